"""The registry of the panels on a job's screen. The registry refers to panels by strings, so that it imports none of
them.

To add a panel, add one file to this folder, with the widget and its size in `DEFAULT_CSS`, and one entry to `PANELS`.
The screen then composes and redraws the panel. A `DetailPanel` with a `title` has a frame.
"""

from __future__ import annotations

import pkgutil
from typing import Any, Literal, Protocol

import msgspec

from sae_tui.jobs.view.watcher import JobDetail

# From top to bottom: "top"; "live", as wide as the screen; "middle", side by side; "bottom".
# The settings key shows the "side" panel next to the panels in the last three places or, on a narrow screen, instead of
# them.
Place = Literal["top", "live", "middle", "bottom", "side"]


class JobPanel(Protocol):
    """A widget drawing the state of a job."""

    def show_detail(self, detail: JobDetail) -> None:
        """Draw the current state of the job."""
        ...


class PanelEntry(msgspec.Struct, frozen=True):
    """A panel's class, as `module:name`, and its place on the screen. Panels in the same place keep their order."""

    target: str
    place: Place

    def make(self, name: str) -> Any:
        """Return the panel, a `JobPanel` that is also a widget, with its name as the id."""
        return pkgutil.resolve_name(self.target)(id=name)


PANELS = {
    "headline": PanelEntry("sae_tui.panels.headline:Headline", "top"),
    "cause": PanelEntry("sae_tui.panels.cause:CausePanel", "top"),
    "curves": PanelEntry("sae_tui.panels.curves:CurvesPanel", "live"),
    "program-curves": PanelEntry("sae_tui.panels.program:ProgramCurves", "live"),
    "ranks": PanelEntry("sae_tui.panels.ranks:RanksPanel", "middle"),
    "program": PanelEntry("sae_tui.panels.program:ProgramPanel", "middle"),
    "events": PanelEntry("sae_tui.panels.events:EventsPanel", "middle"),
    "log": PanelEntry("sae_tui.panels.log:LogPanel", "bottom"),
    "settings": PanelEntry("sae_tui.panels.settings:SettingsPanel", "side"),
}
