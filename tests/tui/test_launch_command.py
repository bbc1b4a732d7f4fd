"""Tests for switching between kinds of jobs on the launch screen, and for the form for commands."""

from __future__ import annotations

from contextlib import closing
from functools import partial

import pytest
from support.commands import command_file
from support.tui import put_into_row, record_job, wait_until
from textual.widgets import Input, Static

from sae_tui.jobs.launch import kept_draft
from sae_tui.jobs.user import user_name
from sae_tui.panels.gpu_picker import GpuPicker
from sae_tui.panels.jobs import JobsPanel
from sae_tui.screens.launch import LaunchScreen
from sae_tui.screens.launch_form import KindSwitch
from sae_tui.widgets.ask import Ask
from sae_tui.widgets.confirm import Confirm
from sae_tui.widgets.find import Find
from sae_tui.widgets.lines import LineView
from sae_tui.widgets.setting_form import CommandLine, SettingForm, SettingRow
from trainer.contract.settings.job_file import load_any
from trainer.contract.store.job_store import Control
from trainer.contract.store.states import JobState

WIDE = (130, 45)


async def opened(pilot, key: str = "r") -> LaunchScreen:
    """Open the form for commands, or the form that another key opens."""
    await pilot.pause()
    before = pilot.app.screen
    await pilot.press(key)
    await wait_until(pilot, lambda: pilot.app.screen is not before and isinstance(pilot.app.screen, LaunchScreen))
    screen = pilot.app.screen
    await wait_until(pilot, lambda: screen.query(SettingRow) and screen.form.review.sentences)
    return screen


def row(screen, name: str) -> SettingRow:
    return screen.query_one(f"#row-{name}", SettingRow)


def hint(screen, name: str) -> str:
    return row(screen, name).hint


async def type_line(pilot, screen, line: str) -> None:
    screen.query_one(CommandLine).value = line
    await pilot.pause()


async def reviewed(pilot, screen, *words: str) -> None:
    await wait_until(pilot, lambda: all(word in screen.form.review.text for word in words))


async def test_a_command_line_is_split_as_in_a_shell_and_launched(make_app, data, monkeypatch) -> None:
    monkeypatch.setattr("sae_tui.jobs.launch.launching.enqueue", lambda data: "")
    app = make_app(4)
    async with app.run_test(size=WIDE) as pilot:
        screen = await opened(pilot)
        assert isinstance(app.focused, CommandLine)
        assert screen.query_one(GpuPicker).chosen == {0}
        await pilot.press(*"sh -c 'exit 3' {gpus} *.txt $HOME")
        await reviewed(pilot, screen, "1 GPU · memory unknown, so it gets idle GPUs · sh -c 'exit 3' '{gpus}' '*.txt'")
        await pilot.press("ctrl+l")
        await wait_until(pilot, lambda: data.run(1).job_file.exists() and app.session.jobs)
        job = load_any(data.run(1).job_file)
        assert job.command.argv == ["sh", "-c", "exit 3", "{gpus}", "*.txt", "$HOME"]
        assert job.launch.gpus == [0]
        assert app.session.jobs[0].name == "sh -c exit 3 {gpus} *.txt $HOME"
        assert (data.run(1).root / "environment.json").stat().st_mode & 0o777 == 0o600
        assert kept_draft.kept(data, "command") is None


async def test_an_open_quote_is_reported_at_the_command_line(make_app) -> None:
    app = make_app(4)
    async with app.run_test(size=WIDE) as pilot:
        screen = await opened(pilot)
        await type_line(pilot, screen, "python3 -c 'print(1)")
        await wait_until(pilot, lambda: "has a quote that is not closed" in hint(screen, "command-argv"))
        await type_line(pilot, screen, "no-such-program")
        await wait_until(pilot, lambda: "there is no program no-such-program on $PATH" in hint(screen, "command-argv"))
        await type_line(pilot, screen, "sh train.sh > log.txt")
        await wait_until(pilot, lambda: "! passes > to the program as an argument" in hint(screen, "command-argv"))
        assert screen.form.review.job is not None


async def test_each_kind_of_job_keeps_its_own_form_and_its_own_draft(make_app, data) -> None:
    app = make_app(4)
    async with app.run_test(size=WIDE) as pilot:
        training = await opened(pilot, "n")
        await put_into_row(pilot, "name", "mine")
        await wait_until(pilot, lambda: training.form.changed)
        commands = await opened(pilot, "f9")
        await type_line(pilot, commands, "sh train.sh")
        await wait_until(pilot, lambda: commands.form.changed)
        extraction = await opened(pilot, "f8")
        assert row(extraction, "model-path").text
        assert "extract" in extraction.query_one(KindSwitch).visual.plain
        await pilot.press("f7")
        await wait_until(pilot, lambda: app.screen is training)
        assert row(training, "name").text == "mine"
        await pilot.press("f9")
        await wait_until(pilot, lambda: app.screen is commands)
        await wait_until(pilot, lambda: all(kept_draft.kept(data, kind) for kind in ("train", "command")))
    app = make_app(4)
    async with app.run_test(size=WIDE) as pilot:
        screen = await opened(pilot)
        await wait_until(pilot, lambda: screen.query_one(CommandLine).value == "sh train.sh")
        assert not [one for one in app.screen_stack if isinstance(one, Confirm)]


async def test_a_click_on_a_kind_shows_its_form(make_app) -> None:
    app = make_app(4)
    async with app.run_test(size=(80, 24)) as pilot:
        screen = await opened(pilot)
        await pilot.click(KindSwitch, offset=(4, 0))
        await wait_until(pilot, lambda: app.screen is not screen and app.screen.query("#row-sae-k"))
        assert app.screen.form.kind == "train"


async def test_earlier_command_lines_are_offered_newest_first_without_repeats(make_app, data) -> None:
    for line, user in (("a --x", None), ("b 'c d'", None), ("a --x", None), ("theirs", "mallory")):
        argv = ["b", "c d"] if line.startswith("b") else line.split()
        config = command_file(*argv)
        record_job(data, "probe", JobState.FINISHED, config=config, user=user or user_name())
    record_job(data, "sae", JobState.FINISHED, user=user_name())
    app = make_app(4)
    async with app.run_test(size=WIDE) as pilot:
        await wait_until(pilot, lambda: len(app.session.jobs) == 5)
        screen = await opened(pilot)
        await pilot.press("up")
        await wait_until(pilot, lambda: isinstance(app.screen, Find))
        assert [line for line, _ in app.screen._things] == ["a --x", "b 'c d'"]
        await pilot.press("down", "enter")
        await wait_until(pilot, lambda: screen.query_one(CommandLine).value == "b 'c d'")
        assert isinstance(app.focused, CommandLine)


async def test_without_earlier_commands_the_up_key_goes_to_the_previous_field(make_app) -> None:
    app = make_app(4)
    async with app.run_test(size=WIDE) as pilot:
        screen = await opened(pilot)
        await pilot.press("up")
        assert row(screen, "name").has_focus_within


@pytest.mark.parametrize(
    ("variables", "clean", "words"),
    [
        ({"VIRTUAL_ENV": "/home/ada/.venv"}, False, "this app's, virtual environment /home/ada/.venv"),
        ({"CONDA_DEFAULT_ENV": "torch2"}, False, "this app's, conda environment torch2"),
        ({}, False, "this app's"),
        ({"VIRTUAL_ENV": "/home/ada/.venv"}, True, "clean"),
    ],
)
async def test_the_form_says_which_environment_the_program_gets(make_app, monkeypatch, variables, clean, words) -> None:
    for name in ("VIRTUAL_ENV", "CONDA_DEFAULT_ENV", "CONDA_PREFIX"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    app = make_app(4)
    async with app.run_test(size=WIDE) as pilot:
        screen = await opened(pilot)
        row(screen, "command-clean_env").set_value(clean)
        screen.query_one(SettingForm).post_message(SettingForm.Edited())
        await wait_until(pilot, lambda: str(screen.query_one("#environment", Static).content) == words)
        assert not screen.query_one("#preset").display


async def test_a_clone_gets_the_environment_of_the_original_job(make_app, data) -> None:
    job_id = record_job(data, "probe", JobState.FINISHED, config=command_file("sh", "train.sh"), user=user_name())
    app = make_app(4)
    async with app.run_test(size=WIDE) as pilot:
        await wait_until(pilot, lambda: app.session.jobs)
        app.screen.query_one(JobsPanel).focus()
        screen = await opened(pilot, "y")
        await wait_until(pilot, lambda: screen.query_one(CommandLine).value == "sh train.sh")
        assert str(screen.query_one("#environment", Static).content) == f"as for job {job_id}"


async def test_the_form_asks_before_it_takes_a_command_line_from_a_file(make_app, tmp_path) -> None:
    file = tmp_path / "job.toml"
    file.write_text('kind = "command"\nname = "given"\n[command]\nargv = ["sh", "-c", "touch \'a b\'"]\n')
    app = make_app(4)
    async with app.run_test(size=WIDE) as pilot:
        screen = await opened(pilot)
        for key, line in (("n", ""), ("y", """sh -c 'touch '"'"'a b'"'"''""")):
            await pilot.press("ctrl+o")
            await wait_until(pilot, lambda: isinstance(app.screen, Ask) and app.screen.query(Input))
            app.screen.query_one(Input).value = str(file)
            await pilot.press("enter")
            await wait_until(pilot, lambda: isinstance(app.screen, Confirm) and app.screen.query("#yes"))
            assert app.screen.question.startswith(f"{file} runs code:\n  command.argv: runs `sh -c 'touch")
            await pilot.press(key)
            await wait_until(pilot, lambda: row(screen, "name").text == "given")
            await wait_until(pilot, partial(_has_line, screen, line))


def _has_line(screen: LaunchScreen, line: str) -> bool:
    return screen.query_one(CommandLine).value == line


@pytest.mark.parametrize("size", [(80, 24), (120, 40)])
async def test_nothing_wraps_in_the_form_for_commands(make_app, size) -> None:
    app = make_app(4)
    async with app.run_test(size=size) as pilot:
        screen = await opened(pilot)
        await type_line(pilot, screen, "sh -c 'exit 3' " + "--a-long-option=1 " * 20)
        await reviewed(pilot, screen, "sh -c 'exit 3'")
        for name in ("name", "command-folder", "command-memory"):
            assert row(screen, name).size.height == 1
        assert row(screen, "command-argv").size.height == 2
        assert screen.query_one(KindSwitch).size.height == 1
        for panel in screen.query(LineView):
            assert all(panel.render_line(y).cell_length == panel.size.width for y in range(panel.size.height))


async def test_launching_a_job_keeps_the_forms_for_the_other_kinds(make_app, data, monkeypatch) -> None:
    monkeypatch.setattr("sae_tui.jobs.launch.launching.enqueue", lambda data: "")
    app = make_app(4)
    async with app.run_test(size=WIDE) as pilot:
        training = await opened(pilot, "n")
        await put_into_row(pilot, "name", "mine")
        await wait_until(pilot, lambda: training.form.changed)
        commands = await opened(pilot, "f9")
        await type_line(pilot, commands, "sh train.sh")
        await wait_until(pilot, lambda: commands.form.review.job)
        await pilot.press("ctrl+l")
        await wait_until(pilot, lambda: app.session.jobs)
        with closing(Control(data.control_db, readonly=True)) as control:
            assert control.job(1).config.startswith('kind = "command"')
        await wait_until(pilot, lambda: app.screen is app.router.dashboard and commands not in app.router._kept)
        fresh = await opened(pilot)
        assert fresh is not commands
        assert fresh.query_one(CommandLine).value == ""
        await pilot.press("f7")
        await wait_until(pilot, lambda: app.screen is training)
        assert row(training, "name").text == "mine"
