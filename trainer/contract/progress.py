"""Shows a long command's progress: a bar on a terminal, a line every 10 s in a pipe, or JSON Lines for the parent.

Any code in a command may call `stage`, `advance` or `track`, which do nothing unless a `Progress` is active.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from typing import Annotated, Any, TypeVar

import msgspec

from trainer.contract.json_file import decode_as
from trainer.contract.printable import printable
from trainer.contract.wording import duration

# The environment variable containing the file descriptor to which a child process writes its progress.
ENV_DESCRIPTOR = "SAE_TUI_PROGRESS_FD"
# Intervals in seconds. A command that takes less than `QUIET_S` shows no bar.
QUIET_S, LINE_EVERY_S, SHOW_EVERY_S = 1.0, 10.0, 0.5
_LONGEST_STAGE = 200
# The largest share that is shown before the command ends.
_MOST_SHARE = 0.99

T = TypeVar("T")


class Reached(msgspec.Struct, frozen=True):
    """The current stage of a command, the completed share of the work, and the seconds left; None if unknown."""

    stage: str = ""
    share: Annotated[float, msgspec.Meta(ge=0, le=1)] | None = None
    left_s: Annotated[float, msgspec.Meta(ge=0, le=1e9)] | None = None

    @property
    def words(self) -> str:
        """The progress as text, such as `rows, 41 %, 3 min left`."""
        share, left, stage = self.words_apart
        return ", ".join(filter(None, (stage, share, left)))

    @property
    def words_apart(self) -> tuple[str, str, str]:
        """The completed share, the time left and the stage as strings; unknown values are ""."""
        share = "" if self.share is None else f"{100 * self.share:.0f} %"
        left = "" if self.left_s is None else f"{duration(self.left_s)} left"
        return share, left, self.stage


class Planned(msgspec.Struct, frozen=True):
    """The expected total time for a stage over all its runs, and the number of runs."""

    seconds: float
    times: int = 1

    @property
    def seconds_once(self) -> float:
        return self.seconds / self.times


class _Stage:
    """The current stage; `before` maps each stage to the number of its completed runs."""

    def __init__(self, name: str, total: float | None, before: Mapping[str, int]) -> None:
        self.name, self.total, self.before = name, total, before
        self.n = 0.0
        self.began = time.monotonic()
        # Progress reported by another process for this stage.
        self.reported: Reached | None = None

    @property
    def part(self) -> float | None:
        """The completed share of the stage (0 to 1); None if unknown."""
        return min(1.0, self.n / self.total) if self.total else None

    @property
    def left_s(self) -> float | None:
        """The seconds left in the stage at the current rate; None if it is too early for an estimate."""
        elapsed, part = time.monotonic() - self.began, self.part
        return elapsed * (1 - part) / part if part and elapsed > 1 else None

    def after(self) -> dict[str, int]:
        """Return a dict mapping each stage to its number of completed runs, including this run."""
        return {**self.before, self.name: self.before.get(self.name, 0) + 1} if self.name else {**self.before}


class Progress:
    """A context manager that shows a command's progress, over all stages if they are `planned`.

    By default, the progress is written to the file descriptor given in the environment or, without one, to standard
    error.
    """

    def __init__(self, what: str, planned: Mapping[str, Planned] | None = None, *, to_descriptor: bool = True) -> None:
        self.what = what
        self._planned = planned or {}
        self._whole_s = sum(one.seconds for one in self._planned.values())
        # The ratio of the elapsed time to the planned time.
        self._pace = 1.0
        # A new stage gets a new object because another thread may read the current object at any time.
        self._stage = _Stage("", None, {})
        self._began = time.monotonic()
        self._is_done = False
        self._over = threading.Event()
        self._descriptor = _descriptor() if to_descriptor else None
        self._thread = threading.Thread(target=self._show, name="progress", daemon=True)

    def stage(self, name: str, total: float | None = None) -> None:
        """Start a stage of `total` units; None means an unknown number."""
        self._stage = _Stage(name, total, self._stage.after())

    def advance(self, n: float = 1) -> None:
        self._stage.n += n

    def reach(self, reached: Reached) -> None:
        """Show the progress reported by another process."""
        self._stage.reported = reached

    @property
    def reached(self) -> Reached:
        stage = self._stage
        if self._is_done:
            return Reached(stage.name, 1.0, 0.0)
        if stage.reported:
            return stage.reported
        return self._reached_of_plan(stage) if self._whole_s else Reached(stage.name, stage.part, stage.left_s)

    def _reached_of_plan(self, stage: _Stage) -> Reached:
        """Return the completed share of all planned stages, and the time left at the current rate."""
        part, left_in_stage, elapsed = stage.part, stage.left_s, time.monotonic() - stage.began
        once = self._once_s(stage.name)
        if part and once and left_in_stage is not None:
            # Assume that the other stages deviate from the plan by the same factor.
            self._pace = elapsed / part / once
        # A stage without units may take any amount of time, so never show such a stage as more than 90 % complete.
        here = once * part if part is not None else min(elapsed / self._pace, 0.9 * once)
        if stage.before.get(stage.name, 0) >= (self._planned[stage.name].times if once else 0):
            # All planned runs of this stage are complete.
            here = 0.0
        before = sum(
            min(one.times, stage.before.get(name, 0)) * one.seconds_once for name, one in self._planned.items()
        )
        done = min(self._whole_s, before + here)
        left = (self._whole_s - done) * self._pace
        if left_in_stage is not None:
            left += left_in_stage - (once - here) * self._pace
        # The command is still running, even if all planned stages are complete.
        return Reached(stage.name, min(_MOST_SHARE, done / self._whole_s), max(0.0, left))

    def _once_s(self, name: str) -> float:
        """Return the expected time for one run of a stage, in seconds."""
        return self._planned[name].seconds_once if name in self._planned else 0.0

    def __enter__(self) -> Progress:
        _shown.append(self)
        self._thread.start()
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        _shown.remove(self)
        self._is_done = kind is None
        self.close()

    def close(self) -> None:
        """Stop showing progress."""
        self._over.set()
        # Wait until the bar is removed, so that it does not get mixed up with the next output on the terminal.
        self._thread.join(timeout=5)

    def _show(self) -> None:
        show = self._write if self._descriptor is not None else _bar_or_line(self.what)
        # The parent or the terminal may be gone.
        with contextlib.suppress(OSError, ValueError):
            try:
                while not self._over.wait(SHOW_EVERY_S):
                    show(self.reached, time.monotonic() - self._began)
            finally:
                if self._descriptor is not None:
                    self._write(self.reached if self._is_done else None, 0.0)
                    os.close(self._descriptor)
                else:
                    show(None, 0.0)

    def _write(self, reached: Reached | None, _elapsed_s: float) -> None:
        if reached and self._descriptor is not None:
            os.write(self._descriptor, msgspec.json.encode(reached) + b"\n")


_shown: list[Progress] = []


def stage(name: str, total: float | None = None) -> None:
    """Start a stage of `total` units in the active `Progress`."""
    for progress in _shown[-1:]:
        progress.stage(name, total)


def advance(n: float = 1) -> None:
    """Mark `n` more units of the current stage as done."""
    for progress in _shown[-1:]:
        progress.advance(n)


def track(values: Iterable[T], name: str, total: float | None = None) -> Iterator[T]:
    """Start a stage and yield the values; each value is one unit of the stage."""
    stage(name, len(values) if total is None and isinstance(values, Sized) else total)
    for value in values:
        yield value
        advance()


def read_reached(line: bytes) -> Reached | None:
    """Parse a progress line from another process; return None if the line is not valid."""
    try:
        reached = decode_as(line, Reached)
    except ValueError:
        return None
    return msgspec.structs.replace(reached, stage=printable(reached.stage[:_LONGEST_STAGE]))


def _descriptor() -> int | None:
    """Return the file descriptor given in the environment, or None; child processes do not inherit it."""
    with contextlib.suppress(ValueError, OSError):
        number = int(os.environ.pop(ENV_DESCRIPTOR, ""))
        os.set_inheritable(number, False)
        return number
    return None


def _bar_or_line(what: str) -> Callable[[Reached | None, float], None]:
    """Return a function that shows progress on standard error; calling it with None ends the display."""
    return _Bar(what) if sys.stderr.isatty() else _ProgressLines(what)


class _ProgressLines:
    """Prints the progress as a line every 10 s."""

    def __init__(self, what: str) -> None:
        self._what, self._next_s = what, LINE_EVERY_S

    def __call__(self, reached: Reached | None, elapsed_s: float) -> None:
        if reached and elapsed_s >= self._next_s:
            # Schedule the next line relative to the current time; otherwise, a suspended process would print all missed
            # lines when it continues.
            self._next_s = elapsed_s + LINE_EVERY_S
            # Import late: queue processes, which use 20 MiB, import this module, and argparse would add another 1 MiB.
            from trainer.contract.output import complain

            complain(f"{self._what}: {reached.words or f'{duration(elapsed_s)} so far'}\n")


class _Bar:
    """Shows a tqdm bar and removes it at the end."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._bar: Any = None

    def __call__(self, reached: Reached | None, elapsed_s: float) -> None:
        if reached is None:
            if self._bar is not None:
                self._bar.close()
            return
        if self._bar is None:
            if elapsed_s < QUIET_S:
                return
            # Import late because importing tqdm takes a tenth of a command's start-up time.
            from tqdm import tqdm

            self._bar = tqdm(total=100, leave=False, dynamic_ncols=True, bar_format="{desc}|{bar:20}|{postfix}")
        share, left, stage = reached.words_apart
        self._bar.n = 100 * (reached.share or 0.0)
        self._bar.set_description_str(f"{self._what} ", refresh=False)
        self._bar.postfix = " " + " · ".join(filter(None, [stage, share, left or f"{duration(elapsed_s)} so far"]))
        self._bar.refresh()
