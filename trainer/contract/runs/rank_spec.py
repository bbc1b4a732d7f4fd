"""The command line and environment of a rank, for the supervisor and for foreground runs."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from trainer.contract.errors import UserError
from trainer.contract.exits import Exit
from trainer.contract.files import write_own
from trainer.contract.json_file import load_json
from trainer.contract.paths import RunPaths, private_folder, refuse_link
from trainer.contract.planning.gpu_vendors import VENDORS, hide_all, is_slice
from trainer.contract.planning.hardware import MeasuredHardware, read_box
from trainer.contract.runs import cuda_variables, nccl
from trainer.contract.settings.declare import show
from trainer.contract.store.rows import Count, Device, JobId, WorldSize
from trainer.contract.trust import open_own


class RankSpec(msgspec.Struct, frozen=True):
    """The specification for an attempt, the same for all its ranks.

    The process starting the ranks writes the specification to `attempt<N>/ranks.json`. For a launched job, `job_id` and
    `control_db` are set; rank 0 reads requests for the job from the database `control_db`.
    """

    run_dir: Path
    output_dir: Path
    attempt: Count
    world_size: WorldSize
    device: Device
    gpu_uuids: tuple[str, ...] = ()
    # The GPU vendor, a key in `VENDORS`; "" without GPUs.
    gpu_vendor: str = ""
    control_db: Path | None = None
    job_id: JobId | None = None
    resume_from: Path | None = None
    # The file with this machine's measured speeds.
    box_file: Path | None = None
    # Whether all ranks are on one host and need no network. The ranks find each other through a file in the attempt
    # folder or, under torchrun, through environment variables.
    on_one_host: bool = True
    # Whether a single process uses all devices. In a training run, each thread of this process is a rank. In files,
    # this field is called `as_threads`.
    as_one_process: bool = msgspec.field(default=False, name="as_threads")
    # Whether the ranks run on different hosts from the process that started them. In this case, they share files with
    # that process, but not the SQLite database.
    by_files: bool = False
    # The memory in bytes that a rank may use on a shared device, or None if there is no limit.
    may_take_bytes: Count | None = None
    # The number of additional devices that only run a language model, and a clause giving the reason if the number was
    # chosen automatically.
    model_gpus: Count = 0
    model_gpus_why: str = ""

    @property
    def n_devices(self) -> int:
        """The number of devices in the job: one per rank, plus the devices that only run the language model."""
        return self.world_size + self.model_gpus

    def model_gpus_of(self, local_rank: int) -> list[int]:
        """Return the indices of the separate devices that run the language model for the given rank."""
        return list(range(self.world_size + local_rank, self.n_devices, self.world_size))

    @property
    def n_processes(self) -> int:
        return 1 if self.as_one_process else self.world_size


# Rank exit codes.
EXIT_FINISHED, EXIT_FAILED, EXIT_USAGE, EXIT_STOPPED = Exit.DONE, Exit.FAILED, Exit.USAGE, Exit.STOPPED


def write_spec(spec: RankSpec) -> Path:
    """Write a spec to the file that the ranks read, and return the file's path."""
    path = RunPaths(spec.run_dir).rank_spec(spec.attempt)
    private_folder(path.parent)
    refuse_link(path.parent)
    # Write atomically because a partial file from a killed process would prevent the run from being resumed.
    write_own(path, msgspec.json.encode(spec, enc_hook=os.fspath))
    return path


def read_spec(path: Path) -> RankSpec:
    """Read a spec; raise `OSError` if the file cannot be read, and `ValueError` if it does not contain a spec."""
    return load_json(path, RankSpec, _as_path)


def read_own_spec(path: Path) -> RankSpec:
    """Read the spec for a rank about to run; raise `UserError` if another user may have written the file."""
    return load_json(path, RankSpec, _as_path, open_own)


def _as_path(kind: type, value: Any) -> Any:
    return kind(value)


def rank_command(spec_file: Path, *, any_owner: bool = False, python: str = "") -> list[str]:
    """Return the command line that runs a rank with this Python or `python`; the rank's number is in its environment.

    `any_owner` skips the owner check for the spec. This is meant for a process that has itself just written all files
    in the run: some file systems report the same owner for all files, or report all files as writable by everyone.

    -P keeps Python from running a `trainer.py` in the working directory instead.
    """
    words = ["-P", "-m", "trainer", "rank", str(spec_file), *(["--any-owner"] if any_owner else [])]
    return [python or sys.executable, *words]


def rank_environment(spec: RankSpec, rank: int, base: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return a rank's environment, including torchrun's variables.

    GPUs are given by UUID, because NVML and CUDA number GPUs differently. CUDA makes at most one MIG slice visible to a
    process, so each rank is given only its own slice.
    """
    uuids, local_rank = spec.gpu_uuids, rank
    if any(map(is_slice, uuids)):
        uuids, local_rank = uuids[rank : rank + 1], 0
    pinned = VENDORS[spec.gpu_vendor].pin(uuids) if spec.gpu_vendor in VENDORS else {}
    environment = dict(base) | {
        "RANK": str(rank),
        "LOCAL_RANK": str(local_rank),
        "WORLD_SIZE": str(spec.world_size),
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": base.get("OMP_NUM_THREADS", str(threads_per_rank(spec.world_size))),
        **hide_all(),
        **pinned,
    }
    if spec.device == "cuda":
        environment = _presets(spec, read_box(spec.box_file), base) | environment
    else:
        # Torch frees and reallocates memory at every step. Huge pages reduce page faults, which saves 5 % of a step.
        environment["THP_MEM_ALLOC_ENABLE"] = base.get("THP_MEM_ALLOC_ENABLE", "1")
    return environment


def srun_environment(spec: RankSpec, srun: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the environment for a rank started by srun, including torchrun's variables.

    SLURM sets the GPUs and cores, and the batch script sets everything else.

    Raise `UserError` if srun has started a different number of processes than the attempt has ranks.
    """
    n_started = _number({"SLURM_NTASKS": "0"} | dict(srun), "SLURM_NTASKS")
    if n_started != spec.n_processes:
        reason = f"srun has started {n_started} processes, but the attempt has {spec.n_processes}"
        raise UserError(f"{reason}; stop the job and resume it, which submits it again")
    return {
        **(_presets(spec, MeasuredHardware(), srun) if spec.device == "cuda" else {}),
        **srun,
        "RANK": str(_number(srun, "SLURM_PROCID")),
        "LOCAL_RANK": str(_number(srun, "SLURM_LOCALID")),
        "WORLD_SIZE": str(spec.world_size),
        "LOCAL_WORLD_SIZE": str(spec.world_size // max(1, _number(srun, "SLURM_NNODES"))),
    }


def _presets(spec: RankSpec, box: MeasuredHardware, base: Mapping[str, str]) -> dict[str, str]:
    """Return the variables set for ranks on GPUs unless the user has set them."""
    return cuda_variables.presets(base) | (nccl.presets(box) if spec.on_one_host else {})


def _number(srun: Mapping[str, str], name: str) -> int:
    value = srun.get(name, "")
    if not re.fullmatch("[0-9]{1,9}", value):
        raise UserError(
            f"srun says {name}={show(value)}, which is not a number; start the ranks with the job's batch script"
        )
    return int(value)


def threads_per_rank(world_size: int) -> int:
    """Return the number of cores per rank, at least 1, when the cores that this process may use are shared evenly."""
    cores: Sequence[int] = sorted(os.sched_getaffinity(0))
    return max(1, len(cores) // world_size)
