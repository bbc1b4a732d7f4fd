from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from trainer.contract.settings.job import JobConfig
from trainer.reporting.mirrors.base import mirrored_run


def test_a_run_keeps_its_unique_id(make_job: Callable[..., JobConfig], tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    job = make_job()
    first, again = mirrored_run(job, tmp_path, 0), mirrored_run(job, tmp_path, 20)
    assert first.id == again.id
    assert mirrored_run(job, tmp_path / "other", 0).id != first.id


def test_an_invalid_id_is_replaced(make_job: Callable[..., JobConfig], tmp_path: Path) -> None:
    (tmp_path / "mirror.id").write_text("../../x")
    assert len(mirrored_run(make_job(), tmp_path, 0).id) == 8


def test_each_sae_in_a_sweep_has_its_own_settings(make_job: Callable[..., JobConfig], tmp_path: Path) -> None:
    settings = mirrored_run(make_job(sae={"k": [2, 4]}), tmp_path, 0).settings
    assert {label: table["sae"]["k"] for label, table in settings.items()} == {"k=2": 2, "k=4": 4}
