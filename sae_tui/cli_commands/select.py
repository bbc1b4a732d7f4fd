"""`sae-tui select`: prints free GPUs for any program, in the format of CUDA_VISIBLE_DEVICES."""

from __future__ import annotations

import argparse

from sae_tui.cli_commands.context import CommandContext
from sae_tui.cli_commands.output import say, show_json
from sae_tui.gpu.base import PUBLIC
from sae_tui.jobs.launch import placement
from trainer.contract.errors import UserError
from trainer.contract.exits import Exit


def select(context: CommandContext, flags: argparse.Namespace) -> int:
    """Print the UUIDs of unused GPUs, most free memory first; fail if there are too few."""
    if context.has_broken_driver():
        return Exit.FAILED
    advice = placement.recommend(context.gpus.choices, flags.free_memory, flags.count)
    chosen = [next(one for one in context.gpus.choices if one.index == index) for index in advice.gpus]
    enough = len(chosen) == flags.count
    if context.as_json:
        free = PUBLIC["memory_free_bytes"]
        show_json(
            {
                "gpus": [
                    {"index": one.index, "uuid": one.uuid, "name": one.name, free: one.memory_free_bytes}
                    for one in chosen
                ],
                "enough": enough,
                "reasons": {str(index): why for index, why in advice.reasons.items()},
            }
        )
        return Exit.DONE if enough else Exit.FAILED
    if not enough:
        whys = "; ".join(f"GPU {index}: {why}" for index, why in advice.reasons.items() if index not in advice.gpus)
        raise UserError(f"--count: {len(chosen)} of {flags.count} GPUs are available" + (f" ({whys})" if whys else ""))
    say(",".join(str(one.index) if flags.index else one.uuid for one in chosen))
    return Exit.DONE
