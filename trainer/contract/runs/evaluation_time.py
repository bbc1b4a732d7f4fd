"""Estimates how long each part of an evaluation takes, and finds its language model, without importing torch."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from trainer.contract.errors import JobFileError
from trainer.contract.json_file import read_json
from trainer.contract.planning.hardware import CPU, MeasuredHardware
from trainer.contract.progress import Planned
from trainer.contract.runs.report_card import FIRES_ON, IN_MODEL, PART_TITLES, PROBES, PROMOTED, ROWS, Card
from trainer.contract.settings.extract import STATE
from trainer.contract.settings.job import JobConfig
from trainer.contract.settings.job_file import members
from trainer.contract.settings.model_size import READING_SPEED, ModelSize, model_size
from trainer.contract.settings.model_source import ModelSettings
from trainer.contract.settings.tokens_of_data import folder_of

# The default number of tokens used to measure the language model's losses, by device.
MODEL_TOKENS = {"cuda": 32_768, "cpu": 4096}
MOST_TEXT_ROWS, MOST_SAMPLED = 2**18, 32_768
_PROBE_SETS, _TEXTS_OF_SET, _TOKENS_OF_TEXT = 12, 384, 60
# The time in seconds to start torch, and to fit the probes for one data set (8 fits for each of 3 seeds).
_START_S, _PROBE_S = 4.0, 6.0
# The model loading speed in bytes/s, and the speed of sparse row operations as a share of the matmul speed.
_LOADING, _OF_ROWS = 2e8, 0.3
LOADING = "loading the model"
# The number of passes over the rows: one each for the mean, the metrics and the distribution.
_TIMES_ROWS = 3


class LanguageModelSize(msgspec.Struct, frozen=True):
    """The language model that produced a job's data; `size` is None if its files are not on this machine."""

    path: str
    size: ModelSize | None

    @property
    def name(self) -> str:
        return Path(self.path).name or self.path


def language_model(job: JobConfig) -> LanguageModelSize | None:
    """Return the model that produced a job's training activations, or None if the data does not record the model.

    A crosscoder's rows come from several hooks or models, so no single model can be patched with them.
    """
    for settings in job.hooks.values():
        if len(settings.parts()) > 1:
            continue
        path: object = None
        if isinstance(settings, ModelSettings):
            path = settings.model
        elif folder := folder_of(settings):
            state = read_json(folder.parent / STATE, dict[str, Any]) or {}
            path = job_table.get("model.path") if isinstance(job_table := state.get("job"), dict) else None
        if isinstance(path, str) and path:
            return LanguageModelSize(path, model_size(path))
    return None


def planned(
    job: JobConfig,
    parts: Iterable[str],
    *,
    device: str,
    name: str = "",
    box: MeasuredHardware | None = None,
    cards: Iterable[Card] = (),
) -> dict[str, Planned]:
    """Return a dict mapping each stage in an evaluation of the given parts to its expected time.

    `device` is "cuda" or "cpu", and `name` is the GPU name. Times in earlier report cards (`cards`) from the same
    device type replace estimates. Return {} if the data cannot be read.
    """
    try:
        shape, saes = job.data_shape(), list(members(job).values())
    except JobFileError:
        return {}
    flops = (box or MeasuredHardware()).speeds(name or (CPU if device == "cpu" else ""), "fp32", 1).flops_per_s
    if device == "cpu":
        flops *= min(16, len(os.sched_getaffinity(0)))
    d_out = shape.d_out or shape.d_in
    rows = job.data.held_out(shape.n_tokens) or MOST_SAMPLED
    texts = min(shape.n_tokens or MOST_TEXT_ROWS, MOST_TEXT_ROWS)
    widths = [sae.sae.width(shape.d_in) for sae in saes]
    of_rows = sum(2.0 * (shape.d_in + d_out) * width for width in widths) / (flops * _OF_ROWS)
    pairs = sum(2.0 * width * width * d_out for width in widths) / flops
    seconds = {ROWS: rows * of_rows + 1, FIRES_ON: texts * of_rows + pairs + 1}
    seconds |= _of_model(job, flops, device, len(saes))
    measured = _measured(cards, device)
    wanted = {*parts} | ({LOADING} if {IN_MODEL, PROBES} & {*parts} else set())
    stages = {name: max(0.5, measured.get(name, seconds[name])) for name in seconds if name in wanted}
    times = {ROWS: _TIMES_ROWS * len(saes), LOADING: 1}
    return {PART_TITLES.get(name, name): Planned(s, times.get(name, len(saes))) for name, s in stages.items()}


def _of_model(job: JobConfig, flops: float, device: str, n_saes: int) -> dict[str, float]:
    model = language_model(job)
    if model is None or model.size is None:
        return dict.fromkeys((LOADING, IN_MODEL, PROBES, PROMOTED), 30.0)
    a_token = 2.0 * model.size.n_parameters / (flops * READING_SPEED)
    # The model runs six passes: one unpatched; three in which the activations are replaced with the SAE's output, zeros
    # or the mean row; and two in which they are replaced with the SAE's output or zeros at all tokens.
    passes = 6 * MODEL_TOKENS[device] * a_token
    probes = _PROBE_SETS * (_TEXTS_OF_SET * _TOKENS_OF_TEXT * a_token + _PROBE_S * (1 + n_saes))
    loading = 4.0 * model.size.n_parameters / _LOADING + _START_S
    return {LOADING: loading, IN_MODEL: passes * n_saes, PROBES: probes, PROMOTED: 2.0 * n_saes}


def _measured(cards: Iterable[Card], device: str) -> dict[str, float]:
    """Return a dict mapping each part to its time in seconds on this device type, summed over the report cards."""
    seconds: dict[str, float] = {}
    for card in cards:
        for name, part in card.parts.items():
            if part.seconds is not None and part.device == device:
                seconds[name] = seconds.get(name, 0.0) + part.seconds
    return seconds


def total(stages: Mapping[str, Planned]) -> float:
    """Return the total time in seconds, including program start-up."""
    return _START_S + sum(one.seconds for one in stages.values())
