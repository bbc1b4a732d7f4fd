"""The command palette's entries for what keys do, from the bindings themselves."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable

from textual.app import SystemCommand
from textual.dom import DOMNode
from textual.screen import Screen


def of_keys(screen: Screen[object], told: Iterable[str]) -> Iterable[SystemCommand]:
    """An entry per key that has an id and a tooltip; `told` are the titles that there are already."""
    known = set(told)
    for node, binding, enabled, tooltip in screen.active_bindings.values():
        if enabled and tooltip and binding.id and binding.description not in known:
            known.add(binding.description)
            yield SystemCommand(binding.description, tooltip, _call(screen, binding.action, node))


def _call(screen: Screen[object], action: str, node: DOMNode) -> Callable[[], Awaitable[None]]:
    async def run() -> None:
        await screen.app.run_action(action, node)

    return run
