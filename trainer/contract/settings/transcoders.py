"""Checks that a job's SAE matches its data, for transcoders and other SAEs."""

from __future__ import annotations

from trainer.contract.errors import Problem
from trainer.contract.settings.catalog import ARCHITECTURES
from trainer.contract.settings.job import SaeSettings


def transcoder_problems(sae: SaeSettings, d_in: int, d_out: int | None) -> list[Problem]:
    """Return an SAE's problems with data of these dimensions; `d_out` is None if the data has no targets."""
    entry, name = ARCHITECTURES[sae.architecture], sae.architecture
    if d_out is None:
        # Without a separate target, a skip connection would copy the input and leave nothing for the latents to learn.
        message = "only a transcoder has a skip connection; give data.target_path, or set it to false"
        return [Problem("sae.skip", message)] if sae.skip else []
    if entry.transcodes == "no":
        message = f'no format supports "{name}" transcoders'
    elif entry.transcodes == "one width" and d_out != d_in:
        message = (
            f'the format for "{name}" transcoders requires equal input and output dimensions, but this one maps {d_in} '
            f"dimensions to {d_out}"
        )
    else:
        return []
    others = " or ".join(f'"{one}"' for one, entry in ARCHITECTURES.items() if entry.transcodes == "yes")
    return [Problem("sae.architecture", f"{message}; use {others}, or omit data.target_path")]
