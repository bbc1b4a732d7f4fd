"""Reads the ranks' PyTorch version from PyTorch's files, because importing it takes seconds and 200 MB of memory."""

from __future__ import annotations

import functools
import importlib.util
import re
from pathlib import Path
from typing import NamedTuple

from trainer.contract.extras import elsewhere
from trainer.contract.planning.gpu_vendors import VENDORS


class Build(NamedTuple):
    """A PyTorch version and its target platform: "cuda", "hip" (ROCm), or "" for neither."""

    version: str
    runtime: str


def installed_build() -> Build | None:
    """Return the installed build of PyTorch, or None if torch is missing or its files do not identify the build.

    If jobs are checked against another Python, return the build that the other Python reports.
    """
    if (there := elsewhere()) is not None:
        return Build(there.torch_version, there.torch_runtime) if there.torch_version else None
    try:
        spec = importlib.util.find_spec("torch")
        file = Path(spec.origin).with_name("version.py") if spec and spec.origin else None
        return _read(file, file.stat().st_mtime_ns) if file else None
    except (OSError, ValueError, ImportError):
        return None


def vendor_of_build(names: list[str]) -> str:
    """Return the vendor whose GPUs the installed PyTorch supports, or the first usable vendor if unknown."""
    usable = [name for name in names if VENDORS[name].device != "cpu"]
    build = installed_build() if len(usable) > 1 else None
    suited = [name for name in usable if build and VENDORS[name].torch_runtime == build.runtime]
    return next(iter(suited or usable), "")


@functools.lru_cache(maxsize=1)
def _read(file: Path, _mtime_ns: int) -> Build | None:
    """Parse the `version.py` of a PyTorch build, in which `cuda` and `hip` are None for an unused platform."""
    text = file.read_text(encoding="utf-8")
    built_for = dict(re.findall(r"^(cuda|hip)\b[^=\n]*=\s*(\S+)", text, re.MULTILINE))
    version = re.search(r"^__version__\s*=\s*['\"](.+?)['\"]", text, re.MULTILINE)
    if version is None or "cuda" not in built_for:
        return None
    return Build(version[1], next((name for name, value in built_for.items() if value != "None"), ""))
