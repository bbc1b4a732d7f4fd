"""Names for hooks, the points in a language model at which activations are read.

Each hook can be named in three ways: by our name, by its TransformerLens name, or by its module path.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from trainer.contract.errors import Problem
from trainer.contract.settings.declare import show

# Maps our site names to the TransformerLens names inside a block.
SITES = {
    "resid_pre": "hook_resid_pre",
    "resid_post": "hook_resid_post",
    "mlp_in": "mlp.hook_in",
    "mlp_out": "hook_mlp_out",
    "attn_out": "hook_attn_out",
}
WANTED = f'"SITE.LAYER" with SITE one of {", ".join(SITES)}, or the path of a module'
# The TransformerLens name for this site in BERT blocks, which normalise their output.
POST_NORM = "hook_normalized_resid_post"
_OURS = re.compile(rf"({'|'.join(SITES)})\.([0-9]{{1,4}})")
_TRANSFORMER_LENS = re.compile(r"blocks\.([0-9]{1,4})\.([a-z_.]+)")
_PATH = re.compile(r"[A-Za-z_]\w*(\.\w+)*")
# The name for a transcoder's hook, which spans a layer's MLP from its input to its output.
_MLP = re.compile(r"mlp\.([0-9]{1,4})")
# The part of a name before its layer, and layers that continue a joined name.
_BEFORE_LAYER = re.compile(r"[a-z_]+\.(?=[0-9]{1,4}$)")
_LAYERS = re.compile(r"[0-9]{1,4}(-[0-9]{1,4})?")
_RANGE = re.compile(r"(.*\.)([0-9]{1,4})-([0-9]{1,4})(\..*)?")


class Hook(msgspec.Struct, frozen=True):
    """A hook: a site in a layer, or the output of the module at `path`."""

    site: str = ""
    layer: int = 0
    path: str = ""

    @property
    def name(self) -> str:
        """Our name, such as "resid_post.12", or the module path."""
        return self.path or f"{self.site}.{self.layer}"

    @property
    def transformer_lens(self) -> str:
        """The TransformerLens name, such as "blocks.12.hook_resid_post"; "" for a module path."""
        return "" if self.path else f"blocks.{self.layer}.{SITES[self.site]}"


def parse_hook(text: str) -> Hook:
    """Parse our name, a TransformerLens name or a module path; raise `ValueError` for any other string.

    This function does not check whether the model has the layer or module.
    """
    if match := _OURS.fullmatch(text):
        return Hook(match[1], int(match[2]))
    if match := _TRANSFORMER_LENS.fullmatch(text):
        sites = {theirs: ours for ours, theirs in SITES.items()} | {POST_NORM: "resid_post"}
        if match[2] in sites:
            return Hook(sites[match[2]], int(match[1]))
        # Some models call their blocks "blocks", so "blocks.3.attn" may be a module path.
        if "hook_" in match[2]:
            listed = ", ".join(f"blocks.{match[1]}.{theirs}" for theirs in SITES.values())
            raise ValueError(f"has no site {match[2]}; the known sites are {listed}")
    if not _PATH.fullmatch(text):
        raise ValueError(f"must be {WANTED}")
    return Hook(path=text)


def ends_of(text: str) -> tuple[str, str]:
    """Return the hooks for an SAE's inputs and targets: "mlp_in.12" and "mlp_out.12" for "mlp.12".

    For any other name, both are the hook with that name.
    """
    match = _MLP.fullmatch(text)
    return (f"mlp_in.{match[1]}", f"mlp_out.{match[1]}") if match else (text, text)


def parts_of(text: str) -> list[str]:
    """Return the names of hooks joined with "+"; a crosscoder reads "resid_post.8+resid_post.12" as one row."""
    return text.split("+")


def is_of_transcoder(text: str) -> bool:
    """Return whether a name denotes an MLP; a transcoder predicts the MLP's output from its input."""
    return _MLP.fullmatch(text) is not None


def both_ends(text: Any) -> list[Any]:
    """Return the hooks at which to read the rows for a name: both ends of an MLP, joined hooks, or the hook itself."""
    return (
        list(dict.fromkeys(end for one in parts_of(text) for end in ends_of(one))) if isinstance(text, str) else [text]
    )


def layer_label(hook: str) -> str:
    """Return the label, such as "layer=12", of the layer of a cross-layer transcoder that reads a hook."""
    return f"layer={parse_hook(ends_of(hook)[0]).layer}"


def is_of_all_layers(text: Any) -> bool:
    """Return whether a name is a site without a layer, such as "mlp" or "resid_post", meaning all layers."""
    return text == "mlp" or (isinstance(text, str) and text in SITES)


def names_of_hook(text: str) -> list[str]:
    """Return all names for a hook, or for hooks joined with "+", starting with the given name."""
    hooks = [Hook(path=text)] if _objection(text) else [parse_hook(one) for one in parts_of(text)]
    ours, theirs = "+".join(hook.name for hook in hooks), [hook.transformer_lens for hook in hooks]
    joined = "+".join(filter(None, theirs)) if all(theirs) else ""
    return [name for name in dict.fromkeys((text, ours, joined)) if name]


def each_named(text: Any) -> list[Any]:
    """Expand a string with names and ranges; "resid_post.4-6, mlp_out.8" contains four names.

    Hooks joined with "+" are one name; "resid_post.8+10-12" is short for the names of its four hooks.

    A value that is not a string is returned unchanged, in a list.
    """
    if not isinstance(text, str):
        return [text]
    return [name for word in text.split(",") for name in _each_joined(word.strip())]


def all_named(value: Any) -> list[Any]:
    """Return the names in a string, or in all strings of a list."""
    return [name for one in (value if isinstance(value, list) and value else [value]) for name in each_named(one)]


def _each_joined(word: str) -> list[str]:
    if "+" not in word:
        return _each_layer(word)
    names: list[str] = []
    for part in map(str.strip, parts_of(word)):
        before = _BEFORE_LAYER.match(names[-1]) if names and _LAYERS.fullmatch(part) else None
        names += _each_layer(f"{before[0]}{part}" if before else part)
    return ["+".join(names)]


def _each_layer(word: str) -> list[str]:
    match = _RANGE.fullmatch(word)
    if match is None or int(match[2]) > int(match[3]):
        return [word]
    return [f"{match[1]}{layer}{match[4] or ''}" for layer in range(int(match[2]), int(match[3]) + 1)]


def short_names(texts: Sequence[Any]) -> dict[str, str]:
    """Return a dict mapping each hook to a short unique name, such as "L12" if all hooks have the same site."""
    names = [name for text in texts if not _objection(text) for name in parts_of(text)]
    hooks = {name: parse_hook(ends_of(name)[0]) for name in names}
    sites = {hook.site for hook in hooks.values()}
    short = {name: f"L{hook.layer}" if len(sites) == 1 and hook.site else hook.name for name, hook in hooks.items()}
    return {text: "+".join(short.get(name, name) for name in parts_of(str(text))) for text in texts}


def problems_of_hooks(texts: Iterable[Any], setting: str) -> list[Problem]:
    """Return the problems with hook names: invalid names, and hooks named twice."""
    problems, given = [], set[tuple[Hook, ...]]()
    for text in texts:
        objection = _objection(text)
        hooks = () if objection else tuple(map(parse_hook, parts_of(text)))
        if objection or hooks in given:
            problems.append(Problem(setting, f"{show(text)} {objection or 'is given twice'}"))
        given.add(hooks)
    return problems


def _objection(text: Any) -> str:
    """Return why a value is not a valid hook name, or "" if it is valid."""
    if not isinstance(text, str):
        return f"must be {WANTED}"
    if is_of_all_layers(text):
        return f"stands for all layers, but the number of layers is not known here; list them, like {text}.0-11"
    try:
        hooks = list(map(parse_hook, parts := parts_of(text)))
    except ValueError as error:
        return str(error)
    if len(parts) > 1 and (mlp := next(filter(is_of_transcoder, parts), None)):
        return f"joins {mlp}, which stands for a transcoder; name its ends instead, like mlp_in.3+mlp_out.3"
    return "joins a hook with itself; name different hooks" if len({*hooks}) < len(hooks) else ""
