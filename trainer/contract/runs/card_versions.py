"""Keeps an SAE's older report cards and the matching features files in `.cards` next to the weights.

Files are named by a digest of their contents, so that nothing is stored twice. At most `MOST_CARDS` older report cards
and `MOST_FEATURES_BYTES` of older features files are kept; the oldest are removed first.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import msgspec

from trainer.contract.files import open_plain, replacing, write_whole
from trainer.contract.json_file import read_json
from trainer.contract.paths import file_mode, private_folder, refuse_link
from trainer.contract.runs.explanations import ExplanationsFile
from trainer.contract.runs.features import CARD, FEATURES
from trainer.contract.runs.report_card import Card, card_from, with_explanations

FOLDER = ".cards"
MOST_CARDS = 20
MOST_FEATURES_BYTES = 2**30
# The key in an exported SAE's metadata for the values of k that it is trained for.
KS = "trained_for_k"
# File name extensions for weight files.
_WEIGHTS = frozenset({".safetensors", ".pt", ".pth", ".bin", ".npz"})
_NAME = re.compile(r"([0-9]{4,9})-([0-9a-f]{16})\.json")
_DIGEST = re.compile(r"[0-9a-f]{16}")
# Fields in the parts of a report card that change at every evaluation, even if the results stay the same.
_CHANGING = ("measured", "seconds", "device")


class Version(msgspec.Struct, frozen=True, kw_only=True):
    """A current or older report card for an SAE.

    `number` is 1 for the first report card. `features` is None if the features file is not stored.
    """

    number: int
    card: Card
    features: Path | None
    is_current: bool


def weights_of(folder: Path) -> str:
    """Return a digest of the names and contents of the weight files in a folder; "" if there are none.

    Exports of an SAE with different values of k have the same weights but different digests.
    """
    files = [file for file in sorted(folder.iterdir()) if file.suffix in _WEIGHTS and file.name != FEATURES]
    digests = [f"{file.name}\0{_digest_of(file)}\0" for file in files if file.is_file() and not file.is_symlink()]
    return hashlib.sha256("".join([*digests, _other_k(folder)]).encode()).hexdigest()[:16] if digests else ""


def _other_k(folder: Path) -> str:
    """Return the k of an SAE that is trained for several k and was exported with a smaller one, otherwise ""."""
    config = read_json(folder / "cfg.json", dict[str, Any]) or {}
    metadata = config.get("metadata")
    ks = metadata.get(KS) if isinstance(metadata, dict) else None
    return f"k\0{config.get('k')}\0" if isinstance(ks, list) and ks and config.get("k") != ks[-1] else ""


def versions(folder: Path) -> list[Version]:
    """Return all versions of the report card in an SAE's folder, latest first."""
    older = {digest: (number, file) for number, digest, file in _stored(folder)}
    found = [
        Version(number=number, card=card, features=_features(folder, card), is_current=False)
        for number, file in older.values()
        if (card := _read(file))
    ]
    if current := _read(folder / CARD):
        last = max((number for number, _ in older.values()), default=0)
        number, _ = older.get(_content(current), (last + 1, None))
        features = folder / FEATURES if os.path.exists(folder / FEATURES) else None
        found = [one for one in found if one.number != number]
        found.append(Version(number=number, card=current, features=features, is_current=True))
    stored = ExplanationsFile(folder)
    found = [msgspec.structs.replace(one, card=with_explanations(one.card, stored)) for one in found]
    return sorted(found, key=lambda one: one.number, reverse=True)


def of_weights(folder: Path, weights: str, tokens: int, step: int = 0) -> Version | None:
    """Return the latest version measured on the given weights, or None."""
    return next((one for one in versions(folder) if one.card.is_of(weights, tokens, step)), None)


def archive(folder: Path) -> None:
    """Store copies of a folder's report card and features file as a version, unless that version is already stored.

    The originals stay in the folder. Raise `OSError` or `UserError` if the version cannot be written.
    """
    current = _read(folder / CARD)
    if current is None:
        return
    place = folder / FOLDER
    refuse_link(place)
    private_folder(place)
    features = folder / FEATURES
    if features.is_file() and not features.is_symlink():
        current = msgspec.structs.replace(current, features=_digest_of(features))
        _put(features, place / f"{current.features}{features.suffix}")
    stored, content = _stored(folder), _content(current)
    if all(digest != content for _, digest, _ in stored):
        number = max((number for number, _, _ in stored), default=0) + 1
        write_whole(place / f"{number:04}-{content}.json", current.as_json())
    _forget_oldest(folder)


def _stored(folder: Path) -> list[tuple[int, str, Path]]:
    """Return the number, digest and file of each older report card, oldest first."""
    found = []
    with contextlib.suppress(OSError):
        for file in (folder / FOLDER).iterdir():
            if match := _NAME.fullmatch(file.name):
                found.append((int(match[1]), match[2], file))
    return sorted(found)


def _read(file: Path) -> Card | None:
    table = read_json(file, dict[str, Any])
    return None if table is None else card_from(table)


def _features(folder: Path, card: Card) -> Path | None:
    file = folder / FOLDER / f"{card.features}{Path(FEATURES).suffix}"
    # A report card may come from another user and contain arbitrary paths, so accept only a digest.
    return file if _DIGEST.fullmatch(card.features) and file.is_file() else None


def _content(card: Card) -> str:
    """Return a digest of a report card that ignores the features file and the times and devices of the measurements."""
    table = msgspec.to_builtins(msgspec.structs.replace(card, features="", sums=None))
    del table["explained"]
    for part in table["parts"].values():
        for name in _CHANGING:
            del part[name]
    return hashlib.sha256(json.dumps(table, sort_keys=True).encode()).hexdigest()[:16]


def _digest_of(file: Path) -> str:
    with open_plain(file) as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()[:16]


def _put(source: Path, target: Path) -> None:
    """Hard-link a file to `target`, or copy it if the file system has no hard links."""
    if target.exists():
        return
    try:
        os.link(source, target)
    except OSError:
        with open_plain(source) as read, replacing(target, file_mode(target.parent)) as written:
            shutil.copyfileobj(read, written, 2**20)


def _forget_oldest(folder: Path) -> None:
    stored = _stored(folder)
    for _, _, file in stored[:-MOST_CARDS]:
        file.unlink(missing_ok=True)
    left = MOST_FEATURES_BYTES
    wanted = []
    for _, _, file in reversed(stored[-MOST_CARDS:]):
        features = _features(folder, card) if (card := _read(file)) else None
        if features and features not in wanted:
            left -= features.stat().st_size
            wanted += [features] if left >= 0 else []
    for file in (folder / FOLDER).glob(f"*{Path(FEATURES).suffix}"):
        if file not in wanted:
            file.unlink(missing_ok=True)
