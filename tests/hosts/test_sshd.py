"""Tests for following another host with the real ssh and a real sshd."""

from __future__ import annotations

import contextlib
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support import slow_line
from support.features import features_file
from support.report_cards import put_card
from support.sshd import Sshd, why_not
from support.tui import record_job, record_metrics

from sae_tui.hosts import follower, job_copy
from sae_tui.hosts.hosts import Hosts
from sae_tui.hosts.job_copy import CopyState
from sae_tui.hosts.view import ConnectionStage, HostView
from trainer.contract.errors import UserError
from trainer.contract.paths import DataDir
from trainer.contract.runs.features import FEATURES
from trainer.contract.store.job_store import Control
from trainer.contract.store.metrics_store import SeriesReader
from trainer.contract.store.states import JobState

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())


@pytest.fixture
def sshd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Sshd]:
    monkeypatch.setattr(follower, "FIRST_WAIT_S", 0.05)
    server = Sshd(tmp_path / "sshd")
    yield server
    server.close()


def wait_for(hosts: Hosts, holds: Callable[[HostView], object]) -> HostView:
    deadline = time.monotonic() + 60
    while not holds(view := hosts.views[0]):
        assert time.monotonic() < deadline, view
        time.sleep(0.02)
    return view


def sentence(sshd: Sshd) -> str:
    """Return the reason why the host cannot be followed."""
    hosts = Hosts(["gpu1"], sshd.ssh, demo=True)
    hosts.start(lambda: None)
    view = wait_for(hosts, lambda view: view.sentence)
    hosts.stop()
    assert view.stage is ConnectionStage.FAILED
    return view.sentence


def streams(folder: Path) -> list[str]:
    """Return the command lines of the processes that stream from this data folder."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and f"SAE_TUI_DATA_DIR={folder}".encode() in (entry / "environ").read_bytes():
                found.append((entry / "cmdline").read_text())
        except OSError:
            continue
    return [words for words in found if "\0stream\0" in words]


def test_a_host_is_followed_across_a_lost_connection_and_no_process_is_left_behind(sshd, tmp_path) -> None:
    data = DataDir(tmp_path / "data" / "demo")
    data.create()
    trains = record_job(data, "trains", JobState.RUNNING, host=socket.gethostname(), step=200, total_steps=2000)
    job_id = record_job(data, "theirs", JobState.QUEUED, host="elsewhere")
    sshd.install(tmp_path / "data")
    hosts = Hosts(["gpu1"], sshd.ssh, demo=True)
    hosts.start(lambda: None)
    first = wait_for(hosts, lambda view: view.jobs and len(view.gpus) == 4)
    assert (first.stage, first.jobs[0].name) == (ConnectionStage.CONNECTED, "theirs")
    assert len(streams(tmp_path / "data")) == 1
    assert hosts.run("gpu1", "hold", str(job_id)).startswith(f"on gpu1: job {job_id} ")
    assert wait_for(hosts, lambda view: view.jobs[0].held)
    with pytest.raises(UserError, match="on gpu1: there is no job 99"):
        hosts.run("gpu1", "stop", "99")
    assert hosts.run("gpu1", "stop", str(trains), "--finish").startswith(f"on gpu1: job {trains} cools down for")
    with contextlib.closing(Control(data.control_db, readonly=True)) as control:
        assert control.open_requests(trains) == {"finish"}
    sshd.cut()
    assert wait_for(hosts, lambda view: view.stage is ConnectionStage.CUT).jobs
    again = wait_for(hosts, lambda view: view.is_connected and view.gpus)
    assert again.since >= first.since
    hosts.stop()
    deadline = time.monotonic() + 30
    while streams(tmp_path / "data"):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_job_is_copied_across_a_lost_connection_and_no_process_is_left_behind(sshd, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(job_copy, "FIRST_WAIT_S", 0.05)
    data = DataDir(tmp_path / "data" / "demo")
    data.create()
    job_id = record_job(data, "theirs", JobState.FINISHED)
    record_metrics(data, job_id)
    put_card(data.sae(job_id))
    (data.sae(job_id) / FEATURES).write_bytes(features_file())
    sshd.install(tmp_path / "data")
    copy = Hosts(["gpu1"], sshd.ssh, demo=True).copy("gpu1", job_id)
    copy.start()

    def wait(holds: Callable[[CopyState], object]) -> CopyState:
        deadline = time.monotonic() + 60
        while not holds(copy.state):
            assert time.monotonic() < deadline, copy.state
            time.sleep(0.02)
        return copy.state

    first = wait(lambda state: state.is_complete)
    with contextlib.closing(SeriesReader(copy.data.run(job_id).metrics_db)) as reader:
        assert reader.points("fvu")
    copy.fetch_features(lambda received, total: None)
    assert (copy.data.sae(job_id) / FEATURES).read_bytes() == features_file()
    sshd.cut()
    assert wait(lambda state: state.sentence).since >= first.since
    wait(lambda state: not state.sentence)
    copy.close()
    assert not copy.data.root.exists()
    deadline = time.monotonic() + 30
    while streams(tmp_path / "data"):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_silent_host_is_disconnected_and_reconnected(sshd, tmp_path) -> None:
    sshd.install(tmp_path / "data")
    # With these options, ssh gives up sooner. The app adds its own values, but ssh uses the first value of each option.
    ssh = [*sshd.ssh, "-o", "ServerAliveInterval=1", "-o", "ServerAliveCountMax=1"]
    hosts = Hosts(["gpu1"], ssh, demo=True)
    hosts.start(lambda: None)
    wait_for(hosts, lambda view: view.gpus)
    sshd.halt()
    wait_for(hosts, lambda view: view.stage is ConnectionStage.CUT)
    wait_for(hosts, lambda view: view.is_connected and view.gpus)
    hosts.stop()


def test_a_host_is_followed_over_a_slow_connection(sshd, tmp_path) -> None:
    sshd.install(tmp_path / "data")
    # The connection has a delay of 0.1 s and a bandwidth of 6,000 bytes/s in each direction.
    proxy = f"ProxyCommand={sys.executable} {slow_line.__file__} {sshd.port} 0.1 6000"
    hosts = Hosts(["gpu1"], [*sshd.ssh, "-o", proxy], demo=True)
    hosts.start(lambda: None)
    first = wait_for(hosts, lambda view: len(view.gpus) == 4)
    assert first.is_connected
    wait_for(hosts, lambda view: view.gpus and view.gpus != first.gpus)
    hosts.stop()


def test_each_connection_error_is_reported_with_a_remedy(sshd) -> None:
    assert sentence(sshd).startswith("has no sae-tui on its PATH")
    sshd.program("echo \"sae-tui: error: COMMAND: invalid choice: 'stream'; see sae-tui --help\" >&2; exit 2")
    assert sentence(sshd) == "has a version of sae-tui that is too old; update sae-tui there"
    sshd.use_key("other_key")
    assert sentence(sshd).startswith("accepts none of your keys; make ssh gpu1 work without a password")
    sshd.know(sshd.folder / "other_key.pub")
    assert sentence(sshd) == "has a different host key than before: if you expect that, run ssh-keygen -R gpu1"
    sshd.know(None)
    assert sentence(sshd) == "is not known to ssh yet; run ssh gpu1 once and check its key"
    sshd.close()
    assert "Connection refused" in sentence(sshd)


def test_no_ssh_agent_display_or_terminal_is_forwarded(sshd, monkeypatch) -> None:
    sshd.program('echo "$SSH_AUTH_SOCK|$DISPLAY|$SSH_TTY|" >&2; exit 9')
    monkeypatch.setenv("DISPLAY", ":9")
    monkeypatch.setenv("SSH_AUTH_SOCK", "/no/agent")
    assert sentence(sshd) == "ended sae-tui: |||"
