"""Tests for the packages that `python -m build` writes, and for their metadata."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest
from support.box import ROOT
from support.packages import build

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
SAMPLE = ("README.md", "acts-00000.safetensors", "meta.json", "tokens.json")
PAGES = [file.name for file in (ROOT / "packaging" / "man").iterdir()]
PRESETS = [f"presets/{file.name}" for file in (ROOT / "data" / "presets").iterdir()]


def the_only(folder: Path, pattern: str) -> Path:
    (file,) = folder.glob(pattern)
    return file


def names_in(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        return archive.namelist()


def sources() -> set[str]:
    """Return every file of the two packages in the source tree."""
    files = [file for package in ("sae_tui", "trainer") for file in (ROOT / package).rglob("*")]
    return {file.relative_to(ROOT).as_posix() for file in files if file.is_file() and "__pycache__" not in file.parts}


@pytest.mark.slow
def test_twine_accepts_the_packages(dist: Path) -> None:
    argv = [sys.executable, "-m", "twine", "check", "--strict", *map(str, dist.iterdir())]
    done = subprocess.run(argv, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("PASSED") == 2


@pytest.mark.slow
def test_the_wheel_built_from_the_sdist_equals_the_one_built_from_the_tree(dist: Path, tmp_path: Path) -> None:
    build(ROOT, tmp_path, "--wheel")
    assert the_only(tmp_path, "*.whl").read_bytes() == the_only(dist, "*.whl").read_bytes()


def test_a_wheel_contains_only_packages_sample_presets_manual_pages_and_licence(dist: Path) -> None:
    data = {f"sae_tui/data/{name}" for name in (*(f"sample/{file}" for file in SAMPLE), *PRESETS)}
    info = f"sae_tui-{PROJECT['version']}.dist-info"
    described = {f"{info}/{name}" for name in ("METADATA", "WHEEL", "RECORD", "entry_points.txt", "licenses/LICENSE")}
    shared = {f"sae_tui-{PROJECT['version']}.data/data/share/man/man1/{page}" for page in PAGES}
    assert set(names_in(the_only(dist, "*.whl"))) == sources() | data | shared | described


def test_an_sdist_has_the_sources_for_the_wheel_and_no_tests(dist: Path) -> None:
    with tarfile.open(the_only(dist, "*.tar.gz")) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    top = {name for name in names if "/" not in name}
    assert top == {".gitignore", "CHANGELOG.md", "LICENSE", "PKG-INFO", "README.md", "pyproject.toml"}
    data = {f"data/{name}" for name in (*(f"sample/{file}" for file in SAMPLE), *PRESETS)}
    assert names - top == sources() | data | {f"packaging/man/{page}" for page in PAGES}


def test_the_version_is_written_in_only_one_place(dist: Path) -> None:
    version = PROJECT["version"]
    assert {file.name for file in dist.iterdir()} == {
        f"sae_tui-{version}.tar.gz",
        f"sae_tui-{version}-py3-none-any.whl",
    }
    written = [file for file in sources() if file.endswith(".py") and f'"{version}"' in (ROOT / file).read_text()]
    assert written == []


def test_without_extras_only_the_projects_base_dependencies_are_required(dist: Path) -> None:
    with zipfile.ZipFile(the_only(dist, "*.whl")) as archive:
        name = next(name for name in archive.namelist() if name.endswith("METADATA"))
        told = Parser().parsestr(archive.read(name).decode())
    always = [line for line in told.get_all("Requires-Dist") or () if "extra ==" not in line]
    assert len(always) == len(PROJECT["dependencies"])
    assert set(told.get_all("Provides-Extra") or ()) == PROJECT["optional-dependencies"].keys()
    assert told["License-Expression"] == "Apache-2.0"
