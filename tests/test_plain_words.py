"""Tests for the word check in `make check`, with files that it must accept or reject."""

from pathlib import Path

from support.plain_words import excess, per_10_000


def written(folder: Path, name: str, text: str) -> Path:
    file = folder / name
    file.write_text(text)
    return file


def test_markers_are_found_in_comments_docstrings_and_messages_but_not_in_code(tmp_path: Path) -> None:
    lines = ('"""Tell nobody about it."""', "# Whoever asks.", 'raise_error("it is told anew")', "")
    prose = written(tmp_path, "prose.py", "\n".join(lines))
    assert per_10_000([prose]) == 1e4 * 5 / 10
    code = written(tmp_path, "code.py", '"""Return the value."""\nnobody = told = whoever = 1\n')
    assert per_10_000([code]) == 0.0


def test_report_cards_and_quoted_code_are_allowed_in_documents(tmp_path: Path) -> None:
    assert per_10_000([written(tmp_path, "page.md", "The report card shows `cards`.\n```\ncards\n```\n")]) == 0.0


def test_a_path_with_too_many_markers_is_named(tmp_path: Path) -> None:
    bad, good = written(tmp_path, "bad.md", "Nobody is told."), written(tmp_path, "good.md", "No process reads it.")
    assert str(bad) in (excess([bad, good], limit=6) or "")
    assert str(good) not in (excess([bad, good], limit=6) or "")
    assert excess([good], limit=6) is None
