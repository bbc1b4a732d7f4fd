"""The active alerts and the alerts from the last day, as lines of text."""

from __future__ import annotations

from collections.abc import Sequence

from sae_tui.alerts.record import Alert
from sae_tui.format import clock_time, duration, fit, wrap
from sae_tui.widgets.lines import Line

_TIME = 14


def alert_lines(alerts: Sequence[Alert], width: int) -> list[Line]:
    """Return the alerts, latest first, with active ones before cleared ones."""
    if not alerts:
        return [(("No alerts in the last 24 hours.", "dim"),)]
    lasting = [alert for alert in alerts if alert.cleared is None]
    over = [alert for alert in alerts if alert.cleared is not None]
    lines: list[Line] = []
    for title, some in (("Now", lasting), ("Cleared", over)):
        if some:
            lines += [((title, "title"),), *(line for alert in some for line in _alert_lines(alert, width)), ()]
    return lines[:-1]


def _alert_lines(alert: Alert, width: int) -> list[Line]:
    lasted = "" if alert.cleared is None else f" (for {duration(alert.cleared - alert.raised)})"
    sign, style = ("⚠ ", "warn") if alert.cleared is None else ("", "text")
    first, *more = wrap(f"{sign}{alert.words}{lasted}", max(20, width - _TIME)) or [""]
    head = fit(clock_time(alert.raised), _TIME)
    return [((head, "dim"), (first, style)), *(((" " * _TIME, "dim"), (text, style)) for text in more)]
