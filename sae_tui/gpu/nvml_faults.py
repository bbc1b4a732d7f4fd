"""Messages about faults in NVIDIA GPUs, their sensors and the driver.

NVIDIA's own messages are not used because one code can have two different messages ("GPU requires restart" and "GPU
requires reset"), and neither contains a remedy.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

from sae_tui.gpu.base import SourceUnavailable
from sae_tui.gpu.faults import LOST

NOT_SUPPORTED = 3
NO_LIBRARY = 12
MISMATCH = 18  # The versions of the library and the driver differ.
# Error codes for functions missing from this driver or pynvml, or whose arguments have a different layout.
MISSING = frozenset({13, 25})

SPLIT = "it is split into MIG slices, which are listed as separate GPUs"
UNCUT = "MIG is enabled, but the GPU has no slices; `nvidia-smi mig -cgi` creates some"
# Error codes after which NVML must be reopened: the driver was reloaded, or does not recognise a handle or an index.
STALE = frozenset({1, 2, 6, MISMATCH, 28})
# Error codes for GPUs that only other users may use.
WITHHELD = frozenset({4, 17})
# Messages for error codes returned when a GPU's handle is requested, or by all of its sensors.
CARD = {
    1: "the driver was unloaded",
    2: "the driver no longer recognises this GPU",
    4: "no permission to read this GPU; see /dev/nvidia*",
    6: "the driver no longer recognises this GPU",
    8: "the GPU's power cables are not attached",
    10: "the GPU did not respond to the driver in time",
    11: "the driver receives no interrupts from the GPU",
    15: LOST,
    16: "the GPU needs a reset: nvidia-smi --gpu-reset",
    17: "the operating system blocks this GPU (container or cgroup)",
    MISMATCH: "the driver was updated; start sae-tui again if this persists",
    28: "the driver no longer recognises this GPU",
    999: "the driver reports an unknown error for this GPU",
}
SENSOR = {
    4: "no permission",
    10: "timed out",
    11: "interrupt fault",
    15: "GPU lost",
    16: "needs a reset",
    17: "blocked by the system",
    21: "no data",
    27: "not ready",
    999: "unknown error",
}
SOURCE = {
    4: ("no permission to use the NVIDIA driver", "ask for read and write access to /dev/nvidia*"),
    9: ("the NVIDIA driver is not loaded", "load it with `sudo modprobe nvidia`, or reboot"),
    11: ("the driver receives no interrupts from a GPU", "see `sudo dmesg | grep NVRM`"),
    NO_LIBRARY: (
        "there is no NVIDIA driver library (libnvidia-ml.so.1)",
        "install the NVIDIA driver, or start the container with --gpus all",
    ),
    MISMATCH: (
        "the NVIDIA driver and its library have different versions",
        "reboot to finish the driver update; if `nvidia-smi` works, only a new process loads the new library:"
        " start sae-tui again",
    ),
}
# GPU manufacturers by PCI vendor id.
_NVIDIA = "0x10de"
_OTHER_MAKERS = {"0x8086": "Intel", "0x106b": "Apple", "0x1ed5": "Moore Threads", "0x19e5": "Huawei"}
# Why one GPU cannot read another's memory.
NO_PEER = {
    1: "the chipset does not support it",
    2: "these GPUs do not support it",
    3: "the link between them does not support it",
    4: "the driver's settings forbid it",
    5: "it is not supported",
}


def gpu(code: int) -> str:
    """Return why a GPU cannot be read."""
    return CARD.get(code, f"the driver reports error {code} for this GPU")


def sensor(code: int) -> str:
    """Return why a GPU sensor cannot be read."""
    return SENSOR.get(code, f"error {code}")


def _unsupported_vendors(drm: Path) -> list[str]:
    """Return the unsupported manufacturers of this machine's GPUs, or [] if any GPU is from NVIDIA."""
    ids = set()
    for file in drm.glob("card*/device/vendor"):
        with contextlib.suppress(OSError):
            ids.add(file.read_text().strip().lower())
    return [] if _NVIDIA in ids else [words for each, words in _OTHER_MAKERS.items() if each in ids]


def no_library(drm: Path = Path("/sys/class/drm")) -> SourceUnavailable:
    """Return the error to raise if NVIDIA's library is missing; mention the machine's unsupported GPUs, if any."""
    reason, remedy = SOURCE[NO_LIBRARY]
    if makers := _unsupported_vendors(drm):
        remedy = f"the GPU here is made by {' and '.join(makers)}; only NVIDIA and AMD GPUs are supported"
    return SourceUnavailable(reason, remedy)


def source(code: int) -> SourceUnavailable:
    """Return the error, including a remedy, to raise if the driver cannot read any GPU."""
    if code == NO_LIBRARY:
        return no_library()
    other = (f"the NVIDIA driver reports error {code}", "see `nvidia-smi` and `sudo dmesg | grep NVRM`")
    return SourceUnavailable(*SOURCE.get(code, other), is_broken=True)


def no_gpus() -> SourceUnavailable:
    """Return the error to raise if the driver finds no GPUs."""
    return SourceUnavailable(
        "the NVIDIA driver sees no GPUs", "compare with `nvidia-smi -L`; start a container with --gpus all"
    )


def broken_pynvml(why: str) -> SourceUnavailable:
    """Return the error to raise if pynvml cannot be imported, or is a different module of that name."""
    return SourceUnavailable(
        f"the Python module pynvml cannot be used ({why})",
        "run `pip uninstall -y pynvml && pip install --force-reinstall nvidia-ml-py`",
        is_broken=True,
    )
