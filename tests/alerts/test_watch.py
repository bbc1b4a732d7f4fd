"""Tests for the alerts that GPU and disk readings raise, and for how alerts are stored."""

from __future__ import annotations

import json
import stat
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import pytest

from sae_tui.alerts import record
from sae_tui.alerts import watch as watch_module
from sae_tui.alerts.catalog import GIB, KINDS, AlertReadings
from sae_tui.alerts.record import DAY_S, Alert, read_alerts, write_alerts
from sae_tui.alerts.watch import GROUP_S, Alerts, AlertWatcher, as_message, sentence_of
from sae_tui.gpu import faults
from sae_tui.gpu.base import THROTTLING, Condition, GpuSample, Xid
from sae_tui.jobs.gpus.availability import Holders
from sae_tui.settings import Settings
from trainer.contract.locks import FileLock
from trainer.contract.paths import DataDir
from trainer.contract.store.rows import Job

BEGIN = 1_700_000_000.0
COLD = SOUND = Condition(slowed_by=(), slowdown_c=90, ecc_uncorrected=0, rows_pending=False, rows_failed=False)
FINE = GpuSample(
    3, "GPU-a", "H100", BEGIN, utilization=50, memory_used_bytes=40 << 30, memory_total_bytes=80 << 30,
    temperature_c=60, condition=COLD,
)  # fmt: skip
JOB = Job(id=12, name="base", config="", user="me", host="here", device="cuda", gpu_source="nvml")
HELD = Holders(jobs={"GPU-a": JOB})


@pytest.fixture
def data(tmp_path):
    data = DataDir(tmp_path / "data")
    data.create()
    return data


class Days:
    """Alerts with a simulated clock that advances by 1 s per reading."""

    def __init__(self, settings: Settings = Settings(), stored: tuple[Alert, ...] = ()) -> None:  # noqa: B008
        self.now = 0.0
        self.alerts = Alerts(settings, stored, clock=lambda: self.now, wall=lambda: BEGIN + self.now)

    def last(self, seconds: int, look: AlertReadings) -> list[str]:
        """Pass `look` to the alerts once per second for `seconds` seconds, and return the messages."""
        said = []
        for _ in range(seconds):
            said += [sentence_of(alert) for alert in self.alerts.turn(look)]
            self.now += 1
        return said


def gpus(*samples: GpuSample, held: Holders = HELD, free_bytes: int | None = 100 * GIB) -> AlertReadings:
    return AlertReadings(samples, held, free_bytes)


@pytest.mark.parametrize(
    ("bad", "after_s", "words", "good", "over_s"),
    [
        (
            gpus(replace(FINE, temperature_c=87)),
            10,
            "GPU 3 is at 87 °C; it throttles at 90 °C",
            gpus(FINE),
            60,
        ),
        (
            gpus(replace(FINE, condition=Condition(slowed_by=("power limit reached", THROTTLING[1])))),
            60,
            "GPU 3 is throttled: too hot (driver limit)",
            gpus(replace(FINE, condition=Condition(slowed_by=("power limit reached",)))),
            60,
        ),
        (
            gpus(replace(FINE, healthy=False, reason=faults.LOST)),
            15,
            f"GPU 3 cannot be read: {faults.LOST}",
            gpus(FINE),
            10,
        ),
        (
            gpus(replace(FINE, condition=replace(SOUND, ecc_uncorrected=7))),
            1,
            "GPU 3 has uncorrected memory errors (ECC): 7 since its last reset",
            gpus(FINE),
            60,
        ),
        (
            gpus(replace(FINE, condition=replace(SOUND, rows_pending=True))),
            1,
            "GPU 3 needs a reset to remap memory rows",
            gpus(FINE),
            60,
        ),
        (
            gpus(replace(FINE, condition=replace(SOUND, xid=Xid(48, BEGIN, "Xid 48: lost bits", is_fatal=True)))),
            1,
            "GPU 3 reports Xid 48: lost bits",
            gpus(FINE),
            60,
        ),
        (
            gpus(replace(FINE, memory_used_bytes=79 << 30, memory_free_bytes=1 << 30)),
            30,
            "GPU 3 has 1.0 GiB of 80.0 GiB memory left",
            gpus(FINE),
            30,
        ),
        (
            gpus(FINE, held=Holders(jobs={"GPU-a": JOB}, idle={"GPU-a": "held 3 h, idle for 10 min"})),
            20 * 60,
            "GPU 3 is not used by job 12 (base): held 3 h, idle for 10 min",
            gpus(FINE),
            60,
        ),
        (
            gpus(FINE, free_bytes=2 * GIB),
            30,
            "the data folder's disk has 2.0 GiB left",
            gpus(FINE),
            30,
        ),
    ],
    ids=[kind.name for kind in KINDS],
)
def test_each_alert_starts_and_ends_after_its_delay(bad, after_s, words, good, over_s):
    days = Days()
    assert days.last(after_s, bad) == []
    assert days.last(2, bad) == [words]
    assert len(days.alerts.active) == 1
    assert days.last(over_s, good) == []
    (over,) = days.last(1, good)
    assert over.endswith(" (cleared)")
    assert days.alerts.active == ()


@pytest.mark.parametrize(
    "look",
    [
        gpus(replace(FINE, condition=Condition(slowed_by=("power limit reached", "clocks follow the display")))),
        gpus(replace(FINE, healthy=False, reason=faults.NO_ANSWER_YET)),
        gpus(replace(FINE, temperature_c=None, memory_used_bytes=None, condition=None), free_bytes=None),
        AlertReadings(),
    ],
)
def test_normal_or_unknown_readings_raise_no_alert(look):
    assert Days().last(3700, look) == []


def test_a_gpu_that_needs_a_reset_raises_the_fatal_error_alert_until_it_is_reset():
    days = Days()
    wanted = gpus(replace(FINE, condition=replace(SOUND, recovery="a reset")))
    assert days.last(3, wanted) == ["GPU 3 needs a reset, according to its driver"]
    assert [alert.kind for alert in days.alerts.active] == ["xid"]
    assert days.last(62, gpus(replace(FINE, condition=replace(SOUND, recovery="")))) == ["GPU 3: fatal error (cleared)"]


def test_a_value_that_swings_around_the_threshold_raises_one_alert():
    days = Days()
    hot, warm = gpus(replace(FINE, temperature_c=87)), gpus(replace(FINE, temperature_c=84))
    said = days.last(12, hot)
    for _ in range(50):
        said += days.last(3, warm) + days.last(3, hot)
    assert said == ["GPU 3 is at 87 °C; it throttles at 90 °C"]


def test_an_alert_about_a_removed_gpu_ends():
    days = Days()
    days.last(20, gpus(replace(FINE, healthy=False, reason=faults.LOST)))
    assert days.last(12, gpus(replace(FINE, index=4))) == ["GPU 3: unreadable (cleared)"]


def lost(*indices: int, of: int = 64) -> AlertReadings:
    """Return readings for `of` GPUs; the GPUs at `indices` are lost."""
    fine = [replace(FINE, index=index, uuid=f"GPU-{index}") for index in range(of)]
    return gpus(*(replace(one, healthy=False, reason=faults.LOST) if one.index in indices else one for one in fine))


def test_gpus_lost_together_share_one_alert():
    days = Days()
    said = days.last(5, lost()) + days.last(60, lost(*range(64)))
    assert said == [f"GPUs 0-63 cannot be read: {faults.LOST}"]
    assert len(days.alerts.active) == 64
    assert days.last(60, lost()) == ["GPUs 0-63: unreadable (cleared)"]
    assert days.alerts.active == ()


def test_gpus_lost_one_after_another_are_reported_every_few_seconds():
    days, said = Days(), []
    for n_lost in range(1, 65):
        said += days.last(1, lost(*range(n_lost)))
    said += days.last(60, lost(*range(64)))
    assert len(said) <= 2 + 64 // GROUP_S
    assert said[0] == f"GPU 0 cannot be read: {faults.LOST}"
    assert said[1] == f"GPUs 1-5 cannot be read: {faults.LOST}"
    assert len(days.alerts.active) == 64


def test_the_alert_command_gets_the_indices_and_number_of_gpus():
    days = Days()
    days.last(15, lost(1, 2, 3, 7))
    message = as_message(days.alerts.turn(lost(1, 2, 3, 7))[0])
    expected = {"state": "raised", "gpus": "1-3, 7", "count": 4, "gpu_index": None, "value": None, "place": "gpus"}
    assert {name: message[name] for name in expected} == expected


def test_an_alert_about_several_gpus_describes_the_last_one():
    hot = gpus(*(replace(FINE, index=index, temperature_c=86 + index) for index in range(3)))
    assert Days().last(60, hot) == ["GPUs 0-2: heat; GPU 2 is at 88 °C; it throttles at 90 °C"]


def test_a_flapping_gpu_raises_one_alert_and_displaces_no_active_alert(monkeypatch):
    monkeypatch.setattr(record, "MOST", 3)
    days, said = Days(), []
    for _ in range(300):
        said += days.last(16, lost(0, 1, of=2)) + days.last(11, lost(0, of=2))
    assert len(said) == 5
    assert said[-1] == f"GPU 1 is flapping, unreadable 3 times within an hour: GPU 1 cannot be read: {faults.LOST}"
    assert {one.place for one in days.alerts.active} == {"gpu-0", "gpu-1"}
    assert days.last(20, lost(of=2)) == ["GPU 0: unreadable (cleared)"]
    assert days.last(3600, lost(of=2)) == ["GPU 1: unreadable (cleared)"]


def test_an_alert_shows_when_its_sensor_stopped_answering():
    days = Days()
    days.last(20, gpus(replace(FINE, temperature_c=95)))
    assert days.last(1000, gpus(replace(FINE, temperature_c=None))) == []
    since = time.strftime("%H:%M", time.localtime(BEGIN + 20))
    assert [one.words for one in days.alerts.active] == [
        f"GPU 3 is at 95 °C; it throttles at 90 °C; unknown since {since}"
    ]
    assert days.last(61, gpus(FINE)) == ["GPU 3: heat (cleared)"]


def test_a_clock_that_is_temporarily_far_ahead_deletes_no_alerts():
    kept = [alert(cleared=BEGIN - 100), alert(kind="lost", cleared=BEGIN - 50)]
    days = Days(stored=(*kept,))
    days.now = 400 * DAY_S
    assert days.alerts.recent == kept


def test_an_error_in_one_kind_of_alert_does_not_stop_the_others(monkeypatch):
    def fails(look: AlertReadings):
        raise ZeroDivisionError("a sensor")

    monkeypatch.setattr(watch_module, "KINDS", (KINDS[0]._replace(measure=fails), *KINDS[1:]))
    days = Days(stored=(alert(),))
    assert days.last(100, lost(3, of=4)) == [f"GPU 3 cannot be read: {faults.LOST}"]
    assert "heat alerts cannot be checked: ZeroDivisionError" in days.alerts.failure
    assert {one.kind for one in days.alerts.active} == {"heat", "lost"}


def test_thresholds_are_settings_and_0_turns_an_alert_off():
    hot = gpus(replace(FINE, temperature_c=80))
    assert Days().last(60, hot) == []
    assert len(Days(Settings(alert_heat_c=12)).last(60, hot)) == 1
    off = Settings(**{kind.setting: 0 for kind in KINDS})
    lost = gpus(replace(FINE, healthy=False, reason=faults.LOST), free_bytes=0)
    assert Days(off).last(100, lost) == []


def alert(kind: str = "heat", host: str | None = None, **fields) -> Alert:
    own = Days().alerts._host
    usual = {"place": "gpu-3", "place_words": "GPU 3", "words": "w", "value": 1.0, "raised": BEGIN - 100}
    return Alert(kind=kind, host=host or own, **(usual | fields))


def test_a_stored_alert_continues_after_a_restart_and_is_not_reported_twice():
    days = Days(stored=(alert(), alert(host="elsewhere")))
    assert days.last(30, gpus(replace(FINE, temperature_c=88))) == []
    assert len(days.alerts.active) == 1
    assert days.last(61, gpus(FINE)) == ["GPU 3: heat (cleared)"]
    assert [one.cleared is None for one in days.alerts.recent] == [False]


def test_alerts_are_kept_for_a_day_after_they_end(data):
    kept = [alert(cleared=BEGIN - DAY_S + 5), alert(kind="unknown-kind", cleared=BEGIN - 1)]
    old = alert(cleared=BEGIN - DAY_S - 5), alert(host="elsewhere", raised=BEGIN - DAY_S - 5)
    days = Days(stored=(*old, *kept))
    write_alerts(data, "box", days.alerts.recent)
    assert read_alerts(data) == kept
    assert stat.S_IMODE(data.alerts("box").stat().st_mode) == 0o600


@pytest.mark.parametrize("content", ["", "{", "[1]", '[{"kind": "heat"}]', "null"])
def test_a_damaged_alert_file_is_read_as_empty(data, content):
    data.alerts("box").write_text(content)
    assert read_alerts(data) == []


def test_hosts_sharing_a_folder_store_their_alerts_separately(data):
    mine, theirs = alert(cleared=BEGIN - 1), alert(host="elsewhere", raised=BEGIN - 200)
    write_alerts(data, "elsewhere", [theirs])
    write_alerts(data, mine.host, [mine])
    assert read_alerts(data) == [theirs, mine]


def test_no_alert_ends_before_its_gpu_has_answered_or_while_there_is_no_driver():
    days = Days(stored=(alert("lost"), alert("idle")))
    waiting = gpus(GpuSample(3, "GPU-index-3", "", BEGIN, healthy=False, reason=faults.NO_ANSWER_YET))
    assert days.last(100, waiting) == []
    assert days.last(100, gpus()) == []
    # A GPU lost before the app started has no known UUID, but its stored alerts stay active.
    unknown = gpus(GpuSample(3, "GPU-index-3", "", BEGIN, healthy=False, reason=faults.LOST))
    assert days.last(59, unknown) == []
    assert {one.kind for one in days.alerts.active} == {"lost", "idle"}
    gone = days.last(300, gpus(replace(FINE, index=4)))
    assert sorted(gone) == ["GPU 3: held and idle (cleared)", "GPU 3: unreadable (cleared)"]


def test_the_alert_command_gets_the_gpu_the_job_and_the_alert_state():
    days = Days()
    days.last(10, gpus(replace(FINE, temperature_c=88)))
    (begun,) = days.alerts.turn(gpus(replace(FINE, temperature_c=88)))
    message = json.loads(json.dumps(as_message(begun)))
    assert {name: message[name] for name in ("state", "kind", "gpu_index", "gpu_uuid", "job_id", "value")} == {
        "state": "raised", "kind": "heat", "gpu_index": 3, "gpu_uuid": "GPU-a", "job_id": 12, "value": 2.0
    }  # fmt: skip


@pytest.fixture
def watch(data) -> Callable[..., AlertWatcher]:
    """Return a function that starts a watcher for a lost GPU and waits for its first report."""
    started = []

    def begin(*, disk_gib: float = 0, **options) -> AlertWatcher:
        told = threading.Event()
        lost = (replace(FINE, healthy=False, reason=faults.LOST),)
        looks = iter([None, 1 / 2])  # the first reading is missing, and the second causes an exception
        settings = Settings(alert_lost_s=0.001, alert_disk_gib=disk_gib)
        watcher = AlertWatcher(data, settings, lambda: next(looks, lost), lambda: HELD, told.set, **options)
        watcher.interval_s = 0.01
        started.append(watcher)
        watcher.start()
        wait_until(lambda: watcher.changed)
        assert told.is_set()
        assert watcher.problems[0].startswith("alerts cannot be checked: ")
        return watcher

    yield begin
    for watcher in started:
        watcher.stop()


def wait_until(condition: Callable[[], object]) -> None:
    wait = threading.Event()
    for _ in range(2000):
        if condition():
            return
        wait.wait(0.01)
    raise AssertionError("the condition was not met in time")


def test_a_new_alert_is_stored_and_listed_as_active_and_recent(watch, data):
    first = watch()
    wait_until(lambda: read_alerts(data))
    (written,) = read_alerts(data)
    assert (written.kind, written.place) == ("lost", "gpu-3")
    assert first.active == (written,)
    assert first.recent() == [written]


def test_alerts_waiting_to_be_grouped_are_reported_before_new_settings_apply(data, monkeypatch):
    monkeypatch.setattr(watch_module, "GROUP_S", 1000.0)
    look = lost(0, of=2)
    watcher = AlertWatcher(data, Settings(alert_lost_s=0.001, alert_disk_gib=0), lambda: look.samples, Holders, int)
    watcher.interval_s = 0.01
    watcher.start()
    wait_until(lambda: watcher.changed)
    look = lost(0, 1, of=2)
    wait_until(lambda: len(watcher.active) == 2)
    assert [one.place for one in watcher.changed] == ["gpu-0"]
    watcher.change(Settings(alert_lost_s=0.001, alert_disk_gib=1))
    wait_until(lambda: len(watcher.changed) == 2)
    watcher.stop()
    assert [one.place for one in watcher.changed] == ["gpu-0", "gpu-1"]


def test_a_second_app_and_a_read_only_app_write_nothing(watch, data):
    def report(**options) -> AlertWatcher:
        watcher = watch(**options)
        watcher.stop()
        watcher._thread.join(20)
        assert len(watcher.changed) == 1
        assert [one.kind for one in watcher.recent()] == ["lost"]
        return watcher

    lock = FileLock(data.locks / f"alerts-{alert().host}.lock")
    assert lock.acquire()
    reports = report()._to_write
    # The writer takes this item from the queue only after it has processed the alert.
    reports.put(([], []))
    wait_until(reports.empty)
    report(readonly=True)
    assert not data.alerts(alert().host).exists()
    lock.release()


def test_a_hung_disk_is_reported_and_delays_no_other_alert(watch, data, monkeypatch):
    hangs = threading.Event()
    monkeypatch.setattr(watch_module.shutil, "disk_usage", lambda _: hangs.wait(60))
    monkeypatch.setattr(watch_module, "DISK_LIMIT_S", 0.1)
    monkeypatch.setattr(watch_module, "write_alerts", lambda *_: hangs.wait(60))
    watcher = watch(disk_gib=5)
    wait_until(lambda: len(watcher.problems) > 1)
    assert watcher.problems[1].startswith(f"the disk of {data.root} does not respond")
    n_before = threading.active_count()
    n_looks = len(watcher.active), watcher.changed
    assert n_looks[0] == 1
    threading.Event().wait(0.1)
    assert threading.active_count() <= n_before
    hangs.set()


def test_the_disk_is_watched_even_if_the_driver_never_lists_its_gpus(data, monkeypatch):
    monkeypatch.setattr(watch_module.shutil, "disk_usage", lambda _: Free(GIB))
    monkeypatch.setattr(watch_module, "KINDS", tuple(kind._replace(raise_s=0) for kind in KINDS))
    watcher = AlertWatcher(data, Settings(), lambda: None, Holders, lambda: None)
    watcher.interval_s = 0.01
    watcher.start()
    wait_until(lambda: watcher.changed)
    watcher.stop()
    assert watcher.changed[0].kind == "disk"


class Free(NamedTuple):
    free: int


def test_a_failure_of_the_alert_command_is_reported_and_the_next_alert_still_runs_it(data, monkeypatch):
    ran = []

    def run(command, message):
        ran.append(message["words"])
        if len(ran) == 1:
            raise MemoryError

    monkeypatch.setattr("sae_tui.alerts.watch.run_hook", run)
    watcher = AlertWatcher(data, Settings(on_alert=("x",)), lambda: None, Holders, lambda: None)
    watcher._run_command([alert(), alert(words="another")])
    wait_until(lambda: len(ran) == 2)
    assert watcher.problems == ("on_alert: MemoryError()",)


def test_an_unwritable_file_is_reported_once_and_alerts_continue(watch, data):
    data.alerts(alert().host).mkdir()
    watcher = watch()
    wait_until(lambda: len(watcher.problems) > 1)
    assert watcher.problems[1].startswith("alerts are not stored: ")
    assert len(watcher.active) == 1
