"""THE REGISTRY of GPU vendors: how to detect a vendor's driver, read its GPUs, and pin a rank to some of them.

A rank is pinned by an environment variable of the vendor, such as CUDA_VISIBLE_DEVICES. If the user sets that variable
to restrict the GPUs, app, commands and trainer all respect it. Its numbers are read as in the vendor's own tool,
which counts by PCI bus. CUDA counts that way only with CUDA_DEVICE_ORDER=PCI_BUS_ID; otherwise it may put the fastest
GPU first. Ranks are started with that order and with UUIDs.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec

from trainer.contract.store.rows import Device

Cards = Sequence[tuple[int, str]]


class Vendor(msgspec.Struct, frozen=True):
    """The facts about a vendor's GPUs that are needed before loading any vendor code.

    `words` is its name, `source` the class that reads its GPUs, as `module:name`; one of `driver_files` exists if its
    driver is loaded. `variable` lists the GPUs that a process may use, by number or by an identifier that begins with
    `uuid_prefix`; `order` sets the variables that make the numbers agree with `tool`, the vendor's command-line
    program. `device` is PyTorch's device type for the GPUs, "cpu" if it cannot use them.
    """

    words: str
    source: str
    driver_files: tuple[str, ...]
    variable: str
    tool: str
    order: Mapping[str, str] = {}
    uuid_prefix: str = "GPU-"
    # The command that turns a split GPU back into one, unless its source reports one.
    unsplit: str = ""
    # Prefix of a slice's identifier, if GPUs can be split into slices that act as GPUs.
    slice_prefix: str = ""
    device: Device = "cuda"
    # PyTorch's name of the builds for these GPUs, as in `torch.version.cuda`, and the usual name.
    torch_runtime: str = "cuda"
    runtime_words: str = "CUDA"
    # The links between its GPUs other than PCI Express, and the command that shows how GPUs are connected.
    link: str = "NVLink"
    topology: str = "nvidia-smi topo -m"
    # Variables that choose by number among the GPUs that `variable` leaves visible; only the first one set applies.
    inner_variables: tuple[str, ...] = ()
    # Prefixes of a GPU's name that narrow columns omit, in this order.
    brands: tuple[str, ...] = ()
    # The vendor's PCI ID as the kernel writes it, and the file with the version of its kernel module.
    pci_vendor: str = ""
    version_file: str = ""
    # Files with the UUID of each GPU of the machine or container, in a folder named by its PCI address.
    uuid_files: str = ""

    @property
    def is_here(self) -> bool:
        """Whether its driver is loaded, judged by files alone."""
        return any(map(os.path.exists, self.driver_files))

    def pin(self, uuids: Iterable[str]) -> dict[str, str]:
        """Return the environment that makes exactly these GPUs visible to a process, in this order."""
        gpus = list(uuids)
        # An inherited variable would choose among these GPUs, and might leave none.
        inner = {name: ",".join(map(str, range(len(gpus)))) for name in self.inner_variables[:1]}
        return {self.variable: ",".join(gpus), **inner, **self.order}

    def prefix_of(self, name: str) -> str:
        """Return the UUID prefix of a GPU with this name; a slice's name ends in its profile."""
        return self.slice_prefix if self.slice_prefix and f" {self.slice_prefix[:-1]} " in name else self.uuid_prefix

    def limits(self, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
        """Return the variables that restrict the visible GPUs, with their values, in order of precedence."""
        inner = [name for name in self.inner_variables if environ.get(name)][:1]
        return {name: environ[name] for name in (self.variable, *inner) if name in environ}

    def visible_devices(self, environ: Mapping[str, str] = os.environ) -> str | None:
        """Return the GPUs that the environment makes visible, in the format of `variable`; None if it does not restrict
        them.
        """
        values = self.limits(environ)
        outer = values.pop(self.variable, None)
        inner = next(iter(values.values()), None)
        if outer is None or inner is None:
            return inner if outer is None else outer
        entries = outer.split(",")
        gpus = [(index, entry.strip()) for index, entry in enumerate(entries)]
        return ",".join(entries[index] for index in self.visible_indices(inner, gpus))

    def visible_indices(self, text: str | None, gpus: Iterable[tuple[int, str]]) -> list[int]:
        """Return the indices of the (index, UUID) pairs that the variable's `text` makes visible, in its order.

        Entries are parsed as CUDA does: numbers, or UUIDs that may be shortened. The list ends before the first entry
        that matches no GPU; a list that names a GPU twice is empty. A number never refers to a slice.
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
        """Return the index of the GPU whose UUID begins with the entry; None if no GPU or more than one matches."""
        if not entry.startswith(self._prefixes):
            return None
        indices = [index for index, uuid in gpus if uuid.lower().startswith(entry.lower())]
        return indices[0] if len(indices) == 1 else None


# Keyed by source name, as in `--gpu-source`. Classes are strings, so listing them imports nothing.
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
        # AMD recommends it on Linux. All versions of ROCm accept UUIDs in it, but only newer ones in the other two; HIP
        # and PyTorch number the GPUs that it leaves from 0.
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
    """Return whether this UUID is that of a slice, rather than of a GPU that is not split."""
    return any(vendor.slice_prefix and uuid.startswith(vendor.slice_prefix) for vendor in VENDORS.values())


def is_slice_by_name(name: str) -> bool:
    """Return the same from the name that PyTorch reports."""
    return any(is_slice(vendor.prefix_of(name)) for vendor in VENDORS.values())


def refusal_of_slices(gpus: Sequence[tuple[int, bool]]) -> str:
    """Return why ranks that exchange tensors cannot run on these GPUs (index, whether it is a slice), or "".

    NCCL mistakes slices of one GPU for the same device, and CUDA shows a process at most one slice.
    """
    cut = [index for index, is_cut in gpus if is_cut]
    if not cut or len(gpus) < 2:
        return ""
    return f"GPU {cut[0]} is a MIG slice, and NCCL cannot connect slices; name one slice alone, or whole GPUs"


def vendors_here() -> list[str]:
    """Return the names of the vendors whose drivers are loaded, in the order of the registry."""
    return [name for name, vendor in VENDORS.items() if vendor.is_here]


def hide_all() -> dict[str, str]:
    """Return the environment that hides the GPUs of all vendors."""
    return {vendor.variable: "" for vendor in VENDORS.values()}


def mixture(vendors: Iterable[str]) -> str:
    """Return a phrase like `GPUs of NVIDIA and AMD` for several vendors; "" for one."""
    words = [VENDORS[name].words for name in dict.fromkeys(vendors) if name in VENDORS]
    return f"GPUs of {' and '.join(words)}" if len(words) > 1 else ""


def refusal_of_mixture(gpus: Iterable[tuple[int, str]]) -> str:
    """Return why a job cannot use all of these GPUs (index, vendor); "" if they are from one vendor."""
    vendor_by_index = dict(gpus)
    if not (mixed := mixture(vendor_by_index.values())):
        return ""
    first = next(iter(vendor_by_index.values()))
    alike = [index for index, vendor in vendor_by_index.items() if vendor == first]
    return f"{mixed} cannot share a job; name GPUs of one vendor, as in launch.gpus = {alike}"


def _by_number(entry: str, gpus: Cards) -> int | None:
    """Return the GPU whose number begins the entry, so `1st` means 1; None if it begins with no number."""
    digits = re.match(r"\+?(\d{1,9})(?!\d)", entry)
    return next((index for index, _ in gpus if digits and index == int(digits[1])), None)
