"""Tests for reading a run's stored report card."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from sae_tui.jobs.evaluation.report_card import read_card, read_cards
from trainer.contract.runs.features import CARD

FIGURES = {"n_tokens": 1000, "fvu": 0.25, "fvu_error": 0.01, "l0": 32.0}


def write(folder: Path, **parts: Any) -> None:
    folder.mkdir(exist_ok=True)
    card = {"figures": FIGURES, "data": {"is_held_out": True}, "spliced": None, "probing": None} | parts
    (folder / CARD).write_bytes(msgspec.json.encode(card))


def test_report_card_values_include_standard_errors(tmp_path: Path) -> None:
    auc = {"auc": 0.8, "seed_error": 0.02, "set_error": 0.1, "of_sets": {"a": 0.8}}
    spliced = {"ce_score": 0.9, "ce_score_error": 0.004, "kl_score": 0.8, "kl_score_error": 0.003}
    write(tmp_path, spliced=spliced, probing={"k": {"1": auc, "16": auc | {"auc": 0.9}}, "dense": auc})
    card = read_card(tmp_path)
    assert card
    values = card.values()
    assert values.pop("card_fvu_error") == 0.01
    assert (values.pop("card_auc_1_error"), values.pop("card_auc_16_error")) == (0.02, 0.02)
    assert (values.pop("card_ce_score_error"), values.pop("card_kl_score_error")) == (0.004, 0.003)
    assert values.pop("card_kl_score") == 0.8
    assert values == {
        "card_fvu": 0.25, "card_l0": 32.0, "card_ce_score": 0.9, "card_auc_1": 0.8, "card_auc_16": 0.9,
        "card_rows": 1000.0,
    }  # fmt: skip


def test_unmeasured_figures_have_no_value(tmp_path: Path) -> None:
    write(tmp_path)
    card = read_card(tmp_path)
    assert card
    assert {*card.values()} == {"card_fvu", "card_fvu_error", "card_l0", "card_rows"}


@pytest.mark.parametrize("content", [b"", b"{}", b"[1]", b'{"figures": {"n_tokens": "many", "fvu": 1}}'])
def test_a_damaged_report_card_is_ignored(tmp_path: Path, content: bytes) -> None:
    (tmp_path / CARD).write_bytes(content)
    assert read_card(tmp_path) is None
    write(tmp_path / "k=8", label="k=8")
    assert [card.label for card in read_cards(tmp_path)] == ["k=8"]
