"""Reads and writes a user's own notes on an SAE's latents: stars, names and notes in `notes.jsonl` next to the SAE.

The file has one line of JSON per latent, in ascending order, so that git can merge it. If a merge leaves two lines
about a latent, the newer one counts.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec

from trainer.contract.errors import UserError, sentence
from trainer.contract.files import open_plain, write_whole
from trainer.contract.json_file import CONFLICT_MARKS, LARGEST, decode_as
from trainer.contract.paths import open_private
from trainer.contract.printable import CONTROL, is_utf8, printable
from trainer.contract.runs.how_far import exported_tokens
from trainer.contract.wording import plural

NOTES = "notes.jsonl"
LONGEST_NAME, LONGEST_NOTE = 80, 2000
_CONFLICT = "is a mark of a merge conflict; delete the lines with <<<<<<<, ======= and >>>>>>>, and keep the others"
_LINK = "it is a symbolic link, and symbolic links are not followed; remove it"


class LatentNote(msgspec.Struct, frozen=True):
    """What a user has noted about a latent. The fields are in the order in which a line stores them.

    `tokens` is the number of tokens that the SAE was trained on when the note was written, None if unknown, and `time`
    is when it was written. `weights` is the digest of the SAE's weights, "" if unknown, as in notes by older versions.
    Other keys in a line are kept.
    """

    latent: Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
    starred: bool = False
    name: Annotated[str, msgspec.Meta(max_length=LONGEST_NAME)] = ""
    note: Annotated[str, msgspec.Meta(max_length=LONGEST_NOTE)] = ""
    tokens: Annotated[int, msgspec.Meta(ge=0)] | None = None
    time: float = 0.0
    weights: Annotated[str, msgspec.Meta(max_length=64)] = ""

    def is_of(self, weights: str, tokens: int | None) -> bool:
        """Return whether the note is about these weights, by their digest or, if it is unknown, by their tokens."""
        if self.weights and weights:
            return self.weights == weights
        return tokens is None or self.tokens == tokens

    @property
    def content(self) -> tuple[bool, str, str]:
        return self.starred, self.name, self.note

    @property
    def is_empty(self) -> bool:
        return not any(self.content)

    def has(self, words: str) -> bool:
        """Return whether the name or the note contains the words, ignoring case."""
        return any(words.casefold() in text.casefold() for text in (self.name, self.note))


Change = Callable[[LatentNote], LatentNote]


class LatentNotes(NamedTuple):
    """The notes on an SAE's latents; `problem` is a sentence about lines that cannot be read, or ""."""

    by_latent: Mapping[int, LatentNote]
    problem: str = ""


class Changed(NamedTuple):
    """A latent's note before and after a change."""

    before: LatentNote
    after: LatentNote

    def undo(self, now: LatentNote) -> LatentNote:
        """Return the note before the change; raise `UserError` if it has been changed again since."""
        if now.content != self.after.content:
            raise UserError(f"the note on latent {now.latent} has been changed since, so nothing is undone")
        return self.before


class _Line(NamedTuple):
    """A line of a file and its number; `note` is None, and `reason` says why, if the line is not a note."""

    text: bytes
    note: LatentNote | None
    number: int = 0
    reason: str = ""


def read_notes(folder: Path) -> LatentNotes:
    """Return the notes on the latents of the SAE in a folder; never raise an error."""
    file = folder / NOTES
    try:
        lines = _read(file)
    except UserError as error:
        return LatentNotes({}, str(error))
    notes = {note.latent: note for line in _newest(lines) if (note := line.note)}
    return LatentNotes(notes, _problem(file, lines))


def change_note(folder: Path, latent: int, change: Change, weights: str = "") -> Changed:
    """Apply a change to the note on a latent, and write it; the change gets the latest note, even if it is empty.

    `weights` is the digest of the SAE's weights.
    Changes by other processes are kept. Raise `UserError` if the file cannot be read or written, or if the new name or
    note is not allowed.
    """
    with _writing(folder) as (file, lines):
        old = next((line for line in _newest(lines) if line.note and line.note.latent == latent), None)
        before = old.note if old and old.note else LatentNote(latent)
        after = _checked(change(before), before)
        if after.content == before.content:
            return Changed(before, before)
        # A note must be newer than the one it replaces, even if another computer's clock is ahead.
        now = max(round(time.time(), 3), before.time + 0.001)
        written = {"tokens": exported_tokens(folder), "time": now, "weights": weights}
        after = msgspec.structs.replace(after, latent=latent, **written)
        _write(file, [*(line for line in lines if line is not old), _line(after, old)])
    return Changed(before, after)


def carry_notes(source: Path, target: Path, moved: Change = lambda note: note) -> list[str]:
    """Add the notes on the SAE in a folder to a copy of the SAE; of two notes on a latent, the newer one counts.

    `moved` changes each note. Return sentences about notes that are not copied, or that the copy had before.
    """
    try:
        lines = _read(source / NOTES)
        if not lines or os.path.realpath(source) == os.path.realpath(target):
            return []
        _refuse_conflict(source / NOTES, lines)
        own = [_line(moved(line.note), line) if line.note else line for line in lines]
        with _writing(target) as (file, theirs):
            _write(file, [*theirs, *own])
    except UserError as error:
        return [f"the notes on latents are not copied: {error}"]
    kept = {line.note.latent for line in theirs if line.note} - {line.note.latent for line in own if line.note}
    return [f"{target / NOTES} keeps {plural(len(kept), 'note')} on other latents"] if kept else []


def _read(file: Path) -> list[_Line]:
    """Return the lines of a file, or [] if it does not exist; raise `UserError` if it cannot be read."""
    try:
        if os.path.islink(file):
            raise OSError(errno.ELOOP, _LINK)
        with open_plain(file) as stream:
            content = stream.read(LARGEST + 1)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise UserError(f"{file} cannot be read: {sentence(error)}") from None
    if len(content) > LARGEST:
        raise UserError(f"{file} is larger than {LARGEST >> 20} MiB, so it is not read")
    return [_parsed(text, number) for number, text in enumerate(content.split(b"\n"), 1) if text.strip()]


def _parsed(text: bytes, number: int) -> _Line:
    try:
        return _Line(text, decode_as(text, LatentNote), number)
    except ValueError as error:
        return _Line(text, None, number, str(error))


def _newest(lines: Iterable[_Line]) -> list[_Line]:
    """Return the newest line about each latent, in ascending order, followed by each line that is not a note."""
    notes: dict[int, _Line] = {}
    others: dict[bytes, _Line] = {}
    for line in lines:
        if line.note is None:
            others[line.text] = line
        elif (known := notes.get(line.note.latent)) is None or not known.note or known.note.time <= line.note.time:
            notes[line.note.latent] = line
    return [*(notes[latent] for latent in sorted(notes)), *others.values()]


def _problem(file: Path, lines: Iterable[_Line]) -> str:
    """Return a sentence about the first line that is not a note, or ""."""
    wrong = [line for line in lines if line.note is None]
    if marker := next(filter(_is_marker, wrong), None):
        return f"{file}, line {marker.number} {_CONFLICT}"
    if not wrong:
        return ""
    more = f", like {plural(len(wrong) - 1, 'other line')}" if len(wrong) > 1 else ""
    reason = printable(wrong[0].reason)
    return f"{file}, line {wrong[0].number} is not a note on a latent, so it is kept but not read{more}: {reason}"


def _is_marker(line: _Line) -> bool:
    return line.note is None and line.text.startswith(CONFLICT_MARKS)


def _refuse_conflict(file: Path, lines: Iterable[_Line]) -> None:
    # Sorting the lines would separate the marks from the lines that they surround.
    if any(map(_is_marker, lines)):
        raise UserError(_problem(file, lines))


def _checked(note: LatentNote, before: LatentNote) -> LatentNote:
    """Return a note without surrounding spaces; raise `UserError` if its new name or its new note is not allowed."""
    name, text = note.name, note.note
    # What another program has written stays as it is.
    if name != before.name:
        name = _text("a name", name, LONGEST_NAME)
    if text != before.note:
        text = _text("a note", text, LONGEST_NOTE, allowed="\n\t")
    return msgspec.structs.replace(note, name=name, note=text)


def _text(what: str, text: str, longest: int, allowed: str = "") -> str:
    text = text.strip()
    if len(text) > longest:
        raise UserError(f"{what} must have at most {longest:,} characters, not {len(text):,}")
    if not is_utf8(text):
        raise UserError(f"{what} must be UTF-8 text")
    wrong = [char for char in CONTROL.findall(text) if char not in allowed]
    if wrong:
        raise UserError(f"{what} must not contain {wrong[0]!a}; remove it")
    return text


def _line(note: LatentNote, old: _Line | None) -> _Line:
    """Return a note as a line; keep the keys of the old line that no note has."""
    known: dict[str, Any] = msgspec.to_builtins(note)
    others = _other_keys(old) if old else {}
    return _Line(json.dumps(known | others, ensure_ascii=False).encode(), note)


def _other_keys(line: _Line) -> dict[str, Any]:
    keys = decode_as(line.text, dict[str, Any])
    return {key: value for key, value in keys.items() if key not in LatentNote.__struct_fields__}


@contextlib.contextmanager
def _writing(folder: Path) -> Iterator[tuple[Path, list[_Line]]]:
    """Yield the path and the latest lines of a folder's notes; other processes cannot write them in the meantime."""
    file = folder / NOTES
    try:
        with _locked(file):
            lines = _read(file)
            _refuse_conflict(file, lines)
            yield file, lines
    except OSError as error:
        raise UserError(f"{file} cannot be written: {sentence(error)}") from None


@contextlib.contextmanager
def _locked(file: Path) -> Iterator[None]:
    """Hold a lock on a file, which is created if it is missing; at the end, remove the file if it is empty."""
    while True:
        descriptor = open_private(file, os.O_RDWR)
        try:
            # Continue without a lock if the file system does not support locks.
            with contextlib.suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            # The previous holder of the lock has replaced or removed the file.
            if not _is_at(file, descriptor):
                continue
            try:
                yield
            finally:
                if not os.fstat(descriptor).st_size and _is_at(file, descriptor):
                    file.unlink()
            return
        finally:
            os.close(descriptor)


def _is_at(file: Path, descriptor: int) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(os.stat(file, follow_symlinks=False), os.fstat(descriptor))
    return False


def _write(file: Path, lines: Iterable[_Line]) -> None:
    """Replace a file by the newest line about each latent and all other lines; leave out notes without content."""
    kept = [line for line in _newest(lines) if line.note is None or not line.note.is_empty or _other_keys(line)]
    if kept:
        write_whole(file, b"".join(line.text.strip() + b"\n" for line in kept))
    else:
        file.unlink()
