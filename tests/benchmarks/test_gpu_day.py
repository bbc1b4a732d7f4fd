"""What `make test-gpu` runs, without a GPU: its parts on the CPU, and how it judges what they answer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from benchmarks.gpu_day import ROOT, Part, Ran, kernels, run, several_cards, steps, summary
from benchmarks.gpu_driver import MIB, Memory, differs_from_cuda, differs_from_tool, read_tool
from benchmarks.gpu_ranks import KINDS, differing

from trainer.contract.settings.catalog import ARCHITECTURES

SCRIPT, GIB = ROOT / "tests" / "benchmarks" / "gpu_day.py", 1024 * MIB


def gpu_day(*words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"}
    argv = [sys.executable, str(SCRIPT), *words]
    return subprocess.run(argv, capture_output=True, text=True, env=environment)


def test_it_runs_on_a_cpu_and_tells_of_each_part(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    out = tmp_path / "found.json"
    done = gpu_day("--gpus", "cpu", "--only", "kernels", "steps", "driver", "--out", str(out))
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(out.read_text())
    assert list(found) == ["kernels", "steps C", "driver"]
    of_kernels, of_steps, *of_cases, of_driver, end = done.stdout.splitlines()
    assert of_kernels.endswith(" 18 cases right")
    assert of_steps.startswith("ok    steps C ")
    for line, case in zip(of_cases, found["steps C"]["answer"], strict=True):
        assert line.split()[0] == case["case"]
        assert f"{case['of_floor']:.0%} of the floor" in line
    assert f" {len(found['driver']['answer']['cards'])} cards" in of_driver
    assert end == f"3 of 3 parts are right; all answers are in {out}"


def test_a_card_that_is_not_there_is_refused() -> None:
    done = gpu_day("--gpus", "77")
    assert done.returncode == 2
    assert "--gpus: " in done.stderr


def test_steps_of_every_architecture_are_timed_and_of_those_with_auxk_also_with_dead_latents(tmp_path: Path) -> None:
    cases = {word for word in steps("A", tmp_path, on_cpu=False).argv if word.startswith("A:")}
    with_auxk = {f"A:{name}:dead" for name in ARCHITECTURES if "topk" in name}
    assert cases == {f"A:{name}" for name in ARCHITECTURES} | with_auxk


def test_several_cards_have_parts_of_their_own_and_modes_that_so_many_can_take() -> None:
    names = [part.name for part in several_cards(3)]
    assert names == ["bus", "bench B topk ddp", "bench B topk tensor", "ranks"]
    *_, ranks = several_cards(4)
    assert ranks.argv[-6:] == ["auto:4", "--modes", "ddp", "tensor", "hybrid", "dp"]
    assert not list(several_cards(1))


def test_on_a_gpu_all_cases_are_run_that_can_be_and_none_in_the_interpreter() -> None:
    part = kernels(on_cpu=False)
    files = [Path(word) for word in part.argv if word.endswith("_cases.py")]
    assert len(files) > 8
    assert all('"TRITON_INTERPRET"' in file.read_text() for file in files)
    assert part.variables["TRITON_INTERPRET"] == "0"


def test_a_part_that_takes_too_long_is_ended_with_what_it_has_started() -> None:
    # What it has started keeps the pipe open.
    ran = run(Part("bus", ["sh", "-c", "sleep 900 & sleep 900"], 1.0))
    assert not ran.ok
    assert ran.stderr.endswith("no end within 1 s")


@pytest.mark.parametrize(
    ("name", "answer", "words"),
    [
        ("driver", {"wrong": ["one", "two"]}, "one; two"),
        ("self-test", {"failed": [{"part": "waits", "name": "topk"}]}, "waits: topk"),
        ("kernels", "FAILED one\n1 failed, 20 passed in 3 s\n", "1 failed, 20 passed in 3 s"),
        ("bus", "", "the last line"),
    ],
)
def test_what_is_wrong_stands_in_the_table(name: str, answer: Any, words: str) -> None:
    assert summary(Part(name, [], 1.0), Ran(False, 1.0, answer, "a line\nthe last line\n")) == words


def card(uuid: str = "GPU-a", total: int | None = 80 * GIB, used: int | None = GIB) -> dict[str, Any]:
    return {"uuid": uuid, "memory_total": total, "memory_used": used, "healthy": True}


@pytest.mark.parametrize(
    ("cards", "by_cuda", "words"),
    [
        ([card()], {"GPU-a": 79 * GIB}, []),
        ([card("GPU-b")], {"GPU-a": 79 * GIB}, ["CUDA has GPU-a", "the app has GPU-b"]),
        ([card(), card("MIG-b")], {"GPU-a": 79 * GIB}, []),
        ([card()], {"GPU-a": 81 * GIB}, ["GPU-a has 8"]),
        ([card()], {"GPU-a": 40 * GIB}, ["GPU-a has 8"]),
        ([card(total=None)], {"GPU-a": 40 * GIB}, []),
        ([card() | {"healthy": False}], {}, []),
    ],
)
def test_cards_are_compared_with_cudas(cards: list[Any], by_cuda: dict[str, int], words: list[str]) -> None:
    wrong = differs_from_cuda(cards, by_cuda)
    assert [one[: len(word)] for one, word in zip(wrong, words, strict=True)] == words


@pytest.mark.parametrize(
    ("one", "words"),
    [
        (card(), ""),
        (card(used=GIB + 60 * MIB), ""),
        (card(used=2 * GIB), "of GPU-a are in use"),
        (card(total=80 * GIB + 2 * MIB), "GPU-a has "),
        (card("GPU-b"), "nvidia-smi has not"),
        (card("MIG-b"), ""),
        (card(total=None, used=None), ""),
    ],
)
def test_and_with_those_of_its_tool_before_and_after(one: dict[str, Any], words: str) -> None:
    before, after = (read_tool(f"GPU-a, {80 * 1024}, {used}\n") for used in (1000, 1024))
    assert after == {"GPU-a": Memory(80 * GIB, GIB)}
    wrong = differs_from_tool([one], before, after)
    assert len(wrong) == bool(words)
    assert words in "".join(wrong)
    assert not differs_from_tool([one], {}, {})


def test_a_figure_that_the_tool_does_not_have_is_not_compared() -> None:
    unknown = read_tool("GPU-a, [N/A], [N/A]\n")
    assert unknown == {"GPU-a": Memory(None, None)}
    assert not differs_from_tool([card()], unknown, unknown)


def test_ranks_that_come_to_another_fvu_than_one_are_named() -> None:
    one = dict.fromkeys(KINDS, 0.3)
    assert not differing({"one": one, "ddp": dict.fromkeys(KINDS, 0.3002)})
    (wrong,) = differing({"one": one, "ddp": one | {"jumprelu": 0.3004}})
    assert wrong == "ddp: FVU of jumprelu is 0.30040, and 0.30000 on one card"
    assert len(differing({"one": one, "tensor": one | {"topk": float("nan")}})) == 1
