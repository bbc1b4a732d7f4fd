"""Tests that every command with JSON output has a strict schema that describes each field."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from jsonschema import Draft202012Validator

from sae_tui.cli_commands.parser import make_parser
from sae_tui.cli_commands.schema import schemas
from trainer.parser import make_parser as make_trainer_parser

# Commands that print another program's or command's format instead of their own JSON, or answer requests.
WITHOUT = {"export-metrics", "receive", "trainer join", "trainer rank"}


def parts(schema: Any) -> Iterator[dict[str, Any]]:
    if isinstance(schema, dict):
        yield schema
    for inner in schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list) else ():
        yield from parts(inner)


def test_every_command_with_json_output_has_a_schema() -> None:
    commands = set()
    for prefix, parser in (("", make_parser(lambda *_: 0)), ("trainer ", make_trainer_parser())):
        (choices,) = (action.choices for action in parser._actions if isinstance(action.choices, dict))
        commands |= {prefix + name for name in choices}
    assert commands - WITHOUT | {"error"} == schemas().keys()


def test_every_object_is_strict_and_describes_each_field() -> None:
    for name, schema in schemas().items():
        Draft202012Validator.check_schema(schema)
        assert schema["title"]
        if name in ("stream", "trainer interact"):  # these schemas allow fields from later versions
            continue
        for part in parts(schema):
            if isinstance(properties := part.get("properties"), dict):
                assert part["additionalProperties"] is False, (name, part["title"])
                assert [key for key, one in properties.items() if not one["description"].endswith(".")] == [], name
                # The description of a nullable field must state when the field is null.
                nullable = {
                    key: one["description"]
                    for key, one in properties.items()
                    if {"type": "null"} in one.get("anyOf", [])
                }
                assert [key for key, words in nullable.items() if "null" not in words] == [], name
