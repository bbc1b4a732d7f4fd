"""Stores the alerts from the last day: one file per host in the data folder, written by the app that holds the lock."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated

import msgspec
from msgspec import Meta

from trainer.contract.json_file import read_json, write_json
from trainer.contract.paths import DataDir
from trainer.contract.store.rows import Time

DAY_S = 86_400.0
# The maximum number of stored alerts. Even a broken sensor that flips once a minute raises fewer alerts than this per
# day.
MOST = 1000
MOST_HOSTS = 100
Words = Annotated[str, Meta(max_length=1000)]


class Alert(msgspec.Struct, frozen=True, kw_only=True):
    """A problem on the machine; times are seconds since the epoch, and `cleared` is None while the problem lasts."""

    kind: Words
    place: Words
    place_words: Words
    words: Words
    host: Words
    value: float | None
    raised: Time
    cleared: Time | None = None
    about: Mapping[str, str | int | None] = {}

    @property
    def key(self) -> tuple[str, str]:
        return self.kind, self.place


def read_alerts(data: DataDir) -> list[Alert]:
    """Return the stored alerts for all hosts, oldest first; skip files that cannot be read."""
    files = sorted(data.root.glob(data.alerts("*").name))[:MOST_HOSTS]
    alerts = [alert for file in files for alert in read_json(file, list[Alert]) or []]
    return sorted(alerts, key=lambda alert: alert.raised)


def write_alerts(data: DataDir, host: str, alerts: Iterable[Alert]) -> None:
    """Replace the stored alerts for this host; raise `OSError` if they cannot be written."""
    write_json(data.alerts(host), list(alerts))


def of_last_day(alerts: Iterable[Alert], now: float, host: str) -> list[Alert]:
    """Return this host's active alerts, and all hosts' alerts from the last 24 hours.

    Another host's active alert is omitted 24 hours after it was raised, because the app on that host may be closed. If
    there are more than `MOST` alerts, omit the oldest cleared alerts.
    """
    recent = [alert for alert in alerts if _is_recent(alert, now, host)]
    surplus = len(recent) - MOST
    if surplus <= 0:
        return recent
    over = [place for place, alert in enumerate(recent) if not _lasts(alert, host)]
    left_out = set(over[:surplus])
    return [alert for place, alert in enumerate(recent) if place not in left_out]


def to_keep(alerts: Iterable[Alert], now: float, host: str) -> list[Alert]:
    """Return the alerts to store.

    If the latest alert is earlier than `now`, count the 24 hours back from that alert, so that no alert is deleted when
    the clock is ahead.
    """
    known = list(alerts)
    newest = max((alert.cleared or alert.raised for alert in known), default=now)
    return of_last_day(known, min(now, newest), host)


def _lasts(alert: Alert, host: str) -> bool:
    return alert.cleared is None and alert.host == host


def _is_recent(alert: Alert, now: float, host: str) -> bool:
    return _lasts(alert, host) or now - (alert.cleared or alert.raised) < DAY_S
