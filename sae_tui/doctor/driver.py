"""Checks the driver and the cards."""

from __future__ import annotations

from collections.abc import Iterator

from sae_tui.doctor.base import Box, Finding
from sae_tui.gpu.visible import all_hidden
from sae_tui.jobs.wording import plural
from trainer.contract.planning.visible import VARIABLE

_NVIDIA = "0x10de"
_DISPLAY = "0x03"  # class of a PCI device: display controllers, of which compute cards are some


def check_driver(box: Box) -> Iterator[Finding]:
    """Tell whether the cards can be reached at all; a machine without cards has nothing to repair."""
    gpus = box.gpus
    if gpus.source_name == "simulated":
        sentence = f"{plural(len(gpus.samples), 'GPU')} of this box are simulated, and jobs on them are CPU processes"
        yield Finding("note", "driver", sentence, "leave out --demo to see the real machine")
    elif gpus.problem:
        yield _without(gpus.problem, gpus.remedy, _cards_on_the_bus(box))
    else:
        facts = gpus.facts
        cuda = f", for CUDA up to {facts.cuda[0]}.{facts.cuda[1]}" if facts.cuda else ""
        version = facts.driver or "of unknown version"
        yield Finding("ok", "driver", f"NVIDIA driver {version}{cuda}; {plural(len(gpus.samples), 'GPU')}")


def check_visible(box: Box) -> Iterator[Finding]:
    """Tell how many cards CUDA_VISIBLE_DEVICES leaves, and whether other programs take its numbers for other cards."""
    limit, gpus = box.environ.get(VARIABLE), box.gpus
    if limit is None or not gpus.n_cards or not gpus.cuda:
        return
    shown, remedy = len(gpus.samples), f"`unset {VARIABLE}` to use all of them"
    if not shown:
        yield Finding("warning", "visible GPUs", all_hidden(limit, gpus.n_cards), remedy)
        return
    sentence = f"{shown} of {plural(gpus.n_cards, 'GPU')} are shown and used, by {VARIABLE}={limit}"
    if limit.strip()[:1].isdecimal() and box.environ.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
        sentence += "; its numbers are taken as those of nvidia-smi, where other programs count the fastest GPU first"
        remedy = "`export CUDA_DEVICE_ORDER=PCI_BUS_ID`, with which all programs count alike"
    yield Finding("note", "visible GPUs", sentence, remedy)


def check_cards(box: Box) -> Iterator[Finding]:
    """Report each card that cannot be used, and in one finding all that can."""
    for sample in box.gpus.samples:
        if not sample.healthy:
            remedy = "leave it out of jobs until it can be read again"
            yield Finding("error", f"GPU {sample.index}", f"{sample.name}: {sample.reason}", remedy)
        elif sample.unusable:
            remedy = "leave it out of jobs, or make it one GPU again when nobody uses it"
            yield Finding("warning", f"GPU {sample.index}", f"{sample.name}: {sample.unusable}", remedy)
    healthy = [sample for sample in box.gpus.samples if sample.healthy]
    if healthy:
        names = dict.fromkeys(sample.name.removeprefix("NVIDIA ") for sample in healthy)
        yield Finding("ok", "GPUs", f"{plural(len(healthy), 'GPU')} can be read: {', '.join(names)}")


def _without(problem: str, remedy: str, n_cards: int) -> Finding:
    """Report why no card can be reached: an error only if the PCI bus has NVIDIA cards."""
    if n_cards:
        sentence = f"{problem}, though {plural(n_cards, 'NVIDIA card')} can be seen on the PCI bus"
        return Finding("error", "driver", sentence, remedy)
    return Finding("note", "driver", f"{problem}; there are no GPUs to see, and jobs run on the CPU", remedy)


def _cards_on_the_bus(box: Box) -> int:
    """Count NVIDIA's display controllers that the kernel lists, with or without a driver."""
    devices = box.root / "sys/bus/pci/devices"
    count = 0
    for vendor in devices.glob("*/vendor"):
        kind = vendor.with_name("class")
        count += vendor.read_text().strip() == _NVIDIA and kind.read_text().startswith(_DISPLAY)
    return count
