"""Finds the bytes of each token; a token may be only part of a character, and so not valid text by itself."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from trainer.contract.json_file import read_json, write_json
from trainer.contract.settings.tokens_of_data import TOKEN_TEXTS

_BYTE = re.compile("<0x([0-9A-Fa-f]{2})>")
_SPACE = "\u2581"


class Base64(msgspec.Struct):
    """Bytes that are not valid UTF-8, stored as base64 in JSON."""

    base64: bytes


def write_tokens(folder: Path, tokens: Sequence[bytes]) -> None:
    """Write each token's text, or its bytes if they are not UTF-8; raise `OSError` if writing fails."""
    write_json(folder / TOKEN_TEXTS, [_stored(one) for one in tokens])


def read_tokens(folder: Path) -> list[bytes]:
    """Return each token's bytes, in token id order, or an empty list if the file is missing or invalid."""
    stored = read_json(folder / TOKEN_TEXTS, list[str | Base64]) or []
    return [one.encode() if isinstance(one, str) else one.base64 for one in stored]


def _stored(token: bytes) -> str | Base64:
    try:
        return token.decode()
    except UnicodeDecodeError:
        return Base64(token)


def token_bytes(tokenizer: Any) -> list[bytes]:
    """Return each token's bytes, in token id order, including a word's leading space.

    The tokenizer's decoder defines how to convert a vocabulary entry to bytes. If the decoder has unsupported steps,
    each token is decoded separately.
    """
    numbers = list(range(len(tokenizer)))
    names = [str(name) for name in tokenizer.convert_ids_to_tokens(numbers)]
    backend = getattr(tokenizer, "backend_tokenizer", None)
    steps = list(_steps(_state(getattr(backend, "decoder", None))))
    if not _are_known(steps):
        return [one.encode("utf-8", "replace") for one in _decoded_alone(tokenizer, numbers, names)]
    # Added tokens appear in the text unchanged.
    added = set(tokenizer.get_added_vocab().values())
    return [name.encode() if number in added else _bytes_of(name, steps) for number, name in enumerate(names)]


def _state(decoder: Any) -> dict[str, Any]:
    return json.loads(decoder.__getstate__()) if decoder is not None else {}


def _steps(decoder: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield a decoder's steps, including the steps nested in sequences."""
    if decoder.get("type") == "Sequence":
        for one in decoder["decoders"]:
            yield from _steps(one)
    else:
        yield decoder


def _are_known(steps: Sequence[dict[str, Any]]) -> bool:
    """Return whether all steps are supported: each converts individual tokens, or only strips the ends of a text."""
    kinds = [step.get("type") for step in steps]
    fused = kinds.index("Fuse") if "Fuse" in kinds else len(kinds)
    of_ends = all(at > fused for at, kind in enumerate(kinds) if kind == "Strip")
    of_strings = all("String" in step["pattern"] for step in steps if step.get("type") == "Replace")
    return of_ends and of_strings and {*kinds} <= {"ByteLevel", "ByteFallback", "Replace", "Metaspace", "Fuse", "Strip"}


def _bytes_of(name: str, steps: Sequence[dict[str, Any]]) -> bytes:
    """Return a token's bytes, given its vocabulary entry."""
    for step in steps:
        match step["type"]:
            case "ByteLevel":
                known = all(char in _BYTES for char in name)
                return bytes(_BYTES[char] for char in name) if known else name.encode()
            case "ByteFallback" if byte := _BYTE.fullmatch(name):
                return bytes.fromhex(byte[1])
            case "Replace":
                name = name.replace(step["pattern"]["String"], step["content"])
            case "Metaspace":
                name = name.replace(step["replacement"], " ")
    return name.encode()


def _byte_characters() -> dict[str, int]:
    """Return a dict mapping each character in byte-level vocabulary entries, as in GPT-2, to its byte."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in shown]
    return {chr(byte): byte for byte in shown} | {chr(0x100 + at): byte for at, byte in enumerate(others)}


_BYTES = _byte_characters()


def _decoded_alone(tokenizer: Any, numbers: list[int], names: list[str]) -> Iterator[str]:
    """Decode each token separately, and yield its text; restore the leading space that the decoder drops."""
    texts = tokenizer.batch_decode([[one] for one in numbers], clean_up_tokenization_spaces=False)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    is_wordpiece = type(getattr(backend, "model", None)).__name__ == "WordPiece"
    for name, text in zip(names, texts, strict=True):
        if is_wordpiece:
            yield name[2:] if name.startswith("##") else f" {name}"
        else:
            yield f" {text}" if name.startswith(_SPACE) and not text.startswith(" ") else text
