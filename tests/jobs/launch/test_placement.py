"""Tests for GPU availability and recommendations, and for how `launch.gpus` is resolved."""

from __future__ import annotations

import dataclasses
import socket
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.extractions import extraction_job
from support.workloads import look_of, stream_of_model, workload

from sae_tui.gpu.base import GpuProcess, GpuSample
from sae_tui.jobs.gpus.availability import FOREIGN_MEMORY_BYTES, GpuChoice, choices, fit, holders
from sae_tui.jobs.launch import placement
from sae_tui.jobs.launch.kinds.training import LaunchTraining
from sae_tui.jobs.launch.placement import Placement, machine, propose_here, recommend
from sae_tui.jobs.queue.gpu_reader import gpus
from sae_tui.jobs.user import user_name
from trainer.contract.errors import JobFileError
from trainer.contract.paths import DataDir
from trainer.contract.planning import memory
from trainer.contract.planning.forecast import forecast
from trainer.contract.planning.hardware import CPU, MeasuredHardware, Speeds, slowest
from trainer.contract.planning.workload import Workload
from trainer.contract.settings.job import SweepAxis
from trainer.contract.settings.job_file import dump_job, parse_job
from trainer.contract.settings.sources import DataShape
from trainer.contract.store.rows import Job, Lease, Rank
from trainer.contract.store.states import JobState
from trainer.contract.wording import duration

GIB = 2**30


def sample(index: int = 0, **fields) -> GpuSample:
    defaults = {"memory_total_bytes": 24 * GIB, "memory_used_bytes": GIB, "processes": ()}
    return GpuSample(index, f"GPU-{index}", "RTX 3090", 0.0, **(defaults | fields))


def choice(index: int, free: int | None = 10 * GIB, state: str = "available", reason: str = "") -> GpuChoice:
    return GpuChoice(index, f"GPU-{index}", "RTX 3090", 24 * GIB, free, state, None, reason)


SLICE = GpuChoice(1, "MIG-1", "H200 MIG 3g.71gb", 24 * GIB, 10 * GIB, "available", None)


def place(job, choices, *, source_cuda: bool, **options) -> Placement:
    """Assign a job to these GPUs on this machine."""
    proposal = propose_here(job, choices, DataDir(Path("/nowhere")), cuda=source_cuda)
    return placement.place(proposal, choices, **options)


def job(job_id: int, **fields) -> Job:
    defaults = {"name": "run", "config": "", "user": "ann", "host": socket.gethostname(), "gpu_source": "nvml"}
    return Job(id=job_id, device="cuda", **(defaults | {"state": JobState.RUNNING} | fields))


def lease(index: int, job_id: int, host: str | None = None) -> Lease:
    host = host or socket.gethostname()
    return Lease(host=host, gpu_uuid=f"GPU-{index}", gpu_index=index, job_id=job_id, user="ann", pid=1, since=0.0)


def rank(job_id: int, number: int, pid: int) -> Rank:
    return Rank(job_id=job_id, attempt=1, rank=number, pid=pid, start_ticks=1, boot_id="b")


# Availability.


@pytest.mark.parametrize(
    ("process", "reason"),
    [
        (GpuProcess(9, "mallory", "python", 5 * GIB), "used by mallory (pid 9, python)"),
        (GpuProcess(9, "mallory", None, None), "used by mallory (pid 9)"),
        (GpuProcess(9, None, None, FOREIGN_MEMORY_BYTES + 1), "used by another process (pid 9)"),
        (GpuProcess(9, "mallory", "Xorg", FOREIGN_MEMORY_BYTES), ""),
    ],
)
def test_a_gpu_is_busy_if_another_users_process_holds_a_lot_of_memory(process, reason):
    (gpu,) = choices([sample(processes=(process,))], holders([], [], []))
    assert (gpu.state, gpu.reason) == ("busy" if reason else "available", reason)


def test_a_gpu_is_free_as_soon_as_our_own_process_has_ended():
    ended = GpuProcess(4_000_000, user_name(), "python -m trainer", 5 * GIB)
    (gpu,) = choices([sample(processes=(ended,))], holders([], [], []))
    assert gpu.state == "available"


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"memory_used_bytes": 20 * GIB, "utilization": 98}, "in use (98 %, 20.0 GiB) by an unseen process"),
        ({"memory_used_bytes": 20 * GIB, "processes": None}, "in use (20.0 GiB) by an unseen process"),
        ({"memory_used_bytes": None, "utilization": 98}, "in use (98 %) by an unseen process"),
        (
            {"memory_used_bytes": 5 * GIB, "processes": (GpuProcess(9, "ann", "Xorg", GIB // 8),)},
            "in use (5.0 GiB) by an unseen process",
        ),
    ],
)
def test_a_gpu_in_use_without_visible_processes_is_busy(fields, reason):
    (gpu,) = choices([sample(**fields)], holders([], [], []))
    assert gpu.state == "busy"
    assert gpu.reason.startswith(reason)
    assert not gpu.may_be_offered
    assert recommend([gpu], 0, 1).gpus == ()


def test_a_gpu_whose_processes_cannot_be_listed_is_never_reported_as_idle():
    quiet, blind = sample(0, processes=None, memory_used_bytes=0), sample(1, processes=None, memory_used_bytes=None)
    quiet, blind = choices([quiet, blind], holders([], [], []))
    assert (quiet.state, quiet.may_be_offered) == ("available", True)
    assert quiet.reason == "0.0 GiB in use, its processes cannot be listed"
    assert (blind.state, blind.may_be_offered) == ("available", False)
    assert blind.reason == "its use is unknown"


def test_gpu_use_by_unknown_processes_is_attributed_to_the_job_that_leased_the_gpu():
    running = job(7, gpu_uuids=("GPU-0",))
    held = holders([running], [lease(0, 7)], [])
    used = sample(memory_used_bytes=20 * GIB, utilization=90)
    assert choices([used], held)[0].reason == "job 7 (run)"
    for processes in ((), None, (GpuProcess(9, None, None, 20 * GIB),)):
        (gpu,) = gpus([dataclasses.replace(used, processes=processes)], held, [lease(0, 7)], {7: running})
        assert gpu.other_user == ""
        assert len(gpu.leases) == 1


def test_a_gpu_shared_by_several_jobs_lists_all_of_them() -> None:
    both = [job(7, gpu_ids=(0,), gpu_uuids=("GPU-0",)), job(8, gpu_ids=(0,), gpu_uuids=("GPU-0",))]
    (gpu,) = choices([sample()], holders(both, [lease(0, 7), lease(0, 8)], []))
    assert (gpu.state, gpu.reason) == ("busy", "jobs 7 and 8")


def test_memory_in_a_reading_taken_before_a_job_ended_is_not_attributed_to_others():
    ended = job(7, gpu_uuids=("GPU-0",), state=JobState.FINISHED, ended=100.0)
    old = dataclasses.replace(sample(memory_used_bytes=20 * GIB), timestamp=99.0)
    new = dataclasses.replace(old, timestamp=101.0)
    held = holders([ended], [], [])
    assert [one.state for one in choices([old, new], held)] == ["available", "busy"]


def test_memory_used_by_unlisted_processes_on_a_leased_gpu_is_not_free():
    mine = lease(0, 7)
    mine = msgspec.structs.replace(mine, shared=True, memory_bytes=6 * GIB)
    held = holders([job(7, gpu_uuids=("GPU-0",))], [mine], [])
    free = [
        gpus([sample(memory_used_bytes=used * GIB, processes=processes)], held, [mine], {})[0].free_bytes
        for used, processes in ((5, ()), (16, ()), (16, (GpuProcess(9, "bob", "python", 12 * GIB),)))
    ]
    assert free == [24 * GIB, 14 * GIB, 12 * GIB]


def test_a_gpu_split_into_mig_slices_is_not_offered():
    (gpu,) = choices([sample(unusable="it is split into MIG instances")], holders([], [], []))
    assert (gpu.state, gpu.reason) == ("unhealthy", "it is split into MIG instances")


def test_memory_reserved_by_the_driver_is_neither_free_nor_usable():
    (gpu,) = choices([sample(memory_used_bytes=3 * GIB, memory_free_bytes=20 * GIB)], holders([], [], []))
    assert (gpu.memory_free_bytes, gpu.memory_usable_bytes) == (20 * GIB, 23 * GIB)


def test_a_job_that_accepts_any_gpus_gets_none_whose_free_memory_is_unknown(box):
    blind = [choice(0, None), choice(1)]
    where = place(box.config(gpus="auto:1"), blind, source_cuda=True)
    assert where.any_gpus
    with pytest.raises(JobFileError, match=r"the free memory of GPU 0 is unknown; name the GPUs to use, as in .*\[0\]"):
        place(box.config(gpus="auto:2"), blind, source_cuda=True)
    assert place(box.config(gpus=[0]), blind, source_cuda=True).gpus == ((0, "GPU-0"),)


def test_the_reason_names_the_largest_process_of_any_other_user():
    processes = (GpuProcess(1, "ann", "a", GIB), GpuProcess(2, "bob", "b", 3 * GIB), GpuProcess(3, "eve", "c", 2 * GIB))
    (gpu,) = choices([sample(processes=processes)], holders([], [], []))
    assert gpu.reason == "used by bob (pid 2, b)"


def test_a_leased_gpu_names_its_job_and_the_jobs_ranks_do_not_count_as_other_users():
    running = job(41, attempt=1, gpu_uuids=("GPU-0", "GPU-1"))
    held = holders([running], [lease(0, 41), lease(1, 41)], [rank(41, 0, 500), rank(41, 1, 501)])
    assert held.pids == {"GPU-0": 500, "GPU-1": 501}
    ours = GpuProcess(501, "ann", "python", 4 * GIB)
    gpus = choices([sample(0), sample(1), sample(2, processes=(ours,))], held)
    assert [one.state for one in gpus] == ["busy", "busy", "available"]
    assert (gpus[0].job_id, gpus[0].reason) == (41, "job 41 (run)")


def test_a_descendant_of_one_of_our_processes_does_not_count_as_another_user():
    running = job(41, attempt=1, gpu_uuids=("GPU-0",), supervisor_pid=499)
    leases = [lease(0, 41)]
    held = holders([running], leases, [rank(41, 0, 500)])
    child, adopted = (
        GpuProcess(pid, "ann", "python", 4 * GIB, above) for pid, above in ((501, (500, 7)), (502, (499,)))
    )
    assert [one.state for one in choices([sample(1, processes=(child, adopted))], held)] == ["available"]
    stranger = GpuProcess(503, "ann", "python", 4 * GIB, (7,))
    (gpu,) = choices([sample(1, processes=(child, stranger))], held)
    assert gpu.reason == "used by ann (pid 503, python)"
    used = sample(0, processes=(child, stranger), memory_used_bytes=8 * GIB, memory_free_bytes=16 * GIB)
    (queued,) = gpus([used], held, leases, {41: running})
    assert queued.free_bytes == 20 * GIB


def test_leases_held_by_ended_jobs_and_on_other_machines_are_ignored():
    ended = job(1, state=JobState.LOST)
    elsewhere = job(2, host="other")
    held = holders([ended, elsewhere], [lease(0, 1), lease(1, 2, host="other"), lease(2, 3)], [])
    assert held.jobs == {}


def test_a_gpu_with_an_unreadable_uuid_is_never_assigned():
    (gpu,) = choices([sample(failed={"uuid": "error"})], holders([], [], []))
    assert gpu.state == "unhealthy"
    assert "UUID" in gpu.reason
    assert recommend([gpu], GIB, 1).gpus == ()


def test_the_reason_why_a_gpu_is_unreadable_is_shown():
    (gpu,) = choices([sample(healthy=False, reason="fell off the bus", memory_used_bytes=None)], holders([], [], []))
    assert (gpu.state, gpu.reason, gpu.memory_free_bytes) == ("unhealthy", "fell off the bus", None)


@pytest.mark.parametrize(
    ("free", "words"),
    [
        (12 * GIB, ""),
        (int(11.2 * GIB), ""),
        (int(9.6 * GIB), "needs 11.2 GiB, 9.6 GiB free"),
        (None, "needs 11.2 GiB, free memory unknown"),
    ],
)
def test_a_gpu_that_is_too_small_shows_needed_and_free_memory(free, words):
    assert fit(choice(0, free), int(11.2 * GIB)) == words


# Recommendation.

CHOICES = st.lists(
    st.tuples(st.one_of(st.none(), st.integers(0, 24 * GIB)), st.sampled_from(["available", "busy", "unhealthy"])),
    max_size=16,
).map(lambda rows: [choice(index, free, state, state) for index, (free, state) in enumerate(rows)])


@given(CHOICES, st.integers(0, 24 * GIB), st.integers(1, 16))
def test_recommended_gpus_are_usable_and_have_the_most_free_memory(found, needed, count):
    recommended = recommend(found, needed, count)
    by_index = {one.index: one for one in found}
    usable = {
        one.index
        for one in found
        if one.state == "available" and one.memory_free_bytes is not None and one.memory_free_bytes >= needed
    }
    assert len(recommended.gpus) == len(set(recommended.gpus)) == min(count, len(usable))
    assert set(recommended.gpus) <= usable
    free = [by_index[index].memory_free_bytes for index in recommended.gpus]
    assert free == sorted(free, reverse=True)
    left = [by_index[index].memory_free_bytes for index in usable - set(recommended.gpus)]
    assert not left or max(left) <= min(free, default=0)
    assert bool(recommended.shortfall) == (len(recommended.gpus) < count)
    assert recommended.reasons.keys() == by_index.keys()
    assert all(recommended.reasons.values())


def test_a_message_about_too_few_gpus_states_the_reason_for_every_rejected_gpu():
    gpus = [choice(0), choice(1, GIB), choice(2, state="busy", reason="job 4 (run)")]
    recommended = recommend(gpus, 2 * GIB, 3)
    assert recommended.gpus == (0,)
    assert (
        recommended.shortfall
        == "only 1 of 3 GPUs is available (GPU 1: needs 2.0 GiB, 1.0 GiB free; GPU 2: job 4 (run))"
    )
    assert recommend(gpus[:1], 0, 2).shortfall == "only 1 of 2 GPUs is available (this machine has 1)"


# Placement.


def without_look(placed: Placement) -> Placement:
    return msgspec.structs.replace(placed, look=None)


@pytest.mark.parametrize(
    ("gpus", "indices", "world_size"),
    [("auto", [], 1), ("auto:2", [], 2), ([0, 1], [0, 1], 2), ([1], [1], 1), ("cpu", [], 1), ("cpu:3", [], 3)],
)
def test_launch_gpus_is_resolved_to_gpus_or_cpu_processes(box, gpus, indices, world_size):
    choices = [choice(0), choice(1, state="busy", reason="job 4 (run)"), choice(2, 12 * GIB)]
    placed = place(box.config(gpus=gpus), choices, source_cuda=True)
    assert [index for index, _ in placed.gpus] == indices
    assert placed.world_size == world_size
    assert placed.any_gpus == str(gpus).startswith("auto")
    assert placed.gpus_wanted == (0 if str(gpus).startswith("cpu") else world_size)
    assert placed.device == ("cpu" if str(gpus).startswith("cpu") else "cuda")


def test_simulated_gpus_are_leased_but_the_job_runs_on_the_cpu(box):
    placed = place(box.config(gpus=[0, 1]), [choice(0), choice(1)], source_cuda=False)
    assert without_look(placed) == Placement("cpu", ((0, "GPU-0"), (1, "GPU-1")), 2)


@pytest.mark.parametrize(("gpus", "device", "world_size"), [("auto:4", "cuda", 8), ("cpu", "cpu", 2), ([0], "cuda", 2)])
def test_a_slurm_job_uses_no_gpu_on_this_machine(box, gpus, device, world_size):
    job = box.config(gpus=gpus, backend="slurm", nodes=2)
    assert without_look(place(job, [choice(0)], source_cuda=True)) == Placement(device, (), world_size)


def test_auto_runs_on_the_cpu_if_there_are_no_gpus(box):
    assert without_look(place(box.config(gpus="auto"), [], source_cuda=False)) == Placement("cpu", (), 1)


@pytest.mark.parametrize(
    ("gpus", "choices", "said"),
    [
        ([5], [choice(0)], "there is no GPU 5 here; this machine has GPU 0"),
        ([0], [], "there is no GPU 0 here; this machine has no GPUs"),
        (
            [0],
            [choice(0, state="unhealthy", reason="it is lost")],
            "GPU 0 cannot be used: it is lost; choose another GPU",
        ),
        ("auto:2", [], 'asks for 2 GPUs, but this machine has none; use "cpu:2"'),
        ("auto:2", [choice(0), choice(1, state="unhealthy")], "asks for 2 GPUs, but only 1 of 2 can be used here"),
        ([0, 1], [choice(0), SLICE], "GPU 1 is a MIG slice, and NCCL cannot connect slices"),
        (
            "auto:2",
            [choice(0), SLICE],
            "asks for 2 GPUs, but only 1 of 2 can be used here; a MIG slice cannot be combined with other GPUs",
        ),
    ],
)
def test_unavailable_gpus_are_rejected_with_a_message_that_names_the_setting(box, gpus, choices, said):
    with pytest.raises(JobFileError) as refused:
        place(box.config(gpus=gpus), choices, source_cuda=True)
    (problem,) = refused.value.problems
    assert problem.path == "launch.gpus"
    assert problem.message.startswith(said)


def test_an_extraction_accepts_any_mig_slices(tmp_path):
    job = extraction_job(tmp_path / "model", tmp_path / "corpus.txt", tmp_path / "rows")
    job = msgspec.structs.replace(job, launch=msgspec.structs.replace(job.launch, gpus="auto:2"))
    choices = [msgspec.structs.replace(SLICE, index=index, uuid=f"MIG-{index}") for index in (0, 1)]
    placed = place(job, choices, source_cuda=True)
    assert (placed.world_size, placed.any_gpus) == (2, True)


def test_the_multi_gpu_enabled_setting_can_limit_a_job_to_one_gpu(box):
    choices = [choice(0), choice(1)]
    with pytest.raises(JobFileError, match="multi_gpu_enabled is false"):
        place(box.config(gpus=[0, 1]), choices, source_cuda=True, multi_gpu_enabled=False)
    assert place(box.config(gpus=[1]), choices, source_cuda=True, multi_gpu_enabled=False).world_size == 1


def test_pre_launch_checks_know_which_gpus_are_busy_or_lost(box):
    choices = [choice(0), choice(1, state="busy", reason="job 4"), choice(2, state="unhealthy", reason="lost")]
    box_seen = machine(choices, box.data, cuda=False)
    assert [(gpu.busy, gpu.unhealthy) for gpu in box_seen.gpus] == [("", ""), ("job 4", ""), ("", "lost")]
    assert box_seen.output_root == box.data.root


# Summary.


DATA = DataShape(8, None, 100_000)


def said(config, data=DATA, gpus: int = 2, *, choices=(), speeds=None, past=()) -> str:
    """Return the summary of a job on `gpus` GPUs. With 0, the job keeps the device in its settings."""
    choices = choices or [choice(index) for index in range(gpus)]
    config = config.replace("launch", gpus=list(range(gpus))) if gpus else config
    box = machine(choices, DataDir(Path("/nowhere")), cuda=True)
    look = look_of(config, data, msgspec.structs.replace(box, speeds=speeds or MeasuredHardware()))
    return LaunchTraining().summary(config, look, device="cuda" if gpus else "cpu", past=past)


def test_the_summary_states_devices_batch_size_memory_and_time(box):
    config = box.config().replace("train", batch_size=4096, n_steps=100)
    needed = f"{memory.estimate(workload(config, 8, 2)).total / GIB:.1f} GiB"
    settled = f"2 GPUs, ddp · effective batch 8192 = 4096 × 2 (4096 on 1 GPU) · needs {needed} per GPU"
    assert said(config) == f"{settled} · about 1 s, estimated"
    alike = {"tokens_per_s": 2000.0, "d_in": 8, "world_size": 2, "mode": "ddp", "config": dump_job(config)}
    past = job(1, state=JobState.FINISHED, **alike)
    # 819,200 tokens at 2,000 tokens/s take about 7 min.
    assert said(config, past=[past]).endswith(" · about 7 min")
    slow = alike | {"tokens_per_s": 9.0}
    others = [
        job(2, **slow),
        job(3, state=JobState.FAILED, **slow),
        job(4, state=JobState.FINISHED, **slow | {"world_size": 1}),
        job(5, state=JobState.FINISHED, **slow | {"d_in": 16}),
        job(6, state=JobState.FINISHED, **slow | {"config": dump_job(config.replace("train", batch_size=64))}),
    ]
    assert said(config, past=others).endswith(", estimated")
    assert said(config, past=[*others, past]).endswith(" · about 7 min")
    sweep = msgspec.structs.replace(config, sweep=(SweepAxis("train.seed", (0, 1)),))
    assert said(sweep, past=[past]).endswith(", estimated")


def test_the_mode_and_duration_in_the_summary_are_based_on_measured_gpu_speeds(box):
    config = box.config().replace("sae", d_sae=65536).replace("train", batch_size=4096, n_steps=100_000)
    wide, gpus = DataShape(1024, None, 10**9), [choice(0, 23 * GIB), choice(1, 23 * GIB)]

    def on(bus_bytes_per_s: float) -> str:
        box_speeds = Speeds(5e14, 3e12, bus_bytes_per_s, 1e-5, is_measured=True)
        speeds = MeasuredHardware().with_measured(gpus[0].name, "bf16", 2, box_speeds)
        (expected,) = forecast(Workload(config, 1, wide, gpus[0].name), speeds, counts=(2,))
        text = said(config, wide, choices=gpus, speeds=speeds)
        assert text.startswith(f"2 GPUs, {expected.settled.job.parallel.mode} · ")
        assert text.endswith(f" · about {duration(expected.seconds)}, estimated")
        return text

    slow, fast = on(1e9), on(1e13)
    assert slow.startswith("2 GPUs, tensor")
    assert slow != fast


def test_the_summary_on_the_cpu_uses_measured_process_speeds(box):
    config = box.config(gpus="cpu").replace("train", n_steps=10**6)
    slow, fast = (
        MeasuredHardware().with_measured(CPU, "fp32", 1, Speeds(flops, 1e12, 1e9, 1e-5, is_measured=True))
        for flops in (1e5, 1e10)
    )
    for speeds in (slow, fast):
        (expected,) = forecast(Workload(config, 1, DATA, CPU), speeds, counts=(1,))
        assert said(config, gpus=0, speeds=speeds).endswith(f" · about {duration(expected.seconds)}, estimated")


def test_the_slowest_gpu_determines_the_speed_of_a_mix_of_gpus():
    assert slowest(["NVIDIA H100", "NVIDIA T4", "NVIDIA A100-SXM4-80GB"]) == "NVIDIA T4"


def test_the_summary_of_a_job_without_gpus_states_the_process_count(box):
    config = box.config(gpus="cpu:2").replace("train", batch_size=64, accumulate=3)
    assert said(config, gpus=0).startswith(
        "2 CPU processes, ddp · effective batch 384 = 64 × 3 × 2 (192 on 1 process) · "
    )
    assert said(box.config(gpus="cpu"), gpus=0).startswith("1 CPU process, single · effective batch 64 ·")


def test_the_summary_of_a_sweep_lists_as_many_saes_as_fit_on_a_line(box):
    config = box.config()

    def swept(*axes):
        return said(msgspec.structs.replace(config, sweep=axes), gpus=1)

    few = swept(SweepAxis("sae.k", (16, 32, 64)))
    single = "(hierarchical_topk trains a single SAE for several k)"
    assert few.startswith(f"3 SAEs: k=16, k=32, k=64 {single} · 1 GPU, single · ")
    many = swept(SweepAxis("sae.k", (4, 8)), SweepAxis("train.seed", tuple(range(10))))
    shown = ", ".join(f"k=4 seed={seed}" for seed in range(5))
    assert many.startswith(f"20 SAEs: {shown}, … · 1 GPU")


def test_a_jobs_summary_accounts_for_the_gpus_of_its_language_model(tmp_path):
    data = stream_of_model(tmp_path)

    def said_of(model_gpus) -> str:
        config, problems = parse_job({"data": data | {"model_gpus": model_gpus}, "train": {"n_steps": 100}})
        assert config, problems
        return said(config, config.data_shape(), 4)

    assert said_of(2).startswith("4 GPUs, ddp · effective batch 8192 = 4096 × 2 (4096 on 1 GPU) · ")
    assert said_of(2).endswith(" · the language model has 2 of 4 GPUs to itself")
    assert "16384 = 4096 × 4" in said_of("auto")
    assert " · the language model shares the training GPUs: with " in said_of("auto")
    assert "language model" not in said_of(0)
