"""Tests for the three ways to name a hook: this project's notation, TransformerLens's names, and module paths."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.contract.settings.hooks import (
    SITES,
    WANTED,
    Hook,
    each_named,
    ends_of,
    is_of_transcoder,
    names_of_hook,
    parse_hook,
    problems_of_hooks,
    short_names,
)


@given(st.sampled_from(list(SITES)), st.integers(0, 9999))
def test_our_name_and_the_transformer_lens_name_refer_to_the_same_hook(site: str, layer: int) -> None:
    hook = parse_hook(f"{site}.{layer}")
    assert hook == Hook(site, layer) == parse_hook(hook.transformer_lens)
    assert parse_hook(hook.name) == hook


def test_hook_names_match_the_names_in_the_transformer_lens_library() -> None:
    assert parse_hook("resid_post.12").transformer_lens == "blocks.12.hook_resid_post"
    assert parse_hook("blocks.3.hook_mlp_out") == Hook("mlp_out", 3)
    assert parse_hook("blocks.3.mlp.hook_in") == Hook("mlp_in", 3)


@pytest.mark.parametrize("path", ["h.3.mlp", "layers.0.self_attn.q_proj", "norm", "blocks.3.attn", "blocks.3.ffn.up"])
def test_any_other_dotted_name_is_a_module_path(path: str) -> None:
    hook = parse_hook(path)
    assert (hook.path, hook.name, hook.transformer_lens) == (path, path, "")


@pytest.mark.parametrize("text", ["", "resid post.1", "../h.0", "h/0", "h.0.", ".h", "12", "h..0", "h.0\n"])
def test_a_name_that_cannot_be_a_module_path_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"^must be ") as error:
        parse_hook(text)
    assert str(error.value) == f"must be {WANTED}"


def test_the_error_for_an_unknown_transformer_lens_hook_lists_the_known_ones() -> None:
    wanted = r"^has no site attn.hook_z; the known sites are blocks.3.hook_resid_pre, "
    with pytest.raises(ValueError, match=wanted) as error:
        parse_hook("blocks.3.attn.hook_z")
    assert str(error.value).endswith("blocks.3.hook_attn_out")


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("resid_post.4-6", ["resid_post.4", "resid_post.5", "resid_post.6"]),
        ("blocks.9-10.hook_mlp_out", ["blocks.9.hook_mlp_out", "blocks.10.hook_mlp_out"]),
        ("h.0-1.mlp.act, resid_pre.3", ["h.0.mlp.act", "h.1.mlp.act", "resid_pre.3"]),
        ("resid_post.7-7", ["resid_post.7"]),
        ("resid_post.6-4", ["resid_post.6-4"]),
        ("resid_post.12", ["resid_post.12"]),
        ("mlp.0-1", ["mlp.0", "mlp.1"]),
        (None, [None]),
    ],
)
def test_layer_ranges_and_commas_produce_several_names(text: str | None, names: list[str]) -> None:
    assert each_named(text) == names


@pytest.mark.parametrize(
    ("names", "short"),
    [
        (["resid_post.4", "blocks.12.hook_resid_post"], ["L4", "L12"]),
        (["resid_post.4", "blocks.4.hook_mlp_out"], ["resid_post.4", "mlp_out.4"]),
        (["h.0.mlp", "h.1.mlp"], ["h.0.mlp", "h.1.mlp"]),
        (["mlp.4", "mlp.12"], ["L4", "L12"]),
        (["h.0.mlp", "resid_post.0"], ["h.0.mlp", "resid_post.0"]),
    ],
)
def test_short_names_are_distinct_and_as_short_as_possible(names: list[str], short: list[str]) -> None:
    assert list(short_names(names).values()) == short


def test_two_names_for_one_hook_are_reported() -> None:
    (twice,) = problems_of_hooks(["resid_post.4", "blocks.4.hook_resid_post", "mlp_out.4"], "data.hook")
    assert str(twice) == 'data.hook: "blocks.4.hook_resid_post" is given twice'
    assert names_of_hook("blocks.4.hook_resid_post") == ["blocks.4.hook_resid_post", "resid_post.4"]
    assert names_of_hook("h.4.mlp") == ["h.4.mlp"]


def test_a_full_mlp_is_read_at_its_input_and_its_output() -> None:
    assert ends_of("mlp.12") == ("mlp_in.12", "mlp_out.12")
    assert is_of_transcoder("mlp.12")
    for alone in ("mlp_in.12", "blocks.12.hook_mlp_out", "h.12.mlp", "mlp.12.act"):
        assert ends_of(alone) == (alone, alone)
        assert not is_of_transcoder(alone)
