"""`sae-tui features`: shows an SAE's latents with max-activating examples."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from sae_tui.cli_commands import cards, interaction
from sae_tui.cli_commands.context import CommandContext
from sae_tui.cli_commands.output import say, show_json, show_table
from sae_tui.cli_commands.values import job_id_in
from sae_tui.jobs.evaluation.outcome import NO_TOKENS
from sae_tui.jobs.features import (
    counts,
    family_words,
    features_in,
    features_of_job,
    has_features,
    in_row,
    in_words,
    part_lines,
    search,
    stability_words,
    strongest_tokens,
)
from sae_tui.jobs.output import may_tell_tokens, why_no_sae
from sae_tui.jobs.store_access import existing
from trainer.contract.errors import UserError
from trainer.contract.exits import Exit
from trainer.contract.runs.crosscoder import letter
from trainer.contract.runs.features import NO_PARTS, NO_STABILITY, Feature, Features, is_filter
from trainer.contract.wording import bars


def features(context: CommandContext, flags: argparse.Namespace) -> int:
    """Print one latent with its max-activating examples, or a list of latents in the requested order.

    With `--text`, print the latents that fire on a text instead.
    """
    interaction.refuse_contradictions(flags)
    if flags.text is not None:
        return interaction.read_text(context, flags)
    read = Features(_file(context, flags))
    if flags.sort == "stable" and not read.has_stability:
        raise UserError(f"--sort: {NO_STABILITY}")
    if flags.sort == "norm" and not read.has_parts:
        raise UserError(f"--sort: {NO_PARTS}")
    if flags.latent is not None:
        feature = read.feature(flags.latent)
        if context.as_json:
            show_json(feature)
        else:
            _show(feature, read)
        return Exit.DONE
    firing, others = (read.order(flags.sort), []) if flags.search is None else search(read, flags.search)
    latents = [*firing, *others]
    shown = [read.feature(latent) for latent in latents[: flags.limit]]
    if context.as_json:
        show_json(shown)
        return Exit.DONE
    say(f"{read.n_latents:,} latents on {read.n_rows:,} rows: {counts(read)}")
    if flags.search is None or is_filter(flags.search):
        _list(shown)
    else:
        say(f"fire on the words: {len(firing):,}")
        _list(shown[: len(firing)])
        say(f"only in their texts: {len(others):,}")
        _list(shown[len(firing) :])
    if len(shown) < len(latents):
        say(f"{len(latents) - len(shown):,} more; show them with --limit N")
    return Exit.DONE


def _file(context: CommandContext, flags: argparse.Namespace) -> Path:
    """Return the feature file for the requested SAE; raise `UserError` if it is missing or the choice is ambiguous."""
    job_id = job_id_in(flags.run)
    if job_id is not None:
        with existing(context.data, job_id) as control:
            job = control.job(job_id)
        if words := why_no_sae(job):
            raise UserError(words)
        if not has_features(context.data, job_id) and not may_tell_tokens(job.config):
            raise UserError(f"job {job_id}: {NO_TOKENS}")
        files = _of_card(context, job_id, flags.card) if flags.card else features_of_job(context.data, job_id)
    else:
        files = features_in(Path(os.path.expanduser(flags.run)))
    if flags.sae is None and len(files) == 1:
        return next(iter(files.values()))
    if flags.sae not in files:
        labels = ", ".join(f'"{label}"' for label in files)
        raise UserError(
            f"--sae: give one of {labels}" if len(files) > 1 else "--sae: the run has only one SAE; leave --sae out"
        )
    return files[flags.sae]


def _of_card(context: CommandContext, job_id: int, number: int) -> dict[str, Path]:
    if files := cards.features_of(context, job_id, number):
        return files
    raise UserError(f"--card: report card {number} has no stored max-activating examples; leave --card out")


def _list(shown: Sequence[Feature]) -> None:
    if shown:
        parts = [f"IN {letter(number)}" for number in range(len(shown[0].parts))]
        show_table(("LATENT", "DENSITY", "LARGEST", *parts, "FIRES ON"), map(_cells, shown))


def _cells(one: Feature) -> tuple[object, ...]:
    shares = [f"{part.share:.2f}" for part in one.parts]
    return one.latent, f"{one.density:.3%}", f"{one.largest:.2f}", *shares, strongest_tokens(one)


def _show(feature: Feature, read: Features) -> None:
    share = f"{feature.density:.3%} of {read.n_rows:,} rows{family_words(feature)}"
    say(f"latent {feature.latent} of {read.n_latents:,}: fires on {share}, at most {feature.largest:.2f}, "
        f"{feature.mean:.2f} on average")  # fmt: skip
    if words := stability_words(feature):
        say(f"stability    {words}")
    for title, words in part_lines(feature):
        say(f"{title.lower():<11}  {words}")
    if feature.density:
        say(f"activations  0 {bars(feature.histogram)} {feature.largest:.2f}")
    say("nearest      " + ", ".join(f"{latent} ({cosine:.2f})" for latent, cosine in feature.nearest))
    for name, moved in (("promotes", feature.promoted), ("suppresses", feature.suppressed)):
        if moved:
            say(f"{name:<11}  {in_row(moved)}")
    for one in feature.contexts:
        say(f"{one.act:8.2f}  {in_words(one)}")
