"""Tests that Arrow files, including SAELens's activation caches, can be read as shards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.combinations import slow_unless
from support.shard_files import BEGINS, lists, problem, rows

from trainer.activations.foreign import read_rows
from trainer.activations.shards import Shards
from trainer.contract.settings.rows import NotRowsError

D_IN, CONTEXT = 16, 8


def write(file: Path, *tables: pa.Table | pa.RecordBatch, form: Any = pa.ipc.new_stream, **options: Any) -> Path:
    with form(str(file), tables[0].schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
        for table in tables:
            writer.write(table)
    return file


def cache_activations(folder: Path, monkeypatch: pytest.MonkeyPatch, *, shuffle: bool, dtype: str) -> None:
    """Have SAELens cache the activations of a tiny model."""
    import sae_lens.cache_activations_runner as saelens
    from datasets import Dataset
    from transformer_lens import HookedTransformer, HookedTransformerConfig

    sizes = {"n_layers": 1, "d_model": D_IN, "n_ctx": 32, "d_head": 8, "n_heads": 2, "d_vocab": 50, "act_fn": "relu"}
    model = HookedTransformer(HookedTransformerConfig(**sizes))  # type: ignore[arg-type]
    monkeypatch.setattr(saelens, "load_model", lambda **_: model)
    tokens = torch.randint(0, 50, (60, 32), generator=torch.Generator().manual_seed(0))
    asked = saelens.CacheActivationsRunnerConfig(
        dataset_path="", model_name="tiny", model_batch_size=4, hook_name="blocks.0.hook_mlp_out", d_in=D_IN,
        training_tokens=24 * CONTEXT, context_size=CONTEXT, new_cached_activations_path=str(folder), shuffle=shuffle,
        prepend_bos=False, buffer_size_gb=8 * CONTEXT * D_IN * 4 / 1e9, dtype=dtype, device="cpu",
    )  # fmt: skip
    dataset = Dataset.from_dict({"tokens": tokens.tolist()})
    saelens.CacheActivationsRunner(asked, override_dataset=dataset).run()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    ("shuffle", "dtype"), slow_unless(lambda shuffle, dtype: shuffle, [(False, "float32"), (True, "float16")])
)
def test_rows_read_from_a_saelens_cache_equal_those_that_saelens_reads(
    shuffle: bool, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from datasets import Dataset

    cache_activations(tmp_path, monkeypatch, shuffle=shuffle, dtype=dtype)
    # SAELens shuffles the dataset that it returns, but the files keep the original order.
    assert shuffle == any(tmp_path.glob("cache-*.arrow"))
    cached = Dataset.load_from_disk(str(tmp_path))
    expected = torch.tensor(np.array(cached["blocks.0.hook_mlp_out"]), dtype=getattr(torch, dtype)).reshape(-1, D_IN)
    source = Shards(path=str(tmp_path))
    assert (source.n_tokens, source.d_in) == (len(expected), D_IN)
    assert len(expected) >= 24 * CONTEXT
    assert torch.equal(source.rows(np.arange(len(expected))), expected)


@pytest.mark.parametrize("form", [pa.ipc.new_stream, pa.ipc.new_file])
@pytest.mark.parametrize(
    "kind",
    [
        pa.list_(pa.float32()),
        pa.list_(pa.float32(), 8),
        pa.large_list(pa.float16()),
        pa.list_(pa.list_(pa.float32(), 8)),
        pa.list_(pa.list_(pa.list_(pa.float32()))),
    ],
    ids=str,
)
def test_variable_fixed_size_large_and_nested_lists_are_read(kind: pa.DataType, form: Any, tmp_path: Path) -> None:
    inner, shape = kind, [8]
    while pa.types.is_nested(inner.value_type):
        inner, shape = inner.value_type, [3, *shape]
    x = rows(50, *shape, dtype=inner.value_type.to_pandas_dtype())
    table = pa.table(
        {
            "texts": pa.array([f"row {number}" for number in range(50)]),
            "words": pa.array(["a", "b"] * 25).dictionary_encode(),
            "pairs": pa.array([{"a": 1, "b": [1, 2]}] * 50),
            "hook": pa.array(x.tolist(), kind),
            "is_first": pa.array([True, False] * 25),
        }
    )
    write(tmp_path / "a.arrow", *table.slice(0, 30).to_batches(max_chunksize=7), table.slice(30), form=form)
    read = Shards(path=str(tmp_path))
    assert np.array_equal(read.rows(np.arange(read.n_tokens)).numpy(), x.reshape(-1, 8))
    assert read.name_of(read.n_tokens - 1) == f"row {read.n_tokens - 1} of a.arrow"


def test_of_several_columns_the_one_named_like_the_tensor_is_read(tmp_path: Path) -> None:
    x, other = rows(20, 4), rows(20, 6)
    table = pa.table({"other": pa.array(other.tolist()), "activations": pa.array(x.tolist(), pa.list_(pa.float32()))})
    write(tmp_path / "a.arrow", table)
    assert np.array_equal(Shards(path=str(tmp_path)).rows(np.arange(20)).numpy(), x)


def test_folders_saved_by_the_datasets_library_are_read(tmp_path: Path) -> None:
    from datasets import Array3D, Dataset, Features, List, Value

    features = Features({"acts": Array3D((2, 5, 4), "float32"), "label": Value("int64"), "x": List(Value("int32"))})
    x = rows(30, 2, 5, 4)
    columns = {"acts": list(x), "label": range(30), "x": [[1, 2]] * 30}
    Dataset.from_dict(columns, features=features).save_to_disk(tmp_path, num_shards=3)
    assert np.array_equal(Shards(path=str(tmp_path)).rows(np.arange(300)).numpy(), x.reshape(-1, 4))


@pytest.mark.parametrize(
    ("table", "reason"),
    [
        (lists([1.0, 2.0], [1.0]), f"{BEGINS}the lists in its column 'x' differ in length"),
        (lists([1.0, 2.0], None), f"{BEGINS}its column 'x' has missing rows or values; remove them"),
        (lists([1.0, None]), f"{BEGINS}its column 'x' has missing rows or values; remove them"),
        (lists(kind=pa.list_(pa.float32())), "contains no activations"),
        (pa.table({"y": [1.0], "z": ["a"]}), f"{BEGINS}no column contains lists of numbers; its columns: 'y' and 'z'"),
        (
            pa.table({"a": lists([1.0])["x"], "b": lists([1.0])["x"]}),
            f"{BEGINS}several columns are lists of numbers ('a' and 'b'); rename the one to read to `activations`",
        ),
    ],
)
def test_a_table_without_exactly_one_valid_column_of_equal_length_lists_is_refused(
    table: pa.Table, reason: str, tmp_path: Path
) -> None:
    file = write(tmp_path / "a.arrow", table)
    assert problem(tmp_path).startswith(f"{file} {reason}")


def test_lists_with_different_lengths_are_refused_even_if_their_mean_length_fits(tmp_path: Path) -> None:
    file = write(tmp_path / "a.arrow", lists([1.0, 2.0], [3.0], [4.0, 5.0, 6.0]))
    message = problem(tmp_path, lambda folder: Shards(path=str(folder)))
    assert message == f"{file} contains lists of different lengths; keep only lists of one length"


def test_batches_with_different_widths_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "a.arrow", lists([1.0, 2.0]), lists([1.0]))
    assert problem(tmp_path).endswith("all shards must agree")


def test_compressed_batches_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "a.arrow", lists([1.0] * 1000), compression="zstd")
    assert "its batches are compressed or big-endian; write it again without" in problem(tmp_path)


@pytest.mark.parametrize("content", [b"x" * 100, bytes(100), b"ARROW1\0\0" + b"\xff" * 100])
def test_a_file_in_another_format_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "a.arrow").write_bytes(content)
    assert problem(tmp_path).startswith(str(tmp_path / "a.arrow"))


def test_a_truncated_file_is_refused(tmp_path: Path) -> None:
    file = write(tmp_path / "a.arrow", lists([1.0] * 1000))
    file.write_bytes(file.read_bytes()[:2000])
    assert problem(tmp_path) == f"{file} {BEGINS}it is truncated or damaged, or not an Arrow file; copy it again"


@given(place=st.integers(0, 10**6), byte=st.integers(0, 255))
def test_a_damaged_file_never_yields_negative_sizes(
    tmp_path_factory: pytest.TempPathFactory, place: int, byte: int
) -> None:
    file = tmp_path_factory.getbasetemp() / "damaged.arrow"
    content = bytearray(write(file, lists([1.0, 2.0], [3.0, 4.0])).read_bytes())
    content[place % len(content)] = byte
    file.write_bytes(content)
    try:
        ranges = read_rows(file)
    except NotRowsError:
        return
    assert all(min(rows.offset, rows.n_tokens, rows.d_in) >= 0 for rows in ranges)
