"""Builds a C library that replaces libnvidia-ml.so.1, and creates the environment for a process that loads it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "tests" / "gpu" / "fake_nvml" / "fake_nvml.c"
COMPILE = ["gcc", "-O2", "-shared", "-fPIC", "-Wall", "-fvisibility=hidden", "-Wl,-soname,libnvidia-ml.so.1"]


def build_drivers(root: Path) -> Path:
    """Build the libraries `new`, `old`, and `none` (a file that cannot be loaded), each in a folder under `root`."""
    for name in ("new", "old", "none"):
        library = root / name / "libnvidia-ml.so.1"
        library.parent.mkdir()
        options = ["-DOLD_DRIVER"] if name == "old" else []
        if name == "none":
            library.touch()
        else:
            subprocess.run([*COMPILE, *options, "-o", library, SOURCE, "-lm", "-lpthread"], check=True)
    return root


def environment(drivers: Path, driver: str = "new", **variables: Any) -> dict[str, str]:
    """Return the environment for a process that uses the fake driver. The argument GPUS=4 sets FAKE_NVML_GPUS=4."""
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("FAKE_NVML_")}
    fake = {f"FAKE_NVML_{key}": str(value) for key, value in variables.items()}
    return {**inherited, **fake, "LD_LIBRARY_PATH": str(drivers / driver), "PYTHONPATH": str(ROOT)}
