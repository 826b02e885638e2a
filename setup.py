"""Metadata is in setup.cfg; here README becomes the page of a package index, which has none of the files beside it."""

import configparser
import re
from pathlib import Path

from setuptools import setup

TOP = Path(__file__).parent
FENCED = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)
HERE, THERE = "pip install -e .  # in a checkout", "pip install xlstm_jax"
LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?:|#)([^)\s]+)\)")  # [words](file), or a picture


def for_an_index(text, address, version):
    """The text with addresses in place of files, at the tag of this version; without an address, words alone.

    A reader there installs from the index.
    """

    def link(found):
        mark, words, file = found.groups()
        if not address:
            return "" if mark else words
        return f"{mark}[{words}]({address}/{'raw' if mark else 'blob'}/v{version}/{file})"

    parts = FENCED.split(text.replace(HERE, THERE, 1))
    parts[::2] = [LINK.sub(link, part) for part in parts[::2]]
    return "".join(parts)


def described():
    """README for an index. The address of the project is ``url`` of setup.cfg."""
    config = configparser.ConfigParser()
    config.read(TOP / "setup.cfg")
    version = re.search(r'__version__ = "(.*)"', (TOP / "xlstm_jax" / "__init__.py").read_text())[1]
    return for_an_index((TOP / "README.md").read_text(), config["metadata"].get("url", "").rstrip("/"), version)


if __name__ == "__main__":
    setup(long_description=described())
