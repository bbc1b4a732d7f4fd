"""Runs an attempt on machines that SkyPilot rents.

The supervisor stays on this machine. SkyPilot copies the data to the rented machine and starts the job there. The
job's output comes back through `sky logs`; it contains the log, and marked lines with the progress for the run's store.
When the job ends, its files are copied here over ssh, with the host names that SkyPilot adds to `~/.ssh/config`.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from sae_tui.jobs.launchers.base import AttemptSetup
from sae_tui.jobs.launchers.capped_log import CappedLog
from sae_tui.jobs.launchers.ingest import Ingest
from sae_tui.jobs.launchers.ranks import OneRank, RankStates
from sae_tui.jobs.skypilot.client import (
    ANSWER_S,
    END_S,
    LAUNCH_S,
    SkyAnswer,
    SkyCommand,
    SkyError,
    cost_of,
    job_in,
    launch_words,
    machine_in,
    sky,
)
from sae_tui.jobs.skypilot.fetch import SSH, fetch_words
from sae_tui.jobs.skypilot.task import HOME, MARK, THERE, machine_name, make_task
from sae_tui.jobs.supervisor_log import note, tolerate, tolerate_disk
from trainer.contract.errors import UserError
from trainer.contract.files import write_own, write_whole
from trainer.contract.json_file import load_json, write_json
from trainer.contract.paths import open_private, private_folder
from trainer.contract.process import ProcessRef
from trainer.contract.runs.log_tail import last_line
from trainer.contract.runs.rank_spec import EXIT_FAILED, EXIT_FINISHED, EXIT_STOPPED, write_spec
from trainer.contract.settings.catalog import KINDS
from trainer.contract.settings.job_file import to_table
from trainer.contract.settings.skypilot import keeps_elsewhere
from trainer.contract.store.job_store import Control
from trainer.contract.store.rows import Rank
from trainer.contract.trust import open_own

# How often the machine's queue is read: while the job's log is followed, and otherwise.
LOOK_EVERY_S, LOOK_AGAIN_S = 60.0, 5.0
# A machine that cannot be asked is presumed to work for this long: SkyPilot's server or the network may be down.
SILENT_S = 1800.0
# A cancelled job gets SIGTERM, and is killed after 30 s. If its end is not reported by then, it is given up.
CANCELLED_WITHIN_S = 240.0
# How long the rest of the log may take after the job has ended.
LOG_ENDS_S = 20.0
CANCEL_S = 30.0
COPY_S = 4 * 3600.0
# A machine is ended after this many idle minutes once its files are here.
IDLE_MINUTES = 15
# Any other machine is stopped after this many idle minutes, which keeps its disk, because this computer may be off when
# the job ends. Some clouds cannot stop machines.
STOPS_AFTER_MINUTES = 60
RENTED_FILE = "rented.json"
# What is not needed to resume a run elsewhere: the SAE and the log are copied when it has finished, and the metrics are
# here. The checkpoints are copied to the run's own folder.
_NOT_KEPT = ("checkpoints", "sae", "logs", "metrics.db*")
_ENDED = {"SUCCEEDED", "FAILED", "FAILED_DRIVER", "FAILED_SETUP", "CANCELLED"}
_MOST_BYTES, _LOG_BYTES = 4 * 2**20, 256 * 2**20
# The word that SkyPilot puts before each line of a job's output.
_PREFIX = re.compile(r"^(\x1b\[[0-9;]*m)*\([^()]*pid=\d+[^()]*\)(\x1b\[[0-9;]*m)* ?")


class Rented(msgspec.Struct, frozen=True):
    """A job's machine: its name, the number of the attempt's job in its queue, and the run's folder name there."""

    name: str
    job_id: int | None = None


def read_rented(folder: Path) -> Rented | None:
    """Return the machine of an attempt, or None; raise `UserError` if other users may have written its file."""
    try:
        return load_json(folder / RENTED_FILE, Rented, None, open_own)
    except (OSError, ValueError):
        return None


def cancel_left_behind(folder: Path) -> None:
    """Cancel the job of an attempt whose supervisor has exited; its machine keeps running."""
    try:
        if (rented := read_rented(folder)) and rented.job_id is not None:
            answer = sky(["cancel", "--yes", rented.name, str(rented.job_id)], CANCEL_S).wait()
            if answer.failure:
                note(f"cancelling its job on {rented.name}: {answer.failure}")
    except (OSError, UserError) as error:
        note(f"cancelling its job on a rented machine: {error}")


class RentedRank(OneRank):
    """The job on the rented machine, which counts as one rank, whatever the number of its processes.

    For a program, every exit code except 0 means failure.
    """

    def __init__(self, exit_file: Path, log: Path, name: str, *, is_program: bool) -> None:
        super().__init__(0, exit_file)
        self._log, self._machine, self._is_program = log, name, is_program
        self.exit_code: int | None = None
        self.why = ""

    @property
    def ref(self) -> ProcessRef:
        return ProcessRef(0, 0, "")

    @property
    def code(self) -> int | None:
        return None if self.ended is None else self.exit_code

    @property
    def name(self) -> str:
        return f"its job on {self._machine}"

    @property
    def failed(self) -> bool:
        return self.code not in (None, EXIT_FINISHED) if self._is_program else super().failed

    def end(self, code: int, why: str = "") -> None:
        self.ended, self.exit_code, self.why = time.time(), code, why

    def error(self, n_ranks: int) -> str:
        return self.why or super().error(n_ranks)

    def failed_at(self) -> float:
        return self.ended or time.time()

    def last_line(self) -> str:
        return last_line(self._log)


class RentedAttempt(RankStates[RentedRank]):
    """Launches a task with SkyPilot, follows the job on the machine, and copies its files here."""

    _processes = "its job"

    def __init__(self, setup: AttemptSetup) -> None:
        super().__init__(setup)
        self._job = setup.config
        self._trains, self._is_program = KINDS[self._job.kind].trains, KINDS[self._job.kind].is_program
        self._folder = self._paths.attempt(self._spec.attempt)
        self._rented = Rented(machine_name(self._paths.root, self._job.name))
        self._ingest = Ingest(self._paths.progress_file(self._spec.attempt), self._paths.metrics_db)
        self._capped = CappedLog(self._paths.log(0), _LOG_BYTES)
        # The command that launches, the command that reads the job's log, and the question that is being asked.
        self._launching: SkyCommand | None = None
        self._log: LogStream | None = None
        self._asking: tuple[str, SkyCommand] | None = None
        self._requests: list[tuple[str, SkyCommand]] = []
        self._copies: list[Sequence[str]] = []
        self._copying: SkyCommand | None = None
        self._is_running = self._asked_to_stop = self._asked_to_finish = self._is_copying = False
        self._state = ""
        self._exit_code: int | None = None
        self._cancelled_at: float | None = None
        self._ended_since: float | None = None
        self._silent_since: float | None = None
        # Why the machine's queue does not show the job.
        self._problem = ""
        self._look_at = 0.0
        self._told: set[str] = set()

    @property
    def is_halted(self) -> bool:
        """False: this machine cannot determine the state of processes on other machines."""
        return False

    @property
    def is_waiting(self) -> bool:
        return not self._is_running or self._is_copying

    @property
    def was_cut_short(self) -> str:
        return ""

    def how(self) -> str:
        """Return how the job ended, as a predicate like `ended with exit code 2`."""
        return "was cancelled" if self._state == "CANCELLED" else self.ranks[0].how()

    def notes(self) -> list[str]:
        return []

    def start(self) -> None:
        """Launch the task, or follow it if an earlier supervisor has launched it.

        Raise `UserError` if the job cannot run on a rented machine, and `SkyError` if `sky` cannot be started.
        """
        private_folder(self._folder)
        known = read_rented(self._folder)
        self._rented = known or self._rented
        exit_file, log = self._paths.rank_exit(self._spec.attempt, 0), self._paths.log(0)
        job = RentedRank(exit_file, log, self._rented.name, is_program=self._is_program)
        if not known:
            self._launch()
        self.ranks = [job]

    def _launch(self) -> None:
        task = make_task(self._job, self._rented.name, self._stored_before())
        file, log = self._folder / "task.yaml", self._paths.logs / "sky.log"
        # A later attempt reads how this one was started, in order to resume the run.
        write_spec(self._spec)
        write_own(file, task.text)
        write_json(self._folder / RENTED_FILE, self._rented)
        self._launching = sky(launch_words(self._rented.name, file), LAUNCH_S, log)
        kinds = " or ".join(f"{one.per_machine} {one.kind}" for one in task.gpus[:3]) or "no GPU"
        more = " or others" if len(task.gpus) > 3 else ""
        self._tell("rents", f"SkyPilot looks for a machine with {kinds}{more}; its output is in {log}")

    def _stored_before(self) -> dict[str, str]:
        """Return the run's files that were copied here when the job was stopped, by their path on the machine."""
        if self._job.launch.runs_url or not self._trains or not self._kept.is_dir():
            return {}
        there = f"{HOME}/runs/{self._rented.name}"
        return {there: str(self._kept), f"{there}/checkpoints": str(self._paths.checkpoints)}

    @property
    def _kept(self) -> Path:
        """The folder with the small files of the run on the machine, once the job was stopped."""
        return self._paths.root / "rented"

    def wait(self, timeout_s: float) -> list[Rank]:
        """Wait up to `timeout_s` seconds; return the job's row if it has ended."""
        if not self._turn():
            time.sleep(timeout_s)
            self._turn()
        return [self._row(rank) for rank in self.ranks if rank.ended]

    def _turn(self) -> bool:
        """Do what can be done without waiting; return whether the attempt has ended."""
        if not self.alive:
            return True
        try:
            self._read_requests()
            if self._launching:
                self._follow_launch()
            elif self._is_copying:
                self._follow_copies()
            else:
                self._follow_job()
        except SkyError as error:
            self._fail(str(error))
        return not self.alive

    def _follow_launch(self) -> None:
        assert self._launching
        if (answer := self._launching.poll()) is None:
            return
        self._launching = None
        if answer.failure:
            self._abandon()
            self._fail(f"no machine was rented: {answer.failure}")
            return
        name = self._rented.name
        # After an earlier attempt, the machine may be about to end; this replaces that schedule.
        self._requests.append(("autostop", sky(["autostop", name, "--yes", "-i", str(STOPS_AFTER_MINUTES)])))
        view = f"`sae-tui --host {name}` shows its GPUs, `ssh {name}` opens a shell"
        self._tell("rented", f"has the machine {name}; {view}, and `sae-tui down {self._job_id}` ends it")

    def _abandon(self) -> None:
        """Have SkyPilot end the machine of a launch that failed or was given up.

        SkyPilot keeps machines whose setup failed, and its server completes a launch after its client is killed. A
        machine from an earlier attempt may have the only checkpoint, so it is only stopped, once it is idle.
        """
        name = self._rented.name
        is_new = self._spec.attempt == 1
        words = ["down", "--yes", name] if is_new else ["autostop", name, "--yes", "-i", str(STOPS_AFTER_MINUTES)]
        try:
            # Nothing waits for this command, because the supervisor exits now.
            sky(words, END_S)
        except SkyError as error:
            note(f"ending {name}: {error}")
            return
        how = "end its machine" if is_new else "stop its machine when it is idle"
        self._tell("cost", f"SkyPilot is asked to {how} {name}, in case there is one; `sky status` shows it")

    # The methods below follow the job on the machine.

    def _follow_job(self) -> None:
        self._read_log()
        if self._ended_since is not None:
            is_read = self._log is None or time.monotonic() - self._ended_since > LOG_ENDS_S
            if is_read:
                self._conclude()
            return
        if self._cancelled_at is not None and time.monotonic() - self._cancelled_at > CANCELLED_WITHIN_S:
            self._fail(f"did not end when it was cancelled; `sae-tui down {self._job_id}` ends its machine")
        elif self._asking:
            self._take_answer()
        elif time.monotonic() >= self._look_at:
            self._ask("queue", ["queue", self._rented.name, "-o", "json"])

    def _ask(self, what: str, words: Sequence[str]) -> None:
        self._asking = (what, sky(words, ANSWER_S))

    def _take_answer(self) -> None:
        assert self._asking
        what, command = self._asking
        if (answer := command.poll()) is None:
            return
        self._asking, self._look_at = None, time.monotonic() + (LOOK_EVERY_S if self._log else LOOK_AGAIN_S)
        try:
            is_known = self._take_queue(answer) if what == "queue" else self._take_status(answer)
            problem = answer.failure
        except SkyError as error:
            is_known, problem = False, str(error)
        if is_known:
            self._silent_since = None
            return
        self._problem = problem if what == "queue" else problem or self._problem
        self._silent_since = self._silent_since or time.monotonic()
        if time.monotonic() - self._silent_since > SILENT_S:
            self._fail(f"its machine {self._rented.name} cannot be asked: {self._problem or 'it has no such job'}")
        elif what == "queue" and self.alive:
            self._ask("status", ["status", "--refresh", self._rented.name, "-o", "json"])

    def _take_queue(self, answer: SkyAnswer) -> bool:
        """Take the job's state from the machine's queue; return whether it is there."""
        if answer.failure or (job := job_in(answer, self._rented.name, self._rented.job_id)) is None:
            return False
        if self._rented.job_id is None:
            self._rented = Rented(self._rented.name, job.job_id)
            write_json(self._folder / RENTED_FILE, self._rented)
        self._state = job.status
        is_open = self._log is not None and self._log.is_open
        if job.status in _ENDED:
            self._ended_since = time.monotonic()
            if self._exit_code is None and not is_open:
                # The job was short, or its log was cut off.
                self._follow_log()
        elif job.status == "RUNNING":
            self._is_running = True
        if job.status in ("PENDING", "SETTING_UP", "RUNNING") and not is_open:
            self._follow_log()
        if job.status == "SETTING_UP":
            self._tell("setup", f"its machine {self._rented.name} installs sae-tui")
        if self._cancelled_at is None and (self._asked_to_stop and not self._is_running):
            self._cancel()
        return True

    def _take_status(self, answer: SkyAnswer) -> bool:
        """Take the machine's state; return whether the machine is up or being started."""
        if answer.failure and not answer.output.strip():
            return False
        machine = machine_in(answer, self._rented.name)
        if machine is None:
            self._fail(f"its machine {self._rented.name} is gone: the cloud took it back, or it was ended elsewhere")
        elif machine.status not in ("UP", "INIT"):
            self._fail(f"its machine {self._rented.name} is stopped; `sky start {self._rented.name}` starts it again")
        return False

    def _follow_log(self) -> None:
        """Read the job's log from its first line; known lines of progress are skipped."""
        words = ["logs", self._rented.name, str(self._rented.job_id), "--tail", "0"]
        self._log = LogStream(words, self._paths.log(0), self._paths.progress_file(self._spec.attempt))

    def _read_log(self) -> None:
        if self._log is None:
            return
        with tolerate_disk("writing the log of a rented machine"):
            self._log.read()
        with tolerate("reading the run's progress"):
            while self._ingest.poll():
                pass
        self._capped.turn()
        if self._log.exit_code is not None:
            self._exit_code = self._log.exit_code
        if not self._log.is_open:
            self._log, self._look_at = None, min(self._look_at, time.monotonic() + 1)

    # The methods below end the job.

    def ask_to_stop(self) -> None:
        """Ask the trainer to save and stop; cancel a job that is no training, or that cannot be asked."""
        if self._asked_to_stop:
            return
        self._asked_to_stop = True
        if self._trains and self._is_running:
            self._request("stop")
        else:
            self._cancel()

    def ask_to_finish(self) -> None:
        """Ask the trainer to cool down and finish early."""
        if not self._asked_to_finish and self._trains and self._is_running:
            self._asked_to_finish = True
            self._request("finish", "--finish")

    def _request(self, what: str, *options: str) -> None:
        """Have the trainer on the machine take a request."""
        name = self._rented.name
        words = ["sae-tui/venv/bin/sae-train", "stop", f"{THERE}/runs/{name}", *options]
        try:
            self._requests.append((what, SkyCommand([*SSH, name, *words], ANSWER_S)))
        except SkyError as error:
            self._refused(what, str(error))

    def _read_requests(self) -> None:
        for what, command in [*self._requests]:
            if (answer := command.poll()) is not None:
                self._requests.remove((what, command))
                if answer.code != 0:
                    self._refused(what, answer.last_line or "ssh did not answer")

    def _refused(self, what: str, why: str) -> None:
        if what == "autostop":
            idle = f"its machine {self._rented.name} keeps running when it is idle, because it cannot be stopped"
            self._tell(what, f"{idle} ({why.rstrip('.')}); `sae-tui down {self._job_id}` ends it", "warning")
            if self._spec.attempt > 1:
                self._requests.append(("keep", sky(["autostop", self._rented.name, "--yes", "--cancel"])))
            return
        if what in ("cancel", "keep"):
            note(f"sky {what}: {why}")
            return
        self._tell(what, f"its trainer on {self._rented.name} could not be asked to {what}: {why}", "warning")
        if what == "stop":
            self._cancel()

    def _cancel(self) -> None:
        """Cancel the job: its processes get SIGTERM, and are killed after 30 s."""
        if self._launching or self._cancelled_at is not None or self._ended_since is not None:
            return
        if self._rented.job_id is not None:
            self._cancelled_at = time.monotonic()
            words = ["cancel", "--yes", self._rented.name, str(self._rented.job_id)]
            self._requests.append(("cancel", sky(words, ANSWER_S)))
            self._look_at = time.monotonic() + LOOK_AGAIN_S

    def end(self) -> None:
        """Cancel the job, or give up a launch; the machine keeps running, because it may have the only checkpoint."""
        if not self.alive:
            return
        self.ranks[0].ended_by_us = True
        if self._launching:
            self._launching.kill()
            self._launching = None
            self._abandon()
            self._fail("was killed while SkyPilot looked for a machine")
        elif self._is_copying:
            self._end_copies("was killed")
        elif self._rented.job_id is None:
            self._fail(f"was killed before its machine reported it; `sae-tui down {self._job_id}` ends the machine")
        else:
            self._cancel()

    def _fail(self, why: str) -> None:
        """Record that the attempt has failed, and stop following the machine."""
        self._let_go()
        self.ranks[0].end(EXIT_FAILED, why)

    def _let_go(self) -> None:
        commands = [self._launching, self._copying, *(command for _, command in self._requests)]
        for command in (*commands, self._asking and self._asking[1]):
            if command:
                command.kill()
        if self._log:
            self._log.close()
        self._launching = self._copying = self._asking = self._log = None
        self._requests = []
        self._ingest.close()

    def _conclude(self) -> None:
        """Copy what the job has written here, or record its end."""
        code = self._code()
        if code == EXIT_FINISHED:
            self._copies = self._results()
        elif code == EXIT_STOPPED and self._trains and not keeps_elsewhere(self._job):
            self._copies = self._checkpoints()
        self._is_copying = True
        self._next_copy()

    def _code(self) -> int:
        """Return the exit code that the job reported, or that its state implies."""
        if self._asked_to_stop and self._state == "CANCELLED":
            return EXIT_STOPPED
        if self._exit_code is not None and self._state != "CANCELLED":
            return self._exit_code
        return EXIT_FINISHED if self._state == "SUCCEEDED" else EXIT_FAILED

    def _why(self) -> str:
        """Return why the job failed, or "" if its last line says so."""
        words = {
            "CANCELLED": "was cancelled with SkyPilot",
            "FAILED_SETUP": f"sae-tui could not be installed on {self._rented.name}; see its log",
            "FAILED_DRIVER": f"SkyPilot's own process failed; see `sky logs {self._rented.name}`",
        }
        return words.get(self._state, "")

    def _results(self) -> list[Sequence[str]]:
        """Return the commands that copy the SAE or the rows of a finished job here."""
        name = self._rented.name
        there = f"sae-tui/runs/{name}"
        if self._job.writes_rows:
            if self._job.launch.runs_url:
                self._tell("rows", f"its rows are in {self._job.launch.runs_url}, in the folder {name}")
                return []
            return [fetch_words(name, there, Path(to_table(self._job)["extract"]["output"]), ".run")]
        return [fetch_words(name, f"{there}/sae", self._arriving)] if self._trains else []

    def _checkpoints(self) -> list[Sequence[str]]:
        """Return the commands that copy everything here that is needed to resume a run on another machine."""
        name = self._rented.name
        there = f"sae-tui/runs/{name}"
        return [
            fetch_words(name, f"{there}/checkpoints", self._paths.checkpoints),
            fetch_words(name, there, self._kept, *_NOT_KEPT),
        ]

    @property
    def _arriving(self) -> Path:
        return self._folder / "arriving"

    def _next_copy(self) -> None:
        if not self._copies:
            self._end_copies("")
            return
        self._copying = SkyCommand(self._copies.pop(0), COPY_S)

    def _follow_copies(self) -> None:
        if self._copying is None or (answer := self._copying.poll()) is None:
            return
        self._copying = None
        if answer.code != 0:
            self._end_copies(answer.last_line or "it took too long")
        else:
            self._next_copy()

    def _end_copies(self, problem: str) -> None:
        code = self._code()
        if not problem and self._arriving.is_dir():
            shutil.rmtree(self._spec.output_dir, ignore_errors=True)
            private_folder(self._spec.output_dir.parent)
            os.replace(self._arriving, self._spec.output_dir)
        name = self._rented.name
        if problem:
            message = f"its files are still on {name}, because copying them failed: {problem}"
            self._tell("not-copied", f"{message}; copy them with `scp -r {name}:sae-tui/runs .`", "error")
        self._say_cost(is_safe=not problem and code in (EXIT_FINISHED, EXIT_STOPPED))
        self._let_go()
        self.ranks[0].end(code, self._why() if code == EXIT_FAILED else "")

    def _say_cost(self, *, is_safe: bool) -> None:
        """Report the cost, and have SkyPilot end a machine whose files are here; a command's files may be anywhere."""
        name, command = self._rented.name, f"`sae-tui down {self._job_id}` ends it"
        if is_safe and not self._is_program:
            answer = sky(["autostop", name, "--yes", "--down", "-i", str(IDLE_MINUTES)], ANSWER_S).wait()
            if not answer.failure:
                later = f"its machine {name} ends after {IDLE_MINUTES} idle minutes"
                self._tell("cost", f"{later} (`sky autostop --cancel {name}` keeps it); cost: {cost_of(name)}")
                return
        later = "it is stopped when it is idle, if its cloud can do that"
        self._tell("cost", f"its machine {name} is still rented; {later}; {command}; cost: {cost_of(name)}", "warning")

    def describe(self) -> str:
        return f"its job is {self._state or 'not known'} on {self._rented.name}"

    def dump_stacks(self, file: Path) -> None:
        """Write the machine's name to the file instead: this machine cannot read the stacks of remote processes."""
        write_whole(file, f"{self.describe()}; run `py-spy dump` there to see what it is doing\n")

    def _tell(self, kind: str, message: str, level: str = "info") -> None:
        """Add an event to the job, unless this attempt has reported it before."""
        spec = self._spec
        if message in self._told or spec.control_db is None or spec.job_id is None:
            return
        with tolerate("reporting the state of the rented machine"):
            control = Control(spec.control_db)
            try:
                control.add_event(spec.job_id, kind, message, level)
                self._told.add(message)
            finally:
                control.close()


class LogStream:
    """The output of a job on a rented machine: the log, progress for the store, and the exit code.

    SkyPilot sends the output from its first line whenever it is asked, so the log is replaced each time.
    """

    def __init__(self, words: Sequence[str], log: Path, progress: Path) -> None:
        pipe = subprocess.PIPE
        try:
            self._process = subprocess.Popen(
                ["sky", *words], stdin=subprocess.DEVNULL, stdout=pipe, stderr=subprocess.STDOUT, start_new_session=True
            )
        except OSError as error:
            raise SkyError(f"`sky` cannot be started: {error.strerror}") from None
        assert self._process.stdout
        os.set_blocking(self._process.stdout.fileno(), False)
        self._log, self._progress = log, progress
        self._known = _n_lines(progress)
        self._partial, self._seen, self.is_open = b"", 0, True
        self.exit_code: int | None = None
        write_whole(log, b"", durable=False)

    def read(self) -> None:
        """Take all output that is there."""
        assert self._process.stdout
        n_bytes = 0
        while self.is_open and n_bytes < _MOST_BYTES:
            try:
                chunk = os.read(self._process.stdout.fileno(), 2**16)
            except BlockingIOError:
                break
            if not chunk:
                self.close()
            n_bytes += len(chunk)
            *lines, self._partial = (self._partial + chunk).split(b"\n")
            self._partial = self._partial[-_MOST_BYTES:]
            self._take([*lines, *([self._partial] if not chunk and self._partial else [])])

    def _take(self, lines: Sequence[bytes]) -> None:
        texts, progress = [], []
        for line in lines:
            text = _PREFIX.sub("", line.decode(errors="replace").rstrip("\r"))
            mark, _, rest = text.partition(" ")
            if mark != MARK:
                texts.append(text)
            elif rest.startswith("end "):
                self.exit_code = int(rest[4:]) if re.fullmatch("[0-9]{1,3}", rest[4:]) else None
            else:
                self._seen += 1
                progress += [rest] if self._seen > self._known else []
        _append(self._log, texts)
        _append(self._progress, progress)

    def close(self) -> None:
        self.is_open = False
        SkyCommand.end_group(self._process)


def _append(file: Path, lines: Sequence[str]) -> None:
    if not lines:
        return
    descriptor = open_private(file, os.O_APPEND)
    try:
        os.write(descriptor, "".join(f"{line}\n" for line in lines).encode(errors="replace"))
    finally:
        os.close(descriptor)


def _n_lines(file: Path) -> int:
    try:
        return file.read_bytes().count(b"\n")
    except OSError:
        return 0
