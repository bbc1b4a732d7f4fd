"""Checks the driver and the GPUs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from sae_tui.doctor.base import CheckedMachine, Finding
from sae_tui.gpu import vendor_to_name
from sae_tui.gpu.visible import all_hidden
from trainer.contract.planning.gpu_vendors import VENDORS, Vendor
from trainer.contract.wording import join_words, plural

# PCI device classes: display controllers, which include most GPUs, and accelerators, such as an MI300X.
_DISPLAY, _ACCELERATOR = "0x03", "0x12"
# Integrated graphics in a Ryzen CPU reserve 0.5 to 2 GiB of memory; the smallest GPUs that ROCm supports have 8 GiB.
_SMALLEST_GPU_BYTES = 4 << 30


def check_driver(box: CheckedMachine) -> Iterator[Finding]:
    """Report whether the driver works; on a machine without GPUs, a missing driver is not an error."""
    gpus = box.gpus
    if gpus.source_name == "simulated":
        sentence = (
            f"this machine has {plural(len(gpus.samples), 'simulated GPU')}; jobs on simulated GPUs run on the CPU"
        )
        yield Finding("note", "driver", sentence, "leave out --demo to check the real machine")
    elif gpus.problem:
        yield _without(gpus.problem, gpus.remedy, gpus_on_the_bus(box))
    else:
        facts = gpus.facts
        cuda = f", for CUDA up to {facts.cuda[0]}.{facts.cuda[1]}" if facts.cuda else ""
        version = facts.driver or "of unknown version"
        vendor = VENDORS.get(gpus.source_name)
        driver = f"{vendor.words} driver {version}" if vendor else f"drivers {version}"
        yield Finding("ok", "driver", f"{driver}{cuda}; {plural(len(gpus.samples), 'GPU')}")
        for fault in facts.faults:
            yield Finding("warning", "driver", fault.sentence, fault.remedy)


def check_visible(box: CheckedMachine) -> Iterator[Finding]:
    """Report how many GPUs the vendor's variables make visible, and whether the numbering is ambiguous."""
    gpus = box.gpus
    names = [gpus.source_name] if gpus.source_name in VENDORS else {sample.vendor for sample in gpus.samples}
    for vendor in (VENDORS[name] for name in names if name in VENDORS):
        limits = vendor.limits(box.environ)
        if limits and gpus.n_gpus:
            yield _finding_of(box, vendor, limits)


def _finding_of(box: CheckedMachine, vendor: Vendor, limits: Mapping[str, str]) -> Finding:
    """Report how many GPUs the vendor's variables make visible; `limits` contains the variables."""
    gpus, limit = box.gpus, next(iter(limits.values()))
    shown, remedy = len(gpus.samples), f"`unset {' '.join(limits)}` to use all of them"
    if not shown:
        return Finding("warning", "visible GPUs", all_hidden(gpus.n_gpus, gpus.source_name, box.environ), remedy)
    settings = [f"{name}={value}" for name, value in limits.items()]
    sentence = f"{shown} of {plural(gpus.n_gpus, 'GPU')} are visible, because of {join_words(settings)}"
    unordered = {name: value for name, value in vendor.order.items() if box.environ.get(name) != value}
    if limit.strip()[:1].isdecimal() and unordered:
        sentence += f"; the app numbers GPUs as {vendor.tool} does, but other programs put the fastest GPU first"
        assignments = " ".join(f"{name}={value}" for name, value in unordered.items())
        remedy = f"`export {assignments}` gives all programs the same order"
    return Finding("note", "visible GPUs", sentence, remedy)


def check_gpu_count(box: CheckedMachine) -> Iterator[Finding]:
    """Report each unusable GPU separately, and all readable GPUs in one finding."""
    for sample in box.gpus.samples:
        if not sample.healthy:
            remedy = "do not use it for jobs until it can be read again"
            yield Finding("error", f"GPU {sample.index}", f"{sample.name}: {sample.reason}", remedy)
        elif sample.obstacle and not sample.unusable:
            yield Finding(
                "warning", f"GPU {sample.index}", f"{sample.name}: {sample.obstacle}", "do not use it for jobs"
            )
        elif sample.unusable:
            unsplit = vendor_to_name(sample.vendor or box.gpus.source_name).unsplit
            remedy = f"`{unsplit}` makes it one GPU again, when it is idle" if unsplit else ""
            yield Finding("note", f"GPU {sample.index}", f"{sample.name}: {sample.unusable}", remedy)
    healthy = [sample for sample in box.gpus.samples if sample.healthy]
    if healthy:
        names = dict.fromkeys(_model_name(sample.name) for sample in healthy)
        yield Finding("ok", "GPUs", f"{plural(len(healthy), 'GPU')} can be read: {', '.join(names)}")


def gpus_on_the_bus(box: CheckedMachine) -> str:
    """Describe how many GPUs from each vendor are on the PCI bus, including GPUs without a driver.

    Integrated graphics identified by their driver are omitted, because they are not used for training.
    """
    vendors = (box.root / "sys/bus/pci/devices").glob("*/vendor")
    ids = [
        path.read_text().strip()
        for path in vendors
        if path.with_name("class").read_text().startswith((_DISPLAY, _ACCELERATOR)) and not _is_graphics_alone(path)
    ]
    counts = {vendor.words: ids.count(vendor.pci_vendor) for vendor in VENDORS.values()}
    return " and ".join(plural(count, f"{words} GPU") for words, count in counts.items() if count)


def _model_name(name: str) -> str:
    for vendor in VENDORS.values():
        name = name.removeprefix(f"{vendor.words} ")
    return name


def _without(problem: str, remedy: str, on_the_bus: str) -> Finding:
    """Report why no GPU can be read; this is an error only if there are GPUs on the PCI bus."""
    if on_the_bus:
        sentence = f"{problem}, although the PCI bus has {on_the_bus}"
        return Finding("error", "driver", sentence, remedy)
    return Finding("note", "driver", f"{problem}; no GPU was found, so jobs run on the CPU", remedy)


def _is_graphics_alone(vendor_file: Path) -> bool:
    """Return whether amdgpu reports too little memory for the GPU to be a discrete one."""
    try:
        return int(vendor_file.with_name("mem_info_vram_total").read_text()) < _SMALLEST_GPU_BYTES
    except (OSError, ValueError):
        return False
