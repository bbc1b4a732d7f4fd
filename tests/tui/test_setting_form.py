"""Tests for forms whose rows get an editor only when they get the focus."""

from __future__ import annotations

import pytest
from support.tui import put_into_row, wait_until
from textual.widgets import Input

from sae_tui.screens.launch import LaunchScreen
from sae_tui.widgets.menu import Menu
from sae_tui.widgets.setting_form import FieldHelp, SettingRow
from trainer.contract.settings.job_file import load_job


async def opened(pilot) -> LaunchScreen:
    await pilot.press("n")
    await wait_until(pilot, lambda: isinstance(pilot.app.screen, LaunchScreen))
    screen = pilot.app.screen
    await wait_until(pilot, lambda: screen.form.review.job)
    await pilot.pause()
    return screen


def row_of(screen, name: str) -> SettingRow:
    return screen.query_one(f"#row-{name}", SettingRow)


def row_in_focus(app) -> str:
    rows = [one for one in app.focused.ancestors_with_self if isinstance(one, SettingRow)] if app.focused else []
    return rows[0].field.path if rows else ""


def drawn(screen, row: SettingRow) -> str:
    """Return the characters that the screen shows at a row's position."""
    return screen._compositor.render_strips()[row.region.y].crop(row.region.x, row.region.right).text


async def test_a_form_has_no_editors_until_a_field_gets_the_focus(make_app) -> None:
    app = make_app(4)
    async with app.run_test(size=(200, 60)) as pilot:
        screen = await opened(pilot)
        assert not screen.query("SettingRow > *")
        await pilot.press("f3")
        await wait_until(pilot, lambda: row_in_focus(app) == "name")
        assert len(screen.query("SettingRow > *")) == 1


async def test_values_of_fields_without_editors_are_launched_and_saved(make_app, data, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("sae_tui.jobs.launch.launching.enqueue", lambda data: "")
    file = tmp_path / "mine.toml"
    file.write_text(
        'name = "mine"\n[data]\npath = "data/sample"\n[sae]\nd_sae = 512\nk = 16\n'
        "[train]\nn_tokens = 60000\ngrad_clip = 0.5\n"
    )
    app = make_app(4)
    async with app.run_test(size=(80, 24)) as pilot:
        screen = await opened(pilot)
        screen.form.fill(file)
        await wait_until(pilot, lambda: screen.form.review.job and screen.form.review.job.name == "mine")
        await pilot.press("ctrl+l")
        await wait_until(pilot, data.run(1).job_file.exists)
        assert not screen.query("SettingRow > *")
        job = load_job(data.run(1).job_file)
        assert (job.name, job.sae.settings.k, job.train.grad_clip) == ("mine", 16, 0.5)


async def test_the_focus_reaches_every_field_in_both_directions(make_app) -> None:
    app = make_app(2)
    async with app.run_test(size=(80, 24)) as pilot:
        screen = await opened(pilot)
        await pilot.press("f3")
        names = [row.field.path for row in screen.query(SettingRow) if row.display]
        for key, order in (("tab", names), ("shift+tab", names[::-1]), ("down", names)):
            for name in order:
                await wait_until(pilot, lambda name=name: row_in_focus(app) == name)
                if name != order[-1]:
                    await pilot.press(key)
        bottom = row_of(screen, names[-1].replace(".", "-")).region.bottom
        assert bottom <= screen.query_one("#form-scroll").region.bottom


async def test_an_invalid_field_below_the_fold_is_shown_and_gets_the_focus(make_app) -> None:
    app = make_app(2)
    async with app.run_test(size=(80, 24)) as pilot:
        screen = await opened(pilot)
        row, place = row_of(screen, "train-checkpoint_every_minutes"), screen.query_one("#form-scroll")
        assert not row.display
        row.set_value(-1)
        screen.form.once_reviewed(lambda review: None)
        await wait_until(pilot, lambda: row.has_class("-wrong") and row.display)
        await pilot.press("f4")
        await wait_until(pilot, lambda: row.has_focus_within and place.region.contains_region(row.region))
        assert row.hint.startswith("✗ ")
        await wait_until(pilot, lambda: "✗" in str(screen.query_one(FieldHelp).content))
        await pilot.press("ctrl+u", *"7")
        await wait_until(pilot, lambda: screen.form.review.job and row.text == "7")


@pytest.mark.parametrize("size", [(80, 24), (131, 45), (200, 60)])
async def test_an_editor_looks_like_the_drawn_value(make_app, size) -> None:
    app = make_app(2)
    async with app.run_test(size=size) as pilot:
        screen = await opened(pilot)
        for name in ("name", "data-source", "sae-k"):
            row = row_of(screen, name)
            before = drawn(screen, row)
            row.focus_editor()
            await wait_until(pilot, lambda row=row: row.has_focus_within)
            await pilot.press("f2")
            await wait_until(pilot, lambda row=row: not row.has_focus_within)
            await pilot.pause()
            assert drawn(screen, row) == before
            assert row.query_one("Input, Menu").size.width == row._value_width


async def test_an_editor_keeps_the_width_of_its_value_if_the_window_gets_wider(make_app) -> None:
    app = make_app(2)
    async with app.run_test(size=(80, 24)) as pilot:
        screen = await opened(pilot)
        row = row_of(screen, "name")
        row.focus_editor()
        await wait_until(pilot, lambda: row.has_focus_within)
        await pilot.resize_terminal(150, 40)
        await wait_until(pilot, lambda: row._value_width > 22 and row.query_one(Input).size.width == row._value_width)


async def test_a_click_on_a_drawn_value_edits_it_at_that_place_or_opens_its_menu(make_app) -> None:
    app = make_app(2)
    async with app.run_test(size=(130, 45)) as pilot:
        screen = await opened(pilot)
        await pilot.click("#row-name", offset=(27, 0))
        await wait_until(pilot, lambda: row_in_focus(app) == "name")
        await pilot.press("x")
        await wait_until(pilot, lambda: row_of(screen, "name").text == "quxick")
        await pilot.click("#row-data-source", offset=(30, 0))
        await wait_until(pilot, lambda: row_of(screen, "data-source").query_one(Menu).expanded)


async def test_a_new_theme_also_changes_the_drawn_values(make_app) -> None:
    app = make_app(2)
    async with app.run_test(size=(130, 45)) as pilot:
        screen = await opened(pilot)

        def background() -> object:
            place = row_of(screen, "sae-k").region
            strip = screen._compositor.render_strips()[place.y].crop(place.x + 25, place.x + 26)
            return next(iter(strip)).style.bgcolor

        before = background()
        app.redraw.choose_theme("light" if app.session.settings.theme == "dark" else "dark")
        await wait_until(pilot, lambda: background() != before)


async def test_a_draft_with_changed_fields_is_marked_without_editors(make_app) -> None:
    app = make_app(2)
    async with app.run_test(size=(130, 45)) as pilot:
        screen = await opened(pilot)
        await put_into_row(pilot, "sae-k", "24")
        await wait_until(pilot, lambda: screen.form.changed == ["sae.k"])
        assert len(screen.query("SettingRow > *")) == 1
