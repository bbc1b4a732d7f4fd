"""The Python that a job or the settings name: whether it may be run, and how the trainer is started by it.

Where none is named, that is the app's own.
"""

from __future__ import annotations

import os
import re
import stat
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from trainer.contract.errors import UserError, sentence
from trainer.contract.settings.job import PYTHONS
from trainer.contract.settings.knobs import show
from trainer.contract.trust import distrust_of_entry, distrust_of_program, distrust_of_searched

# What leads a Python to packages that are not its own: it may be of another version, and of other versions of them.
_OF_ANOTHER = ("PYTHONPATH", "PYTHONHOME", "PYTHONPLATLIBDIR", "PYTHONEXECUTABLE", "__PYVENV_LAUNCHER__", "VIRTUAL_ENV")
_CONFIG = "pyvenv.cfg"
# Where Python's own library is below its prefix, and where packages are, Debian's among them.
_LIBRARY = "lib*/py*3*"
_PACKAGES = (f"{_LIBRARY}/site-packages", f"{_LIBRARY}/dist-packages", f"local/{_LIBRARY}/dist-packages")
# Any other program would be run with what is meant for a Python: `sh -c` runs it line by line.
_NAME = re.compile(r"(python|pypy)[\w.-]*")


def command(python: str | None, *words: str) -> list[str]:
    """Return the argv that runs the trainer, or `words` that begin with `-c`, by this Python, "" for the app's.

    -P, since a `trainer` or `torch` in the working folder would be imported instead.
    """
    start = [] if words[:1] == ("-c",) else ["-m", "trainer"]
    return [whole(python) or sys.executable, "-P", *start, *words]


def variables(python: str | None, base: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the environment to run this Python in: another one than the app's has to find its own packages."""
    return {name: value for name, value in base.items() if not (python and name in _OF_ANOTHER)}


def unset_line() -> str:
    """Return the line of a shell script that does what `variables` does."""
    return f"unset {' '.join(_OF_ANOTHER)}"


def whole(python: str | None) -> str:
    """Return the path with `~` replaced; links are kept, since those of an environment say which it is."""
    return os.path.expanduser(python) if python else ""


def refuse(python: str | None) -> None:
    """Raise `UserError` where a Python is named that cannot or may not be run."""
    if python and (why := refusal(python, whole_packages=True)):
        raise UserError(why)


def refusal(python: str, *, whole_packages: bool = False) -> str:
    """Explain why a Python cannot or may not be run, with what to do; return "" where it can.

    With `whole_packages`, check every file of every package too: 15,000 files take 0.1 s, longer over a network.
    """
    path = whole(python)
    if not os.path.isabs(path) or not path.isprintable():
        return f"takes {PYTHONS}, not {show(python)}"
    if not _NAME.fullmatch(os.path.basename(path)) and not os.path.isdir(path):
        return f"takes a program whose name begins with python, not {show(python)}"
    try:
        return _kind(Path(path)) or _distrust(Path(path), whole_packages)
    except (FileNotFoundError, NotADirectoryError):
        return f"there is no {path}; name another Python, or none for the app's own"
    except OSError as error:
        return f"{path} cannot be run: {sentence(error)}"


def _kind(path: Path) -> str:
    status = path.stat()
    if stat.S_ISDIR(status.st_mode):
        inside = path / "bin" / "python"
        return f"{path} is a folder; name the Python in it" + (f", {inside}" if inside.exists() else "")
    if not stat.S_ISREG(status.st_mode):
        return f"{path} is not a plain file; name the Python of an environment"
    return "" if os.access(path, os.X_OK) else f"{path} may not be executed; `chmod u+x` it, or name another"


def _distrust(python: Path, whole_packages: bool) -> str:
    """Look at what a start of it reads, too: what makes it an environment, its library, and the packages in it."""
    for why in _reasons(python, whole_packages):
        if why:
            reason, _, remedy = why.partition("; ")
            return f"{python} is not run, for {reason}; {remedy or 'name one of your own'}"
    return ""


def _reasons(python: Path, whole_packages: bool) -> Iterator[str]:
    """Yield why not to run a Python, or "", for each thing that decides what it runs."""
    waiting, seen = [python], set[Path]()
    # Packages of what an environment was made from are read only where it says so.
    reads_packages = True
    while waiting:
        program = waiting.pop()
        if program in seen:
            continue
        seen.add(program)
        yield distrust_of_program(program)
        yield distrust_of_searched(program.parent)
        if config := _config_of(program):
            yield distrust_of_program(config)
            yield from _of_prefix(config.parent, packages=True, deep=whole_packages)
            said = _said_by(config)
            reads_packages = said.get("include-system-site-packages") == "true"
            waiting += _pythons_in(Path(said.get("home", "")), program.name)
        elif program.resolve() == program:
            yield from _of_library(program, packages=reads_packages, deep=whole_packages)
        waiting.append(program.resolve())


def _config_of(program: Path) -> Path | None:
    """Return the file that makes the program part of an environment; None where there is none."""
    places = (program.parent / _CONFIG, program.parent.parent / _CONFIG)
    return next((place for place in places if place.exists()), None)


def _said_by(config: Path) -> dict[str, str]:
    pairs = (line.split("=", 1) for line in config.read_text(errors="replace").splitlines() if "=" in line)
    return {name.strip().lower(): value.strip() for name, value in pairs}


def _pythons_in(home: Path, name: str) -> list[Path]:
    """Return the Python in the folder that an environment was made from."""
    named = (home / one for one in (name, "python3", "python"))
    return [one for one in named if home.is_absolute() and one.exists()][:1]


def _of_library(program: Path, *, packages: bool, deep: bool) -> Iterator[str]:
    """Look for the library as Python does, upwards from the program: it may lie in any folder on the way."""
    for prefix in program.parents[1:]:
        yield from _of_prefix(prefix, packages=packages, deep=deep)
        if any(prefix.glob(f"{_LIBRARY}/os.py")):
            return


def _of_prefix(prefix: Path, *, packages: bool, deep: bool) -> Iterator[str]:
    yield distrust_of_searched(prefix)
    for library in prefix.glob(_LIBRARY):
        yield distrust_of_searched(library)
    for folder in (each for place in _PACKAGES * packages for each in prefix.glob(place)):
        yield distrust_of_searched(folder)
        yield from map(_of_package, sorted(folder.iterdir()))
        if deep:
            yield from _inside(folder)


def _inside(folder: Path) -> Iterator[str]:
    """Judge each file and folder in a folder, at any depth."""
    with os.scandir(folder) as entries:
        for entry in entries:
            # The mode of a link means nothing; its target is judged in its own place.
            if not entry.is_symlink():
                yield _of_folder(distrust_of_entry(Path(entry.path), entry.stat(follow_symlinks=False)))
                if entry.is_dir():
                    yield from _inside(Path(entry.path))


def _of_folder(why: str) -> str:
    # If one package has such a mode, the others usually have it too.
    return why.replace("`chmod go-w` it", "`chmod -R go-w` the folder that it is in")


def _of_package(entry: Path) -> str:
    """Judge what lies in a folder of packages by itself; of a file of paths, also the folders that it adds."""
    why = _of_folder(distrust_of_entry(entry, entry.lstat()))
    if why or entry.suffix != ".pth" or not entry.is_file():
        return why
    lines = entry.read_text(errors="replace").splitlines()
    # As Python reads them: the others are code, of any length, or comments.
    added = (entry.parent / line.rstrip() for line in lines if not line.startswith(("import ", "import\t", "#")))
    return next(filter(None, (distrust_of_searched(folder) for folder in added if folder.is_dir())), "")
