"""A form generated from settings, one line each, validated while the user types."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from dataclasses import field as dataclass_field
from itertools import combinations, groupby, pairwise
from typing import Any

from rich.cells import set_cell_size
from rich.text import Text
from textual import on
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Horizontal, Vertical
from textual.content import Content
from textual.events import Click, DescendantBlur, DescendantFocus
from textual.message import Message
from textual.style import Style
from textual.widget import Widget
from textual.widgets import Input, Label, Select, Static

from sae_tui.format import visible, wrap
from sae_tui.widgets.find import Find
from sae_tui.widgets.menu import Menu
from trainer.contract.settings.declare import Setting


@dataclass(frozen=True, slots=True)
class Field:
    """A setting and its path in the job file, such as `train.lr`; with `several`, a list of values makes a sweep.

    `label` is shown before the field; it is the setting's name unless another field has the same name. `section` is the
    heading above the field, by default the section in the path. `meanings` describes choices, each with a sentence.
    """

    path: str
    setting: Setting
    choices: tuple[str, ...] = ()
    several: bool = False
    label: str = ""
    section: str = ""
    meanings: Mapping[str, str] = dataclass_field(default_factory=dict)

    @property
    def options(self) -> tuple[str, ...]:
        """The values to choose from, or () if the value is typed."""
        return self.choices or (("true", "false") if self.setting.is_bool else ())

    def show(self, value: Any) -> str:
        """Return a value as a person would type it."""
        if value == [] == self.setting.default:
            return ""
        if self.setting.is_command_line and isinstance(value, list):
            return shlex.join(map(str, value))
        return ", ".join(value) if self.setting.commas and isinstance(value, list) else show_value(value)

    def parse(self, text: str) -> Any:
        """Return the entered value, or None for the default; raise `ValueError` describing valid values."""
        if not text.strip() and not self.setting.required:
            return None
        value = self.setting.read(text, several=self.several)
        return value if self.several and isinstance(value, list) else self.setting.convert(value)

    @property
    def typing(self) -> str:
        """A hint about accepted input formats other than a plain value."""
        if self.setting.is_command_line:
            return "no shell expands it; ↑ lists earlier ones"
        if self.options or not self.setting.is_number:
            return self.setting.wanted if self.setting.is_list and self.setting.default == [] else ""
        lists = {"lr": "1e-4,3e-4", "seed": "0,1,2"}.get(self.setting.name, "16,32,64")
        hints = [
            "300k, 10M and 1e6 are numbers too" if self.setting.unit == "tokens" else "",
            f"a list like {lists} trains one SAE per value" if self.several else "",
        ]
        return "; ".join(filter(None, hints))


_Section = tuple[str, list[Field]]


class CommandLine(Input):
    """A one-line field for a command line, as typed in a shell. The up key asks the form for earlier command lines."""

    BINDINGS = [
        Binding("up", "earlier", "Earlier", id="form.earlier", tooltip="Earlier command lines, the newest first"),
    ]

    class EarlierAsked(Message):
        """The user asked for earlier command lines."""

        def __init__(self, line: CommandLine) -> None:
            super().__init__()
            self.line = line

    def action_earlier(self) -> None:
        self.post_message(self.EarlierAsked(self))

    def take(self, text: str) -> None:
        """Replace the command line, with the cursor at its end."""
        self.value = text
        self.cursor_position = len(text)
        self.focus()


# No setting's help needs more lines than this at 80 columns.
_MOST_LINES = 3


class FieldHelp(Static):
    """The full help for the focused field, below the form; hidden while no field has the focus."""

    DEFAULT_CSS = """
    FieldHelp { display: none; padding: 0 1; color: $text-muted; }
    FieldHelp.-wrong { color: $text-error; }
    FieldHelp.-warned { color: $text-warning; }
    """

    def __init__(self) -> None:
        super().__init__("", markup=False)
        self._n_lines = 0

    def explain(self, row: SettingRow | None) -> None:
        """Show this row's help or problem; keep the row in view, because the form gets shorter.

        Once the screen is closing, do nothing.
        """
        if self.parent is None:
            return
        text = "" if row is None else row.explanation_in(self._width)
        if text == str(self.content):
            return
        if row is not None:
            for name in ("-wrong", "-warned"):
                self.set_class(row.has_class(name), name)
        n_lines = min(_MOST_LINES, len(wrap(text, self._width))) if text else 0
        # Change the layout only if the height changes, because a new layout takes 50 ms for a form with all settings.
        self.update(text, layout=False)
        if n_lines != self._n_lines:
            self._n_lines = n_lines
            self.styles.height, self.display = n_lines, bool(n_lines)
            if row is not None:
                self.call_after_refresh(row.scroll_visible, animate=False)

    @property
    def _width(self) -> int:
        parent = self.parent
        assert isinstance(parent, Widget)
        return max(20, parent.content_size.width - 2)


# The widths of the parts of a row, in cells, and the share of the row that the value takes up.
_LABEL_WIDTH, _LEAST_VALUE_WIDTH, _VALUE_SHARE = 25, 22, 0.3
# With less space, a row leaves out its help, because the beginning of a sentence does not explain a setting.
_LEAST_HELP_WIDTH = 24
_GAP = "  "


class SettingRow(Horizontal, can_focus=True):
    """A label, a value and, on the right, as much of the help or the problem as fits.

    The row draws its value until it gets the focus, and only then replaces it with an editor, because a form with an
    editor in each row takes five times longer to open.
    """

    DEFAULT_CSS = """
    SettingRow { height: 1; text-wrap: nowrap; text-overflow: ellipsis; }
    SettingRow.-advanced { display: none; }
    SettingForm.-all SettingRow.-advanced, SettingRow.-advanced.-wrong { display: block; }
    SettingRow.-advanced.-changed, SettingRow.-advanced.-found { display: block; }
    SettingRow > Input, SettingRow > Select { margin-left: 25; }
    SettingRow.-overridden > Input { color: $text-disabled; text-style: dim; }
    SettingRow.-line { height: 2; }
    """

    def __init__(self, field: Field, value: Any) -> None:
        rare = "-advanced" if field.setting.advanced else ""
        line = "-line" if field.setting.is_command_line else ""
        super().__init__(id=f"row-{field.path.replace('.', '-')}", classes=f"{rare} {line}".strip() or None)
        self.field = field
        self.start = value
        self.original: str | None = None
        self.marks_usual = False
        self._problem = self._overridden = self._warning = ""
        self._editor: Menu | Input | None = None
        self._last_text = field.show(value)

    def has_new_text(self) -> bool:
        """Return whether the text has changed since the last call."""
        before, self._last_text = self._last_text, self.text
        return self._last_text != before

    def allow_focus(self) -> bool:
        """Give the focus to the row only if it has no editor, which would take the focus."""
        return self._editor is None

    def on_focus(self) -> None:
        self.screen.set_focus(self.fill())

    def focus_on_click(self) -> bool:
        """Do not create the editor until the click is complete, because otherwise the click would go to the editor."""
        return False

    def on_click(self, event: Click) -> None:
        """Edit the value at the position of the click, or open its menu. Later clicks on the value go to the editor."""
        x, editor = event.x - _LABEL_WIDTH, self.fill()
        # Do not call `focus`, because it would take the focus later, even from the open menu.
        self.screen.set_focus(editor)
        if isinstance(editor, Input):
            editor.cursor_position = len(fitted(editor.value, x))  # Textual keeps it within the text
        elif 0 <= x < self._value_width:
            editor.call_later(editor.action_show_overlay)

    def fill(self) -> Menu | Input:
        """Return the editor, and create it if needed."""
        if self._editor is None:
            self._editor = self._new_editor()
            self._editor.styles.width = self._value_width
            self.mount(self._editor)
        return self._editor

    def focus_editor(self) -> None:
        """Put the cursor in the editor."""
        self.fill().focus()

    def on_resize(self) -> None:
        if self._editor is not None:
            self._editor.styles.width = self._value_width

    def _new_editor(self) -> Menu | Input:
        value = self.field.show(self.start)
        if self.field.options:
            return Menu(self._options(), value=value, allow_blank=False, compact=True)
        kind = CommandLine if self.field.setting.is_command_line else Input
        return kind(value, compact=True, placeholder=self._placeholder(), select_on_focus=False)

    @property
    def label(self) -> str:
        return self.field.label or self.field.setting.name

    @property
    def help(self) -> str:
        setting = self.field.setting
        return f"{setting.help} [{setting.unit}]" if setting.unit else setting.help

    @property
    def text(self) -> str:
        editor = self._editor
        return str(editor.value) if editor is not None and editor.is_mounted else self.field.show(self.start)

    def set_value(self, value: Any) -> None:
        """Set a value without marking it as changed by the user."""
        self.start = value
        self.refresh()
        if isinstance(self._editor, Menu):
            self._editor.set_options(self._options())
            self._editor.value = self.field.show(value)
        elif self._editor is not None:
            self._editor.value = self.field.show(value)
            self._editor.cursor_position = len(self._editor.value)

    def say(self, problem: str, overridden: str = "", warning: str = "") -> None:
        """Show the problem, or else the warning, or else the effect of another setting and the help."""
        self._problem, self._overridden, self._warning = problem, overridden, warning
        self.set_class(bool(warning and not problem), "-warned")
        self.set_class(bool(problem), "-wrong")
        self.set_class(self.is_changed, "-changed")
        self.set_class(bool(overridden), "-overridden")
        self.set_class(self.marks_usual and self.is_unusual, "-unusual")
        self.refresh()

    def render(self) -> Content:
        label = (fitted(self.label, _LABEL_WIDTH), self._look("changed", "unusual", usual="label"))
        gap = "\n" + " " * _LABEL_WIDTH if self.field.setting.is_command_line else _GAP
        has_help = self.size.width - _LABEL_WIDTH - self._value_width - len(_GAP) >= _LEAST_HELP_WIDTH
        hint = (self.hint if has_help else self._remarks, self._look("wrong", "warned", usual="hint"))
        return Content.assemble(label, *self._drawn_value(), gap, hint)

    def _drawn_value(self) -> list[tuple[str, Style]]:
        """Return the value as its editor would show it."""
        width, look = self._value_width, self._form.look
        if self.field.options:
            arrow = "▼ "
            chosen = fitted(visible(self.text), width - 1 - len(arrow))
            return [(chosen, look("chosen")), (f" {arrow}", look("arrow"))]
        if not self.text:
            example = fitted(self._placeholder(), min(width, len(self._placeholder())))
            return [(example, look("placeholder")), (" " * (width - len(example)), look("typed"))]
        return [(fitted(visible(self.text), width), self._look("overridden", usual="typed"))]

    @property
    def _value_width(self) -> int:
        """The width of the value and of its editor. A command line takes up the full width, with its hint below it."""
        width = self.size.width
        if self.field.setting.is_command_line:
            return max(0, width - _LABEL_WIDTH)
        return max(_LEAST_VALUE_WIDTH, int(_VALUE_SHARE * width))

    @property
    def _form(self) -> SettingForm:
        return next(node for node in self.ancestors if isinstance(node, SettingForm))

    def _look(self, *states: str, usual: str) -> Style:
        """Return the style of the first state that the row is in, or else the usual style."""
        return self._form.look(next((state for state in states if self.has_class(f"-{state}")), usual))

    def explanation_in(self, width: int) -> str:
        """Return the name of the field, its help or problem, and how to type or choose its value.

        If the meanings of all choices need too many lines of this width, only the current choice is explained.
        """
        if self._problem:
            return f"{self.label}: {self.hint}"
        typing, meanings = self.field.typing, self.field.meanings
        text = f"{self.label}: {self.hint}{typing and f' {typing[:1].upper()}{typing[1:]}.'}"
        every = " ".join([text, *(f'"{name}": {meaning}' for name, meaning in meanings.items())])
        if len(wrap(every, width)) <= _MOST_LINES:
            return every
        return f'{text} "{self.text}": {meanings[self.text]}' if self.text in meanings else text

    @property
    def hint(self) -> str:
        """The problem or the warning or, if there is neither, remarks on the value, and the help."""
        remarks = self._remarks
        return remarks if self._problem or self._warning else " · ".join(filter(None, (remarks, self.help)))

    @property
    def _remarks(self) -> str:
        """The problem or the warning or, if there is neither, remarks on the value."""
        usual = f"default {self._placeholder()}" if self.marks_usual and self.is_unusual else ""
        was = f"was {self.original or 'default'}" if self.is_changed else ""
        was = "" if usual and self.original in ("", self._placeholder()) else was
        if self._problem or self._warning:
            return f"✗ {self._problem}" if self._problem else f"! {self._warning}"
        return " · ".join(filter(None, (self._overridden, was, usual)))

    @property
    def is_unusual(self) -> bool:
        """Whether the value is invalid or differs from the default."""
        try:
            value = self.field.parse(self.text)
        except ValueError:
            return True
        return value is not None and value != self.field.setting.default

    @property
    def is_changed(self) -> bool:
        """Whether there is an original value and the current value differs from it."""
        return self.original is not None and self.text != self.original

    def _options(self) -> list[tuple[Text, str]]:
        """Return the values to choose from, and the current value if it is not one of them.

        A file may contain several values or an unknown value. Values are never parsed as markup, because a file may
        contain any text.
        """
        words = dict.fromkeys((*self.field.options, self.field.show(self.start)))
        return [(Text(visible(word)), word) for word in words]

    def _placeholder(self) -> str:
        """Return the text for an empty field."""
        return "required" if self.field.setting.required else self.field.show(self.field.setting.default) or "none"


# The maximum number of columns in a form; in a wide window, they are next to each other.
_COLUMNS = 3


class SettingForm(Vertical):
    """Rows of settings; without the class `-all`, advanced settings and section names are hidden.

    With the classes `-all` and `-wide`, the sections are next to each other in columns.

    Posts `Edited` after every change; `values` returns the entered values, including values in hidden rows. Values that
    differ from `original`, if given, are highlighted; with `marks_usual`, so are values that differ from the default.
    """

    BINDINGS = [
        Binding(
            "up", "app.focus_previous", "Previous field", show=False, id="form.up", tooltip="To the previous field"
        ),
        Binding("down", "app.focus_next", "Next field", show=False, id="form.down", tooltip="To the next field"),
    ]
    DEFAULT_CSS = """
    SettingForm { height: auto; }
    SettingForm > Vertical { height: auto; }
    SettingForm .section { display: none; text-style: bold; }
    SettingForm.-all .section { display: block; }
    SettingForm.-all.-wide { layout: horizontal; }
    SettingForm.-all.-wide > Vertical { width: 1fr; padding-right: 2; }
    SettingForm > .row--label, SettingForm > .row--hint { color: $text-muted; }
    SettingForm > .row--unusual { color: $foreground; text-style: bold; }
    SettingForm > .row--changed { color: $text-accent; text-style: bold; }
    SettingForm > .row--wrong { color: $text-error; }
    SettingForm > .row--warned { color: $text-warning; }
    /* As Textual draws an editor. */
    SettingForm > .row--typed, SettingForm > .row--chosen { background: $surface; color: $foreground; }
    SettingForm > .row--arrow { background: $surface; color: $foreground 50%; }
    SettingForm > .row--placeholder { background: $surface; color: $text-disabled; }
    SettingForm > .row--overridden { background: $surface; color: $text-disabled; text-style: dim; }
    SettingForm:ansi > .row--chosen, SettingForm:ansi > .row--arrow { background: ansi_default; color: ansi_default; }
    SettingForm:ansi > .row--typed, SettingForm:ansi > .row--overridden {
        background: ansi_default; color: ansi_default; text-style: underline;
    }
    SettingForm:ansi > .row--placeholder { background: ansi_default; color: ansi_default; text-style: underline dim; }
    """
    # The styles of all rows are defined here, because styles in each row would take as long as its editor.
    COMPONENT_CLASSES = {
        "row--label", "row--unusual", "row--changed", "row--hint", "row--wrong", "row--warned",
        "row--typed", "row--chosen", "row--arrow", "row--placeholder", "row--overridden",
    }  # fmt: skip

    class Edited(Message):
        """A value was changed."""

    def __init__(
        self,
        fields: Sequence[Field],
        values: dict[str, Any],
        *,
        id: str | None = None,  # noqa: A002
        classes: str | None = None,
        original: dict[str, Any] | None = None,
        marks_usual: bool = False,
    ) -> None:
        super().__init__(id=id, classes=classes)
        self._original = original
        self._marks_usual = marks_usual
        self._fields = tuple(fields)
        self._values = values
        self._last: SettingRow | None = None
        self._help: FieldHelp | None = None

    def compose(self) -> ComposeResult:
        sections = [
            (name, list(fields)) for name, fields in groupby(self._fields, key=lambda one: one.section or _section(one))
        ]
        for column in _in_columns(sections):
            with Vertical():
                for name, fields in column:
                    if name:
                        yield Label(name, classes="section")
                    yield from map(self._row, fields)

    def _row(self, field: Field) -> SettingRow:
        row = SettingRow(field, self._values.get(field.path, field.setting.default))
        row.marks_usual = self._marks_usual
        if self._original is not None:
            row.original = field.show(self._original.get(field.path, field.setting.default))
        return row

    def look(self, name: str) -> Style:
        """Return the style of a part of a row."""
        return self.get_visual_style(f"row--{name}")

    def toggle_all(self) -> None:
        """Show all settings, or only the usual ones."""
        self.toggle_class("-all")

    def widen(self, *, is_wide: bool) -> None:
        """Show all settings in columns if the window is wide, or only the usual ones in a single column."""
        if is_wide != self.has_class("-wide"):
            self.set_class(is_wide, "-wide", "-all")

    @property
    def rows(self) -> list[SettingRow]:
        return [row for column in self.children for row in column.children if isinstance(row, SettingRow)]

    def values(self) -> tuple[dict[str, Any], dict[str, str]]:
        """Return two dicts by path: the valid values, and the problems with the other fields."""
        values: dict[str, Any] = {}
        problems: dict[str, str] = {}
        for row in self.rows:
            try:
                value = row.field.parse(row.text)
            except ValueError as error:
                problems[row.field.path] = str(error)
                continue
            if value is not None:
                values[row.field.path] = value
        return values, problems

    @property
    def texts(self) -> dict[str, str]:
        """A dict mapping each field's path to its text."""
        return {row.field.path: row.text for row in self.rows}

    @property
    def is_sweep(self) -> bool:
        """Whether a field seems to contain several values, based on commas and brackets."""
        return any(row.field.several and ("," in row.text or "[" in row.text) for row in self.rows)

    def changed_from(self, values: dict[str, Any]) -> list[str]:
        """Return the paths of settings that are invalid or differ from `values`."""
        now, problems = self.values()
        usual = {field.path: field.setting.default for field in self._fields}
        return [path for path in usual if path in problems or (usual | now)[path] != (usual | values)[path]]

    def focus_field(self, path: str) -> None:
        """Put the cursor in the field with this path, if it exists, and scroll it into view."""
        for row in self.rows:
            if row.field.path == path:
                row.add_class("-found")
                row.focus_editor()

    def find(self) -> None:
        """Ask for part of a setting's name; focus the chosen setting and show it if it was hidden."""

        def go(path: str | None) -> None:
            if path is not None:
                self.focus_field(path)

        self.app.push_screen(Find("Find a setting", [(row.field.path, row.help) for row in self.rows]), go)

    def focus_again(self) -> None:
        """Focus the field that last had the focus, or the first field."""
        row = self._last if self._last in self.rows else self.rows[0]
        row.focus_editor()

    @on(DescendantFocus)
    def _remember(self, event: DescendantFocus) -> None:
        self._last = next((row for row in event.widget.ancestors_with_self if isinstance(row, SettingRow)), None)
        self._explain(self._last)

    @on(DescendantBlur)
    def _forget(self) -> None:
        focused = self.screen.focused
        if focused is None or self not in focused.ancestors:
            self._explain(None)

    def _explain(self, row: SettingRow | None) -> None:
        """Show a row's help below the form; a command line already has its own line for it."""
        # Search the screen only once, because that takes longer than drawing the help.
        self._help = self._help or self.screen.query_one(FieldHelp)
        self._help.explain(None if row and row.field.setting.is_command_line else row)

    def set_values(self, values: dict[str, Any]) -> None:
        for row in self.rows:
            row.set_value(values.get(row.field.path, row.field.setting.default))

    def start_from(self, original: dict[str, Any]) -> None:
        """Fill in these values and compare later changes with them."""
        self.set_values(original)
        for row in self.rows:
            row.original = row.field.show(original.get(row.field.path, row.field.setting.default))

    def say(self, problems: Mapping[str, str], overridden: Mapping[str, str], warnings: Mapping[str, str]) -> None:
        """Show each field's problem, warning, or the effect of another setting on it."""
        for row in self.rows:
            path = row.field.path
            row.say(problems.get(path, ""), overridden.get(path, ""), warnings.get(path, ""))
            if row.has_focus_within:
                self._explain(row)

    @on(Input.Changed)
    @on(Select.Changed)
    def _edited(self, event: Input.Changed | Select.Changed) -> None:
        event.stop()
        row = event.control.parent
        # Ignore the first value that a new editor posts, because checking a form once for each row takes longer than
        # drawing it.
        if isinstance(row, SettingRow) and row.has_new_text():
            self.post_message(self.Edited())


def fitted(text: str, width: int) -> str:
    """Return the text cut or padded to a width in cells."""
    return set_cell_size(text, max(0, width))


def _section(field: Field) -> str:
    return field.path.rpartition(".")[0]


def _in_columns(sections: Sequence[_Section]) -> list[Sequence[_Section]]:
    """Divide the sections, in their order, into columns so that the longest column is as short as possible.

    Settings without a section, like the job's name, are above the first section.
    """
    first = 1 if sections[0][0] else min(2, len(sections))
    count = min(_COLUMNS, len(sections) - first + 1)
    cuts = [(0, *inner, len(sections)) for inner in combinations(range(first, len(sections)), count - 1)]
    divided = [[sections[start:end] for start, end in pairwise(ends)] for ends in cuts]
    return min(divided, key=lambda columns: max(sum(1 + len(fields) for _, fields in column) for column in columns))


def show_value(value: Any) -> str:
    """Return a TOML value as a person would type it."""
    if value is None:
        return ""
    return json.dumps(value, ensure_ascii=False) if isinstance(value, bool | list) else str(value)
