"""Tests that labelled texts are read from an installed package's files without importing the package."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from support.probe_texts import two_classes, write_set

from trainer.contract.errors import UserError
from trainer.evaluation import probe_sets
from trainer.evaluation.probe_sets import DEFAULTS, PACKAGE, PER_CLASS, read_sets

# `make model` downloads test-only files to this folder.
FETCHED = Path(sys.prefix) / "model"


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder whose packages take precedence over installed ones."""
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def test_the_default_sets_come_first_followed_by_the_others_in_numerical_order(packages: Path) -> None:
    for name in ("30_later", "4_early", DEFAULTS[1], DEFAULTS[0]):
        write_set(packages, name, two_classes(70))
    assert [one.name for one in read_sets(4)] == [*DEFAULTS[:2], "4_early", "30_later"]


def test_an_equal_number_of_texts_is_taken_from_the_start_of_each_class(packages: Path) -> None:
    rows = two_classes(PER_CLASS + 10) + [("the cat sat on", "0")] * 40 + [("", "1"), ("no label", "")]
    write_set(packages, "1_texts", rows)
    (one,) = read_sets(1)
    assert one.labels == [0] * PER_CLASS + [1] * PER_CLASS
    assert one.texts[:2] == ["the cat sat 0", "the cat sat 1"]
    assert one.texts[-1] == f"a dog ran {PER_CLASS - 1}"


def test_sets_with_more_than_two_classes_or_few_texts_are_skipped(packages: Path) -> None:
    write_set(packages, "1_three", [*two_classes(70), *[("again", "2")] * 70])
    write_set(packages, "2_few", two_classes(20))
    write_set(packages, "3_texts", two_classes(70))
    assert [one.name for one in read_sets(1)] == ["3_texts"]
    with pytest.raises(UserError, match=r"^--sets: must be at most 1 set with 64 texts in each of two classes, not 2$"):
        read_sets(2)


@pytest.mark.parametrize("content", [b"", b"not packed", b"\x28\xb5\x2f\xfd" + b"\x00" * 20])
def test_a_damaged_data_set_produces_a_one_sentence_error(packages: Path, content: bytes) -> None:
    file = write_set(packages, "1_texts", two_classes(70))
    file.write_bytes(content)
    with pytest.raises(UserError) as refused:
        read_sets(1)
    assert str(refused.value).startswith(("--probe: ", "--sets: "))
    assert "\n" not in str(refused.value)


def test_a_table_with_unexpected_columns_produces_a_one_sentence_error(packages: Path) -> None:
    import zstandard

    write_set(packages, "1_texts", []).write_bytes(zstandard.compress(b"words,class\na,0\n"))
    with pytest.raises(UserError, match=r"1_texts.csv.zst cannot be read \(.*prompt.*\); install it again"):
        read_sets(1)


@pytest.mark.skipif(
    not (FETCHED / PACKAGE).exists(), reason="the labelled texts are missing; `make model` downloads them (44 MB)"
)
def test_the_default_sets_exist_in_the_real_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(FETCHED)
    sets = read_sets(len(DEFAULTS) + 1)
    assert [one.name for one in sets[:-1]] == [*DEFAULTS]
    assert all(sum(one.labels) * 2 == len(one.labels) == len(one.texts) <= 2 * PER_CLASS for one in sets)


def test_the_error_for_a_missing_package_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(probe_sets._NEEDED, "no_such_package", "no-such-package")
    with pytest.raises(UserError, match=r"^--probe: needs .*no-such-package: `pip install 'sae-tui\[eval\]'`$"):
        read_sets(1)
