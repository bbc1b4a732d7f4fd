"""Tests for filtering, sorting and marking in the jobs table, and for keys that change a job's name, tags and note."""

from __future__ import annotations

from contextlib import closing

import pytest
from support.tui import record_job, wait_until

from sae_tui.panels.finder import JobsFinder
from sae_tui.panels.jobs import JobsPanel
from sae_tui.settings import load_settings
from sae_tui.widgets.filter import Filter
from sae_tui.widgets.lines import LineView
from trainer.contract.process import ProcessRef
from trainer.contract.store.job_store import Control
from trainer.contract.store.states import JobState


@pytest.fixture
def three(data) -> None:
    record_job(data, "alpha", JobState.FAILED, heldout_fvu=0.1, tags=("good",))
    record_job(data, "beta", JobState.FINISHED, heldout_fvu=0.2)
    me = ProcessRef.current()
    alive = {"supervisor_pid": me.pid, "supervisor_start": me.start_ticks, "boot_id": me.boot_id}
    record_job(data, "gamma", JobState.QUEUED, waits_for="GPU 0 is held by job 7 (ann)", **alive)


def table(app) -> JobsPanel:
    return app.screen.query_one(JobsPanel)


def shown(app) -> list[str]:
    """Return the job names in the table, in order."""
    return [line.split()[1] for line in table(app).plain.splitlines()[1:]]


def said(app) -> str:
    return app.screen.query_one("#finder #found", LineView).plain.strip()


def stored(data, job_id: int):
    with closing(Control(data.control_db, readonly=True)) as control:
        return control.job(job_id)


async def ready(app, pilot, count: int = 3) -> None:
    await wait_until(pilot, lambda: len(app.session.jobs) == count and len(table(app).rows) == count)
    await pilot.pause()


async def test_the_filter_applies_while_typing_enter_keeps_it_and_escape_clears_it(make_app, three) -> None:
    app = make_app(2)
    async with app.run_test(size=(120, 40)) as pilot:
        await ready(app, pilot)
        bar = app.screen.query_one(JobsFinder)
        assert not bar.has_class("-in-use")
        await pilot.press("slash", *"#good")
        assert shown(app) == ["alpha"]
        assert said(app) == "1 of 3"
        await pilot.press("enter")
        assert table(app).has_focus
        assert shown(app) == ["alpha"]
        await pilot.press("escape")
        assert shown(app) == ["gamma", "beta", "alpha"]
        assert not bar.has_class("-in-use")
        await pilot.press("slash", *"zzz")
        assert "No job matches" in table(app).plain
        await pilot.press("escape")
        assert table(app).has_focus
        assert len(shown(app)) == 3


async def test_action_keys_are_letters_while_a_filter_is_typed(make_app, three) -> None:
    app = make_app(2)
    async with app.run_test(size=(120, 40)) as pilot:
        await ready(app, pilot)
        await pilot.press("slash", *"ash x#+")
        assert app.screen.id == "dashboard"
        assert app.screen.query_one("#finder Filter", Filter).value == "ash x#+"


async def test_the_sort_order_cycles_and_the_cursor_stays_on_its_job(make_app, three) -> None:
    app = make_app(2)
    async with app.run_test(size=(120, 40)) as pilot:
        await ready(app, pilot)
        await pilot.press("down")
        assert table(app).selected == 2
        await pilot.press("o")
        assert (said(app), shown(app)) == ("by name", ["alpha", "beta", "gamma"])
        assert table(app).selected == 2
        await pilot.press("o", "o")
        # An unfinished job comes after finished jobs, even if its FVU is lower.
        assert (said(app), shown(app)) == ("by fvu", ["beta", "alpha", "gamma"])
        assert table(app).selected == 2
        await pilot.press("o", "o", "o", "o")
        assert shown(app) == ["gamma", "beta", "alpha"]


async def test_marks_are_glyphs_that_outlive_a_filter_and_are_cleared_together(make_app, data, three) -> None:
    app = make_app(2)
    async with app.run_test(size=(120, 40)) as pilot:
        await ready(app, pilot)
        await pilot.press("space", "space")
        assert table(app).plain.count("●") == 2
        assert said(app) == "2 marked · c compare · # tag · D delete · U unmark"
        assert not app.screen.query_one("#finder Filter", Filter).display
        await pilot.press("slash", *"alpha", "enter")
        assert said(app) == "1 of 3 · 2 ●"
        assert app.screen.query_one(JobsFinder).marked == [2, 3]
        await pilot.press("escape", "up", "up", "up", "space")
        assert app.screen.query_one(JobsFinder).marked == [2]
        await pilot.press("U")
        assert "●" not in table(app).plain


async def test_tags_apply_to_all_marked_jobs_or_to_the_job_under_the_cursor(make_app, data, three) -> None:
    app = make_app(2)
    async with app.run_test(size=(120, 40)) as pilot:
        await ready(app, pilot)
        await pilot.press("down", "space", "space")
        await pilot.press("number_sign", *"+paper -good", "enter")
        await wait_until(pilot, lambda: stored(data, 1).tags == stored(data, 2).tags == ("paper",))
        assert stored(data, 3).tags == ()
        await wait_until(pilot, lambda: "alpha #paper" in table(app).plain)
        await pilot.press("U", "home", "number_sign", *"later", "enter")
        await wait_until(pilot, lambda: stored(data, 3).tags == ("later",))


async def test_a_job_can_be_renamed_and_given_a_note(make_app, data, three) -> None:
    app = make_app(2)
    async with app.run_test(size=(120, 40)) as pilot:
        await ready(app, pilot)
        await pilot.press("R", "ctrl+u", *"delta", "enter")
        await wait_until(pilot, lambda: stored(data, 3).name == "delta")
        await pilot.press("N", *"try again", "enter")
        await wait_until(pilot, lambda: stored(data, 3).note == "try again")
        await pilot.press("R", "ctrl+u", *"nothing of it", "escape")
        await pilot.pause()
        assert stored(data, 3).name == "delta"


async def test_a_queued_job_shows_why_it_waits_and_can_be_moved_and_held_with_keys(make_app, data, three) -> None:
    app = make_app(2)
    async with app.run_test(size=(120, 40)) as pilot:
        await ready(app, pilot)
        assert "GPU 0 is held by job 7 (ann)" in table(app).plain
        await pilot.press("plus", "plus", "plus", "minus")
        await wait_until(pilot, lambda: stored(data, 3).priority == 2)
        await pilot.press("h")
        await wait_until(pilot, lambda: "‖ held     priority 2 · until released" in table(app).plain)
        await pilot.press("h")
        await wait_until(pilot, lambda: not stored(data, 3).held)
        await pilot.press("down", "h")
        assert any("only a queued job" in note.message for note in app._notifications)
        assert not stored(data, 2).held


async def test_an_invalid_edit_is_reported_and_changes_nothing(make_app, data, three) -> None:
    app = make_app(2)
    async with app.run_test(size=(120, 40)) as pilot:
        await ready(app, pilot)
        await pilot.press("R", "ctrl+u", "enter")
        await wait_until(pilot, lambda: any("1 to 80 characters" in note.message for note in app._notifications))
        assert stored(data, 3).name == "gamma"


async def test_every_key_with_a_tooltip_is_in_the_help_and_in_the_palette(make_app, three) -> None:
    app = make_app(2)
    async with app.run_test(size=(120, 40)) as pilot:
        await ready(app, pilot)
        titles = [command.title for command in app.get_system_commands(app.screen)]
        assert len(titles) == len(set(titles))
        wanted = {"Filter", "Order", "Mark", "Unmark", "Tags", "Rename", "Note", "Sooner", "Later", "Hold", "Compare"}
        assert wanted <= set(titles)
        command = next(one for one in app.get_system_commands(app.screen) if one.title == "Mark")
        await command.callback()
        assert app.screen.query_one(JobsFinder).marked == [3]
        await pilot.press("question_mark")
        shown = app.screen.query_one("Page").plain
        assert all(title in shown for title in wanted)


async def test_only_visible_rows_of_a_thousand_jobs_are_drawn(make_app, data) -> None:
    app = make_app(2)
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.pause()
        jobs = [_view(number) for number in range(1, 1001)]
        made: list[int] = []
        panel = table(app)
        panel.show_jobs(jobs)
        await pilot.pause()
        lines = panel._lines
        lines._make = (lambda make: lambda index: (made.append(index), make(index))[1])(lines._make)
        panel.show_jobs(jobs[::-1])
        await pilot.pause()
        assert max(made) <= panel.size.height
        await pilot.press("end")
        assert panel.selected == 1
        assert "run-1 " in "".join(segment.text for segment in panel.render_line(panel.size.height - 1))


def _view(number: int):
    from sae_tui.jobs.view.reader import JobView

    return JobView(
        id=number, name=f"run-{number}", state=JobState.FINISHED, config="", user="ada", host="here", device="cpu",
        gpu_source="none",
    )  # fmt: skip


async def test_a_queued_job_can_be_made_dependent_on_other_jobs(make_app, data, three) -> None:
    app = make_app(4)
    async with app.run_test(size=(120, 40)) as pilot:
        await wait_until(pilot, lambda: len(shown(app)) == 3)
        await pilot.press("A", *"1, 2", "enter")
        await wait_until(pilot, lambda: stored(data, 3).after == (1, 2))
        await pilot.press("A", *("backspace",) * 3, *"x", "enter")
        await pilot.pause()
        assert stored(data, 3).after == (1, 2)


async def test_a_deleted_job_can_be_restored_until_the_app_exits(make_app, data, three) -> None:
    data.run(1).create()
    app = make_app(4)
    async with app.run_test(size=(120, 40)) as pilot:
        await wait_until(pilot, lambda: len(shown(app)) == 3)
        await pilot.press("end", "D", "n")
        assert "alpha" in shown(app)
        await pilot.press("D", "y")
        await wait_until(pilot, lambda: "alpha" not in shown(app))
        assert not data.run(1).root.exists()
        await pilot.press("u")
        await wait_until(pilot, lambda: "alpha" in shown(app))
        assert data.run(1).root.is_dir()
        assert stored(data, 1).tags == ("good",)
        with closing(Control(data.control_db, readonly=True)) as control:
            assert next(event.kind for event in control.events(1)) == "queued"
        await pilot.press("end", "D", "y")
        await wait_until(pilot, lambda: app.session.actions.thrown_away)
    app.session.actions.empty_trash()
    # The job's id remains reserved, although its files have been deleted.
    assert [file for file in data.trash.rglob("*") if file.is_file()] == []


async def test_columns_are_chosen_ordered_and_saved_in_the_settings(make_app, data, three) -> None:
    app = make_app(2)
    async with app.run_test(size=(120, 40)) as pilot:
        await ready(app, pilot)
        assert [column.title for column in table(app).columns][:4] == ["JOB", "NAME", "K", "D_SAE"]
        await pilot.press("C", "space", "down", "K", "enter")
        await wait_until(pilot, lambda: app.screen.id == "dashboard")
        assert [column.title for column in table(app).columns][:4] == ["JOB", "NAME", "D_SAE", "STATE"]
        stored_columns = load_settings(data.settings_file)[0].job_columns
        assert stored_columns == list(table(app).chosen)
        assert "k" not in stored_columns


async def test_any_column_sorts_in_both_directions_with_an_arrow_in_its_heading(make_app, three) -> None:
    app = make_app(2)
    async with app.run_test(size=(120, 40)) as pilot:
        await ready(app, pilot)
        heading = table(app).plain.splitlines()[0]
        await pilot.click(JobsPanel, offset=(heading.index("NAME"), 0))
        assert "NAME▲" in table(app).plain
        assert shown(app) == ["alpha", "beta", "gamma"]
        await pilot.press("O")
        assert "NAME▼" in table(app).plain
        assert (said(app), shown(app)) == ("by name, reversed", ["gamma", "beta", "alpha"])
        await pilot.press("C", *["down"] * [*table(app).chosen].index("fvu"), "o", "escape")
        assert "FVU▲" in table(app).plain
        assert shown(app) == ["beta", "alpha", "gamma"]
        await pilot.press("O")
        # In both directions, an unfinished job comes after finished jobs.
        assert "FVU▼" in table(app).plain
        assert shown(app) == ["beta", "alpha", "gamma"]


async def test_a_job_and_its_clones_fold_into_one_row_with_a_key(make_app, data) -> None:
    first = record_job(data, "quick", JobState.FINISHED)
    second = record_job(data, "quick-2", JobState.FINISHED, parent=first)
    record_job(data, "quick-3", JobState.FAILED, parent=second)
    record_job(data, "other", JobState.FINISHED)
    app = make_app(2)
    async with app.run_test(size=(120, 40)) as pilot:
        await wait_until(pilot, lambda: len(table(app).rows) == 4)
        await pilot.press("F")
        await wait_until(pilot, lambda: len(table(app).rows) == 2)
        assert "▸ family 1 · 3 jobs · 1 failed · 2 finished" in table(app).plain
        assert load_settings(data.settings_file)[0].fold_clones
        await pilot.press("down", "right")
        await wait_until(pilot, lambda: len(table(app).rows) == 5)
        await pilot.press("F")
        await wait_until(pilot, lambda: len(table(app).rows) == 4)
