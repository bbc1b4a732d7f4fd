"""Checks max-activating examples against naive loops over the rows in text order."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from support.extractions import extraction_job, run
from support.tiny_models import make_model, sentences
from torch import Tensor

from trainer.activations.outliers import Outliers
from trainer.cli import main
from trainer.contract.runs.features import FEATURES, Features
from trainer.contract.runs.rank_spec import EXIT_FINISHED, EXIT_USAGE
from trainer.evaluation.contexts import (
    AFTER,
    BEFORE,
    CACHE_CONTEXT,
    N_BINS,
    TokenRows,
    contexts_of,
    most_common_share,
    nearest_latents,
    texts_of,
    write_features,
)
from trainer.extraction.shard_writer import RowOrigin
from trainer.extraction.token_bytes import read_tokens
from trainer.saes.sparse_acts import Acts, DenseActs, SparseActs, SparseIndices

SAMPLE = Path(__file__).parents[3] / "data" / "sample"

D_IN, D_SAE, N_CONTEXTS = 6, 9, 3
W_ENC = torch.randn(D_IN, D_SAE, generator=torch.Generator().manual_seed(0))
WORDS = [f" w{number}" for number in range(50)]


def test_activations_bundled_with_the_app_record_their_text() -> None:
    place = Path(__file__).parents[3] / "data" / "sample"
    (text,) = texts_of(place)
    words = json.loads((place / "tokens.json").read_text())
    one = text.origin.document == 3
    assert "".join(words[token] for token in text.origin.token_ids[one].tolist()).startswith(
        " and as soon as we had heard these things , our hearts did melt , neither did there remain any more courage"
    )
    assert torch.equal(text.origin.positions[one], torch.arange(1, 127, dtype=torch.int32))
    assert int(text.origin.document.max()) == 137


def dense(x: Tensor) -> Acts:
    return DenseActs((x @ W_ENC - 1.0).relu())


def sparse(x: Tensor) -> Acts:
    values = dense(x).dense()
    tokens, latents = torch.nonzero(values >= 0, as_tuple=True)
    starts = torch.arange(len(x)) * D_SAE
    return SparseActs(values[tokens, latents], SparseIndices(latents, tokens, starts), D_SAE)


def text(lengths: list[int], seed: int, first_document: int = 0) -> TokenRows:
    """Return the rows for concatenated documents with the given lengths."""
    generator = torch.Generator().manual_seed(seed)
    n = sum(lengths)
    documents = torch.cat([torch.full((length,), first_document + i) for i, length in enumerate(lengths)])
    positions = torch.cat([torch.arange(length) for length in lengths])
    ids = torch.randint(0, len(WORDS), (n,), generator=generator)
    return TokenRows(torch.randn(n, D_IN, generator=generator), RowOrigin(ids.int(), positions.int(), documents.int()))


def no_outliers() -> Outliers:
    return Outliers(torch.ones(2, D_IN), torch.ones(2, D_IN), 0.0)


def features(found: list[TokenRows], folder: Path, acts_of=dense, outliers: Outliers | None = None) -> Features:
    contexts = contexts_of(acts_of, found, outliers or no_outliers(), D_SAE, N_CONTEXTS)
    assert contexts
    write_features(folder, contexts.tensors(W_ENC.T.contiguous(), [word.encode() for word in WORDS]))
    return Features(folder / FEATURES)


def naive_contexts(found: list[TokenRows], latent: int) -> list[tuple[float, str]]:
    """Return each document's largest activation and the words around it, in descending order of activation."""
    best: dict[int, tuple[float, str]] = {}
    for one in found:
        acts, origin = dense(one.x).dense()[:, latent], one.origin
        for row, act in enumerate(acts.tolist()):
            document = int(origin.document[row])
            if act <= best.get(document, (0.0, ""))[0]:
                continue
            around = range(max(0, row - BEFORE), min(len(acts), row + AFTER + 1))
            words = [WORDS[origin.token_ids[at]] for at in around if origin.document[at] == document]
            best[document] = act, "".join(words)
    return sorted(best.values(), reverse=True)[:N_CONTEXTS]


@settings(max_examples=25)
@given(st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=4), min_size=1, max_size=3), st.integers(0, 99))
def test_contexts_match_a_loop_over_all_rows(tmp_path_factory, lengths, seed) -> None:
    found, number = [], 0
    for part, one in enumerate(lengths):
        found.append(text(one, seed + part, number))
        number += len(one)
    read = features(found, tmp_path_factory.mktemp("sae"))
    acts = torch.cat([dense(one.x).dense() for one in found])
    assert read.n_rows == len(acts)
    for latent in range(D_SAE):
        feature, own = read.feature(latent), acts[:, latent]
        active = own[own > 0]
        assert feature.density == pytest.approx(len(active) / len(acts))
        assert feature.largest == pytest.approx(float(own.max()))
        assert feature.mean == pytest.approx(float(active.mean()) if len(active) else 0.0)
        bins = [min(N_BINS - 1, int(N_BINS * one / feature.largest)) for one in active.tolist()]
        assert sum(feature.histogram) == len(active)
        assert all(abs(n - bins.count(i)) <= 1 for i, n in enumerate(feature.histogram))
        told = [(one.act, "".join(token.text for token in one.tokens)) for one in feature.contexts]
        expected = naive_contexts(found, latent)
        assert [words for _, words in told] == [words for _, words in expected]
        assert [act for act, _ in told] == pytest.approx([act for act, _ in expected])


@pytest.mark.parametrize("words", ["w7", "w", " W4", "nothing"])
def test_a_search_matches_a_loop_over_all_tokens_in_all_contexts(tmp_path: Path, words: str) -> None:
    read = features([text([30, 20, 9], 2), text([25], 3, 3)], tmp_path)
    latents = [read.feature(latent) for latent in read.order()]
    has = {
        one.latent: [any(words.casefold() in token.text for token in context.tokens) for context in one.contexts]
        for one in latents
    }
    on = {
        one.latent: sum(words.casefold() in context.tokens[context.at].text for context in one.contexts)
        for one in latents
    }
    expected = sorted((latent for latent in has if any(has[latent])), key=lambda latent: (-on[latent], latent))
    fire = [latent for latent in expected if on[latent]]
    found = read.search(words)
    assert found[: len(fire)] == fire
    assert sorted(found) == sorted(expected)
    # The other latents keep their order in the list of all latents.
    assert found[len(fire) :] == [latent for latent in read.order() if latent in found[len(fire) :]]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 3)), max_size=40))
def test_the_share_of_the_most_common_token_matches_a_loop(pairs) -> None:
    latents, kinds = (torch.tensor([pair[place] for pair in pairs], dtype=torch.int64) for place in (0, 1))
    expected = []
    for latent in range(5):
        own = Counter(kind for one, kind in pairs if one == latent)
        expected.append(max(own.values()) / own.total() if own else 0.0)
    assert most_common_share(latents, kinds, 5).tolist() == pytest.approx(expected)


def test_sparse_activations_produce_the_same_file_as_dense_activations(tmp_path: Path) -> None:
    found = [text([30, 5], 1)]
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    features(found, tmp_path / "a")
    features(found, tmp_path / "b", sparse)
    assert (tmp_path / "a" / FEATURES).read_bytes() == (tmp_path / "b" / FEATURES).read_bytes()


def test_each_token_in_a_context_is_stored_with_the_latents_activation(tmp_path: Path) -> None:
    found = [text([40], 3)]
    read, acts = features(found, tmp_path), dense(found[0].x).dense()
    for latent in read.order():
        (context,) = read.feature(latent).contexts
        row = int(acts[:, latent].argmax())
        around = acts[max(0, row - BEFORE) : row + AFTER + 1, latent]
        assert [token.act for token in context.tokens] == pytest.approx(around.tolist())
        assert context.tokens[context.at].act == context.act == pytest.approx(float(acts[row, latent]))


def test_rows_with_a_huge_norm_or_a_nan_are_dropped(tmp_path: Path) -> None:
    one = text([20], 5)
    one.x[3] *= 1000
    one.x[7, 2] = float("nan")
    ordinary = torch.ones(20, dtype=torch.bool)
    ordinary[[3, 7]] = False
    read = features([one], tmp_path, outliers=Outliers(one.x[ordinary], one.x[ordinary], 10.0))
    acts = dense(one.x[ordinary]).dense()
    assert read.n_rows == 18
    for latent in range(D_SAE):
        assert read.feature(latent).largest == pytest.approx(float(acts[:, latent].max()))


def test_the_nearest_latents_match_a_loop_in_float64() -> None:
    w_dec = torch.randn(12, 5, generator=torch.Generator().manual_seed(1))
    latents, cosines = nearest_latents(w_dec)
    exact = torch.nn.functional.normalize(w_dec.double(), dim=1)
    for latent in range(12):
        others = sorted(((float(exact[latent] @ exact[one]), one) for one in range(12) if one != latent), reverse=True)
        assert latents[latent].tolist() == [one for _, one in others[:5]]
        assert cosines[latent].tolist() == pytest.approx([cosine for cosine, _ in others[:5]], abs=1e-6)


def test_rows_from_an_extraction_are_read_in_text_order(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    model = make_model(tmp_path / "model", "llama")
    corpus = tmp_path / "corpus.jsonl"
    texts = sentences(40)
    corpus.write_text("".join(json.dumps({"text": one}) + "\n" for one in texts))
    job = extraction_job(model, corpus, tmp_path / "rows", n_tokens=200, hooks=["resid_post.1"], context=64)
    run(job)
    folder = job.folder("resid_post.1")
    words = json.loads((folder / "tokens.json").read_text())
    told: dict[int, str] = {}
    for one in texts_of(folder):
        for token, document in zip(one.origin.token_ids.tolist(), one.origin.document.tolist(), strict=True):
            told[document] = told.get(document, "") + words[token]
    assert sum(map(len, told.values())) > 100
    for document, said in told.items():
        # The rows omit the first token of each document, and the last document may be truncated.
        assert said.strip() in texts[document]


def test_data_without_tokens_produces_no_contexts(tmp_path: Path) -> None:
    save_file({"activations": torch.randn(8, D_IN)}, tmp_path / "shard.safetensors")
    assert list(texts_of(tmp_path)) == []
    assert contexts_of(dense, texts_of(tmp_path), no_outliers(), D_SAE, N_CONTEXTS) is None


def test_without_active_latents_there_are_no_contexts_but_all_latents_are_counted(tmp_path: Path) -> None:
    read = features([text([8], 0)], tmp_path, lambda x: DenseActs(torch.zeros(len(x), D_SAE)))
    assert (read.order(), read.n_latents, read.n_rows) == ([], D_SAE, 8)
    assert read.feature(3).contexts == ()
    assert read.search("w") == []


def test_tokens_with_an_unexpected_shape_produce_no_contexts(tmp_path: Path) -> None:
    one = text([8], 0)
    origin = {name: tensor.reshape(2, 4) for name, tensor in one.origin._asdict().items()}
    save_file({"activations": one.x, **origin}, tmp_path / "shard.safetensors")
    assert list(texts_of(tmp_path)) == []


def test_rows_shuffled_in_an_unknown_order_produce_no_contexts(tmp_path: Path) -> None:
    one = text([8], 0)
    save_file({"activations": one.x, **one.origin._asdict()}, tmp_path / "shard.safetensors")
    assert [len(read.x) for read in texts_of(tmp_path)] == [8]
    (tmp_path / "meta.json").write_text('{"shuffled": true}')
    assert list(texts_of(tmp_path)) == []


SPREAD_TEXTS = ["今天天气很好，我们去公园。", "naïve 🎉 café", "明天的天气会怎么样？", "the cat sat on the mat"]


def test_contexts_with_byte_level_tokens_match_the_original_text(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    model = make_model(tmp_path / "model", "gpt2")
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text("".join(json.dumps({"text": one}) + "\n" for one in SPREAD_TEXTS))
    # Keep every row, even outliers: a dropped row could contain part of a character.
    every_row = {"skip_first": 0, "max_norm": 0.0}
    job = extraction_job(
        model, corpus, tmp_path / "rows", n_tokens=200, hooks=["resid_post.1"], context=64, **every_row
    )
    run(job)
    folder = job.folder("resid_post.1")
    (found,) = texts_of(folder)
    w_enc = torch.randn(found.x.shape[1], D_SAE, generator=torch.Generator().manual_seed(1))
    contexts = contexts_of(lambda x: DenseActs((x @ w_enc).relu()), [found], no_outliers(), D_SAE, 10)
    assert contexts
    write_features(tmp_path, contexts.tensors(w_enc.T.contiguous(), read_tokens(folder)))
    read = Features(tmp_path / FEATURES)
    told = {latent: ["".join(one.text for one in context.tokens) for context in read.feature(latent).contexts]
            for latent in read.order()}  # fmt: skip
    assert sum(map(len, told.values())) > 10
    # A character cut off at the end of the model's context is displayed as �.
    assert all(any(text.strip("�") in whole for whole in SPREAD_TEXTS) for texts in told.values() for text in texts)
    for words in ("天气", "🎉", "ïve", "the cat sat", "很好，"):
        assert sorted(read.search(words)) == sorted(
            latent for latent, texts in told.items() if any(words in text for text in texts)
        )
    assert read.search("天气")


@pytest.mark.slow
def test_a_cache_contains_the_exported_sae_activations_for_each_token(tmp_path: Path) -> None:
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

    n = len(x) // CACHE_CONTEXT * CACHE_CONTEXT
    acts, tokens = torch.zeros(n // CACHE_CONTEXT, CACHE_CONTEXT, 384), torch.zeros(0)
    for file in (tmp_path / "cache").glob("*.safetensors"):
        split, first = load_file(file), int(file.name.split("_")[0])
        context, position, latent = split["locations"].long().unbind(1)
        acts[context, position, latent + first] = split["activations"].float()
        tokens = split["tokens"]
    assert torch.equal(tokens.flatten(), token_ids[:n])
    torch.testing.assert_close(acts.reshape(n, -1), expected[:n], rtol=2e-3, atol=1e-3)


@pytest.mark.slow
def test_data_without_tokens_is_refused_before_any_file_is_written(tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text(
        '[data]\nsource = "synthetic"\n[sae]\nd_sae = 128\nk = 4\n[train]\nn_steps = 2\nbatch_size = 64\n'
        'report_card = false\n[launch]\ngpus = "cpu"\n'
    )
    assert main(["run", str(tmp_path / "job.toml"), "--out", str(tmp_path / "run")]) == EXIT_FINISHED
    out = tmp_path / "cache"
    assert main(["export", str(tmp_path / "run"), "--format", "delphi", "--out", str(out)]) == EXIT_USAGE
    assert not out.exists()
