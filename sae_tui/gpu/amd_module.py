"""Loads AMD's Python module amdsmi, which works only with the matching version of ROCm's library."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import sys
import threading
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import TextIO

from sae_tui.gpu import amd_faults as faults


def load_amdsmi() -> ModuleType:
    """Return the `amdsmi` module, preferably ROCm's own, because structures in other versions may differ.

    Raise `SourceUnavailable` if there is no module, or if it does not match the library.
    """
    if "amdsmi" in sys.modules:
        return sys.modules["amdsmi"]
    spec = _spec_of_rocm() or importlib.util.find_spec("amdsmi")
    if spec is None or spec.loader is None:
        raise faults.no_module()
    module = importlib.util.module_from_spec(spec)
    sys.modules["amdsmi"] = module
    # If the module does not find the library, it prints an error, which would corrupt the screen unless captured.
    words = _OwnThread(sys.stdout)
    try:
        with contextlib.redirect_stdout(words):
            spec.loader.exec_module(module)
        return _checked(module)
    except Exception as error:  # For example AttributeError or KeyError, if the library is missing or too old.
        _forget()
        raise faults.broken_module(_reason(words.getvalue(), error)) from None


class _OwnThread(io.StringIO):
    """Captures output from the thread that creates this object; forwards output from other threads to `others`."""

    def __init__(self, others: TextIO) -> None:
        super().__init__()
        self._thread, self._others = threading.get_ident(), others

    def write(self, text: str) -> int:
        return super().write(text) if threading.get_ident() == self._thread else self._others.write(text)

    def flush(self) -> None:
        self._others.flush()


def _spec_of_rocm() -> ModuleSpec | None:
    """Return the spec of the module installed by ROCm, or None if there is no such module."""
    root = os.environ.get("ROCM_PATH") or os.environ.get("ROCM_HOME") or "/opt/rocm"
    folder = Path(root, "share", "amd_smi", "amdsmi")
    if not (folder / "__init__.py").is_file():
        return None
    return importlib.util.spec_from_file_location(
        "amdsmi", folder / "__init__.py", submodule_search_locations=[str(folder)]
    )


def _checked(module: ModuleType) -> ModuleType:
    if not hasattr(module, "amdsmi_get_gpu_vram_usage") or not hasattr(module, "AmdSmiLibraryException"):
        raise TypeError("it is a different module of that name, or it is from ROCm 5")
    return module


def _reason(printed: str, error: Exception) -> str:
    if "libamd_smi" in printed:
        return "ROCm's library libamd_smi.so is missing"
    return str(error) or type(error).__name__


def _forget() -> None:
    """Remove a partially loaded module from `sys.modules` so that it can be loaded again."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "amdsmi"]:
        del sys.modules[name]
