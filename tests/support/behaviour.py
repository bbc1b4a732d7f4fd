"""Records outputs that must stay bit-identical during refactoring: weights, exported files and JSON output.

PYTHONPATH=tests python -m support.behaviour before.json
PYTHONPATH=tests python -m support.behaviour after.json --like before.json      exits with 1 if they differ
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import itertools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from support.tui import NOW, record_job, record_metrics

from trainer.contract.paths import DataDir
from trainer.contract.settings.catalog import ARCHITECTURES, OPTIMIZERS
from trainer.contract.store.states import JobState

ROOT = Path(__file__).parents[2]
MODES = {"single": 1, "ddp": 2, "tensor": 2}
JOB = f"""
name = "behaviour"
[data]
path = "{ROOT}/data/sample"
[sae]
d_sae = 768
[train]
batch_size = 256
n_steps = 30
log_every = 10
deterministic = true
[parallel]
shares = "even"
"""
CAPTURED: dict[str, Any] = {"capture_output": True, "text": True}
ANSWERS = [
    *(["jobs"], ["jobs", "--sort", "fvu"], ["jobs", "state:failed"], ["job", "1"], ["job", "2"], ["compare", "1", "2"]),
    *(
        ["validate", "job.toml", "--gpus", "cpu"],
        ["validate", "job.toml", "--set", "sae.k=0"],
        ["clone", "1", "--print"],
    ),
    ["recommend", "job.toml"],
]
# The output of these commands changes over time, so only its keys and types are compared.
LIVE = [["gpus"], ["metrics"], ["doctor"]]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("written", type=Path, metavar="FILE")
    parser.add_argument("--like", type=Path, metavar="FILE", help="compare with the results in this file")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        behaviour = dict(itertools.chain(answers(Path(folder)), weights(Path(folder))))
    arguments.written.write_text(json.dumps(behaviour, indent=1))
    before = json.loads(arguments.like.read_text()) if arguments.like else behaviour
    different = [name for name in before | behaviour if before.get(name) != behaviour.get(name)]
    for name in different:
        print(f"{name}: was {before.get(name)!r:.500}, is {behaviour.get(name)!r:.500}")
    print(f"{len(different)} of {len(behaviour)} results differ")
    return bool(different)


def weights(folder: Path) -> Iterator[tuple[str, Any]]:
    """Train each combination of architecture, mode and optimizer; yield the hashes of the exported files and the
    output.
    """
    (folder / "job.toml").write_text(JOB)
    for architecture, mode, optimizer in itertools.product(ARCHITECTURES, MODES, OPTIMIZERS):
        name = f"{architecture} {mode} {optimizer}"
        chosen = {"sae.architecture": architecture, "parallel.mode": mode, "train.optimizer": optimizer}
        chosen["launch.gpus"] = f"cpu:{MODES[mode]}"
        run = folder / name.replace(" ", "-")
        settings = [part for key, value in chosen.items() for part in ("--set", f"{key}={value}")]
        command = ["run", folder / "job.toml", *settings, "--out", run, "--json"]
        done = subprocess.run([sys.executable, "-m", "trainer", *map(str, command)], **CAPTURED, cwd=ROOT)
        if done.returncode:
            yield name, done.stderr.replace(str(folder), "")
            continue
        result = json.loads(done.stdout.splitlines()[-1])
        for varying in ("run_dir", "output_path", "tokens_per_s", "seconds"):
            result.pop(varying, None)
        files = sorted((run / "sae").iterdir())
        yield name, result | {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}
        print(name, file=sys.stderr)


def answers(folder: Path) -> Iterator[tuple[str, Any]]:
    """Yield the JSON output of commands on a fixed store. For the commands in `LIVE`, yield only keys and types."""
    data = DataDir(folder / "data" / "demo")
    data.create()
    (folder / "job.toml").write_text(JOB)
    finished = {"step": 400, "total_steps": 400, "loss": 21.5, "fvu": 0.142, "l0": 32.0, "tokens": 1_638_400}
    for name, state, fields in (
        ("minilm", JobState.FINISHED, finished | {"output_path": "saes/1", "tags": ("good",), "note": "see fig. 3"}),
        ("gpt2", JobState.FAILED, {"error": "rank 1 was killed (SIGKILL)", "gpu_ids": (0,), "gpu_uuids": ("a",)}),
        ("pythia", JobState.STOPPED, {"ended": NOW + 60, "fvu": 0.2}),
    ):
        record_metrics(data, record_job(data, name, state, **fields))
    for command in ANSWERS:
        one, two = (_answer(folder, *command) for _ in range(2))
        yield " ".join(command), _same(one, two)
    for command in LIVE:
        yield command[0], _form(_answer(folder, *command))


def _answer(folder: Path, *command: str) -> Any:
    environment = os.environ | {"SAE_TUI_DATA_DIR": str(folder / "data"), "TZ": "UTC"}
    argv = [sys.executable, "-m", "sae_tui", "--demo", *command, *([] if "--print" in command else ["--json"])]
    done = subprocess.run(argv, **CAPTURED, cwd=folder, env=environment)
    outcome = [done.returncode, done.stdout, done.stderr.replace(str(folder), "")]
    with contextlib.suppress(ValueError):
        outcome[1] = json.loads(done.stdout)
    return json.loads(json.dumps(outcome).replace(str(folder), ""))


def _form(answer: Any) -> Any:
    """Return the keys in JSON output and the types of their values."""
    if isinstance(answer, dict):
        return {key: _form(value) for key, value in answer.items()}
    if isinstance(answer, list):
        return [_form(value) for value in answer]
    return "number" if isinstance(answer, int | float) else type(answer).__name__


def _same(one: Any, two: Any) -> Any:
    if isinstance(one, dict) and isinstance(two, dict):
        return {key: _same(one.get(key), two.get(key)) for key in one | two}
    if isinstance(one, list) and isinstance(two, list) and len(one) == len(two):
        return [_same(*pair) for pair in zip(one, two, strict=True)]
    return one if one == two else "differs from call to call"


if __name__ == "__main__":
    sys.exit(main())
