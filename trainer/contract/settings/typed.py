"""Parses numbers as people type them, such as `10M`, `1.5k` and `300,000`, and lists such as `16,32,64`.

Commas separate thousands if no other interpretation is possible: in a setting with a single value, or if a group starts
with 0. In a setting that may be a sweep, all other commas separate the values of a list. In such a setting, `512,768`
could be a number or a list, so it is refused.
"""

from __future__ import annotations

import re
import shlex
from typing import Any

from trainer.contract.settings.toml import parse_toml

_SCALES = {"": 1, "k": 10**3, "K": 10**3, "M": 10**6, "G": 10**9, "B": 10**9, "T": 10**12}
_THOUSANDS = re.compile(r"[+-]?[0-9]{1,3}(,[0-9]{3})+(\.[0-9]+)?")
_SCALED = re.compile(r"([+-]?[0-9][0-9_]*(?:\.[0-9]+)?) ?([kKMGBT])")
# Longer strings are not meant as numbers and would be slow to convert.
_LONGEST = 400
SIZES = "a size like 20GiB or 500MB"
TIME_LIMITS = 'a string like "90" (minutes), "4:00:00" or "1-12" (days-hours)'
TIMES = "a time like 90s, 10m, 2h or 1d"
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
_SIZE = re.compile(r"(\d{1,15}(?:\.\d+)?)\s*([kmgt]?)(i?b?)", re.IGNORECASE)
_TIME_LIMIT = re.compile(r"([0-9]{1,6}-)?[0-9]{1,9}(:[0-9]{1,2}){0,2}")
_SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}


def parse_value(text: str) -> Any:
    """Parse `3e-4`, `true`, `[0, 1]` or `"word"` as TOML; return "" as None, and anything else as a string."""
    text = text.strip()
    if not text:
        return None
    try:
        table = parse_toml(f"value = {text}")
    except ValueError:
        return text
    return table["value"] if len(table) == 1 else text


def parse_number(text: str, *, several: bool = False, whole: bool = False) -> Any:
    """Parse a number or, with `several`, a list of numbers; parse anything else with `parse_value`.

    With `whole`, `1e6` and `8.0` become integers. Raise `ValueError` if the text could be one number or several.
    """
    text = text.strip()
    if several and _is_ambiguous(text):
        values = text.replace(",", ", ")
        raise ValueError(f"may be one number or several: write {text.replace(',', '')} or [{values}], not {text}")
    value = _one(text)
    if isinstance(value, str) and several and "," in text and len(text) <= _LONGEST:
        inner = text[1:-1] if text.startswith("[") and text.endswith("]") else text
        parts = [part.strip() for part in inner.split(",")]
        value = text if "[" in inner or "" in parts else [_one(part) for part in parts]
    if whole:
        return [_whole(one) for one in value] if isinstance(value, list) else _whole(value)
    return value


def parse_size(text: str) -> int:
    """Return a size like `20GiB` in bytes; units such as `kB` and `MB` are powers of 1,000, others of 1,024.

    Raise `ValueError` if the text is not a size.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None or not (match[2] or match[3].lower() == "b"):
        raise ValueError(f'must be {SIZES}, not "{cut(text)}"')
    base = 1000 if match[3].lower() == "b" and match[2] else 1024
    return int(float(match[1]) * base ** _POWERS[match[2].lower()])


def parse_seconds(text: str) -> float:
    """Return a time like `90s` or `2h` in seconds; raise `ValueError` if the text is not a time."""
    match = re.fullmatch(r"(\d{1,12}(?:\.\d+)?)([smhd]?)", text)
    if not match:
        raise ValueError(f'must be {TIMES}, not "{cut(text)}"')
    return float(match[1]) * _SECONDS[match[2]]


def parse_time_limit(text: str) -> float:
    """Convert a time limit in SLURM's format to seconds; raise `ValueError` if the text is not a time limit.

    SLURM reads `90` and `90:00` as 90 minutes, and `1:30:00` as 1.5 hours. If there is a number of days, it is
    followed by the hours, as in `1-12:00`.
    """
    if not _TIME_LIMIT.fullmatch(text):
        raise ValueError(f'must be {TIME_LIMITS}, not "{cut(text)}"')
    days, dash, rest = text.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    units = (3600, 60, 1) if dash or len(parts) == 3 else (60, 1)
    return 86_400 * int(days or 0) + sum(part * unit for part, unit in zip(parts, units, strict=False))


def as_time_limit(seconds: float) -> str:
    """Return a time limit in SLURM's format, like `4:00:00`."""
    hours, rest = divmod(max(1, round(seconds)), 3600)
    return f"{hours}:{rest // 60:02}:{rest % 60:02}"


def split_command_line(text: str) -> list[str]:
    """Split a command line as a shell would, without expanding anything; also accept a TOML list of its words.

    Raise `ValueError` if a quote is left open.
    """
    words = parse_value(text) if text.lstrip().startswith("[") else None
    if isinstance(words, list):
        return words
    try:
        return shlex.split(text)
    except ValueError as error:
        problem = "has a quote that is not closed" if "quotation" in str(error) else "ends with a backslash"
        raise ValueError(f"{problem}; quote words that contain it") from None


def cut(text: str) -> str:
    """Truncate a string to 60 characters for use in a message."""
    return text if len(text) <= 60 else f"{text[:59]}…"


def _is_ambiguous(text: str) -> bool:
    return bool(_THOUSANDS.fullmatch(text)) and not any(group.startswith("0") for group in text.split(",")[1:])


def _one(text: str) -> Any:
    if len(text) > _LONGEST:
        return parse_value(text)
    if _THOUSANDS.fullmatch(text):
        return parse_value(text.replace(",", ""))
    scaled = _SCALED.fullmatch(text)
    if scaled is None or scaled[1].endswith("_") or "__" in scaled[1]:
        return parse_value(text)
    from fractions import Fraction

    exact = Fraction(scaled[1].replace("_", "")) * _SCALES[scaled[2]]
    return exact.numerator if exact.denominator == 1 else float(exact)


def _whole(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() and abs(value) < 2**63 else value
