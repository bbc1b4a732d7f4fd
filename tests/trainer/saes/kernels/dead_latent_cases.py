"""Checks the kernels that find AuxK's candidates against equivalent torch operations.

`test_triton_dead_latents.py` runs this file. With TRITON_INTERPRET=1, kernels run on a CPU; otherwise they need a GPU.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from types import ModuleType

import pytest
import torch
from support.fake_gpu import job_of
from support.kernels import use_kernels
from torch import Tensor, nn

from trainer.parallel.base import Parallel
from trainer.runtime import narrow_copy
from trainer.runtime.triton_kernels import (
    DEAD_LATENTS,
    LATENT_SELECTIONS,
    OPTIMIZER_STEPS,
    RECONSTRUCTION_ERRORS,
    SPARSE_PRODUCTS,
    TOKENS_SINCE_FIRED,
)
from trainer.saes.kernels import dead_latents, triton_dead_latents
from trainer.saes.kernels.dead_latents import Weights
from trainer.training.learner import Learner

DEVICE = torch.device("cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda")
DEAD_AFTER = 1000
VARIANCE = torch.tensor(0.25, device=DEVICE)


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(torch.Tensor, "is_cuda", True, raising=False)
    with use_kernels({DEAD_LATENTS: triton_dead_latents}):
        yield


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def silences(n_latents: int, n_dead: int, n_different: int) -> Tensor:
    """Return the number of tokens since each latent fired, with at most `n_different` values among the dead latents."""
    generator = torch.Generator().manual_seed(n_latents + n_dead)
    silent = torch.randint(DEAD_AFTER, (n_latents,), generator=generator)
    dead = torch.randperm(n_latents, generator=generator)[:n_dead]
    silent[dead] = DEAD_AFTER + 4096 * torch.randint(n_different, (n_dead,), generator=generator)
    return silent.to(DEVICE)


def naively(silent: Tensor, n: int, dead_after: int) -> list[int]:
    """Return the `n` dead latents that fired least recently. Lower ids win ties, and counts are capped at 2³¹ − 1."""
    lengths = [min(one, 2**31 - 1) for one in silent.tolist()]
    dead = [latent for latent, length in enumerate(silent.tolist()) if length >= dead_after]
    return sorted(sorted(dead, key=lambda latent: (-lengths[latent], latent))[:n])


def assert_found(silent: Tensor, n: int, dead_after: int = DEAD_AFTER, dtype: torch.dtype = torch.float32) -> None:
    b_enc = nn.Parameter(numbers(len(silent)))
    found = dead_latents.longest_since_fired(silent, b_enc, VARIANCE, dead_after, n, dtype)
    assert found is not None
    latents, bias, weight = found
    assert latents.shape == bias.shape == (n,)
    assert latents.dtype == torch.int64
    assert (latents[1:] > latents[:-1]).all()
    assert 0 <= int(latents[0]) <= int(latents[-1]) < len(silent)
    expected = naively(silent, n, dead_after)
    is_dead = silent[latents] >= dead_after
    assert latents[is_dead].tolist() == expected
    assert bias.dtype == dtype
    # Triton's interpreter truncates values that a GPU would round.
    torch.testing.assert_close(bias[is_dead], b_enc.detach()[expected].to(dtype), rtol=torch.finfo(dtype).eps, atol=0)
    assert (bias[~is_dead] == -torch.inf).all()
    assert weight == (1 / VARIANCE if expected else 0)


@pytest.mark.parametrize("n_different", [1, 5, 30_000])
@pytest.mark.parametrize("n_dead", [0, 1, 39, 40, 41, 700, 2500])
def test_candidates_are_the_dead_latents_that_fired_least_recently(n_dead: int, n_different: int) -> None:
    assert_found(silences(2500, n_dead, n_different), 40)


@pytest.mark.parametrize("n_latents", [1, 2, 31, 1024, 1025, 4097])
@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 1.0])
def test_candidates_are_correct_for_any_number_of_latents(n_latents: int, share: float) -> None:
    silent = silences(n_latents, round(share * n_latents), 20)
    for n in {1, max(1, n_latents // 40), min(n_latents, 700)}:
        assert_found(silent, n)


@pytest.mark.parametrize(("n_latents", "n_dead"), [(24_576, 500), pytest.param(32_768, 32_768, marks=pytest.mark.slow)])
def test_candidates_are_correct_for_the_largest_size_handled_by_one_program(n_latents: int, n_dead: int) -> None:
    # All dead latents have gone the same number of tokens without firing.
    assert_found(silences(n_latents, n_dead, 1), 700)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_candidate_biases_have_the_matmul_dtype(dtype: torch.dtype) -> None:
    assert_found(silences(300, 50, 7), 40, dtype=dtype)


@pytest.mark.parametrize("dead_after", [1, 10_000, 2**31 - 2])
def test_counts_of_more_than_2_billion_tokens_do_not_overflow(dead_after: int) -> None:
    beyond = 2**40, 2**31, 2**32, 2**32 - 1, 2**33 - 1, 2**62
    silent = torch.tensor([5, *beyond, 0, 2**31 - 1, 2**31 - 2, 10_000], device=DEVICE)
    for n in (1, 3, 7, 11):
        assert_found(silent, n, dead_after)


def test_sizes_that_one_program_cannot_handle_are_left_to_torch() -> None:
    few = silences(9, 3, 1)
    assert triton_dead_latents.fits(few, DEAD_AFTER)
    assert not triton_dead_latents.fits(few, 2**31)
    assert not triton_dead_latents.fits(few, 0)
    assert not triton_dead_latents.fits(few[:0], DEAD_AFTER)
    assert not triton_dead_latents.fits(few.repeat(4096), DEAD_AFTER)
    assert dead_latents.longest_since_fired(few, numbers(9), VARIANCE, 2**31, 2, torch.float32) is None


@pytest.mark.parametrize("widths", [(1, 1), (37, 5), (5, 1500), (1024, 1025)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("has_copy", [True, False])
def test_rows_are_copied_in_the_matmul_dtype(widths: tuple[int, int], dtype: torch.dtype, has_copy: bool) -> None:
    W_enc, W_dec = nn.Parameter(numbers(9, widths[0]).T), nn.Parameter(numbers(9, widths[1], seed=1))
    if has_copy:
        narrow_copy.keep(W_enc)
        narrow_copy.keep(W_dec)
    latents = torch.tensor([8, 0, -1, 3, 5, -1], device=DEVICE)
    rows = dead_latents.rows(W_enc, W_dec, latents, dtype, widths[1]).weights
    tolerance = {"rtol": 0 if has_copy else torch.finfo(dtype).eps, "atol": 0}
    for found, whole in ((rows.W_enc, W_enc.detach().T), (rows.W_dec, W_dec.detach())):
        expected = whole[latents].to(dtype)
        expected[latents < 0] = 0
        torch.testing.assert_close(found, expected, **tolerance)


@pytest.mark.parametrize("widths", [(1, 1), (37, 5), (5, 1500), (1024, 1025)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("learns_bias", [True, False])
def test_adding_gradients_for_some_latents_increments_the_tensors_versions(
    widths: tuple[int, int], dtype: torch.dtype, learns_bias: bool
) -> None:
    wholes = Weights(numbers(9, widths[0]), numbers(9, seed=1), numbers(9, widths[1], seed=2))
    parts = Weights(*(one[:6].to(dtype) * 3 for one in wholes))
    latents = torch.tensor([-1, 8, 0, 3, -1, 5], device=DEVICE)
    bias, centred = numbers(widths[0], seed=3), numbers(widths[0], seed=4).to(dtype)
    is_own = latents >= 0
    expected = [
        whole.index_add(0, latents[is_own], part.float()[is_own]) for whole, part in zip(wholes, parts, strict=True)
    ]
    expected_bias, versions = bias - centred.float(), [one._version for one in (*wholes, bias)]
    dead_latents.add(wholes, latents, parts, *((bias, centred) if learns_bias else ()))
    for found, whole in zip(wholes, expected, strict=True):
        torch.testing.assert_close(found, whole)
    assert [one._version for one in wholes] == [version + 1 for version in versions[:3]]
    if learns_bias:
        torch.testing.assert_close(bias, expected_bias)
        assert bias._version == versions[3] + 1


@pytest.mark.parametrize("n_dead", [3, 20])
@pytest.mark.parametrize("sae", [{}, {"architecture": "batch_topk", "skip": True}], ids=str)
def test_an_sae_learns_the_same_with_and_without_kernels(sae: dict[str, object], n_dead: int) -> None:
    others = RECONSTRUCTION_ERRORS, TOKENS_SINCE_FIRED, SPARSE_PRODUCTS, LATENT_SELECTIONS, OPTIMIZER_STEPS
    d_out = 12 if sae else None
    with use_kernels(dict.fromkeys(others)):
        with_kernels, without = learner(sae, d_out, n_dead), learner(sae, d_out, n_dead)
    used: list[str] = []
    for number in range(3):
        x, y = numbers(24, 20, seed=number), numbers(24, 12, seed=-number - 1)
        for one, by in ((with_kernels, Counted(used)), (without, None)):
            with use_kernels({DEAD_LATENTS: by} | dict.fromkeys(others)):
                one.begin_step(number)
                # The step has two micro-batches. Row gradients from the first pass are added before the second pass.
                for part in (slice(14), slice(14, None)):
                    one.accumulate(x[part], x[part] if d_out is None else y[part])
                one.update()
    expected = dict(without.state.tensors())
    for name, value in with_kernels.state.tensors():
        torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-5)
    values, expected_values = (one.values(one.sums()) for one in (with_kernels, without))
    assert values == pytest.approx(expected_values, rel=1e-4)
    assert values["auxk"] > 0
    assert used.count("longest_since_fired") == used.count("rows") == used.count("add") == 6


class Counted:
    """A wrapper around the kernels that records which of them are used."""

    def __init__(self, used: list[str]) -> None:
        self._used = used

    def __getattr__(self, name: str) -> object:
        self._used.append(name)
        return getattr(triton_dead_latents, name)


def learner(sae: dict[str, object], d_out: int | None, n_dead: int) -> Learner:
    """Return a learner with `n_dead` dead latents and at most 8 AuxK candidates."""
    settings = {"architecture": "topk", "d_sae": 48, "k": 3, "k_aux": 4} | sae
    one = Learner(job_of(settings, {"batch_size": 24, "precision": "fp32"}), 20, d_out, Parallel(DEVICE))
    one.initialise(numbers(90, 20, seed=7), numbers(90, d_out or 20, seed=8 if d_out else 7))
    one.sae.b_enc.data[:n_dead] = -0.5
    one.sae.n_tokens_since_fired[:n_dead] = 10**7 + torch.arange(n_dead, device=DEVICE) % 5
    one.sae.note_since_fired(one.sae.n_tokens_since_fired)
    return one


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_kernels_pass_their_own_trial(dtype: torch.dtype) -> None:
    triton_dead_latents.try_out(DEVICE, dtype)


@pytest.mark.parametrize("name", ["longest_since_fired", "rows", "add"])
def test_a_trial_with_wrong_results_raises_an_error(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right: ModuleType = getattr(triton_dead_latents, name)

    def wrong(*given: object) -> object:
        found = right(*given)
        if name == "add":
            given[0][1][4] += 1  # type: ignore[index]
        else:
            (given if name == "rows" else found)[0][0] += 1
        return found

    monkeypatch.setattr(triton_dead_latents, name, wrong)
    with pytest.raises(RuntimeError, match="wrong results"):
        triton_dead_latents.try_out(DEVICE, torch.float32)
