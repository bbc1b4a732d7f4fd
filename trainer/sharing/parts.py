"""The parts that a crosscoder's rows are joined from, as listed in the metadata of its exports."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
import torch
from torch import Tensor

from trainer.contract.errors import UsageError, UserError
from trainer.contract.printable import printable
from trainer.contract.wording import plural
from trainer.saes.base import Sae

# The metadata key for the list of parts.
PARTS = "crosscoder_parts"
_ORIGIN = ("model_name", "hook_name", "module")
# The maximum length of a text, because files from other people may contain any text.
_LONGEST = 200


class SaePart(msgspec.Struct, frozen=True):
    """A part of a crosscoder's rows.

    Training multiplies the part's dimensions by `scale`, relative to the part with the largest factor. The scales are
    folded into exported weights.
    """

    width: Annotated[int, msgspec.Meta(ge=1)]
    scale: Annotated[float, msgspec.Meta(gt=0, le=1)]
    name: str = ""
    model_name: str | None = None
    hook_name: str | None = None
    module: str | None = None

    def origin(self) -> dict[str, str]:
        """Return the part's model and hook, as far as they are known, with SAELens' field names."""
        known = {name: getattr(self, name) for name in _ORIGIN}
        return {name: printable(value)[:_LONGEST] for name, value in known.items() if value}

    def facts(self) -> dict[str, str]:
        """Return the part's name, model and hook for the metadata of another export."""
        return {"name": printable(self.name)[:_LONGEST]} | self.origin()


def parts_in(metadata: Mapping[str, Any], d_in: int) -> tuple[SaePart, ...]:
    """Return a crosscoder's parts; () if the metadata lists none, or none that fit its rows of `d_in` dimensions."""
    try:
        parts = msgspec.convert(metadata.get(PARTS), tuple[SaePart, ...])
    except msgspec.ValidationError:
        return ()
    return parts if len(parts) > 1 and sum(part.width for part in parts) == d_in else ()


def origins_of_parts(metas: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return each part's name, model and hook, given the contents of the parts' meta.json files.

    A part's name is its hook if the parts have different hooks, its model if they have different models, or both. If
    the parts have several revisions of a model, each model's name includes its revision.
    """
    facts = [
        {
            "model_name": meta.get("model_name", meta.get("model")),
            "hook_name": meta.get("hook_name"),
            "module": meta.get("output_module"),
        }
        for meta in metas
    ]
    hooks = [str(meta.get("hook", meta.get("hook_name", ""))) for meta in metas]
    models = [Path(str(one["model_name"] or "")).name for one in facts]
    versions = [f"{model}@{meta.get('model_revision') or 'main'}" for model, meta in zip(models, metas, strict=True)]
    if len({*versions}) > len({*models}):
        models = versions
    telling = [names for names in (models, hooks) if len({*names}) > 1]
    names = [" ".join(filter(None, words)) for words in zip(*telling, strict=True)] if telling else [""] * len(metas)
    return [
        {"name": name or f"part {number}"} | {key: value for key, value in one.items() if isinstance(value, str)}
        for number, (name, one) in enumerate(zip(names, facts, strict=True), start=1)
    ]


def refuse_other_parts(parts: Sequence[SaePart], widths: Sequence[int]) -> None:
    """Raise `UsageError` if a crosscoder with `parts` cannot read rows whose parts have these widths."""
    if parts and [part.width for part in parts] != [*widths]:
        wanted = " + ".join(str(part.width) for part in parts)
        message = f"the SAE is a crosscoder of parts with {wanted} dimensions; give --data for each part, in order"
        raise UsageError(f"--data: {message}")


def joined_paths(paths: Sequence[str]) -> dict[str, Any]:
    """Return the `[data]` settings for the rows at a path, or for a crosscoder's rows, joined from several paths."""
    return {"path": paths[0]} if len(paths) == 1 else {"path": [*paths], "join": True}


def parts_of(sae: Sae, given: object) -> list[dict[str, Any]]:
    """Return a crosscoder's parts for its metadata; `given` is the list of their names, models and hooks, if known.

    Raise `UserError` if `given` does not fit the parts.
    """
    assert sae.part_widths is not None
    assert sae.dimension_scales is not None
    widths = sae.part_widths.tolist()
    facts = [{} for _ in widths] if given is None else given
    if not isinstance(facts, list) or len(facts) != len(widths) or not all(isinstance(one, dict) for one in facts):
        raise UserError(f"{PARTS}: must be a list of {plural(len(widths), 'dict')}, one for each part")
    # A dimension's own factor is at most 1, and nearly all are 1.
    scales = [float(part.max()) or 1.0 for part in sae.dimension_scales.split(widths)]
    return [
        {"name": f"part {number}", **own, "width": width, "scale": scale}
        for number, (own, width, scale) in enumerate(zip(facts, widths, scales, strict=True), start=1)
    ]


def scales_of_parts(parts: Sequence[SaePart]) -> Tensor:
    """Return the scale of each dimension's part, float64 [d_in]."""
    each = [torch.full((part.width,), part.scale, dtype=torch.float64) for part in parts]
    return torch.cat(each)
