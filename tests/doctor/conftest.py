"""Fixtures for a sandbox where tests inject faults with real files, programs, limits and mounts."""

from __future__ import annotations

import json
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sae_tui.doctor.base import CheckedMachine
from sae_tui.gpu.none import NoGpus
from trainer.contract.paths import DataDir

ROOT = Path(__file__).parents[2]


class Sandbox:
    """A root folder with its own PATH and environment."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "root"
        self.programs = folder / "bin"
        self.root.mkdir()
        self.programs.mkdir()
        self.data = DataDir(folder / "data")

    def file(self, path: str, content: str = "") -> None:
        """Write a file under the root."""
        target = self.root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(content)

    def program(self, name: str, script: str) -> None:
        """Write an executable file to a folder on the PATH."""
        path = self.programs / name
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)

    def box(self, source: Any = None, *, size: tuple[int, int] | None = (120, 40), **environ: str) -> CheckedMachine:
        environ = {"PATH": str(self.programs), "USER": "ada", **environ}
        box = CheckedMachine(self.data, source or NoGpus(), environ=environ, root=self.root)
        box.size = size
        return box


@pytest.fixture
def sandbox(tmp_path: Path) -> Sandbox:
    return Sandbox(tmp_path)


@pytest.fixture
def in_process(tmp_path: Path) -> Callable[..., list[dict[str, Any]]]:
    """Return a function that runs one of the doctor's checks in another process, with its own limits or mounts."""

    def run(
        check: str,
        *,
        limits: dict[int, tuple[int, int]] | None = None,
        root: Path = Path("/"),
        data: Path | None = None,
        mount: str = "",
    ) -> list[dict[str, Any]]:
        module, _, function = check.partition(":")
        script = f"""
import msgspec, sys
from pathlib import Path
from sae_tui.doctor.base import CheckedMachine
from sae_tui.doctor.{module} import {function}
from sae_tui.gpu.none import NoGpus
from trainer.contract.paths import DataDir
box = CheckedMachine(DataDir(Path({str(data or tmp_path)!r})), NoGpus(), root=Path({str(root)!r}))
print(msgspec.json.encode(list({function}(box))).decode())
"""

        def lower() -> None:
            for name, pair in (limits or {}).items():
                resource.setrlimit(name, pair)

        command = [sys.executable, "-c", script]
        if mount:
            command = ["unshare", "-rm", "sh", "-c", f'{mount} && exec "$@"', "sh", *command]
        done = subprocess.run(
            command, capture_output=True, text=True, preexec_fn=lower, cwd=ROOT, env={"PATH": "/usr/bin:/bin:/sbin"}
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return run


@pytest.fixture
def mounts() -> None:
    """Skip the test if this process cannot create a mount namespace and mount file systems in it."""
    program = shutil.which("unshare")
    if program is None or subprocess.run([program, "-rm", "true"], capture_output=True).returncode:
        pytest.skip("mounting needs user namespaces")


@pytest.fixture
def without_locks(tmp_path: Path) -> Callable[[str], str]:
    """Return a function that runs a script in which all file locks fail with ENOLCK, and returns its output."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("a C compiler is needed to simulate a file system without locks")
    library = tmp_path / "no_locks.so"
    source = ROOT / "tests" / "support" / "no_locks.c"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, source], check=True)

    def run(script: str) -> str:
        environ = {"PATH": "/usr/bin:/bin:/sbin", "LD_PRELOAD": str(library)}
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, env=environ)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run
