"""The app's colour theme, which the user chooses in the app and the settings file stores."""

from __future__ import annotations

import msgspec
from textual.app import App

from sae_tui.session import Session
from sae_tui.settings import change_settings
from sae_tui.theme import OWN_THEMES, ThemeName, shown_theme
from trainer.contract.errors import UserError, sentence


class Colours:
    """Shows the theme of the settings, and changes it."""

    def __init__(self, app: App[None], session: Session) -> None:
        self._app = app
        self._session = session
        for theme in OWN_THEMES:
            app.register_theme(theme)
        self.show()

    def choose(self, name: ThemeName) -> None:
        """Change the theme now and, unless in read-only mode, save it in the settings file."""
        session = self._session
        session.settings = msgspec.structs.replace(session.settings, theme=name)
        self.show()
        if session.readonly:
            self._app.notify("The theme lasts until you quit: settings are read-only here.", markup=False)
            return
        try:
            change_settings(session.data.settings_file, {"theme": name})
        except (UserError, OSError) as error:
            self._app.notify(sentence(error), title="Theme not saved", severity="error", markup=False)

    def show(self) -> None:
        """Show the theme that is in the settings now."""
        chosen = self._session.settings.theme
        self._app.set_class(chosen == "high-contrast", "-strong")
        self._app.theme = shown_theme(chosen, self._app.console.color_system)
