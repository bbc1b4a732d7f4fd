from __future__ import annotations

import os
import stat

import pytest

from sae_tui.settings import Settings, change_settings, load_settings, save_settings, settings_text
from trainer.contract.errors import UserError
from trainer.contract.settings.declare import settings_of


def test_settings_are_read_back_as_saved_and_the_file_has_comments(tmp_path) -> None:
    path = tmp_path / "settings.toml"
    chosen = Settings(monitor_view_default="per_gpu", multi_gpu_enabled=False, sampling_interval_s=2.0)
    save_settings(path, chosen)
    assert load_settings(path) == (chosen, [])
    assert '# Dashboard view at start. It is "aggregated", "per_gpu" or "map".' in path.read_text()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_without_a_file_the_defaults_apply(tmp_path) -> None:
    assert load_settings(tmp_path / "none.toml") == (Settings(), [])


def test_every_error_is_reported_and_the_other_settings_are_kept(tmp_path) -> None:
    path = tmp_path / "settings.toml"
    path.write_text('monitor_view_default = "both"\nsampling_interval_s = 0\nmulti_gpu_enabled = false\nwhat = 1\n')
    settings, problems = load_settings(path)
    assert settings == Settings(multi_gpu_enabled=False)
    messages = {problem.path: problem.message for problem in problems}
    assert messages.keys() == {"monitor_view_default", "sampling_interval_s", "what"}
    assert 'must be "aggregated", "per_gpu" or "map", not "both"' in messages["monitor_view_default"]
    assert "at least 0.2" in messages["sampling_interval_s"]


def test_an_invalid_toml_file_is_reported_and_the_defaults_apply(tmp_path) -> None:
    path = tmp_path / "settings.toml"
    path.write_text("monitor_view_default = ")
    settings, problems = load_settings(path)
    assert settings == Settings()
    assert "not valid TOML" in str(problems[0])


def test_a_failed_save_leaves_the_old_file_unchanged(tmp_path, monkeypatch) -> None:
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


MINE = """# mine, in my order
price_per_kwh = 0.31  # by day

# what is this?
what = 1
on_job_end = [
  "notify-send", # a program
  "done",
]
[later]
theme = "light"
"""


def test_changing_a_setting_leaves_every_other_line_of_the_file_unchanged(tmp_path) -> None:
    path = tmp_path / "settings.toml"
    change_settings(path, {"theme": "light"})
    assert load_settings(path) == (Settings(theme="light"), [])
    path.write_text(MINE)
    path.chmod(0o600)
    change_settings(path, {"price_per_kwh": 0.4, "hosts": ["gpu1"], "on_job_end": None})
    before, after = MINE.splitlines(), path.read_text().splitlines()
    assert [line for line in after if line not in before] == ["price_per_kwh = 0.4  # by day", 'hosts = ["gpu1"]']
    assert [line for line in before if line not in after] == [before[1], *before[5:9]]
    assert after.index('hosts = ["gpu1"]') < after.index("[later]")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.parametrize("text", ["theme = ", 'theme = "a"\ntheme = "b"\n', "\ufeff[", "a = 'b\n"])
def test_a_broken_file_is_reported_and_not_overwritten(tmp_path, text) -> None:
    path = tmp_path / "settings.toml"
    path.write_text(text)
    with pytest.raises(UserError, match=r"not valid TOML.*; correct it by hand or remove it"):
        change_settings(path, {"theme": "light"})
    assert path.read_text() == text


def test_a_settings_file_that_is_a_link_is_not_replaced_by_a_file(tmp_path) -> None:
    path, real = tmp_path / "settings.toml", tmp_path / "dotfile"
    real.write_text('theme = "dark"\n')
    path.symlink_to(real)
    with pytest.raises(UserError, match="is a symbolic link"):
        change_settings(path, {"theme": "light"})
    assert path.is_symlink()


def test_saving_is_refused_if_others_may_write_to_a_settings_file_with_commands(tmp_path) -> None:
    path = tmp_path / "settings.toml"
    path.write_text('on_alert = ["/tmp/evil"]\n')
    path.chmod(0o666)
    with pytest.raises(UserError, match=r"chmod go-w.*its commands would run as you"):
        change_settings(path, {"theme": "light"})
    assert load_settings(path)[0].on_alert == []


def test_every_setting_is_in_a_form_group() -> None:
    assert [setting.name for setting in settings_of(Settings) if not setting.group] == []
