"""A form generated from knobs: one line each, checked as it is typed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from textual import on
from textual.app import ComposeResult
from textual.containers import Horizontal, Vertical
from textual.message import Message
from textual.widgets import Input, Label, Select, Static

from trainer.contract.knobs import Knob


@dataclass(frozen=True, slots=True)
class Field:
    """A knob at its place in the job file: `train.lr`."""

    path: str
    knob: Knob
    choices: tuple[str, ...] = ()


class KnobRow(Horizontal):
    """Label, input and, at the right, the help or what is wrong."""

    DEFAULT_CSS = """
    KnobRow { height: 1; }
    KnobRow.-advanced { display: none; }
    KnobForm.-all KnobRow.-advanced, KnobRow.-advanced.-wrong { display: block; }
    KnobRow > Label { width: 19; color: $text-muted; }
    KnobRow > Input { width: 24; }
    KnobRow > Select { width: 24; }
    KnobRow > .hint { width: 1fr; margin-left: 2; color: $text-muted; text-wrap: nowrap; text-overflow: ellipsis; }
    KnobRow.-wrong > .hint { color: $text-error; }
    KnobRow.-changed > Label { color: $text-accent; text-style: bold; }
    """

    def __init__(self, field: Field, value: Any) -> None:
        rare = "-advanced" if field.knob.advanced else None
        super().__init__(id=f"row-{field.path.replace('.', '-')}", classes=rare)
        self.field = field
        self.start = value

    def compose(self) -> ComposeResult:
        yield Label(self.field.knob.name)
        if self.field.choices:
            options = [(choice, choice) for choice in self.field.choices]
            yield Select(options, value=self.start, allow_blank=False, compact=True)
        else:
            yield Input(show_value(self.start), compact=True, placeholder=self._placeholder(), select_on_focus=False)
        yield Static(self.help, classes="hint", markup=False)

    @property
    def help(self) -> str:
        knob = self.field.knob
        return f"{knob.help} [{knob.unit}]" if knob.unit else knob.help

    @property
    def text(self) -> str:
        editor = self.query_one(Select if self.field.choices else Input)
        return str(editor.value)

    def set_value(self, value: Any) -> None:
        """Puts a value in without making it count as typed."""
        self.start = value
        if self.field.choices:
            self.query_one(Select).value = value
        else:
            self.query_one(Input).value = show_value(value)

    def say(self, problem: str) -> None:
        """Shows what is wrong, or the help where nothing is."""
        self.set_class(bool(problem), "-wrong")
        self.query_one(".hint", Static).update(f"✗ {problem}" if problem else self.help, layout=False)

    def _placeholder(self) -> str:
        return "required" if self.field.knob.required else "default"


class KnobForm(Vertical):
    """Rows of knobs, the advanced ones hidden without the class `-all`.

    Posts `Edited` after every change; `values` gives what has been entered, hidden rows included.
    """

    DEFAULT_CSS = "KnobForm { height: auto; }"

    class Edited(Message):
        """Something was changed."""

    def __init__(
        self,
        fields: Sequence[Field],
        values: dict[str, Any],
        *,
        id: str | None = None,  # noqa: A002
        classes: str | None = None,
    ) -> None:
        super().__init__(id=id, classes=classes)
        self._fields = tuple(fields)
        self._values = values

    def compose(self) -> ComposeResult:
        for field in self._fields:
            yield KnobRow(field, self._values.get(field.path, field.knob.default))

    @property
    def rows(self) -> list[KnobRow]:
        return list(self.query(KnobRow))

    def values(self) -> tuple[dict[str, Any], dict[str, str]]:
        """What has been entered, by path: (values, what is wrong with the others)."""
        values: dict[str, Any] = {}
        problems: dict[str, str] = {}
        for row in self.rows:
            try:
                value = row.field.knob.parse(row.text) if not row.field.choices else row.text
            except ValueError as error:
                problems[row.field.path] = str(error)
                continue
            if value is not None:
                values[row.field.path] = value
        return values, problems

    def set_values(self, values: dict[str, Any]) -> None:
        for row in self.rows:
            row.set_value(values.get(row.field.path, row.field.knob.default))

    def say(self, problems: dict[str, str]) -> None:
        for row in self.rows:
            row.say(problems.get(row.field.path, ""))

    @on(Input.Changed)
    @on(Select.Changed)
    def _edited(self, event: Message) -> None:
        event.stop()
        self.post_message(self.Edited())


def show_value(value: Any) -> str:
    """A TOML value as a person would type it."""
    if value is None:
        return ""
    return str(value).lower() if isinstance(value, bool) else str(value)
