"""Spreads the blocks of one language model over several devices."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainer.contract.errors import UserError
from trainer.contract.wording import plural


def spread(model: Any) -> Any:
    """Place a model's blocks on the GPUs of this process one after the other, about as many bytes on each.

    Raise `UserError` where they have too little free memory.
    """
    # Not before it is needed: 2 s.
    from accelerate import dispatch_model
    from accelerate.utils import get_max_memory

    return dispatch_model(model, places(model, get_max_memory()), force_hooks=True)


def places(model: Any, room: Mapping[int | str, int]) -> dict[str, int]:
    """Return the GPU of each module; `room` is the bytes that are free, by GPU."""
    from accelerate import infer_auto_device_map
    from accelerate.utils import get_balanced_memory

    gpus = {gpu: n_bytes for gpu, n_bytes in room.items() if gpu != "cpu"}
    whole = sorted(getattr(model, "_no_split_modules", None) or [])
    # A module that has no room is on "cpu" or "disk" here, from which its weights would be fetched for every batch.
    balanced = get_balanced_memory(model, {**gpus, "cpu": 0}, no_split_module_classes=whole)
    chosen: dict[str, int] = infer_auto_device_map(model, balanced, no_split_module_classes=whole)
    if not set(chosen.values()) <= gpus.keys():
        raise UserError(f"model.spread: the model does not fit on {plural(len(gpus), 'GPU')}; give more in launch.gpus")
    return chosen
