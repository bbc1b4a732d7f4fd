from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from trainer.api import train
from trainer.contract.errors import JobFileError, UserError
from trainer.contract.settings.job_file import parse_job
from trainer.evaluation.exported import ExportedSae
from trainer.sharing.saelens import SaeLens

SETTINGS = {"d_sae": 64, "k": 4, "lr": 3e-3}


def batches(n: int, size: int = 128, seed: int = 0) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    directions = torch.randn(40, 16, generator=torch.Generator().manual_seed(7))
    for _ in range(n):
        used = torch.rand(size, 40, generator=generator) * (torch.rand(size, 40, generator=generator) < 0.1)
        yield 3 * used @ directions + torch.arange(16)


def test_training_requires_only_an_iterator_of_tensors() -> None:
    fvus: dict[int, float] = {}
    fitted = train(batches(60), n_steps=60, on_log=lambda step, values: fvus.update({step: values["fvu"]}), **SETTINGS)
    assert list(fvus) == [10, 20, 30, 40, 50, 60]
    assert fitted.values["fvu"] == fvus[60] < 0.5 < fvus[10]
    assert fitted.values["l0"] == pytest.approx(4, abs=0.1)


@pytest.mark.parametrize("architecture", ["topk", "batch_topk"])
def test_held_out_rows_are_evaluated_and_determine_the_threshold(architecture: str) -> None:
    rows = next(batches(1, 1000, seed=5))
    fitted = train(batches(60), n_steps=60, held_out=rows, architecture=architecture, **SETTINGS)
    error = (rows - fitted.reconstruct(rows)).square().sum() / (rows - rows.mean(0)).square().sum()
    # Each half of the held-out rows is evaluated with the threshold set on the other half.
    assert fitted.values["heldout_fvu"] == pytest.approx(float(error), rel=1e-4 if architecture == "topk" else 0.05)
    assert float((fitted.encode(rows) > 0).sum()) / 1000 == pytest.approx(4, rel=0.01)
    assert fitted.values["fvu"] != fitted.values["heldout_fvu"]


def test_held_out_rows_with_a_different_shape_produce_a_one_sentence_error() -> None:
    for rows in (torch.zeros(3, 5), torch.zeros(0, 16), torch.zeros(16), (torch.zeros(3, 16), torch.zeros(3, 16))):
        with pytest.raises(UserError, match=r"^held_out: must be shaped like the batches of data, \[128, 16\], not "):
            train(batches(2), n_steps=2, held_out=rows, **SETTINGS)


def test_too_few_finite_held_out_rows_are_refused_before_any_step() -> None:
    for rows in (
        torch.zeros(1, 16),
        torch.full((9, 16), torch.nan),
        torch.ones(3, 16) * torch.tensor([[1], [1e30], [1e30]]),
    ):
        with pytest.raises(UserError, match=r"^held_out: fewer than 2 rows are finite "):
            train(batches(2), n_steps=2, held_out=rows, on_log=lambda *_: pytest.fail("a step was taken"), **SETTINGS)


def test_a_saved_sae_produces_the_same_results_in_saelens(tmp_path: Path) -> None:
    sae_lens = pytest.importorskip("sae_lens")
    fitted = train(batches(20), n_steps=20, **SETTINGS)
    fitted.save(tmp_path / "sae", hook_name="blocks.3")
    loaded = sae_lens.SAE.load_from_disk(tmp_path / "sae")
    x = next(batches(1, seed=5))
    with torch.no_grad():
        torch.testing.assert_close(fitted.encode(x), loaded.encode(x), rtol=1e-5, atol=1e-4)
        torch.testing.assert_close(fitted.reconstruct(x), loaded(x), rtol=1e-5, atol=1e-4)
    assert loaded.cfg.metadata.hook_name == "blocks.3"


def test_a_list_of_batches_is_repeated_but_an_iterator_is_read_only_once() -> None:
    finite = list(batches(3))
    steps: list[int] = []
    train(finite, n_steps=10, log_every=1, on_log=lambda step, _: steps.append(step), **SETTINGS)
    assert steps[-1] == 10
    steps.clear()
    with pytest.warns(UserWarning, match="ended after 3 of 10 steps"):
        train(iter(finite), n_steps=10, log_every=1, on_log=lambda step, _: steps.append(step), **SETTINGS)
    assert steps[-1] == 3


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kk": 3}, r"^kk: is not a setting"),
        ({"k": 0}, r"^sae\.k: must be"),
        ({"k": [1, 2]}, r"^sae\.k: accepts only one value"),
    ],
)
def test_the_error_for_a_wrong_setting_names_the_setting(settings: dict[str, object], message: str) -> None:
    with pytest.raises(JobFileError, match=message):
        train(batches(2), n_steps=2, **settings)


def test_non_finite_rows_are_excluded_and_reported() -> None:
    data = list(batches(3))
    data[1] = data[1].clone()
    data[1][2, 0] = torch.nan
    data[1][3] *= 1e12
    with pytest.warns(
        UserWarning, match="data: 4 rows left out because of values that are not finite or too large for fp32"
    ):
        fitted = train(data, n_steps=6, **SETTINGS)
    assert fitted.values["skipped_steps"] == 0


def test_data_without_a_batch_or_a_finite_row_is_refused() -> None:
    with pytest.raises(UserError, match=r"^data: contains no batches"):
        train([], n_steps=2)
    with pytest.raises(UserError, match=r"^data: every row"):
        train([torch.full((8, 4), torch.nan)], n_steps=2)


def batches_of(n: int, *shape: int) -> Iterator[Tensor]:
    return (torch.randn(*shape) for _ in range(n))


def test_a_warning_says_what_to_do_about_data_that_ends_early() -> None:
    message = r"^data: ended after 5 of 10 steps, .*; pass a list"
    with pytest.warns(UserWarning, match=message):
        fitted = train(batches_of(5, 64, 16), n_steps=10, d_sae=64, k=4)
    assert 0 < fitted.values["fvu"] < 2


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (torch.ones(64, 16), r"batch 1 is \[16\]"),
        ([torch.randn(2, 3, 4)], r"batch 1 is \[2, 3, 4\]"),
        ([torch.randn(64, 16), torch.randn(64, 17)], r"batch 2 is \[64, 17\]"),
        ([(torch.randn(64, 16), torch.randn(63, 8))], r"batch 1 is \[64, 16\] and \[63, 8\]"),
        ([[1.0, 2.0]], "not a list"),
    ],
    ids=["one tensor", "three dimensions", "another width", "another length", "numbers"],
)
def test_data_in_an_unsupported_form_produces_a_one_sentence_error(data: Any, told: str) -> None:
    with pytest.raises(UserError, match=rf"^data: every batch must be a tensor .*{told}$"):
        train(data, n_steps=3, d_sae=64, architecture="batch_topk", k=4)


def test_an_unknown_architecture_is_reported_before_its_settings() -> None:
    with pytest.raises(UserError, match=r'^architecture must be "topk" or .*, not "foo"$'):
        train(batches_of(3, 64, 16), n_steps=3, architecture="foo", k=4)


@pytest.mark.parametrize("name", ["batch_size", "n_tokens", "accumulate", "eval_every", "keep_checkpoints"])
def test_settings_that_apply_only_to_runs_with_files_are_refused(name: str) -> None:
    with pytest.raises(JobFileError, match=rf"^{name}: has no meaning here: "):
        train(batches_of(3, 64, 16), n_steps=3, **{name: 1})


def joined(n: int, size: int = 256) -> list[Tensor]:
    """Return batches whose rows join two views of the same latents; the second is 8 times as large."""
    views = torch.randn(16, 20, generator=torch.Generator().manual_seed(8)) * torch.tensor([1.0] * 12 + [8.0] * 8)
    return [one @ views for one in batches(n, size)]


def test_a_crosscoder_gives_each_part_its_own_scale(tmp_path: Path) -> None:
    data, x = joined(60), joined(61)[-1]
    settings = SETTINGS | {"architecture": "batch_topk"}
    fitted = train(data, n_steps=60, parts=(12, 8), held_out=x, **settings)
    scaled = (torch.cat(data) * fitted.sae.x_scale).split((12, 8), dim=1)
    spreads = [float((part - part.mean(0)).norm(dim=1).mean()) / part.shape[1] ** 0.5 for part in scaled]
    assert spreads == pytest.approx([1, 1], rel=0.05)
    assert fitted.values["heldout_fvu"] < 0.6
    names = [{"name": "base", "model_name": "gpt2"}, {"name": "chat"}]
    fitted.save(tmp_path / "sae", crosscoder_parts=names)
    saved = SaeLens().read(tmp_path / "sae")
    x_hat = ExportedSae(saved, torch.device("cpu")).reconstruct(x)[1]
    torch.testing.assert_close(x_hat, fitted.reconstruct(x), rtol=1e-4, atol=1e-2)
    assert [(part.name, part.width) for part in saved.parts] == [("base", 12), ("chat", 8)]
    assert saved.parts[1].scale == pytest.approx(1 / 8, rel=0.5)
    with pytest.raises(UserError, match=r"^crosscoder_parts: must be a list of 2 dicts, one for each part$"):
        fitted.save(tmp_path / "no", crosscoder_parts=names[:1])


def test_a_crosscoder_trained_from_python_equals_that_of_a_job(
    make_trainer: Callable[..., Any], tmp_path: Path
) -> None:
    rows = torch.cat(joined(8))
    for name, part in zip("ab", rows.split((12, 8), dim=1), strict=True):
        (tmp_path / name).mkdir()
        save_file({"activations": part.contiguous()}, tmp_path / name / "rows.safetensors")
    data = {"path": [str(tmp_path / name) for name in "ab"], "join": True, "held_out_tokens": 0}
    sae, steps = {"architecture": "batch_topk", "d_sae": 64, "k": 4}, {"n_steps": 8, "lr": 3e-3}
    of_job = steps | {"batch_size": 256, "report_card": False}
    job, problems = parse_job({"data": data, "sae": sae, "train": of_job, "launch": {"gpus": "cpu"}})
    assert job, problems
    trainer = make_trainer(job)
    fitted = train((trainer.data.read(256 * step, 256).x for step in range(8)), parts=(12, 8), **sae, **steps)
    assert trainer.run()
    for name, own in fitted.sae.state_dict().items():
        torch.testing.assert_close(own, trainer.learners[""].sae.state_dict()[name], rtol=1e-3, atol=1e-4)


def test_a_row_is_left_out_if_one_part_of_it_is_too_large_for_fp32() -> None:
    data = joined(3)
    first, whole = (float(torch.cat(data)[:, :width].norm(dim=1).median()) for width in (12, 20))
    data[2][7, :12] = 2e9 * first / 12**0.5
    assert 2 * first < whole / 2
    with pytest.warns(UserWarning, match=r"^data: 1 row left out"):
        train(data, n_steps=3, parts=(12, 8), **SETTINGS)


@pytest.mark.parametrize("parts", [(12,), (12, 9), (20, 0), (24, -4), (12.0, 8.0), ("12", "8"), 20, "ab", None])
def test_parts_that_do_not_fit_the_rows_produce_a_one_sentence_error(parts: Any) -> None:
    asked = r"^parts: must be the widths of at least two parts, whose sum is the width of the rows, 20, not "
    with pytest.raises(UserError, match=asked):
        train(joined(2), n_steps=2, parts=parts, **SETTINGS)


def test_a_crosscoder_with_targets_is_refused() -> None:
    with pytest.raises(UserError, match=r"^parts: cannot be combined with targets"):
        train([(one, one[:, :4].clone()) for one in joined(2)], n_steps=2, parts=(12, 8), **SETTINGS)
