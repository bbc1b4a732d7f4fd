"""Commands that change existing jobs.

`sae-tui pause | resume | clone | hold | release | priority | after | rename | tag | note | rm | repair`.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable
from typing import Any

from sae_tui.cli_commands.context import CommandContext, overrides_of
from sae_tui.cli_commands.jobs import wait_for
from sae_tui.cli_commands.launching import launch_all, resolve_placement
from sae_tui.cli_commands.output import say, show_json, warn
from sae_tui.jobs import edits, store_access
from sae_tui.jobs.launch.clone import clone_settings
from sae_tui.jobs.launch.resume import resume as resumed
from sae_tui.jobs.queue.after import waiting_for
from sae_tui.jobs.upkeep import trash
from sae_tui.jobs.upkeep.repair import repair as repaired
from trainer.contract.errors import UserError
from trainer.contract.exits import Exit
from trainer.contract.output import has_done, show_text
from trainer.contract.paths import DataDir
from trainer.contract.store.job_store import Control
from trainer.contract.wording import gibibytes, join_words

Edit = Callable[[DataDir, Control, int], str]


def resume(context: CommandContext, flags: argparse.Namespace) -> int:
    """Resume an ended or paused job from its last good checkpoint; with `--wait`, wait until it ends, like `launch`."""
    place = functools.partial(resolve_placement, context)
    overrides = overrides_of(flags.overrides, flags.gpus)
    if not overrides and (message := _release_if_held(context, flags.id, finish=flags.finish)):
        has_done(message)
        return wait_for(context, flags.id, began="is released") if flags.wait else _tell(context, flags.id, message)
    plan = resumed(context.data, flags.id, place, overrides, finish=flags.finish)
    has_done(f"job {flags.id} {plan.sentence}")
    for note in plan.notes:
        warn(f"warning: {note}")
    if flags.wait:
        return wait_for(context, flags.id, began=plan.sentence)
    if context.as_json:
        show_json({"id": flags.id, "step": plan.step, "notes": plan.notes})
    else:
        cools = ", cools down" if flags.finish else ""
        say(f"job {flags.id} {plan.sentence}{cools}; `sae-tui logs {flags.id} -f` follows it")
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
        from trainer.contract.settings.job_file import dump_job

        show_text(dump_job(job))
        return Exit.DONE
    return launch_all(context, flags, [job], parent=flags.id)


def pause(context: CommandContext, flags: argparse.Namespace) -> int:
    return _tell(context, flags.id, edits.pause(context.data, flags.id))


def hold(context: CommandContext, flags: argparse.Namespace) -> int:
    return _edit(context, flags.id, edits.hold)


def release(context: CommandContext, flags: argparse.Namespace) -> int:
    return _edit(context, flags.id, edits.release)


def prioritise(context: CommandContext, flags: argparse.Namespace) -> int:
    return _edit(
        context, flags.id, lambda data, control, job_id: edits.prioritise(data, control, job_id, flags.priority)
    )


def come_after(context: CommandContext, flags: argparse.Namespace) -> int:
    return _edit(context, flags.id, lambda data, control, job_id: edits.come_after(data, control, job_id, flags.others))


def rename(context: CommandContext, flags: argparse.Namespace) -> int:
    return _edit(context, flags.id, lambda data, control, job_id: edits.rename(data, control, job_id, flags.name))


def write_note(context: CommandContext, flags: argparse.Namespace) -> int:
    return _edit(context, flags.id, lambda data, control, job_id: edits.write_note(data, control, job_id, flags.text))


def tag(context: CommandContext, flags: argparse.Namespace) -> int:
    return _edit(
        context, flags.id, lambda data, control, job_id: edits.retag(data, control, job_id, flags.words, flags.remove)
    )


def remove(context: CommandContext, flags: argparse.Namespace) -> int:
    """After confirmation, permanently delete jobs with all their files: either all of the jobs or none."""
    job_ids = list(dict.fromkeys(flags.ids))
    for job_id in job_ids:
        trash.refuse_unless_ended(context.data, job_id)
    waiting = waiting_for(context.past(), job_ids)
    if not (flags.yes or context.as_json):
        _ask_whether(context, job_ids, waiting)
    elif waiting:
        warn(f"warning: {waiting.replace('would', 'will')}; `sae-tui after ID` lets a job start without it")
    trash.throw_all_away(context.data, job_ids)
    freed = trash.empty(context.data, job_ids)
    has_done(f"{_jobs(job_ids)} deleted")
    if context.as_json:
        show_json({"ids": job_ids, "bytes": freed})
    else:
        say(f"{_jobs(job_ids)} deleted, {gibibytes(freed) if freed else 'nothing'} freed")
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


def _ask_whether(context: CommandContext, job_ids: list[int], waiting: str) -> None:
    if not sys.stdin.isatty():
        raise UserError("rm asks for confirmation, which needs a terminal; in a script add --yes")
    taken = sum(trash.size(folder) for i in job_ids for folder in (context.data.run(i).root, context.data.sae(i)))
    question = f"Delete {_jobs(job_ids)} with checkpoints and SAEs ({gibibytes(taken)})? [y/N] "
    if waiting:
        question = f"{waiting[0].upper()}{waiting[1:]}.\n{question}"
    try:
        answer = input(question)
    except EOFError:
        answer = ""
    if answer.strip().lower() not in ("y", "yes"):
        raise UserError("no job was deleted")


def _jobs(job_ids: list[int]) -> str:
    return f"job{'s' * (len(job_ids) > 1)} {join_words([str(job_id) for job_id in job_ids])}"


def _edit(context: CommandContext, job_id: int, edit: Edit) -> int:
    with store_access.existing(context.data, job_id) as control:
        return _tell(context, job_id, edit(context.data, control, job_id))


def _tell(context: CommandContext, job_id: int, message: str) -> int:
    shown: dict[str, Any] = {"id": job_id, "message": message}
    if context.as_json:
        show_json(shown)
    else:
        say(message)
    return Exit.DONE
