"""Tests that another tool's SAEs are read correctly from every file layout the tool has ever used."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import pytest
import torch
from support.layouts import (
    D_IN,
    D_SAE,
    FLAT,
    LAYOUTS,
    NEWEST,
    K,
    Layout,
    Reference,
    dictionary,
    put,
    saelens,
    scope_2,
    sparsify,
)
from support.layouts import TOPK as TOPK_NAMES
from support.saes import peer
from torch import Tensor

from trainer.contract.errors import UserError
from trainer.contract.settings import catalog
from trainer.contract.settings.catalog import READ_FORMATS
from trainer.evaluation.exported import ExportedSae
from trainer.sharing.base import Given, SharedSae
from trainer.sharing.finding import find
from trainer.sharing.origins import origin_of
from trainer.sharing.reading import parsed_config

CPU = torch.device("cpu")


def given_by(flags: tuple[str, ...]) -> Given:
    return Given(parsed_config(flag for flag in flags if "=" in flag), "--transcoder" in flags)


def written(layout: Layout, folder: Path) -> tuple[Reference, SharedSae]:
    """Write an SAE in a layout, and read it as an import does. Return the reference implementation and the SAE."""
    reference = layout.write(folder)
    found = find(folder / layout.place)
    assert found.form == layout.form
    return reference, found.reader.read(found.place, given_by(layout.flags))


def assert_computes(sae: SharedSae, reference: Reference, x: Tensor) -> None:
    expected, x_hat, clear = reference(x)
    assert clear.float().mean() > 0.5
    acts, found = ExportedSae(sae, CPU).reconstruct(x)
    assert torch.equal((acts.values > 0)[clear], (expected > 0)[clear])
    torch.testing.assert_close(acts.values[clear], expected.float()[clear], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found[clear], x_hat.float()[clear], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", LAYOUTS)
@torch.no_grad()
def test_an_sae_read_from_a_layout_computes_the_same_results_as_in_its_own_tool(name: str, tmp_path: Path) -> None:
    layout = LAYOUTS[name]
    for seed in range(3):
        torch.manual_seed(seed)
        reference, sae = written(layout, tmp_path / str(seed))
        assert_computes(sae, reference, torch.randn(60, D_IN) * 2)
        assert origin_of(sae.metadata) == layout.origin
        assert sae.k == (K if sae.form == "topk" else sae.k)


@torch.no_grad()
def _of_sparsify(monkeypatch: pytest.MonkeyPatch, place: Path, x: Tensor, _: str) -> tuple[Tensor, Tensor]:
    module = peer(monkeypatch, "sparsify.sparse_coder")
    coder = module.SparseCoder.load_from_disk(place)
    top = coder.encode(x)
    acts = torch.zeros(len(x), D_SAE).scatter(1, top.top_indices, top.top_acts)
    # If Triton is installed, sparsify's decoder uses a GPU-only kernel.
    monkeypatch.setattr(module, "decoder_impl", lambda indices, values, rows: acts @ rows.mT)
    return acts, coder(x).sae_out


@torch.no_grad()
def _of_dictionary_learning(
    monkeypatch: pytest.MonkeyPatch, place: Path, x: Tensor, name: str
) -> tuple[Tensor, Tensor]:
    utils = peer(monkeypatch, "dictionary_learning.utils", "nnsight")
    file, k = str(place / "ae.pt"), {"k": K} if "TopK" in name else {}
    loaded = getattr(utils, name).from_pretrained(file, **k)
    return loaded.encode(x), loaded(x)


@torch.no_grad()
def _of_circuit_tracer(monkeypatch: pytest.MonkeyPatch, place: Path, x: Tensor, name: str) -> tuple[Tensor, Tensor]:
    module = peer(monkeypatch, "circuit_tracer.transcoder.single_layer_transcoder")
    files = {"load_gemma_scope_transcoder": "params.npz", "load_gemma_scope_2_transcoder": "params.safetensors"}
    file = place / files[name] if name in files else place
    lazy = {} if name in files else {"lazy_encoder": False, "lazy_decoder": False}
    loaded = getattr(module, name)(str(file), 3, device=CPU, dtype=torch.float32, **lazy)
    return loaded.encode(x), loaded(x)


ORACLES: dict[str, Callable[..., tuple[Tensor, Tensor]]] = {
    "sparsify": _of_sparsify,
    "dictionary_learning": _of_dictionary_learning,
    "gemma-scope": _of_circuit_tracer,
    "circuit-tracer": _of_circuit_tracer,
}


@pytest.mark.parametrize("name", [name for name, one in LAYOUTS.items() if one.oracle and one.form in ORACLES])
@torch.no_grad()
def test_another_tool_computes_the_same_results_from_the_same_files(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    layout = LAYOUTS[name]
    reference, sae = written(layout, tmp_path)
    x = torch.randn(60, D_IN) * 2
    clear = reference(x)[2]
    theirs, their_x_hat = ORACLES[layout.form](monkeypatch, tmp_path / layout.place, x, layout.oracle)
    acts, x_hat = ExportedSae(sae, CPU).reconstruct(x)
    # If a threshold is below 0, circuit-tracer returns negative activations, but Gemma Scope's code applies a ReLU.
    theirs = theirs.relu()
    torch.testing.assert_close(acts.values[clear], theirs[clear], rtol=1e-4, atol=1e-4)
    if layout.oracle != "load_gemma_scope_transcoder" and layout.oracle != "load_gemma_scope_2_transcoder":
        torch.testing.assert_close(x_hat[clear], their_x_hat[clear], rtol=1e-3, atol=1e-3)


GEMMA_SCOPE = ("1: res", "1: transcoder", "2: transcoder with a skip")
# circuit-tracer's config.yaml can store only these metadata values.
OF_A_SET = ("model_name", "hook_name", "hook_name_out", "hook_layer")


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_format_that_can_store_the_sae_keeps_the_origin_of_its_activations(name: str, tmp_path: Path) -> None:
    layout = LAYOUTS[name]
    _, sae = written(layout, tmp_path / "theirs")
    forms = [form for form in READ_FORMATS if catalog.FORMATS[form].is_written]
    for form in forms:
        writer = catalog.FORMATS[form].load()()
        if writer.refusal(sae):
            continue
        folder = tmp_path / form
        writer.write(sae, folder)
        again = find(folder, form)
        origin = origin_of(again.reader.read(again.place).metadata)
        kept = {fact: value for fact, value in layout.origin.items() if form != "circuit-tracer" or fact in OF_A_SET}
        assert origin == kept, form


FOREIGN = saelens("standard", FLAT)
REFUSED: dict[str, tuple[Any, str]] = {
    "tanh-relu": (saelens("standard", FLAT | {"activation_fn_str": "tanh-relu"}), "activation_fn is 'tanh-relu'; only"),
    "jumprelu with a topk activation": (
        saelens(
            "jumprelu",
            FLAT | {"architecture": "jumprelu", "activation_fn_str": "topk", "activation_fn_kwargs": {"k": K}},
        ),
        "architecture is 'jumprelu'; only 'standard'",
    ),
    "signed topk": (
        saelens("topk", FLAT | {"activation_fn_str": "topk", "activation_fn_kwargs": {"k": K, "signed": True}}),
        "signed is 'True'; only False",
    ),
    "an unknown kind of topk": (
        saelens("topk", FLAT | {"activation_fn_str": "topk", "activation_fn_kwargs": {"k": K, "temperature": 2}}),
        "activation_fn_kwargs has 'temperature'",
    ),
    "topk without k": (saelens("topk", FLAT | {"activation_fn_str": "topk"}), "k must be a whole number"),
    "layer_norm": (
        saelens("standard", FLAT | {"normalize_activations": "layer_norm"}),
        "normalize_activations is 'layer_norm': it centres and scales each row separately",
    ),
    "constant_norm_rescale": (
        saelens("standard", FLAT | {"normalize_activations": "constant_norm_rescale"}),
        "scales each row separately to a fixed norm",
    ),
    "an unknown mean norm": (
        saelens("standard", FLAT | {"normalize_activations": "expected_average_only_in"}),
        "--config norm_scaling_factor=NUMBER",
    ),
    "a factor with an unknown effect": (
        saelens(
            "standard",
            {name: value for name, value in FLAT.items() if name != "finetuning_scaling_factor"},
            {"scaling_factor": torch.full((D_SAE,), 2.0)},
        ),
        "use --config finetuning_scaling_factor=true or =false",
    ),
    "a setting with an unknown effect": (
        saelens("standard", FLAT | {"encoder_bias_rotation": "on"}),
        "encoder_bias_rotation is 'on', and its effect is unknown; if it has no effect, use "
        "--config encoder_bias_rotation=null",
    ),
    "an enabled setting with an unknown effect": (
        saelens("standard", FLAT | {"standardize_inputs": True}),
        "standardize_inputs is 'True', and its effect is unknown",
    ),
    "a mean subtracted from each row": (
        saelens("standard", FLAT | {"subtract_row_mean": True}),
        "subtract_row_mean is 'True', and its effect is unknown",
    ),
    "temporal": (saelens("standard", NEWEST | {"architecture": "temporal"}), "architecture is 'temporal'; only"),
    "batchtopk without its threshold": (
        saelens("standard", NEWEST | {"architecture": "batchtopk", "k": K}),
        "`save_inference_model`",
    ),
    "sparsify groupmax": (sparsify({"activation": "groupmax"}, "."), "activation is 'groupmax'; only 'topk'"),
    "sparsify signed": (sparsify({"signed": True}, "."), "signed is 'True'; only False"),
    "sparsify skip without a transcoder mark": (
        sparsify({"skip_connection": True}, "."),
        "if it is a transcoder, add --transcoder",
    ),
    "a dictionary without a class": (
        dictionary("topk", TOPK_NAMES, {"k": K}, {"k": K}),
        "use --config trainer.dict_class=NAME with NAME one of AutoEncoderTopK, BatchTopKSAE",
    ),
    "Gemma Scope 2 without settings": (
        scope_2(None),
        "config.json is missing, and the path does not say whether it is an SAE or a transcoder; use --config",
    ),
    "a dictionary with two values of k": (
        dictionary("topk", TOPK_NAMES, {"dict_class": "AutoEncoderTopK", "k": K}, {"k": K + 1}),
        "k is 5, but 4 in its settings; set the correct value with --config trainer.k=K",
    ),
    "a BatchTopK dictionary without a threshold": (
        dictionary("jumprelu", TOPK_NAMES, {"trainer_class": "TrainerBatchTopK", "k": K}, {"k": K}),
        "has no threshold: a BatchTopKSAE from before December 2024",
    ),
}


def test_an_import_notes_that_gemma_scope_1_transcoders_expect_rows_without_gain(tmp_path: Path) -> None:
    notes = {name: written(LAYOUTS[f"gemma-scope {name}"], tmp_path / name)[1].notes for name in GEMMA_SCOPE}
    assert notes == {"1: res": (), "1: transcoder": (ANY,), "2: transcoder with a skip": ()}
    assert "divide rows of mlp_in by 1 + the weight of pre_feedforward_layernorm" in notes["1: transcoder"][0]


@pytest.mark.parametrize("name", REFUSED)
def test_the_error_for_an_sae_that_cannot_be_computed_here_states_the_reason(name: str, tmp_path: Path) -> None:
    write, reason = REFUSED[name]
    write(tmp_path)
    found = find(tmp_path)
    with pytest.raises(UserError) as refused:
        found.reader.read(found.place)
    (refusal,) = str(refused.value).splitlines()
    assert reason in refusal


def test_an_unknown_setting_is_ignored_if_the_user_has_set_it_to_null(tmp_path: Path) -> None:
    saelens("standard", FLAT | {"encoder_bias_rotation": "on"})(tmp_path)
    found = find(tmp_path)
    assert found.reader.read(found.place, Given({"encoder_bias_rotation": None})).form == "standard"


def test_the_error_for_a_git_lfs_pointer_names_the_file(tmp_path: Path) -> None:
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 135\n"
    for file in ("cfg.json", "sae_weights.safetensors"):
        folder = tmp_path / file
        FOREIGN(folder)
        (folder / file).write_text(pointer)
        with pytest.raises(
            UserError, match=rf"{file} cannot be read: it is a git-lfs pointer, not the file; run `git lfs pull`"
        ):
            find(folder).reader.read(folder)


def test_metadata_from_other_tools_is_shortened_to_a_single_line(tmp_path: Path) -> None:
    hostile = {
        "model_name": "\x1b]52;c;eA==\x07" + "m" * 900,
        "hook_name": ["a"],
        "context_size": 10**40,
        "prepend_bos": 1,
    }
    saelens("standard", NEWEST | {"architecture": "standard", "metadata": hostile})(tmp_path)
    origin = origin_of(find(tmp_path).reader.read(tmp_path).metadata)
    assert origin.keys() == {"model_name"}
    assert origin["model_name"].isprintable()
    assert len(origin["model_name"]) == 200


def test_reading_an_npz_file_runs_no_code_and_detects_headers_that_claim_too_much(tmp_path: Path) -> None:
    import numpy

    class Trap:
        def __reduce__(self) -> Any:
            return Path.touch, (tmp_path / "sprung",)

    arrays = {name: numpy.zeros(2, "f4") for name in ("W_enc", "W_dec", "b_enc", "b_dec")}
    file = tmp_path / "params.npz"
    for change, reason in (
        (lambda: numpy.savez(file, threshold=numpy.array([Trap()], dtype=object), **arrays), "more than arrays or"),
        (lambda: numpy.savez_compressed(file, threshold=numpy.zeros(10**6), **arrays), "is compressed"),
        (lambda: file.write_bytes(b"PK\x03\x04"), "is corrupt"),
        (lambda: _promise(file, arrays), "is shorter than its header says"),
    ):
        change()
        with pytest.raises(UserError, match=reason):
            find(tmp_path).reader.read(tmp_path)
    assert not (tmp_path / "sprung").exists()


def _promise(file: Path, arrays: dict[str, Any]) -> None:
    """Write an array of 2 numbers whose header claims 2^44 numbers."""
    import io
    import zipfile

    import numpy

    head = io.BytesIO()
    numpy.lib.format.write_array_header_1_0(head, {"descr": "<f4", "fortran_order": False, "shape": (2**44,)})
    numpy.savez(file, **arrays)
    with zipfile.ZipFile(file, "a") as archive:
        archive.writestr("threshold.npy", head.getvalue() + bytes(8))


def test_the_error_for_a_folder_of_saes_counts_them_and_names_the_first_few(tmp_path: Path) -> None:
    for layer in range(12):
        sparsify({}, f"layers.{layer}")(tmp_path)
    with pytest.raises(
        UserError, match=r"contains 12 SAEs, e\.g\. layers\.0, layers\.1 and layers\.2; give the path of one"
    ):
        find(tmp_path)


def test_the_error_for_a_folder_without_an_sae_lists_expected_and_found_files(tmp_path: Path) -> None:
    put(tmp_path / "config.json", {"model_type": "gpt2"})
    (tmp_path / "model\x1b.bin").write_bytes(b"")
    with pytest.raises(UserError) as refused:
        find(tmp_path)
    message = str(refused.value)
    assert "expected cfg.json + sae_weights.safetensors (saelens), cfg.json + sae.safetensors (sparsify), " in message
    assert message.endswith("found config.json and model\N{REPLACEMENT CHARACTER}.bin")
    with pytest.raises(UserError, match=r"contains no SAE; expected cfg.json \+ sae.safetensors \(sparsify\); found "):
        find(tmp_path, "sparsify")
    FOREIGN(tmp_path)
    with pytest.raises(UserError, match="contains an SAE in the format saelens, not sparsify; leave out --format"):
        find(tmp_path, "sparsify")


def test_a_config_value_is_read_as_json_if_possible_and_otherwise_as_a_string() -> None:
    words = ["a=3", "b.c=true", "d=null", "e=AutoEncoder", "f=x=y"]
    assert parsed_config(words) == {"a": 3, "b.c": True, "d": None, "e": "AutoEncoder", "f": "x=y"}
    for bad in ("a", "=3", "a..b=3"):
        with pytest.raises(UserError, match="--config: expects KEY=VALUE"):
            parsed_config([bad])


def test_given_settings_override_those_in_the_file(tmp_path: Path) -> None:
    FOREIGN(tmp_path)
    config = json.loads((tmp_path / "cfg.json").read_text())
    given = Given({"activation_fn_str": "topk", "activation_fn_kwargs.k": 3})
    assert find(tmp_path).reader.read(tmp_path, given).k == 3
    assert json.loads((tmp_path / "cfg.json").read_text()) == config
