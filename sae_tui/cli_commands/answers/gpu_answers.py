"""The JSON output about GPUs: `gpus`, `metrics`, `select`, `recommend`."""

from __future__ import annotations

from typing import get_type_hints

from sae_tui.gpu.aggregate import Aggregate, ContributingGpus
from sae_tui.gpu.base import PUBLIC, Condition, GpuProcess, GpuSample, GpuSummary, Xid
from sae_tui.gpu.sensors import exported
from sae_tui.jobs.launch.placement import Recommendation
from trainer.contract.answers.schema import Schema, by_name, fields, list_of, or_null, typed
from trainer.contract.answers.shared import answer

_NO_SENSOR = "null: not supported"
_XID = typed(
    "Driver error",
    Xid,
    {
        "number": "Error number.",
        "timestamp": "Time of the error, in s since the epoch.",
        "words": "What it means.",
        "is_fatal": "Whether jobs cannot start on the GPU before a reset.",
    },
)
# Maps the field name of each sensor that needs a schema other than the one from msgspec to its schema.
_KINDS = {"slowed_by": or_null(list_of(str)), "xid": or_null(_XID)}


def _sensors(kind: type) -> dict[str, tuple[object, str]]:
    """Return a dict that maps the public name of each exported sensor of the class to its type and description."""
    hints = get_type_hints(kind)
    return {one.public: (_KINDS.get(name, hints[name]), one.meaning) for name, one in exported(kind).items()}


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
    **_sensors(GpuSample),
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
    **_sensors(Condition),
}
GPU = fields("GPU", _CARD)
_AT = (float, "Start of the step, in s since the epoch.")
_CARD_THEN = fields(
    "GPU in the past",
    {
        "timestamp": _AT,
        "samples": (int, "Number of samples in the mean."),
        PUBLIC["utilization"]: (float | None, f"Mean utilisation, in %; {_NO_SENSOR}."),
        PUBLIC["memory_used_bytes"]: (int | None, f"Memory in use, in bytes; {_NO_SENSOR}."),
        PUBLIC["memory_total_bytes"]: (int | None, f"Memory capacity, in bytes; {_NO_SENSOR}."),
        PUBLIC["temperature_c"]: (float | None, f"Mean temperature, in °C; {_NO_SENSOR}."),
        PUBLIC["power_w"]: (float | None, f"Power draw, in W; {_NO_SENSOR}."),
        "job_id": (int | None, "Id of the job that held the GPU; null: no job of this data folder."),
    },
)
_COUNTED = {name: f"GPUs that report {name}." for name in ("memory", "utilization", "power", "temperature")}
_TOTAL: dict[str, tuple[object, str]] = {
    "gpu_count": (int, "Number of GPUs."),
    **_sensors(GpuSummary),
}
_TOTALS = fields(
    "All GPUs",
    _TOTAL
    | {
        "unhealthy_count": (int, "Number of GPUs that cannot be read or used."),
        **{name: one for name, one in _sensors(Aggregate).items() if name not in _TOTAL},
        "gpus_with": (typed("ContributingGpus", ContributingGpus, _COUNTED), "Number of GPUs that each figure covers."),
    },
)
_TOTALS_THEN = fields(
    "All GPUs in the past", _TOTAL | {"timestamp": _AT, "gpus_counted": (int, "GPUs that were read in this step.")}
)


def _with(schema: Schema, title: str, **more: tuple[object, str]) -> Schema:
    """Return an object's schema extended by the given fields."""
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
            list_of(
                fields("GPU", {name: _CARD[name] for name in ("index", "uuid", "name", PUBLIC["memory_free_bytes"])})
            ),
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
