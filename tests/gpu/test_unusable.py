"""Tests for GPUs that must not be used, and for GPUs that share the host's memory."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.driver import environment

from sae_tui.cli_commands.gpus import show_gpu_table
from sae_tui.gpu import nvml_memory
from sae_tui.gpu.aggregate import aggregate
from sae_tui.gpu.base import Condition, GpuProcess, GpuSample
from sae_tui.gpu.nvml_faults import no_library
from sae_tui.jobs.gpus.availability import Holders, choices
from sae_tui.jobs.queue.gpu_reader import gpus
from sae_tui.panels.gpu_row import GpuRow, fold_withheld
from trainer.contract.machine_memory import machine_memory
from trainer.contract.store.rows import Job, Lease

GIB = 1 << 30


def _used(percent: int, used: int, total: int) -> dict[str, Any]:
    return {"utilization": percent, "memory_used_bytes": used, "memory_total_bytes": total}


# Maps each driver fault to the reason why the GPU is not offered, or to "" if it is offered.
FAULTS = {
    "cmode=2": "compute mode forbids all programs",
    "pending": "rows of its memory are waiting to be replaced",
    "failed_rows": "a row of its memory could not be replaced",
    "pages,{index}:no_rows": "rows of its memory are waiting to be replaced",
    "ecc=7": "7 uncorrected memory errors",
    "xid=79": "Xid 79",
    "xid=95": "Xid 95",
    "recovery=1": "the driver reports that the GPU needs a reset",
    "recovery=2": "needs a reboot of the machine",
    "recovery=4,{index}:recovery_type=3": "needs its programs to exit, and then a reset",
    "recovery=7,{index}:idle": "needs a reboot of the machine",
    "recovery=0": "",
    "recovery=4294967295": "",
    "recovery=4294967297,{index}:recovery_type=3": "",
    "recovery=1,{index}:recovery_type=0": "",
    "recovery=1,{index}:no_fields": "",
    "xid=31": "",
    "cmode=3": "",
    "idle": "",
}
CHOICES = """
import json
from sae_tui.gpu.nvml import Nvml
from sae_tui.gpu.nvml_faults import no_library
from sae_tui.jobs.gpus.availability import Holders, choices
nvml = Nvml()
samples = [nvml.sample(index, processes=True) for index in range(nvml.open())]
again = [nvml.sample(index, processes=False) for index in range(len(samples))]
print(json.dumps([[one.state, one.may_be_offered, one.reason] for one in choices(samples, Holders())]))
"""


def test_a_gpu_that_must_not_be_used_is_not_offered_and_the_reason_is_given(on_nvml: Callable[..., Any]) -> None:
    specs = [f"{index}:{fault.format(index=index)},{index}:idle" for index, fault in enumerate(FAULTS)]
    offered = on_nvml(CHOICES, FAULTS=",".join(specs), GPUS=len(FAULTS), PIDS="")
    for (fault, words), (state, may_be_offered, reason) in zip(FAULTS.items(), offered, strict=True):
        assert words in reason, fault
        assert (state, may_be_offered) == (("unhealthy", False) if words else ("available", True)), fault


@pytest.fixture
def commands(drivers: Path, tmp_path: Path) -> Callable[..., Any]:
    """Return a function that runs a command with the fake driver and returns its JSON output."""

    def run(*arguments: str, **variables: Any) -> Any:
        env = environment(drivers, PIDS="", **variables)
        env |= {"SAE_TUI_DATA_DIR": str(tmp_path / "data"), "SAE_TUI_LOCK_DIR": str(tmp_path / "locks")}
        command = [sys.executable, "-P", "-m", "sae_tui", "--gpu-source", "nvml", *arguments, "--json"]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
        return json.loads(done.stdout)

    return run


def test_select_returns_only_usable_gpus(commands: Callable[..., Any]) -> None:
    faults = "*:idle,0:cmode=2,1:ecc=1,2:pending"
    chosen = commands("select", "--count", "4", FAULTS=faults, GPUS=4)
    assert [one["index"] for one in chosen["gpus"]] == [3]
    assert "compute mode" in chosen["reasons"]["0"]


def test_a_gpu_without_its_own_memory_shows_the_hosts_memory_and_is_offered(commands: Callable[..., Any]) -> None:
    spark = {"NAME": "NVIDIA GB10", "FAULTS": "0:no_memory_info,0:idle", "GPUS": 1}
    (gpu,) = commands("gpus", **spark)
    assert gpu["memory_total"] == machine_memory().total_bytes
    assert 0 < gpu["memory_free"] <= gpu["memory_total"]
    assert (gpu["is_busy"], gpu["reason"]) == (False, "")
    assert [one["index"] for one in commands("select", **spark)["gpus"]] == [0]


@pytest.mark.parametrize(
    ("name", "is_integrated", "is_coherent"),
    [
        ("NVIDIA GB10", True, False),
        ("NVIDIA Thor", True, False),
        ("Orin (nvgpu)", True, False),
        ("NVIDIA GH200 480GB", False, True),
        ("NVIDIA GB200", False, True),
        ("NVIDIA H200", False, False),
        ("NVIDIA GeForce RTX 5090", False, False),
    ],
)
def test_chips_sharing_the_hosts_memory_are_recognised_by_name(
    name: str, is_integrated: bool, is_coherent: bool
) -> None:
    class Silent:
        NVMLError = OSError

    kind = nvml_memory.MemoryKind.of(Silent, object(), name, None)  # type: ignore[arg-type]
    assert (kind.is_integrated, kind.is_coherent) == (is_integrated, is_coherent)


def test_the_page_cache_in_a_gpus_memory_counts_as_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Memory:
        used, free, total = 70 * GIB, 26 * GIB, 96 * GIB

    (tmp_path / "node4").mkdir()
    (tmp_path / "node4" / "meminfo").write_text(
        f"Node 4 MemTotal: {96 << 20} kB\nNode 4 FilePages: {60 << 20} kB\nNode 4 Shmem: {1 << 20} kB\n"
    )
    monkeypatch.setattr(nvml_memory, "_NODES", tmp_path)
    kind = nvml_memory.MemoryKind("NVIDIA GH200 480GB", is_coherent=True, node=4)
    sample = GpuSample(0, "GPU-a", "GH200", 1.0, utilization=0, processes=(), **nvml_memory.sizes(Memory, kind))
    assert (sample.memory_used_bytes, sample.memory_free_bytes) == (11 * GIB, 85 * GIB)
    (choice,) = choices([sample], Holders())
    assert choice.may_be_offered
    unknown_node = replace(sample, **nvml_memory.sizes(Memory, kind._replace(node=None)))
    assert choices([unknown_node], Holders())[0].may_be_offered
    working = replace(unknown_node, utilization=80)
    assert choices([working], Holders())[0].state == "busy"


def test_an_exclusive_gpu_is_busy_with_even_the_smallest_process_and_never_shared() -> None:
    alone = Condition(compute_mode="one process")
    small = GpuProcess(1 << 21, "mallory", "python", 10 << 20)
    sample = GpuSample(0, "GPU-a", "H200", 1.0, **_used(0, 1 * GIB, 80 * GIB), processes=(small,), condition=alone)
    (taken,) = choices([sample], Holders())
    assert taken.state == "busy"
    assert "allows one process at a time" in taken.reason
    (idle,) = choices([replace(sample, processes=())], Holders())
    assert idle.may_be_offered
    job = Job(
        id=2, name="b", config="", user="me", host="here", device="cuda", gpu_source="nvml", any_gpus=True,
        shares_gpus=True, card_memory_bytes=GIB,
    )  # fmt: skip
    lease = Lease(
        gpu_uuid="GPU-a", gpu_index=0, job_id=1, host="here", user="me", pid=1, since=0.0, shared=True, memory_bytes=GIB
    )
    shared = replace(sample, processes=())
    for mode, may_share in (("one process", False), ("shared", True)):
        (gpu,) = gpus([replace(shared, condition=Condition(compute_mode=mode))], Holders(), [lease], {})
        assert gpu.takes_now(job) is may_share


def test_on_a_machine_with_unsupported_gpus_the_supported_vendors_are_listed(tmp_path: Path) -> None:
    assert "install the NVIDIA driver" in no_library(tmp_path).remedy
    device = tmp_path / "card0" / "device"
    device.mkdir(parents=True)
    (device / "vendor").write_text("0x8086\n")
    error = no_library(tmp_path)
    assert error.remedy == "the GPU here is made by Intel; only NVIDIA and AMD GPUs are supported"
    assert not error.is_broken
    (tmp_path / "card1" / "device").mkdir(parents=True)
    (tmp_path / "card1" / "device" / "vendor").write_text("0x10de\n")
    assert "install the NVIDIA driver" in no_library(tmp_path).remedy


def test_gpus_reserved_for_other_users_share_one_row_at_the_end() -> None:
    blocked = {"healthy": False, "withheld": True, "reason": "the operating system blocks this GPU"}
    samples = [GpuSample(i, f"GPU-{i}", "H200", 1.0, **(blocked if i in (0, 2, 3) else {})) for i in range(5)]
    rows = fold_withheld([GpuRow(sample, "", "dim", lambda name, n: []) for sample in samples])
    assert [row.sample.index for row in rows] == [1, 4, 0]
    assert rows[-1].fault == ("– GPUs 0, 2-3: the operating system blocks this GPU", "dim")


@pytest.mark.parametrize(("shown", "words"), [([0], "0 "), ([1], "1 "), ([0, 1, 2], "GPUs 0, 2: blocked")])
def test_a_table_of_gpus_groups_reserved_gpus_in_one_row(
    shown: list[int], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    fields = ("name", "utilization", "memory_used", "memory_total", "temperature", "power_draw")
    rows = [dict.fromkeys(fields) | {"index": i, "reason": "" if i == 1 else "blocked"} for i in shown]
    show_gpu_table(rows, withheld=[0, 2])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == (2 if len(shown) == 1 else 3)
    assert lines[-1].lstrip().startswith(words)


def test_unknown_throttle_reasons_are_shown_as_bits(on_nvml: Callable[..., Any]) -> None:
    script = """
import json
from sae_tui.gpu.nvml import Nvml
nvml = Nvml()
print(json.dumps([nvml.sample(index, processes=True).condition.slowed_by for index in range(nvml.open())]))
"""
    unknown, mixed, idle = on_nvml(script, GPUS=3, FAULTS="0:thr=1024,1:thr=1028,2:thr=1", PIDS="")
    assert unknown == ["for an unknown reason (0x400)"]
    assert mixed == ["power limit reached", "for an unknown reason (0x400)"]
    assert idle == []


def test_full_utilisation_without_a_process_is_stale_and_excluded_from_the_mean() -> None:
    idle = GpuSample(0, "GPU-a", "RTX 5090", 1.0, **_used(100, 10 << 20, 32 * GIB), processes=())
    busy = replace(idle, utilization=40, processes=(GpuProcess(1 << 21, "mallory", "python", 5 * GIB),))
    (choice, _) = choices([idle, busy], Holders())
    assert choice.may_be_offered
    assert "is stale until a program uses CUDA" in choice.reason
    assert aggregate([idle, busy]).average_utilization == 40
    # A reading is excluded from the mean only if the GPU is certainly not in use.
    for one in (
        replace(idle, processes=None),
        replace(idle, memory_used_bytes=2 * GIB),
        replace(idle, memory_used_bytes=None),
    ):
        assert aggregate([one, busy]).average_utilization == 70


def test_the_list_of_choices_explains_a_stale_reading_from_the_driver(on_nvml: Callable[..., Any]) -> None:
    (latched,) = on_nvml(CHOICES, FAULTS="0:latched", GPUS=1, PIDS="")
    assert latched[:2] == ["available", True]
    assert "is stale until a program uses CUDA" in latched[2]
