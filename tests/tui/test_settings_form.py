from __future__ import annotations

import pytest
from support.far_side import far_side
from support.tui import put_into_row, wait_until
from textual.widgets import Input

from sae_tui.panels.far_gpus import FarGpus
from sae_tui.screens.settings_form import SettingsScreen
from sae_tui.settings import Settings
from sae_tui.widgets.setting_form import SettingRow
from trainer.contract.settings.declare import settings_of

SIZE = (120, 40)


@pytest.fixture
def file(data):
    data.settings_file.write_text('# mine\ntheme = "dark"  # at night\n')
    data.settings_file.chmod(0o600)
    return data.settings_file


async def opened(pilot) -> SettingsScreen:
    await pilot.press("comma")
    await wait_until(pilot, lambda: isinstance(pilot.app.screen, SettingsScreen))
    await pilot.pause()
    return pilot.app.screen


def row_of(app, name: str) -> SettingRow:
    return next(row for row in app.screen.query(SettingRow) if row.field.path == name)


def hint(app, name: str) -> str:
    return row_of(app, name).hint


async def put(pilot, **values: str) -> None:
    for name, value in values.items():
        await put_into_row(pilot, name, value)


def told(app) -> str:
    return " | ".join(str(notice.message) for notice in app.notices)


@pytest.mark.slow
async def test_every_setting_can_be_changed_and_takes_effect_at_once(make_app, file, tmp_path) -> None:
    app = make_app()
    there = far_side(tmp_path / "far", "say(HELLO); say({'type': 'gpus', 'cards': [CARD]}); stay()")
    async with app.run_test(size=SIZE) as pilot:
        await opened(pilot)
        shown = [row.field.path for row in app.screen.query(SettingRow)]
        assert sorted(shown) == sorted(setting.name for setting in settings_of(Settings))
        typed = {"theme": "light", "sampling_interval_s": "30", "history_hours": "2", "alert_disk_gib": "0"}
        words = str(there).replace("'", '"')
        await put(pilot, **typed, hosts="far, far2", ssh_command=words, multi_gpu_enabled="false")
        await pilot.press("ctrl+s")
        await wait_until(pilot, lambda: app.session.settings.theme == "light")
        settings = app.session.settings
        assert settings == Settings(
            theme="light", sampling_interval_s=30.0, history_hours=2.0, alert_disk_gib=0.0, hosts=["far", "far2"],
            ssh_command=there, multi_gpu_enabled=False,
        )  # fmt: skip
        assert app.theme == "sae-light"
        assert app.session.monitor.retention.raw_hours == 2
        assert app.session.alerts._settings is settings
        text = file.read_text()
        assert text.startswith('# mine\ntheme = "light"  # at night\n')
        assert "notify" not in text
        await pilot.press("escape")
        await wait_until(pilot, lambda: app.screen.query(FarGpus) and "far2" in app.screen.query_one(FarGpus).plain)
        await wait_until(pilot, lambda: all(view.is_connected for view in app.session.hosts.views))
        await opened(pilot)
        await put(pilot, hosts="")
        await pilot.press("ctrl+s", "escape")
        await wait_until(pilot, lambda: not app.screen.query(FarGpus))
        assert app.session.hosts is None


async def test_an_invalid_value_is_reported_at_its_field_and_not_saved(make_app, file) -> None:
    app = make_app()
    before = file.read_text()
    async with app.run_test(size=SIZE) as pilot:
        await opened(pilot)
        await put(pilot, sampling_interval_s="0", hosts="-oProxyCommand=x", on_alert="mail")
        await wait_until(pilot, lambda: "✗" in hint(app, "hosts"))
        assert "must be a number of at least 0.2" in hint(app, "sampling_interval_s")
        assert "is not a host name" in hint(app, "hosts")
        assert "must be a list of words" in hint(app, "on_alert")
        await pilot.press("ctrl+s")
        assert "Not saved: correct sampling_interval_s, on_alert and hosts first." in told(app)
        assert file.read_text() == before
        assert row_of(app, "sampling_interval_s").has_focus_within


async def test_a_field_can_be_reset_to_its_saved_value_and_then_to_its_default(make_app, file) -> None:
    file.write_text("price_per_kwh = 0.31\n")
    app = make_app()
    async with app.run_test(size=SIZE) as pilot:
        await opened(pilot)
        assert "default 0.0" in hint(app, "price_per_kwh")
        assert "default" not in hint(app, "currency")
        row_of(app, "price_per_kwh").focus_editor()
        await put(pilot, price_per_kwh="7")
        assert "was 0.31 · default 0.0" in hint(app, "price_per_kwh")
        await pilot.press("ctrl+r")
        assert row_of(app, "price_per_kwh").text == "0.31"
        await pilot.press("ctrl+r")
        assert row_of(app, "price_per_kwh").text == "0.0"


async def test_a_draft_is_kept_and_saved_without_losing_other_changes_to_the_file(make_app, file) -> None:
    app = make_app()
    async with app.run_test(size=SIZE) as pilot:
        await opened(pilot)
        await put(pilot, currency="CHF")
        await pilot.press("escape")
        await pilot.pause()
        assert "Draft kept: 1 setting not saved; press , to reopen them." in told(app)
        file.write_text('theme = "terminal"\ncurrency = "USD"\n')
        await opened(pilot)
        assert (row_of(app, "currency").text, row_of(app, "theme").text) == ("CHF", "terminal")
        file.write_text('theme = "light"\ncurrency = "GBP"\n# new\n')
        await pilot.press("ctrl+s")
        await wait_until(pilot, lambda: app.session.settings.currency == "CHF")
        assert file.read_text() == 'theme = "light"\ncurrency = "CHF"\n# new\n'
        assert "Saved: currency; replaced newer values of currency in the file." in told(app)
        assert (row_of(app, "theme").text, app.session.settings.theme) == ("light", "light")
        assert app.screen._draft == {}


async def test_an_invalid_line_in_the_file_is_shown_and_kept_when_other_settings_are_saved(make_app, file) -> None:
    file.write_text('theme = "[pink=\\u001b[2J]"\nhistory_hours = "long"\n')
    app = make_app()
    async with app.run_test(size=SIZE) as pilot:
        await opened(pilot)
        assert row_of(app, "theme").text == "[pink=\x1b[2J]"
        assert '✗ must be "dark"' in hint(app, "theme")
        await put(pilot, notify="off", look="plain")
        await pilot.press("ctrl+s")
        await wait_until(pilot, lambda: app.session.settings.notify == "off")
        assert "look takes effect at the next start" in told(app)
        assert (
            file.read_text() == 'theme = "[pink=\\u001b[2J]"\nhistory_hours = "long"\nnotify = "off"\nlook = "plain"\n'
        )


async def test_a_broken_file_is_reported_and_not_overwritten(make_app, file) -> None:
    file.write_text("theme = ")
    app = make_app()
    async with app.run_test(size=SIZE) as pilot:
        await opened(pilot)
        assert "is not valid TOML" in told(app)
        await put(pilot, notify="off")
        await pilot.press("ctrl+s")
        await pilot.pause()
        assert "correct it by hand or remove it" in told(app)
        assert file.read_text() == "theme = "


async def test_a_read_only_app_shows_settings_but_does_not_save_them(make_app, file) -> None:
    before = file.read_text()
    app = make_app(readonly=True)
    async with app.run_test(size=SIZE) as pilot:
        await opened(pilot)
        await put(pilot, on_alert='["x"]')
        await pilot.press("ctrl+s")
        await pilot.pause()
        assert "--readonly" in told(app)
        assert file.read_text() == before
        app.redraw.choose_theme("light")
        assert file.read_text() == before


async def test_a_setting_shows_the_flag_that_overrides_it_and_search_finds_it(make_app, file) -> None:
    app = make_app()
    app.session.given = {"look": "plain now, because of --plain"}
    async with app.run_test(size=(80, 24)) as pilot:
        await opened(pilot)
        assert hint(app, "look").startswith("plain now, because of --plain · ")
        await pilot.press("ctrl+f")
        await pilot.press(*"disk", "enter")
        await wait_until(pilot, lambda: row_of(app, "alert_disk_gib").has_focus_within)
        assert isinstance(app.focused, Input)


async def test_opening_the_form_checks_it_only_once(make_app, file, monkeypatch) -> None:
    checks = []
    check = SettingsScreen._wrong
    monkeypatch.setattr(SettingsScreen, "_wrong", lambda screen: checks.append(screen) or check(screen))
    app = make_app()
    async with app.run_test(size=SIZE) as pilot:
        screen = await opened(pilot)
        await wait_until(pilot, lambda: screen.query(SettingRow))
        await pilot.pause()
        assert len(checks) == 1
        await put(pilot, sampling_interval_s="2")
        await wait_until(pilot, lambda: len(checks) == 2)
