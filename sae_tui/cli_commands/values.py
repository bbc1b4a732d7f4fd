"""Parses flag values: numbers, shares, prices, times and sizes. An invalid value causes a one-line error."""

from __future__ import annotations

import argparse
import re

from trainer.contract.errors import UserError
from trainer.contract.settings.declare import cut

_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
_SIZE = re.compile(r"(\d{1,15}(?:\.\d+)?)\s*([kmgt]?)(i?b?)", re.IGNORECASE)
_SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}


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
    match = re.fullmatch(r"(\d{1,12}(?:\.\d+)?)([smhd]?)", text)
    if not match:
        raise argparse.ArgumentTypeError(f'must be a time like 90s, 10m, 2h or 1d, not "{cut(text)}"')
    return float(match[1]) * _SECONDS[match[2]]


def step(text: str) -> int:
    """Return the step length, which must be a whole number of seconds."""
    value = seconds(text)
    if value < 1 or value != int(value):
        raise argparse.ArgumentTypeError(f'must be a step of whole seconds like 10s, 1m or 1h, not "{cut(text)}"')
    return int(value)


def size(text: str) -> int:
    """Return a size like `20GiB` in bytes; units such as `kB` and `MB` are powers of 1,000, others of 1,024."""
    match = _SIZE.fullmatch(text.strip())
    if match is None or not (match[2] or match[3].lower() == "b"):
        raise argparse.ArgumentTypeError(f'must be a size like 20GiB or 500MB, not "{cut(text)}"')
    base = 1000 if match[3].lower() == "b" and match[2] else 1024
    return int(float(match[1]) * base ** _POWERS[match[2].lower()])
