"""Collects the metadata of stored activations for their `meta.json`."""

from __future__ import annotations

import math
from typing import Any

from trainer.contract.settings.extract import ExtractJob
from trainer.extraction.language_model import LanguageModel
from trainer.extraction.provenance import tokenizer_hash, weights_facts
from trainer.extraction.shard_writer import DimensionSums, ShardFile
from trainer.extraction.text import is_data_set


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
        # A longer context changes the position embeddings of all contexts in its batch (longrope, dynamic NTK).
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
    """Return the metadata of the rows of hook `number`; `limit` is the largest norm allowed for a kept row.

    `gamma` is ‖mean‖/‖std‖: the distance of the rows from the origin, relative to their spread. `scale` is ‖std‖.
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
        "gamma": math.hypot(*sums.mean) / spread if spread else None,
        "shards": {shard.name: shard.sha256 for shard in shards},
    }
