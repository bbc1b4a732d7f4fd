"""Measures every matmul in a TopK step, and compares it with the equivalent dense matmul and with a minimum time.

    python tests/benchmarks/kernels.py [--d-in 384] [--d-sae 3072] [--batch 4096] [--k 32] [--device cuda]
        [--precision bf16] [--threads 2] [--repeat 20] [--json FILE]

The floor, or minimum time, is max(FLOPs/peak, bytes/bandwidth) at this machine's measured speed. Each value's bytes are
counted once, as if a cache served all repeated reads. `dense` is one matmul with the same result, without the cost of
scattering activations into a matrix. On a GPU, `torch` is the implementation without Triton. `CPU` is the CPU time per
call and thread, which is more meaningful on a busy machine. Latents are used unevenly: the most frequent latent is
active on most tokens.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from unittest import mock

import torch
from quality import synchronise
from rich.console import Console
from rich.table import Table
from torch import Tensor
from train_step import measured_speeds

from trainer.runtime.triton_kernels import SPARSE_PRODUCTS
from trainer.saes.kernels import sparse
from trainer.saes.kernels.encode import encode
from trainer.saes.kernels.pre_acts import PreActs
from trainer.saes.kernels.select import k_per_token
from trainer.saes.sparse_acts import SparseActs, SparseIndices

# On a GPU, the number of calls between clock readings, large enough that launches overlap with computation as they do
# in a training step.
CALLS = 10


@dataclass
class Kernel:
    """One matmul: a function that runs it, its dense counterpart, and its minimum numbers of operations and bytes."""

    name: str
    run: Callable[[], object]
    flops: float = 0
    bytes: float = 0
    dense: Callable[[], object] | None = None
    deterministic: bool = False
    has_triton: bool = True


@dataclass
class Result:
    """Each implementation's time in seconds, or None if there is no such implementation."""

    name: str
    wall_s: float
    cpu_s: float
    torch_s: float | None
    dense_s: float | None
    floor_s: float


def main() -> None:
    options = parse()
    torch.set_num_threads(options.threads)
    torch.set_float32_matmul_precision("highest")
    speeds = measured_speeds(options)
    results = [measure(kernel, options, speeds) for kernel in kernels(options)]
    Console(width=130).print(table(results, options, speeds))
    if options.json:
        setup = {key: value for key, value in vars(options).items() if key != "json"}
        report = {"setup": setup, **speeds, "kernels": [asdict(result) for result in results]}
        options.json.write_text(json.dumps(report, indent=1) + "\n")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in {"d-in": 384, "d-sae": 3072, "batch": 4096, "k": 32, "threads": 2, "repeat": 20}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


# Measured products


def kernels(options: argparse.Namespace) -> Iterator[Kernel]:
    n_tokens, d_in, d_sae, k = options.batch, options.d_in, options.d_sae, options.k
    narrow = torch.bfloat16 if options.precision == "bf16" else torch.float32
    width, n = narrow.itemsize, options.batch * options.k
    torch.manual_seed(0)
    # In bf16, the matmul inputs are 16-bit, as under autocast, and the sums are fp32.
    x, W_enc, W_dec = (
        torch.randn(*shape, device=options.device).to(narrow)
        for shape in ((n_tokens, d_in), (d_in, d_sae), (d_sae, d_in))
    )
    # Without a bias, pre-activations have a standard deviation of √d_in, so this bias makes a few latents fire nearly
    # always and many rarely.
    b_enc = d_in**0.5 * torch.randn(d_sae, device=options.device).to(narrow)
    pre_acts = PreActs(torch.addmm(b_enc, x, W_enc))
    indices, _ = k_per_token(pre_acts, k)
    acts = SparseActs(torch.rand(n, device=options.device), indices, d_sae)
    acts_matrix, n_used = acts.dense().to(narrow), len(indices.latents.unique())
    entries, rows, tokens = n * (8 + 4), n_used * d_in * width, n_tokens * d_in
    flops = 2 * n * d_in

    yield Kernel(
        "encoder, dense",
        lambda: torch.addmm(b_enc, x, W_enc),
        flops=2 * n_tokens * d_in * d_sae,
        bytes=width * (tokens + d_in * d_sae + n_tokens * d_sae),
        has_triton=False,
    )
    yield Kernel("k largest", lambda: k_per_token(pre_acts, k), bytes=pre_acts.matrix.nbytes + 8 * n, has_triton=False)
    yield Kernel(
        "decode",
        lambda: sparse.bag_sums(acts.values, indices.latents, indices.starts, W_dec),
        flops,
        entries + rows + 4 * tokens,
        lambda: acts_matrix @ W_dec,
    )
    yield Kernel(
        "gradient of activations",
        lambda: sparse.row_products(x, W_dec, indices),
        flops,
        entries + rows + width * tokens,
        lambda: x @ W_dec.T,
    )
    yield Kernel(
        "both gradients of decoding",
        lambda: sparse.both_products(acts, x, W_dec),
        2 * flops,
        entries + rows + width * tokens + 4 * d_sae * d_in,
        lambda: (x @ W_dec.T, acts_matrix.T @ x),
    )
    yield Kernel("sort by latent", lambda: fresh(indices).by_latent(d_sae), bytes=16 * n + 8 * d_sae, has_triton=False)
    for deterministic in (False, True) if indices.latents.is_cuda else (False,):
        yield Kernel(
            "gradient of a weight" + ", deterministic" * deterministic,
            lambda: sparse.transposed_product(acts, x),
            flops,
            entries + width * tokens + 4 * d_sae * d_in,
            lambda: acts_matrix.T @ x,
            deterministic,
        )
    yield whole_pass(options, flops, indices)


def fresh(indices: SparseIndices) -> SparseIndices:
    """Return a copy of the indices without the cached order, so that every call has to sort them."""
    return SparseIndices(indices.latents, indices.tokens, indices.starts)


def whole_pass(options: argparse.Namespace, flops: float, indices: SparseIndices) -> Kernel:
    """Return a kernel that runs a forward and backward pass with the given latents active.

    Its dense counterpart runs five matmuls with plain autograd.
    """
    n_tokens, d_in, d_sae = options.batch, options.d_in, options.d_sae
    made = {"W_enc": (d_in, d_sae), "b_enc": (d_sae,), "W_dec": (d_sae, d_in), "b_dec": (d_in,)}
    weights = {name: torch.randn(*shape, device=options.device, requires_grad=True) for name, shape in made.items()}
    W_enc, b_enc, W_dec, b_dec = weights.values()
    x = torch.randn(n_tokens, d_in, device=options.device)
    mask = torch.zeros(n_tokens, d_sae, dtype=torch.bool, device=options.device)
    mask[indices.tokens, indices.latents] = True
    dtype = torch.bfloat16 if options.precision == "bf16" else None

    def arithmetic() -> contextlib.AbstractContextManager[object]:
        return torch.autocast(x.device.type, dtype) if dtype else contextlib.nullcontext()

    def learn(x_hat: Tensor) -> None:
        torch.autograd.grad((x_hat - x).square().sum(), list(weights.values()))

    def choose(pre_acts: PreActs) -> tuple[SparseIndices, Tensor]:
        return fresh(indices), pre_acts.matrix[indices.tokens, indices.latents]

    def run() -> None:
        with arithmetic():
            acts = encode(x, W_enc, b_enc, b_dec, choose)
            x_hat = sparse.decode(acts, W_dec) + b_dec
        learn(x_hat)

    def dense() -> None:
        with arithmetic():
            acts = torch.addmm(b_enc, x - b_dec, W_enc) * mask
            x_hat = acts @ W_dec + b_dec
        learn(x_hat)

    width = 2 if dtype else 4
    encoder_flops, encoder_bytes = 2 * n_tokens * d_in * d_sae, width * n_tokens * d_sae
    weight_bytes = 2 * d_in * d_sae * (width + 4)
    return Kernel(
        "encode, decode and all gradients", run, encoder_flops + 4 * flops, encoder_bytes + weight_bytes, dense
    )


# Measurement


def measure(kernel: Kernel, options: argparse.Namespace, speeds: dict[str, float]) -> Result:
    floor_s = max(kernel.flops / speeds["flops"], kernel.bytes / speeds["bandwidth"])
    torch.use_deterministic_algorithms(kernel.deterministic)
    wall_s, cpu_s = seconds(kernel.run, options)
    torch.use_deterministic_algorithms(False)
    torch_s = None
    if kernel.has_triton and options.device.startswith("cuda") and SPARSE_PRODUCTS.on(torch.zeros(1, device="cuda")):
        with mock.patch.object(sparse, "SPARSE_PRODUCTS", **{"on.return_value": None}):
            torch_s, _ = seconds(kernel.run, options)
    dense_s = seconds(kernel.dense, options)[0] if kernel.dense else None
    return Result(kernel.name, wall_s, cpu_s, torch_s, dense_s, floor_s)


def seconds(run: Callable[[], object], options: argparse.Namespace) -> tuple[float, float]:
    """Return the median wall time and the median CPU time per thread for one call, in seconds."""
    calls = CALLS if options.device.startswith("cuda") else 1
    walls, cpus = [], []
    run()
    for _ in range(options.repeat):
        synchronise(options.device)
        wall, cpu = time.perf_counter(), time.process_time()
        for _ in range(calls):
            run()
        synchronise(options.device)
        walls.append((time.perf_counter() - wall) / calls)
        cpus.append((time.process_time() - cpu) / calls / torch.get_num_threads())
    return statistics.median(walls), statistics.median(cpus)


def table(results: list[Result], options: argparse.Namespace, speeds: dict[str, float]) -> Table:
    shape = f"{options.batch} tokens, d_in {options.d_in}, d_sae {options.d_sae}, k {options.k}"
    speed = f"{speeds['flops'] / 1e12:.3g} TFLOP/s, {speeds['bandwidth'] / 1e9:.3g} GB/s"
    shown = Table("ms", title=f"{shape}, {options.precision} on {options.device} ({speed})")
    for heading in ("wall", "CPU", "torch", "dense", "dense ×", "floor", "of floor"):
        shown.add_column(heading, justify="right")
    for result in results:
        gain = f"{result.dense_s / result.wall_s:.1f}" if result.dense_s else ""
        times = (result.wall_s, result.cpu_s, result.torch_s, result.dense_s)
        cells = [f"{1e3 * value:.3f}" if value is not None else "" for value in times]
        share = f"{result.floor_s / result.wall_s:.0%}"
        shown.add_row(result.name, *cells, gain, f"{1e3 * result.floor_s:.3f}", share)
    return shown


if __name__ == "__main__":
    main()
