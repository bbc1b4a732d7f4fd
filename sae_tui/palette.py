"""The command palette: commands from the current screen's key bindings, and actions on jobs named in the query."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping
from functools import partial
from typing import Any, cast

from textual.app import App, SystemCommand
from textual.await_complete import AwaitComplete
from textual.command import CommandList, CommandPalette, DiscoveryHit, Hit, Hits, Provider
from textual.content import Content
from textual.dom import DOMNode
from textual.markup import escape
from textual.screen import Screen
from textual.types import IgnoreReturnCallbackType

from sae_tui.app_parts.router import Router
from sae_tui.jobs.asking import asked_of
from sae_tui.jobs.states import describe_state
from sae_tui.jobs.view.reader import JobView
from sae_tui.session import Session
from sae_tui.theme import THEMES, ThemeName

_MOST_JOBS = 50
_KEY_WIDTH = 5


class Palette(CommandPalette):
    """A command palette that tolerates being opened or closed twice in a row and works in windows of any size."""

    # Hide the search icon, a magnifying glass that many fonts lack.
    DEFAULT_CSS = """
    Palette > Vertical { width: 90; max-width: 100%; }
    Palette SearchIcon { display: none; }
    """

    @classmethod
    def open(cls, app: App[Any]) -> None:
        """Open the palette unless it is already open."""
        if not cls.is_open(app):
            app.push_screen(cls())

    def dismiss(self, result: IgnoreReturnCallbackType | None = None) -> AwaitComplete:
        return super().dismiss(cast(None, result)) if self.app.screen is self else AwaitComplete()

    def _action_command_list(self, action: str) -> None:
        # Textual 8.2 cannot page through a list with an empty visible area.
        if self.query_one(CommandList).scrollable_content_region.area:
            super()._action_command_list(action)


class Commands(Provider):
    """Provides the currently available commands, each with its key."""

    async def discover(self) -> Hits:
        keys = _keys(self.screen)
        for title, explanation, act, _ in self.app.get_system_commands(self.screen):
            yield DiscoveryHit(_display(Content(title), keys.get(title)), act, text=title, help=_below(explanation))

    async def search(self, query: str) -> Hits:
        matcher, keys = self.matcher(query), _keys(self.screen)
        for title, explanation, act, _ in self.app.get_system_commands(self.screen):
            # Also search the explanation, but rank a match there below a match in the title.
            named, explained = matcher.match(title), query.casefold() in explanation.casefold()
            if named or explained:
                shown = _display(matcher.highlight(escape(title)), keys.get(title))
                yield Hit(1 + named if named else 0.5, shown, act, text=title, help=_below(explanation))


class JobCommands(Provider):
    """Provides actions on jobs named in the query by id or part of the name. These actions rank below the commands."""

    async def search(self, query: str) -> Hits:
        words = query.casefold().split()
        session: Session = cast(Any, self.app).session
        for job in [job for job in session.jobs if _names(job, words)][:_MOST_JOBS]:
            for verb, explanation, act in _of_job(session, job):
                title = f"{verb} job {job.id}: {job.name}"
                if all(word in title.casefold() for word in words):
                    yield Hit(0.1, _display(Content(title), None), act, text=title, help=_below(explanation))


def _names(job: JobView, words: Iterable[str]) -> bool:
    """Return True if any word is the job's id or part of its name. A single letter never matches a name."""
    return any(word == str(job.id) or (len(word) > 1 and word in job.name.casefold()) for word in words)


def _of_job(session: Session, job: JobView) -> Iterable[tuple[str, str, IgnoreReturnCallbackType]]:
    """Yield the actions available in the job's state: a verb, an explanation and a function."""
    yield "Open", describe_state(job).word, lambda: session.go.open_job(job.id)
    yield "Clone", "Open its settings in a new form", lambda: session.go.clone_job(job.id)
    if job.state.is_final or job.held:
        yield (
            "Resume",
            "Continue from its last checkpoint; a command starts again",
            lambda: session.actions.resume(job.id),
        )
    if not job.state.is_final:
        yield "Stop", f"It {asked_of(job.config).stops}", lambda: session.actions.stop(job.id)
        yield "Pause", "Stop, and free the GPUs until it is resumed", lambda: session.actions.pause(job.id)


def commands(
    screen: Screen[object], router: Router, choose_theme: Callable[[ThemeName], object]
) -> Iterable[SystemCommand]:
    """Yield the palette commands, except actions on individual jobs."""
    yield SystemCommand("New job", "Choose GPUs and launch a job", router.new_job)
    yield SystemCommand("Extract", "Extract activations of a language model", partial(router.new_job, "extract"))
    yield SystemCommand("Run", "Run any program as a job", partial(router.new_job, "command"))
    yield SystemCommand("Dashboard", "All GPUs and jobs", router.show_dashboard)
    yield SystemCommand("Doctor", "Check this machine for problems", router.show_doctor)
    for name in THEMES:
        yield SystemCommand(f"Theme: {name}", "Colours, saved in settings.toml", partial(choose_theme, name))
    yield SystemCommand("Settings", "Theme, alerts, other hosts and all other settings", router.show_settings)
    yield SystemCommand("Alerts", "Current alerts and alerts from the last 24 hours", router.show_alerts)
    yield SystemCommand("Own cost", "Resources that this app uses: CPU, memory, terminal output", router.show_own_cost)
    yield SystemCommand("Help", "The keys of this screen", router.show_help)
    yield SystemCommand("Quit", "Quit; jobs keep running", screen.app.action_quit)
    yield from _of_keys(
        screen,
        (
            "New job",
            "Extract",
            "Run",
            "Dashboard",
            "Doctor",
            "Settings",
            "Help",
            "Quit",
            "Back",
            "Close",
            "Commands",
        ),
    )


def _of_keys(screen: Screen[object], listed: Iterable[str]) -> Iterable[SystemCommand]:
    """Yield a command for each active key binding with an id and a tooltip, unless its title is in `listed`."""
    titles = set(listed)
    for node, binding, enabled, tooltip in screen.active_bindings.values():
        if enabled and tooltip and binding.id and binding.description not in titles:
            titles.add(binding.description)
            yield SystemCommand(binding.description, tooltip, _call(screen, binding.action, node))


def _call(screen: Screen[object], action: str, node: DOMNode) -> Callable[[], Awaitable[None]]:
    async def run() -> None:
        await screen.app.run_action(action, node)

    return run


def _keys(screen: Screen[object]) -> Mapping[str, str]:
    """Return a dict mapping each active key binding's description to its first key."""
    keys: dict[str, str] = {}
    for _, binding, _, _ in screen.active_bindings.values():
        keys.setdefault(binding.description, screen.app.get_key_display(binding))
    return keys


def _display(title: Content, key: str | None) -> Content:
    """Return the title preceded by its key, padded to a fixed width."""
    return Content.assemble((f"{key or '':>{_KEY_WIDTH}}  ", "$text-accent"), title)


def _below(explanation: str) -> str:
    """Return the explanation as markup, indented to start below its title."""
    return " " * (_KEY_WIDTH + 2) + escape(explanation)
