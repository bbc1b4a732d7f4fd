"""Injects failures on one GPU, and measures memory that PyTorch does not report.

    PYTHONPATH=tests python tests/benchmarks/gpu_failures.py [--device cuda|cpu]

The checks exhaust memory during CUDA graph capture, trigger a device-side assert in a child process, run NVIDIA's
compute-sanitizer on Triton kernel test cases, and compare the bytes reserved by PyTorch for steps with nvidia-smi's
value for the process. The script prints JSON: the results of each check, or why the check was `not_run`, and a list of
errors, `wrong`. The exit code is 1 if there are errors.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from support.fake_gpu import job_of

from sae_tui.jobs.known_failures import remedy
from trainer.contract.errors import first_line
from trainer.contract.planning.memory import context_bytes
from trainer.contract.runs import cuda_variables
from trainer.measuring.bench_rank import RepeatedStep
from trainer.parallel.base import Parallel

ROOT = Path(__file__).parents[2]
D_IN, SAE, TRAIN = 768, {"d_sae": 24576, "k": 32}, {"batch_size": 4096, "n_steps": 10**5}
MIB = 2**20
ASSERTING = "import torch; torch.zeros(4, device='cuda')[torch.tensor([9], device='cuda')].sum().item()"
# The time limits in seconds for a child process and for compute-sanitizer, which slows kernels down by a factor of 10
# to 50.
CHILD_S, SANITIZER_S = 60, 90
SANITIZED = ROOT / "tests" / "trainer" / "metrics" / "interval_cases.py"
COMPUTE_APPS = ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"]


class NotRun(Exception):
    """Raised, with the reason, if a check cannot run here."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    options = parser.parse_args()
    cuda_variables.set_here()
    checks: dict[str, Callable[[], dict[str, Any]]] = {
        "memory of the process": process_memory,
        "out of memory in a graph": shortage_in_graph,
        "device-side assert": device_assert,
        "compute-sanitizer": sanitized,
    }
    found = {name: result_of(check, options.device) for name, check in checks.items()}
    wrong = [f"{name}: {words}" for name, one in found.items() for words in one.get("wrong", [])]
    print(json.dumps({"checks": found, "wrong": wrong}))
    return 1 if wrong else 0


def result_of(check: Callable[[], dict[str, Any]], device: str) -> dict[str, Any]:
    """Return the result of a check; a check that cannot run here is not reported as failed."""
    if device != "cuda":
        return {"not_run": "needs a GPU"}
    try:
        return check()
    except NotRun as reason:
        return {"not_run": str(reason)}
    except Exception as error:
        return {"wrong": [f"{type(error).__name__}: {first_line(error)}"]}


def steps_on_gpu() -> RepeatedStep:
    return RepeatedStep(job_of({"architecture": "topk"} | SAE, TRAIN), D_IN, None, Parallel(torch.device("cuda", 0)))


def shortage_in_graph() -> dict[str, Any]:
    """Exhaust the memory during step capture; eager steps must still work, and no memory may leak."""
    steps, words = steps_on_gpu(), list[str]()
    (learner,) = steps.learners
    recorded: Any = learner.whole_steps
    if recorded is None:
        raise NotRun("steps are not captured on this GPU")
    recorded._report = words.append
    steps.take(3)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    total = torch.cuda.mem_get_info()[1]
    # Allow only the memory that eager steps need; a graph needs more.
    torch.cuda.set_per_process_memory_fraction(torch.cuda.memory_reserved() / total)
    try:
        steps.take(1)
    except torch.OutOfMemoryError:
        words.append("an eager step also ran out of memory")
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    if not recorded._n_failed:
        raise NotRun("the capture needed no more memory than eager steps")
    steps.take(2)
    return {"reported": words, "wrong": lost_memory()}


def lost_memory() -> list[str]:
    """Return a sentence if freed memory remains reserved after a failed capture."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    block = torch.empty(256 * MIB, dtype=torch.uint8, device="cuda")
    del block
    torch.cuda.empty_cache()
    grown = torch.cuda.memory_reserved() - before
    return [f"{grown / MIB:.0f} MiB remain reserved after the failed capture"] if grown > 64 * MIB else []


def device_assert() -> dict[str, Any]:
    """Trigger a device-side assert in a child process, and return the message that a user would see."""
    done = subprocess.run([sys.executable, "-c", ASSERTING], capture_output=True, text=True, timeout=CHILD_S)
    if done.returncode == 0:
        return {"wrong": ["the child process did not fail, although it triggers a device-side assert"]}
    error = done.stderr.strip().splitlines() or [""]
    sentence = next((line for line in error if "CUDA error" in line or "device-side" in line), error[-1])
    found = remedy(sentence)
    is_blamed = found is not None and found.kind in ("version", "driver")
    kind = found.kind if found else None
    return {
        "said": sentence[:300],
        "kind": kind,
        "wrong": ["the remedy wrongly blames the PyTorch build or the driver"] if is_blamed else [],
    }


def sanitized() -> dict[str, Any]:
    """Run the kernel test cases under compute-sanitizer."""
    tool = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
    if not tool:
        raise NotRun("compute-sanitizer is not installed")
    argv = [tool, "--error-exitcode", "9", sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider"]
    variables = {"TRITON_INTERPRET": "0", "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    environment = {**os.environ, **variables}
    try:
        argv += ["-p", "support.programs", str(SANITIZED)]
        done = subprocess.run(argv, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=SANITIZER_S)
    except subprocess.TimeoutExpired:
        raise NotRun(f"compute-sanitizer took more than {SANITIZER_S} s") from None
    if done.returncode not in (0, 1, 9):
        raise NotRun(f"compute-sanitizer exited with {done.returncode}")
    lines = [line for line in done.stdout.splitlines() if line.startswith("=========")]
    return {"wrong": [] if done.returncode == 0 else [*lines[:3], done.stdout.strip().splitlines()[-1]]}


def process_memory() -> dict[str, Any]:
    """Return the bytes that steps use according to PyTorch and to the driver; the difference is CUDA's context."""
    steps = steps_on_gpu()
    steps.take(8)
    torch.cuda.synchronize()
    reserved = torch.cuda.memory_reserved()
    of_process, source = bytes_by_driver()
    return {
        "reserved_bytes": reserved,
        "driver_bytes": of_process,
        "driver_is": source,
        "context_bytes": of_process - reserved,
        "assumed_context_bytes": context_bytes("cuda"),
    }


def bytes_by_driver() -> tuple[int, str]:
    """Return the bytes used by this process or, in a container, where pids differ, all bytes in use on the GPU."""
    if shutil.which(COMPUTE_APPS[0]):
        done = subprocess.run(COMPUTE_APPS, capture_output=True, text=True, timeout=30)
        rows = [line.split(",") for line in done.stdout.splitlines() if line.count(",") == 1]
        own = [int(mib) for pid, mib in rows if pid.strip() == str(os.getpid()) and mib.strip().isdecimal()]
        if own:
            return own[0] * MIB, "nvidia-smi, this process"
    free, total = torch.cuda.mem_get_info()
    return total - free, "CUDA, the entire GPU"


if __name__ == "__main__":
    sys.exit(main())
