"""All that only a GPU can tell of this project, in one run of at most eight minutes on one card.

    python tests/benchmarks/gpu_day.py [--out gpu_day.json] [--gpus auto|0|cpu] [--only NAME ...]

`make test-gpu` runs it. Its parts are the program's own commands, each in a process of its own with a limit, so that
one that hangs or crashes leaves the others: the whole self-test; a step's time by phases and its share of the floor,
beside what is modelled; what the driver says; a detached job from launch to export; with several cards the bus and
each parallel mode; and SAELens and sparsify on the same card where they are installed. A line tells of each part as it
ends; the answers are in the JSON file. It ends with 1 if any part failed or a check was wrong. With `--gpus cpu` the
same runs on the CPU, where only whether it works is of interest.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from support.fake_gpu import job_of
from support.roofline import modelled
from support.step_ops import recorded_step

from trainer.contract.planning.gpu_vendors import is_slice

HERE = Path(__file__).parent
TRAINER, APP = [sys.executable, "-m", "trainer"], [sys.executable, "-m", "sae_tui"]
# As in gpu_step.py, and something for a CPU.
SHAPES = {"A": (2304, 65536, 64, 4096), "B": (768, 24576, 32, 4096)}
TINY = {"C": (64, 512, 8, 256)}
ARCHITECTURES = ("topk", "batch_topk", "jumprelu")
# With what beside its name each parallel mode is asked for, and how many cards it takes at least.
MODES = {"ddp": ([], 2), "tensor": ([], 2), "hybrid": (["--set", "parallel.latent_ranks=2"], 4)}
# Of all parts of one card, and of those that only several cards have: what is not done by then is wrong.
LIMIT_S = {False: 480.0, True: 300.0}


class Part(NamedTuple):
    """A command of the program, with the seconds it may take; its answer is its last line of output, or a file."""

    name: str
    argv: list[str]
    limit_s: float
    file: Path | None = None
    of_several: bool = False


class Ran(NamedTuple):
    """How a part ended, and its answer, read as JSON where it is."""

    ok: bool
    seconds: float
    answer: Any
    stderr: str


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("gpu_day.json"))
    parser.add_argument("--gpus", default="auto:1", help="one card, or cpu; default the first")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="parts whose names begin so")
    options = parser.parse_args()
    report: dict[str, Any] = {}
    left_s = dict(LIMIT_S)
    with tempfile.TemporaryDirectory(prefix="gpu-day-") as folder:
        for part in parts(options.gpus, Path(folder)):
            if options.only and not part.name.startswith(tuple(options.only)):
                continue
            ran = run(part._replace(limit_s=min(part.limit_s, max(0.0, left_s[part.of_several]))))
            left_s[part.of_several] -= ran.seconds
            report[part.name] = ran._asdict()
            print(
                f"{'ok   ' if ran.ok else 'WRONG'} {part.name:28} {ran.seconds:6.1f} s  {summary(part, ran)}",
                flush=True,
            )
    options.out.write_text(json.dumps(report, indent=1) + "\n")
    wrong = [name for name, ran in report.items() if not ran["ok"]]
    print(f"{len(report) - len(wrong)} of {len(report)} parts are right; all answers are in {options.out}")
    return 1 if wrong else 0


def parts(gpus: str, folder: Path) -> Iterator[Part]:
    """Yield the parts for this card, or the CPU."""
    on_cpu = gpus == "cpu"
    yield Part("self-test", [*TRAINER, "self-test", "--gpus", gpus, *([] if on_cpu else ["--full"]), "--json"], 300)
    for shape, sizes in (TINY if on_cpu else SHAPES).items():
        for architecture in ARCHITECTURES:
            yield Part(f"step {shape} {architecture}", [*TRAINER, *bench(architecture, sizes, gpus)], 60)
    n_cards = 0 if on_cpu else count_cards()
    if n_cards > 1:
        yield Part("bus", [*TRAINER, "probe", "--json"], 60, of_several=True)
        for mode, (settings, least) in MODES.items():
            if n_cards >= least and (not settings or n_cards % 2 == 0):
                argv = [*bench("topk", SHAPES["B"], f"auto:{n_cards}"), "--set", f"parallel.mode={mode}", *settings]
                yield Part(f"step B topk {mode}", [*TRAINER, *argv], 90, of_several=True)
    yield Part("driver", [*APP, "gpus", "--json"], 30)
    data = ["--data-dir", str(folder / "data")]
    name = "cpu" if on_cpu else gpus
    job = sample_job(folder, 10 if on_cpu else 400)
    yield Part("job", [*APP, *data, "launch", str(job), "--gpus", name, "--wait", "--json"], 90)
    others = folder / "peers.json"
    yield Part(
        "peers", [sys.executable, str(HERE / "train_step.py"), *peers(on_cpu), "--json", str(others)], 120, others
    )


def bench(architecture: str, sizes: tuple[int, int, int, int], gpus: str) -> list[str]:
    d_in, d_sae, k, batch = sizes
    settings = {
        "data.source": "synthetic", "data.d_in": d_in, "sae.architecture": architecture, "sae.d_sae": d_sae, "sae.k": k,
        "train.batch_size": batch, "launch.gpus": gpus,
    }  # fmt: skip
    sets = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    return ["bench", *sets, "--json"]


def count_cards() -> int:
    """Count the whole cards that can be used; slices of a card are never connected."""
    listed = subprocess.run([*APP, "gpus", "--json"], capture_output=True, text=True, timeout=30)
    cards = json.loads(listed.stdout) if listed.returncode == 0 else []
    return sum(card["healthy"] and not is_slice(card["uuid"]) for card in cards)


def sample_job(folder: Path, n_steps: int) -> Path:
    """Write a job on the sample that comes with the program."""
    sample = Path(__file__).parents[2] / "data" / "sample"
    job = folder / "job.toml"
    job.write_text(
        f'name = "gpu day"\n[data]\npath = "{sample}"\n[sae]\nd_sae = 3072\nk = 32\n[train]\nn_steps = {n_steps}\n'
    )
    return job


def peers(on_cpu: bool) -> list[str]:
    if on_cpu:
        sizes = ["--d-in", "64", "--d-sae", "512", "--batch", "256", "--steps", "11"]
    else:
        sizes = ["--d-in", "768", "--d-sae", "24576", "--batch", "4096", "--steps", "44", "--device", "cuda"]
        sizes += ["--precision", "bf16"]
    names = ["ours topk", "plain sparse loop", "sparsify topk Signum", "SaeLens topk"]
    return [*sizes, "--peers", *names]


def run(part: Part) -> Ran:
    """Run a part and read the JSON in its last line."""
    began = time.monotonic()
    try:
        done = subprocess.run(part.argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=part.limit_s)
    except subprocess.TimeoutExpired:
        return Ran(False, time.monotonic() - began, None, f"no end within {part.limit_s:.0f} s")
    text = part.file.read_text() if part.file and part.file.exists() else done.stdout
    return Ran(done.returncode == 0, time.monotonic() - began, answer_in(text), done.stderr[-2000:])


def answer_in(text: str) -> Any:
    """Return the JSON that a text is, or its last line; else the end of the text."""
    for part in (text, text.strip().rpartition("\n")[2]):
        with contextlib.suppress(ValueError):
            return json.loads(part)
    return text[-4000:]


def summary(part: Part, ran: Ran) -> str:
    """Return the figures of a part that one looks for first."""
    if not ran.ok:
        return (ran.stderr.strip().splitlines() or [str(ran.answer)[-100:]])[-1]
    if part.name == "self-test":
        return f"{ran.answer['checks']} checks on {ran.answer['device']}"
    if part.name.startswith("step"):
        return step_words(part.name, ran.answer)
    if part.name == "peers":
        rates = {name: found["tokens_per_s"] for name, found in ran.answer["recipes"].items()}
        return ", ".join(
            f"{rates['ours topk'] / rate:.2f} x {name}" for name, rate in rates.items() if "ours" not in name
        )
    return f"{len(ran.answer)} cards" if part.name == "driver" else ""


def step_words(name: str, answer: dict[str, Any]) -> str:
    """Return a step's milliseconds beside those that are modelled for an H200."""
    ms = answer["step_ms"]
    _, shape, architecture, *_ = name.split()
    if shape not in SHAPES:
        return f"{ms:.2f} ms"
    d_in, d_sae, k, batch = SHAPES[shape]
    job = job_of({"architecture": architecture, "d_sae": d_sae, "k": k}, {"precision": "bf16", "batch_size": batch})
    return f"{ms:.2f} ms; modelled {1e3 * modelled(recorded_step(job, d_in)).step_s:.2f}"


if __name__ == "__main__":
    sys.exit(main())
