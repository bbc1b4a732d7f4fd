"""Records a run's environment: the versions, the commit, the hardware and the command. Errors are ignored."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from trainer.contract.planning.gpu_vendors import VENDORS
from trainer.ranks.devices import torch_vendor, uuid_of

PROJECT = Path(__file__).parents[2]
GIT_TIMEOUT_S = 5.0
_PACKAGES = ("sae-tui", "torch", "numpy", "triton", "safetensors", "msgspec")


def write_environment(file: Path) -> None:
    """Write the environment to a file (mode 0600), with null for unknown values; ignore all errors."""
    from trainer.checkpoints.atomic_folder import write_json

    with contextlib.suppress(Exception):
        write_json(file, environment())


def environment() -> dict[str, Any]:
    """Return the environment as JSON values; GPUs are included only if torch is using CUDA."""
    parts: dict[str, Callable[[], Any]] = {
        "started": lambda: time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": _command_of_parent,
        "working_directory": os.getcwd,
        "versions": versions,
        "git": git_state,
        "hardware": hardware,
    }
    return {name: _or_none(part) for name, part in parts.items()}


def versions() -> dict[str, str | None]:
    """Return the versions of Python, the training packages, and torch's CUDA and ROCm, with None for missing ones."""
    import torch

    by_name = {name: _or_none(partial(importlib.metadata.version, name)) for name in _PACKAGES}
    return {
        "python": platform.python_version(), **by_name, "torch": str(torch.__version__), "cuda": torch.version.cuda,
        "hip": torch.version.hip,
    }  # fmt: skip


def git_state(root: Path = PROJECT) -> dict[str, Any] | None:
    """Return a checkout's commit and whether any files differ from it; None if there is no checkout or git fails."""
    if not (root / ".git").exists():
        return None
    commit = _git(root, "rev-parse", "HEAD")
    status = _git(root, "status", "--porcelain")
    return None if commit is None else {"commit": commit, "dirty": None if status is None else bool(status)}


def hardware() -> dict[str, Any]:
    """Return the host, CPU, GPUs and driver; `cores` is the number of cores that this process may use."""
    return {
        "host": platform.node(),
        "cpu": _or_none(_cpu_model),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "gpus": _or_none(_gpus),
        "driver": _or_none(lambda: Path(VENDORS[torch_vendor()].version_file).read_text().strip()),
    }


def _command_of_parent() -> list[str]:
    """Return the parent's command line, that is, the user's command; a rank's command line only names a spec file."""
    raw = Path(f"/proc/{os.getppid()}/cmdline").read_bytes()
    return [part.decode(errors="replace") for part in raw.rstrip(b"\0").split(b"\0")]


def _cpu_model() -> str | None:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), None)


def _gpus() -> list[dict[str, Any]]:
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return []
    prefix = VENDORS[torch_vendor()].uuid_prefix
    devices = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return [
        {
            "name": gpu.name,
            "memory_bytes": gpu.total_memory,
            "compute_capability": f"{gpu.major}.{gpu.minor}",
            "uuid": uuid_of(gpu.uuid, prefix),
        }
        for gpu in devices
    ]


def _git(root: Path, *arguments: str) -> str | None:
    # Without this option, `status` could lock the index while the user commits.
    command = ["git", "--no-optional-locks", "-C", str(root), *arguments]
    # In a git hook, these variables refer to another repository.
    outside = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            env=outside,
            timeout=GIT_TIMEOUT_S,
        )
        if done.returncode == 0:
            return done.stdout.strip()
    return None


def _or_none(part: Callable[[], Any]) -> Any:
    try:
        return part()
    except Exception:
        return None
