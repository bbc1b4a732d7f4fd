"""Changes a job: its name, tags and note, its queue position, and whether it runs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from sae_tui.jobs.asking import asked_of
from sae_tui.jobs.machine import elsewhere, refuse_if_silent
from sae_tui.jobs.output import kind_of
from sae_tui.jobs.queue.after import comes_after, describe_unfinished, refuse_circle
from sae_tui.jobs.record import write_record
from sae_tui.jobs.states import ENDED, describe_state, stands
from sae_tui.jobs.store_access import existing
from trainer.contract.errors import UserError
from trainer.contract.paths import DataDir, RunPaths
from trainer.contract.printable import CONTROL, is_utf8
from trainer.contract.runs.checkpoint_manifest import newest_first
from trainer.contract.settings.schedule import COOL_DOWN_SHARE
from trainer.contract.store.job_store import ENDING, Control, RequestKind
from trainer.contract.store.rows import Job
from trainer.contract.store.states import DONE, JobState

LONGEST_NAME = 80
LONGEST_TAG = 40
# Returns the reply to a request: a phrase appended to "job N".
Words = Callable[[Job], str]
PRIORITIES = range(-100, 101)


class NotApplicable(UserError):
    """Raised for a change that makes no sense in a job's current state, such as releasing a running job."""


def rename(data: DataDir, control: Control, job_id: int, name: str) -> str:
    name = _text(name)
    if not 1 <= len(name) <= LONGEST_NAME:
        raise UserError(f"a name must have 1 to {LONGEST_NAME} characters, not {len(name)}")
    return _change(data, control, job_id, f'is now called "{name}"', name=name)


def write_note(data: DataDir, control: Control, job_id: int, note: str) -> str:
    note = _text(note, allowed="\n\t")
    return _change(data, control, job_id, "has a new note" if note else "has no note", note=note)


def retag(data: DataDir, control: Control, job_id: int, add: Iterable[str] = (), remove: Iterable[str] = ()) -> str:
    """Add and remove tags; adding an existing tag or removing a missing one has no effect."""
    tags = tuple(sorted({*control.job(job_id).tags, *as_tags(add)} - {*as_tags(remove)}))
    has = f"the tag{'s' * (len(tags) > 1)} {', '.join(tags)}" if tags else "no tags"
    return _change(data, control, job_id, f"has {has}", tags=tags)


def as_tags(words: Iterable[str]) -> tuple[str, ...]:
    """Return the distinct tags in `words`, sorted; raise `UserError` if a word is not a valid tag."""
    return tuple(sorted({*map(_tag, words)}))


def tag_words(text: str) -> tuple[list[str], list[str]]:
    """Split `+good new -bad` into the tags to add and the tags to remove."""
    words = text.replace(",", " ").split()
    return [word.lstrip("+") for word in words if word[0] != "-"], [word[1:] for word in words if word[0] == "-"]


def prioritise(data: DataDir, control: Control, job_id: int, priority: int) -> str:
    """Set a job's priority in the queue (-100 to 100); for a running job, it applies if the job is queued again."""
    if priority not in PRIORITIES:
        raise UserError(f"a priority must be between -100 and 100, not {priority}")
    return _change(data, control, job_id, f"has priority {priority}", priority=priority)


def hold(data: DataDir, control: Control, job_id: int) -> str:
    job = control.job(job_id)
    pause = f"`sae-tui pause {job_id}` {'stops' if kind_of(job.config).is_program else 'saves'} and pauses it"
    instead = "only a queued job can be held" if job.state.is_final else pause
    _refuse_unless_queued(job, instead)
    word = describe_state(msgspec.structs.replace(job, held=True)).word
    return _change(data, control, job_id, f"is {word} until it is released", held=True)


def release(data: DataDir, control: Control, job_id: int) -> str:
    """Release a held or paused job in the queue; the job still waits for GPUs and other jobs."""
    job = control.job(job_id)
    resumes = job.state.is_final and job.state not in DONE
    _refuse_unless_queued(
        job, f"`sae-tui resume {job_id}` {asked_of(job.config).again}" if resumes else "it is not held"
    )
    refuse_if_silent(data, job)
    is_held = job.held or "pause" in control.open_requests(job_id)
    # Answer a pause request that the supervisor has not read yet; otherwise, the supervisor would hold the job again.
    control.answer(job_id, "pause")
    message = _release_message(job, is_held, describe_unfinished(data, control, job), data.run(job_id))
    return _change(data, control, job_id, message, held=False, **({"waits_for": None} if is_held else {}))


def release_to_finish(data: DataDir, control: Control, job_id: int) -> str:
    """Resume a paused training job so that it cools down and finishes."""
    job = control.job(job_id)
    if not kind_of(job.config).trains or not job.attempt:
        raise NotApplicable(f"job {job_id} has no training to cool down yet; release it without --finish")
    message = release(data, control, job_id)
    control.request(job_id, "finish")
    return message


def _release_message(job: Job, is_held: bool, other: str, paths: RunPaths) -> str:
    """Return a message saying what a queued job will do after its release.

    `other` is a clause about the jobs that must finish first, or "" if there are none.
    """
    saved = newest_first(paths.checkpoints)
    starts = f"resumes from step {int(saved[0].name.removeprefix('step-'))}" if saved else "starts"
    starts += " as soon as its GPUs are free" if job.gpus_wanted else ""
    if is_held:
        return f"is released; it {other}" if other else starts
    return f"is not held; it {other or (f'waits: {job.waits_for}' if job.waits_for else starts)}"


def come_after(data: DataDir, control: Control, job_id: int, after: Iterable[int]) -> str:
    """Make a queued job wait until the jobs in `after` have finished."""
    job = control.job(job_id)
    _refuse_unless_queued(job, "only a queued job can wait for other jobs")
    after = tuple(dict.fromkeys(after))
    refuse_circle(control, job_id, after)
    message = comes_after(after) or "no longer waits for other jobs"
    return _change(data, control, job_id, message, after=after, waits_for=None)


def stop(data: DataDir, job_id: int, control: Control | None = None) -> str:
    """Ask a job to save and stop; return a message saying what will happen. `control` is the store if already open."""
    return _ask(data, control, job_id, "stop", queued=_stop_message, running=lambda job: asked_of(job.config).stops)


def finish(data: DataDir, job_id: int, control: Control | None = None) -> str:
    """Ask a training job to cool down and finish; raise `UserError` if the job cannot cool down."""
    with _opened(data, job_id, control) as control:
        job = control.job(job_id)
        if not kind_of(job.config).trains:
            raise NotApplicable(f"job {job_id} has no training to cool down; `sae-tui stop {job_id}` stops it")
        if job.state == JobState.FINISHED:
            raise NotApplicable(f"job {job_id} has already finished")
        if job.state.is_final or job.state == JobState.QUEUED:
            way = f"`sae-tui resume {job_id} --finish`" if job.attempt else f"`sae-tui stop {job_id}`"
            does = "cools it down and finishes it" if job.attempt else "removes it from the queue"
            raise NotApplicable(f"job {job_id} {stands(job)}; {way} {does}")
        asked = control.open_requests(job_id)
        if asked & ENDING:
            raise NotApplicable(f"job {job_id} is being stopped; `sae-tui resume {job_id} --finish` finishes it later")
        if "finish" in asked:
            return f"job {job_id} is already cooling down"
        refuse_if_silent(data, job)
        control.request(job_id, "finish")
        how = f"cools down for another {COOL_DOWN_SHARE:.0%} of the steps taken so far, then finishes"
        return f"job {job_id} {how}" + _if_elsewhere(data, job)


def kill(data: DataDir, job_id: int, control: Control | None = None) -> str:
    """Ask a job's supervisor to stop the job's ranks with SIGTERM, and with SIGKILL 5 s later."""
    return _ask(data, control, job_id, "kill", queued=_stop_message, running=lambda job: asked_of(job.config).killed)


def pause(data: DataDir, job_id: int, control: Control | None = None) -> str:
    """Ask a job to save and return to the queue, where it is held and occupies no GPUs."""
    return _ask(data, control, job_id, "pause", queued=_pause_message, running=lambda job: asked_of(job.config).pauses)


def _change(data: DataDir, control: Control, job_id: int, what: str, **fields: Any) -> str:
    control.job(job_id)
    control.update(job_id, **fields)
    write_record(data.run(job_id), control.job(job_id))
    return f"job {job_id} {what}"


def _text(text: str, allowed: str = "") -> str:
    """Strip leading and trailing whitespace.

    Raise `UserError` if the text contains control characters not in `allowed`, or if it is not valid UTF-8. A
    terminal may send invalid UTF-8, which cannot be stored.
    """
    if not is_utf8(text):
        raise UserError("names, tags and notes must be UTF-8; set the terminal's encoding to UTF-8")
    if any(char not in allowed for char in CONTROL.findall(text.strip())):
        raise UserError(f"names, tags and notes cannot contain control characters: remove them from {text.strip()!a}")
    return text.strip()


def _tag(text: str) -> str:
    tag = _text(text).lstrip("#")
    if tag.startswith("-"):
        raise UserError(f'a tag cannot start with "-", as "{text}" does; `--remove {tag.lstrip("-")}` removes a tag')
    if not 1 <= len(tag) <= LONGEST_TAG or any(char.isspace() or char == "," for char in tag):
        raise UserError(f'a tag is one word of at most {LONGEST_TAG} characters, not "{text}"')
    return tag


def _refuse_unless_queued(job: Job, instead: str) -> None:
    if job.state != JobState.QUEUED:
        raise NotApplicable(f"job {job.id} {stands(job)}; {instead}")


def _stop_message(_: Job) -> str:
    return "is removed from the queue"


def _pause_message(job: Job) -> str:
    word = describe_state(msgspec.structs.replace(job, held=True)).word
    return f"is already {word}" if job.held else f"is {word} until it is released"


def _ask(
    data: DataDir, control: Control | None, job_id: int, kind: RequestKind, *, queued: Words, running: Words
) -> str:
    with _opened(data, job_id, control) as control:
        job = control.job(job_id)
        if job.state.is_final:
            return f"job {job_id} {ENDED[job.state]} already"
        if kind == "pause" and control.open_requests(job_id) & {"stop", "kill"}:
            return f"job {job_id} is being stopped; `sae-tui resume {job_id}` {asked_of(job.config).again} later"
        refuse_if_silent(data, job)
        control.request(job_id, kind)
        does = (queued if job.state == JobState.QUEUED else running)(job)
        return f"job {job_id} {does}" + _if_elsewhere(data, job)


def _opened(data: DataDir, job_id: int, control: Control | None) -> contextlib.AbstractContextManager[Control]:
    """Return the store; a caller that changes several jobs has already opened it."""
    return contextlib.nullcontext(control) if control else existing(data, job_id)


def _if_elsewhere(data: DataDir, job: Job) -> str:
    """Return a clause saying when another host will act on the request, or "" if the job belongs to this host."""
    why = elsewhere(data, job)
    return f", once {job.host} reads the request; {why}" if why else ""
