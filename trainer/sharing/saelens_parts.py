"""One folder per part of a crosscoder, in SAELens' files, for reading directions; no part is an SAE on its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from trainer.sharing.base import Format, SharedSae, forget_card
from trainer.sharing.origins import layer_of
from trainer.sharing.parts import SaePart
from trainer.sharing.saelens import CONFIG, WEIGHTS, SaeLens
from trainer.sharing.saelens_reading import PART

# Figures of the whole crosscoder, such as its FVU, would be wrong for a part.
_OF_EACH = ("context_size", "dataset_path", "prepend_bos", "training_architecture", "training_tokens")
_WARNING = (
    "one part of a crosscoder, for reading: a latent's pre-activation is the sum of (x - b_dec) @ W_enc over all parts,"
    " plus b_enc once"
)


class SaeLensParts(Format):
    """Stores each part of a crosscoder in a folder `part-N` that SAELens loads; its metadata marks it as a part."""

    files = ("part-*", CONFIG, WEIGHTS)

    def refusal(self, sae: SharedSae) -> str | None:
        if not sae.parts:
            return "saelens-parts is for crosscoders, but this SAE reads a single hook; use --format saelens"
        # A gated SAE has two pre-activations per latent, and only W_enc is shared.
        return SaeLens().refusal(sae)

    def write(self, sae: SharedSae, folder: Path) -> list[str]:
        for number, one in enumerate(_each(sae), start=1):
            SaeLens().write(one, folder / f"part-{number}")
        # An earlier export of the whole crosscoder would look like one of the parts.
        for name in (CONFIG, WEIGHTS):
            (folder / name).unlink(missing_ok=True)
        own = {folder / f"part-{number}" for number in range(1, len(sae.parts) + 1)}
        for stale in set(folder.glob("part-*")) - own:
            # A part of an earlier crosscoder with more parts.
            for name in () if stale.is_symlink() else (CONFIG, WEIGHTS):
                (stale / name).unlink(missing_ok=True)
        forget_card(folder)
        return [f"each of the {len(sae.parts)} folders is only a part: its latents do not fire without the other parts"]


def _each(sae: SharedSae) -> Iterator[SharedSae]:
    """Yield each part with its rows of W_enc, columns of W_dec and values of b_dec; all else is the crosscoder's."""
    first = 0
    for number, part in enumerate(sae.parts, start=1):
        own = slice(first, first + part.width)
        first += part.width
        weights = sae.weights | {
            "W_enc": sae.weights["W_enc"][own],
            "W_dec": sae.weights["W_dec"][:, own],
            "b_dec": sae.weights["b_dec"][own],
        }
        yield sae._replace(weights=weights, metadata=_facts(sae, part, number), features=None, firings=None)


def _facts(sae: SharedSae, part: SaePart, number: int) -> dict[str, object]:
    origin, layer = part.origin(), layer_of(part.hook_name)
    facts = {name: sae.metadata[name] for name in _OF_EACH if name in sae.metadata}
    of_part = {"number": number, "n_parts": len(sae.parts), "name": part.name, "scale": part.scale, "note": _WARNING}
    return facts | origin | ({} if layer is None else {"hook_layer": layer}) | {PART: of_part}
