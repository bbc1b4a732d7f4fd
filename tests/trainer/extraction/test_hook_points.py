"""Tests that a hook returns the same activations as the unmodified model."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from support.extractions import CPU, extraction_job
from support.tiny_models import ENCODERS, FAMILIES, N_BLOCKS
from torch import Tensor, nn

from trainer.contract.errors import UserError
from trainer.contract.settings.hooks import SITES, Hook
from trainer.extraction.hook_points import (
    BlockList,
    HookPoint,
    drop_blocks_above,
    find_blocks,
    find_point,
    rows_of,
    taking,
)
from trainer.extraction.language_model import LanguageModel
from trainer.extraction.packing import ContextBatch

IDS = np.arange(2 * 20).reshape(2, 20) * 7 % 290 + 3
POSITIONS = np.tile(np.arange(20), (2, 1))
BATCH = ContextBatch(IDS, POSITIONS, np.repeat([[0], [1]], 20, axis=1))
PLACES = torch.arange(IDS.size)
# Maps each model family to the module paths of its sites. `mlp_in` is the input of its module, and all other sites are
# outputs. For Gemma, `mlp_out` and `attn_out` are the outputs of the norms that follow the MLP and the attention.
MODULES = {
    "gpt2": {"mlp_in": "h.{}.mlp", "mlp_out": "h.{}.mlp", "attn_out": "h.{}.attn", "block": "h.{}"},
    "bert": {
        "mlp_in": "encoder.layer.{}.intermediate",
        "mlp_out": "encoder.layer.{}.output.dense",
        "attn_out": "encoder.layer.{}.attention.output.dense",
        "block": "encoder.layer.{}",
    },
    "llama": {
        "mlp_in": "layers.{}.mlp",
        "mlp_out": "layers.{}.mlp",
        "attn_out": "layers.{}.self_attn",
        "block": "layers.{}",
    },
}
MODULES["roberta"], MODULES["qwen3"] = MODULES["bert"], MODULES["llama"]
MODULES["gemma3"] = MODULES["llama"] | {
    "mlp_out": "layers.{}.post_feedforward_layernorm",
    "attn_out": "layers.{}.post_attention_layernorm",
}


def reference(folder: Path, family: str) -> dict[str, Tensor]:
    """Return the rows from each hook, computed with the unmodified model from the transformers library."""
    model = transformers.AutoModel.from_pretrained(folder).eval()
    rows: dict[str, Tensor] = {}
    for layer in range(N_BLOCKS):
        for site in ("mlp_in", "mlp_out", "attn_out", "block"):
            module = model.get_submodule(MODULES[family][site].format(layer))
            name = f"{'resid_post' if site == 'block' else site}.{layer}"

            def hook(_: nn.Module, given: tuple[Tensor, ...], output: object, name: str = name) -> None:
                of_output = output if isinstance(output, Tensor) else output[0]  # type: ignore[index]
                rows[name] = (given[0] if name.startswith("mlp_in") else of_output).flatten(0, 1)

            module.register_forward_hook(hook)
    with torch.inference_mode():
        states = model(input_ids=torch.from_numpy(IDS), output_hidden_states=True).hidden_states
    # The last hidden state is taken after the model's final norm, so it is not a block's output.
    before = {f"resid_pre.{layer}": states[layer].flatten(0, 1) for layer in range(N_BLOCKS)}
    after = {f"resid_post.{layer}": states[layer + 1].flatten(0, 1) for layer in range(N_BLOCKS - 1)}
    assert all(torch.equal(rows[name], of_hook) for name, of_hook in after.items())
    return rows | before


@pytest.fixture(scope="module")
def both(tiny: Callable[[str], Path]) -> Callable[[str], tuple[dict[str, Tensor], dict[str, Tensor]]]:
    """Return a function that reads rows from a family's hooks with `LanguageModel` and with the reference."""

    @functools.cache
    def read(family: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        hooks = [f"{site}.{layer}" for site in SITES for layer in range(N_BLOCKS)]
        job = extraction_job(tiny(family), Path("text"), Path("output"), hooks=hooks)
        ours = LanguageModel(job, CPU).rows(BATCH, PLACES)
        return dict(zip(hooks, ours, strict=True)), reference(tiny(family), family)

    return read


@pytest.mark.parametrize("site", SITES)
@pytest.mark.parametrize("family", FAMILIES)
def test_rows_equal_the_activations_of_the_unmodified_model_bit_for_bit(both, family: str, site: str) -> None:
    ours, theirs = both(family)
    for layer in range(N_BLOCKS):
        assert torch.equal(ours[f"{site}.{layer}"], theirs[f"{site}.{layer}"]), layer


@pytest.mark.parametrize("family", ["gpt2", "llama", "bert"])
def test_branch_outputs_add_up_to_the_change_in_the_residual_stream(both, family: str) -> None:
    rows, _ = both(family)
    added = rows["resid_pre.1"] + rows["attn_out.1"] + rows["mlp_out.1"]
    # BERT normalises the residual stream twice in each block, so the branch outputs do not add up to its change.
    assert torch.allclose(added, rows["resid_post.1"], atol=1e-4) == (family not in ENCODERS)


@pytest.mark.parametrize("family", FAMILIES)
def test_blocks_above_the_last_hook_are_dropped_without_changing_rows(tiny, both, family: str) -> None:
    job = extraction_job(tiny(family), Path("text"), Path("output"), hooks=["resid_post.0"])
    model = LanguageModel(job, CPU)
    assert len(model._model.get_submodule(MODULES[family]["block"].removesuffix(".{}"))) == 1
    assert torch.equal(model.rows(BATCH, PLACES)[0], both(family)[1]["resid_post.0"])


def test_hooks_accept_module_paths_and_transformer_lens_names(tiny, both) -> None:
    hooks = ["h.1.mlp", "blocks.1.hook_resid_post"]
    model = LanguageModel(extraction_job(tiny("gpt2"), Path("text"), Path("output"), hooks=hooks), CPU)
    mlp, after = model.rows(BATCH, PLACES)
    assert torch.equal(mlp, both("gpt2")[1]["mlp_out.1"])
    assert torch.equal(after, both("gpt2")[1]["resid_post.1"])


def test_only_the_requested_rows_are_returned(tiny, both) -> None:
    model = LanguageModel(extraction_job(tiny("llama"), Path("t"), Path("o"), hooks=["mlp_in.1"]), CPU)
    indices = torch.tensor([3, 25, 39])
    assert torch.equal(model.rows(BATCH, indices)[0], both("llama")[1]["mlp_in.1"][indices])


class Mixed(nn.Module):
    """A model with two blocks of four experts each, structured like early mixture-of-experts models."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleDict({"experts": nn.ModuleList(map(linear, range(4)))}) for _ in range(2))
        self.norms = nn.ModuleList([linear(0)])


def linear(_: int) -> nn.Linear:
    return nn.Linear(2, 2)


def test_the_blocks_are_the_longest_module_list_not_nested_in_another_list() -> None:
    assert find_blocks(Mixed()) == BlockList("layers", 2)


def test_a_model_without_a_list_of_blocks_is_refused() -> None:
    with pytest.raises(UserError, match=r"^model.hooks: the model has no list of blocks; give the paths of modules$"):
        find_blocks(nn.Sequential(linear(0)))


@pytest.mark.parametrize(
    ("hook", "sentence"),
    [
        (Hook("resid_post", 2), "model.hooks: resid_post.2: the model has blocks 0 to 1"),
        (
            Hook("mlp_out", 1),
            "model.hooks: mlp_out.1: the blocks of this model have no mlp_out; "
            "give the path of a module in layers.1: experts",
        ),
        (
            Hook(path="layers.0.mlp"),
            'model.hooks: the model has no module "layers.0.mlp"; '
            "it has layers, layers.0, layers.0.experts, layers.0.experts.0 and 11 more",
        ),
    ],
)
def test_a_hook_that_does_not_exist_in_the_model_is_refused(hook: Hook, sentence: str) -> None:
    model = Mixed()
    with pytest.raises(UserError) as error:
        find_point(model, find_blocks(model), hook)
    assert str(error.value) == sentence


def test_no_blocks_are_dropped_if_a_hook_is_outside_the_blocks() -> None:
    model = Mixed()
    assert (
        drop_blocks_above(model, BlockList("layers", 2), [HookPoint("layers.0", False), HookPoint("norms", False)]) == 2
    )
    assert drop_blocks_above(model, BlockList("layers", 2), [HookPoint("layers.0", False)]) == 1
    assert len(model.layers) == 1


def test_hooks_are_removed_from_the_model_after_each_use() -> None:
    model, seen = nn.Sequential(linear(0), linear(0)), []
    with taking(model, [HookPoint("0", True), HookPoint("1", False)], lambda number, _: seen.append(number)):
        model(torch.zeros(1, 2))
    model(torch.zeros(1, 2))
    assert seen == [0, 1]


def test_a_tokens_heads_form_one_row_and_other_shapes_are_refused() -> None:
    heads = torch.arange(2 * 3 * 2 * 4).reshape(2, 3, 2, 4)
    assert torch.equal(rows_of(heads, torch.tensor([4]), (2, 3)), heads[1, 1].reshape(1, 8))
    assert torch.equal(rows_of(heads.reshape(6, 8), torch.tensor([4]), (2, 3)), heads[1, 1].reshape(1, 8))
    with pytest.raises(ValueError, match=r"outputs a tensor of shape \[2, 2, 3, 4\] for \[2, 3\] tokens"):
        rows_of(heads.transpose(1, 2), torch.tensor([4]), (2, 3))
