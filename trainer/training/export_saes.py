"""Writes the finished SAEs of a run for other tools, with what was measured of them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainer.contract.runs.checkpoint_manifest import Position
from trainer.contract.settings.series import measured_names
from trainer.reporting import rank_log
from trainer.reporting.report import Report
from trainer.saes.base import Sae
from trainer.sharing.saelens import export_sae
from trainer.training.learner import Learner

# An L0 more than so many times above or below what was asked for is reported.
MOST_L0_OFF = 1.25


class Exporter:
    """Writes below `output`; `origins` is what is known of the data of each SAE, by label, for its `cfg.json`."""

    def __init__(self, output: Path, origins: Mapping[str, Mapping[str, Any]], report: Report) -> None:
        self._output, self._origins, self._report = output, origins, report

    def export(self, learners: Mapping[str, Learner], position: Position) -> None:
        """Write every SAE to a folder of its label; all ranks that share its latents have to call this."""
        for label, learner in learners.items():
            with learner.evaluating():
                if (sae := learner.whole_sae()) is not None:
                    self._export_one(label, learner, sae, position)

    def _export_one(self, label: str, learner: Learner, sae: Sae, position: Position) -> None:
        self._tell_missed_l0(label, learner)
        folder = self._output / label if label else self._output
        values = self._report.values[label]
        measured = {name: values[name] for name in measured_names() if name in values}
        training = {"training_architecture": learner.architecture, "training_tokens": position.tokens}
        export_sae(sae, folder, {**self._origins[label], **training, **measured})
        rank_log.say(f"SAE exported: {folder}")

    def _tell_missed_l0(self, label: str, learner: Learner) -> None:
        """Report an L0 that its penalty has not brought near the target: the SAE would look as good as any other."""
        values, target = self._report.values[label], learner.sae.target_l0
        l0 = values.get("heldout_l0", values.get("l0"))
        if target and l0 is not None and not 1 / MOST_L0_OFF <= l0 / target <= MOST_L0_OFF:
            missed = f"L0 is {l0:.1f} where {target} was asked for; train longer, or fix sae.sparsity_coefficient"
            self._report.event("missed_l0", missed, label)
            rank_log.say(missed)
