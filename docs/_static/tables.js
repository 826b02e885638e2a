// Tables, and pages whose sections fold. Without this file all of both is shown as it is.
document.addEventListener("DOMContentLoaded", () => {
  for (const table of document.querySelectorAll("article table.docutils")) describe(table);
  if (document.querySelector(".letters.folds")) fold([...document.querySelectorAll("article > section > section")]);
});

// Says whether a table has sentences or numbers, and with each cell what stands over it: see site.css.
function describe(table) {
  const heads = [...table.querySelectorAll("thead th")].map((head) => head.textContent.trim());
  const cells = [...table.querySelectorAll("tbody td")];
  table.classList.add(cells.some((cell) => cell.textContent.trim().length > 24) ? "words" : "numbers");
  if (heads.length < 3) return;
  for (const cell of cells)
    if (cell.cellIndex > 0 && heads[cell.cellIndex] && cell.textContent.trim()) cell.dataset.head = heads[cell.cellIndex];
}

// Each section becomes a line that opens; the one that an address or a search names is open.
function fold(sections) {
  for (const section of sections) {
    const details = document.createElement("details");
    const summary = document.createElement("summary");
    details.className = "section";
    summary.append(section.querySelector(":scope > h2"));
    details.append(summary, ...section.childNodes);
    section.append(details);
  }
  addEventListener("hashchange", openNamed);
  addEventListener("load", openNamed);
}

function openNamed() {
  const named = location.hash && document.getElementById(decodeURIComponent(location.hash.slice(1)));
  for (const found of [named, ...document.querySelectorAll("details.section .highlighted")]) {
    const details = found && (found.closest("details.section") || found.querySelector(":scope > details.section"));
    if (details) details.open = true;
  }
  if (named) named.scrollIntoView();
}
