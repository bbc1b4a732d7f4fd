"""Validates the commands' JSON output against its schemas."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from typing import Any

from jsonschema import Draft202012Validator
from jsonschema.exceptions import best_match

from sae_tui.cli_commands.schema import ERROR, schemas


@functools.cache
def validator(command: str) -> Draft202012Validator:
    """Return a validator for a command's JSON output, such as `gpus` or `trainer run`."""
    schema = schemas()[command]
    Draft202012Validator.check_schema(schema)
    return Draft202012Validator(schema)


def check_answer(command: str, answer: Any) -> None:
    """Check that JSON output matches its schema."""
    fault = best_match(validator(command).iter_errors(answer))
    assert fault is None, f"{command}: {fault.json_path}: {fault.message}"


def check_trainers_answer(answer: Any) -> None:
    """Check that JSON output matches the schema for one of the trainer's commands."""
    commands = [name for name in schemas() if name.startswith("trainer ")]
    faults = {name: best_match(validator(name).iter_errors(answer)) for name in commands}
    likeliest = {name: fault.message for name, fault in faults.items() if fault and "required" not in fault.message}
    assert None in faults.values(), likeliest or answer


def is_refusal(answer: Any) -> bool:
    """Return whether JSON output reports a failed command."""
    return isinstance(answer, dict) and isinstance(answer.get("error"), dict)


def check_output(arguments: Sequence[object], stdout: str) -> None:
    """Check the standard output of `sae-tui` against its schema if JSON was requested."""
    words = [str(one) for one in arguments]
    if "--json" not in words or not stdout.strip():
        return
    answer = json.loads(stdout)
    named = [word for word in words if word in schemas()]
    check_answer(ERROR if is_refusal(answer) else named[0], answer)
