"""Reads and writes objects on S3, Google Cloud Storage and the Hugging Face hub through fsspec.

An object is written whole or not at all. Failed requests are repeated, and errors are one sentence that names the
setting. fsspec and the package of a protocol are imported only when a store is opened.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import os
import posixpath
import random
import re
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar
from urllib.parse import urlsplit

from trainer.contract.errors import UserError, first_line
from trainer.contract.extras import install, is_installed
from trainer.contract.files import replacing
from trainer.contract.object_paths import is_url as is_url
from trainer.contract.paths import file_mode, private_folder
from trainer.contract.printable import printable

_Result = TypeVar("_Result")


class _Protocol(NamedTuple):
    package: str
    extra: str


# fsspec knows many more protocols; some of them run programs or open archives, so only these are accepted.
_PROTOCOLS = {
    "s3": _Protocol("s3fs", "s3"),
    "gs": _Protocol("gcsfs", "gs"),
    "hf": _Protocol("huggingface_hub", "hf"),
    "file": _Protocol("fsspec", "train"),
    "memory": _Protocol("fsspec", "train"),
}
STORE_PACKAGES = tuple(dict.fromkeys(one.package for one in _PROTOCOLS.values()))
_EXAMPLES = {
    "s3": "s3://bucket/folder",
    "gs": "gs://bucket/folder",
    "hf": "hf://user/repo/folder",
    "file": "file:///folder",
    "memory": "memory://folder",
}
_SHOWN = ("s3://", "gs://", "hf://", "file://")
# Errors that another try cannot repair; botocore's and gcsfs's errors are known by their names only.
_PERMANENT = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError, ValueError, TypeError)
_OF_ACCESS = re.compile(r"NoCredentials|PartialCredentials|CredentialRetrieval|InvalidAccessKey|SignatureDoesNotMatch")
_IS_ACCESS = re.compile(
    r"access ?denied|forbidden|invalid credentials|unauthori[sz]ed|anonymous caller|\b40[13]\b", re.I
)
# The query of a signed URL grants access to anyone who reads the message.
_SIGNED = re.compile(r"(https?://[^\s?'\"]+)\?[^\s'\"]+")
# How often a request is tried, the first wait and the longest wait between two tries.
TRIES, FIRST_WAIT_S, LONGEST_WAIT_S = 5, 0.5, 15.0
# The longest silence of the hub during a request, in seconds; by default, its client waits without a limit.
SILENCE_S = 100.0
_CHUNK = 1 << 20


def checked_url(url: str, field: str) -> str:
    """Return a URL without trailing slashes; raise `UserError` if its protocol is unknown or it contains a password."""
    scheme, _, rest = url.partition("://")
    if scheme not in _PROTOCOLS:
        raise UserError(f'{field}: "{printable(scheme[:20])}://" is not supported; use one of {", ".join(_SHOWN)}')
    if scheme != "memory" and "@" in urlsplit(url).netloc:
        raise UserError(f"{field}: leave keys and passwords out of the URL; set them in the environment")
    is_relative = scheme == "file" and not rest.startswith("/")
    if is_relative or not rest.strip("/") or printable(url) != url or ".." in rest.split("/"):
        raise UserError(f"{field}: {printable(url[:100])} names no folder; use a URL such as {_EXAMPLES[scheme]}")
    return url.rstrip("/")


class ObjectFacts(NamedTuple):
    """An object's size in bytes and its version: a checksum or a time that changes with the content."""

    size: int
    version: str


def url_problem(url: str) -> str:
    """Return why a URL cannot be used on the machine that runs the job, without connecting to it, or ""."""
    if not is_url(url):
        return f'"{printable(url[:100])}" is no URL; use one such as {_EXAMPLES["s3"]} or {_EXAMPLES["file"]}'
    try:
        scheme = checked_url(url, "").partition("://")[0]
    except UserError as error:
        return str(error).removeprefix(": ")
    package, extra = _PROTOCOLS[scheme]
    return "" if is_installed(package) else f"{scheme}:// needs {package}: `{install(extra)}`"


class ObjectStore:
    """The objects below a URL; names are relative to it. `field` is the setting that errors name.

    Each method raises `UserError` if the store refuses the request or still fails after `TRIES` tries.
    """

    def __init__(self, url: str, field: str) -> None:
        self.url, self._field = checked_url(url, field), field
        self.scheme = self.url.partition("://")[0]
        self._fs = self._opened()
        self._root = str(self._fs._strip_protocol(self.url))

    def list(self) -> dict[str, int]:
        """Return each object's name and size in bytes, sorted by name; empty if there are none.

        Names that could leave a folder into which they are downloaded are left out.
        """
        return {name: facts.size for name, facts in self.list_facts().items()}

    def list_facts(self) -> dict[str, ObjectFacts]:
        """Return each object's name, size and version, as `list` does."""

        def found() -> dict[str, ObjectFacts]:
            self._fs.invalidate_cache()
            try:
                entries = self._fs.find(self._root, detail=True)
            except FileNotFoundError:
                self._require_bucket()
                return {}
            # In a shared folder, another user may have put a named pipe or a device, whose opening could block.
            return {self._name(path): _facts(entry) for path, entry in entries.items() if entry.get("type") != "other"}

        listed = self._tried("listed", "", found)
        if not listed:
            self._tried("listed", "", self._require_bucket)
        return {name: facts for name, facts in sorted(listed.items()) if _is_safe(name)}

    def facts(self, name: str) -> ObjectFacts:
        """Return an object's current size and version."""

        def found() -> ObjectFacts:
            self._fs.invalidate_cache()
            return _facts(self._fs.info(self._plain(name)))

        return self._tried("read", name, found)

    def read(self, name: str, first: int = 0, last: int | None = None) -> bytes:
        """Return the bytes of an object from `first` up to `last`, or up to its end."""

        def content() -> bytes:
            read = bytes(self._fs.cat_file(self._plain(name), start=first, end=last))
            if last is not None and len(read) > last - first:
                raise OSError("the store returned more bytes than requested")
            return read

        return self._tried("read", name, content)

    def get(self, name: str, file: Path, size: int, on_bytes: Callable[[int], None] = lambda _: None) -> None:
        """Download an object of `size` bytes to a file; the file appears only when it is complete.

        `on_bytes` receives the number of bytes of each piece; a piece that is downloaded again counts again.
        """

        def download() -> None:
            with replacing(file, file_mode(file.parent)) as stream, self._fs.open(self._plain(name), "rb") as source:
                n = 0
                while piece := source.read(_CHUNK):
                    n += stream.write(piece)
                    on_bytes(len(piece))
                    if n > size:
                        # It may be far too large for the disk.
                        raise ValueError(f"it is larger than {size:,} bytes")
                if n != size:
                    raise OSError(f"it ended after {n:,} of {size:,} bytes")

        self._tried("read", name, download)

    def put(self, source: Path | bytes, name: str, on_bytes: Callable[[int], None] = lambda _: None) -> None:
        """Upload a file or bytes as one object, which appears only when it is complete."""
        self._tried("written", name, lambda: self._upload(source, name, on_bytes))

    def put_together(
        self,
        files: Mapping[str, Path | bytes],
        last: str,
        on_bytes: Callable[[int], None] = lambda _: None,
        removed: Iterable[str] = (),
    ) -> None:
        """Upload several objects, `last` at the end, then remove others; on the hub, all of this is one commit."""
        if self.scheme == "hf":
            self._tried("written", last, lambda: self._commit(files, removed))
            return
        for name in sorted(files, key=lambda one: one == last):
            self.put(files[name], name, on_bytes)
        self.remove(removed)

    def remove(self, names: Iterable[str], first: str = "") -> None:
        """Remove objects, beginning with `first`; objects that do not exist are ignored."""
        ordered = sorted(names, key=lambda one: one != first)
        if self.scheme == "hf" and ordered:
            self._tried("removed", ordered[0], lambda: self._commit({}, removed=ordered))
            return
        for name in ordered:
            with contextlib.suppress(_Missing):
                self._tried("removed", name, lambda name=name: self._fs.rm_file(self._path(name)))  # type: ignore[misc]
            if self.scheme == "file":
                # Other stores have no folders.
                with contextlib.suppress(OSError):
                    Path(self._path(name)).parent.rmdir()

    def _upload(self, source: Path | bytes, name: str, on_bytes: Callable[[int], None]) -> None:
        path, n = self._path(name), 0
        with self._writer(path) as target:
            for piece in _pieces(source):
                target.write(piece)
                n += len(piece)
                on_bytes(len(piece))
        self._fs.invalidate_cache()
        if (written := int(self._fs.info(path)["size"])) != n:
            raise OSError(f"the store kept {written:,} of {n:,} bytes")

    def _writer(self, path: str) -> Any:
        """Return a context that writes an object; stores show an object when it is complete, folders need a rename."""
        if self.scheme != "file":
            return self._fs.open(path, "wb")
        folder = private_folder(Path(path).parent, self._field)
        return replacing(Path(path), file_mode(folder))

    def _commit(self, files: Mapping[str, Path | bytes], removed: Iterable[str] = ()) -> None:
        """Upload and remove objects of a hub repository in one commit."""
        hub: Any = importlib.import_module("huggingface_hub")
        at = self._fs.resolve_path(self._root)
        inside = at.path_in_repo
        added = [
            hub.CommitOperationAdd(posixpath.join(inside, name), one if isinstance(one, bytes) else str(one))
            for name, one in files.items()
        ]
        gone = [hub.CommitOperationDelete(posixpath.join(inside, name)) for name in removed]
        hub.HfApi().create_commit(
            at.repo_id,
            [*added, *gone],
            commit_message="Mirror from sae-tui",
            repo_type=at.repo_type,
            revision=at.revision,
        )
        self._fs.invalidate_cache()

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}" if name else self._root

    def _plain(self, name: str) -> str:
        """Return an object's path; raise `ValueError` if it is a named pipe, device or socket in a folder."""
        path = self._path(name)
        if self.scheme == "file" and not stat.S_ISREG(os.stat(path).st_mode):
            raise ValueError("it is no regular file")
        return path

    def _name(self, path: str) -> str:
        return str(path).removeprefix(self._root).lstrip("/")

    def _require_bucket(self) -> None:
        """Raise `FileNotFoundError` if the bucket or repository itself does not exist."""
        if self.scheme in ("s3", "gs", "hf"):
            parts = self._root.split("/")
            # hf://datasets/user/repo and hf://user/repo
            depth = 1 if self.scheme != "hf" else 3 if parts[0] in ("datasets", "spaces", "buckets") else 2
            self._fs.ls("/".join(parts[:depth]), detail=False)

    def _opened(self) -> Any:
        package, extra = _PROTOCOLS[self.scheme]
        try:
            fsspec: Any = importlib.import_module("fsspec")
            if self.scheme == "hf":
                # Warnings about repeated requests contain signed URLs, and bars would fill a log.
                utils: Any = importlib.import_module("huggingface_hub.utils")
                utils.logging.set_verbosity_error()
                utils.disable_progress_bars()
            return fsspec.filesystem(self.scheme, **({"use_listings_cache": False} if self.scheme == "s3" else {}))
        except ImportError:
            raise UserError(f"{self._field}: {self.scheme}:// needs {package}: `{install(extra)}`") from None
        except Exception as error:
            raise self._failure("opened", "", error) from None

    def _tried(self, doing: str, name: str, call: Callable[[], _Result]) -> _Result:
        """Return the result of a request, repeating it after failures that may pass."""
        for n_failed in range(TRIES):
            if n_failed:
                time.sleep(min(LONGEST_WAIT_S, FIRST_WAIT_S * 2 ** (n_failed - 1)) * random.uniform(0.5, 1.0))
            try:
                self._limit_silence()
                return call()
            except UserError:
                raise
            except Exception as error:
                failed = error
                if _kind(error) != "transient":
                    break
        raise self._failure(doing, name, failed) from None

    def _limit_silence(self) -> None:
        """Set the time limit of the hub's client, which the hub's package replaces after some failures."""
        if self.scheme == "hf":
            utils: Any = importlib.import_module("huggingface_hub.utils")
            utils.get_session().timeout = SILENCE_S

    def _failure(self, doing: str, name: str, error: Exception) -> UserError:
        at = f"{self._field}: {self.url}{f'/{name}' if name else ''}"
        kind = _kind(error)
        if kind == "missing":
            return _Missing(f"{at} does not exist; check the name of the bucket or repository, and the folder")
        reason = printable(_SIGNED.sub(r"\1?…", first_line(error)))
        if kind == "access":
            return UserError(
                f"{at} could not be {doing}: access was denied ({reason}); check the credentials in the environment"
            )
        tries = f" in {TRIES} tries" if kind == "transient" else ""
        kind_of_error = Unreachable if kind == "transient" else UserError
        return kind_of_error(f"{at} could not be {doing}{tries}: {reason}")


class Unreachable(UserError):
    """Raised if a store still fails after several tries for a reason that may pass, such as a lost connection."""


class _Missing(UserError):
    """Raised if an object, bucket or repository does not exist."""


def _facts(entry: Mapping[str, Any]) -> ObjectFacts:
    versions = (entry.get(key) for key in ("ETag", "etag", "md5Hash", "blob_id", "LastModified", "mtime", "created"))
    version = next((one for one in versions if one), "")
    # A listing and a request for one object may give the same time as a number and as a datetime.
    return ObjectFacts(int(entry["size"] or 0), str(getattr(version, "timestamp", lambda: version)()))


def _kind(error: Exception) -> Literal["access", "missing", "permanent", "transient"]:
    chain = [error, error.__cause__, error.__context__]
    names = " ".join(type(one).__name__ for one in chain if one)
    if isinstance(error, PermissionError) or _OF_ACCESS.search(names) or _IS_ACCESS.search(str(error)):
        return "access"
    if isinstance(error, FileNotFoundError) or "RepositoryNotFound" in names or "NoSuchBucket" in str(error):
        return "missing"
    is_full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
    return "permanent" if is_full or isinstance(error, _PERMANENT) else "transient"


def _is_safe(name: str) -> bool:
    """Return whether a downloaded object of this name stays inside its folder and is visible there."""
    parts = name.split("/")
    return bool(name) and printable(name) == name and not any(part in ("", "..") or part[0] == "." for part in parts)


def _pieces(source: Path | bytes) -> Iterator[bytes]:
    if isinstance(source, bytes):
        yield source
        return
    with open(source, "rb") as stream:
        while piece := stream.read(_CHUNK):
            yield piece
