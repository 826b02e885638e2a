"""Elements of the site's drawings: SVG for light and dark, alone and within a page."""

from pathlib import Path
from xml.sax.saxutils import escape

IMAGES = Path(__file__).parent / "images"
QUARTERS = ("#4c78a8", "#f58518", "#54a24b", "#b279a2")  # read on white and on black
ACCENT = "#e45756"
# A browser has a preferred colour scheme; on the site, a button may override the preference.
DARK = "--ink: #e6e6e6; --quiet: #9a9a9a; --faint: #4a4a4a;"
STYLE = f"""<style>
.drawn {{ --ink: #222222; --quiet: #666666; --faint: #cfcfcf; }}
@media (prefers-color-scheme: dark) {{ .drawn {{ {DARK} }} }}
body[data-theme="light"] .drawn {{ --ink: #222222; --quiet: #666666; --faint: #cfcfcf; }}
body[data-theme="dark"] .drawn {{ {DARK} }}
.drawn text {{ font: 14px system-ui, sans-serif; fill: var(--ink); }}
.drawn text.title {{ font-size: 15.5px; font-weight: 600; }}
.drawn text.quiet {{ fill: var(--quiet); }}
.drawn text.accent {{ fill: {ACCENT}; }}
.drawn .line {{ stroke: var(--quiet); stroke-width: 1.3; fill: none; }}
.drawn .frame {{ stroke: var(--faint); stroke-width: 1; fill: none; }}
.drawn .sent {{ stroke: {ACCENT}; stroke-width: 1.6; fill: none; }}
.drawn .head {{ fill: {ACCENT}; }}
</style>"""


def text(x, y, words, anchor="middle", kind=""):
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" class="{kind}">{escape(words)}</text>'


def rect(x, y, width, height, fill="none", opacity=1.0, stroke=None, kind=""):
    ink = f' stroke="{stroke}" stroke-width="1.5"' if stroke else ""
    shape = f'x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="2"'
    paint = f' class="{kind}"' if kind else f' fill="{fill}" fill-opacity="{opacity:g}"{ink}'
    return f"<rect {shape}{paint}/>"


def line(*points, kind="line"):
    return f'<polyline class="{kind}" points="{" ".join(f"{x:g},{y:g}" for x, y in points)}"/>'


def arrow(*points):
    """Returns a line with an arrow head; the last part runs along x or y."""
    (x0, y0), (x, y) = points[-2:]
    dx, dy = (x > x0) - (x < x0), (y > y0) - (y < y0)
    head = [(x, y), (x - 6 * dx - 4 * dy, y - 6 * dy - 4 * dx), (x - 6 * dx + 4 * dy, y - 6 * dy + 4 * dx)]
    corners = " ".join(f"{a:g},{b:g}" for a, b in head)
    return line(*points, kind="sent") + f'<polygon class="head" points="{corners}"/>'


def write(name, width, height, title, parts):
    """Writes images/<name>.svg; screen readers read ``title``."""
    begin = f'<svg xmlns="http://www.w3.org/2000/svg" class="drawn" viewBox="0 0 {width} {height}" role="img">'
    lines = [begin, f"<title>{escape(title)}</title>", STYLE, *parts, "</svg>"]
    (IMAGES / f"{name}.svg").write_text("\n".join(lines) + "\n")
