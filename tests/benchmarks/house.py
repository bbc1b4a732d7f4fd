"""Prints statistics about the source code: sizes of functions and files, and the structure of each folder.

python tests/benchmarks/house.py [CHECKOUT]

A folder's modules are its files and direct subfolders. The number of layers is the length of the longest import chain
between modules, including imports for type checkers. The number of imports is the number of module pairs in which one
module imports the other. An import counts as cyclic if it is part of a cycle.
"""

from __future__ import annotations

import ast
import functools
import re
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path

PACKAGES = ("sae_tui", "trainer", "tests")
FOLDERS = (
    "trainer",
    "trainer/contract",
    "sae_tui",
    "sae_tui/jobs",
    "trainer/parallel",
    "trainer/saes",
    "sae_tui/screens",
)
PLAIN_NAMES = ("found", "said", "known")
Function = ast.FunctionDef | ast.AsyncFunctionDef


def main(root: Path) -> None:
    """Print both tables."""
    for package in PACKAGES:
        files = sorted((root / package).rglob("*.py"))
        print(f"{package}: {', '.join(f'{value} {name}' for name, value in sizes(files).items())}")
    print(f"\n{'folder':20} {'modules':>7} {'layers':>6} {'imports':>7} {'cyclic':>6}")
    for folder in FOLDERS:
        if (root / folder).is_dir():
            capacities, floors, arrows, back = plan(root, folder)
            print(f"{folder:20} {capacities:7} {floors:6} {arrows:7} {back:6}")


def sizes(files: list[Path]) -> dict[str, object]:
    """Return the number of files, lines, functions, docstrings and vaguely named variables."""
    texts = [file.read_text() for file in files]
    lines = [len(text.splitlines()) for text in texts]
    functions = [node for text in texts for node in ast.walk(ast.parse(text)) if isinstance(node, Function)]
    lengths = sorted((node.end_lineno or 0) - node.lineno + 1 for node in functions)
    docs = [doc for node in functions if (doc := ast.get_docstring(node))]
    plain = [name for node in functions for name in set(_assigned(node)) if name in PLAIN_NAMES]
    return {
        "files": len(files),
        "lines": sum(lines),
        "lines in the median file": int(statistics.median(lines)),
        "lines in the longest file": max(lines),
        "functions": len(functions),
        "lines in the median function": int(statistics.median(lengths)),
        "lines at the 90th percentile": lengths[len(lengths) * 9 // 10],
        "lines in the longest function": lengths[-1],
        "docstrings": len(docs),
        "docstrings that do not start with a verb": sum(
            bool(re.match(r"(The|A|An|What|Whether|Of|How|Where|Those)\b", doc)) for doc in docs
        ),
        f"variables called {' or '.join(PLAIN_NAMES)}": len(plain),
    }


def _assigned(function: Function) -> Iterator[str]:
    for node in ast.walk(function):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id


def plan(root: Path, folder: str) -> tuple[int, int, int, int]:
    """Return the number of modules, layers, imports and cyclic imports in a folder."""
    package = folder.replace("/", ".")
    capacities = {path.stem for path in (root / folder).iterdir() if _is_room(path)}
    imports: dict[str, set[str]] = {capacity: set() for capacity in capacities}
    for file in (root / folder).rglob("*.py"):
        capacity = file.relative_to(root / folder).parts[0].removesuffix(".py")
        if capacity in capacities:
            imports[capacity] |= {name for name in _imported(file, package) if name in capacities and name != capacity}

    @functools.cache
    def reached(capacity: str) -> frozenset[str]:
        found, new = set[str](), {capacity}
        while new:
            found, new = found | new, {name for one in new for name in imports[one]} - found
        return frozenset(found)

    back = sum(capacity in reached(name) for capacity, names in imports.items() for name in names)
    down = {capacity: {name for name in names if capacity not in reached(name)} for capacity, names in imports.items()}

    @functools.cache
    def depth(capacity: str) -> int:
        return 1 + max((depth(name) for name in down[capacity]), default=0)

    return len(capacities), max(map(depth, capacities)), sum(map(len, imports.values())), back


def _is_room(path: Path) -> bool:
    is_file = path.suffix == ".py" and not path.stem.startswith("__")
    return is_file or (path.is_dir() and (path / "__init__.py").exists())


def _imported(file: Path, package: str) -> Iterator[str]:
    """Yield the modules of a package that a file imports, including imports that are only for type checkers."""
    for node in ast.walk(ast.parse(file.read_text())):
        names = [name.name for name in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{name.name}" for name in node.names]
        for name in names:
            if name.startswith(f"{package}."):
                yield name.removeprefix(f"{package}.").split(".")[0]


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parents[2])
