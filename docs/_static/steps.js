/* A series of drawings is shown one at a time, with buttons; without this file all of them are shown. */
document.addEventListener("DOMContentLoaded", () => {
  for (const series of document.querySelectorAll("div.steps")) {
    const figures = [...series.querySelectorAll("figure")];
    if (figures.length > 1) addButtons(series, figures);
  }
});

function addButtons(series, figures) {
  const bar = document.createElement("div");
  bar.className = "steps-bar";
  const back = button("‹ Back", () => show(at - 1));
  const where = document.createElement("span");
  where.setAttribute("aria-live", "polite");
  const next = button("Next ›", () => show(at + 1));
  const all = button("All", () => show(null));
  bar.append(back, where, next, all);
  series.prepend(bar);
  let at = 0;

  function show(number) {
    const everything = number === null;
    at = everything ? 0 : Math.min(Math.max(number, 0), figures.length - 1);
    figures.forEach((figure, i) => { figure.hidden = !everything && i !== at; });
    where.textContent = everything ? "all" : `${at + 1} of ${figures.length}`;
    back.disabled = everything || at === 0;
    next.disabled = !everything && at === figures.length - 1;
    if (everything) at = -1;
  }

  bar.addEventListener("keydown", (event) => {
    if (event.key === "ArrowRight") show(at + 1);
    if (event.key === "ArrowLeft") show(at - 1);
  });
  show(0);
}

function button(words, click) {
  const made = document.createElement("button");
  made.type = "button";
  made.textContent = words;
  made.addEventListener("click", click);
  return made;
}
