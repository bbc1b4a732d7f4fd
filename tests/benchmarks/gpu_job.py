"""Checks that a stopped and resumed job with CUDA graphs has bit-identical results to a job without CUDA graphs.

    PYTHONPATH=tests python tests/benchmarks/gpu_job.py [--gpus auto:1|cpu] [--steps 1500]

The job trains on stored rows, logs, evaluates and saves checkpoints. It runs once without graphs and once with graphs;
with graphs, it is stopped after a third of its steps, resumed, and run to the end. The script prints JSON: the duration
of each attempt in seconds, the number of replayed steps, and a list of errors, `wrong`. The exit code is 1 if there are
errors. On a CPU, captured steps are run again instead of being replayed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import msgspec
import torch
from safetensors.torch import load_file

from trainer.contract.paths import RunPaths
from trainer.contract.runs.checkpoint_manifest import newest_first
from trainer.contract.runs.rank_spec import EXIT_FINISHED, EXIT_STOPPED, RankSpec, rank_environment, write_spec
from trainer.contract.settings.job_file import dump_job, parse_job
from trainer.contract.store.database import StoreError
from trainer.contract.store.metrics_store import SeriesReader
from trainer.ranks.device_choice import parse_target
from trainer.ranks.devices import torch_vendor

SAMPLE = Path(__file__).parents[2] / "data" / "sample"
LIMIT_S, POLL_S = 120.0, 0.05


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", default="auto:1", help="one GPU, or cpu")
    parser.add_argument("--steps", type=int, default=1500)
    options = parser.parse_args()
    _, uuids = parse_target(options.gpus)
    with tempfile.TemporaryDirectory(prefix="gpu-job-") as folder:
        plain, graphs = (new_run(Path(folder) / kind, options.steps, uuids) for kind in ("plain", "graphs"))
        seconds = {"plain": attempt(plain, "plain")}
        seconds["graphs"] = attempt(graphs, "graphs", stop_at=options.steps // 3)
        seconds["resumed"] = attempt(resumed(graphs), "graphs")
        replayed = [int((RunPaths(graphs.run_dir).attempt(number) / "replayed").read_text()) for number in (1, 2)]
        differing, curves = differences(plain, graphs)
    wrong = [f"{name} differs from the job without graphs" for name in differing + curves]
    if uuids and not all(replayed):
        wrong.append(f"no step was replayed in {'the first' if not replayed[0] else 'the resumed'} attempt")
    found = {"steps": options.steps, "seconds": seconds, "replayed": replayed, "wrong": wrong}
    print(json.dumps(found))
    return 1 if wrong else 0


def new_run(folder: Path, n_steps: int, uuids: tuple[str, ...]) -> RankSpec:
    """Create a run for the job, and return the spec of its first attempt."""
    batch = 1024 if uuids else 128
    job, problems = parse_job(
        {
            "data": {"path": str(SAMPLE)},
            "sae": {"d_sae": 3072 if uuids else 512, "k": 32, "dead_after_tokens": 20 * batch},
            "train": {
                "n_steps": n_steps,
                "batch_size": batch,
                "deterministic": True,
                "log_every": max(5, n_steps // 50),
                "eval_every": max(10, n_steps // 5),
                "checkpoint_every": max(10, n_steps // 4),
            },
        }
    )
    assert job is not None, problems
    paths = RunPaths(folder)
    paths.create()
    paths.job_file.write_text(dump_job(job))
    device, vendor = ("cuda", torch_vendor()) if uuids else ("cpu", "")
    return RankSpec(folder, folder / "sae", 1, 1, device, uuids, vendor)


def resumed(spec: RankSpec) -> RankSpec:
    newest = newest_first(RunPaths(spec.run_dir).checkpoints)[0]
    return msgspec.structs.replace(spec, attempt=2, resume_from=newest)


def attempt(spec: RankSpec, kind: str, stop_at: int | None = None) -> float:
    """Run an attempt, stop it at step `stop_at` if given, and return its duration in seconds."""
    began, paths = time.monotonic(), RunPaths(spec.run_dir)
    argv = [sys.executable, "-m", "support.graph_rank", str(write_spec(spec)), kind]
    with paths.log(0).open("ab") as log:
        process = subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=rank_environment(spec, 0)
        )
    try:
        while process.poll() is None and time.monotonic() - began < LIMIT_S:
            if stop_at is not None and step_of(paths) >= stop_at:
                paths.stop_file(spec.attempt).touch()
            time.sleep(POLL_S)
    finally:
        process.kill()
    expected = EXIT_FINISHED if stop_at is None else EXIT_STOPPED
    if (code := process.wait()) != expected:
        sys.exit(f"the {kind} attempt exited with {code}, not {expected}: {paths.log(0).read_text()[-2000:]}")
    return time.monotonic() - began


def step_of(paths: RunPaths) -> int:
    with contextlib.suppress(StoreError, OSError), contextlib.closing(SeriesReader(paths.metrics_db)) as reader:
        heartbeat = reader.heartbeat()
        return heartbeat.step if heartbeat else 0
    return 0


def differences(one: RankSpec, other: RankSpec) -> tuple[list[str], list[str]]:
    """Return the names of the saved tensors and the curves that are not bit-identical between the two runs."""
    tensors = [tensors_of(spec) for spec in (one, other)]
    names = sorted(tensors[0].keys() | tensors[1].keys())
    differing = [name for name in names if not all(name in of_run for of_run in tensors) or not equal(name, tensors)]
    curves = [curve_of(spec, "heldout_fvu") for spec in (one, other)]
    # The stopped run's curve has one extra point.
    is_alike = curves[0] and curves[0].items() <= curves[1].items()
    return differing, [] if is_alike else ["the curve of the held-out FVU"]


def equal(name: str, tensors: list[dict[str, torch.Tensor]]) -> bool:
    # Compare bytes, because as a number, NaN does not equal itself.
    first, second = (of_run[name].contiguous().view(-1).view(torch.uint8) for of_run in tensors)
    return torch.equal(first, second)


def tensors_of(spec: RankSpec) -> dict[str, torch.Tensor]:
    """Return the tensors of the SAE that a run has saved."""
    files = sorted(spec.output_dir.rglob("*.safetensors"))
    return {f"{file.name}: {name}": tensor for file in files for name, tensor in load_file(file).items()}


def curve_of(spec: RankSpec, name: str) -> dict[int, float | None]:
    with contextlib.closing(SeriesReader(RunPaths(spec.run_dir).metrics_db)) as reader:
        return {point.step: point.value for point in reader.points(name)}


if __name__ == "__main__":
    sys.exit(main())
