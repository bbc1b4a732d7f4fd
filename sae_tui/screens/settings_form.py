"""The app's settings as a form, read from the settings file and saved to it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import VerticalScroll

from sae_tui.jobs import named_python
from sae_tui.session import Session
from sae_tui.settings import AT_START, Settings, change_settings, load_settings, read_settings_file
from sae_tui.ssh import checked_host
from sae_tui.widgets.footer import Footer, FooterOffer
from sae_tui.widgets.frame import FramedScreen, HeadingLine
from sae_tui.widgets.setting_form import Field, FieldHelp, SettingForm
from trainer.contract.errors import UserError, sentence
from trainer.contract.printable import printable
from trainer.contract.settings.declare import Setting, settings_of
from trainer.contract.wording import join_words, plural


class SettingsScreen(FramedScreen):
    """Shows the content of the settings file. `draft` keeps the unsaved input of each setting while the screen is
    closed.

    Saving writes only changed settings, so that other programs' changes to the file are kept.
    """

    # `on_mount` focuses the first field. Textual would focus it earlier and scroll its heading out of view.
    AUTO_FOCUS = ""
    BINDINGS = [
        Binding("escape", "back", "Back", id="settings.back",
                tooltip="To the previous screen; unsaved changes are kept"),
        Binding("ctrl+s", "save", "Save", id="settings.save", tooltip="Write the changes to the settings file",
                priority=True),
        Binding("ctrl+r", "reset", "Reset", id="settings.reset",
                tooltip="Reset this setting to its saved value, then to its default"),
        Binding("ctrl+f", "find_setting", "Find", id="settings.find", priority=True,
                tooltip="Go to a setting by part of its name"),
    ]  # fmt: skip
    HELP = (
        "Settings that differ from their default are marked. Only your changes are written to the file; its comments "
        "are kept."
    )

    def __init__(self, session: Session, draft: dict[str, str], read_settings: Callable[[], object]) -> None:
        super().__init__(name="settings")
        self.session = session
        self._draft = draft
        self._read_settings = read_settings
        self._path = session.data.settings_file
        # The file's parsed content, including invalid settings, and the reason if the file cannot be read.
        self._stored: dict[str, Any] = {}
        self._broken = ""
        # Maps each unapplied setting in the file to the reason.
        self._warnings: dict[str, str] = {}

    def compose(self) -> ComposeResult:
        self._read()
        yield HeadingLine(" Settings", classes="heading", markup=False)
        with VerticalScroll(id="form-scroll", can_focus=False, classes="panel"):
            yield SettingForm(
                _fields(),
                self._stored | self._draft,
                id="form",
                classes="-all",
                original=self._stored,
                marks_usual=True,
            )
        yield FieldHelp()
        yield Footer()

    def on_mount(self) -> None:
        form = self.query_one(SettingForm)
        form.focus_again()
        self._check()
        if self._broken:
            self.notify(self._broken, title="Settings", severity="error", markup=False)

    def on_resize(self) -> None:
        self._entitle()

    def keys_offered(self) -> FooterOffer:
        """Put the save key first, before the focused widget's keys."""
        return FooterOffer(("settings.save", "settings.reset", "settings.find"))

    def _read(self) -> None:
        try:
            self._stored, self._broken = read_settings_file(self._path), ""
        except UserError as error:
            self._stored, self._broken = {}, str(error)
        self._warnings = {problem.path: problem.message for problem in load_settings(self._path)[1]}

    @property
    def changes(self) -> dict[str, Any]:
        """The new value for each changed setting, as a dict by name; invalid values are left out."""
        values, _ = self.query_one(SettingForm).values()
        typed = {
            name: values.get(name, setting.default) for name, setting in _settings().items() if name in self._draft
        }
        return {
            name: value for name, value in typed.items() if value != self._stored.get(name, _settings()[name].default)
        }

    @on(SettingForm.Edited)
    def _check(self) -> None:
        """Check the form, and keep the changed values as a draft."""
        form = self.query_one(SettingForm)
        self._draft.clear()
        self._draft.update({row.field.path: row.text for row in form.rows if row.is_changed})
        form.say(self._wrong(), self.session.given, self._warnings)
        self._entitle()

    def _wrong(self) -> dict[str, str]:
        """Return the error for each invalid setting, changed or not, as a dict by name."""
        values, wrong = self.query_one(SettingForm).values()
        for name in values.get("hosts", []):
            try:
                checked_host(name)
            except UserError as error:
                wrong.setdefault("hosts", str(error))
        python = values.get("python")
        if python and (why := named_python.refusal(python)):
            wrong.setdefault("python", printable(why))
        return wrong

    def _entitle(self) -> None:
        count = len(self._draft)
        unsaved = f"{count} changed · ctrl+s saves" if count else ""
        hint = "the file is broken: correct it in an editor" if self._broken else unsaved
        self.entitle(self.query_one("#form-scroll"), f"Settings · {self._path}", hint)

    def action_back(self) -> None:
        """Leave the form; unsaved input is kept for the next time."""
        if self._draft:
            self.notify(f"Draft kept: {plural(len(self._draft), 'setting')} not saved; press , to reopen them.")
        self.app.pop_screen()

    def action_find_setting(self) -> None:
        self.query_one(SettingForm).find()

    def action_reset(self) -> None:
        """Restore the saved value for the field under the cursor; if the field is unchanged, restore its default."""
        for row in self.query_one(SettingForm).rows:
            if row.has_focus_within:
                name, default = row.field.path, row.field.setting.default
                row.set_value(self._stored.get(name, default) if row.is_changed else default)

    def action_save(self) -> None:
        """Save the changes and apply them, unless some are invalid."""
        if self.session.actions.refused():
            return
        wrong = [name for name in self._wrong() if name in self._draft]
        if wrong:
            self.query_one(SettingForm).focus_field(wrong[0])
            self.notify(f"Not saved: correct {join_words(wrong)} first.", severity="warning", markup=False)
        elif self.changes or self._broken:
            self._save(self.changes)
        else:
            self.notify("No setting was changed.")

    def _save(self, changes: dict[str, Any]) -> None:
        before = self._stored
        try:
            now = read_settings_file(self._path)
            change_settings(self._path, changes)
        except (UserError, OSError) as error:
            self.notify(sentence(error), title="Not saved", severity="error", markup=False)
            return
        self._tell_saved(changes, [name for name in changes if now.get(name) != before.get(name)])
        self._read_settings()
        self._read()
        self.query_one(SettingForm).start_from(self._stored)
        self._check()

    def _tell_saved(self, changes: dict[str, Any], meanwhile: list[str]) -> None:
        late = sorted(AT_START & changes.keys())
        parts = [f"Saved: {join_words(list(changes))}"]
        parts += (
            [f"{join_words(late)} {'takes' if len(late) == 1 else 'take'} effect at the next start"] if late else []
        )
        parts += [f"replaced newer values of {join_words(meanwhile)} in the file"] if meanwhile else []
        self.notify("; ".join(parts) + ".", severity="warning" if meanwhile else "information", markup=False)


def _settings() -> dict[str, Setting]:
    return {setting.name: setting for setting in settings_of(Settings)}


def _fields() -> list[Field]:
    """Return a field for every setting, grouped by section."""
    groups = list(dict.fromkeys(setting.group for setting in settings_of(Settings)))
    settings = sorted(settings_of(Settings), key=lambda setting: groups.index(setting.group))
    return [Field(setting.name, setting, setting.choices, section=setting.group or "Others") for setting in settings]
