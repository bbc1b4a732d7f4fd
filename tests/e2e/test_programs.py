"""Tests for running other projects' programs as commands: torchrun, and a Jupyter kernel if one is installed."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from support.slurm import free_ports

import sae_tui
from sae_tui.jobs.launchers.process_tree import MARK

ROOT = Path(__file__).parents[2]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-addr", "127.0.0.1"]
# Sums 1 and 2 over two ranks; with the argument `forever`, it does so repeatedly.
RANK = """
import os, sys, torch, torch.distributed as dist
dist.init_process_group("gloo")
rank = dist.get_rank()
while True:
    one = torch.tensor([rank + 1.0])
    dist.all_reduce(one)
    print(f"rank {rank} of job {os.environ['SAE_TUI_JOB_ID']}: {one.item()}", flush=True)
    if sys.argv[1:] != ["forever"]:
        break
dist.destroy_process_group()
"""


@pytest.fixture(autouse=True)
def _own_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("SAE_TUI_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.setenv("PYTHONPATH", str(ROOT), prepend=os.pathsep)
    # On one machine, the loopback interface suffices.
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    yield
    for process in processes_of(tmp_path / "data"):
        process.send_signal(signal.SIGKILL)


def processes_of(data: Path) -> list[psutil.Process]:
    """Return the live processes of programs whose run folder is in this data folder."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            is_ours = process.environ().get(MARK, "").startswith(str(data))
            if is_ours and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def until(holds: Callable[[], object]) -> None:
    deadline = time.monotonic() + 120
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_torchrun_with_two_ranks_finishes_and_leaves_no_processes_behind_when_stopped(tmp_path: Path) -> None:
    (tmp_path / "rank.py").write_text(RANK)
    ports = free_ports(2)
    job = sae_tui.run([*TORCHRUN, "--master-port", ports[0], "rank.py"], gpus=0, folder=tmp_path)
    assert job.wait(120).words == "finished", job.log()
    assert {f"rank {rank} of job 1: 3.0" for rank in (0, 1)} <= set(job.log().splitlines())
    argv = [*TORCHRUN, "--master-port", ports[1], "rank.py", "forever"]
    endless = sae_tui.run(argv, gpus=0, folder=tmp_path)
    until(lambda: "rank 0" in endless.log(50) and "rank 1" in endless.log(50))
    assert len(processes_of(tmp_path / "data")) >= 3
    endless.stop()
    assert endless.wait(120).state == "stopped"
    assert processes_of(tmp_path / "data") == []


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("ipykernel", "jupyter_client"))), reason="ipykernel is not installed"
)
def test_a_jupyter_kernel_runs_its_clients_code_until_it_is_stopped(tmp_path: Path) -> None:
    from jupyter_client import BlockingKernelClient

    argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{run_dir}/kernel.json"]
    job = sae_tui.run(argv, gpus=0, name="kernel")
    file = tmp_path / "data" / "runs" / "1" / "kernel.json"

    def is_written() -> bool:
        with contextlib.suppress(OSError, ValueError):
            return bool(json.loads(file.read_text()))
        return False

    until(is_written)
    assert file.stat().st_mode & 0o777 == 0o600
    client = BlockingKernelClient(connection_file=str(file))
    client.load_connection_file()
    client.start_channels()
    try:
        client.wait_for_ready(timeout=60)
        code = (
            "import os, subprocess; subprocess.Popen(['setsid', 'sleep', '1000']); print(os.environ['SAE_TUI_JOB_ID'])"
        )
        printed: list[str] = []
        reply = client.execute_interactive(
            code, output_hook=lambda message: printed.append(message["content"].get("text", "")), timeout=60
        )
        assert (reply["content"]["status"], "".join(printed)) == ("ok", "1\n")
    finally:
        client.stop_channels()
    job.stop()
    assert job.wait(60).state == "stopped"
    assert processes_of(tmp_path / "data") == []
