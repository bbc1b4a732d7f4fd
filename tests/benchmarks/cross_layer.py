"""Trains a cross-layer transcoder next to a plain dense PyTorch loop on the same rows.

    OMP_NUM_THREADS=1 python tests/benchmarks/cross_layer.py ACTIVATIONS --layers 12-15 --steps 200

`ACTIVATIONS` is an extraction with `hooks = ["mlp"]` or some layers. The loop is the textbook form: dense matmuls in
both directions, BatchTopK per layer, Adam with the better of two learning rates. Both see the same rows in the same
order. Prints FVU on the same held-out rows, tokens per second, and their ratios.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
from torch import Tensor

from trainer.activations.base import IndexedSource
from trainer.activations.open_source import open_source
from trainer.contract.settings.job import JobConfig
from trainer.contract.settings.job_file import members, parse_job
from trainer.parallel.base import Parallel
from trainer.training.layers import Layers
from trainer.training.learner import Learner, layer_in

BATCH, HELD_OUT = 512, 4096
RATES = (1e-3, 4e-3)


def job_of(data: Path, layers: str, d_sae: int, k: int, steps: int, *, share_k: bool) -> JobConfig:
    table = {
        "data": {"path": str(data), "hook": f"mlp.{layers}"},
        "sae": {"architecture": "batch_topk", "d_sae": d_sae, "k": k, "cross_layer": True, "share_k": share_k},
        "train": {"batch_size": BATCH, "n_steps": steps, "precision": "fp32"},
    }
    job, problems = parse_job(table)
    assert job is not None, problems
    return job


class DenseLoop(torch.nn.Module):
    """A cross-layer transcoder in the textbook form, on rows with a mean spread of 1 per dimension."""

    def __init__(self, n_layers: int, d: int, d_sae: int, k: int) -> None:
        super().__init__()
        self.k, self.d = k, d
        generator = torch.Generator().manual_seed(0)
        self.W_enc = torch.nn.ParameterList(
            torch.nn.Parameter(torch.randn(d, d_sae, generator=generator) * 0.3 / d**0.5) for _ in range(n_layers)
        )
        self.W_dec = torch.nn.ParameterList(
            torch.nn.Parameter(
                torch.randn(d_sae, (n_layers - one) * d, generator=generator) / ((n_layers - one) * d) ** 0.5
            )
            for one in range(n_layers)
        )
        self.b_enc = torch.nn.ParameterList(torch.nn.Parameter(torch.zeros(d_sae)) for _ in range(n_layers))
        self.b_dec = torch.nn.ParameterList(torch.nn.Parameter(torch.zeros(d)) for _ in range(n_layers))

    def forward(self, xs: list[Tensor]) -> list[Tensor]:
        x_hats: list[Tensor] = [one.expand(len(xs[0]), self.d) for one in self.b_dec]
        for layer, x in enumerate(xs):
            pre_acts = (x @ self.W_enc[layer] + self.b_enc[layer]).relu()
            bound = pre_acts.flatten().topk(self.k * len(x)).values[-1]
            written = (pre_acts * (pre_acts >= bound)) @ self.W_dec[layer]
            for number, part in enumerate(written.split(self.d, dim=1)):
                x_hats[layer + number] = x_hats[layer + number] + part
        return x_hats


def fvu(x_hats: list[Tensor], ys: list[Tensor]) -> float:
    each = [(y - x_hat).square().sum() / (y - y.mean(0)).square().sum() for x_hat, y in zip(x_hats, ys, strict=True)]
    return float(torch.stack(each).mean())


def of_trainer(
    job: JobConfig, batches: list[tuple[Tensor, Tensor]], held: tuple[Tensor, Tensor]
) -> tuple[float, float]:
    n, parallel = job.n_layers, Parallel(torch.device("cpu"))
    d = batches[0][0].shape[1] // n
    learners = [Learner(one, d, d, parallel, 0, layer_in(job, one)) for one in members(job).values()]
    first = [torch.cat(column)[:8192] for column in zip(*batches[:16], strict=True)]
    for learner in learners:
        learner.initialise(*first)
    layers = Layers(learners)
    began = time.perf_counter()
    for number, (x, y) in enumerate(batches):
        for learner in learners:
            learner.begin_step(number)
        layers.accumulate(x, y, len(x))
        for learner in learners:
            learner.update()
    seconds = time.perf_counter() - began
    x_hats, ys = [], []
    with torch.no_grad():
        # In training mode, both choose the k · n largest of the same batch.
        for learner, target, output in layers.outputs(*held):
            x_hats.append(output.x_hat / learner.sae.y_scale)
            ys.append(target / learner.sae.y_scale)
    return fvu(x_hats, ys), len(batches) * BATCH / seconds


def of_loop(
    job: JobConfig, batches: list[tuple[Tensor, Tensor]], held: tuple[Tensor, Tensor], rate: float
) -> tuple[float, float]:
    n = job.n_layers
    sample = [torch.cat(column)[:8192] for column in zip(*batches[:16], strict=True)]
    d = sample[0].shape[1] // n
    means = [one.mean(0) for one in sample]
    scales = [
        torch.cat([1 / part.std().expand(d) for part in (one - mean).tensor_split(n, dim=1)])
        for one, mean in zip(sample, means, strict=True)
    ]

    def normal(pair: tuple[Tensor, Tensor]) -> list[list[Tensor]]:
        of_both = [(rows - mean) * scale for rows, mean, scale in zip(pair, means, scales, strict=True)]
        return [list(one.tensor_split(n, dim=1)) for one in of_both]

    model = DenseLoop(n, d, job.sae.width(d), job.sae.settings.n_active)
    optimizer = torch.optim.Adam(model.parameters(), rate, fused=True)
    began = time.perf_counter()
    for number, pair in enumerate(batches):
        left = 1 - number / len(batches)
        optimizer.param_groups[0]["lr"] = rate * min(1.0, left / 0.2)
        xs, ys = normal(pair)
        loss = sum((y - x_hat).square().sum() for x_hat, y in zip(model(xs), ys, strict=True)) / len(pair[0])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    seconds = time.perf_counter() - began
    with torch.no_grad():
        xs, ys = normal(held)
        return fvu(model(xs), ys), len(batches) * BATCH / seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--layers", default="12-15")
    parser.add_argument("--d-sae", type=int, default=1152)
    parser.add_argument("--k", type=int, default=16)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--share-k", action="store_true", help="keep the largest activations of all layers")
    flags = parser.parse_args()
    job = job_of(flags.data, flags.layers, flags.d_sae, flags.k, flags.steps, share_k=flags.share_k)
    source = open_source(job)
    assert isinstance(source, IndexedSource)
    order = torch.randperm(source.n_tokens, generator=torch.Generator().manual_seed(0)).numpy()
    held = source.pairs(order[:HELD_OUT])
    rest = order[HELD_OUT : HELD_OUT + flags.steps * BATCH]
    batches = [source.pairs(rest[first : first + BATCH]) for first in range(0, len(rest), BATCH)]
    batches = [(x.float(), y.float()) for x, y in batches]
    held = held[0].float(), held[1].float()
    ours = of_trainer(job, batches, held)
    print(f"sae-tui: FVU {ours[0]:.4f}, {ours[1]:,.0f} tokens/s")
    for rate in RATES:
        loop = of_loop(job, batches, held, rate)
        print(
            f"dense loop, lr {rate:g}: FVU {loop[0]:.4f}, {loop[1]:,.0f} tokens/s; sae-tui: {ours[1] / loop[1]:.2f} ×"
        )


if __name__ == "__main__":
    main()
