"""Builds packages from this source tree, and removes variables that affect pip and Python from an environment."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def build(source: Path, out: Path, *options: str) -> None:
    """Build the packages with the installed build tools."""
    argv = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), *options, str(source)]
    subprocess.run(argv, check=True, capture_output=True, timeout=240)


def plain_environment(**variables: str) -> dict[str, str]:
    """Return the current environment without the variables that affect pip and Python, plus the given variables."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "PYTHON", "NO_COLOR"))}
    return kept | variables
