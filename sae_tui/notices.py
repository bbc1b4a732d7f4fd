"""Shows notifications on one line above the footer.

A new notification replaces the previous one; an error stays until a key is pressed. A job's end, an event or an alert
also rings the bell or sends a desktop notification, depending on the settings.
"""

from __future__ import annotations

import re
import textwrap
import time
from collections import deque
from collections.abc import Sequence

from textual import events
from textual.app import App
from textual.content import Content
from textual.markup import MarkupError
from textual.notifications import Notification, Notify, SeverityLevel

from sae_tui.alerts.record import Alert
from sae_tui.alerts.watch import sentence_of
from sae_tui.format import clock_time
from sae_tui.jobs.states import ENDED
from sae_tui.jobs.view.reader import JobView, News
from sae_tui.widgets.lines import Line
from sae_tui.widgets.reading import LinesScreen
from trainer.contract.printable import printable
from trainer.contract.store.states import JobState

SHOWN_S = 3.0
# A key pressed within this time after an error appears does not dismiss it, because the user cannot have read it yet.
SEEN_S = 1.0
_UNTIL_A_KEY_S = 86_400.0
_MOMENT_S = 0.01
_LETTERS_PER_S = 25
_BEGINS_WITH_WORD = re.compile("[a-z]+ ")
# A symbol for each severity, so that colour is never the only indication.
_MARKS = {"information": "", "warning": "! ", "error": "✗ "}
_STYLES = {"information": "text", "warning": "warn", "error": "bad"}


class Notice(Notification):
    """A notification whose remaining display time is never negative.

    Textual 8.2 first checks whether a notification has expired, and then how long to show it. If it expires in between,
    the timer gets a negative time and blocks the event loop.
    """

    @property
    def time_left(self) -> float:
        """The remaining display time in seconds, always more than 0."""
        return max(_MOMENT_S, super().time_left)

    @property
    def has_expired(self) -> bool:
        """Whether the display time is over."""
        return super().time_left <= 0


class Notices(App[None]):
    """Shows notifications on one line, and keeps the last 100 for rereading."""

    def __init__(self) -> None:
        super().__init__()
        self.notices: deque[Notification] = deque(maxlen=100)

    def notify(
        self,
        message: str,
        *,
        title: str = "",
        severity: SeverityLevel = "information",
        timeout: float | None = None,
        markup: bool = True,
    ) -> None:
        """Show a message for at least `timeout` seconds; may be called from any thread."""
        text = _plain(message) if markup else message
        text = _MARKS[severity] + (f"{title}: {text}" if title else text if severity == "information" else _full(text))
        if severity == "information":
            text = "; ".join(text.splitlines())
        shown_s = _UNTIL_A_KEY_S if severity == "error" else max(timeout or 0, SHOWN_S, len(text) / _LETTERS_PER_S)
        self.post_message(Notify(Notice(text, severity=severity, timeout=shown_s)))

    def _on_notify(self, event: Notify) -> None:
        """Record a notification and drop all earlier ones except errors; Textual's own handler then displays it."""
        self.notices.append(event.notification)
        for old in list(self._notifications):
            if old.severity != "error":
                self._unnotify(old, refresh=False)

    async def on_event(self, event: events.Event) -> None:
        if isinstance(event, events.Key) and not event.is_forwarded:
            self._forget_errors_seen()
        await super().on_event(event)

    def _forget_errors_seen(self) -> None:
        read_notes = [note for note in self._notifications if note.severity == "error" and _age_s(note) > SEEN_S]
        for note in read_notes:
            self._unnotify(note, refresh=False)
        if read_notes:
            self._refresh_notifications()

    def action_notices(self) -> None:
        """Show the latest 100 notifications in full."""
        self.push_screen(LinesScreen("Messages", lambda width: notice_lines(self.notices, width)))


def notice_lines(notices: Sequence[Notification], width: int) -> list[Line]:
    """Return the notifications as lines of `width` cells, latest first, each with its time."""
    if not notices:
        return [(("No messages yet.", "dim"),)]
    lines: list[Line] = []
    for note in reversed(notices):
        when = f"{clock_time(note.raised_at)}  "
        rows = [row for text in note.message.splitlines() for row in textwrap.wrap(text, max(20, width - len(when)))]
        for number, text in enumerate(rows):
            head = when if number == 0 else " " * len(when)
            lines.append(((head, "dim"), (text, _STYLES[note.severity])))
    return lines


def _age_s(note: Notification) -> float:
    return time.time() - note.raised_at


def _plain(text: str) -> str:
    try:
        return Content.from_markup(text).plain
    except MarkupError:
        return text


def _full(text: str) -> str:
    """Return an error message as a sentence. If it begins with a path or a setting, its first letter is unchanged."""
    text = text[:1].upper() + text[1:] if _BEGINS_WITH_WORD.match(text) else text
    return text if text.endswith((".", "!", "?")) else f"{text}."


def tell_end(app: App[None], job: JobView, how: str) -> None:
    """Show that a job has ended; also ring the bell or send a desktop notification (OSC 9), depending on `how`."""
    message = f"Job {job.id} ({job.name}) {ENDED[job.state]}" + (f": {job.error}" if job.error else "")
    bad = job.state in (JobState.FAILED, JobState.LOST)
    app.notify(message, severity="error" if bad else "information", markup=False)
    _call(app, message, how)


def tell_news(app: App[None], news: News, how: str) -> None:
    """Show a new event for a job; also ring the bell or send a desktop notification, depending on `how`."""
    message = f"Job {news.job_id} {news.event.message}"
    app.notify(message, severity="warning" if news.event.level == "warning" else "information", markup=False)
    _call(app, message, how)


def tell_alert(app: App[None], alert: Alert, how: str) -> None:
    """Show a new or cleared alert. Only a new alert rings the bell or sends a desktop notification."""
    app.notify(sentence_of(alert), severity="warning" if alert.cleared is None else "information", markup=False)
    if alert.cleared is None:
        _call(app, sentence_of(alert), how)


def _call(app: App[None], message: str, how: str) -> None:
    if how == "bell":
        app.bell()
    elif how == "terminal" and app._driver is not None:
        app._driver.write(f"\x1b]9;{printable(message)}\x07")
