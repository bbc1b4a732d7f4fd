"""Checks NCCL with a single rank: every exchange of a process group, with every dtype, inside and outside a CUDA graph.

    PYTHONPATH=tests python tests/benchmarks/gpu_nccl.py [--device cuda|cpu]

A single rank receives its own data. Even without a second GPU, this detects wrong values, dtypes that NCCL rejects, and
exchanges that a graph cannot contain. The script prints JSON: the number of correct exchanges, the memory and time NCCL
needs to connect, and a list of errors, `wrong`. The exit code is 1 if there are errors. On a CPU, the script uses gloo
instead of NCCL, without graphs.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.contract.errors import first_line
from trainer.parallel.group import DistributedGroup, all_gather
from trainer.parallel.waiting import waiting

FP32, FP64, BF16, FP16 = torch.float32, torch.float64, torch.bfloat16, torch.float16
INT32, INT64, BYTE, BOOL = torch.int32, torch.int64, torch.uint8, torch.bool
ADDED, SENT = (FP32, FP64, BF16, FP16, INT64), (FP32, FP64, BF16, FP16, INT32, INT64, BYTE, BOOL)
N_ROWS, N_REPLAYS = 8, 3
Exchange = Callable[[DistributedGroup, Tensor], Tensor]


def in_place(exchange: Callable[[DistributedGroup, list[Tensor]], object]) -> Exchange:
    """Return a function that exchanges two tensors in one call, in place, and returns the first tensor."""

    def both(group: DistributedGroup, tensor: Tensor) -> Tensor:
        tensors = [tensor.clone(), torch.cat([tensor.reshape(-1)] * 2).reshape(-1, *tensor.shape[1:])]
        exchange(group, tensors)
        return tensors[0]

    return both


# For each exchange: its name, its dtypes, whether it accepts zero-dimensional tensors, and a function that must return
# values equal to its argument.
EXCHANGES: tuple[tuple[str, tuple[torch.dtype, ...], bool, Exchange], ...] = (
    ("sum", ADDED, True, in_place(lambda group, tensors: group.sum_(*tensors))),
    ("sum parts", ADDED, False, in_place(lambda group, tensors: group.sum_parts_(tensors))),
    ("part of sum", ADDED, False, lambda group, tensor: group.part_of_sum(tensor).to(tensor.dtype)),
    ("spread parts", SENT, False, in_place(lambda group, tensors: group.spread_parts_(tensors))),
    ("everybody's", SENT, False, lambda group, tensor: all_gather(tensor, len(tensor), group)),
    ("gather", SENT, True, lambda group, tensor: group.gather(tensor)[0]),
    ("to owners", SENT, False, lambda group, tensor: group.to_owners(tensor)[0]),
    ("from owners", SENT, False, lambda group, tensor: group.from_owners(tensor[None], len(tensor))),
    ("copy from first", SENT, True, in_place(lambda group, tensors: group.copy_from_first_(tensors))),
    ("collect", SENT, False, lambda group, tensor: group.collect(tensor, [len(tensor)], 0)[0].to(tensor.device)),
)
# A graph cannot contain `collect`, because it copies data to the host. No training step uses `collect`.
NOT_IN_GRAPHS = ("collect",)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    options = parser.parse_args()
    device = torch.device(options.device, 0) if options.device == "cuda" else torch.device("cpu")
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="nccl-") as folder:
        group = connected(device, Path(folder), found)
        results = dict(checked(group, device))
        found["plain"] = list(results.values()).count("ok")
        if device.type == "cuda":
            of_graphs = dict(in_graphs(group, device))
            found["in_graphs"] = list(of_graphs.values()).count("ok")
            results |= of_graphs
        began = time.monotonic()
        dist.destroy_process_group()
        found["destroyed_s"] = time.monotonic() - began
    found["wrong"] = [f"{name}: {words}" for name, words in results.items() if words != "ok"]
    print(json.dumps(found))
    return 1 if found["wrong"] else 0


def connected(device: torch.device, folder: Path, found: dict[str, Any]) -> DistributedGroup:
    """Connect the only rank, as `join` does, and record the seconds and memory needed to connect."""
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.set_device(device)
        torch.zeros(1, device=device)
    free, began = free_bytes(device), time.monotonic()
    store = dist.FileStore(str(folder / "rendezvous"), 1)
    dist.init_process_group(
        "nccl" if on_gpu else "gloo", store=store, rank=0, world_size=1, device_id=device if on_gpu else None
    )
    group = DistributedGroup(None, waiting(device))
    group.sum_(torch.ones(1, device=device))
    if on_gpu:
        torch.cuda.synchronize()
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        found["memory_bytes"] = free - free_bytes(device)
    found["connected_s"] = time.monotonic() - began
    return group


def free_bytes(device: torch.device) -> int:
    return int(torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else 0


def checked(group: DistributedGroup, device: torch.device) -> Iterator[tuple[str, str]]:
    """For each exchange, dtype and shape, yield a name, and "ok" or the error."""
    for name, dtypes, takes_0_dim, exchange in EXCHANGES:
        for dtype in dtypes:
            for shape in [(N_ROWS,), (N_ROWS, 3), *([()] if takes_0_dim else [])]:
                yield (
                    f"{name}, {words_of(dtype)}, {len(shape)} dimensions",
                    result_of(exchange, group, dtype, shape, device),
                )


def words_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def values(dtype: torch.dtype, shape: tuple[int, ...], device: torch.device) -> Tensor:
    # Use integers that bf16 can represent exactly.
    count = torch.arange(N_ROWS * 3, device=device)[: torch.Size(shape).numel()]
    return (count % 2 == 0 if dtype == BOOL else count).to(dtype).reshape(shape)


def result_of(
    exchange: Exchange, group: DistributedGroup, dtype: torch.dtype, shape: tuple[int, ...], device: torch.device
) -> str:
    tensor = values(dtype, shape, device)
    try:
        returned = exchange(group, tensor)
    except Exception as error:
        return f"{type(error).__name__}: {first_line(error)}"
    return "ok" if torch.equal(returned.reshape(shape), values(dtype, shape, device)) else "wrong values were received"


def in_graphs(group: DistributedGroup, device: torch.device) -> Iterator[tuple[str, str]]:
    """Replay each exchange with each dtype on new values in a CUDA graph; yield a name, and "ok" or the error."""
    for name, dtypes, _, exchange in EXCHANGES:
        if name in NOT_IN_GRAPHS:
            continue
        for dtype in dtypes:
            yield f"{name} in a graph, {words_of(dtype)}", replayed(exchange, group, dtype, device)


def replayed(exchange: Exchange, group: DistributedGroup, dtype: torch.dtype, device: torch.device) -> str:
    source, graph = torch.zeros(N_ROWS, dtype=dtype, device=device), torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            returned = exchange(group, source)
        expected = values(dtype, (N_ROWS,), device)
        for _ in range(N_REPLAYS):
            source.copy_(expected)
            graph.replay()
        torch.cuda.synchronize()
        return "ok" if torch.equal(returned.reshape(-1), expected) else "wrong values were received"
    except Exception as error:
        return f"{type(error).__name__}: {first_line(error)}"
    finally:
        # A graph with NCCL kernels must be freed before the group is destroyed.
        graph.reset()


if __name__ == "__main__":
    sys.exit(main())
