"""Finds and formats the snapshots of the latents that a job watches while it trains."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import msgspec

from trainer.contract.runs.features import ActivatingExample
from trainer.contract.runs.watched import WATCHED, WatchedLatent, WatchedSnapshot, Why


class WatchedRow(msgspec.Struct, frozen=True):
    """A latent at a snapshot, with the SAE's label and the steps and tokens up to then; see `WatchedLatent`."""

    step: int
    tokens: int
    sae: str
    latent: int
    why: Why
    density: float | None
    heldout_density: float | None
    cosine: float | None
    largest: float | None
    contexts: tuple[ActivatingExample, ...]


def rows_of(snapshots: Sequence[WatchedSnapshot]) -> list[WatchedRow]:
    """Return the latents of some snapshots, in the order of the steps."""
    return [
        WatchedRow(
            step=snapshot.step,
            tokens=snapshot.tokens,
            sae=snapshot.label,
            latent=one.latent,
            why=one.why,
            density=one.density,
            heldout_density=one.heldout_density,
            cosine=one.cosine,
            largest=one.largest,
            contexts=tuple(context.example for context in one.contexts),
        )
        for snapshot in snapshots
        for one in snapshot.latents
    ]


def has_watched(run: Path) -> bool:
    """Return whether a run has stored snapshots of watched latents."""
    return os.path.isfile(run / WATCHED)


def cells_of(one: WatchedLatent | WatchedRow) -> tuple[str, str, str, str]:
    """Return a latent's number, the reason for watching it, its density and its cosine with the last snapshot."""
    density = "?" if one.density is None else f"{one.density:.3%}"
    return str(one.latent), one.why, density, "" if one.cosine is None else f"{one.cosine:.3f}"
