"""Stores the results of `make test-gpu` by GPU model and commit, and writes them to a table in docs/performance.md.

    PYTHONPATH=tests python tests/benchmarks/gpu_days.py [--write]

The script prints the table, which contains the latest entry for each GPU model. With `--write`, it replaces the table
in the page instead.
"""

from __future__ import annotations

import argparse
import json
import subprocess
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
FILE, PAGE = Path(__file__).with_name("gpu_days.json"), ROOT / "docs" / "performance.md"
BEGIN, END = "<!-- gpu_days.py begins -->", "<!-- gpu_days.py ends -->"
NOTHING = "No GPU has been measured by this command yet."
SHAPES = {"A": "d_in 2304, 65,536 latents", "B": "d_in 768, 24,576 latents", "C": "d_in 64, 512 latents"}
KEPT_OF_STEP = ("recorded", "plain", "first_step_s", "reserved_bytes", "of_floor", "modelled")
NUMBER_OF_ENTRY = ("gpu", "commit")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="replace the table in the page")
    options = parser.parse_args()
    entries = read(FILE)
    if options.write:
        PAGE.write_text(page_with(PAGE.read_text(), entries))
    else:
        print(table(entries))


def read(file: Path) -> list[dict[str, Any]]:
    return list(json.loads(file.read_text())) if file.exists() else []


def record(file: Path, entry: dict[str, Any]) -> None:
    """Add an entry, replacing any entry for the same GPU model and commit."""
    others = [one for one in read(file) if any(one[key] != entry[key] for key in NUMBER_OF_ENTRY)]
    file.write_text(json.dumps([*others, entry], indent=1) + "\n")


def entry_of(report: Mapping[str, Any], commit: str | None = None) -> dict[str, Any]:
    """Return the entry for a report: the GPU, versions, the state of each part, and results for steps and modes."""
    answers = {name: ran["answer"] for name, ran in report.items() if ran["state"] == "ok"}
    driver = answers.get("driver") or {}
    states = driver.get("state") or []
    names = [state["name"] for state in states if "name" in state] or [gpu["name"] for gpu in driver.get("cards", [])]
    steps = [one for name, answer in answers.items() if "steps " in name for one in answer]
    return {
        "gpu": names[0] if names else "CPU",
        "commit": commit or commit_here(),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "gpus": len(driver.get("cuda") or {}),
        **{key: driver.get(key) for key in ("torch", "cuda", "triton", "nccl")},
        "driver": states[0] if states else None,
        "parts": {name: {"state": ran["state"], "seconds": round(ran["seconds"], 1)} for name, ran in report.items()},
        "steps": {one["case"]: {key: one[key] for key in KEPT_OF_STEP if key in one} for one in steps},
        "modes": {name.split()[-1]: answer["step_ms"] for name, answer in answers.items() if name.startswith("bench ")},
        "found": {
            name: answers[name] for name in ("nccl", "failures", "ranks' memory", "ranks' killed") if name in answers
        },
    }


def commit_here() -> str:
    """Return the commit of the source tree, or "unknown" if git cannot determine it."""
    try:
        argv = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=8", "--exclude=*"]
        return subprocess.run(argv, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def table(entries: Sequence[Mapping[str, Any]]) -> str:
    """Return the latest entry for each GPU model as a Markdown table."""
    newest = {entry["gpu"]: entry for entry in entries}
    if not newest:
        return NOTHING
    lines = [
        "| GPU | step | with a graph, ms | eager, ms | of the floor | modelled, ms | first step, s | memory, GiB |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for entry in newest.values():
        lines += [row(entry["gpu"], case, figures) for case, figures in entry["steps"].items()]
    return "\n".join([*lines, "", *(f"- {sentence(entry)}" for entry in newest.values())])


def row(gpu: str, case: str, figures: Mapping[str, float]) -> str:
    shape, _, kind = case.partition(":")
    cells = (
        cell(figures, "recorded", ".2f"), cell(figures, "plain", ".2f"), cell(figures, "of_floor", ".0%"),
        cell(figures, "modelled", ".2f"), cell(figures, "first_step_s", ".1f"),
        cell(figures, "reserved_bytes", ".1f", 2**30),
    )  # fmt: skip
    words = f"{kind.replace(':dead', ' with AuxK')}, {SHAPES.get(shape, shape)}"
    return f"| {gpu} | {words} | {' | '.join(cells)} |"


def cell(figures: Mapping[str, float], key: str, form: str, unit: float = 1) -> str:
    return format(figures[key] / unit, form) if key in figures else ""


def sentence(entry: Mapping[str, Any]) -> str:
    """Return a sentence about an entry: its versions, the number of parts in each state, and each mode's step time."""
    states = [part["state"] for part in entry["parts"].values()]
    counts = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
    versions = ", ".join(f"{name} {entry[name]}" for name in ("torch", "cuda", "triton", "nccl") if entry.get(name))
    modes = "".join(f"; {mode} on {entry['gpus']}: {ms:.2f} ms" for mode, ms in entry["modes"].items())
    return f"{entry['gpu']}, commit {entry['commit']}, {entry['date']}, {versions}: parts {counts}{modes}"


def page_with(page: str, entries: Sequence[Mapping[str, Any]]) -> str:
    """Return the page with the table for `entries` between its markers."""
    before, _, rest = page.partition(BEGIN)
    _, mark, after = rest.partition(END)
    if not mark:
        raise ValueError(f"{PAGE.name} has no {BEGIN} … {END}")
    return f"{before}{BEGIN}\n{table(entries)}\n{END}{after}"


if __name__ == "__main__":
    main()
