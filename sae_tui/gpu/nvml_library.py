"""Loads pynvml, and reloads NVIDIA's NVML library after a driver update."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import itertools
import os.path
from collections.abc import Iterator
from typing import Any

from sae_tui.gpu import nvml_faults as faults

_LIBRARY = "libnvidia-ml.so"
_SONAME = f"{_LIBRARY}.1"
_spellings = itertools.count(1)


def load_pynvml() -> Any:
    """Return the `pynvml` module; raise `SourceUnavailable` if it is missing, broken or from another package."""
    try:
        module = importlib.import_module("pynvml")
    except Exception as error:  # A different package of that name may raise any exception.
        raise faults.broken_pynvml(str(error)) from None
    if not hasattr(module, "nvmlMemory_v2"):
        raise faults.broken_pynvml("it does not come from nvidia-ml-py")
    return module


def has_renewed(pynvml: Any) -> bool:
    """Replace the loaded NVIDIA library with the installed one; return False if they are the same.

    A driver update replaces the file, but the old library stays in memory and does not match the new driver. Load the
    new file as a second library in this process. Call this only while NVML is not initialised.
    """
    for path in _installed():
        with contextlib.suppress(OSError, AttributeError):  # Other versions of pynvml may lack these attributes.
            library = ctypes.CDLL(path)
            if library._handle != pynvml.nvmlLib._handle:
                pynvml._nvmlGetFunctionPointer_cache.clear()
                pynvml.nvmlLib = library
                return True
    return False


def _installed() -> Iterator[str]:
    """Yield the path of each library file loaded by this process, even if the file was replaced."""
    with open("/proc/self/maps", errors="surrogateescape") as maps:
        mapped = {line.split(maxsplit=5)[-1].strip() for line in maps if f"/{_LIBRARY}" in line}
    # For a path it has loaded before, the loader returns the library in memory, so spell the path differently.
    same = "./" * next(_spellings)
    yield from sorted({os.path.join(os.path.dirname(path), same + _SONAME) for path in mapped})
