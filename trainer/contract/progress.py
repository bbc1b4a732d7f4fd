"""How far a long command is: a bar on a terminal, a line every 10 s elsewhere, and JSON lines for a parent process.

Code deep in a command calls `stage`, `advance` or `track`, which do nothing unless a `Progress` is shown.
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

# The descriptor to which a process writes its progress where a parent has asked for it.
ENV_DESCRIPTOR = "SAE_TUI_PROGRESS_FD"
# Seconds. What takes less than the first shows nothing.
QUIET_S, LINE_EVERY_S, TELL_EVERY_S = 2.0, 10.0, 0.5
_LONGEST_STAGE = 200

T = TypeVar("T")


class Reached(msgspec.Struct, frozen=True):
    """How far it is: what is done now, the share of all that is done, and the seconds left; None where not known."""

    stage: str = ""
    share: Annotated[float, msgspec.Meta(ge=0, le=1)] | None = None
    left_s: Annotated[float, msgspec.Meta(ge=0, le=1e9)] | None = None

    @property
    def words(self) -> str:
        """Write it as `rows, 41 %, 3 min left`."""
        share, left, stage = self.words_apart
        return ", ".join(filter(None, (stage, share, left)))

    @property
    def words_apart(self) -> tuple[str, str, str]:
        """Write the share, the time left and the stage; "" for what is not known."""
        share = "" if self.share is None else f"{100 * self.share:.0f} %"
        left = "" if self.left_s is None else f"{duration(self.left_s)} left"
        return share, left, self.stage


class Planned(msgspec.Struct, frozen=True):
    """How long a stage is expected to take in all, and how often it is gone through."""

    seconds: float
    times: int = 1


class Progress:
    """Shows how far `what` is while it is entered; where stages are `planned`, of all of them together.

    With `to_descriptor` the one of the environment, if there is one, is told in place of standard error.
    """

    def __init__(self, what: str, planned: Mapping[str, Planned] | None = None, *, to_descriptor: bool = True) -> None:
        self.what = what
        self._planned = planned or {}
        self._done: dict[str, int] = {}
        # How many times as long as planned the work takes here.
        self._pace = 1.0
        self._stage, self._n = "", 0.0
        self._total: float | None = None
        self._began = self._stage_began = time.monotonic()
        self._told: Reached | None = None
        self._over = threading.Event()
        self._descriptor = _descriptor() if to_descriptor else None
        self._thread = threading.Thread(target=self._show, name="progress", daemon=True)

    def stage(self, name: str, total: float | None = None) -> None:
        """Begin a stage of `total` units; None where nobody knows how many."""
        self._end_stage()
        self._stage, self._n, self._total, self._told = name, 0.0, total, None
        self._stage_began = time.monotonic()

    def advance(self, n: float = 1) -> None:
        self._n += n

    def reach(self, reached: Reached) -> None:
        """Show what another process tells."""
        self._told = reached

    @property
    def reached(self) -> Reached:
        if self._told:
            return self._told
        part = min(1.0, self._n / self._total) if self._total else None
        elapsed = time.monotonic() - self._stage_began
        left_in_stage = elapsed * (1 - part) / part if part and elapsed > 1 else None
        whole = sum(one.seconds for one in self._planned.values())
        if not whole:
            return Reached(self._stage, part, left_in_stage)
        once = self._once(self._stage)
        if part and once and elapsed > 1:
            # Whatever slows this stage down slows the others down too.
            self._pace = elapsed / part / once
        # A stage without units may take any time; it counts as at most nearly done.
        here = once * part if part is not None else min(elapsed / self._pace, 0.9 * once)
        done = min(whole, sum(min(one.times, self._done.get(name, 0)) * self._once(name)
                              for name, one in self._planned.items()) + here)  # fmt: skip
        left = (whole - done) * self._pace
        if left_in_stage is not None:
            left += left_in_stage - (once - here) * self._pace
        return Reached(self._stage, done / whole, max(0.0, left))

    def _once(self, name: str) -> float:
        """Return how long it is expected to take to go through a stage once."""
        planned = self._planned.get(name)
        return planned.seconds / planned.times if planned else 0.0

    def _end_stage(self) -> None:
        if self._stage:
            self._done[self._stage] = self._done.get(self._stage, 0) + 1

    def __enter__(self) -> Progress:
        _shown.append(self)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        _shown.remove(self)
        self.close()

    def close(self) -> None:
        """Show nothing any more."""
        self._over.set()
        # Whatever comes on the terminal next must find no bar there.
        self._thread.join(timeout=5)

    def _show(self) -> None:
        tell = self._write if self._descriptor is not None else _bar_or_line(self.what)
        try:
            while not self._over.wait(TELL_EVERY_S):
                tell(self.reached, time.monotonic() - self._began)
        except (OSError, ValueError):
            pass  # The parent, or the terminal, has gone.
        finally:
            if self._descriptor is not None:
                os.close(self._descriptor)
            else:
                tell(None, 0.0)

    def _write(self, reached: Reached | None, _elapsed_s: float) -> None:
        if reached and self._descriptor is not None:
            os.write(self._descriptor, msgspec.json.encode(reached) + b"\n")


_shown: list[Progress] = []


def stage(name: str, total: float | None = None) -> None:
    """Begin a stage of what is shown, of `total` units."""
    for progress in _shown[-1:]:
        progress.stage(name, total)


def advance(n: float = 1) -> None:
    """Say that so many more units of the stage are done."""
    for progress in _shown[-1:]:
        progress.advance(n)


def track(values: Iterable[T], name: str, total: float | None = None) -> Iterator[T]:
    """Yield the values, each a unit of a stage."""
    stage(name, len(values) if total is None and isinstance(values, Sized) else total)
    for value in values:
        yield value
        advance()


def read_reached(line: bytes) -> Reached | None:
    """Return what a line of another process tells; None where it is none."""
    try:
        reached = decode_as(line, Reached)
    except ValueError:
        return None
    return msgspec.structs.replace(reached, stage=printable(reached.stage[:_LONGEST_STAGE]))


def _descriptor() -> int | None:
    """Return the descriptor that a parent has asked to be told by, which then nobody else uses."""
    with contextlib.suppress(ValueError, OSError):
        number = int(os.environ.pop(ENV_DESCRIPTOR, ""))
        os.set_inheritable(number, False)
        return number
    return None


def _bar_or_line(what: str) -> Callable[[Reached | None, float], None]:
    """Return what shows progress on standard error: None ends it."""
    return _Bar(what) if sys.stderr.isatty() else _Lines(what)


class _Lines:
    """A line every 10 s."""

    def __init__(self, what: str) -> None:
        self._what, self._next_s = what, LINE_EVERY_S

    def __call__(self, reached: Reached | None, elapsed_s: float) -> None:
        if reached and elapsed_s >= self._next_s:
            self._next_s += LINE_EVERY_S
            # A waiting supervisor imports this module, and argparse takes 1 MiB of its 20.
            from trainer.contract.output import complain

            complain(f"{self._what}: {reached.words or f'{duration(elapsed_s)} so far'}\n")


class _Bar:
    """A bar of tqdm's, which goes when it is over."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._bar: Any = None

    def __call__(self, reached: Reached | None, elapsed_s: float) -> None:
        if reached is None:
            if self._bar is not None:
                self._bar.close()
            return
        if self._bar is None:
            if elapsed_s < QUIET_S / 2:
                return
            # Only here: it takes a tenth of the start of a command.
            from tqdm import tqdm

            self._bar = tqdm(total=100, leave=False, dynamic_ncols=True, bar_format="{desc}|{bar:20}|{postfix}")
        words = [reached.stage, "" if reached.share is None else f"{100 * reached.share:.0f} %"]
        left = f"{duration(elapsed_s)} so far" if reached.left_s is None else f"{duration(reached.left_s)} left"
        self._bar.n = 100 * (reached.share or 0.0)
        self._bar.set_description_str(f"{self._what} ", refresh=False)
        self._bar.postfix = " " + " · ".join(filter(None, [*words, left]))
        self._bar.refresh()
