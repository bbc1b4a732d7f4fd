"""Redraws the visible screens when there are new GPU samples or job changes."""

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
    """The job store has changed. The message carries no data; screens read it from the watcher."""

    def can_replace(self, message: Message) -> bool:
        """Replace an older message in the queue, so that a backlog causes one repaint."""
        return type(message) is type(self)


class AlertsChanged(Message, bubble=False):
    """An alert has begun or ended. The message carries no data."""


class Redraw:
    """Makes every visible screen redraw what has changed."""

    def __init__(self, app: App[None], session: Session) -> None:
        self._app = app
        self._session = session
        self._job_of_gpu: dict[str, int] = {}

    def start(self) -> None:
        """Draw the GPUs at every sampling interval, and once as soon as the first samples arrive."""
        self._ticks = self._app.set_interval(self._session.settings.sampling_interval_s, self.show_gpus)
        self._first_look = self._app.set_interval(_LOOK_S, self._look_first, repeat=_MOST_LOOKS)

    def pace(self) -> None:
        """Draw the GPUs at the interval that is in the settings now."""
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
        """Draw the jobs as last read, and the keys that apply to them."""
        self._draw("show_jobs")
        job_of_gpu = {uuid: job.id for uuid, job in self._session.watcher.holders.jobs.items()}
        if job_of_gpu != self._job_of_gpu:
            # Show the job on its GPU at once, not only with the next sample.
            self._job_of_gpu = job_of_gpu
            self._draw("show_gpus")
        self._draw("refresh_bindings")

    def _draw(self, method: str) -> None:
        """Call `method` on every visible screen that has it. Its widgets may already be gone while the app closes."""
        for screen in self._in_sight():
            if show := getattr(screen, method, None):
                with contextlib.suppress(NoMatches):
                    show()

    def _in_sight(self) -> Iterable[Screen[object]]:
        """Yield the top screen and, if it is a dialog, the screens visible behind it."""
        for screen in reversed(self._app.screen_stack):
            yield screen
            if not screen.is_modal:
                return
