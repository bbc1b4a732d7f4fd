"""Random twins: SAEs in a sweep with weights that keep their random initial values, as a baseline for the other SAEs.

If an SAE scores close to its random twin, its figures come from the data and the sparsity, not from training
(Korznikov et al. 2026, arXiv 2602.14111).
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal

Frozen = Literal["decoder", "encoder", "both"]
_FREEZE, _OFF = "freeze=", "off"
_FROZEN: dict[str, Frozen] = {"decoder": "decoder", "encoder": "encoder", "both": "both"}


def frozen_in(label: str) -> Frozen | None:
    """Return which weights an SAE keeps frozen, according to its label, or None if it has no frozen weights."""
    value = next((part.removeprefix(_FREEZE) for part in label.split(",") if part.startswith(_FREEZE)), _OFF)
    return _FROZEN.get(value)


def twins_of(labels: Collection[str], label: str) -> list[str]:
    """Return the labels of the random twins of an SAE, which differ from it only in their frozen weights."""
    return [other for other in labels if other != label and _trained(other) == label]


def without_twins(labels: Collection[str]) -> list[str]:
    """Return the labels of all SAEs except random twins."""
    return [label for label in labels if not (frozen_in(label) and _trained(label) in labels)]


def _trained(label: str) -> str:
    """Return the label of the SAE that differs only in having no frozen weights."""
    return ",".join(f"{_FREEZE}{_OFF}" if part.startswith(_FREEZE) else part for part in label.split(","))
