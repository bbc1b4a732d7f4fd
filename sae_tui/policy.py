"""A machine's policy: limits for all users' jobs, in one TOML file that only its owner can change.

`/etc/sae-tui/policy.toml` applies to all users of the machine. If it does not exist, `policy.toml` in a group's shared
data folder applies to the jobs in that folder. A damaged file never stops a job: a setting that cannot be used is
ignored, and `Policy.problems` says why.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from datetime import UTC, datetime, tzinfo
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from trainer.contract.errors import Problem, UserError, sentence
from trainer.contract.paths import DataDir, is_shared
from trainer.contract.settings.declare import about, settings_of, show
from trainer.contract.settings.toml import parse_toml, read_own_text
from trainer.contract.settings.typed import TIMES, cut, parse_seconds
from trainer.contract.trust import user_of
from trainer.contract.wording import duration, join_words, plural

NAME = "policy.toml"
DAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
Day = Literal["mon", "tue", "wed", "thu", "fri", "sat", "sun"]
# A job that has left its GPUs idle for this long is reported. A policy cannot stop it any earlier.
IDLE_S = 1800.0
LONGEST_S = 365 * 86_400.0
_IDLE_TIMES = "a time of at least 30m, like 2h or 1d"
_CLOCK = re.compile(r"([01]\d|2[0-3]):([0-5]\d)|24:00")
_CLOCKS = 'a time of day like "20:00"'
S = TypeVar("S", bound=msgspec.Struct)

GpusPerUser = Annotated[
    int,
    about(
        "Most GPUs that one user's jobs may hold at once; without it, there is no limit.", unit="GPUs", ge=1, le=100_000
    ),
]
MaxTime = Annotated[
    str, about("Longest time limit a job may have, and the limit of a job that sets none; at most 365d.", wanted=TIMES)
]


class Limits(msgspec.Struct, frozen=True):
    """The limits that apply at a given time; None means no limit."""

    gpus_per_user: int | None = None
    max_time_s: float | None = None

    def or_larger(self, other: Limits) -> Limits:
        """Return the larger value of each limit."""
        return Limits(_larger(self.gpus_per_user, other.gpus_per_user), _larger(self.max_time_s, other.max_time_s))

    @property
    def words(self) -> str:
        """The limits in words, like `4 GPUs for each user, jobs of at most 24 h 00 min`; "" without limits."""
        gpus = f"{plural(self.gpus_per_user, 'GPU')} for each user" if self.gpus_per_user is not None else ""
        time = f"jobs of at most {duration(self.max_time_s)}" if self.max_time_s is not None else ""
        return ", ".join(filter(None, (gpus, time)))


class Rules(msgspec.Struct, frozen=True):
    """The settings at the top of the file."""

    gpus_per_user: GpusPerUser | None = None
    max_time: MaxTime | None = None
    stop_idle_after: (
        Annotated[
            str,
            about(
                "Stops a job that has kept its GPUs below 5 % utilisation for this long; without it, never.",
                wanted=_IDLE_TIMES,
            ),
        ]
        | None
    ) = None
    time_zone: (
        Annotated[
            str,
            about("Time zone of the hours below; without it, the machine's.", wanted='a name like "Europe/Berlin"'),
        ]
        | None
    ) = None


class Hours(msgspec.Struct, frozen=True):
    """A `[[hours]]` section: hours in which larger limits apply."""

    days: (
        Annotated[
            list[Day],
            about(
                "Days on which these hours begin; without it, every day.",
                wanted='a list of days like ["sat", "sun"]',
                min_length=1,
            ),
        ]
        | None
    ) = None
    start: Annotated[str, about("When they begin.", wanted=_CLOCKS)] = "00:00"
    end: Annotated[str, about("When they end; not after the start: on the following day.", wanted=_CLOCKS)] = "24:00"
    gpus_per_user: GpusPerUser | None = None
    max_time: MaxTime | None = None

    def include(self, local: datetime) -> bool:
        """Return whether a local time is within these hours."""
        minute, start, end = 60 * local.hour + local.minute, _minutes(self.start), _minutes(self.end)
        today, yesterday = DAYS[local.weekday()], DAYS[local.weekday() - 1]
        days = self.days or DAYS
        if start < end:
            return today in days and start <= minute < end
        return (today in days and minute >= start) or (yesterday in days and minute < end)

    @property
    def words(self) -> str:
        """The hours in words, like `mon-fri 20:00-08:00`."""
        if self.days is None:
            return f"daily {self.start}-{self.end}"
        places = sorted(map(DAYS.index, set(self.days)))
        is_run = len(places) > 2 and places == list(range(places[0], places[-1] + 1))
        days = f"{DAYS[places[0]]}-{DAYS[places[-1]]}" if is_run else ",".join(DAYS[place] for place in places)
        return f"{days} {self.start}-{self.end}"


class Policy(msgspec.Struct, frozen=True):
    """The policy in force; without a file, `path` is None and there are no limits."""

    path: Path | None = None
    owner: str = ""
    rules: Rules = Rules()
    hours: tuple[Hours, ...] = ()
    zone: tzinfo = UTC
    problems: tuple[Problem, ...] = ()

    @property
    def usual(self) -> Limits:
        """The limits outside the hours in which larger limits apply."""
        return _limits(self.rules)

    @property
    def largest(self) -> Limits:
        """The limits that no job can exceed at any time."""
        limits = self.usual
        for hours in self.hours:
            limits = limits.or_larger(self._in(hours))
        return limits

    def limits(self, now: float) -> Limits:
        """Return the limits at a time in seconds since the epoch."""
        limits = self.usual
        if self.hours:
            local = datetime.fromtimestamp(now, self.zone)
            for hours in self.hours:
                limits = limits.or_larger(self._in(hours)) if hours.include(local) else limits
        return limits

    @property
    def stop_idle_s(self) -> float | None:
        """The time in seconds after which a job that does not use its GPUs is stopped, or None."""
        return None if self.rules.stop_idle_after is None else parse_seconds(self.rules.stop_idle_after)

    @property
    def sentences(self) -> list[str]:
        """The limits in words, then the hours with larger limits, then what happens to idle jobs."""
        lines = [self.usual.words or "no limits"]
        in_hours = [(hours.words, self.usual.or_larger(self._in(hours))) for hours in self.hours]
        lines += [f"{when}: {limits.words or 'no limits'}" for when, limits in in_hours]
        idle_s = self.stop_idle_s
        return lines + ([f"jobs that leave their GPUs idle stop after {duration(idle_s)}"] if idle_s else [])

    def time_limit_s(self, own_s: float | None) -> float | None:
        """Return a job's time limit in seconds: its own, or the policy's if that is shorter or the only one."""
        if own_s is None:
            return self.usual.max_time_s
        longest_s = self.largest.max_time_s
        return own_s if longest_s is None else min(own_s, longest_s)

    def hours_with(self, suffices: Callable[[Limits], bool]) -> str:
        """Return the hours whose limits suffice, in words like `mon-fri 20:00-08:00`, or "" if there are none."""
        named = [hours.words for hours in self.hours if suffices(self.usual.or_larger(self._in(hours)))]
        return join_words(named) if named else ""

    def _in(self, hours: Hours) -> Limits:
        """Return the limits during `hours`; any limit that is not set there is the usual one."""
        return _completed(_limits(hours), self.usual)


NO_POLICY = Policy()


def read_policy(data: DataDir, root: Path = Path("/")) -> Policy:
    """Return the policy for the jobs in a data folder; system files are read from under `root`."""
    try:
        for path, owners in _places(data, root):
            if os.path.lexists(path):
                return _read(path, owners, root)
    except OSError:
        pass  # the folder was deleted or cannot be read, which opening the data folder reports
    return NO_POLICY


def _places(data: DataDir, root: Path) -> Iterator[tuple[Path, Collection[int]]]:
    """Yield the paths where the policy may be, each with the users who may have written it."""
    system = root / "etc" / "sae-tui" / NAME
    yield system, _owners(root)
    if is_shared(data.root):
        yield data.root / NAME, _owners(data.root)


def _owners(folder: Path) -> Collection[int]:
    # In an unprivileged container, / does not belong to user id 0.
    return {0, folder.stat().st_uid}


def _read(path: Path, owners: Collection[int], root: Path) -> Policy:
    try:
        if why := _distrust_of_place(path, owners, root):
            raise UserError(f"{NAME} is ignored, because {why}")
        table = parse_toml(read_own_text(path, owners))
        owner = user_of(path.stat().st_uid)
    except OSError as error:
        return Policy(path, problems=(Problem(str(path), f"is ignored, because it cannot be read: {sentence(error)}"),))
    except UserError as error:
        return Policy(path, problems=(Problem("", str(error)),))
    except ValueError as error:
        return Policy(path, problems=(Problem(str(path), f"is ignored, because it is not valid TOML: {error}"),))
    problems: list[Problem] = []
    listed = table.pop("hours", [])
    rules = _section(Rules, table, "", problems)
    hours = tuple(_hours(listed, _limits(rules), problems))
    return Policy(path, owner, rules, hours, _zone(rules, root), tuple(problems))


def _distrust_of_place(path: Path, owners: Collection[int], root: Path) -> str:
    """Return why the folder with the system's policy file cannot be trusted, or "".

    In a folder shared by a group, any member can replace the file, but not with one that belongs to the folder's owner.
    """
    if not path.is_relative_to(root / "etc"):
        return ""
    status = path.parent.stat()
    if status.st_uid not in owners:
        return f"{path.parent} belongs to {user_of(status.st_uid)}"
    return f"others may write to {path.parent}; `chmod go-w` it" if status.st_mode & 0o022 else ""


def _hours(listed: Any, usual: Limits, problems: list[Problem]) -> Iterator[Hours]:
    """Yield the `[[hours]]` sections that raise a limit and have no mistakes.

    Replacing a mistake with a default would make the limits apply at the wrong times.
    """
    if not (isinstance(listed, list) and all(isinstance(each, Mapping) for each in listed)):
        problems.append(Problem("hours", "must be sections: write [[hours]] and its keys below; it is ignored"))
        return
    for number, each in enumerate(listed, 1):
        wrong: list[Problem] = []
        hours = _section(Hours, each, f"hours {number}: ", wrong)
        if not wrong:
            own = _limits(hours)
            wrong += _without_effect(own, usual, number)
            if usual.or_larger(_completed(own, usual)) != usual:
                yield hours
        problems += wrong


def _without_effect(own: Limits, usual: Limits, number: int) -> list[Problem]:
    """Report an `[[hours]]` section without limits, or with limits that are not above the usual ones."""
    pairs = {"gpus_per_user": (own.gpus_per_user, usual.gpus_per_user), "max_time": (own.max_time_s, usual.max_time_s)}
    limits = [(name, limit, outside) for name, (limit, outside) in pairs.items() if limit is not None]
    if not limits:
        return [
            Problem(
                f"hours {number}",
                "has no effect, because it sets no limit; write gpus_per_user or max_time below [[hours]]",
            )
        ]
    why = "has no effect, because hours can only raise a limit"
    problems = []
    for name, limit, outside in limits:
        if outside is None:
            message = f"{why}, and no limit applies outside of them; set a lower {name} at the top of the file"
            problems.append(Problem(f"hours {number}: {name}", message))
        elif limit <= outside:
            message = f"{why}; set a lower {name} at the top of the file, or a higher one here"
            problems.append(Problem(f"hours {number}: {name}", message))
    return problems


def _section(of: type[S], table: Mapping[str, Any], place: str, problems: list[Problem]) -> S:
    """Convert a table to a section; report and ignore the settings that cannot be used."""
    settings = {setting.name: setting for setting in settings_of(of)}
    sections = ["[[hours]]"] if of is Rules else []
    values: dict[str, Any] = {}
    for name, value in table.items():
        try:
            if name not in settings:
                raise ValueError(f"is not a setting; use one of {', '.join([*settings, *sections])}")
            if value == "":
                raise ValueError(f"is empty; leave this line out, or write {settings[name].wanted}")
            values[name] = settings[name].convert(value)
            if name in _FORMATS:
                _FORMATS[name](values[name])
        except ValueError as error:
            values.pop(name, None)
            problems.append(Problem(f"{place}{cut(name)}", f"{error}; it is ignored"))
    return of(**values)


def _check_time(text: str) -> None:
    if not parse_seconds(text):
        raise ValueError(f"must be {TIMES}, not {show(text)}")
    _refuse_too_long(text)


def _check_idle_time(text: str) -> None:
    if parse_seconds(text) < IDLE_S:
        raise ValueError(f"must be {_IDLE_TIMES}, not {show(text)}")
    _refuse_too_long(text)


def _refuse_too_long(text: str) -> None:
    if parse_seconds(text) > LONGEST_S:
        raise ValueError(f"must be at most a year (365d), not {show(text)}")


def _check_clock(text: str) -> None:
    if not _CLOCK.fullmatch(text):
        raise ValueError(f"must be {_CLOCKS}, not {show(text)}")


def _check_zone(name: str) -> None:
    from zoneinfo import ZoneInfo

    try:
        ZoneInfo(name)
    except (ValueError, OSError, LookupError):
        raise ValueError(f"is not a time zone known to this machine: {show(name)}") from None


_FORMATS: dict[str, Callable[[str], None]] = {
    "max_time": _check_time,
    "stop_idle_after": _check_idle_time,
    "start": _check_clock,
    "end": _check_clock,
    "time_zone": _check_zone,
}


def _zone(rules: Rules, root: Path) -> tzinfo:
    """Return the time zone of the hours; TZ is ignored, because every process must get the same result."""
    from zoneinfo import ZoneInfo

    if rules.time_zone:
        return ZoneInfo(rules.time_zone)
    try:
        with (root / "etc" / "localtime").open("rb") as file:
            return ZoneInfo.from_file(file)
    except (ValueError, OSError):
        return UTC


def _limits(section: Rules | Hours) -> Limits:
    return Limits(section.gpus_per_user, None if section.max_time is None else parse_seconds(section.max_time))


def _completed(own: Limits, usual: Limits) -> Limits:
    return Limits(
        usual.gpus_per_user if own.gpus_per_user is None else own.gpus_per_user,
        usual.max_time_s if own.max_time_s is None else own.max_time_s,
    )


def _larger(first: Any, second: Any) -> Any:
    return None if first is None or second is None else max(first, second)


def _minutes(clock: str) -> int:
    hours, minutes = clock.split(":")
    return 60 * int(hours) + int(minutes)
