"""Reads and writes the snapshots of watched latents that a training run stores in `watched.jsonl`.

The file has one line of JSON per SAE and snapshot. If a process is killed while it writes, only the last line is lost.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from trainer.contract.errors import UserError
from trainer.contract.json_file import LARGEST, read_json_lines, write_lines
from trainer.contract.paths import open_private
from trainer.contract.runs.features import ActivatingExample, Token

WATCHED = "watched.jsonl"
# The reason for watching a latent: the job names it, it came alive, or it is dying.
Why = Literal["asked", "new", "dying"]
_Count = Annotated[int, msgspec.Meta(ge=0, lt=2**62)]


class WatchedContext(msgspec.Struct, frozen=True, array_like=True):
    """A context: its tokens, the latent's activation on each token, and the index of the strongest token."""

    texts: tuple[str, ...]
    acts: tuple[float, ...]
    at: _Count

    def __post_init__(self) -> None:
        if not (len(self.texts) == len(self.acts) > self.at):
            raise ValueError("a context needs one activation per token")

    @property
    def example(self) -> ActivatingExample:
        """The context as in a features file."""
        return ActivatingExample(tuple(map(Token, self.texts, self.acts)), self.at)

    @classmethod
    def of(cls, example: ActivatingExample) -> WatchedContext:
        """Return a context in the form in which it is stored."""
        tokens = example.tokens
        return cls(tuple(one.text for one in tokens), tuple(round(one.act, 4) for one in tokens), example.at)


class WatchedLatent(msgspec.Struct, frozen=True):
    """A latent at a snapshot.

    `density` is the share of the training tokens since the last snapshot on which the latent fired, and
    `heldout_density` its share of the snapshot's held-out rows. `cosine` compares the decoder direction with the one at
    the last snapshot. `largest` is the largest activation on the held-out rows. Each is None if it is unknown.
    `contexts` are the held-out texts in which the latent fires most strongly, strongest first.
    """

    latent: Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
    why: Why = "asked"
    density: float | None = None
    heldout_density: float | None = None
    cosine: float | None = None
    largest: float | None = None
    contexts: tuple[WatchedContext, ...] = ()


class WatchedSnapshot(msgspec.Struct, frozen=True):
    """The watched latents of one SAE after `step` steps; `label` is "" unless the run is a sweep.

    `seen` is the number of tokens, without rows that were left out, that the SAE has been trained on, and `n_rows` is
    the number of held-out rows that were read.
    """

    step: _Count
    tokens: _Count
    seen: _Count
    n_rows: _Count
    latents: tuple[WatchedLatent, ...]
    label: str = ""


def read_watched(run: Path) -> list[WatchedSnapshot]:
    """Return a run's snapshots in the order of their steps; [] if there are none, and without damaged lines.

    Raise `UserError` if the file cannot be read.
    """
    lines = read_json_lines(run / WATCHED, WatchedSnapshot)
    newest = {(one.step, one.label): one for one in lines}
    return sorted(newest.values(), key=lambda one: one.step)


def keep_until(run: Path, step: int) -> list[WatchedSnapshot]:
    """Remove the snapshots after a step, because the run repeats these steps; return the snapshots that are kept.

    Raise `UserError` if the file cannot be read or written.
    """
    kept = [one for one in read_watched(run) if one.step <= step] if step else []
    if kept or (run / WATCHED).exists():
        write_lines(run / WATCHED, map(msgspec.json.encode, kept))
    return kept


def append_watched(run: Path, snapshots: Iterable[WatchedSnapshot]) -> None:
    """Append snapshots in a single write; raise `OSError` if writing fails, and `UserError` if the file is full."""
    content = b"".join(msgspec.json.encode(one) + b"\n" for one in snapshots)
    file = open_private(run / WATCHED, os.O_RDWR | os.O_APPEND)
    try:
        size = os.fstat(file).st_size
        if size + len(content) > LARGEST:
            raise UserError(f"{run / WATCHED} is full ({LARGEST >> 20} MiB)")
        # A process may have been killed in the middle of a line.
        if size and os.pread(file, 1, size - 1) != b"\n":
            content = b"\n" + content
        while content:
            content = content[os.write(file, content) :]
    finally:
        os.close(file)
