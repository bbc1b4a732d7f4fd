"""Tests for settings, and for the descriptions derived from their declarations."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.contract.errors import UserError
from trainer.contract.settings import catalog
from trainer.contract.settings.catalog import ARCHITECTURES, OPTIMIZERS, PARALLEL, SOURCES, Entry
from trainer.contract.settings.declare import Setting, about, settings_of, show
from trainer.contract.settings.job import JobConfig
from trainer.contract.settings.sections import CHOSEN, section_settings
from trainer.contract.settings.typed import parse_number, parse_value


class Sample(msgspec.Struct, frozen=True):
    share: Annotated[float, about("A share.", ge=0, le=1)] = 0.5
    steps: Annotated[int, about("Steps.", unit="steps", ge=1)] | None = None
    rate: Annotated[float, about("A rate.", gt=0)] | Literal["auto"] = "auto"
    word: Annotated[Literal["a", "b", "c"], about("A word.")] | None = None
    title: Annotated[str, about("A title.", min_length=1, max_length=5)] = "x"
    on: Annotated[bool, about("A switch.", advanced=True)] = False
    hidden: int = 3


SETTINGS = {setting.name: setting for setting in settings_of(Sample)}


def every_setting() -> list[tuple[str, Setting]]:
    """Return the path and declaration of every setting, including the settings of every registered class."""
    settings = [("name", setting) for setting in settings_of(JobConfig)]
    for section in JobConfig.sections:
        names = CHOSEN[section][1] if section in CHOSEN else [None]
        settings += [
            (f"{section}.{setting.name}", setting) for name in names for setting in section_settings(section, name)
        ]
    return list(dict(settings).items())


@pytest.mark.parametrize(
    ("path", "setting"), every_setting(), ids=lambda value: value if isinstance(value, str) else ""
)
def test_every_setting_has_help_text_and_describes_its_values(path: str, setting: Setting) -> None:
    assert setting.help.endswith((".", "].")), path
    assert setting.wanted
    assert setting.required or setting.convert(setting.default) == setting.default


@pytest.mark.parametrize(
    "struct",
    [
        *JobConfig.sections.values(),
        *(entry.settings for entries in (ARCHITECTURES, OPTIMIZERS, SOURCES) for entry in entries.values()),
    ],
)
def test_every_field_of_a_section_is_a_setting(struct: type[msgspec.Struct]) -> None:
    assert {setting.name for setting in settings_of(struct)} == set(struct.__struct_fields__) - {"settings"}


def test_a_field_without_help_is_not_a_setting() -> None:
    assert "hidden" not in SETTINGS
    assert SETTINGS["on"].advanced
    assert SETTINGS["on"].is_bool
    assert SETTINGS["steps"].unit == "steps"


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("share", "a number of at least 0 and of at most 1"),
        ("steps", "an integer of at least 1 (steps)"),
        ("rate", 'a number above 0 or "auto"'),
        ("word", '"a", "b" or "c"'),
        ("title", "a string of at least 1 character(s) and of at most 5 characters"),
        ("on", "true or false"),
    ],
)
def test_the_accepted_values_of_a_setting_are_described_in_words(name: str, wanted: str) -> None:
    assert SETTINGS[name].wanted == wanted


def test_only_a_setting_with_a_closed_list_of_values_has_choices() -> None:
    assert SETTINGS["word"].choices == ("a", "b", "c")
    assert SETTINGS["rate"].choices == ()
    assert SETTINGS["share"].choices == ()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("share", float("nan")),
        ("share", 10**400),
        ("rate", -(10**400)),
        ("steps", True),
        ("steps", 1.5),
        ("share", "0.5"),
        ("title", ""),
        ("title", "toolong"),
        ("on", 1),
    ],
)
def test_the_error_for_an_invalid_value_names_the_valid_values(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=r"^must be ") as caught:
        SETTINGS[name].convert(value)
    assert str(caught.value) == f"must be {SETTINGS[name].wanted}, not {show(value)}"


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("rate", 1e99, "must be at most 9.2e+18, not 1e+99"),
        ("steps", 10**22, "must be at most 9,223,372,036,854,775,807, not 10000000000000000000000"),
        ("steps", 2**63, "must be at most 9,223,372,036,854,775,807, not 9223372036854775808"),
        ("rate", float("inf"), "must be finite, not Infinity"),
        ("share", None, "is empty; the default is 0.5"),
        ("title", None, 'is empty; the default is "x"'),
    ],
)
def test_the_error_for_a_refused_value_names_the_actual_reason(name: str, value: object, said: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        SETTINGS[name].convert(value)
    assert str(caught.value) == said


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("rate", "3e-4", 3e-4),
        ("rate", " auto ", "auto"),
        ("rate", '"auto"', "auto"),
        ("steps", "2_000", 2000),
        ("steps", "", None),
        ("steps", "1e6", 1_000_000),
        ("steps", "10M", 10_000_000),
        ("steps", "300k", 300_000),
        ("steps", "1.5 K", 1500),
        ("steps", "300,000", 300_000),
        ("steps", "1,024", 1024),
        ("steps", "2B", 2_000_000_000),
        ("rate", "1e6", 1e6),
        ("rate", "0.5k", 500),
        ("title", "10M", "10M"),
        ("title", "1e3", "1e3"),
        ("on", "true", True),
        ("word", "b", "b"),
        ("title", "5", "5"),
        ("title", "true", "true"),
        ("title", "nan", "nan"),
        ("title", '"5"', "5"),
    ],
)
def test_typed_text_is_converted_to_the_settings_type(name: str, text: str, value: object) -> None:
    assert SETTINGS[name].parse(text) == value


def test_empty_text_is_refused_as_a_value() -> None:
    with pytest.raises(ValueError, match="is empty"):
        SETTINGS["title"].parse("  ")


@given(st.integers(-(2**62), 2**62), st.sampled_from(["{}", "{:,}", "{:_}", "+{}", " {} "]))
def test_an_integer_has_the_same_value_in_any_notation(number: int, style: str) -> None:
    assert parse_number(style.format(abs(number)), whole=True) == abs(number)
    assert parse_number(f"{number:,}") == number


@given(st.integers(0, 10**6), st.sampled_from([("k", 3), ("K", 3), ("M", 6), ("G", 9), ("B", 9), ("T", 12)]))
def test_a_unit_letter_stands_for_an_exact_power_of_ten(number: int, letter: tuple[str, int]) -> None:
    assert parse_number(f"{number}{letter[0]}") == number * 10 ** letter[1]
    assert parse_number(f"{number / 1000:.3f}{letter[0]}", whole=True) == number * 10 ** (letter[1] - 3)


@given(st.lists(st.integers(1, 10**7) | st.sampled_from([1e-4, 0.25, 3e-3]), min_size=2))
def test_commas_make_a_list_if_they_cannot_be_thousands_separators(values: list) -> None:
    written = ",".join(map(str, values))
    bracketed = parse_number(f"[{written}]", several=True)
    assert bracketed == values
    try:
        assert parse_number(written, several=True) == values
    except ValueError as error:
        assert all(100 <= value <= 999 for value in values[1:])
        assert str(error).startswith("may be one number or several: write ")  # noqa: PT017


@given(st.text(max_size=500))
def test_any_typed_text_is_either_read_as_a_value_or_refused_in_one_sentence(text: str) -> None:
    for setting in SETTINGS.values():
        for several in (False, True):
            try:
                setting.convert(setting.read(text, several=several))
            except ValueError as error:
                assert str(error).startswith(("must be ", "may be ", "is empty"))  # noqa: PT017


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("16,32,64", [16, 32, 64]),
        ("16, 32", [16, 32]),
        ("[512, 768]", [512, 768]),
        ("16k,32k", [16_000, 32_000]),
        ("[1e3, 2e3]", [1000, 2000]),
        ("300,000", 300_000),
        ("1,000,050", 1_000_050),
        ("auto,3", ["auto", 3]),
        ("16,", "16,"),
        ("[16, 32", "[16, 32"),
    ],
)
def test_sweepable_settings_accept_a_list_or_a_number(text: str, value: object) -> None:
    assert parse_number(text, several=True, whole=True) == value


@pytest.mark.parametrize("text", ["512,768", "1,536", "100,200,300"])
def test_text_that_could_be_a_number_or_a_list_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=rf"write {text.replace(',', '')} or \[{text.replace(',', ', ')}\]"):
        parse_number(text, several=True)
    assert parse_number(text) == int(text.replace(",", ""))


def test_typed_text_cannot_inject_a_second_line() -> None:
    assert parse_value("1\nother = 2") == "1\nother = 2"
    assert parse_value("[0, 1]") == [0, 1]


def test_a_displayed_value_fits_on_one_line() -> None:
    assert show("a\nb") == '"a\\nb"'
    assert show([0, True]) == "[0, true]"
    assert len(show("x" * 1000)) == 60


def test_the_error_for_an_unregistered_name_lists_the_registered_ones() -> None:
    assert catalog.entry(PARALLEL, "ddp", "parallel.mode") is PARALLEL["ddp"]
    with pytest.raises(
        UserError,
        match=r'^parallel\.mode must be "single" or "dp" or "ddp" or "tensor" or "hybrid" or "sweep", not "dpp"$',
    ):
        catalog.entry(PARALLEL, "dpp", "parallel.mode")


def test_a_catalog_entry_imports_its_code_only_when_it_is_loaded() -> None:
    assert Entry("collections:OrderedDict", "").load().__name__ == "OrderedDict"
