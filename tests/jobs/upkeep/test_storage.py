"""A data folder on a network file system is reported."""

from __future__ import annotations

import pytest

from sae_tui.jobs.upkeep.storage import store_warning
from trainer.contract.paths import DataDir


@pytest.fixture
def data(tmp_path):
    return DataDir(tmp_path / "not" / "there" / "yet")


def test_a_local_data_folder_needs_no_warning(data):
    assert store_warning(data) == ""


def test_a_data_folder_on_a_network_file_system_is_named_with_the_remedy(data, tmp_path, monkeypatch):
    stat = tmp_path / "stat"
    stat.write_text("#!/bin/sh\necho 6969\n")
    stat.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert store_warning(data).startswith(f"{data.root} is on NFS, ")
    assert "--data-dir" in store_warning(data)
