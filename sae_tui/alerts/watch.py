"""One thread that looks for alerts while the app is open, writes them down and runs the user's command."""

from __future__ import annotations

import queue
import shutil
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence

import msgspec

from sae_tui.alerts.catalog import KINDS, Kind, Look, Measured
from sae_tui.alerts.hysteresis import Hysteresis
from sae_tui.alerts.record import Alert, of_last_day, read_alerts, write_alerts
from sae_tui.gpu import faults
from sae_tui.gpu.base import GpuSample
from sae_tui.jobs.cards.availability import Holders
from sae_tui.settings import Settings
from trainer.contract.errors import UserError
from trainer.contract.locks import FileLock
from trainer.contract.paths import DataDir

DISK_EVERY_S = 15.0


class Alerts:
    """The alerts of this machine: `turn` takes what is known now. Clocks are given, so that a test can turn them."""

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
        # One that has been turned off since is over; any other goes on from before the app was closed, until it is.
        self._mine = [alert if alert.kind in known else _ended(alert, wall()) for alert in mine]
        lasting = {alert.key for alert in self._mine if alert.cleared is None}
        self._states = {key: Hysteresis(known[key[0]], is_raised=True) for key in lasting}

    @property
    def active(self) -> tuple[Alert, ...]:
        """Those that last, oldest first."""
        return tuple(alert for alert in self._mine if alert.cleared is None)

    @property
    def recent(self) -> list[Alert]:
        """Those of this host that are to be kept, oldest first."""
        return of_last_day(self._mine, self._wall(), self._host)

    def turn(self, look: Look) -> list[Alert]:
        """Take what is known now; return the alerts that have begun or ended.

        Nothing is told while a card has not answered for the first time: it is neither lost nor well again.
        """
        if any(sample.reason == faults.NO_ANSWER_YET for sample in look.samples):
            return []
        seen: set[tuple[str, str]] = set()
        changed = []
        for kind, rule in self._rules:
            for measured in kind.measure(look):
                key = kind.name, measured.place
                seen.add(key)
                state = self._states.setdefault(key, Hysteresis(rule))
                if state.changes(kind.badness(measured.value), self._clock()):
                    changed.append(self._begin(kind, measured) if state.is_raised else self._end(key))
        for key in self._states.keys() - seen if look.samples else ():
            # A card that is not there any more, though the driver tells of others.
            if self._states[key].changes(None, self._clock()):
                changed.append(self._end(key))
        return changed

    def _begin(self, kind: Kind, measured: Measured) -> Alert:
        alert = Alert(
            kind=kind.name,
            place=measured.place,
            place_words=measured.place_words,
            words=measured.words[:500],
            host=self._host,
            value=measured.value,
            raised=self._wall(),
            about=measured.about,
        )
        self._mine = [*of_last_day(self._mine, self._wall(), self._host), alert]
        return alert

    def _end(self, key: tuple[str, str]) -> Alert:
        self._mine = [_ended(alert, self._wall()) if alert.key == key else alert for alert in self._mine]
        return next(alert for alert in reversed(self._mine) if alert.key == key)


def _ended(alert: Alert, now: float) -> Alert:
    """Return the alert as over, at its beginning at the earliest: clocks are set back."""
    return msgspec.structs.replace(alert, cleared=max(now, alert.raised)) if alert.cleared is None else alert


class AlertWatcher:
    """Looks every interval, on a thread of its own: asking a disk how full it is may take for ever.

    `samples` returns None until it is known which cards there are. `changed` holds what has begun or ended since the
    start, oldest first; `on_change` is called after each addition.
    Of several apps on a host only the one that has the lock writes the file and runs the user's command.
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
        # What went wrong with the file or the command, in sentences.
        self.problems: tuple[str, ...] = ()
        self._data, self._on_change, self._readonly = data, on_change, readonly
        self.change(settings)
        self._samples, self._held = samples, held
        self._lock = FileLock(data.locks / f"alerts-{socket.gethostname()}.lock")
        self._recent: Sequence[Alert] = ()
        self._to_run: queue.SimpleQueue[Alert] | None = None
        self._free: int | None = None
        self._disk_at = 0.0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="alerts", daemon=True)

    def change(self, settings: Settings) -> None:
        """Look by other bounds from now on."""
        self.interval_s = max(1.0, settings.sampling_interval_s)
        self._settings = settings

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Ask the thread to end; nothing has to be waited for."""
        self._stop.set()

    def recent(self) -> list[Alert]:
        """Return the alerts of the last day, newest first: of this host as known now, of others as their files say."""
        host = socket.gethostname()
        others = of_last_day([one for one in read_alerts(self._data) if one.host != host], time.time(), host)
        return sorted([*self._recent, *others], key=lambda alert: alert.raised, reverse=True)

    def _run(self) -> None:
        settings = self._settings
        alerts = Alerts(settings, read_alerts(self._data))
        self.active, self._recent = alerts.active, alerts.recent
        while not self._stop.wait(self.interval_s):
            if settings is not self._settings:
                settings = self._settings
                alerts = Alerts(settings, alerts.recent)
            try:
                self._look(alerts)
            except Exception as error:
                # This thread must outlive whatever a card or the disk does.
                self._note(f"alerts cannot be looked for: {error!r}")

    def _look(self, alerts: Alerts) -> None:
        samples = self._samples()
        # Cards that are not known yet are not cards that have gone.
        if samples is None:
            return
        changed = alerts.turn(Look(samples, self._held(), self._free_bytes()))
        self.active, self._recent = alerts.active, alerts.recent
        if changed and not self._stop.is_set():
            self._tell(changed, alerts)

    def _tell(self, changed: list[Alert], alerts: Alerts) -> None:
        self.changed += tuple(changed)
        self._on_change()
        try:
            if self._readonly or not self._lock.acquire():
                return
            write_alerts(self._data, socket.gethostname(), alerts.recent)
        except (UserError, OSError) as error:
            self._note(f"alerts are not written down: {error}")
        if self._settings.on_alert:
            if self._to_run is None:
                self._to_run = queue.SimpleQueue()
                threading.Thread(target=self._run_hooks, args=(self._to_run,), name="on-alert", daemon=True).start()
            for alert in changed:
                self._to_run.put(alert)

    def _run_hooks(self, alerts: queue.SimpleQueue[Alert]) -> None:
        """Run the user's command for one alert after the other, however many cards are lost at once."""
        # Loaded with the first alert: most apps see none.
        from sae_tui.alerts.hook import run_hook

        while True:
            try:
                run_hook(self._settings.on_alert, as_message(alerts.get()))
            except UserError as error:
                self._note(str(error))

    def _note(self, sentence: str) -> None:
        if sentence not in self.problems:
            self.problems += (sentence,)
            self._on_change()

    def _free_bytes(self) -> int | None:
        if time.monotonic() >= self._disk_at:
            self._disk_at = time.monotonic() + DISK_EVERY_S
            try:
                self._free = shutil.disk_usage(self._data.root).free
            except OSError:
                self._free = None
        return self._free


def as_message(alert: Alert) -> Mapping[str, object]:
    """Return an alert as the user's command gets it."""
    fields = msgspec.structs.asdict(alert)
    about = fields.pop("about")
    return {"state": "raised" if alert.cleared is None else "cleared", **fields, **about, "words": sentence_of(alert)}


def sentence_of(alert: Alert) -> str:
    """Return what to say of an alert when it begins, or when it is over."""
    titles = {kind.name: kind.title for kind in KINDS}
    title = titles.get(alert.kind, alert.kind)
    return alert.words if alert.cleared is None else f"{alert.place_words}: {title} no more"
