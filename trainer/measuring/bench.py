"""Measures a job's step speed on this machine: starts ranks and formats their results, without importing torch."""

from __future__ import annotations

import contextlib
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from trainer.contract.errors import JobFileError, UserError
from trainer.contract.paths import RunPaths
from trainer.contract.runs.rank_spec import RankSpec, rank_environment, write_spec
from trainer.contract.settings.job import USUAL_BATCH, JobConfig
from trainer.contract.settings.job_file import apply_override, dump_job, load_job, parse_job
from trainer.contract.settings.sources import DataShape
from trainer.ranks.devices import torch_vendor

POLL_S, END_AFTER_FAILURE_S = 0.1, 5.0
# The data shape used if the job names no data; d_in is the width of GPT-2 small.
DEFAULT = DataShape(d_in=768, d_out=None, n_tokens=10**9)
PHASES = {
    "forward_encode": "forward, encoder",
    "forward_rest": "forward, without encoder",
    "backward": "backward",
    "metrics": "metrics",
    "exchange": "exchange",
    "update": "update",
}


def bench_job(file: Path | None, overrides: Sequence[str]) -> tuple[JobConfig, DataShape]:
    """Return the job to measure and its data's shape; without a file, use a default job and a common shape."""
    if file is not None:
        job = load_job(file, overrides)
        return job, job.data_shape()
    raw: dict[str, Any] = {}
    for override in overrides:
        apply_override(raw, override)
    has_data = "source" in raw.get("data", {})
    if not has_data:
        raw["data"] = {"path": "random"}
    # The default batch size depends on the run length, which a benchmark does not define.
    raw.setdefault("train", {}).setdefault("batch_size", USUAL_BATCH)
    parsed, problems = parse_job(raw)
    if parsed is None:
        raise JobFileError(problems)
    return parsed, parsed.data_shape() if has_data else DEFAULT


def measure(
    job: JobConfig, shape: DataShape, n_steps: int, *, world_size: int, gpu_uuids: tuple[str, ...]
) -> dict[str, Any]:
    """Return rank 0's measurements; if a rank fails, raise `UserError` with the reason for the first failure.

    No language model runs, so `data.model_gpus = "auto"` means 0.
    """
    if job.parallel.mode == "dp":
        raise UserError('parallel.mode: phases can be timed only in separate processes; use "ddp"')
    sizes = [str(size) for size in (shape.d_in, shape.d_out or 0, n_steps)]
    return run_ranks("trainer.measuring.bench_rank", sizes, job=job, world_size=world_size, gpu_uuids=gpu_uuids)


def run_ranks(
    module: str, arguments: Sequence[str], *, job: JobConfig | None, world_size: int, gpu_uuids: tuple[str, ...]
) -> dict[str, Any]:
    """Run `python -m MODULE SPEC.json ARGUMENTS` for each rank, and return the content of rank 0's `found.json`.

    If a rank fails, raise `UserError` with the reason for the first failure.
    """
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        paths = RunPaths(Path(folder))
        paths.create()
        if job:
            paths.job_file.write_text(dump_job(job), encoding="utf-8")
        spec = RankSpec(
            run_dir=paths.root,
            output_dir=paths.root,
            attempt=1,
            world_size=world_size,
            device="cuda" if gpu_uuids else "cpu",
            gpu_uuids=gpu_uuids,
            gpu_vendor=torch_vendor() if gpu_uuids else "",
        )
        command = [sys.executable, "-P", "-m", module, str(write_spec(spec)), *arguments]
        with _ranks(spec, command, paths) as ranks:
            codes = _wait(ranks)
        if any(codes):
            raise UserError(_reason(paths, codes))
        return dict(msgspec.json.decode((paths.root / "found.json").read_bytes()))


@contextlib.contextmanager
def _ranks(spec: RankSpec, command: list[str], paths: RunPaths) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Start all ranks and yield them; on exit from the context, kill any ranks still running."""
    ranks: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(spec.n_processes):
            with paths.log(rank).open("wb") as log:
                environment = rank_environment(spec, rank)
                ranks.append(
                    subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment)
                )
        yield ranks
    finally:
        for process in ranks:
            process.kill()
            process.wait()


def _wait(ranks: list[subprocess.Popen[bytes]]) -> list[int]:
    """Wait for all ranks and return their exit codes.

    After a failure, wait at most `END_AFTER_FAILURE_S` for the other ranks; they may be hanging in a collective
    operation.
    """
    give_up_at = math.inf
    while any(rank.poll() is None for rank in ranks) and time.monotonic() < give_up_at:
        if any(rank.returncode for rank in ranks):
            give_up_at = min(give_up_at, time.monotonic() + END_AFTER_FAILURE_S)
        time.sleep(POLL_S)
    return [rank.returncode or 0 for rank in ranks]


def _reason(paths: RunPaths, codes: list[int]) -> str:
    """Return the last log line from the first rank to fail; other ranks may have failed as a consequence."""
    logs = sorted((paths.log(rank) for rank, code in enumerate(codes) if code), key=lambda log: log.stat().st_mtime_ns)
    lines = logs[0].read_text(errors="replace").strip().splitlines()
    return lines[-1] if lines else f"a rank exited with code {next(filter(None, codes))}"


def table(figures: dict[str, Any]) -> str:
    """Format the result of `measure` as aligned text."""
    d_out = f", d_out {figures['d_out']}" if figures["d_out"] else ""
    shape = f"d_in {figures['d_in']}{d_out}, d_sae {figures['d_sae']}, {figures['tokens_per_step']:,} tokens per step"
    saes = f", {figures['n_saes']} SAEs" if figures["n_saes"] > 1 else ""
    lines = [
        f"{figures['ranks']} × {figures['device']}, {figures['precision']}, torch {figures['torch']}",
        f"{figures['architecture']}, {figures['optimizer']}, {shape}{saes}",
        "",
        _row("step", figures["step_ms"], note=f"{figures['tokens_per_s']:,.0f} tokens/s"),
        *([_row("  expected by the model", figures["expected_step_ms"])] if "expected_step_ms" in figures else []),
        "phases, timed in separate steps",
    ]
    whole = sum(figures["phases_ms"].values())
    lines += [_row(f"  {PHASES[name]}", ms, ms / whole) for name, ms in figures["phases_ms"].items()]
    floor = figures["floor"]
    traffic = f"{floor['traffic_bytes'] / 2**30:,.2f} GiB at {floor['bandwidth_bytes_per_s'] / 1e9:,.0f} GB/s"
    lines += [
        "",
        _row("encoder's matmul only", floor["encoder_product_ms"]),
        _row("memory traffic only", floor["traffic_ms"], note=traffic),
        _row(
            "floor, the longer time",
            floor["floor_ms"],
            note=f"this step runs at {figures['of_floor']:.0%} of the floor's speed",
        ),
        "",
        f"{'peak memory per rank':<28}{figures['peak_memory_bytes'] / 2**20:>10,.0f} MiB",
    ]
    if figures["sent_bytes"]:
        lines.append(f"{'sent per rank and step':<28}{figures['sent_bytes'] / 2**20:>10,.2f} MiB")
    return "\n".join(lines)


def probe_table(figures: dict[str, Any]) -> str:
    """Format a probe's result as aligned text."""
    lines = [f"{figures['ranks']} × {figures['device']}, {figures['precision']}", ""]
    speeds = zip(figures["flops_per_s"], figures["memory_bytes_per_s"], strict=True)
    for rank, (flops, memory) in enumerate(speeds):
        lines.append(f"rank {rank:<3}{flops / 1e12:>10,.2f} TFLOP/s{memory / 1e9:>10,.1f} GB/s of memory")
    if figures["ranks"] > 1:
        bus, latency = figures["bus_bytes_per_s"] / 1e9, figures["latency_s"] * 1e6
        lines += ["", f"all    {bus:>10,.2f} GB/s in an all-reduce, {latency:,.0f} µs for a tiny all-reduce"]
        lines += [f"{pair:<7}{speed / 1e9:>10,.2f} GB/s" for pair, speed in figures["pairs"].items()]
    return "\n".join(lines)


def _row(name: str, ms: float, share: float | None = None, note: str = "") -> str:
    percent = f"{share:>8.0%}" if share is not None else " " * 8
    return f"{name:<28}{ms:>10,.2f} ms{percent}   {note}".rstrip()
