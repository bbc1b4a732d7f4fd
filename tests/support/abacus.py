"""An example of a new GPU vendor in a single file. Its GPUs are abacuses, and each abacus is a JSON file in a folder.

A file contains `{"beads": 16, "moved": 4, "warmth": 31}`: GiB of memory, GiB in use, and °C. An abacus with a `fault`
cannot be read.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from sae_tui.gpu.base import DriverFault, GpuFacts, GpuSample, SourceUnavailable
from trainer.contract.planning.gpu_vendors import VENDORS, Vendor

FOLDER = Path("/nowhere")
GIB = 1 << 30
FAULTS = {"jam": "a bead is jammed; shake the frame"}


class Abacus:
    """Reads the abacuses in the folder, ordered by file name."""

    name = "abacus"
    cuda = False

    def __init__(self) -> None:
        self._frames: list[Path] = []

    def open(self) -> int:
        self._frames = sorted(FOLDER.glob("frame-*.json"))
        if not self._frames:
            raise SourceUnavailable("the abacus driver sees no frames", "hang one up", is_broken=True)
        return len(self._frames)

    def sample(self, index: int, *, processes: bool) -> GpuSample:
        frame = self._frames[index]
        state: dict[str, Any] = json.loads(frame.read_text())
        known = (index, f"ABACUS-{frame.stem}", "Abacus Suanpan 13", time.time())
        if fault := state.get("fault"):
            return GpuSample(*known, healthy=False, reason=FAULTS[fault])
        return GpuSample(
            *known,
            utilization=100 * state["moved"] // state["beads"],
            memory_used_bytes=state["moved"] * GIB,
            memory_total_bytes=state["beads"] * GIB,
            temperature_c=state["warmth"],
            processes=(),
        )

    def facts(self) -> GpuFacts:
        version = (FOLDER / "driver").read_text()
        miscounts = DriverFault(f"driver {version} miscounts from 9 on", "install driver 2.0")
        return GpuFacts(driver=version, faults=(miscounts,) if version < "2" else ())

    def close(self) -> None: ...


def vendor() -> Vendor:
    """Return the vendor's registry entry."""
    return Vendor(
        "Abacus",
        "support.abacus:Abacus",
        driver_files=(str(FOLDER / "driver"),),
        variable="ABACUS_FRAMES",
        tool="abacus-list",
        uuid_prefix="ABACUS-",
        device="cpu",
        brands=("Abacus ",),
    )


def hang_up(folder: Path, version: str = "2.1", **frames: dict[str, Any]) -> None:
    """Create the folder of a machine with these abacuses."""
    folder.mkdir(exist_ok=True)
    (folder / "driver").write_text(version)
    for name, state in frames.items():
        (folder / f"frame-{name}.json").write_text(json.dumps({"beads": 16, "moved": 0, "warmth": 31} | state))


def register(folder: str) -> None:
    """Register the vendor in this process."""
    global FOLDER
    FOLDER = Path(folder)
    VENDORS["abacus"] = vendor()
