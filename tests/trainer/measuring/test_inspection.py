"""Tests `inspect` on stored activations: against NumPy in float64, and on data sets with one fault each."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.answers import check_answer

from trainer.cli import main
from trainer.contract.errors import JobFileError
from trainer.measuring import inspection
from trainer.measuring.inspection import Inspection, inspect_data, table

SAMPLE = Path(__file__).parents[3] / "data" / "sample"


def store(folder: Path, *shards: torch.Tensor) -> Path:
    folder.mkdir(exist_ok=True)
    for number, rows in enumerate(shards):
        save_file({"activations": rows.contiguous()}, folder / f"shard-{number}.safetensors")
    return folder


def ordinary(n: int = 2000, d: int = 32) -> torch.Tensor:
    return torch.randn(n, d, generator=torch.Generator().manual_seed(0)) + 2


def sentences(facts: Inspection) -> list[str]:
    return [finding.sentence for finding in facts.findings]


def test_figures_match_numpy_in_float64() -> None:
    rows = load_file(SAMPLE / "acts-00000.safetensors")["activations"].numpy().astype(np.float64)
    facts = inspect_data(SAMPLE)
    spread = np.sqrt(rows.var(axis=0).sum())
    assert (facts.n_tokens, facts.d_in, facts.dtype) == (16384, 384, "F16")
    assert facts.scale == pytest.approx(spread, rel=1e-9)
    assert facts.gamma == pytest.approx(np.linalg.norm(rows.mean(axis=0)) / spread, rel=1e-9)
    assert facts.median_norm == pytest.approx(np.median(np.linalg.norm(rows, axis=1)), rel=1e-3)
    assert facts.findings == []
    assert "no problems found" in table(facts)


def test_outliers_affect_neither_the_mean_nor_the_spread(tmp_path: Path) -> None:
    rows = ordinary()
    spoilt = rows.clone()
    spoilt[::200] *= 170
    facts = inspect_data(store(tmp_path / "a", spoilt))
    clean = np.delete(rows.numpy().astype(np.float64), np.s_[::200], axis=0)
    assert facts.outliers == 10
    assert facts.scale == pytest.approx(np.sqrt(clean.var(axis=0).sum()), rel=1e-9)
    (found,) = facts.findings
    assert found.severity == "warning"
    assert found.sentence.startswith("10 of 2,000 rows have more than 10 × the median norm")
    assert "data.max_norm" in found.remedy
    assert inspect_data(tmp_path / "a", max_norm=0).outliers == 0


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_few_non_finite_rows_are_a_warning_and_over_1_percent_are_an_error(value: float, tmp_path: Path) -> None:
    rows = ordinary()
    for n_bad, severity in ((2, "warning"), (50, "error")):
        rows[:n_bad, 5] = value
        facts = inspect_data(store(tmp_path / severity, rows))
        assert facts.not_finite == n_bad
        assert facts.findings[0].severity == severity
        assert main(["inspect", str(tmp_path / severity)]) == (severity == "error")


def test_zero_rows_are_reported_as_padding_and_not_as_duplicates(tmp_path: Path) -> None:
    rows = ordinary()
    rows[:1200] = 0
    rows[1300:1310] *= 100
    facts = inspect_data(store(tmp_path / "a", rows))
    assert (facts.zero_rows, facts.duplicates, facts.outliers) == (1200, 0, 10)
    (found,) = [one for one in facts.findings if "zero" in one.sentence]
    assert found.sentence == "60.0 % of 2,000 rows are zero, like padding"
    assert found.remedy == "set data.drop_zero_rows = true to leave them out"


def test_a_few_dimensions_with_most_of_the_variance_are_reported(tmp_path: Path) -> None:
    rows = ordinary()
    assert inspect_data(store(tmp_path / "a", rows)).heavy_dimensions == []
    rows[:, 17] *= 1000
    facts = inspect_data(store(tmp_path / "b", rows), max_norm=0)
    assert facts.heavy_dimensions == [17]
    assert facts.heavy_share > 0.999
    (found,) = facts.findings
    assert found.severity == "warning"
    assert found.sentence == "1 dimension of 32 (number 17) accounts for 100.0 % of the variance"
    assert "data.drop_dimensions = [17]" in found.remedy
    assert 'data.scale_dimensions = "auto"' in found.remedy


@pytest.mark.parametrize(("factor", "word"), [(1e15, "large"), (1e-19, "small")])
def test_rows_too_large_or_too_small_for_fp32_are_an_error(factor: float, word: str, tmp_path: Path) -> None:
    facts = inspect_data(store(tmp_path / "a", ordinary() * factor))
    (found,) = facts.findings
    assert found.severity == "error"
    assert found.sentence.endswith(f"too {word} for fp32")
    assert "constant" in found.remedy
    assert inspect_data(store(tmp_path / "b", ordinary() * factor**0.9)).findings == []


def test_norms_whose_squares_overflow_in_fp32_are_reported_correctly(tmp_path: Path) -> None:
    facts = inspect_data(store(tmp_path / "a", ordinary() * 1e30))
    assert 1e30 < facts.median_norm < facts.largest_norm < 1e33
    assert facts.findings[0].sentence.endswith("too large for fp32")


def test_fp16_values_too_small_for_full_precision_are_reported(tmp_path: Path) -> None:
    facts = inspect_data(store(tmp_path / "a", (ordinary() * 1e-6).half()))
    (found,) = facts.findings
    assert found.severity == "warning"
    assert "where fp16 loses precision" in found.sentence
    assert "bf16" in found.remedy
    assert inspect_data(store(tmp_path / "b", (ordinary() * 1e-3).half())).findings == []


def test_constant_dimensions_repeated_rows_and_a_mean_far_from_zero_are_reported(tmp_path: Path) -> None:
    rows = ordinary() + 20
    rows[:, [1, 4]] = 7.0
    rows[100:200] = rows[:100]
    facts = inspect_data(store(tmp_path / "a", rows[:900], rows[900:]))
    assert (facts.constant_dimensions, facts.duplicates) == (2, 100)
    assert facts.gamma > 10
    found = "\n".join(sentences(facts))
    for part in ("2 dimensions of 32 are the same", "100 of 2,000 rows occur more than once", "the mean is"):
        assert part in found


def test_identical_rows_and_too_few_rows_are_reported(tmp_path: Path) -> None:
    same = inspect_data(store(tmp_path / "a", torch.ones(2000, 32)))
    assert sentences(same) == ["all rows are the same"]
    assert "few for d_in 32" in sentences(inspect_data(store(tmp_path / "b", ordinary(100))))[0]


def test_headers_are_reported_without_reading_any_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a").mkdir()
    torch.save(torch.full((9, 4), torch.nan, dtype=torch.float64), tmp_path / "a" / "a.pt")
    (tmp_path / "a" / ".hidden").touch()
    assert main(["inspect", "--headers", str(tmp_path / "a")]) == 0
    note = f"skipped 1 file in {tmp_path / 'a'} (hidden): '.hidden'"
    assert capsys.readouterr().out.splitlines()[:2] == ["9 rows, d_in 4, F64", note]
    assert main(["inspect", "--headers", "--json", str(tmp_path / "a")]) == 0
    check_answer("trainer inspect", answer := json.loads(capsys.readouterr().out))
    assert [(shard["file"], shard["n_tokens"]) for shard in answer["shards"]] == [(str(tmp_path / "a" / "a.pt"), 9)]


def test_a_file_name_that_is_not_utf_8_produces_a_json_error_when_reading_headers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.save(torch.ones(9, 4), tmp_path / os.fsdecode(b"\xff.pt"))
    assert main(["inspect", "--headers", "--json", str(tmp_path)]) == 1
    assert json.loads(capsys.readouterr().out)["error"]["fix"] == "rename the file"


def test_only_a_random_sample_of_large_data_is_inspected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inspection, "SAMPLE_ROWS", 500)
    facts = inspect_data(store(tmp_path / "a", ordinary()))
    assert (facts.n_tokens, facts.n_looked_at) == (2000, 500)
    assert "500 of them checked" in table(facts)


def test_the_command_prints_json_and_refuses_invalid_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(SAMPLE), "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["n_tokens"] == 16384
    assert main(["inspect", str(tmp_path / "none")]) == 2
    assert "data.path: there is nothing at" in capsys.readouterr().err
    with pytest.raises(JobFileError, match="there are no"):
        inspect_data(tmp_path)
