"""Builds the `meta.json` for stored activations, including hashes that identify the model and its tokenizer."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trainer.contract.errors import UserError
from trainer.contract.settings.extract import ExtractJob
from trainer.extraction.language_model import LanguageModel
from trainer.extraction.packing import Tokenizer
from trainer.extraction.shard_writer import DimensionSums, ShardFile
from trainer.extraction.text import is_data_set

# The largest model size, in bytes, at which files are still hashed in full; this takes a second or two. For larger
# models, only pieces of each file are hashed.
WHOLE_BYTES = 2 * 2**30
_PIECES, _PIECE_BYTES = 64, 2**16
# Patterns for weight files; the first pattern that matches any file is used, as in transformers.
_WEIGHTS = ("*.safetensors", "*.bin", "*.pt")


def facts_of_all(job: ExtractJob, model: LanguageModel) -> dict[str, Any]:
    """Return the metadata shared by all hooks: the model, its tokenizer, the text, and the selection of rows.

    `dataset_split` is None if the text is a file or a folder of files.
    """
    revision = job.model.revision or getattr(model.config, "_commit_hash", None)
    kept = job.extract
    return {
        "model_name": job.model.path,
        "model_revision": revision,
        **weights_facts(job.model.path),
        "model_class": model.class_name,
        "model_dtype": str(model.dtype).removeprefix("torch."),
        "attention": model.attention,
        "tokenizer": model.tokenizer.name,
        "tokenizer_name": job.model.path,
        "tokenizer_sha256": tokenizer_hash(model.tokenizer),
        "tokens_before_text": model.tokenizer.before,
        "tokens_after_text": model.tokenizer.after,
        "documents_share_contexts": model.packs,
        "context_size": job.text.context,
        # With longrope or dynamic NTK, a context longer than this changes the position embeddings of its entire batch.
        **({"rows_depend_on_batch_above": model.window_before} if model.window_before else {}),
        "dataset_path": job.text.path or job.text.dataset,
        "dataset_subset": job.text.subset,
        "dataset_split": job.text.split if job.text.dataset or is_data_set(str(job.text.path)) else None,
        "dataset_column": job.text.column,
        "texts_mended": model.tokenizer.n_mended,
        "special_tokens_dropped": not kept.keep_special,
        "keep_special": kept.keep_special,
        "skip_first": kept.skip_first,
        "max_norm": kept.max_norm,
        "shuffled": True,
        "seed": kept.seed,
    }


def facts_of_hook(
    job: ExtractJob, number: int, model: LanguageModel, sums: DimensionSums, shards: list[ShardFile], limit: float
) -> dict[str, Any]:
    """Return the metadata for the rows at hook `number`; `limit` is the largest norm allowed for a kept row.

    `gamma` is ‖mean‖/‖std‖: the norm of the mean row, relative to the rows' spread. `scale` is ‖std‖. `int8_noise` is
    the expected squared error of int8 rows, as a share of their variance.
    """
    hook, spread = job.hooks[number], math.sqrt(max(0.0, sums.variance))
    return {
        "hook_name": model.names[number],
        "hook": hook.name,
        "module": model.points[number].path,
        "is_module_input": model.points[number].of_input,
        "output_module": model.modules[number],
        "d_in": len(sums.total),
        "n_tokens": sums.n,
        "norm_limit": limit if job.extract.max_norm else None,
        "mean": sums.mean,
        "scale": spread,
        **({"int8_noise": sums.noise / sums.n / sums.variance} if sums.noise and sums.variance > 0 else {}),
        "gamma": math.hypot(*sums.mean) / spread if spread else None,
        "shards": {shard.name: shard.sha256 for shard in shards},
    }


def tokenizer_hash(tokenizer: Tokenizer) -> str:
    """Return a SHA-256 hash of everything that determines token ids: vocabulary, merges, rules and chat template."""
    return hashlib.sha256(json.dumps(tokenizer.rules(), sort_keys=True).encode()).hexdigest()


def weights_facts(path: str) -> dict[str, Any]:
    """Return a hash for each file of a local model, or {} for a hub model, which is identified by its revision.

    `weights_sha256` contains the hashes of complete files. Models larger than `WHOLE_BYTES` have
    `weights_sample_sha256` instead: for each file, a hash of its size and of 64 evenly spaced pieces of 64 KiB.
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
    """Return a folder's configuration and weight files, or the single file containing both."""
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
