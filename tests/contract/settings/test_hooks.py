"""Names of hooks: ours, TransformerLens's and paths of modules."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.contract.settings.hooks import SITES, WANTED, Hook, parse_hook


@given(st.sampled_from(list(SITES)), st.integers(0, 9999))
def test_a_place_has_the_same_hook_by_our_name_and_by_that_of_transformer_lens(site: str, layer: int) -> None:
    hook = parse_hook(f"{site}.{layer}")
    assert hook == Hook(site, layer) == parse_hook(hook.transformer_lens)
    assert parse_hook(hook.name) == hook


def test_the_names_of_transformer_lens_are_those_of_the_field() -> None:
    assert parse_hook("resid_post.12").transformer_lens == "blocks.12.hook_resid_post"
    assert parse_hook("blocks.3.hook_mlp_out") == Hook("mlp_out", 3)
    assert parse_hook("blocks.3.mlp.hook_in") == Hook("mlp_in", 3)


@pytest.mark.parametrize("path", ["h.3.mlp", "layers.0.self_attn.q_proj", "norm", "blocks.3.attn", "blocks.3.ffn.up"])
def test_any_other_dotted_name_is_the_path_of_a_module(path: str) -> None:
    hook = parse_hook(path)
    assert (hook.path, hook.name, hook.transformer_lens) == (path, path, "")


@pytest.mark.parametrize("text", ["", "resid post.1", "../h.0", "h/0", "h.0.", ".h", "12", "h..0", "h.0\n"])
def test_what_is_no_name_of_a_module_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"^must be ") as error:
        parse_hook(text)
    assert str(error.value) == f"must be {WANTED}"


def test_a_hook_of_transformer_lens_that_we_have_not_is_refused_with_those_we_have() -> None:
    with pytest.raises(ValueError, match=r"^has no site attn.hook_z; known are blocks.3.hook_resid_pre, ") as error:
        parse_hook("blocks.3.attn.hook_z")
    assert str(error.value).endswith("blocks.3.hook_attn_out")
