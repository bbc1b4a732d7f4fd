"""Which data tells of what tokens its rows are, as an extraction writes it (no torch, no numpy)."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from trainer.contract.errors import UserError
from trainer.contract.json_file import read_json
from trainer.contract.settings.model_source import ModelKnobs
from trainer.contract.settings.shards import inspect_shards, read_header
from trainer.contract.settings.sources import ShardKnobs, SourceKnobs, each

META = "meta.json"
# What a shard has beside its rows: of each its token, its position in its piece of a document, and the document.
ORIGIN = ("token_ids", "positions", "document")


def folder_of(knobs: SourceKnobs) -> Path | None:
    """Return the folder of the data; None where it has none, or several."""
    paths = each(knobs.folders) if isinstance(knobs, ShardKnobs) else []
    return Path(os.path.expanduser(paths[0])) if len(paths) == 1 else None


def may_tell_tokens(knobs: Iterable[SourceKnobs]) -> bool:
    """Tell whether some of the data may tell its tokens; data that is not here now may, and what a model reads does."""
    return any(isinstance(one, ModelKnobs) or ((folder := folder_of(one)) and _may_tell(folder)) for one in knobs)


def _may_tell(folder: Path) -> bool:
    try:
        return tells_tokens(folder)
    except (UserError, OSError):
        return True


def tells_tokens(folder: Path) -> bool:
    """Tell whether the shards of a folder tell their tokens and the order of their text; raise `UserError`."""
    meta = read_json(folder / META, dict[str, object]) or {}
    is_in_order = not meta.get("shuffled") or isinstance(meta.get("seed"), int)
    return not folder.is_file() and is_in_order and shard_tells_tokens(inspect_shards(folder).shards[0].file)


def shard_tells_tokens(file: Path) -> bool:
    """Tell whether a shard has what its rows are of."""
    header, _ = read_header(file) if file.suffix == ".safetensors" else ({}, 0)
    return {*ORIGIN} <= header.keys()
