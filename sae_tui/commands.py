"""The command palette's entries: jobs by name, and what keys do, from the bindings themselves."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from typing import TYPE_CHECKING

from textual.app import SystemCommand
from textual.dom import DOMNode
from textual.markup import escape
from textual.screen import Screen

from sae_tui.jobs.states import shown

if TYPE_CHECKING:
    from sae_tui.app import SaeApp

_MOST_JOBS = 50


def of_jobs(app: SaeApp) -> Iterable[SystemCommand]:
    """What can be done to each of the newest jobs."""
    for job in app.jobs[:_MOST_JOBS]:
        name = escape(job.name)
        yield SystemCommand(f"Open job {job.id}: {name}", shown(job).word, lambda i=job.id: app.open_job(i))
        yield SystemCommand(
            f"Clone job {job.id}: {name}", "Its settings in a new form", lambda i=job.id: app.clone_job(i)
        )
        if job.state.is_final or job.held:
            yield SystemCommand(
                f"Resume job {job.id}: {name}",
                "From its last checkpoint",
                lambda i=job.id: app.continue_job(i),
            )
        if not job.state.is_final:
            yield SystemCommand(f"Stop job {job.id}: {name}", "Save and stop", lambda i=job.id: app.stop_job(i))
            yield SystemCommand(f"Pause job {job.id}: {name}", "Save and wait", lambda i=job.id: app.pause_job(i))


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
