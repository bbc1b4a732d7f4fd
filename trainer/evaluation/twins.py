"""Adds random twins' figures to the report cards of the SAEs trained alongside them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec

from trainer.contract.runs.card_figures import twin_of
from trainer.contract.runs.report_card import Card, read_card
from trainer.contract.store.twins import twins_of
from trainer.evaluation.card import write_card


def write_twins(folders: Mapping[str, Path]) -> dict[str, Card]:
    """Add random twins' figures to report cards; return the changed report cards.

    `folders` maps each SAE's label to its folder. SAEs or twins without a report card are left out.
    """
    done = {}
    for label, folder in folders.items():
        of_twins = {twin: read_card(folders[twin]) for twin in twins_of(folders, label)}
        card = read_card(folder) if of_twins else None
        if card and (twins := tuple(twin_of(card, twin, other) for twin, other in of_twins.items() if other)):
            done[label] = write_card(folder, msgspec.structs.replace(card, twins=twins), replaces=card)
    return done
