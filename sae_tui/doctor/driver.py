"""Checks the driver and the cards."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from sae_tui.doctor.base import Box, Finding
from sae_tui.gpu import vendor_to_name
from sae_tui.gpu.visible import all_hidden
from trainer.contract.planning.gpu_vendors import VENDORS, Vendor
from trainer.contract.wording import join_words, plural

# Classes of PCI devices: display controllers, of which compute cards are some, and accelerators, such as an MI300X.
_DISPLAY, _ACCELERATOR = "0x03", "0x12"
# The graphics of a Ryzen set 0.5 to 2 GiB aside; the smallest cards that ROCm takes have 8.
_SMALLEST_CARD_BYTES = 4 << 30


def check_driver(box: Box) -> Iterator[Finding]:
    """Tell whether the cards can be reached at all; a machine without cards has nothing to repair."""
    gpus = box.gpus
    if gpus.source_name == "simulated":
        sentence = f"{plural(len(gpus.samples), 'GPU')} of this box are simulated, and jobs on them are CPU processes"
        yield Finding("note", "driver", sentence, "leave out --demo to see the real machine")
    elif gpus.problem:
        yield _without(gpus.problem, gpus.remedy, cards_on_the_bus(box))
    else:
        facts = gpus.facts
        cuda = f", for CUDA up to {facts.cuda[0]}.{facts.cuda[1]}" if facts.cuda else ""
        version = facts.driver or "of unknown version"
        vendor = VENDORS.get(gpus.source_name)
        driver = f"{vendor.words} driver {version}" if vendor else f"drivers {version}"
        yield Finding("ok", "driver", f"{driver}{cuda}; {plural(len(gpus.samples), 'GPU')}")
        for fault in facts.faults:
            yield Finding("warning", "driver", fault.sentence, fault.remedy)


def check_visible(box: Box) -> Iterator[Finding]:
    """Tell how many cards CUDA_VISIBLE_DEVICES or its like leaves, and whether others take its numbers differently."""
    gpus = box.gpus
    names = [gpus.source_name] if gpus.source_name in VENDORS else {sample.vendor for sample in gpus.samples}
    for vendor in (VENDORS[name] for name in names if name in VENDORS):
        limits = vendor.limits(box.environ)
        if limits and gpus.n_cards:
            yield _finding_of(box, vendor, limits)


def _finding_of(box: Box, vendor: Vendor, limits: Mapping[str, str]) -> Finding:
    """Tell how many cards the vendor's variables leave, which are set to `limits`."""
    gpus, limit = box.gpus, next(iter(limits.values()))
    shown, remedy = len(gpus.samples), f"`unset {' '.join(limits)}` to use all of them"
    if not shown:
        return Finding("warning", "visible GPUs", all_hidden(gpus.n_cards, gpus.source_name, box.environ), remedy)
    settings = [f"{name}={value}" for name, value in limits.items()]
    sentence = f"{shown} of {plural(gpus.n_cards, 'GPU')} are shown and used, by {join_words(settings)}"
    unordered = {name: value for name, value in vendor.order.items() if box.environ.get(name) != value}
    if limit.strip()[:1].isdecimal() and unordered:
        sentence += (
            f"; its numbers are taken as those of {vendor.tool}, where other programs count the fastest GPU first"
        )
        assignments = " ".join(f"{name}={value}" for name, value in unordered.items())
        remedy = f"`export {assignments}`, with which all programs count alike"
    return Finding("note", "visible GPUs", sentence, remedy)


def check_cards(box: Box) -> Iterator[Finding]:
    """Report each card that cannot be used, and in one finding all that can."""
    for sample in box.gpus.samples:
        if not sample.healthy:
            remedy = "leave it out of jobs until it can be read again"
            yield Finding("error", f"GPU {sample.index}", f"{sample.name}: {sample.reason}", remedy)
        elif sample.obstacle and not sample.unusable:
            yield Finding("warning", f"GPU {sample.index}", f"{sample.name}: {sample.obstacle}", "leave it out of jobs")
        elif sample.unusable:
            unsplit = vendor_to_name(sample.vendor or box.gpus.source_name).unsplit
            remedy = f"`{unsplit}` makes it one GPU again, when nobody uses it" if unsplit else ""
            yield Finding("note", f"GPU {sample.index}", f"{sample.name}: {sample.unusable}", remedy)
    healthy = [sample for sample in box.gpus.samples if sample.healthy]
    if healthy:
        names = dict.fromkeys(_model_name(sample.name) for sample in healthy)
        yield Finding("ok", "GPUs", f"{plural(len(healthy), 'GPU')} can be read: {', '.join(names)}")


def cards_on_the_bus(box: Box) -> str:
    """Count the display controllers and accelerators of all vendors that the kernel lists, with or without a driver.

    The graphics of a processor are left out, as far as a driver tells: nobody trains on them.
    """
    vendors = (box.root / "sys/bus/pci/devices").glob("*/vendor")
    ids = [
        path.read_text().strip()
        for path in vendors
        if path.with_name("class").read_text().startswith((_DISPLAY, _ACCELERATOR)) and not _is_graphics_alone(path)
    ]
    counts = {vendor.words: ids.count(vendor.pci_vendor) for vendor in VENDORS.values()}
    return " and ".join(plural(count, f"{words} card") for words, count in counts.items() if count)


def _model_name(name: str) -> str:
    for vendor in VENDORS.values():
        name = name.removeprefix(f"{vendor.words} ")
    return name


def _without(problem: str, remedy: str, on_the_bus: str) -> Finding:
    """Report why no card can be reached: an error only if there are some on the PCI bus."""
    if on_the_bus:
        sentence = f"{problem}, though {on_the_bus} can be seen on the PCI bus"
        return Finding("error", "driver", sentence, remedy)
    return Finding("note", "driver", f"{problem}; there are no GPUs to see, and jobs run on the CPU", remedy)


def _is_graphics_alone(vendor_file: Path) -> bool:
    """Tell whether amdgpu says of a device that its memory is too little for a card."""
    try:
        return int(vendor_file.with_name("mem_info_vram_total").read_text()) < _SMALLEST_CARD_BYTES
    except (OSError, ValueError):
        return False
