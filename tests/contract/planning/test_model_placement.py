"""Tests for choosing which GPUs run the language model during training."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trainer.contract.planning import memory
from trainer.contract.planning.check_job import Machine, MachineGpu, check, wanted_devices, wanted_ranks
from trainer.contract.planning.forecast import DeviceMemory
from trainer.contract.planning.hardware import Bus, DeviceSpeeds, MeasuredHardware, assumed_speeds
from trainer.contract.planning.model_placement import (
    ModelPlacement,
    counts_that_work,
    place_model,
    refusal_of_model_gpus,
)
from trainer.contract.planning.outlook import outlook
from trainer.contract.planning.step_time import source_s, step_time, text_parts
from trainer.contract.planning.workload import Layout, Workload, ranks_of, steps_of, with_model_gpus
from trainer.contract.settings.job import JobConfig
from trainer.contract.settings.job_file import parse_job

GIB = 2**30
WIDTH = 3584
RTX_3090 = "NVIDIA GeForce RTX 3090"
H100 = "NVIDIA H100 80GB HBM3"
Make = Callable[..., JobConfig]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """Return a function that creates a job with a language model of the given size, stored as a sparse file."""
    (tmp_path / "text.txt").write_text("a cat sat")

    def make_job(n_parameters: float = 10.5e9, gpus: str = "auto:8", d_sae: int = 65536, **sections: Any) -> JobConfig:
        model = tmp_path / f"model-{n_parameters:.0f}"
        model.mkdir(exist_ok=True)
        config = {"hidden_size": WIDTH, "num_hidden_layers": 40, "dtype": "bfloat16"}
        (model / "config.json").write_text(json.dumps(config))
        (model / "pytorch_model.bin").touch()
        # The weight file is sparse, so it takes up no disk space.
        os.truncate(model / "pytorch_model.bin", 2 * int(n_parameters))
        data = {"source": "model", "model": str(model), "hook": "resid_post.20", "text": str(tmp_path / "text.txt")}
        table = {"data": data | sections.pop("data", {}), "sae": {"d_sae": d_sae, "k": 64}}
        train = {"precision": "bf16", "n_tokens": 10**8} | sections.pop("train", {})
        launch = {"gpus": gpus} | sections.pop("launch", {})
        job, problems = parse_job(table | {"train": train, "launch": launch} | sections)
        assert job, problems
        return job

    return make_job


def place(job: JobConfig, name: str = RTX_3090, box: MeasuredHardware | None = None, **options: Any) -> ModelPlacement:
    return place_model(job, job.data_shape(), wanted_devices(job), name, box or MeasuredHardware(), **options)


@pytest.mark.parametrize(("devices", "counts"), [(1, []), (2, [1]), (3, [2]), (4, [2, 3]), (8, [4, 6, 7])])
def test_each_training_gpu_has_the_same_number_of_model_gpus(devices: int, counts: list[int]) -> None:
    assert counts_that_work(devices) == counts


@pytest.mark.parametrize(
    ("gpus", "asked", "changes", "told"),
    [
        (
            "auto:8",
            3,
            {},
            "with 8 GPUs, only 4, 6 and 7 work, not 3: each training GPU needs the same number of model GPUs",
        ),
        (
            "auto:4",
            4,
            {},
            "with 4 GPUs, only 2 and 3 work, not 4: each training GPU needs the same number of model GPUs",
        ),
        ("auto:3", 1, {}, "with 3 GPUs, only 2 works, not 1: each training GPU needs the same number of model GPUs"),
        ("auto:2", 2, {}, "with 2 GPUs, only 1 works, not 2: each training GPU needs the same number of model GPUs"),
        ("auto", 1, {}, '1 GPU cannot reserve 1 for the model; use 0 or "auto", or set launch.gpus to at least 2 GPUs'),
        ("cpu:4", 2, {}, '2 separate GPUs for the model are not possible with launch.gpus = "cpu:4"; use 0 or "auto"'),
        ("auto:4", 2, {"launch": {"backend": "slurm"}}, "are not possible with launch.backend"),
        ("auto:4", 2, {"parallel": {"mode": "dp"}}, "are not possible with parallel.mode"),
        ("auto:4", 2, {}, ""),
        ("auto:4", 0, {}, ""),
        ("cpu:4", "auto", {}, ""),
    ],
)
def test_the_error_for_an_impossible_number_of_model_gpus_lists_the_possible_numbers(
    gpus: str, asked: Any, changes: dict[str, Any], told: str, make: Make
) -> None:
    job = make(gpus=gpus, data={"model_gpus": asked}, **changes)
    refusal = refusal_of_model_gpus(job, wanted_devices(job))
    assert told in refusal
    assert bool(told) == bool(refusal)
    machine = Machine(tuple(MachineGpu(index, RTX_3090, 80 * GIB) for index in range(8)), 8, Path("/"))
    problems = [problem for problem in check(job, machine) if problem.path == "data.model_gpus"]
    assert [problem.message for problem in problems] == ([refusal] if refusal else [])


def test_a_language_model_that_does_not_fit_next_to_an_sae_gets_its_own_gpus(make: Make) -> None:
    job, capacity = make(), DeviceMemory(24 * GIB, 24 * GIB)
    chosen = place(job, capacity=capacity)
    beside = place(with_model_gpus(job, 8, 0), capacity=capacity)
    assert beside.needs_bytes > 24 * GIB >= chosen.needs_bytes
    own = chosen.model_gpus
    assert own in (4, 6, 7)
    assert chosen.settled.work.ranks == 8 - own
    assert chosen.sentence == (
        f"the language model has {own} of 8 GPUs to itself: next to the SAE it would not fit into 24.0 GiB"
    )
    assert chosen.reader
    assert chosen.reader.total > 2 * 10.5e9
    # The training GPUs do not hold the language model.
    stored = memory.estimate(chosen.settled.held)
    assert stored.weights == stored.gradients
    assert chosen.needs_bytes == max(stored.total, chosen.reader.total)


def test_free_memory_takes_precedence_over_total_memory(make: Make) -> None:
    assert place(make(), capacity=DeviceMemory(24 * GIB, 80 * GIB)).model_gpus
    assert place(make(), H100, capacity=DeviceMemory(80 * GIB, 80 * GIB)).model_gpus == 0


def test_the_model_shares_the_training_gpus_unless_separate_ones_are_clearly_faster(make: Make) -> None:
    together = place(make(), H100, capacity=DeviceMemory(80 * GIB, 80 * GIB))
    assert together.model_gpus == 0
    assert together.reader is None
    assert together.sentence.startswith("the language model shares the training GPUs: with ")
    assert together.sentence.endswith(("× as long", "about the same time"))
    # With a slow bus, training on many GPUs is slow.
    fast = assumed_speeds(H100, "bf16")
    slow = {f"{H100} x{n}": Bus(5e8, 1e-3) for n in (2, 4, 8)}
    box = MeasuredHardware({H100: DeviceSpeeds({"bf16": fast.flops_per_s}, fast.memory_bytes_per_s)}, slow)
    apart = place(make(d_sae=16384), H100, box, capacity=DeviceMemory(80 * GIB, 80 * GIB))
    assert apart.model_gpus == 7
    assert "to itself: next to the SAE a step would take " in apart.sentence
    beside = place(with_model_gpus(make(d_sae=16384), 8, 0), H100, box, capacity=DeviceMemory(80 * GIB, 80 * GIB))
    assert beside.settled.time.total_s >= 1.1 * apart.settled.time.total_s


def test_if_no_placement_fits_the_one_needing_the_least_memory_is_chosen_with_a_reason(make: Make) -> None:
    chosen = place(make(), capacity=DeviceMemory(8 * GIB, 8 * GIB))
    assert "needs the least memory" in chosen.why
    assert chosen.needs_bytes <= place(with_model_gpus(make(), 8, 0)).needs_bytes


@pytest.mark.parametrize(
    "changes",
    [
        {"gpus": "auto"},
        {"gpus": "cpu:8"},
        {"launch": {"backend": "slurm"}},
        {"parallel": {"mode": "dp"}},
        {"parallel": {"mode": "ddp", "shares": "1:1:1:1:1:1:1:2"}},
        {"data": {"model_gpus": 0}},
    ],
)
def test_no_placement_is_computed_if_only_one_is_possible(changes: dict[str, Any], make: Make) -> None:
    chosen = place(make(**changes), capacity=DeviceMemory(24 * GIB, 24 * GIB))
    assert (chosen.model_gpus, chosen.why) == (0, "")


def test_groups_of_ranks_that_share_latents_stay_complete(make: Make) -> None:
    job = make(parallel={"mode": "hybrid", "latent_ranks": 2})
    assert place(job, capacity=DeviceMemory(24 * GIB, 24 * GIB)).model_gpus in (4, 6)


def test_a_resumed_run_keeps_its_number_of_ranks_if_possible(make: Make) -> None:
    capacity = DeviceMemory(24 * GIB, 24 * GIB)
    for ranks, own in ((8, 0), (4, 4), (2, 6), (1, 7)):
        again = place(make(), capacity=capacity, ranks_before=ranks)
        assert (again.model_gpus, again.why) == (own, "as before, since each rank has read its own part of the text")
    assert place(make(), capacity=capacity, ranks_before=3).model_gpus == place(make(), capacity=capacity).model_gpus
    assert place(make(data={"model_gpus": 6}), capacity=capacity, ranks_before=4).model_gpus == 6


@pytest.mark.parametrize("mode", ["auto", "ddp", "tensor"])
def test_an_automatic_placement_does_not_change_the_size_of_a_step(mode: str, make: Make) -> None:
    job = make(parallel={"mode": mode})
    plain = Layout(job, 8)
    assert ranks_of(job, 8) == 8
    for own in (0, 4, 6, 7):
        placed = with_model_gpus(job, 8, own)
        layout = Layout(placed, 8 - own)
        assert (layout.tokens_per_step, layout.total_steps) == (plain.tokens_per_step, plain.total_steps)
        assert layout.model_gpus == own
        assert layout.total_steps == steps_of(job, 8)


def test_with_a_given_number_of_model_gpus_all_other_gpus_become_ranks(make: Make) -> None:
    job = make(data={"model_gpus": 6})
    assert (wanted_devices(job), wanted_ranks(job)) == (8, 2)
    chosen = place(job)
    assert (chosen.model_gpus, chosen.devices, chosen.settled.work.ranks) == (6, 8, 2)
    assert chosen.settled.work.tokens_per_step == 2 * 4096
    assert steps_of(job, 8) == Layout(job, 2).total_steps


def test_a_step_takes_as_long_as_reading_or_training_whichever_is_slower(make: Make) -> None:
    speeds = assumed_speeds(H100, "bf16")
    for n_parameters, reads_longer in ((10.5e9, True), (1e8, False)):
        job = make(n_parameters, parallel={"mode": "ddp"})
        apart = Workload(with_model_gpus(job, 8, 4), 4, job.data_shape(), H100)
        reading, training = source_s(apart, speeds), step_time(apart, speeds)
        together = Workload(with_model_gpus(job, 8, 0), 4, job.data_shape(), H100)
        same_step = together.with_settings("train", global_batch_size=apart.tokens_per_step)
        alone = step_time(same_step, speeds).total_s - source_s(same_step, speeds)
        assert text_parts(apart) == 4
        assert training.total_s == pytest.approx(max(reading, alone))
        assert (reading > alone) == reads_longer


def test_the_memory_check_uses_whichever_of_training_and_model_gpus_needs_more(make: Make) -> None:
    job = make(gpus="auto:2", data={"model_gpus": 1}, d_sae=4096)
    gpus = [MachineGpu(index, RTX_3090, 16 * GIB, memory_total_bytes=16 * GIB) for index in range(2)]
    look = outlook(job, job.data_shape(), 2, gpus)
    assert look.placed
    assert look.placed.reader
    assert (look.devices, look.ranks, look.fullest) == (2, 1, look.placed.reader)
    assert look.needs_bytes == look.placed.reader.total > look.settled.needs_bytes
    (problem,) = look.problems(job)
    assert problem.path == "data.model"
    assert problem.message.endswith("lower data.batch_tokens, or choose a smaller model or larger GPUs")
    assert look.remedies(16 * GIB) == []
