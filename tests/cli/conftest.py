"""Fixtures for tests that run commands as real processes, each test with its own data folder."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.answers import check_output
from support.driver import build_drivers
from support.forked_commands import FAKE_RANKS, run_command

from trainer.contract.paths import DataDir
from trainer.contract.store.database import StoreError
from trainer.contract.store.job_store import Control

JOB = """
name = "from-the-shell"
[data]
path = "{path}"
[sae]
d_sae = 16
k = 4
[train]
batch_size = 64
n_steps = 5
log_every = 1
"""


class Shell:
    """Runs `sae-tui` on simulated GPUs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.data = DataDir(folder / "data" / "demo")
        self.job_file = folder / "job.toml"
        self.job_file.write_text(JOB.format(path=self._shard()))
        self.started: list[subprocess.Popen[str]] = []
        self.env = os.environ | {"SAE_TUI_DATA_DIR": str(folder / "data")}

    def argv(self, *arguments: object) -> list[str]:
        return [sys.executable, "-m", "sae_tui", "--demo", *map(str, arguments)]

    def run(self, *arguments: object, code: int | None = 0, **env: str) -> subprocess.CompletedProcess[str]:
        """Run a command and check that it exits with `code`; None accepts any exit code."""
        done = run_command(["--demo", *map(str, arguments)], self.env | env, self.folder, timeout=120)
        assert code in (None, done.returncode), (done.returncode, done.stdout, done.stderr)
        assert "Traceback" not in done.stderr
        check_output(arguments, done.stdout)
        return done

    def json(self, *arguments: object, code: int | None = 0, **env: str) -> Any:
        return json.loads(self.run(*arguments, "--json", code=code, **env).stdout)

    def errors(self, *arguments: object, code: int, **env: str) -> list[str]:
        """Run a command, check that it exits with `code`, and return the lines that it wrote to stderr."""
        return self.run(*arguments, code=code, **env).stderr.splitlines()

    def start(self, *arguments: object) -> subprocess.Popen[str]:
        """Start a long-running command with its output piped."""
        argv = self.argv(*arguments)
        # Restore the default SIGINT handling: if this process ignores it, for example under nohup, so would the child.
        process = subprocess.Popen(
            argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=self.env, preexec_fn=_obey_ctrl_c
        )
        self.started.append(process)
        return process

    def _shard(self) -> Path:
        n_tokens, d_in = 4096, 8
        values = struct.pack(f"<{n_tokens * d_in}f", *((7 * i % 97) / 97 for i in range(n_tokens * d_in)))
        header = {"activations": {"dtype": "F32", "shape": [n_tokens, d_in], "data_offsets": [0, len(values)]}}
        encoded = json.dumps(header).encode()
        path = self.folder / "acts.safetensors"
        path.write_bytes(struct.pack("<Q", len(encoded)) + encoded + values)
        return path

    def end_everything(self) -> None:
        for process in self.started:
            process.kill()
            process.communicate()
        with (
            contextlib.suppress(StoreError),
            contextlib.closing(Control(self.data.control_db, readonly=True)) as control,
        ):
            for job in control.jobs():
                for ref in [job.supervisor, *(rank.process for rank in control.ranks(job.id))]:
                    if ref:
                        ref.send(signal.SIGKILL)
            control.close()


@pytest.fixture(scope="session")
def drivers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build fake versions of NVIDIA's library in the folders `new`, `old` and `none`."""
    return build_drivers(tmp_path_factory.mktemp("fake_nvml"))


def _obey_ctrl_c() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    shell = Shell(tmp_path)
    yield shell
    shell.end_everything()


@pytest.fixture
def fake_ranks(shell: Shell) -> None:
    """Launch jobs whose ranks do not need torch. Use this fixture if a test is not about training."""
    shell.env |= {FAKE_RANKS: "1"}
