"""Uploads exactly the files of an export to the Hugging Face hub, after the user has confirmed the list of files."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from trainer.contract.errors import UsageError, UserError
from trainer.contract.progress import Progress
from trainer.contract.settings import catalog
from trainer.contract.wording import plural
from trainer.sharing.base import MODEL_CARD, format_named
from trainer.sharing.hub import Repository
from trainer.training.hub_card import hub_card, local_paths


class Push:
    """The upload of an export to `out`. Create this object before the export, so that it can detect the exported files.

    Raises `UserError` if uploading would fail.
    """

    def __init__(self, name: str, out: Path, *, public: bool, confirmed: bool) -> None:
        if not confirmed and not (sys.stdin and sys.stdin.isatty()):
            raise UsageError("--push: asks for confirmation; in a script, add --yes")
        self._repository, self._confirmed = Repository(name, public=public), confirmed
        # An export creates a new file before it replaces the old one, so the inode number differs.
        self._before = {(file, file.stat().st_ino) for file in _files_in(out.resolve())}

    def send(
        self,
        out: Path,
        checkpoints: Sequence[Path],
        form: str,
        tell: Callable[[str], None],
        labels: Collection[str] | None = None,
        k: int | None = None,
    ) -> dict[str, Any]:
        """List the files, ask for confirmation, upload them and return the result; raise `UserError` if that fails.

        `labels` contains the exported SAEs' labels; None means all. `k` is the exported k, if it is not the SAEs' own.
        """
        files = self._written(out, form) | self._card(out, checkpoints, form, labels, k)
        sizes = {name: len(one) if isinstance(one, bytes) else one.stat().st_size for name, one in files.items()}
        place = self._repository
        visible = "public" if place.is_public else "private"
        tell(f"to {place.url} ({visible}, {'new' if place.is_new else 'exists'}):")
        for name, size in sizes.items():
            tell(f"  {name}, {size:,} bytes")
        for path in local_paths(checkpoints):
            tell(f"note: the metadata in these files contains a local path, {path}")
        if not self._confirmed:
            _ask(f"Send {plural(len(files), 'file')}, {sum(sizes.values()):,} bytes, to be {visible}? [y/N] ", out)
        try:
            # On a terminal, the hub's client shows the progress.
            with contextlib.nullcontext() if sys.stderr.isatty() else Progress("sending"):
                place.send(files)
        except UserError as error:
            raise UserError(f"{error}; no files were uploaded; they are still in {out}, so try again") from None
        tell(f"sent to {place.url}")
        command = format_named(form).opening(place.name)
        if command:
            tell(f"open it: {command}")
        listed = [{"path": name, "bytes": size} for name, size in sizes.items()]
        return {"url": place.url, "private": not place.is_public, "files": listed, "command": command}

    def _written(self, out: Path, form: str) -> dict[str, Path | bytes]:
        """Return the format's files that were added to `out` since this object was created."""
        patterns, out = catalog.FORMATS[form].load().files, out.resolve()
        return {
            str(file.relative_to(out)): file
            for file in sorted(_files_in(out))
            if (file, file.stat().st_ino) not in self._before and any(fnmatchcase(file.name, one) for one in patterns)
        }

    def _card(
        self, out: Path, checkpoints: Sequence[Path], form: str, labels: Collection[str] | None, k: int | None
    ) -> dict[str, Path | bytes]:
        """Return the user's README.md in `out` if it exists, or a generated README.md if the repository has none."""
        if (own := out / MODEL_CARD).is_file() and not own.is_symlink():
            return {MODEL_CARD: own}
        if self._repository.has_card:
            return {}
        return {MODEL_CARD: hub_card(checkpoints, form, self._repository.name, labels, k).encode()}


def _files_in(out: Path) -> Iterator[Path]:
    return (file for file in out.rglob("*") if file.is_file() and not file.is_symlink())


def _ask(question: str, out: Path) -> None:
    try:
        answer = input(question)
    except EOFError:
        answer = ""
    if answer.strip().lower() not in ("y", "yes"):
        raise UserError(f"nothing was sent; the SAE is in {out}")
