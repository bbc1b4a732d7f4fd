"""`python -m trainer`: train in the foreground, estimate, or be one rank of a run."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from trainer.contract import memory
from trainer.contract.config import JobConfig, load_job
from trainer.contract.problems import JobFileError, UserError, errors
from trainer.contract.ranks import EXIT_FAILED, EXIT_FINISHED, EXIT_STOPPED, EXIT_USAGE, RankSpec
from trainer.contract.shards import inspect_shards
from trainer.contract.validate import Machine, check, chosen_indices, wanted_ranks
from trainer.devices import Device, visible_gpus

EXAMPLES = """\
examples:
  python -m trainer run job.toml                         train on what the job file asks for
  python -m trainer run job.toml --set launch.gpus=cpu:2 on two CPU processes
  python -m trainer run job.toml --set train.n_steps=50 --out /tmp/try --json
  python -m trainer estimate job.toml                    memory per GPU, before anything runs

a job file needs no more than:
  [data]
  path = "data/sample"       # .safetensors shards with a tensor `activations` [n_tokens, d_in]

Ctrl-C saves a checkpoint and stops; a second one ends at once.
Exit codes: 0 finished, 1 failed, 2 bad usage or job file, 3 stopped.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code; what a user can cause is told in one line per problem."""
    flags = _parser().parse_args(argv)
    try:
        return int(flags.command(flags))
    except JobFileError as error:
        print(error, file=sys.stderr)
        return EXIT_USAGE
    except UserError as error:
        print(error, file=sys.stderr)
        return EXIT_FAILED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m trainer",
        description="Trains sparse autoencoders on stored activations.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(required=True, metavar="{run,estimate,rank}")
    run = commands.add_parser("run", help="train in the foreground")
    run.add_argument("--out", type=Path, metavar="DIR", help="run folder; default runs/NAME-TIME")
    run.set_defaults(command=_run)
    estimate = commands.add_parser("estimate", help="memory per GPU of a job")
    estimate.set_defaults(command=_estimate)
    for command in (run, estimate):
        _add_job(command)
    rank = commands.add_parser("rank", help="be one rank of a run (started by `run` and by the app)")
    rank.add_argument("spec", type=Path, metavar="SPEC.json")
    rank.set_defaults(command=_rank)
    return parser


def _add_job(command: argparse.ArgumentParser) -> None:
    command.add_argument("job", type=Path, metavar="JOB.toml", help="the job file")
    command.add_argument(
        "--set",
        dest="overrides",
        action="append",
        default=[],
        metavar="section.key=value",
        help="override a setting of the job file; can be given again",
    )
    command.add_argument("--json", action="store_true", help="print the result as JSON, in the last line")


def _run(flags: argparse.Namespace) -> int:
    from trainer.foreground import Foreground

    job = load_job(flags.job, flags.overrides)
    gpus = [] if str(job.launch.gpus).startswith("cpu") else visible_gpus()
    run_dir = (flags.out or Path("runs") / _folder_name(job.name)).absolute()
    _refuse_bad(job, gpus, run_dir)
    uuids = tuple(gpu.uuid for gpu in _chosen(job, gpus))
    foreground = Foreground(
        job,
        RankSpec(
            run_dir=run_dir,
            output_dir=run_dir / "sae",
            attempt=1,
            world_size=len(uuids) or wanted_ranks(job),
            device="cuda" if uuids else "cpu",
            gpu_uuids=uuids,
        ),
    )
    code = foreground.run()
    _print_result(foreground.result(), code, as_json=flags.json)
    return code


def _refuse_bad(job: JobConfig, gpus: list[Device], run_dir: Path) -> None:
    """Raises `JobFileError` with all that keeps the job from running, and prints what only slows it."""
    machine = Machine(tuple(gpu.as_machine_gpu for gpu in gpus), len(os.sched_getaffinity(0)), run_dir)
    problems = check(job, machine)
    if fatal := errors(problems):
        raise JobFileError(fatal)
    for problem in problems:
        print(f"warning: {problem}", file=sys.stderr)


def _chosen(job: JobConfig, gpus: list[Device]) -> list[Device]:
    """The GPUs to train on; none for the CPU, which is also what "auto" means where there is no GPU."""
    by_index = {gpu.index: gpu for gpu in gpus}
    indices = chosen_indices(job) or list(by_index)[: wanted_ranks(job)]
    return [by_index[index] for index in indices] if gpus else []


def _folder_name(name: str) -> str:
    safe = re.sub(r"[^\w.-]+", "-", name).strip("-.") or "run"
    return f"{safe}-{time.strftime('%Y%m%d-%H%M%S')}"


def _print_result(result: dict[str, object], code: int, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(result))
        return
    word = {EXIT_FINISHED: "finished", EXIT_STOPPED: "stopped"}[code]
    print(f"{word} after {result['steps']} steps; the SAE is in {result['output_path']}")


def _estimate(flags: argparse.Namespace) -> int:
    job = load_job(flags.job, flags.overrides)
    d_in = inspect_shards(job.data.knobs.path).d_in  # type: ignore[attr-defined]
    ranks = wanted_ranks(job)
    device = "cpu" if str(job.launch.gpus).startswith("cpu") else "cuda"
    estimate = memory.estimate(job, d_in, ranks, device=device)
    per_gpu = msgspec.structs.asdict(estimate) | {"total": estimate.total}
    if flags.json:
        # Before its first step nothing is known of this machine's speed.
        print(json.dumps({"per_gpu": per_gpu, "seconds": None}))
        return EXIT_FINISHED
    print(f"per {'GPU' if device == 'cuda' else 'process'}, on {ranks}:")
    for name, n_bytes in per_gpu.items():
        print(f"  {name:<14}{n_bytes / 2**20:>10,.1f} MiB")
    return EXIT_FINISHED


def _rank(flags: argparse.Namespace) -> int:
    from trainer.rank import main as run_rank

    return run_rank(flags.spec)
