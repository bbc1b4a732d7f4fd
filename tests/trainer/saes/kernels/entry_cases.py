"""Checks the kernel that moves selected entries to the front against a stable sort.

`test_triton_entries.py` runs this file. With TRITON_INTERPRET=1, the kernel runs on a CPU; otherwise it needs a GPU.
"""

from __future__ import annotations

import os

import pytest
import torch

from trainer.saes.kernels import triton_entries

DEVICE = torch.device("cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("n", [1, 1024, 5000])
@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
def test_chosen_entries_come_first_in_their_order_and_all_other_entries_are_padding(
    n: int, share: float, dtype: torch.dtype
) -> None:
    chance = torch.Generator().manual_seed(n)
    is_chosen = torch.rand(n, generator=chance) < share
    latents = torch.randint(0, 2**40, (n,), generator=chance)
    tokens = torch.randint(0, 17, (n,), generator=chance).sort().values
    values = torch.randn(n, generator=chance).to(dtype)
    values[::7], values[1::11] = -torch.inf, torch.nan
    given = (one.to(DEVICE) for one in (latents, tokens, values, is_chosen))
    found = triton_entries.chosen_first(*given, 17)
    assert int(found.n_chosen) == int(is_chosen.sum())
    order = torch.cat([is_chosen.nonzero().flatten(), (~is_chosen).nonzero().flatten()])
    expected = latents, tokens, torch.where(is_chosen, values, 0), torch.where(is_chosen, tokens, 17)
    for one, other in zip(found[:-1], expected, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one.cpu().nan_to_num(nan=3), other[order].nan_to_num(nan=3))


def test_the_kernel_passes_its_own_trial() -> None:
    triton_entries.try_out(DEVICE)


def test_a_trial_with_wrong_results_raises_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    right = triton_entries.chosen_first
    monkeypatch.setattr(triton_entries, "chosen_first", lambda *given: right(*given)._replace(n_chosen=given[0][5]))
    with pytest.raises(RuntimeError, match="wrong results"):
        triton_entries.try_out(DEVICE)
