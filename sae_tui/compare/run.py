"""Reads a run for a comparison: its SAEs, and its metrics as functions of steps, tokens and time."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import msgspec

from sae_tui.gpu.secrets import masked_settings
from sae_tui.jobs.evaluation.report_card import ReportCard, read_cards
from sae_tui.jobs.live import LiveRun
from trainer.contract.errors import UserError
from trainer.contract.paths import DataDir
from trainer.contract.runs.explanations import ExplainedLatents, ExplanationsFile
from trainer.contract.runs.latent_notes import NOTES, read_notes
from trainer.contract.runs.row_sums import RowSums, read_sums
from trainer.contract.settings.job_file import members, parse_job, to_table
from trainer.contract.settings.series import error_of
from trainer.contract.settings.toml import table_of
from trainer.contract.store.database import StoreError
from trainer.contract.store.job_store import Control
from trainer.contract.store.rows import DROPPED, Job

MOST_POINTS = 500

Settings = Mapping[str, Any]  # maps a setting's dotted path to its value


class Sample(NamedTuple):
    """One value of a metric. `time_s` is the time since the run's first value, including pauses."""

    step: int
    tokens: float
    time_s: float
    value: float | None


class ComparedSae(msgspec.Struct, frozen=True):
    """An SAE to compare: a run's only SAE, or one SAE from a sweep.

    `latest` maps each metric to its latest value. If the SAE has a report card, the card's values are included under
    names that start with `card_`.
    """

    label: str
    job: Job
    member: str
    settings: Settings
    latest: Mapping[str, float]
    # Sums per text over the rows used for the report card.
    sums: RowSums | None = None
    # The language models that described the latents, and the versions of their prompts.
    explained_by: tuple[tuple[str, ...], ...] = ()


class Curve(msgspec.Struct, frozen=True):
    """A metric's curve for an SAE, or for a run whose SAEs share it; `sae` is the SAE's index in the comparison."""

    label: str
    sae: int
    samples: tuple[Sample, ...]


class ComparedRun:
    """Reads a run's files. After the first poll, only what has changed is read."""

    def __init__(self, data: DataDir, job_id: int, host: str = "") -> None:
        self.job_id = job_id
        self._which = f"{job_id} on {host}" if host else str(job_id)
        self.saes: tuple[ComparedSae, ...] = ()
        self._live = LiveRun(data.run(job_id))
        self._output = data.sae(job_id)
        self._cards: dict[str, ReportCard] = {}
        self._sums: dict[str, RowSums] = {}
        self._notes: dict[str, dict[str, float]] = {}
        self._files: dict[str, ExplanationsFile] = {}
        self._explained: dict[str, ExplainedLatents] = {}
        self._job: Job | None = None
        self._began: float | None = None
        self._curves: dict[tuple[str, str], tuple[Sample, ...]] = {}

    @property
    def metrics(self) -> set[str]:
        return {name.partition("@")[0] for name in self._live.latest}

    def poll(self, control: Control) -> bool:
        """Read the changes; return False if the run no longer exists."""
        try:
            job = control.job(self.job_id)
        except StoreError:
            raise
        except UserError:
            return False
        if self._live.poll():
            self._curves.clear()
            self._job = None
        if (cards := {card.label: card for card in read_cards(self._output)}) != self._cards:
            self._cards, self._job = cards, None
            read = {label: read_sums(self._output / label, card.figures.fvu) for label, card in cards.items()}
            self._sums = {label: sums for label, sums in read.items() if sums}
        if (notes := dict(self._count_notes())) != self._notes:
            self._notes, self._job = notes, None
        if (explained := dict(self._summaries())) != self._explained:
            self._explained, self._job = explained, None
        if job != self._job:
            self._job = job
            shown = job if job.state.is_final else msgspec.structs.replace(job, **self._live.fields())
            self.saes = tuple(self._saes(shown))
        return True

    def curve(self, metric: str, sae: ComparedSae, place: int) -> Curve | None:
        """Return the metric's curve with about `MOST_POINTS` points, or None if the SAE lacks the metric.

        A metric that a sweep's SAEs share is returned only for the first SAE.
        """
        name = self._name(metric, sae.member)
        if name is None or (name == metric and sae is not self.saes[0]):
            return None
        label = sae.label if name != metric or not sae.member else self._which
        if (name, label) not in self._curves:
            try:
                self._curves[name, label] = tuple(self._samples(name))
            except StoreError:
                # If a run's file is damaged, omit the curve but still compare the other runs.
                return None
        return Curve(label, place, self._curves[name, label])

    def all_values(self, metric: str, sae: ComparedSae) -> Iterator[Sample]:
        """Yield every value of a metric, read from the store on demand; non-finite values are None."""
        name = self._name(metric, sae.member)
        if name is None or self._live.reader is None or (name == metric and sae is not self.saes[0]):
            return
        with contextlib.suppress(StoreError):
            for step, timestamp, value in self._live.reader.timed_values(name):
                yield self._sample(step, timestamp, value)

    def close(self) -> None:
        self._live.close()

    def _saes(self, job: Job) -> Iterator[ComparedSae]:
        """Yield the job's SAEs, except those dropped by `train.halving`."""
        for member, settings in settings_of(job.config).items():
            if f"{DROPPED}@{member}" in self._live.latest:
                continue
            label = f"{self._which} {member}" if member else self._which
            # The job may have been renamed after its job file was written, so use its current name.
            latest = self._latest(member) | self._card(member) | self._notes.get(member, {})
            explained, own = self._explained.get(member), {**settings, "name": job.name}
            latest |= _of_explanations(explained) if explained else {}
            by = (explained.models, explained.prompts) if explained else ()
            yield ComparedSae(label, job, member, own, latest, self._sums.get(member), by)

    def _latest(self, member: str) -> dict[str, float]:
        """Return a dict mapping metrics to latest values: the SAE's own, or the run's if its SAEs share the metric."""
        names = {metric: self._name(metric, member) for metric in self.metrics}
        return {metric: self._live.latest[name] for metric, name in names.items() if name in self._live.latest}

    def _card(self, member: str) -> dict[str, float]:
        return self._cards[member].values() if member in self._cards else {}

    def _count_notes(self) -> Iterator[tuple[str, dict[str, float]]]:
        """Yield the label of each SAE with notes on latents, and the numbers of starred and named latents."""
        for file in (self._output / NOTES, *self._output.glob(f"*/{NOTES}")):
            if notes := read_notes(file.parent).by_latent.values():
                label = "" if file.parent == self._output else file.parent.name
                starred, named = ([note for note in notes if getattr(note, field)] for field in ("starred", "name"))
                yield label, {"starred": len(starred), "named": len(named)}

    def _summaries(self) -> Iterator[tuple[str, ExplainedLatents]]:
        """Yield the label of each SAE with explanations of its current weights, and their summary."""
        for label, card in self._cards.items():
            stored = self._files.setdefault(label, ExplanationsFile(self._output / label))
            if card.weights and (summary := stored.summary_of(card.weights, card.figures.d_sae)):
                yield label, summary

    def _name(self, metric: str, member: str) -> str | None:
        """Return the name of an SAE's metric in the run's store, or None if the run lacks the metric."""
        own = f"{metric}@{member}"
        if member and own in self._live.latest:
            return own
        of_others = any(name.startswith(f"{metric}@") for name in self._live.latest)
        return metric if metric in self._live.latest and not (member and of_others) else None

    def _samples(self, name: str) -> Iterator[Sample]:
        reader = self._live.reader
        if reader is None:
            return
        points = reader.history(name, most=MOST_POINTS)
        written = reader.timestamps(name, [point.step for point in points])
        for point, timestamp in zip(points, written, strict=True):
            yield self._sample(point.step, timestamp or 0.0, point.value)

    def _sample(self, step: int, timestamp: float, value: float | None) -> Sample:
        """Return a sample with a token count interpolated linearly from the count at the latest step."""
        job, heartbeat = self._job, self._live.heartbeat
        steps, tokens = (heartbeat.step, heartbeat.tokens) if heartbeat else (job.step, job.tokens) if job else (0, 0)
        return Sample(step, step * tokens / steps if steps else 0.0, max(0.0, timestamp - self._start()), value)

    def _start(self) -> float:
        """Return the time of the run's first value. A resumed run's job row contains only the latest start time."""
        if self._began is None and self._live.reader:
            written = [self._live.reader.timestamps(name, [0])[0] for name in self._live.latest]
            starts = [self._job.started] if self._job and self._job.started else []
            self._began = min([*starts, *(at for at in written if at is not None)], default=None)
        return self._began or 0.0


def _of_explanations(explained: ExplainedLatents) -> dict[str, float]:
    """Return the number of described latents, and the mean scores with their standard errors."""
    values: dict[str, float] = {"explained": explained.n_latents}
    for name, score in (("detection", explained.detection), ("fuzzing", explained.fuzzing)):
        if score:
            values |= {name: score.mean, error_of(name): score.error}
    return values


@functools.lru_cache(maxsize=256)
def settings_of(config: str) -> Mapping[str, Settings]:
    """Return a dict mapping each SAE's label in a job file to its settings; a single SAE has the label ""."""
    raw = table_of(config)
    job, _ = parse_job(raw)
    if job is None:  # the job file contains a setting from another version
        return {"": masked_settings(_flat(raw))}
    return {label: masked_settings(_flat(to_table(member))) for label, member in members(job).items()}


def _flat(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in table.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {prefix + key: value}
    return flat
