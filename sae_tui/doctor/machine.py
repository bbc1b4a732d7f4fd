"""Checks operating-system limits that affect multi-process jobs."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator

from sae_tui.doctor.base import CheckedMachine, Finding
from trainer.contract.wording import gibibytes

# The size recommended by NVIDIA for containers; Docker's default is 64 MB.
LEAST_SHARED_BYTES = 1 << 30
# Python, torch and NCCL keep about 200 files open per rank; stored activations add one open file per shard.
LEAST_FILES = 1024
LEAST_LOCKED_BYTES = 64 << 20


def check_shared_memory(box: CheckedMachine) -> Iterator[Finding]:
    """Check /dev/shm, which NCCL and data loaders use to pass data between processes."""
    folder = box.root / "dev/shm"
    remedy = "start the container with --shm-size=1g or --ipc=host, or `mount -o remount,size=1g /dev/shm`"
    try:
        status = os.statvfs(folder)
    except OSError as error:
        sentence = f"/dev/shm cannot be used ({error.strerror}), but the processes of a job exchange data through it"
        yield Finding("error", "shared memory", sentence, remedy)
        return
    size, free = status.f_blocks * status.f_frsize, status.f_bavail * status.f_frsize
    sentence = f"/dev/shm has {gibibytes(free)} free of {gibibytes(size)}"
    if size < LEAST_SHARED_BYTES:
        yield Finding("warning", "shared memory", f"{sentence}; jobs on several GPUs may fail below 1 GiB", remedy)
    elif free < LEAST_SHARED_BYTES:
        cure = "remove files that programs left there; `ls -l /dev/shm` lists them"
        yield Finding("warning", "shared memory", f"{sentence}; jobs on several GPUs may fail below 1 GiB", cure)
    else:
        yield Finding("ok", "shared memory", sentence)


def check_open_files(_: CheckedMachine) -> Iterator[Finding]:
    """Check the soft limit on open files. A process starts with the soft limit and may raise it to the hard limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= LEAST_FILES:
        yield Finding("ok", "open files", f"a process may open {_limit(soft)} files")
        return
    sentence = f"a process may open only {soft} files; activations in many shards, or many ranks, need more"
    if hard == resource.RLIM_INFINITY or hard >= LEAST_FILES:
        remedy = f"run `ulimit -n {min(65536, hard) if hard > 0 else 65536}` before sae-tui"
    else:
        remedy = "ask the administrator for a higher nofile limit in /etc/security/limits.conf"
    yield Finding("warning", "open files", sentence, remedy)


def check_locked_memory(box: CheckedMachine) -> Iterator[Finding]:
    """Check the limit on locked memory, which affects InfiniBand, but not the GPU driver."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    enough = soft == resource.RLIM_INFINITY or soft >= LEAST_LOCKED_BYTES
    infiniband = any((box.root / "sys/class/infiniband").glob("*"))
    if enough or not infiniband:
        without = "" if enough else ", which is enough without InfiniBand"
        yield Finding("ok", "locked memory", f"a process may lock {_limit(soft, of_bytes=True)}{without}")
        return
    sentence = f"a process may lock only {_limit(soft, of_bytes=True)}; NCCL over InfiniBand fails with this limit"
    remedy = "run `ulimit -l unlimited`, or ask for memlock in limits.conf; for a container, use --ulimit memlock=-1"
    yield Finding("warning", "locked memory", sentence, remedy)


def _limit(limit: int, *, of_bytes: bool = False) -> str:
    """Format a limit, in bytes or as a plain number."""
    if limit == resource.RLIM_INFINITY:
        return "any amount of memory" if of_bytes else "any number of"
    return gibibytes(limit) if of_bytes else f"{limit:,}"
