from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from torch import Tensor

from trainer.saes.kernels import sparse, top_k
from trainer.self_test.base import CPU
from trainer.self_test.long_offsets import N_LAST, PRE_ACTS, WEIGHTS, check_long_offsets, product_errors, right_choices
from trainer.self_test.products import TOLERANCE

products, choices = partial(product_errors, 40, 12, CPU), partial(right_choices, 20, 64, CPU)


def test_the_last_rows_lie_beyond_32_bit_offsets_and_cpus_are_not_checked() -> None:
    for n_rows, width in (WEIGHTS, PRE_ACTS):
        assert (n_rows - N_LAST) * width >= 2**31
    assert not list(check_long_offsets(CPU))


def test_matmuls_and_selections_on_the_last_rows_are_correct_on_a_cpu() -> None:
    assert max(products().values()) < TOLERANCE
    assert all(choices().values())


def test_a_matmul_at_a_wrong_offset_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    decode, both_products = sparse.decode, sparse.both_products

    def write_elsewhere_too(*given: Any) -> tuple[Tensor, Tensor]:
        sums, entries = both_products(*given)
        sums[5] = 1
        return sums, entries.roll(1)

    monkeypatch.setattr(sparse, "decode", lambda acts, rows: decode(acts, rows.roll(3, dims=0)))
    monkeypatch.setattr(sparse, "both_products", write_elsewhere_too)
    assert min(products().values()) > TOLERANCE


def test_a_selection_at_a_wrong_offset_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    of_each, of_all = top_k.of_each, top_k.of_all
    monkeypatch.setattr(top_k, "of_each", lambda values, k: of_each(values.flip(0), k))
    monkeypatch.setattr(top_k, "of_all", lambda values, n: of_all(values, n) - 1)
    assert not any(choices().values())
