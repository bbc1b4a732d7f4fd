"""`sae-tui features | annotate`: shows an SAE's latents with max-activating examples, and writes notes on them."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from msgspec.structs import replace

from sae_tui.cli_commands import cards, interaction
from sae_tui.cli_commands.context import CommandContext
from sae_tui.cli_commands.output import say, show_json, show_table, warn
from sae_tui.cli_commands.selection import bad_usage
from sae_tui.cli_commands.values import job_id_in
from sae_tui.jobs.evaluation.outcome import NO_TOKENS
from sae_tui.jobs.features import (
    STAR,
    Found,
    counts,
    effect_words,
    family_words,
    features_in,
    features_of_job,
    has_features,
    in_row,
    in_words,
    label_lines,
    own_title,
    part_lines,
    search,
    stability_words,
    strongest_tokens,
    where_else,
)
from sae_tui.jobs.output import may_tell_tokens, why_no_sae
from sae_tui.jobs.store_access import existing
from sae_tui.jobs.watched import cells_of, rows_of
from trainer.contract.errors import UserError
from trainer.contract.exits import Exit
from trainer.contract.output import has_done
from trainer.contract.printable import on_one_line
from trainer.contract.runs.crosscoder import letter
from trainer.contract.runs.features import NO_EFFECTS, NO_PARTS, NO_STABILITY, Feature, Features, is_filter
from trainer.contract.runs.latent_notes import LatentNote, change_note
from trainer.contract.runs.watched import read_watched
from trainer.contract.wording import bars

# The flags of `annotate` that change a note, and their values for an empty note.
_EMPTY = {"starred": False, "name": "", "note": ""}


def features(context: CommandContext, flags: argparse.Namespace) -> int:
    """Print one latent with its max-activating examples, or a list of latents in the requested order.

    With `--text`, print the latents that fire on a text instead. With `--watched`, print the snapshots taken in
    training.
    """
    interaction.refuse_contradictions(flags)
    if flags.watched:
        return _show_watched(context, flags)
    if flags.text is not None:
        return interaction.read_text(context, flags)
    read = _open(context, flags)
    if flags.sort == "stable" and not read.has_stability:
        raise UserError(f"--sort: {NO_STABILITY}")
    if flags.sort == "effect" and not read.has_effects:
        raise UserError(f"--sort: {NO_EFFECTS}")
    if flags.sort == "norm" and not read.has_parts:
        raise UserError(f"--sort: {NO_PARTS}")
    if flags.latent is not None:
        feature = read.feature(flags.latent)
        if context.as_json:
            show_json(feature)
        else:
            _show(feature, read)
        return Exit.DONE
    found = Found([], read.order(flags.sort), []) if flags.search is None else search(read, flags.search)
    latents = [*found.noted, *found.firing, *found.others]
    shown = [read.feature(latent) for latent in latents[: flags.limit]]
    if context.as_json:
        show_json(shown)
        return Exit.DONE
    say(f"{read.n_latents:,} latents on {read.n_rows:,} rows: {counts(read)}")
    if flags.search is None or is_filter(flags.search):
        _list(shown)
    else:
        titles = ("in your notes", "fire on the words", f"only {where_else(read)}")
        for title, some in zip(titles, found, strict=True):
            if some or title != titles[0]:
                say(f"{title}: {len(some):,}")
                _list([one for one in shown if one.latent in some])
    if len(shown) < len(latents):
        say(f"{len(latents) - len(shown):,} more; show them with --limit N")
    return Exit.DONE


def _show_watched(context: CommandContext, flags: argparse.Namespace) -> int:
    """Print the snapshots of watched latents, or the ones of a single latent with its examples."""
    job_id = job_id_in(flags.run)
    run = Path(os.path.expanduser(flags.run))
    if job_id is not None:
        with existing(context.data, job_id) as control:
            control.job(job_id)
        run = context.data.run(job_id).root
    snapshots = read_watched(run)
    if not snapshots:
        raise UserError(f"{flags.run}: no snapshots of latents are stored; train.watch_latents stores some")
    labels = list(dict.fromkeys(one.label for one in snapshots))
    if flags.sae is not None and flags.sae not in labels:
        raise UserError(f"--sae: give one of {', '.join(labels)}" if labels != [""] else "--sae: leave it out")
    rows = rows_of([one for one in snapshots if flags.sae in (None, one.label)])
    rows = [one for one in rows if flags.latent in (None, one.latent)]
    if flags.latent is not None and not rows:
        raise UserError(f"LATENT: latent {flags.latent} was not watched")
    if context.as_json:
        show_json(rows)
        return Exit.DONE
    if flags.latent is None:
        heading = ("STEP", *["SAE"] * (len(labels) > 1), "LATENT", "WHY", "DENSITY", "COSINE", "FIRES ON")
        show_table(
            heading,
            (
                (one.step, *[one.sae] * (len(labels) > 1), *cells_of(one), strongest_tokens(one.contexts))
                for one in rows
            ),
        )
        return Exit.DONE
    for one in rows:
        _, why, density, cosine = cells_of(one)
        of_sae = f" {one.sae}" if one.sae else ""
        say(f"step {one.step}{of_sae}: {why}, density {density}, cosine {cosine or '?'}")
        for example in one.contexts:
            say(f"{example.act:8.2f}  {in_words(example)}")
    return Exit.DONE


def annotate(context: CommandContext, flags: argparse.Namespace) -> int:
    """Change or print the note on a latent, or print the notes on all latents."""
    read = _open(context, flags)
    changes = {name: getattr(flags, name) for name in _EMPTY if getattr(flags, name) is not None}
    changes = _EMPTY | changes if flags.clear else changes
    if flags.latent is None:
        if changes:
            raise bad_usage("LATENT: is missing", "name the latent, as in `annotate 7 1234 --star`")
        return _show_notes(context, [read.notes.by_latent[latent] for latent in sorted(read.notes.by_latent)])
    read.feature(flags.latent)  # refuses a latent that does not exist
    if not changes:
        return _show_note(context, read.notes.by_latent.get(flags.latent, LatentNote(flags.latent)))
    changed = change_note(read.folder, flags.latent, lambda note: replace(note, **changes), read.weights)
    has_done(f"the note on latent {flags.latent} is written")
    return _show_note(context, changed.after)


def _show_notes(context: CommandContext, notes: Sequence[LatentNote]) -> int:
    if context.as_json:
        show_json(notes)
    elif notes:
        show_table(
            ("LATENT", "STAR", "NAME", "NOTE"),
            ((one.latent, STAR * one.starred, on_one_line(one.name), on_one_line(one.note)) for one in notes),
        )
    else:
        say("no latent has a note; `sae-tui annotate RUN LATENT --star` stars one")
    return Exit.DONE


def _show_note(context: CommandContext, note: LatentNote) -> int:
    if context.as_json:
        show_json(note)
        return Exit.DONE
    words = " · ".join(filter(None, [on_one_line(note.name), on_one_line(note.note)]))
    star = f"{STAR} " * note.starred
    say(f"{star}latent {note.latent}: {words or ('starred' if note.starred else 'no note')}")
    return Exit.DONE


def _open(context: CommandContext, flags: argparse.Namespace) -> Features:
    read = Features(chosen_file(context, flags))
    if read.notes.problem:
        warn(read.notes.problem)
    return read


def chosen_file(context: CommandContext, flags: argparse.Namespace) -> Path:
    """Return the feature file for the requested SAE; raise `UserError` if it is missing or the choice is ambiguous."""
    job_id = job_id_in(flags.run)
    if job_id is not None:
        with existing(context.data, job_id) as control:
            job = control.job(job_id)
        if words := why_no_sae(job):
            raise UserError(words)
        if not has_features(context.data, job_id) and not may_tell_tokens(job.config):
            raise UserError(f"job {job_id}: {NO_TOKENS}")
        number = getattr(flags, "card", None)
        files = _of_card(context, job_id, number) if number else features_of_job(context.data, job_id)
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
        more = ["EFFECT"] if shown[0].effect is not None else []
        more += [f"IN {letter(number)}" for number in range(len(shown[0].parts))]
        has_notes = any(one.starred or own_title(one) for one in shown)
        names = ["STAR", "NAME"] if has_notes else []
        headings = ("LATENT", "DENSITY", "LARGEST", *more, *names, "FIRES ON")
        show_table(headings, (_cells(one, has_notes=has_notes) for one in shown))


def _cells(one: Feature, *, has_notes: bool) -> tuple[object, ...]:
    more = [f"{one.effect:+.1e}"] if one.effect is not None else []
    more += [f"{part.share:.2f}" for part in one.parts]
    own = [STAR * one.starred, own_title(one)] if has_notes else []
    return one.latent, f"{one.density:.3%}", f"{one.largest:.2f}", *more, *own, strongest_tokens(one.contexts)


def _show(feature: Feature, read: Features) -> None:
    share = f"{feature.density:.3%} of {read.n_rows:,} rows{family_words(feature)}"
    star = f"{STAR} " * feature.starred
    say(f"{star}latent {feature.latent} of {read.n_latents:,}: fires on {share}, at most {feature.largest:.2f}, "
        f"{feature.mean:.2f} on average")  # fmt: skip
    for title, words in label_lines(feature):
        say(f"{title.lower():<11}  {on_one_line(words)}")
    if words := stability_words(feature):
        say(f"stability    {words}")
    if words := effect_words(feature):
        say(f"effect       {words}")
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
