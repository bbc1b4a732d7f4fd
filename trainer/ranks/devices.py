"""Lists the GPUs that PyTorch can use, in a separate process.

Listing GPUs creates a CUDA context of about 500 MB, which must not stay in a process that only starts ranks.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from trainer.contract.errors import UserError
from trainer.contract.planning.check_job import MachineGpu
from trainer.contract.planning.gpu_vendors import VENDORS, Vendor, is_slice, vendors_here
from trainer.contract.planning.torch_build import vendor_of_build

MOST_GPUS = 64


class Device(msgspec.Struct, frozen=True):
    """A GPU: the index shown by its vendor's tool, the UUID used to select it, its name and its total memory."""

    index: int
    uuid: str
    name: str
    memory_bytes: int

    @property
    def as_machine_gpu(self) -> MachineGpu:
        """The GPU in the form that job checks expect; other processes' memory use is not included."""
        return MachineGpu(self.index, self.name, self.memory_bytes, is_slice=is_slice(self.uuid))


def torch_vendor() -> str:
    """Return the `VENDORS` key for the vendor whose GPUs PyTorch can use here, or ""."""
    return vendor_of_build(vendors_here())


def gpus_here() -> list[Device]:
    """Return the GPUs that jobs can use, or [] if PyTorch cannot list them (estimates also work without GPUs)."""
    with contextlib.suppress(UserError):
        return visible_gpus()
    return []


def visible_gpus() -> list[Device]:
    """Return the GPUs that CUDA_VISIBLE_DEVICES allows, or [] without a driver; this process does not import torch.

    Raise `UserError` if PyTorch cannot list the GPUs.
    """
    name = torch_vendor()
    if not name:
        return []
    environment = {**os.environ, **VENDORS[name].order}
    command = [sys.executable, "-P", str(Path(__file__)), name]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, env=environment)
    if done.returncode:
        lines = done.stderr.decode(errors="replace").strip().splitlines() or ["it gave no reason"]
        raise UserError(f'launch.gpus: PyTorch cannot list the GPUs ({lines[-1]}); choose "cpu" to train without a GPU')
    # Libraries may print to stdout during import, so only the last line is decoded.
    return msgspec.json.decode(done.stdout.rpartition(b"\n")[2], type=list[Device])


def _list_by_torch(vendor: Vendor) -> list[Device]:
    import torch

    devices = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        uuid = uuid_of(properties.uuid, vendor.prefix_of(properties.name))
        devices.append(Device(index, uuid, properties.name, properties.total_memory))
    return devices


def uuid_of(uuid: object, prefix: str) -> str:
    """Return the UUID for selecting a GPU, given the 16 bytes that PyTorch reports.

    ROCm stores the 16 ASCII digits of the GPU's serial number in these bytes; PyTorch prints each byte as two hex
    digits.
    """
    digits = str(uuid).replace("-", "")
    with contextlib.suppress(ValueError, UnicodeDecodeError):
        serial = bytes.fromhex(digits).decode("ascii")
        return f"{prefix}{int(serial, 16):016x}"
    return f"{prefix}{uuid}"


def numbered(listed: Sequence[Device], on_the_bus: Sequence[str], vendor: Vendor, visible: str | None) -> list[Device]:
    """Return the devices with their indices among all GPUs; CUDA itself numbers only the visible GPUs, from 0.

    `on_the_bus` contains the UUIDs of all GPUs in bus order; if some are missing, use the numbers in the vendor's
    environment variable (`visible`).
    """
    if {device.uuid for device in listed} <= set(on_the_bus):
        indices = [on_the_bus.index(device.uuid) for device in listed]
    else:
        gpus = [(index, "") for index in range(MOST_GPUS)]
        indices = vendor.visible_indices(visible, gpus) or list(range(len(listed)))
    if len(indices) < len(listed):
        indices = list(range(len(listed)))
    return [msgspec.structs.replace(device, index=index) for index, device in zip(indices, listed, strict=False)]


def uuids_on_the_bus(vendor: Vendor, root: Path = Path("/")) -> list[str]:
    """Return the UUIDs of all GPUs in PCI bus order, or [] if the kernel driver does not list them."""
    files = root.glob(vendor.uuid_files) if vendor.uuid_files else ()
    uuids = []
    for file in sorted(files, key=lambda file: (len(file.parent.name), file.parent.name)):
        found = re.search(r"^(?:GPU UUID:\s*(\S+)|([0-9a-fA-F]{16})$)", file.read_text(errors="replace"), re.MULTILINE)
        uuids.append((found[1] or f"{vendor.uuid_prefix}{found[2].lower()}") if found else "")
    return uuids


if __name__ == "__main__":
    whose = VENDORS[sys.argv[1]]
    gpus = numbered(_list_by_torch(whose), uuids_on_the_bus(whose), whose, whose.visible_devices())
    sys.stdout.buffer.write(msgspec.json.encode(gpus))
