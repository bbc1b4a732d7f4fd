"""Draws the visible screens anew when there are new samples of the GPUs or news of the jobs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

from textual.app import App
from textual.css.query import NoMatches
from textual.message import Message
from textual.screen import Screen

from sae_tui.gpu import faults
from sae_tui.session import Session

_LOOK_S = 0.03
_MOST_LOOKS = 60


class JobsChanged(Message, bubble=False):
    """The job store has something new; the watcher's thread tells only that, and screens pull the rest."""

    def can_replace(self, message: Message) -> bool:
        """Replace an older one in the queue, so that a backlog is one repaint."""
        return type(message) is type(self)


class AlertsChanged(Message, bubble=False):
    """An alert has begun or ended; the thread that looks for them tells only that."""


class Redraw:
    """Has every visible screen draw what is new."""

    def __init__(self, app: App[None], session: Session) -> None:
        self._app = app
        self._session = session
        self._job_of_card: dict[str, int] = {}

    def start(self) -> None:
        """Draw the GPUs at every interval, and the first time as soon as there is something to draw."""
        self._ticks = self._app.set_interval(self._session.settings.sampling_interval_s, self.show_gpus)
        self._first_look = self._app.set_interval(_LOOK_S, self._look_first, repeat=_MOST_LOOKS)

    def pace(self) -> None:
        """Draw the GPUs at the interval that the settings have now."""
        self._ticks.stop()
        self._ticks = self._app.set_interval(self._session.settings.sampling_interval_s, self.show_gpus)

    def _look_first(self) -> None:
        monitor = self._session.monitor
        samples = monitor.latest()
        answered = samples and all(sample.reason != faults.NO_ANSWER_YET for sample in samples)
        if answered or monitor.problem:
            self._first_look.stop()
            self.show_gpus()

    def show_gpus(self) -> None:
        """Draw the latest samples."""
        self._draw("show_gpus")

    def show_jobs(self) -> None:
        """Draw the jobs as last read, and the keys that can be used with them."""
        self._draw("show_jobs")
        job_of_card = {uuid: job.id for uuid, job in self._session.watcher.holders.jobs.items()}
        if job_of_card != self._job_of_card:
            # A card is named after its job as soon as the job is, not at the next sample.
            self._job_of_card = job_of_card
            self._draw("show_gpus")
        self._draw("refresh_bindings")

    def _draw(self, method: str) -> None:
        """Call `method` on every visible screen that has it; its widgets may be gone already while the app closes."""
        for screen in self._in_sight():
            if show := getattr(screen, method, None):
                with contextlib.suppress(NoMatches):
                    show()

    def _in_sight(self) -> Iterable[Screen[object]]:
        """Yield the screen on top, and behind a dialog the screens that show through."""
        for screen in reversed(self._app.screen_stack):
            yield screen
            if not screen.is_modal:
                return
