"""The state of an SAE's training: whether training finished, overfitted, or had a lower held-out FVU earlier."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from trainer.contract.json_file import convert_as, read_json
from trainer.contract.runs.checkpoint_manifest import Best, CheckpointState
from trainer.contract.settings.schedule import Schedule
from trainer.contract.store.rows import Count

# Metric names in a run's store.
PASSES, BEST_STEP, BEST_FVU = "passes", "best_step", "best_heldout_fvu"
# Event types: the run is overfitting, or the run was resumed (this invalidates earlier overfitting events).
OVERFITTING, RESUMED = "overfitting", "resumed"
# The largest relative excess of the held-out FVU over the training FVU that is considered normal. Even without
# overfitting, unseen texts cause an excess of 4 to 12 %.
MOST_GAP = 0.25
_PREFIX = "training_"


class HowFar(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a run when an SAE's weights were saved, at step `step` of `total_steps`.

    `lr_share` is the learning rate divided by the peak learning rate, or None for an optimizer without decay. `passes`
    is the number of passes over the training rows, or None for a stream. `fvu` is the FVU on the last batches, and
    `heldout_fvu` is the FVU on held-out rows. `best` is the run's lowest held-out FVU, if it is clearly lower than
    `heldout_fvu`.
    """

    step: Count
    total_steps: Count
    lr_share: float | None = None
    passes: float | None = None
    fvu: float | None = None
    heldout_fvu: float | None = None
    best: Best | None = None
    # Whether the weights are from the run's last checkpoint.
    is_last: bool = True

    @property
    def is_finished(self) -> bool:
        """Whether the run completed all its steps; only SAEs of finished runs are ranked by FVU."""
        return self.step >= self.total_steps

    @property
    def unfinished(self) -> str:
        """A phrase saying at which step the run was stopped, or "" for a finished run."""
        if self.is_finished:
            return ""
        where = f"{'stopped' if self.is_last else 'taken'} at step {self.step:,} of {self.total_steps:,}"
        rate = "" if self.lr_share is None else f" with the learning rate at {self.lr_share:.0%}"
        is_worse = self.is_last and self.lr_share is not None
        return f"{where}{rate}{'; a finished run of this length is usually better' * is_worse}"

    @property
    def gap(self) -> float | None:
        """The relative excess of the held-out FVU over the FVU on the last batches, or None if an FVU is unknown."""
        return self.heldout_fvu / self.fvu - 1 if self.heldout_fvu is not None and self.fvu else None

    @property
    def overfitting(self) -> str:
        """A phrase with the FVUs and steps that show overfitting, or ""."""
        clauses = []
        if self.gap is not None and self.gap > MOST_GAP and (self.passes or 0) > 1:
            of_both = f"{self.fvu:.4f} on the last batches, {self.heldout_fvu:.4f} held out"
            clauses.append(f"FVU is {of_both}, after {self.passes:,.1f} passes over the training rows")
        if self.best:
            now = "" if self.heldout_fvu is None else f"; {self.heldout_fvu:.4f} at the end"
            clauses.append(f"held-out FVU was best at step {self.best.step:,} ({self.best.fvu:.4f}{now})")
        return "; ".join(clauses)

    def facts(self) -> Iterator[tuple[str, str]]:
        """Yield the report card lines about the training, as pairs (title, text)."""
        passes = ""
        if self.passes is not None:
            # A short run on many rows reads a small part of them.
            passes = f", {self.passes:,.1f}" if self.passes >= 0.1 else f", {self.passes:.1g}"
            passes += " passes over the training rows"
        yield "training", self.unfinished or f"finished after {self.step:,} steps{passes}"
        if self.overfitting:
            yield OVERFITTING, self.overfitting

    def metadata(self) -> dict[str, Any]:
        """Return the metadata entries that describe the training, for an export."""
        best = {BEST_STEP: self.best.step, BEST_FVU: self.best.fvu} if self.best else {}
        known = {
            "is_last": None if self.is_last else False,
            "steps": self.step,
            "total_steps": self.total_steps,
            "lr_share": self.lr_share,
            PASSES: self.passes,
            **best,
        }
        return {f"{_PREFIX}{name}": value for name, value in known.items() if value is not None}


def of_state(state: CheckpointState, schedule: Schedule | None, planned: int, values: Mapping[str, float]) -> HowFar:
    """Return the state, at a checkpoint, of a run of `planned` steps.

    `values` maps metric names to their values. `schedule` is the learning-rate schedule, or None for an optimizer
    without a schedule.
    """
    cool_down, step = state.cool_down_of(planned), state.position.step
    whole = msgspec.structs.replace(schedule, cool_down=cool_down) if schedule else None
    share = whole.lr_factor(min(step, whole.total_steps)) if whole else None
    now, best = values.get("heldout_fvu", state.heldout_fvu), state.best or None
    return HowFar(
        step=step,
        total_steps=cool_down.end if cool_down else planned,
        lr_share=share,
        passes=state.position.tokens / state.n_train_rows if state.n_train_rows else None,
        fvu=values.get("fvu"),
        heldout_fvu=now,
        best=best if best and now is not None and best.is_clearly_below(now, share) else None,
    )


def from_metadata(metadata: Mapping[str, Any]) -> HowFar | None:
    """Return the training state stored in an export's metadata, or None if it is missing or invalid."""
    table = {name.removeprefix(_PREFIX): value for name, value in metadata.items() if name.startswith(_PREFIX)}
    if "steps" not in table:
        return None
    best = {"step": table[BEST_STEP], "fvu": table.get(BEST_FVU)} if BEST_STEP in table else None
    measured = {name: metadata.get(name) for name in ("fvu", "heldout_fvu")}
    known = {"step": table["steps"], "best": best, **measured}
    try:
        return convert_as({**table, **known}, HowFar)
    except msgspec.ValidationError:
        return None


def exported_tokens(folder: Path) -> int | None:
    """Return how many tokens the exported SAE in a folder was trained on, or None if unknown."""
    metadata = (read_json(folder / "cfg.json", dict[str, Any]) or {}).get("metadata")
    tokens = metadata.get("training_tokens") if isinstance(metadata, dict) else None
    return tokens if isinstance(tokens, int) else None
