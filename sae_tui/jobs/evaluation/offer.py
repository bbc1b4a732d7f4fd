"""Determines which parts of an evaluation are possible, how long each takes, and which are selected by default."""

from __future__ import annotations

import contextlib
from collections.abc import Collection

import msgspec

from sae_tui.jobs.evaluation.report_card import whole_cards
from sae_tui.jobs.evaluation.request import AUTO, EvaluationRequest, ReservedGpu, refuse
from trainer.contract.errors import UserError
from trainer.contract.paths import DataDir
from trainer.contract.planning.hardware import read_box
from trainer.contract.printable import printable
from trainer.contract.runs.checkpoint_manifest import newest_first, read_state
from trainer.contract.runs.evaluation_time import SEEDS, language_model, planned, total
from trainer.contract.runs.report_card import (
    EFFECTS,
    FIRES_ON,
    IN_MODEL,
    PART_TITLES,
    PROBES,
    PROMOTED,
    ROWS,
    Card,
    Part,
)
from trainer.contract.settings.job import JobConfig
from trainer.contract.settings.job_file import parse_job
from trainer.contract.settings.sources import SyntheticSettings
from trainer.contract.settings.toml import table_of
from trainer.contract.store.rows import Job
from trainer.contract.wording import duration

# A part that takes longer than this is not selected by default.
_LONG_S = 600.0
_STAGES = {ROWS: (ROWS, FIRES_ON, SEEDS), IN_MODEL: (IN_MODEL, PROMOTED), EFFECTS: (EFFECTS,), PROBES: (PROBES,)}


class OfferedPart(msgspec.Struct, frozen=True):
    """A part of an evaluation, with its description.

    `why_not` explains why the part cannot be measured, or is "" if it can.
    """

    name: str
    words: str
    why_not: str = ""
    is_default: bool = False


class EvaluationOffer(msgspec.Struct, frozen=True):
    """The parts of an evaluation, and a description of the device.

    `other_device` describes the alternative device, if any.
    """

    job_id: int
    parts: tuple[OfferedPart, ...]
    device: str
    other_device: str = ""
    wants_gpu: bool = False


class EvaluationChoice(msgspec.Struct, frozen=True):
    """The user's choice: the parts of an evaluation, and the device."""

    parts: frozenset[str]
    on_gpu: bool = False

    def request(self, job: Job, gpu: ReservedGpu | None) -> EvaluationRequest:
        """Return the request for the evaluating process."""
        in_model = {IN_MODEL, EFFECTS, PROBES} & self.parts
        return EvaluationRequest(
            job.id,
            model=AUTO if in_model else None,
            gpu=gpu,
            is_probed=PROBES in self.parts,
            waits=self.on_gpu,
            gpu_source=job.gpu_source,
            keeps_rows=ROWS not in self.parts,
            is_spliced=IN_MODEL in self.parts,
            has_effects=EFFECTS in self.parts,
        )


def offer_of(data: DataDir, job: Job, idle: ReservedGpu | None, *, cuda: bool) -> EvaluationOffer:
    """Return the evaluation parts for a job's SAEs; raise `UserError` if the job cannot be evaluated now."""
    refuse(data, job)
    wants_gpu = job.device == "cuda" and cuda
    parsed, _ = parse_job(table_of(job.config))
    model = language_model(parsed) if parsed else None
    cards = [*whole_cards(data.sae(job.id)).values()]
    dropped = _dropped(data, job.id)
    seconds = _seconds(data, parsed, cards, dropped, "cuda" if wants_gpu else "cpu") if parsed else {}
    default = _default(seconds, cards, has_model=model is not None)
    if parsed and isinstance(parsed.data.settings, SyntheticSettings):
        no_model = "its rows are synthetic, so there is no language model"
    elif parsed and any(len(settings.parts()) > 1 for settings in parsed.hooks.values()):
        no_model = "a crosscoder reconstructs several hooks or models at once"
    else:
        no_model = f"its data does not name the model; `sae-tui eval {job.id} --model JOB.toml` names it"
    parts = []
    for name in _STAGES:
        # The model's name or folder may come from another user, so make it printable.
        of_model = printable(model.name) if model and name != ROWS else ""
        words = _words(name, of_model, seconds.get(name, 0.0), [one.parts.get(name) for one in cards])
        why_not = "" if model or name == ROWS else no_model
        parts.append(OfferedPart(name, words, why_not, name in default))
    if not wants_gpu:
        return EvaluationOffer(job.id, tuple(parts), "the CPU")
    device = f"GPU {idle.index}" if idle else "a GPU, once one is free"
    return EvaluationOffer(job.id, tuple(parts), device, "the CPU", wants_gpu=True)


def _dropped(data: DataDir, job_id: int) -> Collection[str]:
    """Return the labels of the SAEs that `train.halving` has dropped."""
    with contextlib.suppress(UserError):
        for checkpoint in newest_first(data.run(job_id).checkpoints)[:1]:
            return read_state(checkpoint).halved.dropped
    return ()


def _seconds(
    data: DataDir, job: JobConfig, cards: list[Card], dropped: Collection[str], device: str
) -> dict[str, float]:
    """Return a dict mapping each part to its duration in seconds, or to 0 if the duration is unknown."""
    box = read_box(data.box_file)
    plans = {
        name: planned(job, stages, device=device, box=box, cards=cards, dropped=dropped)
        for name, stages in _STAGES.items()
    }
    return {name: total(stages) if stages else 0.0 for name, stages in plans.items()}


def _default(seconds: dict[str, float], cards: list[Card], *, has_model: bool) -> list[str]:
    """Return the default parts: the missing parts that do not take long or, if there are none, only the rows."""
    lacking = [name for name in (ROWS, IN_MODEL) if not cards or not all(name in one.parts for one in cards)]
    short = [name for name in lacking if seconds.get(name, 0.0) <= _LONG_S and (name == ROWS or has_model)]
    # Remeasuring the rows is worthwhile because an evaluation reads more rows than the measurement at the end of
    # training.
    return short or [ROWS]


def _words(name: str, model: str, seconds: float, measured: list[Part | None]) -> str:
    """Return a part's description, like `in the model (SmolLM2-135M, about 2 min), has 4,096 tokens`."""
    title = "rows and max-activating examples" if name == ROWS else PART_TITLES[name]
    about = f"about {duration(max(5.0, round(seconds / 5) * 5))}" if seconds else ""
    facts = ", ".join(filter(None, (model, about)))
    there = next(filter(None, measured), None)
    return f"{title}{f' ({facts})' if facts else ''}{f', has {there.n:,} {there.unit}' if there else ''}"
