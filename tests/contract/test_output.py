"""Tests that commands print untrusted text without control characters."""

from __future__ import annotations

import contextlib
import io
import json

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sae_tui.cli_commands import output as shell
from trainer import cli
from trainer.contract.errors import BadUsage
from trainer.contract.output import SafeParser, run_command

# The strings include surrogates, which represent the bytes in a file name that is not valid UTF-8.
TEXTS = st.text(st.characters())
EVIL = "\x1b]52;c;x\x07\x9b31m\u202e\u2028\r\udc9b\t\n\u200b"


def printed(act) -> str:
    """Return everything written to standard output and standard error, and fail if it cannot be encoded as UTF-8."""
    written = io.StringIO()
    with contextlib.redirect_stdout(written), contextlib.redirect_stderr(written):
        act()
    written.getvalue().encode()
    return written.getvalue()


@given(TEXTS)
@example(EVIL)
def test_no_output_function_prints_control_characters_from_untrusted_text(text: str) -> None:
    ways = [
        lambda: shell.say(text),
        lambda: shell.warn(text),
        lambda: shell.show_table([text], [[text], [(text, 1)]]),
        lambda: shell.show_fields([(text, text)]),
        lambda: shell.show_json({text: [text, (text,)]}),
        lambda: cli._say(text),
        lambda: cli._warn(text),
    ]
    for way in ways:
        assert printed(way).replace("\n", "").replace("\t", "").isprintable()
    assert json.loads(printed(ways[4]))


@given(TEXTS)
@example(EVIL)
def test_the_message_for_a_usage_error_has_no_control_characters(text: str) -> None:
    with pytest.raises(BadUsage) as refused:
        SafeParser(prog="p").parse_args([f"x{text}"])
    output = refused.value.sentence
    assert "usage: p" in output
    assert output.replace("\n", "").replace("\t", "").isprintable()


@pytest.mark.parametrize(("leaving", "code"), [(SystemExit(2), 2), (SystemExit(), 0)])
def test_every_kind_of_system_exit_produces_an_exit_code(leaving: BaseException, code: int) -> None:
    def command() -> int:
        raise leaving

    assert run_command(command) == code
