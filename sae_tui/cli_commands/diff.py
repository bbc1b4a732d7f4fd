"""`sae-tui diff`: trains a crosscoder on two language models, and shows what only one of them has."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from sae_tui.cli_commands.context import CommandContext
from sae_tui.cli_commands.edits import print_job_file
from sae_tui.cli_commands.evaluation import evaluated
from sae_tui.cli_commands.job_files import overrides_of
from sae_tui.cli_commands.launching import launch_all, record_all
from sae_tui.cli_commands.output import say, show_json, show_table, warn
from sae_tui.cli_commands.parser import make_parser
from sae_tui.cli_commands.waiting import EXITS, wait_until_ended
from sae_tui.jobs.edits import LONGEST_NAME
from sae_tui.jobs.evaluation.report_card import whole_cards
from sae_tui.jobs.view.reader import JobView
from trainer.contract.errors import JobFileError, Problem
from trainer.contract.exits import Exit
from trainer.contract.paths import working_folder
from trainer.contract.runs.card_figures import CardFigure, figures_of
from trainer.contract.settings.job import JobConfig
from trainer.contract.settings.job_file import job_of

TAG = "diff"
# The default number of tokens. A text file may have fewer: it has at least one token per `_BYTES_PER_TOKEN` bytes, of
# which some are held out or sampled.
TOKENS = 100_000_000
_BYTES_PER_TOKEN = 8
# The default number of latents per dimension of both models together.
_EXPANSION = 8.0
# The flags that set these settings.
_FLAGS = {
    "data.hook": "--hook", "data.text": "--text", "data.dataset": "--dataset", "sae.k": "--k", "sae.d_sae": "--d-sae",
    "train.n_tokens": "--tokens", "name": "--name", "data.model": "MODEL", "data.revision": "MODEL",
}  # fmt: skip
# The group of the figures of a crosscoder's parts on a report card.
_PARTS = "parts"


def diff(context: CommandContext, flags: argparse.Namespace) -> int:
    """Train a crosscoder on both models, evaluate it, and print its figures."""
    job = diff_job(flags)
    if flags.dry_run:
        return print_job_file(context, job)
    options = argparse.Namespace(**vars(flags) | {"tag": [TAG, *flags.tag], "wait": False, "hold": False})
    if flags.detach:
        return launch_all(context, options, [job])
    (job_id,), _ = record_all(context, options, [job])
    if not context.as_json:
        warn(f"job {job_id} trains the crosscoder; Ctrl-C leaves it running, and `sae-tui job {job_id}` shows it")
    view = wait_until_ended(context, job_id)
    code, message = EXITS[view.state], ""
    if not code:
        went_well, message = evaluated(context, _evaluation_flags(job_id))
        code = Exit.DONE if went_well else Exit.FAILED
    figures = _figures(context, job_id)
    if context.as_json:
        show_json(_as_json(view, figures))
    elif not EXITS[view.state]:
        _show(job_id, flags, figures)
    if code and message:
        warn(message)
    return code


def diff_job(flags: argparse.Namespace) -> JobConfig:
    """Return the job that trains the crosscoder; raise `JobFileError` with all problems in the flags."""
    versions = [_model_and_revision(model) for model in (flags.model_a, flags.model_b)]
    data: dict[str, Any] = {"source": "model", "model": [model for model, _ in versions], "hook": flags.hook}
    if any(revisions := [revision for _, revision in versions]):
        data["revision"] = [revision or "main" for revision in revisions]
    data["text" if flags.text else "dataset"] = flags.text or flags.dataset
    sae: dict[str, Any] = {"architecture": "batch_topk", "k": flags.k}
    sae |= {"d_sae": flags.d_sae} if flags.d_sae else {"expansion_factor": _EXPANSION}
    name = flags.name or f"{_short(flags.model_a)} vs {_short(flags.model_b)}"[:LONGEST_NAME]
    table = {"name": name, "data": data, "sae": sae, "train": {"n_tokens": flags.tokens or _tokens_in(flags.text)}}
    try:
        job = job_of(table, overrides_of(flags.overrides, flags.gpus), [working_folder()])
        whole = job.with_paths([working_folder()])
        whole.data_shape()
    except JobFileError as error:
        problems = [replace(one, path=_FLAGS.get(one.path, one.path)) for one in error.problems]
        raise JobFileError(problems, is_usage=True) from None
    if whole.sweep:
        raise JobFileError(
            [Problem("--set", "gives several SAEs, but diff trains one; launch them with --dry-run's file")]
        )
    return whole


def _short(model: str) -> str:
    return Path(model).name or model


def _model_and_revision(given: str) -> tuple[str, str]:
    """Split MODEL@REVISION; the path of a local model may contain an @."""
    model, _, revision = (given, "", "") if os.path.exists(os.path.expanduser(given)) else given.partition("@")
    return model, revision


def _tokens_in(text: str | None) -> int:
    """Return `TOKENS` or, for a smaller text file, a number of tokens that the file has for certain."""
    try:
        size = os.path.getsize(os.path.expanduser(text)) if text and os.path.isfile(os.path.expanduser(text)) else None
    except OSError:
        size = None
    return TOKENS if size is None else max(1, min(TOKENS, size // _BYTES_PER_TOKEN))


def _evaluation_flags(job_id: int) -> argparse.Namespace:
    """Return the flags of `sae-tui eval ID --wait`, which finds the texts on which each latent fires."""
    arguments = ["eval", str(job_id), "--wait"]
    return make_parser(diff, arguments).parse_args(arguments)


def _figures(context: CommandContext, job_id: int) -> list[CardFigure]:
    """Return the figures on the crosscoder's report card; empty if there is no report card."""
    card = next(iter(whole_cards(context.data.sae(job_id)).values()), None)
    return [] if card is None else figures_of(card)


def _as_json(view: JobView, figures: list[CardFigure]) -> dict[str, Any]:
    """Return the answer to `--json`."""
    values = {one.name: one.value for one in figures}
    return {
        "id": view.id,
        "state": view.state.value,
        "output_path": view.output_path,
        "error": view.error,
        "fvu": values.get("fvu"),
        "l0": values.get("l0"),
        "parts": {one.name: one.value for one in figures if one.group == _PARTS},
    }


def _show(job_id: int, flags: argparse.Namespace, figures: list[CardFigure]) -> None:
    say(f"A is {flags.model_a}, B is {flags.model_b}")
    shown = [one for one in figures if one.group == _PARTS or one.name in ("fvu", "l0")]
    if shown:
        show_table(("FIGURE", "VALUE"), [(one.series.title, one.text) for one in shown])
    say(f"`sae-tui features {job_id} --sort norm` lists the latents that write most in B first")
    say(f"`sae-tui features {job_id} --search part:B` lists the latents that write only in B")
    say(f"in the app, open job {job_id}, press f for its latents, and search for part:B")
