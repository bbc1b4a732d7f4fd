"""Tests, in new processes, which modules an import loads; import-linter checks the import statements."""

from __future__ import annotations

import ast
import graphlib
import importlib.util
import json
import os
import pkgutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SCREEN = ("textual", "rich")
HEAVY = ("torch", "numpy")

# This script imports modules one by one, and prints the forbidden modules that each import loads.
WATCH = """
import importlib, json, sys
forbidden, found, names = set(sys.argv[1].split(",")), {}, sys.argv[2:]
for name in names:
    before = forbidden & set(sys.modules)
    importlib.import_module(name)
    if new := (forbidden & set(sys.modules)) - before:
        found[name] = sorted(new)
print(json.dumps(found))
"""


def modules_below(package: str) -> Iterator[str]:
    """Yield the names of the package and of every module in it except `__main__`, without importing anything."""
    folder = ROOT.joinpath(*package.split("."))
    if folder.is_dir():
        yield package
    for module in pkgutil.iter_modules([str(folder)]):
        name = f"{package}.{module.name}"
        if module.ispkg:
            yield from modules_below(name)
        elif module.name != "__main__":
            yield name


def loaded_by(names: list[str], forbidden: tuple[str, ...]) -> dict[str, list[str]]:
    command = [sys.executable, "-c", WATCH, ",".join(forbidden), *names]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


@pytest.mark.parametrize(
    ("packages", "forbidden"),
    [
        (["trainer.contract"], (*HEAVY, *SCREEN, "pynvml", "psutil", "safetensors", "sqlite_utils", "sae_tui")),
        (
            ["sae_tui.jobs", "sae_tui.doctor", "sae_tui.compare"],
            (*HEAVY, *SCREEN, "pynvml", "safetensors", "sqlite_utils"),
        ),
        (["sae_tui.gpu"], (*HEAVY, *SCREEN, "sqlite_utils", "safetensors")),
        (
            ["sae_tui.widgets", "sae_tui.panels", "sae_tui.screens"],
            (*HEAVY, "pynvml", "sqlite_utils", "safetensors"),
        ),
        (["trainer"], (*SCREEN, "sae_tui")),  # torch itself loads pynvml if it is installed
    ],
)
def test_no_module_in_a_package_loads_a_forbidden_module(packages: list[str], forbidden: tuple[str, ...]) -> None:
    modules = {package: list(modules_below(package)) for package in packages}
    assert all(modules.values())
    assert loaded_by([name for names in modules.values() for name in names], forbidden) == {}


@pytest.mark.parametrize("module", ["sae_tui.start", "sae_tui.cli", "sae_tui.settings"])
def test_starting_the_app_loads_no_tensor_library_and_no_driver(module: str) -> None:
    assert loaded_by([module], (*HEAVY, "pynvml", "sqlite_utils", "safetensors", "trainer.cli")) == {}


def test_the_app_loads_no_screen_before_it_is_opened() -> None:
    code = (
        "import sys, sae_tui.start; print(sorted(name for name in sys.modules if name.startswith('sae_tui.screens.')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert {name.rpartition(".")[2] for name in ast.literal_eval(done.stdout)} == {
        "dashboard",
        "dashboard_panels",
        "dashboard_rows",
        "job_edits",
        "look_back",
        "offers",
        "process_list",
        "processes",
    }


def test_modules_for_other_hosts_are_loaded_only_if_a_host_is_named() -> None:
    code = "import sys, sae_tui.cli, sae_tui.start; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert "sae_tui.screens.dashboard" in loaded
    theirs = (
        "sae_tui.ssh",
        "sae_tui.hosts",
        "sae_tui.panels.far_",
        "sae_tui.screens.far_",
        "sae_tui.screens.dashboard_hosts",
    )
    assert [name for name in loaded if name.startswith(theirs)] == []


def test_the_apps_command_line_loads_no_screen() -> None:
    assert loaded_by(["sae_tui.cli"], SCREEN) == {}


# Modules that would take a large part of a command's start-up time: for commands that need no job, and for commands
# that only list GPUs or jobs.
NEEDS_NO_JOBS = (
    "sae_tui.gpu.base",
    "sae_tui.jobs",
    "sae_tui.settings",
    "trainer.contract.object_store",
    "trainer.contract.prctl",
    "trainer.contract.runs",
    "trainer.contract.settings.catalog",
    "trainer.contract.settings.declare",
    "trainer.contract.store",
)
NEEDS_NO_PLAN = (
    "sae_tui.cli_commands.past",
    "sae_tui.jobs.detach",
    "sae_tui.jobs.launch",
    "trainer.contract.object_store",
    "trainer.contract.planning.check_job",
    "trainer.contract.settings.extract",
)
NEEDS_ONLY_ROWS = (
    "hashlib",
    "sae_tui.cli_commands.job",
    "sae_tui.cli_commands.selection",
    "sae_tui.jobs.bulk",
    "sae_tui.jobs.evaluation.report_card",
    "sae_tui.jobs.view.past_runs",
    "trainer.contract.runs.report_card",
)


def test_a_command_does_not_look_for_garbage_in_its_modules_as_it_ends(tmp_path: Path) -> None:
    code = "import gc; from sae_tui.cli import main; main(); print(gc.get_freeze_count())"
    environ = os.environ | {"SAE_TUI_DATA_DIR": str(tmp_path / "data")}
    done = subprocess.run([sys.executable, "-c", code, "jobs"], env=environ, capture_output=True, text=True, check=True)
    assert int(done.stdout.split()[-1]) > 10_000


@pytest.mark.parametrize(
    ("arguments", "spared"),
    [
        (["--help"], NEEDS_NO_JOBS),
        (["gpus", "--help"], NEEDS_NO_JOBS),
        (["--version"], NEEDS_NO_JOBS),
        (["completion", "bash"], NEEDS_NO_JOBS),
        (["TAB"], NEEDS_NO_JOBS),
        (["gpus"], (*NEEDS_NO_PLAN, *NEEDS_ONLY_ROWS, "sae_tui.gpu.aggregate")),
        (["jobs"], (*NEEDS_NO_PLAN, *NEEDS_ONLY_ROWS)),
    ],
)
def test_a_command_loads_only_what_it_needs(arguments: list[str], spared: Sequence[str], tmp_path: Path) -> None:
    code = """
import json, os, sys
import sae_tui.cli
def say_loaded():
    os.write(2, json.dumps([*sys.modules]).encode())
if sys.argv[1] == "TAB":
    leave = os._exit
    os._exit = lambda code: (say_loaded(), leave(code))
    sae_tui.cli.main([])
sae_tui.cli.main(sys.argv[1:])
say_loaded()
"""
    line = "sae-tui gpus --"
    shell = {
        "_ARGCOMPLETE": "1",
        "COMP_LINE": line,
        "COMP_POINT": str(len(line)),
        "_ARGCOMPLETE_STDOUT_FILENAME": os.devnull,
    }
    environ = os.environ | {"SAE_TUI_DATA_DIR": str(tmp_path / "data")} | (shell if arguments == ["TAB"] else {})
    done = subprocess.run([sys.executable, "-c", code, *arguments], env=environ, capture_output=True, text=True)
    loaded = json.loads(done.stderr[done.stderr.index("[") :])
    assert {*spared}.isdisjoint(loaded), {*spared} & {*loaded}


def test_only_one_module_loads_the_driver_library() -> None:
    names = [name for name in modules_below("sae_tui.gpu") if name != "sae_tui.gpu.nvml"]
    assert loaded_by(names, ("pynvml",)) == {}


@pytest.mark.parametrize("package", ["trainer", "sae_tui"])
def test_importing_a_package_loads_none_of_its_modules(package: str) -> None:
    code = f"import sys; before = set(sys.modules); import {package}; print(sorted(set(sys.modules) - before))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str([package])


@pytest.mark.parametrize("arguments", [[], ["--help"], ["run"], ["run", "missing.toml"]])
def test_the_trainer_loads_torch_only_when_it_trains(arguments: list[str]) -> None:
    code = """
import json, runpy, sys
sys.argv[0] = "trainer"
try:
    runpy.run_module("trainer", run_name="__main__", alter_sys=True)
except SystemExit:
    pass
print(json.dumps(sorted({"torch", "numpy", "sae_tui", "rich", "textual"} & set(sys.modules))))
"""
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.slow
def test_training_on_a_cpu_loads_neither_the_compiler_nor_pandas() -> None:
    code = """
import sys, torch
from trainer.api import train
for optimizer in ("adam", "signum", "muon"):
    train([torch.randn(64, 16)] * 3, architecture="topk", d_sae=32, k=4, n_steps=3, optimizer=optimizer)
print(sorted({"torch._dynamo", "torch._inductor", "triton", "pandas", "sqlite_utils"} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.splitlines()[-1:] == ["[]"], done.stderr


def test_the_tests_of_imports_cover_every_module_in_both_packages() -> None:
    files = {
        file.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".").removesuffix(".__init__")
        for package in ("trainer", "sae_tui")
        for file in (ROOT / package).rglob("*.py")
        if file.name != "__main__.py"
    }
    assert {name for package in ("trainer", "sae_tui") for name in modules_below(package)} == files
    assert all(importlib.util.find_spec(name.partition(".")[0]) for name in files)


def imported_by(module: str) -> Iterator[str]:
    """Yield the imports of a module, including imports in functions and imports that are only for type checkers."""
    file = ROOT.joinpath(*module.split("."))
    for node in ast.walk(ast.parse((file / "__init__.py" if file.is_dir() else file.with_suffix(".py")).read_text())):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{name.name}" for name in node.names)
            yield str(node.module)


# Names of the Python API that store rows, trainer classes and other layers also use.
SHARED_NAMES = {"Job", "Latents", "Loaded"}


def test_a_class_name_is_used_once_in_both_packages() -> None:
    names = Counter(
        node.name
        for package in ("trainer", "sae_tui")
        for file in (ROOT / package).rglob("*.py")
        for node in ast.parse(file.read_text()).body
        if isinstance(node, ast.ClassDef)
    )
    assert {name for name, n in names.items() if n > 1} <= SHARED_NAMES


def test_there_are_no_import_cycles() -> None:
    modules = {name for package in ("trainer", "sae_tui") for name in modules_below(package)}
    graph = {name: {other for other in imported_by(name) if other in modules - {name}} for name in modules}
    graphlib.TopologicalSorter(graph).prepare()


def test_the_import_rules_between_layers_are_respected() -> None:
    done = subprocess.run(
        [Path(sys.executable).with_name("lint-imports"), "--no-cache"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
