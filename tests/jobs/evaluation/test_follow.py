"""Tests for the process that evaluates a job: a job has only one evaluation at a time, and every outcome is
recorded.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import msgspec
import pytest
import torch
from safetensors.torch import save_file
from support.report_cards import EFFECTS, PROBING, SPLICED

from sae_tui.jobs import going
from sae_tui.jobs.evaluation import follow, request
from sae_tui.jobs.evaluation.follow import RunningEvaluation
from sae_tui.jobs.evaluation.request import EvaluationRequest
from sae_tui.jobs.going import FAILED, STARTED, STOPPED, Going
from sae_tui.jobs.gpus.availability import GpuChoice
from sae_tui.jobs.gpus.locks import GpuLocks
from sae_tui.jobs.reconcile import reconcile
from sae_tui.jobs.upkeep import trash
from sae_tui.jobs.view.reader import JobsReader
from tests.jobs.conftest import Box, wait_for
from trainer.contract.errors import UserError
from trainer.contract.locks import FileLock
from trainer.contract.process import ProcessRef
from trainer.contract.runs.features import CARD, FEATURES
from trainer.contract.store.states import JobState

# Runs the real evaluation process with a shell script in place of the trainer. The script gets the trainer's arguments
# as $0, $1 and so on.
FAKE = """
import sys
from sae_tui.jobs.evaluation.follow import main
sys.exit(main(sys.argv[2:], ["sh", "-c", sys.argv[1]]))
"""


@pytest.fixture
def job_id(box: Box) -> int:
    """Record a stopped job with an SAE."""
    job_id = box.record()
    box.data.run(job_id).create()
    (folder := box.data.sae(job_id)).mkdir()
    (folder / "cfg.json").touch()
    box.control.transition(job_id, JobState.STOPPED)
    return job_id


def evaluate(box: Box, monkeypatch: pytest.MonkeyPatch, job_id: int, script: str, **asked: Any) -> str:
    monkeypatch.setattr(request, "FOLLOWER", (sys.executable, "-c", FAKE, script))
    return request.evaluate(box.data, EvaluationRequest(job_id, **asked))


def write_card(folder: Path, fvu: float = 0.25, *, is_held_out: bool = True, **parts: Any) -> None:
    folder.mkdir(exist_ok=True)
    card = {"label": folder.name, "figures": {"n_tokens": 1000, "fvu": fvu}, "data": {"is_held_out": is_held_out}}
    card |= parts
    (folder / CARD).write_bytes(msgspec.json.encode(card))


def test_the_trainer_is_started_for_the_run_and_its_result_is_recorded(box: Box, job_id: int, monkeypatch) -> None:
    write_card(box.data.sae(job_id), spliced=SPLICED, probing=PROBING)
    (box.data.sae(job_id) / FEATURES).touch()
    message = evaluate(box, monkeypatch, job_id, 'echo "$0 $@"', model="auto", is_probed=True)
    assert message == f"job {job_id} is being evaluated on the CPU; the evaluation continues if you quit"
    assert request.wait_for_end(box.data, job_id) == (
        True,
        f"job {job_id} was evaluated: FVU 0.2500 on 1,000 held-out rows, CE score 0.950 ± 0.004, "
        "KL score 0.960 ± 0.003, AUC 0.800 ± 0.010 with k = 1, 0.800 ± 0.010 with k = 16; "
        f"f, or `sae-tui features {job_id}`, shows its latents",
    )
    called = box.data.run(job_id).evaluation_log.read_text()
    assert called == f"{box.data.run(job_id).root} --device cpu --model auto --probe\n"
    assert box.data.run(job_id).evaluation_log.stat().st_mode & 0o777 == 0o600
    assert box.messages(job_id, STARTED) == ["is being evaluated on the CPU"]


def test_a_requested_measurement_of_effects_is_named_in_the_command_and_its_message(
    box: Box, job_id: int, monkeypatch
) -> None:
    write_card(box.data.sae(job_id), effects=EFFECTS)
    asked = {"model": "auto", "has_effects": True, "is_spliced": False, "keeps_rows": True}
    evaluate(box, monkeypatch, job_id, 'echo "$0 $@"', **asked)
    went_well, message = request.wait_for_end(box.data, job_id)
    assert went_well
    assert "was evaluated: 21 latents help the model and 13 hurt it (correlation with ablations 0.90); " in message
    called = box.data.run(job_id).evaluation_log.read_text()
    assert called == f"{box.data.run(job_id).root} --device cpu --model auto --tokens 0 --effects --keep-rows\n"


def test_the_message_names_a_sweeps_best_sae_and_says_whether_rows_are_held_out(
    box: Box, job_id: int, monkeypatch
) -> None:
    write_card(box.data.sae(job_id) / "k=8", 0.5, is_held_out=False)
    write_card(box.data.sae(job_id) / "k=16", 0.25, is_held_out=False)
    evaluate(box, monkeypatch, job_id, "true")
    assert request.wait_for_end(box.data, job_id)[1] == (
        f"job {job_id} was evaluated: k=16 has FVU 0.2500 on 1,000 rows that it was trained on, "
        "since no rows are held out; "
        "it has no max-activating examples, since its data has no token ids"
    )


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ('echo "data.path: it is gone" >&2; exit 1', "was not evaluated: data.path: it is gone"),
        ("kill -9 $$", "was not evaluated: it was killed by signal 9; see "),
        (
            'echo "not written: there is no SAE in x"',
            "was evaluated, but its report card is not written: there is no SAE in x",
        ),
        ("true", "was evaluated, but "),
    ],
)
def test_a_failed_evaluation_is_recorded_in_one_sentence(
    box: Box, job_id: int, monkeypatch, script: str, reason: str
) -> None:
    evaluate(box, monkeypatch, job_id, script)
    went_well, message = request.wait_for_end(box.data, job_id)
    assert not went_well
    assert message.startswith(f"job {job_id} {reason}")
    assert box.messages(job_id, FAILED) == [message.removeprefix(f"job {job_id} ")]


def test_a_job_has_one_evaluation_at_a_time_and_it_ends_when_its_process_is_killed(
    box: Box, job_id: int, monkeypatch
) -> None:
    evaluate(box, monkeypatch, job_id, "echo $$ $PPID; exec sleep 600")
    log = box.data.run(job_id).evaluation_log
    wait_for(lambda: len(log.read_text().split()) == 2, "the evaluation")
    trainer, follower = (ProcessRef.of(int(pid)) for pid in log.read_text().split())
    with pytest.raises(UserError, match="is already being evaluated"):
        evaluate(box, monkeypatch, job_id, "true")
    # An evaluation that loses the race for the lock fails with the same message.
    monkeypatch.setattr(request, "refuse", lambda *_: None)
    with pytest.raises(UserError, match=f"job {job_id} is already being evaluated$"):
        evaluate(box, monkeypatch, job_id, "true")
    follower.send(signal.SIGKILL)
    wait_for(lambda: not trainer.is_alive(), "the end of the trainer")
    ended = (False, f"job {job_id} was not evaluated: its process was killed; see {log}")
    assert request.wait_for_end(box.data, job_id) == ended
    assert seen(box, job_id) is None
    # `kill -9` during a write leaves a temporary file like this.
    file = box.data.evaluations / f"{job_id}.json"
    shutil.copy(file, half := file.with_name(f".{file.name}.0123456789abcdef"))
    for _ in range(2):
        reconcile(box.data)
        assert [*box.data.evaluations.iterdir()] == [half]
    assert len(box.messages(job_id, FAILED)) == 1
    assert request.wait_for_end(box.data, job_id) == ended


def test_a_killed_evaluation_is_not_recorded_during_the_next_one_or_through_a_link(
    box: Box, job_id: int, tmp_path: Path
) -> None:
    (dead := subprocess.Popen(["sleep", "600"])).kill()
    process = ProcessRef(dead.pid, 1, ProcessRef.current().boot_id)
    dead.wait()
    going.write(box.data, Going(job_id=job_id, process=process, host=socket.gethostname(), parts=(), began=1.0))
    next_one = FileLock(box.data.run(job_id).evaluation_lock)
    assert next_one.acquire()
    reconcile(box.data)
    assert box.messages(job_id, FAILED) == []
    next_one.release()
    file = box.data.evaluations / f"{job_id}.json"
    file.rename(tmp_path / file.name)
    file.symlink_to(tmp_path / file.name)
    reconcile(box.data)
    assert box.messages(job_id, FAILED) == []
    file.unlink()
    (tmp_path / file.name).rename(file)
    reconcile(box.data)
    assert len(box.messages(job_id, FAILED)) == 1


def test_a_killed_evaluation_does_not_report_the_success_of_an_earlier_one(box: Box, job_id: int, monkeypatch) -> None:
    write_card(box.data.sae(job_id))
    evaluate(box, monkeypatch, job_id, "true")
    assert request.wait_for_end(box.data, job_id)[0]
    since = time.time()
    evaluate(box, monkeypatch, job_id, "true", waits=True, gpu_source="simulated:1")
    (now := seen(box, job_id)).process.send(signal.SIGKILL)
    wait_for(lambda: not now.process.is_alive(), "the end of the evaluation")
    went_well, message = request.wait_for_end(box.data, job_id, since)
    assert (went_well, "its process was killed" in message) == (False, True)


def test_an_evaluation_ends_with_its_trainer_even_if_a_child_still_runs(box: Box, job_id: int, monkeypatch) -> None:
    evaluate(box, monkeypatch, job_id, "sleep 600 & echo $!; exit 3")
    log = box.data.run(job_id).evaluation_log
    assert not request.wait_for_end(box.data, job_id)[0]
    ProcessRef.of(int(log.read_text())).send(signal.SIGKILL)
    assert len(box.messages(job_id, FAILED)) == 1


@pytest.fixture
def process_settings() -> Iterator[None]:
    """Restore the process-wide settings that an evaluation changes."""
    mask, handler = os.umask(0o077), signal.getsignal(signal.SIGHUP)
    os.umask(mask)
    yield
    os.umask(mask)
    signal.signal(signal.SIGHUP, handler)


@pytest.mark.usefixtures("process_settings")
def test_a_stop_request_before_the_trainer_starts_is_not_lost(box: Box, job_id: int) -> None:
    evaluation = RunningEvaluation(box.data, EvaluationRequest(job_id))
    box.control.request(job_id, "stop-evaluation")
    evaluation.run(["sh", "-c", "exec sleep 5"])
    assert box.messages(job_id, STOPPED) == ["was not evaluated: it was stopped; earlier results are kept"]
    assert box.control.open_requests(job_id) == set()


@pytest.mark.usefixtures("process_settings")
def test_an_evaluation_that_has_a_gpu_is_not_shown_as_waiting(box: Box, job_id: int, monkeypatch) -> None:
    gpu = request.ReservedGpu(2, "GPU-2", "nvml", str(box.data.locks))
    looks = iter([(None, "no GPU is free"), (gpu, "")])
    monkeypatch.setattr(follow, "_free_gpu", lambda *_: next(looks))
    monkeypatch.setattr(follow, "LOOK_S", 0.01)
    evaluation = RunningEvaluation(box.data, EvaluationRequest(job_id, waits=True))
    assert evaluation._has_device()
    now = seen(box, job_id)
    assert (now.where, now.waits_for, now.device) == ("GPU 2", "", "cuda")


def seen(box: Box, job_id: int) -> Going | None:
    """Return a job's evaluation as shown in the list of jobs, or None."""
    reader = JobsReader(box.data)
    reader.poll()
    reader.close()
    return next(job.evaluation for job in reader.jobs if job.id == job_id)


REPORTS = """echo '{"stage": "rows", "share": 0.41, "left_s": 180}' >&$SAE_TUI_PROGRESS_FD; exec sleep 600"""


def test_a_running_evaluation_shows_its_progress_and_can_be_stopped(box: Box, job_id: int, monkeypatch) -> None:
    evaluate(box, monkeypatch, job_id, REPORTS, model="auto", keeps_rows=True)
    wait_for(lambda: (now := seen(box, job_id)) and now.reached.share, "the progress")
    now = seen(box, job_id)
    assert now
    assert (now.words, now.parts, now.where) == ("evaluating 41 % · 3 min left · rows", ("model",), "the CPU")
    assert (
        request.stop(box.data, job_id) == f"the evaluation of job {job_id} is being stopped; earlier results are kept"
    )
    message = f"job {job_id} was not evaluated: it was stopped; earlier results are kept"
    assert request.wait_for_end(box.data, job_id) == (False, message)
    assert seen(box, job_id) is None
    with pytest.raises(UserError, match=f"job {job_id} is not being evaluated"):
        request.stop(box.data, job_id)
    # The request that stopped the previous evaluation does not stop the next one.
    write_card(box.data.sae(job_id))
    evaluate(box, monkeypatch, job_id, "true")
    assert request.wait_for_end(box.data, job_id)[0]


def test_an_evaluation_waits_for_a_gpu_and_can_be_stopped_while_it_waits(box: Box, job_id: int, monkeypatch) -> None:
    message = evaluate(box, monkeypatch, job_id, "true", waits=True, gpu_source="simulated:1")
    assert message == f"job {job_id} will be evaluated once a GPU is free, even if you quit"
    # An evaluation is never given a GPU if its job ran on the CPU, so this one keeps waiting.
    wait_for(lambda: (now := seen(box, job_id)) and now.waits_for, "the wait")
    now = seen(box, job_id)
    assert now
    assert now.words == "evaluation waits: no GPU is free"
    request.stop(box.data, job_id)
    message = f"job {job_id} was not evaluated: it was stopped while waiting for a GPU"
    assert request.wait_for_end(box.data, job_id) == (False, message)


def test_the_evaluation_of_a_deleted_job_ends_and_nothing_is_recorded(box: Box, job_id: int, monkeypatch) -> None:
    evaluate(box, monkeypatch, job_id, "exec sleep 600")
    log = box.data.run(job_id).root
    trash.throw_away(box.data, job_id)
    held = box.data.trash / str(job_id) / "run" / "evaluation.lock"
    wait_for(lambda: not request.is_held(held), "the end of the evaluation")
    assert not log.exists()
    assert box.messages(job_id, FAILED) == []


def test_an_evaluation_ends_when_its_data_folder_is_moved_and_does_not_recreate_it(
    box: Box, job_id: int, monkeypatch
) -> None:
    evaluate(box, monkeypatch, job_id, "exec sleep 600")
    follower = (now := seen(box, job_id)) and now.process
    box.control.close()
    moved = box.data.root.rename(box.data.root.with_name("moved"))
    wait_for(lambda: not follower.is_alive(), "the end of the evaluation")
    assert not box.data.root.exists()
    assert moved.exists()


def test_an_idle_gpu_is_locked_to_evaluate_a_job_that_ran_on_a_gpu(box: Box, job_id: int, monkeypatch) -> None:
    choices = [gpu(0, 10, "busy"), gpu(1, 20), gpu(2, 30), gpu(3, None)]
    idle = request.idle_gpu(box.data, box.job(box.record(device="cuda")), choices, "nvml")
    assert idle
    assert (idle.index, idle.uuid, idle.vendor) == (2, "GPU-2", "nvml")
    assert request.idle_gpu(box.data, box.job(job_id), choices, "nvml") is None
    assert request.idle_gpu(box.data, box.job(box.record(device="cuda")), choices, "simulated") is None

    write_card(box.data.sae(job_id))
    idle = msgspec.structs.replace(idle, locks=str(box.data.locks))
    others = GpuLocks(box.data.locks, ["GPU-2"])
    for is_free in (True, False):
        assert is_free or others.take()
        script = 'echo "$2 on <$CUDA_VISIBLE_DEVICES>"'
        assert "GPU 2" in evaluate(box, monkeypatch, job_id, script, gpu=idle)
        assert request.wait_for_end(box.data, job_id)[0]
    called = box.data.run(job_id).evaluation_log.read_text().splitlines()
    assert called == ["cuda on <GPU-2>", "cpu on <>"]
    assert box.messages(job_id, STARTED) == ["is being evaluated on GPU 2", "is being evaluated on the CPU"]


def gpu(index: int, free: int | None, state: Literal["available", "busy"] = "available") -> GpuChoice:
    return GpuChoice(index, f"GPU-{index}", "H200", 100, free, state)


def test_a_job_without_an_sae_cannot_be_evaluated(box: Box, job_id: int) -> None:
    config = 'kind = "extract"\n[model]\npath = "x"\nhooks = ["resid_post.0"]\n[text]\npath = "x"\n'
    refusals = {
        box.record(): "is queued; it can be evaluated once it has ended",
        box.record(config=config): "stores activations and has no SAE; evaluate a job that trains on them",
    }
    (box.data.sae(job_id) / "cfg.json").unlink()
    refusals[job_id] = f"has no SAE to evaluate in {box.data.sae(job_id)}"
    for one, reason in refusals.items():
        with pytest.raises(UserError, match=f"job {one} .*{reason}"):
            request.evaluate(box.data, EvaluationRequest(one))
        assert request.offer(box.data, one)[1] == ""


@pytest.mark.parametrize("tells", [True, False])
def test_an_evaluation_is_offered_only_if_it_can_add_something(box: Box, tmp_path: Path, tells: bool) -> None:
    rows = tmp_path / "rows"
    config = f'[data]\npath = "{rows}"\n'
    job_id = box.record(config=config)
    (folder := box.data.sae(job_id)).mkdir()
    (folder / "cfg.json").touch()
    box.control.transition(job_id, JobState.STOPPED)
    assert "Evaluate it now?" in request.offer(box.data, job_id)[1]
    # Every finished run has a report card, but report cards do not record whether the data has token ids.
    write_card(folder)
    assert "Evaluate it now?" in request.offer(box.data, job_id)[1]
    rows.mkdir()
    origin = {name: torch.zeros(9, dtype=torch.int32) for name in ("token_ids", "positions", "document")}
    save_file({"activations": torch.zeros(9, 4)} | (origin if tells else {}), rows / "a.safetensors")
    message, question = request.offer(box.data, job_id)
    assert message.endswith("since its data has no token ids") != tells
    assert ("Evaluate it now?" in question) == tells
