"""Tells on the screen, and by a bell or desktop note as the settings say, what has ended and what is wrong."""

from __future__ import annotations

from textual.app import App

from sae_tui.alerts.record import Alert
from sae_tui.alerts.watch import sentence_of
from sae_tui.jobs.states import ENDED
from sae_tui.jobs.view.reader import JobView, News
from trainer.contract.printable import printable
from trainer.contract.store.states import JobState


def tell_end(app: App[None], job: JobView, how: str) -> None:
    """Notify that a job has ended; ring the bell or send a desktop note (OSC 9) as the setting `notify` says."""
    message = f"Job {job.id} ({job.name}) {ENDED[job.state]}" + (f": {job.error}" if job.error else "")
    bad = job.state in (JobState.FAILED, JobState.LOST)
    app.notify(message, severity="error" if bad else "information", markup=False)
    _call(app, message, how)


def tell_news(app: App[None], news: News, how: str) -> None:
    """Notify of what was recorded of a job, and ring as for its end."""
    message = f"Job {news.job_id} {news.event.message}"
    app.notify(message, severity="warning" if news.event.level == "warning" else "information", markup=False)
    _call(app, message, how)


def tell_alert(app: App[None], alert: Alert, how: str) -> None:
    """Notify of an alert that begins, and ring as for the end of a job; of one that is over notify only."""
    app.notify(sentence_of(alert), severity="warning" if alert.cleared is None else "information", markup=False)
    if alert.cleared is None:
        _call(app, sentence_of(alert), how)


def _call(app: App[None], message: str, how: str) -> None:
    if how == "bell":
        app.bell()
    elif how == "terminal" and app._driver is not None:
        app._driver.write(f"\x1b]9;{printable(message)}\x07")
