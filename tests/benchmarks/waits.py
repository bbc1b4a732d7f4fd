"""Measures how long users wait for a job's first step, in wall time and in CPU time.

python tests/benchmarks/waits.py [--times 5] [--only launch,array,resume,eval,extract]

- launch: from `sae-tui launch` to the end of the first step of a small job on the CPU.
- array: from the end of a job to the first step of the next job in its array.
- resume: from `sae-tui resume` to the end of the first step.
- eval: `sae-train eval` of that job's SAE.
- extract: from `sae-train extract` to the first rows of a 98 MB GGUF model (needs `make model`).

The limit is how long `import torch` takes in a new process, measured in the same run.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2]))

from support.real_model import FILE, why_not, write_text

from trainer.contract.paths import DataDir

ROOT = Path(__file__).parents[2]
JOB = """
name = "wait"
[data]
source = "synthetic"
d_in = 384
[sae]
d_sae = 1536
k = 32
[train]
batch_size = "auto"
n_steps = {steps}
log_every = 1
[launch]
gpus = "cpu"
"""
EXTRACTION = """
kind = "extract"
[model]
path = "{model}"
hooks = ["blocks.8.hook_resid_post"]
[text]
path = "{text}"
[extract]
output = "{out}"
n_tokens = 1000
"""
LIMIT_S = 300


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument("--only", default=",".join(WAITS), help="default: %(default)s")
    options = parser.parse_args()
    print(f"load {os.getloadavg()[0]:.1f}; import torch takes {once(import_torch)[0]:.2f} s")
    for name in options.only.split(","):
        if name == "extract" and why_not():
            print(f"extract: {why_not()}")
            continue
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            found = [WAITS[name](Box(Path(folder) / str(number))) for number in range(options.times)]
        walls, cpus = zip(*found, strict=True)
        print(f"{name:8} wall {statistics.median(walls):6.2f} s   cpu {statistics.median(cpus):6.2f} s", flush=True)


class Box:
    """A data folder and the commands that use it."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.folder, self.data = folder, DataDir(folder / "data")
        self.env = os.environ | {"SAE_TUI_DATA_DIR": str(folder / "data"), "PYTHONPATH": str(ROOT)}

    def run(self, *words: str, module: str = "sae_tui") -> str:
        argv = [sys.executable, "-P", "-m", module, *words]
        done = subprocess.run(argv, env=self.env, cwd=self.folder, capture_output=True, text=True, check=True)
        return done.stdout

    def launch(self, steps: int, *words: str) -> int:
        file = self.folder / "job.toml"
        file.write_text(JOB.format(steps=steps))
        rows = json.loads(self.run("launch", str(file), "--json", *words))
        return rows[0]["id"] if isinstance(rows, list) else rows["id"]

    def wait(self, job_id: int, text: str, after: int = 0) -> None:
        """Wait until a job's log contains a text."""
        log, deadline = self.data.run(job_id).log(0), time.monotonic() + LIMIT_S
        while not (log.exists() and text in log.read_text()[after:]):
            if time.monotonic() > deadline:
                raise TimeoutError(f"{log} does not contain {text!r}")
            time.sleep(0.005)

    def stop(self, job_id: int) -> None:
        self.run("stop", str(job_id))
        while json.loads(self.run("job", str(job_id), "--json"))["state"] != "stopped":
            time.sleep(0.05)

    def cpu_of(self, job_id: int) -> float:
        """Return the CPU time of a job's processes."""
        mark = str(self.data.run(job_id).root).encode()
        found = [one for one in Path("/proc").iterdir() if one.name.isdigit() and mark in read(one / "cmdline")]
        ticks = [read(one / "stat").rpartition(b")")[2].split()[11:13] for one in found]
        return sum(int(one) for pair in ticks for one in pair) / os.sysconf("SC_CLK_TCK")


def read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError:
        return b""


def launch(box: Box) -> tuple[float, float]:
    began = time.monotonic()
    job_id = box.launch(100_000)
    box.wait(job_id, "step 1/")
    found = time.monotonic() - began, box.cpu_of(job_id)
    box.stop(job_id)
    return found


def array(box: Box) -> tuple[float, float]:
    first = box.launch(30, "--grid", "train.seed=0,1", "--at-once", "1")
    box.wait(first, "finished at step")
    began = time.monotonic()
    box.wait(first + 1, "step 1/")
    found = time.monotonic() - began, box.cpu_of(first + 1)
    box.wait(first + 1, "finished at step")
    return found


def resume(box: Box) -> tuple[float, float]:
    job_id = box.launch(100_000)
    box.wait(job_id, "step 1/")
    box.stop(job_id)
    known, began = len(box.data.run(job_id).log(0).read_text()), time.monotonic()
    box.run("resume", str(job_id))
    box.wait(job_id, "\n" if known == 0 else "resumed from", known)
    after = box.data.run(job_id).log(0).read_text().rindex("resumed from")
    box.wait(job_id, "step ", box.data.run(job_id).log(0).read_text().index("\n", after))
    found = time.monotonic() - began, box.cpu_of(job_id)
    box.stop(job_id)
    return found


def evaluation(box: Box) -> tuple[float, float]:
    job_id = box.launch(30)
    box.wait(job_id, "finished at step")
    folder = str(box.data.run(job_id).root)
    return once(lambda: box.run("eval", folder, module="trainer"))


def extract(box: Box) -> tuple[float, float]:
    write_text(text := box.folder / "text.jsonl")
    job = box.folder / "extract.toml"
    job.write_text(EXTRACTION.format(model=FILE, text=text, out=box.folder / "rows"))
    return once(lambda: box.run("extract", str(job), module="trainer"))


def import_torch() -> None:
    subprocess.run([sys.executable, "-c", "import torch"], check=True)


def once(act: Callable[[], object]) -> tuple[float, float]:
    """Return the wall time and the CPU time of an action that waits for its child processes."""
    began, before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
    act()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return time.monotonic() - began, spent


WAITS = {"launch": launch, "array": array, "resume": resume, "eval": evaluation, "extract": extract}


if __name__ == "__main__":
    main()
