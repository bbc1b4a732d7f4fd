"""The known causes of a failure, by what the ranks say, and what to do about each."""

from __future__ import annotations

import re
from typing import Literal

import msgspec

Kind = Literal["gpu-memory", "host-memory", "disk", "time-out", "port", "version", "not-finite", "killed"]


class Remedy(msgspec.Struct, frozen=True):
    """A known cause; `may_repeat` says whether the same job could well run through the next time."""

    kind: Kind
    text: str
    may_repeat: bool = True


# What to look for, the first that matches; texts of PyTorch, NCCL, the kernel and our own sentences.
_KNOWN: tuple[tuple[str, Remedy], ...] = (
    (
        r"too little free memory|CUDA out of memory|OutOfMemoryError|CUBLAS_STATUS_ALLOC_FAILED",
        Remedy("gpu-memory", "clone it with half the train.batch_size, or choose GPUs with more free memory", False),
    ),
    (
        r"machine ran out of memory|can't allocate memory|Cannot allocate memory|MemoryError|bad_alloc",
        Remedy("host-memory", "lower train.batch_size, run fewer jobs at once, or free memory of this machine", False),
    ),
    (
        r"No space left|disk .*is full|Disk quota exceeded|free some space|Read-only file system",
        Remedy("disk", "free some space or raise the quota, then resume it: its last good checkpoint is whole"),
    ),
    (
        r"address already in use|EADDRINUSE|connectFullMesh failed",
        Remedy("port", "another process has the port; resume it, which takes a new one"),
    ),
    (
        r"No module named '(torch|numpy|safetensors)",
        Remedy("version", "it was installed when the job was launched; `sae-tui doctor` says how to install it again"),
    ),
    (
        r"CUDA driver error: (operation )?not supported",
        Remedy("version", "start it with PYTORCH_ALLOC_CONF=expandable_segments:False, as virtual GPUs need it", False),
    ),
    (
        r"driver version is insufficient|no kernel image|sees \d+ GPUs, so rank|forward compatibility|CUDA driver",
        Remedy("version", "the PyTorch build does not suit this driver; see `sae-tui doctor`", False),
    ),
    (
        r"Watchdog caught collective operation timeout|NCCL.*time-?d? ?out|DistBackendError|made no step for"
        r"|Timed out waiting|Connection closed by peer",
        Remedy("time-out", "a rank or the link between GPUs hung; stacks.txt of the attempt says where; resume it"),
    ),
    (
        r"not finite|holds (a )?NaN|every SAE .* given up",
        Remedy("not-finite", "lower train.lr, or look for broken values in the activations", False),
    ),
    (
        r"was killed \(SIGKILL\)",
        Remedy("killed", "often the kernel's OOM killer, when memory runs out: `dmesg -T | grep -i oom` tells"),
    ),
)


def remedy(error: str | None) -> Remedy | None:
    """Return what to do about an error; None where its cause is not a known one."""
    return next((cause for pattern, cause in _KNOWN if error and re.search(pattern, error, re.IGNORECASE)), None)
