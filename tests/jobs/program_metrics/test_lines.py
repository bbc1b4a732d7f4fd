"""Tests that metrics and positions are found in the output of common tools, and that other output yields none."""

from __future__ import annotations

import json
import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sae_tui.jobs.program_metrics import lines
from sae_tui.jobs.program_metrics.lines import LONGEST_LINE, StepSource, read_line
from trainer.contract.settings.metrics_pattern import parse_pattern

# Python before 3.11.5 matches these quantifiers wrongly.
POSSESSIVE_GROUP = re.compile(r"\)(?:[?*+]|\{[0-9,]*\})\+")
BAR = "train:  45%|####      | 450/1000 [00:10<00:12, 44.1it/s, loss=0.3, lr=1e-4]"


@pytest.mark.parametrize(
    ("line", "position", "values"),
    [
        # Hand-written loops.
        ('{"step": 10, "loss": 0.3}', (StepSource.STEP, 10, None), {"loss": 0.3}),
        ('{"step": 1, "eval": {"acc": 0.5, "ok": true}, "note": "x"}', (StepSource.STEP, 1, None), {"eval/acc": 0.5}),
        ('{"global_step": 7, "step": 1, "loss": NaN}', (StepSource.STEP, 7, None), {"loss": math.nan}),
        ("step=10 loss=0.3 lr=1e-4", (StepSource.STEP, 10, None), {"loss": 0.3, "lr": 1e-4}),
        ("step 10/500 loss: 0.12", (StepSource.STEP, 10, 500), {"loss": 0.12}),
        ("iteration: 5, Loss = 2", (StepSource.STEP, 5, None), {"loss": 2.0}),
        ("val_acc: 93.1%", (StepSource.LINE, 0, None), {"val_acc": 93.1}),
        (
            "Epoch 3/10 - train loss 1.25, val loss 1.5",
            (StepSource.EPOCH, 3, 10),
            {"train_loss": 1.25, "val_loss": 1.5},
        ),
        ("step 5: train loss 1.25, val loss 1.5", (StepSource.STEP, 5, None), {"train_loss": 1.25, "val_loss": 1.5}),
        # The Hugging Face trainer.
        (
            "{'loss': 0.5, 'grad_norm': 1.2, 'learning_rate': 5e-05, 'epoch': 0.02}",
            (StepSource.LINE, 0, None),
            {"loss": 0.5, "grad_norm": 1.2, "learning_rate": 5e-05},
        ),
        # nanoGPT, Megatron and PyTorch's examples.
        ("iter 100: loss 1.2345, time 23.4ms, mfu 12.3%", (StepSource.STEP, 100, None), {"loss": 1.2345, "mfu": 12.3}),
        (
            " iteration      100/  500 | learning rate: 1.0E-4 | lm loss: 3.4E+00 |",
            (StepSource.STEP, 100, 500),
            {"learning_rate": 1e-4, "lm_loss": 3.4},
        ),
        ("Train Epoch: 1 [640/60000 (1%)]\tLoss: 2.123", (StepSource.BAR, 640, 60000), {"loss": 2.123}),
        # Progress bars from tqdm and Keras.
        (BAR, (StepSource.BAR, 450, 1000), {"loss": 0.3, "lr": 1e-4}),
        ("450it [00:10, 44.1it/s, loss=0.3]", (StepSource.BAR, 450, None), {"loss": 0.3}),
        (
            "450/1000 [====>....] - ETA: 3s - loss: 0.3 - acc: 0.9",
            (StepSource.BAR, 450, 1000),
            {"loss": 0.3, "acc": 0.9},
        ),
    ],
)
def test_a_line_printed_by_a_common_tool_is_understood(
    line: str, position: tuple[object, ...], values: dict[str, float]
) -> None:
    reading = read_line(line)
    assert reading
    assert (reading.source, reading.step, reading.total) == position
    assert dict(reading.values) == pytest.approx(values, nan_ok=True)


@pytest.mark.parametrize(
    "line",
    [
        "",
        "starting",
        "2026-11-29 21:02:28 INFO: connected to http://localhost:8080/x",
        "date=2026-11-29 version=1.2.3 address=127.0.0.1 at 10:30",
        "size=3x4 took=12s memory=3.2GB",
        "Downloading:  45%|####      | 4.5M/10.0M [00:10<00:12, 441kB/s]",
        "timestamp=1700000000 pid=1234 rank=3",
        '["step", 10]',
        "File x.py, line 3, in main",
    ],
)
def test_a_line_without_metrics_yields_none(line: str) -> None:
    assert read_line(line) is None


def test_a_bars_speed_is_in_steps_per_second() -> None:
    slow, unknown = BAR.replace("44.1it/s", "4.00s/it"), BAR.replace("44.1it/s", "?it/s")
    rates = [reading.rate for line in (BAR, slow, unknown) if (reading := read_line(line))]
    assert rates == [44.1, 0.25, None]


def test_bars_are_distinguished_by_text_and_total_but_not_by_numbers_in_the_text() -> None:
    bars = ["Epoch 1: 1%|# | 1/100 [00:01<00:09, 1it/s]", "Epoch 2: 7%|# | 7/100 [00:01<00:09, 1it/s]", BAR]
    first, second, other = (reading.bar for line in bars if (reading := read_line(line)))
    assert first == second != other


def test_with_a_pattern_only_its_values_and_the_positions_of_bars_are_found() -> None:
    patterns = [parse_pattern("[{step}/{total}] nll {train/nll} {{x}}")]
    reading = read_line("info [ 3/10]   nll  -1.5e-2 {x} loss: 3", patterns)
    assert reading
    assert (reading.step, reading.total, dict(reading.values)) == (3, 10, {"train/nll": -0.015})
    assert read_line("step=3 loss=4", patterns) is None
    bar = read_line(BAR, patterns)
    assert bar
    assert (bar.step, bar.values) == (450, {})


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        ("loss", "no name in braces"),
        ("{step}{loss}", "no text between"),
        ("{loss} {loss}", "twice"),
        ("{loss:.3f}", "like {loss}"),
        ("{0}", "like {loss}"),
        ("{", "single brace"),
        ("}", "single brace"),
        ("x" * 501 + "{loss}", "longer than"),
    ],
)
def test_an_invalid_pattern_is_refused_with_the_reason(pattern: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        parse_pattern(pattern)


NAMES = st.from_regex(r"[a-z][a-z_/]{0,20}", fullmatch=True).map(lambda name: f"m_{name}".rstrip("/"))
NUMBERS = st.floats(allow_nan=False, allow_infinity=False, width=32)


@given(st.dictionaries(NAMES, NUMBERS, min_size=1, max_size=5), st.integers(0, 10**9))
def test_values_written_as_json_or_as_name_value_pairs_are_read_back(values: dict[str, float], step: int) -> None:
    for line in (
        json.dumps({"step": step} | values),
        f"step={step} " + " ".join(f"{n}={v}" for n, v in values.items()),
    ):
        reading = read_line(line)
        assert reading
        assert (reading.source, reading.step, dict(reading.values)) == (StepSource.STEP, step, values)


PIECES = [
    "step",
    "loss",
    "=",
    ":",
    " ",
    "1",
    ".",
    "e",
    "-",
    "/",
    "[",
    "]",
    "|",
    "%",
    "{",
    "}",
    '"',
    ",",
    "it",
    "a",
    "\0",
]


@given(st.one_of(st.text(), st.lists(st.sampled_from(PIECES), max_size=60).map("".join)))
def test_no_line_raises_an_error(line: str) -> None:
    for patterns in ((), [parse_pattern("a {x} b {y/z}")]):
        reading = read_line(line, patterns)
        assert reading is None or all(isinstance(value, float) for value in reading.values.values())


@pytest.mark.parametrize("piece", [*PIECES, "loss ", "a=1", "1e", "train ", "[1", '{"a":', "nan", "step(", "0."])
def test_a_long_line_is_searched_in_linear_time(piece: str) -> None:
    # A backtracking regular expression would take minutes, and the test would time out.
    for end in ("", "1", "=", "]"):
        read_line((piece * LONGEST_LINE)[: LONGEST_LINE - 1] + end, [parse_pattern("{x} a {y}")])


def test_no_pattern_has_a_possessive_group() -> None:
    patterns = [one.pattern for one in vars(lines).values() if isinstance(one, re.Pattern)]
    assert len(patterns) > 5
    assert [one for one in patterns if POSSESSIVE_GROUP.search(one)] == []
    assert POSSESSIVE_GROUP.search(r"(?:of (\d+))?+")
