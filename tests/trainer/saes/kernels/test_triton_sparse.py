"""Runs `triton_cases.py` on a GPU, or in Triton's interpreter if there is no GPU, and compiles the kernels for GPUs."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from support.interpreted import run_cases

CASES = Path(__file__).with_name("triton_cases.py")


@pytest.fixture
def kernels() -> ModuleType:
    pytest.importorskip("triton")
    from trainer.saes.kernels import triton_sparse

    return triton_sparse


def test_the_kernels_match_dense_matmuls_in_float64(kernels: ModuleType) -> None:
    run_cases(CASES)


@pytest.mark.parametrize(("capability", "element"), [(80, "fp32"), (90, "bf16")])
@pytest.mark.parametrize("name", ["_sum_bags", "_sum_by_latent", "_join_measures", "_multiply_rows", "_weigh_rows"])
def test_every_kernel_compiles_for_a_gpu(
    name: str, capability: int, element: str, kernels: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The interpreter accepts code that the compiler rejects. Compiling needs no GPU.
    from triton import compiler
    from triton.backends.compiler import GPUTarget

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    kernel = getattr(kernels, name)
    types = dict.fromkeys(kernel.arg_names, "i32")
    outputs = {"out", "out_products", "out_totals", "out_squares", "out_dots", "out_lengths"}
    wide = {"values", "unit_rows", "factor", "squares", "dots", "lengths"}
    types |= dict.fromkeys((outputs | wide) & types.keys(), "*fp32")
    types |= dict.fromkeys({"indices", "tokens", "order", "starts", "latents", "n_filled"} & types.keys(), "*i64")
    types |= dict.fromkeys({"rows", "dense"} & types.keys(), f"*{element}")
    if name == "_sum_bags":
        types["out"] = f"*{element}"
    options: dict[str, Any] = kernels._tile(32, 768, 4096)
    if name == "_weigh_rows":
        options = dict(kernels._WEIGHED)
        types |= {"weights": "*fp32", "factor": "fp32"}
    if name == "_join_measures":
        options = {"LATENTS": kernels.JOINED, "num_warps": 4}
    if name == "_sum_by_latent":
        options = kernels._pieces(torch.empty(4096, 768, dtype=torch.bfloat16, device="meta"))
    constants = {key: options.pop(key) for key in [key for key in options if key.isupper()]}
    types |= dict.fromkeys(constants, "constexpr")
    options.pop("of_part", None)
    source = compiler.ASTSource(kernel, types, constants)
    compiled = compiler.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    assert compiled.asm["cubin"]
