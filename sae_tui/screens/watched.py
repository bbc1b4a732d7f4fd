"""The screen with the snapshots of watched latents: a list of latents next to the examples of the selected latent."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Sequence

from textual import on, work
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Horizontal
from textual.message import Message
from textual.widgets import Label

from sae_tui.format import fit
from sae_tui.jobs.features import strongest_tokens
from sae_tui.jobs.watched import cells_of
from sae_tui.panels.latents import LatentDetail, context_line
from sae_tui.session import Session
from sae_tui.widgets.footer import Footer, FooterOffer
from sae_tui.widgets.frame import FramedScreen, entitle
from sae_tui.widgets.lines import Line
from sae_tui.widgets.table import Column, KeyedTable, Row
from trainer.contract.errors import UserError
from trainer.contract.runs.watched import WATCHED, WatchedLatent, WatchedSnapshot, read_watched

# The delay between two snapshots during playback, and between two looks at the file.
_TICK_S = 1.0
_REASONS = {
    "asked": "named in train.watch_latents",
    "new": "watched because it came alive",
    "dying": "watched because it is dying",
}
_COLUMNS = (
    Column("LATENT", 7, right=True),
    Column("WHY", 5),
    Column("DENSITY", 8, right=True),
    Column("COSINE", 6, right=True, drop=1),
    Column("FIRES ON", 8, grow=True),
)


class SnapshotsRead(Message):
    """The snapshots were read, in the order of their steps; `problem` explains why they could not be read."""

    def __init__(self, snapshots: Sequence[WatchedSnapshot], problem: str = "") -> None:
        super().__init__()
        self.snapshots, self.problem = snapshots, problem


def latent_lines(one: WatchedLatent, snapshot: WatchedSnapshot, width: int) -> list[Line]:
    """Return a latent's numbers at a snapshot, and its examples aligned at their strongest tokens."""
    _, _, density, cosine = cells_of(one)
    rows = ""
    if one.heldout_density is not None:
        rows = f", and on {one.heldout_density:.3%} of {snapshot.n_rows:,} held-out rows"
    words = [
        f"{_REASONS[one.why]}",
        f"fires on {density} of the training tokens since the last snapshot{rows}",
        f"cosine with its direction at the last snapshot: {cosine or 'unknown'}",
    ]
    head: list[Line] = [((line, "text"),) for text in words for line in textwrap.wrap(text, max(10, width - 1))]
    if not one.contexts:
        return [*head, ((" ", "text"),), (("No examples: it fires on none of the rows, or their tokens are unknown.",
                                           "dim"),)]  # fmt: skip
    examples = [context.example for context in one.contexts]
    largest = max([one.largest or 0.0, *(example.act for example in examples)])
    return [*head, ((" ", "text"),), *(context_line(example, largest, width) for example in examples)]


class WatchedScreen(FramedScreen):
    """Shows the watched latents of one SAE at one snapshot at a time."""

    BINDINGS = [
        Binding("escape", "app.pop_screen", "Back", id="watched.back", tooltip="To the previous screen"),
        Binding("right,right_square_bracket", "step(1)", "Next", key_display="→", id="watched.next",
                tooltip="Show the next snapshot"),
        Binding("left,left_square_bracket", "step(-1)", "Previous", key_display="←", id="watched.previous",
                tooltip="Show the previous snapshot"),
        Binding("space", "play", "Play", id="watched.play",
                tooltip="Play the snapshots back, one per second, or stop"),
        Binding("m", "next_member", "SAE", id="watched.member", tooltip="The next SAE of a sweep"),
    ]  # fmt: skip
    DEFAULT_CSS = """
    WatchedScreen > Label { width: 100%; height: 1; background: $panel; text-style: bold; }
    WatchedScreen Horizontal { height: 1fr; }
    WatchedScreen KeyedTable { width: 2fr; height: 1fr; margin-right: 2; }
    WatchedScreen.-framed KeyedTable { margin-right: 0; }
    WatchedScreen.-framed LatentDetail { padding: 0 1; }
    WatchedScreen LatentDetail { width: 3fr; height: 1fr; }
    """

    def __init__(self, session: Session, job_id: int, member: str = "") -> None:
        super().__init__(name="watched")
        self.session, self.job_id, self.member = session, job_id, member
        self._all: Sequence[WatchedSnapshot] = ()
        # The step of the snapshot that is shown; None shows the newest, also when another one arrives.
        self._step: int | None = None
        self._plays = False
        self._seen: object = None

    def compose(self) -> ComposeResult:
        yield Label("", id="watched-title", markup=False)
        with Horizontal():
            yield KeyedTable(_COLUMNS, id="watched-latents").add_class("panel")
            yield LatentDetail(id="watched-latent").add_class("panel")
        yield Footer()

    def on_mount(self) -> None:
        self.query_one(KeyedTable).focus()
        self.query_one(LatentDetail).show_instead("Reading …")
        self.watch(self.query_one(KeyedTable), "cursor", self._show_latent, init=False)
        self.set_interval(_TICK_S, self._tick)
        self._read()

    def on_resize(self) -> None:
        self._show()

    def show_gpus(self) -> None:
        """Do nothing because this screen shows no GPUs."""

    def show_jobs(self) -> None:
        """Do nothing because this screen reads only the snapshots."""

    def _tick(self) -> None:
        """Play the next snapshot, and read the file again if it has changed."""
        if self._plays:
            self._move(1)
            self._plays = self._step is not None
        self._read()

    @work(thread=True, group="watched", exclusive=True, exit_on_error=False)
    def _read(self) -> None:
        run = self.session.data.run(self.job_id).root
        try:
            status = os.stat(run / WATCHED)
            state = status.st_mtime_ns, status.st_size, status.st_ino
            if state == self._seen:
                return
            self._seen = state
            read = SnapshotsRead(read_watched(run))
        except OSError as error:
            read = SnapshotsRead((), f"{WATCHED} cannot be read: {error.strerror or error}")
        except UserError as error:
            read = SnapshotsRead((), str(error))
        self.post_message(read)

    @on(SnapshotsRead)
    def _show_read(self, event: SnapshotsRead) -> None:
        self._all = event.snapshots
        labels = self._labels
        if not labels:
            self.query_one(LatentDetail).show_instead(event.problem or "No snapshot has been stored yet.")
        elif self.member not in labels:
            self.member = labels[0]
        self.refresh_bindings()
        self._show()

    @property
    def _labels(self) -> list[str]:
        return list(dict.fromkeys(one.label for one in self._all))

    @property
    def _snapshots(self) -> list[WatchedSnapshot]:
        """The snapshots of the SAE that is shown."""
        return [one for one in self._all if one.label == self.member]

    @property
    def _place(self) -> int:
        """The index of the snapshot that is shown among the SAE's snapshots."""
        steps = [one.step for one in self._snapshots]
        return len(steps) - 1 if self._step is None else max(0, sum(step <= self._step for step in steps) - 1)

    @property
    def snapshot(self) -> WatchedSnapshot | None:
        """The snapshot that is shown, or None without any."""
        snapshots = self._snapshots
        return snapshots[min(self._place, len(snapshots) - 1)] if snapshots else None

    def _show(self) -> None:
        snapshot, n = self.snapshot, len(self._snapshots)
        parts = [f"Job {self.job_id}{self.session.place}", self.member, "Watched latents"]
        if snapshot:
            plays = " · playing" if self._plays else ""
            parts.append(f"step {snapshot.step:,} (snapshot {self._place + 1} of {n}){plays}")
            rows = [_row(one) for one in snapshot.latents]
            self.query_one(KeyedTable).show_rows(rows)
        self.query_one("#watched-title", Label).update(fit(" " + " · ".join(filter(None, parts)), self.size.width))
        entitle(self.query_one(KeyedTable), "Latents")
        self._show_latent()

    def _show_latent(self) -> None:
        snapshot, cursor = self.snapshot, self.query_one(KeyedTable).cursor
        chosen = [one for one in snapshot.latents if str(one.latent) == cursor] if snapshot else []
        if snapshot and chosen:
            self.query_one(LatentDetail).show_made(
                f"Latent {chosen[0].latent}", lambda width: latent_lines(chosen[0], snapshot, width)
            )
        elif snapshot:
            self.query_one(LatentDetail).show_instead("No latent is watched at this snapshot.")

    def _move(self, by: int) -> None:
        snapshots = self._snapshots
        if snapshots:
            place = max(0, min(len(snapshots) - 1, self._place + by))
            self._step = None if place == len(snapshots) - 1 else snapshots[place].step
            self._show()

    def action_step(self, by: int) -> None:
        self._plays = False
        self._move(by)

    def action_play(self) -> None:
        """Play from the snapshot that is shown, or from the first one if the newest is shown; or stop."""
        self._plays = not self._plays and len(self._snapshots) > 1
        if self._plays and self._step is None:
            self._step = self._snapshots[0].step
        self._show()

    def action_next_member(self) -> None:
        labels = self._labels
        self.member = labels[(labels.index(self.member) + 1) % len(labels)]
        self._show()

    def keys_offered(self) -> FooterOffer:
        return FooterOffer(hidden=frozenset() if len(self._labels) > 1 else frozenset({"watched.member"}))

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        return action != "next_member" or len(self._labels) > 1


def _row(one: WatchedLatent) -> Row:
    cells = (*cells_of(one), strongest_tokens([context.example for context in one.contexts]))
    return Row(str(one.latent), tuple((cell, "text") for cell in cells))
