"""Builds JSON Schemas (draft 2020-12) from types; each field's description gives its unit and the meaning of null."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, get_type_hints

import msgspec

Schema = dict[str, Any]
# A type that msgspec can convert to a schema, or a schema itself.
Kind = Any
DRAFT = "https://json-schema.org/draft/2020-12/schema"


def whole(title: str, schema: Schema) -> Schema:
    """Add the JSON Schema draft and a title to the schema for a command's output."""
    return {"$schema": DRAFT, "title": title} | {key: value for key, value in schema.items() if key != "title"}


def fields(title: str, described: Mapping[str, tuple[Kind, str]], *, may_lack: Iterable[str] = ()) -> Schema:
    """Return the schema for an object with exactly the given fields; the fields in `may_lack` are optional."""
    lacking = set(may_lack)
    return {
        "title": title,
        "type": "object",
        "properties": {name: of(kind) | {"description": words} for name, (kind, words) in described.items()},
        "required": [name for name in described if name not in lacking],
        "additionalProperties": False,
    }


def typed(
    title: str,
    kind: type,
    words: Mapping[str, str],
    inner: Mapping[str, Kind] | None = None,
    *,
    without: Iterable[str] = (),
    no_number_is_null: bool = False,
) -> Schema:
    """Return the schema for a Struct, dataclass or NamedTuple with all fields required.

    `words` maps each field to its description, and `inner` maps each field that is an object to its schema. With
    `no_number_is_null`, a float field may also be null, because NaN is written as null.
    """
    hints = {name: hint for name, hint in get_type_hints(kind, include_extras=True).items() if name not in without}
    assert hints.keys() == words.keys(), (kind, hints.keys() ^ words.keys())
    kinds = {name: (inner or {}).get(name, hint) for name, hint in hints.items()}
    if no_number_is_null:
        kinds = {name: float | None if one is float else one for name, one in kinds.items()}
    return fields(title, {name: (kinds[name], words[name]) for name in hints})


def of(kind: Kind) -> Schema:
    """Return the schema for a type; return a schema unchanged."""
    return kind if isinstance(kind, dict) else msgspec.json.schema(kind)


def list_of(kind: Kind) -> Schema:
    return {"type": "array", "items": of(kind)}


def by_name(kind: Kind) -> Schema:
    """Return the schema for an object whose keys are not known in advance."""
    return {"type": "object", "additionalProperties": of(kind)}


def or_null(kind: Kind) -> Schema:
    return {"anyOf": [of(kind), {"type": "null"}]}


def one_of(*kinds: Kind) -> Schema:
    """Return the schema for a value that matches one of several schemas; their titles say when each applies."""
    return {"anyOf": [of(kind) for kind in kinds]}


def word(*words: str) -> Schema:
    return {"type": "string", "enum": list(words)}


def as_text(schema: Schema) -> str:
    """Return a schema as indented JSON."""
    return msgspec.json.format(msgspec.json.encode(schema), indent=2).decode()
