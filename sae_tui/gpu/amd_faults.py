"""Messages about faults in AMD GPUs, their sensors, the driver and its library, by AMD SMI error code.

The codes are the same in ROCm 6 and 7.
"""

from __future__ import annotations

import os

from sae_tui.gpu.base import DriverFault, SourceUnavailable

# Error codes for values not provided by the GPU, the driver or this version of the library. All other codes indicate
# failures.
MISSING = frozenset({2, 3, 5, 20, 40, 52})
NO_PERMISSION = 10
DRIVER_NOT_LOADED = 34

# Error codes after which AMD SMI must be reopened.
STALE = frozenset({31, 32, DRIVER_NOT_LOADED})
SILENT = "none of the GPU's sensors respond any more; see `sudo dmesg | grep amdgpu`"
SPLIT = (
    "it is one partition of a split GPU (%s), and all partitions have the same UUID in ROCm; "
    "`sudo amd-smi set -C SPX` merges them again"
)
CARD = {
    7: SILENT,
    8: "the GPU did not respond to the driver in time",
    NO_PERMISSION: "no permission to read this GPU; join the groups render and video",
    11: "the driver receives no interrupts from the GPU",
    12: "the GPU cannot be read; see `sudo dmesg | grep amdgpu`",
    14: SILENT,
    30: "the driver is busy with this GPU, for example during a reset",
    31: "the driver no longer recognises this GPU",
    32: "the driver was unloaded",
    DRIVER_NOT_LOADED: "the driver was unloaded",
}
SENSOR = {
    7: "cannot be read",
    8: "timed out",
    9: "not ready",
    NO_PERMISSION: "no permission",
    11: "interrupt fault",
    12: "cannot be read",
    14: "cannot be read",
    30: "busy",
    31: "GPU lost",
    43: "unexpected response",
}
# Programs use this device file to compute on the GPU, but AMD SMI can read most values without it.
COMPUTE_FILE = "/dev/kfd"
JOIN_GROUPS = "join its groups with `sudo usermod -aG render,video $USER`, and log in again"
SOURCE = {
    4: ("AMD SMI cannot load the libraries that it needs", "install ROCm's amd-smi-lib and libdrm again"),
    NO_PERMISSION: ("no permission to use the AMD driver", JOIN_GROUPS),
    DRIVER_NOT_LOADED: ("the AMD driver is not loaded", "load it with `sudo modprobe amdgpu`, or reboot"),
}
INSTALL = "install ROCm's package amd-smi-lib, or the version of the pip package amdsmi that matches ROCm"


def gpu(code: int) -> str:
    """Return why a GPU cannot be read."""
    return CARD.get(code, f"the driver reports error {code} for this GPU")


def sensor(code: int) -> str:
    """Return why a GPU sensor cannot be read."""
    return SENSOR.get(code, f"error {code}")


def source(code: int) -> SourceUnavailable:
    """Return the error, including a remedy, to raise if the driver cannot read any GPU."""
    other = (f"AMD SMI reports error {code}", "see `amd-smi list` and `sudo dmesg | grep amdgpu`")
    return SourceUnavailable(*SOURCE.get(code, other), is_broken=True)


def no_gpus() -> SourceUnavailable:
    """Return the error to raise if the driver finds no GPUs, or shows none of them to this user."""
    if of_driver():
        return source(NO_PERMISSION)
    remedy = "compare with `amd-smi list`; start a container with --device=/dev/kfd --device=/dev/dri"
    return SourceUnavailable("the AMD driver sees no GPUs", remedy)


def no_module() -> SourceUnavailable:
    """Return the error to raise if the Python module that reads AMD GPUs is missing."""
    return SourceUnavailable("the Python module amdsmi, which reads AMD GPUs, is not installed", INSTALL)


def broken_module(why: str) -> SourceUnavailable:
    """Return the error to raise if the module is unusable, for example because it does not match the library."""
    return SourceUnavailable(f"the Python module amdsmi cannot be used ({why})", INSTALL, is_broken=True)


def of_driver() -> tuple[DriverFault, ...]:
    """Return the faults that prevent PyTorch from using GPUs, although AMD SMI can read them."""
    if not os.path.exists(COMPUTE_FILE) or os.access(COMPUTE_FILE, os.R_OK | os.W_OK):
        return ()
    sentence = f"no permission to use {COMPUTE_FILE}, without which PyTorch sees no AMD GPU"
    return (DriverFault(sentence, JOIN_GROUPS),)
