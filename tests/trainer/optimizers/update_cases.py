"""Checks the optimizer-update kernels against a float64 reference and against the tensor passes they replace.

`test_triton_update.py` runs this file. With TRITON_INTERPRET=1, kernels run on a CPU; otherwise they need a GPU.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.combinations import ALL, combined
from support.fake_gpu import job_of
from support.kernels import use_kernels
from support.steps import skips
from torch import Tensor, nn

from trainer.optimizers import triton_update
from trainer.optimizers.adam import Adam
from trainer.optimizers.base import LatentAxis, TiedParameter
from trainer.parallel.base import Parallel
from trainer.parallel.group import Group
from trainer.runtime import narrow_copy, row_measures
from trainer.runtime.narrow_copy import NarrowCopy, kept_or_own
from trainer.runtime.triton_kernels import OPTIMIZER_STEPS, SPARSE_PRODUCTS
from trainer.saes.kernels import sparse, triton_sparse
from trainer.training.following import Following
from trainer.training.learner import Learner, RowUpdate, Update

DEVICE = torch.device("cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda")
# Variants of an update: architectures, settings, and moment dtypes.
WAYS: list[tuple[dict[str, Any], str]] = [
    ({"architecture": "topk"}, "fp32"),
    ({"architecture": "topk"}, "bf16"),
    ({"architecture": "topk"}, "int8"),
    ({"architecture": "topk", "encoder_follows": "off"}, "fp32"),
    ({"architecture": "standard"}, "bf16"),
    ({"architecture": "jumprelu"}, "int8"),
]
NARROW = (torch.bfloat16, torch.float16)


@pytest.fixture(autouse=True)
def always_triton() -> Iterator[None]:
    """Use the kernels on every device, not only on GPUs."""
    with use_kernels({OPTIMIZER_STEPS: triton_update}):
        yield


def rows(n: int, d: int, seed: int) -> Tensor:
    return torch.randn(n, d, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


@pytest.mark.parametrize("width", [4, 16, 36, 64, 100, 300])
@pytest.mark.parametrize("size", [1.0, 1e-6])
def test_measured_norms_and_dot_products_match_float64(width: int, size: float) -> None:
    grad, weight = rows(5, width, 1), nn.functional.normalize(rows(5, width, 2))
    grad[2] = 0
    # Create a gradient that is almost parallel to its weight row.
    grad[3] = weight[3] + size * grad[3]
    squares, dots = torch.empty(5, device=DEVICE), torch.empty(5, device=DEVICE)
    triton_update.measure(grad, weight, squares, dots)
    exact = (grad.double() * weight.double()).sum(dim=1)
    torch.testing.assert_close(dots.double(), exact, rtol=1e-6, atol=1e-6)
    across = grad.double() - dots.double()[:, None] * weight.double()
    torch.testing.assert_close(squares.double(), across.square().sum(dim=1), rtol=1e-3, atol=1e-13)
    triton_update.measure(grad, None, squares, None)
    torch.testing.assert_close(squares.double(), grad.double().square().sum(dim=1), rtol=1e-6, atol=0)


def test_measuring_some_rows_returns_the_same_values_as_measuring_all_rows() -> None:
    grad, weight = rows(5, 36, 1), nn.functional.normalize(rows(5, 36, 2))
    whole, some = (torch.zeros(2, 5, device=DEVICE) for _ in range(2))
    triton_update.measure(grad, weight, *whole)
    triton_update.measure(grad, weight, *some, torch.tensor([4, -1, 1, 4], device=DEVICE))
    assert torch.equal(some[:, [4, 1]], whole[:, [4, 1]])
    assert not some[:, [0, 2, 3]].any()
    triton_update.measure(grad, weight, *some, torch.tensor([1], device=DEVICE), torch.tensor([3, 4], device=DEVICE))
    assert torch.equal(some[:, [1, 3, 4]], whole[:, [1, 3, 4]])
    assert not some[:, [0, 2]].any()


@pytest.mark.parametrize("n", [1, 1024, 2500])
def test_vectors_can_be_measured_in_parts_or_as_a_whole(n: int) -> None:
    grad = rows(1, n, 1)[0]
    parts = torch.empty(triton_update.n_parts(n), device=DEVICE)
    whole = torch.empty(1, dtype=torch.float64, device=DEVICE)
    for squares in (parts, whole):
        triton_update.measure_vector(grad, squares)
        torch.testing.assert_close(squares.double().sum(), grad.double().square().sum(), rtol=1e-6, atol=0)


class Twin(Group):
    """A group of two replicas. The other replica always has the same values, but does not update any weights."""

    size = 2

    def gather(self, tensor: Tensor) -> Tensor:
        return torch.stack([tensor, tensor])


def learners(
    sae: dict[str, Any], d_out: int | None = None, data: Group | None = None, **train: Any
) -> tuple[Learner, Learner]:
    """Return two learners of the same SAE: one is updated by kernels, the other by passes over entire matrices."""
    settings = {"batch_size": 16, "precision": "fp32", "lr": 1e-2, "grad_clip": 0.05} | train
    job = job_of({"d_sae": 6, "k": 3} | sae, settings, {"mode": "ddp"} if data else None)
    by_rows, by_passes = (Learner(job, 72, d_out, Parallel(DEVICE, data=data, world=data)) for _ in range(2))
    for one in (by_rows, by_passes):
        one.initialise(rows(50, 72, 9), rows(50, d_out or 72, 10 if d_out else 9))
    follower = by_passes.optimizer.followers.get(by_passes.stepped.parameters["W_dec"])
    following = follower and Following(follower.share, by_passes.stepped.parameters)
    by_passes._update = Update(by_passes.sae, by_passes.stepped, by_passes.optimizer, following)
    assert isinstance(by_rows._update, RowUpdate)
    return by_rows, by_passes


def step(one: Learner, number: int, bad: float | None = None) -> None:
    """Take a step. If `bad` is given, it replaces one value in the gradient."""
    one.begin_step(number)
    x = rows(16, 72, number)
    one.accumulate(x, rows(16, one.sae.d_out, 50 + number) if one.sae.is_transcoder else x)
    if bad is not None:
        one.sae.W_enc.grad[2, 3] = bad
    one.update()


def state(one: Learner) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in one.state.tensors()}


def assert_alike(one: Learner, other: Learner) -> None:
    found, expected = state(one), state(other)
    assert found.keys() == expected.keys()
    # How much a step of 1e-2 changes if a moment is rounded to an adjacent code.
    off = 3e-7 if found["optimizer.exp_avg.W_enc"].dtype == torch.float32 else 2e-4
    for name, value in found.items():
        assert value.stride() == expected[name].stride(), name
        if value.dtype in (torch.int8, torch.uint8, torch.bfloat16):
            # A value halfway between two codes may be rounded either way.
            codes, others = (t.view(torch.int16) if t.dtype == torch.bfloat16 else t for t in (value, expected[name]))
            different = (codes.int() - others.int()).abs()
            assert int(different.max()) <= 1, name
            assert float(different.float().mean()) < 0.01, name
            continue
        torch.testing.assert_close(value, expected[name], rtol=2e-5, atol=off, msg=name)


@pytest.mark.parametrize(("sae", "moments"), WAYS, ids=str)
def test_steps_match_passes_over_entire_matrices(sae: dict[str, Any], moments: str) -> None:
    by_rows, by_passes = learners(sae, state=moments)
    by_rows.loss_scale.enabled = True
    by_rows.loss_scale.factor.fill_(1024)  # exact, because 1024 is a power of 2
    for number in range(2):
        step(by_rows, number)
        step(by_passes, number)
        torch.testing.assert_close(by_rows.grad_norm, by_passes.grad_norm, rtol=1e-4, atol=0)
    # The loss scale is not compared, because the other learner has none.
    by_rows.loss_scale.enabled = False
    assert_alike(by_rows, by_passes)


def test_transcoder_steps_match_passes_over_entire_matrices() -> None:
    one, other = learners({"architecture": "batch_topk", "skip": True}, d_out=132)
    step(one, 0)
    step(other, 0)
    assert_alike(one, other)


def test_steps_on_replicas_with_sharded_latents_match_passes_over_entire_matrices() -> None:
    one, other = learners({"architecture": "topk"}, data=Twin(), state="int8")
    before = one.sae.W_dec.detach().clone()
    step(one, 0)
    step(other, 0)
    assert_alike(one, other)
    assert one.stepped.rows == slice(0, 3)
    changed = (one.sae.W_dec != before).any(dim=1)
    assert bool(changed[:3].any())
    assert not changed[3:].any()


@pytest.mark.parametrize(("moments", "bad"), [("fp32", torch.nan), ("bf16", torch.nan), ("int8", torch.inf)])
def test_a_skipped_step_leaves_every_bit_unchanged(moments: str, bad: float) -> None:
    one, _ = learners({"architecture": "topk"}, state=moments)
    step(one, 0, bad)  # before the optimizer has any state
    step(one, 1)
    before = state(one)
    step(one, 2, bad)
    after = state(one)
    assert [name for name, value in before.items() if not torch.equal(value, after[name])] == []
    assert skips(one) == (2, 1, 0)
    step(one, 3)
    assert not torch.equal(before["sae.W_enc"], one.sae.W_enc)


class Measuring:
    """A wrapper around the kernels that records which rows of each gradient are measured, or None for all rows."""

    def __init__(self) -> None:
        self.asked: list[list[int] | None] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(triton_update, name)

    def measure(self, *arguments: Any) -> None:
        triton_update.measure(*arguments)
        some_rows = arguments[4:]
        self.asked.append([row for some in some_rows for row in some.tolist()] if some_rows else None)


@pytest.fixture
def measuring() -> Iterator[Measuring]:
    """Use kernels to sum gradients as well, and record which rows are remeasured."""
    kernels = Measuring()
    with use_kernels({OPTIMIZER_STEPS: kernels, SPARSE_PRODUCTS: triton_sparse}):
        yield kernels


def assert_measured(one: Learner) -> None:
    """Assert that the gradient norms and dot products for one step match a float64 reference."""
    square, of_all, dims = one._update.measure_latents(), one._update.measure_shared(), one.sae.latent_dims()
    torch.testing.assert_close(of_all, one.sae.b_dec.grad.double().square().sum(), rtol=1e-6, atol=0)
    vectors = [vector for name, vector in one.sae.named_parameters() if name in dims and vector.dim() == 1]
    expected = sum(vector.grad.double().square().sum() for vector in vectors)
    for weights in (one.sae.W_enc, one.sae.W_dec):
        grad, rows, measures = weights.grad.double(), weights.detach().double(), one._update._by_rows._measures[weights]
        if weights is one.sae.W_enc:
            grad = grad.T
            assert measures.dots is None
        elif measures.dots is not None:
            torch.testing.assert_close(measures.dots.double(), (grad * rows).sum(dim=1), rtol=1e-5, atol=1e-8)
            grad -= measures.dots.double()[:, None] * rows
        torch.testing.assert_close(measures.squares.double(), grad.square().sum(dim=1), rtol=1e-5, atol=1e-14)
        expected += grad.square().sum()
    torch.testing.assert_close(square, expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize(
    ("architecture", "precision", "widest"),
    combined(("topk", "batch_topk", "matryoshka_batch_topk"), ("fp32", "bf16", "fp16"), (4096, 32)),
)
def test_gradients_are_measured_while_they_are_summed(
    architecture: str, precision: str, widest: int, measuring: Measuring, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton_sparse, "LONGEST", 20)
    monkeypatch.setattr(triton_sparse, "WIDEST", widest)
    one, _ = learners({"architecture": architecture, "d_sae": 12}, precision=precision)
    x = rows(16, 72, 0)
    one.accumulate(x, x)
    assert_measured(one)
    # Only rows whose entries are split across several windows of 20 entries are remeasured.
    assert len(measuring.asked) == 2
    assert all(some is not None and len(set(some)) <= 3 for some in measuring.asked)


def test_rows_added_by_auxk_are_remeasured(measuring: Measuring) -> None:
    by_rows, by_passes = learners({"architecture": "topk", "d_sae": 12})
    for one in (by_rows, by_passes):
        one.sae.n_tokens_since_fired[[2, 7]] = one.sae._longest_since_fired = 10**6
        step(one, 0)
    assert measuring.asked == [[2, 7], [2, 7]]
    assert_alike(by_rows, by_passes)
    by_rows.sae.n_tokens_since_fired[5] = 10**6
    by_rows.accumulate(rows(16, 72, 1), rows(16, 72, 1))
    assert_measured(by_rows)


def test_the_entire_gradient_is_measured_if_anything_else_was_added_to_it(measuring: Measuring) -> None:
    one, _ = learners({"architecture": "topk"})
    x = rows(16, 72, 0)
    one.accumulate(x, x)
    one.accumulate(x, x)
    assert_measured(one)
    assert measuring.asked == [None, None]
    one.drop_gradients()
    one.accumulate(x, x)
    one.sae.W_dec.grad[3] *= 2
    measuring.asked.clear()
    assert_measured(one)
    assert measuring.asked == [None]


def test_gradients_are_measured_early_only_if_there_are_no_micro_batches_or_replicas(measuring: Measuring) -> None:
    lone, several, shared = (
        learners({"architecture": "topk"}, **kwargs)[0] for kwargs in ({}, {"accumulate": 2}, {"data": Twin()})
    )
    are_kept = [row_measures.of(one.sae.W_dec) is not None for one in (lone, several, shared)]
    assert are_kept == [True, False, False]


def copies(one: Learner) -> dict[Tensor, NarrowCopy]:
    return {weights: weights.copy_in_16_bits for weights in (one.sae.W_enc, one.sae.W_dec)}


@pytest.mark.parametrize(
    ("sae", "moments", "dtype"),
    # The interpreter is slow, so only about half of the combinations of variant and dtype are tested with it.
    [(*way, dtype) for n, way in enumerate(WAYS) for m, dtype in enumerate(NARROW) if ALL or n == 0 or (n + m) % 2],
    ids=str,
)
def test_a_step_also_writes_the_weights_in_16_bits(sae: dict[str, Any], moments: str, dtype: torch.dtype) -> None:
    one, _ = learners(sae, state=moments)
    for number, bad in enumerate((None, None, torch.nan, None)):
        before = {weights: kept_or_own(weights, dtype) for weights in copies(one)}
        step(one, number, bad)
        for weights, copy in copies(one).items():
            renewed = copy.to_renew(weights)
            assert renewed is before[weights]
            assert renewed.stride() == weights.stride()
            assert torch.equal(renewed, weights.to(dtype))


def test_a_step_is_the_same_whether_16_bit_copies_are_kept_or_recreated() -> None:
    one, other = (learners({"architecture": "topk"}, precision="bf16")[0] for _ in range(2))
    for number in range(3):
        for copy in copies(other).values():
            copy.forget()
        step(one, number)
        step(other, number)
    found, expected = state(one), state(other)
    assert [name for name, value in found.items() if not torch.equal(value, expected[name])] == []


def test_a_step_is_the_same_whether_replicas_exchange_16_bit_copies_or_fp32_weights(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Pretend that the sparse-product kernels work.
    monkeypatch.setattr(sparse, "_dtype_of_rows", sparse.product_dtype)
    monkeypatch.setattr(Learner, "_may_exchange_narrow", lambda *_: True)
    one, _ = learners({"architecture": "topk"}, data=Twin(), precision="bf16")
    monkeypatch.setattr(Learner, "_may_exchange_narrow", lambda *_: False)
    other, _ = learners({"architecture": "topk"}, data=Twin(), precision="bf16")
    kept = [narrow_copy.keep(weights) for weights in (other.sae.W_enc, other.sae.W_dec)]
    for number in range(3):
        for copy in kept:
            copy.forget()
        step(one, number)
        step(other, number)
        assert one.sae.W_enc.untyped_storage().nbytes() == 0
    for name, weights in one.stepped.parameters.items():
        assert torch.equal(weights, other.stepped.parameters[name]), name
        moments = other.optimizer.state[other.stepped.parameters[name]]
        assert all(torch.equal(value, moments[kind]) for kind, value in one.optimizer.state[weights].items())


def test_any_other_change_to_the_weights_invalidates_their_16_bit_copies() -> None:
    one, _ = learners({"architecture": "topk"}, precision="bf16")
    step(one, 0)
    saved = state(one)
    step(one, 1)
    sae, dead = one.sae, torch.tensor([True, False, False, True, False, False], device=DEVICE)
    changes = [
        lambda: one.state.load(saved),
        lambda: sae.revive(dead, rows(2, 72, 3), rows(2, 72, 4)),
        lambda: one.initialise(rows(50, 72, 9), rows(50, 72, 9)),
    ]
    for change in changes:
        change()
        for weights, copy in copies(one).items():
            assert copy.to_renew(weights) is None
            assert torch.equal(kept_or_own(weights, torch.bfloat16), weights.bfloat16())
    one.agree()
    assert all(copy.to_renew(weights) is None for weights, copy in copies(one).items())
    with torch.inference_mode():
        assert kept_or_own(sae.W_enc, torch.bfloat16) is sae.W_enc
    step(one, 2)
    assert torch.equal(kept_or_own(sae.W_dec, torch.bfloat16), sae.W_dec.bfloat16())


def test_a_run_updated_by_kernels_can_continue_with_passes_over_entire_matrices() -> None:
    by_rows, by_passes = learners({"architecture": "topk"}, state="int8")
    for number in range(2):
        step(by_rows, number)
    by_passes.state.load(state(by_rows))
    step(by_rows, 2)
    step(by_passes, 2)
    assert_alike(by_rows, by_passes)


@pytest.mark.parametrize("moments", ["fp32", "int8"])
def test_a_latents_step_does_not_depend_on_the_other_latents_on_its_rank(moments: str) -> None:
    # A latent's step has the same bits whichever other latents are updated with it, and therefore depends neither on
    # the sharding nor on the order of programs.
    def stepped(some: Tensor) -> list[Tensor]:
        weights = nn.Parameter(nn.functional.normalize(rows(7, 72, 1))[some])
        encoder = nn.Parameter(rows(7, 72, 2)[some].T)
        optimizer = Adam([weights, encoder], 1e-2, beta1=0.9, beta2=0.999, state=moments)
        optimizer.unit_rows = (weights,)
        optimizer.latent_axes = {weights: LatentAxis(0, some), encoder: LatentAxis(1, some)}
        optimizer.followers = {weights: TiedParameter(encoder, 0.3)}
        optimizer.found_inf = torch.zeros((), device=DEVICE)
        by_rows = optimizer.by_rows()
        assert by_rows is not None
        for number in range(2):
            weights.grad, encoder.grad = rows(7, 72, 10 + number)[some], rows(7, 72, 20 + number)[some].T
            by_rows.measure_latents()
            by_rows.step(1 - optimizer.found_inf)
        return [weights.detach(), encoder.detach().T, optimizer.state[encoder]["exp_avg"].T]

    whole = stepped(torch.arange(7, device=DEVICE))
    for some in (torch.tensor([5]), torch.tensor([6, 0, 3]), torch.tensor([], dtype=torch.int64)):
        for part, all_rows in zip(stepped(some.to(DEVICE)), whole, strict=True):
            assert torch.equal(part, all_rows[some])


def test_the_weights_match_a_float64_reference() -> None:
    weights = nn.Parameter(nn.functional.normalize(rows(4, 36, 1)))
    optimizer = Adam([weights], 1e-2, beta1=0.9, beta2=0.999, state="fp32")
    optimizer.unit_rows, optimizer.latent_axes = (weights,), {weights: LatentAxis(0, torch.arange(4, device=DEVICE))}
    optimizer.found_inf = torch.zeros((), device=DEVICE)
    by_rows = optimizer.by_rows()
    assert by_rows is not None
    exact = weights.detach().double()
    m, v = torch.zeros_like(exact), torch.zeros_like(exact)
    for number in range(1, 6):
        weights.grad = rows(4, 36, 10 + number)
        grad = weights.grad.double()
        by_rows.measure_latents()
        by_rows.step(1 - optimizer.found_inf)
        grad -= (grad * exact).sum(dim=1, keepdim=True) * exact
        m, v = 0.9 * m + 0.1 * grad, 0.999 * v + 0.001 * grad**2
        exact = exact - 1e-2 * m / (1 - 0.9**number) / ((v / (1 - 0.999**number)).sqrt() + 6.25e-10)
        exact /= exact.norm(dim=1, keepdim=True)
    torch.testing.assert_close(weights.detach().double(), exact, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("beta1", [0.9, 0.0])
@pytest.mark.parametrize("n", [1, 1023, 1024, 2500])
def test_vector_steps_match_float64_and_can_be_continued_by_torch(n: int, beta1: float) -> None:
    matrix, vector = nn.Parameter(rows(2, 4, 1)), nn.Parameter(rows(1, n, 2)[0])
    optimizer = Adam([matrix, vector], 1e-2, beta1=beta1, beta2=0.999, state="int8")
    optimizer.latent_axes = {one: LatentAxis(0, torch.arange(len(one), device=DEVICE)) for one in (matrix, vector)}
    by_rows = optimizer.by_rows()
    assert by_rows is not None
    exact = vector.detach().double()
    m, v, count = torch.zeros_like(exact), torch.zeros_like(exact), 0
    for number in range(7):
        # These gradients differ by orders of magnitude, like gradients for rare and frequent latents.
        vector.grad = 10 ** -rows(1, n, 3)[0].abs() * rows(1, n, 10 + number)[0]
        grad, is_bad = vector.grad.double() / 3, number in (0, 4)
        optimizer.found_inf = torch.full((), float(is_bad), device=DEVICE)
        optimizer.grad_scale = torch.full((), 3.0, device=DEVICE)
        before = vector.detach().clone()
        # The last step uses torch instead of the kernels.
        if number < 6:
            by_rows.measure_latents()
            by_rows.step(1 - optimizer.found_inf)
            assert vector.grad is None
        optimizer.step()
        if is_bad:
            assert torch.equal(vector, before)
            continue
        count += 1
        m, v = beta1 * m + (1 - beta1) * grad, 0.999 * v + 0.001 * grad**2
        exact = exact - 1e-2 * m / (1 - beta1**count) / ((v / (1 - 0.999**count)).sqrt() + 6.25e-10)
    torch.testing.assert_close(vector.detach().double(), exact, rtol=1e-5, atol=1e-6)
    assert float(optimizer.state[vector]["step"]) == count == 5


def test_matrices_that_are_not_stored_latent_by_latent_are_left_to_the_optimizer() -> None:
    weights = nn.Parameter(rows(6, 8, 1))
    for axis, is_stepped in ((LatentAxis(0, torch.arange(6)), True), (LatentAxis(1, torch.arange(8)), False)):
        optimizer = Adam([weights], 1e-2, beta1=0.9, beta2=0.999, state="fp32")
        optimizer.latent_axes = {weights: axis}
        assert (optimizer.by_rows() is not None) == is_stepped


def test_rows_with_unsupported_widths_are_left_to_the_optimizer() -> None:
    assert [width for width in (1, 16, 2300, 2302, 2304, 8192, 8196) if triton_update.fits(width)] == [
        16, 2300, 2304, 8192,
    ]  # fmt: skip


def test_the_kernels_pass_their_own_trial() -> None:
    triton_update.try_out(DEVICE)


def test_a_trial_with_wrong_results_raises_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("measure", "measure_vector", "step", "step_vector"):
        with monkeypatch.context() as patched:
            patched.setattr(triton_update, name, lambda *_: None)
            with pytest.raises(RuntimeError, match="wrong results"):
                triton_update.try_out(DEVICE)
