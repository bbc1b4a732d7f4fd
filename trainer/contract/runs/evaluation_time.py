"""Estimates how long each part of an evaluation takes, and finds its language model, without importing torch."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from trainer.contract.errors import JobFileError
from trainer.contract.json_file import read_json
from trainer.contract.planning.hardware import CPU, MeasuredHardware, Speeds
from trainer.contract.progress import Planned
from trainer.contract.runs.report_card import (
    EFFECTS,
    FIRES_ON,
    IN_MODEL,
    PART_TITLES,
    PROBES,
    PROMOTED,
    ROWS,
    Card,
)
from trainer.contract.settings.extract import STATE
from trainer.contract.settings.job import JobConfig
from trainer.contract.settings.job_file import members
from trainer.contract.settings.model_size import READING_SPEED, ModelSize, model_size
from trainer.contract.settings.model_source import ModelSettings
from trainer.contract.settings.sources import SyntheticSettings
from trainer.contract.settings.tokens_of_data import folder_of
from trainer.contract.store.seeds import by_seeds
from trainer.contract.store.twins import without_twins

# The default number of tokens used to measure the language model's losses, by device.
MODEL_TOKENS = {"cuda": 32_768, "cpu": 4096}
# By device, the default number of tokens on which the effects of latents are estimated, and the number of these tokens
# on which latents are ablated. `N_ABLATED` latents are ablated. Estimating takes as long as `GRADIENT_PASSES` forward
# passes.
EFFECT_TOKENS, ABLATED_TOKENS = {"cuda": 2**16, "cpu": 2**14}, {"cuda": 2**14, "cpu": 2**11}
N_ABLATED, GRADIENT_PASSES = 20, 3
MOST_TEXT_ROWS, MOST_SAMPLED = 2**18, 32_768
_PROBE_SETS, _TEXTS_OF_SET, _TOKENS_OF_TEXT = 12, 384, 60
_BF16_BYTES = 2
# The time in seconds to start torch, and to fit the probes for one data set (8 fits for each of 3 seeds).
_START_S, _PROBE_S = 4.0, 6.0
# The model loading speed in bytes/s, and the speed of sparse row operations as a share of the matmul speed.
_LOADING, _OF_ROWS = 2e8, 0.3
# The time in seconds that Python takes to launch the kernels of a block on a GPU. With the 32 blocks of a 7B model,
# transformers decodes about 40 tokens/s (github.com/NVIDIA/FasterTransformer/issues/506), although a GPU reads the
# weights in 5 ms.
_LAUNCH_S = 0.8e-3
# The number of tokens per forward pass (`TOKENS_AT_ONCE` in `trainer.evaluation.spliced`).
_TOKENS_OF_PASS = 1024
# Stages that are not parts of a report card.
LOADING, READING, DENSE_PROBES, KNOWN = (
    "loading the model", "reading the text again", "dense probes", "known features",
)  # fmt: skip
COSINES, FIRING = "stability across seeds", "firing across seeds"
# The comparison of SAEs that differ only in the seed, in the stages `COSINES` and `FIRING`.
SEEDS = "seeds"
# For each device type, the number of rows that a language model recomputes from the text. On a CPU, this takes 1 to 2
# minutes.
ROWS_READ_AGAIN = {"cuda": 2**16, "cpu": 2**13}
# The number of rows on which the known features of synthetic data are detected. None of them has been used to train a
# run. A feature that fires on one row in a thousand fires on 8 of them.
KNOWN_ROWS = 8192
# The largest number of latents to compare with all latents of SAEs with other seeds. On a CPU, comparing two SAEs with
# 16,384 latents takes 2 s.
MOST_LATENTS = {"cuda": 2**17, "cpu": 2**14}
# The largest number of latents to match one to one. Matching 4,096 latents takes 1 s, and the time grows cubically.
MOST_MATCHED = 4096
# The number of passes over the rows: one each for the mean, the metrics and the distribution.
_TIMES_ROWS = 3
# The time of a refinement step, as a multiple of the time to encode and decode the rows.
_TIMES_REFINED = 5


class LanguageModelSize(msgspec.Struct, frozen=True):
    """The language model that produced a job's data; `size` is None if its files are not on this machine."""

    path: str
    size: ModelSize | None

    @property
    def name(self) -> str:
        return Path(self.path).name or self.path


class ModelTime(msgspec.Struct, frozen=True):
    """The expected times in seconds for a language model of this size on a device; see `model_time`."""

    size: ModelSize
    device: str
    speeds: Speeds

    @property
    def _bytes(self) -> float:
        return self.size.n_parameters * float(self.size.value_bytes("auto", on_cuda=self.device == "cuda"))

    @property
    def loading_s(self) -> float:
        """The time to start torch, and to load the weights."""
        return self._bytes / _LOADING + _START_S

    def pass_s(self, n_tokens: float) -> float:
        """Return the time for one forward pass: arithmetic, reading the weights, or launching kernels."""
        flops = 2.0 * self.size.n_parameters * n_tokens / (self.speeds.flops_per_s * READING_SPEED)
        if self.device != "cuda":
            return flops
        return max(flops, self._bytes / self.speeds.memory_bytes_per_s, _LAUNCH_S * self.size.n_layers)

    def text_s(self, n_tokens: float) -> float:
        """Return the time for one pass over a long text, in batches."""
        return self.pass_s(_TOKENS_OF_PASS) * n_tokens / _TOKENS_OF_PASS

    def answer_s(self, n_prompt: int, n_tokens: int) -> float:
        """Return the time for a steered answer, with its unchanged continuation, and their comparison."""
        return self.pass_s(2 * n_prompt) + n_tokens * self.pass_s(2) + self.pass_s(2 * (n_prompt + n_tokens))

    def effects_s(self, n_tokens: int, n_ablated_tokens: int) -> float:
        """Return the time to estimate the effects of all latents, and to ablate the largest."""
        return self.text_s(GRADIENT_PASSES * n_tokens + N_ABLATED * n_ablated_tokens)


def model_time(size: ModelSize, device: str, name: str = "", box: MeasuredHardware | None = None) -> ModelTime:
    """Return the expected times for a model; on a GPU, it has the dtype in which it is stored, and fp32 on a CPU."""
    narrow = device == "cuda" and size.value_bytes("auto", on_cuda=True) == _BF16_BYTES
    speeds = (box or MeasuredHardware()).speeds(_device_name(device, name), "bf16" if narrow else "fp32", 1)
    if device == "cpu":
        speeds = msgspec.structs.replace(speeds, flops_per_s=speeds.flops_per_s * _cores())
    return ModelTime(size, device, speeds)


def _device_name(device: str, name: str) -> str:
    return name or (CPU if device == "cpu" else "")


def _cores() -> int:
    return min(16, len(os.sched_getaffinity(0)))


def language_model(job: JobConfig) -> LanguageModelSize | None:
    """Return the model that produced a job's training activations, or None if the data does not record the model.

    A crosscoder's rows come from several hooks or models, so no single model can be patched with them.
    """
    for settings in job.hooks.values():
        if len(settings.parts()) > 1:
            continue
        path: object = None
        revision: object = None
        if isinstance(settings, ModelSettings):
            path, revision = next(zip(settings.models, settings.revisions, strict=False), (None, None))
        elif folder := folder_of(settings):
            state = read_json(folder.parent / STATE, dict[str, Any]) or {}
            if isinstance(job_table := state.get("job"), dict):
                path, revision = job_table.get("model.path"), job_table.get("model.revision")
        if isinstance(path, str) and path:
            return LanguageModelSize(path, model_size(path, revision if isinstance(revision, str) else None))
    return None


def planned(
    job: JobConfig,
    parts: Iterable[str],
    *,
    device: str,
    name: str = "",
    box: MeasuredHardware | None = None,
    cards: Iterable[Card] = (),
    dropped: Collection[str] = (),
    refine: int = 0,
) -> dict[str, Planned]:
    """Return a dict mapping each stage in an evaluation of the given parts to its expected time.

    `device` is "cuda" or "cpu", and `name` is the GPU name. Times in earlier report cards (`cards`) from the same
    device type replace estimates. `dropped` contains the labels of SAEs that `train.halving` has dropped, and `refine`
    is the number of refinement steps. Return {} if the data cannot be read.
    """
    try:
        shape, saes = job.data_shape(), {label: sae for label, sae in members(job).items() if label not in dropped}
    except JobFileError:
        return {}
    flops = (box or MeasuredHardware()).speeds(_device_name(device, name), "fp32", 1).flops_per_s
    flops *= _cores() if device == "cpu" else 1
    d_out = shape.d_out or shape.d_in
    rows = job.data.held_out(shape.n_tokens) or MOST_SAMPLED
    texts = min(shape.n_tokens or MOST_TEXT_ROWS, MOST_TEXT_ROWS)
    widths = {label: sae.sae.width(shape.d_in) for label, sae in saes.items()}
    a_row = {label: 2.0 * (shape.d_in + d_out) * width / (flops * _OF_ROWS) for label, width in widths.items()}
    of_rows = sum(a_row.values())
    pairs = sum(2.0 * width * width * d_out for width in widths.values()) / flops
    seconds = {
        ROWS: rows * of_rows * (1 + refine * _TIMES_REFINED) + 1,
        FIRES_ON: texts * of_rows + pairs + 1,
        KNOWN: KNOWN_ROWS * of_rows,
    }
    groups = _compared(widths, device)
    seconds[COSINES] = sum(_cosine_seconds(len(labels), widths[labels[0]], d_out, flops) for labels in groups)
    seconds[FIRING] = rows * sum(a_row[label] for labels in groups for label in labels)
    n_hooks = len({job.hook_number(sae) for sae in saes.values()})
    model = language_model(job)
    times = model_time(model.size, device, name, box) if model and model.size else None
    seconds |= _of_model(times, len(saes), n_hooks)
    measured, wanted = _measured(cards, device, refine), _stages_of(job, {*parts}, has_groups=bool(groups))
    stages = {name: max(0.5, measured.get(name, seconds[name])) for name in seconds if name in wanted}
    n_times = {ROWS: _TIMES_ROWS * len(saes), PROBES: len(saes) + n_hooks}
    n_times |= dict.fromkeys((LOADING, READING, DENSE_PROBES), n_hooks) | dict.fromkeys((COSINES, FIRING), len(groups))
    return {PART_TITLES.get(name, name): Planned(s, n_times.get(name, len(saes))) for name, s in stages.items()}


def _stages_of(job: JobConfig, parts: set[str], *, has_groups: bool) -> set[str]:
    """Return the stages of an evaluation of the given parts."""
    more: dict[str, Any] = {
        LOADING: {IN_MODEL, EFFECTS, PROBES} & parts,
        DENSE_PROBES: PROBES in parts,
        READING: FIRES_ON in parts and isinstance(job.data.settings, ModelSettings),
        KNOWN: isinstance(job.data.settings, SyntheticSettings),
        COSINES: SEEDS in parts and has_groups,
        FIRING: SEEDS in parts and has_groups,
    }
    return parts | {name for name, is_wanted in more.items() if is_wanted}


def _compared(widths: Mapping[str, int], device: str) -> list[list[str]]:
    """Return the groups of SAEs that are compared because they differ only in the seed."""
    groups = by_seeds(without_twins([*widths])).values()
    return [labels for labels in groups if len(labels) > 1 and widths[labels[0]] <= MOST_LATENTS[device]]


def _cosine_seconds(n_saes: int, width: int, d_out: int, flops: float) -> float:
    """Return the time to compare the encoder and decoder directions of each pair of SAEs."""
    matching = (width / MOST_MATCHED) ** 3 if width <= MOST_MATCHED else 0.0
    return n_saes * (n_saes - 1) / 2 * (4.0 * width * width * d_out / flops + matching)


def _of_model(model: ModelTime | None, n_saes: int, n_hooks: int) -> dict[str, float]:
    if model is None:
        return dict.fromkeys((LOADING, IN_MODEL, EFFECTS, PROBES, DENSE_PROBES, PROMOTED, READING), 30.0)
    device = model.device
    # The model runs six passes: one unpatched; three in which the activations are replaced with the SAE's output, zeros
    # or the mean row; and two in which they are replaced with the SAE's output or zeros at all tokens.
    passes = model.text_s(6 * MODEL_TOKENS[device])
    probes = _PROBE_SETS * (model.text_s(_TEXTS_OF_SET * _TOKENS_OF_TEXT) * n_hooks + _PROBE_S * n_saes)
    return {
        LOADING: model.loading_s * n_hooks,
        IN_MODEL: passes * n_saes,
        EFFECTS: model.effects_s(EFFECT_TOKENS[device], ABLATED_TOKENS[device]) * n_saes,
        PROBES: probes,
        DENSE_PROBES: _PROBE_SETS * _PROBE_S * n_hooks,
        PROMOTED: 2.0 * n_saes,
        READING: model.text_s(ROWS_READ_AGAIN[device]) * n_hooks,
    }


def _measured(cards: Iterable[Card], device: str, refine: int) -> dict[str, float]:
    """Return a dict mapping each part to its time in seconds on this device type, summed over the report cards.

    Rows that were measured with another number of refinement steps are left out.
    """
    seconds: dict[str, float] = {}
    for card in cards:
        refined = card.figures.refined.n_steps if card.figures.refined else 0
        for name, part in card.parts.items():
            if name == ROWS and refined != refine:
                continue
            if part.seconds is not None and part.device == device:
                seconds[name] = seconds.get(name, 0.0) + part.seconds
    return seconds


def total(stages: Mapping[str, Planned]) -> float:
    """Return the total time in seconds, including program start-up."""
    return _START_S + sum(one.seconds for one in stages.values())
