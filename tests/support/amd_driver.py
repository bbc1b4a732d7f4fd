"""Builds a C library that replaces AMD's libamd_smi.so, and creates the environment for a process that loads it."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
from pathlib import Path
from typing import Any

from support.driver import ROOT

SOURCE = ROOT / "tests" / "gpu" / "fake_amd_smi" / "fake_amd_smi.c"
COMPILE = ["gcc", "-O2", "-shared", "-fPIC", "-Wall", "-Wno-missing-field-initializers"]


def module_folder() -> Path | None:
    """Return the folder of the installed amdsmi package without importing it, or None if it is not installed."""
    spec = importlib.util.find_spec("amdsmi")
    return Path(spec.origin).parent if spec and spec.origin else None


def build_library(root: Path, module: Path) -> Path:
    """Build the library, with all functions that AMD's Python module needs, in a folder laid out like ROCm's."""
    asked = re.findall(r"_libraries\['libamd_smi\.so'\]\.(\w+)", (module / "amdsmi_wrapper.py").read_text())
    stubs = root / "stubs.c"
    stubs.write_text(
        "".join(f"__attribute__((weak)) int {name}(void) {{ return 2; }}\n" for name in sorted(set(asked)))
    )
    library = root / "lib" / "libamd_smi.so"
    library.parent.mkdir()
    subprocess.run([*COMPILE, "-o", library, SOURCE, stubs], check=True)
    return root


def environment(rocm: Path, **variables: Any) -> dict[str, str]:
    """Return the environment for a process that uses the library. The argument GPUS=4 sets FAKE_AMD_SMI_GPUS=4."""
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("FAKE_AMD_SMI_")}
    fake = {f"FAKE_AMD_SMI_{key}": str(value) for key, value in variables.items()}
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**inherited, **fake, "ROCM_PATH": str(rocm), "PYTHONPATH": path}
