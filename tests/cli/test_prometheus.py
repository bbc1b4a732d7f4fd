"""Tests for the Prometheus metrics, parsed with prometheus-client."""

from __future__ import annotations

import math
from collections.abc import Iterable

from prometheus_client import generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from sae_tui.cli_commands.prometheus import ENDED_S, gauge, gpu_metrics, job_metrics, known
from sae_tui.gpu.base import THROTTLING, Condition, GpuSample
from sae_tui.jobs.view.reader import JobView
from trainer.contract.store.states import JobState

NOW = 1_700_000_000.0
Values = dict[tuple[str, tuple[tuple[str, str], ...]], float]


class Metrics(Collector):
    def __init__(self, metrics: Iterable[Metric]) -> None:
        self.collect = lambda: known(metrics)


def text_of(metrics: Iterable[Metric]) -> str:
    return generate_latest(Metrics(metrics)).decode()


def read(text: str) -> Values:
    """Return a dict that maps each name with its labels to a value; check that each combination occurs only once."""
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    values = {(one.name, tuple(sorted(one.labels.items()))): one.value for one in samples}
    assert len(values) == len(samples)
    return values


def job(**fields) -> JobView:
    usual = {"id": 7, "name": "base", "config": "", "user": "me", "host": "h", "device": "cuda", "gpu_source": "nvml"}
    return JobView(**usual | {"state": JobState.RUNNING} | fields)


def test_labels_with_special_characters_are_escaped():
    name = 'a "quoted" \\n back\\slash, {braces} = 1'
    text = text_of([gauge("x", "Help.", [({"name": name, "id": 3}, 1.5)])])
    assert read(text) == {("x", (("id", "3"), ("name", name))): 1.5}


def test_control_characters_in_a_label_are_replaced():
    text = text_of([gauge("x", "Help.", [({"name": "a\nb 1\x1b[31m\u202e"}, 1)])])
    ((_, ((_, label),)),) = read(text)
    assert label == "a�b 1�[31m�"


def test_a_metric_without_values_is_left_out():
    assert text_of([gauge("x", "Help.", [({}, None)]), gauge("y", "Help.", [])]) == ""
    assert text_of([gauge("x", "Help.", [({}, math.inf), ({"a": 1}, math.nan)])]).endswith(' +Inf\nx{a="1"} NaN\n')


def test_gpu_metrics_are_labelled_by_index_uuid_and_name_and_use_base_units():
    condition = Condition(slowed_by=(THROTTLING[0],), sm_clock_mhz=1695, fan_percent=40, rows_failed=False)
    sample = GpuSample(
        3, "GPU-a", "H100", NOW, utilization=98, memory_used_bytes=40 << 30, memory_total_bytes=80 << 30,
        temperature_c=74, power_w=612.5, condition=condition,
    )  # fmt: skip
    lost = GpuSample(4, "GPU-b", "H100", NOW, healthy=False)
    values = read(text_of(gpu_metrics([sample, lost], {"GPU-a": 12})))
    of_first = {name: value for (name, labels), value in values.items() if ("gpu", "3") in labels}
    assert of_first == {
        "sae_tui_gpu_healthy": 1,
        "sae_tui_gpu_utilization_ratio": 0.98,
        "sae_tui_gpu_memory_used_bytes": 40 << 30,
        "sae_tui_gpu_memory_total_bytes": 80 << 30,
        "sae_tui_gpu_memory_free_bytes": 40 << 30,
        "sae_tui_gpu_temperature_celsius": 74,
        "sae_tui_gpu_power_watts": 612.5,
        "sae_tui_gpu_sm_clock_hertz": 1_695_000_000,
        "sae_tui_gpu_fan_ratio": 0.4,
        "sae_tui_gpu_rows_failed": 0,
        "sae_tui_gpu_throttled": 1,
        "sae_tui_gpu_held_by_job": 1,
    }
    labels = (("gpu", "4"), ("name", "H100"), ("uuid", "GPU-b"))
    assert [key for key in values if ("gpu", "4") in key[1]] == [("sae_tui_gpu_healthy", labels)]


def test_jobs_are_exported_with_their_state_and_latest_values():
    running = job(
        step=40, total_steps=100, tokens=4096, tokens_per_s=182.0, loss=0.09, fvu=0.142, heldout_fvu=0.2, energy_wh=2.0
    )
    values = read(text_of(job_metrics([running], NOW)))
    labels = (("id", "7"), ("name", "base"))
    assert (values["sae_tui_job_heldout_fvu", labels], values["sae_tui_job_fvu", labels]) == (0.2, 0.142)
    assert values["sae_tui_job_energy_joules", labels] == 7200
    assert values["sae_tui_job_tokens_per_second", labels] == 182
    states = {key[1][2][1]: value for key, value in values.items() if key[0] == "sae_tui_job_state"}
    assert states.keys() == {str(state) for state in JobState}
    assert [state for state, value in states.items() if value] == ["running"]


def test_a_job_on_a_silent_host_is_exported_without_a_state_or_speed():
    values = read(text_of(job_metrics([job(tokens_per_s=182.0, silent="its host h has been silent")], NOW)))
    assert [key for key, value in values.items() if key[0] == "sae_tui_job_state" and value] == []
    assert values["sae_tui_job_silent", (("id", "7"), ("name", "base"))] == 1
    assert "sae_tui_job_tokens_per_second" not in {name for name, _ in values}


def test_the_help_text_says_whether_an_fvu_is_held_out():
    text = text_of(job_metrics([job(fvu=0.142, heldout_fvu=0.2)], NOW))
    assert "# HELP sae_tui_job_heldout_fvu Latest held-out FVU.\n" in text
    assert "# HELP sae_tui_job_fvu Latest batch FVU.\n" in text


def test_a_job_is_exported_for_an_hour_after_its_end():
    ended = [job(id=i, state=JobState.FINISHED, ended=NOW - ENDED_S + i) for i in (-1, 1)]
    ids = {labels[0][1] for _, labels in read(text_of(job_metrics(ended, NOW)))}
    assert ids == {"1"}
