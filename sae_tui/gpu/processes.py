"""While the process list is displayed, reads the processes on the GPUs and the operating system's data about them."""

from __future__ import annotations

import contextlib
import os
import re
import signal
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sae_tui.gpu.base import GpuProcess, GpuSample, ProcessKind, ProcessShares
from sae_tui.gpu.owner import command_line
from sae_tui.gpu.proc_files import arguments_of, read_file
from sae_tui.gpu.secrets import HIDDEN, is_harmless, masked
from trainer.contract.errors import UserError
from trainer.contract.planning.gpu_vendors import VENDORS
from trainer.contract.printable import on_one_line, printable
from trainer.contract.process import ProcessRef, ancestors_of, in_container
from trainer.contract.wording import plural

# Patterns for the cgroups that container runtimes and SLURM create, each with the name to display.
_GROUPS = (
    (re.compile(r"docker[-/]([0-9a-f]{12})[0-9a-f]{52}"), "docker"),
    (re.compile(r"libpod-([0-9a-f]{12})[0-9a-f]{52}"), "podman"),
    (re.compile(r"(?:crio|cri-containerd)-([0-9a-f]{12})[0-9a-f]{52}"), "kubernetes"),
    (re.compile(r"/kubepods.*/([0-9a-f]{12})[0-9a-f]{52}"), "kubernetes"),
    (re.compile(r"/lxc(?:\.payload)?[./]([\w-]+)"), "lxc"),
    (re.compile(r"/job_(\d+)"), "slurm job"),
)

_UNKNOWN = ProcessShares()


@dataclass(frozen=True, slots=True)
class ProcessDetails:
    """A process on one or more GPUs; `started` is in seconds since the epoch.

    `cpu_percent` is relative to one core, and unknown until the process has been read twice. The other percentages are
    the process's shares of a GPU's multiprocessors, memory bandwidth and video units, or its highest shares if it uses
    several GPUs. `identity` is None if the driver lists the process, but it is not visible here because it has exited
    or its pid belongs to another container. `container` is empty if the app runs in the same container. `ancestors`
    contains the process's parent, its grandparent and so on.
    """

    pid: int
    user: str | None
    command: str | None
    gpus: tuple[int, ...] = ()
    memory_used_bytes: int | None = None
    sm_percent: int | None = None
    cpu_percent: float | None = None
    host_memory_bytes: int | None = None
    started: float | None = None
    identity: ProcessRef | None = None
    container: str = ""
    ancestors: tuple[Ancestor, ...] = ()
    kind: ProcessKind | None = None
    bandwidth_percent: int | None = None
    encoder_percent: int | None = None
    decoder_percent: int | None = None
    host_memory_percent: float | None = None

    @property
    def key(self) -> Hashable:
        """A value that is constant while the process exists; a later process with the same pid has a different key."""
        return self.pid, self.identity


@dataclass(frozen=True, slots=True)
class Ancestor:
    """An ancestor of a process on a GPU."""

    pid: int
    user: str | None
    command: str | None


class ProcessReader:
    """Reads the processes on GPUs, and remembers them between reads to compute CPU usage from two reads."""

    def __init__(self) -> None:
        self._known: dict[int, _OsProcess] = {}

    def read(
        self, samples: Iterable[GpuSample], shares: Mapping[int, Mapping[int, ProcessShares]]
    ) -> tuple[ProcessDetails, ...]:
        """Return all processes without duplicates, in descending order of GPU memory.

        `shares` maps each GPU index to a dict mapping pids to the processes' shares of the GPU.
        """
        by_pid: dict[int, list[tuple[int, GpuProcess]]] = {}
        for sample in samples:
            for process in sample.processes or ():
                by_pid.setdefault(process.pid, []).append((sample.index, process))
        self._known = {pid: host for pid in by_pid if (host := self._host(pid))}
        found = [self._details(pid, on_gpus, shares) for pid, on_gpus in by_pid.items()]
        return tuple(sorted(found, key=lambda one: -(one.memory_used_bytes or 0)))

    def _host(self, pid: int) -> _OsProcess | None:
        """Return the remembered process with this pid, or a new one if the pid now belongs to another process."""
        known = self._known.get(pid)
        return known if known is not None and known.identity.is_alive() else _OsProcess.of(pid)

    def _details(
        self, pid: int, on_gpus: list[tuple[int, GpuProcess]], shares: Mapping[int, Mapping[int, ProcessShares]]
    ) -> ProcessDetails:
        parts = [process for _, process in on_gpus]
        sizes = [one.memory_used_bytes for one in parts if one.memory_used_bytes is not None]
        used = [shares[index][pid] for index, _ in on_gpus if pid in shares.get(index, ())]
        sm, bandwidth, encoder, decoder = (_highest(values) for values in zip(*used, strict=True)) if used else _UNKNOWN
        listed = parts[0]
        host = self._known.get(pid)
        # If the process with this pid belongs to another user here, the driver's pid is from another container.
        if host is not None and None is not listed.user != host.user:
            host = None
        return ProcessDetails(
            pid,
            host.user if host else listed.user,
            (host.command if host else None) or listed.name,
            tuple(index for index, _ in on_gpus),
            sum(sizes) if len(sizes) == len(parts) else None,
            sm,
            kind=_kind([one.kind for one in parts]),
            bandwidth_percent=bandwidth,
            encoder_percent=encoder,
            decoder_percent=decoder,
            **(host.now() if host else {}),
        )


def _highest(values: Iterable[int | None]) -> int | None:
    return max((value for value in values if value is not None), default=None)


def _kind(kinds: Sequence[ProcessKind | None]) -> ProcessKind | None:
    """Return the kind of a process, given its kinds on the GPUs that it uses."""
    known = {kind for kind in kinds if kind is not None}
    return "C+G" if len(known) > 1 else next(iter(known), None)


class _OsProcess:
    """The operating system's data about a process; values that never change are read only once."""

    def __init__(self, process: Any, identity: ProcessRef) -> None:
        self.identity = identity
        self.user, self.command = _owner(process)
        self._process = process
        self._has_cpu = False
        self._container = container_of(identity.pid)
        self._ancestors = tuple(_ancestors(identity.pid))

    @classmethod
    def of(cls, pid: int) -> _OsProcess | None:
        """Return the process that currently has this pid, or None."""
        # Read the identity first, to detect whether the pid is reused during the reads below.
        identity = ProcessRef.of(pid)
        with _unless_gone():
            host = cls(_process(pid), identity) if identity else None
            return host if host is not None and host.identity.is_alive() else None
        return None

    def now(self) -> dict[str, Any]:
        """Return the process's current data as keyword arguments for `ProcessDetails`."""
        cpu = memory = share = started = None
        with _unless_gone(), self._process.oneshot():
            started, used = self._process.create_time(), self._process.cpu_percent()
            # The first value is always 0, because CPU usage is measured between two reads.
            cpu, self._has_cpu = used if self._has_cpu else None, True
            memory, share = self._process.memory_info().rss, self._process.memory_percent()
        return {
            "cpu_percent": cpu, "host_memory_bytes": memory, "host_memory_percent": share, "started": started,
            "identity": self.identity, "container": self._container, "ancestors": self._ancestors,
        }  # fmt: skip


def _process(pid: int) -> Any:
    import psutil  # Importing psutil takes 15 ms, so import it only when the processes are displayed.

    return psutil.Process(pid)


def _unless_gone() -> contextlib.AbstractContextManager[None]:
    """Suppress errors caused by a process that has exited or may not be read."""
    import psutil

    return contextlib.suppress(psutil.Error, OSError)


def _owner(process: Any) -> tuple[str | None, str | None]:
    """Return a process's user and command line; each is None if it cannot be read."""
    user = command = None
    with _unless_gone():
        user = printable(str(process.username()))
        command = on_one_line(command_line(arguments_of(process.pid), most=None))
    return user, command


def _ancestors(pid: int) -> Iterable[Ancestor]:
    """Yield the ancestors of a process, starting with its parent and excluding process 1."""
    for parent in ancestors_of(pid):
        user = command = None
        with _unless_gone():
            user, command = _owner(_process(parent))
        yield Ancestor(parent, user, command)


def container_of(pid: int) -> str:
    """Return a process's container or cluster job, or "" if it has none or shares it with the app."""
    theirs, ours = (_group(path) for path in (f"/proc/{pid}/cgroup", "/proc/self/cgroup"))
    return "" if theirs == ours else theirs


def _group(path: str) -> str:
    """Return the container named in a cgroup file, like `docker 3f2a91bc04de`, or ""."""
    try:
        text = Path(path).read_text(errors="replace")[:65_536]
    except OSError:
        return ""
    found = ((program, pattern.search(text)) for pattern, program in _GROUPS)
    return next((printable(f"{program} {match[1]}") for program, match in found if match), "")


@dataclass(frozen=True, slots=True)
class Surroundings:
    """A process's working folder, program and environment; all are empty if this user may not read them."""

    folder: str = ""
    program: str = ""
    environment: tuple[tuple[str, str], ...] = ()

    def shown(self, *, whole: bool = False) -> tuple[tuple[str, str], ...]:
        """Return the environment variables; unless `whole`, hide every value not known to be harmless."""
        return tuple((name, value if whole else _harmless(name, value)) for name, value in self.environment)


def surroundings(process: ProcessDetails) -> Surroundings:
    """Read a process's working folder, program and environment; only its user and root may do so.

    The result contains secrets, which `Surroundings.shown` hides.
    """
    if process.identity is None:
        return Surroundings()
    here = Path(f"/proc/{process.pid}")
    folder, program = (printable(_target(here / name)) for name in ("cwd", "exe"))
    environment = b""
    with contextlib.suppress(OSError):
        environment = read_file(here / "environ")
    # If the process has exited, the values may belong to another process with the same pid.
    if not process.identity.is_alive():
        return Surroundings()
    pairs = (entry.partition("=") for entry in environment.decode("utf-8", "replace").split("\0") if "=" in entry)
    read = {printable(name): printable(value) for name, _, value in pairs}
    return Surroundings(folder, program, tuple(sorted(read.items())))


def _harmless(name: str, value: str) -> str:
    return masked(value) if is_harmless(name) else HIDDEN


_MOST_REASONS = 5  # in a message about a signal to several processes
SIGNALS = {
    signal.SIGINT: "interrupt it, as ctrl+c does",
    signal.SIGTERM: "ask it to exit",
    signal.SIGKILL: "kill it immediately, without saving",
    signal.SIGSTOP: "pause it; it keeps its memory",
    signal.SIGCONT: "resume it",
}
ENDING_SIGNALS = frozenset({signal.SIGINT, signal.SIGTERM, signal.SIGKILL})


def send_signal(process: ProcessDetails, number: signal.Signals, source_name: str) -> str:
    """Send a signal to exactly the process that was displayed; return a message about the result.

    Raise `UserError` if the process has exited, belongs to another user or is not visible here. In a container, also
    raise `UserError` if the process with this pid has not opened the GPU driver, since the driver's pid then belongs to
    a process in another container.
    """
    what = f"process {process.pid}"
    if process.identity is None:
        raise UserError(
            f"{what} cannot be seen from here, so no signal can be sent to it; it may belong to a container"
        )
    try:
        owner = os.stat(f"/proc/{process.pid}").st_uid
    except OSError:
        raise UserError(f"{what} has already exited") from None
    if os.geteuid() not in (0, owner):
        raise UserError(f"{what} belongs to {process.user}; only {process.user} or root can send it a signal")
    if in_container() and not _has_open(process.pid, _driver_files(source_name)):
        raise UserError(f"{what} here has no GPU open; the driver's pid belongs to another container")
    if not process.identity.send(number):
        raise UserError(f"{what} has already exited")
    return f"{number.name} was sent to {what}"


def send_signals(processes: Sequence[ProcessDetails], number: signal.Signals, source_name: str) -> str:
    """Send a signal to each process, as `send_signal` does; return how many received it and why others did not.

    Raise `UserError` if none received it.
    """
    refused: list[str] = []
    for process in processes:
        try:
            send_signal(process, number, source_name)
        except UserError as error:
            refused.append(str(error))
    n_sent, everyone = len(processes) - len(refused), plural(len(processes), "process")
    sent_to = f"{n_sent or 'none'} of {everyone}" if refused else everyone
    n_more = len(refused) - _MOST_REASONS
    more = [f"{n_more} more did not receive it"] if n_more > 0 else []
    result = "; ".join([f"{number.name} was sent to {sent_to}", *refused[:_MOST_REASONS], *more])
    if not n_sent:
        raise UserError(result)
    return result


def _driver_files(source_name: str) -> frozenset[str]:
    """Return the device files for a source's GPU drivers, or an empty set for simulated GPUs."""
    if source_name == "simulated":
        return frozenset()
    vendors = [VENDORS[source_name]] if source_name in VENDORS else VENDORS.values()
    return frozenset(file for vendor in vendors for file in vendor.driver_files)


def _has_open(pid: int, files: frozenset[str]) -> bool:
    if not files:
        return True
    links = Path(f"/proc/{pid}/fd")
    with contextlib.suppress(OSError):
        return any(_target(link) in files for link in links.iterdir())
    return False


def _target(link: Path) -> str:
    with contextlib.suppress(OSError):
        return os.readlink(link)
    return ""
