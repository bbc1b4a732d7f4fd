"""Hashes that identify the model and the tokenizer of stored activations, independently of their paths."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trainer.contract.errors import UserError
from trainer.extraction.packing import Tokenizer

# Up to this total size in bytes, a model's files are hashed completely, which takes a second or two. Of larger models,
# only pieces of each file are hashed.
WHOLE_BYTES = 2 * 2**30
_PIECES, _PIECE_BYTES = 64, 2**16
# Patterns of weight files; the first that matches is used, as in transformers.
_WEIGHTS = ("*.safetensors", "*.bin", "*.pt")


def tokenizer_hash(tokenizer: Tokenizer) -> str:
    """Return the SHA-256 of all that determines the ids of a text: vocabulary, merges, rules and chat template."""
    return hashlib.sha256(json.dumps(tokenizer.rules(), sort_keys=True).encode()).hexdigest()


def weights_facts(path: str) -> dict[str, Any]:
    """Return the hashes of a local model's files by name, or {} for a hub model, which its revision identifies.

    `weights_sha256` has the hashes of complete files. Models above `WHOLE_BYTES` have `weights_sample_sha256` instead:
    for each file the hash of its size and of 64 pieces of 64 KiB, spread evenly over the file.
    """
    files = _files(Path(path))
    if not files:
        return {}
    try:
        is_whole = sum(file.stat().st_size for file in files) <= WHOLE_BYTES
        hashes = {file.name: _digest(_whole(file) if is_whole else _sample(file)) for file in files}
    except OSError as error:
        raise UserError(f"model.path: {path} cannot be read: {error.strerror or error}") from None
    return {"weights_sha256" if is_whole else "weights_sample_sha256": hashes}


def _files(path: Path) -> list[Path]:
    """Return the configuration and weight files of a folder, or the single file that holds both."""
    if path.is_file():
        return [path]
    weights = next((found for pattern in _WEIGHTS if (found := sorted(path.glob(pattern)))), [])
    return [*sorted(path.glob("config.json")), *weights]


def _whole(file: Path) -> Iterator[bytes]:
    with open(file, "rb") as stream:
        while piece := stream.read(2**20):
            yield piece


def _sample(file: Path) -> Iterator[bytes]:
    size = file.stat().st_size
    yield str(size).encode()
    with open(file, "rb") as stream:
        for number in range(_PIECES):
            stream.seek(max(0, size - _PIECE_BYTES) * number // (_PIECES - 1))
            yield stream.read(_PIECE_BYTES)


def _digest(pieces: Iterator[bytes]) -> str:
    digest = hashlib.sha256()
    for piece in pieces:
        digest.update(piece)
    return digest.hexdigest()
