"""The exchange form of SAEs, and the interface for reading and writing file formats."""

from __future__ import annotations

import contextlib
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

import msgspec
import torch
from torch import Tensor

from trainer.activations.heavy_dimensions import changed_scales
from trainer.contract.errors import UsageError, UserError
from trainer.contract.files import open_plain
from trainer.contract.hub_cache import is_plain_file
from trainer.contract.locks import locked
from trainer.contract.printable import printable
from trainer.contract.runs.card_versions import KS, archive, weights_of
from trainer.contract.runs.explanations import EXPLANATIONS, carry_explanations
from trainer.contract.runs.features import CARD, FEATURES
from trainer.contract.runs.how_far import exported_tokens
from trainer.contract.runs.latent_notes import NOTES, Change, LatentNote, carry_notes
from trainer.contract.runs.row_sums import SUMS
from trainer.contract.settings import catalog
from trainer.contract.wording import join_words
from trainer.saes.base import Sae
from trainer.saes.layer import Layer
from trainer.sharing.parts import PARTS, SaePart, parts_in, parts_of, scales_of_parts

# The metadata key for the dimension scales, {dimension: factor}. In a crosscoder, they are relative to a part's scale.
SCALES = "dimension_scales"
# The metadata key for the share of held-out rows with fewer than k positive pre-activations, for a TopK SAE.
BELOW_K = "heldout_rows_below_k"
# The metadata key for the threshold of activations times their rank norms, if the threshold differs between latents.
OF_RANKED = "threshold_of_ranked"
# The metadata key for the place of a layer in a cross-layer transcoder.
CROSS_LAYER = "cross_layer"
# The model card that `eval` writes next to the weights, and its first line.
MODEL_CARD, CARD_TITLE = "README.md", "# Sparse autoencoder"
# The sentence in the model card that refers to `card.json`.
CARD_REST = " `card.json` has all figures."
# The maximum length of an architecture name; longer names in imported files are truncated.
_LONGEST_NAME = 60


def layer_of_metadata(metadata: Mapping[str, Any]) -> Layer | None:
    """Return the layer of a cross-layer transcoder from metadata, or None if the metadata names none."""
    with contextlib.suppress(msgspec.ValidationError):
        layer = msgspec.convert(metadata.get(CROSS_LAYER), Layer)
        return layer if layer.number < layer.n_layers else None
    return None


class Firings(NamedTuple):
    """The nonzero activations on a text: tokens [n_contexts, length], `indices` [n, 3] and activations [n].

    Each row of `indices` contains the index of the context, the index of the token in the context, and the index of the
    latent. All activations are positive.
    """

    tokens: Tensor
    indices: Tensor
    activations: Tensor


class SharedSae(NamedTuple):
    """An SAE in exchange form, mapping raw activations to raw activations.

    `config` and `weights` follow SAELens' layout for the architecture. An SAE encodes x − b_dec, and a transcoder
    encodes x itself. `k` is the number of active latents per token in training, or None if unknown. `levels` contains a
    Matryoshka SAE's prefix widths. `features` is the file that `eval` has stored for these weights. `firings` computes
    the activations on the run's data, for formats that need them; it is None if the data's tokens are unknown. `l0` is
    the L0 stated in the imported files. `notes` contains sentences about these files.
    """

    config: dict[str, Any]
    weights: dict[str, Tensor]
    metadata: dict[str, Any]
    k: int | None = None
    levels: tuple[int, ...] = ()
    is_transcoder: bool = False
    unit_decoder: bool = False
    features: Path | None = None
    firings: Callable[[], Firings] | None = None
    l0: float | None = None
    notes: tuple[str, ...] = ()

    @property
    def architecture(self) -> str:
        """The SAELens name for the inference architecture; an SAE trained with BatchTopK is "jumprelu"."""
        return str(self.config["architecture"])

    @property
    def form(self) -> str:
        """The SAELens name for an SAE with the same activation function; "standard" for a plain transcoder."""
        name = self.architecture
        end = next((end for end in ("skip_transcoder", "transcoder") if name.endswith(end)), "")
        return name.removesuffix(end).removesuffix("_") or "standard"

    @property
    def has_skip(self) -> bool:
        """Whether a skip connection adds W_skip @ x to the output; the shape of W_skip is [d_out, d_in]."""
        return "W_skip" in self.weights

    @property
    def parts(self) -> tuple[SaePart, ...]:
        """The parts that a crosscoder's rows are joined from; () for other SAEs."""
        return () if self.is_transcoder else parts_in(self.metadata, self.d_in)

    @property
    def layer(self) -> Layer | None:
        """The place of this layer in a cross-layer transcoder; None for other SAEs."""
        layer = layer_of_metadata(self.metadata) if self.is_transcoder else None
        return layer if layer and self.d_out % layer.n_targets == 0 else None

    @property
    def trained_as(self) -> str:
        """Our name for the training architecture, printable and at most 60 characters long; "" if unknown."""
        return printable(str(self.metadata.get("training_architecture", "")))[:_LONGEST_NAME]

    @property
    def d_in(self) -> int:
        return int(self.weights["W_enc"].shape[0])

    @property
    def d_sae(self) -> int:
        return int(self.weights["W_enc"].shape[1])

    @property
    def d_out(self) -> int:
        return int(self.weights["W_dec"].shape[1])


class Given(NamedTuple):
    """User settings that override or supplement the settings in an SAE's files.

    `config` maps dotted names to values and overrides the settings in the files. `transcoder` marks the SAE as a
    transcoder if the files do not.
    """

    config: Mapping[str, Any] = MappingProxyType({})
    transcoder: bool = False


NOTHING_GIVEN = Given()


class Format(ABC):
    """A tool's file format for SAEs: a folder of files."""

    # Glob patterns for the files that `write` may create.
    files: ClassVar[tuple[str, ...]] = ()
    # The sets of files from which an SAE can be read.
    reads: ClassVar[tuple[tuple[str, ...], ...]] = ()
    # Whether `write` needs `SharedSae.firings`.
    needs_firings: ClassVar[bool] = False
    # Whether notes on latents, and their explanations, are copied next to the export.
    has_labels: ClassVar[bool] = True

    def refusal(self, sae: SharedSae) -> str | None:
        """Return why the format cannot store this SAE without changing the SAE's output, or None if it can."""
        return None

    @abstractmethod
    def write(self, sae: SharedSae, folder: Path) -> list[str]:
        """Write an SAE atomically; return one sentence per omission. The caller must check `refusal` first."""

    def opening(self, repository: str) -> str:
        """Return the shell command that opens an uploaded export in its tool, or "" if it has no such command."""
        return ""

    def recognises(self, place: Path) -> bool:
        """Return whether a folder, or the folder of a file, contains an SAE in this format."""
        sets = [names for names in self.reads if place.is_dir() or place.name in names]
        return any(holds(folder_of(place), *names) for names in sets)

    def read(self, place: Path, given: Given = NOTHING_GIVEN) -> SharedSae:
        """Read the SAE in a folder or file; raise `UserError` if no supported architecture can compute it."""
        raise UsageError(f"{place} is in a format that can be exported, but not imported")


def folder_of(place: Path) -> Path:
    """Return the path if it is a folder, otherwise its parent."""
    return place if place.is_dir() else place.parent


def holds(folder: Path, *names: str) -> bool:
    """Return whether a folder contains all given files; links are followed only inside the hub's cache."""
    return all(is_plain_file(folder / name) for name in names)


def format_named(name: str) -> Format:
    """Return a format by its name in the registry."""
    form: Format = catalog.FORMATS[name].load()()
    return form


def format_in(place: Path) -> str | None:
    """Return the format name for the SAE at a path, or None if there is no readable SAE."""
    return next((name for name in catalog.READ_FORMATS if format_named(name).recognises(place)), None)


def count_saes(names: Sequence[str]) -> str:
    """Return a phrase with the number of SAEs and up to three names as examples."""
    shown = [printable(name) for name in names[:3]]
    return f"{len(names)} SAEs, e.g. {join_words(shown)}" if len(names) > 1 else f"an SAE in {shown[0]}"


@torch.no_grad()
def shared_form(sae: Sae, metadata: dict[str, Any], k: int | None = None, features: Path | None = None) -> SharedSae:
    """Return an SAE's exchange form; the SAE must be in evaluation mode."""
    scales = _scales_of(sae) if sae.part_widths is None else _parts_of(sae, metadata.get(PARTS))
    return SharedSae(
        config=sae.export_config(),
        weights=sae.export_weights(),
        metadata=metadata | scales | ({KS: list(sae.settings.ks)} if sae.settings.ks else {}),
        k=k,
        levels=tuple(getattr(sae, "widths", ())),
        is_transcoder=sae.is_transcoder,
        unit_decoder=sae.traits.unit_decoder and sae.dropped_mean is None,
        features=features,
    )


def _scales_of(sae: Sae) -> dict[str, Any]:
    """Return the dimension scales used in training, as metadata; they are already folded into the exported weights."""
    return {} if sae.dimension_scales is None else {SCALES: changed_scales(sae.dimension_scales)}


def _parts_of(sae: Sae, given: object) -> dict[str, Any]:
    """Return a crosscoder's parts as metadata, and the scales of dimensions that differ from their part's scale."""
    assert sae.dimension_scales is not None
    parts = parts_of(sae, given)
    of_parts = scales_of_parts(parts_in({PARTS: parts}, sae.d_in))
    # In float64, the product with the part's scale rounds to exactly the scale used in training.
    changed = changed_scales(sae.dimension_scales.cpu().double() / of_parts)
    return {PARTS: parts} | ({SCALES: changed} if changed else {})


def scales_in(metadata: Mapping[str, Any], d_out: int) -> Tensor | None:
    """Return the dimension scales [d_out] from metadata, or None if they are missing or malformed."""
    factors, parts = metadata.get(SCALES), parts_in(metadata, d_out)
    if not isinstance(factors, dict) or not _are_scales(factors, d_out):
        return scales_of_parts(parts).float() if parts else None
    scales = scales_of_parts(parts) if parts else torch.ones(d_out, dtype=torch.float64)
    numbers = [int(number) for number in factors]
    scales[numbers] *= torch.tensor([*map(float, factors.values())], dtype=torch.float64)
    return scales.float()


def _are_scales(factors: dict[Any, Any], d_out: int) -> bool:
    if not factors or not factors.keys() <= {str(number) for number in range(d_out)}:
        return False
    return all(isinstance(factor, int | float) and 0 <= factor <= 1 for factor in factors.values())


def refusal_of_several_hooks(sae: SharedSae, tool: str) -> str | None:
    """Return why a tool's format refuses a crosscoder or a cross-layer transcoder, or None for another SAE."""
    if sae.layer:
        return f"{tool} has no cross-layer transcoders; use --format circuit-tracer"
    of = " + ".join(str(part.width) for part in sae.parts)
    return f"{tool} has no crosscoders (this one reads {of} dimensions); use --format saelens" if of else None


def public_name(value: Any) -> Any:
    """Return a value for publication: only the last component of an absolute path; any other value unchanged."""
    is_path = isinstance(value, str) and Path(value).is_absolute()
    return Path(value).name or value if is_path else value


def has_own_model_card(folder: Path) -> bool:
    """Return whether `eval` wrote the README.md in a folder."""
    with contextlib.suppress(OSError), open_plain(folder / MODEL_CARD) as stream:
        return stream.read(len(CARD_TITLE)) == CARD_TITLE.encode()
    return False


def carry_labels(
    source: Path, target: Path, *, has_same_weights: bool = True, moved: Change = lambda note: note
) -> list[str]:
    """Add the notes on an SAE's latents, and the latents' explanations, to a copy of the SAE.

    The digest of the copy's weights replaces the digest of the SAE's weights, because it depends on the format. Labels
    of other weights keep their digest, and explanations of other weights are left out. `moved` changes the notes that
    have no digest. Return sentences about what is not copied.
    """
    has_some = any((source / name).exists() for name in (NOTES, EXPLANATIONS))
    if not has_some or os.path.realpath(source) == os.path.realpath(target):
        return []
    old, new = (weights_of(source), weights_of(target)) if has_same_weights else ("", "")
    tokens = exported_tokens(target)

    def relabelled(note: LatentNote) -> LatentNote:
        if not note.weights:
            return moved(note)
        now = note.tokens if tokens is None else tokens
        return msgspec.structs.replace(note, weights=new, tokens=now) if note.weights == old else note

    return [*carry_notes(source, target, relabelled), *carry_explanations(source, target, old, new)]


def forget_card(folder: Path) -> None:
    """Archive the replaced weights' report card as an older version, and delete it from the folder."""
    with contextlib.suppress(OSError), locked(folder):
        # Delete the report card even if it cannot be archived, because it must not describe other weights.
        with contextlib.suppress(OSError, UserError):
            archive(folder)
        for name in (CARD, FEATURES, SUMS, *([MODEL_CARD] if has_own_model_card(folder) else [])):
            (folder / name).unlink(missing_ok=True)
