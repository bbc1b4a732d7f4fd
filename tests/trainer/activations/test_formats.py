"""Tests that training produces identical results with every storage format, and works on data larger than memory."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file, save_file

from trainer.activations.shards import Shards
from trainer.contract.settings.job import JobConfig
from trainer.training.loop import Trainer

MakeJob = Callable[..., JobConfig]
MakeTrainer = Callable[..., Trainer]


def write(x: torch.Tensor, form: str, folder: Path) -> None:
    """Write rows to two shards in the given storage format."""
    folder.mkdir()
    for name, rows in (("a", x[:1700].clone()), ("b", x[1700:].clone())):
        file = folder / f"{name}.{form}"
        table = pa.table({"activations": pa.FixedSizeListArray.from_arrays(pa.array(rows.numpy().ravel()), x.shape[1])})
        if form == "safetensors":
            save_file({"activations": rows}, file)
        elif form == "npy":
            np.save(file, rows.numpy())
        elif form == "pt":
            torch.save({"activations": rows}, file)
        elif form == "arrow":
            with pa.ipc.new_stream(str(file), table.schema) as writer:
                writer.write_table(table, max_chunksize=300)
        else:
            pq.write_table(table, file, row_group_size=300)


def trained(folder: Path, make_job: MakeJob, make_trainer: MakeTrainer, tmp_path: Path) -> dict[str, torch.Tensor]:
    output = tmp_path / f"sae-{folder.name}"
    job = make_job(data={"path": str(folder)})
    make_trainer(job, output=output, checkpoints=tmp_path / f"checkpoints-{folder.name}").run()
    return load_file(output / "sae_weights.safetensors")


@pytest.mark.parametrize("form", ["npy", "pt", "arrow", "parquet"])
def test_training_is_bit_identical_with_every_storage_format(
    form: str, activations: Path, make_job: MakeJob, make_trainer: MakeTrainer, tmp_path: Path
) -> None:
    x = torch.cat([load_file(activations / f"{name}.safetensors")["activations"].float() for name in "ab"])
    write(x, "safetensors", tmp_path / "safetensors")
    write(x, form, tmp_path / form)
    first, second = (trained(tmp_path / one, make_job, make_trainer, tmp_path) for one in ("safetensors", form))
    assert all(torch.equal(first[name], second[name]) for name in first)


# RLIMIT_DATA limits a process's private memory, but not the pages of mapped files.
UNDER_A_LIMIT = """
import resource, sys, threading
from pathlib import Path
import torch
from trainer.activations.shards import Shards
from trainer.contract.settings.job_file import parse_job
from trainer.parallel.base import Parallel
from trainer.reporting.progress import RunProgress
from trainer.training.loop import Trainer

torch.set_num_threads(1)
folder, out = Path(sys.argv[1]), Path(sys.argv[2])
table = {
    "data": {"path": str(folder)},
    "sae": {"d_sae": 64, "k": 4},
    "train": {"batch_size": 512, "n_steps": 200, "lr": 1e-3, "log_every": 50},
}
job, problems = parse_job(table)
torch.randn(64, 64) @ torch.randn(64, 64)
in_use = 1024 * int(next(line for line in open("/proc/self/status") if line.startswith("VmData")).split()[1])
limit = in_use + int(sys.argv[3])
resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
source = Shards(path=str(folder))
Trainer(
    job, source=source, parallel=Parallel(torch.device("cpu")), progress=RunProgress(), stop=threading.Event(),
    checkpoints=out / "checkpoints", output=out / "sae",
).run()
n_bytes = source.n_tokens * source.d_in * 4
try:
    torch.empty(n_bytes, dtype=torch.uint8)
except RuntimeError:
    print("trained", n_bytes, limit - in_use)
"""


@pytest.mark.slow
def test_training_works_on_data_larger_than_memory(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    rows, folder = generator.standard_normal((2**17, 64), np.float32), tmp_path / "acts"
    folder.mkdir()
    for number in range(8):
        np.save(folder / f"{number}.npy", rows + np.float32(number))
    limit = 2**27
    arguments = [sys.executable, "-c", UNDER_A_LIMIT, folder, tmp_path, limit]
    process = subprocess.run([*map(str, arguments)], capture_output=True, text=True, check=False)
    assert process.stdout.endswith(f"\ntrained {8 * rows.nbytes} {limit}\n"), process.stdout + process.stderr
    assert 8 * rows.nbytes > limit
    assert (tmp_path / "sae" / "sae_weights.safetensors").exists()


@pytest.mark.parametrize("form", ["safetensors", "npy", "pt", "arrow", "parquet"])
def test_float64_contexts_under_a_different_tensor_name_are_read_from_any_format(form: str, tmp_path: Path) -> None:
    x = torch.randn(6, 5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    file = tmp_path / f"a.{form}"
    if form == "safetensors":
        save_file({"acts": x, "token_ids": torch.arange(30)}, file)
    elif form == "npy":
        np.save(file, x.numpy())
    elif form == "pt":
        torch.save({"acts": x, "token_ids": torch.arange(30)}, file)
    elif form == "arrow":
        table = pa.table({"acts": pa.array(x.tolist()), "tokens": pa.array([[1, 2]] * 6)})
        with pa.ipc.new_stream(str(file), table.schema) as writer:
            writer.write_table(table)
    else:
        pq.write_table(pa.table({"acts": pa.array(x.flatten(0, 1).tolist())}), file)
    source = Shards(path=str(tmp_path))
    read = source.rows(np.arange(30))
    assert read.dtype == torch.float32
    assert torch.equal(read, x.reshape(30, 4).float())
    assert source.notes == [f"{tmp_path} stores float64, which is read as float32"]
