"""The places in a language model where activations are read, by three kinds of names for the same place."""

from __future__ import annotations

import re

import msgspec

# By our name of a site: what TransformerLens calls it inside a block.
SITES = {
    "resid_pre": "hook_resid_pre",
    "resid_post": "hook_resid_post",
    "mlp_in": "mlp.hook_in",
    "mlp_out": "hook_mlp_out",
    "attn_out": "hook_attn_out",
}
WANTED = f'"SITE.LAYER" with SITE one of {", ".join(SITES)}, or the path of a module'
_OURS = re.compile(rf"({'|'.join(SITES)})\.([0-9]{{1,4}})")
_TRANSFORMER_LENS = re.compile(r"blocks\.([0-9]{1,4})\.([a-z_.]+)")
_PATH = re.compile(r"[A-Za-z_]\w*(\.\w+)*")


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
        sites = {theirs: ours for ours, theirs in SITES.items()}
        if match[2] in sites:
            return Hook(sites[match[2]], int(match[1]))
        # Some models call their blocks that, too: "blocks.3.attn" is a module of theirs.
        if "hook_" in match[2]:
            listed = ", ".join(f"blocks.{match[1]}.{theirs}" for theirs in SITES.values())
            raise ValueError(f"has no site {match[2]}; known are {listed}")
    if not _PATH.fullmatch(text):
        raise ValueError(f"must be {WANTED}")
    return Hook(path=text)
