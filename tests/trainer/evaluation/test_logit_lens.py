"""Tests of the tokens that decoder directions promote and suppress, against loops over each family's parameters."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from support.extractions import CPU, extraction_job
from support.tiny_models import D_IN, make_config, make_tokenizer, sentences
from torch import Tensor

from trainer.contract.settings.extract import ExtractJob
from trainer.evaluation.logit_lens import N_TOKENS, moved_tokens
from trainer.evaluation.spliced import SplicedModel

D_SAE = 7
W_DEC = torch.randn(D_SAE, D_IN, generator=torch.Generator().manual_seed(1))
# By family: the path of the final norm, whether it subtracts the mean, and the number added to its weight.
NORMS = {
    "gpt2": ("transformer.ln_f", True, 0.0),
    "llama": ("model.norm", False, 0.0),
    "gemma3": ("model.norm", False, 1.0),
    "qwen3": ("model.norm", False, 0.0),
}


def make_causal(folder: Path, family: str) -> Any:
    """Write a causal model with norm weights far from 1, and return it."""
    torch.manual_seed(0)
    tokenizer = make_tokenizer(family)
    model = transformers.AutoModelForCausalLM.from_config(make_config(family, len(tokenizer)))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name.lower() or "ln_" in name:
                parameter.copy_(torch.randn_like(parameter))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model


def job_of(folder: Path, hook: str = "resid_post.1") -> ExtractJob:
    text = folder / "corpus.jsonl"
    text.write_text("".join(json.dumps({"text": one}) + "\n" for one in sentences(5)))
    return extraction_job(folder, text, folder / "rows", hooks=[hook])


def in_a_loop(model: Any, family: str) -> list[list[float]]:
    """Return the logits of each direction by definition, one by one in float64."""
    path, takes_mean, added = NORMS[family]
    scale = (model.get_submodule(path).weight.double() + added).tolist()
    w_u = model.lm_head.weight.double().tolist()
    logits = []
    for direction in W_DEC.double().tolist():
        mean = sum(direction) / D_IN if takes_mean else 0.0
        moved = [(one - mean) * factor for one, factor in zip(direction, scale, strict=True)]
        logits.append([sum(a * b for a, b in zip(moved, of_token, strict=True)) for of_token in w_u])
    return logits


@pytest.mark.parametrize("family", NORMS)
def test_the_most_affected_tokens_match_a_loop_over_the_model_parameters(tmp_path: Path, family: str) -> None:
    logits = in_a_loop(make_causal(tmp_path, family), family)
    told = SplicedModel(job_of(tmp_path), "resid_post.1", CPU).moved_tokens(W_DEC)
    for latent, of_tokens in enumerate(logits):
        order = sorted(range(len(of_tokens)), key=lambda token: -of_tokens[token])
        for name, best in (("promoted", order[:N_TOKENS]), ("suppressed", order[: -N_TOKENS - 1 : -1])):
            assert told[name][latent].tolist() == best
            values = torch.tensor([of_tokens[token] for token in best])
            torch.testing.assert_close(told[f"{name}_logits"][latent], values, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("hook", ["mlp_in.1", "transformer.h.1.attn.c_proj"])
def test_hooks_outside_the_residual_stream_have_no_promoted_tokens(tmp_path: Path, hook: str) -> None:
    make_causal(tmp_path, "gpt2")
    assert SplicedModel(job_of(tmp_path, hook), hook, CPU).moved_tokens(W_DEC) == {}


def test_a_model_with_more_than_a_norm_before_its_unembedding_is_skipped(tmp_path: Path) -> None:
    tokenizer = make_tokenizer("bert")
    config = make_config("bert", len(tokenizer))
    config.is_decoder = True
    transformers.BertLMHeadModel(config).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    assert SplicedModel(job_of(tmp_path), "resid_post.1", CPU).moved_tokens(W_DEC) == {}


def test_directions_are_processed_in_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    w_u = torch.randn(D_IN, 50, generator=torch.Generator().manual_seed(2))
    whole = moved_tokens(W_DEC, w_u)
    monkeypatch.setattr("trainer.evaluation.logit_lens._AT_ONCE", 100)
    parts = moved_tokens(W_DEC, w_u)
    for name in whole:
        torch.testing.assert_close(whole[name], parts[name])
    few: dict[str, Tensor] = moved_tokens(W_DEC, w_u[:, :4])
    assert few["promoted"].shape == (D_SAE, 4)
