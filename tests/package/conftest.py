"""Fixtures for the built packages, and for a virtual environment in which pip has installed the sdist offline."""

from __future__ import annotations

import fcntl
import os
import re
import subprocess
import sys
import venv
from collections.abc import Callable
from pathlib import Path

import pytest
from support import wheelhouse
from support.box import ROOT
from support.packages import build, plain_environment

Make = Callable[[str, Callable[[Path], None]], Path]


@pytest.fixture(scope="session")
def once(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Make:
    """Return a function that creates a folder once for all test processes."""
    base = tmp_path_factory.getbasetemp()
    base = base if worker_id == "master" else base.parent

    def make(name: str, fill: Callable[[Path], None]) -> Path:
        folder, done = base / name, base / f"{name}.done"
        with open(base / f"{name}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not done.exists():
                folder.mkdir()
                fill(folder)
                done.touch()
        return folder

    return make


@pytest.fixture(scope="session")
def dist(once: Make) -> Path:
    """Return a folder with the sdist and the wheel built from it."""
    return once("dist", lambda folder: build(ROOT, folder))


@pytest.fixture(scope="session")
def watching(once: Make, dist: Path) -> Path:
    """Return the `bin` folder of an environment in which the sdist is installed, offline and without extras."""

    def fill(folder: Path) -> None:
        locked = (ROOT / "requirements" / "watch.txt").read_text()
        wheels = folder / "wheels"
        wheels.mkdir()
        wheelhouse.fill(wheels, re.findall(r"^([\w.-]+)==", locked, re.MULTILINE))
        venv.create(folder / "env", symlinks=True)
        (sdist,) = dist.glob("*.tar.gz")
        pip = [sys.executable, "-m", "pip", "--isolated", "--python", str(folder / "env/bin/python")]
        offline = ["--no-index", "--find-links", str(wheels), "--no-compile", "--no-cache-dir"]
        subprocess.run(
            [*pip, "install", *offline, str(sdist)],
            check=True, capture_output=True, timeout=240, env=plain_environment(PIP_CONFIG_FILE=os.devnull),
        )  # fmt: skip

    return once("watching", fill) / "env" / "bin"
