"""Uses namespaces to simulate a host with its own name, boot id, GPUs and package on this machine. Requires root."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import uuid
from pathlib import Path

from jobs.conftest import Box, wait_for
from support.driver import ROOT, build_drivers, environment

from trainer.contract.process import ProcessRef
from trainer.contract.settings.job_file import dump_job
from trainer.contract.store.rows import Job
from trainer.contract.store.states import JobState

_SCRIPT = """
mount --bind "$0/boot_id" /proc/sys/kernel/random/boot_id
[ ! -e /etc/machine-id ] || mount --bind "$0/machine_id" /etc/machine-id
hostname "$1"; echo up; exec sleep infinity
"""
# Code appended to the installed modules: ranks that do not need torch, and a torch check that always passes.
_FAKES = {
    "trainer/contract/runs/rank_spec.py": """

def rank_command(spec_file, *, any_owner=False, python=""):
    return [sys.executable, {program!r}, str(spec_file)]
""",
    "sae_tui/jobs/launch/pytorch.py": """

def cuda_problem(vendors=()):
    return ""
""",
}


class RealHost:
    """A host on which commands start and change jobs. Ranks run `jobs/fake_rank.py`, which does not use torch.

    A fake version of NVIDIA's library provides the GPUs, whose UUIDs depend on `number`.
    """

    def __init__(self, box: Box, name: str, number: int = 0, faults: str = "", gpus: int = 1) -> None:
        self.box = box
        self._folder = box.data.root.parent / f"host-{name}"
        self.package = self._folder / "installed"
        install(self.package)
        self._folder.joinpath("machine_id").write_text(f"{uuid.uuid4().hex}\n")
        (self._folder / "locks").mkdir(mode=0o1777)
        (self._folder / "locks").chmod(0o1777)
        self.driver = self._folder / "driver"
        self.driver.symlink_to(drivers() / "new")
        faults = ",".join(filter(None, ["*:idle", f"*:uuid={256 * number}" if number else "", faults]))
        self.env = environment(drivers(), GPUS=gpus, PIDS="", FAULTS=faults) | {
            "LD_LIBRARY_PATH": str(self.driver),
            "PYTHONPATH": str(self.package),
            "SAE_TUI_LOCK_DIR": str(self._folder / "locks"),
        }
        self.boot(name)

    def __enter__(self) -> RealHost:
        return self

    def __exit__(self, *_: object) -> None:
        self.power_off()

    # The machine

    def boot(self, name: str) -> None:
        """Start the host with this name and a new boot id."""
        self.name = name
        (self._folder / "boot_id").write_text(f"{uuid.uuid4()}\n")
        command = ["unshare", "--uts", "--mount", "sh", "-ec", _SCRIPT, str(self._folder), name]
        self._first = subprocess.Popen(command, stdout=subprocess.PIPE)
        assert self._first.stdout
        assert self._first.stdout.readline() == b"up\n", "the host did not start"

    def power_off(self) -> None:
        """Kill all processes on the host at once, as a power cut would."""
        with contextlib.suppress(FileNotFoundError):
            namespace = os.readlink(f"/proc/{self._first.pid}/ns/uts")
            wait_for(lambda: not self._kill(namespace), "the end of all processes of the host")
        self._first.wait()
        for mark in self.box.data.root.glob("runs/in-use-*"):
            if self.box.job(int(mark.read_text())).host == self.name:
                mark.unlink()

    def _kill(self, namespace: str) -> list[int]:
        """Send SIGKILL to all processes on the host; return the pids that were alive."""
        lived = []
        for entry in Path("/proc").iterdir():
            # A zombie process's namespace link cannot be read.
            with contextlib.suppress(OSError):
                if entry.name.isdigit() and os.readlink(entry / "ns" / "uts") == namespace:
                    lived.append(int(entry.name))
                    os.kill(lived[-1], signal.SIGKILL)
        return lived

    def rename(self, name: str) -> None:
        self._inside("hostname", name)
        self.name = name

    def signal(self, process: ProcessRef, number: signal.Signals) -> None:
        """Send a signal to a process started since this host booted."""
        assert os.readlink(f"/proc/{process.pid}/ns/uts") == os.readlink(f"/proc/{self._first.pid}/ns/uts")
        os.kill(process.pid, number)

    # Commands

    def _inside(self, *command: str) -> subprocess.CompletedProcess[str]:
        of = f"/proc/{self._first.pid}/ns"
        return subprocess.run(
            ["nsenter", f"--uts={of}/uts", f"--mount={of}/mnt", *command],
            env=self.env, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120,
        )  # fmt: skip

    def run(self, *words: object, ok: bool = True) -> str:
        """Run `sae-tui` with these arguments and return its output.

        Check that the command succeeds or, with `ok=False`, that it fails without crashing.
        """
        fixed = [sys.executable, "-P", "-m", "sae_tui", "--data-dir", str(self.box.data.root), "--gpu-source", "nvml"]
        done = self._inside(*fixed, *map(str, words))
        said = (done.stdout + done.stderr).strip()
        assert "Traceback" not in said, said
        assert (done.returncode == 0) == ok, f"{words} ended with {done.returncode}: {said}"
        return said

    def launch(self, *names: str, gpus: str = "auto:1", **place: object) -> list[int]:
        """Launch jobs. Their names determine what their ranks do; `place` contains options like `after=3` or
        `hold=True`.
        """
        folder = Path(tempfile.mkdtemp(dir=self._folder))
        files = [folder / f"{n}.toml" for n in range(len(names))]
        for file, name in zip(files, names, strict=True):
            file.write_text(dump_job(self.box.config(name, gpus=gpus)))
        flags = [f"--{name}" if value is True else f"--{name}={value}" for name, value in place.items()]
        launched, _ = json.JSONDecoder().raw_decode(self.run("launch", "--json", *flags, *files))
        return [one["id"] for one in (launched if isinstance(launched, list) else [launched])]

    def trains(self, job_id: int) -> Job:
        """Wait until a job has taken a step, and return its row. `Box.wait_steps` works only for ranks with the real
        boot id.
        """
        wait_for(lambda: self.box.job(job_id).step, f"steps of job {job_id}", 60)
        return self.box.job(job_id)

    # Guarantees

    def require(self, state: JobState, *job_ids: int, error: str = "") -> None:
        for job_id in job_ids:
            row = self.box.job(job_id)
            assert row.state == state, f"job {job_id} is {row.state}, not {state}: {row.error or row.waits_for}"
            assert error in (row.error or ""), f"{error!r} is not in {row.error!r}"

    def ended(self, *job_ids: int, timeout_s: float = 60.0) -> list[Job]:
        """Wait until these jobs have finished; return their rows."""
        rows = [self.box.wait_ended(job_id, timeout_s) for job_id in job_ids]
        self.require(JobState.FINISHED, *job_ids)
        return rows

    def log(self, job_id: int) -> str:
        return self.box.data.run(job_id).log(0).read_text()


def require_order(*rows: Job) -> None:
    """Check that each of these jobs started after the previous one had ended."""
    for one, other in itertools.pairwise(rows):
        assert (one.ended or 0) <= (other.started or 0), f"job {other.id} did not wait for job {one.id}"


def require_nothing_left(box: Box) -> None:
    """Check that no process or lease remains, and that no GPU was assigned to two jobs at once."""
    folder = os.fsencode(box.data.root)

    def living() -> list[str]:
        lines = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and int(entry.name) != os.getpid():
                with contextlib.suppress(OSError):
                    lines += [line for line in [(entry / "cmdline").read_bytes()] if folder in line]
        return [line.replace(b"\0", b" ").decode(errors="replace") for line in lines]

    try:
        wait_for(lambda: not living(), "the end of all processes", 20)
    except AssertionError:
        raise AssertionError(f"still alive: {living()}") from None
    assert not box.control.leases(), box.control.leases()
    assert not (box.data.root / "runs" / "double-booking").exists(), "one GPU was given to two jobs"


def install(folder: Path) -> None:
    """Copy the packages into a folder, with ranks that do not need torch."""
    for name in ("sae_tui", "trainer"):
        shutil.copytree(ROOT / name, folder / name)
    program = str(ROOT / "tests" / "jobs" / "fake_rank.py")
    for name, text in _FAKES.items():
        with (folder / name).open("a") as module:
            module.write(text.replace("{program!r}", repr(program)))


@functools.cache
def _libraries() -> tempfile.TemporaryDirectory[str]:
    """Return a temporary folder that is removed when this process exits."""
    return tempfile.TemporaryDirectory(prefix="sae-tui-libraries-")


@functools.cache
def drivers() -> Path:
    """Build the fake versions of NVIDIA's library once, plus a version named `hangs` whose first call never returns."""
    folder = Path(_libraries().name) / "drivers"
    folder.mkdir()
    build_drivers(folder)
    (folder / "hangs").mkdir()
    source = "#include <unistd.h>\nint nvmlInitWithFlags(unsigned f) { for (;;) pause(); }\n"
    source += "int nvmlInit_v2(void) { for (;;) pause(); }\n"
    library = folder / "hangs" / "libnvidia-ml.so.1"
    command = ["gcc", "-shared", "-fPIC", "-Wl,-soname,libnvidia-ml.so.1", "-xc", "-", "-o", library]
    subprocess.run(command, input=source, text=True, check=True)
    return folder


@functools.cache
def preloaded(name: str) -> Path:
    """Build a library for LD_PRELOAD from a source file in `support`."""
    library = Path(_libraries().name) / f"{name}.so"
    source = Path(__file__).parents[1] / "support" / f"{name}.c"
    subprocess.run(["gcc", "-O2", "-shared", "-fPIC", "-Wall", "-o", library, source, "-ldl"], check=True)
    return library
