"""Tests for the simulated machine."""

from __future__ import annotations

import getpass

import pytest

from sae_tui.gpu import load_source, source_names
from sae_tui.gpu.base import SourceUnavailable
from sae_tui.gpu.simulated import ENV_FAULTS, GIB, Simulated, uuid_of
from trainer.contract.errors import UserError


def test_the_demo_machine_has_three_idle_gpus_and_one_used_by_another_user() -> None:
    box = Simulated(clock=lambda: 1000.0)
    samples = [box.sample(index, processes=True) for index in range(box.open())]
    assert [sample.name.split()[-1] for sample in samples] == ["3090", "3090", "3080", "3090"]
    assert [sample.memory_total_bytes for sample in samples] == [24 * GIB, 24 * GIB, 10 * GIB, 24 * GIB]
    assert all(sample.processes == () and sample.utilization == 0 for sample in samples[:3])
    (other_user,) = samples[3].processes or ()
    assert (other_user.pid, other_user.user, other_user.name) == (31415, "mallory", "python train.py")
    assert other_user.memory_used_bytes == 21 * GIB
    assert 94 <= (samples[3].utilization or 0) <= 100


def test_the_same_clock_produces_the_same_samples() -> None:
    one, other = (Simulated(8, clock=lambda: 1234.5) for _ in range(2))
    assert [one.sample(i, processes=True) for i in range(8)] == [other.sample(i, processes=True) for i in range(8)]


def test_a_simulated_gpu_shows_the_load_from_the_job_running_on_it() -> None:
    now, occupied = [0.0], {}
    box = Simulated(clock=lambda: now[0], occupied=lambda: occupied)
    idle = box.sample(1, processes=True)
    occupied[uuid_of(1)] = (4242, 8 * GIB)
    readings = []
    for second in range(300):
        now[0] = float(second)
        readings.append(box.sample(1, processes=True))
    assert all(80 <= (sample.utilization or 0) <= 95 for sample in readings)
    assert readings[0].memory_used_bytes == (idle.memory_used_bytes or 0) + 8 * GIB
    temperatures = [sample.temperature_c or 0 for sample in readings]
    assert temperatures == sorted(temperatures)
    assert temperatures[0] == idle.temperature_c
    assert temperatures[-1] > temperatures[0] + 30
    assert (readings[-1].power_w or 0) > 5 * (idle.power_w or 0)
    (process,) = readings[-1].processes or ()
    assert (process.pid, process.user, process.memory_used_bytes) == (4242, getpass.getuser(), 8 * GIB)
    occupied.clear()
    now[0] = 1000.0
    after = box.sample(1, processes=True)
    assert (after.utilization, after.processes, after.memory_used_bytes) == (0, (), idle.memory_used_bytes)
    assert after.temperature_c == temperatures[-1]
    now[0] = 2000.0
    assert box.sample(1, processes=True).temperature_c == idle.temperature_c


def test_a_job_never_shows_more_memory_than_the_gpu_has() -> None:
    box = Simulated(clock=lambda: 0.0, occupied=lambda: {uuid_of(2): (1, 64 * GIB)})
    assert box.sample(2, processes=False).memory_used_bytes == 10 * GIB


@pytest.mark.parametrize("count", [1, 4, 16])
def test_the_simulated_machine_has_the_requested_number_of_gpus(count: int) -> None:
    box = Simulated(count)
    assert box.open() == count
    assert len({box.sample(index, processes=False).uuid for index in range(count)}) == count


@pytest.mark.parametrize("count", [0, 65])
def test_too_few_or_too_many_gpus_are_rejected(count: int) -> None:
    with pytest.raises(UserError, match="must be 1 to 64"):
        Simulated(count)


def test_faults_are_set_by_an_environment_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENV_FAULTS, "1:lost, 2:no_power")
    box = Simulated()
    lost = box.sample(1, processes=True)
    assert (lost.healthy, lost.uuid, lost.utilization) == (False, uuid_of(1), None)
    assert "fallen off the bus" in lost.reason
    assert box.sample(2, processes=True).power_w is None
    assert box.sample(2, processes=True).healthy


@pytest.mark.parametrize("text", ["lost", "1:melted", "x:lost"])
def test_an_unknown_fault_is_rejected_by_name(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv(ENV_FAULTS, text)
    with pytest.raises(UserError, match=f'{ENV_FAULTS} takes INDEX:FAULT, .* not "{text}"'):
        Simulated()


@pytest.mark.parametrize("name", source_names())
def test_every_gpu_source_is_loaded_by_its_name(name: str) -> None:
    source = load_source(name)
    assert source.name == ("nvml" if name == "auto" else name)
    assert source.cuda is (source.name in ("nvml", "amdsmi"))


def test_options_are_passed_to_the_gpu_source() -> None:
    assert load_source("simulated", count=2).open() == 2


def test_an_unknown_source_is_rejected_with_a_list_of_known_ones() -> None:
    with pytest.raises(UserError, match='must be "auto" or "nvml" or "amdsmi" or "simulated" or "none", not "rocm"'):
        load_source("rocm")


def test_the_source_none_is_reported_as_monitoring_off() -> None:
    with pytest.raises(SourceUnavailable, match="monitoring is off"):
        load_source("none").open()
