"""THE REGISTRY of GPU vendors: whether a vendor's driver is here, who reads its cards, and how a rank is kept to some.

A rank is pinned by an environment variable of the vendor's, such as CUDA_VISIBLE_DEVICES. The user may set the same
variable to leave only some cards to all of us, and app, commands and trainer then see the same ones. Numbers in it are
read as those of the vendor's own tool, which counts by PCI bus. CUDA itself counts so only with
CUDA_DEVICE_ORDER=PCI_BUS_ID, and without it may put the fastest card first; ranks are started with that order set and
with UUIDs.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec

from trainer.contract.store.rows import Device

Cards = Sequence[tuple[int, str]]


class Vendor(msgspec.Struct, frozen=True):
    """What the rest of the program must know of a vendor's GPUs before any of its own code is loaded.

    `words` names it, `source` is the class that reads its cards, as `module:name`, and one of `driver_files` exists
    where its driver is loaded. `variable` holds the cards that a process may use, by number or by an identity that
    begins with `uuid_prefix`; `order` has the variables that make the numbers those of `tool`, the vendor's own program
    for its cards. `device` is what PyTorch calls the cards, "cpu" if it cannot use them.
    """

    words: str
    source: str
    driver_files: tuple[str, ...]
    variable: str
    tool: str
    order: Mapping[str, str] = {}
    uuid_prefix: str = "GPU-"
    # The command that makes a split card one GPU again, where what its source says of it does not name it.
    unsplit: str = ""
    # What the identity of a slice begins with, where cards can be split into slices that are GPUs of their own.
    slice_prefix: str = ""
    device: Device = "cuda"
    # What PyTorch calls the builds that run on them, as in `torch.version.cuda`, and people call them.
    torch_runtime: str = "cuda"
    runtime_words: str = "CUDA"
    # The links between its cards beside PCI Express, and the command of its tool that shows how cards are connected.
    link: str = "NVLink"
    topology: str = "nvidia-smi topo -m"
    # Variables that choose by number among the cards that `variable` has left; the first that is set counts.
    inner_variables: tuple[str, ...] = ()
    # Beginnings of a card's name that a narrow column leaves out, in this order.
    brands: tuple[str, ...] = ()
    # The vendor's number on the PCI bus, as the kernel writes it, and the file with the version of its kernel module.
    pci_vendor: str = ""
    version_file: str = ""
    # Files with the UUID of each card of the machine, or of the container, in a folder named by its place on the bus.
    uuid_files: str = ""

    @property
    def is_here(self) -> bool:
        """Whether its driver is loaded, as far as can be told without asking it."""
        return any(map(os.path.exists, self.driver_files))

    def pin(self, uuids: Iterable[str]) -> dict[str, str]:
        """Return the environment in which a process sees exactly these cards, in this order."""
        cards = list(uuids)
        # What is inherited would choose among these cards, and might leave none.
        inner = {name: ",".join(map(str, range(len(cards)))) for name in self.inner_variables[:1]}
        return {self.variable: ",".join(cards), **inner, **self.order}

    def prefix_of(self, name: str) -> str:
        """Return what the UUID of a card of this name begins with; slices have their profile at the end of it."""
        return self.slice_prefix if self.slice_prefix and f" {self.slice_prefix[:-1]} " in name else self.uuid_prefix

    def limits(self, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
        """Return the variables that leave only some cards, with their values, in the order in which they count."""
        inner = [name for name in self.inner_variables if environ.get(name)][:1]
        return {name: environ[name] for name in (self.variable, *inner) if name in environ}

    def visible_devices(self, environ: Mapping[str, str] = os.environ) -> str | None:
        """Return the cards that the environment leaves, as `variable` would name them; None where it leaves all."""
        values = self.limits(environ)
        outer = values.pop(self.variable, None)
        inner = next(iter(values.values()), None)
        if outer is None or inner is None:
            return inner if outer is None else outer
        entries = outer.split(",")
        cards = [(index, entry.strip()) for index, entry in enumerate(entries)]
        return ",".join(entries[index] for index in self.visible_indices(inner, cards))

    def visible_indices(self, text: str | None, cards: Iterable[tuple[int, str]]) -> list[int]:
        """Return the indices of the cards that the variable's `text` leaves, in its order, of all (index, UUID).

        Entries are read as CUDA reads them: numbers, or UUIDs that may be shortened; the list ends before the first
        entry that names no card, and a list that names a card twice is empty. A number is never that of a slice.
        """
        all_cards = list(cards)
        if text is None:
            return [index for index, _ in all_cards]
        names_uuids = text.strip().startswith(self._prefixes)
        look_up: Callable[[str, Cards], int | None] = self._by_uuid if names_uuids else _by_number
        named = all_cards if names_uuids else [(index, uuid) for index, uuid in all_cards if not is_slice(uuid)]
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

    def _by_uuid(self, entry: str, cards: Cards) -> int | None:
        """Find the card whose UUID begins with the entry; None where no card, or more than one, does."""
        if not entry.startswith(self._prefixes):
            return None
        indices = [index for index, uuid in cards if uuid.lower().startswith(entry.lower())]
        return indices[0] if len(indices) == 1 else None


# By the name of the source, as in `--gpu-source`. Classes are strings, so that listing them imports nothing.
VENDORS: dict[str, Vendor] = {
    "nvml": Vendor(
        "NVIDIA",
        "sae_tui.gpu.nvml:Nvml",
        # The second is that of Windows' Linux.
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
        # AMD recommends it on Linux. It takes UUIDs in every version of ROCm, the other two in newer ones alone; HIP
        # and PyTorch take the cards that it has left as 0, 1, ...
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
    """Tell whether this is the identity of a slice of a card, as against that of a whole one."""
    return any(vendor.slice_prefix and uuid.startswith(vendor.slice_prefix) for vendor in VENDORS.values())


def is_slice_by_name(name: str) -> bool:
    """Tell the same by the name that PyTorch has for it."""
    return any(is_slice(vendor.prefix_of(name)) for vendor in VENDORS.values())


def refusal_of_slices(gpus: Sequence[tuple[int, bool]]) -> str:
    """Return why ranks that exchange cannot run on these GPUs (index, whether it is a slice); "" where they can.

    NCCL takes slices of one card for the same device, and CUDA shows a process one slice at most.
    """
    cut = [index for index, is_cut in gpus if is_cut]
    if not cut or len(gpus) < 2:
        return ""
    return f"GPU {cut[0]} is a slice of a card, and NCCL cannot connect slices; name one of them alone, or whole GPUs"


def vendors_here() -> list[str]:
    """Return the names of the vendors whose drivers are loaded, in the order of the registry."""
    return [name for name, vendor in VENDORS.items() if vendor.is_here]


def hide_all() -> dict[str, str]:
    """Return the environment in which a process sees no GPU of any vendor."""
    return {vendor.variable: "" for vendor in VENDORS.values()}


def mixture(vendors: Iterable[str]) -> str:
    """Return a phrase like `GPUs of NVIDIA and AMD` for GPUs of more than one vendor; "" for those of one."""
    words = [VENDORS[name].words for name in dict.fromkeys(vendors) if name in VENDORS]
    return f"GPUs of {' and '.join(words)}" if len(words) > 1 else ""


def refusal_of_mixture(gpus: Iterable[tuple[int, str]]) -> str:
    """Return why a job cannot use all of these GPUs (index, vendor); "" where they are of one vendor."""
    vendor_by_index = dict(gpus)
    if not (mixed := mixture(vendor_by_index.values())):
        return ""
    first = next(iter(vendor_by_index.values()))
    alike = [index for index, vendor in vendor_by_index.items() if vendor == first]
    return f"{mixed} cannot share a job; name those of one vendor, as in launch.gpus = {alike}"


def _by_number(entry: str, cards: Cards) -> int | None:
    """Find a card by the number that an entry begins with, so that `1st` is 1; None where there is none."""
    digits = re.match(r"\+?(\d{1,9})(?!\d)", entry)
    return next((index for index, _ in cards if digits and index == int(digits[1])), None)
