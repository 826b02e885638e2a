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


def project_urls(address):
    """Returns the addresses that an index shows beside the page, by label; none without an address of the project."""
    if not address:
        return {}
    return {
        "Documentation": f"{address}/blob/HEAD/docs/index.md",
        "Source": address,
        "Changelog": f"{address}/blob/HEAD/CHANGELOG.md",
        "Issues": f"{address}/issues",
    }


def address_of(config):
    """Returns the address of the project: ``Source`` of ``project_urls`` in setup.cfg, written by a release."""
    lines = config["metadata"].get("project_urls", "").splitlines()
    urls = {label.strip(): address.strip() for label, mark, address in (line.partition("=") for line in lines) if mark}
    return urls.get("Source", "").rstrip("/")


def described(config):
    """Returns README for an index."""
    version = re.search(r'__version__ = "(.*)"', (TOP / "xlstm_jax" / "__init__.py").read_text())[1]
    return for_an_index((TOP / "README.md").read_text(), address_of(config), version)


if __name__ == "__main__":
    config = configparser.ConfigParser()
    config.read(TOP / "setup.cfg")
    # The argument replaces the one line of setup.cfg, from which the others follow.
    setup(long_description=described(config), project_urls=project_urls(address_of(config)))
