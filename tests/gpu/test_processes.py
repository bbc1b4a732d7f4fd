"""Tests for GPU processes, with and without a fake driver, and for signals to these processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from sae_tui.gpu import owner as owner_module
from sae_tui.gpu import proc_files, processes
from sae_tui.gpu.base import GpuProcess, GpuSample, ProcessShares
from sae_tui.gpu.owner import owner
from sae_tui.gpu.proc_files import read_file
from sae_tui.gpu.processes import (
    ProcessDetails,
    ProcessReader,
    container_of,
    send_signal,
    send_signals,
    surroundings,
)
from trainer.contract.errors import UserError

GIB = 1 << 30
UNSEEN = 4_194_303
READ = """
import json
from dataclasses import asdict
from sae_tui.gpu.nvml import Nvml
nvml = Nvml()
nvml.open()
sample = nvml.sample(0, processes=True)
print(json.dumps([asdict(sample)["processes"], nvml.shares(0, sample)]))
"""
DIGITS = "3f2a91bc04de" + "0" * 52


def on_gpu(*found: GpuProcess, index: int = 0) -> GpuSample:
    return GpuSample(index, f"GPU-{index}", "H200", 0.0, processes=found)


def read(*found: GpuProcess) -> ProcessDetails:
    (one,) = ProcessReader().read([on_gpu(*found)], {})
    return one


@pytest.fixture
def spinning() -> Iterator[subprocess.Popen[bytes]]:
    environment = {
        "HF_TOKEN": "hf_very_secret",
        "PROXY": "http://ann:hush@box:1",
        "LANG": "a\x1b[2Jb",
        "PYTHONPATH": "/x:https://u:LE/AK@h/x",
    }
    code = "print(flush=True)\nwhile True: pass"
    with subprocess.Popen([sys.executable, "-c", code], env=environment, cwd="/", stdout=subprocess.PIPE) as process:
        # Wait for output, because the kernel exposes a program's environment only some time after the program has
        # started.
        assert process.stdout
        process.stdout.readline()
        yield process
        process.kill()


def test_a_driver_reports_the_gpu_share_of_each_process(on_nvml) -> None:
    (process,), shares = on_nvml(READ, GPUS=1, PIDS=os.getpid(), PID_MIB=1024)
    assert (process["pid"], process["memory_used_bytes"]) == (os.getpid(), GIB)
    assert [*shares] == [str(os.getpid())]
    sm, bandwidth, encoder, decoder = shares[str(os.getpid())]
    assert 0 <= bandwidth <= sm <= 100
    assert encoder == decoder == 0
    assert on_nvml(READ, GPUS=1, PIDS=os.getpid(), FAULTS="0:no_procutil")[1] == {}
    video = on_nvml(READ, GPUS=1, PIDS=os.getpid(), FAULTS="0:enc=30,0:dec=200")[1]
    assert video[str(os.getpid())][2:] == [30, None]


@pytest.mark.parametrize(("fault", "kind"), [("plain", "C"), ("both_lists", "C+G"), ("graphics", "G")])
def test_the_kind_of_a_process_follows_from_the_drivers_two_lists(on_nvml, fault, kind) -> None:
    ((process,), _) = on_nvml(READ, GPUS=1, PIDS=os.getpid(), FAULTS=f"0:{fault}")
    assert process["kind"] == kind


def test_process_details_combine_data_from_the_machine_and_the_driver(spinning, until) -> None:
    reader, me = ProcessReader(), processes._process(os.getpid()).username()
    samples = [
        on_gpu(GpuProcess(spinning.pid, me, None, GIB)),
        on_gpu(GpuProcess(spinning.pid, me, None, 2 * GIB), index=1),
    ]
    shares = {0: {spinning.pid: ProcessShares(40, 20, 0)}, 1: {spinning.pid: ProcessShares(60, 10)}}
    assert reader.read(samples, shares)[0].cpu_percent is None
    until(lambda: (reader.read(samples, shares)[0].cpu_percent or 0) > 5)
    (one,) = reader.read(samples, shares)
    assert (one.gpus, one.memory_used_bytes, one.sm_percent) == ((0, 1), 3 * GIB, 60)
    assert (one.bandwidth_percent, one.encoder_percent, one.decoder_percent) == (20, 0, None)
    assert 0 < (one.host_memory_percent or 0) < 100
    assert one.command.startswith("python")
    assert "while True: pass" in one.command
    assert (one.host_memory_bytes or 0) > 1 << 20
    assert 0 <= time.time() - (one.started or 0) < 600
    assert one.ancestors[0].pid == os.getpid()
    assert one.container == ""
    unlisted = [on_gpu(GpuProcess(spinning.pid, me, None, GIB)), on_gpu(GpuProcess(spinning.pid, me, None, None))]
    assert reader.read(unlisted, {})[0].memory_used_bytes is None


def test_a_process_that_is_not_visible_has_only_data_from_the_driver() -> None:
    one = read(GpuProcess(UNSEEN, None, None, GIB))
    assert (one.identity, one.command, one.host_memory_bytes, one.memory_used_bytes) == (None, None, None, GIB)
    with pytest.raises(UserError, match="cannot be seen from here"):
        send_signal(one, signal.SIGTERM, "simulated")


def test_a_process_is_not_confused_with_another_users_process_with_the_same_pid() -> None:
    one = read(GpuProcess(os.getpid(), "mallory", "python train.py", GIB))
    assert (one.user, one.command, one.identity, one.host_memory_bytes) == ("mallory", "python train.py", None, None)


def test_a_process_with_a_reused_pid_is_read_again(spinning) -> None:
    reader, samples = ProcessReader(), [on_gpu(GpuProcess(spinning.pid, None, None, GIB))]
    (first,) = reader.read(samples, {})
    reader._known[spinning.pid].identity = replace_start(first)
    (second,) = reader.read(samples, {})
    assert second.identity == first.identity


def replace_start(process: ProcessDetails):
    assert process.identity is not None
    return type(process.identity)(process.pid, process.identity.start_ticks - 1, process.identity.boot_id)


def test_a_signal_reaches_only_the_displayed_process(spinning) -> None:
    one = read(GpuProcess(spinning.pid, None, None, GIB))
    with pytest.raises(UserError, match="has already exited"):
        send_signal(replace(one, identity=replace_start(one)), signal.SIGKILL, "simulated")
    assert spinning.poll() is None
    assert send_signal(one, signal.SIGTERM, "simulated") == f"SIGTERM was sent to process {spinning.pid}"
    assert spinning.wait(10) == -signal.SIGTERM
    with pytest.raises(UserError, match="has already exited"):
        send_signal(one, signal.SIGTERM, "simulated")


def test_a_signal_reaches_only_processes_that_still_exist_and_the_rest_are_explained(
    spinning,
) -> None:
    one = read(GpuProcess(spinning.pid, None, None, GIB))
    other = replace(one, identity=replace_start(one))
    unseen = read(GpuProcess(UNSEEN, None, None, GIB))
    with pytest.raises(
        UserError, match=r"SIGTERM was sent to none of 7 processes; .* exited; .*; 2 more did not receive it"
    ):
        send_signals([other] * 7, signal.SIGTERM, "simulated")
    assert spinning.poll() is None
    message = send_signals([one, other, unseen], signal.SIGTERM, "simulated")
    assert message.startswith(f"SIGTERM was sent to 1 of 3 processes; process {spinning.pid} has already exited; ")
    assert f"process {UNSEEN} cannot be seen from here" in message
    assert spinning.wait(10) == -signal.SIGTERM


def test_only_the_owner_or_root_may_send_a_signal(spinning, monkeypatch) -> None:
    one = read(GpuProcess(spinning.pid, None, None, GIB))
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(UserError, match="can send it a signal"):
        send_signal(one, signal.SIGKILL, "simulated")
    assert spinning.poll() is None


@pytest.mark.parametrize("has_open", [False, True])
def test_in_a_container_only_a_process_with_the_driver_open_gets_signals(monkeypatch, tmp_path, has_open) -> None:
    driver = tmp_path / "nvidiactl"
    driver.touch()
    monkeypatch.setattr(processes, "in_container", lambda: True)
    monkeypatch.setattr(processes, "_driver_files", lambda _: frozenset([str(driver)]))
    code = f"file = open({str(driver)!r})\n" if has_open else ""
    code += "print('ready', flush=True)\nimport time\ntime.sleep(600)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        one = read(GpuProcess(process.pid, None, None, GIB))
        if has_open:
            send_signal(one, signal.SIGKILL, "nvml")
            assert process.wait(10) == -signal.SIGKILL
        else:
            with pytest.raises(UserError, match="has no GPU open"):
                send_signal(one, signal.SIGKILL, "nvml")
            assert process.poll() is None
            process.kill()


def test_only_real_gpus_have_driver_files() -> None:
    assert processes._driver_files("simulated") == frozenset()
    assert "/dev/nvidiactl" in processes._driver_files("nvml") & processes._driver_files("auto")


def test_the_environment_of_a_process_is_shown_without_secrets(spinning) -> None:
    around = surroundings(read(GpuProcess(spinning.pid, None, None, GIB)))
    assert around.folder == "/"
    assert "python" in around.program
    shown = {"HF_TOKEN": "…", "PROXY": "…", "LANG": "a�[2Jb", "PYTHONPATH": "/x:https://…@h/x"}
    assert {name: value for name, value in around.shown() if name in shown} == shown
    assert dict(around.shown(whole=True))["HF_TOKEN"] == "hf_very_secret"
    assert surroundings(read(GpuProcess(UNSEEN, None, None, GIB))).environment == ()


@pytest.mark.parametrize(
    ("group", "name"),
    [
        (f"0::/system.slice/docker-{DIGITS}.scope", "docker 3f2a91bc04de"),
        (f"12:memory:/docker/{DIGITS}", "docker 3f2a91bc04de"),
        (f"0::/user.slice/user-1000.slice/libpod-{DIGITS}.scope", "podman 3f2a91bc04de"),
        (f"0::/kubepods.slice/kubepods-pod1.slice/cri-containerd-{DIGITS}.scope", "kubernetes 3f2a91bc04de"),
        (f"11:cpu:/kubepods/burstable/pod1/{DIGITS}", "kubernetes 3f2a91bc04de"),
        ("0::/lxc.payload.gpu-box/init.scope", "lxc gpu-box"),
        ("0::/system.slice/slurmstepd.scope/job_1234/step_0", "slurm job 1234"),
        ("0::/user.slice/user-1000.slice/session-3.scope", ""),
    ],
)
def test_the_container_of_a_process_is_recognised_by_its_control_group(tmp_path, group, name) -> None:
    file = tmp_path / "cgroup"
    file.write_text(f"{group}\n")
    assert processes._group(str(file)) == name


def test_the_container_of_a_process_is_left_out_if_the_app_runs_in_it_too(monkeypatch) -> None:
    monkeypatch.setattr(processes, "_group", lambda path: "docker 1" if "self" in path else "docker 2")
    assert container_of(1) == "docker 2"
    monkeypatch.setattr(processes, "_group", lambda _: "docker 1")
    assert container_of(1) == ""


def test_a_file_that_never_answers_blocks_only_one_short_read(tmp_path) -> None:
    pipe = tmp_path / "cmdline"  # opening a pipe waits for a writer, just as reading /proc waits for a hung process
    os.mkfifo(pipe)
    before = set(_file_readers())
    for limit_s in (0.05, 60, 60):
        with pytest.raises(TimeoutError):
            read_file(pipe, limit_s)
    (waiting,) = set(_file_readers()) - before
    pipe.write_bytes(b"python\0train.py\0")
    waiting.join(10)
    pipe.unlink()
    pipe.write_bytes(b"at once")
    assert read_file(pipe, 60) == b"at once"


def test_simultaneous_reads_of_a_file_share_the_answer(tmp_path, monkeypatch) -> None:
    pipe = tmp_path / "cmdline"
    os.mkfifo(pipe)
    both_wait, contents = threading.Barrier(2), []

    class Answer(Future):
        def result(self, timeout=None):
            if both_wait.wait(30) == 0:
                pipe.write_bytes(b"python\0train.py\0")
            return super().result(timeout)

    monkeypatch.setattr(proc_files, "Future", Answer)
    callers = [threading.Thread(target=lambda: contents.append(read_file(pipe, 60)), daemon=True) for _ in range(2)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(60)
    assert contents == [b"python\0train.py\0"] * 2


def _file_readers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "proc-file"]


def test_a_process_with_an_unreadable_command_line_is_shown_by_its_program_name(monkeypatch) -> None:
    def hangs(path, limit_s=0.0):
        raise TimeoutError

    monkeypatch.setattr(proc_files, "read_file", hangs)
    monkeypatch.setattr(owner_module, "_known", {})
    comm = Path("/proc/self/comm").read_text().strip()
    assert owner(os.getpid()) == (processes._process(os.getpid()).username(), comm)
    assert read(GpuProcess(os.getpid(), None, None, GIB)).command == comm


def test_line_ends_in_a_command_line_are_shown_as_spaces(monkeypatch) -> None:
    monkeypatch.setattr(owner_module, "_known", {})
    monkeypatch.setattr(owner_module, "arguments_of", lambda pid: ["python", "-c", "\nimport x\nx.run()\x1b"])
    assert owner(os.getpid())[1] == "python -c  import x x.run()�"


def test_the_owner_of_a_process_is_read_again_after_ten_seconds_and_for_another_process(monkeypatch) -> None:
    now, reads = 0.0, []
    monkeypatch.setattr(owner_module, "_known", {})
    monkeypatch.setattr(owner_module, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(owner_module, "arguments_of", lambda pid: reads.append(pid) or ["python", str(len(reads))])
    here, parent = os.getpid(), os.getppid()
    assert [owner(here)[1], owner(parent)[1], owner(here)[1]] == ["python 1", "python 2", "python 1"]
    now = 10.0
    assert owner(here)[1] == "python 3"
    with subprocess.Popen(["true"]) as ended:
        ended.wait()
    assert owner(ended.pid) == (None, None)


def test_command_lines_equal_those_from_psutil() -> None:
    for pid in (os.getpid(), os.getppid()):
        assert proc_files.arguments_of(pid) == psutil.Process(pid).cmdline()
