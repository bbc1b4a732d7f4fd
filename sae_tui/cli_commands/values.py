"""What flags take: numbers, shares, prices and times; anything else is told in one line."""

from __future__ import annotations

import argparse
import re

from trainer.contract.settings.knobs import cut

_SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}


def positive(text: str) -> int:
    return _integer(text, least=1)


def rank(text: str) -> int:
    return _integer(text, least=0)


def _integer(text: str, least: int) -> int:
    if not re.fullmatch(r"\d{1,18}", text) or int(text) < least:
        raise argparse.ArgumentTypeError(f'takes an integer of at least {least}, not "{cut(text)}"')
    return int(text)


def share(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f'takes a number from 0 to below 1, not "{cut(text)}"')
    return value


def price(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f'takes a price like 2.5, not "{cut(text)}"')
    return value


def seconds(text: str) -> float:
    match = re.fullmatch(r"(\d{1,12}(?:\.\d+)?)([smhd]?)", text)
    if not match:
        raise argparse.ArgumentTypeError(f'takes a time like 90s, 10m, 2h or 1d, not "{cut(text)}"')
    return float(match[1]) * _SECONDS[match[2]]


def step(text: str) -> int:
    """Return whole seconds, which divide a time into steps without a rest."""
    value = seconds(text)
    if value < 1 or value != int(value):
        raise argparse.ArgumentTypeError(f'takes a step of whole seconds like 10s, 1m or 1h, not "{cut(text)}"')
    return int(value)
