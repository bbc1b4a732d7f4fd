"""Tests the parts of `make test-gpu` without a GPU by running them on the CPU and evaluating their results."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from benchmarks import gpu_days
from benchmarks.gpu_day import (
    LEAST_S,
    NOT_RUN,
    OK,
    ROOT,
    WRONG,
    Part,
    Ran,
    kernels,
    parts,
    run,
    run_within,
    several,
    summary,
)
from benchmarks.gpu_driver import MIB, Memory, differs_from_cuda, differs_from_tool, read_tool
from benchmarks.gpu_ranks import KINDS, differing
from benchmarks.gpu_shared import MODES as SHARING
from benchmarks.gpu_shared import wrong_of

from trainer.contract.settings.catalog import ARCHITECTURES

SCRIPT, GIB = ROOT / "tests" / "benchmarks" / "gpu_day.py", 1024 * MIB


PATHS = {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"}


def gpu_day(*words: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, str(SCRIPT), *words]
    return subprocess.run(argv, capture_output=True, text=True, env=os.environ | PATHS)


@pytest.mark.slow
def test_a_run_on_a_cpu_prints_and_records_each_part(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    out, days = tmp_path / "found.json", tmp_path / "days.json"
    names = "kernels", "steps", "driver", "nccl", "failures"
    done = gpu_day("--gpus", "cpu", "--only", *names, "--out", str(out), "--record", str(days))
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(out.read_text())
    assert list(found) == ["driver", "steps C", "nccl", "failures", "kernels"]
    of_driver, of_steps, of_case, of_nccl, of_failures, of_kernels, end = done.stdout.splitlines()
    assert of_steps.startswith("ok      steps C ")
    (case,) = found["steps C"]["answer"]
    assert of_case.split()[0] == case["case"]
    assert f"{case['of_floor']:.0%} of the floor; first step {case['first_step_s']:.1f} s" in of_case
    assert f" {len(found['driver']['answer']['cards'])} GPUs" in of_driver
    assert of_nccl.endswith(" correct exchanges, none in a graph")
    assert "compute-sanitizer: needs a GPU" in of_failures
    assert of_kernels.endswith(" 18 cases passed")
    assert end == f"5 ok; all results are in {out}"
    (day,) = json.loads(days.read_text())
    assert day["steps"].keys() == {"C:topk:dead"}
    assert {part["state"] for part in day["parts"].values()} == {"ok"}


@pytest.mark.slow
def test_two_ranks_on_one_device_train_like_a_single_rank_in_fp32_and_bf16() -> None:
    argv = [sys.executable, str(SCRIPT.with_name("gpu_shared.py")), "--device", "cpu"]
    done = subprocess.run(argv, capture_output=True, text=True, env=os.environ | PATHS)
    assert done.returncode == 0, done.stdout + done.stderr
    cases = json.loads(done.stdout)["cases"]
    assert {(case["mode"], case["precision"]) for case in cases} == set(product(SHARING, ("fp32", "bf16")))


def test_host_waits_and_differing_fvus_on_several_ranks_are_reported() -> None:
    case = {"mode": "ddp", "kind": "topk", "precision": "fp32", "fvu": 0.3, "one": 0.3, "waits": {}}
    assert not wrong_of([case, case | {"precision": "bf16", "fvu": 0.31}])
    (wrong,) = wrong_of([case | {"fvu": 0.31}])
    assert wrong == "ddp, topk, fp32: FVU 0.31000, but 0.30000 on one rank"
    assert wrong_of([case | {"waits": {"step.py:9": 2}}]) == ["ddp, topk, fp32: the host waits at step.py:9"]


@pytest.mark.slow
def test_a_stopped_and_resumed_job_is_bit_identical_to_an_uninterrupted_job() -> None:
    argv = [sys.executable, str(SCRIPT.with_name("gpu_job.py")), "--gpus", "cpu", "--steps", "30"]
    done = subprocess.run(argv, capture_output=True, text=True, env=os.environ | PATHS)
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout)["replayed"][0] > 0


def test_a_missing_gpu_is_rejected() -> None:
    done = gpu_day("--gpus", "77")
    assert done.returncode == 2
    assert "--gpus: " in done.stderr


def test_steps_of_every_architecture_are_timed_with_dead_latents_where_auxk_exists(tmp_path: Path) -> None:
    argv = [word for part in parts("0", tmp_path) if "steps A" in part.name for word in part.argv]
    cases = [word for word in argv if word.startswith("A:")]
    with_auxk = {f"A:{name}:dead" for name in ARCHITECTURES if "topk" in name}
    assert set(cases) == {f"A:{name}" for name in ARCHITECTURES} | with_auxk
    assert len(cases) == len(set(cases))


def test_the_most_important_parts_run_first_and_peers_last(tmp_path: Path) -> None:
    names = [part.name for part in parts("0", tmp_path)]
    first = ["driver", "steps B", "steps A", "resumed job", "nccl", "shared GPU", "first checks"]
    assert names[: len(first)] == first
    assert names[-1] == "peers"


def test_on_several_gpus_all_possible_modes_and_the_additional_parts_run() -> None:
    names = [part.name for part in several("auto", 3)]
    assert names[:3] == ["bus", "bench B topk ddp", "bench B topk tensor"]
    of_four = {part.name: part.argv for part in several("auto", 4)}
    assert of_four["ranks"][-6:] == ["auto:4", "--modes", "ddp", "tensor", "hybrid", "dp"]
    assert "auto:3" in of_four["uneven ranks"]
    assert not list(several("auto", 1))


def test_all_kernel_cases_run_on_the_gpu_and_not_in_the_interpreter() -> None:
    part = kernels(on_cpu=False)
    files = [Path(word) for word in part.argv if word.endswith("_cases.py")]
    assert len(files) > 8
    assert all('"TRITON_INTERPRET"' in file.read_text() for file in files)
    assert part.variables["TRITON_INTERPRET"] == "0"


def test_a_part_that_exceeds_its_time_limit_is_killed_with_its_child_processes() -> None:
    # The child process would keep the pipe open if only the shell were killed.
    ran = run(Part("bus", ["sh", "-c", "sleep 900 & sleep 900"], 1.0))
    assert ran.state == WRONG
    assert ran.stderr.endswith("did not finish within 1 s")


@pytest.mark.parametrize(
    ("left_s", "limit_s", "state"), [(0.0, 60.0, NOT_RUN), (LEAST_S, 60.0, NOT_RUN), (60.0, 1.0, WRONG)]
)
def test_a_part_runs_only_if_time_is_left_and_fails_if_it_exceeds_its_own_limit(
    left_s: float, limit_s: float, state: str
) -> None:
    part = Part("bus", ["sleep", "900"], limit_s)
    ran = run_within(part, left_s)
    assert ran.state == state
    assert ("left" in summary(part, ran)) == (state == NOT_RUN)


def test_a_part_whose_program_is_missing_is_not_run_and_the_reason_is_reported() -> None:
    ran = run(Part("bus", ["/no/such/program"], 1.0))
    assert ran.state == NOT_RUN
    assert "could not be started" in ran.why


def test_a_result_without_the_expected_values_still_has_a_summary() -> None:
    assert "cannot be summarised" in summary(Part("nccl", [], 1.0), Ran(OK, answer={}))


@pytest.mark.parametrize(
    ("name", "answer", "words"),
    [
        ("driver", {"wrong": ["one", "two"]}, "one; two"),
        ("self-test", {"failed": [{"part": "waits", "name": "topk"}]}, "waits: topk"),
        ("kernels", "FAILED one\n1 failed, 20 passed in 3 s\n", "1 failed, 20 passed in 3 s"),
        ("bus", "", "the last line"),
    ],
)
def test_the_summary_of_a_failed_part_shows_its_errors(name: str, answer: Any, words: str) -> None:
    assert summary(Part(name, [], 1.0), Ran(WRONG, 1.0, answer, "a line\nthe last line\n")) == words


def gpu(uuid: str = "GPU-a", total: int | None = 80 * GIB, used: int | None = GIB) -> dict[str, Any]:
    return {"uuid": uuid, "memory_total": total, "memory_used": used, "healthy": True}


@pytest.mark.parametrize(
    ("gpus", "by_cuda", "words"),
    [
        ([gpu()], {"GPU-a": 79 * GIB}, []),
        ([gpu("GPU-b")], {"GPU-a": 79 * GIB}, ["CUDA lists GPU-a", "the app lists GPU-b"]),
        ([gpu(), gpu("MIG-b")], {"GPU-a": 79 * GIB}, []),
        ([gpu()], {"GPU-a": 81 * GIB}, ["GPU-a has 8"]),
        ([gpu()], {"GPU-a": 40 * GIB}, ["GPU-a has 8"]),
        ([gpu(total=None)], {"GPU-a": 40 * GIB}, []),
        ([gpu() | {"healthy": False}], {}, []),
    ],
)
def test_gpus_listed_by_the_app_are_compared_with_cuda(
    gpus: list[Any], by_cuda: dict[str, int], words: list[str]
) -> None:
    wrong = differs_from_cuda(gpus, by_cuda)
    assert [one[: len(word)] for one, word in zip(wrong, words, strict=True)] == words


@pytest.mark.parametrize(
    ("one", "words"),
    [
        (gpu(), ""),
        (gpu(used=GIB + 60 * MIB), ""),
        (gpu(used=2 * GIB), "of GPU-a are in use"),
        (gpu(total=80 * GIB + 2 * MIB), "GPU-a has "),
        (gpu("GPU-b"), "nvidia-smi does not"),
        (gpu("MIG-b"), ""),
        (gpu(total=None, used=None), ""),
    ],
)
def test_gpus_listed_by_the_app_are_compared_with_nvidia_smi_before_and_after(one: dict[str, Any], words: str) -> None:
    before, after = (read_tool(f"GPU-a, {80 * 1024}, {used}\n") for used in (1000, 1024))
    assert after == {"GPU-a": Memory(80 * GIB, GIB)}
    wrong = differs_from_tool([one], before, after)
    assert len(wrong) == bool(words)
    assert words in "".join(wrong)
    assert not differs_from_tool([one], {}, {})


def test_a_value_missing_from_nvidia_smi_is_not_compared() -> None:
    unknown = read_tool("GPU-a, [N/A], [N/A]\n")
    assert unknown == {"GPU-a": Memory(None, None)}
    assert not differs_from_tool([gpu()], unknown, unknown)


def test_modes_whose_fvu_differs_from_the_single_gpu_fvu_are_named() -> None:
    one = dict.fromkeys(KINDS, 0.3)
    assert not differing({"one": one, "ddp": dict.fromkeys(KINDS, 0.3002)})
    (wrong,) = differing({"one": one, "ddp": one | {"jumprelu": 0.3004}})
    assert wrong == "ddp: FVU of jumprelu is 0.30040, but 0.30000 on one GPU"
    assert len(differing({"one": one, "tensor": one | {"topk": float("nan")}})) == 1


# Entries in `gpu_days.json`


def day(gpu: str, commit: str, step_ms: float = 1.5) -> dict[str, Any]:
    step = {"case": "B:topk:dead", "recorded": step_ms, "plain": 6.0, "of_floor": 0.4, "modelled": 1.0}
    return gpu_days.entry_of(
        {
            "driver": {"state": OK, "seconds": 2.0, "answer": {"state": [{"name": gpu}], "cuda": {"GPU-a": 1}}},
            "steps B": {"state": OK, "seconds": 9.0, "answer": [step]},
            "bench B topk ddp": {"state": OK, "seconds": 9.0, "answer": {"step_ms": 1.25}},
            "peers": {"state": NOT_RUN, "seconds": 0.0, "answer": None},
        },
        commit,
    )


def test_a_new_entry_replaces_the_entry_for_the_same_gpu_and_commit(tmp_path: Path) -> None:
    file = tmp_path / "days.json"
    for entry in (day("H100", "a"), day("H200", "a"), day("H100", "b"), day("H100", "a", 1.25)):
        gpu_days.record(file, entry)
    kept = [(one["gpu"], one["commit"], one["steps"]["B:topk:dead"]["recorded"]) for one in gpu_days.read(file)]
    assert kept == [("H200", "a", 1.5), ("H100", "b", 1.5), ("H100", "a", 1.25)]


def test_the_table_contains_the_newest_entry_for_each_gpu_and_omits_missing_values() -> None:
    table = gpu_days.table([day("H100", "a"), day("H200", "a"), day("H100", "b", 1.25)])
    words = "topk with AuxK, d_in 768, 24,576 latents"
    assert f"| H100 | {words} | 1.25 | 6.00 | 40% | 1.00 |  |  |" in table
    assert table.count("| H100 |") == 1
    assert "H100, commit b" in table
    assert "parts 3 ok, 1 not run; ddp on 1: 1.25 ms" in table


def test_the_performance_page_contains_the_table_with_the_recorded_entries() -> None:
    page = gpu_days.PAGE.read_text()
    assert page == gpu_days.page_with(page, gpu_days.read(gpu_days.FILE)), "tests/benchmarks/gpu_days.py --write"
