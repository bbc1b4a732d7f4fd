"""Tests that documents packed into one context do not affect each other, and that invalid models are rejected."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import transformers
from accelerate import dispatch_model
from safetensors.torch import load_file, save_file
from support.extractions import CPU, extraction_job
from support.tiny_models import BOS, CONTEXT, DECODERS, ENCODERS, FAMILIES, N_BLOCKS, SLIDING_WINDOW, sentences
from torch import Tensor

from trainer.contract.errors import UserError
from trainer.extraction.language_model import LanguageModel, indices
from trainer.extraction.model_files import refuse_odd_config
from trainer.extraction.packing import ContextBatch, batches, pack, separate

Load = Callable[[str], LanguageModel]


def load(folder: Path, *hooks: str, **settings: object) -> LanguageModel:
    job = extraction_job(folder, Path("text"), Path("output"), hooks=list(hooks or ["resid_post.2"]), **settings)
    return LanguageModel(job, CPU)


def rows_of(model: LanguageModel, batch: ContextBatch) -> Tensor:
    """Return the rows from the first hook for each token in a batch, [n_contexts, n_tokens, d]."""
    return model.rows(batch, torch.arange(batch.ids.size))[0].reshape(*batch.ids.shape, -1)


def alone(folder: Path, ids: np.ndarray) -> Tensor:
    """Run a document on its own through the unmodified model, and return the last block's output."""
    model = transformers.AutoModel.from_pretrained(folder).eval()
    blocks = next(module for module in model.modules() if isinstance(module, torch.nn.ModuleList))
    outputs: list[Tensor] = []
    blocks[-1].register_forward_hook(
        lambda _, __, output: outputs.append(output if isinstance(output, Tensor) else output[0])
    )
    with torch.inference_mode():
        model(input_ids=torch.from_numpy(ids)[None])
    return outputs[0][0]


def require_like_alone(folder: Path, model: LanguageModel, made: list[ContextBatch]) -> list[int]:
    """Check that each document piece has the same rows as in its own forward pass, and return the piece lengths."""
    lengths = []
    for batch in made:
        for ids, numbers, rows in zip(batch.ids, batch.documents, rows_of(model, batch), strict=True):
            for number in {*numbers.tolist()} - {-1}:
                place = numbers == number
                torch.testing.assert_close(rows[place], alone(folder, ids[place]), rtol=1e-3, atol=1e-3)
                lengths.append(int(place.sum()))
    return lengths


@pytest.mark.parametrize("family", DECODERS)
def test_a_packed_document_has_the_same_rows_as_on_its_own(tiny: Callable[[str], Path], family: str) -> None:
    model = load(tiny(family))
    assert model.packs
    # The last context is shorter than the others, so it is in a separate batch.
    made = list(batches(pack(model.tokenizer.tokens(sentences(6)), 32), 2, fills=False))
    assert made[-1].ids.shape < (1, 32) < made[0].ids.shape == (2, 32)
    lengths = require_like_alone(tiny(family), model, made)
    assert len(lengths) > len(made) * 2
    assert max(lengths) > 2 * SLIDING_WINDOW


@pytest.mark.parametrize("family", ENCODERS)
def test_an_encoder_gets_one_document_per_row_and_padding_changes_nothing(tiny, family: str) -> None:
    model = load(tiny(family))
    assert not model.packs
    made = list(batches(separate(model.tokenizer.tokens(sentences(6)), 32), 3, fills=True))
    assert any((batch.documents == -1).any() for batch in made)
    require_like_alone(tiny(family), model, made)


@pytest.mark.parametrize("weight", [0.1, 0.5, 1.0])
def test_documents_are_not_packed_for_an_encoder_even_if_its_attention_is_weak(copy, weight: float) -> None:
    file = (folder := copy("bert")) / "model.safetensors"
    weights = load_file(file)
    scaled = {name: one * weight if "attention.output.dense.weight" in name else one for name, one in weights.items()}
    save_file(scaled, file, {"format": "pt"})
    assert not load(folder).packs


def test_documents_are_not_packed_if_a_model_isolates_them_only_in_batches_of_one(
    tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = LanguageModel._forward

    def forgetful(self: LanguageModel, batch: ContextBatch, *, packed: bool) -> Tensor:
        return forward(self, batch, packed=packed and len(batch.ids) == 1)

    monkeypatch.setattr(LanguageModel, "_forward", forgetful)
    assert not load(tiny("llama")).packs


@pytest.fixture
def copy(tiny, tmp_path: Path) -> Callable[[str], Path]:
    """Return a function that copies a family's tiny model, so that a test can damage the copy."""
    return lambda family: Path(shutil.copytree(tiny(family), tmp_path / family))


def edit(file: Path, **changes: object) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def require_refused(sentence: str, folder: Path, *hooks: str, **settings: object) -> None:
    with pytest.raises(UserError) as error:
        load(folder, *hooks, **settings)
    assert "\n" not in str(error.value)
    assert str(error.value).startswith(sentence)


def test_a_missing_model_is_refused(tmp_path: Path) -> None:
    require_refused(f"model.path: there is nothing at {tmp_path / 'none'}", tmp_path / "none")
    require_refused(f"model.path: {tmp_path} has no config.json; give the folder of a model", tmp_path)


def test_a_damaged_weight_file_is_refused(copy) -> None:
    (folder := copy("gpt2")).joinpath("model.safetensors").write_bytes(b"nothing")
    require_refused('model.path: "', folder)


def test_missing_weights_are_refused_rather_than_randomly_initialised(copy) -> None:
    file = (folder := copy("llama")) / "model.safetensors"
    weights = load_file(file)
    lacking = [name for name in weights if ".1.mlp" in name]
    save_file({name: one for name, one in weights.items() if name not in lacking}, file, {"format": "pt"})
    sentence = "model.path: its files have no weights for layers.1.mlp.down_proj.weight and 2 more"
    require_refused(sentence, folder)
    # A hook in block 0 does not need the later block with the missing weights.
    load(folder, "resid_post.0")


def test_remote_code_is_not_run_by_default(copy) -> None:
    folder = copy("gpt2")
    (folder / "own.py").write_text("raise SystemExit(5)\n")
    edit(folder / "config.json", model_type="own", auto_map={"AutoConfig": "own.C", "AutoModel": "own.M"})
    shown = "comes with its own Python code; set model.remote_code = true if you trust its author"
    with pytest.raises(UserError, match=shown):
        load(folder)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"n_layer": 10**7}, "n_layer = 10,000,000, but no model has more than 2,048"),
        ({"n_layer": 900}, "n_layer = 900, but its files contain "),
        ({"text_config": {"num_local_experts": 10**6}}, "text_config.num_local_experts = 1,000,000, but no model has"),
        ({"layer_types": ["full"] * 10_000}, "layer_types = 10,000, but no model has"),
        (
            {"attn_implementation": "org/kernel"},
            'requires code from the hub (attn_implementation = "org/kernel"); remove',
        ),
        ({"_attn_implementation": {"vision": "org/k"}}, "requires code from the hub (_attn_implementation"),
        ({"_experts_implementation": "org/kernel"}, "requires code from the hub (_experts_implementation"),
        ({"use_kernels": True}, "requires code from the hub (use_kernels = true)"),
    ],
)
def test_an_excessive_or_unsafe_configuration_is_refused_before_building_the_model(copy, settings, sentence) -> None:
    folder = copy("gpt2")
    edit(folder / "config.json", **settings)
    with pytest.raises(UserError, match=re.escape(sentence)) as refused:
        load(folder)
    assert " cannot be loaded: its configuration " in str(refused.value)


@pytest.mark.parametrize(
    ("file", "settings", "sentence"),
    [
        ("config.json", {"n_positions": 8}, "its weights do not have the shapes in its config.json; download it"),
        ("config.json", {"n_layer": "2"}, "Validation error for field 'n_layer': .*expected int, got str"),
        ("tokenizer.json", {"added_tokens": None}, r"one of its files is damaged \(TypeError: .*\); download it again"),
    ],
)
def test_a_damaged_model_produces_a_one_sentence_error(copy, file, settings, sentence) -> None:
    folder = copy("gpt2")
    edit(folder / file, **settings)
    with pytest.raises(UserError, match=f" cannot be loaded: {sentence}"):
        load(folder)


@pytest.mark.parametrize(
    "settings",
    [
        {"num_hidden_layers": 126, "hidden_size": 16384},
        {"num_hidden_layers": 61, "n_routed_experts": 256, "first_k_dense_replace": 3},
        {"text_config": {"num_hidden_layers": 62, "layer_types": ["full"] * 62}, "vision_config": {"depth": 27}},
        {"num_hidden_layers": 94, "num_experts": 128, "max_window_layers": 94, "mlp_only_layers": []},
        {"num_hidden_layers": 32, "num_experts": 16384, "num_experts_per_tok": 64},
    ],
    ids=["Llama 405B", "DeepSeek-V3", "Gemma 3", "Qwen3 MoE", "Doge"],
)
def test_configurations_of_large_models_are_accepted(settings: dict[str, Any], tmp_path: Path) -> None:
    refuse_odd_config(settings, tmp_path, allows_code=False)


def test_a_model_with_many_added_tokens_and_an_sae_in_its_folder_can_be_loaded(copy) -> None:
    folder = copy("gpt2")
    file = folder / "model.safetensors"
    torch.save(load_file(file), folder / "pytorch_model.bin")
    file.unlink()
    save_file({"W_dec": torch.zeros(2, 2)}, folder / "sae.safetensors")
    config = (folder / "tokenizer_config.json").read_text()
    (folder / "tokenizer_config.json").write_text(config + " " * 5 * 2**20)
    assert load(folder)


def test_the_weights_of_a_model_split_across_files_are_counted(copy) -> None:
    folder = copy("gpt2")
    file = (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
    names = load_file(file).keys()
    index = {"metadata": {}, "weight_map": dict.fromkeys(names, file.name)}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    save_file({"W_dec": torch.zeros(2, 2)}, folder / "sae.safetensors")
    edit(folder / "config.json", n_layer=900)
    with pytest.raises(UserError, match=rf"n_layer = 900, but its files contain {len(names)} weights"):
        load(folder)


def test_model_files_that_are_too_large_or_outside_the_folder_are_refused(copy) -> None:
    folder = copy("gpt2")
    (folder / "model.safetensors").rename(folder.parent / "outside.safetensors")
    index = {"metadata": {}, "weight_map": {"wte.weight": "../outside.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(UserError, match="names weights outside its folder"):
        load(folder)
    folder = copy("llama")
    with (folder / "config.json").open("r+b") as stream:
        stream.truncate(5 * 2**20)
    with pytest.raises(UserError, match=r"/config.json is larger than 4 MiB; download the model again"):
        load(folder)


def test_a_folder_without_a_tokenizer_is_refused(copy) -> None:
    folder = copy("gpt2")
    for file in folder.glob("tokenizer*"):
        file.unlink()
    require_refused(f"model.path: {folder} has no tokenizer; copy the model's tokenizer.json and ", folder)


def test_a_model_that_needs_inputs_other_than_token_ids_is_refused(tiny, tmp_path: Path) -> None:
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 2, "num_heads": 2, "vocab_size": 300}
    transformers.T5Model(transformers.T5Config(**sizes)).save_pretrained(tmp_path)
    for file in tiny("gpt2").glob("tokenizer*"):
        shutil.copy(file, tmp_path)
    require_refused("model.path: T5Model needs inputs other than token ids: ", tmp_path, "encoder.block.0")


def test_a_context_longer_than_the_model_allows_is_refused(tiny) -> None:
    load(tiny("gpt2"), context=CONTEXT)
    sentence = f"text.context: must be at most {CONTEXT}, the model's context length, not {CONTEXT + 1}"
    require_refused(sentence, tiny("gpt2"), context=CONTEXT + 1)
    require_refused("text.context: must be above 2", tiny("bert"), context=2, skip_first=0)


def test_a_context_longer_than_a_longrope_models_original_window_is_recorded(copy) -> None:
    folder = copy("llama")
    config = transformers.AutoConfig.from_pretrained(folder)
    factors = [1.0] * (config.head_dim // 2)
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": CONTEXT // 2}
    edit(folder / "config.json", rope_parameters=rope | {"short_factor": factors, "long_factor": factors})
    assert load(folder, context=CONTEXT).window_before == CONTEXT // 2
    assert load(folder, context=CONTEXT // 2).window_before is None


def test_unknown_token_ids_are_refused(tiny) -> None:
    model = load(tiny("gpt2"))
    for unknown in (300, -100):
        ids = np.array([[5, unknown, 7]])
        sentence = f"^text.column: contains the token id {unknown}; the model has ids 0 to 299$"
        with pytest.raises(UserError, match=sentence):
            rows_of(model, ContextBatch(ids, np.arange(3)[None], np.zeros((1, 3), np.int64)))


def test_modules_that_do_not_run_or_do_not_output_a_row_per_token_are_refused(tiny) -> None:
    batch = ContextBatch(np.arange(5, 13)[None], np.arange(8)[None], np.zeros((1, 8), np.int64))
    shape = r"^model.hooks: pooler outputs a tensor of shape \[1, 32\] for \[1, 8\] tokens; choose another module$"
    with pytest.raises(UserError, match=shape):
        rows_of(load(tiny("bert"), "pooler"), batch)
    with pytest.raises(UserError, match=r"^model.hooks: h.0.attn.attn_dropout does not run in a forward pass; choose"):
        rows_of(load(tiny("gpt2"), "h.0.attn.attn_dropout"), batch)
    heads = rows_of(load(tiny("qwen3"), "layers.0.self_attn.q_norm"), batch)
    assert heads.shape == (1, 8, 2 * 16)


@pytest.mark.parametrize(("setting", "dtype"), [("auto", torch.float32), ("bf16", torch.bfloat16)])
def test_weights_have_the_requested_dtype_which_defaults_to_fp32_on_a_cpu(
    copy, setting: str, dtype: torch.dtype
) -> None:
    folder = copy("llama")
    edit(folder / "config.json", dtype="bfloat16")
    job = extraction_job(folder, Path("text"), Path("output"))
    section = type(job.model)(job.model.path, job.model.hooks, dtype=setting)
    model = LanguageModel(msgspec.structs.replace(job, model=section), CPU)
    assert model.dtype == dtype
    assert model.packs


def test_special_tokens_around_a_text_are_added_to_each_packed_piece(tiny) -> None:
    model = load(tiny("llama"))
    (context, *_) = pack(model.tokenizer.tokens(sentences(6)), 32)
    bos = model.tokenizer._tokenizer.convert_tokens_to_ids(BOS)
    assert (context.ids[context.positions == 0] == bos).all()


@pytest.fixture
def load_whole(tiny: Callable[[str], Path]) -> Load:
    """Return a function that loads a family's tiny model, with hooks in its first and last blocks."""
    hooks = ["mlp_in.0", f"resid_post.{N_BLOCKS - 1}"]
    return lambda family: LanguageModel(extraction_job(tiny(family), Path("text"), Path("rows"), hooks=hooks), CPU)


@pytest.mark.parametrize("family", FAMILIES)
def test_each_block_is_placed_on_a_single_gpu_and_blocks_keep_their_order(load_whole: Load, family: str) -> None:
    model = load_whole(family)._model
    n_bytes = sum(parameter.nbytes for parameter in model.parameters())
    capacity = n_bytes * 9 // 10
    chosen = indices(model, {0: capacity, 1: capacity, "cpu": 10 * n_bytes})
    gpus = {
        name: next(gpu for module, gpu in chosen.items() if f"{name}.".startswith(f"{module}."))
        for name, _ in model.named_parameters()
    }
    assert list(gpus.values()) == sorted(gpus.values())
    assert {*gpus.values()} == {0, 1}
    blocks = next(name for name, module in model.named_modules() if isinstance(module, torch.nn.ModuleList))
    for number in range(N_BLOCKS):
        assert len({gpu for name, gpu in gpus.items() if name.startswith(f"{blocks}.{number}.")}) == 1


def test_a_model_too_large_for_all_gpus_together_produces_a_one_sentence_error(load_whole: Load) -> None:
    with pytest.raises(UserError, match=r"^model.spread: the model does not fit on 2 GPUs; add more to launch.gpus$"):
        indices(load_whole("llama")._model, {0: 5_000, 1: 5_000, "cpu": 10**12})


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_are_the_same_if_modules_move_their_inputs_between_devices(load_whole: Load, family: str) -> None:
    model, ids = load_whole(family), np.arange(24).reshape(2, 12)
    batch = ContextBatch(ids, np.tile(np.arange(12), (2, 1)), np.repeat([[0], [1]], 12, axis=1))
    before = model.rows(batch, torch.arange(24))
    # Accelerate wraps the forward pass of each module, even if all modules are on the same device.
    modules = {name: torch.device("cpu") for name, part in model._model.named_modules() if not [*part.children()]}
    dispatch_model(model._model, modules, force_hooks=True)
    assert any(hasattr(part, "_hf_hook") for part in model._model.modules())
    for one, other in zip(before, model.rows(batch, torch.arange(24)), strict=True):
        assert torch.equal(one, other)
