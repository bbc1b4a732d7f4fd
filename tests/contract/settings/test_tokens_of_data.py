"""Tests that the check for whether stored data includes tokens agrees with the code that reads them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from trainer.contract.errors import UserError
from trainer.contract.settings.sources import ShardSettings
from trainer.contract.settings.tokens_of_data import META, ORIGIN, folder_of, may_tell_tokens, tells_tokens
from trainer.evaluation.contexts import texts_of
from trainer.extraction.shard_writer import RowOrigin

SAMPLE = Path(__file__).parents[3] / "data" / "sample"


def write(folder: Path, names: tuple[str, ...], **meta: object) -> Path:
    folder.mkdir()
    save_file({"activations": torch.randn(5, 3)} | {name: torch.arange(5) for name in names}, folder / "0.safetensors")
    (folder / META).write_text(json.dumps(meta))
    return folder


def test_an_extraction_writes_the_tensors_that_the_check_looks_for() -> None:
    assert RowOrigin._fields == ORIGIN
    assert tells_tokens(SAMPLE)


@pytest.mark.parametrize(
    ("names", "meta", "tells"),
    [
        (ORIGIN, {}, True),
        (ORIGIN[:2], {}, False),
        (ORIGIN, {"shuffled": True}, False),
        (ORIGIN, {"shuffled": True, "seed": 0}, True),
    ],
)
def test_data_includes_tokens_if_the_texts_of_its_rows_can_be_read(tmp_path: Path, names, meta, tells: bool) -> None:
    folder = write(tmp_path / "rows", names, **meta)
    assert tells_tokens(folder) == tells == any(texts_of(folder))
    assert may_tell_tokens([ShardSettings(path=str(folder))]) == tells


def test_missing_data_may_include_tokens_but_several_folders_do_not(tmp_path: Path) -> None:
    gone = ShardSettings(path=str(tmp_path / "gone"))
    with pytest.raises(UserError):
        tells_tokens(tmp_path / "gone")
    assert may_tell_tokens([gone])
    assert folder_of(ShardSettings(path=[str(SAMPLE), str(SAMPLE)])) is None
    assert not may_tell_tokens([])
