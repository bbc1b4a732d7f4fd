"""Exports a run's finished SAEs for other tools, with their metrics."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from trainer.contract.runs.checkpoint_manifest import Position
from trainer.contract.runs.how_far import HowFar
from trainer.contract.runs.recipe import MOST_L0_MISS, RECIPE, Recipe, asked_l0, l0_miss
from trainer.contract.settings.series import measured_names
from trainer.reporting import rank_log
from trainer.reporting.report import Report
from trainer.saes.base import Sae
from trainer.saes.penalised import Penalised
from trainer.sharing.base import CROSS_LAYER
from trainer.sharing.saelens import export_sae
from trainer.training.final_writes import Write
from trainer.training.learner import Learner
from trainer.training.thresholds import threshold_facts


class Exporter:
    """Writes a run's SAEs to `output`, or to subfolders named after their labels.

    `origins` maps each SAE's label to facts about its data for `cfg.json`; `recipe_of` returns the recipe of the SAE
    with a given label.
    """

    def __init__(
        self,
        output: Path,
        origins: Mapping[str, Mapping[str, Any]],
        recipe_of: Callable[[str], Recipe],
        report: Report,
    ) -> None:
        self._output, self._origins, self._recipe_of, self._report = output, origins, recipe_of, report

    def writes(
        self, learners: Mapping[str, Learner], position: Position, how_far: Callable[[str], HowFar]
    ) -> list[Write]:
        """Return a `Write` for each SAE, to a folder named after its label; all ranks sharing latents must call this.

        `how_far` returns the training progress of the SAE with a given label.
        """
        writes = []
        for label, learner in learners.items():
            with learner.evaluating():
                sae = learner.whole_sae()
            if sae is not None:
                self._report_missed_l0(label, learner, self._recipe_of(label).target_l0)
                to = partial(self._export_one, label, learner, sae, position, how_far(label))
                folder = self._output / label if label else self._output
                writes.append(Write(folder, partial(to, folder), to))
        return writes

    def _export_one(
        self, label: str, learner: Learner, sae: Sae, position: Position, how_far: HowFar, folder: Path
    ) -> None:
        recipe = self._recipe_of(label)
        values = self._report.values[label]
        measured = {name: values[name] for name in measured_names() if name in values}
        with learner.evaluating():
            training = training_facts(learner, position, recipe) | how_far.metadata()
            export_sae(sae, folder, {**self._origins[label], **training, **measured})
        rank_log.say(f"SAE exported: {folder}")
        if how_far.unfinished:
            rank_log.say(how_far.unfinished)

    def _report_missed_l0(self, label: str, learner: Learner, target: int | None) -> None:
        """Report an L0 that misses the requested L0, since the FVU is then not comparable with other SAEs' FVUs."""
        values = self._report.values[label]
        l0 = values.get("heldout_l0", values.get("l0"))
        if l0 is None or abs(l0_miss(l0, target)) <= MOST_L0_MISS:
            return
        remedy = "compare its FVU only with SAEs of this L0"
        if isinstance(learner.sae, Penalised):
            remedy += "; to get closer, train longer or set sae.sparsity_coefficient"
        missed = f"L0 is {l0:.1f} ({asked_l0(l0, target)}): {remedy}"
        self._report.event("missed_l0", missed, label)
        rank_log.say(missed)


def training_facts(learner: Learner, position: Position, recipe: Recipe | None) -> dict[str, Any]:
    """Return facts about an SAE's training for its export metadata."""
    return {
        "training_architecture": learner.architecture,
        "training_tokens": position.tokens,
        **({RECIPE: msgspec.to_builtins(recipe)} if recipe else {}),
        **threshold_facts(learner.sae),
        **({CROSS_LAYER: msgspec.to_builtins(learner.layer)} if learner.layer else {}),
    }
