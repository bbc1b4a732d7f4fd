"""Every Triton kernel as real steps launch it, compiled for every card without having one: spills, shared memory."""

from __future__ import annotations

import functools
import itertools
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from support.fake_gpu import job_of
from support.step_ops import Op, Operand, recorded_step
from triton.backends.compiler import GPUTarget

# Shared memory that one program may have, in KiB, by compute capability.
SHARED = {70: 96, 75: 64, 80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99, "gfx90a": 64, "gfx942": 64}
SHAPES = ((2304, 65536, 64), (768, 24576, 32), (384, 3072, 32), (2300, 8192, 16))
ARCHITECTURES = ("topk", "batch_topk", "matryoshka_batch_topk", "jumprelu", "gated", "standard")
TYPES = {
    torch.float64: "fp64", torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.int64: "i64",
    torch.int32: "i32", torch.int8: "i8", torch.uint8: "u8", torch.int16: "i16", torch.bool: "i1",
}  # fmt: skip
TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"
OPTIONS = {"num_warps", "num_stages", "enable_fp_fusion"}


@functools.cache
def launches() -> dict[str, Op]:
    """Return each kind of launch of steps of all architectures, by a name that says what it is."""
    found: dict[str, Op] = {}
    for architecture, (d_in, d_sae, k), precision in itertools.product(ARCHITECTURES, SHAPES, ("bf16", "fp32")):
        states = ("fp32", "bf16", "int8") if architecture == "topk" else ("fp32",)
        for state in states:
            sae = {"architecture": architecture, "d_sae": d_sae, "k": k}
            train = {"precision": precision, "batch_size": 4096, "state": state}
            for op in recorded_step(job_of(sae, train), d_in, dead=True).ops:
                if op.is_kernel:
                    found.setdefault(_name(op), op)
    return found


def _name(op: Op) -> str:
    types = "/".join(TYPES[one.dtype] for _, one in op.arguments if isinstance(one, Operand))
    return f"{op.name} {types} {' '.join(f'{k}={v}' for k, v in op.arguments if not isinstance(v, Operand))}"


@pytest.mark.parametrize("target", SHARED, ids=str)
def test_every_kernel_compiles_without_spills_and_fits(target: int | str, monkeypatch: pytest.MonkeyPatch) -> None:
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
    called, parameters = dict(op.arguments), op.kernel.params
    signature, constants, attributes = {}, {}, {}
    for place, parameter in enumerate(parameters):
        value = called.get(parameter.name, parameter.default)
        if parameter.is_constexpr or value is None:
            signature[parameter.name], constants[parameter.name] = "constexpr", value
        elif isinstance(value, Operand):
            signature[parameter.name] = f"*{TYPES[value.dtype]}"
            attributes[place,] = [["tt.divisibility", 16]]
        elif isinstance(value, int) and value == 1:
            # So does Triton where it launches.
            signature[parameter.name], constants[parameter.name] = "constexpr", 1
        else:
            signature[parameter.name] = "fp32" if isinstance(value, float) else "i32" if value < 2**31 else "i64"
            if isinstance(value, int) and value % 16 == 0:
                attributes[place,] = [["tt.divisibility", 16]]
    source = triton.compiler.ASTSource(op.kernel, signature, constants, attributes)
    kind, width = ("cuda", 32) if isinstance(target, int) else ("hip", 64)
    options = {name: value for name, value in called.items() if name in OPTIONS}
    return triton.compile(source, target=GPUTarget(kind, target, width), options=options)


def _spills(compiled: Any, target: int | str) -> int:
    if isinstance(target, str):
        return int(re.search(r"\.vgpr_spill_count:\s+(\d+)", compiled.asm["amdgcn"])[1])
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        listed = subprocess.run([TOOLS / "nvdisasm", file.name], capture_output=True, text=True, check=True).stdout
    return len(re.findall(r"\b(?:STL|LDL)\b", listed))
