"""The JSON answers about jobs: their state, their results, and what a command did to them."""

from __future__ import annotations

import msgspec

from sae_tui.compare.tables import all_results
from sae_tui.doctor.advice import JobReport
from sae_tui.doctor.base import Finding
from sae_tui.doctor.job import JobRow
from sae_tui.hosts.protocol import Message
from sae_tui.jobs.energy import Energy
from sae_tui.jobs.view.postmortem import Postmortem
from trainer.contract.answers.schema import DRAFT, Schema, by_name, fields, list_of, or_null, typed, word
from trainer.contract.answers.shared import HOW_FAR, IMPORT_CHECK, answer, card, metric_words, metrics
from trainer.contract.runs.features import ActivatingExample, Feature, LogitChange, Token
from trainer.contract.settings.series import measured_names
from trainer.contract.store.rows import Event, Rank
from trainer.contract.store.states import JobState

_ID = (int, "Id of the job.")
_STATE = (word(*JobState), "State of the job; finished, stopped, failed, lost and imported are ends.")
_MESSAGE = (str, "What was done, in a sentence.")
ENERGY = {
    "energy_wh": "Energy of its GPUs, in Wh; null: not measured.",
    "energy_share": "Share of its time that was measured (0 to 1); null: none.",
    "energy_from": "What it was measured by; null: not measured.",
    "cost": "Price of the energy; null: no price is set.",
    "currency": "Currency of the price; null: no price is set.",
    "co2_g": "CO₂ of the energy, in g; null: not known.",
}
_ENERGY = typed("Energy", Energy, ENERGY)["properties"]
_JOB: dict[str, tuple[object, str]] = {
    "id": _ID,
    "name": (str, "Its name."),
    "state": _STATE,
    "phase": (str, 'What its ranks are doing; "": nothing, or not known.'),
    "step": (int, "Steps made."),
    "total_steps": (int | None, "Steps that it is to make; null: not known yet."),
    "progress": (float, "Share of its steps that are made (0 to 1)."),
    "eta_s": (float | None, "Time left, in s; null: it makes no steps, or it is not known yet."),
    "tokens": (int, "Tokens trained on; of an extraction rows stored."),
    "loss": (float | None, "Newest loss; null: none yet."),
    **metrics(),
    "overfitting": (
        str | None,
        "How much better it fits its training rows than others, and when it was best; null: it does not overfit, or"
        " an older version trained it: then only `job` knows.",
    ),
    "tokens_per_s": (float | None, "Tokens per second; null: not known yet."),
    "device": (word("cuda", "cpu"), "What it runs on."),
    "gpu_ids": (list_of(int), "Indices of its GPUs; none on the CPU, or before it has them."),
    "gpu_uuids": (list_of(str), "UUIDs of these."),
    "distributed": (bool, "Whether it has several processes."),
    "world_size": (int, "Its GPUs or CPU processes."),
    "mode": (str | None, "Parallel mode; null: not settled."),
    "host": (str, "Machine it was launched on."),
    "user": (str | None, "Who launched it; null: not known."),
    "attempt": (int, "Starts of its ranks; 0: none yet."),
    "waits_for": (str | None, "What keeps it in line, in words; null: nothing."),
    "priority": (int, "-100 to 100; higher goes first."),
    "held": (bool, "Whether it is kept from starting, or is paused."),
    "after": (list_of(int), "Ids of the jobs that have to finish before it starts."),
    "tags": (list_of(str), "Its tags."),
    "note": (str, 'Its note; "": none.'),
    "created": (float, "When it was launched, in s since the epoch."),
    "started": (float | None, "When its ranks were started first, in s since the epoch; null: not yet."),
    "ended": (float | None, "When it ended, in s since the epoch; null: not yet."),
    "error": (str | None, "Why it failed, in a sentence; null: it did not."),
    "output_path": (str | None, "Where its SAE or activations are; null: nowhere yet."),
    "estimated_memory_bytes": (int | None, "What a rank was to need, in bytes; null: not known."),
    "peak_memory_bytes": (int | None, "What the fullest rank took, in bytes; null: not measured."),
    "dropped": (int | None, "Rows of metrics that could not be stored; null: not known."),
    "silent": (
        str | None,
        "For how long its host has given no sign of life, in words; its state is then not known; null: it has.",
    ),
    "evaluation": (
        or_null(
            fields(
                "Evaluation",
                {
                    "parts": (list_of(str), "What it measures: rows, model, probes."),
                    "stage": (str, 'What it does now, in words; "": it starts.'),
                    "progress": (float | None, "Share that is done (0 to 1); null: not known yet."),
                    "eta_s": (float | None, "Time left, in s; null: not known yet."),
                    "device": (word("cuda", "cpu"), "What it runs on."),
                    "gpu_ids": (list_of(int), "Index of its GPU; none on the CPU, or before it has one."),
                    "waits_for": (str | None, "What it waits for, in words; null: nothing."),
                    "started": (float, "When it was asked for, in s since the epoch."),
                },
            )
        ),
        "The running evaluation of its SAEs; null: none.",
    ),
    "best_sae": (str | None, "Of a sweep: which SAE loss and metrics are of; null: no sweep."),
    **{name: (one, one["description"]) for name, one in _ENERGY.items()},
}
JOB = fields("Job", _JOB)
_EVENT = typed(
    "Event",
    Event,
    {
        "timestamp": "When, in s since the epoch.",
        "level": "info, warning or error.",
        "kind": "Kind, in a word.",
        "message": "What happened.",
    },
)
_RANK = typed(
    "Rank",
    Rank,
    {
        "job_id": "Id of the job.",
        "attempt": "Which start of its ranks.",
        "rank": "Number of the rank.",
        "pid": "Process id.",
        "start_ticks": "When the process was started, as the kernel counts it.",
        "boot_id": "Of which boot of the machine.",
        "exit_code": "Exit code; null: it runs, or a signal ended it.",
        "exit_signal": "Signal that ended it; null: none.",
        "ended": "When it ended, in s since the epoch; null: it runs.",
        "error": "Why it failed; null: it did not.",
    },
)
_CAUSE = typed(
    "Cause of a failure",
    Postmortem,
    {
        "error": "What went wrong.",
        "remedy": 'What is known to help; "": nothing.',
        "rank": "Which rank failed first; null: not known.",
        "traceback": "Lines of its exception.",
        "log": "Last lines of its log.",
        "others": "How the others ended.",
        "stacks": 'Where all were when a rank hung; "": none did.',
        "resumes": 'What a resume does; "": it does not help.',
    },
    {name: list_of(str) for name in ("traceback", "log", "others")},
)
_OF_CARD = (
    "architecture", "step", "tokens", "data", "figures", "recovery", "spliced", "probing", "training", "weights",
    "parts",
)  # fmt: skip
_WHOLE_JOB = fields(
    "Job with all that happened to it",
    _JOB
    | {
        **HOW_FAR,
        "events": (list_of(_EVENT), "What happened, oldest first."),
        "ranks": (list_of(_RANK), "Its processes."),
        "cause": (or_null(_CAUSE), "Why it failed; null: it did not."),
        "card": (
            list_of(card("Report card", *_OF_CARD, sae=(str, 'Which SAE of a sweep; "" for a run of one.'))),
            "The report card of each SAE; none before it is evaluated.",
        ),
    },
)
_VERSION: dict[str, tuple[object, str]] = {
    "number": (int, "Counts from 1."),
    "sae": (str, 'Which SAE of a sweep; "" for a run of one.'),
    "is_current": (bool, "Whether it is the card of now."),
    "measured": (float | None, "When its newest part was measured, in s since the epoch; null: not known."),
    "step": (int, "Step of the SAE; 0: not known."),
    "tokens": (int, "Tokens it was trained on."),
    "weights": (str, 'Identity of the weights; "": not known.'),
    "fvu": (float, "Fraction of variance unexplained."),
    "ce_score": (float | None, "Share of what zeros lose that reconstructions keep; null: not measured."),
    "parts": (by_name(float), "When each part was measured, in s since the epoch."),
    "has_features": (bool, "Whether it is stored what its latents fired on."),
}
_CARDS = list_of(fields("Version of a report card", _VERSION))
_ONE_CARD = list_of(fields("One version in full", _VERSION | {"card": (card("Report card"), "The card.")}))
_TOLD = fields("What was done", {"id": _ID, "message": _MESSAGE})
_RESUMED = fields(
    "Resumed",
    {"id": _ID, "step": (int, "From which step."), "notes": (list_of(str), "What is other than it was.")},
)
_LAUNCHED = fields(
    "Launched job",
    {
        "id": _ID,
        "gpus": (list_of(int), "Indices of its GPUs; none where it takes any, or the CPU."),
        "device": (word("cuda", "cpu"), "What it runs on."),
        "logout": (str, "Whether it survives your logout, in a sentence."),
    },
)
_ENDED = {"title": "With --wait: the job once it has ended"} | {k: v for k, v in JOB.items() if k != "title"}
_LAUNCH = (_LAUNCHED, list_of(_LAUNCHED), _ENDED, list_of(_ENDED))
_VALIDATED = fields(
    "Whether a job can run",
    {
        "valid": (bool, "Whether it can run here; if not, the exit code is 1."),
        "errors": (list_of(str), "What keeps it from running, each `setting: sentence`."),
        "warnings": (list_of(str), "What to be warned of, likewise."),
        "mode": (str | None, "Parallel mode; null: it cannot run."),
        "memory_required": (int | None, "What it needs on each GPU, in bytes; null: not known."),
        "memory_measured": (int | None, "Peak of a job of this shape, in bytes; null: there was none."),
        "disk_bytes": (int, "Of an extraction: bytes that it will write."),
        "disk_free_bytes": (int | None, "Of an extraction: bytes that are free there; null: not known."),
        "seconds": (float | None, "Of an extraction: how long it will take, in s; null: not known."),
    },
    may_lack=["disk_bytes", "disk_free_bytes", "seconds"],
)
_FINDING = typed(
    "Finding",
    Finding,
    {
        "level": "How bad it is.",
        "subject": "What was looked at.",
        "sentence": "What was found.",
        "remedy": 'What to do; "": nothing.',
    },
)
_WAY = typed(
    "One way to run the job",
    JobRow,
    {
        "n_gpus": "GPUs; 0: CPU processes.",
        "ranks": "Processes.",
        "mode": "Parallel mode.",
        "latent_ranks": "Ranks that share the latents.",
        "chosen": "Whether the job's settings come to this mode.",
        "memory_bytes": "What each needs, in bytes.",
        "seconds": "How long it takes, in s.",
        "tokens_per_s": "Tokens per second.",
        "speed_up": "Against one device.",
        "efficiency": "Speed-up per device (0 to 1).",
        "is_measured": "Whether by speeds that were measured here.",
        "cost": "By the price that was given; null: none was.",
        "reason": "Why this mode.",
        "gpus": "Indices of the GPUs with most room; none: there are too few.",
        "room_bytes": "Memory of the smallest of them, in bytes; null: not known.",
        "fits": "Whether it fits; null: there are too few.",
        "fits_now": "Whether it fits and nobody uses them; null: there are too few.",
    },
    {"gpus": list_of(int)},
)
_REPORT = typed(
    "Report on a job",
    JobReport,
    {
        "name": "Name of the job.",
        "rows": "All ways to run it.",
        "findings": "What follows from them.",
        "price_per_gpu_hour": "Price that was given; null: none was.",
    },
    {"rows": list_of(_WAY), "findings": list_of(_FINDING)},
)
_APP = fields(
    "Environment of the app",
    {
        "python": (str, "Path of its Python."),
        "version": (str, "Version of that."),
        "sae_tui": (str, "Version of sae-tui in it."),
    },
)
_TRAINER = fields(
    "Environment of the trainer, where it is another one",
    {
        "python": (str, "Path of its Python."),
        "version": (str | None, "Version of that; null: it has not answered."),
        "sae_tui": (str | None, "Version of sae-tui in it; null: there is none."),
        "torch": (str | None, "Version of PyTorch in it; null: there is none."),
        "gpus": (int | None, "GPUs that this PyTorch sees; null: there is none."),
        "problem": (str | None, "What keeps it from training, and what to do; null: nothing does."),
    },
)
_ENVIRONMENTS = fields(
    "Environments",
    {
        "app": (_APP, "That of the app."),
        "trainer": (or_null(_TRAINER), "That of the trainer; null: it is that of the app."),
    },
)
_DOCTOR = fields(
    "What would be in the way of a training",
    {
        "ok": (bool, "Whether there is no error; if there is, the exit code is 1."),
        "findings": (list_of(_FINDING), "What was found."),
        "job": (or_null(_REPORT), "With JOB.toml: its ways to run; null: none was given."),
        "environments": (_ENVIRONMENTS, "Where the app runs and where trainings do."),
    },
)
_MORE_OF_RUNS = {
    "card_rows": (int | None, "Rows that the report card is of; null: not evaluated."),
    "tokens": (int | None, "Tokens trained on; null: not known."),
    "duration_s": (float | None, "Time that it ran, in s; null: it has not started."),
    "peak_memory_bytes": (int | None, "What the fullest rank took, in bytes; null: not measured."),
    "energy_wh": (float | None, ENERGY["energy_wh"]),
}


def _result(name: str, title: str) -> tuple[object, str]:
    words = metric_words(name) if name in measured_names() else f"{title}; null: not known."
    return _MORE_OF_RUNS.get(name, (float | None, words))


_RUN = fields(
    "SAE of a run",
    {"id": _ID, "name": (str, "Name of the job."), "state": _STATE}
    | {"sae": (str, 'Which SAE of a sweep; "" for a run of one.')}
    | {one.name: _result(one.name, one.title) for one in all_results()}
    | {name: (_ENERGY[name], ENERGY[name]) for name in ("energy_share", "cost", "currency", "co2_g")},
)
_COMPARED = fields(
    "Runs beside each other",
    {
        "runs": (list_of(_RUN), "One of each SAE."),
        "differences": (by_name({"type": "array"}), "Settings that differ, by name, with a value for each of `runs`."),
        "same": (by_name(list_of(str)), "By result: the SAEs that are not told apart from the best."),
        "same_because": (by_name(str), "By result: why they are not, and what lead would count."),
    },
)
_WRITTEN = fields(
    "With --svg or --csv: the files",
    {"svg": (str, "Picture, an absolute path."), "csv": (str, "Table, an absolute path.")},
    may_lack=["svg", "csv"],
)
_MOVED = typed("Token", LogitChange, {"text": "The token.", "logit": "How far its logit is moved."})
_CONTEXT = typed(
    "ActivatingExample",
    ActivatingExample,
    {"tokens": "Tokens.", "at": "Place of the one on which it fires most."},
    {"tokens": list_of(typed("Token", Token, {"text": "The token.", "act": "How strongly it fires; 0: not."}))},
)
_FEATURE = typed(
    "Latent",
    Feature,
    {
        "latent": "Its number.",
        "density": "Share of rows on which it fires (0 to 1).",
        "largest": "Largest activation.",
        "mean": "Mean activation where it fires.",
        "histogram": "Activations in bins of equal width up to the largest.",
        "nearest": "Latents with the cosines of their decoder directions, the nearest first.",
        "contexts": "Where it fires most.",
        "promoted": "Tokens that it promotes most; none: the language model was not at hand.",
        "suppressed": "Tokens that it suppresses most.",
    },
    {
        "histogram": list_of(int),
        "nearest": list_of({"type": "array", "prefixItems": [{"type": "integer"}, {"type": "number"}], "items": False}),
        "contexts": list_of(_CONTEXT),
        "promoted": list_of(_MOVED),
        "suppressed": list_of(_MOVED),
    },
)
_LOGS = fields(
    "Log",
    {"id": _ID, "rank": (int, "Whose log."), "lines": (list_of(str), "Its last lines.")},
)
_STOPPED = fields("Stopped", {"id": _ID, "state": (or_null(_STATE[0]), "State; null: not known."), "message": _MESSAGE})
_EDITS = ("pause", "hold", "release", "priority", "after", "rename", "tag", "note", "eval")
_IMPORTED = fields(
    "Job of an imported SAE",
    {
        "id": _ID,
        "format": (str, "Format that it was read as."),
        "architecture": (str, "Architecture of the SAE."),
        "notes": (list_of(str), "What to know about it."),
        **IMPORT_CHECK,
    },
)
_EXPORTED = fields(
    "Exported SAE",
    {
        "checkpoint": (str, "Which checkpoint, an absolute path."),
        "step": (int, "Its step."),
        "output_path": (str, "Folder that was written, an absolute path."),
        "saes": (by_name(str), "Of a sweep: the folder of each SAE by its label."),
        "left_out": (by_name(str), "Of a sweep: why the format cannot hold an SAE, by its label."),
        "notes": (list_of(str), "What the format does not hold; left out where that is nothing."),
    },
    may_lack=["saes", "left_out", "notes"],
)
_REMOVED = fields("Deleted jobs", {"ids": (list_of(int), "Their ids."), "bytes": (int, "What was freed, in bytes.")})
_REPAIRED = fields("Repaired", {"done": (list_of(str), "What was done, in sentences; none: nothing was amiss.")})
ANSWERS: dict[str, Schema] = {
    "jobs": answer("sae-tui jobs --json; with --watch a line at every change", list_of(JOB)),
    "job": answer("sae-tui job --json; with --cards all versions of its report card", _WHOLE_JOB, _CARDS, _ONE_CARD),
    "logs": answer("sae-tui logs --json", _LOGS),
    "stop": answer("sae-tui stop --json", _STOPPED),
    "validate": answer("sae-tui validate --json", _VALIDATED),
    "launch": answer("sae-tui launch --json: a job, or a list of several", *_LAUNCH),
    "clone": answer("sae-tui clone --json", *_LAUNCH),
    "resume": answer("sae-tui resume --json", _RESUMED, _TOLD, _ENDED),
    "import": answer("sae-tui import --json", _IMPORTED),
    "export": answer("sae-tui export --json", _EXPORTED),
    "doctor": answer("sae-tui doctor --json", _DOCTOR),
    "compare": answer("sae-tui compare --json", _COMPARED, _WRITTEN),
    "features": answer("sae-tui features --json: latents, or the one that is named", list_of(_FEATURE), _FEATURE),
    "rm": answer("sae-tui rm --json", _REMOVED),
    "repair": answer("sae-tui repair --json", _REPAIRED),
    "stream": {"$schema": DRAFT, "title": "sae-tui stream, in each line"} | msgspec.json.schema(Message),
    **{name: answer(f"sae-tui {name} --json", _TOLD) for name in _EDITS},
}
