"""Sphinx extension that inlines drawings, and turns consecutive drawings into a series with steps.

A page names an SVG as any picture, ``![words](../images/parameter-1.svg)``, which a code host shows. Inlined SVG
follows the site's button for light and dark; a picture would not. Without JavaScript the drawings of a series are
stacked.
"""

import re
from functools import partial
from pathlib import Path
from xml.sax.saxutils import quoteattr

SERIES = re.compile(r"(?:^!\[[^\]]*\]\(\S+\.svg\)\n+)+", re.MULTILINE)
DRAWING = re.compile(r"!\[([^\]]*)\]\((\S+\.svg)\)")


def inline(app, page, source):
    """Replaces the link of each SVG by the SVG's text."""
    folder = (Path(app.srcdir) / page).parent
    source[0] = SERIES.sub(partial(_figures, app.env, folder), source[0])


def _figures(env, folder, series):
    figures = [_figure(env, folder / file, words) for words, file in DRAWING.findall(series[0])]
    return '```{raw} html\n<div class="steps">\n' + "\n".join(figures) + "\n</div>\n```\n\n"


def _figure(env, file, words):
    env.note_dependency(str(file))
    svg = file.read_text().strip().replace("<svg ", f"<svg aria-label={quoteattr(words)} ", 1)
    return f"<figure>{svg}</figure>"


def setup(app):
    """Called by Sphinx."""
    app.connect("source-read", inline)
    app.add_js_file("steps.js")
    return {"parallel_read_safe": True}
