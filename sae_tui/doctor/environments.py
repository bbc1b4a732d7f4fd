"""Reports on the app's Python environment and, if training uses another one, on that environment too."""

from __future__ import annotations

import platform
import sys
from collections.abc import Iterator
from importlib.metadata import Distribution, distributions, version
from pathlib import Path
from typing import Any

from sae_tui.doctor.base import CheckedMachine, Finding
from sae_tui.jobs.environment import PACKAGE, look
from trainer.contract import exits
from trainer.contract.paths import working_folder
from trainer.contract.printable import printable
from trainer.contract.wording import join_words


def check_environments(box: CheckedMachine) -> Iterator[Finding]:
    """Report which Python runs the app, and what a separate Python for training has or lacks."""
    trains = "" if box.python else ", which also trains"
    yield Finding("ok", "app", f"Python {platform.python_version()}, {PACKAGE} {version(PACKAGE)}{trains}")
    if not box.python:
        return
    if lack := lack_of(box):
        sentence, _, remedy = lack.partition("; ")
        yield Finding("error", "trainer", sentence, remedy or "set another Python in the settings")
    else:
        yield Finding("ok", "trainer", f"{look(box.python).words}: {printable(box.python_path)}")


def check_trainer_code(_box: CheckedMachine) -> Iterator[Finding]:
    """Report what `import trainer` finds, which packages own its files, and which code `python -m trainer` runs."""
    folder = Path(exits.__file__).parents[1]
    others = sorted(_owners_of("trainer") - {PACKAGE})
    if others:
        whose = f"{folder} also contains files from {join_words(others)}, which may have replaced files of {PACKAGE}"
        yield Finding(
            "warning", "trainer", whose,
            f"install each in a separate environment, then run pip install --force-reinstall {PACKAGE}",
        )  # fmt: skip
    else:
        yield Finding("ok", "trainer", f"`import trainer` finds {printable(str(folder))}, which belongs to {PACKAGE}")
    for name in ("trainer.py", "trainer/__init__.py"):
        here = working_folder() / name
        if here.is_file() and here.parent != folder:
            yield Finding(
                "note", "trainer", f"in this folder `python -m trainer` runs {printable(str(here))}",
                "use `sae-train`, which works in any folder; jobs are not affected",
            )  # fmt: skip


def _owners_of(name: str) -> set[str]:
    """Return the installed distributions with a package of this name.

    `packages_distributions` is not used, because it creates an object for each file in each distribution: 7 MiB if
    torch is installed.
    """
    return {one.metadata["Name"] for one in distributions() if _has_package(one, name)}


def _has_package(one: Distribution, name: str) -> bool:
    """Return whether a distribution lists this package or, if it lists none, has files in its folder."""
    if listed := (one.read_text("top_level.txt") or "").split():
        return name in listed
    return f"\n{name}/" in "\n" + (one.read_text("RECORD") or "")


def lack_of(box: CheckedMachine) -> str:
    """Return why the training environment cannot train, or "" if it can or if it is the app's environment."""
    return look(box.python).lack() if box.python else ""


def both(box: CheckedMachine) -> dict[str, dict[str, Any] | None]:
    """Return facts about the two environments; "trainer" is None if training uses the app's environment."""
    app = {"python": sys.executable, "version": platform.python_version(), "sae_tui": version(PACKAGE)}
    if not box.python:
        return {"app": app, "trainer": None}
    there = look(box.python)
    answer = there.answer
    torch = answer.torch if answer else None
    trainer = {
        "python": box.python_path,
        "version": ".".join(map(str, answer.version)) if answer else None,
        "sae_tui": answer.trainer if answer else None,
        "torch": torch.version if torch else None,
        "gpus": torch.gpus if torch else None,
        "problem": there.lack() or None,
    }
    return {"app": app, "trainer": trainer}
