"""Whether the app reads of each card what CUDA and nvidia-smi tell of it: its identity, and its memory.

    python tests/benchmarks/gpu_driver.py

It prints JSON: the cards as the app, CUDA and nvidia-smi have them, and what is `wrong`, in words. It ends with 1 if
anything is. Without NVIDIA's tool there is only CUDA, or its like, to compare with.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from typing import Any, NamedTuple

from trainer.contract.planning.gpu_vendors import is_slice
from trainer.ranks.devices import torch_vendor, visible_gpus

MIB = 2**20
# CUDA leaves a part of the memory, that of page tables and the like, to the driver.
LEAST_OF_CUDA = 0.9
# How much more or less may be in use than nvidia-smi tells just before and just after, in whole MiB.
NEAR_USED = 64 * MIB
QUERY = ["nvidia-smi", "--query-gpu=uuid,memory.total,memory.used", "--format=csv,noheader,nounits"]


class Memory(NamedTuple):
    """Bytes of a card as nvidia-smi tells them; None where it does not."""

    total: int | None
    used: int | None


def main() -> int:
    by_cuda = {gpu.uuid: gpu.memory_bytes for gpu in visible_gpus()}
    # The app between two looks of the tool, since others may take memory meanwhile.
    before = by_tool()
    cards = by_app()
    after = by_tool()
    wrong = [*differs_from_cuda(cards, by_cuda), *differs_from_tool(cards, before, after)]
    found = {"cards": cards, "cuda": by_cuda, "nvidia_smi": {uuid: one._asdict() for uuid, one in after.items()}}
    print(json.dumps(found | {"wrong": wrong}))
    return 1 if wrong else 0


def by_app() -> list[dict[str, Any]]:
    """Return the cards that CUDA, or its like, should have."""
    source = ["--gpu-source", torch_vendor()] if torch_vendor() else []
    argv = [sys.executable, "-m", "sae_tui", *source, "gpus", "--json"]
    return json.loads(subprocess.check_output(argv, timeout=60))


def by_tool() -> dict[str, Memory]:
    """Return the memory of all cards of NVIDIA; none where the tool is not there."""
    if not shutil.which(QUERY[0]):
        return {}
    return read_tool(subprocess.check_output(QUERY, text=True, timeout=30))


def read_tool(text: str) -> dict[str, Memory]:
    rows = [[cell.strip() for cell in line.split(",")] for line in text.splitlines() if line.strip()]
    return {uuid: Memory(*(int(mib) * MIB if mib.isdecimal() else None for mib in mibs)) for uuid, *mibs in rows}


def differs_from_cuda(cards: list[dict[str, Any]], by_cuda: dict[str, int]) -> list[str]:
    """Tell in words which card only one of them has, and whose memory is not what CUDA has of it.

    Of slices CUDA names one alone.
    """
    totals = {card["uuid"]: card["memory_total"] for card in cards if card["healthy"]}
    unknown = [f"CUDA has {uuid}, and the app has not" for uuid in by_cuda if uuid not in totals]
    missing = [f"the app has {uuid}, and CUDA has not" for uuid in totals if uuid not in by_cuda and not is_slice(uuid)]
    return (
        unknown
        + missing
        + [
            f"{uuid} has {totals[uuid]:,} bytes for the app and {of_cuda:,} for CUDA"
            for uuid, of_cuda in by_cuda.items()
            if totals.get(uuid) and not LEAST_OF_CUDA * totals[uuid] <= of_cuda <= totals[uuid]
        ]
    )


def differs_from_tool(cards: list[dict[str, Any]], before: dict[str, Memory], after: dict[str, Memory]) -> list[str]:
    """Tell in words which card nvidia-smi does not have, and whose memory is not what it tells of it.

    It lists no slices.
    """
    wrong = []
    for card in cards if after else ():
        uuid, total, used = card["uuid"], card["memory_total"], card["memory_used"]
        if is_slice(uuid) or not uuid.startswith("GPU-"):
            continue
        if uuid not in after or uuid not in before:
            wrong.append(f"the app has {uuid}, and nvidia-smi has not")
            continue
        if None not in (total, after[uuid].total) and abs(total - after[uuid].total) > MIB:
            wrong.append(f"{uuid} has {total:,} bytes for the app and {after[uuid].total:,} for nvidia-smi")
        uses = [before[uuid].used, after[uuid].used]
        if None not in (used, *uses) and not min(uses) - NEAR_USED <= used <= max(uses) + NEAR_USED:
            wrong.append(f"{used:,} bytes of {uuid} are in use for the app and {uses[1]:,} for nvidia-smi")
    return wrong


if __name__ == "__main__":
    sys.exit(main())
