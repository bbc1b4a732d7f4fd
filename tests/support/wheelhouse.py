"""Wheels rebuilt from installed packages so that pip can install them without an index or a network."""

from __future__ import annotations

import configparser
import csv
import io
import sys
import zipfile
from collections.abc import Iterable, Iterator
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

# Files that an installer adds to the installed package.
_BY_INSTALLER = ("INSTALLER", "REQUESTED", "RECORD", "direct_url.json")


def fill(folder: Path, names: Iterable[str]) -> None:
    """Write a wheel for each of these packages and for pip, which is not in the lock files.

    Packages that are not installed are skipped, because they are for other systems.
    """
    for name in (*names, "pip"):
        try:
            _write_wheel(folder, distribution(name))
        except PackageNotFoundError:
            continue


def _write_wheel(folder: Path, package: Distribution) -> None:
    stem = f"{package.metadata['Name'].replace('-', '_')}-{package.version}"
    tags = [line.split()[1] for line in (package.read_text("WHEEL") or "").splitlines() if line.startswith("Tag:")]
    # For example, the tags `py2-none-any` and `py3-none-any` are combined into `py2.py3-none-any`.
    tag = "-".join(".".join(dict.fromkeys(parts)) for parts in zip(*(tag.split("-") for tag in tags), strict=True))
    record = io.StringIO()
    writer = csv.writer(record, lineterminator="\n")
    # The files are not compressed, because compression would take five times as long.
    with zipfile.ZipFile(folder / f"{stem}-{tag}.whl", "w") as wheel:
        for name, file in _files(package, stem):
            wheel.write(file, name)
            writer.writerow([name, "", ""])
        info = next(name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")).partition("/")[0]
        writer.writerow([f"{info}/RECORD", "", ""])
        wheel.writestr(f"{info}/RECORD", record.getvalue())


def _files(package: Distribution, stem: str) -> Iterator[tuple[str, Path]]:
    """Yield the name and path of each file in a package's wheel, except scripts, which an installer recreates."""
    made = set(_scripts(package))
    for entry in package.files or ():
        file = Path(str(entry.locate())).resolve()
        if entry.name in _BY_INSTALLER or "__pycache__" in entry.parts:
            continue
        if entry.parts[0] != "..":
            yield entry.as_posix(), file
        elif file.parent == Path(sys.prefix) / "bin" and entry.name not in made:
            yield f"{stem}.data/scripts/{entry.name}", file


def _scripts(package: Distribution) -> Iterator[str]:
    parser = configparser.ConfigParser(delimiters="=")
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string(package.read_text("entry_points.txt") or "")
    for group in ("console_scripts", "gui_scripts"):
        if parser.has_section(group):
            yield from parser[group]
