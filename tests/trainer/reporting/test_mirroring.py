from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from trainer.contract.errors import JobFileError
from trainer.contract.planning.check_job import Machine, check
from trainer.contract.settings.catalog import MIRRORS, MirrorEntry
from trainer.contract.settings.job import JobConfig
from trainer.contract.store.metrics_store import MetricRow, SeriesReader
from trainer.reporting.mirroring import Dealer, with_mirrors
from trainer.reporting.mirrors.base import Mirror, MirroredRun
from trainer.reporting.progress import StoredProgress

MakeJob = Callable[..., JobConfig]


class Toy(Mirror):
    """A mirror that stores the data it receives, and can be made to fail or hang."""

    opened: list[Toy] = []
    fails_in, hangs = "", threading.Event()

    def __init__(self, run: MirroredRun) -> None:
        self._may_fail("open")
        self.run = run
        self.kept: list[tuple[str, int, dict[str, float]]] = []
        self.is_closed = False
        self.opened.append(self)

    @property
    def place(self) -> str:
        return "a list"

    def log(self, label: str, step: int, values: Mapping[str, float]) -> None:
        self._may_fail("log")
        self.kept.append((label, step, dict(values)))

    def flush(self) -> None: ...

    def close(self) -> None:
        if self.fails_in == "never ends":
            self.hangs.wait()
        self.is_closed = True

    def _may_fail(self, where: str) -> None:
        if self.fails_in == where:
            raise ConnectionError(f"no\nway to {where}")


@pytest.fixture(autouse=True)
def toy(monkeypatch: pytest.MonkeyPatch) -> type[Toy]:
    monkeypatch.setitem(MIRRORS, "toy", MirrorEntry(f"{__name__}:Toy", "A toy.", "json"))
    monkeypatch.setattr(MirrorEntry, "load", lambda entry: Toy)
    monkeypatch.setattr(Toy, "opened", [])
    monkeypatch.setattr("trainer.reporting.mirroring.HAND_OVER_S", 0.02)
    return Toy


@contextlib.contextmanager
def reporting(job: JobConfig, folder: Path) -> Iterator[Any]:
    """Yield a progress object that reports to the store and to the mirrors configured in a job."""
    stored = StoredProgress(folder / "metrics.db", 100, threading.Event(), None)
    progress = with_mirrors(stored, job, folder, 0)
    yield progress
    progress.close()


def told(folder: Path) -> list[tuple[str, str]]:
    with contextlib.closing(SeriesReader(folder / "metrics.db")) as reader:
        assert reader.latest() == {"loss": 0.5}
        return [(event.level, event.message) for event in reader.events()]


def test_a_mirror_gets_all_metric_rows_and_is_closed(make_job: MakeJob, tmp_path: Path) -> None:
    with reporting(make_job(train={"mirror": "toy"}), tmp_path) as progress:
        progress.rows([MetricRow("loss", 1, 1.0)])
        progress.rows([MetricRow("loss", 2, 0.5)])
        progress.heartbeat("training", 2, 64)
        assert progress.place == ("training", 2)
    (toy,) = Toy.opened
    assert {step: values for _, step, values in toy.kept} == {1: {"loss": 1.0}, 2: {"loss": 0.5}}
    assert toy.is_closed
    assert told(tmp_path) == [("info", "the metrics are also sent to toy: a list")]


@pytest.mark.parametrize("where", ["open", "log"])
def test_a_failing_mirror_is_reported_only_once(
    where: str, make_job: MakeJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Toy, "fails_in", where)
    with reporting(make_job(train={"mirror": ["toy"]}), tmp_path) as progress:
        for step in range(50):
            progress.rows([MetricRow("loss", step, 0.5)])
    warnings = [one for one in told(tmp_path) if one[0] == "warning"]
    assert warnings == [("warning", f"toy receives no further metrics: no way to {where}")]


def test_a_mirror_that_does_not_close_is_abandoned_and_reported(
    make_job: MakeJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Toy, "fails_in", "never ends")
    monkeypatch.setattr("trainer.reporting.mirroring.CLOSE_S", 0.3)
    with reporting(make_job(train={"mirror": "toy"}), tmp_path) as progress:
        progress.rows([MetricRow("loss", 1, 0.5)])
    assert told(tmp_path)[-1] == (
        "warning",
        "toy may lack some metrics, since it did not accept all of them within 0.3 s after the end of the run",
    )
    Toy.hangs.set()


def test_a_run_without_measurements_is_not_mirrored(make_job: MakeJob, tmp_path: Path) -> None:
    with reporting(make_job(train={"mirror": "toy"}), tmp_path):
        pass
    assert not Toy.opened


def test_a_folder_that_cannot_store_the_id_disables_only_the_mirrors(make_job: MakeJob, tmp_path: Path) -> None:
    (tmp_path / "mirror.id").mkdir()
    with reporting(make_job(train={"mirror": "toy"}), tmp_path) as progress:
        progress.rows([MetricRow("loss", 1, 0.5)])
    ((level, message),) = told(tmp_path)
    assert level == "warning"
    assert "the metrics are not sent to other tools" in message


def test_without_a_mirror_a_run_reports_directly_to_its_store(make_job: MakeJob, tmp_path: Path) -> None:
    with reporting(make_job(), tmp_path) as progress:
        assert type(progress) is StoredProgress
    assert not (tmp_path / "mirror.id").exists()


def test_saes_in_a_sweep_get_their_own_values_and_those_for_the_entire_run() -> None:
    rows = [
        MetricRow("tokens_per_s", 1, 9.0),
        MetricRow("step_ms", 1, 3.0, rank=0),
        MetricRow("step_ms", 1, 4.0, rank=1),
        MetricRow("fvu@k=2", 1, 0.2),
        MetricRow("fvu", 1, 0.2),
        MetricRow("fvu@k=4", 1, 0.4),
    ]
    of_run = {"tokens_per_s": 9.0, "step_ms/0": 3.0, "step_ms/1": 4.0}
    sharded = Dealer(["k=2", "k=4"]).out(rows)
    assert sharded == {("k=2", 1): of_run | {"fvu": 0.2}, ("k=4", 1): of_run | {"fvu": 0.4}}


@pytest.mark.parametrize("mirror", ["tensorbord", ["toy", "x"], ["toy", "toy"], 5])
def test_the_error_for_an_invalid_mirror_names_the_setting_and_the_known_mirrors(
    mirror: Any, make_job: MakeJob, tmp_path: Path
) -> None:
    with pytest.raises((AssertionError, JobFileError), match=r"train\.mirror.*must be \"tensorboard\""):
        make_job(train={"mirror": mirror})


def test_a_mirror_that_is_not_installed_is_reported_before_the_run(
    make_job: MakeJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(MIRRORS, "toy", MirrorEntry("x:Y", "A toy.", "not_there_at_all"))
    problems = check(make_job(train={"mirror": "toy"}), Machine((), cpu_count=2, output_root=tmp_path))
    assert [str(problem) for problem in problems if problem.path == "train.mirror"] == [
        "train.mirror: toy is not installed; run `pip install not_there_at_all`, or leave it out"
    ]
