"""Checks short training runs on the device: FVU close to the CPU's, exact resuming and replay, and no host waits."""

from __future__ import annotations

import itertools
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainer.contract.settings.catalog import ARCHITECTURES
from trainer.runtime.precision import set_deterministic
from trainer.saes.topk import TopK
from trainer.self_test.base import (
    CPU,
    SMALL,
    TINY,
    Check,
    Size,
    job_of,
    learner_of,
    let_some_die,
    rows,
    take,
)
from trainer.training.graph_replay import CudaTape, GraphReplay, Tape
from trainer.training.learner import Learner

# The largest allowed relative difference from the CPU's FVU in fp32, after the first steps and after all steps. Devices
# may select different latents if activations are nearly equal, so training runs slowly diverge.
NEAR = {"fp32": (1e-3, 0.02), "tf32": (5e-3, 0.05), "bf16": (0.03, 0.05), "fp16": (0.03, 0.05)}
FIRST_STEPS, N_BATCHES = 5, 40
# The largest allowed relative difference between a replayed and an eager step, in the loss and in the weight change.
NEAR_LOSSES, NEAR_CHANGES = 2e-3, 0.05
# Part of the warning that PyTorch prints when the host waits. PyTorch's warning that it may miss some waits is ignored.
WAITED = "called a synchronizing CUDA operation"
# Training settings to check in addition to each architecture's defaults.
OTHERS: tuple[dict[str, Any], ...] = (
    {"optimizer": "signum"},
    {"optimizer": "muon"},
    {"state": "fp32"},
    {"state": "bf16"},
    {"state": "int8"},
    {"precision": "fp16"},
)


def _size(device: torch.device) -> Size:
    return SMALL if device.type == "cuda" else TINY


def check_curves(device: torch.device, n_steps: int, among: Collection[str] = tuple(NEAR)) -> Iterator[Check]:
    """For each precision in `among`, compare each architecture's FVU on the device with its fp32 FVU on the CPU."""
    size = _size(device)
    data = rows(N_BATCHES * size.batch_size, size.d_in)
    precisions = [name for name in NEAR if name in among and (device.type == "cuda" or name == "fp32")]
    for architecture in ARCHITECTURES:
        reference = _curve(size, architecture, "fp32", CPU, data, n_steps)
        for precision in precisions:
            first, last = _curve(size, architecture, precision, device, data, n_steps)
            off = abs(first / reference[0] - 1), abs(last / reference[1] - 1)
            is_near = all(a < b for a, b in zip(off, NEAR[precision], strict=True))
            found = {"fvu": last, "fvu_cpu": reference[1], "off_at_first": off[0], "off_at_last": off[1]}
            yield Check("curves", f"{architecture}, {precision}", is_near, found)


def _curve(
    size: Size, architecture: str, precision: str, device: torch.device, data: Tensor, n_steps: int
) -> tuple[float, float]:
    """Return the FVU on the first rows, after a few steps and after all steps."""
    train = {"precision": precision, "n_steps": n_steps, "state": "fp32"}
    learner = learner_of(job_of(size, {"architecture": architecture}, train), size.d_in, device)
    sample = data[: 8 * size.batch_size].to(device)
    learner.initialise(sample, sample)
    batches = itertools.cycle(data.split(size.batch_size))
    first = float("nan")
    for number, batch in zip(range(n_steps), batches, strict=False):
        take(learner, number, batch.to(device))
        if number + 1 == min(FIRST_STEPS, n_steps):
            first = _fvu(learner, sample)
    return first, _fvu(learner, sample)


@torch.no_grad()
def _fvu(learner: Learner, x: Tensor) -> float:
    x = x * learner.sae.x_scale
    with learner.evaluating():
        x_hat = learner.forward(x, x).x_hat.float()
    return float((x - x_hat).double().square().sum() / (x - x.mean(dim=0)).double().square().sum())


def check_resuming(device: torch.device, half: int) -> Iterator[Check]:
    """Check that saving, loading and continuing a run leads to exactly the same state as an uninterrupted run."""
    was = torch.are_deterministic_algorithms_enabled()
    set_deterministic(True)
    try:
        for sae, train in _settings():
            yield Check("resuming", _name(sae, train), *_resumed_alike(device, sae, train, half))
    finally:
        torch.use_deterministic_algorithms(was)


def _resumed_alike(
    device: torch.device, sae: dict[str, Any], train: dict[str, Any], half: int
) -> tuple[bool, dict[str, Any]]:
    size = _size(device)
    batches = rows(8 * size.batch_size, size.d_in).split(size.batch_size)

    def fresh() -> Learner:
        job = job_of(size, sae | {"dead_after_tokens": 4 * size.batch_size}, train | {"n_steps": 2 * half})
        learner = learner_of(job, size.d_in, device)
        sample = torch.cat(batches).to(device)
        learner.initialise(sample, sample)
        return learner

    def go(learner: Learner, first: int, last: int) -> None:
        for number in range(first, last):
            take(learner, number, batches[number % len(batches)].to(device))

    whole, broken, resumed = fresh(), fresh(), fresh()
    go(whole, 0, 2 * half)
    go(broken, 0, half)
    saved = broken.state.collect() or {}
    resumed.state.load({name: tensor.to(CPU, copy=True).contiguous() for name, tensor in saved.items()})
    go(resumed, half, 2 * half)
    expected = dict(whole.state.tensors())
    differing = [name for name, tensor in resumed.state.tensors() if not torch.equal(tensor, expected[name])]
    return not differing, {"differing": differing}


def check_waits(device: torch.device) -> Iterator[Check]:
    """Check that the host does not wait for the device in a step without logging."""
    if device.type != "cuda":
        return
    x = rows(SMALL.batch_size, SMALL.d_in).to(device)
    for sae, train in _settings():
        learner = learner_of(job_of(SMALL, sae, {"precision": "bf16"} | train), SMALL.d_in, device)
        learner.initialise(x, x)
        let_some_die(learner)
        for number in range(3):
            take(learner, number, x)
        indices = waits_of(device, partial(take, learner, 3, x))
        yield Check("waits", _name(sae, train), not indices, {"places": dict(indices)})


def check_recording(device: torch.device, n_steps: int) -> Iterator[Check]:
    """Check that replayed steps are bit-identical to eager steps, even if host-side decisions change between steps.

    In deterministic mode, architectures with a sparsity penalty use dense matmuls, so their steps are not captured.
    Instead, these steps are compared outside deterministic mode with a tolerance, because the summation order differs;
    each pair of steps starts from the same weights.
    """
    if device.type != "cuda":
        return
    was = torch.are_deterministic_algorithms_enabled()
    try:
        for sae, train in _settings():
            kind = partial(_captured_learner, device, sae, train)
            is_exact, (plain, captured) = isinstance(kind().sae, TopK), (kind(), kind())
            set_deterministic(is_exact)
            if plain.steps_by_rows:
                compare = _captured_alike if is_exact else captured_nearly_alike
                yield Check("graph replay", _name(sae, train), *compare(plain, captured, device, n_steps))
    finally:
        torch.use_deterministic_algorithms(was)


def _captured_learner(device: torch.device, sae: dict[str, Any], train: dict[str, Any]) -> Learner:
    # With 8,192 latents, a sparsity penalty leaves a small enough fraction active for sparse matmuls.
    size = SMALL if "topk" in sae["architecture"] else SMALL._replace(d_sae=8192)
    learner = learner_of(job_of(size, sae, {"precision": "bf16"} | train), size.d_in, device)
    sample = rows(size.batch_size, size.d_in).to(device)
    learner.initialise(sample, sample)
    return learner


def _captured_alike(
    plain: Learner, captured: Learner, device: torch.device, n_steps: int
) -> tuple[bool, dict[str, Any]]:
    captured.whole_steps = steps = GraphReplay(captured, CudaTape)
    batches = [one.to(device) for one in rows(8 * SMALL.batch_size, SMALL.d_in).split(SMALL.batch_size)]
    for number in range(n_steps):
        for learner in (plain, captured):
            if number == n_steps // 2:
                let_some_die(learner)
            take(learner, number, batches[number % len(batches)])
    expected = dict(plain.state.tensors())
    differing = [name for name, tensor in captured.state.tensors() if not torch.equal(tensor, expected[name])]
    return not differing and steps.n_replayed > 0, {"differing": differing, "replayed": steps.n_replayed}


def captured_nearly_alike(
    plain: Learner, captured: Learner, device: torch.device, n_steps: int, tape: Callable[[], Tape] = CudaTape
) -> tuple[bool, dict[str, Any]]:
    """Compare the losses and weight changes of eager and replayed steps starting from the same weights."""
    captured.whole_steps = steps = GraphReplay(captured, tape)
    batches = [one.to(device) for one in rows(8 * SMALL.batch_size, SMALL.d_in).split(SMALL.batch_size)]
    losses_off, changes_off = 0.0, 0.0
    for number in range(n_steps):
        state = {name: tensor.clone() for name, tensor in captured.state.tensors()}
        plain.state.load({name: tensor.clone() for name, tensor in state.items()})
        for learner in (plain, captured):
            take(learner, number, batches[number % len(batches)])
        expected, found = (one.values(one.sums())["loss"] for one in (plain, captured))
        losses_off = max(losses_off, abs(found / expected - 1))
        changes_off = max(changes_off, _changes_off(plain, captured, state))
    figures = {"losses_off": losses_off, "changes_off": changes_off, "replayed": steps.n_replayed}
    return losses_off < NEAR_LOSSES and changes_off < NEAR_CHANGES and steps.n_replayed > 0, figures


@torch.no_grad()
def _changes_off(plain: Learner, captured: Learner, before: dict[str, Tensor]) -> float:
    """Return the distance between both learners' weights, relative to the eager learner's change from `before`."""
    parted = went = 0.0
    others = dict(captured.sae.named_parameters())
    for name, weights in plain.sae.named_parameters():
        parted += float((weights - others[name]).double().square().sum())
        went += float((weights - before[f"sae.{name}"]).double().square().sum())
    return (parted / went) ** 0.5 if went else float(parted > 0)


def waits_of(device: torch.device, work: Callable[[], None]) -> Counter[str]:
    """Return how often the host waits for a GPU during `work`, by source line."""
    if device.type != "cuda":
        work()
        return Counter()
    torch.cuda.synchronize(device)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            work()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return Counter(f"{Path(one.filename).name}:{one.lineno}" for one in seen if WAITED in str(one.message))


def _settings() -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Yield settings for [sae] and [train]: the defaults for all architectures, and topk with each of `OTHERS`."""
    for architecture in ARCHITECTURES:
        yield {"architecture": architecture}, {}
    for train in OTHERS:
        if train != {"precision": "fp16"} or torch.cuda.is_available():
            yield {"architecture": "topk"}, train


def _name(sae: dict[str, Any], train: dict[str, Any]) -> str:
    return " ".join([sae["architecture"], *map(str, train.values())])
