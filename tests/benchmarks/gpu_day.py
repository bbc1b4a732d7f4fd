"""All that only a GPU can tell of this project, in one run of at most eight minutes on one card.

    python tests/benchmarks/gpu_day.py [--out gpu_day.json] [--gpus auto:1|0|cpu] [--only NAME ...]

`make test-gpu` runs it. Each of its parts is a process of its own with a limit, so that one that hangs or crashes
leaves the others: the whole self-test; all cases of Triton's kernels, compiled; a step of every kind of SAE, with its
share of the floor, beside what is modelled; what the driver says, beside CUDA and nvidia-smi; a detached job from
launch to export; SAELens and sparsify on the same card where they are installed; and with several cards the bus, each
parallel mode, and whether it learns what one card learns. A line tells of each part as it ends; the answers are in the
JSON file. It ends with 1 if any part failed or a check was wrong. With `--gpus cpu` the same runs on the CPU, kernels
in Triton's interpreter and those of one file alone, where only whether it works is of interest.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from trainer.contract.errors import UsageError, UserError
from trainer.contract.planning.gpu_vendors import VENDORS, is_slice
from trainer.ranks.device_choice import parse_target
from trainer.ranks.devices import torch_vendor, visible_gpus

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
TRAINER, APP = [sys.executable, "-m", "trainer"], [sys.executable, "-m", "sae_tui"]
# As in gpu_profile.py, and something for a CPU; with what is timed of each.
SHAPES = {"A": (2304, 65536, 64, 4096), "B": (768, 24576, 32, 4096)}
TINY = {"C": (64, 512, 8, 256)}
KINDS = (
    "topk", "topk:dead", "batch_topk", "batch_topk:dead", "matryoshka_batch_topk", "matryoshka_batch_topk:dead",
    "jumprelu", "gated", "standard",
)  # fmt: skip
KINDS_OF_CPU = ("topk:dead", "jumprelu")
# Of cases, those for a driver that is none, those that take a CPU for a GPU, and those on more memory than there is; on
# a CPU only few, for it is slow.
NOT_FOR_GPUS = ("fake_cuda/kernel_cases.py", "training/recorded_cases.py", "trainer/long_offset_cases.py")
CASES_OF_CPU = "metrics/interval_cases.py"
# Compiling takes 0.3 to 1 s a kernel, and there are 600; each process takes half a GB of the GPU.
MOST_PROCESSES = 8
# With what beside its name each parallel mode is asked for, and how many cards it takes at least.
MODES = {"ddp": ([], 2), "tensor": ([], 2), "hybrid": (["--set", "parallel.latent_ranks=2"], 4)}
# Of all parts of one card, and of those that see all cards: what is not done by then is wrong.
LIMIT_S = {False: 480.0, True: 300.0}


class Part(NamedTuple):
    """A command, with the seconds it may take; its answer is its last line of output, or a file.

    It sees one card, unless it `sees_all`, and has these variables.
    """

    name: str
    argv: list[str]
    limit_s: float
    file: Path | None = None
    sees_all: bool = False
    variables: Mapping[str, str] = {}


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
    try:
        one_card = pinned_to(options.gpus)
    except UserError as error:
        parser.error(str(error))
    report: dict[str, Any] = {}
    left_s = dict(LIMIT_S)
    with tempfile.TemporaryDirectory(prefix="gpu-day-") as folder:
        for part in parts(options.gpus, Path(folder)):
            if options.only and not part.name.startswith(tuple(options.only)):
                continue
            part = part._replace(
                limit_s=min(part.limit_s, max(0.0, left_s[part.sees_all])),
                variables={} if part.sees_all else {**one_card, **part.variables},
            )
            ran = run(part)
            left_s[part.sees_all] -= ran.seconds
            report[part.name] = ran._asdict()
            print(
                f"{'ok   ' if ran.ok else 'WRONG'} {part.name:22} {ran.seconds:6.1f} s  {summary(part, ran)}",
                flush=True,
            )
    options.out.write_text(json.dumps(report, indent=1) + "\n")
    wrong = [name for name, ran in report.items() if not ran["ok"]]
    print(f"{len(report) - len(wrong)} of {len(report)} parts are right; all answers are in {options.out}")
    return 1 if wrong else 0


def pinned_to(gpus: str) -> dict[str, str]:
    """Return the variables that leave the one card that is asked for; none for a CPU."""
    n_ranks, uuids = parse_target(gpus)
    if n_ranks != 1 or (not uuids and gpus != "cpu"):
        raise UsageError("--gpus: name one GPU of this machine, or cpu")
    return VENDORS[torch_vendor()].pin(uuids) if uuids else {}


def parts(gpus: str, folder: Path) -> Iterator[Part]:
    """Yield the parts for this card, or the CPU."""
    on_cpu = gpus == "cpu"
    # The trainer sees no other.
    alone = "cpu" if on_cpu else "auto:1"
    yield Part("self-test", [*TRAINER, "self-test", "--gpus", alone, *([] if on_cpu else ["--full"]), "--json"], 300)
    yield kernels(on_cpu)
    for shape in TINY if on_cpu else SHAPES:
        yield steps(shape, folder, on_cpu)
    shape, sizes = next(iter(TINY.items())) if on_cpu else ("B", SHAPES["B"])
    yield Part(f"bench {shape} topk", [*TRAINER, *bench("topk", sizes, alone)], 60)
    yield Part("driver", script("gpu_driver.py"), 60, sees_all=True)
    data = ["--data-dir", str(folder / "data")]
    job = sample_job(folder, 10 if on_cpu else 400)
    yield Part("job", [*APP, *data, "launch", str(job), "--gpus", gpus, "--wait", "--json"], 90)
    others = folder / "peers.json"
    yield Part("peers", [*script("train_step.py"), *peers(on_cpu), "--json", str(others)], 120, others)
    if not on_cpu:
        yield from several_cards(sum(not is_slice(gpu.uuid) for gpu in visible_gpus()))


def several_cards(n_cards: int) -> Iterator[Part]:
    """Yield the parts for so many whole cards; slices of a card are never connected."""
    if n_cards < 2:
        return
    modes = {
        mode: settings
        for mode, (settings, least) in MODES.items()
        if n_cards >= least and (not settings or n_cards % 2 == 0)
    }
    yield Part("bus", [*TRAINER, "probe", "--json"], 60, sees_all=True)
    for mode, settings in modes.items():
        argv = [*bench("topk", SHAPES["B"], f"auto:{n_cards}"), "--set", f"parallel.mode={mode}", *settings]
        yield Part(f"bench B topk {mode}", [*TRAINER, *argv], 90, sees_all=True)
    yield Part("ranks", [*script("gpu_ranks.py"), f"auto:{n_cards}", "--modes", *modes, "dp"], 200, sees_all=True)


def script(name: str) -> list[str]:
    return [sys.executable, str(HERE / name)]


def kernels(on_cpu: bool) -> Part:
    """Return the part that runs the cases of Triton's kernels, several at a time."""
    every = [file for file in sorted(ROOT.glob("tests/**/*_cases.py")) if not str(file).endswith(NOT_FOR_GPUS)]
    files = [str(file) for file in every if not on_cpu or str(file).endswith(CASES_OF_CPU)]
    at_once = 0 if on_cpu else min(MOST_PROCESSES, os.cpu_count() or 1)
    plugins = ["-p", "no:cacheprovider", "-p", "support.programs"]
    argv = [sys.executable, "-m", "pytest", "-n", str(at_once), *plugins, "--tb", "short", *files]
    # It is by this variable that cases take a device.
    return Part("kernels", argv, 150, variables={"TRITON_INTERPRET": "1" if on_cpu else "0", "OMP_NUM_THREADS": "1"})


def steps(shape: str, folder: Path, on_cpu: bool) -> Part:
    """Return the part that times steps of all kinds, those with dead latents with AuxK."""
    file = folder / f"steps-{shape}.json"
    cases = [f"{shape}:{kind}" for kind in (KINDS_OF_CPU if on_cpu else KINDS)]
    argv = [*script("gpu_profile.py"), *cases, "--device", "cpu" if on_cpu else "cuda", "--json", str(file)]
    return Part(f"steps {shape}", argv, 100, file)


def bench(architecture: str, sizes: tuple[int, int, int, int], gpus: str) -> list[str]:
    d_in, d_sae, k, batch = sizes
    settings = {
        "data.source": "synthetic", "data.d_in": d_in, "sae.architecture": architecture, "sae.d_sae": d_sae, "sae.k": k,
        "train.batch_size": batch, "launch.gpus": gpus,
    }  # fmt: skip
    sets = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    return ["bench", *sets, "--json"]


def sample_job(folder: Path, n_steps: int) -> Path:
    """Write a job on the sample that comes with the program."""
    sample = ROOT / "data" / "sample"
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
    """Run a part and read the JSON in its file, or in its last line; end all its processes where it takes too long."""
    began, paths = time.monotonic(), os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    process = subprocess.Popen(
        part.argv, cwd=ROOT, env={**os.environ, "PYTHONPATH": paths, **part.variables}, text=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    try:
        stdout, stderr = process.communicate(timeout=part.limit_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        stdout, stderr = process.communicate()
        stderr += f"\nno end within {part.limit_s:.0f} s"
    text = part.file.read_text() if part.file and part.file.exists() else stdout
    return Ran(process.returncode == 0, time.monotonic() - began, answer_in(text), stderr[-2000:])


def answer_in(text: str) -> Any:
    """Return the JSON that a text is, or its last line; else the end of the text."""
    for part in (text, text.strip().rpartition("\n")[2]):
        with contextlib.suppress(ValueError):
            return json.loads(part)
    return text[-20_000:]


def summary(part: Part, ran: Ran) -> str:
    """Return the figures of a part that one looks for first."""
    if not ran.ok:
        return wrong_words(part, ran)
    kind = part.name.partition(" ")[0]
    return _WORDS[kind](ran.answer) if kind in _WORDS else ""


def wrong_words(part: Part, ran: Ran) -> str:
    """Tell what is wrong as far as a part itself tells it, else by the last line that it wrote."""
    if isinstance(ran.answer, dict) and (wrong := ran.answer.get("wrong")):
        return "; ".join(wrong)
    if isinstance(ran.answer, dict) and (failed := ran.answer.get("failed")):
        return "; ".join(f"{check['part']}: {check['name']}" for check in failed)
    text = str(ran.answer) if part.name == "kernels" and ran.answer else ran.stderr
    return (text.strip().splitlines() or [f"it wrote {str(ran.answer)[-100:]}"])[-1]


def case_words(answer: str) -> str:
    found = re.search(r"(\d+) passed", answer)
    return f"{found[1] if found else 0} cases right"


def step_words(answer: list[dict[str, Any]]) -> str:
    """Return a line for each kind of step: its milliseconds, and beside them those that are modelled for an H200."""
    lines = [
        f"{one['case']:28} {one.get('recorded', one['plain']):7.2f} ms, {one['of_floor']:4.0%} of the floor; "
        f"modelled {one['modelled']:.2f}"
        for one in answer
    ]
    return "\n      ".join([f"{len(lines)} kinds, recorded where that pays", *lines])


def peer_words(answer: dict[str, Any]) -> str:
    rates = {name: found["tokens_per_s"] for name, found in answer["recipes"].items()}
    return ", ".join(f"{rates['ours topk'] / rate:.2f} x {name}" for name, rate in rates.items() if "ours" not in name)


def rank_words(answer: dict[str, Any]) -> str:
    one = answer["fvu"]["one"]
    off = max(abs(fvu / one[kind] - 1) for of_kind in answer["fvu"].values() for kind, fvu in of_kind.items())
    n_waits = sum(sum(places.values()) for places in answer["waits"].values())
    return f"FVU {off:.0e} off that of one card; {n_waits} waits of a host in a step of {len(answer['waits'])} modes"


def driver_words(answer: dict[str, Any]) -> str:
    others = "CUDA and nvidia-smi have" if answer["nvidia_smi"] else "CUDA has"
    return f"{len(answer['cards'])} cards, as {others} them"


_WORDS: dict[str, Callable[[Any], str]] = {
    "self-test": lambda answer: f"{answer['checks']} checks on {answer['device']}",
    "kernels": case_words,
    "steps": step_words,
    "bench": lambda answer: f"{answer['step_ms']:.2f} ms, {answer['of_floor']:.0%} of the floor",
    "driver": driver_words,
    "peers": peer_words,
    "ranks": rank_words,
}


if __name__ == "__main__":
    sys.exit(main())
