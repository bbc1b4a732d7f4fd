"""GPUs as the trainer finds them by PyTorch, under the numbers that nvidia-smi shows."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from trainer.contract.planning.gpu_vendors import VENDORS
from trainer.ranks import devices
from trainer.ranks.devices import Device, numbered, visible_gpus

BUS = ["GPU-a", "GPU-b", "GPU-c", "GPU-d"]


def listed(*uuids: str) -> list[Device]:
    return [Device(index, uuid, "H100", 80 << 30) for index, uuid in enumerate(uuids)]


@pytest.mark.parametrize(
    ("uuids", "on_the_bus", "visible", "indices"),
    [
        (BUS, BUS, None, [0, 1, 2, 3]),
        (["GPU-c", "GPU-b"], BUS, "GPU-c,GPU-b", [2, 1]),
        (["GPU-c", "GPU-b"], BUS, "2,1", [2, 1]),
        (["GPU-c", "GPU-b"], [], "2,1", [2, 1]),
        (["GPU-c", "GPU-b"], [], "GPU-c,GPU-b", [0, 1]),
        (["GPU-c", "GPU-b"], ["GPU-?", "GPU-?"], None, [0, 1]),
        ([], [], "", []),
    ],
)
def test_a_card_keeps_its_number_whatever_others_are_hidden(uuids, on_the_bus, visible, indices):
    assert [device.index for device in numbered(listed(*uuids), on_the_bus, VENDORS["nvml"], visible)] == indices


def test_a_shell_with_hidden_gpus_gives_the_others_by_their_own_numbers(tmp_path: Path, monkeypatch):
    (tmp_path / "torch.py").write_text("""
import os
from types import SimpleNamespace as Group
assert os.environ["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
shown = [int(entry) for entry in os.environ["CUDA_VISIBLE_DEVICES"].split(",")]
properties = lambda index: Group(uuid=f"card-{shown[index]}", name="H100", total_memory=1)
cuda = Group(device_count=lambda: len(shown), get_device_properties=properties)
""")
    monkeypatch.setitem(VENDORS, "nvml", msgspec.structs.replace(VENDORS["nvml"], driver_files=("/",)))
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{Path(devices.__file__).parents[2]}")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,3")
    assert [(gpu.index, gpu.uuid) for gpu in visible_gpus()] == [(5, "GPU-card-5"), (3, "GPU-card-3")]
