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
        "sm_clock_mhz": f"Clock of its cores, in MHz; {_NO_SENSOR}.",
        "performance_state": f"0 at full speed to 15; {_NO_SENSOR}.",
        "fan_percent": f"Speed of its fan, in %; {_NO_SENSOR}.",
        "slowed_by": f"What keeps it from running faster, in words; {_NO_SENSOR}.",
        "slowdown_c": f"From how many °C on it slows itself down; {_NO_SENSOR}.",
        "xid": "The last error that its driver has reported; null: none.",
        "compute_mode": f"shared, one process, or no computing; {_NO_SENSOR}.",
        "ecc_uncorrected": f"Uncorrected errors of its memory since its last reset; {_NO_SENSOR}.",
        "rows_pending": f"Whether rows of its memory wait for a reset to be replaced; {_NO_SENSOR}.",
        "rows_failed": f"Whether a row of its memory could not be replaced; {_NO_SENSOR}.",
        "recovery": f'What its driver asks for before it is used again; "": nothing; {_NO_SENSOR}.',
    },
    {
        "slowed_by": or_null(list_of(str)),
        "xid": or_null(
            typed(
                "Error of a driver",
                Xid,
                {
                    "number": "Its number.",
                    "timestamp": "When, in s since the epoch.",
                    "words": "What it means.",
                    "is_fatal": "Whether no job is started on the GPU until it is reset.",
                },
            )
        ),
    },
)
_PROCESS = typed(
    "Process on a GPU",
    GpuProcess,
    {
        "pid": "Its process id.",
        "user": "Whose it is; null: not known.",
        "name": "Its name; null: not known.",
        "memory_used_bytes": "Memory that it holds, in bytes; null: not known.",
    },
)
_CARD: dict[str, tuple[object, str]] = {
    "index": (int, "As the driver and nvidia-smi number it."),
    "uuid": (str, "What a job is pinned to; as CUDA_VISIBLE_DEVICES takes it."),
    "name": (str, "Its model."),
    "memory_total": (int | None, f"In bytes; {_NO_SENSOR}."),
    "memory_used": (int | None, f"In bytes; {_NO_SENSOR}."),
    "memory_free": (int | None, f"In bytes; {_NO_SENSOR}."),
    "utilization": (int | None, f"Share of the time in which a kernel ran, in %; {_NO_SENSOR}."),
    "temperature": (int | None, f"In °C; {_NO_SENSOR}."),
    "power_draw": (float | None, f"In W; {_NO_SENSOR}."),
    "power_limit": (float | None, f"In W; {_NO_SENSOR}."),
    "is_busy": (bool, "Whether somebody uses it."),
    "current_job": (int | None, "Id of the job that has it; null: none of ours."),
    "current_job_type": ({"enum": ["training", "foreign", None]}, "Who uses it; null: nobody."),
    "healthy": (bool, "Whether it can be read and jobs can run on it."),
    "reason": (str, 'Why it cannot be taken, in words; "": it can.'),
    "timestamp": (float, "When it was read, in s since the epoch."),
    "processes": (or_null(list_of(_PROCESS)), f"Who holds memory on it; {_NO_SENSOR}."),
}
_CONDITIONS = _CONDITION["properties"]
GPU = fields("GPU", _CARD | {name: (one, one["description"]) for name, one in _CONDITIONS.items()})
_AT = (float, "Begin of the step, in s since the epoch.")
_CARD_THEN = fields(
    "GPU in the past",
    {
        "timestamp": _AT,
        "samples": (int, "Samples that it is the mean of."),
        "utilization": (float | None, f"In %; {_NO_SENSOR}."),
        "memory_used": (int | None, f"In bytes; {_NO_SENSOR}."),
        "memory_total": (int | None, f"In bytes; {_NO_SENSOR}."),
        "temperature": (float | None, f"In °C; {_NO_SENSOR}."),
        "power_draw": (float | None, f"In W; {_NO_SENSOR}."),
        "job_id": (int | None, "Id of the job that had it; null: none of ours."),
    },
)
_COUNTED = {name: f"Cards that the {name} is of." for name in ("memory", "utilization", "power", "temperature")}
_TOTAL: dict[str, tuple[object, str]] = {
    "gpu_count": (int, "GPUs there are."),
    "total_memory_used": (int | None, f"In bytes; {_NO_SENSOR}."),
    "total_memory_total": (int | None, f"In bytes; {_NO_SENSOR}."),
    "average_utilization": (float | None, f"In %; {_NO_SENSOR}."),
    "max_temperature": (float | None, f"In °C; {_NO_SENSOR}."),
    "total_power_draw": (float | None, f"In W; {_NO_SENSOR}."),
}
_TOTALS = fields(
    "All GPUs",
    _TOTAL
    | {
        "unhealthy_count": (int, "Those that cannot be read or used."),
        "total_power_limit": (float | None, f"In W; {_NO_SENSOR}."),
        "gpus_with": (typed("ContributingGpus", ContributingGpus, _COUNTED), "How many cards each figure is of."),
    },
)
_TOTALS_THEN = fields(
    "All GPUs in the past", _TOTAL | {"timestamp": _AT, "gpus_counted": (int, "GPUs that were read then.")}
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
        every_s=(int | None, "Length of a step, in s; null: the samples as they are."),
        history=(list_of(_TOTALS_THEN), "What was stored, oldest first."),
    ),
    "per_gpu": _with(GPU, "GPU, with --since", history=(list_of(_CARD_THEN), "What was stored of it, oldest first.")),
}
_SELECTED = fields(
    "Free GPUs",
    {
        "gpus": (
            list_of(fields("GPU", {name: _CARD[name] for name in ("index", "uuid", "name", "memory_free")})),
            "Those to take, most free memory first.",
        ),
        "enough": (bool, "Whether they are as many as were asked for; if not, the exit code is 1."),
        "reasons": (by_name(str), "Why or why not, by index."),
    },
)
_RECOMMENDED = typed(
    "GPUs that suit a job",
    Recommendation,
    {
        "gpus": "Indices of those to take, best first; none: the exit code is 1.",
        "memory_required": "What the job needs on each, in bytes.",
        "reasons": "Why or why not, by index.",
        "shortfall": 'Why there are fewer than asked for; "": there are enough.',
    },
    {"reasons": by_name(str), "gpus": list_of(int)},
)
_RECOMMENDED = _with(
    _RECOMMENDED,
    "GPUs that suit a job",
    memory_measured=(int | None, "Peak of a job of this shape that was measured, in bytes; null: there was none."),
    mode=(str, "Parallel mode that it is for."),
)
ANSWERS: dict[str, Schema] = {
    "gpus": answer("sae-tui gpus --json: all GPUs, with INDEX one; with --watch a line a second", list_of(GPU), GPU),
    "metrics": answer(
        "sae-tui metrics --json: all GPUs as one, or with --view per_gpu each",
        _TOTALS,
        list_of(GPU),
        _PAST["aggregated"],
        list_of(_PAST["per_gpu"]),
    ),
    "select": answer("sae-tui select --json", _SELECTED),
    "recommend": answer("sae-tui recommend --json", _RECOMMENDED),
}
