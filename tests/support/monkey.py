"""Presses random keys and sends random bytes to an app with jobs in every state, and reports faults.

PYTHONPATH=tests python -m support.monkey --seeds 0:1000 --keys 2000 --processes 2

The same seed sends the same keys in the same packets, but the app's timing depends on the machine.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import os
import pkgutil
import random
import re
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyte
from support.box import Box
from support.terminal import Terminal
from support.tui import record_metrics
from textual._ansi_sequences import ANSI_SEQUENCES_KEYS
from textual.keys import key_to_character

from trainer.contract.exits import Exit
from trainer.contract.process import ProcessRef
from trainer.contract.store.states import JobState

ROOT = Path(__file__).parents[2]
SIZES = [(40, 12), (60, 20), (80, 24), (120, 40), (200, 60)]
APP = Path(__file__).with_name("fake_training_app.py")
EDITORS = ["true", "false", "no-such-editor", "sed -i s/^k.=.*/k=16/", "sed -i s/^k.=.*/k=banana/"]
WORDS = [
    "7",
    "0.5",
    "1e6",
    "16,32",
    "quick",
    "#good",
    "state:failed",
    "k=8",
    "../x",
    "é日本",
    "-1",
    "fvu",
    "GPU 1",
    "",
    " ",
]
TEXT = "abcdefghijklmnoprstuvwxyz0123456789 .,:#/-_"
PASTES = ["hello world", "/tmp/a job.toml", "line one\nline two\n", "x" * 300, "D y D y", "\x1b[31mred"]
# Terminal input other than keys, such as mouse reports and terminal replies. The test adds random bytes.
BYTES = [
    b"", b"", b"\x1b", b"\x1b[", b"\x1b[M", b"\x1b[<", b"\x1b[<0;9;", b"\x1b[48;", b"\x1b[9999999999;5u", b"\x1b]11;",
    b"\xe2",
]  # fmt: skip
ESCAPE = re.compile(rb"\x1b(?:\[[0-?]*[ -/]*[@-~]|[\]P^_][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")
FRAMES = re.compile("[\u2500-\u257f]")
# This word appears only in the confirmation of a deletion.
DELETION_ASKED = b"SAEs?"
TRACEBACK = b"Traceback (most recent call last):\r\n"
QUIET_S = 0.25


@dataclass
class Result:
    """The result of running one seed.

    `faults` are sentences. `answers_s` contains the time in seconds from each press of `?` until the help is shown.
    """

    seed: int
    size: tuple[int, int]
    keys: int = 0
    starts: int = 0
    seconds: float = 0.0
    answers_s: list[float] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    tail: str = ""

    def __str__(self) -> str:
        size = "x".join(map(str, self.size))
        slowest = max(self.answers_s, default=0.0)
        done = f"{self.seed:5} {size:>7} {self.keys:6} keys {self.starts:3} starts {self.seconds:6.1f} s"
        return f"{done}  ? {slowest:.2f} s  {'; '.join(self.faults) or 'ok'}"


def bound_keys() -> list[bytes]:
    """Return the bytes that a terminal sends for each key bound by a screen, a panel or the app."""
    from textual.widget import Widget

    from sae_tui.app import SaeApp
    from sae_tui.panels.registry import PANELS

    for entry in PANELS.values():
        pkgutil.resolve_name(entry.target)
    codes: set[bytes] = set()
    for owner in [SaeApp, *_subclasses(Widget)]:
        if not owner.__module__.startswith("sae_tui"):
            continue
        for binding in owner.__dict__.get("BINDINGS", []):
            keys = binding[0] if isinstance(binding, tuple) else binding.key
            codes |= {code for key in keys.split(",") if (code := _bytes_of(key.strip()))}
    # Keys that quit the app are left out, because restarting it takes a second. `_choose_key` occasionally presses `q`.
    return sorted(codes - {b"q", b"\x11"})


def _subclasses(kind: type[Any]) -> Iterator[type[Any]]:
    for one in kind.__subclasses__():
        yield one
        yield from _subclasses(one)


def _bytes_of(key: str) -> bytes | None:
    """Return the bytes that a terminal sends for a key, given Textual's name for the key, or None if there are none."""
    sequences = [s for s, keys in ANSI_SEQUENCES_KEYS.items() if isinstance(keys, tuple) and keys[0] == key]
    if sequences:
        return min(sequences, key=len).encode("latin-1")
    character = key if len(key) == 1 else key_to_character(key)
    return character.encode() if character else None


class Monkey:
    """Runs one seed: the app in its own data folder, and a given number of random keys."""

    def __init__(self, seed: int, n_keys: int, folder: Path) -> None:
        self.result = Result(seed, SIZES[seed % len(SIZES)])
        self._n_keys = n_keys
        self._random = random.Random(seed)
        self._keys = bound_keys()
        self._box = Box(folder)
        self._folder = folder
        self._sleepers: list[subprocess.Popen[bytes]] = []
        self._known: set[int] = set()
        # The ids of the jobs named in a deletion question, and the number of jobs in a question that states only a
        # number.
        self._asked: set[int] = set()
        self._n_asked = 0
        self._searched = 0
        self.pressed: list[str] = []

    def run(self) -> Result:
        """Press the random keys; stop at the first fault."""
        started = time.monotonic()
        try:
            self._fill()
            self._start()
            while self.result.keys < self._n_keys and not self.result.faults:
                for _ in range(min(100, self._n_keys // 3)):
                    self._press_some()
                self._look()
            self._leave()
        except AssertionError as error:
            self.result.faults.append(str(error).splitlines()[0])
        finally:
            self.result.seconds = time.monotonic() - started
            self.result.tail = "".join(self.pressed[-400:]) + self.result.tail
            self._end()
        return self.result

    # the box

    def _fill(self) -> None:
        """Record one job in each state. Each unfinished job gets a supervisor process that only sleeps."""
        leased = iter(range(3))
        for state in JobState:
            fields: dict[str, object] = {}
            if state in (JobState.RUNNING, JobState.STARTING, JobState.STALLED):
                gpu = next(leased)
                fields |= {"gpu_ids": (gpu,), "gpu_uuids": (f"GPU-51a0-sim-{gpu}",)}
            if not state.is_final:
                fields["supervisor"] = self._sleeper()
            job_id = self._box.record_job(f"{state} job", state, total_steps=400, **fields)
            record_metrics(self._box.data, job_id, steps=100, ranks=1)
        self._box.record_job("held job", JobState.QUEUED, held=True, tags=("good",), supervisor=self._sleeper())
        sweep = self._box.record_job("a sweep with a rather long name é日本語", JobState.FINISHED)
        record_metrics(self._box.data, sweep, steps=50)
        self._box.record_job(
            "rank 1 ran out", JobState.FAILED, error="rank 1: torch.OutOfMemoryError: CUDA out of memory"
        )
        self._known = self._jobs()

    def _sleeper(self) -> ProcessRef:
        process = subprocess.Popen(["sleep", "3600"], start_new_session=True)
        self._sleepers.append(process)
        sleeper = ProcessRef.of(process.pid)
        assert sleeper
        return sleeper

    def _jobs(self) -> set[int]:
        with closing(sqlite3.connect(f"file:{self._box.data.control_db}?mode=ro", uri=True, timeout=30)) as db:
            return {row[0] for row in db.execute("SELECT id FROM jobs")}

    # the app

    def _start(self) -> None:
        columns, rows = self.result.size
        environment = {
            **self._box.env,
            "EDITOR": self._random.choice(EDITORS),
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")]),
            "HOME": str(self._folder),
        }
        environment.pop("VISUAL", None)
        argv = [sys.executable, str(APP), "--demo"]
        colours = self._random.choice(["", "truecolor"])
        self.terminal = Terminal(
            argv,
            columns=columns,
            rows=rows,
            env=environment,
            colours=colours,
            cwd=self._folder,
            emulated=False,
            controlling=True,
        )
        self._mode = self.terminal.mode
        self._searched = 0
        self.result.starts += 1
        started = time.monotonic()
        while b" RT" not in self.terminal.raw:  # a narrow window shortens the GPUs' names
            self.terminal.read(0.1)
            code = self.terminal.process.poll()
            self._fail_if(code is not None, f"the app exited with code {code} before it showed anything")
            self._fail_if(time.monotonic() - started > 120, "the app shows no GPUs")
        self.terminal.read_until_quiet(QUIET_S, 60)

    def _press_some(self) -> None:
        """Press a few keys in packets of 1 to 8 bytes, sometimes faster than the screen is drawn."""
        stream = b"".join(self._choose_key() for _ in range(self._random.randint(1, 6)))
        while stream:
            n = self._random.randint(1, 8)
            packet, stream = stream[:n], stream[n:]
            self.pressed.append(repr(packet)[2:-1] + " ")
            with suppress(OSError):  # the app has just ended
                self.terminal.send(packet)
            if self._random.random() < 0.6:
                self._read(self._random.choice([0.002, 0.01, 0.03]))
        if self._random.random() < 0.01:
            columns, rows = self._random.choice([*SIZES, (10, 3), (25, 8)])
            self.pressed.append(f"<{columns}x{rows}> ")
            self.terminal.resize(columns, rows)
        self._check()

    def _choose_key(self) -> bytes:
        """Choose a key: usually a bound key, and often one that confirms or closes a dialog."""
        self.result.keys += 1
        kind = self._random.random()
        if kind < 0.55:
            return self._random.choice(self._keys)
        if kind < 0.67:
            return b"\x1b"
        if kind < 0.74:
            return b"\r"
        if kind < 0.78:
            return self._random.choice([b"y", b"n", b" ", b"\t", b"\x7f", b"\x10", b"\x03", b"\x1a"])
        if kind < 0.80:
            return self._random.choice([*WORDS]).encode()
        if kind < 0.81:
            pasted = self._random.choice(PASTES)
            bracketed = self._random.random() < 0.5
            return (f"\x1b[200~{pasted}\x1b[201~" if bracketed else pasted.replace("\n", "\r")).encode()
        if kind < 0.8105:
            return b"q"
        if kind < 0.83:
            return self._random.choice(BYTES) + self._random.randbytes(self._random.randint(0, 5))
        return self._random.choice(TEXT).encode()

    def _read(self, seconds: float) -> None:
        before = len(self.terminal.raw)
        self.terminal.read(seconds)
        at = self.terminal.raw.find(DELETION_ASKED, max(0, before - len(DELETION_ASKED)))
        while at >= 0:
            self._note_question(bytes(self.terminal.raw[max(0, at - 6000) : at]))
            at = self.terminal.raw.find(DELETION_ASKED, at + 1)

    def _note_question(self, drawn: bytes) -> None:
        """Record the ids of the jobs named in a deletion question, or the number of jobs.

        `drawn` is the output up to the end of the question.
        """
        # The cells next to a narrow dialog are drawn between the dialog's lines, but the job's id is in the first line.
        # A partial redraw may leave out this line.
        question = plain(drawn).rpartition("Delete")[2]
        if one := re.match(r"job(\d+)\(", question):
            self._asked.add(int(one[1]))
        else:
            several = re.match(r"\d+", question)
            self._n_asked = max(self._n_asked, int(several[0]) if several else 1)

    def _check(self) -> None:
        """Fail if there was a traceback, an exit that no key requested, or an unconfirmed deletion."""
        raw = self.terminal.raw
        framed = b"\xe2\x94\x82 /" in raw[-20000:] and b" locals " in raw[-20000:]
        # A traceback in a job's log that is shown on the screen does not have these line breaks.
        at = raw.rfind(b"\xe2\x94\x82 /") if framed else raw.find(TRACEBACK, self._searched)
        if at >= 0:
            self._read(0.5)  # the remaining output
            text = ESCAPE.sub(b"", bytes(raw[max(0, at - 3000) : at + 3000])).decode(errors="replace")
            self.result.tail = f"\n{text}"
        self._fail_if(at >= 0, "a traceback")
        self._searched = max(0, len(raw) - 100)
        now = self._jobs()
        if gone := self._known - now:
            deadline = time.monotonic() + 5
            while self._n_asked < len(gone - self._asked) and time.monotonic() < deadline:
                self._read(0.05)  # The question may not have been read yet.
            unasked = gone - self._asked
            asked = self._n_asked >= len(unasked)
            self._fail_if(not asked, f"jobs {sorted(gone)} were deleted without a visible confirmation")
            # Several jobs are deleted one after another.
            self._n_asked -= len(unasked)
            self._asked -= gone
        self._known = now
        if self.terminal.process.poll() is not None:
            self._check_exit()
            self._start()

    def _check_exit(self) -> None:
        """Check that after `q`, the exit code is 0 and the terminal is back in its initial mode."""
        self.terminal.read_until_quiet(0.05, 5)
        raw, code = self.terminal.raw, self.terminal.process.returncode
        left = raw.rfind(b"\x1b[?1049l")
        # After the app has restored the terminal, ctrl+c interrupts the exiting process, as it would any command.
        # ctrl+z makes the terminal discard characters that it has not echoed yet, so the ^C may be missing.
        interrupted = b"^C" in raw[left:] or b"^Z" in raw[left:]
        ends_well = (0, Exit.INTERRUPTED, -signal.SIGINT) if interrupted else (0,)
        broken = TRACEBACK in raw or b"Traceback" in raw[left:]
        self._fail_if(broken or code not in ends_well, f"the app exited with code {code}")
        self._fail_if(self.terminal.mode != self._mode, "the terminal's mode was not restored")
        self._fail_if(left < raw.rfind(b"\x1b[?1049h"), "the terminal is left on the alternate screen")
        self.terminal.close()

    def _leave_all(self) -> None:
        """Close every open screen.

        Wait after each Escape, because Escape followed by another byte would be read as one key.
        """
        for _ in range(6):
            with suppress(OSError):  # the app has just ended
                self.terminal.send(b"\x1b")
            self.pressed.append("<Esc> ")
            self._read(0.15)
        self._wait_until_idle()

    def _wait_until_idle(self) -> None:
        """Wait until all keys have been processed, i.e. until the app is neither using nor waiting for a core."""
        deadline, before = time.monotonic() + 180, -1.0
        while self.terminal.process.poll() is None:
            spent, state = busy_seconds(self.terminal.process.pid)
            if state != "R" and spent - before < 0.1 * QUIET_S:
                return
            self._fail_if(time.monotonic() > deadline, "the app never becomes idle")
            before = spent
            self._read(QUIET_S)

    def _look(self) -> None:
        """Check that `?` opens the help from the dashboard at the original window size, then close the help."""
        self.terminal.resize(*self.result.size)
        self._wait_until_idle()
        self._leave_all()
        self._check()
        if not self._opens_help():
            return
        self.terminal.send(b"\x1b")
        self._read(0.25)
        self._check()

    def _opens_help(self) -> bool:
        """Return whether `?` opens the help. The help may not open if an earlier `q` has just closed the app."""
        if self._asks(3):
            return True
        # There may have been more open dialogs than presses of Escape.
        for _ in range(3):
            self._leave_all()
        if self.terminal.process.poll() is None:
            self._fail_if(not self._asks(20), "the app does not respond to ?")
            return True
        self._check()
        return False

    def _asks(self, seconds: float) -> bool:
        before, asked = len(self.terminal.raw), time.monotonic()
        self.terminal.send(b"?")
        self.pressed.append("<?> ")
        while "GPUsabove" not in plain(bytes(self.terminal.raw[before:])):
            self.terminal.read(0.02)
            if self.terminal.process.poll() is not None or time.monotonic() - asked > seconds:
                return False
        self.result.answers_s.append(time.monotonic() - asked)
        return True

    def _leave(self) -> None:
        if self.result.faults:
            return
        for _ in range(3):
            if self.terminal.process.poll() is None:
                self._leave_all()
                with suppress(OSError):  # the app has just ended
                    self.terminal.send(b"q")
                self._read(2)
        self.terminal.wait_for_exit(30)
        self._check_exit()

    def _fail_if(self, wrong: bool, what: str) -> None:
        if wrong:
            raise AssertionError(what)

    def _end(self) -> None:
        if hasattr(self, "terminal"):
            (self._folder / "raw.txt").write_bytes(bytes(self.terminal.raw))
            if self.result.faults:
                self.result.tail += f"\n{self._screen()}\n{self._stacks()}"
            self.terminal.close()
        self._box.close()
        for process in self._sleepers:
            process.kill()
            process.wait()

    def _stacks(self) -> str:
        """Return the stack traces of the app's threads, recorded during the crash if a signal such as SIGSEGV ended the
        app.
        """
        stacks = self._folder / "stacks.txt"
        if self.terminal.process.poll() is not None:
            return stacks.read_text() if stacks.exists() else ""
        state = busy_seconds(self.terminal.process.pid)[1]
        self.terminal.process.send_signal(signal.SIGUSR1)
        self.terminal.read(0.5)
        return f"state {state}\n{stacks.read_text()}"

    def _screen(self) -> str:
        """Return the text drawn on the screen at the current window size."""
        screen = pyte.Screen(*self.result.size)
        pyte.ByteStream(screen).feed(bytes(self.terminal.raw))
        return "\n".join(screen.display)


def busy_seconds(pid: int) -> tuple[float, str]:
    """Return the core-seconds used by a process, and its state, which is R while it is running or waiting for a core.

    The seconds that its main thread waited for a core are included, because the process gets little CPU time on a busy
    machine.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        waited_ns = int(Path(f"/proc/{pid}/schedstat").read_text().split()[1])
    except OSError:
        return 0.0, "Z"
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK") + waited_ns / 1e9, fields[0]


def plain(raw: bytes) -> str:
    """Remove escape sequences, white space and dialog frames from terminal output."""
    return "".join(FRAMES.sub("", ESCAPE.sub(b"", raw).decode(errors="replace")).split())


def run(seed: int, n_keys: int, keep: Path | None = None) -> Result:
    """Run one seed in a temporary folder; if it fails, keep its keys and output in the folder `keep`."""
    with tempfile.TemporaryDirectory(prefix=f"monkey-{seed}-") as folder:
        result = Monkey(seed, n_keys, Path(folder)).run()
        if result.faults and keep:
            keep.mkdir(parents=True, exist_ok=True)
            (keep / f"{seed}.keys").write_text(result.tail)
            (keep / f"{seed}.raw").write_bytes((Path(folder) / "raw.txt").read_bytes())
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="0:10", help="FIRST:LAST, without LAST")
    parser.add_argument("--keys", type=int, default=2000)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--keep", type=Path, help="folder for the keys and output of failed seeds")
    flags = parser.parse_args()
    seeds = range(*map(int, flags.seeds.split(":")))
    failed, answers = 0, []
    with concurrent.futures.ProcessPoolExecutor(flags.processes) as pool:
        for result in pool.map(run, seeds, [flags.keys] * len(seeds), [flags.keep] * len(seeds)):
            answers += result.answers_s
            failed += bool(result.faults)
            print(result, flush=True)
    print(f"{len(seeds) - failed} of {len(seeds)} seeds without a fault")
    if answers:
        ordered = sorted(answers)
        at = [ordered[int(len(ordered) * share)] for share in (0.5, 0.99)]
        print(f"? responded within {at[0]:.2f} s (median), {at[1]:.2f} s (99 %), {ordered[-1]:.2f} s (worst)")
    return failed > 0


if __name__ == "__main__":
    sys.exit(main())
