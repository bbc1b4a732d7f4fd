"""The schemas of answers: kept as their types are, strict, and with words for each field."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from jsonschema import Draft202012Validator
from support.schemas import schema_texts

from sae_tui.cli_commands.parser import make_parser
from sae_tui.cli_commands.schema import schema_files
from trainer.parser import make_parser as make_trainer_parser

# They print what another program reads, which is not JSON.
WITHOUT = {"export-metrics", "trainer join", "trainer rank"}


def parts(schema: Any) -> Iterator[dict[str, Any]]:
    if isinstance(schema, dict):
        yield schema
    for inner in schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list) else ():
        yield from parts(inner)


def test_the_files_are_as_the_types_make_them_or_make_schemas_renews_them() -> None:
    texts = schema_texts()
    there = {file for folder in {file.parent for file in texts} for file in folder.glob("*.json")}
    assert there == texts.keys()
    assert [file.name for file, text in texts.items() if file.read_text(encoding="utf-8") != text] == []


def test_every_command_that_answers_in_json_has_a_schema() -> None:
    commands = set()
    for prefix, parser in (("", make_parser(lambda *_: 0)), ("trainer ", make_trainer_parser())):
        (choices,) = (action.choices for action in parser._actions if isinstance(action.choices, dict))
        commands |= {prefix + name for name in choices}
    assert commands - WITHOUT | {"error"} == schema_files().keys()


def test_every_object_is_strict_and_says_what_each_field_is() -> None:
    for name, file in schema_files().items():
        schema = json.loads(file.read_text())
        Draft202012Validator.check_schema(schema)
        assert schema["title"]
        if name == "stream":  # a protocol, which later versions may add to
            continue
        for part in parts(schema):
            if isinstance(properties := part.get("properties"), dict):
                assert part["additionalProperties"] is False, (name, part["title"])
                assert [key for key, one in properties.items() if not one["description"].endswith(".")] == [], name
                # What may be null says when.
                nullable = {
                    key: one["description"]
                    for key, one in properties.items()
                    if {"type": "null"} in one.get("anyOf", [])
                }
                assert [key for key, words in nullable.items() if "null" not in words] == [], name
