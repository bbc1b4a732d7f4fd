"""What of a job's SAEs can be measured now, how long each part takes, and which parts are worth it."""

from __future__ import annotations

import msgspec

from sae_tui.jobs.evaluation.report_card import whole_cards
from sae_tui.jobs.evaluation.request import AUTO, Card, Request, refuse
from trainer.contract.paths import DataDir
from trainer.contract.planning.hardware import read_box
from trainer.contract.runs.evaluation_time import language_model, planned, total
from trainer.contract.runs.report_card import FIRES_ON, IN_MODEL, PROBES, PROMOTED, ROWS, Part
from trainer.contract.settings.job_file import parse_job
from trainer.contract.settings.toml import table_of
from trainer.contract.store.rows import Job
from trainer.contract.wording import duration

# Of a part that nobody has asked for more than this is not offered as the default, in seconds.
_LONG_S = 600.0
_STAGES = {ROWS: (ROWS, FIRES_ON), IN_MODEL: (IN_MODEL, PROMOTED), PROBES: (PROBES,)}


class OfferedPart(msgspec.Struct, frozen=True):
    """A part with what a person reads; `why_not` says why it cannot be measured, "" where it can."""

    name: str
    words: str
    why_not: str = ""
    is_default: bool = False


class Offer(msgspec.Struct, frozen=True):
    """What can be measured of a job's SAEs, and where: `device` in words, and the other one, "" where there is none."""

    job_id: int
    parts: tuple[OfferedPart, ...]
    device: str
    other_device: str = ""
    wants_gpu: bool = False


class Asked(msgspec.Struct, frozen=True):
    """What a person has chosen of it."""

    parts: frozenset[str]
    on_gpu: bool = False

    def request(self, job: Job, card: Card | None) -> Request:
        """Return it as what the process that evaluates is asked for."""
        in_model = {IN_MODEL, PROBES} & self.parts
        return Request(
            job.id,
            model=AUTO if in_model else None,
            card=card,
            is_probed=PROBES in self.parts,
            waits=self.on_gpu,
            gpu_source=job.gpu_source,
            keeps_rows=ROWS not in self.parts,
            is_spliced=IN_MODEL in self.parts,
        )


def offer_of(data: DataDir, job: Job, idle: Card | None, *, cuda: bool) -> Offer:
    """Return what can be measured of a job's SAEs; raise `UserError` where it cannot be evaluated now."""
    refuse(data, job)
    wants_gpu = job.device == "cuda" and cuda
    parsed, _ = parse_job(table_of(job.config))
    model = language_model(parsed) if parsed else None
    cards = [*whole_cards(data.sae(job.id)).values()]
    no_model = "" if model else "its data does not name the model; `sae-tui eval ID --model JOB.toml` does"
    seconds: dict[str, float] = {}
    for name in _STAGES:
        if parsed is None:
            break
        stages = planned(
            parsed, _STAGES[name], device="cuda" if wants_gpu else "cpu", box=read_box(data.box_file), cards=cards
        )
        seconds[name] = total(stages) if stages else 0.0
    named = model.name if model else ""
    parts = tuple(
        OfferedPart(name, _words(name, named, seconds.get(name, 0.0), [one.parts.get(name) for one in cards]), why)
        for name, why in ((ROWS, ""), (IN_MODEL, no_model), (PROBES, no_model))
    )
    missing = [name for name in (ROWS, IN_MODEL) if not all(name in one.parts for one in cards) or not cards]
    default = [name for name in missing if seconds.get(name, 0.0) <= _LONG_S and (name == ROWS or model)] or [ROWS]
    # What every finished run has is of fewer rows than this measures.
    parts = tuple(msgspec.structs.replace(one, is_default=one.name in default) for one in parts)
    if not wants_gpu:
        return Offer(job.id, parts, "the CPU")
    device = f"GPU {idle.index}" if idle else "a GPU, once one is free"
    return Offer(job.id, parts, device, "the CPU", wants_gpu=True)


def _words(name: str, model: str, seconds: float, measured: list[Part | None]) -> str:
    """Write a part as `in the model (SmolLM2-135M, about 2 min), measured 4,096 tokens before`."""
    title = {ROWS: "rows, and what latents fire on", IN_MODEL: "in the model", PROBES: "probes"}[name]
    facts = [model] if name != ROWS and model else []
    facts += [f"about {duration(max(5.0, round(seconds / 5) * 5))}"] if seconds else []
    there = [part for part in measured if part]
    before = f", has {there[0].n:,} {there[0].unit}" if there else ""
    return f"{title} ({', '.join(facts)}){before}" if facts else f"{title}{before}"
