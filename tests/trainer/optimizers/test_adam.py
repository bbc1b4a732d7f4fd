from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from trainer.optimizers import tiled
from trainer.optimizers.adam import Adam
from trainer.optimizers.codecs import BLOCK, CODECS

SHAPES = ((2 * BLOCK + 6, 300), (300, 2 * BLOCK + 6), (300,), (7,))


def made(state: str, **settings: float) -> tuple[Adam, list[nn.Parameter]]:
    generator = torch.Generator().manual_seed(0)
    parameters = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]
    return Adam(parameters, 1e-2, **({"beta1": 0.9, "beta2": 0.999} | settings), state=state), parameters


def gradients(step: int) -> list[Tensor]:
    """Return gradients for rare and frequent latents. At each step, about a fifth of them have a zero gradient."""
    generator = torch.Generator().manual_seed(step)
    sizes = 10 ** (-6 * torch.rand(300, generator=torch.Generator().manual_seed(1)))
    active = sizes * (torch.rand(300, generator=generator) < 0.8)
    raw = [torch.randn(shape, generator=generator) + 0.3 for shape in SHAPES]
    return [raw[0] * active, raw[1] * active[:, None], raw[2] * active, raw[3]]


def trained(state: str, n_steps: int, **settings: float) -> tuple[Adam, list[nn.Parameter]]:
    optimizer, parameters = made(state, **settings)
    for step in range(n_steps):
        for parameter, gradient in zip(parameters, gradients(step), strict=True):
            parameter.grad = gradient
        optimizer.step()
    return optimizer, parameters


def naive(n_steps: int, beta1: float, beta2: float) -> list[np.ndarray]:
    """Return the weights after `n_steps` steps of Algorithm 1 from the Adam paper, in float64."""
    weights = [parameter.detach().double().numpy() for parameter in made("fp32")[1]]
    m, v = ([np.zeros_like(weight) for weight in weights] for _ in range(2))
    for step in range(n_steps):
        for i, gradient in enumerate(gradient.double().numpy() for gradient in gradients(step)):
            m[i] = beta1 * m[i] + (1 - beta1) * gradient
            v[i] = beta2 * v[i] + (1 - beta2) * gradient**2
            m_hat, v_hat = m[i] / (1 - beta1 ** (step + 1)), v[i] / (1 - beta2 ** (step + 1))
            weights[i] = weights[i] - 1e-2 * m_hat / (np.sqrt(v_hat) + 6.25e-10)
    return weights


@pytest.mark.parametrize("beta1", [0.9, 0.0])
def test_the_weights_match_the_algorithm_in_the_paper(beta1: float) -> None:
    _, parameters = trained("fp32", 20, beta1=beta1)
    for parameter, expected in zip(parameters, naive(20, beta1, 0.999), strict=True):
        np.testing.assert_allclose(parameter.detach().numpy(), expected, rtol=1e-4, atol=1e-5)


def test_a_step_computed_in_tiles_equals_a_fused_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CODECS, "bf16", CODECS["fp32"])
    monkeypatch.setitem(tiled._TILE, "cpu", 1000)  # small enough for every matrix to have several tiles
    for one, other in zip(trained("bf16", 20)[1], trained("fp32", 20)[1], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("to", ["fp32", "bf16"])
@pytest.mark.parametrize("stored", ["fp32", "bf16"])
def test_a_checkpoint_can_be_resumed_with_moments_in_another_dtype(stored: str, to: str) -> None:
    before, parameters = trained(stored, 20)
    after, own_parameters = made(to)
    for parameter, own in zip(parameters, own_parameters, strict=True):
        own.data.copy_(parameter.data)
        after.state[own] = after.adopted(own, dict(before.state[parameter]))
        if own.dim() > 1:
            expected, actual = CODECS[stored].read(before.state[parameter]), CODECS[to].read(after.state[own])
            for moment, kept in zip(expected, actual, strict=True):
                assert (kept - moment).abs().max() <= 0.02 * moment.abs().max()
        own.grad = torch.ones_like(own)
    steps = [after.state[own]["step"].item() for own in own_parameters]
    after.step()
    assert [after.state[own]["step"].item() for own in own_parameters] == [step + 1 for step in steps]
    assert all(own.isfinite().all() for own in own_parameters)


@pytest.mark.parametrize("state", ["bf16", "int8"])
def test_the_tile_size_does_not_change_the_result(state: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = trained(state, 3)[1]
    monkeypatch.setitem(tiled._TILE, "cpu", 1000)
    assert all(torch.equal(one, other) for one, other in zip(trained(state, 3)[1], whole, strict=True))


@pytest.mark.parametrize(("state", "tolerance"), [("bf16", 0.02), ("int8", 0.06)])
def test_compact_moments_lead_to_nearly_the_same_weights(state: str, tolerance: float) -> None:
    start = made("fp32")[1]
    for parameter, exact, begin in zip(trained(state, 100)[1], trained("fp32", 100)[1], start, strict=True):
        assert (parameter - exact).norm() < tolerance * (exact - begin).norm()


@pytest.mark.parametrize(("state", "n_bytes"), [("fp32", 8), ("bf16", 4), ("int8", 2)])
def test_moments_take_the_configured_number_of_bytes(state: str, n_bytes: int) -> None:
    optimizer, parameters = trained(state, 1)
    for parameter in parameters[:2]:
        held = sum(value.nbytes for value in optimizer.state[parameter].values())
        assert n_bytes * parameter.numel() <= held < (n_bytes + 0.2) * parameter.numel()


@pytest.mark.parametrize("state", ["bf16", "int8"])
def test_the_second_moment_of_a_silent_latent_decays_correctly(state: str) -> None:
    # Each step reduces the moment by a thousandth, which is less than half the spacing between representable values.
    optimizer, parameters = trained(state, 20)
    before = [second_moment(optimizer, parameter) for parameter in parameters[:2]]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    for _ in range(300):
        optimizer.step()
    for one, parameter in zip(before, parameters, strict=False):
        sizeable = one > 1e-4 * one.max()
        ratio = second_moment(optimizer, parameter)[sizeable] / one[sizeable]
        assert float(ratio.mean()) == pytest.approx(0.999**300, rel=0.01)
        assert float(ratio.std()) < 0.1


def second_moment(optimizer: Adam, parameter: nn.Parameter) -> Tensor:
    """Return a parameter's second moment, decoded to fp32."""
    state = {name: value for name, value in optimizer.state[parameter].items() if name != "step"}
    for name, value in state.items():
        if name.endswith("scale") and len(value) < len(parameter):
            state[name] = value.repeat_interleave(BLOCK, dim=0)[: len(parameter)]
    return CODECS[optimizer._codec].read(state)[1]


def test_the_second_moment_never_decays_if_it_is_rounded_to_nearest() -> None:
    state = {name: torch.full((4, 8), 1.0, dtype=torch.bfloat16) for name in ("exp_avg", "exp_avg_sq")}
    for _ in range(100):
        m, v = CODECS["bf16"].read(state)
        CODECS["bf16"].write(state, m, v * 0.999, 1, torch.tensor(2**15, dtype=torch.int32))
    assert bool((state["exp_avg_sq"] == 1).all())


@pytest.mark.parametrize("state", list(CODECS))
@pytest.mark.parametrize("dim", [0, 1])
def test_decoding_and_re_encoding_moments_produces_the_same_bits(state: str, dim: int) -> None:
    codec, generator = CODECS[state], torch.Generator().manual_seed(4)
    m = torch.randn(BLOCK, 500, generator=generator) * 10 ** (-20 * torch.rand(BLOCK, 500, generator=generator))
    m[:, 7], m[9] = 0, 0
    stored = codec.new(m, dim)
    codec.write(stored, m.clone(), m.square(), dim, torch.randint(2**16, m.shape, generator=generator).int())
    again = {name: value.clone() for name, value in stored.items()}
    codec.write(again, *codec.read(again), dim, torch.tensor(2**15, dtype=torch.int32))
    assert all(torch.equal(stored[name], again[name]) for name in stored)


@pytest.mark.parametrize("state", list(CODECS))
def test_rounding_preserves_the_mean(state: str) -> None:
    codec = CODECS[state]
    m = torch.linspace(-1, 1, 999)[:, None].repeat(1, 1) * torch.tensor([[1.0, 0.37, 0.011]])
    total_m, total_v = torch.zeros_like(m), torch.zeros_like(m)
    for dither in range(0, 2**16, 2**9):
        stored = codec.new(m, 1)
        if state == "fp32":
            stored["exp_avg"], stored["exp_avg_sq"] = m.clone(), m.square()
        codec.write(stored, m.clone(), m.square(), 1, torch.tensor(dither, dtype=torch.int32))
        read = codec.read(stored)
        total_m, total_v = total_m + read[0] / 128, total_v + read[1] / 128
    torch.testing.assert_close(total_m, m, rtol=0.004, atol=1e-4)
    torch.testing.assert_close(total_v, m.square(), rtol=0.01, atol=1e-6)


@pytest.mark.parametrize("state", ["fp32", "bf16", "int8"])
def test_a_rank_without_latents_still_counts_its_steps(state: str) -> None:
    parameters = [nn.Parameter(torch.zeros(8, 0)), nn.Parameter(torch.zeros(0, 8)), nn.Parameter(torch.zeros(0))]
    optimizer = Adam(parameters, 1e-3, beta1=0.9, beta2=0.999, state=state)
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    assert all(int(optimizer.state[parameter]["step"]) == 1 for parameter in parameters)


def test_compiled_updates_get_no_float64_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    # A compiled kernel with a float64 argument would compute every weight in float64.
    # On many GPUs, float64 runs at 1/64 of the fp32 speed.
    given: list[object] = []
    monkeypatch.setattr(tiled, "_update", lambda *arguments: given.extend(tree_leaves(arguments)))
    trained("int8", 2)
    assert torch.float64 not in {one.dtype for one in given if isinstance(one, Tensor)}
