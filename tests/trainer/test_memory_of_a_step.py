"""Checks a step's estimated GPU memory against torch's memory tracker, on tensors that use no memory."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from support.combinations import slow_unless
from support.fake_gpu import CPU, OtherInterpreter, fake_gpu, job_of
from support.kernels import NO_KERNELS, use_kernels
from support.workloads import workload
from torch import Tensor

from trainer.contract.planning import memory
from trainer.contract.settings.catalog import ARCHITECTURES
from trainer.contract.settings.job import JobConfig
from trainer.contract.settings.job_file import members, parse_job
from trainer.optimizers import triton_update
from trainer.parallel.base import Parallel
from trainer.runtime.triton_kernels import (
    DEAD_LATENTS,
    LATENT_SELECTIONS,
    OPTIMIZER_STEPS,
    RECONSTRUCTION_ERRORS,
    SELECTIONS_ACROSS_RANKS,
    SPARSE_PRODUCTS,
)
from trainer.saes import losses
from trainer.saes.kernels import triton_dead_latents, triton_entries, triton_errors, triton_sparse, triton_top_k
from trainer.saes.sparse_acts import SparseActs
from trainer.training.layers import trained_together
from trainer.training.learner import Learner, layer_in

CHOOSING = ("topk", "hierarchical_topk", "batch_topk", "matryoshka_batch_topk")
PENALISED = ("standard", "gated", "jumprelu")
SHAPES = ({"d_sae": 3072, "k": 32}, 384, 4096), ({"d_sae": 24576, "k": 64}, 768, 4096), ({"d_sae": 18432}, 2304, 1024)


class SparseKernels:
    """A stand-in for the sparse-product kernels that only allocates their results."""

    SumBuffers = triton_sparse.SumBuffers

    @staticmethod
    def bag_sums(values: Tensor, indices: Tensor, starts: Tensor, rows: Tensor, *others: Any) -> Tensor:
        return rows.new_empty(len(starts), rows.shape[1], dtype=others[-1])

    @staticmethod
    def sum_by_latent(
        acts: SparseActs, dense: Tensor, rows: Tensor | None = None, *_: Any, **others: Any
    ) -> triton_sparse.Summed:
        acts.indices.tokens_by_latent(acts.d_sae)
        products = None if rows is None else acts.values.new_empty(len(acts.values))
        sums = dense.new_empty(acts.d_sae, dense.shape[1], dtype=torch.float32)
        totals = sums.new_empty(acts.d_sae) if rows is None else None
        return triton_sparse.Summed(sums, products, totals, None)

    @staticmethod
    def weighted_sum(weights: Tensor, rows: Tensor, factor: float) -> Tensor:
        return rows.new_empty(rows.shape[1], dtype=torch.float32)

    @staticmethod
    def row_products(dense: Tensor, rows: Tensor, indices: Tensor, starts: Tensor, filled: Any) -> Tensor:
        return rows.new_empty(len(indices), dtype=torch.float32)


class DeadLatentKernels:
    """A stand-in for the kernels that find AuxK candidates."""

    fits = staticmethod(triton_dead_latents.fits)

    @staticmethod
    def longest_since_fired(
        since_fired: Tensor, b_enc: Tensor, variance: Tensor, dead_after: int, n: int, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor, Tensor]:
        return since_fired.new_empty(n), b_enc.new_empty(n, dtype=dtype), torch.empty_like(variance)

    @staticmethod
    def rows(*arguments: object) -> None:
        """Do nothing, because the kernel writes to existing tensors."""

    add = rows


class TopKKernels:
    """A stand-in for the top-k kernels that only allocates their results."""

    fits, fits_whole = staticmethod(triton_top_k.fits), staticmethod(triton_top_k.fits_whole)
    fits_all = staticmethod(triton_top_k.fits_all)

    @staticmethod
    def largest_of_each(values: Tensor, k: int) -> tuple[Tensor, Tensor]:
        maxima = values.new_empty(len(values), values.shape[1] // triton_top_k._group(values.shape[1], k))
        found = values.new_empty(len(values), k, dtype=torch.int64), values.new_empty(len(values), k)
        del maxima
        return found

    @staticmethod
    def largest_of_all(values: Tensor, n: int) -> Tensor:
        grouped = values.view(-1, triton_top_k._shared_group(values.numel(), n))
        groups = grouped.amax(dim=1).new_empty(n, dtype=torch.int64)
        members = grouped.index_select(0, groups)
        return members.new_empty(n, dtype=torch.int64)

    @staticmethod
    def strongest(values: Tensor, k: int) -> Tensor:
        return torch.empty_like(values)

    @staticmethod
    def are_largest(values: Tensor, k: int) -> tuple[Tensor, Tensor]:
        return torch.empty_like(values, dtype=torch.bool), values.new_empty(len(values))


class EntryKernels:
    """A stand-in for the kernel that moves chosen entries to the front."""

    @staticmethod
    def chosen_first(
        latents: Tensor, tokens: Tensor, values: Tensor, is_chosen: Tensor, n_tokens: int
    ) -> triton_entries.Ordered:
        so_far = is_chosen.cumsum(0)
        copies = [torch.empty_like(one) for one in (latents, tokens, values, tokens)]
        return triton_entries.Ordered(*copies, so_far[-1])


class ErrorKernels:
    """A stand-in for the kernels that compute reconstruction errors."""

    fits = staticmethod(triton_errors.fits)

    @staticmethod
    def errors_of(y: Tensor, x_hat: Tensor, y_mean: Tensor) -> tuple[Tensor, losses.Sums]:
        sums = y.new_empty(4, y.shape[1])
        error, centred = losses.Moments(sums[1].sum(), sums[0]), losses.Moments(sums[3].sum(), sums[2])
        return torch.empty_like(y), losses.Sums(error, centred)

    @classmethod
    def nested(cls, parts: Tensor, offset: Tensor, y: Tensor, y_mean: Tensor) -> triton_errors.NestedErrors:
        x_hat, sums = cls.errors_of(y, y, y_mean)
        return triton_errors.NestedErrors(torch.empty_like(parts), x_hat, sums, sums.error.square.clone())

    @classmethod
    def nested_bags(
        cls, acts: SparseActs, rows: Tensor, n_levels: int, offset: Tensor, y: Tensor, y_mean: Tensor
    ) -> triton_errors.NestedErrors:
        x_hat, sums = cls.errors_of(y, y, y_mean)
        errors = y.new_empty(len(y), n_levels, y.shape[1])
        return triton_errors.NestedErrors(errors, x_hat, sums, sums.error.square.clone())

    @classmethod
    def errors_of_bags(
        cls, acts: SparseActs, rows: Tensor, offset: Tensor, y: Tensor, y_mean: Tensor
    ) -> triton_errors.OfBags:
        errors, sums = cls.errors_of(y, y, y_mean)
        narrow = errors if rows.dtype == y.dtype else torch.empty_like(y, dtype=rows.dtype)
        return triton_errors.OfBags(errors, narrow, torch.empty_like(y), sums)

    @staticmethod
    def nested_gradients(
        errors: Tensor, of_whole: Tensor, of_inner: Tensor, dtype: torch.dtype = torch.float32
    ) -> tuple[Tensor, Tensor]:
        return torch.empty_like(errors, dtype=dtype), errors.new_empty(errors.shape[-1])

    @staticmethod
    def add_and_square(part: Tensor, other: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        return other.new_empty(()), torch.empty_like(part)


class UpdateKernels:
    """A stand-in for the kernels of an optimizer update, which allocate no memory."""

    Matrix, Vector, Constants = triton_update.Matrix, triton_update.Vector, triton_update.Constants
    fits, n_parts = staticmethod(triton_update.fits), staticmethod(triton_update.n_parts)

    @staticmethod
    def measure(*arguments: object) -> None:
        """Do nothing, because the kernel writes to existing tensors."""

    measure_vector = measure

    @staticmethod
    def step(*arguments: object) -> None:
        """Do nothing, because the kernel changes weights and moments in place."""

    step_vector = step


@pytest.fixture
def fake() -> Iterator[None]:
    kernels = {
        SPARSE_PRODUCTS: SparseKernels,
        LATENT_SELECTIONS: TopKKernels,
        SELECTIONS_ACROSS_RANKS: EntryKernels,
        DEAD_LATENTS: DeadLatentKernels,
        RECONSTRUCTION_ERRORS: ErrorKernels,
        OPTIMIZER_STEPS: UpdateKernels,
    }
    with use_kernels(NO_KERNELS | kernels), fake_gpu():
        yield


def counted(job: JobConfig, d_in: int, d_out: int | None, n_ranks: int) -> int:
    """Return the peak memory in bytes during the second step, when the optimizer already has its state."""
    from torch.distributed._tools.mem_tracker import MemTracker

    others = OtherInterpreter(n_ranks) if n_ranks > 1 else None
    groups = {"world": others, "data" if job.parallel.mode == "ddp" else "latents": others}
    parallel = Parallel(CPU, **groups)
    learners = [Learner(one, d_in, d_out, parallel, layer=layer_in(job, one)) for one in members(job).values()]
    tracker = MemTracker()
    for learner in learners:
        # Pretend that a latent has not fired for a long time, so that AuxK is active.
        learner.sae._longest_since_fired = 10**12
        tracker.track_external(learner.sae)
        whole = set(map(id, learner.sae.parameters()))
        tracker.track_external(*(one for one in learner.stepped.parameters.values() if id(one) not in whole))
    with tracker:
        for step in range(2):
            take_step(job, learners, step, d_in, d_out, tracker)
    return int(tracker.get_tracker_snapshot("peak")[CPU]["Total"])


def take_step(
    job: JobConfig, learners: Sequence[Learner], step: int, d_in: int, d_out: int | None, tracker: Any
) -> None:
    for learner in learners:
        learner.begin_step(step)
    for _ in range(job.train.accumulate):
        x = torch.empty(job.train.batch_size, job.n_layers * d_in)
        y = x if d_out is None else torch.empty(job.train.batch_size, job.n_layers * d_out)
        for unit in trained_together(learners):
            unit.accumulate(x, y, len(x) * learners[0].sae.data.size)
            tracker.reset_mod_stats()
    for learner in learners:
        learner.update()


def cases() -> Iterator[tuple[dict[str, Any], dict[str, Any], int, int | None, int]]:
    """Yield SAE settings, training settings, input and target widths, and the number of ranks sharing latents."""
    for name, precision, (sae, d_in, batch) in itertools.product(CHOOSING + PENALISED, ("fp32", "bf16"), SHAPES):
        yield sae | {"architecture": name}, {"batch_size": batch, "precision": precision}, d_in, None, 1
    for name, (n_ranks, precision), (sae, d_in, batch) in itertools.product(
        CHOOSING + PENALISED, ((2, "fp32"), (8, "bf16")), SHAPES
    ):
        yield sae | {"architecture": name}, {"batch_size": batch, "precision": precision}, d_in, None, n_ranks
    wide, d_in, batch = SHAPES[1]
    train = {"batch_size": batch, "precision": "bf16"}
    for name in CHOOSING + PENALISED:
        yield wide | {"architecture": name}, train | {"accumulate": 2}, d_in, None, 1
        yield wide | {"architecture": name}, train, d_in, None, 4
    for changes in ({"optimizer": "signum"}, {"optimizer": "muon"}, {"state": "int8"}, {"state": "bf16"}):
        yield wide, train | changes, d_in, None, 1
        yield wide, train | changes | {"batch_size": 512}, d_in, None, 1
    for name in CHOOSING:
        yield wide | {"architecture": name, "auxk_alpha": 0.0}, train, d_in, None, 1
    for name in ("batch_topk", "matryoshka_batch_topk", "standard", "jumprelu"):
        yield wide | {"architecture": name}, train, d_in, 1024, 1
        yield wide | {"architecture": name, "skip": True}, train, d_in, 1024, 1
        yield wide | {"architecture": name, "skip": True}, train | {"precision": "fp32"}, d_in, 1024, 4
    yield wide | {"k": [32, 64, 128]}, train, d_in, None, 1
    yield {"architecture": ["topk", "jumprelu"], "d_sae": 12288}, train, d_in, None, 1
    many = {"architecture": "hierarchical_topk", "k": 1024}
    for (sae, width, n_tokens), n_levels, precision in itertools.product(SHAPES[:2], (4, 10), ("fp32", "bf16")):
        of_batch = {"batch_size": n_tokens, "precision": precision}
        yield many | {"d_sae": sae["d_sae"], "n_levels": n_levels}, of_batch, width, None, 1


def is_fast(sae: dict[str, Any], train: dict[str, Any], d_in: int, d_out: int | None, n_ranks: int) -> bool:
    """Return whether `make test` runs a case: one shape, in 16 bits, and the rarer settings with few architectures."""
    if d_in != SHAPES[1][1] or train["precision"] != "bf16" or train["batch_size"] != SHAPES[1][2]:
        return False
    is_usual = d_out is None and "accumulate" not in train and "auxk_alpha" not in sae
    return n_ranks != 4 and (is_usual or sae["architecture"] in ("topk", "batch_topk", "jumprelu"))


@pytest.mark.parametrize(("sae", "train", "d_in", "d_out", "n_ranks"), slow_unless(is_fast, cases()), ids=str)
def test_the_estimate_is_within_5_percent_of_the_memory_counted_by_torch(
    sae: dict[str, Any], train: dict[str, Any], d_in: int, d_out: int | None, n_ranks: int, fake: None
) -> None:
    job = job_of(sae, train, {"mode": "tensor"} if n_ranks > 1 else {})
    work = workload(job, d_in, n_ranks, d_out=d_out)
    estimate = memory.estimate(work)
    of_tensors = estimate.total - estimate.slack - memory.outside_pytorch(work)
    real, entry = counted(job, d_in, d_out, n_ranks), ARCHITECTURES[job.sae.architecture]
    matrix = 4 * work.micro_batch * job.sae.width(d_in) / n_ranks
    fits = entry.dense_matrices + (real - of_tensors) / matrix
    assert of_tensors == pytest.approx(real, rel=0.05), f"dense_matrices = {fits:.2f} fits"


@pytest.mark.parametrize(
    ("architecture", "n_ranks", "accumulate"),
    slow_unless(
        lambda architecture, n_ranks, accumulate: (n_ranks == 2) == (accumulate == 2),
        [("topk", 2, 1), ("topk", 4, 1), ("topk", 2, 2), ("topk", 4, 2), ("batch_topk", 8, 1)],
    ),
)
def test_the_estimate_is_within_5_percent_if_replicas_share_the_optimizer(
    architecture: str, n_ranks: int, accumulate: int, fake: None
) -> None:
    wide, d_in, batch = SHAPES[1]
    train = {"batch_size": batch, "precision": "bf16", "accumulate": accumulate}
    job = job_of(wide | {"architecture": architecture}, train, {"mode": "ddp"})
    work = workload(job, d_in, n_ranks)
    estimate = memory.estimate(work)
    of_tensors = estimate.total - estimate.slack - memory.outside_pytorch(work)
    assert of_tensors == pytest.approx(counted(job, d_in, None, n_ranks), rel=0.05)


@pytest.mark.parametrize(
    ("architecture", "precision", "n_ranks", "n_layers"),
    slow_unless(
        lambda architecture, precision, n_ranks, n_layers: n_layers == 4 and precision == "bf16",
        itertools.product(("batch_topk", "jumprelu"), ("fp32", "bf16"), (1, 2), (4, 12)),
    ),
)
def test_the_estimate_for_a_cross_layer_transcoder_is_within_15_percent(
    architecture: str, precision: str, n_ranks: int, n_layers: int, fake: None
) -> None:
    sae = {"architecture": architecture, "d_sae": 6144, "k": 32, "cross_layer": True}
    table = {
        "data": {"path": "x", "hook": [f"mlp.{layer}" for layer in range(n_layers)]},
        "sae": sae,
        "train": {"batch_size": 2048, "precision": precision, "n_steps": 100},
        "parallel": {"mode": "tensor"} if n_ranks > 1 else {},
    }
    job, problems = parse_job(table)
    assert job is not None, problems
    work = workload(job, 768, n_ranks, d_out=768)
    estimate = memory.estimate(work)
    of_tensors = estimate.total - estimate.slack - memory.outside_pytorch(work)
    assert of_tensors == pytest.approx(counted(job, 768, 768, n_ranks), rel=0.15)


def test_there_are_at_least_60_cases() -> None:
    assert len(list(cases())) >= 60
