"""The GPUs that PyTorch can use, as a program of its own.

Asking makes a CUDA context of some 500 MB, which must not stay in a process that only starts others.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from trainer.contract.errors import UserError
from trainer.contract.planning.check_job import MachineGpu
from trainer.contract.planning.visible import visible_devices, visible_indices

MOST_CARDS = 64
_DRIVER_FILES = ("/dev/nvidiactl", "/dev/dxg")


# A folder for every card of the machine, or of the container, named by its place on the PCI bus.
_CARDS = Path("/proc/driver/nvidia/gpus")


class Device(msgspec.Struct, frozen=True):
    """A GPU by the index that nvidia-smi shows and the UUID that CUDA knows; `memory_bytes` is what it has in all."""

    index: int
    uuid: str
    name: str
    memory_bytes: int

    @property
    def as_machine_gpu(self) -> MachineGpu:
        """What others use of its memory is not known here."""
        return MachineGpu(self.index, self.name, self.memory_bytes)


def visible_gpus() -> list[Device]:
    """Those that CUDA_VISIBLE_DEVICES leaves; empty where there is no driver, which costs no import of torch."""
    if not any(map(os.path.exists, _DRIVER_FILES)):
        return []
    environment = dict(os.environ) | {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    command = [sys.executable, "-P", str(Path(__file__))]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, env=environment)
    if done.returncode:
        lines = done.stderr.decode(errors="replace").strip().splitlines() or ["it gave no reason"]
        raise UserError(f'launch.gpus: PyTorch cannot list the GPUs ({lines[-1]}); choose "cpu" to do without')
    return msgspec.json.decode(done.stdout, type=list[Device])


def _listed_by_torch() -> list[Device]:
    import torch

    found = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        uuid = f"GPU-{properties.uuid}"
        found.append(Device(index, uuid, properties.name, properties.total_memory))
    return found


def numbered(listed: Sequence[Device], on_the_bus: Sequence[str], visible: str | None) -> list[Device]:
    """With their indices among all cards, since CUDA counts only those that it is let see, from 0.

    `on_the_bus` are the UUIDs of all, in the order of the bus; where they are not told, numbers in
    CUDA_VISIBLE_DEVICES say the same.
    """
    if {device.uuid for device in listed} <= set(on_the_bus):
        indices = [on_the_bus.index(device.uuid) for device in listed]
    else:
        cards = [(index, "") for index in range(MOST_CARDS)]
        indices = visible_indices(visible, cards) or list(range(len(listed)))
    if len(indices) < len(listed):
        indices = list(range(len(listed)))
    return [msgspec.structs.replace(device, index=index) for index, device in zip(indices, listed, strict=False)]


def _uuids_on_the_bus() -> list[str]:
    """As the kernel's driver lists them, nothing where it does not."""
    found = []
    for folder in sorted(_CARDS.glob("*"), key=lambda folder: (len(folder.name), folder.name)):
        lines = (folder / "information").read_text(errors="replace").splitlines()
        found += [line.partition(":")[2].strip() for line in lines if line.startswith("GPU UUID:")] or [""]
    return found


if __name__ == "__main__":
    gpus = numbered(_listed_by_torch(), _uuids_on_the_bus(), visible_devices())
    sys.stdout.buffer.write(msgspec.json.encode(gpus))
