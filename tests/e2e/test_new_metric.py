"""Tests that a new metric needs only one file and one registry entry to work like the existing metrics."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import torch
from support.tui import StillMonitor, record_job, wait_until
from tqdm import tqdm

import sae_tui.cli
import trainer.cli
from sae_tui.app import SaeApp
from sae_tui.panels.headline import Headline
from sae_tui.settings import Settings
from trainer.activations.synthetic import Synthetic
from trainer.contract.paths import DataDir
from trainer.contract.planning.workload import Layout
from trainer.contract.runs.lock import RunLock
from trainer.contract.runs.rank_spec import RankSpec
from trainer.contract.settings.catalog import METRICS, MetricEntry, Series
from trainer.contract.settings.job import JobConfig
from trainer.contract.settings.job_file import dump_job, parse_job
from trainer.contract.store.states import JobState
from trainer.parallel.base import Parallel
from trainer.ranks.foreground import BAR, Foreground, result, write_job
from trainer.reporting.progress import StoredProgress
from trainer.training.loop import Trainer

N_STEPS = {1: 5, 2: 20}  # maps each trained job's id to its number of steps
Shell = Callable[..., str]


def make_job(n_steps: int) -> JobConfig:
    table = {
        "name": f"steps-{n_steps}",
        "data": {"source": "synthetic", "n_features": 40, "d_in": 16, "n_rows": 4096},
        "sae": {"d_sae": 64, "k": 4},
        "train": {"batch_size": 128, "n_steps": n_steps, "lr": 3e-3, "log_every": 5},
        "launch": {"gpus": "cpu"},
    }
    job, problems = parse_job(table)
    assert job is not None, problems
    return job


def train(data: DataDir, job: JobConfig) -> int:
    """Train a job in this process, write the files and rows that its supervisor and rank would, and return its id."""
    job_id = record_job(data, job.name, JobState.FINISHED, config=dump_job(job))
    paths = data.run(job_id)
    paths.create()
    write_job(job, paths)
    progress = StoredProgress(paths.metrics_db, Layout(job, 1).total_steps, threading.Event(), None)
    with contextlib.closing(progress):
        Trainer(
            job,
            source=Synthetic(**msgspec.structs.asdict(job.data.settings)),
            parallel=Parallel(torch.device("cpu")),
            progress=progress,
            stop=threading.Event(),
            checkpoints=paths.checkpoints,
            output=data.sae(job_id),
        ).run()
    return job_id


@pytest.fixture(scope="module", autouse=True)
def registered() -> Iterator[None]:
    """Register the metric, which otherwise consists only of its file."""
    series = Series("SNR", unit="dB", better="higher", format=".1f")
    entry = MetricEntry("support.snr:Snr", "Signal-to-noise ratio of x_hat.", series, held_out=True)
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setitem(METRICS, "snr", entry)
        yield


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> DataDir:
    """Return a data folder with two trained jobs."""
    folder = DataDir(tmp_path_factory.mktemp("new_metric") / "data")
    folder.create()
    for job_id, n_steps in N_STEPS.items():
        assert train(folder, make_job(n_steps)) == job_id
    return folder


@pytest.fixture
def shell(data: DataDir, capsys: pytest.CaptureFixture[str]) -> Shell:
    """Return a function that runs an app or trainer command, depending on `program`, and returns its output."""

    def run(*arguments: object, program: str = "sae-tui") -> str:
        capsys.readouterr()
        if program == "trainer":
            assert trainer.cli.main([*map(str, arguments)]) == 0
        else:
            # Call `_main`, because `main` also restores signals, sets the umask, and calls `os._exit` if a driver
            # hangs.
            assert sae_tui.cli._main(["--data-dir", str(data.root), *map(str, arguments)]) == 0
        return capsys.readouterr().out

    return run


def test_the_log_shows_the_new_metric_for_training_and_held_out_data(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = DataDir(tmp_path / "data")
    data.create()
    train(data, make_job(5))
    log = capsys.readouterr().out
    assert re.search(r"step 5/5  loss .*  dead \S+%  batch SNR -?\d+\.\d dB  lr ", log)
    assert re.search(r"step 5  held-out FVU .*  held-out SNR -?\d+\.\d dB$", log, re.MULTILINE)


def test_the_progress_bar_and_the_result_show_the_new_metric(data: DataDir) -> None:
    job, paths = make_job(20), data.run(2)
    spec = RankSpec(run_dir=paths.root, output_dir=data.sae(2), attempt=1, world_size=1, device="cpu")
    with RunLock(paths.root) as lock, tqdm(total=20, file=io.StringIO(), bar_format=BAR) as bar:
        Foreground(job, spec, lock)._show(bar)
        assert re.search(r", held-out FVU=\S+, l0=\S+, snr=\S+\]$", str(bar))
    outcome = result(job, spec)
    assert {"snr", "heldout_snr"} <= outcome.keys()
    assert re.fullmatch(r"held-out FVU .*, L0 .*, .*% dead, SNR .* dB", trainer.cli._quality(outcome))
    assert f"SNR {outcome['heldout_snr']:.1f} dB" in trainer.cli._quality(outcome)


def test_exported_saes_have_the_new_metric_in_their_metadata(data: DataDir, shell: Shell, tmp_path: Path) -> None:
    shell("export", data.run(2).root, "--out", tmp_path / "again", program="trainer")
    for folder in (data.sae(2), tmp_path / "again"):
        metadata = json.loads((folder / "cfg.json").read_text())["metadata"]
        assert metadata["snr"] > 0
        assert metadata["heldout_snr"] > 0


def test_jobs_are_listed_with_the_new_metric_and_sorted_by_it_best_first(shell: Shell) -> None:
    listed = json.loads(shell("jobs", "--sort", "snr", "--json"))
    assert [job["id"] for job in listed] == [2, 1]
    assert listed[0]["heldout_snr"] > listed[1]["heldout_snr"]
    assert [job["id"] for job in json.loads(shell("jobs", "--sort", "fvu", "--json"))] == [2, 1]
    heading, first, _ = shell("jobs", "--sort", "snr").splitlines()
    assert re.search(r"L0 +SNR +DEAD +TOKENS/S", heading)
    assert f"{listed[0]['heldout_snr']:.4g} dB" in first
    assert f"{listed[0]['heldout_snr']:.4g} dB" in re.search(r"^held-out SNR .*$", shell("job", 2), re.MULTILINE)[0]
    assert json.loads(shell("job", 2, "--json"))["snr"] == listed[0]["snr"]


def test_a_comparison_shows_the_new_metric_in_its_table_json_and_csv(shell: Shell, tmp_path: Path) -> None:
    table = shell("compare", 1, 2)
    assert re.search(r"^batch SNR +-?[\d.]+ dB +-?[\d.]+ dB$", table, re.MULTILINE)
    assert re.search(r"^held-out SNR .* dB ★$", table, re.MULTILINE)
    assert all(run["snr"] and run["heldout_snr"] for run in json.loads(shell("compare", 1, 2, "--json"))["runs"])
    shell("compare", 1, 2, "--csv", tmp_path / "all.csv")
    with (tmp_path / "all.csv").open() as file:
        rows = list(csv.DictReader(file))
    names = list(dict.fromkeys(row["metric"] for row in rows))
    assert names.index("snr") == names.index("heldout_snr") + 1 < names.index("tokens_per_s")
    assert [int(row["step"]) for row in rows if row["metric"] == "snr"] == [5, 5, 10, 15, 20]


async def test_the_job_screen_shows_the_curve_and_the_value_of_the_new_metric(data: DataDir) -> None:
    app = SaeApp(data, StillMonitor(4), Settings(sampling_interval_s=60.0), ())
    async with app.run_test(size=(160, 40)) as pilot:
        await wait_until(pilot, lambda: app.session.jobs)
        app.session.go.open_job(2)
        await wait_until(pilot, lambda: app.session.detail is not None)
        await pilot.pause()
        assert re.search(r"FVU \S+  L0 \S+  SNR \S+ dB", app.screen.query_one(Headline).plain)
        curve = app.screen.query_one("#curve-snr")
        assert re.search(r"held-out SNR +\S+ dB · batch \S+", curve.plain)
        assert any(0x2800 < ord(character) < 0x2900 for character in curve.plain)
        others = [app.screen.query_one(f"#curve-{name}") for name in ("loss", "fvu", "l0", "dead_fraction")]
        assert not any(curve.region.overlaps(other.region) for other in others)
