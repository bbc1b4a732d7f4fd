"""The JSON answers about GPUs: `gpus`, `metrics`, `select`, `recommend`."""

from __future__ import annotations

from sae_tui.gpu.aggregate import ContributingGpus
from sae_tui.gpu.base import Condition, GpuProcess, Xid
from sae_tui.jobs.launch.placement import Recommendation
from trainer.contract.answers.schema import Schema, by_name, fields, list_of, or_null, typed
from trainer.contract.answers.shared import answer

_NO_SENSOR = "null: not supported"
_CONDITION = typed(
    "",
    Condition,
    {
        "sm_clock_mhz": f"Core clock, in MHz; {_NO_SENSOR}.",
        "performance_state": f"Performance state, from 0 (full speed) to 15; {_NO_SENSOR}.",
        "fan_percent": f"Fan speed, in %; {_NO_SENSOR}.",
        "slowed_by": f"What slows it down, as a list of phrases; {_NO_SENSOR}.",
        "slowdown_c": f"Temperature at which it throttles, in °C; {_NO_SENSOR}.",
        "xid": "The last error that the driver reported; null: none.",
        "compute_mode": f"Compute mode: shared, one process, or no computing; {_NO_SENSOR}.",
        "ecc_uncorrected": f"Uncorrected memory errors since the last reset; {_NO_SENSOR}.",
        "rows_pending": f"Whether memory rows wait for a reset to be remapped; {_NO_SENSOR}.",
        "rows_failed": f"Whether a memory row could not be remapped; {_NO_SENSOR}.",
        "recovery": f'Recovery action that the driver asks for before the next use; "": none; {_NO_SENSOR}.',
    },
    {
        "slowed_by": or_null(list_of(str)),
        "xid": or_null(
            typed(
                "Driver error",
                Xid,
                {
                    "number": "Error number.",
                    "timestamp": "Time of the error, in s since the epoch.",
                    "words": "What it means.",
                    "is_fatal": "Whether jobs cannot start on the GPU before a reset.",
                },
            )
        ),
    },
)
_PROCESS = typed(
    "Process on a GPU",
    GpuProcess,
    {
        "pid": "Process id.",
        "user": "User who owns the process; null: not known.",
        "name": "Name of the process; null: not known.",
        "memory_used_bytes": "GPU memory that the process holds, in bytes; null: not known.",
    },
)
_CARD: dict[str, tuple[object, str]] = {
    "index": (int, "Index of the GPU, as the driver and nvidia-smi number it."),
    "uuid": (str, "UUID, as CUDA_VISIBLE_DEVICES takes it; jobs are pinned to it."),
    "name": (str, "Model of the GPU."),
    "memory_total": (int | None, f"Memory capacity, in bytes; {_NO_SENSOR}."),
    "memory_used": (int | None, f"Memory in use, in bytes; {_NO_SENSOR}."),
    "memory_free": (int | None, f"Free memory, in bytes; {_NO_SENSOR}."),
    "utilization": (int | None, f"Share of time in which a kernel ran, in %; {_NO_SENSOR}."),
    "temperature": (int | None, f"Temperature, in °C; {_NO_SENSOR}."),
    "power_draw": (float | None, f"Power draw, in W; {_NO_SENSOR}."),
    "power_limit": (float | None, f"Power limit, in W; {_NO_SENSOR}."),
    "is_busy": (bool, "Whether the GPU is in use."),
    "current_job": (int | None, "Id of the job that holds the GPU; null: no job of this data folder."),
    "current_job_type": (
        {"enum": ["training", "foreign", None]},
        "Kind of use: a job of this data folder (training) or anything else (foreign); null: free.",
    ),
    "healthy": (bool, "Whether the GPU can be read and jobs can run on it."),
    "reason": (str, 'Why no job can take the GPU, as a phrase; "": it is free.'),
    "timestamp": (float, "Time of the reading, in s since the epoch."),
    "processes": (or_null(list_of(_PROCESS)), f"Processes that hold memory on the GPU; {_NO_SENSOR}."),
}
_CONDITIONS = _CONDITION["properties"]
GPU = fields("GPU", _CARD | {name: (one, one["description"]) for name, one in _CONDITIONS.items()})
_AT = (float, "Start of the step, in s since the epoch.")
_CARD_THEN = fields(
    "GPU in the past",
    {
        "timestamp": _AT,
        "samples": (int, "Number of samples in the mean."),
        "utilization": (float | None, f"Mean utilisation, in %; {_NO_SENSOR}."),
        "memory_used": (int | None, f"Memory in use, in bytes; {_NO_SENSOR}."),
        "memory_total": (int | None, f"Memory capacity, in bytes; {_NO_SENSOR}."),
        "temperature": (float | None, f"Mean temperature, in °C; {_NO_SENSOR}."),
        "power_draw": (float | None, f"Power draw, in W; {_NO_SENSOR}."),
        "job_id": (int | None, "Id of the job that held the GPU; null: no job of this data folder."),
    },
)
_COUNTED = {name: f"GPUs that report {name}." for name in ("memory", "utilization", "power", "temperature")}
_TOTAL: dict[str, tuple[object, str]] = {
    "gpu_count": (int, "Number of GPUs."),
    "total_memory_used": (int | None, f"Memory in use on all GPUs, in bytes; {_NO_SENSOR}."),
    "total_memory_total": (int | None, f"Memory capacity of all GPUs, in bytes; {_NO_SENSOR}."),
    "average_utilization": (float | None, f"Mean utilisation, in %; {_NO_SENSOR}."),
    "max_temperature": (float | None, f"Highest temperature, in °C; {_NO_SENSOR}."),
    "total_power_draw": (float | None, f"Power draw of all GPUs, in W; {_NO_SENSOR}."),
}
_TOTALS = fields(
    "All GPUs",
    _TOTAL
    | {
        "unhealthy_count": (int, "Number of GPUs that cannot be read or used."),
        "total_power_limit": (float | None, f"Sum of the power limits, in W; {_NO_SENSOR}."),
        "gpus_with": (typed("ContributingGpus", ContributingGpus, _COUNTED), "Number of GPUs that each figure covers."),
    },
)
_TOTALS_THEN = fields(
    "All GPUs in the past", _TOTAL | {"timestamp": _AT, "gpus_counted": (int, "GPUs that were read in this step.")}
)


def _with(schema: Schema, title: str, **more: tuple[object, str]) -> Schema:
    """Return the schema of an object with additional fields."""
    added = fields(title, more)
    return added | {
        "properties": schema["properties"] | added["properties"],
        "required": schema["required"] + added["required"],
    }


_PAST = {
    "aggregated": _with(
        _TOTALS,
        "All GPUs, with --since",
        every_s=(int | None, "Length of a step, in s; null: single samples, without means."),
        history=(list_of(_TOTALS_THEN), "Stored values, oldest first."),
    ),
    "per_gpu": _with(
        GPU, "GPU, with --since", history=(list_of(_CARD_THEN), "Stored values of this GPU, oldest first.")
    ),
}
_SELECTED = fields(
    "Free GPUs",
    {
        "gpus": (
            list_of(fields("GPU", {name: _CARD[name] for name in ("index", "uuid", "name", "memory_free")})),
            "Chosen GPUs, most free memory first.",
        ),
        "enough": (bool, "Whether enough GPUs are free; if not, the exit code is 1."),
        "reasons": (by_name(str), "Why each GPU was chosen or rejected, by index."),
    },
)
_RECOMMENDED = typed(
    "GPUs that suit a job",
    Recommendation,
    {
        "gpus": "Indices of the chosen GPUs, best first; empty: the exit code is 1.",
        "memory_required": "Memory that the job needs on each GPU, in bytes.",
        "reasons": "Why each GPU was chosen or rejected, by index.",
        "shortfall": 'Why there are too few GPUs; "": there are enough.',
    },
    {"reasons": by_name(str), "gpus": list_of(int)},
)
_RECOMMENDED = _with(
    _RECOMMENDED,
    "GPUs that suit a job",
    memory_measured=(
        int | None,
        "Measured peak memory of an earlier job of this shape, in bytes; null: none was measured.",
    ),
    mode=(str, "Parallel mode of this recommendation."),
)
ANSWERS: dict[str, Schema] = {
    "gpus": answer(
        "sae-tui gpus --json: all GPUs, or one with INDEX; with --watch one line per second", list_of(GPU), GPU
    ),
    "metrics": answer(
        "sae-tui metrics --json: the sum over all GPUs, or each GPU with --view per_gpu",
        _TOTALS,
        list_of(GPU),
        _PAST["aggregated"],
        list_of(_PAST["per_gpu"]),
    ),
    "select": answer("sae-tui select --json", _SELECTED),
    "recommend": answer("sae-tui recommend --json", _RECOMMENDED),
}
