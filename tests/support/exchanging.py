"""A rank that exchanges tensors with other ranks and saves the results."""

from __future__ import annotations

import os
import signal
import time
from contextlib import nullcontext
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from trainer.parallel import rendezvous, shared_memory
from trainer.parallel.group import DistributedGroup, Group, PeerLost, _coalescing
from trainer.parallel.process_group import World, join


def exchange(group: Group) -> dict[str, Tensor]:
    """Exchange tensors of all types and sizes. Some tensors fit in a slot of shared memory; others are split."""
    torch.manual_seed(group.index)
    tensors = {"matrix": torch.randn(300, 700).T, "tiny": torch.randn(3), "none": torch.randn(0)}
    tensors |= {"half": torch.randn(100, 100).bfloat16(), "double": torch.randn(5).double(), "odd": torch.randn(123457)}
    tensors |= {"columns": torch.randn(700, 4 * group.size).T, "counts": torch.arange(40000) + group.index}
    own = {f"own {name}": tensor.clone() for name, tensor in tensors.items()}
    own |= {f"part of {name}": group.part_of_sum(tensors[name]) for name in ("half", "columns")}
    group.sum_(*tensors.values())
    gathered = group.gather(torch.arange(40000) * (group.index + 1))
    begun, transfers = group.start_gather(torch.arange(40000) * (group.index + 1))
    group.finish(transfers)
    assert torch.equal(begun, gathered)
    first = torch.randn(80, 2000).T
    own["own first"] = first.clone()
    group.copy_from_first_([first])
    for name, n_rows in (("even", 4 * group.size), ("uneven", 4 * group.size + 1)):
        parts = torch.randn(n_rows, 3000)
        own[f"own {name}"] = parts.clone()
        tensors[f"part of {name}"] = group.part_of_sum(parts)
        group.sum_parts_([parts])
        group.spread_parts_([parts])
        tensors[name] = parts
    pair = {"pair's matrix": torch.randn(4 * group.size, 300), "pair's vector": torch.randn(4 * group.size)}
    own |= {f"own {name}": tensor.clone() for name, tensor in pair.items()}
    group.sum_parts_(pair.values())
    group.spread_parts_(pair.values())
    tensors |= pair
    n_rows = 4 * group.size
    for name, rows in (("alike", torch.randn(n_rows, 900)), ("unlike", torch.randn(n_rows + 1, 900) > 0)):
        own[f"own {name}"] = rows
        theirs = group.to_owners(rows)
        tensors[f"owned {name}"] = theirs
        tensors[name] = group.from_owners(theirs, len(rows))
    own["own collected"] = torch.randn(group.index + 1, 300_000).bfloat16()
    if collected := group.collect(own["own collected"], [rank + 1 for rank in range(group.size)], 0):
        tensors["collected"] = torch.cat(collected)
    tensors["one row"] = group.from_owners(group.to_owners(torch.ones(1, 5)), 1)
    return (
        own | tensors | {"gathered": gathered, "first": first, "flags": group.gather(torch.tensor([group.index == 1]))}
    )


def in_parts(world: World) -> dict[str, Tensor]:
    """Sum over a group with the first and last ranks, and over a group with the last two. Ranks outside a group keep
    their values.
    """
    sums = {}
    for name, members in (("ends", [0, world.size - 1]), ("last two", [world.size - 2, world.size - 1])):
        sums[name] = torch.tensor([float(world.group.index)])
        world.part([members]).sum_(sums[name])
    return sums


def lose(group: Group) -> dict[str, Tensor]:
    """Kill the last rank during an exchange; return how many seconds the other ranks take to detect this."""
    group.sum_(torch.ones(4))
    if group.index == group.size - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    try:
        group.sum_(torch.ones(10**6))
    except PeerLost:
        return {"seconds": torch.tensor(time.monotonic() - began)}
    return {}


def main(rank: int, size: int, file: Path, what: str, is_apart: bool) -> None:
    """Connect to the other ranks through `file`, and save the results next to it in a file named after the rank."""
    torch.set_num_threads(1)
    shared_memory.SLOT_BYTES = 2**16
    if is_apart and rank:
        # Simulate ranks on other machines, which cannot open the shared memory of rank 0.
        rendezvous.DOOR += "elsewhere-"
    # As on a GPU, start several transfers at once and let a collective add the parts.
    setattr(DistributedGroup, "_adds_parts", lambda ranks, tensor: len(tensor) % ranks.size == 0)  # noqa: B010
    # torch 2.6 fails if there is nothing to transfer.
    at_once = lambda ranks, tensors: _coalescing(ranks._group) if tensors else nullcontext()  # noqa: E731
    setattr(DistributedGroup, "_at_once", at_once)  # noqa: B010
    world = join(torch.device("cpu"), rank, size, file)
    assert type(world.group) is (DistributedGroup if is_apart else shared_memory.SharedRanks)
    tensors = lose(world.group) if what == "lose" else exchange(world.group) | in_parts(world)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, f"{file}.{rank}")
