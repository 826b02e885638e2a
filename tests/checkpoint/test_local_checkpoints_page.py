"""Test of the page on checkpoints on local disks: its program prints what the page shows.

The site's build leaves the program out: two jobs of two processes take half a minute of processor time.
"""

import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs/howto/local_checkpoints.md"


@pytest.mark.slow  # the page shows orbax's managers; what the library restores by itself is in tests/faults
def test_local_checkpoints_page_program_prints_the_output_shown(tmp_path):
    blocks = re.findall(r"^```(py|text)\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    # The first block is the program that the others read from the page, and start.
    _, *starts = [text for kind, text in blocks if kind == "py"]
    program = "\n".join(starts)
    shown = "".join(text for kind, text in blocks if kind == "text")
    printed = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=600, check=True
    ).stdout
    # Losses of the two ends of JAX differ in the last digits.
    assert re.sub(r"\d{3}$", "", printed, flags=re.M) == re.sub(r"\d{3}$", "", shown, flags=re.M)
    assert shown.count("from step 4") == 4
