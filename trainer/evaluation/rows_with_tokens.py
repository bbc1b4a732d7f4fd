"""Provides rows with their tokens, to find the texts on which latents fire: stored rows, or a text read again."""

from __future__ import annotations

import contextlib
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import torch

from trainer.contract.progress import advance, stage
from trainer.contract.settings.hooks import ends_of
from trainer.contract.settings.model_source import ModelSettings
from trainer.contract.settings.sources import SourceSettings
from trainer.contract.settings.tokens_of_data import folder_of
from trainer.extraction.extraction import extract
from trainer.extraction.model_stream import job_of_stream
from trainer.extraction.peers import Alone

READING_TEXTS = "reading the text again"
# Number of rows that a language model computes again from the text, by device. On a CPU this takes a minute or two.
N_ROWS = {"cuda": 2**16, "cpu": 2**13}


@contextlib.contextmanager
def rows_with_tokens(settings: SourceSettings, device: torch.device) -> Iterator[Path | None]:
    """Yield the folder of the data, or None if it has no folder or several.

    For a language model's stream, read the beginning of its text again, store the rows in a temporary folder, and
    delete it afterwards. Raise `UserError` if this fails.
    """
    if not isinstance(settings, ModelSettings):
        yield folder_of(settings)
        return
    hook, _ = ends_of(settings.hook)
    job, n = job_of_stream(settings, [hook]), N_ROWS[device.type]
    with tempfile.TemporaryDirectory(prefix="sae-tui-texts-") as folder:
        job = msgspec.structs.replace(job, extract=msgspec.structs.replace(job.extract, output=folder, n_tokens=n))
        stage(READING_TEXTS, n)
        so_far = 0

        def report(kept: int) -> None:
            nonlocal so_far
            advance(kept - so_far)
            so_far = kept

        extract(job, device, Alone(threading.Event(), report), lambda _: None)
        yield job.folder(hook)
