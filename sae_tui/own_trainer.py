"""Checks that `import trainer` finds this project's package, before any module imports it. Also starts `sae-train`."""

from __future__ import annotations

import os
import sys
from importlib import import_module
from importlib.util import find_spec

_MARK = b'PART_OF = "sae-tui"'


def sae_train() -> int:
    """Run the trainer's command line, after checking that `trainer` is this project's package."""
    refuse_another("sae-train")
    # Import the module by name, because the app must not import any part of the trainer except `trainer.contract`.
    code: int = import_module("trainer.cli").main()
    return code


def refuse_another(program: str = "sae-tui") -> None:
    """Exit with a message if another package or file named trainer would be imported instead."""
    fault = fault_of_trainer()
    if fault and "--json" in sys.argv:
        import json

        message, _, fix = fault.partition("; ")
        sys.stdout.write(json.dumps({"error": {"field": None, "message": message, "fix": fix}}) + "\n")
        sys.exit(1)
    if fault:
        sys.exit(f"{program}: error: {fault}")


def fault_of_trainer() -> str:
    """Return why `import trainer` would not find this project's package, on one printable line; "" if it would."""
    return "".join(char if char.isprintable() else "\ufffd" for char in _fault())


def _fault() -> str:
    """Return why `import trainer` would not find this project's package, or "" if it would.

    The name `trainer` is common: users may have their own trainer.py, and if PyPI's `trainer` package is also
    installed, its files replace ours. The check does not run any code from the other package.
    """
    spec = find_spec("trainer")
    if spec is None or spec.origin is None:
        return "the trainer package of sae-tui is not installed; run pip install --force-reinstall sae-tui"
    if not os.path.exists(os.path.join(os.path.dirname(spec.origin), "contract", "exits.py")):
        return (
            f"`import trainer` finds {spec.origin}, which is not sae-tui's trainer; rename it, "
            "or remove its folder from PYTHONPATH"
        )
    with open(spec.origin, "rb") as file:
        if _MARK in file.read(4096):
            return ""
    return (
        f"{spec.origin} belongs to another package called trainer, which has replaced files of sae-tui; run "
        "pip uninstall trainer, then pip install --force-reinstall sae-tui, or install each in a separate environment"
    )
