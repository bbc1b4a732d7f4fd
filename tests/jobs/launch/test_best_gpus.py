from __future__ import annotations

import msgspec
import pytest

from sae_tui.jobs.launch.best_gpus import best_gpus
from trainer.contract.paths import DataDir
from trainer.contract.planning.check_job import Machine, MachineGpu
from trainer.contract.planning.gpu_vendors import VENDORS
from trainer.contract.planning.hardware import MeasuredHardware, Speeds
from trainer.contract.settings.job_file import parse_any

GIB = 2**30
FAST = MeasuredHardware()
for count in (1, 2, 3, 4, 8):
    FAST = FAST.with_measured("RTX 3090", "bf16", count, Speeds(5e13, 8e11, 1e13, 1e-6, is_measured=True))
LONG = {"train": {"batch_size": 4096, "n_tokens": 200_000_000}}


def gpu(index: int, total: float = 24, free: float | None = None, **fields) -> MachineGpu:
    left = total - 1 if free is None else free
    return MachineGpu(index, "RTX 3090", int(left * GIB), memory_total_bytes=int(total * GIB), **fields)


def best(gpus, tmp_path, *, several: bool = True, **sections):
    raw = {"data": {"source": "synthetic", "d_in": 512}, "sae": {"d_sae": 16384, "k": 32}} | sections
    job, problems = parse_any(raw)
    assert job, problems
    return best_gpus(job, Machine(tuple(gpus), 8, DataDir(tmp_path).root, speeds=FAST), several=several)


def test_a_short_job_gets_one_gpu_and_a_long_job_gets_every_gpu_that_saves_enough_time(tmp_path) -> None:
    four = [gpu(index) for index in range(4)]
    short = best(four, tmp_path, train={"batch_size": 4096, "n_tokens": 1_000_000})
    assert (short.gpus, short.setting) == ((0,), [0])
    assert short.why.startswith("1 GPU suffices; 2 GPUs would save ")
    long = best(four, tmp_path, **LONG)
    assert long.gpus == (0, 1, 2, 3)
    assert "4 GPUs take " in long.why
    assert best(four, tmp_path, several=False, **LONG).gpus == (0,)


def test_smaller_gpus_are_left_out_unless_the_job_needs_them(tmp_path) -> None:
    mixed = [gpu(0), gpu(1, 10), gpu(2), gpu(3, 10)]
    assert best(mixed, tmp_path, **LONG).gpus == (0, 2)
    huge = {"sae": {"d_sae": 1_500_000, "k": 32}, "train": {"batch_size": 1024, "n_steps": 100}}
    needed = best([gpu(0), gpu(1, 10), gpu(2, 10), gpu(3, 10)], tmp_path, **huge)
    assert needed.gpus == (0, 1, 2, 3)
    assert needed.why == "it needs the memory of 4 GPUs"
    assert best([gpu(0), gpu(1, 10), gpu(3, 10)], tmp_path, **LONG).gpus == (0,)
    assert best([gpu(0), gpu(1), gpu(2), gpu(3, 10)], tmp_path, **LONG).gpus == (0, 1, 2)


def test_busy_gpus_are_not_taken_and_the_job_waits_for_one_if_no_other_gpu_suffices(tmp_path) -> None:
    busy = {"free": 2, "busy": "used by mallory"}
    assert best([gpu(0, **busy), gpu(1), gpu(2), gpu(3, **busy)], tmp_path, **LONG).gpus == (1, 2)
    waits = best([gpu(0, **busy), gpu(1, **busy)], tmp_path, **LONG)
    assert (waits.gpus, waits.setting) == ((), "auto:1")
    assert "it waits for one" in waits.why
    assert best([gpu(0, unhealthy="lost")], tmp_path, **LONG) is None


def test_a_number_of_gpus_that_the_job_rules_out_is_never_chosen(tmp_path) -> None:
    four = [gpu(index) for index in range(3)]
    hybrid = best(four, tmp_path, **LONG, parallel={"mode": "hybrid", "latent_ranks": 3})
    assert len(hybrid.gpus) in (1, 3)
    assert best(four, tmp_path, **LONG, sae={"d_sae": 9_000_000, "k": 32}) is None


def test_gpus_from_different_vendors_are_never_combined(tmp_path) -> None:
    one, other = list(VENDORS)[:2]
    mixed = [gpu(0, vendor=one), gpu(1, vendor=other), gpu(2, vendor=one)]
    assert best(mixed, tmp_path, **LONG).gpus in ((0, 2), (1,))


def test_a_program_gets_one_gpu_with_the_memory_that_it_asks_for(tmp_path) -> None:
    command = {"kind": "command", "command": {"argv": ["true"], "memory": "15GiB"}}
    job, problems = parse_any(command)
    assert job, problems
    machine = Machine((gpu(0, 10), gpu(1), gpu(2)), 8, tmp_path)
    assert best_gpus(job, machine).gpus == (1,)
    assert (
        best_gpus(msgspec.structs.replace(job, launch=msgspec.structs.replace(job.launch, backend="slurm")), machine)
        is None
    )


@pytest.mark.parametrize("known", [True, False])
def test_gpus_with_unknown_memory_are_left_out(tmp_path, known) -> None:
    unknown = msgspec.structs.replace(gpu(0), memory_free_bytes=None, memory_total_bytes=None)
    found = best([unknown, *([gpu(1)] if known else [])], tmp_path, **LONG)
    assert (found and found.gpus) == ((1,) if known else None)
