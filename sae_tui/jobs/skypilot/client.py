"""Runs SkyPilot's command `sky` without waiting for it, and explains its failures.

Each command runs in a process with a time limit, because it contacts a server that may not respond.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import msgspec

from sae_tui.jobs.supervisor_log import note
from trainer.contract.json_file import decode_as
from trainer.contract.paths import open_private
from trainer.contract.printable import on_one_line

# The time limits. A launch looks for a machine in all regions, copies the data and installs packages.
ANSWER_S, LAUNCH_S, END_S = 120.0, 4 * 3600.0, 900.0
_MOST_BYTES = 2**20
# Colours and cursor movements.
_ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_LONGEST = 300
# Secrets that the machine's programs may need; `sky` takes their values from this process's environment.
SECRETS = ("HF_TOKEN", "WANDB_API_KEY")
_CAPACITY = "resume the job later, or allow other GPUs with launch.gpu_kinds and other clouds with launch.infra"
# Maps text in the command's output to a sentence; the first match counts.
_REASONS = (
    (
        r"api login|Authentication required|ApiServerAuthentication|Unauthorized",
        "SkyPilot is not logged in to its server; run `sky api login`",
    ),
    (
        r"Cloud access is not set up|No enabled cloud|NoCloudAccess|no cloud(s)? (is|are) enabled",
        "SkyPilot has no cloud to rent from; run `sky check`, and follow what it says",
    ),
    (
        r"CloudUserIdentity|credentials? (have|has|is|are)? ?(expired|invalid)|Unable to locate credentials"
        r"|ExpiredToken|InvalidClientTokenId|invalid_grant|Reauthentication|AuthFailure|UnauthorizedOperation",
        "the cloud does not accept SkyPilot's credentials; log in to the cloud again, then run `sky check`",
    ),
    (
        r"[Qq]uota|QUOTA|VcpuLimitExceeded|InstanceLimitExceeded|LimitExceeded",
        f"the cloud's quota allows no more machines of this kind; request a higher quota, or {_CAPACITY}",
    ),
    (
        r"No launchable resource|not found in the catalog|accelerator .* not found",
        "no enabled cloud offers these GPUs; choose others with launch.gpu_kinds, or enable a cloud (`sky check`)",
    ),
    (
        r"InsufficientInstanceCapacity|ZONE_RESOURCE_POOL_EXHAUSTED|[Nn]o capacity|insufficient capacity"
        r"|Failed to provision|ResourcesUnavailable|Failed to acquire resources|out of stock",
        f"no cloud has a free machine of these kinds now; {_CAPACITY}",
    ),
    (
        r"not found on the cloud provider|preempted",
        "the machine is gone: the cloud took it back, or it was ended elsewhere",
    ),
    (r"does not exist|Cluster\(s\) not found|ClusterDoesNotExist", "the machine is gone"),
    (
        r"Could not connect|ConnectionError|Max retries exceeded|Failed to resolve|Name or service not known"
        r"|Network is unreachable|Connection refused",
        "SkyPilot cannot reach its server or the clouds; check this machine's network",
    ),
    (r"InvalidTask|Invalid task|ValidationError|Invalid YAML|is not valid under", "SkyPilot refuses the task file"),
)


class SkyError(OSError):
    """Raised when `sky` cannot be started or reports an error; the text is one sentence."""


class SkyAnswer(msgspec.Struct, frozen=True):
    """The result of a command: its exit code, None if it was killed at its time limit, and its output."""

    code: int | None
    output: str
    errors: str = ""

    @property
    def failure(self) -> str:
        """Why `sky` failed, as one sentence; "" if it did not."""
        if self.code == 0:
            return ""
        return reason(f"{self.output}\n{self.errors}") if self.code is not None else "`sky` did not answer in time"

    @property
    def last_line(self) -> str:
        return _last_line(self.errors) or _last_line(self.output)


class SkyCommand:
    """A running command; its output is kept in a temporary file or, with `log`, appended to a file."""

    def __init__(self, argv: Sequence[str], limit_s: float = ANSWER_S, log: Path | None = None) -> None:
        """Start the command; raise `SkyError` if this fails."""
        self._until, self._log = time.monotonic() + limit_s, log
        self._output = _temporary() if log is None else _append_to(log)
        self._errors = _temporary() if log is None else self._output
        self._start = self._output.seek(0, os.SEEK_END)
        try:
            self._process = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=self._output, stderr=self._errors, start_new_session=True
            )
        except OSError as error:
            self._close()
            raise SkyError(_not_started(argv[0], error)) from None

    def poll(self) -> SkyAnswer | None:
        """Return the answer once the command has ended, or was killed at its time limit; None while it runs."""
        code = self._process.poll()
        if code is None:
            if time.monotonic() < self._until:
                return None
            self.end_group(self._process)
        answer = SkyAnswer(code, self._read(self._output), "" if self._log else self._read(self._errors))
        self._close()
        return answer

    def wait(self) -> SkyAnswer:
        """Wait for the answer, at most until the time limit."""
        while (answer := self.poll()) is None:
            time.sleep(0.05)
        return answer

    def kill(self) -> None:
        """Kill the command; SkyPilot's server may still complete the request."""
        self.end_group(self._process)
        self._close()

    @staticmethod
    def end_group(process: subprocess.Popen[bytes]) -> None:
        """Kill a process with the processes that it started, and wait for its end."""
        with contextlib.suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def _read(self, file: IO[bytes]) -> str:
        first = self._start if self._log else 0
        file.seek(max(first, file.seek(0, os.SEEK_END) - _MOST_BYTES))
        return _ESCAPE.sub("", file.read(_MOST_BYTES).decode(errors="replace"))

    def _close(self) -> None:
        self._output.close()
        self._errors.close()


def sky(words: Sequence[str], limit_s: float = ANSWER_S, log: Path | None = None) -> SkyCommand:
    """Start a `sky` command; raise `SkyError` if it cannot be started."""
    return SkyCommand(["sky", *words], limit_s, log)


def _temporary() -> IO[bytes]:
    return tempfile.TemporaryFile()


def _append_to(log: Path) -> IO[bytes]:
    return os.fdopen(open_private(log, os.O_APPEND | os.O_RDWR), "r+b", buffering=0)


def _not_started(program: str, error: OSError) -> str:
    if program == "sky" and isinstance(error, FileNotFoundError):
        return "the command `sky` is not on $PATH; run `pip install skypilot`, or add its folder to $PATH"
    return f"`{program}` cannot be started: {error.strerror}"


def reason(text: str) -> str:
    """Return one sentence for the output of a command that failed."""
    said = next((sentence for pattern, sentence in _REASONS if re.search(pattern, text)), "")
    detail = _last_line(text)
    if not said:
        return f"SkyPilot says: {detail}" if detail else "`sky` failed without a message"
    return f"{said} (SkyPilot says: {detail})" if "task file" in said else said


def _last_line(text: str) -> str:
    lines = [line.strip() for line in _ESCAPE.sub("", text).splitlines() if line.strip()]
    return on_one_line(lines[-1])[:_LONGEST] if lines else ""


def find_json(text: str, kind: type[Any]) -> Any:
    """Return the JSON value in a command's output, which may begin with other lines.

    Raise `SkyError` if there is none, for example because another version of SkyPilot prints another format.
    """
    starts = [at.start() for at in re.finditer(r"^[\[{]", text, re.MULTILINE)]
    for start in starts:
        with contextlib.suppress(ValueError):
            return decode_as(text[start:], kind)
    raise SkyError(f"`sky` printed no JSON that sae-tui understands, but: {_last_line(text) or 'nothing'}")


class QueuedJob(msgspec.Struct, frozen=True):
    """A job in a machine's queue, as printed by `sky queue -o json`."""

    job_id: int
    status: str


class RentedMachine(msgspec.Struct, frozen=True):
    """A rented machine, as printed by `sky status -o json`."""

    name: str
    status: str
    resources_str: str | None = None
    cloud: str | None = None
    region: str | None = None

    @property
    def words(self) -> str:
        """Where and what the machine is, such as `1x L4 in aws us-east-1`."""
        what = on_one_line(self.resources_str or "a machine")
        place = " ".join(word for word in (self.cloud, self.region) if word)
        return f"{what} in {on_one_line(place)}" if place else what


class Cost(msgspec.Struct, frozen=True):
    """The cost of a machine so far, as printed by `sky cost-report -o json`, in US dollars."""

    name: str
    total_cost: float | None = None
    duration: float | None = None


def machine_in(answer: SkyAnswer, name: str) -> RentedMachine | None:
    """Return the machine with this name from the answer to `sky status`, or None if it is gone."""
    machines: list[RentedMachine] = find_json(answer.output, list[RentedMachine])
    return next((machine for machine in machines if machine.name == name), None)


def job_in(answer: SkyAnswer, name: str, job_id: int | None) -> QueuedJob | None:
    """Return the machine's job from the answer to `sky queue`: the newest job if `job_id` is None."""
    queues: Mapping[str, list[QueuedJob]] = find_json(answer.output, dict[str, list[QueuedJob]])
    jobs = sorted(queues.get(name, []), key=lambda job: -job.job_id)
    return next((job for job in jobs if job_id in (None, job.job_id)), None)


def cost_of(name: str) -> str:
    """Return what a machine has cost so far, such as `$1.32 so far`, or "unknown"."""
    try:
        costs: list[Cost] = find_json(sky(["cost-report", "-o", "json"]).wait().output, list[Cost])
    except SkyError as error:
        note(f"the cost of {name}: {error}")
        return "unknown"
    known = [cost.total_cost for cost in costs if cost.name == name and cost.total_cost is not None]
    return f"${sum(known):.2f} so far, by SkyPilot's estimate" if known else "unknown"


def launch_words(name: str, task: Path) -> list[str]:
    """Return the words after `sky` that launch a task without waiting for it to end."""
    secrets = [word for secret in SECRETS if os.environ.get(secret) for word in ("--secret", secret)]
    return ["launch", "-c", name, "--yes", "--detach-run", *secrets, str(task)]
