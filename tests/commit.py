"""The commit that is tested, by which drawn tests and drawn mutations differ."""

import subprocess
from pathlib import Path


def commit_hash() -> str:
    """Returns the hash of the commit in hexadecimal digits; an empty text where there is none, as in an archive."""
    command = ["git", "rev-parse", "HEAD"]
    done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""
