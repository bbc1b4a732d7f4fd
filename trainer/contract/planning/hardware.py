"""This machine's speeds, measured by ranks at startup and stored in a file.

Until a speed has been measured, published figures are used.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import msgspec

from trainer.contract.json_file import read_json, write_json

CPU = "CPU process"
# The fraction of a GPU's published peak speeds that large matmuls and copies achieve.
_REACHED = 0.7
# Published figures: TFLOP/s for dense bf16 matmuls (fp32 for a GPU without fast bf16), memory bandwidth in GB/s, and
# the GB/s of an all-reduce over NVLink or XGMI (0 for a GPU with neither).
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
    "MI355X": (2500, 8000, 350),
    "MI350X": (2300, 8000, 350),
    "MI325X": (1307, 6000, 310),
    "MI300X": (1307, 5300, 310),
    "MI300A": (980, 5300, 310),
    # The figures are per chip; each of the two chips on a board is a separate GPU.
    "MI250X": (191, 1600, 100),
    "MI250": (181, 1600, 100),
    "MI210": (181, 1600, 0),
    "MI100": (92, 1200, 0),
    "R9700": (191, 640, 0),
    "RX 9070": (191, 640, 0),
    "W7900": (123, 864, 0),
    "RX 7900": (123, 960, 0),
}
_UNKNOWN = (70, 800, 0)
# A CPU core's FLOP/s and memory bytes/s, and the bytes/s and latency between processes over the loopback interface.
_CPU_FLOPS, _CPU_BYTES, _CPU_BUS, _CPU_LATENCY_S = 50e9, 8e9, 1.5e9, 3e-4
# Bytes/s over PCIe with peer-to-peer transfers, bytes/s for transfers through host memory (as on GeForce GPUs), and
# latency.
_PCIE_BUS, _STAGED_BUS, _LATENCY_S = 20e9, 10e9, 25e-6
# Bytes/s that a GPU node and a CPU node send to other nodes (80 % of 100 Gb/s and of 10 Gb/s), and the latency of an
# exchange between nodes.
_NODE_LINK, _CPU_NODE_LINK, _NODE_LATENCY_S = 10e9, 1e9, 50e-6
# The speed of matmuls relative to bf16.
_SLOWER = {"fp16": 1.0, "bf16": 1.0, "tf32": 0.5, "fp32": 0.1}

# A MIG slice's name ends with its profile, such as `1g.10gb`: its share of the GPU's compute units in sevenths, and its
# memory.
_SLICE = re.compile(r" MIG (\d)g\.")
# GPUs below compute capability 8.0 support neither bf16 nor tf32. On Volta (7.0) and Turing (7.5), fp16 is 2 to 8 times
# as fast as fp32; on older GPUs, fp16 is no faster than fp32.
BF16_FROM, FP16_FROM = (8, 0), (7, 0)
_VOLTA_OR_TURING = re.compile(
    r"\b(V100S?|GV100|TITAN (V|RTX)|T4G?|RTX 20[678]0|Quadro (RTX|T\d+)|GTX 16\d0|T(4|5|6|10|12)00)\b"
)
# AMD GPUs before CDNA and RDNA 3; their fp16 is twice as fast as fp32.
_OLD_AMD = re.compile(r"\b(MI25|MI50|MI60|Vega|VII|RX [56]\d{3}|W[56]\d{3})\b")
_OLDER = re.compile(r"\b(K80|M40|M60|P100|P40|P4|GTX|TITAN|Quadro)\b")
# The precisions that "auto" can resolve to, from the most to the least widely supported.
AUTO = ("fp32", "tf32", "fp16", "bf16")

# A measured rate. Time estimates divide by it, so it must not be 0.
Rate = Annotated[float, msgspec.Meta(gt=0)]


class Speeds(msgspec.Struct, frozen=True):
    """The speeds of a rank and of the link between ranks.

    The speeds are the FLOP/s of matmuls, the bytes/s of memory, and the bytes/s and latency (in seconds) of an
    all-reduce.
    """

    flops_per_s: float
    memory_bytes_per_s: float
    bus_bytes_per_s: float
    latency_s: float
    is_measured: bool = False
    # The number of nodes, the bytes/s that a node sends to other nodes, for all its ranks together, and the latency of
    # an exchange between nodes. With several nodes, `bus_bytes_per_s` and `latency_s` refer to the ranks in a node.
    nodes: int = 1
    node_bytes_per_s: float = math.inf
    node_latency_s: float = 0.0


class DeviceSpeeds(msgspec.Struct, frozen=True):
    """The measured speeds for a device type; `flops_per_s` maps each precision to the matmul speed."""

    flops_per_s: dict[str, Rate]
    memory_bytes_per_s: Rate


class Bus(msgspec.Struct, frozen=True):
    """The measured bytes/s per device of an all-reduce, and the latency of a tiny all-reduce in seconds."""

    bytes_per_s: Rate
    latency_s: Annotated[float, msgspec.Meta(ge=0)]


class MeasuredHardware(msgspec.Struct, frozen=True):
    """All speeds measured on this machine; `buses` has keys of the form `<device name> x<ranks>`."""

    # Speeds by device name. The file has the key `cards`, as in earlier versions.
    devices: dict[str, DeviceSpeeds] = msgspec.field(default_factory=dict, name="cards")
    buses: dict[str, Bus] = {}
    # By device name: the speed of a node's link to other nodes, for all its ranks together.
    node_links: dict[str, Bus] = {}
    # Whether GPU-to-GPU transfers hung or failed although transfers through host memory worked.
    peers_fail: bool = False

    def speeds(self, device: str, precision: str, ranks: int, nodes: int = 1) -> Speeds:
        """Return the speeds of `ranks` devices with this name; unmeasured speeds are derived from published figures."""
        assumed, on_node = assumed_speeds(device, precision, nodes), max(1, ranks // nodes)
        speeds, bus, link = (
            self.devices.get(device),
            self.buses.get(f"{device} x{on_node}"),
            self.node_links.get(device),
        )
        measured = speeds is not None and precision in speeds.flops_per_s and (on_node == 1 or bus is not None)
        measured = measured and (nodes == 1 or link is not None)
        return Speeds(
            speeds.flops_per_s.get(precision, assumed.flops_per_s) if speeds else assumed.flops_per_s,
            speeds.memory_bytes_per_s if speeds else assumed.memory_bytes_per_s,
            bus.bytes_per_s if bus else assumed.bus_bytes_per_s,
            bus.latency_s if bus else assumed.latency_s,
            measured,
            nodes,
            link.bytes_per_s if link and nodes > 1 else assumed.node_bytes_per_s,
            link.latency_s if link and nodes > 1 else assumed.node_latency_s,
        )

    def with_measured(self, device: str, precision: str, ranks: int, speeds: Speeds) -> MeasuredHardware:
        """Return a copy that also contains these measured speeds."""
        known = self.devices.get(device)
        flops = (known.flops_per_s if known else {}) | {precision: speeds.flops_per_s}
        devices = self.devices | {device: DeviceSpeeds(flops, speeds.memory_bytes_per_s)}
        on_node = max(1, ranks // speeds.nodes)
        bus = {f"{device} x{on_node}": Bus(speeds.bus_bytes_per_s, speeds.latency_s)} if on_node > 1 else {}
        link = {device: Bus(speeds.node_bytes_per_s, speeds.node_latency_s)} if speeds.nodes > 1 else {}
        return msgspec.structs.replace(self, devices=devices, buses=self.buses | bus, node_links=self.node_links | link)


def auto_precision(device: str, capability: tuple[int, int]) -> str:
    """Resolve `train.precision = "auto"` on a device, "cuda" or "cpu", and return the precision.

    On GPUs, the precision is bf16 if bf16 matmuls are fast, fp16 with loss scaling if only fp16 is fast, and otherwise
    tf32. GPUs that do not support tf32 compute tf32 matmuls in fp32.
    """
    if device != "cuda":
        return "fp32"
    if capability >= BF16_FROM:
        return "bf16"
    return "fp16" if capability >= FP16_FROM else "tf32"


def usual_capability(name: str) -> tuple[int, int]:
    """Return a compute capability for a GPU name, from which to choose the default precision.

    For AMD GPUs, return the compute capability of NVIDIA GPUs that have the same fast precisions. Unknown GPUs are
    assumed to be new.
    """
    if _VOLTA_OR_TURING.search(name) or _OLD_AMD.search(name):
        return FP16_FROM
    return (6, 0) if _OLDER.search(name) else BF16_FROM


def assumed_speeds(device: str, precision: str, nodes: int = 1) -> Speeds:
    """Return the speeds to expect from published figures for this GPU, or for a typical GPU if the name is unknown."""
    one = _assumed_on_a_node(device, precision)
    if nodes == 1:
        return one
    link = _CPU_NODE_LINK if device == CPU else _NODE_LINK
    return msgspec.structs.replace(one, nodes=nodes, node_bytes_per_s=link, node_latency_s=_NODE_LATENCY_S)


def _assumed_on_a_node(device: str, precision: str) -> Speeds:
    if device == CPU:
        return Speeds(_CPU_FLOPS, _CPU_BYTES, _CPU_BUS, _CPU_LATENCY_S)
    tflops, gigabytes, nvlink = _published(device)
    of_gpu = int(match[1]) / 7 if (match := _SLICE.search(device)) else 1.0
    bus = nvlink * 1e9 or (_STAGED_BUS if "GeForce" in device else _PCIE_BUS)
    reached = _REACHED * of_gpu
    return Speeds(reached * tflops * 1e12 * _SLOWER[precision], reached * gigabytes * 1e9, bus, _LATENCY_S)


def has_nvlink(device: str) -> bool:
    """Return whether GPUs with this name are usually connected by NVLink or XGMI; PCIe variants are not."""
    return _published(device)[2] > 0


def _published(device: str) -> tuple[int, int, int]:
    """Return the published figures for a GPU, with a link speed of 0 for PCIe variants."""
    tflops, gigabytes, nvlink = next((figures for name, figures in _PUBLISHED.items() if name in device), _UNKNOWN)
    return tflops, gigabytes, 0 if "PCIE" in device.upper() else nvlink


def slowest(names: Iterable[str]) -> str:
    """Return the name of the slowest GPU by published figures; all other GPUs must wait for it."""
    return min(names, key=lambda name: assumed_speeds(name, "bf16").flops_per_s)


def read_box(file: Path | None) -> MeasuredHardware:
    """Return the measured speeds; a missing or corrupt file counts as empty, because speeds can be measured again.

    A host without its own file reads `box.json`, which earlier versions wrote for all hosts.
    """
    if file is None:
        return MeasuredHardware()
    return (
        read_json(file, MeasuredHardware)
        or read_json(file.with_name("box.json"), MeasuredHardware)
        or MeasuredHardware()
    )


def write_box(file: Path, box: MeasuredHardware) -> None:
    """Write the measured speeds atomically; ignore failures because they only make later estimates less accurate."""
    with contextlib.suppress(OSError):
        write_json(file, box)
