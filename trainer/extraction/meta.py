"""What is known of stored activations, for `meta.json` beside them."""

from __future__ import annotations

import math
from typing import Any

from trainer.contract.settings.extract import ExtractJob
from trainer.extraction.language_model import LanguageModel
from trainer.extraction.shard_writer import ShardFile, Sums

# What each token stands for, by its number.
TOKENS = "tokens.json"


def meta_of(job: ExtractJob, number: int, model: LanguageModel, sums: Sums, shards: list[ShardFile]) -> dict[str, Any]:
    """Return the facts of a hook's rows, by number.

    `gamma` is ‖mean‖/‖std‖: how far the rows are from the origin, in their spread. `scale` is ‖std‖.
    """
    hook, spread = job.hooks[number], math.sqrt(max(0.0, sums.variance))
    return {
        "model_name": job.model.path,
        "model_revision": job.model.revision or getattr(model.config, "_commit_hash", None),
        "model_class": model.class_name,
        "hook_name": hook.transformer_lens or hook.name,
        "hook": hook.name,
        "module": model.points[number].path,
        "is_module_input": model.points[number].of_input,
        "d_in": len(sums.total),
        "model_dtype": str(model.dtype).removeprefix("torch."),
        "attention": model.attention,
        "tokenizer": model.tokenizer.name,
        "tokens_before_text": model.tokenizer.before,
        "tokens_after_text": model.tokenizer.after,
        "documents_share_contexts": model.packs,
        "context_size": job.text.context,
        "dataset_path": job.text.path or job.text.dataset,
        "special_tokens_dropped": not job.extract.keep_special,
        "n_tokens": sums.n,
        "shuffled": True,
        "seed": job.extract.seed,
        "mean": sums.mean,
        "scale": spread,
        "gamma": math.hypot(*sums.mean) / spread if spread else None,
        "shards": {shard.name: shard.sha256 for shard in shards},
    }
