from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
import torch
from safetensors.torch import load_file
from support.hanging_ranks import HANGING, HUNG_FILE

from trainer.contract.errors import UserError
from trainer.contract.process import ProcessRef
from trainer.contract.runs.checkpoint_manifest import damage, read_state
from trainer.contract.runs.rank_spec import EXIT_FAILED, EXIT_FINISHED, EXIT_STOPPED, RankSpec, rank_command
from trainer.contract.settings.job import JobConfig
from trainer.contract.store.database import StoreError
from trainer.contract.store.job_store import Control
from trainer.contract.store.metrics_store import WAITING, SeriesReader
from trainer.contract.store.rows import Job
from trainer.ranks.loading import load_trainer
from trainer.ranks.rank import rank_device, report, wait_until_stuck
from trainer.ranks.training_work import TrainingWork, model_devices, set_order_of_sums
from trainer.reporting import rank_log
from trainer.reporting.progress import RunProgress

ENDLESS = {"n_steps": 10**7, "log_every": 20}
UNLOGGED = ENDLESS | {"log_every": 1_000_000}


def curve(run_dir: Path, name: str, rank: int = 0) -> list[float | None]:
    with contextlib.closing(SeriesReader(run_dir / "metrics.db")) as reader:
        return [point.value for point in reader.points(name, rank)]


def is_training(run_dir: Path) -> bool:
    try:
        return bool(curve(run_dir, "loss"))
    except StoreError:
        return False


def steps_done(run_dir: Path) -> int:
    try:
        with contextlib.closing(SeriesReader(run_dir / "metrics.db")) as reader:
            heartbeat = reader.heartbeat()
    except StoreError:
        return 0
    return heartbeat.step if heartbeat else 0


@pytest.mark.parametrize(
    ("sae", "term"),
    [({}, "auxk"), ({"architecture": "gated"}, "gate_l1"), ({"resample_every_tokens": 2048}, "auxk")],
    ids=str,
)
def test_two_ranks_learn_the_same_as_one_rank_from_the_same_global_batches(
    sae: dict,
    term: str,
    make_job: Callable[..., JobConfig],
    make_trainer: Callable,
    start_ranks: Callable,
    kept,
    tmp_path: Path,
) -> None:
    # `dead_after_tokens` is small so that AuxK is active and counters over all ranks affect the result. 40 steps with
    # 256 tokens each are more than three epochs.
    sae = {"dead_after_tokens": 1024, "d_sae": 128} | sae
    alone = make_trainer(make_job(sae=sae, train={"batch_size": 256, "n_steps": 40}), kept)
    alone.run()
    assert max(kept.curve(term)) > 0
    assert ("resample_every_tokens" in sae) == any(kind == "resampled" for kind, _, _ in kept.events)

    ranks = start_ranks(make_job(sae=sae, train={"batch_size": 128, "n_steps": 40}), 2)
    assert ranks.wait() == [EXIT_FINISHED] * 2
    run_dir = ranks.spec.run_dir
    for name in ("loss", "mse", term, "fvu", "l0", "dead_fraction", "grad_norm", "heldout_fvu"):
        assert curve(run_dir, name) == pytest.approx(kept.curve(name), rel=1e-3, abs=1e-5), name
    exported = load_file(run_dir / "sae" / "sae_weights.safetensors")
    expected = load_file(tmp_path / "sae" / "sae_weights.safetensors")
    assert exported.keys() == expected.keys()
    for name, tensor in exported.items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-3, atol=1e-3, msg=name)
    for rank in (0, 1):
        assert len(curve(run_dir, "rank_tokens_per_s", rank)) == len(curve(run_dir, "step_ms", rank)) == 8


def test_a_stop_request_in_the_control_store_ends_both_ranks_after_a_checkpoint(
    make_job: Callable[..., JobConfig], start_ranks: Callable, eventually: Callable, tmp_path: Path
) -> None:
    with contextlib.closing(Control(tmp_path / "control.db")) as control:
        job_id = control.create_job(
            Job(name="a", config="", user="u", host="h", device="cpu", gpu_source="none", world_size=2)
        )
        ranks = start_ranks(make_job(train=UNLOGGED), 2, control_db=control.path, job_id=job_id)
        run_dir = ranks.spec.run_dir
        eventually(lambda: steps_done(run_dir))
        control.request(job_id, "stop")
        assert ranks.wait(30) == [EXIT_STOPPED] * 2
    (checkpoint,) = (run_dir / "checkpoints").iterdir()
    step = read_state(checkpoint).position.step
    with contextlib.closing(SeriesReader(run_dir / "metrics.db")) as reader:
        heartbeat = reader.heartbeat()
    assert heartbeat is not None
    assert (heartbeat.phase, heartbeat.step) == ("stopped", step)


def test_if_a_rank_is_killed_the_other_exits_within_ten_seconds_and_says_why(
    make_job: Callable[..., JobConfig], start_ranks: Callable, eventually: Callable
) -> None:
    ranks = start_ranks(make_job(train=ENDLESS), 2)
    run_dir = ranks.spec.run_dir
    eventually(lambda: is_training(run_dir))
    ranks.processes[1].kill()
    assert ranks.wait(10) == [EXIT_FAILED, -signal.SIGKILL]
    left = json.loads((run_dir / "attempt1" / "rank0.exit.json").read_text())
    assert left["error"].startswith("the connection to another rank was lost")
    assert "PeerLost" in left["traceback"]
    assert "connection to another rank was lost" in ranks.processes[0].stderr.read().splitlines()[-1]


def test_sigterm_stops_a_rank_after_a_checkpoint_and_ctrl_c_is_ignored(
    make_job: Callable[..., JobConfig], start_ranks: Callable, eventually: Callable
) -> None:
    ranks = start_ranks(make_job(train=ENDLESS), 1, command=rank_command)
    run_dir = ranks.spec.run_dir
    eventually(lambda: is_training(run_dir))
    rows = len(curve(run_dir, "loss"))
    ranks.processes[0].send_signal(signal.SIGINT)
    eventually(lambda: len(curve(run_dir, "loss")) > rows + 1)
    for number in (signal.SIGXCPU, signal.SIGTERM, signal.SIGTERM):
        ranks.processes[0].send_signal(number)
    assert ranks.wait(30) == [EXIT_STOPPED]
    assert list((run_dir / "checkpoints").iterdir())


def test_sigterm_to_one_of_two_ranks_stops_both_between_log_rows(
    make_job: Callable[..., JobConfig], start_ranks: Callable, eventually: Callable
) -> None:
    ranks = start_ranks(make_job(train=UNLOGGED), 2)
    run_dir = ranks.spec.run_dir
    eventually(lambda: steps_done(run_dir))
    ranks.processes[1].send_signal(signal.SIGTERM)
    assert ranks.wait(20) == [EXIT_STOPPED] * 2
    (checkpoint,) = (run_dir / "checkpoints").iterdir()
    assert damage(checkpoint) is None
    assert not (run_dir / "metrics.db-wal").exists()


def test_the_rates_of_two_ranks_add_up_to_roughly_the_jobs_rate(
    make_job: Callable[..., JobConfig], start_ranks: Callable
) -> None:
    train = {"batch_size": 1024, "n_steps": 31, "log_every": 10}
    ranks = start_ranks(make_job(sae={"d_sae": 2048}, train=train), 2)
    assert ranks.wait() == [EXIT_FINISHED] * 2
    run_dir = ranks.spec.run_dir
    job, first, second = (
        curve(run_dir, name, rank)
        for name, rank in (("tokens_per_s", 0), ("rank_tokens_per_s", 0), ("rank_tokens_per_s", 1))
    )
    assert len(job) == len(first) == len(second) == 4
    for of_job, *of_ranks in zip(job, first, second, strict=True):
        # A rank's rate excludes the time spent waiting for other ranks.
        assert 0.9 * of_job < sum(of_ranks) < 3 * of_job
    assert max(first + second) < 5 * min(first + second)


def test_garbage_collection_is_re_enabled_after_loading() -> None:
    load_trainer()
    assert gc.isenabled()
    assert gc.get_freeze_count()
    gc.unfreeze()


def test_the_error_for_nccl_running_out_of_memory_names_the_setting_to_change(tmp_path: Path) -> None:
    error = torch.distributed.DistBackendError("NCCL error in: x.cpp:77\nLast error:\nCuda failure 2 'out of memory'")
    report(tmp_path / "left.json", error)
    assert json.loads((tmp_path / "left.json").read_text())["error"].startswith("train.batch_size: ")


_STOPPED_AGAIN = """
import os, signal, threading
from trainer.ranks.rank import hold_signals, _stop_on_sigterm
from trainer.reporting.progress import RunProgress

hold_signals()
stop = threading.Event()
_stop_on_sigterm(stop, RunProgress(), 60, os.getppid())
for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU):
    os.kill(os.getpid(), number)
    assert stop.wait(30)
    stop.clear()
print("each time")
"""


def test_each_stop_signal_is_a_separate_request() -> None:
    done = subprocess.run([sys.executable, "-c", _STOPPED_AGAIN], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("each time\n", "")


def test_a_rank_without_progress_counts_as_stuck_unless_it_is_saving_or_waiting() -> None:
    progress = RunProgress()
    progress.heartbeat("saving", 1, 0)
    waiting = threading.Thread(target=wait_until_stuck, args=(progress, 0.2), daemon=True)
    waiting.start()
    waiting.join(1)
    assert waiting.is_alive()
    progress.heartbeat(WAITING, 1, 0)
    waiting.join(1)
    assert waiting.is_alive()
    for step in range(10):
        progress.heartbeat("training", step, 0)
        waiting.join(0.1)
        assert waiting.is_alive()
    waiting.join(5)
    assert not waiting.is_alive()


@pytest.mark.slow
def test_a_run_folder_can_have_any_name(
    make_job: Callable[..., JobConfig], start_ranks: Callable, tmp_path: Path
) -> None:
    ranks = start_ranks(make_job(), 2, run_dir=tmp_path / "a #1?x=%20", command=rank_command)
    assert ranks.wait() == [EXIT_FINISHED] * 2


ORPHANED = """
import os, signal, subprocess, sys, threading, time
if os.environ["RANK"] == "0":
    signal.pause()
spec, meeting_place, pid_file = sys.argv[1:]
def start():
    rank = subprocess.Popen([sys.executable, "-m", "trainer", "rank", spec], stderr=subprocess.DEVNULL)
    while not os.path.exists(meeting_place):
        time.sleep(0.01)
    with open(pid_file, "w") as file:
        file.write(str(rank.pid) + ".")
# To the kernel, the thread that started the rank is its parent.
threading.Thread(target=start).start()
signal.pause()
"""


def test_a_waiting_rank_exits_with_its_supervisor_not_with_the_thread_that_started_it(
    make_job: Callable[..., JobConfig], start_ranks: Callable, eventually: Callable, tmp_path: Path
) -> None:
    meeting_place, pid_file = tmp_path / "run" / "attempt1" / "rendezvous", tmp_path / "pid"
    supervisors = start_ranks(
        make_job(train=ENDLESS),
        2,
        command=lambda spec: [sys.executable, "-c", ORPHANED, str(spec), str(meeting_place), str(pid_file)],
    )
    eventually(lambda: pid_file.exists() and pid_file.read_text().endswith("."))
    rank = ProcessRef.of(int(pid_file.read_text()[:-1]))
    try:
        # Wait until the rank has received the signal that the kernel sends when the thread that started the rank exits.
        eventually(lambda: not _has_pending_sigterm(rank.pid))
        assert rank.is_alive()
        supervisors.processes[1].kill()
        eventually(lambda: not rank.is_alive(), 10)
    finally:
        rank.send(signal.SIGKILL)


SUPERVISED = """
import os, signal, subprocess, sys
rank = subprocess.Popen([sys.executable, "-m", "support.hanging_ranks", "rank", sys.argv[1]])
with open(sys.argv[2] + os.environ["RANK"], "w") as file:
    file.write(str(rank.pid) + ".")
signal.pause()
"""


def test_a_rank_in_a_hanging_exchange_exits_once_its_supervisor_and_rank_0_are_gone(
    make_job: Callable, start_ranks: Callable, eventually: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hung, tests = tmp_path / "hung", Path(__file__).parents[2]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tests.parent), str(tests)]))
    monkeypatch.setenv(HANGING, "1")
    monkeypatch.setenv(HUNG_FILE, str(hung))
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    supervisors = start_ranks(
        make_job(train=ENDLESS), 2, command=lambda spec: [sys.executable, "-c", SUPERVISED, spec, tmp_path / "pid"]
    )
    eventually(hung.exists)
    first, other = (ProcessRef.of(int((tmp_path / f"pid{rank}").read_text()[:-1])) for rank in range(2))
    try:
        supervisors.processes[1].kill()
        # Wait until the rank has received the signal that the kernel sends when its supervisor dies. The rank is still
        # waiting for rank 0.
        eventually(lambda: not _has_pending_sigterm(other.pid))
        assert other.is_alive()
        supervisors.processes[0].kill()
        first.send(signal.SIGKILL)
        eventually(lambda: not other.is_alive(), 10)
    finally:
        for process in (first, other):
            process.send(signal.SIGKILL)


def _has_pending_sigterm(pid: int) -> bool:
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return bool(int(status["ShdPnd"], 16) & 1 << signal.SIGTERM - 1)


def test_a_failed_rank_writes_its_reason_to_a_file_and_one_line_to_stderr(
    make_job: Callable[..., JobConfig], start_ranks: Callable, tmp_path: Path
) -> None:
    ranks = start_ranks(make_job(data={"path": str(tmp_path / "gone")}), 1, command=rank_command)
    assert ranks.wait() == [EXIT_FAILED]
    left = json.loads((ranks.spec.run_dir / "attempt1" / "rank0.exit.json").read_text())
    assert left["error"].startswith("data.path: there is nothing at")
    assert "Traceback" in left["traceback"]
    assert ranks.processes[0].stderr.read().splitlines() == [left["error"]]


def test_log_lines_contain_no_terminal_control_characters(capsys: pytest.CaptureFixture[str]) -> None:
    rank_log.say("checkpoint saved: /data/\x1b]2;owned\x07\x9b31m\u202e\udcff")
    assert capsys.readouterr().out.removesuffix("\n").isprintable()


def test_a_rank_finds_the_gpus_for_its_language_model_or_reports_missing_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = RankSpec(tmp_path, tmp_path, attempt=1, world_size=2, model_gpus=4, device="cuda")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 6)
    assert model_devices(spec, 1) == [torch.device("cuda", 3), torch.device("cuda", 5)]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 5)
    assert model_devices(spec, 0) == [torch.device("cuda", 2), torch.device("cuda", 4)]
    with pytest.raises(UserError, match="sees 5 GPUs, so the language model of rank 1 lacks one"):
        model_devices(spec, 1)
    simulated = RankSpec(tmp_path, tmp_path, attempt=1, world_size=1, model_gpus=2, device="cpu")
    assert model_devices(simulated, 0) == [torch.device("cpu")] * 2


@pytest.mark.parametrize(
    ("n_ranks", "rank", "name", "refusal"),
    [
        (2, 0, "NVIDIA H200 MIG 3g.71gb", "launch.gpus: GPU 0 is a MIG slice, and NCCL cannot connect slices"),
        # CUDA shows a process only one MIG slice, even if several slices are visible.
        (2, 1, "NVIDIA H200 MIG 3g.71gb", "launch.gpus: GPU 1 is a MIG slice, and NCCL cannot connect slices"),
        (1, 0, "NVIDIA H200 MIG 3g.71gb", "begun"),
        (2, 0, "NVIDIA H200", "begun"),
    ],
)
def test_a_rank_with_a_mig_slice_from_a_launcher_fails_before_it_connects(
    make_job: Callable[..., JobConfig],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    n_ranks: int,
    rank: int,
    name: str,
    refusal: str,
) -> None:
    def begin(*_: object) -> NoReturn:
        raise UserError("begun")

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(name=name))
    monkeypatch.setattr(torch, "manual_seed", begin)
    monkeypatch.setenv("LOCAL_RANK", str(rank))
    spec = RankSpec(tmp_path, tmp_path, attempt=1, world_size=n_ranks, device="cuda", on_one_host=False)
    with pytest.raises(UserError, match=refusal):
        TrainingWork(spec, rank, make_job(), threading.Event(), begin).run(RunProgress())


@pytest.mark.parametrize(
    ("n_visible", "rank", "spec", "index"),
    [
        (8, 3, {}, 3),
        # With `srun --gpus-per-task=1`, each rank sees only one GPU, regardless of SLURM_LOCALID.
        (1, 3, {"by_files": True}, 0),
        (1, 3, {"on_one_host": False}, 0),
        (1, 0, {"gpu_uuids": ("GPU-1",)}, 0),
        (1, 1, {"gpu_uuids": ("GPU-1", "GPU-2")}, None),
        (1, 1, {"as_one_process": True}, None),
        (0, 0, {}, None),
        (2, 3, {}, None),
    ],
)
def test_a_rank_uses_its_gpu_even_if_a_launcher_makes_only_this_gpu_visible(
    n_visible: int, rank: int, spec: dict[str, Any], index: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: n_visible)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    of_rank = RankSpec(run_dir=tmp_path, output_dir=tmp_path, attempt=1, world_size=8, device="cuda", **spec)
    if index is None:
        with pytest.raises(UserError, match=rf"sees {n_visible} GPUs, so rank {rank} has none"):
            rank_device(of_rank, rank)
    else:
        assert rank_device(of_rank, rank) == torch.device("cuda", index)


def test_deterministic_ranks_sum_in_rings_unless_the_user_has_chosen_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NCCL_ALGO", raising=False)
    set_order_of_sums(False)
    assert "NCCL_ALGO" not in os.environ
    monkeypatch.setenv("NCCL_ALGO", "Tree")
    set_order_of_sums(True)
    assert os.environ["NCCL_ALGO"] == "Tree"
    monkeypatch.delenv("NCCL_ALGO")
    set_order_of_sums(True)
    assert os.environ.pop("NCCL_ALGO") == "Ring"
