"""Tests that other tools compute the same results as the exported SAE.

Each tool reads the format written for it. `make model` downloads the tools. Tests whose tool is missing are skipped.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.features import MOVED, SPREAD, features_file
from support.saes import KINDS, TRANSCODERS, made, new_sae, peer, put_bar_into_a_gap
from torch import Tensor

from trainer.contract.errors import UserError
from trainer.contract.runs.explanations import Explanation, record
from trainer.contract.settings.catalog import FORMATS
from trainer.saes.base import Sae
from trainer.saes.topk import TopK
from trainer.sharing.base import BELOW_K, Format, SharedSae, shared_form
from trainer.sharing.circuit_tracer import member_of, notes_of_set

SCALE = 0.4
ORIGIN = {
    "model_name": "gpt2",
    "hook_name": "blocks.2.mlp.hook_in",
    "hook_name_out": "blocks.2.hook_mlp_out",
    "hook_layer": 2,
    "context_size": 64,
}


class Computed(NamedTuple):
    """An SAE's results for raw data x: activations [n_tokens, d_sae] and reconstructions."""

    x: Tensor
    acts: Tensor
    x_hat: Tensor


def form_of(name: str) -> Format:
    form: Format = FORMATS[name].load()()
    return form


@torch.no_grad()
def written(
    name: str, kind: str, folder: Path, d_out: int | None = None, *, skip: bool = False
) -> tuple[Sae, Computed, list[str]]:
    """Write an SAE in a format. Return the SAE, its results in the trainer, and notes about the export."""
    sae = made(kind, d_out, x_scale=SCALE, y_scale=SCALE, skip=skip)
    x = torch.randn(300, 32) * 3
    put_bar_into_a_gap(sae, x * SCALE)
    output = sae(x * SCALE, x * SCALE)
    metadata = ORIGIN | {"training_architecture": kind, "training_tokens": 5}
    notes = form_of(name).write(shared_form(sae, metadata, k=8), folder)
    return sae, Computed(x, output.acts.dense() / SCALE, output.x_hat / SCALE), notes


def assert_computes(acts: Tensor, x_hat: Tensor, expected: Computed) -> None:
    assert torch.equal(acts > 0, expected.acts > 0)
    torch.testing.assert_close(acts, expected.acts, rtol=1e-4, atol=3e-5)
    torch.testing.assert_close(x_hat, expected.x_hat, rtol=1e-4, atol=1e-4)


LOADED_AS = {
    "topk": "AutoEncoderTopK",
    "batch_topk": "BatchTopKSAE",
    "hierarchical_topk": "AutoEncoderTopK",
    "matryoshka_batch_topk": "MatryoshkaBatchTopKSAE",
    "jumprelu": "JumpReluAutoEncoder",
    "gated": "GatedAutoEncoder",
    "standard": "AutoEncoderNew",
}


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_dictionary_learning_computes_the_same_results_as_the_trainer(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = peer(monkeypatch, "dictionary_learning.utils", "nnsight").load_dictionary
    _, expected, _ = written("dictionary_learning", kind, tmp_path / "sae")
    dictionary, config = load(str(tmp_path / "sae"), "cpu")
    assert type(dictionary).__name__ == LOADED_AS[kind] == config["trainer"]["dict_class"]
    assert (config["trainer"]["lm_name"], config["trainer"]["layer"]) == ("gpt2", 2)
    acts = dictionary.encode(expected.x)
    assert_computes(acts, dictionary.decode(acts), expected)


@pytest.mark.parametrize(("d_out", "skip"), [(None, False), (32, False), (32, True)], ids=["sae", "plain", "skip"])
@torch.no_grad()
def test_sparsify_computes_the_same_results_as_the_trainer(
    d_out: int | None, skip: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sparsify = peer(monkeypatch, "sparsify.sparse_coder")
    _, expected, _ = written("sparsify", "topk", tmp_path / "sae", d_out, skip=skip)
    coder = sparsify.SparseCoder.load_from_disk(tmp_path / "sae")
    assert (coder.cfg.transcode, coder.cfg.skip_connection) == (d_out is not None, skip)
    top = coder.encode(expected.x)
    acts = torch.zeros_like(expected.acts).scatter(1, top.top_indices, top.top_acts)
    # If Triton is installed, sparsify's decoder uses a GPU-only kernel.
    monkeypatch.setattr(sparsify, "decoder_impl", lambda indices, values, rows: acts @ rows.mT)
    assert_computes(acts, coder(expected.x).sae_out, expected)


@pytest.mark.parametrize("skip", [False, True], ids=["plain", "skip"])
@pytest.mark.parametrize("kind", [*TRANSCODERS, "topk"])
@torch.no_grad()
def test_circuit_tracer_computes_the_same_results_as_the_transcoder(
    kind: str, skip: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tracer = peer(monkeypatch, "circuit_tracer.transcoder.single_layer_transcoder")
    yaml = pytest.importorskip("yaml")
    _, expected, notes = written("circuit-tracer", kind, tmp_path / "set", d_out=32, skip=skip)
    gap, *of_topk = notes
    assert gap == "circuit-tracer loads sets that start at layer 0 and have no gaps, but layers 0, 1 are missing"
    assert ["since April 2026" in note for note in of_topk] == ([True] if kind == "topk" else [])
    config = yaml.safe_load((tmp_path / "set" / "config.yaml").read_text())
    assert config == {
        "model_kind": "transcoder_set", "model_name": "gpt2", "feature_input_hook": "mlp.hook_in",
        "feature_output_hook": "hook_mlp_out", "scan": "", **({"activation": "topk", "k": 8} if of_topk else {}),
    }  # fmt: skip
    hooks = {name: config[name] for name in ("scan", "feature_input_hook", "feature_output_hook")}
    files = {0: str(tmp_path / "set" / "layer_2.safetensors")}
    for lazy in (False, True):
        cpu = torch.device("cpu")
        (loaded,) = tracer.load_transcoder_set(files, device=cpu, lazy_encoder=lazy, lazy_decoder=lazy, **hooks)
        if of_topk:
            loaded.activation_function = k_largest
        acts = loaded.encode(expected.x)
        assert (loaded.W_skip is not None) == skip
        assert_computes(acts, loaded.decode(acts, expected.x), expected)
    read = form_of("circuit-tracer").read(tmp_path / "set")
    assert (read.form, read.k) == (("topk", 8) if of_topk else (read.form, None))


def k_largest(pre_acts: Tensor) -> Tensor:
    """Keep each row's 8 largest pre-activations, like TopK in circuit-tracer, which the tested fork lacks.

    At commit 4bb8c0e, circuit-tracer also keeps negative ones, and gets k from the `activation` and `k` of config.yaml.
    """
    largest = pre_acts.topk(8)
    return torch.zeros_like(pre_acts).scatter(-1, largest.indices, largest.values)


def test_a_circuit_tracer_topk_may_store_its_k_in_the_layers_file(tmp_path: Path) -> None:
    written("circuit-tracer", "topk", tmp_path, d_out=32)
    config, layer = tmp_path / "config.yaml", tmp_path / "layer_2.safetensors"
    config.write_text(config.read_text().replace("k: 8\n", ""))
    save_file(load_file(layer) | {"k": torch.tensor(8)}, layer)
    assert form_of("circuit-tracer").read(tmp_path).k == 8


@pytest.mark.parametrize(("share", "notes"), [(0.0, 0), (0.05, 1), (None, 0)])
def test_an_export_reports_on_how_many_rows_circuit_tracer_keeps_negative_values(
    share: float | None, notes: int
) -> None:
    shared = shared_form(made("topk", 32), {"hook_layer": 0} | ({} if share is None else {BELOW_K: share}))
    found = [note for note in notes_of_set([member_of(shared)]) if "negative" in note]
    assert len(found) == notes
    assert not notes or "on up to 5 % of a layer's held-out rows, fewer than k" in found[0]


@pytest.mark.parametrize("k", ["", "k: 0\n", "k: many\n", "k: 99999999999\n"])
def test_a_circuit_tracer_topk_without_its_k_produces_a_one_sentence_error(k: str, tmp_path: Path) -> None:
    written("circuit-tracer", "topk", tmp_path, d_out=32)
    config = tmp_path / "config.yaml"
    config.write_text(config.read_text().replace("k: 8\n", k))
    with pytest.raises(UserError, match=r"\bk\b") as error:
        form_of("circuit-tracer").read(tmp_path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "kind", "d_out", "reason"),
    [
        ("sparsify", "jumprelu", None, "sparsify supports only TopK, but this SAE is exported as jumprelu"),
        (
            "sparsify",
            "topk",
            20,
            "sparsify needs d_out = d_in, but this maps 32 dimensions to 20",
        ),
        ("saelens", "topk", 32, "SAELens has no TopK transcoders; use --format sparsify"),
        ("dictionary_learning", "jumprelu", 32, "dictionary_learning has no transcoders"),
        ("circuit-tracer", "topk", None, "circuit-tracer supports only transcoders"),
        (
            "circuit-tracer",
            "standard",
            20,
            "circuit-tracer needs d_out = d_in, but this maps 32 dimensions to 20",
        ),
    ],
)
def test_a_format_that_cannot_represent_the_sae_is_refused(
    name: str, kind: str, d_out: int | None, reason: str
) -> None:
    for skip in (False, True) if d_out else (False,):
        refusal = form_of(name).refusal(shared_form(made(kind, d_out, skip=skip), {}))
        assert refusal is not None
        assert refusal.startswith(reason)


def test_metadata_unknown_to_sparsify_is_kept_next_to_its_settings(tmp_path: Path) -> None:
    _, _, notes = written("sparsify", "topk", tmp_path / "sae")
    assert notes == []
    assert form_of("sparsify").read(tmp_path / "sae").metadata == ORIGIN | {
        "training_architecture": "topk", "training_tokens": 5,
    }  # fmt: skip


def test_a_layer_name_is_never_used_as_a_path(tmp_path: Path) -> None:
    shared = shared_form(made("standard", 32), {"hook_layer": "../x"})
    (note,) = form_of("circuit-tracer").write(shared, tmp_path / "set")
    assert note == "the data does not name its layer; rename layer_0.safetensors after the layer"
    assert {file.name for file in (tmp_path / "set").iterdir()} == {"config.yaml", "layer_0.safetensors"}


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_dict_contains_only_tensors_and_no_extra_bytes(kind: str, tmp_path: Path) -> None:
    sae, _, _ = written("dictionary_learning", kind, tmp_path / "sae")
    tensors = torch.load(tmp_path / "sae" / "ae.pt", weights_only=True)
    assert all(isinstance(tensor, Tensor) for tensor in tensors.values())
    assert (tmp_path / "sae" / "ae.pt").stat().st_size < 4.2 * sum(one.numel() for one in sae.parameters()) + 5000
    assert json.loads((tmp_path / "sae" / "config.json").read_text())["metadata"]["training_tokens"] == 5


def with_features(folder: Path, **moved: Any) -> SharedSae:
    """Return an SAE with two latents and a stored features file."""
    (folder / "features.safetensors").write_bytes(features_file(**moved))
    sae = new_sae(TopK, 3, 2, k=1).eval()
    torch.nn.init.normal_(sae.W_dec)
    return shared_form(sae, ORIGIN | {"context_size": 25}, features=folder / "features.safetensors")


def test_neuronpedia_shows_the_features_stored_by_eval(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shared = with_features(tmp_path)
    out = tmp_path / "out"
    out.mkdir()
    (out / "batch-7.json").write_text("of more latents")
    assert form_of("neuronpedia").refusal(shared) is None
    notes = ["logits are left out, since they require `sae-train eval` with --model"]
    assert form_of("neuronpedia").write(shared, out) == notes
    assert {file.name for file in out.iterdir()} == {"batch-0.json"}
    batch = json.loads((out / "batch-0.json").read_text())
    assert (batch["model_id"], batch["layer"]) == ("gpt2", 2)
    first, second = batch["features"]
    assert first["vector"] == shared.weights["W_dec"][0].tolist()
    assert (first["frac_nonzero"], second["frac_nonzero"]) == (0.03, 0.08)
    assert (first["freq_hist_data_bar_values"], first["freq_hist_data_bar_heights"]) == ([1.0, 3.0], [1.0, 2.0])
    assert (first["n_prompts_total"], first["n_tokens_in_prompt"]) == (4, 25)
    strongest = first["activations"][0]
    assert (strongest["tokens"], strongest["values"]) == ([" the", " Lämb", "s"], [0.0, 4.0, 1.0])
    assert strongest["qualifying_token_index"] == 1
    theirs = peer(monkeypatch, "sae_dashboard.neuronpedia.neuronpedia_dashboard").NeuronpediaDashboardBatch(**batch)
    read = theirs.to_dict()
    for feature, again in zip(batch["features"], read["features"], strict=True):
        assert {name: again[name] for name in feature} == feature
    assert "pos_str" not in first


def test_neuronpedia_shows_the_promoted_tokens_stored_by_eval(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shared = with_features(tmp_path, **MOVED)
    assert form_of("neuronpedia").write(shared, tmp_path / "out") == []
    batch = json.loads((tmp_path / "out" / "batch-0.json").read_text())
    names = ("pos_str", "pos_values", "neg_str", "neg_values")
    moved = [{name: one[name] for name in names} for one in batch["features"]]
    assert moved == [
        {"pos_str": [" Lämb"], "pos_values": [1.5], "neg_str": ["s"], "neg_values": [-2.5]},
        {"pos_str": [" the"], "pos_values": [0.5], "neg_str": [" Lämb"], "neg_values": [-0.25]},
    ]
    theirs = peer(monkeypatch, "sae_dashboard.neuronpedia.neuronpedia_dashboard").NeuronpediaDashboardBatch(**batch)
    assert [{name: one[name] for name in names} for one in theirs.to_dict()["features"]] == moved


def test_neuronpedia_gets_the_explanations_of_these_weights(tmp_path: Path) -> None:
    shared, out = with_features(tmp_path), tmp_path / "out"
    file = out / "explanations" / "batch-0.jsonl.gz"
    scored = Explanation(latent=1, text="articles", model="gpt-4o-mini", detection=0.9, fuzzing=0.75, prompts="v1")
    record(tmp_path, scored, Explanation(latent=0, text="lambs", model="m", prompts="v1"))
    form_of("neuronpedia").write(shared, out)
    first, second = map(json.loads, gzip.decompress(file.read_bytes()).splitlines())
    assert first.pop("id") != second.pop("id")
    where = {"modelId": "gpt2", "layer": "2-blocks.2.mlp.hook_in", "typeName": None, "authorId": ""}
    of_first = {"index": "0", "description": "lambs", "explanationModelName": "m"}
    assert first == where | of_first | {"notes": "sae-tui explain, prompts v1"}
    of_second = {"index": "1", "description": "articles", "explanationModelName": "gpt-4o-mini"}
    assert second == where | of_second | {"notes": "sae-tui explain, prompts v1, detection 0.900, fuzzing 0.750"}
    record(tmp_path, Explanation(latent=0, text="lambs", weights="w"), Explanation(latent=1, text="x", weights="w"))
    form_of("neuronpedia").write(shared, out)
    assert not file.exists()


def test_the_neuronpedia_export_merges_tokens_that_share_a_character(tmp_path: Path) -> None:
    shared = with_features(tmp_path)
    (tmp_path / "features.safetensors").write_bytes(features_file(SPREAD))
    form_of("neuronpedia").write(shared, tmp_path / "out")
    batch = json.loads((tmp_path / "out" / "batch-0.json").read_text())
    strongest = batch["features"][0]["activations"][0]
    assert (strongest["tokens"], strongest["values"]) == ([" 天", "气"], [4.0, 1.0])
    assert strongest["qualifying_token_index"] == 0


def test_names_of_latents_are_exported_as_explanations_for_neuronpedia(tmp_path: Path) -> None:
    (tmp_path / "cfg.json").write_text('{"metadata": {"training_tokens": 5}}')
    lines = (
        '{"latent": 0, "name": "sheep", "note": "private", "tokens": 5}',
        '{"latent": 1, "name": "of other weights", "tokens": 4}',
    )
    (tmp_path / "notes.jsonl").write_text("\n".join(lines))
    shared = with_features(tmp_path)
    notes = form_of("neuronpedia").write(shared, tmp_path / "out")
    assert notes[1:] == ["1 name given to other weights left out"]
    file = tmp_path / "out" / "explanations" / "batch-0.jsonl.gz"
    (row,) = [json.loads(line) for line in gzip.decompress(file.read_bytes()).splitlines()]
    assert row.pop("id")
    # The fields that Neuronpedia's own files of explanations have.
    assert row == {
        "modelId": "gpt2", "layer": f"2-{shared.metadata['hook_name']}", "index": "0", "description": "sheep",
        "authorId": "", "typeName": None, "explanationModelName": None,
    }  # fmt: skip
    before = file.read_bytes()
    form_of("neuronpedia").write(with_features(tmp_path), tmp_path / "out")
    assert file.read_bytes() == before
    (tmp_path / "notes.jsonl").unlink()
    form_of("neuronpedia").write(with_features(tmp_path), tmp_path / "out")
    assert not file.exists()


def test_an_export_for_neuronpedia_is_refused_if_the_sae_has_no_stored_features(tmp_path: Path) -> None:
    shared = with_features(tmp_path)
    for other, reason in (
        (shared._replace(features=None), "has stored none here"),
        (shared._replace(features=tmp_path / "gone"), "has stored none here"),
        (shared._replace(weights=shared_form(made(), {}).weights), "belongs to another SAE; run eval again"),
    ):
        assert str(form_of("neuronpedia").refusal(other)).endswith(reason)
