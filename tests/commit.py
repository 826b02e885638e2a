"""Hash of the tested commit, the seed of randomly drawn tests and mutations."""

import subprocess
from pathlib import Path


def commit_hash() -> str:
    """Returns the hexadecimal commit hash; "" outside of a git repository, as in an archive."""
    command = ["git", "rev-parse", "HEAD"]
    done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""
