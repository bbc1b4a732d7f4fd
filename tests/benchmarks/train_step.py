"""Measures the speed of a training step in our trainer, other trainers and plain loops, on the same data.

    python tests/benchmarks/train_step.py [--data FILE] [--d-sae 3072] [--batch 4096] [--k 32] [--steps 110]
        [--peers NAME ...] [--device cuda] [--precision bf16] [--d-in 384] [--json FILE]

Each recipe runs in its own process, so that its peak memory can be measured separately. The processes take turns in
rounds of several steps, so other load affects all recipes equally. The first step in each round is not timed, because
the caches contain other data at that point. Tokens/s are medians over the rounds. The CPU rate is computed from the CPU
time per thread instead of the wall time. This rate is more meaningful on a busy machine, but favours recipes that leave
threads idle. The peak memory is followed, in parentheses, by its increase since the libraries and the data were loaded.
FVU is measured on held-out rows after all steps.

The floor is the time for one sparse step's arithmetic or for its memory traffic at this machine's measured speed,
whichever is longer. "of floor" is the floor divided by the measured time. Without --data, rows are sparse sums of
random directions.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import os
import resource
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peers
import torch
import torch.nn.functional as F
from quality import Data, evaluate, synchronise
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file
from torch import Tensor

MiB = 2**20
N_SYNTHETIC = 65_536
# The size of the matrices and the number of bytes used to measure the machine's speed. Both exceed every cache, but fit
# in a laptop's memory.
PROBE_SIZE = {"cpu": 2048, "cuda": 8192}
PROBE_BYTES = {"cpu": 256 * MiB, "cuda": 2048 * MiB}


def main() -> None:
    options = parse()
    if options.worker:
        work(options)
        return
    floor_s, speeds = floor(options)
    workers = {name: Worker(name) for name in peers.available(options.peers)}
    results = take_turns(workers, options)
    report = {"setup": dataclasses.asdict(setup_of(options)), "floor_s": floor_s, **speeds, "recipes": results}
    Console(width=150).print(table(results, options, floor_s, speeds))
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help=".safetensors file with `activations` [n_tokens, d_in]")
    parser.add_argument("--peers", nargs="+", default=list(peers.RECIPES), choices=list(peers.RECIPES), metavar="NAME")
    parser.add_argument("--d-in", type=int, default=384, help="width of synthetic rows")
    parser.add_argument("--d-sae", type=int, default=3072)
    parser.add_argument("--batch", type=int, default=4096)
    parser.add_argument("--k", type=int, default=32)
    parser.add_argument("--steps", type=int, default=110)
    parser.add_argument("--round", type=int, default=11, help="number of steps in a round")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    return parser.parse_args()


def setup_of(options: argparse.Namespace, d_in: int | None = None) -> peers.Setup:
    n_steps = options.steps // options.round * options.round
    width = d_in or options.d_in, options.d_sae
    bf16 = options.precision == "bf16"
    return peers.Setup(*width, options.k, options.batch, n_steps, options.device, bf16, options.seed)


# The parent process


class Worker:
    """A process that trains one recipe, one round per request."""

    def __init__(self, name: str) -> None:
        argv = [sys.executable, *sys.argv, "--worker", name]
        # Start our process like a rank, and the other processes as their users would.
        own = {"THP_MEM_ALLOC_ENABLE": "1"} if name.startswith("ours") else {}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self._process = subprocess.Popen(argv, env=os.environ | own, **pipes)

    def ask(self, question: str) -> dict[str, Any]:
        """Send a request to the process, and return its JSON reply; raise `EOFError` if the process has died."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(question, file=self._process.stdin, flush=True)
        line = self._process.stdout.readline()
        if not line:
            raise EOFError(f"exited with {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        with self._process:
            self._process.kill()


def take_turns(workers: dict[str, Worker], options: argparse.Namespace) -> dict[str, Any]:
    """Run the recipes' rounds in turn, then evaluate the recipes; omit recipes that fail, and print why on stderr."""
    rounds: dict[str, list[dict[str, Any]]] = {name: [] for name in workers}
    ends: dict[str, dict[str, Any]] = {}
    for question in ["start", *["round"] * (options.steps // options.round), "end"]:
        for name in list(workers):
            try:
                answer = workers[name].ask(question)
            except (EOFError, BrokenPipeError) as failure:
                print(f"{name} is left out: {failure}", file=sys.stderr)
                workers.pop(name).close()
                continue
            if question == "round":
                rounds[name].append(answer)
            elif question == "end":
                ends[name] = answer
                workers[name].close()
    return {name: summary(rounds[name], ends[name], options.batch) for name in ends}


def summary(rounds: list[dict[str, float]], end: dict[str, Any], batch: int) -> dict[str, Any]:
    def median(key: str) -> float:
        return statistics.median(part[key] for part in rounds)

    rates = {"tokens_per_s": batch / median("wall_s"), "tokens_per_cpu_s": batch / max(median("cpu_s"), 1e-9)}
    return rates | end | {"rounds": rounds}


def table(results: dict[str, Any], options: argparse.Namespace, floor_s: float, speeds: dict[str, float]) -> Table:
    shown = Table("recipe", title=title(options, floor_s, speeds))
    for heading in ("tokens/s", "ours ×", "tokens/CPU s", "ours ×", "of floor", "peak MiB", "FVU"):
        shown.add_column(heading, justify="right")
    for name, result in results.items():
        share = floor_s * result["tokens_per_s"] / options.batch
        memory = f"{result['peak'] / MiB:,.0f} ({result['own_peak'] / MiB:,.0f})"
        rates = [cell for key in ("tokens_per_s", "tokens_per_cpu_s") for cell in rate(key, result, results)]
        shown.add_row(name, *rates, f"{share:.0%}", memory, f"{result['fvu']:.4f}")
    return shown


def rate(key: str, result: dict[str, Any], results: dict[str, Any]) -> tuple[str, str]:
    """Return a recipe's rate, and our recipe's speed-up over it."""
    ours = results.get(peers.Ours.name)
    return f"{result[key]:,.0f}", f"{ours[key] / result[key]:.2f}" if ours else ""


def title(options: argparse.Namespace, floor_s: float, speeds: dict[str, float]) -> str:
    shape = f"d_sae {options.d_sae}, k {options.k}, batch {options.batch}, {options.precision} on {options.device}"
    floor = (
        f"floor {floor_s * 1e3:.2f} ms at {speeds['flops'] / 1e12:.3g} TFLOP/s and {speeds['bandwidth'] / 1e9:.3g} GB/s"
    )
    return f"{shape}; {floor}"


# The minimum time of a step


def floor(options: argparse.Namespace) -> tuple[float, dict[str, float]]:
    """Return the minimum time for a sparse step in seconds, max(FLOPs/peak, bytes/bandwidth), and both speeds."""
    d_in = rows(options).shape[1] if options.data else options.d_in
    tokens, parameters = options.batch, 2 * d_in * options.d_sae + d_in + options.d_sae
    # The encoder's dense matmul is followed by four matmuls on k latents per token: decoding, its two gradients and the
    # encoder's gradient.
    n_flops = 2 * tokens * d_in * options.d_sae + 8 * tokens * options.k * d_in
    # Fused Adam reads p, g, m and v, and writes p, m and v. In addition, gradients are written, and pre-activations are
    # written and read.
    width = 2 if options.precision == "bf16" else 4
    n_bytes = 28 * parameters + 4 * parameters + 2 * width * tokens * options.d_sae
    speeds = measured_speeds(options)
    return max(n_flops / speeds["flops"], n_bytes / speeds["bandwidth"]), speeds


def measured_speeds(options: argparse.Namespace) -> dict[str, float]:
    """Measure the FLOP/s of a large matmul and the bytes/s of a large copy."""
    torch.set_num_threads(options.threads)
    kind = options.device.partition(":")[0]
    dtype = torch.bfloat16 if options.precision == "bf16" else torch.float32
    n = PROBE_SIZE[kind]
    a, b = (torch.randn(n, n, device=options.device).to(dtype) for _ in range(2))
    source = torch.ones(PROBE_BYTES[kind] // 4, device=options.device)
    target = torch.empty_like(source)
    copied = 2 * PROBE_BYTES[kind]
    return {
        "flops": 2 * n**3 / fastest(lambda: a @ b, options.device),
        "bandwidth": copied / fastest(lambda: target.copy_(source), options.device),
    }


def fastest(work: Callable[[], Any], device: str, times: int = 10) -> float:
    return min(timed(work, device) for _ in range(times))


def timed(work: Callable[[], Any], device: str) -> float:
    synchronise(device)
    start = time.perf_counter()
    work()
    synchronise(device)
    return time.perf_counter() - start


# A recipe's process


def work(options: argparse.Namespace) -> None:
    """Read "start", "round" and "end" from standard input, and reply to each with one line of JSON."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(options.threads)
    answers, sys.stdout = sys.stdout, sys.stderr
    trial = Trial(options)
    for line in sys.stdin:
        print(json.dumps(getattr(trial, line.strip())()), file=answers, flush=True)


class Trial:
    """Trains a recipe in rounds."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options, self._device = options, options.device
        self._data = Data(rows(options), options.seed, self._device)
        self._setup = setup_of(options, self._data.train.shape[1])

    def start(self) -> dict[str, Any]:
        """Import the recipe's libraries, record the memory in use, and build the recipe."""
        toy = dataclasses.replace(self._setup, d_in=8, d_sae=16, k=2)
        peers.build(self._options.worker, toy, torch.randn(64, 8, device=self._device))
        sample = self._data.sample
        gc.collect()
        self._before = reset_peak(self._device)
        self._recipe = peers.build(self._options.worker, self._setup, sample)
        self._batches = self._data.batches(self._setup.batch_size)
        return {}

    def round(self) -> dict[str, float]:
        """Train one round; return the mean seconds per step, excluding the first step."""
        self._recipe.step(next(self._batches))
        batches = [next(self._batches) for _ in range(self._options.round - 1)]
        cpu = time.process_time()
        wall_s = timed(lambda: [self._recipe.step(x) for x in batches], self._device)
        cpu_s = (time.process_time() - cpu) / torch.get_num_threads()
        if self._device.startswith("cuda"):
            # Free cached memory for the other processes.
            torch.cuda.empty_cache()
        return {"wall_s": wall_s / len(batches), "cpu_s": cpu_s / len(batches)}

    def end(self) -> dict[str, Any]:
        peak = peak_bytes(self._device)
        fvu, _, _ = evaluate(self._recipe.reconstruct_at_k, self._data.held_out)
        return {"peak": peak, "own_peak": peak - self._before, "fvu": fvu, "version": self._recipe.version()}


def reset_peak(device: str) -> int:
    """Reset the peak memory; return the number of bytes currently in use."""
    if device.startswith("cuda"):
        torch.cuda.reset_peak_memory_stats()
        return int(torch.cuda.memory_allocated())
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        print("the peak memory may have occurred during imports", file=sys.stderr)
    return status_bytes("VmRSS") or 0


def peak_bytes(device: str) -> int:
    if device.startswith("cuda"):
        return int(torch.cuda.max_memory_allocated())
    return status_bytes("VmHWM") or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def status_bytes(key: str) -> int | None:
    """Return a value from /proc/self/status in bytes, or None if this file does not exist (only Linux has it)."""
    path = Path("/proc/self/status")
    lines = path.read_text().splitlines() if path.exists() else []
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:")), None)


def rows(options: argparse.Namespace) -> Tensor:
    """Return the rows from the file, or sums of k of 2·d_sae random directions that differ in frequency."""
    if options.data:
        return load_file(options.data)["activations"]
    generator = torch.Generator().manual_seed(options.seed)
    n_directions = 2 * options.d_sae
    directions = F.normalize(torch.randn(n_directions, options.d_in, generator=generator), dim=1)
    used = (torch.rand(N_SYNTHETIC, options.k, generator=generator) ** 2 * n_directions).long()
    sizes = torch.rand(N_SYNTHETIC, options.k, generator=generator)
    return F.embedding_bag(used, directions, per_sample_weights=sizes, mode="sum").half()


if __name__ == "__main__":
    main()
