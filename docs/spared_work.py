"""Sphinx extension that spares Sphinx repeated work.

Sphinx reads pages in forks of its process, a few dozen pages in each, and every fork would parse the modules of the
names on its pages again. ``parse_modules`` parses the modules once, before the forks.

A page of the reference is parsed as a document within a document. Sphinx detaches its environment from the outer
document before the page is pickled, and some nodes refer to the inner document: each page would be stored with the
whole environment, 2 MB of it. ``forget_inner_documents`` lets all nodes refer to the outer document.
"""

import inspect
from contextlib import suppress

from sphinx.errors import PycodeError
from sphinx.pycode import ModuleAnalyzer


def parse_modules(values):
    """Parses the modules in which classes and functions are defined, and the modules of base classes.

    Args:
        values: The classes, functions and other objects of the reference; objects without a module are skipped.
    """
    owners = [base for value in values for base in (inspect.getmro(value) if inspect.isclass(value) else [value])]
    for module in {getattr(owner, "__module__", None) for owner in owners} - {None}:
        with suppress(PycodeError):  # a module written in C
            ModuleAnalyzer.for_module(module).analyze()


def forget_inner_documents(app, doctree):
    """Lets the nodes of a page refer to the page's document, and to no document within."""
    del app
    for node in doctree.findall():
        node.document = doctree


def setup(app):
    """Called by Sphinx."""
    app.connect("doctree-read", forget_inner_documents, priority=900)
    return {"parallel_read_safe": True}
