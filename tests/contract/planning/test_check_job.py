"""Tests that every reason why a job cannot run is reported before launch."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.workloads import workload

from trainer.contract.errors import Problem, errors
from trainer.contract.planning import memory
from trainer.contract.planning.check_job import Machine, MachineGpu, check, chosen_indices, wanted_ranks
from trainer.contract.settings.job import JobConfig

GIB = 2**30
N_TOKENS, D_IN = 20_000, 8


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """Return a machine with five GPUs: free, busy, broken, without a memory sensor, and nearly full."""
    gpus = (
        MachineGpu(0, "RTX 3090", 23 * GIB),
        MachineGpu(1, "RTX 3090", 20 * GIB, busy="python of bob, pid 12"),
        MachineGpu(2, "RTX 3090", None, unhealthy="GPU is lost"),
        MachineGpu(3, "MIG", None),
        MachineGpu(4, "RTX 3080", GIB // 4),
    )
    return Machine(gpus, cpu_count=2, output_root=tmp_path / "not" / "there" / "yet")


@pytest.fixture
def checked(
    machine: Machine, make_job: Callable[..., JobConfig], write_shard: Callable[..., Path]
) -> Callable[..., list[Problem]]:
    """Return a function that checks a job on a small shard and returns the problems."""
    path = str(write_shard(N_TOKENS, D_IN))

    def run(machine: Machine = machine, **sections: dict[str, Any]) -> list[Problem]:
        return check(make_job(**sections | {"data": {"path": path} | sections.get("data", {})}), machine)

    return run


SMALL = {"n_tokens": 40_000}  # two passes over the shards


@pytest.mark.parametrize("gpus", ["auto", "auto:2", "cpu", "cpu:2", [0], [0, 3]])
def test_a_job_that_fits_has_no_problems(checked: Callable[..., list[Problem]], gpus: Any) -> None:
    assert checked(train=SMALL, launch={"gpus": gpus}) == []


@pytest.mark.parametrize(
    ("sections", "path", "message", "severity"),
    [
        ({"launch": {"gpus": [9]}}, "launch.gpus", "there is no GPU 9 here; this machine has 0, 1, 2, 3, 4", "error"),
        ({"launch": {"gpus": [2]}}, "launch.gpus", "GPU 2 cannot be used: GPU is lost", "error"),
        ({"launch": {"gpus": [1]}}, "launch.gpus", "GPU 1 is busy: python of bob, pid 12", "warning"),
        ({"launch": {"gpus": [4]}}, "launch.gpus", "GPU 4 has 0.2 GiB free of 0.6 GiB needed; ", "warning"),
        (
            {"launch": {"gpus": "auto:5"}, "train": SMALL | {"batch_size": 64}},
            "launch.gpus",
            "asks for 5 GPUs, but this machine has 4 that can be used",
            "error",
        ),
        (
            {"launch": {"gpus": "cpu:3"}},
            "launch.gpus",
            "starts 3 processes on 2 cores; one process per core would be faster",
            "warning",
        ),
        (
            {"launch": {"gpus": [0, 3]}, "parallel": {"mode": "single"}},
            "parallel.mode",
            '"single" runs on one device, but launch.gpus asks for 2; use "ddp" or "auto"',
            "error",
        ),
        (
            {"launch": {"gpus": "cpu:2"}, "parallel": {"mode": "single"}},
            "parallel.mode",
            '"single" runs on one device, but launch.gpus asks for 2; use "ddp" or "auto"',
            "error",
        ),
        (
            {"launch": {"gpus": "cpu:2"}, "parallel": {"mode": "hybrid", "latent_ranks": 4}},
            "parallel.latent_ranks",
            "4 does not divide 2 ranks; use a divisor of 2",
            "error",
        ),
        (
            {"launch": {"gpus": "cpu:2"}, "parallel": {"mode": "tensor"}, "train": SMALL | {"optimizer": "muon"}},
            "train.optimizer",
            '"muon" needs whole matrices, but "tensor" splits them; use "adam" or "signum", or "ddp"',
            "error",
        ),
        (
            {"launch": {"gpus": "cpu:2"}, "parallel": {"shares": "3:2:1"}},
            "parallel.shares",
            '"3:2:1" is for 3 ranks, but launch.gpus asks for 2; give a number for each, or "auto"',
            "error",
        ),
        (
            {"launch": {"gpus": "cpu:2"}, "parallel": {"shares": "3:0"}},
            "parallel.shares",
            "each rank needs a share",
            "error",
        ),
        (
            {"launch": {"gpus": "cpu:2"}, "train": SMALL | {"global_batch_size": 1}},
            "train.global_batch_size",
            "1 tokens per step are too few for 2 ranks; use at least 2",
            "error",
        ),
        (
            {"launch": {"gpus": "cpu:2"}, "parallel": {"mode": "tensor"}, "sae": {"d_sae": 1, "k": 1}},
            "sae.d_sae",
            "1 latents cannot be split over 2 ranks; use at least 2",
            "error",
        ),
        ({"sae": {"k": 65}}, "sae.k", "must be at most the number of latents, 64, not 65", "error"),
        ({"sae": {"k": [8, 65]}}, "sae.k", "must be at most the number of latents, 64, not 65", "error"),
        ({"sae": {"k": 65, "d_sae": [64, 128]}}, "sae.k", "the number of latents, 64, not 65", "error"),
        (
            {"data": {"held_out_tokens": 20_000}},
            "data.held_out_tokens",
            "which has 20,000 tokens; usually, at most a 20th is held out",
            "error",
        ),
        (
            {"sae": {"normalize": "none"}},
            "sae.normalize",
            "assume a spread of about 1 per dimension",
            "warning",
        ),
        (
            {"sae": {"d_sae": 4, "k": 2}},
            "sae.d_sae",
            "4 latents for 8 dimensions is not overcomplete; expected at least 8",
            "warning",
        ),
        ({"sae": {"expansion_factor": 0.5, "k": 2}}, "sae.expansion_factor", "4 latents for 8 dimensions", "warning"),
        ({"train": {"n_tokens": 2_000_000}}, "train.n_tokens", "passes over 19,000 stored tokens", "warning"),
        ({"train": {"n_steps": 1000}}, "train.n_steps", "4,096,000 tokens are 216 passes", "warning"),
    ],
)
def test_each_reason_why_a_job_cannot_run_is_reported_as_one_problem(
    checked: Callable[..., list[Problem]], sections: dict[str, Any], path: str, message: str, severity: str
) -> None:
    (problem,) = checked(**{"train": SMALL, **sections})
    assert problem.path == path
    assert message in problem.message
    assert problem.severity == severity


@pytest.mark.parametrize(
    ("train", "gpus", "most"),
    [
        ({"batch_size": 19_001}, "auto", 19_000),
        ({"batch_size": 9_501}, "cpu:2", 9_500),
        ({"batch_size": 5_001, "accumulate": 2}, "cpu:2", 9_500),
        ({"batch_size": 1, "accumulate": 30_000}, "auto", 19_000),
    ],
)
def test_the_error_for_a_step_larger_than_the_data_names_the_largest_possible_size(
    checked: Callable[..., list[Problem]], train: dict[str, int], gpus: str, most: int
) -> None:
    (problem,) = checked(train=train, launch={"gpus": gpus})
    assert problem.path == "train.batch_size"
    cure = f"make batch_size × accumulate at most {most:,}"
    assert problem.message.endswith(f"has only 20,000, with about 1,000 held out; {cure}")
    ranks = int(gpus.partition(":")[2] or 1)
    assert checked(train={"batch_size": most, "n_tokens": 40_000}, launch={"gpus": gpus}) == []
    assert checked(train={"batch_size": most // ranks + 1, "accumulate": ranks}, launch={"gpus": gpus}) != []


def test_a_machine_without_gpus_accepts_auto(checked: Callable[..., list[Problem]], tmp_path: Path) -> None:
    bare = Machine((), cpu_count=2, output_root=tmp_path)
    assert checked(bare, train=SMALL) == []
    (problem,) = checked(bare, train=SMALL, launch={"gpus": [0]})
    assert problem.message == "there is no GPU 0 here; this machine has none"


@pytest.mark.parametrize(("ranks", "asked"), [(1, "1 GPU"), (2, "2 GPUs")])
def test_a_gpu_count_is_refused_on_a_machine_without_gpus(
    checked: Callable[..., list[Problem]], tmp_path: Path, ranks: int, asked: str
) -> None:
    (problem,) = checked(Machine((), cpu_count=2, output_root=tmp_path), train=SMALL, launch={"gpus": f"auto:{ranks}"})
    assert (problem.path, problem.severity) == ("launch.gpus", "error")
    assert problem.message == f'asks for {asked}, but this machine has none; use "cpu:{ranks}"'


@pytest.mark.parametrize(
    ("gpus", "message"),
    [
        ([2], ""),
        ([2, 3], "GPU 2 is a MIG slice, and NCCL cannot connect slices; name only one slice, or whole GPUs"),
        ([0, 3], "GPU 3 is a MIG slice, and NCCL cannot connect slices; name only one slice, or whole GPUs"),
        (
            "auto:2",
            "asks for 2 GPUs, but this machine has 1 that can be used; a MIG slice cannot be combined with other GPUs",
        ),
    ],
)
def test_a_training_job_uses_either_one_mig_slice_or_only_whole_gpus(
    checked: Callable[..., list[Problem]], machine: Machine, gpus: Any, message: str
) -> None:
    cut = tuple(MachineGpu(index, "H200 MIG 3g.71gb", 70 * GIB, is_slice=True) for index in (2, 3))
    split = MachineGpu(1, "H200", None, unhealthy="it is split into MIG slices")
    box = msgspec.structs.replace(machine, gpus=(MachineGpu(0, "H200", 140 * GIB), split, *cut))
    problems = checked(box, train=SMALL, launch={"gpus": gpus})
    assert [(one.path, one.message) for one in problems] == ([("launch.gpus", message)] if message else [])


def test_a_full_disk_is_reported_as_an_error(checked: Callable[..., list[Problem]]) -> None:
    problems = checked(train=SMALL, sae={"d_sae": 10**13})
    (disk_problem,) = [problem for problem in problems if problem.path == "--data-dir"]
    # The SAE has 17e13 parameters, including the encoder's bias. Each of the four checkpoints takes 8 bytes per
    # parameter, and the exported SAE takes 4.
    assert f"the checkpoints and the SAE need about {36 * 17e13 / GIB:,.1f} GiB" in disk_problem.message
    assert disk_problem in errors(problems)


def test_all_problems_are_reported_at_once(checked: Callable[..., list[Problem]]) -> None:
    problems = checked(
        launch={"gpus": [1, 2, 9]}, parallel={"mode": "single"}, sae={"k": 99}, train={"batch_size": 10**6}
    )
    assert [problem.path for problem in problems] == [
        "launch.gpus",
        "launch.gpus",
        "launch.gpus",
        "parallel.mode",
        "sae.k",
        "train.batch_size",
    ]
    assert len(errors(problems)) == 5


def test_devices_are_checked_even_if_the_data_is_missing(machine: Machine, make_job: Callable[..., JobConfig]) -> None:
    problems = check(make_job(data={"path": "/nowhere"}, launch={"gpus": [9]}), machine)
    assert [problem.path for problem in problems] == ["data.path", "launch.gpus"]


def test_the_memory_estimate_includes_all_saes_in_a_sweep(
    checked: Callable[..., list[Problem]], make_job: Callable[..., JobConfig], tmp_path: Path
) -> None:
    # Deterministic mode disables CUDA graphs, which take extra memory in a single-SAE run but not in a sweep.
    sae, alone = {"d_sae": 100_000}, SMALL | {"batch_size": 64, "deterministic": True}
    enough = memory.estimate(workload(make_job(sae=sae, train=alone), D_IN, 1)).total + 1
    machine = Machine((MachineGpu(0, "RTX 3090", enough),), cpu_count=2, output_root=tmp_path)
    assert checked(machine, sae=sae, train=alone, launch={"gpus": [0]}) == []
    (problem,) = checked(machine, sae=sae, train=alone | {"seed": [0, 1]}, launch={"gpus": [0]})
    assert (problem.path, problem.severity) == ("launch.gpus", "warning")
    assert "lower train.batch_size or sae.d_sae, use a smaller sweep, or choose other GPUs" in problem.message


def test_duplicate_rows_are_refused_in_one_sentence(
    make_job: Callable[..., JobConfig], machine: Machine, write_shard: Callable[..., Path], tmp_path: Path
) -> None:
    first = write_shard(N_TOKENS, D_IN)
    linked, copied = tmp_path / "linked", tmp_path / "copied"
    for folder in (linked, copied):
        folder.mkdir()
    shard = next(first.glob("*.safetensors"))
    os.link(shard, linked / "other.safetensors")
    shutil.copy(shard, copied / shard.name)
    (tmp_path / "symbolic").symlink_to(first)
    for folder in (first, copied):
        (folder / "meta.json").write_text(json.dumps({"shards": {shard.name: "0" * 64}}))

    def refusals(*folders: Path) -> list[str]:
        job = make_job(data={"path": list(map(str, folders))}, train=SMALL)
        return [str(one) for one in check(job, machine) if one.path == "data.path"]

    for other in (first, first / ".", tmp_path / "symbolic", linked, copied):
        (refusal,) = refusals(first, other)
        assert "so the run would train on held-out rows; give each once" in refusal
    (copied / "meta.json").unlink()
    assert refusals(first, copied) == []


def test_texts_can_be_held_out_only_if_the_shards_store_them(checked: Callable[..., list[Problem]]) -> None:
    (problem,) = checked(data={"hold_out": "texts"}, train=SMALL)
    assert str(problem).startswith("data.hold_out: not all shards store the text of each row (a tensor `document`)")


@pytest.mark.parametrize(
    ("architecture", "steps", "warned"),
    [("jumprelu", 49, True), ("gated", 299, True), ("standard", 300, False), ("topk", 49, False)],
)
def test_a_run_too_short_to_control_its_l0_triggers_a_warning(
    checked: Callable[..., list[Problem]], architecture: str, steps: int, warned: bool
) -> None:
    train, launch = {"n_steps": steps, "batch_size": 128}, {"gpus": "cpu"}
    problems = checked(sae={"architecture": architecture}, train=train, launch=launch)
    assert [(one.path, one.severity) for one in problems] == [("train.n_steps", "warning")] * warned
    if warned:
        assert f"after {steps} steps L0 may be far from k = " in problems[0].message
        fixed = {"architecture": architecture, "sparsity_coefficient": 0.1}
        assert checked(sae=fixed, train=train, launch=launch) == []


@pytest.mark.parametrize(
    ("settings", "n_gpus", "warned"),
    [
        ({"parallel": {"mode": "ddp"}}, 2, ""),
        ({"parallel": {"mode": "ddp"}}, 3, "64 latents do not divide evenly over 3 GPUs"),
        # Without ZeRO, all-reduce works with any number of latents.
        ({"parallel": {"mode": "ddp", "zero": False}}, 3, ""),
        ({"parallel": {"mode": "ddp"}, "launch": {"gpus": "cpu:3"}}, 3, ""),
        # Ranks with different latents do not exchange weight gradients.
        ({"parallel": {"mode": "tensor"}}, 3, ""),
        ({"parallel": {"mode": "hybrid", "latent_ranks": 3}}, 6, "64 latents do not divide evenly over 6 GPUs"),
        ({"parallel": {"mode": "ddp"}, "sae": {"d_sae": [64, 66]}}, 3, "64 latents do not divide evenly over 3 GPUs"),
    ],
)
def test_latents_that_do_not_divide_evenly_among_replicas_trigger_a_warning(
    settings: dict[str, Any], n_gpus: int, warned: str, checked: Callable[..., list[Problem]], tmp_path: Path
) -> None:
    gpus = tuple(MachineGpu(index, "RTX 3090", 23 * GIB) for index in range(n_gpus))
    defaults = {"launch": {"gpus": f"auto:{n_gpus}"}, "sae": {"d_sae": 64}, "train": SMALL}
    problems = checked(Machine(gpus, cpu_count=8, output_root=tmp_path), **(defaults | settings))
    assert [(problem.path, problem.severity) for problem in problems] == [("sae.d_sae", "warning")] * bool(warned)
    if warned:
        assert problems[0].message.startswith(warned)
        assert problems[0].message.endswith(f"choose {64 - 64 % n_gpus} or 66")


def test_without_held_out_tokens_all_tokens_are_used_for_training(checked: Callable[..., list[Problem]]) -> None:
    (problem,) = checked(data={"held_out_tokens": 0}, train=SMALL | {"batch_size": 20_001})
    assert problem.message.endswith("has only 20,000; make batch_size × accumulate at most 20,000")


def test_the_error_for_a_transcoder_without_an_export_format_names_the_alternatives(
    checked: Callable[..., list[Problem]], write_shard: Callable[..., Path], tmp_path: Path
) -> None:
    targets = tmp_path / "targets"
    write_shard(N_TOKENS, 24).rename(targets)
    write_shard(N_TOKENS, D_IN)
    data = {"target_path": str(targets)}
    (problem,) = checked(train=SMALL, data=data)
    assert (problem.path, problem.severity) == ("sae.architecture", "error")
    assert problem.message.startswith('the format for "topk" transcoders requires equal input and output dimensions')
    assert checked(train=SMALL, data=data, sae={"architecture": "batch_topk"}) == []
    (problem,) = checked(train=SMALL, data=data, sae={"architecture": ["batch_topk", "topk"]})
    assert problem.path == "sae.architecture"
    (problem,) = checked(train=SMALL, sae={"skip": [False, True]})
    assert (problem.path, problem.severity) == ("sae.skip", "error")


def test_synthetic_data_needs_no_file(machine: Machine, make_job: Callable[..., JobConfig]) -> None:
    assert check(make_job(data={"source": "synthetic"}), machine) == []
    (problem,) = check(make_job(data={"source": "synthetic", "active": 300}), machine)
    assert str(problem) == "data.active: must be at most 243.2 with these features, trees and topics, not 300"
    (problem,) = check(make_job(data={"source": "synthetic", "n_rows": 2000}), machine)
    assert "one step needs 3,968 tokens, but synthetic data of 256 features has only 2,000" in problem.message


@pytest.mark.parametrize(
    ("gpus", "indices", "ranks"),
    [("auto", [], 1), ("auto:3", [], 3), ("cpu", [], 1), ("cpu:2", [], 2), ([5, 0], [5, 0], 2)],
)
def test_launch_gpus_determines_the_device_count(
    make_job: Callable[..., JobConfig], gpus: Any, indices: list[int], ranks: int
) -> None:
    job = make_job(launch={"gpus": gpus})
    assert (chosen_indices(job), wanted_ranks(job)) == (indices, ranks)
