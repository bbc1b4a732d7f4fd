from __future__ import annotations

import json
from dataclasses import replace

import pytest
from support.cards import Cards

from sae_tui.doctor.self_test import check_training
from sae_tui.gpu.base import GpuSample, SourceUnavailable
from sae_tui.gpu.simulated import Simulated
from sae_tui.jobs.gpus.locks import ENV_LOCK_DIR, GpuLocks, lock_folder
from trainer.contract.planning import torch_build

FOUND = {"device": "NVIDIA H100", "ok": True, "checks": 214, "failed": [], "seconds": 118.4}


@pytest.fixture
def tested(sandbox, tmp_path, monkeypatch):
    """Return a function that creates a machine whose trainer prints the given result and records its arguments."""
    monkeypatch.setenv(ENV_LOCK_DIR, str(tmp_path / "locks"))
    package = tmp_path / "site" / "trainer"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()

    def box(source, **found):
        code = f"""import os, sys
visible = [os.environ.get(name, '-') for name in ('CUDA_VISIBLE_DEVICES', 'ROCR_VISIBLE_DEVICES')]
open({str(tmp_path / "asked")!r}, 'w').write(' '.join([*sys.argv[1:], *visible]))
print({json.dumps(FOUND | found)!r})
"""
        (package / "__main__.py").write_text(code)
        return sandbox.box(source, PYTHONPATH=str(package.parent))

    return box


def test_an_idle_gpu_is_tested_and_passes(tested, tmp_path) -> None:
    (finding,) = check_training(tested(Cards(3)))
    assert (finding.level, finding.sentence) == (
        "ok",
        "this machine trains correctly: 214 checks in 118 s on NVIDIA H100",
    )
    assert (tmp_path / "asked").read_text() == "self-test --gpus auto:1 --json GPU-0 -"


def test_failed_checks_are_named(tested) -> None:
    failed = [{"part": "curves", "name": f"topk {n}", "ok": False, "found": {}} for n in range(5)]
    (finding,) = check_training(tested(Cards(1), ok=False, failed=failed))
    assert finding.level == "error"
    assert finding.sentence == (
        "5 of 214 checks in 118 s on NVIDIA H100 are wrong: "
        "curves (topk 0), curves (topk 1), curves (topk 2) and 2 others"
    )


def test_a_leased_gpu_is_not_tested(tested, tmp_path) -> None:
    box = tested(Cards(1))
    box.data.create()
    locks = GpuLocks(lock_folder(box.data, box.gpus.source_name), ["GPU-0"])
    assert locks.take()
    (finding,) = check_training(box)
    locks.release()
    assert finding.level == "note"
    assert not (tmp_path / "asked").exists()


class Mixed(Cards):
    """One NVIDIA GPU and one AMD GPU, as a source for several vendors reports them."""

    def sample(self, index: int, *, processes: bool) -> GpuSample:
        return replace(super().sample(index, processes=processes), vendor=("nvml", "amdsmi")[index])


@pytest.mark.parametrize(
    ("runtime", "pinned"), [("cuda", ["GPU-0", "-"]), ("hip", ["-", "GPU-1"]), ("", ["GPU-0", "-"])]
)
def test_with_two_vendors_a_gpu_that_torch_can_use_is_tested(runtime, pinned, tested, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(torch_build, "installed_build", lambda: torch_build.Build("2.11", runtime))
    (finding,) = check_training(tested(Mixed(2)))
    assert finding.level == "ok"
    assert (tmp_path / "asked").read_text().split()[-2:] == pinned


def test_no_gpu_is_tested_if_all_gpus_that_torch_can_use_are_leased(tested, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(torch_build, "installed_build", lambda: torch_build.Build("2.11", "hip"))
    box = tested(Mixed(2))
    box.data.create()
    locks = GpuLocks(lock_folder(box.data, box.gpus.source_name), ["GPU-1"])
    assert locks.take()
    (finding,) = check_training(box)
    locks.release()
    assert finding.level == "note"
    assert not (tmp_path / "asked").exists()


def test_no_gpu_is_tested_if_all_are_hidden(tested) -> None:
    box = tested(Cards(2))
    box.environ = {**box.environ, "CUDA_VISIBLE_DEVICES": ""}
    (finding,) = check_training(box)
    assert (finding.level, finding.sentence) == ("note", "not run, since no GPU is idle")


class Unreachable(Cards):
    """A source that finds no driver."""

    def open(self) -> int:
        raise SourceUnavailable("no NVIDIA driver is loaded", "install it")


@pytest.mark.parametrize("source", [Unreachable(0), Cards(0)], ids=["no driver", "a driver without cards"])
def test_without_a_gpu_the_cpu_is_tested_and_the_finding_says_so(source, tested, tmp_path) -> None:
    (finding,) = check_training(tested(source, device="CPU"))
    assert (finding.level, finding.sentence) == (
        "ok", "there is no GPU, so the CPU was tested; this machine trains correctly: 214 checks in 118 s on CPU",
    )  # fmt: skip
    assert (tmp_path / "asked").read_text() == "self-test --gpus cpu --json - -"


def test_a_gpu_without_a_driver_is_not_treated_as_a_machine_without_a_gpu(tested, sandbox, tmp_path) -> None:
    sandbox.file("sys/bus/pci/devices/0000:01:00.0/vendor", "0x10de\n")
    sandbox.file("sys/bus/pci/devices/0000:01:00.0/class", "0x030200\n")
    (finding,) = check_training(tested(Unreachable(0)))
    assert (finding.level, finding.sentence) == ("note", "not run, since no GPU is idle")
    assert not (tmp_path / "asked").exists()


def test_with_simulated_gpus_the_cpu_is_tested(tested, tmp_path) -> None:
    (finding,) = check_training(tested(Simulated(), device="CPU"))
    assert finding.level == "ok"
    assert (tmp_path / "asked").read_text() == "self-test --gpus cpu --json - -"
