"""Declares settings: a single declaration defines a setting's name, default, help, unit and bounds.

TOML files, flags, forms and checks use these declarations. A section is a frozen struct with fields annotated with
`about`; `settings_of` returns its settings as `Setting`s.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
from collections.abc import Iterable
from typing import Annotated, Any, Literal, get_args, get_origin

import msgspec
from msgspec import Meta

from trainer.contract.json_file import convert_as
from trainer.contract.settings.typed import cut, parse_number, parse_value, split_command_line

Value = Any  # a TOML value: str, int, float, bool, list or None


def about(
    text: str,
    *,
    unit: str = "",
    advanced: bool = False,
    wanted: str = "",
    commas: bool = False,
    is_command_line: bool = False,
    group: str = "",
    **bounds: Any,
) -> Meta:
    """Return the description of a field for `Annotated`: its help, unit and bounds.

    `wanted` replaces the bounds in messages. With `commas`, a list of strings can be typed as `one, two`, and with
    `is_command_line`, as in a shell. Forms without sections show the field under the heading `group`.
    """
    extra = {"unit": unit, "advanced": advanced, "wanted": wanted, "commas": commas, "group": group}
    extra |= {"is_command_line": is_command_line}
    return Meta(description=text, extra=extra, **bounds)


class Setting(msgspec.Struct, frozen=True):
    """A setting of a job; parses and validates its values."""

    name: str
    annotation: Any
    default: Value
    help: str
    unit: str = ""
    advanced: bool = False
    required: bool = False
    commas: bool = False
    is_command_line: bool = False
    group: str = ""

    @property
    def choices(self) -> tuple[str, ...]:
        """The allowed keywords; empty if the setting accepts other values."""
        options = _members(self.annotation)
        literals = [arg for option in options if get_origin(option) is Literal for arg in get_args(option)]
        closed = all(get_origin(option) is Literal or option is type(None) for option in options)
        return tuple(literals) if closed else ()

    @property
    def is_bool(self) -> bool:
        return bool in map(_plain, _members(self.annotation))

    @property
    def is_list(self) -> bool:
        return list in map(_plain, _members(self.annotation))

    @property
    def is_text(self) -> bool:
        """Whether the setting accepts any string or list of strings, even strings that look like numbers."""
        options = _members(self.annotation)
        has_text = any(_plain(option) is str for option in options)
        return not self.choices and has_text and all(_plain(_entry(option)) is str for option in options)

    @property
    def is_number(self) -> bool:
        return not {int, float}.isdisjoint(map(_plain, _members(self.annotation)))

    def convert(self, value: Value) -> Value:
        """Convert a value to the setting's type; raise `ValueError` listing the valid values if it is invalid."""
        if _is_storable(value):
            with contextlib.suppress(msgspec.ValidationError):
                return convert_as(value, self.annotation)
        raise ValueError(self._objection(value))

    def _objection(self, value: Value) -> str:
        if value is None:
            return "is empty" if self.required else f"is empty; the default is {show(self.default)}"
        if not _is_storable(value) and value == math.inf:
            return f"must be finite, not {show(value)}"
        if not _is_storable(value) and value > 0 and self.is_number and self._has_no_upper_bound:
            whole = float not in map(_plain, _members(self.annotation))
            return f"must be at most {f'{_LARGEST:,}' if whole else f'{float(_LARGEST):.2g}'}, not {show(value)}"
        return f"must be {self.wanted}, not {show(value)}"

    @property
    def _has_no_upper_bound(self) -> bool:
        return "of at most" not in self.wanted and " below " not in self.wanted

    def read(self, text: str, *, several: bool = False) -> Value:
        """Parse a form field or `--set` value, as TOML or in common number formats, without validating the value.

        For a string setting, `5` stays a string. With `several`, a list or comma-separated values form a sweep. A
        command line is split as a shell would split it. Raise `ValueError` if a quote is left open, or if it is
        unclear whether commas separate thousands or values.
        """
        if self.is_command_line:
            return split_command_line(text)
        if self.is_number:
            whole = float not in map(_plain, _members(self.annotation))
            return parse_number(text, several=several, whole=whole)
        value = parse_value(text)
        if self.commas and isinstance(value, str):
            return [word.strip() for word in value.split(",")]
        # The hooks in a sweep can also be written in other ways, so they are split where they are checked.
        if several and self.name != "hook" and isinstance(value, str) and "," in value:
            return [parse_value(word) for word in value.split(",")]
        is_final = isinstance(value, str | None) or ((several or self.is_list) and isinstance(value, list))
        return text.strip() if self.is_text and not is_final else value

    def parse(self, text: str) -> Value:
        """Parse and validate a form field's text; raise `ValueError` listing the valid values if it is invalid."""
        return self.convert(self.read(text))

    @property
    def wanted(self) -> str:
        """A description of the accepted values, such as `an integer of at least 1 (tokens)`."""
        meta = _meta(self.annotation)
        if meta and meta.extra and meta.extra["wanted"]:
            return str(meta.extra["wanted"])
        words = " or ".join(_phrase(option) for option in _members(self.annotation) if option is not type(None))
        return f"{words} ({self.unit})" if self.unit else words


def show(value: Value) -> str:
    """Format a value as in a job file, on one line, truncated to 60 characters."""
    text = "nothing" if value is None else json.dumps(value, ensure_ascii=False, default=str)
    return cut(text)


@functools.cache
def settings_of(struct: type[msgspec.Struct]) -> tuple[Setting, ...]:
    """Return the settings declared by a section, in field order; fields without help are not settings."""
    return tuple(_setting(field) for field in msgspec.structs.fields(struct) if _meta(field.type) is not None)


def _setting(field: msgspec.structs.FieldInfo) -> Setting:
    meta = _meta(field.type)
    assert meta is not None
    extra = meta.extra or {}
    return Setting(
        name=field.name,
        annotation=field.type,
        default=None if field.required else _default(field),
        help=meta.description or "",
        unit=extra.get("unit", ""),
        advanced=extra.get("advanced", False),
        required=field.required,
        commas=extra.get("commas", False),
        is_command_line=extra.get("is_command_line", False),
        group=extra.get("group", ""),
    )


def _default(field: msgspec.structs.FieldInfo) -> Value:
    """Return a field's default; list defaults come from a factory, so that they are not shared."""
    return field.default_factory() if callable(field.default_factory) else field.default


def _meta(annotation: Any) -> Meta | None:
    """Return the `Meta` that has a description in a field's annotation, or in the annotation of a union member."""
    if get_origin(annotation) is Annotated:
        described = [part for part in annotation.__metadata__ if isinstance(part, Meta) and part.description]
        return described[0] if described else _meta(annotation.__origin__)
    return next((meta for option in get_args(annotation) if (meta := _meta(option))), None)


def _members(annotation: Any) -> list[Any]:
    """Return the members of a union, annotated or not; for any other type, return only the type itself."""
    if get_origin(annotation) is Annotated:
        inner = _members(annotation.__origin__)
        return [annotation] if len(inner) == 1 and not get_args(annotation.__origin__) else inner
    if get_origin(annotation) in (Literal, list, tuple) or not get_args(annotation):
        return [annotation]
    return [member for option in get_args(annotation) for member in _members(option)]


_WORDS = {int: "an integer", float: "a number", bool: "true or false", str: "a string", list: "a list of integers"}


def _phrase(option: Any) -> str:
    if get_origin(option) is Literal:
        return either(f'"{choice}"' for choice in get_args(option))
    bounds = _bounds(option.__metadata__) if get_origin(option) is Annotated else ""
    return _WORDS.get(_plain(option), str(option)) + bounds


def _plain(option: Any) -> Any:
    """Return the bare type of a union member: `str` for `Annotated[str, ...]`, and `list` for `list[int]`."""
    option = option.__origin__ if get_origin(option) is Annotated else option
    return get_origin(option) or option


def _entry(option: Any) -> Any:
    """Return the element type if a union member is a list; otherwise, return the member itself."""
    bare = option.__origin__ if get_origin(option) is Annotated else option
    return get_args(bare)[0] if get_origin(bare) is list else option


def _bounds(metadata: Iterable[Any]) -> str:
    limits = {
        "ge": "of at least {}",
        "gt": "above {}",
        "le": "of at most {}",
        "lt": "below {}",
        "min_length": "of at least {} character(s)",
        "max_length": "of at most {} characters",
    }
    phrases = [
        phrase.format(limit)
        for meta in metadata
        if isinstance(meta, Meta)
        for name, phrase in limits.items()
        if (limit := getattr(meta, name)) is not None
    ]
    return " " + " and ".join(phrases) if phrases else ""


def either(options: Iterable[str]) -> str:
    """Return a list of options like `a, b or c`."""
    *first, last = options
    return f"{', '.join(first)} or {last}" if first else last


_LARGEST = 2**63 - 1


def _is_storable(value: Value) -> bool:
    """Return whether torch and SQLite can represent a value.

    TOML also allows nan, infinities and integers beyond 64 bits.
    """
    return not isinstance(value, int | float) or abs(value) <= _LARGEST
