"""Runs the trainer's self-test on an idle GPU, or on the CPU if the machine has no GPU."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import msgspec

from sae_tui.doctor.base import CheckedMachine, Finding
from sae_tui.doctor.driver import gpus_on_the_bus
from sae_tui.jobs.environment import look
from sae_tui.jobs.gpus.availability import GpuChoice, choices
from sae_tui.jobs.gpus.locks import GpuLocks, lock_folder
from sae_tui.jobs.gpus.occupancy import Occupancy
from trainer.contract.errors import UserError
from trainer.contract.extras import judged_by, missing_of_trainer
from trainer.contract.json_file import decode_as
from trainer.contract.planning.gpu_vendors import VENDORS
from trainer.contract.planning.torch_build import vendor_of_build
from trainer.contract.wording import plural

SUBJECT = "self-test"
LIMIT_S = 600.0
# The maximum number of failed checks listed in a finding.
_MOST_NAMED = 3


class Tested(msgspec.Struct, frozen=True):
    """The output of `sae-train self-test --json`."""

    device: str
    ok: bool
    checks: int
    failed: list[dict[str, Any]]
    seconds: float


def check_training(box: CheckedMachine) -> Iterator[Finding]:
    """Run a small training job on the first idle GPU. A lock keeps other jobs off this GPU during the test.

    If packages are missing, return without a finding, because `check_torch` reports them.
    """
    if not box.python and missing_of_trainer():
        return
    if not box.gpus.cuda:
        yield _finding(box, {}, "cpu")
        return
    if not box.gpus.n_gpus and not gpus_on_the_bus(box):
        found = _finding(box, {}, "cpu")
        yield msgspec.structs.replace(found, sentence=f"there is no GPU, so the CPU was tested; {found.sentence}")
        return
    usable = choices(box.gpus.samples, Occupancy(box.data).holders())
    vendors = list(dict.fromkeys(choice.vendor for choice in usable))
    suited = _vendor_of_torch(box, vendors) if len(vendors) > 1 else next(iter(vendors), "")
    idle = [one for one in usable if one.uuid and one.state == "available" and one.vendor == suited]
    if not idle:
        of_vendor = f" of {VENDORS[suited].words}" if suited else ""
        yield Finding("note", SUBJECT, f"not run, since no GPU{of_vendor} is idle", "repeat it when a GPU is idle")
        return
    with _kept(box, idle[0]) as why:
        if why:
            yield Finding("note", SUBJECT, f"not run, since {why}", "repeat it later")
            return
        vendor = VENDORS[idle[0].vendor or box.gpus.source_name]
        yield _finding(box, vendor.pin([idle[0].uuid]), "auto:1")


def _vendor_of_torch(box: CheckedMachine, vendors: list[str]) -> str:
    """Return the vendor whose GPUs the training environment's PyTorch supports."""
    with judged_by(look(box.python).packages if box.python else None):
        return vendor_of_build(vendors)


@contextlib.contextmanager
def _kept(box: CheckedMachine, choice: GpuChoice) -> Iterator[str]:
    """Keep jobs off a GPU within the context; yield why this is impossible, or "" if it is possible."""
    try:
        box.data.create()
    except UserError as error:
        yield str(error)
        return
    locks = GpuLocks(lock_folder(box.data, box.gpus.source_name), [choice.uuid])
    if not locks.take():
        yield locks.why or "a job is starting on the GPU"
        return
    try:
        yield ""
    finally:
        locks.release()


def _finding(box: CheckedMachine, visible: dict[str, str], gpus: str) -> Finding:
    answer, failure = box.trainer("self-test", "--gpus", gpus, "--json", limit_s=LIMIT_S, **visible)
    try:
        tested = decode_as(answer.rpartition("\n")[2], Tested)
    except ValueError:
        remedy = "run `sae-train self-test` to see the error"
        return Finding(
            "error", SUBJECT, f"it exited without a result: {failure or 'its output is not valid JSON'}", remedy
        )
    figures = f"{plural(tested.checks, 'check')} in {tested.seconds:.0f} s"
    if tested.ok:
        return Finding("ok", SUBJECT, f"this machine trains correctly: {figures} on {tested.device}")
    names = [f"{one['part']} ({one['name']})" for one in tested.failed[:_MOST_NAMED]]
    more = f" and {plural(len(tested.failed) - len(names), 'other')}" if len(tested.failed) > len(names) else ""
    sentence = f"{len(tested.failed)} of {figures} on {tested.device} are wrong: {', '.join(names)}{more}"
    remedy = "train on another machine, and run `sae-train self-test`: a driver, a GPU or this program is faulty"
    return Finding("error", SUBJECT, sentence, remedy)
