"""THE REGISTRY of GPU vendors: how to detect a vendor's driver, read its GPUs, and pin a rank to some of them.

A rank is pinned by a vendor-specific environment variable, such as CUDA_VISIBLE_DEVICES. If the user sets that variable
to restrict the GPUs, the app, the commands and the trainer all respect it. GPU indices in the variable are the same as
in the vendor's own tool, which numbers GPUs by PCI bus. CUDA uses the same numbers only with
CUDA_DEVICE_ORDER=PCI_BUS_ID; otherwise the fastest GPU may come first. Ranks are therefore started with that setting,
and their GPUs are named by UUID.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from trainer.contract.store.rows import Device

Cards = Sequence[tuple[int, str]]


class Vendor(msgspec.Struct, frozen=True):
    """The facts about a vendor's GPUs that are needed before any vendor-specific code is loaded.

    `words` is the vendor's name, and `source` is the class that reads its GPUs, as `module:name`. If the vendor's
    driver is loaded, one of `driver_files` exists. `variable` is the environment variable listing the GPUs that a
    process may use, by index or by a UUID starting with `uuid_prefix`. `order` contains the variables needed to make
    these indices agree with `tool`, the vendor's command-line program. `device` is PyTorch's device type for the GPUs,
    or "cpu" if PyTorch cannot use them.
    """

    words: str
    source: str
    driver_files: tuple[str, ...]
    variable: str
    tool: str
    order: Mapping[str, str] = {}
    uuid_prefix: str = "GPU-"
    # The command to merge a GPU's slices, for sources that do not report such a command.
    unsplit: str = ""
    # The prefix of a slice's UUID, if GPUs can be split into slices that act as GPUs.
    slice_prefix: str = ""
    device: Device = "cuda"
    # PyTorch's name for the platform of these GPUs, as in `torch.version.cuda`, and the name to show to users.
    torch_runtime: str = "cuda"
    runtime_words: str = "CUDA"
    # The name of the direct links between GPUs, and the command that shows how GPUs are connected.
    link: str = "NVLink"
    topology: str = "nvidia-smi topo -m"
    # Environment variables that select by index among the GPUs that `variable` leaves visible; if several are set, only
    # the first one applies.
    inner_variables: tuple[str, ...] = ()
    # GPU name prefixes removed in narrow columns, in this order.
    brands: tuple[str, ...] = ()
    # The vendor's PCI ID in the kernel's format, and the file containing the version of the vendor's kernel module.
    pci_vendor: str = ""
    version_file: str = ""
    # Files with the UUID of each GPU in the machine or container, each in a folder named after the GPU's PCI address.
    uuid_files: str = ""

    @property
    def is_here(self) -> bool:
        """Whether the vendor's driver is loaded, according to its device files."""
        return any(map(os.path.exists, self.driver_files))

    def pin(self, uuids: Iterable[str]) -> dict[str, str]:
        """Return the environment variables needed to make exactly these GPUs visible to a process, in this order."""
        gpus = list(uuids)
        # Set an inner variable too, because an inherited value would select among these GPUs and could hide all of
        # them.
        inner = {name: ",".join(map(str, range(len(gpus)))) for name in self.inner_variables[:1]}
        return {self.variable: ",".join(gpus), **inner, **self.order}

    def prefix_of(self, name: str) -> str:
        """Return the UUID prefix for a GPU with this name; a slice's name ends with a profile, as in `MIG 1g.10gb`."""
        return self.slice_prefix if self.slice_prefix and f" {self.slice_prefix[:-1]} " in name else self.uuid_prefix

    def limits(self, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
        """Return the variables that restrict the visible GPUs, with their values, in order of precedence."""
        inner = [name for name in self.inner_variables if environ.get(name)][:1]
        return {name: environ[name] for name in (self.variable, *inner) if name in environ}

    def visible_devices(self, environ: Mapping[str, str] = os.environ) -> str | None:
        """Return the GPUs made visible by the environment, in the format of `variable`; None means all GPUs."""
        values = self.limits(environ)
        outer = values.pop(self.variable, None)
        inner = next(iter(values.values()), None)
        if outer is None or inner is None:
            return inner if outer is None else outer
        entries = outer.split(",")
        gpus = [(index, entry.strip()) for index, entry in enumerate(entries)]
        return ",".join(entries[index] for index in self.visible_indices(inner, gpus))

    def visible_indices(self, text: str | None, gpus: Iterable[tuple[int, str]]) -> list[int]:
        """Return the indices of the GPUs that are visible if `text` is the value of `variable`.

        `gpus` contains pairs (index, UUID). The indices are returned in the same order as in `text`. Like CUDA, this
        method accepts indices and UUIDs, and the UUIDs may be abbreviated. An entry that matches no GPU ends the list,
        and a list that names a GPU twice makes no GPU visible. An index never refers to a slice.
        """
        all_gpus = list(gpus)
        if text is None:
            return [index for index, _ in all_gpus]
        names_uuids = text.strip().startswith(self._prefixes)
        look_up: Callable[[str, Cards], int | None] = self._by_uuid if names_uuids else _by_number
        named = all_gpus if names_uuids else [(index, uuid) for index, uuid in all_gpus if not is_slice(uuid)]
        indices: list[int] = []
        for entry in text.split(","):
            index = look_up(entry.strip(), named)
            if index is None:
                break
            if index in indices:
                return []
            indices.append(index)
        return indices

    @property
    def _prefixes(self) -> tuple[str, ...]:
        return (self.uuid_prefix, self.slice_prefix) if self.slice_prefix else (self.uuid_prefix,)

    def _by_uuid(self, entry: str, gpus: Cards) -> int | None:
        """Return the index of the GPU whose UUID starts with the entry; None if no GPU or more than one matches."""
        if not entry.startswith(self._prefixes):
            return None
        indices = [index for index, uuid in gpus if uuid.lower().startswith(entry.lower())]
        return indices[0] if len(indices) == 1 else None


# Maps each source name, as in `--gpu-source`, to its vendor. Classes are given as strings to avoid imports.
VENDORS: dict[str, Vendor] = {
    "nvml": Vendor(
        "NVIDIA",
        "sae_tui.gpu.nvml:Nvml",
        # The second file exists under WSL.
        driver_files=("/dev/nvidiactl", "/dev/dxg"),
        variable="CUDA_VISIBLE_DEVICES",
        tool="nvidia-smi",
        order={"CUDA_DEVICE_ORDER": "PCI_BUS_ID"},
        slice_prefix="MIG-",
        unsplit="nvidia-smi -mig 0",
        brands=("NVIDIA ", "GeForce ", "Tesla "),
        pci_vendor="0x10de",
        version_file="/sys/module/nvidia/version",
        uuid_files="proc/driver/nvidia/gpus/*/information",
    ),
    "amdsmi": Vendor(
        "AMD",
        "sae_tui.gpu.amd:Amd",
        driver_files=("/dev/kfd",),
        # AMD recommends this variable on Linux. All versions of ROCm accept UUIDs in it, but only newer versions accept
        # UUIDs in the two inner variables. HIP and PyTorch number the visible GPUs from 0.
        variable="ROCR_VISIBLE_DEVICES",
        inner_variables=("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"),
        tool="amd-smi",
        torch_runtime="hip",
        runtime_words="ROCm",
        link="XGMI",
        topology="amd-smi topology",
        brands=("AMD ", "Radeon ", "Instinct "),
        pci_vendor="0x1002",
        version_file="/sys/module/amdgpu/version",
        uuid_files="sys/bus/pci/drivers/amdgpu/*/unique_id",
    ),
}


def is_slice(uuid: str) -> bool:
    """Return whether this UUID belongs to a slice rather than to an unsplit GPU."""
    return any(vendor.slice_prefix and uuid.startswith(vendor.slice_prefix) for vendor in VENDORS.values())


def is_slice_by_name(name: str) -> bool:
    """Return whether a device name reported by PyTorch is a slice name."""
    return any(is_slice(vendor.prefix_of(name)) for vendor in VENDORS.values())


def refusal_of_slices(gpus: Sequence[tuple[int, bool]]) -> str:
    """Return why ranks that exchange tensors cannot run on these GPUs, given as pairs (index, is a slice), or "".

    NCCL mistakes slices of the same GPU for a single device, and CUDA makes at most one slice visible to a process.
    """
    cut = [index for index, is_cut in gpus if is_cut]
    if not cut or len(gpus) < 2:
        return ""
    return f"GPU {cut[0]} is a MIG slice, and NCCL cannot connect slices; name only one slice, or whole GPUs"


def vendors_here() -> list[str]:
    """Return the names of the vendors whose drivers are loaded, in registry order."""
    return [name for name, vendor in VENDORS.items() if vendor.is_here]


def hide_all() -> dict[str, str]:
    """Return the environment variables that hide every vendor's GPUs."""
    return {vendor.variable: "" for vendor in VENDORS.values()}


def mixture(vendors: Iterable[str]) -> str:
    """Return a phrase like `GPUs of NVIDIA and AMD` for several vendors; "" for one."""
    words = [VENDORS[name].words for name in dict.fromkeys(vendors) if name in VENDORS]
    return f"GPUs of {' and '.join(words)}" if len(words) > 1 else ""


def refusal_of_mixture(gpus: Iterable[tuple[int, str]]) -> str:
    """Return why a job cannot use all of these GPUs, given as pairs (index, vendor); "" if all have the same vendor."""
    vendor_by_index = dict(gpus)
    if not (mixed := mixture(vendor_by_index.values())):
        return ""
    first = next(iter(vendor_by_index.values()))
    alike = [index for index, vendor in vendor_by_index.items() if vendor == first]
    return f"{mixed} cannot share a job; name GPUs from one vendor, as in launch.gpus = {alike}"


def _by_number(entry: str, gpus: Cards) -> int | None:
    """Return the GPU index at the start of the entry (`1st` means 1); None if there is no such GPU."""
    digits = re.match(r"\+?(\d{1,9})(?!\d)", entry)
    return next((index for index, _ in gpus if digits and index == int(digits[1])), None)
