"""Tests that a data folder on a network file system is reported."""

from __future__ import annotations

import pytest

from sae_tui.jobs.upkeep.storage import store_warning
from trainer.contract import mounts
from trainer.contract.paths import DataDir


@pytest.fixture
def data(tmp_path):
    return DataDir(tmp_path / "not" / "there" / "yet")


def test_a_local_data_folder_needs_no_warning(data):
    assert store_warning(data) == ""


def test_a_data_folder_on_a_network_file_system_is_reported_with_a_remedy(data, monkeypatch):
    monkeypatch.setattr(mounts, "LOCAL", frozenset())
    (kind,) = {mounts.mount_of(data.root.parents[2]).kind}
    assert store_warning(data).startswith(f"{data.root} is on {kind}, ")
    assert "--data-dir" in store_warning(data)
