"""THE REGISTRY of the panels of a job's screen, as strings, so that listing imports nothing.

A new panel is one new file here, with its widget and the size it takes in its `DEFAULT_CSS`, and one entry in `PANELS`:
the screen composes it and has it draw whatever is new. A `DetailPanel` with a `title` has a frame round it.
"""

from __future__ import annotations

import pkgutil
from typing import Any, Literal, Protocol

import msgspec

from sae_tui.jobs.view.watcher import JobDetail

# From top to bottom: above all; below that as wide as the screen; beside each other; at the bottom. Beside those three,
# or in their place where the screen is narrow, is what the key for settings shows.
Place = Literal["top", "live", "middle", "bottom", "side"]


class JobPanel(Protocol):
    """A widget that draws what is known of a job."""

    def show_detail(self, detail: JobDetail) -> None:
        """Draw the job as it is now."""
        ...


class PanelEntry(msgspec.Struct, frozen=True):
    """The class of a panel, as `module:name`, and where on the screen it is; in a place panels are in their order."""

    target: str
    place: Place

    def make(self, name: str) -> Any:
        """Return the panel, a `JobPanel` that is a widget, with its name as the id."""
        return pkgutil.resolve_name(self.target)(id=name)


PANELS = {
    "headline": PanelEntry("sae_tui.panels.headline:Headline", "top"),
    "cause": PanelEntry("sae_tui.panels.cause:CausePanel", "top"),
    "curves": PanelEntry("sae_tui.panels.curves:CurvesPanel", "live"),
    "ranks": PanelEntry("sae_tui.panels.ranks:RanksPanel", "middle"),
    "events": PanelEntry("sae_tui.panels.events:EventsPanel", "middle"),
    "log": PanelEntry("sae_tui.panels.log:LogPanel", "bottom"),
    "settings": PanelEntry("sae_tui.panels.settings:SettingsPanel", "side"),
}
