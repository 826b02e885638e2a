"""Sphinx extension that corrects anchors of source pages and warns of links to a missing anchor or page.

``sphinx.ext.viewcode`` stores one module per source file, and uses it for the links back to all public names of the
file. In this library a name may be documented under another module than other names of its file, so the extension
corrects the links.
"""

import re
from html import unescape
from pathlib import Path
from urllib.parse import unquote

from implied_pages import public_names
from sphinx.util.logging import getLogger

LINK = re.compile(r'\shref="([^"#:?]*\.html)?(?:#([^"]+))?"')  # to a page of the site, an anchor, or both
ID = re.compile(r'\sid="([^"]+)"')
LINK_BACK = re.compile(r'(reference/(\w+)\.html)#[\w.]+\.(\2(?:\.\w+)*)"')  # a public name or its method


def mend_links_back(app, page, template, context, doctree):
    """Replaces, on a source page, the module in links to public names by the module that documents the name."""
    del app, template, doctree
    if page.startswith("_modules/"):
        modules = {name: module for module, name, _ in public_names()}

        def mended(link):
            return f'{link[1]}#{modules[link[2]]}.{link[3]}"' if link[2] in modules else link[0]

        context["body"] = LINK_BACK.sub(mended, context["body"])


def broken_links(pages):
    """Returns (page, link) of each link from these HTML files to a file or an anchor that is missing."""
    texts = {page.resolve(): page.read_text() for page in pages}
    ids = {page: set(ID.findall(text)) for page, text in texts.items()}
    found = []
    for page, text in texts.items():
        for file, anchor in sorted(set(LINK.findall(text))):
            target = (page.parent / unquote(file)).resolve() if file else page
            if not target.exists():
                found.append((page, file))
            elif anchor and target in ids and unescape(unquote(anchor)) not in ids[target]:
                found.append((page, f"{file}#{anchor}"))
    return found


def warn_of_broken_links(app, error):
    """Checks the pages of the last build; files that earlier builds left in the folder are not read."""
    if error or app.builder.format != "html":
        return
    modules = [name for name, entry in getattr(app.env, "_viewcode_modules", {}).items() if entry]
    names = [*app.env.found_docs, *(f"_modules/{name.replace('.', '/')}" for name in modules)]
    built = [page for name in names if (page := Path(app.builder.get_outfilename(name))).exists()]
    for page, link in broken_links(built):
        getLogger(__name__).warning("%s links to %s, which is missing", page.relative_to(app.outdir), link)


def setup(app):
    """Called by Sphinx."""
    app.connect("html-page-context", mend_links_back)
    app.connect("build-finished", warn_of_broken_links)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
