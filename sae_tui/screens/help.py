"""What the keys of a screen do, from the bindings themselves."""

from __future__ import annotations

from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import VerticalScroll
from textual.screen import ModalScreen, Screen
from textual.widgets import Static

_INTRODUCTION = (
    "GPUs above, jobs below. A job runs on its own: quitting the app, closing the terminal or losing the line "
    "never touches it. A finished job leaves sae_weights.safetensors and cfg.json, which SAELens loads."
)


class HelpScreen(ModalScreen[None]):
    """Escape closes it."""

    BINDINGS = [
        Binding("escape,question_mark,f1,q", "dismiss", "Close", id="help.close", tooltip="Back to where you were")
    ]
    DEFAULT_CSS = """
    HelpScreen { align: center middle; }
    HelpScreen > VerticalScroll { width: 72; max-width: 95%; height: auto; max-height: 90%; padding: 1 2; }
    HelpScreen > VerticalScroll { border: round $primary; background: $surface; }
    HelpScreen Static { height: auto; }
    """

    def __init__(self, about: Screen[object]) -> None:
        super().__init__()
        self._about = about

    def compose(self) -> ComposeResult:
        with VerticalScroll():
            yield Static(f"{_INTRODUCTION}\n\n{self._keys()}", markup=False)

    def _keys(self) -> str:
        """A line per binding that has a tooltip: of the focused widget, the screen and the app."""
        shown: dict[str, str] = {}
        for active in self._about.active_bindings.values():
            binding = active.binding
            if binding.tooltip:
                key = self.app.get_key_display(binding)
                shown.setdefault(key, f"{key:>8}  {binding.description:<14} {binding.tooltip}")
        return "\n".join(shown.values())
