"""Tests that a key means the same on every screen, and that the last release's keys still work."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
from support.reference import bindings, declared
from support.scenes import SCENES
from support.tui import wait_until
from textual.pilot import Pilot

from sae_tui.panels.jobs import JobsPanel
from sae_tui.panels.latents import LatentList
from sae_tui.screens.help import topics
from sae_tui.screens.process_list import ProcessList
from sae_tui.widgets.footer import Footer
from sae_tui.widgets.log_view import LogView
from sae_tui.widgets.old_keys import OLD

# Keys that act on the focused widget, or move the focus.
GENERAL = frozenset(("space", "enter", "escape", "up", "down", "left", "right"))
# Keys that may have several names, and why.
ACCEPTED: Mapping[str, tuple[set[str], str]] = {
    "question_mark": ({"Help", "Close"}, "closes what it has opened"),
    "f1": ({"Help", "Close"}, "closes what it has opened"),
    "q": ({"Quit", "Close"}, "closes a text first"),
    "slash": ({"Filter", "Search", "Find"}, "looks for words in what is listed"),
    "n": ({"New job", "Next", "No"}, "the next match as in less, and no in questions"),
    "N": ({"Note", "Previous"}, "the previous match as in less"),
    "y": ({"Clone", "Yes"}, "yes in questions"),
    "f": ({"Features", "Finish"}, "the other answer to a question"),
    "a": ({"All free", "All metrics", "All values", "Axis"}, "all; on curves, nothing can be selected"),
    "r": ({"Run", "Best"}, "the best GPUs, on the form that runs a job"),
    "R": ({"Rename", "Always"}, "always the best GPUs, on the same form"),
    "plus": ({"Sooner", "Zoom"}, "more"),
    "minus": ({"Later", "Zoom out"}, "less"),
    "right_square_bracket": ({"GPUs down", "Next", "Next GPU", "Rank"}, "the next one"),
    "left_square_bracket": ({"GPUs up", "Previous", "Previous GPU", "Previous rank"}, "the previous one"),
    "m": ({"SAE", "Metric", "Mark"}, "the next one; in the processes, space folds, so it cannot mark"),
    "M": ({"Previous SAE", "Previous metric"}, "the previous one"),
    "h": ({"Hold", "Back"}, "left as in vi, in long commands"),
    "l": ({"Log", "More"}, "right as in vi, in long commands"),
    "s": ({"Stop", "Signal"}, "stops a job, or a process that is none"),
    "t": ({"Processes", "Tree"}, "opens the processes, and then their tree"),
    "f2": ({"GPUs", "Model"}, "there are no GPUs to choose, and letters are typed into a field"),
    "S": ({"Scale", "Steer"}, "no curve is drawn for latents"),
    "p": ({"Pause", "Probe"}, "no job can be paused in the doctor"),
    "A": ({"After", "Adopt"}, "no job is queued among the processes"),
}


def test_a_key_has_the_same_name_on_all_screens() -> None:
    names: dict[str, set[str]] = {}
    for binding in bindings():
        for key in binding.key.split(","):
            names.setdefault(key, set()).add(binding.description)
    several = {key: each for key, each in names.items() if len(each) > 1 and key not in GENERAL}
    assert several == {key: accepted for key, (accepted, _) in ACCEPTED.items()}


@dataclass(frozen=True)
class OldKey:
    """A key from the last release, the key that is shown instead, a scene where it works, and what it changes there."""

    place: str
    key: str
    now: str
    scene: str
    changes: Callable[[Any], object]
    before: tuple[str, ...] = ()


def _screen(app: Any) -> object:
    return type(app.screen).__name__


def _marked(app: Any) -> object:
    return app.screen.query_one(JobsPanel).marked


def _marked_processes(app: Any) -> object:
    return {*app.screen.query_one(ProcessList)._marked}


def _span(app: Any) -> object:
    return app.screen._back.span_s


def _latent(app: Any) -> object:
    return app.screen.query_one(LatentList).latent


LONGER, SHORTER = "greater_than_sign", "less_than_sign"
# The keys of a scene are pressed in this order. The log of the second rank, which `r` shows, has too few lines for `f`.
OLD_KEYS = (
    OldKey("Dashboard", "e", "X", "dashboard, one job", _screen),
    OldKey("Dashboard", "v", "V", "dashboard, one job", lambda app: app.screen.panels.view),
    OldKey("Dashboard", "plus", LONGER, "dashboard, one job", _span, ("shift+tab",)),
    OldKey("Dashboard", "minus", SHORTER, "dashboard, one job", _span, ("shift+tab", LONGER)),
    OldKey("JobsFinder", "x", "U", "dashboard, one job", _marked, ("space",)),
    OldKey("JobScreen", "c", "b", "job, running", _screen),
    OldKey("JobScreen", "r", "right_square_bracket", "job, running", lambda app: app.screen.log_rank),
    OldKey("LogScreen", "f", "end", "log", lambda app: app.screen.query_one(LogView).follows, ("slash", "1", "enter")),
    OldKey("LogScreen", "r", "right_square_bracket", "log", lambda app: app.screen.source),
    OldKey("FeaturesScreen", "s", "o", "features", lambda app: app.screen.order),
    OldKey("FeaturesScreen", "g", "colon", "features", _screen),
    OldKey("FeaturesScreen", "n", "equals_sign", "features", _latent),
    OldKey("DoctorScreen", "r", "ctrl+n", "doctor", lambda app: app.screen._look),
    OldKey("CompareScreen", "l", "S", "compare", lambda app: app.screen.view.log),
    OldKey("CompareScreen", "E", "x", "compare", _screen),
    OldKey("ProcessList", "x", "U", "processes", _marked_processes, ("m",)),
    OldKey("ProcessPage", "v", "a", "processes", lambda app: app.screen.shows_all, ("enter",)),
    OldKey("GpuScreen", "plus", LONGER, "GPU", _span),
    OldKey("GpuScreen", "minus", SHORTER, "GPU", _span, (LONGER,)),
)


@pytest.mark.parametrize("name", dict.fromkeys(old.scene for old in OLD_KEYS))
async def test_a_key_from_the_last_release_works_like_its_new_key_but_is_not_shown(data, name: str) -> None:
    (scene,) = (one for one in SCENES if one.name == name)
    app: Any = scene.app(data)
    async with app.run_test(size=(120, 40)) as pilot:
        await scene.show(pilot)
        screen, focused = app.screen, app.focused
        for old in (one for one in OLD_KEYS if one.scene == name):
            await _try(pilot, old)
            while app.screen is not screen:
                await pilot.press("escape")
            screen.set_focus(focused)


async def _try(pilot: Pilot[Any], old: OldKey) -> None:
    """Press an old key in its scene, and check what it does and that it is not shown."""
    app: Any = pilot.app
    await pilot.press(*old.before)
    await pilot.pause()
    active = app.screen.active_bindings
    assert active[old.key].binding.action == active[old.now].binding.action
    shown = {key for topic in topics(app.screen) for keys, _, _ in topic.keys for key in keys.split()}
    assert app.get_key_display(active[old.now].binding) in shown
    assert app.get_key_display(active[old.key].binding) not in shown
    assert old.key not in {entry.key for footer in app.screen.query(Footer) for _, entry in footer._places}
    before = old.changes(app)
    await pilot.press(old.key)
    await wait_until(pilot, lambda: old.changes(app) != before)


def test_every_key_from_the_last_release_is_tested() -> None:
    assert {(node.__name__, binding.key) for node, binding in declared() if binding.group is OLD} == {
        (old.place, old.key) for old in OLD_KEYS
    }
