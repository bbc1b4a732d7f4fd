"""Checks the `launch.*` settings of jobs that run on machines rented through SkyPilot, and lists their GPUs."""

from __future__ import annotations

import difflib
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple
from urllib.parse import urlsplit

from trainer.contract.errors import Problem
from trainer.contract.settings.command import CommandJob
from trainer.contract.settings.declare import show
from trainer.contract.settings.job import AnyJob

# SkyPilot's names for GPUs that clouds rent, with each GPU's memory in GiB and the name that its driver reports.
# SkyPilot accepts any name in a task file, and refuses an unknown one only when it looks for a machine.
RENTED_GPUS: Mapping[str, tuple[int, str]] = {
    "T4": (15, "Tesla T4"),
    "V100": (16, "Tesla V100-SXM2-16GB"),
    "V100-32GB": (32, "Tesla V100-SXM2-32GB"),
    "L4": (22, "NVIDIA L4"),
    "A10G": (22, "NVIDIA A10G"),
    "A10": (22, "NVIDIA A10"),
    "RTX3090": (24, "NVIDIA GeForce RTX 3090"),
    "RTX4090": (24, "NVIDIA GeForce RTX 4090"),
    "RTX5090": (32, "NVIDIA GeForce RTX 5090"),
    "A100": (40, "NVIDIA A100-SXM4-40GB"),
    "A40": (45, "NVIDIA A40"),
    "L40": (45, "NVIDIA L40"),
    "L40S": (45, "NVIDIA L40S"),
    "RTXA6000": (48, "NVIDIA RTX A6000"),
    "RTX6000-Ada": (48, "NVIDIA RTX 6000 Ada Generation"),
    "A100-80GB": (80, "NVIDIA A100-SXM4-80GB"),
    "H100": (80, "NVIDIA H100 80GB HBM3"),
    "GH200": (96, "NVIDIA GH200 480GB"),
    "H200": (141, "NVIDIA H200"),
    "B200": (180, "NVIDIA B200"),
}
# The schemes of the buckets that SkyPilot can mount.
BUCKETS = ("s3", "gs", "r2", "nebius", "oci", "cos", "https")
# The number of GPUs that one rented machine can have.
MOST_PER_NODE = 16
_KIND = re.compile(r"([A-Za-z0-9][\w.-]*)(?::([1-9][0-9]?))?")
_INFRA = re.compile(r"[a-z0-9*][\w*./:@-]*")


class RentedGpus(NamedTuple):
    """A kind of GPU, with the number of GPUs on each machine, or None if the job decides the number."""

    kind: str
    per_machine: int | None = None


def parse_kind(text: str) -> RentedGpus:
    """Parse `H100` or `H100:2`; raise `ValueError` for an unknown kind, with the nearest known name."""
    match = _KIND.fullmatch(text.strip())
    if not match:
        raise ValueError(f"must be GPUs like H100 or A100-80GB:2, not {show(text)}")
    by_lower = {name.lower(): name for name in RENTED_GPUS}
    name = by_lower.get(match[1].lower())
    if name is None:
        near = difflib.get_close_matches(match[1].lower(), by_lower, n=1, cutoff=0.5)
        meant = f"did you mean {by_lower[near[0]]}?" if near else f"use one of {', '.join(RENTED_GPUS)}"
        raise ValueError(f"there is no GPU called {match[1]}; {meant}")
    count = int(match[2]) if match[2] else None
    if count and count > MOST_PER_NODE:
        raise ValueError(f"a machine has at most {MOST_PER_NODE} GPUs, not {count}; use launch.nodes for more")
    return RentedGpus(name, count)


def check_skypilot(job: AnyJob) -> list[Problem]:
    """Return all of a job's problems that can be detected without contacting SkyPilot."""
    return [*_check_program(), *check_rented(job), *_check_restarts(job)]


def check_rented(job: AnyJob) -> list[Problem]:
    """Return a job's problems with rented machines, whether or not SkyPilot is installed here."""
    return [*_check_kinds(job), *_check_words(job), *_check_size(job), *_check_spot(job)]


def _check_program() -> Iterator[Problem]:
    if shutil.which("sky") is None:
        message = '"skypilot" requires the command `sky`, which is not on $PATH here; run `pip install skypilot`'
        yield Problem("launch.backend", message)


def _check_kinds(job: AnyJob) -> Iterator[Problem]:
    _, _, count = str(job.launch.gpus).partition(":")
    for text in job.launch.gpu_kinds or ():
        try:
            kind = parse_kind(text)
        except ValueError as error:
            yield Problem("launch.gpu_kinds", str(error))
            continue
        if kind.per_machine and str(job.launch.gpus).startswith("auto:") and int(count) != kind.per_machine:
            yield Problem("launch.gpu_kinds", f'{text} contradicts launch.gpus = "{job.launch.gpus}"; leave one out')
    if isinstance(job, CommandJob) and not (job.on_cpu or job.launch.gpu_kinds or job.command.memory):
        message = 'is missing; name the GPUs that the program needs, like ["H100:1"], or set command.memory'
        yield Problem("launch.gpu_kinds", message)
    if job.on_cpu and job.launch.gpu_kinds:
        yield Problem("launch.gpu_kinds", f'a job on launch.gpus = "{job.launch.gpus}" rents no GPU; leave it out')
    if isinstance(job.launch.gpus, list):
        n = len(job.launch.gpus)
        message = f'a rented machine has other GPUs, so the list is treated as "auto:{n}", with {n} for each node'
        yield Problem("launch.gpus", message, "warning")


def _check_words(job: AnyJob) -> Iterator[Problem]:
    launch = job.launch
    if launch.infra is not None and not _INFRA.fullmatch(launch.infra):
        yield Problem("launch.infra", f"must be a place like aws, gcp/us-central1 or runpod, not {show(launch.infra)}")
    if launch.runs_url is not None:
        parts = urlsplit(launch.runs_url)
        if parts.scheme not in BUCKETS or not parts.netloc or re.search(r"[\s$\\\x00-\x1f\x7f]", launch.runs_url):
            message = f"must be a bucket like s3://my-bucket/runs or gs://my-bucket, not {show(launch.runs_url)}"
            yield Problem("launch.runs_url", message)
    package = launch.package
    if package and package.endswith(".whl") and not os.path.isfile(os.path.expanduser(package)):
        yield Problem("launch.package", f"there is no wheel {package}; build it with `pip wheel --no-deps .`")
    if package is not None and (not package.strip() or not package.isprintable() or package.startswith("-")):
        yield Problem("launch.package", f"must be a wheel, or a requirement like sae-tui==0.2.0, not {show(package)}")


def _check_size(job: AnyJob) -> Iterator[Problem]:
    if job.launch.nodes > 1 and job.kind == "extract":
        yield Problem("launch.nodes", "an extraction uses one rented machine, with all its GPUs; set it to 1")
    if job.launch.nodes > 1 and job.kind == "train" and not job.launch.runs_url:
        message = "is missing: several machines share their run folder; set it, like s3://my-bucket/runs"
        yield Problem("launch.runs_url", message)
    if job.launch.python:
        yield Problem("launch.python", "a rented machine gets its own Python; leave it out")


def _check_spot(job: AnyJob) -> Iterator[Problem]:
    """Warn about the work that is lost if a cloud takes a spot machine back."""
    if job.launch.spot and not keeps_elsewhere(job) and job.kind == "train":
        message = "checkpoints are lost with the machine; keep them with launch.runs_url or train.mirror_checkpoints"
        yield Problem("launch.spot", message, "warning")


def _check_restarts(job: AnyJob) -> Iterator[Problem]:
    if job.launch.spot and not job.launch.max_restarts:
        message = "the job fails when the cloud takes the machine back; set launch.max_restarts to rent another"
        yield Problem("launch.spot", message, "warning")


def keeps_elsewhere(job: AnyJob) -> bool:
    """Return whether the job's checkpoints are also stored outside the rented machine."""
    return bool(job.launch.runs_url or getattr(getattr(job, "train", None), "mirror_checkpoints", None))


def wanted_kinds(texts: Sequence[str] | None) -> list[RentedGpus]:
    """Return the kinds that a job names, or all known kinds; raise `ValueError` for an unknown name."""
    return [parse_kind(text) for text in texts] if texts else [RentedGpus(name) for name in RENTED_GPUS]
