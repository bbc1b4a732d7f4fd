"""Runs the self-test on one device; reports each check as it completes, and the totals at the end."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from trainer.contract.errors import first_line
from trainer.self_test.base import Check
from trainer.self_test.feeding import check_feeding
from trainer.self_test.learning import check_curves, check_recording, check_resuming, check_waits
from trainer.self_test.long_offsets import check_long_offsets
from trainer.self_test.memory_need import check_memory
from trainer.self_test.products import check_products, check_selections

Part = Callable[[torch.device], Iterator[Check]]
_QUICK: tuple[Part, ...] = (check_products, check_selections, check_waits, check_feeding)
# On a GPU, SHORT should take two minutes, and FULL less than five.
SHORT: tuple[Part, ...] = (
    *_QUICK,
    partial(check_recording, n_steps=24),
    partial(check_resuming, half=10),
    partial(check_curves, n_steps=40),
)
FULL: tuple[Part, ...] = (
    *_QUICK,
    partial(check_recording, n_steps=48),
    partial(check_resuming, half=20),
    partial(check_curves, n_steps=200),
    check_memory,
    check_long_offsets,
)


def checks(device: torch.device, *, full: bool) -> Iterator[Check]:
    """Yield a device's checks as they complete; an exception in a part counts as a failed check."""
    warnings.filterwarnings("ignore", category=FutureWarning)
    for part in FULL if full else SHORT:
        name = getattr(part, "func", part).__name__.removeprefix("check_")
        try:
            yield from part(device)
        except Exception as error:
            yield Check(name, "it ran", False, {"error": f"{type(error).__name__}: {first_line(error)}"})


def run(gpu: dict[str, str], *, full: bool, tell: Callable[[Check], None]) -> dict[str, Any]:
    """Check one GPU, or the CPU if `gpu` is empty; call `tell` with each check.

    `gpu` contains environment variables that make this the only visible GPU. Return `{"device", "ok", "checks",
    "failed", "seconds"}`; "failed" lists the failed checks.
    """
    # Set the variables before any code queries the driver.
    os.environ.update(gpu)
    began = time.monotonic()
    device = torch.device("cuda", 0) if gpu else torch.device("cpu")
    found = []
    for check in checks(device, full=full):
        found.append(check)
        tell(check)
    failed = [check for check in found if not check.ok]
    name = torch.cuda.get_device_name(device) if gpu else "CPU"
    return {
        "device": name,
        "ok": not failed,
        "checks": len(found),
        "failed": [check._asdict() for check in failed],
        "seconds": round(time.monotonic() - began, 1),
    }
