"""Describes an evaluation result for the event that records it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from sae_tui.jobs.evaluation.report_card import ReportCard, read_cards
from sae_tui.jobs.going import DONE, FAILED
from trainer.contract.paths import DataDir, RunPaths
from trainer.contract.runs.features import CARD, FEATURES
from trainer.contract.runs.log_tail import last_line
from trainer.contract.runs.report_card import EFFECTS, IN_MODEL, PROBES, ROWS
from trainer.contract.runs.spread_words import spread_words
from trainer.contract.settings.series import CRITERION, series_named
from trainer.contract.store.seeds import by_seeds, mean, spread_of, without_seed
from trainer.contract.store.twins import without_twins
from trainer.contract.wording import plural

NO_TOKENS = "it has no max-activating examples, since its data has no token ids"
_NOT_WRITTEN = "not written: "


def outcome(data: DataDir, job_id: int, parts: Sequence[str] = (ROWS,)) -> tuple[str, str, str]:
    """Return the kind, message and level of the event that records a completed evaluation of `parts`."""
    last = last_line(data.run(job_id).evaluation_log)
    if last.startswith(_NOT_WRITTEN):
        return FAILED, f"was evaluated, but its report card is {last}; the log contains the metrics", "warning"
    if not (cards := read_cards(data.sae(job_id))):
        return FAILED, f"was evaluated, but {data.sae(job_id)} has no readable {CARD}", "warning"
    return DONE, f"was evaluated: {_figures(cards, parts)}; {_contexts(data, job_id)}", "info"


def failure(paths: RunPaths, code: int) -> str:
    """Return a message about a failed evaluation, with the trainer's error message or the signal that killed it."""
    if code < 0:
        return f"was not evaluated: it was killed by signal {-code}; see {paths.evaluation_log}"
    return f"was not evaluated: {last_line(paths.evaluation_log).removeprefix('error: ')}"


def _figures(cards: list[ReportCard], parts: Sequence[str]) -> str:
    """Describe the requested metrics of the SAE with the lowest FVU or, with several seeds, the lowest mean FVU."""
    by_label = {card.label: card for card in cards}
    groups = by_seeds(without_twins(by_label)).values()
    of_best = min(groups, key=lambda labels: mean([by_label[label].figures.fvu for label in labels]))
    best = by_label[of_best[0]]
    spread = spread_of([by_label[label].figures.fvu for label in of_best])
    fvu = f"FVU {best.figures.fvu:.4f}"
    if spread:
        named = ", ".join(filter(None, [without_seed(best.label), f"mean of {plural(spread.n, 'seed')}"]))
        fvu = f"FVU {spread_words(spread, series_named(CRITERION))} ({named})"
    rows = f"{best.figures.n_tokens:,} held-out rows" if best.data.is_held_out else (
        f"{best.figures.n_tokens:,} rows that it was trained on, since no rows are held out")  # fmt: skip
    words = [f"{fvu} on {rows}"] if ROWS in parts else []
    if IN_MODEL in parts:
        words.append(best.spliced.words if best.spliced else "no loss, since its model does not predict the next token")
    if EFFECTS in parts and best.effects:
        words.append(best.effects.words)
    if PROBES in parts and best.probing:
        words.append(best.probing.words)
    is_named = len(cards) > 1 and not (spread and ROWS in parts)
    return f"{f'{best.label} has ' * is_named}{', '.join(words)}"


def _contexts(data: DataDir, job_id: int) -> str:
    if has_features(data.sae(job_id)):
        return f"f, or `sae-tui features {job_id}`, shows its latents"
    return NO_TOKENS


def is_judged(folder: Path) -> bool:
    """Return whether the SAE in a folder, or any SAE in a sweep, has a report card."""
    return (folder / CARD).exists() or any(folder.glob(f"*/{CARD}"))


def has_features(folder: Path) -> bool:
    """Return whether feature files are stored for the SAE in a folder, or for any SAE in a sweep."""
    return (folder / FEATURES).exists() or any(folder.glob(f"*/{FEATURES}"))
