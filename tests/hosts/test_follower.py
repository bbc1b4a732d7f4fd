"""Tests for following a host, with a child process in place of ssh."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.far_side import far_side, runs_of

from sae_tui.hosts import follower as following
from sae_tui.hosts.follower import FarLogReader, HostFollower
from sae_tui.hosts.hosts import Hosts
from sae_tui.hosts.view import ConnectionStage, HostView
from sae_tui.panels.far_gpus import FarHost, state_words

GOOD = 'say(HELLO); say({"type": "jobs", "jobs": [JOB, JOB]}); say({"type": "gpus", "cards": [CARD]}); stay()'


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(following, "FIRST_WAIT_S", 0.01)


@contextmanager
def followed(folder: Path, *programs: str) -> Iterator[Callable[[Callable[[HostView], object]], HostView]]:
    """Follow a host; yield a function that waits until the host's view meets a condition, and returns the view."""
    changed = threading.Event()
    hosts = Hosts(["far"], far_side(folder, *programs))

    def wait_for(holds: Callable[[HostView], object]) -> HostView:
        deadline = time.monotonic() + 30
        while not holds(view := hosts.views[0]):
            assert time.monotonic() < deadline, view
            changed.wait(0.05)
            changed.clear()
        return view

    hosts.start(changed.set)
    yield wait_for
    hosts.stop()


def test_a_followed_host_shows_its_jobs_and_its_gpus_with_their_history(tmp_path: Path) -> None:
    hosts = Hosts(["far"], far_side(tmp_path, "print('Welcome!'); " + GOOD))
    assert hosts.views[0].stage is ConnectionStage.CONNECTING
    hosts.start(lambda: None)
    deadline = time.monotonic() + 30
    while not hosts.views[0].gpus:
        assert time.monotonic() < deadline, hosts.views
        time.sleep(0.01)
    view = hosts.views[0]
    hosts.stop()
    assert (view.stage, view.sentence) == (ConnectionStage.CONNECTED, "")
    assert [(job.id, job.name, job.host) for job in view.jobs] == [(7, "theirs", "far")]
    assert view.gpus[0].holder == "idle"
    assert 40 in hosts.past("far", 5, 1.0).column(0, "utilization", 5)
    assert runs_of(tmp_path) == [["stream"]]


def test_a_lost_connection_is_reported_with_the_time_and_is_restored(tmp_path: Path) -> None:
    once = GOOD.replace("stay()", "sys.stdin.readline") + "; sys.exit(255)"
    with followed(tmp_path, once, "sys.exit(255)", GOOD) as wait_for:
        seen = wait_for(lambda view: view.jobs)
        cut = wait_for(lambda view: view.stage is ConnectionStage.CUT)
        assert (cut.sentence, cut.gpus) in [("", ()), ("cannot be reached: ssh printed no error", ())]
        assert cut.since >= seen.since
        # The last known jobs are still shown.
        assert cut.jobs
        assert wait_for(lambda view: view.is_connected and view.gpus).sentence == ""
    assert len(runs_of(tmp_path)) >= 3


def test_cutting_a_connection_ends_the_remote_process_and_reconnects(tmp_path: Path) -> None:
    """A suspended app cuts its connections so that the hosts close their GPU drivers."""
    hosts = Hosts(["far"], far_side(tmp_path, GOOD, GOOD))
    hosts.start(lambda: None)
    for n_runs in (1, 2):
        deadline = time.monotonic() + 30
        while not (len(runs_of(tmp_path)) == n_runs and hosts.views[0].is_connected and hosts.views[0].gpus):
            assert time.monotonic() < deadline, hosts.views
            time.sleep(0.01)
        hosts.cut()
    hosts.stop()


@pytest.mark.parametrize(
    ("program", "sentence"),
    [
        ('say(HELLO | {"protocol": 2, "version": "9.9"}); stay()', "has sae-tui 9.9, which is newer than the one here"),
        ("say(HELLO); say('<html>'); stay()", "sent an invalid message: JSON is malformed"),
        ('say(HELLO); say({"type": "jobs", "jobs": [JOB | {"id": -1}]}); stay()', "`$.jobs[0].id`"),
        ('say({"type": "jobs", "jobs": [JOB]}); stay()', "sent an invalid message: no greeting"),
        ("sys.stderr.write('sh: sae-tui: not found\\n'); sys.exit(127)", "has no sae-tui on its PATH"),
        (
            "sys.stderr.write(\"error: invalid choice: 'stream'\\n\"); sys.exit(2)",
            "has a version of sae-tui that is too old",
        ),
        ("sys.stderr.write('me: Permission denied (publickey).\\n'); sys.exit(255)", "accepts none of your keys"),
    ],
)
def test_the_reason_why_a_host_cannot_be_followed_is_given_in_one_sentence(tmp_path: Path, program, sentence) -> None:
    with followed(tmp_path, program) as wait_for:
        assert sentence in wait_for(lambda view: view.sentence).sentence


def test_without_ssh_the_message_names_what_to_install() -> None:
    told = threading.Event()
    follower = HostFollower("far", ["/no/such/ssh"], told.set)
    follower.start()
    assert told.wait(30)
    follower.stop()
    assert "/no/such/ssh: No such file or directory; install an ssh client" in follower.view.sentence


def test_stopping_ends_the_ssh_process(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    program = f"say(HELLO); stay(); open({str(gone)!r}, 'w').close()"
    hosts = Hosts(["far"], far_side(tmp_path, "import signal; signal.signal(15, signal.SIG_IGN); " + program))
    hosts.start(lambda: None)
    deadline = time.monotonic() + 30
    while not hosts.views[0].is_connected:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    hosts.stop()
    # The process exits when its standard input is closed, even though it ignores SIGTERM.
    while not gone.exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_silent_host_is_reported_without_values_and_reconnected(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(following, "SILENT_AFTER_S", 0.2)
    halted = GOOD.replace("stay()", "import os; os.kill(os.getpid(), 19)")
    speaks = GOOD.replace("stay()", "[(say({'type': 'log'}), time.sleep(0.01)) for _ in iter(int, 1)]")
    with followed(tmp_path, "import time; " + halted, "import time; " + speaks) as wait_for:
        seen = wait_for(lambda view: view.gpus)
        silent = wait_for(lambda view: view.stage is ConnectionStage.SILENT)
        assert (silent.gpus, silent.is_connected) == ((), False)
        assert silent.jobs
        assert seen.since <= silent.since <= time.time()
        assert state_words(FarHost(silent, ())).startswith("silent since ")
        monkeypatch.setattr(following, "CUT_AFTER_S", 0.3)
        cut = wait_for(lambda view: view.stage is ConnectionStage.CUT)
        assert cut.sentence.startswith("has sent nothing for ")
        assert cut.since == silent.since
        assert wait_for(lambda view: view.is_connected and view.gpus)


def test_a_silent_host_counts_as_connected_again_once_it_sends_a_message(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(following, "SILENT_AFTER_S", 0.2)
    may_continue = tmp_path / "continue"
    later = f"import os, time; [time.sleep(0.01) for _ in iter(lambda: os.path.exists({str(may_continue)!r}), True)]"
    tail = "[(say({'type': 'gpus', 'cards': [CARD]}), time.sleep(0.01)) for _ in iter(int, 1)]"
    with followed(tmp_path, f"say(HELLO); {later}\n{tail}") as wait_for:
        wait_for(lambda view: view.stage is ConnectionStage.SILENT)
        may_continue.touch()
        assert wait_for(lambda view: view.gpus).is_connected
    assert len(runs_of(tmp_path)) == 1


def test_a_login_without_a_greeting_times_out(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(following, "GREETING_S", 0.3)
    with followed(tmp_path, "stay()") as wait_for:
        view = wait_for(lambda view: view.stage is ConnectionStage.FAILED)
        assert view.sentence.startswith("has sent nothing for ")


def test_log_lines_arrive_in_order_followed_by_the_reason_why_the_log_ended(tmp_path: Path) -> None:
    program = 'say(HELLO); [say({"type": "log", "lines": [f"{n} {words[1:]}\\x1b[2J"]}) for n in range(3)]'
    argv = Hosts(["far"], far_side(tmp_path, program)).argv("far", "stream", "--log", "7")
    told: queue.Queue[list[str]] = queue.Queue()
    reader = FarLogReader("far", argv, told.put)
    reader.start()
    lines = [line for _ in range(4) for line in told.get(timeout=20)]
    reader.stop()
    assert lines == [*(f"{n} ['--log', '7']�[2J" for n in range(3)), "(far ended the log)"]


def test_an_unreadable_log_is_reported_with_the_reason(tmp_path: Path) -> None:
    argv = Hosts(["far"], far_side(tmp_path, "sys.exit(127)")).argv("far", "stream", "--log", "7")
    told: queue.Queue[list[str]] = queue.Queue()
    FarLogReader("far", argv, told.put).start()
    assert "has no sae-tui on its PATH" in told.get(timeout=20)[0]
