"""Tests that delphi (downloaded by `make model`) can read the activation caches written for it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.saes import made, peer
from torch import Tensor

from trainer.contract.errors import UsageError
from trainer.sharing.base import Firings, shared_form
from trainer.sharing.delphi import MOST_SPLITS, Delphi

D_SAE = 128
ORIGIN = {"model_name": "gpt2", "dataset_path": "a-text"}


def firings(d_sae: int = D_SAE, largest: float = 3.0) -> Firings:
    """Create random activations for `d_sae` latents in 5 contexts with 64 tokens each."""
    generator = torch.Generator().manual_seed(0)
    acts = torch.rand(5, 64, d_sae, generator=generator) * largest
    acts[acts < 0.9 * largest] = 0
    indices = acts.nonzero()
    return Firings(torch.randint(50_000, (5, 64), generator=generator), indices, acts[tuple(indices.T)])


def write(of: Firings, folder: Path) -> list[str]:
    shared = shared_form(made(), ORIGIN)._replace(firings=lambda: of)
    assert Delphi().refusal(shared) is None
    return Delphi().write(shared, folder)


def dense(folder: Path) -> Tensor:
    """Return the activations from a cache, in which latent ids are relative to the first id in the file name."""
    acts = torch.zeros(5, 64, D_SAE)
    for file in folder.glob("*.safetensors"):
        split = load_file(file)
        first = int(file.name.split("_")[0])
        context, position, latent = split["locations"].long().unbind(1)
        acts[context, position, latent + first] = split["activations"].float()
    return acts


def test_each_file_has_all_tokens_and_the_activations_of_its_latents(tmp_path: Path) -> None:
    of = firings()
    notes = write(of, tmp_path / "sae")
    expected = torch.zeros(5, 64, D_SAE)
    expected[tuple(of.indices.T)] = of.activations
    torch.testing.assert_close(dense(tmp_path / "sae"), expected, rtol=1e-3, atol=0)
    files = sorted((tmp_path / "sae").glob("*.safetensors"), key=lambda file: int(file.stem.split("_")[0]))
    ranges = [tuple(map(int, file.stem.split("_"))) for file in files]
    assert len(ranges) == MOST_SPLITS
    assert [latent for first, last in ranges for latent in range(first, last + 1)] == list(range(D_SAE))
    for file in files:
        assert torch.equal(load_file(file)["tokens"], of.tokens)
        assert load_file(file)["locations"].dtype == torch.uint16
    config = json.loads((tmp_path / "sae" / "config.json").read_text())
    assert config.items() >= {"model_name": "gpt2", "cache_ctx_len": 64, "n_tokens": 320, "n_splits": 5}.items()
    assert "the SAE itself is left out" in notes[0]


def test_every_file_contains_activations_even_if_most_latents_are_dead(tmp_path: Path) -> None:
    write(firings(d_sae=40), tmp_path)
    files = list(tmp_path.glob("*.safetensors"))
    assert all(len(load_file(file)["activations"]) for file in files)
    assert {int(file.stem.split("_")[1]) for file in files} >= {D_SAE - 1}


def test_a_second_cache_replaces_all_files_from_the_first(tmp_path: Path) -> None:
    write(firings(), tmp_path)
    write(firings(d_sae=10), tmp_path)
    assert {file.name for file in tmp_path.iterdir()} == {f"0_{D_SAE - 1}.safetensors", "config.json"}


def test_activations_that_exceed_half_precision_stay_finite(tmp_path: Path) -> None:
    of = firings(largest=1e6)
    write(of, tmp_path)
    assert float(dense(tmp_path).max()) == float(of.activations.max())


def test_data_without_tokens_or_activations_is_refused(tmp_path: Path) -> None:
    shared = shared_form(made(), ORIGIN)
    assert "has no tokens; use data from `sae-train extract`" in str(Delphi().refusal(shared))
    none = Firings(torch.zeros(1, 8, dtype=torch.int64), torch.zeros(0, 3, dtype=torch.int64), torch.zeros(0))
    with pytest.raises(UsageError, match="no latent fires in the run's data"):
        write(none, tmp_path / "sae")
    assert not (tmp_path / "sae").exists()


def test_delphi_reads_the_activations_for_every_latent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # delphi imports these packages, but does not need them to read a cache.
    peer(monkeypatch, "json", "faiss", "blobfile", "orjson", "sentence_transformers")
    monkeypatch.setattr(sys.modules["sentence_transformers"], "SentenceTransformer", None, raising=False)
    loader = peer(monkeypatch, "delphi.latents.loader")
    config = peer(monkeypatch, "delphi.config")
    of = firings()
    write(of, tmp_path / "my-sae")

    class Tokens:
        def batch_decode(self, ids: Tensor) -> list[str]:
            return [str(int(one)) for one in ids]

    sampled = config.SamplerConfig(n_examples_train=5, n_examples_test=5, n_quantiles=5)
    constructed = config.ConstructorConfig(min_examples=5, n_non_activating=0)
    dataset = loader.LatentDataset(str(tmp_path), sampled, constructed, tokenizer=Tokens(), modules=["my-sae"])
    assert torch.equal(dataset.tokens, of.tokens)
    read = {}
    for buffer in dataset.buffers:
        for data in buffer:
            read[data.latent.latent_index] = data.activation_data
    assert sorted(read) == of.indices[:, 2].unique().tolist()
    for latent, data in read.items():
        mine = of.indices[:, 2] == latent
        assert torch.equal(data.locations, of.indices[mine])
        torch.testing.assert_close(data.activations.float(), of.activations[mine], rtol=1e-3, atol=0)
    records = list(dataset)
    assert len(records) > D_SAE // 2
    for record in records:
        n_fired = int((of.indices[:, 2] == record.latent.latent_index).sum())
        assert record.per_token_frequency == pytest.approx(n_fired / of.tokens.numel())
