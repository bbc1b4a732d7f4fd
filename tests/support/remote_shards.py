"""Shards in a store in memory that counts requests and runs a function before each of them."""

from __future__ import annotations

import gc
import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from safetensors.torch import save_file

from trainer.activations.int8_rows import encoded
from trainer.contract import object_cache, object_store
from trainer.contract.object_cache import RowCache
from trainer.contract.object_store import ObjectStore

URL = "memory://bucket/acts/h"
# The rows of a shard, their dimension, and the number of texts in a shard.
N, D, N_TEXTS = 300, 128, 30


class Requests(MemoryFileSystem):  # type: ignore[misc]
    """Passes the name and the range of each read to `before_read`, and records them in `reads`."""

    protocol = "memory"
    cachable = False
    store: dict[str, Any] = {}
    pseudo_dirs: list[str] = [""]
    reads: list[tuple[str, int, int]] = []
    before_read: Callable[[str, int], object] = staticmethod(lambda name, first: None)

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **kwargs: Any) -> bytes:
        name, first = path.rpartition("/")[2], start or 0
        type(self).before_read(name, first)
        type(self).reads.append((name, first, end or -1))
        content: bytes = super().cat_file(path, start=start, end=end, **kwargs)
        return content

    @classmethod
    def whole_reads(cls) -> list[str]:
        """Return the name of each shard that was read from its start to its end."""
        return [name for name, first, last in cls.reads if name.endswith("rs") and first == 0 and last > N * D * 4]


def store_for_a_test(monkeypatch: pytest.MonkeyPatch, cache: Path) -> Iterator[type[Requests]]:
    """Yield an empty store, with an empty cache folder and without waits between tries; end downloads afterwards."""
    opened, begin = list[RowCache](), RowCache.__init__

    def note(cache: RowCache, *args: Any, **kwargs: Any) -> None:
        begin(cache, *args, **kwargs)
        opened.append(cache)

    monkeypatch.setattr(RowCache, "__init__", note)
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    monkeypatch.setattr(object_store, "FIRST_WAIT_S", 0.0)
    monkeypatch.setattr(object_cache, "LONGEST_WAIT_S", 0.05)
    for name, value in (("store", {}), ("reads", []), ("before_read", staticmethod(lambda name, first: None))):
        monkeypatch.setattr(Requests, name, value)
    fsspec.register_implementation("memory", Requests, clobber=True)
    object_cache.forget_refreshed()
    yield Requests
    for one in opened:
        one.close()
    for thread in [thread for one in opened for thread in one._threads]:
        thread.join()
    # Cycles keep the shards' open files; several tests together would open more than the 1,024 that `select` accepts.
    gc.collect()
    object_cache.forget_refreshed()
    fsspec.register_implementation("memory", MemoryFileSystem, clobber=True)


def write_shards(
    folder: Path, n_shards: int = 8, *, has_sums: bool = True, columns: bool = True, int8: bool = False,
    seed: int = 0, width: int = D,
) -> None:  # fmt: skip
    """Write shuffled shards with the texts of their rows, as an extraction does."""
    folder.mkdir(parents=True, exist_ok=True)
    sums = {}
    for number in range(n_shards):
        generator = torch.Generator().manual_seed(seed + number)
        rows, first = torch.randn(N, width, generator=generator), number * N
        document = torch.arange(first, first + N) * N_TEXTS // N
        own = {"document": document.int(), "token_ids": document.int(), "positions": document.int()}
        file = folder / f"shard-{number:05d}.safetensors"
        coded = {"int8_rows": encoded(rows, rows.mean(0)), "int8_mean": rows.mean(0)}
        save_file({**(coded if int8 else {"activations": rows}), **(own if columns else {})}, file)
        sums[file.name] = hashlib.sha256(file.read_bytes()).hexdigest()
    (folder / "meta.json").write_text(json.dumps({"shuffled": True} | ({"shards": sums} if has_sums else {})))


def upload(folder: Path, url: str = URL) -> None:
    """Upload all files of a folder."""
    store = ObjectStore(url, "data.path")
    for file in folder.iterdir():
        store.put(file, file.name)
