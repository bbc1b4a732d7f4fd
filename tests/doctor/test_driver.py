from __future__ import annotations

import dataclasses
import threading

import pytest
from support.cards import Cards

from sae_tui.doctor.driver import check_driver, check_gpu_count, check_visible
from sae_tui.gpu.base import GpuFacts, GpuPair, GpuSample, SourceUnavailable
from sae_tui.gpu.simulated import Simulated


class Broken(Cards):
    def __init__(self) -> None:
        super().__init__(0)

    def open(self) -> int:
        raise SourceUnavailable("the NVIDIA driver is not loaded", "load it with `sudo modprobe nvidia`, or reboot")


def test_without_gpus_the_finding_says_that_jobs_run_on_the_cpu(sandbox) -> None:
    (finding,) = check_driver(sandbox.box(Broken()))
    assert finding.level == "note"
    assert finding.sentence == ("the NVIDIA driver is not loaded; no GPU was found, so jobs run on the CPU")
    assert "modprobe" in finding.remedy
    assert list(check_gpu_count(sandbox.box(Broken()))) == []


def test_gpus_on_the_bus_without_a_driver_are_an_error(sandbox) -> None:
    for place, vendor, kind in (("17:00.0", "0x10de", "0x030200"), ("17:00.1", "0x10de", "0x040300"),
                                ("65:00.0", "0x10de", "0x030000"), ("02:00.0", "0x1a03", "0x030000")):  # fmt: skip
        sandbox.file(f"sys/bus/pci/devices/0000:{place}/vendor", f"{vendor}\n")
        sandbox.file(f"sys/bus/pci/devices/0000:{place}/class", f"{kind}\n")
    (finding,) = check_driver(sandbox.box(Broken()))
    assert finding.level == "error"
    assert "although the PCI bus has 2 NVIDIA GPUs" in finding.sentence


def test_integrated_graphics_are_not_reported_as_gpus_without_a_driver(sandbox) -> None:
    for place, memory in (("05:00.0", 512 << 20), ("06:00.0", 16 << 30)):
        sandbox.file(f"sys/bus/pci/devices/0000:{place}/vendor", "0x1002\n")
        sandbox.file(f"sys/bus/pci/devices/0000:{place}/class", "0x030000\n")
        sandbox.file(f"sys/bus/pci/devices/0000:{place}/mem_info_vram_total", f"{memory}\n")
    (finding,) = check_driver(sandbox.box(Broken()))
    assert "although the PCI bus has 1 AMD GPU" in finding.sentence
    sandbox.file("sys/bus/pci/devices/0000:06:00.0/mem_info_vram_total", f"{1 << 30}\n")
    (finding,) = check_driver(sandbox.box(Broken()))
    assert finding.level == "note"


def test_a_working_driver_is_reported_with_its_cuda_version(sandbox) -> None:
    box = sandbox.box(Cards(8, GpuFacts(driver="570.172.08", cuda=(12, 8))))
    (driver,) = check_driver(box)
    assert (driver.level, driver.sentence) == ("ok", "NVIDIA driver 570.172.08, for CUDA up to 12.8; 8 GPUs")
    (gpus,) = check_gpu_count(box)
    assert gpus.sentence == "8 GPUs can be read: H100"


def test_a_lost_gpu_is_a_separate_error(sandbox) -> None:
    lost, rest = check_gpu_count(sandbox.box(Simulated(4, faults={2: "lost"})))
    assert (lost.level, lost.subject) == ("error", "GPU 2")
    assert "fallen off the bus" in lost.sentence
    assert rest.sentence.startswith("3 GPUs can be read")


def test_a_gpu_split_by_mig_is_a_note(sandbox) -> None:
    class Split(Cards):
        def sample(self, index: int, *, processes: bool) -> GpuSample:
            return dataclasses.replace(super().sample(index, processes=processes), unusable="it is split")

    split, _ = check_gpu_count(sandbox.box(Split(1)))
    assert (split.level, split.subject, split.sentence) == ("note", "GPU 0", "NVIDIA H100: it is split")
    assert split.remedy == "`nvidia-smi -mig 0` makes it one GPU again, when it is idle"
    of_amd = Split(1)
    of_amd.name = "amdsmi"
    assert next(check_gpu_count(sandbox.box(of_amd))).remedy == ""


@pytest.mark.parametrize(
    ("environ", "level", "said"),
    [
        ({"CUDA_VISIBLE_DEVICES": ""}, "warning", 'CUDA_VISIBLE_DEVICES="" hides all 4 GPUs'),
        ({"CUDA_VISIBLE_DEVICES": "2"}, "note", "the app numbers GPUs as nvidia-smi does"),
        ({"CUDA_VISIBLE_DEVICES": "2", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}, "note", "because of CUDA_VISIBLE_DEVICES=2"),
        ({"CUDA_VISIBLE_DEVICES": "GPU-2"}, "note", "1 of 4 GPUs are visible, because of CUDA_VISIBLE_DEVICES=GPU-2"),
    ],
)
def test_gpus_hidden_by_the_environment_are_reported(sandbox, environ, level, said) -> None:
    box = sandbox.box(Cards(4, GpuFacts(pairs=(GpuPair(0, 1), GpuPair(2, 3)))), **environ)
    (finding,) = check_visible(box)
    assert finding.level == level
    assert said in finding.sentence
    assert ("fastest" in finding.sentence) == (environ == {"CUDA_VISIBLE_DEVICES": "2"})
    assert box.gpus.facts.pairs == ()
    assert len(box.gpus.samples) == (1 if "2" in environ["CUDA_VISIBLE_DEVICES"] else 0)


def test_an_environment_that_hides_nothing_produces_no_finding(sandbox) -> None:
    assert list(check_visible(sandbox.box(Cards(4)))) == []
    assert list(check_visible(sandbox.box(Simulated(4), CUDA_VISIBLE_DEVICES="1"))) == []


def test_simulated_gpus_are_reported_as_simulated(sandbox) -> None:
    (finding,) = check_driver(sandbox.box(Simulated(4)))
    assert finding.level == "note"
    assert "simulated" in finding.sentence


def test_a_hanging_driver_is_reported_after_a_timeout(sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    released = threading.Event()

    class Hanging(Cards):
        def open(self) -> int:
            released.wait()
            return 0

    monkeypatch.setattr("sae_tui.doctor.base.GPU_LIMIT_S", 0.05)
    (finding,) = check_driver(sandbox.box(Hanging(0)))
    released.set()
    assert "did not respond within 0.05 s" in finding.sentence
