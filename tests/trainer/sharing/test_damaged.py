"""Tests that damaged or unexpected files from other tools are either read or rejected with a one-sentence error."""

from __future__ import annotations

import io
import json
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from support.saes import made, put_bar_into_a_gap
from torch import Tensor

from trainer.contract.errors import UserError
from trainer.contract.settings.catalog import FORMATS
from trainer.evaluation.exported import read_exported
from trainer.sharing.base import SharedSae, format_in, shared_form
from trainer.training.import_sae import import_sae

D_IN = 32
SAES = [
    ("saelens", "topk", None), ("saelens", "jumprelu", None), ("saelens", "gated", None), ("saelens", "standard", 32),
    ("sparsify", "topk", None), ("sparsify", "topk", 32), ("dictionary_learning", "topk", None),
    ("dictionary_learning", "batch_topk", None), ("dictionary_learning", "gated", None),
    ("dictionary_learning", "standard", None), ("dictionary_learning", "jumprelu", None),
]  # fmt: skip
NUMBERS = st.one_of(st.integers(), st.sampled_from([0, -1, 2**31, 2**63, 2**64, 10**400]), st.floats(), st.floats(0, 1))
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), NUMBERS, st.text(max_size=80), st.just("\x1b[2J"), st.just("x" * 10_000)),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
DTYPES = [torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.bool, torch.float8_e4m3fn, torch.complex64]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write an SAE of each kind in its format, along with rows for importing it."""
    root = tmp_path_factory.mktemp("damaged")
    (root / "acts").mkdir()
    save_file({"activations": torch.randn(200, D_IN)}, root / "acts" / "a.safetensors")
    for number, (form, kind, d_out) in enumerate(SAES):
        sae = made(kind, d_out, x_scale=0.4, y_scale=0.4)
        with torch.no_grad():
            put_bar_into_a_gap(sae, torch.randn(300, D_IN))
        FORMATS[form].load()().write(shared_form(sae, {"training_architecture": kind}, k=8), root / str(number))
    return root


def read_or_refused(folder: Path, world: Path) -> None:
    """Read, run and import an SAE. Each operation must either work or fail with a one-sentence error."""
    for use in (_run, lambda folder: _import(folder, world)):
        try:
            sae = use(folder)
        except UserError as error:
            (line,) = str(error).splitlines()
            assert 10 < len(line) < 1000, line
        else:
            assert all(tensor.isfinite().all() for tensor in sae.weights.values())


def _run(folder: Path) -> SharedSae:
    shared = FORMATS[str(format_in(folder))].load()().read(folder) if format_in(folder) else None
    sae = read_exported(folder, torch.device("cpu"))
    acts, x_hat = sae.reconstruct(torch.ones(2, sae.d_in))
    assert acts.values.shape == (2, sae.d_sae)
    assert x_hat.shape == (2, sae.W_dec.shape[1])
    assert shared is not None
    return shared


def _import(folder: Path, world: Path) -> SharedSae:
    """Import an SAE, and return the SAE that the new run exports."""
    sets = [f"data.target_path={world / 'acts'}"] if "transcode" in (folder / "kind").read_text() else []
    import_sae(folder, folder / "run", [str(world / "acts")], sets)
    output = folder / "run" / "sae"
    names = {"cfg.json", "sae.safetensors"}
    form = "sparsify" if names <= {file.name for file in output.iterdir()} else "saelens"
    weights = load_file(weights_of(output))
    assert all(tensor.isfinite().all() for tensor in weights.values())
    return FORMATS[form].load()().read(output)


@pytest.fixture
def damaged(world: Path) -> Callable[[int, Callable[[Path], None]], None]:
    def check(number: int, damage: Callable[[Path], None]) -> None:
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(shutil.copytree(world / str(number), Path(scratch) / "sae"))
            (folder / "kind").write_text("transcoder" if SAES[number][2] else "sae")
            damage(folder)
            read_or_refused(folder, world)

    return check


def config_of(folder: Path) -> Path:
    return next(folder / name for name in ("cfg.json", "config.json") if (folder / name).exists())


def weights_of(folder: Path) -> Path:
    return next(file for file in folder.iterdir() if file.suffix in (".safetensors", ".pt"))


def read_weights(file: Path) -> dict[str, Tensor]:
    return torch.load(file, weights_only=True) if file.suffix == ".pt" else load_file(file)


def write_weights(file: Path, tensors: dict[str, Tensor]) -> None:
    torch.save(tensors, file) if file.suffix == ".pt" else save_file(tensors, file)


@pytest.mark.parametrize("which", range(len(SAES)))
def test_undamaged_files_can_be_read_run_and_imported(world: Path, tmp_path: Path, which: int) -> None:
    folder = Path(shutil.copytree(world / str(which), tmp_path / "sae"))
    (folder / "kind").write_text("transcoder" if SAES[which][2] else "sae")
    _run(folder)
    _import(folder, world)


ANY = settings(
    deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
WHICH = st.integers(0, len(SAES) - 1)


@ANY
@given(which=WHICH, place=st.integers(0, 30), value=st.one_of(st.just(...), VALUES))
def test_an_sae_with_any_value_for_a_setting_is_read_or_refused(
    damaged: Any, which: int, place: int, value: Any
) -> None:
    def damage(folder: Path) -> None:
        config = json.loads(config_of(folder).read_text())
        indices = [(table, key) for table in (config, *_tables(config)) for key in table]
        table, key = indices[place % len(indices)]
        table.pop(key) if value is ... else table.update({key: value})
        config_of(folder).write_text(json.dumps(config))

    damaged(which, damage)


def _tables(config: dict[str, Any]) -> list[dict[str, Any]]:
    return [value for value in config.values() if isinstance(value, dict)]


@ANY
@given(which=WHICH, value=VALUES)
def test_any_json_value_in_place_of_the_settings_is_read_or_refused(damaged: Any, which: int, value: Any) -> None:
    damaged(which, lambda folder: config_of(folder).write_text(json.dumps(value)))


@ANY
@given(
    which=WHICH,
    of_weights=st.booleans(),
    indices=st.lists(st.integers(0, 10**6), max_size=4),
    byte=st.integers(0, 255),
    cut=st.one_of(st.none(), st.integers(0, 10**6)),
)
def test_a_file_with_damaged_bytes_is_read_or_refused(
    damaged: Any, which: int, of_weights: bool, indices: list[int], byte: int, cut: int | None
) -> None:
    def damage(folder: Path) -> None:
        file = weights_of(folder) if of_weights else config_of(folder)
        content = bytearray(file.read_bytes())
        for place in indices:
            # Change only the start and the end of the file, because most other bytes are tensor values.
            content[(place % 600) * (-1 if place % 2 else 1) % len(content)] = byte
        file.write_bytes(content if cut is None else content[: cut % len(content)])

    damaged(which, damage)


@ANY
@given(
    which=st.integers(0, 5),
    place=st.integers(0, 30),
    field=st.sampled_from(["dtype", "shape", "data_offsets", ""]),
    value=VALUES,
)
def test_a_safetensors_header_with_any_value_is_read_or_refused(
    damaged: Any, which: int, place: int, field: str, value: Any
) -> None:
    def damage(folder: Path) -> None:
        file = weights_of(folder)
        content = file.read_bytes()
        length = int.from_bytes(content[:8], "little")
        header = json.loads(content[8 : 8 + length])
        name = sorted(header)[place % len(header)]
        if field:
            header[name][field] = value
        else:
            header[name] = value
        head = json.dumps(header).encode()
        file.write_bytes(len(head).to_bytes(8, "little") + head + content[8 + length :])

    damaged(which, damage)


@ANY
@given(
    which=WHICH,
    place=st.integers(0, 30),
    change=st.one_of(
        st.sampled_from(["missing", "extra", "transposed", "flat", "scalar", "empty", "one more"]),
        st.sampled_from([float("nan"), float("inf"), -float("inf"), 3e38, -3e38, 0.0]),
        st.sampled_from(DTYPES),
    ),
)
def test_tensors_with_unexpected_dtypes_shapes_or_values_are_read_or_refused(
    damaged: Any, which: int, place: int, change: Any
) -> None:
    def damage(folder: Path) -> None:
        tensors = read_weights(weights_of(folder))
        name = sorted(tensors)[place % len(tensors)]
        tensors |= _changed(tensors.pop(name), name, change)
        write_weights(weights_of(folder), tensors)

    damaged(which, damage)


def _changed(tensor: Tensor, name: str, change: Any) -> dict[str, Tensor]:
    if change == "missing":
        return {}
    if change == "extra":
        return {name: tensor, "another": torch.ones(3)}
    if isinstance(change, torch.dtype):
        return {name: tensor.to(change)}
    if isinstance(change, float):
        return {name: torch.full_like(tensor, change) if tensor.is_floating_point() else tensor}
    shaped = {
        "transposed": lambda: tensor.mT if tensor.dim() == 2 else tensor[None],
        "flat": lambda: tensor.flatten(),
        "scalar": lambda: tensor.flatten()[0],
        "empty": lambda: tensor.flatten()[:0],
        "one more": lambda: torch.cat([tensor, tensor[:1]]) if tensor.dim() else tensor[None],
    }
    return {name: shaped[change]().clone().contiguous()}


@ANY
@given(value=st.sampled_from([None, 1, "text", [1], {"a": 1}, {1: 2}, {"encoder.weight": None}]))
def test_an_unexpected_pickled_object_is_read_or_refused(damaged: Any, value: Any) -> None:
    content = io.BytesIO()
    torch.save(value, content)
    damaged(6, lambda folder: (folder / "ae.pt").write_bytes(content.getvalue()))
