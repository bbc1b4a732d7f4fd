"""Reading JSON that a crash may have cut, a disk spoilt or a stranger written: any bytes give a value or a sentence."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from trainer.contract.files import open_plain

# None of our files comes near it; a larger one is something else, and would fill the memory.
LARGEST = 64 * 2**20

T = TypeVar("T")


def decoded(text: bytes | str, kind: type[T], dec_hook: Callable[[type, Any], Any] | None = None) -> T:
    """The value of this type; raises `ValueError` with the reason where the text is no such thing."""
    try:
        return msgspec.json.decode(text, type=kind, dec_hook=dec_hook)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except UnicodeDecodeError:
        raise ValueError("it is not UTF-8") from None
    except (msgspec.MsgspecError, TypeError, OverflowError) as error:
        raise ValueError(str(error)) from None


def load_json(file: Path, kind: type[T], dec_hook: Callable[[type, Any], Any] | None = None) -> T:
    """What is in a file; raises `ValueError` with the reason, and `OSError` where it cannot be read."""
    with open_plain(file) as stream:
        content = stream.read(LARGEST + 1)
    if len(content) > LARGEST:
        raise ValueError(f"it is larger than {LARGEST >> 20} MB")
    return decoded(content, kind, dec_hook)


def read_json(file: str | os.PathLike[str], kind: type[T]) -> T | None:
    """None where there is none, or none that can be read."""
    try:
        return load_json(Path(file), kind)
    except (OSError, ValueError):
        return None
