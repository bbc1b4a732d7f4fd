"""What may be changed of a job at any time: its name, tags and note; of one in line also its place."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from sae_tui.jobs.record import write_record
from trainer.contract.control import Control
from trainer.contract.paths import DataDir
from trainer.contract.problems import UserError
from trainer.contract.states import JobState

LONGEST_NAME = 80
LONGEST_TAG = 40


def rename(data: DataDir, control: Control, job_id: int, name: str) -> str:
    name = _text(name)
    if not 1 <= len(name) <= LONGEST_NAME:
        raise UserError(f"a name has 1 to {LONGEST_NAME} characters, not {len(name)}")
    return _change(data, control, job_id, f'is called "{name}"', name=name)


def write_note(data: DataDir, control: Control, job_id: int, note: str) -> str:
    note = _text(note)
    return _change(data, control, job_id, "has a new note" if note else "has no note", note=note)


def retag(data: DataDir, control: Control, job_id: int, add: Iterable[str] = (), remove: Iterable[str] = ()) -> str:
    """Tags are single words; adding one twice, or taking away one that is not there, does nothing."""
    tags = tuple(sorted({*control.job(job_id).tags, *as_tags(add)} - {*as_tags(remove)}))
    return _change(data, control, job_id, f"has the tags {', '.join(tags) or 'none'}", tags=tags)


def as_tags(words: Iterable[str]) -> tuple[str, ...]:
    """Each once, sorted; raises `UserError` for one that is no tag."""
    return tuple(sorted({*map(_tag, words)}))


def tag_words(text: str) -> tuple[list[str], list[str]]:
    """`+good new -bad` as tags to add and to take away."""
    words = text.replace(",", " ").split()
    return [word.lstrip("+") for word in words if word[0] != "-"], [word[1:] for word in words if word[0] == "-"]


def prioritise(data: DataDir, control: Control, job_id: int, priority: int) -> str:
    """Which of the jobs in line goes first; also of one that runs, should it come to wait again."""
    if not -100 <= priority <= 100:
        raise UserError(f"a priority is -100 to 100, not {priority}")
    return _change(data, control, job_id, f"has priority {priority}", priority=priority)


def hold(data: DataDir, control: Control, job_id: int) -> str:
    _refuse_unless_queued(control, job_id, "held", f"`sae-tui pause {job_id}` saves it and puts it back")
    return _change(data, control, job_id, "is held until it is released", held=True)


def release(data: DataDir, control: Control, job_id: int) -> str:
    """Lets a job in line start as soon as it can: not held any more, and after nobody."""
    _refuse_unless_queued(control, job_id, "released", f"`sae-tui resume {job_id}` goes on with one that has ended")
    # A pause that its supervisor has not seen yet would hold it again.
    control.answer(job_id, "pause")
    return _change(data, control, job_id, "may start as soon as it has its GPUs", held=False, after=())


def come_after(data: DataDir, control: Control, job_id: int, after: Iterable[int]) -> str:
    """Makes a job in line wait until those others have finished."""
    _refuse_unless_queued(control, job_id, "put after another", "only a job in line can wait")
    after = tuple(dict.fromkeys(after))
    refuse_circle(control, job_id, after)
    others = " and ".join(f"job {other}" for other in after)
    return _change(data, control, job_id, f"comes after {others}" if after else "comes after nobody", after=after)


def refuse_circle(control: Control, job_id: int, after: Iterable[int]) -> None:
    """Raises `UserError` where a job would come after itself, or after one that there is not."""
    waiting = [control.job(other).id for other in after]
    # A job that was deleted since comes after nobody.
    known = {job.id: job.after for job in control.jobs()}
    seen: set[int] = set()
    while waiting:
        other = waiting.pop()
        if other == job_id:
            raise UserError(f"job {job_id} cannot come after itself; choose another job")
        if other not in seen:
            seen.add(other)
            waiting += known.get(other, ())


def _change(data: DataDir, control: Control, job_id: int, what: str, **fields: Any) -> str:
    control.job(job_id)
    control.update(job_id, **fields)
    write_record(data.run(job_id), control.job(job_id))
    return f"job {job_id} {what}"


def _text(text: str) -> str:
    """Without spaces around it; bytes of another encoding, which a terminal may send, cannot be stored."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise UserError("names, tags and notes are UTF-8; set the terminal's encoding to it") from None
    return text.strip()


def _tag(text: str) -> str:
    tag = _text(text).lstrip("#")
    if not 1 <= len(tag) <= LONGEST_TAG or any(char.isspace() or char == "," for char in tag):
        raise UserError(f'a tag is one word of at most {LONGEST_TAG} characters, not "{text}"')
    return tag


def _refuse_unless_queued(control: Control, job_id: int, done: str, instead: str) -> None:
    state = control.job(job_id).state
    if state != JobState.QUEUED:
        raise UserError(f"job {job_id} is {state} and cannot be {done}; {instead}")
