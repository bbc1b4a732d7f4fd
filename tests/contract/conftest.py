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
    """Return a safetensors file built byte by byte, so that tests can corrupt any part of it."""
    size = n_tokens * d_in * {"F16": 2, "BF16": 2, "F32": 4}.get(dtype, 8)
    header = json.dumps({name: {"dtype": dtype, "shape": [n_tokens, d_in], "data_offsets": [0, size]}}).encode()
    return struct.pack("<Q", len(header)) + header + bytes(size)


@pytest.fixture
def write_shard(tmp_path: Path) -> Callable[..., Path]:
    """Return a function that writes `tmp_path/acts/<file>` and returns its folder."""

    def write(n_tokens: int = 1000, d_in: int = 8, *, file: str = "a.safetensors", **options: Any) -> Path:
        folder = tmp_path / "acts"
        folder.mkdir(exist_ok=True)
        (folder / file).write_bytes(shard_bytes(n_tokens, d_in, **options))
        return folder

    return write


@pytest.fixture
def make_job() -> Callable[..., JobConfig]:
    """Return a function that creates a job from the keys of its sections; the default data path does not exist."""

    def make(**sections: dict[str, Any]) -> JobConfig:
        job, problems = parse_job({"data": {"path": "acts"}} | sections)
        assert job is not None, problems
        return job

    return make


@pytest.fixture(scope="session")
def copy_store(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Schema, Path], Path]:
    """Return a function that puts an empty, migrated store at a path.

    It copies an existing store, since a migration needs a process and takes half a second.
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
    """Return a function that creates a job row as a launcher would write it."""

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
        """Return the next line that the process prints; "" once it has exited."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def finish(self) -> int:
        """Close the input of the process and return its exit code."""
        self.process.communicate(timeout=60)
        return self.process.returncode


@pytest.fixture
def child() -> Iterator[Callable[..., Child]]:
    """Return a function that starts processes and ends them after the test."""
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
    """Return a function that polls a condition until it holds and fails after a deadline."""

    def wait(condition: Callable[[], object], seconds: float = 20.0) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, "it did not happen in time"
            time.sleep(0.01)

    return wait


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """Create a folder that every user can reach, unlike pytest's own."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        yield folder
        folder.chmod(0o755)


@pytest.fixture
def ordinary_user() -> Callable[[], contextlib.AbstractContextManager[None]]:
    """Return a context in which the process runs as the user `nobody`, since file permissions do not restrict root."""

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
