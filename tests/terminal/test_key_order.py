"""Tests that keys are handled in the order they were typed, in an app with two widgets."""

from __future__ import annotations

import asyncio

import pytest
from support.tui import wait_until
from textual import events
from textual.app import ComposeResult
from textual.binding import Binding
from textual.widget import Widget
from textual.widgets import Input

from sae_tui.terminal.key_order import KeysInOrder
from sae_tui.terminal.key_parser import Packet, PacketParser


class Stuck(Widget, can_focus=True):
    """A widget that blocks on the key `x` until the test releases it."""

    def __init__(self) -> None:
        super().__init__()
        self.let_go = asyncio.Event()

    async def on_key(self, event: events.Key) -> None:
        if event.key == "x":
            await self.let_go.wait()


class Small(KeysInOrder):
    BINDINGS = [
        Binding("slash", "open", "Filter", id="small.filter"),
        Binding("ctrl+q", "quit", priority=True),
        Binding("a,b,c", "count", "Count"),
    ]
    BEFORE_TEXT = frozenset({"small.filter"})

    def __init__(self) -> None:
        super().__init__()
        self.counted = 0

    def compose(self) -> ComposeResult:
        yield Stuck()
        yield Input()

    def action_open(self) -> None:
        self.query_one(Input).focus()

    def action_count(self) -> None:
        self.counted += 1


def send(app: Small, data: str) -> None:
    """Post the messages for input that arrives in one packet, as the driver does."""
    for message in PacketParser().feed(data):
        message.set_sender(app)
        app.post_message(message)


async def test_a_packet_contains_the_keys_that_arrived_together() -> None:
    assert [type(message) for message in PacketParser().feed("abc")] == [events.Key] * 3
    packet, *keys = PacketParser().feed("abcd")
    assert isinstance(packet, Packet)
    assert list(packet.keys) == keys


async def test_keys_after_a_key_that_opens_a_field_are_text_input() -> None:
    app = Small()
    async with app.run_test() as pilot:
        send(app, "a/abc\x7f\x7fd")
        await wait_until(pilot, lambda: app.query_one(Input).value == "ad")
        assert app.counted == 1


@pytest.mark.parametrize("turns", [3, 6, 9])
async def test_keys_arriving_while_the_app_is_exiting_are_dropped(turns: int) -> None:
    app = Small()
    async with app.run_test():
        send(app, "abc" * 60)
        for _ in range(turns):
            await asyncio.sleep(0)
    assert app.counted < 180


async def test_repeated_keys_are_commands_and_pasted_text_is_ignored() -> None:
    app = Small()
    async with app.run_test() as pilot:
        send(app, "aaaabc")
        await wait_until(pilot, lambda: app.counted == 6)
        send(app, "a cab")
        await wait_until(pilot, lambda: app._notifications)
        assert [note.message for note in app._notifications] == ["Pasted text is ignored here; press / to filter."]
        app.post_message(events.Paste("text"))
        await wait_until(pilot, lambda: len(app._notifications) == 2)
        assert app.counted == 6


async def test_a_hanging_key_handler_does_not_prevent_quitting() -> None:
    app = Small()
    async with app.run_test() as pilot:
        app.query_one(Stuck).focus()
        await pilot.pause()
        send(app, "xa\x11")
        while not app._exit:
            await asyncio.sleep(0.02)
        assert app.counted == 0
        app.query_one(Stuck).let_go.set()
