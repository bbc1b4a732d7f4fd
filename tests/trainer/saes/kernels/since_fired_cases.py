"""Checks the kernels that run at the end of a step against equivalent torch operations.

`test_triton_since_fired.py` runs this file. With TRITON_INTERPRET=1, kernels run on a CPU; otherwise they need a GPU.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.fake_gpu import job_of
from support.kernels import NO_KERNELS, use_kernels

from trainer.parallel.base import Parallel
from trainer.saes.kernels import since_fired, triton_since_fired
from trainer.saes.sparse_acts import SparseActs, SparseIndices
from trainer.training.learner import Learner

DEVICE = torch.device("cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda")


@pytest.mark.parametrize("n", [0, 1, 1024, 2500])
@pytest.mark.parametrize("n_others", [2, 3, 16])
@pytest.mark.parametrize("n_tokens", [0, 4096])
@pytest.mark.parametrize("bad", [1.5, torch.nan, torch.inf])
def test_the_kernel_matches_the_equivalent_torch_operations(n: int, n_others: int, n_tokens: int, bad: float) -> None:
    generator = torch.Generator().manual_seed(n)
    silent = torch.randint(2**40, (n,), generator=generator).to(DEVICE)
    sums = (torch.randint(3, (n + n_others,), generator=generator) * 7.0).to(DEVICE)
    sums[n + 1] = bad
    came = torch.full((), float(n_tokens), device=DEVICE)
    # The kernel must not change the memory that follows its sums.
    given = [(silent.clone(), torch.cat([sums, sums + 1])) for _ in range(2)]
    found = triton_since_fired.add_tokens(given[0][0], given[0][1][: n + n_others], came)
    with use_kernels(NO_KERNELS):
        expected = since_fired.add_tokens(given[1][0], given[1][1][: n + n_others], came)
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
    for one, other in zip(*given, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(("n_entries", "n"), [(0, 3), (1, 1), (1024, 9), (3000, 2500)])
@pytest.mark.parametrize("n_numbers", [1, 3])
def test_counts_of_firing_latents_are_added_to_the_existing_counts(n_entries: int, n: int, n_numbers: int) -> None:
    generator = torch.Generator().manual_seed(n)
    values = torch.randn(n_entries, generator=generator).relu().to(DEVICE)
    latents = torch.randint(n, (n_entries,), generator=generator).to(DEVICE)
    acts = SparseActs(values, SparseIndices(latents, torch.zeros_like(latents), latents[:1] * 0), n)
    sums = torch.randint(9, (2, n + 1 + n_numbers), generator=generator).float().to(DEVICE)
    numbers = torch.arange(1.0, n_numbers + 1, device=DEVICE).unbind()
    # The kernel must not change the second row of the sums.
    by_kernel, by_torch = sums.clone(), sums.clone()
    found = triton_since_fired.count(by_kernel[0], acts, 4096, numbers)
    with use_kernels(NO_KERNELS):
        expected = since_fired.count(by_torch[0], acts, 4096, *numbers)
    assert torch.equal(found, torch.bincount(latents[values > 0], minlength=n).float())
    assert torch.equal(found, expected)
    assert torch.equal(by_kernel, by_torch)


@pytest.mark.parametrize("n_tokens", [0.0, 4096.0])
@pytest.mark.parametrize("error", [0.0, 1.5, 9e4, torch.nan, torch.inf])
def test_the_residual_variance_matches_torch(n_tokens: float, error: float) -> None:
    sums = torch.tensor([n_tokens, error if n_tokens else 0.0, 7.0], device=DEVICE)
    found, expected = torch.full((2,), 0.7, device=DEVICE).unbind()
    triton_since_fired.take_variance(found, sums)
    with use_kernels(NO_KERNELS):
        since_fired.take_variance(expected, sums)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0, equal_nan=True)
    assert found == 0.7 or n_tokens


@pytest.mark.parametrize(
    "sae", [{"architecture": "batch_topk"}, {"architecture": "jumprelu"}, {"architecture": "matryoshka_batch_topk"}]
)
def test_steps_end_in_the_same_state_as_with_torch_and_skipped_steps_change_nothing(
    sae: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = job_of({"d_sae": 12, "k": 3} | sae, {"batch_size": 16, "precision": "fp32", "lr": 1e-2})
    by_kernel, by_torch = (Learner(job, 16, None, Parallel(DEVICE)) for _ in range(2))
    used = []

    def kernel(*given: Any) -> Any:
        used.append(given)
        return triton_since_fired.add_tokens(*given)

    x = torch.randn(64, 16, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    by_torch_alone = since_fired.add_tokens, since_fired.take_variance
    for one, kernels in ((by_kernel, (kernel, triton_since_fired.take_variance)), (by_torch, by_torch_alone)):
        for place, function in zip(("base.add_tokens", "auxk.take_variance"), kernels, strict=True):
            monkeypatch.setattr(f"trainer.saes.{place}", function)
        one.initialise(x, x)
        for number in range(4):
            before = {name: tensor.clone() for name, tensor in one.state.tensors()}
            batch = x[16 * number : 16 * number + 16].clone()
            # Step 2 is skipped because of the NaN.
            batch[3, 2] = torch.nan if number == 2 else batch[3, 2]
            one.begin_step(number)
            one.accumulate(batch, batch)
            one.update()
            assert not one.sae.step_sums.any()
            changed = [name for name, now in one.state.tensors() if not torch.equal(before.get(name, now * 0), now)]
            assert bool(changed) == (number != 2), changed
    assert len(used) == 4
    found, expected = dict(by_kernel.state.tensors()), dict(by_torch.state.tensors())
    assert [name for name, value in expected.items() if not torch.equal(found[name], value)] == []


def test_the_kernel_passes_its_own_trial() -> None:
    triton_since_fired.try_out(DEVICE)


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("add_tokens", lambda since_fired, sums, n_tokens: sums[2:].clone()),
        ("take_variance", lambda variance, sums: None),
    ],
)
def test_a_trial_with_wrong_results_raises_an_error(
    name: str, wrong: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton_since_fired, name, wrong)
    with pytest.raises(RuntimeError, match="wrong results"):
        triton_since_fired.try_out(DEVICE)
