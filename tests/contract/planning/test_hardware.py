from __future__ import annotations

import stat
from pathlib import Path

import msgspec
import pytest

from trainer.contract.planning.hardware import CPU, MeasuredHardware, Speeds, assumed_speeds, read_box, write_box

FOUND = Speeds(2e12, 3e11, 4e10, 5e-5, is_measured=True)


def test_measured_speeds_are_stored_and_read_back(tmp_path: Path) -> None:
    file = tmp_path / "box.json"
    write_box(file, read_box(file).with_measured("NVIDIA H200", "bf16", 4, FOUND))
    write_box(file, read_box(file).with_measured("NVIDIA H200", "fp32", 1, FOUND))
    box = read_box(file)
    assert box.speeds("NVIDIA H200", "bf16", 4) == FOUND
    assert box.speeds("NVIDIA H200", "bf16", 1).is_measured
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_the_bus_speed_is_assumed_for_an_unmeasured_number_of_gpus() -> None:
    box = MeasuredHardware().with_measured("NVIDIA H200", "bf16", 4, FOUND)
    two = box.speeds("NVIDIA H200", "bf16", 2)
    assert (two.flops_per_s, two.is_measured) == (FOUND.flops_per_s, False)
    assert two.bus_bytes_per_s == assumed_speeds("NVIDIA H200", "bf16").bus_bytes_per_s


@pytest.mark.parametrize("content", [None, b"", b"{", b'{"cards": 3}'])
def test_a_missing_or_damaged_file_counts_as_a_file_without_measurements(content: bytes | None, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "box.json").write_bytes(content)
    assert read_box(tmp_path / "box.json") == MeasuredHardware()


def test_storing_measured_speeds_in_a_missing_folder_raises_no_error(tmp_path: Path) -> None:
    write_box(tmp_path / "nowhere" / "box.json", MeasuredHardware())
    assert not list(tmp_path.iterdir())


def test_gpus_are_recognised_by_name() -> None:
    h200, geforce, unknown = (assumed_speeds(name, "bf16") for name in ("NVIDIA H200", "NVIDIA GeForce RTX 3090", "X"))
    assert h200.bus_bytes_per_s > geforce.bus_bytes_per_s
    assert h200.flops_per_s > unknown.flops_per_s > assumed_speeds(CPU, "fp32").flops_per_s


def test_the_link_between_nodes_is_stored_with_the_bus_inside_a_node() -> None:
    found = msgspec.structs.replace(FOUND, nodes=2, node_bytes_per_s=5e9, node_latency_s=1e-4)
    box = MeasuredHardware().with_measured("NVIDIA H100", "bf16", 16, found)
    assert box.speeds("NVIDIA H100", "bf16", 16, nodes=2) == found
    assert box.speeds("NVIDIA H100", "bf16", 8) == FOUND
    assert (
        not MeasuredHardware()
        .with_measured("NVIDIA H100", "bf16", 8, FOUND)
        .speeds("NVIDIA H100", "bf16", 16, nodes=2)
        .is_measured
    )
