"""What a rank writes to its log: one line for how it starts, one per log row, one for what it saves."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Mapping

import torch

from trainer.activations.base import Source
from trainer.contract.printable import printable_lines
from trainer.parallel.base import Parallel
from trainer.saes.base import Sae

_FORMATS = {"loss": "{:.4f}", "fvu": "{:.4f}", "l0": "{:.1f}", "dead_fraction": "{:.1%}", "lr": "{:.1e}"}
_LABELS = {"dead_fraction": "dead"}


# Of a thread: whether another one of its process speaks for it.
muted = threading.local()


def say(line: str) -> None:
    """Write a line to stdout, which is the log of a rank; a log that cannot be written stops no training.

    Under torchrun it is a terminal, and a line may name what others have named.
    """
    if getattr(muted, "is_on", False):
        return
    with contextlib.suppress(OSError):
        sys.stdout.write(f"{time.strftime('%H:%M:%S')}  {printable_lines(line)}\n")
        sys.stdout.flush()


def opening(
    parallel: Parallel, source: Source, sae: Sae, total_steps: int, tokens_per_step: int, label: str = ""
) -> str:
    """Who trains what, on what, for how long."""
    parameters = sum(parameter.numel() for parameter in sae.parameters())
    return ", ".join(
        (
            f"rank {parallel.rank} of {parallel.world_size} on {_device_name(parallel.device)}",
            f"process {os.getpid()}",
            f"{torch.get_num_threads()} threads",
            f"torch {torch.__version__}",
            f"d_in {sae.d_in}",
            f"d_sae {sae.d_sae}",
            f"{parameters:,} parameters",
            f"{total_steps:,} steps × {tokens_per_step:,} tokens",
            f"{source.place} ({source.n_tokens:,} tokens)",
            *([label] if label else []),
        )
    )


def row(step: int, total_steps: int, values: Mapping[str, float], tokens_per_s: float, label: str = "") -> str:
    """One log interval; only those of `values` that have a place in the line are shown."""
    shown = [
        f"{_LABELS.get(name, name)} {form.format(values[name])}" for name, form in _FORMATS.items() if name in values
    ]
    return "  ".join([f"step {step}/{total_steps}", *([label] if label else []), *shown, f"{tokens_per_s:,.0f} tok/s"])


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
