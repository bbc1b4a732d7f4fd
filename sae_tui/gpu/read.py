"""`python -m sae_tui.gpu.read SOURCE`: prints every GPU once as JSON; a process of its own, since a driver may hang."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import msgspec

from sae_tui.gpu import load_source
from sae_tui.gpu.base import GpuSample, SourceUnavailable
from sae_tui.gpu.once import open_source, read_all
from trainer.contract.errors import UserError
from trainer.contract.json_file import decode_as


def samples_of(output: bytes) -> tuple[GpuSample, ...]:
    """Decode the output of the process; raise `ValueError` if it is something else."""
    return decode_as(output, tuple[GpuSample, ...])


def main(arguments: Sequence[str]) -> int:
    """Print the samples of a source and return the exit code; `SOURCE` may end in `:COUNT` simulated cards."""
    name, _, count = arguments[0].partition(":")
    try:
        source = load_source(name, **({"count": int(count)} if count else {}))
        samples = read_all(source, open_source(source))
    except (SourceUnavailable, UserError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    # The end of the line says that this is all: a process that hangs in the driver keeps the pipe open.
    sys.stdout.buffer.write(msgspec.json.encode(samples) + b"\n")
    sys.stdout.flush()
    return 0


if __name__ == "__main__":
    # A thread may hang in the driver, and would keep the process from ending.
    os._exit(main(sys.argv[1:]))
