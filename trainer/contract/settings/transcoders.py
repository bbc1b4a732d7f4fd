"""Checks that a job's SAE matches its data, for transcoders, cross-layer transcoders and other SAEs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trainer.contract.errors import Problem
from trainer.contract.settings.catalog import ARCHITECTURES
from trainer.contract.settings.hooks import ends_of, is_of_transcoder, parse_hook
from trainer.contract.settings.job import CROSS_LAYER, HOOK, SaeSettings, SweepAxis


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


def problems_of_layers(is_cross_layer: Any, axes: Sequence[SweepAxis]) -> list[Problem]:
    """Return the problems with the axes of a cross-layer transcoder, whose layers are the values of `data.hook`."""
    if swept := [axis for axis in axes if axis.path == CROSS_LAYER]:
        return [Problem(swept[0].path, "cannot have several values; train the others in another job")]
    if is_cross_layer is not True:
        return []
    hooks = next((axis.values for axis in axes if axis.path == HOOK), ())
    others = [axis.path for axis in axes if axis.path != HOOK]
    problems = [Problem(path, "has several values, but a job trains one cross-layer transcoder") for path in others]
    if len(hooks) < 2 or not all(isinstance(hook, str) and is_of_transcoder(hook) for hook in hooks):
        message = 'needs the MLPs of at least two layers; set data.hook = "mlp", or name layers, like "mlp.0-11"'
        return [*problems, Problem(CROSS_LAYER, message)]
    layers = [parse_hook(ends_of(hook)[0]).layer for hook in hooks]
    if layers != sorted(layers):
        problems.append(Problem(HOOK, "must name the layers of a cross-layer transcoder in ascending order"))
    return problems
