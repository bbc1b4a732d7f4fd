"""Tests that the trainer finds GPUs through PyTorch and numbers them as nvidia-smi does."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import pytest

from trainer.contract.errors import JobFileError, UsageError
from trainer.contract.planning.gpu_vendors import VENDORS
from trainer.ranks import device_choice, devices
from trainer.ranks.device_choice import chosen, parse_target, refuse_bad
from trainer.ranks.devices import Device, numbered, torch_vendor, uuid_of, uuids_on_the_bus, visible_gpus

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
def test_a_gpu_keeps_its_index_when_other_gpus_are_hidden(uuids, on_the_bus, visible, indices):
    assert [device.index for device in numbered(listed(*uuids), on_the_bus, VENDORS["nvml"], visible)] == indices


def test_visible_gpus_keep_their_indices_in_a_shell_that_hides_other_gpus(tmp_path: Path, monkeypatch):
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


def test_the_serial_number_in_a_rocm_uuid_is_decoded(tmp_path: Path):
    """Check the decoding: ROCm stores the digits as ASCII bytes, which PyTorch prints in hex."""
    shown = "39663361-3563-3030-6431-653266306130"
    assert uuid_of(shown, "GPU-") == "GPU-9f3a5c00d1e2f0a0"
    nvidia = "ffc79498-8ff3-c2dc-3b0d-fafd804516ae"
    assert uuid_of(nvidia, "GPU-") == f"GPU-{nvidia}"
    assert uuid_of("58580000-0000-0000-0000-000000000000", "GPU-") == "GPU-58580000-0000-0000-0000-000000000000"


def test_gpus_from_every_vendor_are_listed_in_bus_order(tmp_path: Path):
    files = {
        "proc/driver/nvidia/gpus/0000:41:00.0/information": "Model: H100\nGPU UUID: \t GPU-b\n",
        "proc/driver/nvidia/gpus/0000:01:00.0/information": "Model: H100\nGPU UUID: \t GPU-a\n",
        "sys/bus/pci/drivers/amdgpu/0000:2c:00.0/unique_id": "9f3a5c00d1e2f0a1\n",
        "sys/bus/pci/drivers/amdgpu/0000:0c:00.0/unique_id": "9F3A5C00D1E2F0A0\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text(text)
    assert uuids_on_the_bus(VENDORS["nvml"], tmp_path) == ["GPU-a", "GPU-b"]
    assert uuids_on_the_bus(VENDORS["amdsmi"], tmp_path) == ["GPU-9f3a5c00d1e2f0a0", "GPU-9f3a5c00d1e2f0a1"]


def test_the_vendor_is_the_one_that_pytorch_was_built_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name in ("nvml", "amdsmi"):
        monkeypatch.setitem(VENDORS, name, msgspec.structs.replace(VENDORS[name], driver_files=("/",)))
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    for line, vendor in (("cuda = None\nhip = '6.4'", "amdsmi"), ("cuda = '12.8'\nhip = None", "nvml")):
        monkeypatch.delitem(sys.modules, "torch", raising=False)
        (tmp_path / "torch" / "version.py").write_text(f"__version__ = '2.9'\n{line}\n")
        assert torch_vendor() == vendor


WHOLE, OTHER, SLICE = Device(0, "GPU-a", "H200", 1), Device(1, "GPU-b", "H200", 1), Device(2, "MIG-c", "H200 MIG", 1)


@pytest.mark.parametrize(
    ("asked", "there", "uuids"),
    [
        ("auto", [WHOLE, OTHER, SLICE], ("GPU-a", "GPU-b")),
        ("auto:2", [WHOLE, SLICE, OTHER], ("GPU-a", "GPU-b")),
        ("auto:1", [SLICE, WHOLE], ("MIG-c",)),
        ("auto", [SLICE], ("MIG-c",)),
        ("2", [WHOLE, OTHER, SLICE], ("MIG-c",)),
    ],
)
def test_several_chosen_gpus_never_include_a_mig_slice(asked, there, uuids, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(device_choice, "visible_gpus", lambda: there)
    assert parse_target(asked) == (len(uuids), uuids)


def test_measuring_a_mig_slice_with_another_gpu_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(device_choice, "visible_gpus", lambda: [WHOLE, OTHER, SLICE])
    with pytest.raises(UsageError, match="--gpus: GPU 2 is a MIG slice, and NCCL cannot connect slices"):
        parse_target("0,2")


def test_a_foreground_job_on_several_gpus_uses_no_mig_slice(make_job, tmp_path: Path):
    there = [WHOLE, SLICE, OTHER]
    assert chosen(make_job(launch={"gpus": "auto:2"}), there) == [WHOLE, OTHER]
    assert chosen(make_job(launch={"gpus": "auto:1"}), [SLICE, WHOLE]) == [SLICE]
    for gpus in ("auto:2", [0, 2]):
        with pytest.raises(JobFileError, match="slice"):
            refuse_bad(make_job(launch={"gpus": gpus}), [WHOLE, SLICE], tmp_path, only="launch.")
