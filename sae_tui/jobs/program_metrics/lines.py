"""Finds metrics and progress in a line of any program's output.

It understands JSON (`{"step": 10, "loss": 0.3}`), `key=value`, `loss: 0.3`, `step 10/500`, and the bars of tqdm and
Keras. Every regular expression runs in linear time, because a program may print anything.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from enum import IntEnum
from typing import Any

import msgspec

from trainer.contract.settings.metrics_pattern import NUMBER, MetricsPattern

# Only this many characters of a line are searched for pairs and bars; JSON and patterns may extend to `LONGEST_LINE`.
LONGEST_TEXT = 4096
LONGEST_LINE = 16384
_DEEPEST = 4
_LARGEST_STEP = 2**53

_STEPS = ("global_step", "trainer/global_step", "train/global_step", "_step", "step", "iteration", "iter")
_TOTALS = ("total_steps", "max_steps", "num_steps", "n_steps", "total")
# The names of numbers that are not metrics.
_IGNORED = frozenset(
    {"timestamp", "_timestamp", "_runtime", "time", "ts", "date", "pid", "port", "rank", "local_rank", "world_size"}
    | {"line", "lineno", "version", "epoch", "epochs", "train_epoch", *_STEPS, *_TOTALS}
)
_BEFORE = (
    "train|training|val|valid|validation|test|eval|dev|lm|best|avg|mean|average|running|total|learning|grad|gradient"
    "|epoch|batch|loss|iter"
)
_KEY = rf"(?<![\w./-])((?:(?:{_BEFORE})[ \t]+)?[A-Za-z_][\w./@-]{{0,63}}+)"
_END = r"(?![\w:/]|[.-]\w|%\|)"
# After a colon without a space or quotes, only a number with a decimal point counts: `localhost:8080` is not a metric.
_SEPARATOR = r"""(?:["']?[ \t]?=[ \t]{0,8}+|["'][ \t]?:[ \t]{0,8}+|:[ \t]{1,8}+|:(?=[-+]?\d{0,20}\.\d))"""
_PAIR = re.compile(rf"{_KEY}{_SEPARATOR}({NUMBER}){_END}", re.IGNORECASE)
_KNOWN = (
    r"[a-z_]{0,20}loss|acc|accuracy|lr|ppl|perplexity|norm|mfu|reward|score|f1|auc|bleu|error"  # followed by a space
)
_SPACED = re.compile(rf"(?<![\w./-])((?:(?:{_BEFORE})[ \t]+)?(?:{_KNOWN}))[ \t]{{1,8}}+({NUMBER}){_END}", re.IGNORECASE)
_WHOLE = r"(\d{1,15}+)"
_OF = rf"[ \t]{{0,8}}+(?:/|of\b)[ \t]{{0,8}}+{_WHOLE}"
_GAP = r"""["']?[\s:=#\[(]{0,8}"""
# In Python before 3.11.5, a possessive optional group, `(...)?+`, may wrongly fail to match, unlike an atomic one.
_STEP = re.compile(
    rf"(?<![\w-])(?:global[_ ]?step|step|iteration|iter){_GAP}{_WHOLE}(?>(?:{_OF})?)(?![\w%/]|[.-]\d)", re.IGNORECASE
)
_EPOCH = re.compile(rf"(?<![\w-])epoch{_GAP}{_WHOLE}(?>(?:{_OF})?)(?![\w%/]|[.-]\d)", re.IGNORECASE)
# `batch 5/100`, `[640/60000 (1%)]`, and Keras's `450/1000 [====>...]`: a position that starts over in each epoch.
_BATCH = re.compile(rf"(?<![\w-])batch{_GAP}{_WHOLE}{_OF}|\[[ \t]{{0,8}}+{_WHOLE}{_OF}", re.IGNORECASE)
_KERAS = re.compile(rf"^[ \t]{{0,8}}+{_WHOLE}/{_WHOLE}[ \t]+[\[━╸]")
# `train:  45%|████      | 450/1000 [00:10<00:12, 44.1it/s, loss=0.3]`
_TQDM = re.compile(
    rf"(\d{{1,3}}+)%\|[^|]{{0,300}}+\|[ \t]{{0,8}}+{_WHOLE}/{_WHOLE}[ \t]{{0,8}}+"
    r"\[([\d:?]{1,20}+)<([^,\]]{1,30}+),[ \t]{0,8}+([^,\]]{1,40}+)"
)
# Without a total: `450it [00:10, 44.1it/s, loss=0.3]`
_TQDM_OPEN = re.compile(rf"(?<![\w.]){_WHOLE}it[ \t]\[[\d:]{{1,20}}+,[ \t]{{0,8}}+([^,\]]{{1,40}}+)")
_RATE = re.compile(r"([\d.]{1,20}+)[ \t]?(s/)?")
_DIGITS = re.compile(r"\d+")


class StepSource(IntEnum):
    """Where a step comes from; a higher value is preferred."""

    LINE = 0  # the number of the line
    EPOCH = 1
    BAR = 2
    STEP = 3


class Reading(msgspec.Struct, frozen=True):
    """What a line reports: values, and perhaps a position, a total number of steps and a speed in steps/s."""

    values: Mapping[str, float]
    source: StepSource = StepSource.LINE
    step: int = 0
    total: int | None = None
    rate: float | None = None
    # Identifies a progress bar, or "" if the position does not come from one.
    bar: str = ""


def read_line(line: str, patterns: Sequence[MetricsPattern] = ()) -> Reading | None:
    """Return what a line reports, or None; if there are patterns, search only for them and for progress bars."""
    if len(line) > LONGEST_LINE or not _DIGITS.search(line):
        return None
    for pattern in patterns:
        if found := pattern.find(line):
            return _from_numbers({name: float(text) for name, text in found.items()})
    text = line[:LONGEST_TEXT]
    if bar := _bar(text):
        position, rest = bar
        return position if patterns else msgspec.structs.replace(position, values=_metrics(_pairs(rest)))
    if patterns:
        return None
    return (_from_json(line) if line.lstrip().startswith("{") else None) or _from_text(text)


def _bar(text: str) -> tuple[Reading, str] | None:
    """Return a progress bar's position and the text after the bar, or None if there is no bar."""
    if "%|" in text and (match := _TQDM.search(text)):
        _, n, total, _, _, rate = match.groups()
        name = f"{_DIGITS.sub('', text[: match.start()]).strip(': ')[:80]}/{total}"
        return Reading({}, StepSource.BAR, int(n), int(total), _rate(rate), name), text[match.end() :]
    if "it [" in text and (match := _TQDM_OPEN.search(text)):
        name = f"{_DIGITS.sub('', text[: match.start()]).strip(': ')[:80]}/"
        return Reading({}, StepSource.BAR, int(match[1]), None, _rate(match[2]), name), text[match.end() :]
    if match := _KERAS.match(text):
        return Reading({}, StepSource.BAR, int(match[1]), int(match[2]), None, f"/{match[2]}"), text[match.end() :]
    return None


def _rate(text: str) -> float | None:
    """Return the speed in a tqdm bar, like `44.1it/s` or `2.30s/it`, in steps/s; None for `?it/s`."""
    match = _RATE.match(text.strip())
    if not match:
        return None
    with contextlib.suppress(ValueError, ZeroDivisionError):
        value = float(match[1])
        return 1 / value if match[2] else value
    return None


def _from_json(line: str) -> Reading | None:
    """Return the numbers in a JSON object; nested names are joined with slashes."""
    with contextlib.suppress(ValueError, RecursionError):
        decoded = json.loads(line)
        if isinstance(decoded, dict):
            return _from_numbers(dict(numbers_in(decoded)))
    return None


def numbers_in(table: Mapping[Any, Any], prefix: str = "", depth: int = 0) -> Iterator[tuple[str, float]]:
    """Yield the numbers in nested tables, as pairs (name, number)."""
    for key, value in table.items():
        if isinstance(value, dict) and depth < _DEEPEST:
            yield from numbers_in(value, f"{prefix}{key}/", depth + 1)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            with contextlib.suppress(OverflowError):
                yield f"{prefix}{key}", float(value)


def _from_text(text: str) -> Reading | None:
    pairs = _pairs(text)
    position = _position(text, pairs)
    if position and position.source > StepSource.LINE:
        pairs = {_joined(name): float(value) for name, value in _SPACED.findall(text)} | pairs
    values = _metrics(pairs)
    if position:
        return msgspec.structs.replace(position, values=values)
    return Reading(values) if values else None


def _pairs(text: str) -> dict[str, float]:
    return {_joined(name): float(value) for name, value in _PAIR.findall(text)}


def _joined(name: str) -> str:
    return re.sub(r"\s+", "_", name.lower())


def _position(text: str, pairs: Mapping[str, float]) -> Reading | None:
    """Return the position in a line of text: a step, a batch, or an epoch."""
    lower = text.lower()
    # Looking for a word first is five times as fast as running a regular expression that finds nothing.
    if ("step" in lower or "iter" in lower) and (match := _STEP.search(text)):
        total = int(match[2]) if match[2] else _total(pairs)
        return Reading({}, StepSource.STEP, int(match[1]), total)
    if ("[" in lower or "batch" in lower) and (match := _BATCH.search(text)):
        n, all_of_them = (match[1], match[2]) if match[1] else (match[3], match[4])
        return Reading({}, StepSource.BAR, int(n), int(all_of_them), None, f"batch/{all_of_them}")
    if "epoch" in lower and (match := _EPOCH.search(text)):
        return Reading({}, StepSource.EPOCH, int(match[1]), int(match[2]) if match[2] else None)
    return None


def _from_numbers(numbers: Mapping[str, float]) -> Reading | None:
    """Return what named numbers report; one of them may be a step."""
    lower = {name.lower(): value for name, value in numbers.items()}
    values = _metrics(numbers)
    for name in _STEPS:
        if (step := _whole(lower.get(name))) is not None:
            return Reading(values, StepSource.STEP, step, _total(lower))
    if (epoch := _whole(lower.get("epoch"))) is not None:
        return Reading(values, StepSource.EPOCH, epoch)
    return Reading(values) if values else None


def _total(numbers: Mapping[str, float]) -> int | None:
    return next((total for name in _TOTALS if (total := _whole(numbers.get(name)))), None)


def _whole(value: float | None) -> int | None:
    is_step = value is not None and 0 <= value <= _LARGEST_STEP and value == math.floor(value)
    return int(value) if is_step and value is not None else None


def _metrics(numbers: Mapping[str, float]) -> dict[str, float]:
    return {name: value for name, value in numbers.items() if name.lower() not in _IGNORED}
