"""Makes ranks agree on Triton kernels: one rank per host compiles first, and all ranks or none use a kernel."""

from __future__ import annotations

import json
from collections.abc import Callable

import torch

from trainer.contract.settings.job import JobConfig
from trainer.contract.settings.job_file import members
from trainer.contract.wording import join_words
from trainer.parallel.group import Group, gather_bytes
from trainer.runtime.precision import NARROW
from trainer.runtime.triton_kernels import COMPILED_UPDATES, KERNELS, Kernels, try_all, withhold


def agree(
    group: Group,
    device: torch.device,
    job: JobConfig,
    *,
    compiles: bool,
    report: Callable[[str], object],
) -> None:
    """Try a job's kernels on all ranks, and disable every kernel that fails on any rank.

    Ranks with `compiles` go first, because ranks that compile at the same time would each occupy the host's cores for a
    minute and write the same files. A rank without a kernel would be several times slower and keep all other ranks
    waiting. Without ZeRO, replicas with and without a kernel would also round differently. `report` is called with one
    sentence for each cause of failure.
    """
    dtype, needed = NARROW.get(job.train.precision, torch.float32), _needed(job)
    if compiles:
        try_all(device, dtype, needed)
    # `cpu()` waits for the gather; a GPU only queues it. Without this wait, other ranks would start compiling too
    # early.
    group.gather(torch.zeros(1, device=device)).cpu()
    failures = try_all(device, dtype, needed)
    of_all = [json.loads(failed) for failed in gather_bytes(group, json.dumps(failures).encode(), device)]
    causes: dict[str, list[str]] = {}
    for name in sorted(set().union(*of_all)):
        ranks = [rank for rank, failed in enumerate(of_all) if name in failed]
        where = "" if len(ranks) == group.size else f" on rank{'s'[: len(ranks) > 1]} {join_words([*map(str, ranks)])}"
        causes.setdefault(f"it fails{where} ({of_all[ranks[0]][name]})", []).append(KERNELS[name].purpose)
    for cause, purposes in causes.items():
        report(f"{join_words(purposes)} run without Triton, which is slower: {cause}")
    withhold(set().union(*of_all))


def _needed(job: JobConfig) -> list[Kernels]:
    """Return the kernels a job may use.

    Trying compiled updates takes seconds, so they are included only for skip connections and optimizers other than
    Adam. Adam's updates of latents have Triton kernels.
    """
    compiles_updates = any(one.sae.skip or one.train.optimizer != "adam" for one in members(job).values())
    return [one for one in KERNELS.values() if compiles_updates or one != COMPILED_UPDATES]
