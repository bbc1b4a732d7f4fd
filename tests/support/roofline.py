"""Models the duration of a GPU step from its operations, with constants fitted to an H200.

An operation's duration is the maximum of three times: its bytes divided by the memory bandwidth, its FLOPs divided by
the peak rate, and its kernel launches. Steps measured on an H200 (`docs/performance.md`) took 0 to 15 % longer than
modelled. Steps for smaller SAEs took up to 30 % longer, because each of hundreds of small operations takes slightly
longer than a launch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from support.step_ops import Op, Operand, Step

# The memory bandwidth of an H200 in bytes/s, and the fraction of the bandwidth that a pass over a matrix achieves.
BANDWIDTH, REACHED = 4.3e12, 0.9
# The bytes/s for kernels that gather rows from the L2 cache. The key True is for kernels that also multiply these rows
# by other rows.
L2 = {False: 7.5e12, True: 5e12}
PEAK = {torch.bfloat16: 740e12, torch.float16: 740e12, torch.float32: 400e12, torch.float64: 60e12}
FP32_UNITS = 60e12
PROCESSORS = 132
# The seconds between the starts of two kernels on the GPU, and the seconds the host takes to launch a kernel, on an
# H200 in a virtual machine with slow cores. A fast host takes a fifth of this time.
LAUNCH, HOST_LAUNCH = 2.5e-6, 38e-6
# The seconds the host takes to replay a step captured as a CUDA graph.
HOST_RECORDED = 0.4e-3
# How many times slower torch is for operands with different shapes or types, which it reads element by element.
_UNEVEN = 2
# The seconds per thread instruction in kernels that search rows, which are limited by instructions rather than bytes.
# Measured with 128 threads per row: 11,550 instructions per thread took 0.327 ms, and 5,280 instructions took 0.145 ms.
# The other constants are instruction counts in the code for sm_90: per value read, per candidate, and per candidate in
# each iteration of the search for a threshold.
_INSTRUCTION, _READ, _LOOKED_AT, _IN_ROUND = 5.4e-14, 6.3, 50, 5.5
# The number of iterations of the search for a threshold: over the maxima of the groups, over the values in the selected
# groups, and over AuxK's rows with more than k positive values. For an SAE trained in bf16 on data/sample, the first
# two searches took 8.4 and 2.6 iterations on average, and at most 10 and 8. For normal noise, each took 10 on average,
# and at most 15.
_GROUP_ROUNDS, _NUMBER_ROUNDS, _ROW_ROUNDS = 9, 3, 10
# The seconds per wave of programs that split one search, and Adam's seconds per weight in a small tensor.
_ROUND, _SMALL_ADAM = 20e-6, 1.05e-9
# The seconds torch.topk takes per value, by value size in bytes. torch.topk passes over the matrix two to eight times.
_SELECTION = {2: 7.5e-12, 4: 11e-12, 8: 20e-12}
# The bytes/s that one program reads, and the seconds its threads take to add up counts and write the result. A
# multiprocessor gets at most 64 bytes per cycle from the L2 cache, which is 112e9 bytes/s at 1.75 GHz, and less here
# because each tile waits for the previous tile. In the code for sm_90, 6 tiles with the counts of 24,576 latents are
# 6 * 136 instructions in 16 warps, and 4 warps advance per cycle. These instructions take 1.9 us, less than reading the
# bytes. The remaining 270 instructions take 0.6 us, and there are 15 barriers. If more latents are dead than AuxK uses,
# a search of up to 31 iterations of about 1 us follows, which is not included here.
_OF_PROGRAM, _COUNTED = 80e9, 2e-6
# The number of programs that a gather kernel needs to saturate a GPU, and the bytes/s that fewer programs achieve.
_FEW_PROGRAMS, _FEW_REACH = 8192, 2.7e12
_LARGE = 1_000_000


class Cost(NamedTuple):
    """The cost of one operation: its kernel launches and its GPU seconds."""

    launches: int
    seconds: float
    kind: str


class Modelled(NamedTuple):
    """The cost of a step: its operations, kernel launches and seconds, and its bytes if each operand is moved once."""

    n_ops: int
    launches: int
    bytes: int
    passes_s: float
    update_s: float
    host_s: float

    @property
    def gpu_s(self) -> float:
        return self.passes_s + self.update_s

    @property
    def step_s(self) -> float:
        """A step's duration in seconds: the longer of the GPU's and the host's time."""
        return max(self.gpu_s, self.host_s)


def modelled(step: Step, *, is_recorded: bool = False) -> Modelled:
    """Return the cost of a step; with `is_recorded`, the host replays the step as a CUDA graph."""
    launches = sum(cost(op).launches for op in step.ops)
    n_bytes = sum(op.bytes for op in step.ops)
    host = HOST_RECORDED if is_recorded else HOST_LAUNCH * launches
    return Modelled(len(step.ops), launches, n_bytes, _seconds(step.passes), _seconds(step.update), host)


def floor_s(d_in: int, d_sae: int, n_tokens: int) -> float:
    """Return the minimum seconds for a TopK SAE step with 16-bit matmuls and Adam in fp32.

    The minimum consists of one dense matmul and moving 36 bytes per weight: 24 to read and write the weight and two
    moments, 8 to write and read the gradient, and 4 to write and read the 16-bit copy. Gathering the rows of active
    latents is not included.
    """
    product = 2 * n_tokens * d_in * d_sae / PEAK[torch.bfloat16]
    return product + 36 * 2 * d_in * d_sae / BANDWIDTH


def cost(op: Op) -> Cost:
    """Return the cost of a torch operation or of a Triton kernel."""
    if op.is_kernel:
        return _KERNELS.get(op.name, _row_kernel)(op)
    return _OPS.get(op.name, _pass)(op)


def _seconds(ops: Iterable[Op]) -> float:
    return sum(cost(op).seconds for op in ops)


def _bytes(operands: Iterable[Operand]) -> int:
    return sum(one.bytes for one in operands)


def _pass(op: Op) -> Cost:
    """Return the cost of an element-wise pass or reduction. Matrices with different memory layouts cost more."""
    large = [one for one in (*op.reads, *op.writes) if len(one.shape) == 2 and one.numel > _LARGE]
    layouts = {one.stride[0] == 1 and one.stride[1] > 1 for one in large if 0 not in one.stride}
    kinds = {(one.shape, one.dtype) for one in (*op.reads, *op.writes) if one.numel > 1}
    slower = 3 if len(layouts) > 1 else _UNEVEN if len(kinds) > 1 and op.name in _UNEVENLY else 1
    kind = "pass over two layouts" if slower > 1 else "pass"
    return Cost(1, max(op.bytes * slower / BANDWIDTH / REACHED, LAUNCH), kind)


def _small(op: Op) -> Cost:
    return Cost(1, LAUNCH, "pass")


def _fill(op: Op) -> Cost:
    return Cost(1, max(_bytes(op.writes) / BANDWIDTH, LAUNCH), "fill")


def _product(op: Op) -> Cost:
    left = op.reads[-2]
    out = op.writes[0]
    flops = 2 * out.numel * left.shape[-1]
    is_dense = min(out.shape[-2:]) > 1 if len(out.shape) > 1 else False
    peak = PEAK[out.dtype] if is_dense else FP32_UNITS
    # Dot products of rows computed as a batched matmul achieve four fifths of the bandwidth.
    reached = 1.0 if is_dense else 0.8
    return Cost(1, max(op.bytes / BANDWIDTH / reached, flops / peak, LAUNCH), "product")


def _selection(op: Op) -> Cost:
    values = op.reads[0]
    size, row = values.dtype.itemsize, values.shape[-1]
    seconds = _SELECTION[size] * values.numel + 20 * LAUNCH
    if values.numel == row and row > 4 * _LARGE:
        # For a single row, many blocks count the digits, and one block adds up the counts.
        seconds += size * row / 16384 * 0.1e-6
    return Cost({2: 15, 4: 21, 8: 33}[size], seconds, "top-k")


def _sort(op: Op) -> Cost:
    keys = op.reads[0]
    passes = 2 * keys.dtype.itemsize
    # One block sorts up to 4,096 numbers. Before the sort, two kernels copy the numbers and create their indices.
    launches = 3 if keys.shape[-1] <= 4096 else 3 + passes
    return Cost(launches, max(keys.numel * (keys.dtype.itemsize + 8) * 3 * passes / BANDWIDTH, LAUNCH * passes), "sort")


def _gathered(op: Op) -> Cost:
    """Return the cost of indexing a matrix. Indexing reads 32-byte sectors but uses only part of each sector."""
    out = _bytes(op.writes)
    return Cost(1, max((4 * out + _bytes(op.reads[1:])) / BANDWIDTH, LAUNCH), "gather")


def _rows_gathered(op: Op) -> Cost:
    return Cost(1, max((_bytes(op.reads[1:]) + 2 * _bytes(op.writes)) / BANDWIDTH, LAUNCH), "gather")


def _rows_added(op: Op) -> Cost:
    source = op.reads[-1].bytes
    return Cost(1, max((4 * source + _bytes(op.reads[1:-1])) / BANDWIDTH, 2 * LAUNCH), "scatter")


def _index_put(op: Op) -> Cost:
    whole = 2 * op.reads[0].bytes / BANDWIDTH if op.name == "index_put" else 0
    return Cost(12, max(6 * op.reads[-1].bytes / BANDWIDTH, 12 * LAUNCH) + whole, "scatter")


def _fused_adam(op: Op) -> Cost:
    """Return the cost of fused Adam, which reads and writes the weight, the gradient and two moments.

    The gradient is written because Adam scales it. One program updates up to 65,536 weights of a tensor.
    """
    n = sum(one.numel for one in op.reads) // 4
    longest = min(max((one.numel for one in op.reads), default=0), 65536)
    seconds = max(32 * n / BANDWIDTH / 0.92, _SMALL_ADAM * longest)
    return Cost(max(4, math.ceil(n / 65536 / 320)), seconds, "optimizer")


def _gather_kernel(op: Op) -> Cost:
    """Return the cost of a kernel that gathers rows, from the bytes it reads from memory and from the cache."""
    # The kernel gathers rows from its last matrix.
    rows = [one for one in op.reads if len(one.shape) == 2][-1]
    n_entries, width = op.argument("n_entries"), rows.shape[1]
    gathered = n_entries * width * rows.dtype.itemsize
    other = _bytes(one for one in (*op.reads, *op.writes) if one is not rows)
    if math.prod(op.grid) < _FEW_PROGRAMS:
        return Cost(1, 15e-6 + (gathered + other) / _FEW_REACH, "gathering kernel")
    from_memory = (min(gathered, rows.bytes) + other) / BANDWIDTH / REACHED
    return Cost(1, max(from_memory, (gathered + other) / L2[False]), "gathering kernel")


def _latent_kernel(op: Op) -> Cost:
    """Return the cost of a kernel that gathers rows for each latent, and reads or writes the latent's own row once."""
    if op.argument("latents") is not None:
        # This kernel processes only the few latents whose entries do not fit in the first block.
        return Cost(1, 8e-6, "gathering kernel")
    dense, multiplies = op.argument("dense"), op.argument("rows") is not None
    n_entries, width = op.argument("n_entries"), dense.shape[1]
    gathered = n_entries * width * dense.dtype.itemsize
    other = _bytes(one for one in (*op.reads, *op.writes) if one is not dense)
    from_memory = (min(gathered, dense.bytes) + other) / BANDWIDTH / REACHED
    return Cost(1, max(from_memory, (gathered + other) / L2[multiplies]), "gathering kernel")


def _row_kernel(op: Op) -> Cost:
    """Return the cost of a kernel that reads and writes each operand once, in order."""
    return Cost(1, max(op.bytes / BANDWIDTH / REACHED, LAUNCH), "row kernel")


def _selecting_kernel(op: Op) -> Cost:
    """Return the cost of a kernel whose programs each search a row: the larger of memory-bandwidth time and instruction
    time.
    """
    n_rows, n_columns = op.argument("bits").shape
    moved = op.bytes
    if op.name in _OF_WHOLE_ROWS:
        searched = _OF_WHOLE_ROWS[op.name]
        instructions = op.argument("COLUMNS") * (18 + (22 + 4 * _ROW_ROUNDS) * searched)
    else:
        groups, numbers = op.argument("GROUPS"), op.argument("KEPT") * op.argument("GROUP")
        moved += op.argument("GROUP") * op.argument("bits").dtype.itemsize * n_rows * op.argument("k")
        in_rounds = _IN_ROUND * (groups * _GROUP_ROUNDS + numbers * _NUMBER_ROUNDS)
        instructions = _READ * n_columns + _LOOKED_AT * (groups + numbers) + in_rounds
    seconds = max(moved / BANDWIDTH / REACHED, instructions * n_rows * _INSTRUCTION, LAUNCH)
    return Cost(1, seconds, "selecting kernel")


def _counting_kernel(op: Op) -> Cost:
    """Return the cost of a kernel that adds to scattered elements, like torch's scatter_add."""
    return Cost(1, max(op.bytes / BANDWIDTH / REACHED, 2 * LAUNCH), "scatter")


def _sharing_kernel(op: Op) -> Cost:
    """Return the cost of a kernel whose programs split one search: the larger of memory-bandwidth time and the time of
    all waves of programs.
    """
    rounds = math.ceil(op.grid[0] / (PROCESSORS * 6))
    return Cost(1, max(op.bytes / BANDWIDTH / REACHED, rounds * _ROUND), "selecting kernel")


def _candidates_kernel(op: Op) -> Cost:
    """Return the cost of a kernel whose programs each read the entire input."""
    return Cost(1, LAUNCH + op.argument("since_fired").bytes / _OF_PROGRAM + _COUNTED, "selecting kernel")


# For kernels that process complete rows, the fraction of rows that they must search. With noise around 0, half of the
# rows have more than k positive values. Kernels that mark or gather values also search rows with fewer positive values.
_OF_WHOLE_ROWS = {"_keep_strongest": 0.5, "_mark_largest": 1.0, "_gather_largest": 1.0}
# torch computes these element-wise operations with a slow kernel if their operands differ in shape or type.
_UNEVENLY = {"add", "sub", "mul", "div"}
_KERNELS: dict[str, Callable[[Op], Cost]] = {
    "_sum_bags": _gather_kernel,
    "_nest_bags": _gather_kernel,
    "_multiply_rows": _gather_kernel,
    "_sum_by_latent": _latent_kernel,
    "_largest_of_rows": _selecting_kernel,
    "_keep_strongest": _selecting_kernel,
    "_mark_largest": _selecting_kernel,
    "_gather_largest": _selecting_kernel,
    "_count": _counting_kernel,
    "_count_digits": _sharing_kernel,
    "_write_chosen": _sharing_kernel,
    "_find_longest_silent": _candidates_kernel,
}
_BY_COST: dict[Callable[[Op], Cost], str] = {
    _product: "addmm mm bmm mv addmv",
    _fill: "scalar_tensor zeros ones full arange new_zeros new_full fill_ zeros_like ones_like full_like zero_",
    _gathered: "gather index scatter",
    _index_put: "index_put index_put_ _index_put_impl_",
    _selection: "topk",
    _sort: "sort",
    _rows_gathered: "index_select",
    _rows_added: "index_add index_add_",
    _fused_adam: "_fused_adam_",
    _small: "_foreach_add_",
}
_OPS = {name: cost for cost, names in _BY_COST.items() for name in names.split()}
