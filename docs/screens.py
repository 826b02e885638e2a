"""Takes screens of every page of the built site on contact sheets, and lists elements wider than their window.

    make docs-screens       # docs/_build/screens has the sheets; the list is printed

Looks: telephone and desk, light and dark. A page that scrolls sideways is a mistake; a code block or a table that
scrolls is listed for the desk, where a reader expects full width. Pages of single names have the same form, and need
``--all``.
"""

import argparse
import re
import shutil
from pathlib import Path

from PIL import Image, ImageDraw
from playwright.sync_api import sync_playwright

BUILT = Path(__file__).parent / "_build"
LOOKS = [("telephone", 390, 844), ("desk", 1440, 900)]  # name, width and height of the window in pixels
SCHEMES = ("light", "dark")
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
SCREENS = 3  # at most this many screens of a page, stacked
COLUMNS = {"telephone": 8, "desk": 4}  # pages per sheet
WIDE = 2000  # pixels of a sheet
LABEL = 18

# Elements that scroll sideways: (kind, hidden pixels, place).
DOES_NOT_FIT = """() => {
  const found = [], hidden = (e) => e.scrollWidth - e.clientWidth;
  const root = document.documentElement;
  if (root.scrollWidth > innerWidth) found.push(["page", root.scrollWidth - innerWidth, document.title]);
  for (const e of document.querySelectorAll("article .highlight pre, article div.output pre, article .highlight"))
    if (hidden(e) > 1 && !e.querySelector("pre"))
      found.push(["code", hidden(e), e.textContent.split("\\n").sort((a, b) => b.length - a.length)[0].trim()]);
  for (const e of document.querySelectorAll("article table, article .table-wrapper"))
    if (hidden(e) > 1) found.push(["table", hidden(e), e.textContent.trim().replace(/\\s+/g, " ").slice(0, 60)]);
  return found;
}"""


def pages_of(site, everything):
    """Returns the pages in the order of their paths, without generated pages (index, search, sources)."""
    pages = sorted(site.rglob("*.html"))
    generated = {site / name for name in ("genindex.html", "search.html", "py-modindex.html")}
    skipped = ("_modules", "_static") if everything else ("_modules", "_static", "reference")
    return [page for page in pages if page not in generated and page.relative_to(site).parts[0] not in skipped]


def screens(browser, pages, site, folder):
    """Writes a picture for each page and look, and yields overflowing elements: (page, width, kind, pixels, where)."""
    for look, width, height in LOOKS:
        for scheme in SCHEMES:
            window = browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)
            for page in pages:
                window.goto(page.as_uri())
                name = "_".join(page.relative_to(site).with_suffix("").parts)
                high = min(SCREENS * height, window.evaluate("document.documentElement.scrollHeight"))
                window.set_viewport_size({"width": width, "height": high})
                window.screenshot(path=folder / f"{look}-{scheme}-{name}.png")
                window.set_viewport_size({"width": width, "height": height})
                if scheme == SCHEMES[0]:
                    yield from ((name, width, *found) for found in window.evaluate(DOES_NOT_FIT))
            window.close()


def sheets(folder):
    """Puts the pictures of each look side by side."""
    for look, width, height in LOOKS:
        columns = COLUMNS[look]
        wide = WIDE // columns
        for scheme in SCHEMES:
            files = sorted(folder.glob(f"{look}-{scheme}-*.png"))
            for first in range(0, len(files), columns):
                sheet = Image.new("RGB", (WIDE, SCREENS * height * wide // width + LABEL), "grey")
                for column, file in enumerate(files[first : first + columns]):
                    picture = Image.open(file)
                    sheet.paste(picture.resize((wide - 4, picture.height * wide // width)), (column * wide, LABEL))
                    ImageDraw.Draw(sheet).text((column * wide + 4, 3), file.stem.split("-", 2)[2], fill="white")
                sheet.save(folder / f"sheet-{look}-{scheme}-{first // columns + 1:02}.png")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("site", nargs="?", type=Path, default=BUILT / "html")
    parser.add_argument("--out", type=Path, default=BUILT / "screens")
    parser.add_argument("--browser", default=next(filter(None, map(shutil.which, BROWSERS)), None), help="a Chromium")
    parser.add_argument("--only", default="", help="pages in whose path this pattern is found")
    parser.add_argument("--all", action="store_true", help="the pages of single names, too")
    chosen = parser.parse_args()
    pages = [page for page in pages_of(chosen.site.resolve(), chosen.all) if re.search(chosen.only, str(page))]
    chosen.out.mkdir(parents=True, exist_ok=True)
    for file in chosen.out.glob("*.png"):
        file.unlink()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chosen.browser, args=["--no-sandbox", "--disable-gpu"])
        for page, width, kind, pixels, where in screens(browser, pages, chosen.site.resolve(), chosen.out):
            if kind == "page" or width == LOOKS[-1][1]:
                print(f"{page} at {width}: {kind} hides {pixels} pixels: {where}")
        browser.close()
    sheets(chosen.out)
    print(f"{len(pages)} pages on {len(list(chosen.out.glob('sheet-*')))} sheets in {chosen.out}")


if __name__ == "__main__":
    main()
