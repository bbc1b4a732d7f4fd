"""The GPUs that PyTorch can use, as a program of its own.

Asking makes a CUDA context of some 500 MB, which must not stay in a process that only starts others.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec

from trainer.contract.problems import UserError
from trainer.contract.validate import MachineGpu

_DRIVER_FILES = ("/dev/nvidiactl", "/dev/dxg")


class Device(msgspec.Struct, frozen=True):
    """A GPU by the index and UUID that CUDA knows it by; `memory_bytes` is what it has in all."""

    index: int
    uuid: str
    name: str
    memory_bytes: int

    @property
    def as_machine_gpu(self) -> MachineGpu:
        """What others use of its memory is not known here."""
        return MachineGpu(self.index, self.name, self.memory_bytes)


def visible_gpus() -> list[Device]:
    """In the order of NVML's indices; empty where there is no driver, which costs no import of torch."""
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


if __name__ == "__main__":
    sys.stdout.buffer.write(msgspec.json.encode(_listed_by_torch()))
