"""Tests for the frame around the content: colours, footer, messages, help and palette."""

from __future__ import annotations

import gc
import itertools
import weakref
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.tui import StillMonitor, record_job, record_metrics, title_of, wait_until
from textual._context import active_app
from textual._styles_cache import StylesCache
from textual.color import Color
from textual.command import CommandPalette
from textual.widgets import Button, Input, Label
from textual.widgets._toast import Toast
from textual.widgets.option_list import Option

from sae_tui import notices
from sae_tui.gpu.simulated import Simulated
from sae_tui.jobs.view.reader import JobView
from sae_tui.notices import tell_end
from sae_tui.panels.gpu_cards import card
from sae_tui.panels.gpu_picker import GpuPicker
from sae_tui.panels.gpus import GpuPanel
from sae_tui.panels.jobs import JobsPanel
from sae_tui.screens.compare import CompareScreen
from sae_tui.screens.help import HelpScreen, Topic, help_lines
from sae_tui.settings import load_settings
from sae_tui.theme import THEMES
from sae_tui.widgets import frame
from sae_tui.widgets.confirm import Confirm
from sae_tui.widgets.footer import Footer, FooterKey, arrange
from sae_tui.widgets.setting_form import SettingForm
from trainer.contract.errors import Problem
from trainer.contract.process import ProcessRef
from trainer.contract.store.states import JobState


def alive() -> dict:
    me = ProcessRef.current()
    return {"supervisor_pid": me.pid, "supervisor_start": me.start_ticks, "boot_id": me.boot_id}


def footer(app) -> str:
    return app.screen.query_one(Footer).plain.rstrip()


def messages(app) -> list[str]:
    """Return the messages shown above the footer."""
    return [str(toast.render()) for toast in app.screen.query(Toast)]


# Colours.


async def test_with_the_terminals_own_colours_bar_tracks_and_inputs_stay_visible(make_app, data) -> None:
    record_job(data, "half", JobState.STOPPED, total_steps=100, step=50)
    app = make_app(4, theme="terminal")
    async with app.run_test(size=(80, 24)) as pilot:
        await wait_until(pilot, lambda: app.session.jobs)
        bar, rail = (app.screen.query_one(GpuPanel)._style(name) for name in ("spark", "rail"))
        assert bar.color != rail.color
        await pilot.press("n")
        await wait_until(pilot, lambda: app.screen.query(SettingForm))
        await pilot.press("f3")
        await wait_until(pilot, lambda: app.screen.query("SettingRow Input"))
        assert app.screen.query("SettingRow Input").first(Input).rich_style.underline
        assert app.screen.query_one(SettingForm).look("typed").underline


# The footer.


@pytest.mark.parametrize(
    ("state", "fields", "begins"),
    [
        (JobState.FINISHED, {}, "⏎ Open  y Clone  space Mark  c Compare  D Delete  n New job"),
        (JobState.FAILED, {}, "⏎ Open  g Resume  y Clone  l Log"),
        (JobState.RUNNING, alive(), "⏎ Open  s Stop  p Pause  l Log"),
        (JobState.QUEUED, alive(), "h Hold  s Cancel  A After"),
        (JobState.QUEUED, {"held": True, **alive()}, "g Resume  h Release  s Cancel  A After"),
    ],
)
async def test_the_footer_shows_the_actions_for_the_selected_job(make_app, data, state, fields, begins) -> None:
    record_job(data, "other", JobState.STOPPED)
    record_job(data, "this", state, **fields)
    app = make_app(2)
    async with app.run_test(size=(80, 24)) as pilot:
        await wait_until(pilot, lambda: len(app.session.jobs) == 2 and footer(app).startswith(f" {begins}"))
        assert footer(app).endswith("  q Quit  ? Help")
        await pilot.press("down")
        await wait_until(pilot, lambda: footer(app).startswith(" ⏎ Open  g Resume  y Clone  l Log"))


EMPTY = " n New job  X Extract  r Run  V View  , Settings"


async def test_without_jobs_new_job_comes_first_and_a_text_field_shows_f1_for_help(make_app) -> None:
    app = make_app(2)
    async with app.run_test(size=(80, 24)) as pilot:
        await wait_until(pilot, lambda: footer(app) == EMPTY.ljust(65) + "q Quit  ? Help")
        await pilot.press("slash")
        await wait_until(pilot, lambda: footer(app).endswith("^q Quit  F1 Help"))
        assert "Filter" not in footer(app)
        await pilot.press("f1")
        assert isinstance(app.screen, HelpScreen)


@pytest.mark.parametrize("width", [10, 20, 40, 60, 80, 120])
def test_a_key_that_does_not_fit_is_left_out_but_quit_and_help_never_are(width) -> None:
    left = [
        FooterKey("^l", "Launch", "ctrl+l"),
        FooterKey("^e", "Edit", "ctrl+e"),
        FooterKey("^s", "Save", "ctrl+s"),
    ] * 4
    right = [FooterKey("q", "Quit", "q"), FooterKey("?", "Help", "question_mark")]
    places = arrange(left, right, width)
    assert [entry.key for _, entry in places[-2:]] == ["q", "question_mark"]
    assert all(x + entry.width < width for x, entry in places)
    assert all(one + entry.width < other for (one, entry), (other, _) in itertools.pairwise(places))
    assert [entry for _, entry in places[:-2]] == left[: len(places) - 2]


@pytest.mark.parametrize("keys", [("0",), ("t",), ("enter", "a"), ("enter", "l")])
async def test_a_narrow_footer_shows_the_key_for_going_back(make_app, data, keys) -> None:
    record_job(data, "minilm", JobState.FINISHED)
    app = make_app()
    async with app.run_test(size=(80, 24)) as pilot:
        await wait_until(pilot, lambda: app.session.jobs)
        for key in keys:
            await pilot.press(key)
            await pilot.pause()
        await wait_until(pilot, lambda: footer(app).startswith(" esc Back"))


async def test_clicking_a_key_in_the_footer_presses_it(make_app) -> None:
    app = make_app(2)
    async with app.run_test(size=(80, 24)) as pilot:
        await wait_until(pilot, lambda: "New job" in footer(app))
        await pilot.click(Footer, offset=(footer(app).index("? Help") + 3, 0))
        await pilot.pause()
        assert isinstance(app.screen, HelpScreen)


# Messages.


async def test_a_message_replaces_the_previous_one_and_takes_one_line(make_app) -> None:
    app = make_app(2)
    async with app.run_test(size=(80, 24), notifications=True) as pilot:
        app.notify("the first")
        app.notify("of two lines\nor more, " + "x" * 100, title="Job 3", markup=False)
        await pilot.pause()
        await wait_until(pilot, lambda: messages(app))
        assert messages(app) == ["Job 3: of two lines; or more, " + "x" * 100]
        (toast,) = app.screen.query(Toast)
        assert (toast.region.y, toast.region.height, toast.region.width) == (22, 1, 80)


async def test_a_message_that_expires_while_being_mounted_does_not_freeze_the_app(make_app) -> None:
    app = make_app(2)
    async with app.run_test(size=(80, 24), notifications=True) as pilot:
        app.notify("said long ago")
        await wait_until(pilot, lambda: app.notices)
        app.notices[-1].timeout = -1.0
        await app.screen.mount(late := Toast(app.notices[-1]))
        await wait_until(pilot, lambda: late not in app.screen.query(Toast))


async def test_all_errors_are_shown_in_full_until_a_key_is_pressed_on_any_screen(make_app, monkeypatch) -> None:
    monkeypatch.setattr(notices, "SEEN_S", 0)
    # On a busy machine, the test may press the key late.
    monkeypatch.setattr(notices, "SHOWN_S", 3600.0)
    wrong = [Problem(f"setting_{number}", "must be another value than this one, " * 4) for number in range(3)]
    app = make_app(2, problems=wrong)
    async with app.run_test(size=(80, 24), notifications=True) as pilot:
        await wait_until(pilot, lambda: len(messages(app)) == 3)
        await pilot.pause()
        assert [toast.region.height for toast in app.screen.query(Toast)] == [3, 3, 3]
        assert app.screen.query(Toast).last().region.bottom == 23
        app.notify("said meanwhile")
        await wait_until(pilot, lambda: len(messages(app)) == 4)
        app.action_help()
        await wait_until(pilot, lambda: isinstance(app.screen, HelpScreen) and len(messages(app)) == 4)
        await pilot.press("down")
        await wait_until(pilot, lambda: messages(app) == ["said meanwhile"])
        await pilot.press("escape", "exclamation_mark")
        await pilot.pause()
        shown = app.screen.query_one("Page").plain
        assert all(f"setting_{number}" in shown for number in range(3))


async def test_a_key_pressed_before_an_error_could_be_read_does_not_close_it(make_app, monkeypatch) -> None:
    # On a busy machine, the test may press the key late.
    monkeypatch.setattr(notices, "SEEN_S", 3600.0)
    app = make_app(2)
    async with app.run_test(size=(80, 24), notifications=True) as pilot:
        app.notify("this went wrong", severity="error")
        await wait_until(pilot, lambda: messages(app))
        await pilot.press("V")
        assert messages(app) == ["✗ This went wrong."]


# Help.


def test_help_indents_the_text_for_each_key_at_every_width() -> None:
    listed = [Topic("Jobs", (("D", "Delete", "a long text " * 12),)), Topic("Find", (("/", "Filter", "find"),))]
    for width in (40, 74, 120):
        lines = ["".join(text for text, _ in line) for line in help_lines("", listed, width)]
        assert max(map(len, lines)) <= width
        shown = [line for line in lines if "long text" in line and "Delete" not in line]
        assert shown
        assert all(line.startswith(" " * 20) for line in shown)
    assert "Find" in lines[0]


async def test_help_lists_the_screens_keys_by_topic(make_app) -> None:
    app = make_app(2)
    async with app.run_test(size=(120, 40)) as pilot:
        await pilot.press("question_mark")
        assert [topic.title for topic in app.screen.topics] == ["Jobs", "Queue", "Find", "GPUs", "Everywhere"]
        assert "A job runs independently" in app.screen.query_one("Page").plain
        first = app.screen.topics[0].keys[0]
        assert first[:2] == ("n", "New job")
        await pilot.press("escape", "n")
        await wait_until(pilot, lambda: app.screen.name == "launch")
        await pilot.press("f1")
        assert [topic.title for topic in app.screen.topics] == ["GPUs", "Launch", "Everywhere"]
        assert "A job runs independently" not in app.screen.query_one("Page").plain


# The palette.


async def found(app, pilot, query: str) -> list[str]:
    """Return the titles that the command palette lists for a query, in order."""
    await pilot.press("ctrl+p")
    await wait_until(pilot, lambda: isinstance(app.screen, CommandPalette))
    listed = app.screen.query_one("CommandList")
    app.screen.query_one("CommandInput", Input).value = query
    await app.workers.wait_for_complete()
    await pilot.pause()
    options: list[Option] = [listed.get_option_at_index(index) for index in range(listed.option_count)]
    shown = [str(option.prompt).splitlines()[0] for option in options]
    await pilot.press("escape")
    await pilot.pause()
    return shown


async def test_the_palette_lists_all_keys_but_only_jobs_that_match_the_query(make_app, data) -> None:
    for number in range(12):
        record_job(data, f"theme of a long name {number}" if number == 3 else f"run {number}", JobState.FINISHED)
    app = make_app(2)
    async with app.run_test(size=(120, 40)) as pilot:
        await wait_until(pilot, lambda: len(app.session.jobs) == 12)
        everything = await found(app, pilot, "")
        assert "    n  New job" in everything
        assert "    D  Delete" in everything
        assert not any(" job 1:" in title for title in everything)
        assert (await found(app, pilot, "clone"))[0] == "    y  Clone"
        themes = [title.strip() for title in await found(app, pilot, "theme")]
        assert set(themes[:5]) == {f"Theme: {name}" for name in THEMES}
        assert "Open job 4: theme of a long name 3" in themes[3:]
        assert [title.strip() for title in await found(app, pilot, "resume 12")] == ["Resume job 12: run 11"]


async def test_the_palette_opens_the_settings_and_their_key_does_not_open_them_twice(make_app, data) -> None:
    app = make_app(2)
    async with app.run_test(size=(120, 40)) as pilot:
        await pilot.press("ctrl+p", *"settings", "enter")
        await wait_until(pilot, lambda: app.screen.name == "settings")
        assert title_of(app.screen.query_one("#form-scroll")).strip() == f"Settings · {data.settings_file}"
        app.action_settings()
        await pilot.press("escape")
        await wait_until(pilot, lambda: app.screen.id == "dashboard")


async def test_the_palette_shows_the_apps_cpu_cost(make_app) -> None:
    app = make_app(2)
    async with app.run_test(size=(120, 40)) as pilot:
        await pilot.press("ctrl+p", *"own cost", "enter")
        await wait_until(pilot, lambda: app.screen.query("Page"))
        await wait_until(pilot, lambda: "s per minute" in app.screen.query_one("Page").plain)
        assert "reading GPU 1" in app.screen.query_one("Page").plain


async def test_a_theme_is_saved_without_changing_the_other_settings(make_app, data) -> None:
    data.settings_file.write_text('# mine\nhistory_hours = 5.0\ntheme = "dark" # at night\nwhat = 1\n')
    app = make_app(2)
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.pause()
        command = next(one for one in app.get_system_commands(app.screen) if one.title == "Theme: light")
        command.callback()
        assert app.theme == "sae-light"
    assert data.settings_file.read_text() == '# mine\nhistory_hours = 5.0\ntheme = "light" # at night\nwhat = 1\n'
    settings, _ = load_settings(data.settings_file)
    assert (settings.theme, settings.history_hours) == ("light", 5.0)


# Tables and GPU cards.


async def test_a_bar_and_its_track_differ_in_colour_and_in_character(make_app, data) -> None:
    record_job(data, "half", JobState.STOPPED, total_steps=100, step=50)
    app = make_app(4)
    async with app.run_test(size=(80, 24)) as pilot:
        await wait_until(pilot, lambda: app.session.jobs)
        await pilot.pause()
        strip = app.screen.query_one(JobsPanel).render_line(1)
        bar, rail = (next(part for part in strip if part.text.startswith(sign)) for sign in ("━", "─"))
        assert (bar.text, rail.text.strip()) == ("━" * 5, "─" * 5)
        assert bar.style.color != rail.style.color


def test_the_reason_why_a_gpu_is_lost_fills_all_lines_of_its_card() -> None:
    from sae_tui.panels.gpu_row import GpuRow

    source = Simulated(1, clock=lambda: 0.0, faults={0: "lost"})
    source.open()
    sample = source.sample(0, processes=True)
    lines = card(GpuRow(sample, sample.reason, "bad", lambda *_: []), 38, 4)
    reason_text = " ".join("".join(text for text, _ in line).strip() for line in lines[1:])
    assert reason_text.strip() == f"✗ {sample.reason}"
    assert "".join(text for text, _ in lines[0]).strip() == "GPU 0 RTX 3090"


async def test_gpu_numbers_are_never_truncated_in_the_picker(make_app) -> None:
    app = make_app(monitor=StillMonitor(16))
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.press("n")
        await wait_until(pilot, lambda: app.screen.name == "launch" and app.screen.query(GpuPicker))
        await pilot.pause()
        shown = app.screen.query_one(GpuPicker).plain
        assert all(f"GPU {number} " in shown for number in range(16))


@pytest.mark.parametrize(("width", "least"), [(80, 22), (120, 34), (200, 56)])
async def test_a_field_uses_the_available_width(make_app, width, least) -> None:
    app = make_app(2)
    async with app.run_test(size=(width, 40)) as pilot:
        await pilot.press("n")
        await wait_until(pilot, lambda: app.screen.query(SettingForm))
        await pilot.press("f3")
        await wait_until(pilot, lambda: any(one.size.width >= least for one in app.screen.query("SettingRow Input")))


async def test_a_question_longer_than_the_screen_keeps_its_buttons_and_can_be_scrolled(make_app) -> None:
    app = make_app(2)
    async with app.run_test(size=(40, 12)) as pilot:
        app.push_screen(Confirm("\n".join(f"line {number}" for number in range(30)), yes="Launch"))
        await pilot.pause()
        for button in app.screen.query(Button):
            assert app.screen.region.contains_region(button.region)
        first = app.screen.query_one("#question").region.y
        await pilot.press("down", "down")
        assert app.screen.query_one("#question").region.y == first - 2


async def test_the_export_names_the_folder_that_it_writes_to(make_app, data) -> None:
    for name in ("one", "two"):
        record_metrics(data, record_job(data, name, JobState.FINISHED))
    app = make_app(2)
    async with app.run_test(size=(80, 24)) as pilot:
        app.session.go.show(CompareScreen(app.session, [1, 2]))
        await wait_until(pilot, lambda: app.screen.comparison.curves)
        await pilot.press("x")
        asked = " ".join(str(app.screen.query_one(Label).render()).split())
        assert str(Path.cwd()) in asked
        assert app.screen.query_one(Label).region.width <= 60


def test_a_desktop_notification_about_an_ended_job_is_one_terminal_sequence() -> None:
    written: list[str] = []
    job = JobView(
        id=7, name="a\x07\x1b]2;owned", state=JobState.FAILED, config="", user="ada", host="box", device="cpu",
        gpu_source="none", error="b\x1b\\\x9b31m\u202e\n",
    )  # fmt: skip
    app = SimpleNamespace(_driver=SimpleNamespace(write=written.append), notify=lambda *_, **__: None)
    tell_end(app, job, "terminal")
    (sequence,) = written
    assert sequence.startswith("\x1b]9;Job 7 (a")
    assert sequence.endswith("\x07")
    assert sequence[2:-1].isprintable()


# Memory.


def test_the_rendered_lines_of_closed_widgets_are_freed() -> None:
    lines = StylesCache()
    lines.get_inner_outer(Color(0, 0, 0), Color(9, 9, 9))
    kept = weakref.ref(lines)
    del lines
    gc.collect()
    assert kept(), "Textual no longer keeps them, so `_free_closed` need not clear its cache"
    frame._free_closed()
    assert kept() is None


async def test_a_closed_screen_is_freed_outside_its_own_context(make_app, monkeypatch) -> None:
    freed = []
    monkeypatch.setattr(frame, "_FREED_AFTER_S", 0.01)
    monkeypatch.setattr(frame, "_free_closed", lambda: freed.append(active_app.get(None)))
    async with make_app(4).run_test(size=(120, 40)) as pilot:
        await pilot.press("comma")
        await wait_until(pilot, lambda: pilot.app.screen.query(SettingForm))
        assert not freed
        await pilot.press("escape")
        await wait_until(pilot, lambda: freed)
    # Textual's context would keep the screen alive until the timer ends.
    assert freed[0] is None
