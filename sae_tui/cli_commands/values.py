"""Parses flag values: numbers, shares, prices, times and sizes. An invalid value causes a one-line error."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from typing import TypeVar

from trainer.contract.errors import UserError
from trainer.contract.settings.typed import cut, parse_seconds, parse_size

V = TypeVar("V")


def positive(text: str) -> int:
    return _integer(text, least=1)


def job_id_in(text: str) -> int | None:
    """Return the text as a job id, or None if it is not a number but, for example, a folder name."""
    return int(text) if re.fullmatch(r"\d{1,18}", text) else None


def rank(text: str) -> int:
    return _integer(text, least=0)


def port(text: str) -> int:
    if not re.fullmatch(r"\d{1,5}", text) or int(text) > 65535:
        raise argparse.ArgumentTypeError(f'must be a port from 0 to 65535, not "{cut(text)}"')
    return int(text)


def host(text: str) -> str:
    from sae_tui.ssh import checked_host

    try:
        return checked_host(text)
    except UserError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _integer(text: str, least: int) -> int:
    if not re.fullmatch(r"\d{1,18}", text) or int(text) < least:
        raise argparse.ArgumentTypeError(f'must be an integer of at least {least}, not "{cut(text)}"')
    return int(text)


def share(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f'must be a number from 0 to below 1, not "{cut(text)}"')
    return value


def price(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f'must be a price like 2.5, not "{cut(text)}"')
    return value


def seconds(text: str) -> float:
    return _parsed(parse_seconds, text)


def step(text: str) -> int:
    """Return the step length, which must be a whole number of seconds."""
    value = seconds(text)
    if value < 1 or value != int(value):
        raise argparse.ArgumentTypeError(f'must be a step of whole seconds like 10s, 1m or 1h, not "{cut(text)}"')
    return int(value)


def size(text: str) -> int:
    return _parsed(parse_size, text)


def _parsed(parse: Callable[[str], V], text: str) -> V:
    try:
        return parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
