"""Parses flag values: numbers, shares, prices, times and sizes. An invalid value produces a one-line error."""

from __future__ import annotations

import argparse
import contextlib
import math
import re
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

from trainer.contract.answers.interaction import MOST_GENERATED, MOST_TEMPERATURE
from trainer.contract.errors import UserError
from trainer.contract.object_paths import is_url

V = TypeVar("V")


def positive(text: str) -> int:
    return _integer(text, least=1)


def job_id_in(text: str) -> int | None:
    """Return the text as a job id, or None if it is not a number but, for example, a folder name."""
    return int(text) if re.fullmatch(r"\d{1,18}", text) else None


def rank(text: str) -> int:
    return _integer(text, least=0)


def gpu_indices(text: str) -> tuple[int, ...]:
    if not re.fullmatch(r"\d{1,4}(,\d{1,4})*", text):
        raise argparse.ArgumentTypeError(f'must be GPU indices like 0,1, not "{_cut(text)}"')
    return tuple(sorted(set(map(int, text.split(",")))))


def port(text: str) -> int:
    if not re.fullmatch(r"\d{1,5}", text) or int(text) > 65535:
        raise argparse.ArgumentTypeError(f'must be a port from 0 to 65535, not "{_cut(text)}"')
    return int(text)


def host(text: str) -> str:
    from sae_tui.ssh import checked_host

    try:
        return checked_host(text)
    except UserError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _integer(text: str, least: int) -> int:
    if not re.fullmatch(r"\d{1,18}", text) or int(text) < least:
        raise argparse.ArgumentTypeError(f'must be an integer of at least {least}, not "{_cut(text)}"')
    return int(text)


def share(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f'must be a number from 0 to below 1, not "{_cut(text)}"')
    return value


def price(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f'must be a price like 2.5, not "{_cut(text)}"')
    return value


def strength(text: str) -> float:
    value = _number(text)
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f'must be a number such as 2 or -1.5, not "{_cut(text)}"')
    return value


def temperature(text: str) -> float:
    value = _number(text)
    if not 0 <= value <= MOST_TEMPERATURE:
        raise argparse.ArgumentTypeError(f'must be a number from 0 to {MOST_TEMPERATURE}, not "{_cut(text)}"')
    return value


def part(text: str) -> int:
    """Return the number of a crosscoder's part from its letter."""
    if not re.fullmatch(r"[A-Za-z]", text):
        raise argparse.ArgumentTypeError(f'must be the letter of a part, such as B, not "{_cut(text)}"')
    return ord(text.upper()) - ord("A")


def generated(text: str) -> int:
    value = positive(text)
    if value > MOST_GENERATED:
        raise argparse.ArgumentTypeError(f"must be at most {MOST_GENERATED:,}, not {value:,}")
    return value


def _number(text: str) -> float:
    """Return the text as a number, or NaN if it is none."""
    with contextlib.suppress(ValueError):
        return float(text)
    return math.nan


def seconds(text: str) -> float:
    from trainer.contract.settings.typed import parse_seconds

    return _parsed(parse_seconds, text)


def step(text: str) -> int:
    """Return the step length, which must be a whole number of seconds."""
    value = seconds(text)
    if value < 1 or value != int(value):
        raise argparse.ArgumentTypeError(f'must be a step of whole seconds like 10s, 1m or 1h, not "{_cut(text)}"')
    return int(value)


def size(text: str) -> int:
    from trainer.contract.settings.typed import parse_size

    return _parsed(parse_size, text)


def count(text: str) -> int:
    """Parse a number of tokens like 20M or 300,000."""
    from trainer.contract.settings.typed import parse_number

    value = _parsed(lambda given: parse_number(given, whole=True), text)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise argparse.ArgumentTypeError(f'must be a number like 20M, not "{_cut(text)}"')
    return value


# The largest allowed array, so that a typing mistake does not launch a million jobs.
MOST_IN_ARRAY = 1000
_INDEX = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9})(?::([0-9]{1,9}))?)?")


class ArraySpec(NamedTuple):
    """The indices of an array's jobs, and how many jobs may run at once; None means no limit."""

    indices: tuple[int, ...]
    at_once: int | None = None


def array(text: str) -> ArraySpec:
    """Parse an array in SLURM's syntax: `0-31`, `0-31:2`, `1,3,7` or `0-31%4`."""
    numbers, percent, limit = text.partition("%")
    parts = [_indices(part) for part in numbers.split(",")]
    if any(part is None for part in parts) or (percent and not (re.fullmatch(r"[0-9]{1,9}", limit) and int(limit))):
        raise argparse.ArgumentTypeError(f'must be like 0-31, 0-31:2, 1,3,7 or 0-31%4, not "{_cut(text)}"')
    if (count := sum(len(part) for part in parts if part)) > MOST_IN_ARRAY:
        raise argparse.ArgumentTypeError(f"has {count:,} jobs, but at most {MOST_IN_ARRAY:,} are possible")
    indices = dict.fromkeys(index for part in parts if part for index in part)
    return ArraySpec(tuple(indices), int(limit) if percent else None)


def _indices(part: str) -> range | None:
    match = re.fullmatch(_INDEX, part.strip())
    if match is None or match[3] == "0" or int(match[2] or match[1]) < int(match[1]):
        return None
    return range(int(match[1]), int(match[2] or match[1]) + 1, int(match[3] or 1))


class CardName(NamedTuple):
    """A report card: its number, or None for the current one; `job_id` is None for the command's own job."""

    job_id: int | None
    number: int | None


def card_name(text: str) -> CardName:
    """Parse the name of a report card: `2`, `8:2`, or `8:` for job 8's current one."""
    match = re.fullmatch(r"(?:(\d{1,18}):)?([1-9]\d{0,8})?", text)
    if not match or not text:
        raise argparse.ArgumentTypeError(
            f'must be a number of --cards like 2, or 8: or 8:2 for job 8, not "{_cut(text)}"'
        )
    job, number = match.groups()
    return CardName(int(job) if job else None, int(number) if number else None)


class Selector(NamedTuple):
    """Part of a selection: the ids from `first` to `last`, or all jobs with a tag."""

    first: int = 0
    last: int = 0
    tag: str = ""

    @property
    def is_id(self) -> bool:
        return not self.tag and self.first == self.last

    def matches(self, job_id: int, tags: Sequence[str]) -> bool:
        return self.tag in tags if self.tag else self.first <= job_id <= self.last

    @property
    def lack(self) -> str:
        """A clause saying that this matches no job."""
        if self.tag:
            return f'no job has the tag "{self.tag}"'
        return f"there is no job {self.first}" if self.is_id else f"there is no job from {self.first} to {self.last}"


def selector_in(word: str) -> Selector | None:
    """Return the jobs selected by a word, or None if the word is neither an id nor a range nor a tag."""
    if re.fullmatch(r"\d{1,18}", word) and int(word):
        return Selector(int(word), int(word))
    if match := re.fullmatch(r"(\d{1,9})(?:-|\.\.)(\d{1,9})", word):
        first, last = sorted((int(match[1]), int(match[2])))
        return Selector(first, last)
    return Selector(tag=word[1:]) if word.startswith("#") and word[1:] else None


def selector(word: str) -> Selector:
    """Parse an argument that selects jobs."""
    if (found := selector_in(word)) is None:
        raise argparse.ArgumentTypeError(f'must be a job id, a range like 3-9 or a #tag, not "{_cut(word)}"')
    return found


def selector_or_url(word: str) -> Selector | str:
    """Parse an argument that selects jobs, or a URL."""
    return word if is_url(word) else selector(word)


def _cut(text: str) -> str:
    from trainer.contract.settings.typed import cut

    return cut(text)


def _parsed(parse: Callable[[str], V], text: str) -> V:
    try:
        return parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
