"""Reads the report card stored by an evaluation next to an SAE's weights."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import msgspec

from trainer.contract.errors import UserError
from trainer.contract.json_file import read_json
from trainer.contract.paths import DataDir
from trainer.contract.printable import printable
from trainer.contract.runs import card_versions, report_card
from trainer.contract.runs.card_versions import Version
from trainer.contract.runs.explanations import ExplanationsFile
from trainer.contract.runs.features import CARD
from trainer.contract.runs.report_card import Card, KnownFeatures
from trainer.contract.settings.series import error_of


class FiguresSummary(msgspec.Struct, frozen=True):
    """SAE metrics, measured on `n_tokens` rows; `dead` is the fraction of latents that never fire on these rows."""

    n_tokens: int
    fvu: float
    fvu_error: float | None = None
    l0: float | None = None
    dead: float | None = None
    dead_error: float | None = None
    d_sae: int = 0


def with_error(value: float | None, error: float | None) -> str:
    """Return a value with its standard error, like `0.953 ± 0.004`."""
    if value is None:
        return "not defined"
    return f"{value:.3f}" + ("" if error is None else f" ± {error:.3f}")


class PatchedModelSummary(msgspec.Struct, frozen=True):
    """The performance of a language model with the SAE patched in.

    A score of 1 corresponds to the unmodified model, and 0 to zeroed activations.
    """

    ce_score: float | None = None
    ce_score_error: float | None = None
    kl_score: float | None = None
    kl_score_error: float | None = None

    @property
    def words(self) -> str:
        """Both scores with their standard errors, as text."""
        ce, kl = with_error(self.ce_score, self.ce_score_error), with_error(self.kl_score, self.kl_score_error)
        return f"CE score {ce}, KL score {kl}"


class EffectsSummary(msgspec.Struct, frozen=True):
    """The number of latents that help or hurt the language model, and how well estimates and ablations correlate."""

    n_helping: int
    n_hurting: int
    pearson: float | None = None

    @property
    def words(self) -> str:
        agreement = "" if self.pearson is None else f" (correlation with ablations {self.pearson:.2f})"
        return f"{self.n_helping:,} latents help the model and {self.n_hurting:,} hurt it{agreement}"


class AucSummary(msgspec.Struct, frozen=True):
    """The mean AUC of probes over several data sets, and its standard error over random splits."""

    auc: float
    seed_error: float | None = None


class ProbingSummary(msgspec.Struct, frozen=True):
    """The performance of probes that predict text labels from k latents, for each k."""

    k: dict[str, AucSummary] = {}

    @property
    def words(self) -> str:
        """The AUC and its standard error for each k, as text."""
        of_each = (f"{with_error(one.auc, one.seed_error)} with k = {k}" for k, one in self.k.items())
        return f"AUC {', '.join(of_each)}"


class MeasuredRows(msgspec.Struct, frozen=True):
    """Properties of the rows on which an SAE was evaluated."""

    is_held_out: bool


class ReportCard(msgspec.Struct, frozen=True):
    """The parts of an SAE's report card that the app shows; `label` is the SAE's name in a sweep."""

    figures: FiguresSummary
    data: MeasuredRows
    label: str = ""
    tokens: int = 0
    spliced: PatchedModelSummary | None = None
    effects: EffectsSummary | None = None
    probing: ProbingSummary | None = None
    known: KnownFeatures | None = None
    weights: str = ""

    def values(self) -> dict[str, float]:
        """Return the metrics used to compare SAEs, with their standard errors if known."""
        own = self.figures
        values = {
            "card_fvu": own.fvu,
            error_of("card_fvu"): own.fvu_error,
            "card_l0": own.l0,
            "card_dead": own.dead,
            error_of("card_dead"): own.dead_error,
            "card_rows": own.n_tokens,
        }
        if self.spliced:
            values |= {"card_ce_score": self.spliced.ce_score, error_of("card_ce_score"): self.spliced.ce_score_error}
            values |= {"card_kl_score": self.spliced.kl_score, error_of("card_kl_score"): self.spliced.kl_score_error}
        for k, probes in (self.probing.k if self.probing else {}).items():
            values |= {f"card_auc_{k}": probes.auc, error_of(f"card_auc_{k}"): probes.seed_error}
        if self.known:
            values |= {"card_f1": self.known.f1, error_of("card_f1"): self.known.f1_error}
        return {name: value for name, value in values.items() if value is not None}


def read_card(folder: Path) -> ReportCard | None:
    """Return the report card of the SAE in a folder, or None if it is missing or unreadable."""
    return read_json(folder / CARD, ReportCard)


def whole_cards(folder: Path) -> dict[str, Card]:
    """Return a dict mapping each SAE label in a folder to the SAE's complete report card."""
    cards = [
        report_card.with_explanations(card, ExplanationsFile(one))
        for one in _folders(folder)
        if (card := report_card.read_card(one))
    ]
    return {card.label: card for card in cards}


def read_cards(folder: Path) -> list[ReportCard]:
    """Return the report card for the SAE in a folder, or the report cards for all SAEs in a sweep."""
    return [card for one in _folders(folder) if (card := read_card(one))]


def versions_of(folder: Path) -> dict[str, list[Version]]:
    """Return a dict mapping each SAE label in a folder to the SAE's current and earlier report cards, latest first.

    The label of a single SAE is "".
    """
    older = (file.parent for file in folder.glob(f"*/{card_versions.FOLDER}"))
    folders = sorted({*_folders(folder), *older}, key=lambda one: (one != folder, one.name))
    cards = {"" if one == folder else one.name: card_versions.versions(one) for one in folders}
    return {label: versions for label, versions in cards.items() if versions}


class OtherCard(msgspec.Struct, frozen=True):
    """A report card to compare another one with; `name` identifies it, like `card 2` or `job 7, k=16`."""

    name: str
    card: Card

    @property
    def words(self) -> str:
        """The subject and the main figures, as text."""
        spliced, step = self.card.spliced, f"step {self.card.step:,}" if self.card.step else ""
        ce = f"CE score {with_error(spliced.ce_score, None)}" if spliced else ""
        fvu = f"FVU {self.card.figures.fvu:.4f}"
        return printable(" · ".join(filter(None, [self.card.title, step, fvu, ce])))


def other_cards(data: DataDir, job_id: int, label: str, others: Iterable[int]) -> list[OtherCard]:
    """Return the report cards to compare a job's current one with: earlier ones, then other SAEs' and other jobs'.

    `label` identifies the SAE that the current report card belongs to.
    """
    folder = data.sae(job_id)
    own = [
        OtherCard(f"card {one.number}", one.card) for one in versions_of(folder).get(label, []) if not one.is_current
    ]
    members = [OtherCard(printable(other), card) for other, card in whole_cards(folder).items() if other != label]
    of_jobs = [
        OtherCard(printable(", ".join(filter(None, [f"job {other}", name]))), card)
        for other in others
        if other != job_id
        for name, card in whole_cards(data.sae(other)).items()
    ]
    return [*own, *members, *of_jobs]


def version_of(folder: Path, number: int) -> dict[str, Version]:
    """Return a dict mapping each SAE label in a folder to the SAE's report card with this number.

    Raise `UserError` if no SAE has a report card with this number.
    """
    cards = versions_of(folder)
    if shown := {label: one for label, versions in cards.items() for one in versions if one.number == number}:
        return shown
    there = sorted({one.number for versions in cards.values() for one in versions})
    raise UserError(
        f"--card: must be one of {', '.join(map(str, there))}" if there else "--card: there is no report card"
    )


def _folders(folder: Path) -> list[Path]:
    return [folder, *sorted(file.parent for file in folder.glob(f"*/{CARD}"))]
