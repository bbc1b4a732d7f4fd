"""Snapshots of watched latents, as a training run stores them."""

from __future__ import annotations

from pathlib import Path

from trainer.contract.runs.watched import WatchedContext, WatchedLatent, WatchedSnapshot, append_watched


def put_watched(run: Path, *snapshots: WatchedSnapshot) -> None:
    """Append snapshots to a run's file; create the run's folder if it is missing."""
    run.mkdir(parents=True, exist_ok=True)
    append_watched(run, snapshots)


def snapshot(step: int, label: str = "", latents: tuple[int, ...] = (12, 77)) -> WatchedSnapshot:
    """Return a snapshot in which each latent fires on a word that names the latent and the step."""
    watched = tuple(
        WatchedLatent(
            latent,
            "asked" if latent == 12 else "new",
            density=step / 10_000,
            heldout_density=0.0625,
            cosine=0.875 if step > 100 else None,
            largest=2.0,
            contexts=(WatchedContext((" the", f" w{latent}s{step}", " ran"), (0.0, 2.0, 0.5), 1),),
        )
        for latent in latents
    )
    return WatchedSnapshot(step, 128 * step, 128 * step, 512, watched, label)
