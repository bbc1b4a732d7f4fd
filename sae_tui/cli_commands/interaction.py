"""`sae-tui features --text` and `sae-tui steer`: read a text with an SAE, and steer its language model."""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import sys
import textwrap
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from msgspec.structs import asdict

from sae_tui.cli_commands.context import CommandContext
from sae_tui.cli_commands.output import cells_of, chopped, pad, say, show_json, show_table
from sae_tui.cli_commands.values import job_id_in
from sae_tui.jobs.evaluation.request import ReservedGpu, idle_gpu, python_of
from sae_tui.jobs.features import readable
from sae_tui.jobs.interaction import Interaction
from sae_tui.jobs.output import why_no_sae
from sae_tui.jobs.store_access import existing
from trainer.contract.answers.interaction import (
    Continued,
    Generate,
    Generated,
    ReadText,
    Steered,
    TextRead,
    TextToken,
)
from trainer.contract.errors import UsageError, UserError
from trainer.contract.exits import Exit
from trainer.contract.output import show_text
from trainer.contract.printable import MARK, printable
from trainer.contract.progress import Progress

# The number of latents listed for a token, and of characters of a bar.
MOST_LATENTS, _BAR = 10, 24


def read_text(context: CommandContext, flags: argparse.Namespace) -> int:
    """Print a text's tokens with the strongest latents of each or, with a latent, its activation on each token."""
    with _started(context, flags) as interaction:
        if flags.latent is not None and flags.latent >= (n := interaction.n_latents):
            raise UserError(f"LATENT: latent {flags.latent} does not exist; the SAE has latents 0 to {n - 1:,}")
        (answer,) = interaction.ask(ReadText(flags.text, flags.chat, () if flags.latent is None else (flags.latent,)))
    assert isinstance(answer, TextRead)
    if context.as_json:
        show_json(asdict(answer))
    elif flags.latent is None:
        _show_strongest(answer.tokens)
    else:
        _show_latent(answer.tokens, flags.latent)
    if not context.as_json and any(not one.is_counted for one in answer.tokens):
        say("(…) first and special tokens: SAEs are not trained on them, and their activations mean little")
    return Exit.DONE


def steer(context: CommandContext, flags: argparse.Namespace) -> int:
    """Continue a prompt with and without steering, and print both with the effect on predictions."""
    strength = 0.0 if flags.ablate else flags.strength
    request = Generate(
        flags.prompt, tuple(Steered(latent, strength) for latent in flags.latents), is_chat=flags.chat, adds=flags.add,
        only_generated=flags.only_generated, n_tokens=flags.tokens, temperature=flags.temperature, seed=flags.seed,
        part=flags.part,
    )  # fmt: skip
    with _started(context, flags) as interaction:
        done = _generated(interaction, request)
    if context.as_json:
        show_json(asdict(done))
        return Exit.DONE
    for line in _side_by_side(done.plain, done.steered, shutil.get_terminal_size().columns):
        say(line)
    say()
    _show_effect(done, request)
    return Exit.DONE


def refuse_contradictions(flags: argparse.Namespace) -> None:
    """Raise `UsageError` if a flag of `sae-tui features` is given that needs, or excludes, another one."""
    for flag, is_given in {"--chat": flags.chat, "--model": flags.model is not None, "--cpu": flags.cpu}.items():
        if is_given and flags.text is None:
            raise UsageError(f"{flag}: needs --text; add --text, or leave out {flag}")
    for flag, is_given in {"--search": flags.search is not None, "--card": flags.card is not None}.items():
        if is_given and flags.text is not None:
            raise UsageError(f"{flag}: cannot be combined with --text; leave one of them out")
        if is_given and flags.watched:
            raise UsageError(f"{flag}: cannot be combined with --watched; leave one of them out")
    if flags.watched and flags.text is not None:
        raise UsageError("--text: cannot be combined with --watched; leave one of them out")


@contextlib.contextmanager
def _started(context: CommandContext, flags: argparse.Namespace) -> Iterator[Interaction]:
    """Load the requested SAE and its language model, and show the progress."""
    place = place_of_sae(context, flags.run, flags.sae, on_cpu=flags.cpu)
    with Interaction(*place, flags.model) as interaction:
        with Progress("starting", to_descriptor=False) as progress:
            interaction.start(progress.reach)
        yield interaction


class Place(NamedTuple):
    """An SAE's folder, the Python interpreter that reads it, and a free GPU, or None to use the CPU."""

    folder: Path
    python: str = ""
    gpu: ReservedGpu | None = None


def place_of_sae(context: CommandContext, run: str, label: str | None, *, on_cpu: bool) -> Place:
    """Return where an SAE is, and what runs it.

    `run` is the id of a job, or a folder. Raise `UserError` if there is no such SAE.
    """
    job_id = job_id_in(run)
    if job_id is None:
        folder = Path(os.path.abspath(os.path.expanduser(run)))
        return Place(_of_label(folder / "sae" if (folder / "sae").is_dir() else folder, label))
    with existing(context.data, job_id) as control:
        job = control.job(job_id)
    if words := why_no_sae(job):
        raise UserError(words)
    is_offered = job.device == "cuda" and not on_cpu
    gpu = idle_gpu(context.data, job, context.gpus.choices, context.gpus.source_name) if is_offered else None
    return Place(_of_label(context.data.sae(job_id), label), python_of(context.data, job_id), gpu)


def _of_label(folder: Path, label: str | None) -> Path:
    """Return the folder of one of the exported SAEs in a folder; raise `UserError` if it is missing or ambiguous."""
    if (folder / "cfg.json").exists():
        if label:
            raise UserError("--sae: the run has only one SAE; leave --sae out")
        return folder
    labels = sorted(one.parent.name for one in folder.glob("*/cfg.json"))
    if not labels:
        raise UserError(f"{folder} has no exported SAE; export one as SAELens first")
    if label in labels:
        return folder / label
    if label is None and len(labels) == 1:
        return folder / labels[0]
    names = ", ".join(f'"{one}"' for one in labels)
    raise UserError(f"--sae: give one of {names}")


def _shown(token: TextToken) -> str:
    """Return a token as text; a space at its start or end stays visible, and text without width is shown as a mark."""
    whole = readable(token.text).replace(" ", "·") if token.text.strip(" ") == "" else readable(token.text)
    whole = printable(whole) if cells_of(whole) else MARK
    return whole if token.is_counted else f"({whole})"


def _show_strongest(tokens: Sequence[TextToken]) -> None:
    names = [_shown(token) for token in tokens]
    width = max(map(cells_of, ["TOKEN", *names]))
    say(f"{'TOKEN':{width}}  STRONGEST LATENTS (ACTIVATION)")
    for name, token in zip(names, tokens, strict=True):
        latents = "  ".join(f"{one.latent} ({one.act:.2f})" for one in token.latents[:MOST_LATENTS])
        say(f"{pad(name, width)}  {latents}")


def _show_latent(tokens: Sequence[TextToken], latent: int) -> None:
    """Print a latent's activation on each token, with a bar relative to its largest one on counted tokens."""
    acts = [next((one.act for one in token.latents if one.latent == latent), 0.0) for token in tokens]
    largest = max((act for act, token in zip(acts, tokens, strict=True) if token.is_counted), default=0.0)
    for act, token in zip(acts, tokens, strict=True):
        share = min(1.0, act / largest) if largest and token.is_counted else 0.0
        say(f"{act:9.2f}  {'█' * round(_BAR * share):{_BAR}}  {_shown(token)}".rstrip())
    if not largest:
        say(f"latent {latent} does not fire on this text")


def _generated(interaction: Interaction, request: Generate) -> Generated:
    """Return both continuations; show them on a terminal while they are generated. Ctrl+C ends them early."""
    live = _LiveColumns()
    with _stopped_by_ctrl_c(interaction):
        for answer in interaction.ask(request):
            if isinstance(answer, Continued):
                live.show(answer.plain, answer.steered)
    live.clear()
    assert isinstance(answer, Generated)
    return answer


@contextlib.contextmanager
def _stopped_by_ctrl_c(interaction: Interaction) -> Iterator[None]:
    """Within the context, Ctrl+C ends the generation, whose last answer still comes."""
    # The interrupted thread may hold the lock that `stop` needs.
    kept = signal.signal(signal.SIGINT, lambda *_: threading.Thread(target=interaction.stop, daemon=True).start())
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, kept)


class _LiveColumns:
    """Two texts next to each other at the end of the terminal, redrawn in place; nothing in a pipe."""

    def __init__(self) -> None:
        self._is_terminal = sys.stdout.isatty()
        self._n_lines = 0

    def show(self, plain: str, steered: str) -> None:
        if self._is_terminal:
            size = shutil.get_terminal_size()
            self.clear()
            # The last lines are the ones that change.
            lines = _side_by_side(plain, steered, size.columns - 1)[-(size.lines - 2) :]
            show_text("".join(f"{printable(line)}\n" for line in lines))
            self._n_lines = len(lines)

    def clear(self) -> None:
        if self._n_lines:
            show_text(f"\x1b[{self._n_lines}F\x1b[J")
            self._n_lines = 0


def _side_by_side(plain: str, steered: str, width: int) -> list[str]:
    """Return lines with two texts in columns of half the width."""
    space = max(20, (width - 3) // 2)
    columns = [_wrapped(one, space) for one in (plain, steered)]
    n = max(map(len, columns))
    left, right = (column + [""] * (n - len(column)) for column in columns)
    lines = [f"{'WITHOUT STEERING':{space}} │ STEERED"]
    return lines + [f"{pad(one, space)} │ {other}".rstrip() for one, other in zip(left, right, strict=True)]


def _wrapped(continuation: str, width: int) -> list[str]:
    lines = [textwrap.wrap(printable(line), width, drop_whitespace=False) or [""] for line in continuation.split("\n")]
    # Wide characters take two cells.
    return [part for some in lines for line in some for part in chopped(line, width)]


def _show_effect(done: Generated, request: Generate) -> None:
    """Print the tokens whose logits moved most, and the KL divergence after each token."""
    if done.moved:
        rows = [
            (readable(one.text), f"{one.logit:+.2f}", f"{one.plain:.1%}", f"{one.steered:.1%}") for one in done.moved
        ]
        show_table(("NEXT TOKEN", "LOGIT", "WITHOUT", "STEERED"), rows)
        say()
    kls = [one.kl for one in done.kl]
    most = done.kl[max(range(len(kls)), key=kls.__getitem__)]
    where = f"most after {readable(most.text).strip() or repr(most.text)} ({most.kl:.3f})"
    say(f"KL divergence {sum(kls) / len(kls):.3f} nats on average over {len(kls)} tokens, {where}")
    seed = f"temperature {request.temperature:g}, seed {request.seed}" if request.temperature else "temperature 0"
    say(f"{done.n_tokens} tokens, {seed}")
