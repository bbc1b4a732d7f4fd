"""Determines, without torch or numpy, whether data records the tokens of its rows, as extractions do."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from trainer.contract.errors import UserError
from trainer.contract.json_file import read_json
from trainer.contract.object_paths import url_of
from trainer.contract.settings.model_source import ModelSettings
from trainer.contract.settings.requests import HIDDEN_STATES, RequestSettings
from trainer.contract.settings.shards import DOCUMENT, TOKENS, inspect_shards, read_header, shard_files
from trainer.contract.settings.sources import ShardSettings, SourceSettings, each

META = "meta.json"
# The name of the file with each token's text, in token id order.
TOKEN_TEXTS = "tokens.json"
# The names of the tensors in a shard that contain each row's token, the token's position in its piece of a document,
# and its document.
ORIGIN = (TOKENS, "positions", DOCUMENT)


def folder_of(settings: SourceSettings) -> Path | None:
    """Return the data folder, or None if there is not exactly one.

    For a crosscoder, this is the first part's folder, because all parts have the rows of the same tokens.
    """
    if isinstance(settings, RequestSettings):
        return Path(os.path.expanduser(settings.path))
    first = settings.parts()[0]
    paths = each(first.folders) if isinstance(first, ShardSettings) else []
    return Path(os.path.expanduser(paths[0])) if len(paths) == 1 else None


def may_tell_tokens(settings: Iterable[SourceSettings]) -> bool:
    """Return whether some of the data may record its tokens.

    A stream from a language model records its tokens, and data that does not exist yet might do so.
    """
    return any(isinstance(one, ModelSettings) or ((folder := folder_of(one)) and _may_tell(folder)) for one in settings)


def _may_tell(folder: Path) -> bool:
    try:
        return tells_tokens(folder)
    except (UserError, OSError):
        return True


def tells_tokens(folder: Path) -> bool:
    """Return whether the shards in a folder record their tokens and the text order; may raise `UserError`."""
    meta = read_json(folder / META, dict[str, object]) or {}
    is_in_order = not meta.get("shuffled") or isinstance(meta.get("seed"), int)
    # Only the copies of objects are looked at, because a request may take long.
    files = shard_files(folder) if url_of(folder) else [inspect_shards(folder).shards[0].file]
    if not files:
        raise UserError(f"data.path: {url_of(folder)} has not been read yet")
    return not folder.is_file() and is_in_order and shard_tells_tokens(files[0])


def shard_tells_tokens(file: Path) -> bool:
    """Return whether a shard, or the file of a request, records the tokens for its rows.

    The tokens of a request are of use only with their texts, which an inference engine does not store.
    """
    header, _ = read_header(file) if file.suffix == ".safetensors" else ({}, 0)
    is_request = {HIDDEN_STATES, TOKENS} <= header.keys() and (file.parent / TOKEN_TEXTS).exists()
    return is_request or {*ORIGIN} <= header.keys()
