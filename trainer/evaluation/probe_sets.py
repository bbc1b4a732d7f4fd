"""Reads labelled texts for training probes from the `sae-probes` package's files.

The package is not imported, because that would also import SAELens, TransformerLens and XGBoost. Only the package's
tables are needed.
"""

from __future__ import annotations

import csv
import importlib.util
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from trainer.contract.errors import UserError, first_line
from trainer.contract.extras import install
from trainer.contract.wording import plural

PACKAGE = "sae_probes"
_NEEDED = {PACKAGE: "sae-probes", "sklearn": "scikit-learn", "zstandard": "zstandard"}
_TABLES = "data/cleaned_data"
_ENDING = ".csv.zst"
# The maximum number of texts per class, taken from the beginning of a table.
PER_CLASS = 192
# With fewer texts, the validation set for selecting the penalty would contain only a dozen texts.
_FEWEST_PER_CLASS = 64
# Data sets of short texts on a wide range of subjects, with labels that a human reader would agree with.
DEFAULTS = (
    "5_hist_fig_ismale",
    "7_hist_fig_ispolitician",
    "21_headline_istrump",
    "87_glue_cola",
    "92_glue_sst2",
    "96_spam_is",
    "105_click_bait",
    "124_world_country_United_States",
    "126_art_type_book",
    "130_temp_cat_Frequency",
    "149_twt_emotion_happiness",
    "156_athlete_sport_baseball",
)


class TextSet(NamedTuple):
    """An equal number of texts from each of two classes; `labels` are 0 or 1."""

    name: str
    texts: list[str]
    labels: list[int]


def read_sets(n: int) -> list[TextSet]:
    """Return `n` data sets: first the `DEFAULTS`, then other sets with two classes, in numerical order.

    Raise `UserError` if a package is not installed, a set cannot be read, or there are fewer than `n` sets.
    """
    sets: list[TextSet] = []
    for file in _in_order(_folder()):
        if one := _read(file):
            sets.append(one)
        if len(sets) == n:
            return sets
    there = plural(len(sets), "set")
    raise UserError(f"--sets: must be at most {there} with {_FEWEST_PER_CLASS} texts in each of two classes, not {n}")


def _folder() -> Path:
    missing = [package for module, package in _NEEDED.items() if importlib.util.find_spec(module) is None]
    if missing:
        raise UserError(f"--probe: needs {' and '.join(missing)}: `{install('eval')}`")
    spec = importlib.util.find_spec(PACKAGE)
    return Path(((spec and spec.submodule_search_locations) or [""])[0]) / _TABLES


def _in_order(folder: Path) -> list[Path]:
    files = {file.name.removesuffix(_ENDING): file for file in folder.glob(f"*{_ENDING}")}
    if not files:
        raise UserError(f"--probe: {folder} has no sets; {_again()}")
    others = sorted(files.keys() - set(DEFAULTS), key=lambda name: (_number(name), name))
    return [files[name] for name in (*DEFAULTS, *others) if name in files]


def _number(name: str) -> int:
    number = name.partition("_")[0]
    return int(number) if number.isdecimal() else 10**9


def _read(file: Path) -> TextSet | None:
    """Return a data set, or None if it does not have two classes with enough texts."""
    try:
        by_label: dict[str, list[str]] = {}
        for row in _rows(file):
            if (text := row["prompt"]) and row["target"]:
                by_label.setdefault(row["target"], []).append(text)
    except Exception as error:
        # If the file is damaged, decompression, UTF-8 decoding or parsing may fail, or a column may be missing.
        raise UserError(f"--probe: {file} cannot be read ({first_line(error)}); {_again()}") from None
    n = min(map(len, by_label.values()), default=0)
    if len(by_label) != 2 or n < _FEWEST_PER_CLASS:
        return None
    n = min(n, PER_CLASS)
    texts = [text for label in sorted(by_label) for text in by_label[label][:n]]
    return TextSet(file.name.removesuffix(_ENDING), texts, [0] * n + [1] * n)


def _rows(file: Path) -> Iterator[dict[str, Any]]:
    import zstandard

    with file.open("rb") as packed, zstandard.ZstdDecompressor().stream_reader(packed) as stream:
        yield from csv.DictReader(io.TextIOWrapper(stream, "utf-8", newline=""), strict=True)


def _again() -> str:
    return "install it again: `pip install --force-reinstall --no-deps sae-probes`"
