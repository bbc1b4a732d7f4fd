"""Checks and measures everything that requires a GPU, in at most eight minutes on a single GPU.

    PYTHONPATH=tests python tests/benchmarks/gpu_day.py [--out gpu_day.json] [--gpus auto:1|0|cpu] [--only NAME ...]

`make test-gpu` runs this script. The most important parts run first, in the first three minutes: the driver, versions
and clocks; steps with a cold kernel cache; a stopped and resumed job with CUDA graphs; NCCL with one rank; two ranks on
one GPU; waits, resuming and memory. The other parts are injected failures, kernels, learning curves, other kinds of
SAE, a launched job and other trainers. With several GPUs, there are additional parts for the bus, every parallel mode,
NCCL's memory and a killed rank. Each part is a process with a time limit, so a part that hangs or crashes does not
affect the others. Parts that cannot run here, or that the remaining time is too short for, are reported as "not run".
The exit code is 1 if a part fails. `--record` adds the results to `gpu_days.json`, which `gpu_days.py` converts to the
table in docs/performance.md. With `--gpus cpu`, the same parts run on a CPU, which only serves to test this script.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import gpu_days

from trainer.contract.errors import UsageError, UserError
from trainer.contract.planning.gpu_vendors import VENDORS, is_slice
from trainer.contract.runs import cuda_variables
from trainer.ranks.device_choice import parse_target
from trainer.ranks.devices import torch_vendor, visible_gpus

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
TRAINER, APP = [sys.executable, "-m", "trainer"], [sys.executable, "-m", "sae_tui"]
# The d_in, d_sae, k and token count of each shape in gpu_profile.py, and of a small shape for CPUs.
SHAPES = {"A": (2304, 65536, 64, 4096), "B": (768, 24576, 32, 4096)}
TINY = {"C": (64, 512, 8, 256)}
# `FIRST` lists the kinds of SAE that are timed first for each shape, and `KINDS` lists all kinds. With `dead`, some
# latents are dead and AuxK is active.
FIRST = {"A": ("topk", "topk:dead", "batch_topk:dead"), "B": ("topk", "topk:dead"), "C": ("topk:dead",)}
KINDS = (
    "topk", "topk:dead", "batch_topk", "batch_topk:dead", "matryoshka_batch_topk", "matryoshka_batch_topk:dead",
    "jumprelu", "gated", "standard", "hierarchical_topk", "hierarchical_topk:dead",
)  # fmt: skip
KINDS_OF_CPU = ("jumprelu",)
# Files with kernel cases that need a fake driver, treat a CPU as a GPU, or need more memory than is available. A CPU is
# slow, so it runs only the cases in `CASES_OF_CPU`.
NOT_FOR_GPUS = (
    "fake_cuda/kernel_cases.py",
    "training/graph_replay_cases.py",
    "trainer/long_offset_cases.py",
    "runtime/compiling_cases.py",
    "runtime/kernel_count_cases.py",
    "runtime/new_kernel_cases.py",
)
CASES_OF_CPU = "metrics/interval_cases.py"
# The maximum number of processes for testing kernels. Compiling each of the 600 kernels takes 0.3 to 1 s, and each
# process uses half a GB of GPU memory.
MOST_PROCESSES = 8
# Each mode's settings, and the minimum number of GPUs that it needs.
MODES = {"ddp": ([], 2), "tensor": ([], 2), "hybrid": (["--set", "parallel.latent_ranks=2"], 4)}
# The total time limits in seconds for the parts on one GPU and for the parts on several GPUs, and the minimum time in
# seconds that must be left for a part to be started.
LIMIT_S, LEAST_S = {False: 480.0, True: 300.0}, 5.0
OK, WRONG, NOT_RUN = "ok", "WRONG", "not run"


class Part(NamedTuple):
    """A command with a time limit; its result is the last line of its output or, if given, the content of `file`.

    The command sees only one GPU, unless `sees_all` is set. `variables` are added to its environment.
    """

    name: str
    argv: list[str]
    limit_s: float
    file: Path | None = None
    sees_all: bool = False
    variables: Mapping[str, str] = {}


class Ran(NamedTuple):
    """The outcome of a part and its result (parsed if it is JSON); `why` explains why a part was not run."""

    state: str
    seconds: float = 0.0
    answer: Any = None
    stderr: str = ""
    why: str = ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("gpu_day.json"))
    parser.add_argument("--gpus", default="auto:1", help="one GPU, or cpu; default: the first GPU")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="run only parts whose names start with one of these")
    parser.add_argument(
        "--record", type=Path, nargs="?", const=gpu_days.FILE, help=f"add the results to {gpu_days.FILE.name}"
    )
    options = parser.parse_args()
    try:
        one_gpu = pinned_to(options.gpus)
    except UserError as error:
        parser.error(str(error))
    cuda_variables.set_here()
    with tempfile.TemporaryDirectory(prefix="gpu-day-") as folder:
        # Start with empty caches, as on a new machine, so that the first step takes as long as it would there.
        caches = {name: f"{folder}/{name}" for name in ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")}
        chosen = [
            part._replace(variables={**caches, **({} if part.sees_all else one_gpu), **part.variables})
            for part in parts(options.gpus, Path(folder))
            if not options.only or part.name.startswith(tuple(options.only))
        ]
        report = run_all(chosen, dict(LIMIT_S))
    options.out.write_text(json.dumps({name: ran._asdict() for name, ran in report.items()}, indent=1) + "\n")
    if options.record:
        gpu_days.record(options.record, gpu_days.entry_of({name: ran._asdict() for name, ran in report.items()}))
    counts = {state: sum(ran.state == state for ran in report.values()) for state in (OK, WRONG, NOT_RUN)}
    words = ", ".join(f"{count} {state}" for state, count in counts.items() if count)
    print(f"{words}; all results are in {options.out}")
    return 1 if counts[WRONG] else 0


def run_all(chosen: Sequence[Part], left_s: dict[bool, float]) -> dict[str, Ran]:
    """Run the parts within the time left for one GPU and for all GPUs, and print a line for each part."""
    report = {}
    for part in chosen:
        ran = run_within(part, left_s[part.sees_all])
        left_s[part.sees_all] -= ran.seconds
        report[part.name] = ran
        print(f"{ran.state:7} {part.name:22} {ran.seconds:6.1f} s  {summary(part, ran)}", flush=True)
    return report


def run_within(part: Part, left_s: float) -> Ran:
    """Run a part in the remaining time; the part fails only if it exceeds its own time limit."""
    if left_s < LEAST_S:
        return Ran(NOT_RUN, why="no time was left")
    ran = run(part._replace(limit_s=min(part.limit_s, left_s)))
    if ran.state == WRONG and left_s < part.limit_s and ran.seconds >= left_s:
        return ran._replace(state=NOT_RUN, why=f"the part did not finish in the {left_s:.0f} s that were left")
    return ran


def pinned_to(gpus: str) -> dict[str, str]:
    """Return the environment variables that expose only the requested GPU, or {} for a CPU."""
    n_ranks, uuids = parse_target(gpus)
    if n_ranks != 1 or (not uuids and gpus != "cpu"):
        raise UsageError("--gpus: name one GPU of this machine, or cpu")
    return VENDORS[torch_vendor()].pin(uuids) if uuids else {}


def parts(gpus: str, folder: Path) -> Iterator[Part]:
    """Yield the parts for a GPU or a CPU, the most important parts first."""
    on_cpu = gpus == "cpu"
    # These parts see only the requested GPU.
    alone, device = ("cpu", "cpu") if on_cpu else ("auto:1", "cuda")
    shapes = TINY if on_cpu else SHAPES
    yield Part("driver", script("gpu_driver.py"), 60, sees_all=True)
    for shape in sorted(shapes, reverse=True):
        yield steps(f"steps {shape}", [f"{shape}:{kind}" for kind in FIRST[shape]], folder, device)
    job_steps = ["--steps", "60"] if on_cpu else []
    yield Part("resumed job", [*script("gpu_job.py"), "--gpus", alone, *job_steps], 120)
    yield Part("nccl", [*script("gpu_nccl.py"), "--device", device], 60)
    yield Part("shared GPU", [*script("gpu_shared.py"), "--device", device], 90)
    yield Part("first checks", [*script("gpu_checks.py"), "first", "--gpus", alone], 90)
    yield Part("failures", [*script("gpu_failures.py"), "--device", device], 180)
    yield kernels(on_cpu)
    yield Part("products", [*script("gpu_checks.py"), "products", "--gpus", alone], 90)
    yield Part("curves", [*script("gpu_checks.py"), "curves", "--gpus", alone], 150)
    for shape in sorted(shapes, reverse=True):
        kinds = [kind for kind in (KINDS_OF_CPU if on_cpu else KINDS) if kind not in FIRST[shape]]
        yield steps(f"other steps {shape}", [f"{shape}:{kind}" for kind in kinds], folder, device)
    data = ["--data-dir", str(folder / "data")]
    job = sample_job(folder, 10 if on_cpu else 400)
    yield Part("launched job", [*APP, *data, "launch", str(job), "--gpus", gpus, "--wait", "--json"], 90)
    yield Part("rest of checks", [*script("gpu_checks.py"), "rest", "--gpus", alone], 150)
    others = folder / "peers.json"
    yield Part("peers", [*script("train_step.py"), *peers(on_cpu), "--json", str(others)], 120, others)
    if on_cpu:
        yield from several("cpu", 2)
    else:
        yield from several("auto", sum(not is_slice(gpu.uuid) for gpu in visible_gpus()))


def several(word: str, n_gpus: int) -> Iterator[Part]:
    """Yield the parts for several GPUs or CPU processes; MIG slices do not count, because NCCL cannot connect them."""
    if n_gpus < 2:
        return
    all_of_them = f"{word}:{n_gpus}"
    shape, sizes = next(iter((TINY if word == "cpu" else {"B": SHAPES["B"]}).items()))
    modes = {
        mode: settings
        for mode, (settings, least) in MODES.items()
        if n_gpus >= least and (not settings or n_gpus % 2 == 0)
    }
    gpus = [] if word == "auto" else ["--gpus", all_of_them]
    yield Part("bus", [*TRAINER, "probe", *gpus, "--json"], 60, sees_all=True)
    for mode, settings in modes.items():
        argv = [*bench("topk", sizes, all_of_them), "--set", f"parallel.mode={mode}", *settings]
        yield Part(f"bench {shape} topk {mode}", [*TRAINER, *argv], 90, sees_all=True)
    for what in ("memory", "profile", "killed"):
        yield Part(f"ranks' {what}", [*script("gpu_several.py"), all_of_them, what], 150, sees_all=True)
    # In `dp` mode, all ranks are threads in one process, so this mode needs several GPUs.
    threads = [] if word == "cpu" else ["dp"]
    yield Part("ranks", [*script("gpu_ranks.py"), all_of_them, "--modes", *modes, *threads], 200, sees_all=True)
    uneven = [*script("gpu_ranks.py"), f"{word}:{min(n_gpus, 3)}", "--modes", "ddp", "tensor", "--uneven"]
    yield Part("uneven ranks", uneven, 120, sees_all=True)


def script(name: str) -> list[str]:
    return [sys.executable, str(HERE / name)]


def kernels(on_cpu: bool) -> Part:
    """Return the part that runs the Triton kernel test cases, several at a time."""
    every = [file for file in sorted(ROOT.glob("tests/**/*_cases.py")) if not str(file).endswith(NOT_FOR_GPUS)]
    files = [str(file) for file in every if not on_cpu or str(file).endswith(CASES_OF_CPU)]
    at_once = 0 if on_cpu else min(MOST_PROCESSES, os.cpu_count() or 1)
    plugins = ["-p", "no:cacheprovider", "-p", "support.programs"]
    argv = [sys.executable, "-m", "pytest", "-n", str(at_once), *plugins, "--tb", "short", *files]
    # The cases select their device based on this variable.
    return Part("kernels", argv, 150, variables={"TRITON_INTERPRET": "1" if on_cpu else "0", "OMP_NUM_THREADS": "1"})


def steps(name: str, cases: list[str], folder: Path, device: str) -> Part:
    """Return the part that times steps for these cases."""
    file = folder / f"{name}.json"
    return Part(name, [*script("gpu_profile.py"), *cases, "--device", device, "--json", str(file)], 120, file)


def bench(architecture: str, sizes: tuple[int, int, int, int], gpus: str) -> list[str]:
    d_in, d_sae, k, batch = sizes
    settings = {
        "data.source": "synthetic", "data.d_in": d_in, "sae.architecture": architecture, "sae.d_sae": d_sae, "sae.k": k,
        "train.batch_size": batch, "launch.gpus": gpus,
    }  # fmt: skip
    sets = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    return ["bench", *sets, "--json"]


def sample_job(folder: Path, n_steps: int) -> Path:
    """Write a job that uses the sample data bundled with the program."""
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
    """Run a part, and read the JSON from its file or its last output line; kill its processes if it takes too long."""
    began, paths = time.monotonic(), os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    try:
        process = subprocess.Popen(
            part.argv, cwd=ROOT, env={**os.environ, "PYTHONPATH": paths, **part.variables}, text=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
        )  # fmt: skip
    except OSError as error:
        return Ran(NOT_RUN, why=f"it could not be started: {error}")
    try:
        stdout, stderr = process.communicate(timeout=part.limit_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        stdout, stderr = process.communicate()
        stderr += f"\ndid not finish within {part.limit_s:.0f} s"
    text = part.file.read_text() if part.file and part.file.exists() else stdout
    state = WRONG if process.returncode else OK
    return Ran(state, time.monotonic() - began, answer_in(text), stderr[-2000:])


def answer_in(text: str) -> Any:
    """Return the JSON in the text or its last line; otherwise, return the end of the text."""
    for part in (text, text.strip().rpartition("\n")[2]):
        with contextlib.suppress(ValueError):
            return json.loads(part)
    return text[-20_000:]


def summary(part: Part, ran: Ran) -> str:
    """Return a part's main results."""
    if ran.state == NOT_RUN:
        return ran.why
    if ran.state == WRONG:
        return wrong_words(part, ran)
    word = next((word for name, word in _WORDS.items() if name in part.name), None)
    try:
        return word(ran.answer) if word else ""
    except (KeyError, TypeError, IndexError, ValueError, AttributeError) as error:
        # A summary that fails, for example because a tool is missing, must not abort the run.
        return f"its result cannot be summarised ({type(error).__name__}: {error})"


def wrong_words(part: Part, ran: Ran) -> str:
    """Return the errors that the part reported or, if there are none, the last line that it wrote."""
    if isinstance(ran.answer, dict) and (wrong := ran.answer.get("wrong")):
        return "; ".join(wrong)
    if isinstance(ran.answer, dict) and (failed := ran.answer.get("failed")):
        return "; ".join(f"{check['part']}: {check['name']}" for check in failed)
    text = str(ran.answer) if part.name == "kernels" and ran.answer else ran.stderr
    return (text.strip().splitlines() or [f"it wrote {str(ran.answer)[-100:]}"])[-1]


def case_words(answer: str) -> str:
    found = re.search(r"(\d+) passed", answer)
    return f"{found[1] if found else 0} cases passed"


def step_words(answer: list[dict[str, Any]]) -> str:
    """Return a line for each kind of step: its time, the time of its first step, and the time modelled for an H200."""
    lines = [
        f"{one['case']:28} {one.get('recorded', one['plain']):7.2f} ms ({one['plain']:.2f} eager), "
        f"{one['of_floor']:4.0%} of the floor; first step {one['first_step_s']:.1f} s; "
        f"modelled {one.get('modelled', math.nan):.2f}"
        for one in answer
    ]
    return "\n      ".join([f"{len(lines)} kinds", *lines])


def peer_words(answer: dict[str, Any]) -> str:
    rates = {name: found["tokens_per_s"] for name, found in answer["recipes"].items()}
    return ", ".join(f"{rates['ours topk'] / rate:.2f} x {name}" for name, rate in rates.items() if "ours" not in name)


def rank_words(answer: dict[str, Any]) -> str:
    one = answer["fvu"]["one"]
    off = max(abs(fvu / one[kind] - 1) for of_kind in answer["fvu"].values() for kind, fvu in of_kind.items())
    n_waits = sum(sum(indices.values()) for indices in answer["waits"].values())
    return (
        f"FVU differs by at most {off:.0e} from one GPU; {n_waits} host waits in a step of {len(answer['waits'])} modes"
    )


def shared_words(answer: dict[str, Any]) -> str:
    off = max(abs(case["fvu"] / case["one"] - 1) for case in answer["cases"])
    return f"FVU on two ranks differs by at most {off:.0e} in {len(answer['cases'])} runs; no host waits"


def driver_words(answer: dict[str, Any]) -> str:
    others = "CUDA and nvidia-smi" if answer["nvidia_smi"] else "CUDA"
    state = answer["state"][0] if answer["state"] else {}
    clocks = "; ".join(
        f"{name} {state[name]}" for name in ("driver_version", "clocks.sm", "power.limit") if name in state
    )
    return f"{len(answer['cards'])} GPUs, as in {others}; torch {answer['torch']}{clocks and '; '}{clocks}"


def job_words(answer: dict[str, Any]) -> str:
    seconds = answer["seconds"]
    return (
        f"{answer['steps']} steps, bit-identical; {seconds['plain']:.0f} s eager, {seconds['graphs']:.0f} and "
        f"{seconds['resumed']:.0f} s with graphs; {answer['replayed']} steps replayed"
    )


def nccl_words(answer: dict[str, Any]) -> str:
    memory = f", {answer['memory_bytes'] / 2**20:.0f} MiB" if "memory_bytes" in answer else ""
    graphs = f" and {answer['in_graphs']} in a graph" if "in_graphs" in answer else ", none in a graph"
    return f"{answer['plain']} correct exchanges{graphs}{memory}"


def failure_words(answer: dict[str, Any]) -> str:
    """Return the result of each check or, if the check could not run, the reason."""
    return "; ".join(f"{name}: {one.get('not_run', 'ok')}" for name, one in answer["checks"].items())


def several_words(answer: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value:,.1f}" for name, value in answer.items() if isinstance(value, int | float))


# Maps part names to the functions that summarise them. The first key found in the part's name is used.
_WORDS: dict[str, Callable[[Any], str]] = {
    "checks": lambda answer: f"{answer['checks']} checks on {answer['device']}",
    "products": lambda answer: f"{answer['checks']} checks on {answer['device']}",
    "curves": lambda answer: f"{answer['checks']} checks on {answer['device']}",
    "kernels": case_words,
    "steps": step_words,
    "bench": lambda answer: f"{answer['step_ms']:.2f} ms, {answer['of_floor']:.0%} of the floor",
    "driver": driver_words,
    "resumed job": job_words,
    "nccl": nccl_words,
    "shared GPU": shared_words,
    "failures": failure_words,
    "peers": peer_words,
    "ranks'": several_words,
    "ranks": rank_words,
}


if __name__ == "__main__":
    sys.exit(main())
