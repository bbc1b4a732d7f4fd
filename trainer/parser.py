"""The `sae-train` command-line parser."""

from __future__ import annotations

import argparse
from pathlib import Path

from trainer.contract.object_paths import is_url, local_path
from trainer.contract.output import SafeParser
from trainer.contract.settings.catalog import (
    EACH_PART,
    IS_TRANSCODER,
    READ_FORMATS,
    SAES_CONFIG,
    WHERE_SAE,
    WRITTEN_FORMATS,
)
from trainer.contract.settings.consent import FLAG, FLAG_HELP
from trainer.help import (
    BENCH,
    ESTIMATE,
    EVAL,
    EXPORT,
    EXTRACT,
    FETCH,
    IMPORT,
    INSPECT,
    INTERACT,
    JOIN,
    OVERVIEW,
    PAIRS,
    PROBE,
    RESUME,
    RUN,
    SELF_TEST,
    STOP,
)

PROGRAM = "sae-train"


def make_parser() -> SafeParser:
    """Return the command-line parser; in the parsed arguments, `command` is the name of the command."""
    parser = SafeParser(
        prog=PROGRAM,
        description="Trains sparse autoencoders on stored or streamed activations of language models.",
        epilog=OVERVIEW,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(
        required=True,
        metavar="COMMAND",
    )

    def add(name: str, about: str, text: str) -> argparse.ArgumentParser:
        form = argparse.RawDescriptionHelpFormatter
        added = commands.add_parser(
            name, is_of_command=True, help=about, description=f"{about[0].upper()}{about[1:]}.", epilog=text
        )
        added.formatter_class = form
        added.set_defaults(command=name)
        return added

    run = add("run", "train in the foreground", RUN)
    _add_job(run)
    run.add_argument("--out", type=Path, metavar="DIR", help="run folder; default runs/NAME-TIME")
    extract = add("extract", "store a language model's activations on text, for training", EXTRACT)
    _add_job(extract)
    inspect = add("inspect", "check stored activations: statistics and problems", INSPECT)
    inspect.add_argument("data", type=_data, metavar="DATA", help="a folder or URL of shards, as for data.path")
    inspect.add_argument("--headers", action="store_true", help="only read the headers: rows, width and type")
    inspect.add_argument("--json", action="store_true", help="print the result as JSON on the last line")
    pairs = add("pairs", "write pairs of an activation and its text to a Parquet file", PAIRS)
    pairs.add_argument("data", type=Path, metavar="DATA", help="a hook's folder, written by an extraction")
    pairs.add_argument("file", type=Path, metavar="FILE.parquet", help="file to write")
    pairs.add_argument("--rows", type=_positive, metavar="N", default=100_000, help="most pairs; default 100000")
    pairs.add_argument("--before", type=_count, metavar="N", default=64, help="tokens before each token; default 64")
    pairs.add_argument("--after", type=_count, metavar="N", default=16, help="tokens after each token; default 16")
    pairs.add_argument("--json", action="store_true", help="print the result as JSON on the last line")
    join = add("join", "train as one of the ranks that torchrun starts, on one host or several", JOIN)
    _add_job(join)
    join.add_argument("--out", type=Path, metavar="DIR", required=True, help="run folder, the same on all hosts")
    resume = add("resume", "resume a run from its newest checkpoint", RESUME)
    where = "the folder that `run` created, or the URL of its mirror (train.mirror_checkpoints)"
    resume.add_argument("run_dir", type=_folder_or_url, metavar="RUN_DIR", help=where)
    new = "with a URL: the run folder to create; default runs/NAME-TIME"
    resume.add_argument("--out", type=Path, metavar="DIR", help=new)
    resume.add_argument("--finish", action="store_true", help="cool down over the next steps, and then finish")
    _add_common(resume)
    fetch = add("fetch", "download a run from the mirror of its checkpoints, without training", FETCH)
    fetch.add_argument("url", metavar="URL", help="the value of train.mirror_checkpoints")
    fetch.add_argument("--out", type=Path, metavar="DIR", required=True, help="the run folder to create")
    fetch.add_argument("--json", action="store_true", help="print the result as JSON on the last line")
    stop = add("stop", "ask a run in the foreground or under torchrun to save and stop, or to finish early", STOP)
    stop.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="the folder that `run` created")
    stop.add_argument("--finish", action="store_true", help="cool down over the next steps, and then finish")
    stop.add_argument("--json", action="store_true", help="print the result as JSON on the last line")
    _add_export(add("export", "write a checkpoint's SAE in another tool's format", EXPORT))
    _add_import(add("import", "create a run from an SAE that another tool trained", IMPORT))
    judge = add("eval", "write a trained SAE's report card, measured on held-out rows", EVAL)
    _add_eval(judge)
    talk = add("interact", "read texts with an SAE and steer its language model, for other programs", INTERACT)
    _add_interact(talk)
    _add_job(add("estimate", "estimate a job's time and its memory per GPU before it runs", ESTIMATE))
    bench = add("bench", "measure a job's step time on this machine, by phase", BENCH)
    _add_job(bench, nargs="?")
    for command in (run, extract, join, resume, judge, bench):
        command.add_argument(FLAG, action="store_true", help=FLAG_HELP)
    bench.add_argument("--steps", type=_positive, default=20, metavar="N", help="steps to time; default 20")
    probe = add("probe", "measure the speed of every device and of the bus between them", PROBE)
    probe.add_argument("--gpus", default="auto", metavar="GPUS", help='like launch.gpus: 0,1 or "cpu:2"; default all')
    probe.add_argument("--precision", choices=("auto", "fp32", "tf32", "bf16", "fp16"), default="auto")
    probe.add_argument("--json", action="store_true", help="print the result as JSON on the last line")
    _add_self_test(
        add("self-test", "check that a GPU trains correctly: against float64, the CPU and itself", SELF_TEST)
    )
    rank = commands.add_parser(
        "rank", is_of_command=True, description="Run one rank of a training run; started by `run` and by the app."
    )
    rank.add_argument("spec", type=Path, metavar="SPEC.json")
    rank.add_argument("--any-owner", action="store_true", help="run even if another user owns the run's files")
    rank.set_defaults(command="rank")
    return parser


def _add_job(command: argparse.ArgumentParser, nargs: str | None = None) -> None:
    command.add_argument("job", type=Path, metavar="JOB.toml", nargs=nargs, help="the job file")
    _add_common(command)


def _add_common(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--set",
        dest="overrides",
        action="append",
        default=[],
        metavar="section.key=value",
        help="override a setting in the job file, like train.n_tokens=10M or sae.k=16,32,64; may be repeated",
    )
    command.add_argument("--json", action="store_true", help="print the result as JSON on the last line")


def _add_export(command: argparse.ArgumentParser) -> None:
    command.add_argument("paths", type=Path, metavar="RUN_DIR_OR_CHECKPOINT", nargs="+")
    command.add_argument("--out", type=Path, metavar="DIR", required=True, help="folder to write the SAE to")
    listed = "%(choices)s; default: %(default)s"
    command.add_argument("--format", choices=WRITTEN_FORMATS, default="saelens", metavar="FORMAT", help=listed)
    command.add_argument("--best", action="store_true", help="the checkpoint with the lowest held-out FVU")
    command.add_argument("--force", action="store_true", help="replace an SAE that is already in DIR")
    command.add_argument(
        "--only", action="append", default=[], metavar="LABEL", help="only this SAE of a sweep; may be repeated"
    )
    k = "write a hierarchical_topk SAE with this k instead of the largest k that it was trained for"
    command.add_argument("--k", type=int, metavar="K", help=k)
    command.add_argument(
        "--push", metavar="REPO", help="also upload the files to NAME or OWNER/NAME on the Hugging Face hub"
    )
    command.add_argument("--public", action="store_true", help="with --push: a public repository; default private")
    command.add_argument("--yes", action="store_true", help="with --push: upload without asking")
    command.add_argument("--json", action="store_true", help="print the result as JSON on the last line")


def _add_import(command: argparse.ArgumentParser) -> None:
    command.add_argument("folder", type=Path, metavar="FOLDER", help=WHERE_SAE)
    command.add_argument("--out", type=Path, metavar="RUN_DIR", required=True, help="the run folder to create")
    command.add_argument(
        "--data",
        action="append",
        metavar="DATA",
        required=True,
        help=f"stored activations for the SAE's evaluation and further training{EACH_PART}",
    )
    command.add_argument("--format", choices=READ_FORMATS, help="default: recognised from the files")
    _add_given(command)
    _add_common(command)


def _add_given(command: argparse.ArgumentParser) -> None:
    """Add options for settings that may be missing from an SAE's files."""
    command.add_argument("--config", action="append", default=[], metavar="KEY=VALUE", help=SAES_CONFIG)
    command.add_argument("--transcoder", action="store_true", help=IS_TRANSCODER)


def _add_eval(command: argparse.ArgumentParser) -> None:
    command.add_argument("path", type=Path, metavar="PATH", help="a run, a checkpoint, or a folder with an SAE")
    command.add_argument(
        "--data",
        action="append",
        metavar="DIR",
        help=f"activations to evaluate on, for an SAE that does not belong to a run{EACH_PART}",
    )
    command.add_argument("--targets", metavar="DIR", help="with --data: the targets of a transcoder for these rows")
    _add_given(command)
    command.add_argument("--best", action="store_true", help="the checkpoint with the lowest held-out FVU")
    command.add_argument(
        "--model",
        metavar="JOB.toml",
        help="an extraction's job file, or auto: measure the loss of its language model patched with the SAE",
    )
    command.add_argument(
        "--tokens",
        type=_count,
        metavar="N",
        help="with --model: number of tokens to read, or 0 for none; default 32768, or 4096 on a CPU",
    )
    command.add_argument(
        "--effects",
        action="store_true",
        help="with --model: estimate how much ablating each latent changes the loss, and ablate the 20 largest",
    )
    command.add_argument(
        "--effect-tokens",
        type=_positive,
        metavar="N",
        help="with --effects: number of tokens to read; default 65536, or 16384 on a CPU",
    )
    command.add_argument(
        "--probe",
        action="store_true",
        help="with --model: measure how well 1 and 16 latents predict the classes of texts",
    )
    command.add_argument(
        "--sets",
        type=_positive,
        metavar="N",
        help="with --probe: number of sets of labelled texts, at most 113; default 12",
    )
    command.add_argument(
        "--keep-rows",
        action="store_true",
        help="skip measuring on rows if the report card already has these metrics for these weights",
    )
    command.add_argument(
        "--refine",
        type=_count,
        default=0,
        metavar="N",
        help="also measure FVU and L0 after N steps of refinement (encode(x, refine=N) in Python); default 0",
    )
    command.add_argument(
        "--contexts",
        type=_count,
        metavar="N",
        help="max-activating examples to keep per latent, or 0 for none; default 20",
    )
    command.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: a GPU if there is one"
    )
    command.add_argument("--json", action="store_true", help="print the result as JSON on the last line")


def _add_interact(command: argparse.ArgumentParser) -> None:
    command.add_argument("path", type=Path, metavar="FOLDER", help="the folder of an exported SAE")
    command.add_argument("--model", metavar="PATH", help="the language model; default: the one in the SAE's metadata")
    command.add_argument("--idle", type=_positive, default=900, metavar="SECONDS", help="end after this time; 900")
    command.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: a GPU if there is one"
    )
    command.add_argument("--json", action="store_true", help="write errors as JSON")


def _add_self_test(command: argparse.ArgumentParser) -> None:
    which = 'the index of a GPU, or "cpu"; default: the first GPU'
    command.add_argument("--gpus", default="auto:1", metavar="GPU", help=which)
    more = "also test longer training runs, memory use against the estimate, and matrices with more than 2^31 values"
    command.add_argument("--full", action="store_true", help=more)
    command.add_argument("--json", action="store_true", help="print the result as JSON on the last line")


def _folder_or_url(text: str) -> Path | str:
    return text if is_url(text) else Path(text)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, not {text}")
    return int(text)


def _count(text: str) -> int:
    return 0 if text == "0" else _positive(text)


def _data(given: str) -> Path:
    """Return the path of a data folder; for a URL, the folder with the copies of its objects."""
    return Path(local_path(given))
