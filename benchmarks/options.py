"""Types of command-line options that several programs take."""

import argparse


def positive(text: str) -> int:
    """A positive integer.

    Raises:
      argparse.ArgumentTypeError: the text is none.
    """
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive integer.")
    return int(text)
