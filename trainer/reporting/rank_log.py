"""Writes a rank's log: one line at the start, one per log interval, and one per save."""

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
from trainer.contract.settings.series import LOSS, LR, held_out_metrics, log_words, result_metrics, title_of
from trainer.parallel.base import Parallel
from trainer.saes.base import Sae

# `muted.is_on` is True in threads that must not log, because another thread in the process does the logging.
muted = threading.local()


def say(line: str) -> None:
    """Write a line to stdout, which is the rank's log; ignore write errors.

    Control characters are replaced, because under torchrun stdout is a terminal, and names in a line may come from
    other users.
    """
    if getattr(muted, "is_on", False):
        return
    with contextlib.suppress(OSError):
        sys.stdout.write(f"{time.strftime('%H:%M:%S')}  {printable_lines(line)}\n")
        sys.stdout.flush()


def opening(
    parallel: Parallel, source: Source, sae: Sae, total_steps: int, tokens_per_step: int, label: str = ""
) -> str:
    """Return a log's first line: rank, device, torch version, and the sizes of the SAE, the run and the data."""
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
            source.place if source.n_tokens is None else f"{source.place} ({source.n_tokens:,} tokens)",
            *([label] if label else []),
        )
    )


def row(step: int, total_steps: int, values: Mapping[str, float], tokens_per_s: float, label: str = "") -> str:
    """Return the log line for an interval, with the loss, result metrics and learning rate from `values`."""
    in_order = {"loss": LOSS, **result_metrics(), "lr": LR}
    shown = [
        f"{series.short or (title_of(name) if name in held_out_metrics() else name)} {log_words(values[name], series)}"
        for name, series in in_order.items()
        if name in values
    ]
    return "  ".join([f"step {step}/{total_steps}", *([label] if label else []), *shown, f"{tokens_per_s:,.0f} tok/s"])


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
