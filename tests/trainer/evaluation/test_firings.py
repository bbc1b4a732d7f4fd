from __future__ import annotations

from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file

from trainer.cli import main
from trainer.contract.runs.rank_spec import EXIT_FINISHED, EXIT_USAGE
from trainer.evaluation.firings import CONTEXT

SAMPLE = Path(__file__).parents[3] / "data" / "sample"


def test_a_cache_has_the_activations_of_the_exported_sae_on_each_token(tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text(f'[data]\npath = "{SAMPLE}"\n[launch]\ngpus = "cpu"\n')
    small = ["sae.d_sae=384", "sae.k=8", "train.n_steps=4", "train.batch_size=512", "train.report_card=false"]
    flags = [word for setting in small for word in ("--set", setting)]
    assert main(["run", str(tmp_path / "job.toml"), "--out", str(tmp_path / "run"), *flags]) == EXIT_FINISHED
    export = ["export", str(tmp_path / "run"), "--format", "delphi", "--out"]
    assert main([*export, str(tmp_path / "cache")]) == EXIT_FINISHED

    weights = load_file(tmp_path / "run" / "sae" / "sae_weights.safetensors")
    with safe_open(SAMPLE / "acts-00000.safetensors", "pt") as shard:
        x, token_ids = shard.get_tensor("activations").float(), shard.get_tensor("token_ids").long()
    pre_acts = (x - weights["b_dec"]) @ weights["W_enc"] + weights["b_enc"]
    top = pre_acts.relu().topk(8, dim=1)
    expected = torch.zeros_like(pre_acts).scatter_(1, top.indices, top.values)

    n = len(x) // CONTEXT * CONTEXT
    acts, tokens = torch.zeros(n // CONTEXT, CONTEXT, 384), torch.zeros(0)
    for file in (tmp_path / "cache").glob("*.safetensors"):
        split, first = load_file(file), int(file.name.split("_")[0])
        context, position, latent = split["locations"].long().unbind(1)
        acts[context, position, latent + first] = split["activations"].float()
        tokens = split["tokens"]
    assert torch.equal(tokens.flatten(), token_ids[:n])
    torch.testing.assert_close(acts.reshape(n, -1), expected[:n], rtol=2e-3, atol=1e-3)


def test_data_without_tokens_is_refused_before_any_file_is_written(tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text(
        '[data]\nsource = "synthetic"\n[sae]\nd_sae = 128\nk = 4\n[train]\nn_steps = 2\nbatch_size = 64\n'
        'report_card = false\n[launch]\ngpus = "cpu"\n'
    )
    assert main(["run", str(tmp_path / "job.toml"), "--out", str(tmp_path / "run")]) == EXIT_FINISHED
    out = tmp_path / "cache"
    assert main(["export", str(tmp_path / "run"), "--format", "delphi", "--out", str(out)]) == EXIT_USAGE
    assert not out.exists()
