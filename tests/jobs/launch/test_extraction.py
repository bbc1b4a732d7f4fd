"""Tests for estimating, before launch, how much memory and time an extraction job needs."""

from __future__ import annotations

import json
import os
from pathlib import Path

import msgspec
import pytest

from sae_tui.jobs.launch.kinds.extraction import LaunchExtraction
from sae_tui.jobs.launch.memory_need import FreeMemory
from trainer.contract.planning.extraction import ExtractionProposal, batch_that_fits, outlook_of_extraction
from trainer.contract.settings.extract import ExtractJob
from trainer.contract.settings.job_file import parse_as


@pytest.fixture
def job(tmp_path: Path) -> ExtractJob:
    """Return an extraction job whose model has ten million parameters, judging by its files."""
    config = {"hidden_size": 512, "num_hidden_layers": 8, "torch_dtype": "float32"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "pytorch_model.bin").touch()
    os.truncate(tmp_path / "pytorch_model.bin", 40_000_000)
    table = {"model": {"path": str(tmp_path), "hooks": ["mlp_out.2"]}, "text": {"path": "x"}, "extract": {}}
    parsed, problems = parse_as(ExtractJob, {"kind": "extract", **table, "launch": {"gpus": "cpu"}})
    assert parsed, problems
    return parsed


def test_the_memory_components_add_up_to_the_estimate(job: ExtractJob) -> None:
    look = outlook_of_extraction(job, ())
    takes = LaunchExtraction().need(job, look, FreeMemory(), device="cpu")
    assert takes
    assert look.memory
    assert takes.rank_bytes == look.needs_bytes
    assert takes.parts.weights == 40_000_000
    assert (
        LaunchExtraction().summary(job, look).startswith("1 CPU process · 1,000,000 rows of 1 hook, 512 wide · needs ")
    )


def test_if_memory_is_short_the_largest_batch_that_fits_is_suggested(job: ExtractJob) -> None:
    look = outlook_of_extraction(job, ())
    assert look.needs_bytes
    short = FreeMemory(look.needs_bytes - 1, "this machine")
    takes = LaunchExtraction().need(job, look, short, device="cpu")
    assert takes
    assert takes.judged_lacking
    assert takes.remedies == ("extract.batch_tokens = 4096",)
    assert batch_that_fits(job, look.needs_bytes, cuda=False) == 4096
    none = LaunchExtraction().need(job, look, FreeMemory(1, "this machine"), device="cpu")
    assert none
    assert (none.remedies, none.otherwise) == ((), "a smaller model")


def test_a_clone_of_a_job_that_ran_out_of_memory_reads_half_as_many_tokens_at_once(job: ExtractJob) -> None:
    assert ExtractionProposal.half_batch(job, 1) == ["extract.batch_tokens=4096"]
    least = msgspec.structs.replace(job, extract=msgspec.structs.replace(job.extract, batch_tokens=256))
    assert ExtractionProposal.half_batch(least, 1) == []


def test_the_memory_needed_for_a_model_that_is_not_on_this_machine_is_unknown(job: ExtractJob) -> None:
    elsewhere = msgspec.structs.replace(job, model=msgspec.structs.replace(job.model, path="some/model"))
    look = outlook_of_extraction(elsewhere, ())
    assert LaunchExtraction().need(elsewhere, look, FreeMemory(), device="cpu") is None
    assert LaunchExtraction().summary(elsewhere, look).endswith("memory unknown: the model is not downloaded yet")
