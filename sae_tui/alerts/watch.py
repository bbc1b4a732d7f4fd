"""Checks for alerts while the app is open, stores them and runs the user's command, all on background threads."""

from __future__ import annotations

import math
import os
import queue
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future

import msgspec

from sae_tui.alerts.catalog import KINDS, AlertKind, AlertReadings, MeasuredValue
from sae_tui.alerts.hysteresis import FLAPS_AT, GONE, Hysteresis, Rule
from sae_tui.alerts.record import Alert, of_last_day, read_alerts, to_keep, write_alerts
from sae_tui.gpu import faults
from sae_tui.gpu.base import GpuSample
from sae_tui.jobs.gpus.availability import Holders
from sae_tui.settings import Settings
from sae_tui.threads import on_thread
from trainer.contract.errors import UserError
from trainer.contract.locks import FileLock
from trainer.contract.paths import DataDir

LIMIT_S = 30
KILL_AFTER_S = 5


def run_hook(command: Sequence[str], message: Mapping[str, object], limit_s: float = LIMIT_S) -> None:
    """Run a command without a shell, in a new session; raise `UserError` if it fails or takes too long.

    The `timeout` program kills the command even if this process has exited. The message is kept in memory rather than
    in a temporary file because the disk may be full.
    """
    bounded = ["timeout", "-k", f"{KILL_AFTER_S}", f"{limit_s:g}", *command]
    try:
        with os.fdopen(os.memfd_create("alert"), "wb+", buffering=0) as file:
            file.write(msgspec.json.encode(message) + b"\n")
            file.seek(0)
            process = subprocess.Popen(
                bounded, stdin=file, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
            )
    except (OSError, ValueError) as error:
        raise UserError(f"on_alert: {error}") from None
    if code := process.wait():
        raise UserError(f"on_alert: {_FAILURES.get(code, f'{command[0]} exited with code {code}')}")


_FAILURES = {
    124: f"it took longer than {LIMIT_S} s and was killed",
    126: "its first word is not an executable program",
    127: "the program in its first word was not found; give its path",
}


DISK_EVERY_S, DISK_LIMIT_S = 15.0, 10.0
# How long after a report to collect further changes of the same kind before reporting them together. GPUs that fail
# together are detected one by one, but should not each cause a report.
GROUP_S = 5.0


class Alerts:
    """Tracks the alerts on this machine as `turn` processes the readings. Tests can pass their own clocks."""

    def __init__(
        self,
        settings: Settings,
        stored: Sequence[Alert] = (),
        *,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._clock, self._wall, self._host = clock, wall, socket.gethostname()
        self._rules = [(kind, rule) for kind in KINDS if (rule := kind.rule(settings))]
        known = {kind.name: rule for kind, rule in self._rules}
        mine = [alert for alert in stored if alert.host == self._host]
        # A stored alert stays active after an app restart, unless its kind has been turned off in the meantime.
        self._mine = [alert if alert.kind in known else _ended(alert, wall()) for alert in mine]
        lasting = {alert.key for alert in self._mine if alert.cleared is None}
        self._states = {key: Hysteresis(known[key[0]], is_raised=True) for key in lasting}
        # Maps the key of each active alert with an unknown value to the time when the value became unknown.
        self._unknown: dict[tuple[str, str], float] = {}
        # Unreported changes, and the earliest time of the next report.
        # The keys are (kind of alert, whether the alert was cleared).
        self._pending: dict[tuple[str, bool], list[Alert]] = {}
        self._next_news: dict[tuple[str, bool], float] = {}
        # Why a kind of alert could not be checked, or "" if all kinds were checked.
        self.failure = ""

    @property
    def active(self) -> tuple[Alert, ...]:
        """The active alerts, oldest first. If an alert's value is unknown, its text says since when."""
        return tuple(self._with_age(alert) for alert in self._mine if alert.cleared is None)

    @property
    def recent(self) -> list[Alert]:
        """This host's alerts to store in the file, oldest first."""
        return to_keep(self._mine, self._wall(), self._host)

    def turn(self, look: AlertReadings) -> list[Alert]:
        """Process the current readings; return the alerts to report as raised or cleared.

        Merge alerts of the same kind that are raised or cleared within `GROUP_S`. Return no alerts until every GPU has
        responded once, because until then it is unknown whether a GPU is lost or has recovered.
        """
        if any(sample.reason == faults.NO_ANSWER_YET for sample in look.samples):
            return []
        changed: list[Alert] = []
        seen: set[tuple[str, str]] = set()
        self.failure = ""
        for kind, rule in self._rules:
            try:
                measured = list(kind.measure(look))
            except Exception as error:
                # An error in one kind of alert must not affect the other kinds.
                self.failure = f"{kind.title} alerts cannot be checked: {error!r}"
                seen |= {key for key in self._states if key[0] == kind.name}
                continue
            for one in measured:
                seen.add((kind.name, one.place))
                changed += self._take(kind, rule, one)
        for key in self._states.keys() - seen if look.samples else ():
            # The GPU is gone: the driver still lists other GPUs, but not this one.
            if self._states[key].changes(GONE, self._clock()):
                changed.append(self._end(key))
        return self._news(changed)

    def _take(self, kind: AlertKind, rule: Rule, measured: MeasuredValue) -> list[Alert]:
        """Process a value; return the alert it raises or clears, if any."""
        key = kind.name, measured.place
        state = self._states.setdefault(key, Hysteresis(rule))
        value = kind.badness(measured.value)
        has_changed = state.changes(value, self._clock())
        if not state.is_raised or value is not None:
            self._unknown.pop(key, None)
        else:
            self._unknown.setdefault(key, self._wall())
        if not has_changed:
            return []
        return [self._begin(kind, measured, flaps=state.flaps) if state.is_raised else self._end(key)]

    def _news(self, changed: list[Alert]) -> list[Alert]:
        """Return the alerts to report now: at most one per kind every `GROUP_S`, merged from all pending changes."""
        for alert in changed:
            self._pending.setdefault((alert.kind, alert.cleared is not None), []).append(alert)
        now = self._clock()
        due = [group for group in self._pending if now >= self._next_news.get(group, now)]
        self._next_news |= dict.fromkeys(due, now + GROUP_S)
        return [together(self._pending.pop(group)) for group in due]

    def rest(self) -> list[Alert]:
        """Return the alerts that have not been reported yet; call this before replacing the rules."""
        groups, self._pending = self._pending, {}
        return [together(group) for group in groups.values()]

    def _with_age(self, alert: Alert) -> Alert:
        since = self._unknown.get(alert.key)
        if since is None:
            return alert
        at = time.strftime("%H:%M", time.localtime(since))
        return msgspec.structs.replace(alert, words=f"{alert.words}; unknown since {at}")

    def _begin(self, kind: AlertKind, measured: MeasuredValue, *, flaps: bool) -> Alert:
        often = f"{measured.place_words} is flapping, {kind.title} {FLAPS_AT} times within an hour: " if flaps else ""
        alert = Alert(
            kind=kind.name,
            place=measured.place,
            place_words=measured.place_words,
            words=f"{often}{measured.words}"[:500],
            host=self._host,
            value=measured.value,
            raised=self._wall(),
            about=measured.about,
        )
        self._mine = [*to_keep(self._mine, self._wall(), self._host), alert]
        return alert

    def _end(self, key: tuple[str, str]) -> Alert:
        self._mine = [_ended(alert, self._wall()) if alert.key == key else alert for alert in self._mine]
        return next(alert for alert in reversed(self._mine) if alert.key == key)


def together(alerts: Sequence[Alert]) -> Alert:
    """Merge alerts of one kind into one like `GPUs 0-63 cannot be read: …`; return a single alert unchanged."""
    first = alerts[-1]
    gpus = sorted({index for alert in alerts if isinstance(index := alert.about.get("gpu_index"), int)})
    if len(gpus) < 2:
        return first
    places = f"GPUs {as_ranges(gpus)}"
    said = {alert.words.removeprefix(alert.place_words) for alert in alerts}
    words = f"{places}{said.pop()}" if len(said) == 1 else f"{places}: {title_of(first)}; {first.words}"
    about = {"gpu_index": None, "gpu_uuid": None, "job_id": None, "gpus": as_ranges(gpus), "count": len(gpus)}
    return msgspec.structs.replace(first, place="gpus", place_words=places, words=words[:1000], value=None, about=about)


def as_ranges(numbers: Sequence[int]) -> str:
    """Format ascending numbers as ranges, like `0-3, 7`."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ", ".join(f"{part[0]}-{part[-1]}" if len(part) > 1 else f"{part[0]}" for part in parts)


def _ended(alert: Alert, now: float) -> Alert:
    """Return the alert as cleared now, but never before it was raised, because the clock may have been set back."""
    return msgspec.structs.replace(alert, cleared=max(now, alert.raised)) if alert.cleared is None else alert


class AlertWatcher:
    """Checks for alerts at regular intervals, on a separate thread because reading the free disk space may hang.

    `samples` returns None until the GPUs are known. `changed` contains the alerts raised or cleared since the start,
    oldest first; `on_change` is called after each addition. If several apps run on a host, only the app that holds the
    lock writes the file and runs the user's command.
    """

    def __init__(
        self,
        data: DataDir,
        settings: Settings,
        samples: Callable[[], Sequence[GpuSample] | None],
        held: Callable[[], Holders],
        on_change: Callable[[], object],
        *,
        readonly: bool = False,
    ) -> None:
        self.changed: tuple[Alert, ...] = ()
        self.active: tuple[Alert, ...] = ()
        # Problems with the checks, the alert file and the user's command, each described in one sentence.
        self.problems: tuple[str, ...] = ()
        self._data, self._on_change, self._readonly = data, on_change, readonly
        self.change(settings)
        self._samples, self._held = samples, held
        self._lock = FileLock(data.locks / f"alerts-{socket.gethostname()}.lock")
        self._recent: Sequence[Alert] = ()
        self._to_run: queue.SimpleQueue[Alert] | None = None
        self._to_write: queue.SimpleQueue[tuple[list[Alert], list[Alert]]] | None = None
        self._free: int | None = None
        self._asked: Future[int] | None = None
        self._asked_at = -math.inf
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="alerts", daemon=True)

    def change(self, settings: Settings) -> None:
        """Use the bounds in these settings from now on."""
        self.interval_s = max(1.0, settings.sampling_interval_s)
        self._settings = settings

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Signal the thread to stop; do not wait for it."""
        self._stop.set()

    def recent(self) -> list[Alert]:
        """Return the alerts from the last day, latest first: this host's from memory, other hosts' from files."""
        host = socket.gethostname()
        others = [one for one in read_alerts(self._data) if one.host != host]
        recent = of_last_day([*self._recent, *others], time.time(), host)
        return sorted(recent, key=lambda alert: alert.raised, reverse=True)

    def _run(self) -> None:
        settings = self._settings
        alerts = Alerts(settings, self._stored())
        self.active, self._recent = alerts.active, alerts.recent
        while not self._stop.wait(self.interval_s):
            if settings is not self._settings:
                settings, rest = self._settings, alerts.rest()
                alerts = Alerts(settings, alerts.recent)
                if rest:
                    self._tell(rest, alerts)
            try:
                self._look(alerts)
            except Exception as error:
                # GPU and disk errors must not end this thread.
                self._note(f"alerts cannot be checked: {error!r}")

    def _stored(self) -> list[Alert]:
        """Return the stored alerts, or [] if the disk does not respond, so that the checks can start anyway."""
        try:
            return on_thread(lambda: read_alerts(self._data)).result(DISK_LIMIT_S)
        except Exception as error:
            self._note(f"the stored alerts cannot be read: {error!r}")
            return []

    def _look(self, alerts: Alerts) -> None:
        # While a driver hangs, the state of its GPUs is unknown, but the disk can still be checked.
        samples = self._samples() or ()
        changed = alerts.turn(AlertReadings(samples, self._held(), self._free_bytes()))
        self.active, self._recent = alerts.active, alerts.recent
        if alerts.failure:
            self._note(alerts.failure)
        if changed and not self._stop.is_set():
            self._tell(changed, alerts)

    def _tell(self, changed: list[Alert], alerts: Alerts) -> None:
        self.changed += tuple(changed)
        self._on_change()
        if self._readonly:
            return
        if self._to_write is None:
            self._to_write = queue.SimpleQueue()
            threading.Thread(target=self._write_down, args=(self._to_write,), name="alerts-file", daemon=True).start()
        self._to_write.put((changed, alerts.recent))

    def _write_down(self, reports: queue.SimpleQueue[tuple[list[Alert], list[Alert]]]) -> None:
        """Run the user's command and write the file on a separate thread because the disk may hang."""
        while True:
            changed, recent = reports.get()
            try:
                if not self._lock.acquire():
                    continue
            except Exception as error:
                self._note(f"alerts are not stored: {error}")
            self._run_command(changed)
            try:
                write_alerts(self._data, socket.gethostname(), recent)
            except Exception as error:
                self._note(f"alerts are not stored: {error}")

    def _run_command(self, changed: list[Alert]) -> None:
        if not self._settings.on_alert:
            return
        if self._to_run is None:
            self._to_run = queue.SimpleQueue()
            threading.Thread(target=self._run_hooks, args=(self._to_run,), name="on-alert", daemon=True).start()
        for alert in changed:
            self._to_run.put(alert)

    def _run_hooks(self, alerts: queue.SimpleQueue[Alert]) -> None:
        """Run the user's command for the alerts, one at a time."""
        while True:
            try:
                run_hook(self._settings.on_alert, as_message(alerts.get()))
            except UserError as error:
                self._note(str(error))
            except Exception as error:
                # Command or disk errors must not end this thread.
                self._note(f"on_alert: {error!r}")

    def _note(self, sentence: str) -> None:
        if sentence not in self.problems:
            self.problems += (sentence,)
            self._on_change()

    def _free_bytes(self) -> int | None:
        """Return the most recently read number of free bytes, or None while the disk does not respond.

        Do not query the disk again until it has responded.
        """
        now = time.monotonic()
        if self._asked and self._asked.done():
            self._free = None if self._asked.exception() else self._asked.result()
            self._asked = None
        if self._asked is None and now >= self._asked_at + DISK_EVERY_S:
            self._asked_at = now
            self._asked = on_thread(lambda: shutil.disk_usage(self._data.root).free)
        elif self._asked and now > self._asked_at + DISK_LIMIT_S:
            self._free = None
            self._note(f"the disk of {self._data.root} does not respond, so its free space is unknown")
        return self._free


def as_message(alert: Alert) -> Mapping[str, object]:
    """Return an alert's JSON fields for the user's command."""
    fields = msgspec.structs.asdict(alert)
    about = fields.pop("about")
    return {"state": "raised" if alert.cleared is None else "cleared", **fields, **about, "words": sentence_of(alert)}


def sentence_of(alert: Alert) -> str:
    """Return the message for a new or cleared alert."""
    return alert.words if alert.cleared is None else f"{alert.place_words}: {title_of(alert)} (cleared)"


def title_of(alert: Alert) -> str:
    """Return the title of an alert's kind, or the kind's name if this version does not know the kind."""
    return next((kind.title for kind in KINDS if kind.name == alert.kind), alert.kind)
