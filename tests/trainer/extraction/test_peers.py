"""Tests that several ranks extract exactly the same rows as a single rank, despite interruptions."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w
import torch
from safetensors.torch import load_file
from support.extractions import run, run_ranks
from torch import Tensor

from trainer.activations.shards import Shards
from trainer.contract.errors import UsageError, UserError
from trainer.contract.settings.extract import ExtractJob
from trainer.contract.settings.job_file import to_table
from trainer.evaluation.contexts import texts_of
from trainer.extraction.extraction import share_of
from trainer.extraction.state import STATE, stored_state

ROOT = Path(__file__).parents[3]
Make = Callable[..., ExtractJob]
# Exceeds the number of tokens in the text, so that an extraction reads the entire text.
ALL = 10**6


def meta(job: ExtractJob, hook: str = "mlp_out.0") -> dict[str, Any]:
    return json.loads((job.folder(hook) / "meta.json").read_text())


def rows_of(job: ExtractJob, hook: str = "mlp_out.0") -> dict[tuple[int, ...], list[Tensor]]:
    """Map each (document, position, token) to its rows. Pieces of the same document may share a key."""
    rows: dict[tuple[int, ...], list[Tensor]] = {}
    for file in sorted(job.folder(hook).glob("*.safetensors")):
        shard = load_file(file)
        keys = zip(*(shard[name].tolist() for name in ("document", "positions", "token_ids")), strict=True)
        for key, row in zip(keys, shard["activations"], strict=True):
            rows.setdefault(key, []).append(row)
    return rows


def digests(output: Path) -> dict[str, str]:
    """Return the SHA-256 of each file, except for lock files and hidden files."""
    files = [file for file in output.rglob("[!.]*") if file.is_file() and file.name != "run.lock"]
    return {str(file.relative_to(output)): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


@pytest.fixture(scope="module")
def n_rows(tiny: Callable[[str], Path], corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> int:
    """Return the number of rows that an extraction of the entire text stores."""
    from support.extractions import extraction_job

    return run(extraction_job(tiny("gpt2"), corpus, tmp_path_factory.mktemp("all") / "rows", n_tokens=ALL)).n_tokens


@pytest.mark.parametrize("size", [2, 3])
def test_several_ranks_store_the_same_rows_as_a_single_rank(make: Make, tmp_path: Path, size: int) -> None:
    alone, several = (make(name=name, n_tokens=ALL, max_norm=1.02) for name in ("alone", "several"))
    whole = run(alone)
    result = run_ranks(several, size, tmp_path / "meet")[0]
    assert (result.state, result.n_tokens, result.left_out) == ("finished", whole.n_tokens, whole.left_out)
    assert result.left_out["outlier norms"] > 0
    expected, stored = rows_of(alone), rows_of(several)
    assert stored.keys() == expected.keys()
    for key, rows in expected.items():
        assert sorted(row[0].item() for row in stored[key]) == pytest.approx(
            sorted(row[0].item() for row in rows), abs=1e-5
        )


def test_several_ranks_subtract_the_same_mean_from_int8_rows(make: Make, tmp_path: Path) -> None:
    alone, several = (make(name=name, n_tokens=ALL, dtype="int8", shard_rows=100) for name in ("alone", "several"))
    n_rows = run(alone).n_tokens
    assert run_ranks(several, 2, tmp_path / "meet")[0].n_tokens == n_rows
    for hook in several.model.hooks:
        sources = [Shards(path=str(job.folder(hook))) for job in (alone, several)]
        assert sources[1].coded_bytes == sources[0].coded_bytes  # one mean, so that no row has an index
        one, other = (source.rows(np.arange(n_rows)) for source in sources)
        torch.testing.assert_close(one.mean(0), other.mean(0), rtol=1e-3, atol=1e-3)


def test_metadata_describes_the_rows_from_all_ranks(make: Make, tmp_path: Path) -> None:
    job = make(n_tokens=500)
    run_ranks(job, 2, tmp_path / "meet")
    for hook in job.model.hooks:
        facts = meta(job, hook)
        files = sorted(job.folder(hook).glob("*.safetensors"))
        assert facts["shards"] == {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}
        x = torch.cat([load_file(file)["activations"] for file in files]).double()
        mean, spread = x.mean(0), (x - x.mean(0)).square().sum(1).mean().sqrt()
        assert facts["n_tokens"] == len(x) == 500
        torch.testing.assert_close(torch.tensor(facts["mean"], dtype=torch.float64), mean)
        assert facts["scale"] == pytest.approx(float(spread))
        assert facts["gamma"] == pytest.approx(float(mean.norm() / spread))
    assert not (Path(job.extract.output) / ".parts").exists()


@pytest.mark.parametrize("n_tokens", [1, 2, 301, 1000])
def test_exactly_the_requested_number_of_rows_is_stored(make: Make, tmp_path: Path, n_tokens: int) -> None:
    job = make(n_tokens=n_tokens)
    assert run_ranks(job, 3, tmp_path / "meet")[0].n_tokens == n_tokens
    assert sum(map(len, rows_of(job).values())) == n_tokens


@pytest.mark.parametrize("lacking", [0, 1, 20])
def test_if_a_rank_runs_out_of_text_the_other_ranks_extract_more_rows(
    make: Make, tmp_path: Path, n_rows: int, lacking: int
) -> None:
    job = make(n_tokens=n_rows - lacking, shard_rows=100)
    results = run_ranks(job, 3, tmp_path / "meet")
    assert results[0].n_tokens == n_rows - lacking
    assert sum(map(len, rows_of(job).values())) == n_rows - lacking
    if lacking < 20:
        shares = [share_of(n_rows - lacking, rank, 3) for rank in range(3)]
        assert [result.n_tokens for result in results[1:]] != shares[1:]


def test_the_rows_in_a_shard_can_be_restored_to_text_order(make: Make, tmp_path: Path) -> None:
    job = make(n_tokens=600)
    run_ranks(job, 2, tmp_path / "meet")
    for text in texts_of(job.folder("mlp_out.0")):
        assert (text.origin.document.diff() >= 0).all()


def test_an_extraction_resumes_only_with_the_same_number_of_ranks(make: Make, tmp_path: Path) -> None:
    job = make(n_tokens=1400, shard_rows=64)
    folder = job.folder("mlp_out.0")

    class AtFirstShard(threading.Event):
        def is_set(self) -> bool:
            return any(folder.glob("*.safetensors"))

    results = run_ranks(job, 2, tmp_path / "meet", AtFirstShard())
    assert {result.state for result in results} == {"stopped"}
    n_stored = stored_state(job, 2).n_stored
    assert n_stored == 64 * len(list(folder.glob("*.safetensors")))
    for size in (1, 3):
        with pytest.raises(
            UsageError, match=f"launch.gpus: .* contains an extraction by 2 processes, not {size}; use 2 again"
        ):
            stored_state(job, size)
    assert run_ranks(job, 2, tmp_path / "again")[0].n_tokens == 1400
    undisturbed = make(name="undisturbed", n_tokens=1400, shard_rows=64)
    run_ranks(undisturbed, 2, tmp_path / "undisturbed-meet")
    assert digests(Path(job.extract.output)) == digests(Path(undisturbed.extract.output))
    # A finished extraction is not repeated with a different number of ranks.
    assert stored_state(job, 1).is_finished


def test_a_text_without_rows_is_refused_by_the_first_rank(make: Make, tmp_path: Path) -> None:
    (empty := tmp_path / "empty.txt").write_text("")
    with pytest.raises(UserError, match="the text yields no row"):
        run_ranks(make(text=empty), 2, tmp_path / "meet")


@pytest.mark.timeout(240)
@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_killing_a_rank_at_any_moment_changes_no_byte_in_the_output(make: Make, tmp_path: Path, size: int) -> None:
    job = make(n_tokens=600, shard_rows=50)
    (file := tmp_path / "job.toml").write_text(tomli_w.dumps(to_table(job)))
    (root := tmp_path / "killed").mkdir()
    command = [sys.executable, ROOT / "tests/support/killed_ranks.py", file, root, "0", str(2 * size - 2), str(size)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    killed = json.loads(done.stdout.splitlines()[-1])
    assert any(-signal.SIGKILL in codes for starts in killed for codes in starts)
    whole = digests(root / "whole")
    assert len(whole) == 1 + 2 * (2 + size * -(-600 // size // 50))
    for number, starts in enumerate(killed):
        assert starts[-1] == [0] * size, killed
        assert digests(root / str(number)) == whole, (number, starts)
        assert not (root / str(number) / ".parts").exists()
        assert (root / str(number) / STATE).exists()
