from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

from trainer.api import train
from trainer.contract.errors import UserError
from trainer.saes.refinement import refined
from trainer.saes.sparse_acts import DenseActs


def problem(d_sae: int = 40, k: int = 5) -> tuple[Tensor, Tensor, Tensor]:
    """Return rows [200, 16], decoder directions [d_sae, 16] and activations with k active latents per row."""
    generator = torch.Generator().manual_seed(0)
    W_dec = normalize(torch.randn(d_sae, 16, generator=generator), dim=1)
    x = torch.randn(200, 16, generator=generator)
    values, latents = (x @ W_dec.T).topk(k, dim=1)
    return x, W_dec, torch.zeros(200, d_sae).scatter_(1, latents, values.relu())


def square_errors(x: Tensor, acts: Tensor, W_dec: Tensor) -> Tensor:
    return (x - acts @ W_dec).square().sum(dim=1)


def test_many_steps_reach_the_least_squares_solution_for_the_chosen_latents() -> None:
    from scipy.optimize import nnls

    x, W_dec, acts = (tensor.double() for tensor in problem())
    found = refined(x, DenseActs(acts), W_dec, 300).dense()
    errors = square_errors(x, found, W_dec).tolist()
    for row, own, error in zip(x.numpy(), found.numpy(), errors, strict=True):
        best, residual = nnls(W_dec.numpy()[own > 0].T, row)
        assert error == pytest.approx(residual**2, rel=1e-6)
        np.testing.assert_allclose(own[own > 0], best, atol=2e-3)


def test_every_step_lowers_errors_and_no_token_gets_a_larger_error_or_more_active_latents() -> None:
    x, W_dec, acts = problem()
    acts[0] = 0
    acts[1] *= torch.arange(40) == acts[1].argmax()
    errors = [square_errors(x, refined(x, DenseActs(acts), W_dec, n).dense(), W_dec) for n in range(4)]
    torch.testing.assert_close(errors[0], square_errors(x, acts, W_dec))
    assert all((later <= former * (1 + 1e-5)).all() for former, later in pairwise(errors))
    assert float(errors[1].mean()) < 0.8 * float(errors[0].mean())
    found = refined(x, DenseActs(acts), W_dec, 3).dense()
    assert (found >= 0).all()
    assert ((found > 0).sum(dim=1) <= (acts > 0).sum(dim=1)).all()


def test_refinement_replaces_a_wrong_latent() -> None:
    W_dec = torch.eye(4)
    x, acts = torch.tensor([[0.0, 3.0, 0.0, 1.0]]), torch.tensor([[2.0, 0.0, 0.0, 1.0]])
    torch.testing.assert_close(refined(x, DenseActs(acts), W_dec, 1).dense(), x)


@pytest.mark.parametrize(
    "architecture", ["topk", "batch_topk", "matryoshka_batch_topk", "jumprelu", "standard", "gated"]
)
def test_a_fitted_sae_reconstructs_better_with_refinement(architecture: str) -> None:
    x, _, _ = problem()
    x = 5 + 3 * x
    fitted = train([x], n_steps=40, architecture=architecture, d_sae=64, k=4, lr=3e-3)
    errors = [float((x - fitted.reconstruct(x, refine=n)).square().sum()) for n in (0, 1, 3)]
    assert errors[0] > 1.02 * errors[1] > 1.02 * errors[2]
    acts, W_dec = fitted.encode(x, refine=3), fitted.sae.raw_decoder()
    rebuilt = acts @ W_dec + fitted.sae.raw(fitted.sae.b_dec)
    torch.testing.assert_close(rebuilt, fitted.reconstruct(x, refine=3), rtol=1e-4, atol=1e-4)
    assert float((acts > 0).sum()) <= float((fitted.encode(x) > 0).sum())


def test_a_transcoder_refuses_refinement() -> None:
    x, _, _ = problem()
    fitted = train([(x, x.flip(1))], n_steps=2, d_sae=64, k=4)
    with pytest.raises(UserError, match=r"^refine: must be 0 for a transcoder"):
        fitted.encode(x, refine=1)


def test_no_rows_are_refined_to_no_rows_and_an_invalid_number_of_steps_is_refused() -> None:
    x, _, _ = problem()
    fitted = train([x], n_steps=2, d_sae=64, k=4)
    assert fitted.encode(x[:0], refine=2).shape == (0, 64)
    for steps in (-1, 1.5, "1"):
        with pytest.raises(UserError, match=r"^refine: must be a number of steps, 0 or more, not"):
            fitted.encode(x, refine=steps)  # type: ignore[arg-type]
