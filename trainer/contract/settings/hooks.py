"""The places in a language model where activations are read, by three kinds of names for the same place."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import msgspec

from trainer.contract.errors import Problem
from trainer.contract.settings.knobs import show

# By our name of a site: what TransformerLens calls it inside a block.
SITES = {
    "resid_pre": "hook_resid_pre",
    "resid_post": "hook_resid_post",
    "mlp_in": "mlp.hook_in",
    "mlp_out": "hook_mlp_out",
    "attn_out": "hook_attn_out",
}
WANTED = f'"SITE.LAYER" with SITE one of {", ".join(SITES)}, or the path of a module'
# What it calls the same place of BERT's blocks, which normalise what they give to the next.
POST_NORM = "hook_normalized_resid_post"
_OURS = re.compile(rf"({'|'.join(SITES)})\.([0-9]{{1,4}})")
_TRANSFORMER_LENS = re.compile(r"blocks\.([0-9]{1,4})\.([a-z_.]+)")
_PATH = re.compile(r"[A-Za-z_]\w*(\.\w+)*")
# A transcoder's place: the layer's MLP, from what goes into it to what comes out.
_MLP = re.compile(r"mlp\.([0-9]{1,4})")
_RANGE = re.compile(r"(.*\.)([0-9]{1,4})-([0-9]{1,4})(\..*)?")


class Hook(msgspec.Struct, frozen=True):
    """One place: a site of a layer, or else the output of the module at `path`."""

    site: str = ""
    layer: int = 0
    path: str = ""

    @property
    def name(self) -> str:
        """Our name of it: "resid_post.12", or the path of the module."""
        return self.path or f"{self.site}.{self.layer}"

    @property
    def transformer_lens(self) -> str:
        """Its name in TransformerLens, like "blocks.12.hook_resid_post"; "" for a module that has none there."""
        return "" if self.path else f"blocks.{self.layer}.{SITES[self.site]}"


def parse_hook(text: str) -> Hook:
    """Return the place of this name, ours, TransformerLens's or a module's path; raise `ValueError` where it is none.

    Whether a model has the layer or the module is not known here.
    """
    if match := _OURS.fullmatch(text):
        return Hook(match[1], int(match[2]))
    if match := _TRANSFORMER_LENS.fullmatch(text):
        sites = {theirs: ours for ours, theirs in SITES.items()} | {POST_NORM: "resid_post"}
        if match[2] in sites:
            return Hook(sites[match[2]], int(match[1]))
        # Some models call their blocks that, too: "blocks.3.attn" is a module of theirs.
        if "hook_" in match[2]:
            listed = ", ".join(f"blocks.{match[1]}.{theirs}" for theirs in SITES.values())
            raise ValueError(f"has no site {match[2]}; known are {listed}")
    if not _PATH.fullmatch(text):
        raise ValueError(f"must be {WANTED}")
    return Hook(path=text)


def ends_of(text: str) -> tuple[str, str]:
    """Return where the inputs and the targets of an SAE are read: of "mlp.12", at "mlp_in.12" and "mlp_out.12".

    Of any other name both are that name.
    """
    match = _MLP.fullmatch(text)
    return (f"mlp_in.{match[1]}", f"mlp_out.{match[1]}") if match else (text, text)


def is_of_transcoder(text: str) -> bool:
    """Tell whether a name is that of an MLP as a whole, whose outputs are to be made of its inputs."""
    return _MLP.fullmatch(text) is not None


def both_ends(text: Any) -> list[Any]:
    """Return the places where the rows of a name are: two of an MLP as a whole, else that one."""
    return list(dict.fromkeys(ends_of(text))) if isinstance(text, str) else [text]


def is_of_all_layers(text: Any) -> bool:
    """Tell whether a name is a site without a layer, which stands for that of all layers: "mlp" or "resid_post"."""
    return text == "mlp" or (isinstance(text, str) and text in SITES)


def names_of_hook(text: str) -> list[str]:
    """Return all names of the place that a text names, that text first."""
    hook = Hook(path=text) if _objection(text) else parse_hook(text)
    return [name for name in dict.fromkeys((text, hook.name, hook.transformer_lens)) if name]


def each_named(text: Any) -> list[Any]:
    """Return the names that a text stands for: "resid_post.4-6, mlp_out.8" for four; what is no text alone."""
    if not isinstance(text, str):
        return [text]
    return [name for word in text.split(",") for name in _each_layer(word.strip())]


def all_named(value: Any) -> list[Any]:
    """Return the names that a text, or all texts of a list, stand for."""
    return [name for one in (value if isinstance(value, list) and value else [value]) for name in each_named(one)]


def _each_layer(word: str) -> list[str]:
    match = _RANGE.fullmatch(word)
    if match is None or int(match[2]) > int(match[3]):
        return [word]
    return [f"{match[1]}{layer}{match[4] or ''}" for layer in range(int(match[2]), int(match[3]) + 1)]


def short_names(texts: Iterable[str]) -> dict[str, str]:
    """Return for each name of a place a short one that no other of them has: "L12" where all are of one site."""
    hooks = {text: parse_hook(ends_of(text)[0]) for text in texts if not _objection(text)}
    sites = {hook.site for hook in hooks.values()}
    short = {text: f"L{hook.layer}" if len(sites) == 1 and hook.site else hook.name for text, hook in hooks.items()}
    return {text: short.get(text, text) for text in texts}


def problems_of_hooks(texts: Iterable[Any], setting: str) -> list[Problem]:
    """Report names that are of no place, and those of one that another name is of."""
    problems, hooks = [], set()
    for text in texts:
        objection = _objection(text) or ("is given twice" if parse_hook(text) in hooks else "")
        if objection:
            problems.append(Problem(setting, f"{show(text)} {objection}"))
        else:
            hooks.add(parse_hook(text))
    return problems


def _objection(text: Any) -> str:
    """Say why a value is no name of a place; return "" for one that is."""
    if not isinstance(text, str):
        return f"must be {WANTED}"
    if is_of_all_layers(text):
        return f"stands for all layers, and how many there are is not told here; name them, like {text}.0-11"
    try:
        parse_hook(text)
    except ValueError as error:
        return str(error)
    return ""
