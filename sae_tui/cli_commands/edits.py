"""Commands that change existing jobs.

`sae-tui pause | resume | clone | hold | release | priority | after | rename | tag | note | rm | repair`.
"""

from __future__ import annotations

import argparse
import functools
import json
import re
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from sae_tui.cli_commands.context import CommandContext
from sae_tui.cli_commands.job_files import consent_of, overrides_of
from sae_tui.cli_commands.launching import launch_all, resolve_placement
from sae_tui.cli_commands.output import say, show_json, warn
from sae_tui.cli_commands.selection import (
    bad_usage,
    change,
    confirm,
    named_jobs,
    refuse_without_terminal,
    report,
    select,
    tell,
)
from sae_tui.cli_commands.values import Selector, selector, selector_in
from sae_tui.cli_commands.waiting import wait_for
from sae_tui.jobs import edits, store_access
from sae_tui.jobs.asking import stored_with
from sae_tui.jobs.bulk import Change, NothingToDo, attempt, unless_ended
from sae_tui.jobs.gpus.occupancy import name_elsewhere
from sae_tui.jobs.launch.clone import clone_settings, free_name
from sae_tui.jobs.launch.from_mirror import job_from_mirror
from sae_tui.jobs.launch.resume import resume as resumed
from sae_tui.jobs.queue.after import waiting_for
from sae_tui.jobs.upkeep import trash
from sae_tui.jobs.upkeep.repair import repair as repaired
from trainer.contract.errors import UserError
from trainer.contract.exits import Exit
from trainer.contract.output import has_done, show_text
from trainer.contract.paths import DataDir
from trainer.contract.progress import Progress, track
from trainer.contract.settings.consent import sets
from trainer.contract.settings.job import AnyJob
from trainer.contract.settings.job_file import load_job
from trainer.contract.settings.toml import read_plain_text
from trainer.contract.settings.typed import cut
from trainer.contract.store.job_store import Control
from trainer.contract.wording import gibibytes


def resume(context: CommandContext, flags: argparse.Namespace) -> int:
    """Resume ended or paused jobs from their last good checkpoints; with `--wait`, wait until they end."""
    if urls := [one for one in flags.ids if isinstance(one, str)]:
        if len(flags.ids) > 1:
            raise bad_usage("the URL of a mirror cannot be combined with other jobs", "give only the URL")
        return _resume_from_mirror(context, flags, urls[0])
    chosen = select(context, flags.ids)
    if chosen.is_single:
        return _resume_one(context, flags, chosen.ids[0])
    with Progress("resume", to_descriptor=False):
        outcomes = [
            attempt(job_id, lambda one: _resume(context, flags, one).with_notes) for job_id in track(chosen.ids, "jobs")
        ]
    resumed_ids = [one.id for one in outcomes if one.outcome == "done"]
    if not (flags.wait and resumed_ids):
        return report(context, outcomes, "resumed")
    left = [one for one in outcomes if one.outcome != "done"]
    for one in left:
        warn(f"{one.outcome}: {one.message}")
    return max(wait_for(context, *resumed_ids, began="is resumed"), Exit.FAILED if left else Exit.DONE)


def _resume_from_mirror(context: CommandContext, flags: argparse.Namespace, url: str) -> int:
    """Download a job that another machine has mirrored, and resume it here; a finished job is only downloaded."""
    source = name_elsewhere(context.gpus.source_name, len(context.gpus.choices))
    consent, python = consent_of(context, flags).given(flags.overrides), context.settings.python
    with Progress("downloading", to_descriptor=False) as progress:
        job_id, fetched = job_from_mirror(
            context.data, url, consent, gpu_source=source, python=python, on_reached=progress.reach
        )
    downloaded = f"job {job_id} was downloaded from {url} at step {fetched.step:,}"
    has_done(downloaded)
    for note in fetched.notes:
        warn(f"warning: {note}")
    if fetched.has_sae and not sets(flags.overrides, "train.n_steps", "train.n_tokens"):
        return tell(context, job_id, f"{downloaded}; it has finished")
    # The job's GPUs are on another machine, so choose them again, as at a launch.
    here = load_job(context.data.run(job_id).job_file, read=read_plain_text)
    flags.overrides = [f"launch.gpus={json.dumps(here.launch.gpus)}", *flags.overrides]
    flags.overrides += [f"launch.python={python}"] if python and not sets(flags.overrides, "launch.python") else []
    try:
        return _resume_one(context, flags, job_id)
    except UserError:
        warn(f"{downloaded}, but could not be resumed; `sae-tui resume {job_id}` tries again")
        raise


class _Resumed(NamedTuple):
    """The outcome for a job: a message, a phrase for how the job began, the step, and notes on changed settings.

    The step is None for a released job, and for a command, which starts over.
    """

    message: str
    began: str
    step: int | None = None
    notes: Sequence[str] = ()
    is_released: bool = False

    @property
    def with_notes(self) -> str:
        return "; ".join([self.message, *self.notes])


def _resume(context: CommandContext, flags: argparse.Namespace, job_id: int) -> _Resumed:
    """Release a held job, or resume an ended job."""
    overrides = overrides_of(flags.overrides, flags.gpus)
    if not overrides and (message := _release_if_held(context, job_id, finish=flags.finish)):
        return _Resumed(message, "is released", is_released=True)
    plan = resumed(context.data, job_id, functools.partial(resolve_placement, context), overrides, finish=flags.finish)
    step = None if plan.counts == "attempt" else plan.step
    return _Resumed(f"job {job_id} {plan.sentence}", plan.sentence, step, plan.notes)


def _resume_one(context: CommandContext, flags: argparse.Namespace, job_id: int) -> int:
    done = _resume(context, flags, job_id)
    has_done(done.message)
    for note in done.notes:
        warn(f"warning: {note}")
    if flags.wait:
        return wait_for(context, job_id, began=done.began)
    if done.is_released:
        return tell(context, job_id, done.message)
    if context.as_json:
        show_json({"id": job_id, "step": done.step, "notes": done.notes})
    else:
        cools = ", cools down" if flags.finish else ""
        say(f"{done.message}{cools}; `sae-tui logs {job_id} -f` follows it")
    return Exit.DONE


def _release_if_held(context: CommandContext, job_id: int, *, finish: bool) -> str:
    """Release a held or paused job and return a message, or "" for any other job."""
    with store_access.existing(context.data, job_id) as control:
        job = control.job(job_id)
        if not job.held or job.state.is_final:
            return ""
        if not finish:
            return edits.release(context.data, control, job_id)
        return f"{edits.release_to_finish(context.data, control, job_id)} and then cools down"


def clone(context: CommandContext, flags: argparse.Namespace) -> int:
    """Launch a job with another job's settings and some changes; with `--print`, print the job file instead."""
    job = clone_settings(context.data, flags.id, overrides_of(flags.overrides, flags.gpus))
    if flags.print:
        return print_job_file(context, job)
    if not sets(flags.overrides, "name"):
        with store_access.existing(context.data, flags.id) as control:
            job = msgspec.structs.replace(job, name=free_name(job.name, (one.name for one in control.jobs())))
    return launch_all(context, flags, [job], parent=flags.id)


def print_job_file(context: CommandContext, job: AnyJob) -> int:
    """Print the file with which the same job can be launched again."""
    from trainer.contract.settings.job_file import dump_job, to_table

    if context.as_json:
        show_json({"job_file": dump_job(job), "settings": to_table(job)})
    else:
        show_text(dump_job(job))
    return Exit.DONE


def pause(context: CommandContext, flags: argparse.Namespace) -> int:
    return change(context, select(context, flags.ids), unless_ended(edits.pause), "paused")


def hold(context: CommandContext, flags: argparse.Namespace) -> int:
    return change(context, select(context, flags.ids), edits.hold, "held")


def release(context: CommandContext, flags: argparse.Namespace) -> int:
    return change(context, select(context, flags.ids), _release_held, "released")


def _release_held(data: DataDir, control: Control, job_id: int) -> str:
    is_held = control.job(job_id).held or "pause" in control.open_requests(job_id)
    message = edits.release(data, control, job_id)
    if not is_held:
        raise NothingToDo(message)
    return message


def prioritise(context: CommandContext, flags: argparse.Namespace) -> int:
    """Set the priority given with `--to` or, after a single id, as the last argument."""
    words, priority = flags.ids, flags.to
    if priority is None:
        priority = _last_number(words)
        words = words[:1]
    if priority not in edits.PRIORITIES:
        name = "N" if flags.to is None else "--to"
        raise bad_usage(f"{name}: {priority} is out of range", "give a priority from -100 to 100")
    selectors = [_selector(word) for word in words]
    return change(
        context,
        select(context, selectors),
        lambda data, control, job_id: edits.prioritise(data, control, job_id, priority),
        f"with priority {priority}",
    )


def _last_number(words: Sequence[str]) -> int:
    """Return the priority in `priority ID N`; raise `BadUsage` for any other arguments."""
    if len(words) == 1:
        raise bad_usage("N: the priority is missing", "write `priority 7 5` or `priority 3-9 12 --to 5`")
    if len(words) > 2 or not _selector(words[0]).is_id:
        raise bad_usage("--to: the priority for several jobs is missing", "write it as in `priority 3-9 12 --to 5`")
    if not re.fullmatch(r"[+-]?\d{1,9}", words[1]):
        raise bad_usage(f'N: must be an integer, not "{cut(words[1])}"', "give a priority from -100 to 100")
    return int(words[1])


def _selector(word: str) -> Selector:
    try:
        return selector(word)
    except argparse.ArgumentTypeError as error:
        raise bad_usage(f"ID: {error}", "write ids, ranges and #tags as in `3-9 12 '#sweep'`") from None


def come_after(context: CommandContext, flags: argparse.Namespace) -> int:
    return _edit(context, flags.id, lambda data, control, job_id: edits.come_after(data, control, job_id, flags.others))


def rename(context: CommandContext, flags: argparse.Namespace) -> int:
    return _edit(context, flags.id, lambda data, control, job_id: edits.rename(data, control, job_id, flags.name))


def write_note(context: CommandContext, flags: argparse.Namespace) -> int:
    return change(
        context,
        select(context, flags.ids),
        lambda data, control, job_id: edits.write_note(data, control, job_id, flags.text),
        "changed",
    )


def tag(context: CommandContext, flags: argparse.Namespace) -> int:
    """Add and remove tags: ids, ranges and #tags select jobs, and all other words are tags."""
    selectors = [one for word in flags.ids if (one := selector_in(word))]
    words = [*(word for word in flags.ids if selector_in(word) is None), *flags.add]
    if not selectors:
        raise bad_usage("ID: no job is given", "start with job ids, ranges or #tags, as in `tag 3-9 baseline`")
    edits.as_tags([*words, *flags.remove])
    return change(
        context,
        select(context, selectors),
        lambda data, control, job_id: edits.retag(data, control, job_id, words, flags.remove),
        "tagged",
    )


def remove(context: CommandContext, flags: argparse.Namespace) -> int:
    """After confirmation, permanently delete jobs and all their files. Delete either all of the jobs or none.

    If jobs are selected by a range or tag, skip any that have not ended.
    """
    chosen = select(context, flags.ids)
    living = {job_id for job_id, job in chosen.jobs.items() if not job.state.is_final} - chosen.named
    job_ids = [job_id for job_id in chosen.ids if job_id not in living]
    if not job_ids:
        raise UserError("no job was deleted, because none of these jobs has ended; stop them first")
    if living:
        stop_first = "has not ended; stop it first" if len(living) == 1 else "have not ended; stop them first"
        warn(f"skipped: {named_jobs(living)} {stop_first}")
    for job_id in job_ids:
        trash.refuse_unless_ended(context.data, job_id)
    waiting = waiting_for(context.past(), job_ids)
    if waiting and (flags.yes or context.as_json):
        warn(f"warning: {waiting.replace('would', 'will')}; `sae-tui after ID` lets a job start without it")
    stored = stored_with(chosen.jobs[job_id] for job_id in job_ids if job_id in chosen.jobs)
    _ask_whether(context, flags, job_ids, stored, waiting)
    with Progress("rm", to_descriptor=False):
        trash.throw_all_away(context.data, job_ids)
        freed = trash.empty(context.data, job_ids)
    has_done(f"{named_jobs(job_ids)} deleted")
    if context.as_json:
        show_json({"ids": job_ids, "bytes": freed})
    else:
        say(f"{named_jobs(job_ids)} deleted, {gibibytes(freed) if freed else 'nothing'} freed")
    return Exit.DONE


def repair(context: CommandContext, flags: argparse.Namespace) -> int:
    """Rebuild the job list from the job folders if it has been lost, and repair inconsistencies left by a crash."""
    done = []
    for step in repaired(context.data, flags.host_gone or ""):
        done.append(step)
        if not context.as_json:
            say(step)
    if context.as_json:
        show_json({"done": done})
    elif not done:
        say("nothing to repair")
    return Exit.DONE


def _ask_whether(
    context: CommandContext, flags: argparse.Namespace, job_ids: list[int], stored: str, waiting: str
) -> None:
    if flags.yes or context.as_json:
        return
    refuse_without_terminal("rm")
    taken = sum(trash.size(folder) for i in job_ids for folder in (context.data.run(i).root, context.data.sae(i)))
    question = f"Delete {named_jobs(job_ids)} with {stored} ({gibibytes(taken)})?"
    if waiting:
        question = f"{waiting[0].upper()}{waiting[1:]}.\n{question}"
    confirm(question, "no job was deleted")


def _edit(context: CommandContext, job_id: int, edit: Change) -> int:
    with store_access.existing(context.data, job_id) as control:
        return tell(context, job_id, edit(context.data, control, job_id))
