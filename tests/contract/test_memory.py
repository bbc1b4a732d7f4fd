"""What a job takes of a GPU's memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from trainer.contract.config import JobConfig
from trainer.contract.memory import CUDA_CONTEXT_BYTES, estimate

MakeJob = Callable[..., JobConfig]
sizes = st.integers(1, 2**17)


def total(make_job: MakeJob, d_in: int, d_sae: int, batch_size: int, world_size: int, **train: Any) -> int:
    job = make_job(sae={"d_sae": d_sae}, train={"batch_size": batch_size, **train})
    return estimate(job, d_in, world_size).total


@given(d_in=sizes, d_sae=sizes, batch_size=sizes, world_size=st.integers(1, 8), more=st.integers(1, 1000))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_more_of_anything_never_takes_less(
    make_job: MakeJob, d_in: int, d_sae: int, batch_size: int, world_size: int, more: int
) -> None:
    least = total(make_job, d_in, d_sae, batch_size, world_size)
    assert total(make_job, d_in, d_sae + more, batch_size, world_size) > least
    assert total(make_job, d_in, d_sae, batch_size + more, world_size) > least
    assert total(make_job, d_in + more, d_sae, batch_size, world_size) > least
    assert total(make_job, d_in, d_sae, batch_size, world_size + 1) >= least
    assert total(make_job, d_in, d_sae, batch_size, world_size, precision="fp32") >= least


def test_the_parameters_are_counted_exactly(make_job: MakeJob) -> None:
    d_in, d_sae = 384, 3072
    parameters = {"W_enc": (d_in, d_sae), "W_dec": (d_sae, d_in), "b_enc": (d_sae,), "b_dec": (d_in,)}
    stored = sum(np.zeros(shape, np.float32).nbytes for shape in parameters.values())
    memory = estimate(make_job(sae={"d_sae": d_sae}), d_in, 1)
    assert (memory.weights, memory.gradients, memory.optimizer) == (stored, stored, 2 * stored)


def test_several_ranks_hold_a_buffer_of_all_gradients(make_job: MakeJob) -> None:
    job = make_job(sae={"d_sae": 64})
    assert estimate(job, 8, 1).communication == 0
    assert estimate(job, 8, 2).communication == estimate(job, 8, 2).gradients


def test_a_step_holds_at_least_its_pre_activations_and_their_gradients(make_job: MakeJob) -> None:
    job = make_job(sae={"d_sae": 3072}, train={"batch_size": 4096, "precision": "fp32"})
    assert estimate(job, 384, 1).activations > 2 * 4 * 4096 * 3072


@pytest.mark.parametrize(("device", "context"), [("cuda", CUDA_CONTEXT_BYTES), ("cpu", 0)])
def test_only_a_gpu_pays_for_a_context(make_job: MakeJob, device: str, context: int) -> None:
    assert estimate(make_job(), 384, 1, device=device).context == context


def test_a_usual_job_fits_a_usual_card(make_job: MakeJob) -> None:
    assert 1 < estimate(make_job(sae={"d_sae": 16384}), 768, 1).total / 2**30 < 8
