"""Fixtures for extraction tests: a short text for tiny language models, and extraction jobs that read it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.extractions import extraction_job
from support.tiny_models import sentences

from trainer.contract.settings.extract import ExtractJob

N_DOCUMENTS = 60


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write short documents with about 2,000 tokens in total."""
    file = tmp_path_factory.mktemp("text") / "corpus.jsonl"
    file.write_text("".join(json.dumps({"text": one}) + "\n" for one in sentences(N_DOCUMENTS)))
    return file


@pytest.fixture
def make(tiny: Callable[[str], Path], corpus: Path, tmp_path: Path) -> Callable[..., ExtractJob]:
    """Return a function that creates a small extraction job for a model family. The output folder is called `name`."""

    def make_job(family: str = "gpt2", name: str = "activations", text: Path = corpus, **settings: Any) -> ExtractJob:
        return extraction_job(tiny(family), text, tmp_path / name, **settings)

    return make_job
