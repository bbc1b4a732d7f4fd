"""Reports ended jobs, new events and alerts on the screen, and by bell or desktop notification as the settings say."""

from __future__ import annotations

from textual.app import App

from sae_tui.alerts.record import Alert
from sae_tui.alerts.watch import sentence_of
from sae_tui.jobs.states import ENDED
from sae_tui.jobs.view.reader import JobView, News
from trainer.contract.printable import printable
from trainer.contract.store.states import JobState


def tell_end(app: App[None], job: JobView, how: str) -> None:
    """Notify that a job has ended; ring the bell or send a desktop notification (OSC 9), as `how` says."""
    message = f"Job {job.id} ({job.name}) {ENDED[job.state]}" + (f": {job.error}" if job.error else "")
    bad = job.state in (JobState.FAILED, JobState.LOST)
    app.notify(message, severity="error" if bad else "information", markup=False)
    _call(app, message, how)


def tell_news(app: App[None], news: News, how: str) -> None:
    """Notify of a job's new event, and ring as for the end of a job."""
    message = f"Job {news.job_id} {news.event.message}"
    app.notify(message, severity="warning" if news.event.level == "warning" else "information", markup=False)
    _call(app, message, how)


def tell_alert(app: App[None], alert: Alert, how: str) -> None:
    """Notify of an alert. Ring as for the end of a job if it begins; a cleared alert does not ring."""
    app.notify(sentence_of(alert), severity="warning" if alert.cleared is None else "information", markup=False)
    if alert.cleared is None:
        _call(app, sentence_of(alert), how)


def _call(app: App[None], message: str, how: str) -> None:
    if how == "bell":
        app.bell()
    elif how == "terminal" and app._driver is not None:
        app._driver.write(f"\x1b]9;{printable(message)}\x07")
