"""Measures how fast batches are read from each shard format, compared with a sequential read of the same files.

    python tests/benchmarks/loader.py [--rows 1_000_000] [--d-in 768] [--folder DIR] [--formats safetensors,parquet]

Batches of 4096 rows are read in training order, and each row is read once. Rows that were shuffled when stored, for
example by an extraction, are read in contiguous ranges; other rows are read one by one. First, a single thread reads,
as during a training step on a CPU. Then all threads repeatedly read into the same memory, as they would for a GPU. The
goal is 90 % of the speed of a sequential read that discards the data, both from the page cache and from disk. Before
they are read from disk, the files are dropped from the cache. Then a TopK SAE is trained for 100 steps; at most 2 % of
the time may be spent waiting for data. Parquet is decoded once in advance, and decoding is timed separately. The
benchmark needs `--rows` × `--d-in` × 4 bytes of disk space, or twice that for Parquet.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import io
import itertools
import json
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from rich.console import Console
from rich.table import Table
from safetensors.numpy import save_file

from trainer.activations import foreign
from trainer.activations.base import Empty, empty_rows
from trainer.activations.shards import Shards
from trainer.activations.training_data import IndexedData
from trainer.contract.settings.inspectors import inspecting_by
from trainer.contract.settings.job_file import parse_job
from trainer.parallel.base import Parallel
from trainer.parallel.group import Group
from trainer.reporting.progress import RunProgress
from trainer.training.loop import Trainer

N_SHARDS, BATCH, STEPS = 4, 4096, 100
COLUMNS = ("format", "stored", "from", "sequential", "batches", "of it", "by all", "of it", "opened in s", "waiting")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--d-in", type=int, default=768)
    parser.add_argument("--folder", type=Path, help="folder for the shards; default: a temporary folder")
    parser.add_argument("--formats", default=",".join(WRITERS))
    options = parser.parse_args()
    title = f"{options.rows:,} rows of {options.d_in} in fp32, {torch.get_num_threads()} threads; GB/s"
    table = Table(title=title)
    for name in COLUMNS:
        table.add_column(name, justify="left" if name in COLUMNS[:3] else "right")
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        for form in options.formats.split(","):
            measure(table, form, Path(folder) / form, options.rows, options.d_in)
            shutil.rmtree(Path(folder) / form)
    Console(width=120).print(table)


def measure(table: Table, form: str, folder: Path, n_rows: int, d_in: int) -> None:
    """Write shards, and add four rows to the table: in text order and shuffled, each read from disk and from cache."""
    folder.mkdir()
    for number in range(N_SHARDS):
        rows = np.random.default_rng(number).standard_normal((n_rows // N_SHARDS, d_in), np.float32)
        WRITERS[form](folder / f"shard-{number}.{form}", rows)
    files = sorted(folder.iterdir())
    for stored, where in itertools.product(("in text order", "shuffled"), ("disk", "cache")):
        (folder / "meta.json").write_text(json.dumps({"shuffled": stored == "shuffled"}))
        prepare(files, where)
        sequential = sum(file.stat().st_size for file in files) / timed(read_through, files) / 1e9
        prepare(files, where)
        began = time.perf_counter()
        source = Shards(path=str(folder))
        opening = time.perf_counter() - began
        in_batches = 4 * d_in * source.n_tokens / timed(read_in_batches, source) / 1e9
        speeds = [in_batches]
        if where == "cache":  # mapped pages cannot be dropped from the cache
            source.read_by_all_threads()
            read = functools.partial(read_in_batches, empty=one_place(d_in))
            speeds.append(4 * d_in * source.n_tokens / timed(read, source) / 1e9)
        waiting = f"{wait_of_training(folder):.1%}" if where == "cache" else ""
        pairs = [text for speed in speeds for text in (f"{speed:.2f}", f"{speed / sequential:.0%}")]
        pairs += [""] * (4 - len(pairs))
        table.add_row(form, stored, where, f"{sequential:.2f}", *pairs, f"{opening:.2f}", waiting)


def prepare(files: list[Path], where: str) -> None:
    """Load files into the page cache, or drop them from it."""
    if where == "cache":
        read_through(files)
        return
    for file in files:
        with file.open("rb") as stream:
            os.fsync(stream.fileno())
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read_through(files: list[Path]) -> None:
    """Read files sequentially into one buffer."""
    buffer = bytearray(2**22)
    for file in files:
        with file.open("rb", buffering=0) as stream:
            while stream.readinto(buffer):
                pass


def read_in_batches(source: Shards, empty: Empty = empty_rows) -> None:
    """Read one epoch in training order."""
    data = IndexedData(source, 0, 0, Group())
    for position in range(0, source.n_tokens, BATCH):
        data.read(position, min(BATCH, source.n_tokens - position), empty)


def one_place(d_in: int) -> Empty:
    """Return an allocator that reuses the same memory for every batch."""
    place = torch.empty(BATCH * d_in)
    return lambda n, width, _: place[: n * width].view(n, width)


def wait_of_training(folder: Path) -> float:
    """Train; return the share of the time that was spent waiting for data."""
    table = {
        "data": {"path": str(folder)},
        "sae": {"expansion_factor": 8, "k": 32},
        "train": {"batch_size": BATCH, "n_steps": STEPS, "eval_every": 0, "log_every": STEPS // 2},
    }
    job, problems = parse_job(table)
    assert job is not None, problems
    shares = Waits()
    with tempfile.TemporaryDirectory() as out, contextlib.redirect_stdout(io.StringIO()):
        indices = {"checkpoints": Path(out) / "checkpoints", "output": Path(out) / "sae"}
        source, parallel = Shards(path=str(folder)), Parallel(torch.device("cpu"))
        Trainer(job, source=source, parallel=parallel, progress=shares, stop=threading.Event(), **indices).run()
    return shares.last


class Waits(RunProgress):
    """Keeps the last reported share of time that training spent waiting for data."""

    last = 0.0

    def rows(self, rows: Any) -> None:
        self.last = next((row.value for row in rows if row.name == "data_wait"), self.last)


def timed(action: Callable[[Any], object], of: Any) -> float:
    """Return the duration of an action in seconds."""
    began = time.perf_counter()
    action(of)
    return time.perf_counter() - began


def lists(rows: np.ndarray) -> pa.Table:
    return pa.table({"activations": pa.FixedSizeListArray.from_arrays(pa.array(rows.ravel()), rows.shape[1])})


def write_arrow(file: Path, rows: np.ndarray) -> None:
    with pa.ipc.new_stream(str(file), lists(rows).schema) as writer:
        writer.write_table(lists(rows), max_chunksize=100_000)


WRITERS: dict[str, Callable[[Path, np.ndarray], object]] = {
    "safetensors": lambda file, rows: save_file({"activations": rows}, file),
    "npy": np.save,
    "pt": lambda file, rows: torch.save({"activations": torch.from_numpy(rows)}, file),
    "arrow": write_arrow,
    "parquet": lambda file, rows: pq.write_table(lists(rows), file),
}

if __name__ == "__main__":
    with inspecting_by(foreign.inspect):
        sys.exit(main())
