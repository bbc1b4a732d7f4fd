"""EleutherAI's delphi format: `config.json`, and one `FIRST_LAST.safetensors` per range of latents."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from trainer.checkpoints.atomic_folder import fill_folder, write_json
from trainer.contract.errors import UsageError
from trainer.sharing.base import Firings, Format, SharedSae

CONFIG = "config.json"
# Delphi's default number of files.
MOST_SPLITS = 5
# The largest fp16 value. delphi stores activations in fp16; larger activations become infinite.
_LARGEST_HALF = 65504


class Delphi(Format):
    """Stores latent activations and the text's tokens, but no SAE weights."""

    files = ("[0-9]*_[0-9]*.safetensors", CONFIG)
    needs_firings = True

    def refusal(self, sae: SharedSae) -> str | None:
        if sae.firings is None:
            reason = "delphi needs the tokens on which latents fire, but the data of this run has no tokens"
            return f"{reason}; use data from `sae-train extract`"
        return None

    def write(self, sae: SharedSae, folder: Path) -> list[str]:
        assert sae.firings is not None
        firings = sae.firings()
        if not len(firings.activations):
            raise UsageError("--format: delphi needs latents that fire, but no latent fires in the run's data")
        splits = _splits(firings, sae.d_sae)
        names = {f"{first}_{last}.safetensors": (first, last) for first, last in splits}
        with fill_folder(folder, last=CONFIG) as temporary:
            for name, (first, last) in names.items():
                save_file(_split(firings, first, last), temporary / name)
            write_json(temporary / CONFIG, _config(sae, firings, len(names)))
        for stale in set(folder.glob(self.files[0])) - {folder / name for name in names}:
            stale.unlink(missing_ok=True)
        return [
            "the SAE itself is left out, since delphi explains latents from the tokens on which they fire",
            "texts are concatenated without a separator token, and tokens without rows in the data are missing",
        ]


def _splits(firings: Firings, d_sae: int) -> list[tuple[int, int]]:
    """Return the indices of the first and last latent of each file; the files cover all latents.

    Every file contains at least one firing latent, because delphi cannot read a file without activations.
    """
    latents = firings.indices[:, 2].contiguous()
    for n_splits in range(min(MOST_SPLITS, d_sae), 1, -1):
        bounds = torch.linspace(0, d_sae, n_splits + 1).long()
        if torch.bucketize(latents, bounds[1:-1], right=True).unique().numel() == n_splits:
            return list(zip(bounds[:-1].tolist(), (bounds[1:] - 1).tolist(), strict=True))
    return [(0, d_sae - 1)]


def _split(firings: Firings, first: int, last: int) -> dict[str, Tensor]:
    """Return the tensors for one file, with latent indices starting at 0."""
    latents = firings.indices[:, 2]
    is_in = (latents >= first) & (latents <= last)
    indices, activations = firings.indices[is_in] - torch.tensor([0, 0, first]), firings.activations[is_in]
    fits = int(indices.max()) < 2**16
    return {
        "locations": indices.to(torch.uint16 if fits else torch.uint32).contiguous(),
        "activations": activations.half() if float(activations.max()) <= _LARGEST_HALF else activations.float(),
        "tokens": firings.tokens.long().contiguous(),
    }


def _config(sae: SharedSae, firings: Firings, n_splits: int) -> dict[str, object]:
    """Return the fields of delphi's CacheConfig, including the model whose tokenizer delphi loads."""
    n_contexts, n_tokens = firings.tokens.shape
    return {
        "dataset_repo": str(sae.metadata.get("dataset_path") or ""),
        "dataset_split": "",
        "dataset_name": "",
        "dataset_column": "",
        "batch_size": 1,
        "cache_ctx_len": n_tokens,
        "n_tokens": n_contexts * n_tokens,
        "n_splits": n_splits,
        "model_name": str(sae.metadata.get("model_name", "")),
    }
