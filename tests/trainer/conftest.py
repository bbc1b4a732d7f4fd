"""Fixtures for the trainer's tests: tiny language models, activations, jobs, trainers and rank processes."""

from __future__ import annotations

import functools
import json
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from support.answers import check_trainers_answer
from support.forked import ForkedRank, Prepare
from support.tiny_models import make_model

from trainer import cli
from trainer.activations import foreign
from trainer.activations.open_source import open_source
from trainer.contract.planning.workload import ONE_PROCESS
from trainer.contract.runs.rank_spec import RankSpec, rank_environment, write_spec
from trainer.contract.settings.inspectors import inspecting_by
from trainer.contract.settings.job import JobConfig
from trainer.contract.settings.job_file import dump_job, parse_job
from trainer.contract.store.metrics_store import MetricRow
from trainer.parallel.base import Parallel
from trainer.ranks import foreground_extraction
from trainer.reporting.progress import RunProgress
from trainer.training.loop import Trainer

D_IN = 16


@pytest.fixture(scope="module", autouse=True)
def _no_data_folder() -> Iterator[None]:
    """Prevent tests from reading or writing measured speeds in the user's data folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SAE_TUI_DATA_DIR", "/dev/null/none")
        yield


@pytest.fixture(scope="session", autouse=True)
def _foreign_formats() -> Iterator[None]:
    """Register the shard formats used by other tools, as the trainer's commands do."""
    with inspecting_by(foreign.inspect):
        yield


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function that creates a family's tiny model on the first call, and returns the model folder."""
    root = tmp_path_factory.mktemp("models")
    return functools.cache(lambda family: make_model(root / family, family))


class Kept(RunProgress):
    """A `RunProgress` that records everything a trainer reports."""

    def __init__(self) -> None:
        super().__init__()
        self.reported: list[MetricRow] = []
        self.events: list[tuple[str, str, str]] = []
        self.phases: list[str] = []

    def heartbeat(self, phase: str, step: int, tokens: int) -> None:
        super().heartbeat(phase, step, tokens)
        self.phases.append(phase)

    def event(self, kind: str, message: str, level: str = "info") -> None:
        self.events.append((kind, level, message))

    def rows(self, rows: Any) -> None:
        self.reported += rows

    def curve(self, name: str) -> list[float]:
        return [row.value for row in self.reported if row.name == name]


@pytest.fixture(autouse=True)
def answers_as_their_schemas(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that all JSON output from commands in this process matches the trainer's schemas."""
    for module, name in ((cli, "_say"), (foreground_extraction, "show_text")):
        monkeypatch.setattr(module, name, functools.partial(_check_and_tell, getattr(module, name)))


def _check_and_tell(tell: Callable[[str], None], text: str) -> None:
    if text.startswith("{"):
        check_trainers_answer(json.loads(text))
    tell(text)


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seed the random number generators, and use a single thread.

    Waiting threads spin, which makes small matmuls 20 times slower on a busy machine.
    """
    torch.manual_seed(0)
    torch.set_num_threads(1)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.fixture
def activations(tmp_path: Path) -> Path:
    """Write 3,000 tokens to two shards with different dtypes. Each token is a sum of a few of 40 directions."""
    generator = torch.Generator().manual_seed(0)
    directions = torch.randn(40, D_IN, generator=generator)
    used = torch.rand(3000, 40, generator=generator) * (torch.rand(3000, 40, generator=generator) < 0.1)
    x = 3 * used @ directions + torch.arange(D_IN)
    folder = tmp_path / "acts"
    folder.mkdir()
    save_file({"activations": x[:1700]}, folder / "a.safetensors")
    save_file({"activations": x[1700:].to(torch.bfloat16)}, folder / "b.safetensors")
    return folder


@pytest.fixture
def make_job(activations: Path) -> Callable[..., JobConfig]:
    """Return a function that creates a small job. Each keyword argument overrides settings in one section."""

    def make(**sections: dict[str, Any]) -> JobConfig:
        table: dict[str, Any] = {
            "data": {"path": str(activations)},
            "sae": {"d_sae": 64, "k": 4, "dead_after_tokens": 600},
            "train": {"batch_size": 128, "n_steps": 20, "lr": 3e-3, "log_every": 5},
            "parallel": {},
            "launch": {},
        }
        for name, keys in sections.items():
            table[name] |= keys
        job, problems = parse_job(table)
        assert job is not None, problems
        return job

    return make


@pytest.fixture
def make_trainer(tmp_path: Path) -> Callable[..., Trainer]:
    """Return a function that creates a trainer in this process, with one rank by default."""

    def make(job: JobConfig, progress: RunProgress | None = None, **options: Any) -> Trainer:
        arguments: dict[str, Any] = {
            "stop": threading.Event(),
            "checkpoints": tmp_path / "checkpoints",
            "output": tmp_path / "sae",
            "parallel": Parallel(torch.device("cpu")),
        }
        return Trainer(
            job,
            source=open_source(job),
            progress=progress or RunProgress(),
            **(arguments | options),
        )

    return make


@pytest.fixture
def kept() -> Kept:
    return Kept()


class Ranks:
    """The rank processes in one attempt, and the spec they share."""

    def __init__(
        self,
        spec: RankSpec,
        command: Callable[[Path], list[str]] | None,
        prepare: Prepare | None,
        measures_in_full: bool,
    ) -> None:
        self.spec = spec
        file = write_spec(spec)
        environments = [rank_environment(spec, rank) for rank in range(spec.n_processes)]
        self.processes: list[Any] = [
            subprocess.Popen(command(file), env=environment, stderr=subprocess.PIPE, text=True, cwd="/")
            if command
            else ForkedRank(file, environment, prepare, measures_in_full=measures_in_full)
            for environment in environments
        ]

    def wait(self, timeout_s: float = 120) -> list[int]:
        """Wait for all ranks and return their exit codes."""
        deadline = time.monotonic() + timeout_s
        return [process.wait(max(0, deadline - time.monotonic())) for process in self.processes]


@pytest.fixture
def start_ranks(tmp_path: Path) -> Iterator[Callable[..., Ranks]]:
    """Yield a function that starts the ranks for a job, and kill all surviving ranks after the test.

    Without `command`, each rank is forked from a process that has imported torch, and calls `prepare` first. The rank
    measures the speed of this machine with little data unless `measures_in_full` is true.
    """
    started: list[Ranks] = []

    def start(
        job: JobConfig,
        world_size: int,
        *,
        run_dir: Path = tmp_path / "run",
        attempt: int = 1,
        command: Callable[[Path], list[str]] | None = None,
        prepare: Prepare | None = None,
        measures_in_full: bool = False,
        **options: Any,
    ) -> Ranks:
        run_dir.mkdir(exist_ok=attempt > 1)
        (run_dir / "job.toml").write_text(dump_job(job))
        spec = RankSpec(
            run_dir=run_dir,
            output_dir=run_dir / "sae",
            attempt=attempt,
            world_size=world_size,
            device="cpu",
            as_one_process=job.parallel.mode in ONE_PROCESS,
            **options,
        )
        started.append(Ranks(spec, command, prepare, measures_in_full))
        return started[-1]

    yield start
    for ranks in started:
        for process in ranks.processes:
            process.kill()
            process.communicate()


@pytest.fixture
def eventually() -> Callable[..., None]:
    """Return a function that waits until a condition is true, and fails after a timeout."""

    def wait(condition: Callable[[], object], timeout_s: float = 60) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, "timed out while waiting for the condition"
            threading.Event().wait(0.02)

    return wait
