"""Exports a job's SAE for other tools, in a trainer process because this needs torch, and generates code to load it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from sae_tui.jobs.evaluation.request import python_of
from sae_tui.jobs.launch.trainer_command import OnReached, answer_of
from sae_tui.jobs.store_access import existing
from trainer.contract.extras import refuse_without_trainer
from trainer.contract.paths import DataDir, working_folder


class Snippet(NamedTuple):
    """Python code that loads an SAE, and the library that it uses."""

    library: str
    code: str


def loading_snippets(folder: Path) -> list[Snippet]:
    """Return the ways to load the SAE in a job's output folder, the most convenient first, or [] if there is no SAE."""
    snippets = []
    if (folder / "sae_weights.safetensors").is_file():
        code = f"from sae_lens import SAE\n\nsae = SAE.load_from_disk({str(folder)!r})\n"
        snippets = [Snippet("SAELens", code), _plain(folder / "sae_weights.safetensors")]
    elif (folder / "sae.safetensors").is_file():
        code = f"from sparsify import SparseCoder\n\nsae = SparseCoder.load_from_disk({str(folder)!r})\n"
        snippets = [Snippet("sparsify", code), _plain(folder / "sae.safetensors")]
    return snippets


def _plain(file: Path) -> Snippet:
    code = f"from safetensors.torch import load_file\n\nweights = load_file({str(file)!r})\n"
    return Snippet("safetensors", code)


class Exported(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The trainer's report on an export: the checkpoint, and the folder for the SAE or for each SAE in a sweep.

    If the format does not support some SAEs in a sweep, `left_out` maps their labels to the reasons. If the SAE was
    uploaded, `pushed` contains the `url`. A set of transcoders has several `checkpoints` instead, and the step of each
    layer in `layers`.
    """

    output_path: str
    checkpoint: str = ""
    step: int = 0
    checkpoints: list[str] = []
    layers: dict[str, int] = {}
    saes: dict[str, str] = {}
    left_out: dict[str, str] = {}
    notes: tuple[str, ...] = ()
    pushed: dict[str, Any] = {}

    @property
    def newest_step(self) -> int:
        """The step of the checkpoint, or of the newest one of a set."""
        return max(self.layers.values(), default=self.step)


def export_sae(
    data: DataDir, job_id: int, out: Path, arguments: Sequence[str], on_reached: OnReached | None = None
) -> Exported:
    """Export a job's SAE to a folder; `arguments` are passed to the trainer's `export` command.

    Raise `UserError` if the export fails.
    """
    with existing(data, job_id) as control:
        control.job(job_id)
    if not (python := python_of(data, job_id)):
        refuse_without_trainer()
    words = [str(data.run(job_id).root), "--out", str(working_folder() / out), *arguments]
    return answer_of("export", words, Exported, python=python, on_reached=on_reached)
