"""Tests that the message about rows in an extraction's output folder matches what the extraction does with them."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from support.extractions import extraction_job, run, run_ranks
from support.tiny_models import make_model, sentences

from trainer.contract.errors import UsageError
from trainer.contract.planning.check_job import Machine, check
from trainer.contract.planning.stored_extraction import n_stored_rows, what_is_there
from trainer.contract.settings.extract import PARTS, STATE, ExtractJob

Make = Callable[..., ExtractJob]


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("sources")
    (folder / "corpus.txt").write_text("\n\n".join(sentences(200)))
    return make_model(folder / "llama", "llama"), folder / "corpus.txt"


@pytest.fixture
def make(sources: tuple[Path, Path], tmp_path: Path) -> Make:
    return lambda **settings: extraction_job(*sources, tmp_path / "rows", **settings)


def stop_after(n: int) -> tuple[threading.Event, Callable[[int], object]]:
    stop = threading.Event()
    return stop, lambda rows: stop.set() if rows >= n else None


def test_a_missing_or_empty_folder_is_not_mentioned(make: Make) -> None:
    assert what_is_there(make()) == ""
    run(make(), *stop_after(1))
    assert what_is_there(make(n_tokens=200)) == ""


def test_a_finished_extraction_is_reported_before_it_is_launched_again(make: Make, tmp_path: Path) -> None:
    run(job := make())
    told = f"{tmp_path / 'rows'} contains this extraction, finished with 300 rows"
    assert what_is_there(job) == told
    warnings = [problem for problem in check(job, Machine((), 2, tmp_path)) if problem.path == "extract.output"]
    assert [(problem.message, problem.severity) for problem in warnings] == [(told, "warning")]


def test_another_extractions_folder_is_reported_and_refused(make: Make, tmp_path: Path) -> None:
    run(make())
    other = make(n_tokens=200)
    assert "with a different extract.n_tokens, 300, so this extraction would be refused" in what_is_there(other)
    refused = [problem for problem in check(other, Machine((), 2, tmp_path)) if problem.path == "extract.output"]
    assert [(problem.message, problem.severity) for problem in refused] == [(what_is_there(other), "error")]
    with pytest.raises(UsageError, match=r"with a different extract\.n_tokens, 300"):
        run(other)


def test_a_stopped_extraction_is_reported_as_resumable(make: Make) -> None:
    run(job := make(), *stop_after(150))
    assert what_is_there(job).endswith("contains the first 128 rows of this extraction, which resumes after them")
    assert (n_stored_rows(job), n_stored_rows(make(n_tokens=200))) == (128, 0)


def test_rows_stored_by_several_processes_are_added_up(make: Make, tmp_path: Path) -> None:
    job, output = make(shard_rows=16), tmp_path / "rows"
    run_ranks(job, 2, tmp_path / "meet")
    assert "finished with 300 rows" in what_is_there(job)
    # Write the states that two stopped processes would leave behind.
    state = json.loads((output / STATE).read_text()) | {"is_finished": False}
    (output / STATE).write_text(json.dumps(state | {"shards": [[], []]}))
    for rank, n in enumerate((2, 3)):
        (output / PARTS / str(rank)).mkdir(parents=True)
        part = state | {"shards": [of_hook[:n] for of_hook in state["shards"]]}
        (output / PARTS / str(rank) / STATE).write_text(json.dumps(part))
    assert "contains the first 80 rows of this extraction" in what_is_there(job)
    assert n_stored_rows(job) == 80


def test_unrelated_shards_are_reported_as_a_reason_for_refusal(make: Make) -> None:
    (folder := (job := make()).folder("mlp_out.0")).mkdir(parents=True)
    (folder / "acts.safetensors").touch()
    assert what_is_there(job).startswith(f"{folder} contains unrelated shards, so this extraction would be refused")
