from __future__ import annotations

import torch

from trainer.saes.sparse_acts import DenseActs, SparseActs, SparseIndices

# Tokens 0 and 2 have two entries each, and token 1 has none. The last entry is inactive.
DENSE = torch.tensor([[0.0, 2.0, 0.0, 1.0], [0.0, 0.0, 0.0, 0.0], [3.0, 0.0, 0.0, 0.0]])
PLACES = SparseIndices(torch.tensor([3, 1, 0, 2]), torch.tensor([0, 0, 2, 2]), torch.tensor([0, 2, 2]))
SPARSE = SparseActs(torch.tensor([1.0, 2.0, 3.0, 0.0]), PLACES, 4)


def test_sparse_and_dense_activations_produce_the_same_results() -> None:
    per_latent = torch.tensor([10.0, 20.0, 30.0, 40.0])
    for acts in (SPARSE, DenseActs(DENSE)):
        assert torch.equal(acts.dense(), DENSE)
        assert acts.count_by_latent(acts.values > 0).tolist() == [1, 1, 0, 1]
        assert acts.per_token(acts.values).tolist() == [3, 0, 3]
        weighted = acts.with_values(acts.values * acts.at(per_latent))
        assert torch.equal(weighted.dense(), DENSE * per_latent)


def test_activations_without_entries_are_all_zero() -> None:
    nothing = torch.zeros(0, dtype=torch.int64)
    acts = SparseActs(torch.zeros(0), SparseIndices(nothing, nothing, torch.zeros(3, dtype=torch.int64)), 4)
    assert torch.equal(acts.dense(), torch.zeros(3, 4))
    assert acts.count_by_latent(acts.values > 0).tolist() == [0] * 4
    assert acts.per_token(acts.values).tolist() == [0] * 3


def test_gradients_flow_through_the_dense_matrix() -> None:
    values = SPARSE.values.clone().requires_grad_()
    (SPARSE.with_values(values).dense() * torch.arange(12.0).view(3, 4)).sum().backward()
    assert values.grad is not None
    assert values.grad.tolist() == [3, 1, 8, 10]
