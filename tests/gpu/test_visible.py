"""Tests for which GPUs the app shows if CUDA_VISIBLE_DEVICES or `--only` hides some of them."""

from __future__ import annotations

import pytest
from support.cards import Cards

from sae_tui.gpu.monitor import Monitor
from sae_tui.gpu.simulated import Simulated
from trainer.contract.paths import DataDir


@pytest.fixture
def start(tmp_path):
    started = []

    def run(source, only=()) -> Monitor:
        data = DataDir(tmp_path / "data")
        data.create()
        started.append(Monitor(source, data, dict, interval_s=0.05, only=only))
        started[-1].start()
        return started[-1]

    yield run
    for monitor in started:
        monitor.stop()


def test_only_visible_gpus_are_shown_and_all_are_sampled(start, until, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-3,GPU-1")
    monitor = start(Cards(4))
    until(lambda: [sample.uuid for sample in monitor.latest()] == ["GPU-1", "GPU-3"])
    assert monitor.hidden == "2 of 4 GPUs, by CUDA_VISIBLE_DEVICES"
    assert [sample.index for sample in monitor.latest()] == [1, 3]
    # Hidden GPUs are sampled too, because the process that stores the history stores it for all users.
    assert len(monitor._sampler.ring(0)) > 0


@pytest.mark.parametrize(
    ("devices", "only", "hidden"),
    [
        ("0,1,2,3", {1}, "1 of 4 GPUs, by --only"),
        ("1,3", {1, 3}, "2 of 4 GPUs, by CUDA_VISIBLE_DEVICES"),
        ("1,3", {1}, "1 of 4 GPUs, by CUDA_VISIBLE_DEVICES and --only"),
    ],
)
def test_each_setting_that_hides_gpus_is_named(start, until, monkeypatch, devices, only, hidden):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", devices)
    monitor = start(Cards(4), only=only)
    until(lambda: {sample.index for sample in monitor.latest()} == only)
    assert monitor.hidden == hidden


def test_the_reason_is_shown_if_no_gpu_is_visible(start, until, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monitor = start(Cards(2))
    until(lambda: monitor.problem)
    assert monitor.problem == 'CUDA_VISIBLE_DEVICES="" hides all 2 GPUs; unset it, or list GPUs in it'
    assert monitor.latest() == ()


def test_if_only_an_unknown_slice_is_visible_no_gpu_is_shown(start, until, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-1/2/0")
    monitor = start(Cards(2))
    until(lambda: monitor.problem)
    assert monitor.problem == 'CUDA_VISIBLE_DEVICES="MIG-1/2/0" hides all 2 GPUs; unset it, or list GPUs in it'


def test_cuda_visible_devices_does_not_hide_simulated_gpus(start, until, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monitor = start(Simulated(2))
    until(lambda: len(monitor.latest()) == 2)
    assert monitor.hidden == ""
