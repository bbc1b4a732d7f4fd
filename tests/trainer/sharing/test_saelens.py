from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from support.extractions import CPU
from support.forked import in_loaded_process
from support.layouts import D_IN as LAYOUTS_WIDTH
from support.layouts import LAYOUTS
from support.saes import KINDS, TRANSCODERS, made, put_bar_into_a_gap
from support.saves import kill_exports
from support.tiny_models import D_IN, make_model

from trainer.contract.errors import UserError
from trainer.contract.settings.catalog import ARCHITECTURES
from trainer.contract.settings.hooks import parse_hook
from trainer.evaluation.exported import ExportedSae
from trainer.extraction.model_stream import ModelStream
from trainer.extraction.packing import ContextBatch
from trainer.saes.base import Sae
from trainer.sharing.base import shared_form
from trainer.sharing.saelens import TRANSFORMER_LENS_MODELS, SaeLens, export_sae, origin


def test_these_tests_export_every_architecture() -> None:
    assert KINDS.keys() == ARCHITECTURES.keys()
    assert TRANSCODERS.keys() == {name for name, entry in ARCHITECTURES.items() if entry.transcodes == "yes"}


def round_trip(sae: Sae, folder: Path, **metadata: Any) -> Any:
    sae_lens = pytest.importorskip("sae_lens")
    export_sae(sae, folder, metadata)
    return sae_lens.SAE.load_from_disk(folder)


@pytest.mark.parametrize("scale", [1.0, 0.2, 5.0])
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_saelens_reconstructs_raw_data_just_as_the_trainer_does(kind: str, scale: float, tmp_path: Path) -> None:
    sae = made(kind, x_scale=scale, y_scale=scale)
    # The raw values have a standard deviation of 3. The trainer's inputs are the raw values times `scale`.
    x = torch.randn(500, 32) * 3
    put_bar_into_a_gap(sae, x * scale)
    loaded = round_trip(sae, tmp_path / "sae")
    output = sae(x * scale, x * scale)
    assert loaded.cfg.architecture() == KINDS[kind][2]
    torch.testing.assert_close(loaded(x), output.x_hat / scale, rtol=1e-6, atol=1e-5)
    acts, expected = loaded.encode(x), output.acts.dense() / scale
    assert torch.equal(acts > 0, expected > 0)
    torch.testing.assert_close(acts, expected, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("skip", [False, True], ids=["plain", "skip"])
@pytest.mark.parametrize("kind", TRANSCODERS)
@torch.no_grad()
def test_saelens_maps_raw_inputs_to_raw_targets_just_as_the_transcoder_does(
    kind: str, skip: bool, tmp_path: Path
) -> None:
    sae = made(kind, d_out=20, x_scale=0.4, y_scale=2.5, skip=skip)
    x = torch.randn(500, 32) * 3
    put_bar_into_a_gap(sae, x * 0.4)
    loaded = round_trip(sae, tmp_path / "sae")
    assert loaded.cfg.architecture() == TRANSCODERS[kind].replace(
        "transcoder", "skip_transcoder" if skip else "transcoder"
    )
    assert (loaded.cfg.d_in, loaded.cfg.d_out) == (32, 20)
    output = sae(x * 0.4, torch.zeros(500, 20))
    torch.testing.assert_close(loaded(x), output.x_hat / 2.5, rtol=1e-6, atol=1e-5)
    assert torch.equal(loaded.encode(x) > 0, output.acts.dense() > 0)


def test_facts_about_training_are_in_the_saelens_metadata(tmp_path: Path) -> None:
    metadata = {"model_name": "gpt2", "hook_name": "blocks.6.hook_resid_post", "l0": 8.0}
    loaded = round_trip(made("batch_topk"), tmp_path / "sae", **metadata)
    assert {name: loaded.cfg.metadata[name] for name in metadata} == metadata


def test_an_export_folder_is_private_and_contains_only_two_files(tmp_path: Path) -> None:
    folder = tmp_path / "saes" / "7"
    export_sae(made(), folder, {})
    assert {file.name: stat.S_IMODE(file.stat().st_mode) for file in folder.iterdir()} == {
        "cfg.json": 0o600,
        "sae_weights.safetensors": 0o600,
    }
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_an_sae_in_a_shared_folder_is_shared_with_the_group(tmp_path: Path) -> None:
    tmp_path.chmod(0o2770)
    for _ in range(2):
        export_sae(made(), tmp_path / "7", {})
        assert {stat.S_IMODE(file.stat().st_mode) for file in (tmp_path / "7").iterdir()} == {0o660}
        assert stat.S_IMODE((tmp_path / "7").stat().st_mode) == 0o2770


def test_an_sae_from_an_earlier_attempt_is_replaced_completely(tmp_path: Path) -> None:
    for tokens in (1, 2):
        export_sae(made(), tmp_path / "sae", {"training_tokens": tokens})
    assert json.loads((tmp_path / "sae" / "cfg.json").read_text())["metadata"]["training_tokens"] == 2
    assert [entry.name for entry in tmp_path.iterdir()] == ["sae"]


def test_user_files_next_to_an_sae_are_kept_unchanged(tmp_path: Path) -> None:
    folder = tmp_path / "saes" / "7"
    export_sae(made(), folder, {"training_tokens": 1})
    (folder / "plots").mkdir()
    (folder / "plots" / "fvu.svg").write_text("a plot")
    (folder / "evals.json").write_text("mine")
    (folder / "evals.json").chmod(0o644)
    export_sae(made(), folder, {"training_tokens": 2})
    assert json.loads((folder / "cfg.json").read_text())["metadata"]["training_tokens"] == 2
    assert {entry.name for entry in folder.iterdir()} == {"cfg.json", "sae_weights.safetensors", "evals.json", "plots"}
    assert ((folder / "evals.json").read_text(), (folder / "plots" / "fvu.svg").read_text()) == ("mine", "a plot")
    assert stat.S_IMODE((folder / "evals.json").stat().st_mode) == 0o644
    assert [entry.name for entry in folder.parent.iterdir()] == ["7"]


def test_an_sae_is_not_written_through_a_symbolic_link(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "cfg.json").write_text("mine")
    (tmp_path / "sae").symlink_to(precious)
    with pytest.raises(UserError, match="sae is a symbolic link, and symbolic links are not followed; remove it"):
        export_sae(made(), tmp_path / "sae", {})
    # If a file in the folder is a symbolic link, the link is replaced and its target is kept.
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "cfg.json").symlink_to(precious / "cfg.json")
    export_sae(made(), tmp_path / "other", {})
    assert [(entry.name, entry.read_text()) for entry in precious.iterdir()] == [("cfg.json", "mine")]


def test_killing_an_export_at_any_moment_leaves_a_complete_sae_and_user_files(tmp_path: Path) -> None:
    n_killed = in_loaded_process(kill_exports, tmp_path)
    assert n_killed > 5
    token_counts = set()
    for moment in range(1, n_killed + 1):
        folder = tmp_path / str(moment)
        assert {entry.name for entry in folder.iterdir()} == {"cfg.json", "sae_weights.safetensors", "evals.json"}
        assert load_file(folder / "sae_weights.safetensors")["W_enc"].shape == (32, 128)
        token_counts.add(json.loads((folder / "cfg.json").read_text())["metadata"]["training_tokens"])
        # The next export removes the files left by the killed export.
        export_sae(made(), folder, {"training_tokens": 3})
        assert not list(tmp_path.glob(f".{moment}.*"))
    assert token_counts == {1, 2}


def test_the_origin_of_activations_is_stored_under_the_names_that_saelens_uses() -> None:
    meta = {"model": "gpt2", "hook_name": "blocks.6", "n_tokens": 5}
    assert origin(meta) == {"model_name": "gpt2", "hook_name": "blocks.6"}
    assert origin({}) == {}
    hooked = {"hook_name": "blocks.6.mlp.hook_in", "hook_name_out": "blocks.6.hook_mlp_out", "tokens_before_text": [1]}
    assert origin(hooked | {"special_tokens_dropped": True}) == {
        "hook_name": "blocks.6.mlp.hook_in", "hook_name_out": "blocks.6.hook_mlp_out", "hook_layer": 6,
        "prepend_bos": True, "exclude_special_tokens": True,
    }  # fmt: skip


def test_saelens_metadata_describes_how_to_load_a_model_with_its_hooks(tmp_path: Path) -> None:
    facts = origin({"model_name": "gpt2", "hook_name": "blocks.6.hook_resid_post"})
    for also in ({}, {"module": "transformer.h.6"}):
        metadata = round_trip(made(), tmp_path / "sae", **facts, **also).cfg.metadata
        assert (metadata.model_class_name, metadata.model_from_pretrained_kwargs) == ("HookedTransformer", {})
        assert (metadata.hook_layer, metadata.hook_name) == (6, "blocks.6.hook_resid_post")


def test_models_that_transformer_lens_should_load_are_in_its_list_of_models() -> None:
    loading = pytest.importorskip("transformer_lens.loading_from_pretrained")
    for name in TRANSFORMER_LENS_MODELS:
        assert loading.get_official_model_name(name).lower() == name.lower()
    for name in ("openai-community/gpt2", "HuggingFaceTB/SmolLM2-135M"):
        with pytest.raises(ValueError, match="not found"):
            loading.get_official_model_name(name)


def stream_at(model: Path, text: Path, hook: str) -> ModelStream:
    stream = ModelStream(model=str(model), hook=hook, text=str(text), context=16, d_in=D_IN)
    stream.begin(0, 1, CPU)
    return stream


@pytest.mark.parametrize("family", ["gpt2", "llama", "gemma3", "bert"])
@torch.no_grad()
def test_saelens_computes_the_same_rows_that_an_sae_was_trained_on(family: str, tmp_path: Path) -> None:
    sae_lens = pytest.importorskip("sae_lens")
    from datasets import Dataset
    from sae_lens.load_model import load_model

    model = make_model(tmp_path / "model", family)
    (tmp_path / "text.txt").write_text("a cat sat")
    rows = torch.arange(4 * 16).reshape(4, 16) * 7 % 290 + 3
    batch = ContextBatch(rows.numpy(), np.tile(np.arange(16), (4, 1)), np.repeat(np.arange(4)[:, None], 16, axis=1))
    for hook in ("resid_post.1", "resid_pre.0", "resid_pre.2", "mlp_in.1", "mlp_out.1", "attn_out.1", "mlp.1"):
        stream, is_transcoder = stream_at(model, tmp_path / "text.txt", hook), hook == "mlp.1"
        sae = round_trip(made("batch_topk", 32 if is_transcoder else None), tmp_path / hook, **origin(stream.meta))
        facts = sae.cfg.metadata
        lens = load_model(facts.model_class_name, facts.model_name, "cpu", facts.model_from_pretrained_kwargs)
        dataset = Dataset.from_list([{"input_ids": row} for row in rows.tolist()])
        store = sae_lens.ActivationsStore.from_sae(lens, sae, dataset, streaming=False)
        tokens = store.get_batch_tokens(4)
        assert torch.equal(tokens, rows)
        ours = stream._model.rows(batch, torch.arange(rows.numel()))
        torch.testing.assert_close(store.get_activations(tokens).flatten(0, 1), ours[0], rtol=1e-4, atol=1e-4)
        if is_transcoder:
            _, cache = lens.run_with_cache(tokens, names_filter=[facts.hook_name_out])
            torch.testing.assert_close(cache[facts.hook_name_out].flatten(0, 1), ours[1], rtol=1e-4, atol=1e-4)


def test_the_original_hook_name_is_restored_when_an_sae_written_for_saelens_is_reread(tmp_path: Path) -> None:
    facts = {
        "model_name": "/models/tiny/tiny.gguf", "hook_name": "blocks.1.mlp.hook_in", "hook_layer": 1,
        "hook_name_out": "blocks.1.hook_mlp_out", "module": "model.layers.1.norm", "module_out": "model.layers.1.mlp",
    }  # fmt: skip
    notes = SaeLens().write(shared_form(made("batch_topk", 32), facts), tmp_path / "sae")
    assert notes == ["SAELens loads a GGUF model only with its tokenizer files next to it"]
    told = json.loads((tmp_path / "sae" / "cfg.json").read_text())["metadata"]
    assert (told["model_name"], told["hook_name"]) == ("/models/tiny", "model.layers.1.norm")
    assert told["model_from_pretrained_kwargs"] == {"gguf_file": "tiny.gguf"}
    assert SaeLens().read(tmp_path / "sae").metadata.items() >= facts.items()


def test_rows_after_a_bert_blocks_last_norm_have_their_transformer_lens_name(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", "bert")
    (tmp_path / "text.txt").write_text("a cat sat")
    meta = stream_at(model, tmp_path / "text.txt", "resid_post.1").meta
    assert (meta["hook"], meta["hook_name"]) == ("resid_post.1", "blocks.1.hook_normalized_resid_post")
    assert origin(meta)["hook_layer"] == 1
    assert parse_hook(meta["hook_name"]) == parse_hook("resid_post.1")


@pytest.mark.parametrize("name", [name for name, layout in LAYOUTS.items() if layout.oracle == "sae_lens"])
@torch.no_grad()
def test_saelens_computes_the_same_results_from_files_of_any_version(name: str, tmp_path: Path) -> None:
    sae_lens = pytest.importorskip("sae_lens")
    torch.manual_seed(0)
    reference = LAYOUTS[name].write(tmp_path)
    theirs = sae_lens.SAE.load_from_disk(tmp_path)
    x = torch.randn(60, LAYOUTS_WIDTH) * 2
    # `clear` marks rows whose selected latents cannot be changed by rounding.
    clear = reference(x)[2]
    acts, x_hat = ExportedSae(SaeLens().read(tmp_path), CPU).reconstruct(x)
    others = theirs.encode(x)
    assert torch.equal((acts.values > 0)[clear], (others > 0)[clear])
    torch.testing.assert_close(acts.values[clear], others[clear], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(x_hat[clear], theirs(x)[clear], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("architecture", ["batchtopk", "matryoshka_batchtopk", "standard", "gated", "topk", "jumprelu"])
@torch.no_grad()
def test_a_saelens_checkpoint_is_read_like_its_inference_model(architecture: str, tmp_path: Path) -> None:
    sae_lens = pytest.importorskip("sae_lens")
    kind, config = sae_lens.registry.get_sae_training_class(architecture)
    widths = {"matryoshka_widths": [10, 40]} if "matryoshka" in architecture else {}
    k = {"k": 4} if "topk" in architecture else {}
    torch.manual_seed(0)
    theirs = kind(config(d_in=LAYOUTS_WIDTH, d_sae=40, **k, **widths))
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=0.7)
    if "batchtopk" in architecture:
        theirs.topk_threshold.fill_(1.3)
    theirs.save_model(tmp_path / "training")
    theirs.save_inference_model(tmp_path / "inference")
    checkpoint, inference = (SaeLens().read(tmp_path / name) for name in ("training", "inference"))
    form = "jumprelu" if "batchtopk" in architecture else architecture
    assert (checkpoint.form, checkpoint.k, inference.form) == (form, 4 if k else None, form)
    for name, tensor in inference.weights.items():
        torch.testing.assert_close(checkpoint.weights[name], tensor, rtol=1e-5, atol=1e-6)
