from __future__ import annotations

import os
import stat

import pytest

from sae_tui.settings import Settings, change_setting, load_settings, save_settings, settings_text
from trainer.contract.errors import UserError


def test_what_is_saved_is_read_back_and_explains_itself(tmp_path) -> None:
    path = tmp_path / "settings.toml"
    chosen = Settings(monitor_view_default="per_gpu", multi_gpu_enabled=False, sampling_interval_s=2.0)
    save_settings(path, chosen)
    assert load_settings(path) == (chosen, [])
    assert '# What the dashboard shows first. It is "aggregated", "per_gpu" or "map".' in path.read_text()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_no_file_means_the_defaults(tmp_path) -> None:
    assert load_settings(tmp_path / "none.toml") == (Settings(), [])


def test_every_mistake_is_told_and_the_rest_is_kept(tmp_path) -> None:
    path = tmp_path / "settings.toml"
    path.write_text('monitor_view_default = "both"\nsampling_interval_s = 0\nmulti_gpu_enabled = false\nwhat = 1\n')
    settings, problems = load_settings(path)
    assert settings == Settings(multi_gpu_enabled=False)
    messages = {problem.path: problem.message for problem in problems}
    assert messages.keys() == {"monitor_view_default", "sampling_interval_s", "what"}
    assert 'must be "aggregated", "per_gpu" or "map", not "both"' in messages["monitor_view_default"]
    assert "at least 0.2" in messages["sampling_interval_s"]


def test_a_file_that_is_no_toml_leaves_the_defaults_and_says_so(tmp_path) -> None:
    path = tmp_path / "settings.toml"
    path.write_text("monitor_view_default = ")
    settings, problems = load_settings(path)
    assert settings == Settings()
    assert "not valid TOML" in str(problems[0])


def test_a_failed_save_leaves_the_old_file_alone(tmp_path, monkeypatch) -> None:
    path = tmp_path / "settings.toml"
    save_settings(path, Settings())
    before = path.read_text()

    def full(*_: object) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        save_settings(path, Settings(monitor_view_default="per_gpu"))
    assert path.read_text() == before
    assert list(tmp_path.iterdir()) == [path]
    assert settings_text(Settings()) == before


def test_one_setting_is_changed_and_every_other_line_stays_as_it_was(tmp_path) -> None:
    path = tmp_path / "settings.toml"
    change_setting(path, "theme", "light")
    assert load_settings(path) == (Settings(theme="light"), [])
    path.write_text("# mine\nwhat = 1\nhistory_hours = 5\n")
    change_setting(path, "theme", "terminal")
    assert path.read_text() == '# mine\nwhat = 1\nhistory_hours = 5\ntheme = "terminal"\n'
    path.write_text('on_job_end = ["""\ntheme = 1\n"""]\n')
    with pytest.raises(UserError, match='write theme = "light" yourself'):
        change_setting(path, "theme", "light")
    assert "theme = 1" in path.read_text()
