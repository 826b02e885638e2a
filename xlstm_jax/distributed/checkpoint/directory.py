"""Where checkpoints lie: a local folder, or the URL of an object store."""

import os
from pathlib import Path
from typing import Any


def is_url(directory: Any) -> bool:
    return "://" in os.fspath(directory)


def directory_path(directory: str | os.PathLike[str]) -> Any:
    """The directory as orbax takes it; refuses what can hold no folders."""
    from etils import epath  # which orbax brings along; it has no types

    if not os.fspath(directory):
        raise ValueError("the directory of the checkpoints is ''; name a folder ('.' for the working directory).")
    if is_url(directory):
        try:
            return epath.Path(directory)
        except KeyError as error:
            known = "gs://, s3:// and az://"
            raise ValueError(
                f"the directory {os.fspath(directory)!r} has the scheme {error.args[0]!r}, which orbax does not know. "
                f"It takes {known}; name a local folder by its path."
            ) from None
    path = Path(os.path.abspath(directory))
    for link in (path, *path.parents):
        if link.is_symlink() and not link.exists():  # a run would find no steps there, and start anew
            raise ValueError(
                f"the directory {path} is not to be found: {link} is a link to {os.readlink(link)}, which leads "
                "nowhere. Mount what it leads to, or mend or remove the link."
            )
    inside = next(parent for parent in (path, *path.parents) if parent.exists())
    if not inside.is_dir():
        where = "is" if inside == path else f"lies beneath {inside}, which is"
        raise ValueError(f"the directory {path} {where} a file, and can hold no checkpoints. Name another folder.")
    return epath.Path(path)
