"""Follows the symbolic links from a model's snapshot to its blobs in the Hugging Face hub cache."""

from __future__ import annotations

import os
import stat
from pathlib import Path

# The suggested fix for a refused link.
COPY = "replace it with a copy of the file, as `cp -rL` does"


def plain_file(file: Path) -> Path:
    """Return the given path, or the target blob if the path is a link in the hub cache.

    All other links are refused because they could lead to any file that this user can read. The blob must be a regular
    file directly in the `blobs` folder of the same `models--*` folder. The blob must belong to this user, to root or,
    in a shared cache, to the owner of the link. Raise `ValueError` for a refused link and `OSError` if the file does
    not exist.
    """
    if not file.is_symlink():
        file.stat()
        return file
    try:
        return _blob(file)
    except RuntimeError:  # `resolve` raises this for a loop of links
        raise ValueError(f"is part of a loop of symbolic links and is not followed; {COPY}") from None


def _blob(file: Path) -> Path:
    """Return the target blob of a link; raise the same errors as `plain_file`, or `RuntimeError` for a loop."""
    snapshot = file.parent.resolve(strict=True)
    model = next((one for one in snapshot.parents if one.name.startswith("models--")), None)
    if model is None or snapshot.relative_to(model).parts[0] != "snapshots":
        raise ValueError(f"is a symbolic link, and symbolic links are not followed; {COPY}")
    target = snapshot / os.readlink(file)
    blob = model / "blobs" / target.name
    if target.name in ("", ".", "..") or target.parent.resolve() != blob.parent:
        raise ValueError(
            f"is a symbolic link that points outside the blobs of {model.name[:100]} and is not followed; {COPY}"
        )
    status = blob.lstat()
    if not stat.S_ISREG(status.st_mode):
        raise ValueError(f"is a symbolic link to something other than a regular file and is not followed; {COPY}")
    if status.st_uid not in (os.geteuid(), 0, file.lstat().st_uid):
        raise ValueError(f"is a symbolic link to another user's file and is not followed; {COPY}")
    return blob


def is_plain_file(file: Path) -> bool:
    """Return whether a path is a regular file accepted by `plain_file`."""
    try:
        return stat.S_ISREG(plain_file(file).stat().st_mode)
    except (OSError, ValueError):
        return False
