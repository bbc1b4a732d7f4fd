"""Tests that the Dockerfile and the conda-forge recipe agree with pyproject.toml, because tests cannot build them."""

from __future__ import annotations

import re
import shutil
import tomllib
from pathlib import Path

import pytest
import yaml
from support.box import ROOT
from support.packages import build

PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]
DOCKERFILE = (ROOT / "packaging" / "Dockerfile").read_text()
IGNORED = (ROOT / "packaging" / "Dockerfile.dockerignore").read_text()
RECIPE = yaml.safe_load((ROOT / "packaging" / "conda" / "recipe.yaml").read_text())


def copied() -> list[str]:
    """Return the files and folders copied in the Dockerfile's first stage."""
    lines = re.findall(r"^COPY (?!--from)(.+) \S+$", DOCKERFILE, re.MULTILINE)
    return [source for line in lines for source in line.split()]


def as_in_conda(requirements: list[str]) -> set[str]:
    """Return pip requirements in conda's format, like `textual >=8.2,<9`."""
    parts = [re.match(r"([\w-]+)([^;]*)", requirement) for requirement in requirements]
    names = {"torch": "pytorch"}
    return {f"{names.get(part[1], part[1])} {part[2]}" for part in parts if part}


def test_the_image_is_built_from_the_files_of_an_sdist() -> None:
    described = {PROJECT["readme"], *PROJECT["license-files"], "pyproject.toml"}
    assert set(copied()) == described | set(PYPROJECT["tool"]["hatch"]["build"]["targets"]["sdist"]["only-include"])
    assert set(copied()) == set(re.findall(r"^!(.+)$", IGNORED, re.MULTILINE))


@pytest.mark.slow
def test_the_files_copied_into_the_image_build_the_same_wheel(dist: Path, tmp_path: Path) -> None:
    for name in copied():
        source, target = ROOT / name, tmp_path / "source" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, target)
    build(tmp_path / "source", tmp_path / "made", "--wheel")
    (made,), (wheel,) = (tmp_path / "made").iterdir(), dist.glob("*.whl")
    assert made.read_bytes() == wheel.read_bytes()


def test_the_image_does_not_run_as_root_and_opens_no_port() -> None:
    stage = DOCKERFILE.rpartition("\nFROM ")[2]
    assert re.findall(r"^USER (\S+)$", stage, re.MULTILINE) == ["1000:1000"]
    assert "EXPOSE" not in DOCKERFILE
    (extra,) = re.findall(r"^ARG EXTRAS=(\w+)$", stage, re.MULTILINE)
    assert extra in PROJECT["optional-dependencies"]


def test_conda_and_pip_have_the_same_requirements() -> None:
    asked, python = RECIPE["requirements"], RECIPE["context"]["python_min"]
    assert f">={python}" == PROJECT["requires-python"]
    assert set(asked["run"]) == as_in_conda(PROJECT["dependencies"]) | {"python >=${{ python_min }}", "__linux"}
    assert set(asked["run_constraints"]) == as_in_conda(PROJECT["optional-dependencies"]["train"])
    assert set(asked["host"]) == {"python ${{ python_min }}.*", "pip", *PYPROJECT["build-system"]["requires"]}


def test_conda_builds_the_same_programs_and_version() -> None:
    scripts = [f"{name} = {where}" for name, where in PROJECT["scripts"].items()]
    assert RECIPE["build"]["python"]["entry_points"] == scripts
    about = {"license": PROJECT["license"], "summary": PROJECT["description"]}
    assert {name: RECIPE["about"][name] for name in about} == about
    assert RECIPE["context"]["version"] == PROJECT["version"]
