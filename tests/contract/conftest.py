"""Fixtures for the tests of the contract: shards, jobs, stores and real processes."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from trainer.contract.settings.job import JobConfig
from trainer.contract.settings.job_file import parse_job
from trainer.contract.store.database import open_writer
from trainer.contract.store.job_store import Control
from trainer.contract.store.migrations import MIGRATIONS, Schema
from trainer.contract.store.rows import Job


def shard_bytes(n_tokens: int, d_in: int, *, name: str = "activations", dtype: str = "F32") -> bytes:
    """Return the bytes of a safetensors file, assembled by hand so that tests can corrupt any part of it."""
    size = n_tokens * d_in * {"F16": 2, "BF16": 2, "F32": 4}.get(dtype, 8)
    header = json.dumps({name: {"dtype": dtype, "shape": [n_tokens, d_in], "data_offsets": [0, size]}}).encode()
    return struct.pack("<Q", len(header)) + header + bytes(size)


@pytest.fixture
def write_shard(tmp_path: Path) -> Callable[..., Path]:
    """Return a function that writes a shard to the folder `tmp_path/acts` and returns the folder."""

    def write(n_tokens: int = 1000, d_in: int = 8, *, file: str = "a.safetensors", **options: Any) -> Path:
        folder = tmp_path / "acts"
        folder.mkdir(exist_ok=True)
        (folder / file).write_bytes(shard_bytes(n_tokens, d_in, **options))
        return folder

    return write


@pytest.fixture
def make_job() -> Callable[..., JobConfig]:
    """Return a function that creates a job from the given sections. The default data path does not exist."""

    def make(**sections: dict[str, Any]) -> JobConfig:
        job, problems = parse_job({"data": {"path": "acts"}} | sections)
        assert job is not None, problems
        return job

    return make


@pytest.fixture(scope="session")
def copy_store(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Schema, Path], Path]:
    """Return a function that creates an empty store with the current schema at a path.

    The function copies a store that the fixture has migrated once, because a migration starts a process and takes half
    a second.
    """
    originals = {schema: tmp_path_factory.mktemp("stores") / f"{schema}.db" for schema in MIGRATIONS}
    for schema, path in originals.items():
        open_writer(path, schema).close()

    def copy(schema: Schema, path: Path) -> Path:
        return Path(shutil.copy(originals[schema], path))

    return copy


@pytest.fixture
def control(tmp_path: Path, copy_store: Callable[[Schema, Path], Path]) -> Iterator[Control]:
    with contextlib.closing(Control(copy_store("control", tmp_path / "control.db"))) as opened:
        yield opened


@pytest.fixture
def queued() -> Callable[..., Job]:
    """Return a function that creates the database row of a queued job."""

    def make(**fields: Any) -> Job:
        return Job(
            **{"name": "a", "config": "", "user": "ada", "host": "box", "device": "cuda", "gpu_source": "nvml"} | fields
        )

    return make


class Child:
    """A real Python process that exchanges lines with the test over its standard streams."""

    def __init__(self, code: str, *arguments: object, **options: Any) -> None:
        command = [sys.executable, "-c", code, *map(str, arguments)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, **options)
        self.pid = self.process.pid

    def tell(self, line: object = "") -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()

    def hear(self) -> str:
        """Return the next line that the process prints, or "" if it has exited."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def finish(self) -> int:
        """Close the process's standard input, and return the exit code."""
        self.process.communicate(timeout=60)
        return self.process.returncode


@pytest.fixture
def child() -> Iterator[Callable[..., Child]]:
    """Yield a function that starts processes, and kill them after the test."""
    started: list[Child] = []

    def start(code: str, *arguments: object, **options: Any) -> Child:
        started.append(Child(code, *arguments, **options))
        return started[-1]

    yield start
    for one in started:
        one.process.kill()
        one.process.communicate()


@pytest.fixture
def eventually() -> Callable[..., None]:
    """Return a function that polls a condition until it is true, and fails after a timeout."""

    def wait(condition: Callable[[], object], seconds: float = 20.0) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, "timed out while waiting for the condition"
            time.sleep(0.01)

    return wait


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """Create a folder that every user can access, unlike pytest's temporary folders."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        yield folder
        folder.chmod(0o755)


@pytest.fixture
def ordinary_user() -> Callable[[], contextlib.AbstractContextManager[None]]:
    """Return a context manager that runs its body as user `nobody`, because file permissions do not restrict root."""

    @contextlib.contextmanager
    def become() -> Iterator[None]:
        if os.geteuid() != 0:
            yield
            return
        try:
            os.seteuid(65534)
        except OSError as error:
            pytest.skip(f"root cannot become an ordinary user here: {error}")
        try:
            yield
        finally:
            os.seteuid(0)

    return become
