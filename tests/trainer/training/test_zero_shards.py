"""Tests replicas that each update a shard of the latents and exchange 16-bit copies of the updated weights."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from support.saes import new_sae
from torch import Tensor

from trainer.parallel.group import local_shard
from trainer.parallel.latents import Latents
from trainer.parallel.threads import Threads, on_all
from trainer.runtime import narrow_copy
from trainer.runtime.narrow_copy import kept_or_own
from trainer.saes.topk import TopK
from trainer.training.zero_shards import SteppedShare

D_IN, MATRICES = 12, ("W_enc", "W_dec")
TIMEOUT_S = 60.0


class Late(NamedTuple):
    """A transfer whose result is NaN until a rank waits for it."""

    target: Tensor
    result: Tensor

    @classmethod
    def of(cls, target: Tensor) -> Late:
        late = cls(target, target.clone())
        target.fill_(torch.nan)
        return late

    def wait(self) -> None:
        self.target.copy_(self.result)


class LateThreads(Threads):
    """A process group whose asynchronous exchanges deliver their results only when a rank waits for them."""

    def finish(self, transfers: list[Any]) -> None:
        for transfer in transfers:
            transfer.wait()

    def start_spread(self, tensors: Iterable[Tensor]) -> list[Any]:
        listed = list(tensors)
        self.spread_parts_(listed)
        parts = [part for tensor in listed for part in enumerate(tensor.tensor_split(self.size))]
        return [Late.of(part) for rank, part in parts if rank != self.index]

    def start_sum_parts(self, tensors: Iterable[Tensor]) -> list[Any]:
        listed = list(tensors)
        self.sum_parts_(listed)
        return [Late.of(local_shard(tensor, self)) for tensor in listed]


def share_of(group: Threads, d_sae: int) -> tuple[TopK, SteppedShare]:
    sae: TopK = new_sae(TopK, D_IN, d_sae, k=2)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in sae.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    sae.shard(group, group, Latents(d_sae))
    return sae, SteppedShare(sae, group)


def stepped(group: Threads, d_sae: int, *, is_narrow: bool) -> dict[str, Tensor]:
    """Return the weights after three steps whose gradients depend on 16-bit copies of all weights."""
    sae, share = share_of(group, d_sae)
    if is_narrow:
        share.exchange_narrow(torch.bfloat16)
    for number in range(3):
        share.divide()
        for name, weights in share_of_all(sae):
            read = kept_or_own(weights, torch.bfloat16) if name in MATRICES else weights.detach()
            weights.grad = (read.bfloat16().float() * 3 + number).sin()
        share.begin()
        with torch.no_grad():
            for parameter in share.parameters.values():
                parameter -= 0.1 * parameter.grad if parameter.grad is not None else 0
        share.end()
    share.restore()
    return {name: weights.detach().clone() for name, weights in sae.named_parameters()}


def share_of_all(sae: TopK) -> list[tuple[str, Tensor]]:
    return [(name, weights) for name, weights in sae.named_parameters() if name in sae.latent_dims()]


def on_late_threads(size: int, work: Callable[[LateThreads], Any]) -> list[Any]:
    return on_all(size, lambda group: work(LateThreads(group._meeting, size, group.index)), TIMEOUT_S)


@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize("d_sae", [24, 27])
def test_exchanges_in_16_bits_and_in_fp32_lead_to_bit_identical_weights(size: int, d_sae: int) -> None:
    expected, *_ = on_all(size, lambda group: stepped(group, d_sae, is_narrow=False), TIMEOUT_S)
    for weights in on_late_threads(size, lambda group: stepped(group, d_sae, is_narrow=True)):
        assert all(torch.equal(weights[name], expected[name]) for name in expected)


def test_a_rank_keeps_fp32_weights_only_for_its_own_latents() -> None:
    def bytes_of(group: Threads) -> dict[str, list[int]]:
        sae, share = share_of(group, 24)
        share.exchange_narrow(torch.bfloat16)
        share.divide()
        divided = [sae.W_enc.untyped_storage().nbytes(), share.parameters["W_enc"].untyped_storage().nbytes()]
        share.restore()
        return {"divided": divided, "restored": [sae.W_enc.untyped_storage().nbytes()]}

    whole = 4 * D_IN * 24
    assert on_all(2, bytes_of, TIMEOUT_S) == [{"divided": [0, whole // 2], "restored": [whole]}] * 2


def test_if_the_weights_are_replaced_the_next_pass_uses_the_new_ones() -> None:
    def read(group: Threads) -> bool:
        sae, share = share_of(group, 24)
        share.exchange_narrow(torch.bfloat16)
        share.divide()
        share.restore(fill=False)
        with torch.no_grad():
            sae.W_dec.copy_(torch.arange(24 * D_IN).view(24, D_IN))
        share.divide()
        expected = torch.arange(24.0 * D_IN).view(24, D_IN)
        copy = kept_or_own(sae.W_dec, torch.bfloat16)
        return torch.equal(share.parameters["W_dec"], local_shard(expected, group)) and torch.equal(
            copy, expected.bfloat16()
        )

    assert on_all(2, read, TIMEOUT_S) == [True, True]


@pytest.mark.parametrize("may", [True, False])
def test_the_decoder_gradient_is_summed_early_or_with_the_other_gradients(
    may: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A single thread replaces the attribute for all threads, and restores it.
    # If several threads did this, they would restore one another's values.
    on_gpu = threading.Barrier(4, partial(monkeypatch.setattr, torch.Tensor, "is_cuda", True), TIMEOUT_S)
    on_cpu = threading.Barrier(4, monkeypatch.undo, TIMEOUT_S)

    def summed(group: LateThreads) -> tuple[int, Tensor]:
        on_gpu.wait()
        sae, share = share_of(group, 24)
        on_cpu.wait()
        share.send_early(may=may)
        ((group.index + 1) * sae.W_dec.sum() + sae.W_enc.sum()).backward()
        left = share.part_sums()
        group.sum_parts_(left)
        share.begin()
        return len(left), share.parameters["W_dec"].grad

    for n_left, gradient in on_late_threads(4, summed):
        assert n_left == (1 if may else 2)
        assert torch.equal(gradient, torch.full((6, D_IN), 10.0))


def test_a_16_bit_copy_is_not_read_before_its_transfer_has_ended() -> None:
    weights = torch.nn.Parameter(torch.ones(4, 3))
    copy = narrow_copy.keep(weights)
    rows = copy.read(weights, torch.bfloat16)
    late = Late.of(rows)
    copy.arrive(late.wait)
    assert rows.isnan().all()
    assert torch.equal(kept_or_own(weights, torch.bfloat16), torch.ones(4, 3).bfloat16())
