"""Writes a package of labelled texts with the layout of sae-probes."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable
from pathlib import Path

import zstandard

from trainer.evaluation.probe_sets import PACKAGE


def write_set(folder: Path, name: str, rows: Iterable[tuple[str, object]]) -> Path:
    """Write (text, label) pairs as a data set in a folder, as in the package; return the file."""
    package = folder / PACKAGE
    (tables := package / "data" / "cleaned_data").mkdir(parents=True, exist_ok=True)
    # The real package imports modules that may not be installed.
    (package / "__init__.py").write_text("raise AssertionError('this package must not be imported')\n")
    text = io.StringIO(newline="")
    table = csv.writer(text)
    table.writerow(["prompt", "target"])
    table.writerows(rows)
    (file := tables / f"{name}.csv.zst").write_bytes(zstandard.compress(text.getvalue().encode()))
    return file


def two_classes(n: int, first: str = "the cat sat", second: str = "a dog ran") -> list[tuple[str, object]]:
    """Return `n` texts of each of two classes, in alternating order. The two classes use different words."""
    return [row for number in range(n) for row in ((f"{first} {number}", "0"), (f"{second} {number}", "1"))]
