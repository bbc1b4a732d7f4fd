"""Tests for jobs with real training processes.

There are only a few such tests, because each process has to import torch.
"""

from __future__ import annotations

import json
import os
import signal
import time

import pytest
import torch
from safetensors.torch import load_file
from support.tiny_models import make_model, sentences

from sae_tui.jobs import edits
from sae_tui.jobs.launch import launching
from sae_tui.jobs.launch.placement import Placement
from sae_tui.jobs.reconcile import reconcile
from sae_tui.jobs.view.reader import JobReader
from trainer.contract.runs.rank_spec import read_spec
from trainer.contract.settings.job_file import parse_job
from trainer.contract.store.states import JobState

TWO_GPUS = Placement("cpu", ((0, "GPU-51a0-sim-0"), (1, "GPU-51a0-sim-1")), 2)
START_S = 90.0


def launch(box, n_steps: int = 1_000_000) -> int:
    job = box.config().replace("train", n_steps=n_steps, log_every=1)
    return launching.launch(box.data, job, TWO_GPUS, gpu_source="simulated")


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_ranks_save_and_stop_on_request(box, wait_for):
    job_id = launch(box)
    box.wait(job_id, JobState.RUNNING, timeout_s=START_S)
    reader = JobReader(box.data, job_id)
    wait_for(lambda: reader.poll() and {("loss", 0), ("tokens_per_s", 0)} <= reader.series.keys(), "curves")
    edits.stop(box.data, job_id)
    job = box.wait_ended(job_id, timeout_s=START_S)
    assert (job.state, job.error) == (JobState.STOPPED, None)
    assert [rank.exit_code for rank in box.control.ranks(job_id)] == [3, 3]
    assert any(box.data.run(job_id).checkpoints.iterdir())
    reader.close()


@pytest.mark.timeout(200)
def test_a_killed_rank_is_the_reported_cause_even_if_its_peer_lost_the_connection(box):
    job_id = launch(box)
    box.wait(job_id, JobState.RUNNING, timeout_s=START_S)
    killed = box.control.ranks(job_id)[1]
    killed.process.send(signal.SIGKILL)
    begun = time.monotonic()
    job = box.wait_ended(job_id)
    assert time.monotonic() - begun < 12
    assert job.state == JobState.FAILED
    assert job.error.startswith("rank 1 was killed (SIGKILL)")
    assert box.living(job_id) == []


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_ranks_do_not_outlive_a_killed_supervisor(box):
    job_id = launch(box)
    box.wait(job_id, JobState.RUNNING, timeout_s=START_S)
    os.kill(box.job(job_id).supervisor_pid, signal.SIGKILL)
    deadline = time.monotonic() + 30
    while not reconcile(box.data):
        assert time.monotonic() < deadline, box.living(job_id)
        time.sleep(0.1)
    assert box.job(job_id).state == JobState.LOST
    assert box.living(job_id) == []
    assert any(box.data.run(job_id).checkpoints.iterdir())


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_a_job_stopped_before_its_first_step_does_not_disturb_a_simultaneous_job(box):
    first = launch(box)
    job = box.config().replace("train", n_steps=3)
    second = launching.launch(box.data, job, Placement("cpu", (), 2), gpu_source="none")
    edits.stop(box.data, first)
    assert box.wait_ended(second, timeout_s=START_S).state == JobState.FINISHED
    assert box.wait_ended(first, timeout_s=START_S).state == JobState.STOPPED


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_weights_are_bit_identical_if_the_language_model_has_its_own_gpu(box, tmp_path):
    model, text = make_model(tmp_path / "model", "gpt2"), tmp_path / "text.jsonl"
    text.write_text("".join(json.dumps({"text": one}) + "\n" for one in sentences(300)))

    def launched(model_gpus: int, where: Placement, source: str) -> int:
        data = {
            "source": "model", "model": str(model), "hook": "resid_post.1", "text": str(text), "context": 32,
            "batch_tokens": 128, "shuffle_tokens": 300, "held_out_tokens": 100, "model_gpus": model_gpus,
        }  # fmt: skip
        sae, train = {"d_sae": 64, "k": 4}, {"batch_size": 64, "n_steps": 30, "deterministic": True}
        gpus = [index for index, _ in where.gpus] or "cpu"
        job, problems = parse_job({"data": data, "sae": sae, "train": train, "launch": {"gpus": gpus}})
        assert job, problems
        return launching.launch(box.data, job, where, gpu_source=source)

    apart = launched(1, TWO_GPUS, "simulated")
    together = launched(0, Placement("cpu", (), 1), "none")
    for job_id in (apart, together):
        job = box.wait_ended(job_id, timeout_s=START_S)
        assert (job.state, job.error) == (JobState.FINISHED, None)
    job, spec = box.job(apart), read_spec(box.data.run(apart).rank_spec(1))
    assert (job.world_size, job.gpu_uuids, job.step) == (2, ("GPU-51a0-sim-0", "GPU-51a0-sim-1"), 30)
    assert (spec.world_size, spec.model_gpus) == (1, 1)
    assert [rank.rank for rank in box.control.ranks(apart)] == [0]
    log = box.data.run(apart).log(0).read_text()
    assert "plan: single on 1; the language model has 1 of 2 GPUs to itself; it reads the whole text, for " in log
    weights = [load_file(box.data.sae(one) / "sae_weights.safetensors") for one in (apart, together)]
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(tensor, weights[1][name]) for name, tensor in weights[0].items())
