"""Lists all code that reads bytes from untrusted sources; the module `uses` defines how each reader is called."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from fuzz import uses
from fuzz.uses import Home

NOTHING = type(None)


class Reader(NamedTuple):
    """A function that reads bytes from an untrusted source.

    `read` gets a data folder with the bytes in the file named by `seeds`. It returns one of `kinds`, or raises
    `UserError` or one of `raises`.
    """

    name: str
    seeds: str
    read: Callable[[Home], Any]
    kinds: tuple[type, ...]
    raises: tuple[type[Exception], ...] = ()


READERS = (
    Reader("job file", "job", uses.job_file, (list,)),
    Reader("job file, all errors", "job", uses.examined, (list,)),
    Reader("job file in the store", "job", uses.stored_config, (dict,)),
    Reader("--set", "override", uses.override, (list,)),
    Reader("numbers in flags and form fields", "seconds", uses.number, (int,)),
    Reader("shards", "shards", uses.shards, (int,)),
    Reader("meta.json", "meta", uses.meta, (str,)),
    Reader("manifest.json", "manifest", uses.checkpoint, (int,)),
    Reader("state.json", "state", uses.checkpoint, (int,)),
    Reader("tensors of a checkpoint", "tensors", uses.tensors, (dict,)),
    Reader("random generator state of a checkpoint", "random", uses.tensors, (dict,)),
    Reader("state of a checkpoint to be exported", "state", uses.tensors, (dict,)),
    Reader("box.json", "box", uses.box, (float,)),
    Reader("plan.json", "plan", uses.plan, (str, NOTHING)),
    Reader("mark of a rank", "mark", uses.mark, (bool, NOTHING)),
    Reader("row.json", "row", uses.row, (str, NOTHING)),
    Reader("record.json", "record", uses.record, (str, NOTHING)),
    Reader("record.json, repaired", "record", uses.repaired, (str, NOTHING)),
    Reader("exit.json", "exit", uses.ending, (str, NOTHING)),
    Reader("exit.json, repaired", "exit", uses.repaired, (str, NOTHING)),
    Reader("exit.json of a failure", "exit", uses.why, (str, NOTHING)),
    Reader("exit report of a rank", "rank_exit", uses.why, (str, NOTHING)),
    # This reader raises `ValueError` with the reason. The rank then exits, and a resume reads the previous attempt.
    Reader("ranks.json", "ranks", uses.ranks, (dict,), (ValueError,)),
    Reader("progress.jsonl", "progress", uses.progress, (int,)),
    Reader("log", "log", uses.log, (list,)),
    Reader("log, searched", "log", uses.search, (int,)),
    Reader("NVML's texts", "nvml", uses.driver, (list,)),
    Reader("GPUs of queued jobs", "cards", uses.read_gpus, (int,)),
    Reader("settings.toml", "settings", uses.settings, (str,)),
    Reader("/proc/locks", "locks", uses.held_locks, (dict,)),
    Reader("squeue", "squeue", uses.squeue, (str, NOTHING)),
    Reader("sbatch", "sbatch", uses.sbatch, (str,), (OSError,)),
    Reader("id of a SLURM job", "slurm_job", uses.slurm_id, (str,), (OSError,)),
    Reader("srun's environment", "srun", uses.srun, (dict,)),
    Reader("CUDA_VISIBLE_DEVICES", "devices", uses.devices, (list,)),
    Reader("filter and sort order of jobs", "words", uses.words, (list,)),
)
