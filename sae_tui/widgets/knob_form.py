"""A form generated from knobs: one line each, checked as it is typed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from textual import on
from textual.app import ComposeResult
from textual.containers import Horizontal, Vertical
from textual.message import Message
from textual.widgets import Input, Label, Select, Static

from trainer.contract.knobs import Knob, parse_value


@dataclass(frozen=True, slots=True)
class Field:
    """A knob at its place in the job file: `train.lr`; `several` where a list of values makes a sweep."""

    path: str
    knob: Knob
    choices: tuple[str, ...] = ()
    several: bool = False

    @property
    def options(self) -> tuple[str, ...]:
        """The words to choose from; none where the value is typed."""
        return self.choices or (("true", "false") if self.knob.is_bool else ())

    def parse(self, text: str) -> Any:
        """The value that was entered; raises `ValueError` with what would be right."""
        value = parse_value(text)
        return value if self.several and isinstance(value, list) else self.knob.parse(text)


class KnobRow(Horizontal):
    """Label, input and, at the right, the help or what is wrong."""

    DEFAULT_CSS = """
    KnobRow { height: 1; }
    KnobRow.-advanced { display: none; }
    KnobForm.-all KnobRow.-advanced, KnobRow.-advanced.-wrong, KnobRow.-advanced.-changed { display: block; }
    KnobRow > Label { width: 25; color: $text-muted; }
    KnobRow > Input { width: 22; }
    KnobRow > Select { width: 22; }
    KnobRow > .hint { width: 1fr; margin-left: 2; color: $text-muted; text-wrap: nowrap; text-overflow: ellipsis; }
    KnobRow:focus-within { height: auto; }
    KnobRow:focus-within > .hint { height: auto; text-wrap: wrap; }
    KnobRow.-wrong > .hint { color: $text-error; }
    KnobRow.-changed > Label { color: $text-accent; text-style: bold; }
    """

    def __init__(self, field: Field, value: Any) -> None:
        rare = "-advanced" if field.knob.advanced else None
        super().__init__(id=f"row-{field.path.replace('.', '-')}", classes=rare)
        self.field = field
        self.start = value
        self.original: str | None = None

    def compose(self) -> ComposeResult:
        yield Label(self.field.knob.name)
        if self.field.options:
            yield Select(self._options(), value=show_value(self.start), allow_blank=False, compact=True)
        else:
            yield Input(show_value(self.start), compact=True, placeholder=self._placeholder(), select_on_focus=False)
        yield Static(self.help, classes="hint", markup=False)

    @property
    def help(self) -> str:
        knob = self.field.knob
        return f"{knob.help} [{knob.unit}]" if knob.unit else knob.help

    @property
    def text(self) -> str:
        editor = self.query_one(Select if self.field.options else Input)
        return str(editor.value)

    def set_value(self, value: Any) -> None:
        """Puts a value in without making it count as typed."""
        self.start = value
        if self.field.options:
            select = self.query_one(Select)
            select.set_options(self._options())
            select.value = show_value(value)
        else:
            self.query_one(Input).value = show_value(value)

    def say(self, problem: str) -> None:
        """Shows what is wrong, or what it was before it was changed, or the help."""
        self.set_class(bool(problem), "-wrong")
        self.set_class(self.is_changed, "-changed")
        said = (
            f"✗ {problem}" if problem else f"was {self.original or 'default'} · {self.help}" if self.is_changed else ""
        )
        self.query_one(".hint", Static).update(said or self.help, layout=False)

    @property
    def is_changed(self) -> bool:
        """Whether it differs from what it is compared with, if it is with anything."""
        return self.original is not None and self.text != self.original

    def _options(self) -> list[tuple[str, str]]:
        """The words, and a list of some of them where a job file has one."""
        return [(word, word) for word in dict.fromkeys((*self.field.options, show_value(self.start)))]

    def _placeholder(self) -> str:
        return "required" if self.field.knob.required else "default"


class KnobForm(Vertical):
    """Rows of knobs, the advanced ones and the names of the sections hidden without the class `-all`.

    Posts `Edited` after every change; `values` gives what has been entered, hidden rows included. What differs from
    `original`, where there is one, is highlighted.
    """

    DEFAULT_CSS = """
    KnobForm { height: auto; }
    KnobForm > .section { display: none; text-style: bold; }
    KnobForm.-all > .section { display: block; }
    """

    class Edited(Message):
        """Something was changed."""

    def __init__(
        self,
        fields: Sequence[Field],
        values: dict[str, Any],
        *,
        id: str | None = None,  # noqa: A002
        classes: str | None = None,
        original: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(id=id, classes=classes)
        self._original = original
        self._fields = tuple(fields)
        self._values = values

    def compose(self) -> ComposeResult:
        told = ""
        for field in self._fields:
            section = field.path.rpartition(".")[0]
            if section != told:
                yield Label(section, classes="section")
            told = section
            row = KnobRow(field, self._values.get(field.path, field.knob.default))
            if self._original is not None:
                row.original = show_value(self._original.get(field.path, field.knob.default))
            yield row

    @property
    def rows(self) -> list[KnobRow]:
        return list(self.query(KnobRow))

    def values(self) -> tuple[dict[str, Any], dict[str, str]]:
        """What has been entered, by path: (values, what is wrong with the others)."""
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

    def focus_field(self, path: str) -> None:
        """Puts the cursor into a field, if there is such a one."""
        for row in self.rows:
            if row.field.path == path:
                row.query_one(Select if row.field.options else Input).focus()

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
    return json.dumps(value, ensure_ascii=False) if isinstance(value, bool | list) else str(value)
