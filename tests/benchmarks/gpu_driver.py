"""Compares the app's values for each GPU with CUDA's and nvidia-smi's; reports versions, clocks and power limits.

    python tests/benchmarks/gpu_driver.py

The script prints JSON: the GPUs as reported by the app, CUDA and nvidia-smi, and a list of errors, `wrong`. The exit
code is 1 if there are errors. Without nvidia-smi, the app is compared only with CUDA or its equivalent.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import shutil
import subprocess
import sys
from typing import Any, NamedTuple

from trainer.contract.planning.gpu_vendors import is_slice
from trainer.ranks.devices import torch_vendor, visible_gpus

MIB = 2**20
# The minimum fraction of the total memory that CUDA must report. The driver reserves the remainder, for example for
# page tables.
LEAST_OF_CUDA = 0.9
# How far, in bytes, the app's value may lie outside the range between nvidia-smi's values just before and just after
# it. nvidia-smi reports multiples of 1 MiB.
NEAR_USED = 64 * MIB
# Values that affect a GPU's current speed. Names that the driver does not know are omitted.
STATE = (
    "name", "driver_version", "clocks.sm", "clocks.max.sm", "clocks.mem", "power.draw", "power.limit",
    "temperature.gpu", "pcie.link.gen.current", "pcie.link.width.current", "persistence_mode", "ecc.mode.current",
    "clocks_throttle_reasons.active",
)  # fmt: skip
QUERY = ["nvidia-smi", "--query-gpu=uuid,memory.total,memory.used", "--format=csv,noheader,nounits"]


class Memory(NamedTuple):
    """The total and used GPU memory in bytes according to nvidia-smi, or None if unknown."""

    total: int | None
    used: int | None


def main() -> int:
    by_cuda = {gpu.uuid: gpu.memory_bytes for gpu in visible_gpus()}
    # Query the app between two nvidia-smi calls, because other processes may allocate memory in the meantime.
    before = by_tool()
    gpus = by_app()
    after = by_tool()
    wrong = [*differs_from_cuda(gpus, by_cuda), *differs_from_tool(gpus, before, after)]
    found = {"cards": gpus, "cuda": by_cuda, "nvidia_smi": {uuid: one._asdict() for uuid, one in after.items()}}
    print(json.dumps(found | versions() | {"state": states(), "wrong": wrong}))
    return 1 if wrong else 0


def versions() -> dict[str, str | None]:
    """Return the versions that determine which kernels are used."""
    import torch

    triton = importlib.util.find_spec("triton") and importlib.metadata.version("triton")
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() else None
    return {"torch": str(torch.__version__), "cuda": torch.version.cuda, "triton": triton or None, "nccl": nccl}


def states() -> list[dict[str, str]]:
    """Return the clocks, power and PCIe link of each GPU from nvidia-smi.

    Each value is queried separately, because a query with an unknown name fails.
    """
    if not shutil.which(QUERY[0]):
        return []
    rows: list[dict[str, str]] = []
    for name in STATE:
        argv = [QUERY[0], f"--query-gpu={name}", "--format=csv,noheader"]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=30)
        for index, value in enumerate(done.stdout.splitlines() if done.returncode == 0 else []):
            rows += [{}] * (index == len(rows))
            rows[index] = rows[index] | {name: value.strip()}
    return rows


def by_app() -> list[dict[str, Any]]:
    """Return the GPUs that the app lists for the vendor that PyTorch is built for."""
    source = ["--gpu-source", torch_vendor()] if torch_vendor() else []
    argv = [sys.executable, "-m", "sae_tui", *source, "gpus", "--json"]
    return json.loads(subprocess.check_output(argv, timeout=60))


def by_tool() -> dict[str, Memory]:
    """Return the memory of each NVIDIA GPU, or {} if nvidia-smi is missing."""
    if not shutil.which(QUERY[0]):
        return {}
    return read_tool(subprocess.check_output(QUERY, text=True, timeout=30))


def read_tool(text: str) -> dict[str, Memory]:
    rows = [[cell.strip() for cell in line.split(",")] for line in text.splitlines() if line.strip()]
    return {uuid: Memory(*(int(mib) * MIB if mib.isdecimal() else None for mib in mibs)) for uuid, *mibs in rows}


def differs_from_cuda(gpus: list[dict[str, Any]], by_cuda: dict[str, int]) -> list[str]:
    """Return a sentence for each GPU that is missing from one of the two lists, or whose memory differs from CUDA's.

    MIG slices may be missing, because CUDA lists only one of them.
    """
    totals = {gpu["uuid"]: gpu["memory_total"] for gpu in gpus if gpu["healthy"]}
    unknown = [f"CUDA lists {uuid}, but the app does not" for uuid in by_cuda if uuid not in totals]
    missing = [uuid for uuid in totals if uuid not in by_cuda and not is_slice(uuid)]
    return (
        unknown
        + [f"the app lists {uuid}, but CUDA does not" for uuid in missing]
        + [
            f"{uuid} has {totals[uuid]:,} bytes according to the app, but {of_cuda:,} according to CUDA"
            for uuid, of_cuda in by_cuda.items()
            if totals.get(uuid) and not LEAST_OF_CUDA * totals[uuid] <= of_cuda <= totals[uuid]
        ]
    )


def differs_from_tool(gpus: list[dict[str, Any]], before: dict[str, Memory], after: dict[str, Memory]) -> list[str]:
    """Return a sentence for each GPU that nvidia-smi does not list, or whose memory differs from nvidia-smi's value.

    MIG slices are skipped, because nvidia-smi does not list them.
    """
    wrong = []
    for gpu in gpus if after else ():
        uuid, total, used = gpu["uuid"], gpu["memory_total"], gpu["memory_used"]
        if is_slice(uuid) or not uuid.startswith("GPU-"):
            continue
        if uuid not in after or uuid not in before:
            wrong.append(f"the app lists {uuid}, but nvidia-smi does not")
            continue
        if None not in (total, after[uuid].total) and abs(total - after[uuid].total) > MIB:
            wrong.append(
                f"{uuid} has {total:,} bytes according to the app, but {after[uuid].total:,} according to nvidia-smi"
            )
        uses = [before[uuid].used, after[uuid].used]
        if None not in (used, *uses) and not min(uses) - NEAR_USED <= used <= max(uses) + NEAR_USED:
            wrong.append(
                f"{used:,} bytes of {uuid} are in use according to the app, but {uses[1]:,} according to nvidia-smi"
            )
    return wrong


if __name__ == "__main__":
    sys.exit(main())
