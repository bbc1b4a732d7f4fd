"""Tests for data folders that another job will write."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.extractions import extraction_job
from support.tiny_models import D_IN, make_model

from trainer.contract.errors import JobFileError
from trainer.contract.settings.job import JobConfig
from trainer.contract.settings.job_file import job_of
from trainer.contract.settings.promised import Promise


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "llama", "llama")


def training(**data: object) -> JobConfig:
    return job_of({"data": data, "sae": {"d_sae": 64, "k": 4}})


def test_the_shape_of_a_promised_folder_is_known_before_it_is_written(model: Path, tmp_path: Path) -> None:
    promises = extraction_job(model, tmp_path, tmp_path / "rows", n_tokens=5000).promises("job 3")
    shape = training(path=str(tmp_path / "rows" / "mlp_out.0")).data_shape(promises)
    assert shape == (D_IN, None, 5000, ())
    both = training(path=str(tmp_path / "rows/mlp_out.0"), target_path=str(tmp_path / "rows/resid_post.1"))
    assert both.data_shape(promises) == (D_IN, D_IN, 5000, ())


def test_a_link_to_a_promised_folder_resolves_to_it(model: Path, tmp_path: Path) -> None:
    promises = extraction_job(model, tmp_path, tmp_path / "rows", n_tokens=5000).promises("job 3")
    (tmp_path / "link").symlink_to(tmp_path / "rows")
    assert training(path=str(tmp_path / "link" / "mlp_out.0")).data_shape(promises).n_tokens == 5000


def test_a_promised_folder_whose_width_is_unknown_until_it_is_written_is_refused(model: Path, tmp_path: Path) -> None:
    job = extraction_job(model, tmp_path, tmp_path / "rows", hooks=["layers.1.mlp"])
    with pytest.raises(JobFileError, match=r"^data.path: job 3 has yet to write .*; launch this job after"):
        training(path=str(tmp_path / "rows" / "layers.1.mlp")).data_shape(job.promises("job 3"))


def test_the_error_for_the_parent_folder_of_several_hooks_names_the_hooks(tmp_path: Path) -> None:
    promises = {str(tmp_path / "rows" / name): Promise(8, 100, "job 3") for name in ("a", "b")}
    with pytest.raises(JobFileError, match=r"job 3 writes a folder for every hook in .*; give one of them: a and b"):
        training(path=str(tmp_path / "rows")).data_shape(promises)


def test_a_folder_that_no_job_promises_is_read_from_disk(tmp_path: Path) -> None:
    with pytest.raises(JobFileError, match="there is nothing at"):
        training(path=str(tmp_path / "other")).data_shape({str(tmp_path / "rows"): Promise(8, 100, "job 3")})
