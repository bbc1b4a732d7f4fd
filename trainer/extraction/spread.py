"""Spreads the blocks of one language model over several devices."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainer.contract.errors import UserError
from trainer.contract.wording import plural


def spread(model: Any) -> Any:
    """Place a model's blocks in order on the GPUs of this process, with about the same number of bytes on each.

    Raise `UserError` if the GPUs have too little free memory.
    """
    # Imported only when needed, since the import takes 2 s.
    from accelerate import dispatch_model
    from accelerate.utils import get_max_memory

    return dispatch_model(model, places(model, get_max_memory()), force_hooks=True)


def places(model: Any, capacity: Mapping[int | str, int]) -> dict[str, int]:
    """Return the GPU of each module; `capacity` is the number of free bytes of each GPU."""
    from accelerate import infer_auto_device_map
    from accelerate.utils import get_balanced_memory

    gpus = {gpu: n_bytes for gpu, n_bytes in capacity.items() if gpu != "cpu"}
    whole = sorted(getattr(model, "_no_split_modules", None) or [])
    # Modules that fit on no GPU are assigned to "cpu" or "disk"; their weights would be copied for every batch.
    balanced = get_balanced_memory(model, {**gpus, "cpu": 0}, no_split_module_classes=whole)
    chosen: dict[str, int] = infer_auto_device_map(model, balanced, no_split_module_classes=whole)
    if not set(chosen.values()) <= gpus.keys():
        raise UserError(f"model.spread: the model does not fit on {plural(len(gpus), 'GPU')}; give more in launch.gpus")
    return chosen
