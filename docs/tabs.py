"""Sphinx extension that shows a block of Linen and the block of NNX after it as two tabs.

On a page the second block follows the first, as a code host shows both:

    ```python           Linen: runs when the site is built
    ```python nnx       NNX: runs in tests/house/test_nnx_tabs.py

A tab of Sphinx cannot contain a cell that runs, as cells are parts of a page. So the cell, with its outputs, moves into
the tab after the page has been read.
"""

import re

from docutils import nodes
from sphinx_inline_tabs._impl import TabContainer  # the node of its directive

NNX_BLOCK = re.compile(r"^```python nnx$", re.MULTILINE)
CLASS = "nnx"


def mark(text):
    """Returns a page on which NNX blocks have a class, by which ``into_tabs`` finds them."""
    return NNX_BLOCK.sub(f"```{{code-block}} python\n:class: {CLASS}\n", text)


def into_tabs(app, doctree):
    """Moves each NNX block, and the block before it, into tabs."""
    del app
    for block in list(
        doctree.findall(
            lambda node: (
                isinstance(node, nodes.literal_block) and CLASS in node["classes"]
            )
        )
    ):
        parent = block.parent
        position = parent.index(block)
        before = parent[position - 1]
        linen, nnx = _tab("Linen", before), _tab("NNX", block)
        linen["new_set"] = True
        parent[position - 1 : position + 1] = [linen, nnx]


def _tab(label, node):
    tab = TabContainer("", type="tab", new_set=False)
    tab += nodes.label("", "", nodes.Text(label))
    tab += nodes.container("", node, is_div=True, classes=["tab-content"])
    return tab


def setup(app):
    """Called by Sphinx."""
    app.connect("doctree-read", into_tabs)
    return {"parallel_read_safe": True}
