from __future__ import annotations

from support.tui import wait_until
from textual.app import App
from textual.screen import Screen

from sae_tui.widgets.confirm import Confirm
from sae_tui.widgets.reading import LinesScreen


class Recorded(App[None]):
    """An app that records which screens have been rendered, even if nothing has been written to the terminal."""

    def __init__(self) -> None:
        super().__init__()
        self.rendered: set[Screen[object]] = set()

    def _display(self, screen: Screen[object], renderable: object) -> None:
        if renderable is not None:
            self.rendered.add(screen)
        super()._display(screen, renderable)


async def test_a_yes_typed_before_the_question_was_drawn_is_ignored() -> None:
    answers: list[bool | None] = []
    app: App[None] = App()
    async with app.run_test(size=(80, 24)) as pilot:
        question = Confirm("Delete everything?")
        drawn = app.push_screen(question, answers.append)
        question.action_answer(True)
        await drawn
        assert answers == []
        assert app.screen is question
        await pilot.pause()
        await pilot.press("y")
        assert answers == [True]


async def test_a_yes_is_ignored_until_the_question_is_redrawn_after_another_dialog() -> None:
    answers: list[bool | None] = []
    app: App[None] = App()
    async with app.run_test(size=(80, 24)) as pilot:
        question = Confirm("Delete everything?")
        await app.push_screen(question, answers.append)
        await pilot.pause()
        await app.push_screen(LinesScreen("Messages", lambda width: [(("over it", "text"),)]))
        await pilot.pause()
        app.pop_screen()
        assert app.screen is question
        question.action_answer(True)
        await pilot.pause()
        assert app.screen is question
        await pilot.press("y")
        assert answers == [True]


async def test_a_yes_is_ignored_while_the_app_draws_nothing() -> None:
    answers: list[bool | None] = []
    app = Recorded()
    async with app.run_test(size=(80, 24)) as pilot:
        question = Confirm("Delete everything?")
        with app.batch_update():
            await app.push_screen(question, answers.append)
            await wait_until(pilot, lambda: question in app.rendered)
            question.action_answer(True)
            await pilot.pause()
            assert answers == []
        await pilot.pause()
        await pilot.press("y")
        assert answers == [True]


async def test_an_answer_is_used_only_once_if_its_key_is_pressed_repeatedly() -> None:
    answers: list[bool | None] = []
    app: App[None] = App()
    async with app.run_test(size=(80, 24)) as pilot:
        question = Confirm("Go on?")
        await app.push_screen(question, answers.append)
        await pilot.pause()
        question.action_answer(True)
        question.action_answer(True)
        question.action_answer(False)
        await pilot.pause()
        assert answers == [True]
        assert not isinstance(app.screen, Confirm)


async def test_a_no_is_accepted_at_once() -> None:
    answers: list[bool | None] = []
    app: App[None] = App()
    async with app.run_test(size=(80, 24)) as pilot:
        question = Confirm("Go on?")
        await app.push_screen(question, answers.append)
        question.action_answer(False)
        await pilot.pause()
        assert answers == [False]


async def test_a_yes_is_ignored_in_a_window_too_small_for_the_question() -> None:
    answers: list[bool | None] = []
    app: App[None] = App()
    async with app.run_test(size=(10, 3)) as pilot:
        question = Confirm("Delete job 12, which has failed, with checkpoints, logs and SAEs?")
        await app.push_screen(question, answers.append)
        await pilot.pause()
        await pilot.press("y")
        assert app.screen is question
        await pilot.resize_terminal(25, 8)
        await pilot.pause()
        await pilot.press("y")
        assert answers == [True]


async def test_a_question_offers_a_second_action_if_there_is_one() -> None:
    answers: list[bool | None] = []
    app: App[None] = App()
    async with app.run_test(size=(80, 24)) as pilot:
        for question, took_other in ((Confirm("Stop?", also="Finish"), True), (Confirm("Stop?"), False)):
            await app.push_screen(question, answers.append)
            await pilot.pause()
            await pilot.press("f")
            assert question.took_other is took_other
        assert answers == [True]
