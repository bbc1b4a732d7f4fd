"""Maps the URLs of objects to the local folders in which they are cached, and back, without any request."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import quote, unquote

from trainer.contract.errors import UserError

_URL = re.compile(r"[a-z][a-z0-9+.:-]*://", re.IGNORECASE)
# Folders in the user's cache folder: copies of objects that are read, and shards that wait for their upload.
_OBJECTS, _STAGING = "objects", "uploads"


def is_url(path: str | Path) -> bool:
    """Return whether a path has the form of a URL, such as `s3://bucket/rows`."""
    return _URL.match(str(path)) is not None


def cache_folder() -> Path:
    """Return the user's cache folder; raise `UserError` if the user has no home folder."""
    import platformdirs

    try:
        path = platformdirs.user_cache_dir("sae-tui", appauthor=False)
    except RuntimeError:
        path = "~"
    if path.startswith("~"):
        raise UserError("the user has no home folder for cached objects; set XDG_CACHE_HOME to a folder")
    return Path(path)


def objects_folder() -> Path:
    """Return the folder with the copies of objects that are read."""
    return cache_folder() / _OBJECTS


def local_path(path: str) -> str:
    """Return the folder with the local copies of a URL's objects; other paths are returned unchanged."""
    return str(_below(objects_folder(), path)) if is_url(path) else path


def staging_folder(url: str) -> Path:
    """Return the folder with the files that wait for their upload to a URL."""
    return _below(cache_folder() / _STAGING, url)


def url_of(path: str | Path) -> str | None:
    """Return the URL whose objects `local_path` keeps at a path, or None for any other path."""
    place = os.fspath(path)
    if f"/{_OBJECTS}/" not in place:
        return None
    folder = f"{objects_folder()}/"
    if not place.startswith(folder):
        return None
    scheme, _, rest = place.removeprefix(folder).partition("/")
    return f"{scheme}://{'/' if scheme == 'file' else ''}{unquote(rest)}" if rest else None


def joined(path: str, *names: str) -> str:
    """Return the path or URL of a file or folder inside a folder."""
    return "/".join([path.rstrip("/"), *names]) if is_url(path) else os.path.join(path, *names)


def absolute(path: str, base: Path) -> str:
    """Return an absolute path, resolved against a base folder; a URL is returned unchanged."""
    return path.rstrip("/") if is_url(path) else os.path.abspath(base / os.path.expanduser(path))


def real_paths(paths: Sequence[str]) -> list[str]:
    """Return paths without links, for comparisons; a URL becomes its local folder."""
    return [os.path.realpath(local_path(path)) for path in paths]


def _below(folder: Path, url: str) -> Path:
    scheme, _, rest = url.partition("://")
    # An encoded first dot keeps ".." inside the folder and leaves hidden names to the cache itself.
    names = [re.sub(r"^\.", "%2E", quote(name, safe="-_.~@=+, ")) for name in rest.split("/") if name]
    return folder.joinpath(scheme.lower(), *names)
