"""Small extraction jobs that run in this process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from trainer.contract.settings.extract import ExtractJob
from trainer.contract.settings.job_file import parse_as
from trainer.extraction.extraction import Extraction, ExtractionResult
from trainer.extraction.peers import Alone, Peers

CPU = torch.device("cpu")


def extraction_job(model: Path, text: Path, output: Path, **settings: Any) -> ExtractJob:
    """Return a small extraction job; the keyword arguments may be settings from any section."""
    table: dict[str, dict[str, Any]] = {
        "model": {"path": str(model), "hooks": ["resid_post.1", "mlp_out.0"]},
        "text": {"path": str(text), "context": 32},
        "extract": {"n_tokens": 300, "batch_tokens": 64, "shard_rows": 128, "output": str(output)},
        "launch": {"gpus": "cpu"},
    }
    for name, value in settings.items():
        places = {"hooks": "model", "context": "text", "column": "text", "split": "text", "remote_code": "model"}
        table[places.get(name, "extract")][name] = value
    job, problems = parse_as(ExtractJob, {"kind": "extract", **table})
    assert job, problems
    return job


def run(
    job: ExtractJob, stop: threading.Event | None = None, advance: Callable[[int], object] = lambda n: None
) -> ExtractionResult:
    """Run an extraction job in this process."""
    return Extraction(job, CPU, Alone(stop or threading.Event(), advance)).run()


def run_ranks(job: ExtractJob, size: int, folder: Path, stop: threading.Event | None = None) -> list[ExtractionResult]:
    """Run an extraction job on several ranks, each a thread of this process, and return each rank's result.

    The ranks find each other through files in `folder`, which must be new.
    """
    stop = stop or threading.Event()
    # Load the models sequentially because transformers changes its own classes while loading a model.
    parts = [Extraction(job, CPU, Peers(folder, rank, size, stop)) for rank in range(size)]
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(Extraction.run, parts))
