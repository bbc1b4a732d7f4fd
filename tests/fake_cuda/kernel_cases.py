"""Compiles every Triton kernel in a training step without a GPU; checks for register spills and too much shared memory.

Each kernel is compiled for every GPU type.
"""

from __future__ import annotations

import functools
import itertools
import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from support.fake_gpu import job_of, one_of_ranks
from support.step_ops import Op, Operand, Step, recorded_step
from triton.backends.compiler import GPUTarget

from trainer.contract.settings.catalog import ARCHITECTURES

# Maps each compute capability or AMD architecture to the maximum shared memory per program, in KiB.
SHARED = {70: 96, 75: 64, 80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99, "gfx90a": 64, "gfx942": 64}
SHAPES = ((2304, 65536, 64), (768, 24576, 32), (384, 3072, 32), (2300, 8192, 16))
TYPES = {
    torch.float64: "fp64", torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.int64: "i64",
    torch.int32: "i32", torch.int8: "i8", torch.uint8: "u8", torch.int16: "i16", torch.bool: "i1",
}  # fmt: skip
TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"
OPTIONS = {"num_warps", "num_stages", "enable_fp_fusion"}


@functools.cache
def launches() -> dict[str, Op]:
    """Return a dict that maps the name of each distinct compilation to one of its launches."""
    found: dict[str, Op] = {}
    for op in itertools.chain.from_iterable(step.ops for step in _steps()):
        if op.is_kernel:
            found.setdefault(f"{op.name} {_specialised(op)}", op)
    return {_name(op): op for op in found.values()}


def _steps() -> Iterator[Step]:
    """Yield steps for every SAE architecture, on one GPU and on one of two GPUs that split the tokens or latents."""
    for architecture, (d_in, d_sae, k), precision in itertools.product(ARCHITECTURES, SHAPES, ("bf16", "fp16", "fp32")):
        sae = {"architecture": architecture, "d_sae": d_sae, "k": k}
        train = {"precision": precision, "batch_size": 4096}
        for state in ("fp32", "bf16", "int8") if architecture == "topk" else ("fp32",):
            yield recorded_step(job_of(sae, train | {"state": state}), d_in, dead=True)
        for grid in ((2, 1), (1, 2)) if precision != "fp32" else ():
            ranks, settings = one_of_ranks(*grid)
            yield recorded_step(job_of(sae, train, settings), d_in, dead=True, parallel=ranks)


def _name(op: Op) -> str:
    types = "/".join(TYPES[one.dtype] for _, one in op.arguments if isinstance(one, Operand))
    return f"{op.name} {types} {' '.join(f'{k}={v}' for k, v in op.arguments if not isinstance(v, Operand))}"


def test_the_launches_cover_all_data_types_and_padding_entries() -> None:
    called = [one for op in launches().values() for one in op.arguments]
    assert {torch.float32, torch.bfloat16, torch.float16} <= {
        one.dtype for _, one in called if isinstance(one, Operand)
    }
    assert any(name == "n_filled" and value is not None for name, value in called)


# Compiling takes up to four minutes of CPU time, and the machine may be busy.
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("target", SHARED, ids=str)
def test_every_kernel_compiles_without_register_spills_and_fits_in_shared_memory(
    target: int | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert launches()
    faults = []
    with tempfile.TemporaryDirectory() as cache:
        monkeypatch.setenv("TRITON_CACHE_DIR", cache)
        for name, op in launches().items():
            compiled = _compiled(op, target)
            if compiled.metadata.shared > SHARED[target] * 1024:
                faults.append(f"{name}: {compiled.metadata.shared} bytes of shared memory")
            if n := _spills(compiled, target):
                faults.append(f"{name}: {n} spills")
    assert not faults, "\n".join(faults)


def _compiled(op: Op, target: int | str) -> Any:
    *source, options = _specialised(op)
    kind, width = ("cuda", 32) if isinstance(target, int) else ("hip", 64)
    compiler = triton.compiler
    return compiler.compile(compiler.ASTSource(op.kernel, *source), GPUTarget(kind, target, width), options)


def _specialised(op: Op) -> tuple[dict[str, Any], ...]:
    """Return everything that is known when the kernel is compiled: types, constants, divisibility and options."""
    called = dict(op.arguments)
    signature, constants, attributes = {}, {}, {}
    for place, parameter in enumerate(op.kernel.params):
        value = called.get(parameter.name, parameter.default)
        if parameter.is_constexpr or value is None:
            signature[parameter.name], constants[parameter.name] = "constexpr", value
        elif isinstance(value, Operand):
            signature[parameter.name] = f"*{TYPES[value.dtype]}"
            attributes[place,] = [["tt.divisibility", 16]]
        elif isinstance(value, int) and value == 1:
            # When Triton launches a kernel, it also treats an argument equal to 1 as a constant.
            signature[parameter.name], constants[parameter.name] = "constexpr", 1
        else:
            signature[parameter.name] = "fp32" if isinstance(value, float) else "i32" if value < 2**31 else "i64"
            if isinstance(value, int) and value % 16 == 0:
                attributes[place,] = [["tt.divisibility", 16]]
    return signature, constants, attributes, {name: value for name, value in called.items() if name in OPTIONS}


def _spills(compiled: Any, target: int | str) -> int:
    if isinstance(target, str):
        return int(re.search(r"\.vgpr_spill_count:\s+(\d+)", compiled.asm["amdgcn"])[1])
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        listed = subprocess.run([TOOLS / "nvdisasm", file.name], capture_output=True, text=True, check=True).stdout
    return len(re.findall(r"\b(?:STL|LDL)\b", listed))
