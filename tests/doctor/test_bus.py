from __future__ import annotations

import dataclasses
import json
import subprocess
import sys

import msgspec
import pytest
from support.cards import GIB, Cards

from sae_tui.doctor.bus import Probed, check_bus
from sae_tui.gpu.base import GpuProcess
from sae_tui.gpu.simulated import Simulated
from sae_tui.jobs.gpus.locks import ENV_LOCK_DIR, GpuLocks, lock_folder
from trainer.contract.planning.hardware import read_box

FOUND = {
    "device": "NVIDIA H100", "ranks": 3, "precision": "bf16", "flops_per_s": [6e14, 5e14, 6e14],
    "memory_bytes_per_s": [3e12, 3e12, 2e12], "bus_bytes_per_s": 2e10, "latency_s": 2e-5,
    "pairs": {"0-1": 2e10, "0-2": 2e10, "1-2": 1.5e10},
}  # fmt: skip


class Used(Cards):
    """GPUs, the last of which runs another user's process."""

    def sample(self, index, *, processes):
        sample = super().sample(index, processes=processes)
        if index < self.count - 1:
            return sample
        other_user = GpuProcess(1, "bob", "python", 30 * GIB)
        return dataclasses.replace(sample, processes=(other_user,))


class Cut(Cards):
    """Two undivided GPUs, followed by MIG slices."""

    def sample(self, index, *, processes):
        sample = super().sample(index, processes=processes)
        return dataclasses.replace(sample, uuid=f"MIG-{index}") if index > 1 else sample


@pytest.fixture
def probing(sandbox, tmp_path, monkeypatch):
    """Return a function that creates a machine whose trainer prints the given measurements and records its
    arguments.
    """
    monkeypatch.setenv(ENV_LOCK_DIR, str(tmp_path / "locks"))
    package = tmp_path / "site" / "trainer"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()

    def box(source, body=None, **found):
        prints = f"print('starting')\nprint({json.dumps(FOUND | found)!r})"
        asked = f"import os, sys\nopen({str(tmp_path / 'asked')!r}, 'w').write("
        asked += "' '.join([*sys.argv[1:], os.environ['CUDA_VISIBLE_DEVICES']]))\n"
        (package / "__main__.py").write_text(asked + (body or prints))
        return sandbox.box(source, PYTHONPATH=str(package.parent))

    return box


def test_the_bus_between_all_idle_gpus_is_measured_and_stored(probing, tmp_path) -> None:
    box = probing(Cards(3))
    (finding,) = check_bus(box)
    assert (finding.level, finding.remedy) == ("ok", "")
    assert finding.sentence == "3 GPUs exchange 20.0 GB/s in an all-reduce; a small all-reduce takes 20 µs"
    assert (tmp_path / "asked").read_text() == "probe --gpus auto:3 --json GPU-0,GPU-1,GPU-2"
    speeds = read_box(box.data.box_file)
    assert msgspec.structs.astuple(speeds.speeds("NVIDIA H100", "bf16", 3))[:5] == (5e14, 2e12, 2e10, 2e-5, True)
    assert speeds.speeds("NVIDIA H100", "bf16", 2).bus_bytes_per_s == 1.5e10


def test_mig_slices_are_not_measured(probing, tmp_path) -> None:
    list(check_bus(probing(Cut(4), ranks=2)))
    assert (tmp_path / "asked").read_text() == "probe --gpus auto:2 --json GPU-0,GPU-1"


def test_a_slow_bus_is_a_warning_that_suggests_the_tensor_mode(probing) -> None:
    (finding,) = check_bus(probing(Cards(3), bus_bytes_per_s=6e9))
    assert finding.level == "warning"
    assert "6.0 GB/s" in finding.sentence
    assert '"tensor"' in finding.remedy


def test_a_pair_of_gpus_slower_than_half_the_median_speed_is_named(probing) -> None:
    _, finding = check_bus(probing(Cards(3), pairs={"0-1": 2e10, "0-2": 2e10, "1-2": 9e9}))
    assert finding.level == "warning"
    slow = "exchange data at less than half the median speed, 20.0 GB/s"
    assert finding.sentence.startswith(f"GPUs 1-2 (9.0 GB/s) {slow}")


def test_the_bus_is_not_measured_while_a_gpu_is_in_use(probing, tmp_path) -> None:
    (finding,) = check_bus(probing(Used(3)))
    assert finding.level == "note"
    assert "GPU 2 is used by bob" in finding.sentence
    assert not (tmp_path / "asked").exists()


def test_the_bus_is_not_measured_while_a_job_leases_a_gpu(probing, tmp_path) -> None:
    box = probing(Cards(2))
    box.data.create()
    locks = GpuLocks(lock_folder(box.data, "nvml"), ["GPU-1"])
    assert locks.take()
    (finding,) = check_bus(box)
    locks.release()
    assert (finding.level, "a job is starting on one of the GPUs" in finding.sentence) == ("note", True)
    assert not (tmp_path / "asked").exists()


def test_a_data_folder_that_cannot_be_created_is_a_note(probing, tmp_path) -> None:
    box = probing(Cards(2))
    box.data.root.write_text("in the way")
    (finding,) = check_bus(box)
    assert (finding.level, str(box.data.root) in finding.sentence) == ("note", True)


def test_a_probe_releases_its_gpus(probing) -> None:
    box = probing(Cards(2))
    list(check_bus(box))
    locks = GpuLocks(lock_folder(box.data, "nvml"), ["GPU-0", "GPU-1"])
    assert locks.take()
    locks.release()


@pytest.mark.parametrize("source", [Cards(0), Cards(1), Simulated(4), None])
def test_without_two_real_gpus_there_is_nothing_to_measure(probing, tmp_path, source) -> None:
    (finding,) = check_bus(probing(source))
    assert finding.level == "note"
    assert finding.remedy
    assert not (tmp_path / "asked").exists()


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ("sys.exit('NCCL error: unhandled cuda error')", "NCCL error: unhandled cuda error"),
        ("print(1)", "not valid JSON"),
    ],
)
def test_a_failed_probe_is_reported_with_its_reason(probing, body, why) -> None:
    box = probing(Cards(2), body)
    (finding,) = check_bus(box)
    assert finding.level == "error"
    assert why in finding.sentence
    assert not box.data.box_file.exists()


def test_without_peer_access_the_bus_is_measured_through_host_memory(probing) -> None:
    body = "if 'NCCL_P2P_DISABLE' not in os.environ:\n    sys.exit('the exchange hung')\n"
    box = probing(Cards(2), body + f"print({json.dumps(FOUND)!r})")
    broken, bus = check_bus(box)
    assert (broken.level, bus.level) == ("warning", "ok")
    assert "the exchange hung" in broken.sentence
    speeds = read_box(box.data.box_file)
    assert speeds.peers_fail
    assert speeds.speeds("NVIDIA H100", "bf16", 3).is_measured
    # The check also notices when direct reads work again, and records that.
    tuple(check_bus(probing(Cards(2), f"print({json.dumps(FOUND)!r})")))
    assert not read_box(box.data.box_file).peers_fail


@pytest.mark.slow
def test_the_trainers_output_is_parsed() -> None:
    command = [sys.executable, "-m", "trainer", "probe", "--gpus", "cpu:2", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    answer = msgspec.json.decode(done.stdout.strip().rpartition("\n")[2], type=Probed)
    assert (answer.ranks, list(answer.pairs)) == (2, ["0-1"])
    assert answer.speeds.bus_bytes_per_s > 0
