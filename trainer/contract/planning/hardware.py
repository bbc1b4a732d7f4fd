"""How fast this box is: what ranks measured as they started, kept in `box.json`, and published figures until then."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import msgspec

from trainer.contract.files import write_whole
from trainer.contract.json_file import read_json

CPU = "CPU process"
# What large products and copies reach of a card's published peaks.
_REACHED = 0.7
# Published: TFLOP/s of dense bf16 products (of fp32 where a card has no fast bf16), GB/s of memory, GB/s of an
# all-reduce over NVLink, 0 for cards without it.
_PUBLISHED = {
    "B200": (2250, 8000, 650),
    "H200": (989, 4800, 360),
    "H100": (989, 3350, 360),
    "A100": (312, 2000, 230),
    "L40S": (362, 864, 0),
    "RTX 6000 Ada": (364, 960, 0),
    "RTX 5090": (210, 1790, 0),
    "RTX 4090": (165, 1008, 0),
    "RTX 3090": (71, 936, 0),
    "A6000": (155, 768, 0),
    "A10": (125, 600, 0),
    "L4": (121, 300, 0),
    "V100": (112, 900, 120),
    "T4": (65, 320, 0),
}
_UNKNOWN = (70, 800, 0)
# Of a core, in GFLOP/s and GB/s, and of what processes exchange over the loopback interface.
_CPU_FLOPS, _CPU_BYTES, _CPU_BUS, _CPU_LATENCY_S = 50e9, 8e9, 1.5e9, 3e-4
# A PCIe bus with peer-to-peer transfers; GeForce cards have to go through the host's memory.
_PCIE_BUS, _STAGED_BUS, _LATENCY_S = 20e9, 10e9, 25e-6
# Of bf16 products.
_SLOWER = {"fp16": 1.0, "bf16": 1.0, "tf32": 0.5, "fp32": 0.1}

# What is expected of a device is divided by it.
Rate = Annotated[float, msgspec.Meta(gt=0)]


class Speeds(msgspec.Struct, frozen=True):
    """What a rank does alone and all ranks together: FLOP/s of products, bytes/s of memory, bytes/s and seconds of
    latency of an all-reduce."""

    flops_per_s: float
    memory_bytes_per_s: float
    bus_bytes_per_s: float
    latency_s: float
    is_measured: bool = False


class Card(msgspec.Struct, frozen=True):
    """Measured on one kind of device; products by their arithmetic."""

    flops_per_s: dict[str, Rate]
    memory_bytes_per_s: Rate


class Bus(msgspec.Struct, frozen=True):
    """Measured between so many of them: what each sends and gets in an all-reduce, and the time of a tiny one."""

    bytes_per_s: Rate
    latency_s: Annotated[float, msgspec.Meta(ge=0)]


class Box(msgspec.Struct, frozen=True):
    """Everything measured here so far, by the name of a device and `name x ranks`."""

    cards: dict[str, Card] = {}
    buses: dict[str, Bus] = {}
    # Whether GPUs that read each other's memory were seen to hang or fail, and did not by way of the host's.
    peers_fail: bool = False

    def speeds(self, device: str, precision: str, ranks: int) -> Speeds:
        """Of `ranks` devices of this name; assumed where they were not measured."""
        assumed = assumed_speeds(device, precision)
        card, bus = self.cards.get(device), self.buses.get(f"{device} x{ranks}")
        measured = card is not None and precision in card.flops_per_s and (ranks == 1 or bus is not None)
        return Speeds(
            card.flops_per_s.get(precision, assumed.flops_per_s) if card else assumed.flops_per_s,
            card.memory_bytes_per_s if card else assumed.memory_bytes_per_s,
            bus.bytes_per_s if bus else assumed.bus_bytes_per_s,
            bus.latency_s if bus else assumed.latency_s,
            measured,
        )

    def with_measured(self, device: str, precision: str, ranks: int, found: Speeds) -> Box:
        """A copy that knows these as well."""
        card = self.cards.get(device)
        flops = (card.flops_per_s if card else {}) | {precision: found.flops_per_s}
        cards = self.cards | {device: Card(flops, found.memory_bytes_per_s)}
        bus = {f"{device} x{ranks}": Bus(found.bus_bytes_per_s, found.latency_s)} if ranks > 1 else {}
        return msgspec.structs.replace(self, cards=cards, buses=self.buses | bus)


def assumed_speeds(device: str, precision: str) -> Speeds:
    """From published figures of the card whose name this is, or of an ordinary one."""
    if device == CPU:
        return Speeds(_CPU_FLOPS, _CPU_BYTES, _CPU_BUS, _CPU_LATENCY_S)
    found = next((figures for name, figures in _PUBLISHED.items() if name in device), _UNKNOWN)
    tflops, gigabytes, nvlink = found
    bus = nvlink * 1e9 or (_STAGED_BUS if "GeForce" in device else _PCIE_BUS)
    return Speeds(_REACHED * tflops * 1e12 * _SLOWER[precision], _REACHED * gigabytes * 1e9, bus, _LATENCY_S)


def slowest(names: Iterable[str]) -> str:
    """The kind of card that cards of other kinds wait for, by published figures."""
    return min(names, key=lambda name: assumed_speeds(name, "bf16").flops_per_s)


def read_box(file: Path | None) -> Box:
    """What is known; nothing where the file is not there or not whole, for it can be measured again."""
    if file is None:
        return Box()
    return read_json(file, Box) or Box()


def write_box(file: Path, box: Box) -> None:
    """Replace the file in one go; a folder that takes none costs nothing but the next estimate."""
    with contextlib.suppress(OSError):
        write_whole(file, msgspec.json.format(msgspec.json.encode(box)) + b"\n")
