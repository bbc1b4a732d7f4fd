"""Rows with the tokens that they are of, by which it is found on what latents fire: stored, or read once more."""

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
from trainer.contract.settings.model_source import ModelKnobs
from trainer.contract.settings.sources import SourceKnobs
from trainer.contract.settings.tokens_of_data import folder_of
from trainer.extraction.extraction import extract
from trainer.extraction.model_stream import job_of_stream
from trainer.extraction.peers import Alone

READING_TEXTS = "reading the text again"
# Rows that a language model reads once more: on a CPU that takes it a minute or two.
N_ROWS = {"cuda": 2**16, "cpu": 2**13}


@contextlib.contextmanager
def rows_with_tokens(knobs: SourceKnobs, device: torch.device) -> Iterator[Path | None]:
    """Yield the folder of the data; None where it has none, or several.

    What a language model streams is stored by reading the beginning of its text again, and deleted afterwards. Raise
    `UserError` where that fails.
    """
    if not isinstance(knobs, ModelKnobs):
        yield folder_of(knobs)
        return
    hook, _ = ends_of(knobs.hook)
    job, n = job_of_stream(knobs, [hook]), N_ROWS[device.type]
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
