"""Each module has a test file in the mirrored folder; `mirror.toml` lists modules and test files that differ."""

from __future__ import annotations

import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
TESTS = ROOT / "tests"
# Folders with tests of the entire product, and with code that tests share.
WHOLE = {"benchmarks", "e2e", "faults", "fuzz", "package", "slurm", "support"}
ON_SCREEN = {"app", "messages", "notices", "palette", "panels", "screens", "theme", "widgets"}
COMMANDS = {"cli", "cli_commands"}

MIRROR = tomllib.loads((TESTS / "mirror.toml").read_text())
ELSEWHERE = MIRROR["tested_by"] | MIRROR["needs_none"]


def place_of(module: str) -> str:
    """Return the path of the test file that a module should have."""
    package, *parts = module.split(".")
    *folders, name = parts
    if package == "trainer":
        folders = folders if parts[0] == "contract" else ["trainer", *folders]
    elif parts[0] in ON_SCREEN:
        folders = ["tui"]
    elif parts[0] in COMMANDS:
        folders = ["cli"]
    return "/".join(["tests", *folders, f"test_{name}.py"])


def modules() -> list[str]:
    """Return every module except packages and entry points."""
    files = [file for package in ("trainer", "sae_tui") for file in (ROOT / package).rglob("*.py")]
    names = [".".join(file.relative_to(ROOT).with_suffix("").parts) for file in files]
    return [name for name in names if not name.endswith(("__init__", "__main__"))]


def has_mirror(module: str) -> bool:
    return (ROOT / place_of(module)).exists()


def test_every_module_has_a_mirrored_test_file_or_an_entry() -> None:
    assert [module for module in modules() if not has_mirror(module) and module not in ELSEWHERE] == []


def test_every_entry_names_an_existing_module_without_a_mirrored_test_file() -> None:
    names = modules()
    assert [module for module in ELSEWHERE if module not in names or has_mirror(module)] == []
    assert MIRROR["tested_by"].keys().isdisjoint(MIRROR["needs_none"])


def test_every_named_test_file_exists() -> None:
    named = [[files] if isinstance(files, str) else files for files in MIRROR["tested_by"].values()]
    assert [file for files in [*named, MIRROR["across"]] for file in files if not (ROOT / file).exists()] == []


def test_every_test_file_mirrors_a_module_or_has_an_entry() -> None:
    files = [file.relative_to(TESTS) for file in TESTS.rglob("test_*.py")]
    below = {f"tests/{file.as_posix()}" for file in files if len(file.parts) > 1 and file.parts[0] not in WHOLE}
    assert below - {place_of(module) for module in modules()} == MIRROR["across"].keys()


def test_entries_are_sorted_within_their_group() -> None:
    groups = (TESTS / "mirror.toml").read_text().split("\n\n")
    lines = [[line for line in group.splitlines() if line.startswith('"')] for group in groups]
    assert [group for group in lines if group != sorted(group)] == []
