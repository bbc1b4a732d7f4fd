"""Tests for the colours of GPU readings, which depend on the load and on thresholds from the settings."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sae_tui.alerts.catalog import USUAL_SLOWDOWN_C
from sae_tui.gpu.base import Condition, GpuSample
from sae_tui.gpu.past import RecentHistory
from sae_tui.panels.aggregate import totals
from sae_tui.panels.gpu_lines import gpu_lines
from sae_tui.panels.gpu_row import GpuRow
from sae_tui.panels.load import load_style
from sae_tui.settings import Settings, load_settings

GIB = 2**30
SAMPLE = GpuSample(
    0, "GPU-0", "H200", 1.0, utilization=40, memory_used_bytes=10 * GIB, memory_total_bytes=100 * GIB, power_w=100.0,
    power_limit_w=700.0, temperature_c=60, condition=Condition(slowdown_c=80),
)  # fmt: skip


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("utilization", (0, 49, 50, 89, 90, 100)),
        ("memory_used_bytes", (0, 59 * GIB, 60 * GIB, 89 * GIB, 90 * GIB, 100 * GIB)),
        ("power_w", (0.0, 489.0, 490.0, 685.0, 686.0, 710.0)),
        ("temperature_c", (30, 59, 60, 73, 74, 81)),
    ],
)
def test_a_reading_is_green_then_yellow_then_red(field: str, values: tuple[float, ...]) -> None:
    styles = [load_style(replace(SAMPLE, **{field: value}), field, Settings()) for value in values]
    assert styles == ["low", "low", "middle", "middle", "high", "high"]
    assert load_style(replace(SAMPLE, **{field: None}), field, Settings()) == "text"


@pytest.mark.parametrize("percent", [29, 57, 58])
def test_a_value_at_a_threshold_has_its_colour(percent: int) -> None:
    settings = Settings(colour_util_percent=[percent, 99])
    assert load_style(replace(SAMPLE, utilization=percent), "utilization", settings) == "middle"
    assert load_style(replace(SAMPLE, utilization=percent - 1), "utilization", settings) == "low"


def test_a_temperature_is_judged_by_the_gpus_own_limit_or_else_by_a_typical_one() -> None:
    hot = replace(SAMPLE, temperature_c=USUAL_SLOWDOWN_C - 6, condition=None)
    assert load_style(hot, "temperature_c", Settings()) == "high"
    cool = replace(hot, condition=Condition(slowdown_c=USUAL_SLOWDOWN_C + 20))
    assert load_style(cool, "temperature_c", Settings()) == "low"


def test_a_reading_without_a_known_maximum_is_plain() -> None:
    assert load_style(replace(SAMPLE, power_limit_w=None), "power_w", Settings()) == "text"
    assert load_style(replace(SAMPLE, memory_total_bytes=None), "memory_used_bytes", Settings()) == "text"


def test_thresholds_can_be_set_in_either_order_and_a_wrong_one_is_named(tmp_path) -> None:
    path = tmp_path / "settings.toml"
    path.write_text("colour_util_percent = [30, 20]\ncolour_heat_c = [5]\ncolour_power_percent = [-1, 5]\n")
    settings, problems = load_settings(path)
    assert load_style(replace(SAMPLE, utilization=25), "utilization", settings) == "middle"
    assert load_style(replace(SAMPLE, utilization=30), "utilization", settings) == "high"
    assert settings.colour_heat_c == Settings().colour_heat_c
    assert {problem.path: problem.message.split(" (")[0] for problem in problems} == {
        "colour_heat_c": "must be a list of two numbers like [20, 6], not [5]",
        "colour_power_percent": "must be a list of two numbers like [70, 98], not [-1, 5]",
    }


def test_the_number_and_bar_of_a_gpu_and_of_the_totals_have_the_loads_colour() -> None:
    busy = replace(SAMPLE, utilization=100, memory_used_bytes=70 * GIB, power_w=300.0, temperature_c=79)
    row = GpuRow(busy, "used by ann", "text", lambda name, n: [None] * n)
    (line,) = gpu_lines([row], [row], 150)
    styles = {text.strip(): style for text, style in line if text.strip()}
    assert styles["100%"] == styles["79°C"] == "high"
    assert (styles["70/100Gi"], styles["300 W"], styles["used by ann"]) == ("middle", "low", "text")
    assert [style for text, style in line if "━" in text] == ["high rail", "middle rail"]
    found = totals([busy], RecentHistory({}, {}), Settings())
    assert [(one.label, one.load) for one in found] == [
        ("VRAM", "middle"), ("Util", "high"), ("Power", "low"), ("Temp", "high"),
    ]  # fmt: skip
