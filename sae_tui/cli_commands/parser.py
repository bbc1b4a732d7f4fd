"""The commands of `sae-tui`, their flags and their help texts."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, get_args

from sae_tui.cli_commands.values import (
    array,
    card_name,
    count,
    generated,
    gpu_indices,
    host,
    part,
    port,
    positive,
    price,
    rank,
    seconds,
    selector,
    selector_or_url,
    share,
    size,
    step,
    strength,
    temperature,
)
from sae_tui.gpu import source_names
from trainer.contract import output
from trainer.contract.exits import Exit, in_short
from trainer.contract.settings.consent import FLAG, FLAG_HELP
from trainer.contract.settings.schedule import COOL_DOWN_SHARE

if TYPE_CHECKING:
    from sae_tui.cli_commands.context import CommandContext

Command = Callable[["CommandContext", argparse.Namespace], int]
Add = Callable[[str, str, str], "CommandParser"]
# Modules with commands acting on jobs or their GPUs. Before any of these commands runs, the states of crashed jobs are
# corrected.
_ABOUT_JOBS = frozenset(
    {"edits", "job", "jobs", "launching", "evaluation", "gpus", "metrics", "recommend", "running", "diff"}
)
# The shells that support completion.
SHELLS = ("bash", "zsh", "fish")
# Runs a command with `--host` on that host.
SEND = "sending.send"

EXAMPLES = f"""\
examples:
  sae-tui                                       open the app
  sae-tui --demo                                open it with simulated GPUs; training is real
  sae-tui --host gpu1 --host me@gpu2            also show GPUs and jobs on these hosts, over ssh
  sae-tui gpus                                  what each GPU is doing, and who uses it
  CUDA_VISIBLE_DEVICES=$(sae-tui select -n 2) python train.py         two free GPUs for any program
  sae-tui doctor                                check this machine for problems
  sae-tui doctor job.toml --gpus 0,1            also memory, time and cost of the job on 1 to 8 GPUs
  sae-tui validate job.toml --gpus 0,1          list everything that would keep the job from running
  sae-tui launch job.toml --gpus auto:2         train on the two best GPUs for it
  sae-tui launch job.toml --set train.lr=3e-4 --wait
  sae-tui jobs --json | jq '.[0].heldout_fvu'   the newest job's result
  sae-tui jobs '#base' state:finished --sort fvu
  sae-tui compare 7 9 --svg fvu.svg             settings, results and curves side by side
  sae-tui import their-sae --data activations   make a job from another tool's SAE: evaluate, compare, train it
  sae-tui eval 7 --wait                         report card and max-activating examples
  sae-tui features 7 --search king              latents of job 7 that fire on "king" (evaluate it first)
  sae-tui logs 7 -f                             follow the log of job 7
  sae-tui stop 7                                save a checkpoint and stop; --kill kills it within 5 s
  sae-tui stop 7 --finish                       cool down first, and end as a shorter, finished run
  sae-tui resume 7 --gpus 2,3                   resume from its last good checkpoint, on other GPUs
  sae-tui launch a.toml b.toml --grid sae.k=16,32,64 --gpus auto      queue six jobs
  sae-tui task job.toml > task.yaml             a SkyPilot task, to run the job on rented GPUs
  sae-tui diff base tuned --hook resid_post.12 --text texts.jsonl     what only one of two models has
  sae-tui clone 7 --set train.lr=1e-4 --after 7 the same with another learning rate, after job 7
  eval "$(sae-tui completion bash)"             complete commands and job ids; also zsh, and fish with | source

A job keeps running when the app, this command or the terminal is closed.
{in_short(Exit.DONE, Exit.FAILED, Exit.USAGE, Exit.UNTOLD)} With --wait:
0 finished, {Exit.STOPPED:d} stopped, {Exit.JOB_FAILED:d} failed, {Exit.JOB_LOST:d} lost; for several jobs, the highest.
With --json, errors are JSON too: {{"error": {{"field", "message", "fix"}}}}.
"""


COMMAND_EXAMPLES = {
    "gpus": ["gpus", "gpus 0 --json", "gpus --watch --json | jq .[0].power_draw"],
    "select": [
        "select -n 2 --free-memory 20GiB",
        "select --json                  with names, and why the other GPUs are not free",
    ],
    "stream": ["stream      `sae-tui --host` runs this over ssh; it exits when its standard input closes"],
    "receive": ["receive      reads the command from its standard input, over ssh"],
    "serve": [
        "serve      on the computer with the browser, run the command that it prints: ssh -L PORT:127.0.0.1:PORT HOST",
        "serve --port 8500 --write",
    ],
    "metrics": [
        "metrics --view per_gpu --since 10m",
        "metrics --view per_gpu --since 24h --every 5m --json",
        "metrics --view per_gpu --since 2d --csv > gpus.csv",
    ],
    "export-metrics": [
        "export-metrics      in prometheus.yml: targets: ['127.0.0.1:9405']",
        "export-metrics --once",
    ],
    "recommend": ["recommend job.toml --count 2"],
    "validate": ["validate job.toml --gpus 0,1", "validate job.toml --set sae.d_sae=24576"],
    "launch": [
        "launch job.toml --gpus auto:2",
        "launch job.toml --gpus 0 --after 7 --tag baseline",
        "launch job.toml --grid sae.k=16,32,64 --gpus auto      queue three jobs",
        "launch job.toml --grid train.seed=0,1,2,3 --at-once 2",
        "launch job.toml --host gpu1                            launch it on another host",
    ],
    "arena": [
        "arena topk.toml matryoshka.toml",
        "arena recipe.toml --set sae.architecture=topk,batch_topk,jumprelu --seeds 5",
        "arena 12 13      the table of jobs that were trained on synthetic data",
    ],
    "task": [
        "task job.toml > task.yaml",
        "task job.toml --gpus H100,A100-80GB --spot --runs s3://my-bucket/runs > task.yaml",
        "task job.toml --nodes 2 --gpus H100:8 --runs gs://my-bucket > task.yaml",
    ],
    "down": ["down 7", "down 7 --yes"],
    "diff": [
        "diff Qwen/Qwen2.5-0.5B Qwen/Qwen2.5-0.5B-Instruct --hook resid_post.12 --text texts.jsonl",
        "diff base tuned --hook resid_post.6+12 --text texts.jsonl --k 50 --d-sae 16384 --tokens 20M",
        "diff base tuned --hook resid_post.12 --dataset HuggingFaceFW/fineweb --dry-run > diff.toml",
        "features 7 --search part:B      the latents that only the second model has, if the crosscoder is job 7",
    ],
    "run": [
        "run --gpus 1 --memory 20GiB --name probe -- python probe.py --layer 12",
        "run --gpus 2 --after 7 --time 4h -- torchrun --nproc-per-node {gpus} finetune.py",
        "run --gpus 1 --grid lr=1e-3,3e-4 --grid seed=0,1 -- python train.py --lr {lr} --seed {seed}",
        "run --gpus 1 --array 0-31%4 -- python train.py --seed {array_index}      32 jobs, at most 4 at once",
        "run --backend slurm --gpus 2 -- torchrun --nproc-per-node {gpus} finetune.py",
        "run --host gpu1 --gpus 1 --wait -- python probe.py",
        "run --gpus 0 --shell 'zcat texts.gz | python count.py > counts.json'",
    ],
    "adopt": [
        "adopt 12345 --name 'fine-tune'      it keeps its GPUs, and gets a history, an energy meter and alerts",
    ],
    "import": [
        "import their-sae --data activations/resid_post.12",
        "eval 8 --wait && sae-tui compare 7 8      compare it with job 7 by their report cards",
        "resume 8 --gpus auto                      train it further",
    ],
    "export": [
        "export 7 --out my-sae",
        "export 7 --out my-sae --format sparsify --best",
        "export 7 --out my-sae --only k=32",
    ],
    "doctor": ["doctor", "doctor job.toml --gpus 0,1 --price-per-gpu-hour 2.5"],
    "job": [
        "job 7",
        "job 7 --wait     wait until it has ended",
        "job 7 --json | jq .heldout_fvu",
        "job 7 --cards    list its current and earlier report cards; job 7 --card 2 shows one",
        "job 7 --against 1    compare the report card with its card 1; --against 8: with job 8's",
    ],
    "stop": [
        "stop 7",
        "stop 3-9 12 '#sweep'",
        "stop 7 --finish    cool down first, which improves the quality most",
        "stop 7 --kill",
        "stop 7 --evaluation",
    ],
    "logs": ["logs 7 -f", "logs 7 --rank 1 -n 20", "logs 7 --evaluation -f"],
    "jobs": [
        "jobs",
        "jobs --watch --json",
        "jobs '#baseline' state:paused",
        "jobs state:finished --sort fvu --limit 5",
    ],
    "compare": ["compare 7 9", "compare 7 9 --metric loss --svg loss.svg"],
    "resume": [
        "resume 7",
        "resume 7 --gpus 2,3",
        "resume 3-9 12                           each from its own checkpoint",
        "resume 7 --set train.n_steps=20000      train for longer than planned",
        "resume 7 --finish                       cool down from the checkpoint, and end as finished",
        "resume hf://ada/saes/run1               a job of another machine, from train.mirror_checkpoints",
    ],
    "clone": ["clone 7 --set train.lr=1e-4", "clone 7 --print > job.toml"],
    "pause": ["pause 7      later: sae-tui resume 7", "pause '#sweep'"],
    "hold": ["hold 7      later: sae-tui release 7", "hold 3-9 12 '#sweep'"],
    "release": ["release 7", "release '#sweep'"],
    "priority": ["priority 7 5", "priority 3-9 '#sweep' --to 5"],
    "after": [
        "after 12 7 9      job 12 waits until jobs 7 and 9 have finished",
        "after 12          job 12 waits for no job",
    ],
    "rename": ["rename 7 'k 32, wide'"],
    "tag": ["tag 7 baseline paper", "tag 3-9 '#sweep' paper", "tag 7 --remove paper"],
    "note": ["note 7 'loss spike at step 4000'", "note 3-9 'wrong seed'"],
    "rm": ["rm 7 9", "rm 3-9 '#old' --yes"],
    "repair": ["repair", "repair --host gpu7    mark the jobs of a host that is gone as lost"],
    "eval": [
        "eval 7 --wait",
        "eval 7 --model auto      also evaluate it in the language model of its data",
        "eval 7 --model auto --probe --keep-rows     add these to a report card that already has rows",
    ],
    "features": [
        "features 7                     the latents of job 7, sparse ones first",
        'features 7 --search king       latents that fire on "king"',
        "features 7 1234                max-activating examples of latent 1234",
        "features 7 --search starred:   the latents that you have starred",
        "features 7 12 --watched        latent 12 at each snapshot that was taken in training",
        'features 7 --text "The king spoke"     the latents that fire on each token of a text',
    ],
    "steer": [
        'steer 7 1234 --prompt "The weather today" --strength 3',
        'steer 7 1234 88 --ablate --prompt "Who are you?" --chat --json',
    ],
    "annotate": [
        "annotate 7 1234 --star --name 'names of kings'",
        "annotate 7 1234 --note 'also fires on queens, less strongly'",
        "annotate 7                     all notes on the latents of job 7",
    ],
    "explain": [
        "explain 7                 the stored explanations of job 7, with their scores",
        "explain 7 --url http://localhost:8000/v1 --model qwen3-8b      explain 100 latents, sparse ones first",
        "explain 7 12 34 --url https://api.openai.com/v1 --model gpt-5-mini      two latents; the key: $OPENAI_API_KEY",
    ],
    "completion": [
        "completion --install      for your shell; it prints how to undo it",
        'completion bash           in ~/.bashrc: eval "$(sae-tui completion bash)"',
    ],
    "schema": ["schema", "schema gpus", "schema trainer run", "schema error"],
    "skill": ["skill > SKILL.md"],
}
ALSO = "Global flags: --data-dir DIR, --demo, --demo-gpus N, --gpu-source NAME; see sae-tui --help."


class CommandParser(output.SafeParser):
    """Reports incorrect usage on one line, without argparse's list of all flags, which would hide the error.

    Unless `is_used`, the command is not on the command line, and its flags are ignored.
    """

    def __init__(self, *arguments: Any, is_used: bool = True, add_help: bool = True, **named: Any) -> None:
        self.is_used = is_used
        super().__init__(*arguments, add_help=is_used and add_help, **named)

    def add_argument(self, *names: Any, **named: Any) -> argparse.Action:
        return super().add_argument(*names, **named) if self.is_used else argparse.Action([], "")

    def sentence_on(self, message: str) -> str:
        return f"sae-tui: error: {message.removeprefix('argument ')}; see {self.prog} --help\n"


class ShowVersion(argparse.Action):
    """Looks up the version only on request, because the lookup takes a tenth of a command's startup time."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        from importlib.metadata import version

        output.show_text(f"sae-tui {version('sae-tui')}\n")
        parser.exit()


def make_parser(open_app: Command, words: Collection[str] | None = None) -> CommandParser:
    """Return the parser for all commands and their flags; without a command, `open_app` runs.

    If `words` is given, add only the flags of commands among these words, because adding the flags of all commands
    takes a third of the startup time.
    """
    shared = _shared_flags()
    parser = CommandParser(
        prog="sae-tui",
        description="Monitor GPUs and train sparse autoencoders on them. Without a command, opens the app.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        parents=[shared],
    )
    parser.add_argument("--version", action=ShowVersion, nargs=0, help="show the version and exit")
    only = "in the app, show jobs and processes without changing them"
    parser.add_argument("--readonly", action="store_true", help=only)
    parser.add_argument(
        "--plain", action="store_true", help="draw the app in ASCII, without block and braille characters"
    )
    other = "in the app, also show the GPUs and jobs on this host, over ssh; may be repeated"
    parser.add_argument("--host", type=host, action="append", default=[], metavar="HOST", help=other)
    _add_only(parser)
    parser.set_defaults(command=open_app)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")

    def add(name: str, function: str, summary: str) -> CommandParser:
        if words is not None and name not in words:
            return commands.add_parser(name, help=summary, is_used=False)
        added = commands.add_parser(
            name,
            is_of_command=True,
            help=summary,
            description=f"{summary}.",
            epilog=f"{_examples(name)}\n\n{ALSO}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
            parents=[_shared_flags(in_help=False), _json_flag()],
        )
        added.set_defaults(command=_load_when_run(function), takes_only=False)
        return added

    _add_gpu_commands(add)
    _add_job_file_commands(add)
    _add_job_commands(add)
    _add_edit_commands(add)
    _add_own_commands(add)
    return parser


def _choices(command: CommandParser, load: Callable[[], Iterable[str]]) -> tuple[str, ...]:
    """Return a flag's choices. Their modules are loaded only if the command is on the command line."""
    return tuple(load()) if command.is_used else ()


def _backends() -> Iterable[str]:
    from trainer.contract.settings.catalog import LAUNCH_BACKENDS

    return LAUNCH_BACKENDS


def _written_formats() -> Iterable[str]:
    from trainer.contract.settings.catalog import WRITTEN_FORMATS

    return WRITTEN_FORMATS


def _axes() -> Iterable[str]:
    from sae_tui.compare.lines import AXES

    return AXES


def _orders_of_jobs() -> Iterable[str]:
    from sae_tui.jobs.view.find import orders

    return orders()


def _orders_of_latents() -> Iterable[str]:
    from trainer.contract.runs.features import Order

    orders: tuple[str, ...] = get_args(Order)
    return orders


def _add_only(parser: argparse.ArgumentParser) -> None:
    shows = "show only the GPUs with these indices"
    parser.add_argument(
        "--only", dest="only_gpus", type=gpu_indices, default=argparse.SUPPRESS, metavar="0,1", help=shows
    )
    parser.set_defaults(takes_only=True)


def _load_when_run(function: str) -> Command:
    """Return a command that imports its module when run; importing all modules takes a third of the startup time."""

    def run(context: CommandContext, flags: argparse.Namespace) -> int:
        module, _, name = (SEND if getattr(flags, "on_host", None) else function).partition(".")
        if module in _ABOUT_JOBS:
            context.mend()
        command: Command = getattr(importlib.import_module(f"{__package__}.{module}"), name)
        return command(context, flags)

    return run


def _add_gpu_commands(add: Add) -> None:
    show = add("gpus", "gpus.show_gpus", "List the GPUs and who uses them")
    show.add_argument("index", type=int, nargs="?", metavar="INDEX", help="show only this GPU, as one object")
    show.add_argument("--watch", action="store_true", help="repeat every second; with --json, one line each time")
    _add_only(show)
    selects = "Print free GPUs for any program, in the format of CUDA_VISIBLE_DEVICES (AMD: ROCR_VISIBLE_DEVICES)"
    choose = add("select", "select.select", selects)
    choose.add_argument(
        "-n", "--count", type=positive, default=1, metavar="N", help="number of GPUs; default: %(default)s"
    )
    free = "only GPUs with at least this much free memory"
    choose.add_argument("--free-memory", type=size, default=0, metavar="20GiB", help=free)
    choose.add_argument(
        "--index",
        action="store_true",
        help="print indices instead of UUIDs; some programs number GPUs in another order",
    )
    stream = add("stream", "stream.stream", "Write GPUs and jobs as JSON lines, for the app on another host")
    stream.add_argument("--log", type=positive, metavar="ID", help="write the log of this job instead")
    stream.add_argument("--job", type=positive, metavar="ID", help="write everything about this job instead")
    stream.add_argument(
        "--features", action="store_true", help="with --job: write its max-activating examples instead, and exit"
    )
    stream.add_argument(
        "--rank", type=rank, default=0, metavar="N", help="rank whose log is written; default: %(default)s"
    )
    add("receive", "receiving.receive", "Run a command that `run --host` or `launch --host` sent from another host")
    _add_serve(add)
    metrics = add("metrics", "metrics.show_metrics", "Show current and past GPU load")
    metrics.add_argument("--view", choices=("aggregated", "per_gpu"), default="aggregated", help="default: %(default)s")
    metrics.add_argument(
        "--since", type=seconds, metavar="10m", help="also show the history of this period, such as 10m or 24h"
    )
    every = (
        "average over steps of this length, 1 s or more, as in `metrics --view per_gpu --since 24h --every 5m --json`;"
        " default: every sample in JSON or CSV per GPU, otherwise about 60 steps; old data has one-minute means only"
    )
    metrics.add_argument("--every", type=step, metavar="1m", help=every)
    metrics.add_argument("--csv", action="store_true", help="print the history since --since as CSV")
    _add_only(metrics)
    export = add("export-metrics", "exporting.export_metrics", "Serve GPU and job metrics to Prometheus")
    free = "port on 127.0.0.1, or 0 for any free port; default: %(default)s"
    export.add_argument("--port", type=port, default=9405, metavar="N", help=free)
    export.add_argument("--once", action="store_true", help="print the metrics once and exit, for a textfile collector")


def _add_serve(add: Add) -> None:
    show = add("serve", "serve.serve", "Show the app in a browser on this machine, for anyone who has its address")
    free = "port on 127.0.0.1; default: any free port"
    show.add_argument("--port", type=port, default=0, metavar="N", help=free)
    write = "allow launching, stopping and changing jobs there; otherwise the app is read-only"
    show.add_argument("--write", action="store_true", help=write)


def _add_job_file_commands(add: Add) -> None:
    recommend = add("recommend", "recommend.recommend", "Recommend GPUs for a job")
    number = "number of GPUs; default: as in the job file, or for `auto`, the fewest that suffice"
    recommend.add_argument("--count", type=positive, metavar="N", help=number)
    validate = add("validate", "launching.validate", "List everything that would prevent a job from running")
    launch = add("launch", "launching.launch", "Start jobs in the background, or queue them until their GPUs are free")
    _add_launch_flags(launch)
    _add_host(launch)
    _add_queue_flags(launch)
    grid = "launch a job for each value; with several grids, for each combination; may be repeated"
    launch.add_argument("--grid", action="append", default=[], metavar="sae.k=16,32,64", help=grid)
    _add_at_once(launch)
    compete = add("arena", "arena.arena", "Compare recipes by the known features of synthetic data that they find")
    given = "job files, whose data is replaced unless it is synthetic, or ids of ended jobs"
    compete.add_argument("jobs", nargs="+", metavar="JOB", help=given)
    seeds = "train each recipe with N seeds; default: %(default)s"
    compete.add_argument("--seeds", type=positive, default=3, metavar="N", help=seeds)
    look = add("doctor", "doctor.doctor", "Check this machine for problems that would prevent training")
    cost = "price of a GPU per hour, in any currency"
    look.add_argument("--price-per-gpu-hour", type=price, metavar="P", help=cost)
    probe = "also measure the bus between idle GPUs; this uses all of them for a few seconds"
    look.add_argument("--probe", action="store_true", help=probe)
    trained = "also run small training jobs for a few minutes, on an idle GPU, or on the CPU if there is no GPU"
    look.add_argument("--self-test", action="store_true", help=trained)
    service = "only install a user service that restarts the queue after this machine reboots"
    look.add_argument("--install-service", action="store_true", help=service)
    look.set_defaults(folder_limit_s=10.0)  # doctor continues if the data folder does not respond
    launch.add_argument("jobs", type=Path, nargs="+", metavar="JOB.toml", help="job files")
    for command in (recommend, validate, look):
        nargs = "?" if command is look else None
        command.add_argument("job", type=Path, metavar="JOB.toml", help="the job file", nargs=nargs)
    _add_rented(add)
    _add_diff(add)
    _add_run(add)
    _add_adopt(add)
    _add_importing(add)
    _add_export(add)
    for command in (recommend, validate, launch, look, compete):
        _add_overrides(command)
    for command in (validate, launch, look, compete):
        command.add_argument(FLAG, action="store_true", help=FLAG_HELP)
    for command in (validate, launch, look, compete):
        _add_gpus(command)


def _add_rented(add: Add) -> None:
    task = add("task", "rented.task", "Print a SkyPilot task file, which runs a job on machines rented from a cloud")
    task.add_argument("job", type=Path, metavar="JOB.toml", help="the job file")
    kinds = "GPUs to rent, any one of them, or auto:2, cpu; default: the smallest that fit"
    task.add_argument("--gpus", metavar="H100,A100-80GB:2", help=kinds)
    task.add_argument("--nodes", type=positive, metavar="N", help="number of machines; overrides launch.nodes")
    spot = "rent cheaper machines that the cloud may take back; overrides launch.spot"
    task.add_argument("--spot", action=argparse.BooleanOptionalAction, help=spot)
    task.add_argument("--infra", metavar="CLOUD", help="rent only there, as in aws or gcp/us-central1")
    bucket = "bucket for checkpoints, such as s3://my-bucket/runs; overrides launch.runs_url"
    task.add_argument("--runs", metavar="URL", help=bucket)
    package = "what to install there: a wheel, or a requirement; default: this version, from PyPI"
    task.add_argument("--package", metavar="FILE.whl", help=package)
    _add_overrides(task)
    task.add_argument(FLAG, action="store_true", help=FLAG_HELP)
    end = add("down", "rented.down", "End a job's rented machine, and with it the costs")
    _job_id(end)
    _add_yes(end, "end it")


def _add_diff(add: Add) -> None:
    compare = add("diff", "diff.diff", "Train a crosscoder on two language models, and show what only one of them has")
    for name, which in (("model_a", "the first model, A"), ("model_b", "the second model, B, with the same tokenizer")):
        model = f"{which}: a folder, a name on the hub (or NAME@REVISION), or a .gguf file"
        compare.add_argument(name, metavar=name.upper(), help=model)
    where = "hook at which both models are read, like resid_post.12; several layers: resid_post.8+12"
    compare.add_argument("--hook", required=True, metavar="HOOK", help=where)
    texts = compare.add_mutually_exclusive_group(required=True)
    texts.add_argument("--text", metavar="FILE", help="text that both models read: .txt, .jsonl, .parquet or a folder")
    texts.add_argument("--dataset", metavar="NAME", help="data set on the hub, instead of --text")
    k = "mean number of latents that fire per token; default: %(default)s"
    compare.add_argument("--k", type=positive, default=100, metavar="N", help=k)
    width = "number of latents; default: 8 per dimension of both models together"
    compare.add_argument("--d-sae", type=positive, metavar="N", help=width)
    tokens = "number of tokens to train on; default: 100 million, or fewer for a small text file"
    compare.add_argument("--tokens", type=count, metavar="20M", help=tokens)
    compare.add_argument("--name", metavar="NAME", help="name of the job; default: the names of the models")
    compare.add_argument("--dry-run", action="store_true", help="print the job file and launch nothing")
    compare.add_argument("-d", "--detach", action="store_true", help="launch the job and return; do not evaluate it")
    compare.add_argument("--tag", action="append", default=[], metavar="WORD", help="tag the job; may be repeated")
    _complete_ids(
        compare.add_argument(
            "--after", type=positive, action="append", default=[], metavar="ID", help="start only after this job"
        )
    )
    _add_overrides(compare)
    _add_gpus(compare)


def _add_run(add: Add) -> None:
    run = add("run", "running.run", "Run any command as a job: on free GPUs, in the queue, in the background")
    run.usage = "sae-tui run [flags] -- COMMAND [ARGUMENT ...]"
    what = "the program and its arguments, without a shell; {gpus}, {gpu_list}, {job_id} and {run_dir} are replaced"
    run.add_argument("argv", nargs=argparse.REMAINDER, metavar="COMMAND", help=what)
    run.add_argument("--shell", metavar="LINE", help="run this line with /bin/sh instead of a command")
    number = "number of GPUs, or 0 for the CPU; default: 1 if there are GPUs; indices: 0,1 or [0]"
    run.add_argument("--gpus", metavar="N", help=number)
    needed = "memory needed on each GPU; default: idle GPUs are used"
    run.add_argument("--memory", type=_checked(size), metavar="20GiB", help=needed)
    run.add_argument("--name", metavar="NAME", help="name of the job; default: the command")
    run.add_argument("--folder", metavar="DIR", help="working directory; default: the current one")
    run.add_argument("--env", action="append", default=[], metavar="NAME=VALUE", help="set a variable; may be repeated")
    run.add_argument("--clean-env", action="store_true", help="start without the variables of this shell")
    longest = "time limit, after which the program is asked to stop"
    run.add_argument("--time", type=_checked(seconds), metavar="4h", help=longest)
    signals = ("TERM", "INT", "HUP", "QUIT", "USR1", "USR2")
    run.add_argument("--stop-signal", choices=signals, default="TERM", help="default: %(default)s")
    grace = "time to stop before the program is killed; default: 60s"
    run.add_argument("--grace", type=_checked(seconds), default="60s", metavar="60s", help=grace)
    run.add_argument(
        "--retries", type=rank, default=0, metavar="N", help="restart the program up to N times if it fails"
    )
    codes = "restart only after this exit code; may be repeated"
    run.add_argument("--retry-on", type=positive, action="append", default=[], metavar="EXIT", help=codes)
    again = "queue the job again after this exit code, for programs that save and exit; may be repeated"
    run.add_argument("--requeue", type=positive, action="append", default=[], metavar="EXIT", help=again)
    grid = "run the command for each value, which replaces {lr}; with several grids, for each combination"
    run.add_argument("--grid", action="append", default=[], metavar="lr=1e-3,3e-4", help=grid)
    found = (
        "pattern that finds metrics in the output; may be repeated; default: JSON, key=value, loss: 0.1, tqdm's bars"
    )
    run.add_argument("--metrics", action="append", default=[], metavar="'step={step} loss={loss}'", help=found)
    indices = "run the command for each index, at most 4 at once with %%4; {array_index} is replaced"
    run.add_argument("--array", type=array, metavar="0-31%4", help=indices)
    _add_at_once(run)
    run.add_argument("--backend", choices=_choices(run, _backends), help="default: local")
    _add_queue_flags(run)
    _add_launch_flags(run)
    _add_host(run)
    _add_overrides(run)
    run.add_argument("-d", "--detach", action="store_true", help="return immediately (the default)")


def _add_adopt(add: Add) -> None:
    take = add("adopt", "running.adopt", "Turn one of your running processes into a job")
    take.add_argument("pid", type=positive, metavar="PID", help="pid of the process, as shown by `sae-tui gpus`")
    take.add_argument("--name", metavar="NAME", help="name of the job; default: its command line")
    take.add_argument("--tag", action="append", default=[], metavar="WORD", help="tag the job; may be repeated")


def _add_at_once(command: argparse.ArgumentParser) -> None:
    most = "run at most N of these jobs at once"
    command.add_argument("--at-once", type=positive, metavar="N", help=most)


def _checked(parse: Callable[[str], object]) -> Callable[[str], str]:
    """Return a function that checks an argument by parsing it, and returns its text."""

    def checked(text: str) -> str:
        parse(text)
        return text

    return checked


def _add_importing(add: Add) -> None:
    take = add("import", "importing.take_in", "Import an SAE from another tool as a job")
    if take.is_used:
        _add_import_flags(take)


def _add_import_flags(take: argparse.ArgumentParser) -> None:
    from trainer.contract.settings.catalog import EACH_PART, IS_TRANSCODER, READ_FORMATS, SAES_CONFIG, WHERE_SAE

    take.add_argument("folder", type=Path, metavar="FOLDER", help=WHERE_SAE)
    data = f"stored activations for evaluating the SAE and training it further{EACH_PART}"
    take.add_argument("--data", type=Path, action="append", metavar="DATA", required=True, help=data)
    take.add_argument("--format", choices=READ_FORMATS, help="default: detected from the files")
    take.add_argument("--config", action="append", default=[], metavar="KEY=VALUE", help=SAES_CONFIG)
    take.add_argument("--transcoder", action="store_true", help=IS_TRANSCODER)
    take.add_argument("--tag", action="append", default=[], metavar="WORD", help="tag the job; may be repeated")
    _add_overrides(take)


def _add_export(add: Add) -> None:
    share = add("export", "sharing.export", "Export a job's SAE for other tools")
    _job_id(share)
    share.add_argument("--out", type=Path, metavar="DIR", required=True, help="folder to write to")
    share.add_argument(
        "--format",
        choices=_choices(share, _written_formats),
        default="saelens",
        metavar="FORMAT",
        help="%(choices)s; default: %(default)s",
    )
    share.add_argument(
        "--best", action="store_true", help="export the checkpoint with the lowest held-out FVU, not the last one"
    )
    share.add_argument("--force", action="store_true", help="replace an SAE that is already in the folder")
    share.add_argument(
        "--only", action="append", default=[], metavar="LABEL", help="export only this SAE of a sweep; may be repeated"
    )
    k = "write a hierarchical_topk SAE with this k instead of the largest k that it was trained for"
    share.add_argument("--k", type=positive, metavar="K", help=k)


def _add_overrides(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--set",
        dest="overrides",
        action="append",
        default=[],
        metavar="section.key=value",
        help="override a setting in the job file, like train.n_tokens=10M or sae.k=16,32,64; may be repeated",
    )


def _add_gpus(command: argparse.ArgumentParser) -> None:
    command.add_argument("--gpus", metavar="0,1", help="0,1 or auto, auto:2, cpu, cpu:2; overrides launch.gpus")


def _add_launch_flags(command: argparse.ArgumentParser) -> None:
    """Add the flags shared by all commands that create a job."""
    _add_wait(command)
    _complete_ids(
        command.add_argument(
            "--after",
            type=positive,
            action="append",
            default=[],
            metavar="ID",
            help="start only after this job has finished; may be repeated",
        )
    )
    command.add_argument("--hold", action="store_true", help="hold the job in the queue until `sae-tui release ID`")
    command.add_argument("--tag", action="append", default=[], metavar="WORD", help="tag the job; may be repeated")


def _add_host(command: argparse.ArgumentParser) -> None:
    there = "run this command on another host over ssh, in the folder with the same path"
    command.add_argument("--host", dest="on_host", type=host, metavar="HOST", help=there)


def _add_queue_flags(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--share", action="store_true", help="also use GPUs that are already in use, if they have enough free memory"
    )
    command.add_argument(
        "--priority", type=int, metavar="N", help="-100 to 100; jobs with a higher priority start first; default: 0"
    )


def _add_wait(command: argparse.ArgumentParser) -> None:
    codes = "wait until the job has ended; exit codes: 0 finished, 3 stopped, 4 failed, 5 lost"
    command.add_argument("--wait", action="store_true", help=codes)


def _add_job_commands(add: Add) -> None:
    _add_finding(add)
    show = add("job", "job.show_job", "Show one job with its events")
    stop = add("stop", "job.stop", "Ask jobs to save a checkpoint and stop")
    logs = add("logs", "job.show_logs", "Show the log of a job")
    for command in (show, logs):
        _job_id(command)
    _job_ids(stop)
    _add_yes(stop, "stop many running jobs")
    _add_wait(show)
    stop.add_argument("--evaluation", action="store_true", help="stop the evaluation of its SAEs, not the job")
    logs.add_argument("--evaluation", action="store_true", help="show the log of the evaluation of its SAEs")
    show.add_argument("--cards", action="store_true", help="list its current and earlier report cards")
    which = "show the report card with this number in the list of --cards"
    show.add_argument("--card", type=positive, metavar="N", help=which)
    other = "compare the report card with card M of this job, or with JOB: or JOB:M of another job"
    show.add_argument("--against", type=card_name, metavar="M", help=other)
    stop.add_argument("--kill", action="store_true", help="kill it within 5 s, even without a checkpoint")
    early = f"cool down first, which adds {COOL_DOWN_SHARE:.0%} to the steps already run, and end as finished".replace(
        "%", "%%"
    )
    stop.add_argument("--finish", action="store_true", help=early)
    logs.add_argument("-f", "--follow", action="store_true", help="follow the log until the job ends")
    logs.add_argument("--rank", type=rank, default=0, metavar="N", help="show the log of this rank; default: 0")
    logs.add_argument(
        "-n", "--lines", type=positive, default=100, metavar="N", help="show at most the last N lines; default: 100"
    )


def _add_finding(add: Add) -> None:
    _add_jobs(add)
    _add_compare(add)
    _add_eval(add)
    _add_features(add)
    _add_explain(add)
    _add_steer(add)
    _add_annotate(add)


def _add_jobs(add: Add) -> None:
    find = add("jobs", "jobs.show_jobs", "List the jobs, newest first")
    words = "list only jobs that match all of these: words, #tag, state:failed, arch:topk, user:ann, id:7"
    find.add_argument("filter", nargs="*", metavar="FILTER", help=words)
    find.add_argument("--sort", choices=_choices(find, _orders_of_jobs), default="newest", help="default: %(default)s")
    find.add_argument("--reverse", action="store_true", help="sort in the opposite direction")
    find.add_argument("--watch", action="store_true", help="repeat after every change; with --json, one line each time")
    find.add_argument("--limit", type=positive, metavar="N", help="list only the first N jobs")
    each = "list every job of an array; by default, an array is one line unless a filter is given"
    find.add_argument("--all", action="store_true", help=each)


def _add_compare(add: Add) -> None:
    look = add("compare", "compare.compare", "Compare runs: their settings, results and curves")
    ids = look.add_argument("ids", type=positive, nargs="+", metavar="ID", help="ids of the jobs")
    _complete_ids(ids)
    look.add_argument(
        "--metric",
        metavar="NAME",
        help="metric of the curves, such as loss; default: heldout_fvu, or all metrics in the CSV file",
    )
    look.add_argument(
        "--x", choices=_choices(look, _axes), default="step", help="x axis of the curves; default: %(default)s"
    )
    look.add_argument("--smooth", type=share, default=0.0, metavar="0.9", help="smoothing factor of a moving average")
    look.add_argument("--log", action="store_true", help="use a logarithmic scale")
    look.add_argument("--svg", type=Path, metavar="FILE", help="write the curves as an SVG image")
    look.add_argument("--csv", type=Path, metavar="FILE", help="write the values of the curves as CSV")
    look.add_argument("--force", action="store_true", help="overwrite existing files")


def _add_eval(add: Add) -> None:
    judge = add("eval", "evaluation.evaluate", "Evaluate the SAE of a job that has ended, in the background")
    _job_id(judge)
    spliced = "also measure the loss of the language model patched with the SAE: auto, or an extraction's job file"
    judge.add_argument("--model", metavar="auto", help=spliced)
    of_each = (
        "with --model: estimate how much ablating each latent changes the loss; ablate the 20 with the largest effects"
    )
    judge.add_argument("--effects", action="store_true", help=of_each)
    judge.add_argument(
        "--probe", action="store_true", help="with --model: k-sparse probing with 1 and 16 latents on labelled texts"
    )
    keep = "skip the measurement on rows if the report card already has it for the same weights"
    judge.add_argument("--keep-rows", action="store_true", help=keep)
    better = "also measure FVU and L0 after N steps of refinement (encode(x, refine=N) in Python); default 0"
    judge.add_argument("--refine", type=rank, default=0, metavar="N", help=better)
    judge.add_argument(
        "--no-splice",
        action="store_true",
        help="with --model: skip the loss of the patched model; measure only --effects, --probe and promoted tokens",
    )
    judge.add_argument(FLAG, action="store_true", help=f"with --model: {FLAG_HELP}")
    judge.add_argument("--cpu", action="store_true", help="use no GPU; default: a free GPU if the job ran on a GPU")
    judge.add_argument(
        "--wait",
        action="store_true",
        help="wait until the evaluation has ended; exit codes: 0 if it succeeded, otherwise 1",
    )


def _add_features(add: Add) -> None:
    latents = add("features", "features.features", "Show an SAE's latents and their max-activating examples")
    run = latents.add_argument("run", metavar="RUN", help="id of a job, or folder of an SAE or run")
    _complete_ids(run)
    latents.add_argument(
        "latent", type=rank, nargs="?", metavar="LATENT", help="show only this latent, with its max-activating examples"
    )
    latents.add_argument("--sae", metavar="LABEL", help="label of the SAE in a sweep, such as k=16")
    order = (
        "sparse: latents that fire on 0.01 to 1 %% of the rows first, by largest activation, dense latents last;"
        " starred: latents with a star, a name or a note first; effect: by the effect on the language model's loss"
        " (eval --effects); norm: by the relative norm of a crosscoder's decoder rows; default: sparse"
    )
    latents.add_argument("--sort", choices=_choices(latents, _orders_of_latents), default="sparse", help=order)
    latents.add_argument(
        "--search",
        metavar="WORDS",
        help="only latents whose max-activating examples, name or note contain these words; latents with the words in"
        " your notes come first, and then latents firing on them; starred: keeps latents with a star, and named:WORD"
        " latents with this word in their name;"
        " stable:>0.7 keeps latents that other seeds found too, effect:>0.001 latents with a larger effect on the"
        " language model's loss, and family:token keeps latents that fire on one token;"
        " of a crosscoder, part:B keeps latents only in part B (confirmed:B, if latent scaling agrees), and norm:>0.9"
        " latents with a larger relative norm",
    )
    which = "use the report card with this number in `sae-tui job ID --cards`"
    latents.add_argument("--card", type=positive, metavar="N", help=which)
    latents.add_argument("--limit", type=positive, default=20, metavar="N", help="list at most N; default: %(default)s")
    latents.add_argument(
        "--watched",
        action="store_true",
        help="the snapshots of latents that the job stored while it trained (train.watch_latents)",
    )
    latents.add_argument(
        "--text", metavar="TEXT", help="read this text with the language model: each token's strongest latents"
    )
    _add_interaction(latents, "with --text: ")


def _add_steer(add: Add) -> None:
    steered = add("steer", "interaction.steer", "Continue a prompt with latents set to other values, and without")
    _complete_ids(steered.add_argument("run", metavar="RUN", help="id of a job, or folder of an SAE or run"))
    steered.add_argument("latents", type=rank, nargs="+", metavar="LATENT", help="latents to steer together")
    steered.add_argument("--prompt", required=True, metavar="TEXT", help="the text to continue")
    steered.add_argument(
        "--strength",
        type=strength,
        default=2.0,
        metavar="X",
        help="set each latent to X times its largest activation; default: 2",
    )
    steered.add_argument("--ablate", action="store_true", help="set the latents to 0, as --strength 0")
    steered.add_argument("--add", action="store_true", help="add the strength to each latent's own activation")
    steered.add_argument("--only-generated", action="store_true", help="read the prompt unchanged")
    steered.add_argument("--tokens", type=generated, default=30, metavar="N", help="tokens to generate; default: 30")
    steered.add_argument(
        "--temperature", type=temperature, default=0.0, metavar="T", help="0: the most likely tokens; default: 0"
    )
    steered.add_argument("--seed", type=rank, default=0, metavar="N", help="seed of both continuations; default: 0")
    steered.add_argument("--sae", metavar="LABEL", help="label of the SAE in a sweep, such as k=16")
    steered.add_argument(
        "--part",
        type=part,
        metavar="B",
        help="change only this part of a crosscoder, in its model; default: all parts in the model of part A",
    )
    _add_interaction(steered)


def _add_interaction(command: argparse.ArgumentParser, of: str = "") -> None:
    command.add_argument("--chat", action="store_true", help=f"{of}a user's message in the model's chat template")
    command.add_argument(
        "--model", metavar="PATH", help=f"{of}the language model; default: the one in the SAE's metadata"
    )
    command.add_argument(
        "--cpu", action="store_true", help=f"{of}use no GPU; default: a free GPU if the job ran on one"
    )


def _add_annotate(add: Add) -> None:
    note = add("annotate", "features.annotate", "Star latents of an SAE, and write names and notes for them")
    run = note.add_argument("run", metavar="RUN", help="id of a job, or folder of an SAE or run")
    _complete_ids(run)
    which = "the latent; leave it out to list all notes"
    note.add_argument("latent", type=rank, nargs="?", metavar="LATENT", help=which)
    note.add_argument("--sae", metavar="LABEL", help="label of the SAE in a sweep, such as k=16")
    star = note.add_mutually_exclusive_group()
    star.add_argument("--star", dest="starred", action="store_true", default=None, help="star the latent")
    star.add_argument("--unstar", dest="starred", action="store_false", default=None, help="remove its star")
    note.add_argument("--name", metavar="TEXT", help='give it a name of at most 80 characters; "" removes it')
    note.add_argument("--note", metavar="TEXT", help='write a note of at most 2,000 characters; "" removes it')
    note.add_argument("--clear", action="store_true", help="first remove its star, name and note")


def _add_explain(add: Add) -> None:
    summary = "Explain an SAE's latents with a language model, or show the stored explanations"
    explain = add("explain", "explaining.explain", summary)
    run = explain.add_argument("run", metavar="RUN", help="id of a job, or folder of an SAE or run")
    _complete_ids(run)
    explain.add_argument(
        "latent", type=rank, nargs="*", metavar="LATENT", help="explain these latents; default: see --latents"
    )
    server = "OpenAI-compatible server that runs the language model; without it, show the stored explanations"
    explain.add_argument("--url", metavar="http://localhost:8000/v1", help=server)
    explain.add_argument("--model", metavar="NAME", help="name of the language model on the server")
    most = "explain the first N latents in the order of `sae-tui features`; default: %(default)s"
    explain.add_argument("--latents", type=positive, default=100, metavar="N", help=most)
    explain.add_argument("--sae", metavar="LABEL", help="label of the SAE in a sweep, such as k=16")
    again = "also explain latents that are already explained by this model with these prompts"
    explain.add_argument("--again", action="store_true", help=again)
    explain.add_argument(
        "--parallel", type=positive, default=4, metavar="N", help="latents at the same time; default: %(default)s"
    )
    explain.add_argument("--seed", type=rank, default=0, metavar="N", help="chooses the texts; default: %(default)s")
    explain.add_argument(
        "--timeout", type=seconds, default=300.0, metavar="5m", help="longest time for one answer; default: 5m"
    )
    longest = "longest answer in tokens; raise it for models that think first; default: %(default)s"
    explain.add_argument("--max-tokens", type=positive, default=500, metavar="N", help=longest)
    _add_yes(explain, "send many requests")


def _add_edit_commands(add: Add) -> None:
    resume = add(
        "resume", "edits.resume", "Resume jobs that have ended or are paused, from their last good checkpoints"
    )
    clone = add("clone", "edits.clone", "Launch a new job with another job's settings")
    pause = add("pause", "edits.pause", "Save checkpoints of jobs and free their GPUs until they are resumed")
    hold = add("hold", "edits.hold", "Hold queued jobs, so that they do not start")
    release = add("release", "edits.release", "Release held jobs, so that they can start")
    priority = add("priority", "edits.prioritise", "Set the priority of queued jobs")
    after = add("after", "edits.come_after", "Make a queued job wait until other jobs have finished")
    rename = add("rename", "edits.rename", "Rename a job")
    tag = add("tag", "edits.tag", "Add tags to jobs")
    note = add("note", "edits.write_note", "Set a note on jobs")
    early = "cool down from the checkpoint and end as finished, instead of training all remaining steps"
    resume.add_argument("--finish", action="store_true", help=early)
    for command in (clone, after, rename):
        _job_id(command)
    mirror = "or one URL: the mirror of a job from another machine (train.mirror_checkpoints)"
    _complete_selected(
        resume.add_argument("ids", type=selector_or_url, nargs="+", metavar="ID", help=f"{_SELECTED}, {mirror}")
    )
    resume.add_argument(FLAG, action="store_true", help=f"with a URL: {FLAG_HELP}")
    for command in (pause, hold, release, note):
        _job_ids(command)
    for command in (resume, clone):
        _add_overrides(command)
        _add_gpus(command)
    _add_wait(resume)
    _add_launch_flags(clone)
    clone.add_argument("--print", action="store_true", help="print the job file instead of launching the job")
    words = f"{_SELECTED}; after a single id also the priority"
    _complete_selected(priority.add_argument("ids", nargs="+", metavar="ID", help=words))
    most = "priority, -100 to 100; jobs with a higher priority start first"
    priority.add_argument("--to", type=int, metavar="N", help=most)
    others = after.add_argument(
        "others",
        type=positive,
        nargs="*",
        metavar="OTHER",
        help="ids of the jobs to wait for; leave them out to wait for no job",
    )
    _complete_ids(others)
    rename.add_argument("name", metavar="NAME")
    words = f"{_SELECTED}; all other words are the tags to add"
    _complete_selected(tag.add_argument("ids", nargs="+", metavar="ID", help=words))
    looks = "add this tag, which may look like an id; may be repeated"
    tag.add_argument("--add", action="append", default=[], metavar="WORD", help=looks)
    tag.add_argument("--remove", action="append", default=[], metavar="WORD", help="remove this tag; may be repeated")
    note.add_argument("text", metavar="TEXT", help='text of the note; "" removes it')
    delete = add("rm", "edits.remove", "Delete jobs with their checkpoints, logs and SAEs")
    _job_ids(delete)
    _add_yes(delete, "delete")
    mend = add(
        "repair", "edits.repair", "Rebuild the list of jobs from their folders, and repair damage left by a crash"
    )
    gone = "a host that no longer exists: also mark its jobs as lost, except jobs active in the last 3 minutes"
    mend.add_argument("--host", dest="host_gone", metavar="NAME", help=gone)


def _add_own_commands(add: Add) -> None:
    script = add("completion", "completion.complete_in_shell", "Set up shell completion of commands and job ids")
    script.add_argument(
        "shell", choices=SHELLS, nargs="?", help="default: the shell in $SHELL, otherwise your login shell"
    )
    script.add_argument(
        "--install",
        action="store_true",
        help="write the script to the file that the shell loads; default: print it",
    )
    schema = add("schema", "schema.show_schema", "Print the JSON Schema of a command's output, or list all schemas")
    schema.add_argument("words", nargs="*", metavar="COMMAND", help="such as `gpus`, `trainer run`, or `error`")
    add("skill", "skill.show_skill", "Print a guide for agents that work with JSON")


def _job_id(command: argparse.ArgumentParser) -> None:
    _complete_ids(command.add_argument("id", type=positive, metavar="ID", help="id of the job"))


# The help for arguments that select jobs.
_SELECTED = "job ids, ranges like 3-9, and #tags in quotes"


def _job_ids(command: argparse.ArgumentParser) -> None:
    _complete_selected(command.add_argument("ids", type=selector, nargs="+", metavar="ID", help=_SELECTED))


def _complete_selected(argument: argparse.Action) -> None:
    """Complete this argument with job ids and tags."""
    argument.completer = _completer("ids_and_tags")  # type: ignore[attr-defined]


def _add_yes(command: argparse.ArgumentParser, does: str) -> None:
    command.add_argument("-y", "--yes", action="store_true", help=f"{does} without confirmation")


def _complete_ids(job_id: argparse.Action) -> None:
    """Complete this argument with job ids."""
    job_id.completer = _completer("job_ids")  # type: ignore[attr-defined]


def _completer(function: str) -> Callable[..., dict[str, str]]:
    """Return a function from the `completion` module, which is loaded only if the shell asks for job ids."""

    def complete(**named: Any) -> dict[str, str]:
        module = importlib.import_module(f"{__package__}.completion")
        found: dict[str, str] = getattr(module, function)(**named)
        return found

    return complete


def _examples(command: str) -> str:
    return "\n".join(["examples:", *(f"  sae-tui {line}" for line in COMMAND_EXAMPLES[command])])


def _shared_flags(*, in_help: bool = True) -> CommandParser:
    """Return the flags allowed before and after the command.

    The flags have no defaults, because the default for a flag after the command would overwrite a value given before
    it.
    """
    shared = CommandParser(add_help=False, argument_default=argparse.SUPPRESS)
    shared.add_argument("--data-dir", metavar="DIR", help="folder for jobs; default: $SAE_TUI_DATA_DIR")
    shared.add_argument("--demo", action="store_true", help="use simulated GPUs, and keep the jobs in DIR/demo")
    shared.add_argument("--demo-gpus", type=positive, metavar="N", help="number of simulated GPUs")
    shared.add_argument("--gpu-source", choices=source_names(), help="source of GPU data; default: auto")
    for action in shared._actions if not in_help else ():
        action.help = argparse.SUPPRESS
    return shared


def _json_flag() -> CommandParser:
    flag = CommandParser(add_help=False, argument_default=argparse.SUPPRESS)
    flag.add_argument("--json", action="store_true", help="print JSON")
    return flag
