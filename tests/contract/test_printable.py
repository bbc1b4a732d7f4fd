"""Tests that untrusted text is made safe to print in a terminal."""

from __future__ import annotations

import json
import tomllib

import tomli_w
from hypothesis import example, given
from hypothesis import strategies as st

from trainer.contract.printable import MARK, on_one_line, printable, printable_json, printable_lines, printable_toml

TEXTS = st.text(st.characters(exclude_categories=["Cs"]))


@given(TEXTS)
@example("\x1b]52;c;x\x07\x9b31m\u202e\u2028\r\n")
def test_printable_text_keeps_its_length_and_changes_only_unsafe_characters(text: str) -> None:
    shown = printable(text)
    assert shown.replace("\t", "").isprintable()
    assert len(shown) == len(text)
    assert all(after in (before, MARK) for before, after in zip(text, shown, strict=True))
    assert printable(shown) == shown


def test_line_endings_become_spaces_in_one_line_text() -> None:
    assert on_one_line("python -c '\nimport x\r\nx.run()'\x1b") == f"python -c ' import x x.run()'{MARK}"


def test_line_feeds_and_tabs_are_kept() -> None:
    assert printable_lines("a\tb\nc\r\nd\x85") == f"a\tb\nc{MARK}\nd{MARK}"


@given(TEXTS)
@example("\U000e0001\x9b\u202e")
def test_escaped_json_and_toml_are_printable_and_keep_their_value(text: str) -> None:
    as_json = printable_json(json.dumps({"a": text}, ensure_ascii=False, indent=2))
    as_toml = printable_toml(tomli_w.dumps({"a": text}))
    assert json.loads(as_json) == tomllib.loads(as_toml) == {"a": text}
    assert (as_json + as_toml).replace("\n", "").isprintable()
