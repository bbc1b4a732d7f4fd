"""The JSON output about jobs: their states, their results, and how commands affect them."""

from __future__ import annotations

from typing import get_args

import msgspec

from sae_tui.cli_commands.arena import FIGURES
from sae_tui.compare.cards import Verdict
from sae_tui.compare.tables import all_results
from sae_tui.doctor.advice import JobReport
from sae_tui.doctor.base import Finding
from sae_tui.hosts.protocol import Message
from sae_tui.jobs.energy import Energy
from sae_tui.jobs.launch.ways import Way
from sae_tui.jobs.view.past_runs import SIZES
from sae_tui.jobs.view.postmortem import Postmortem
from sae_tui.jobs.view.quality import FvuEstimate
from sae_tui.jobs.watched import WatchedRow
from trainer.contract.answers.interaction import FiringLatent, Generated, MovedToken, TextRead, TextToken, TokenKl
from trainer.contract.answers.schema import DRAFT, Schema, by_name, fields, list_of, or_null, typed, word
from trainer.contract.answers.shared import HOW_FAR, IMPORT_CHECK, SEEDS, answer, card, metric_words, metrics
from trainer.contract.runs.explanations import Explanation
from trainer.contract.runs.features import ActivatingExample, Feature, LatentPart, LogitChange, Token
from trainer.contract.runs.latent_notes import LatentNote
from trainer.contract.settings.series import measured_names
from trainer.contract.store.rows import Event, Rank
from trainer.contract.store.states import JobState

_ID = (int, "Id of the job.")
_STATE = (word(*JobState), "State of the job; finished, stopped, failed, lost and imported are final.")
_MESSAGE = (str, "What was done, in a sentence.")
ENERGY = {
    "energy_wh": "Energy of its GPUs, in Wh; null if not measured.",
    "energy_share": "Share of the run time with an energy measurement (0 to 1); null if none.",
    "energy_from": "Source of the measurement; null if not measured.",
    "cost": "Cost of the energy; null if no price is set.",
    "currency": "Currency of the price; null if no price is set.",
    "co2_g": "CO₂ of the energy, in g; null if unknown.",
}
_ENERGY = typed("Energy", Energy, ENERGY)["properties"]
_JOB: dict[str, tuple[object, str]] = {
    "id": _ID,
    "name": (str, "Name of the job."),
    "state": _STATE,
    "phase": (str, 'Current activity of the ranks; "" if none or unknown.'),
    "step": (int, "Steps done."),
    "total_steps": (int | None, "Planned steps; null if not known yet."),
    "progress": (float, "Share of the planned steps that are done (0 to 1)."),
    "eta_s": (float | None, "Time left, in s; null if the job runs no steps or the time is not known yet."),
    "tokens": (int, "Tokens trained on; for an extraction, rows stored; for a command, steps."),
    "loss": (float | None, "Latest loss; null until the first loss is reported."),
    **metrics(),
    "overfitting": (
        str | None,
        "How much better it fits training rows than held-out rows, and at which step it was best; null if it does not"
        " overfit. For jobs from older versions, only `sae-tui job` reports it.",
    ),
    "tokens_per_s": (float | None, "Tokens per second; for a command, steps per second; null if not known yet."),
    "device": (word("cuda", "cpu"), "Devices that it runs on."),
    "gpu_ids": (list_of(int), "Indices of its GPUs; empty on the CPU, or before GPUs are assigned."),
    "gpu_uuids": (list_of(str), "UUIDs of its GPUs."),
    "distributed": (bool, "Whether it runs as several processes."),
    "world_size": (int, "Number of GPUs or CPU processes."),
    "mode": (str | None, "Parallel mode; null if not chosen yet."),
    "host": (str, "Machine that it was launched on."),
    "user": (str | None, "User who launched it; null if unknown."),
    "attempt": (int, "Number of times its ranks have been started; 0 if not started yet."),
    "waits_for": (str | None, "Why it is still queued, as a phrase; null if nothing holds it back."),
    "priority": (int, "Priority from -100 to 100; jobs with a higher priority start first."),
    "held": (bool, "Whether it is held or paused."),
    "after": (list_of(int), "Ids of the jobs that must finish before it starts."),
    "array": (int | None, "Id of the first job of its array; null if it is not part of an array."),
    "array_limit": (int | None, "How many jobs of its array may run at once; null if not limited."),
    "tags": (list_of(str), "Its tags."),
    "note": (str, 'Its note; "" if none.'),
    "created": (float, "Launch time, in s since the epoch."),
    "started": (float | None, "First start of its ranks, in s since the epoch; null if not started yet."),
    "ended": (float | None, "End time, in s since the epoch; null if it has not ended."),
    "error": (str | None, "Why it failed, in a sentence; null if it did not fail."),
    "output_path": (str | None, "Folder of its SAE or activations; null if not written yet."),
    "estimated_memory_bytes": (int | None, "Estimated memory per rank, in bytes; null if unknown."),
    "peak_memory_bytes": (int | None, "Peak memory of the rank that used most, in bytes; null if not measured."),
    "dropped": (int | None, "Number of metric rows lost because they could not be stored; null if unknown."),
    "silent": (
        str | None,
        "How long its host has sent no heartbeat, as a phrase (its state is then unknown); null if heartbeats arrive.",
    ),
    "evaluation": (
        or_null(
            fields(
                "Evaluation",
                {
                    "parts": (list_of(str), "What the evaluation measures: rows, model, probes."),
                    "stage": (str, 'Current activity, as a phrase; "" while it is starting.'),
                    "progress": (float | None, "Progress (0 to 1); null if not known yet."),
                    "eta_s": (float | None, "Time left, in s; null if not known yet."),
                    "device": (word("cuda", "cpu"), "Devices that it runs on."),
                    "gpu_ids": (list_of(int), "Index of its GPU; empty on the CPU, or before a GPU is assigned."),
                    "waits_for": (str | None, "Why it is waiting, as a phrase; null if it is not waiting."),
                    "started": (float, "Time of the request, in s since the epoch."),
                },
            )
        ),
        "The running evaluation of its SAEs; null if none.",
    ),
    "metrics": (by_name(float), "Latest value of each metric that it reports, by name."),
    "best_sae": (
        str | None,
        "In a sweep, the SAE that the loss and metrics belong to; otherwise null. If several SAEs differ only in the"
        " seed, the values are their means, and this is the first of them, or null if the sweep has no other SAEs.",
    ),
    "seeds": (
        or_null(SEEDS),
        "In a sweep over seeds, the SAEs over which the loss and metrics are averaged; otherwise null.",
    ),
    **{name: (one, one["description"]) for name, one in _ENERGY.items()},
}
JOB = fields("Job", _JOB)
_EVENT = typed(
    "Event",
    Event,
    {
        "timestamp": "Time of the event, in s since the epoch.",
        "level": "Level: info, warning or error.",
        "kind": "Kind of event, in one word.",
        "message": "What happened.",
    },
)
_RANK = typed(
    "Rank",
    Rank,
    {
        "job_id": "Id of the job.",
        "attempt": "Number of the attempt; each start of the ranks is an attempt.",
        "rank": "Number of the rank.",
        "pid": "Process id.",
        "start_ticks": "Start time of the process, in the kernel's clock ticks.",
        "boot_id": "Boot id of the machine.",
        "exit_code": "Exit code; null if the process is running or was killed by a signal.",
        "exit_signal": "Signal that killed it; null if none.",
        "ended": "End time, in s since the epoch; null if the process is running.",
        "error": "Why it failed; null if it did not fail.",
    },
)
_CAUSE = typed(
    "Cause of a failure",
    Postmortem,
    {
        "error": "What went wrong.",
        "remedy": 'Known remedy; "" if none.',
        "rank": "Rank that failed first; null if unknown.",
        "traceback": "Lines of the exception.",
        "log": "Last lines of the rank's log.",
        "others": "How the other ranks ended.",
        "stacks": 'Where each rank was when one hung; "" if no rank hung.',
        "resumes": 'What resuming would do; "" if resuming would not help.',
    },
    {name: list_of(str) for name in ("traceback", "log", "others")},
)
_ESTIMATE = typed(
    "Expected held-out FVU",
    FvuEstimate,
    {
        "heldout_fvu": "Expected value; in a sweep over seeds, the mean over the seeds.",
        "low": "Lower end of the 80 % band.",
        "high": "Upper end of the 80 % band.",
        "past_runs": "Number of runs that this is based on.",
    },
)
_OF_CARD = (
    "architecture", "step", "tokens", "data", "figures", "recovery", "known", "twins", "spliced", "effects", "probing",
    "training", "weights", "parts", "explained",
)  # fmt: skip
_MIRRORED = fields(
    "Mirror of a job's checkpoints",
    {
        "url": (str, "Where the checkpoints are uploaded to."),
        "run": (str, "Id of the run, the same on all machines."),
        "step": (int | None, "Step of the newest mirrored checkpoint; null before the first."),
        "time": (float | None, "Time of the last upload, in s since the epoch; null before the first."),
        "has_sae": (bool, "Whether the finished SAE is mirrored."),
        "problem": (str, 'Why the latest upload failed; "" if it did not.'),
    },
)
_WHOLE_JOB = fields(
    "Job with its events",
    _JOB
    | {
        **HOW_FAR,
        "mirrored": (
            or_null(_MIRRORED),
            "Mirror of its checkpoints (train.mirror_checkpoints); null if it has none.",
        ),
        "forecast": (
            or_null(_ESTIMATE),
            "Held-out FVU expected at the end of the run, from past runs in the data folder; null if these are too few"
            " or too different, before the first evaluation, after an error or a request to stop, and after the end.",
        ),
        "twice": (
            fields(
                "With larger settings",
                {
                    name: (or_null(_ESTIMATE), f"Held-out FVU expected with twice {words}; null if unknown.")
                    for name, words in SIZES.items()
                },
            ),
            "Held-out FVU expected with one setting doubled, by a power law fitted to finished runs on the same data.",
        ),
        "events": (list_of(_EVENT), "Events, oldest first."),
        "ranks": (list_of(_RANK), "Its processes."),
        "cause": (or_null(_CAUSE), "Why it failed; null if it did not fail."),
        "card": (
            list_of(
                card("Report card", *_OF_CARD, sae=(str, 'Label of the SAE in a sweep; "" for a run with one SAE.'))
            ),
            "Report card of each SAE; empty before the first evaluation.",
        ),
    },
)
_VERSION: dict[str, tuple[object, str]] = {
    "number": (int, "Number of the version, from 1."),
    "sae": (str, 'Label of the SAE in a sweep; "" for a run with one SAE.'),
    "is_current": (bool, "Whether this is the current report card."),
    "measured": (float | None, "Time of its latest measurement, in s since the epoch; null if unknown."),
    "step": (int, "Training step of the SAE; 0 if unknown."),
    "tokens": (int, "Tokens that the SAE was trained on."),
    "weights": (str, 'Fingerprint of the weights; "" if unknown.'),
    "fvu": (float, "Fraction of variance unexplained."),
    "ce_score": (
        float | None,
        "Share of the loss from zero ablation that reconstructions recover; null if not measured.",
    ),
    "parts": (by_name(float), "Time of each measurement, in s since the epoch."),
    "has_features": (bool, "Whether the max-activating examples of its latents are stored."),
}
_CARDS = list_of(fields("Version of a report card", _VERSION))
_ONE_CARD = list_of(fields("One version in full", _VERSION | {"card": (card("Report card"), "The report card.")}))
_COMPARED_FIGURE = fields(
    "Figure on two report cards",
    {
        "name": (str, "Name of the figure, such as fvu."),
        "better": (or_null(word("lower", "higher")), "Which values are better; null if neither."),
        "value": (float | None, "Value on this report card; null if not measured."),
        "error": (float | None, "Its standard error; null if unknown."),
        "against": (float | None, "Value on the other report card; null if not measured."),
        "against_error": (float | None, "Its standard error; null if unknown."),
        "difference": (float | None, "`value` minus `against`; null if one of them is null."),
        "verdict": (
            word(*get_args(Verdict)),
            "same: within 2 combined standard errors; differs: neither is better; missing: on one report card only.",
        ),
        "is_exact": (bool, "Whether the values are compared exactly, because an error is unknown."),
    },
)
_OTHER_CARD = fields(
    "Other report card",
    {
        "job": _ID,
        "number": (int, "Number of the version."),
        "sae": (str, 'Label of the SAE in a sweep; "" for a run with one SAE.'),
    },
)
_DIFFERENCES = list_of(
    fields(
        "Difference between two report cards",
        {
            "sae": _VERSION["sae"],
            "number": _VERSION["number"],
            "against": (_OTHER_CARD, "The report card that this one is compared with."),
            "limits": (list_of(str), "Why the differences may not be due to the SAEs."),
            "figures": (list_of(_COMPARED_FIGURE), "Every figure on either report card."),
        },
    )
)
_TOLD = fields("What was done", {"id": _ID, "message": _MESSAGE})
_OUTCOMES = list_of(
    fields(
        "For several jobs: the outcome for each",
        {
            "id": _ID,
            "message": _MESSAGE,
            "outcome": (word("done", "skipped", "failed"), "Whether the job was changed; skipped: it does not apply."),
        },
    )
)
_RESUMED = fields(
    "Resumed",
    {
        "id": _ID,
        "step": (int | None, "Step that it continues from; null for a command, which starts again."),
        "notes": (list_of(str), "Changed settings."),
    },
)
_LAUNCHED = fields(
    "Launched job",
    {
        "id": _ID,
        "gpus": (list_of(int), "Indices of its GPUs; empty if it uses any GPUs, or the CPU."),
        "device": (word("cuda", "cpu"), "Devices that it runs on."),
        "logout": (str, "Sentence that says whether the job survives your logout."),
        "array": (int | None, "Id of the first job of its array; null if it is not part of an array."),
    },
)
_ENDED = {"title": "With --wait: the job after its end"} | {k: v for k, v in JOB.items() if k != "title"}
_LAUNCH = (_LAUNCHED, list_of(_LAUNCHED), _ENDED, list_of(_ENDED))
_VALIDATED = fields(
    "Whether a job can run",
    {
        "valid": (bool, "Whether the job can run here; if not, the exit code is 1."),
        "errors": (list_of(str), "Errors that prevent the job from running, each as `setting: sentence`."),
        "warnings": (list_of(str), "Warnings, each as `setting: sentence`."),
        "mode": (str | None, "Parallel mode; null if the job cannot run."),
        "start": (str | None, "When and where SLURM would start it; null if it runs on this machine."),
        "memory_required": (int | None, "Memory that it needs on each GPU, in bytes; null if unknown."),
        "memory_measured": (
            int | None,
            "Measured peak memory of an earlier job of this shape, in bytes; null if none was measured.",
        ),
        "disk_bytes": (int, "For an extraction: bytes that it will write."),
        "disk_free_bytes": (int | None, "For an extraction: free bytes on that disk; null if unknown."),
        "seconds": (float | None, "For an extraction: estimated time, in s; null if unknown."),
    },
    may_lack=["disk_bytes", "disk_free_bytes", "seconds"],
)
_FINDING = typed(
    "Finding",
    Finding,
    {
        "level": "Severity.",
        "subject": "Subject of the check.",
        "sentence": "Result of the check, in a sentence.",
        "remedy": 'What to do about it; "" if nothing.',
    },
)
_WAY = typed(
    "One way to run the job",
    Way,
    {
        "n_gpus": "Number of GPUs; 0 for CPU processes.",
        "ranks": "Processes.",
        "mode": "Parallel mode.",
        "latent_ranks": "Number of ranks that the latents are split across.",
        "chosen": "Whether the job's settings select this mode.",
        "memory_bytes": "Memory that each device needs, in bytes.",
        "seconds": "Estimated time, in s.",
        "tokens_per_s": "Tokens per second.",
        "speed_up": "Speed-up relative to one device.",
        "efficiency": "Speed-up per device (0 to 1).",
        "is_measured": "Whether the time is based on speeds measured on this machine.",
        "cost": "Cost at the given price; null if no price was given.",
        "reason": "Reason for this mode.",
        "gpus": "Indices of the GPUs with the most memory; empty if there are too few.",
        "room_bytes": "Memory of the smallest of these GPUs, in bytes; null if unknown.",
        "fits": "Whether the job fits; null if there are too few GPUs.",
        "fits_now": "Whether the job fits and these GPUs are free; null if there are too few GPUs.",
        "is_limited": "Whether a smaller GPU among them limits the others.",
    },
    {"gpus": list_of(int)},
)
_JOB_FILE = fields(
    "A job file, with --print or --dry-run",
    {
        "job_file": (str, "Text of the job file, in TOML."),
        "settings": (by_name({}), "The same settings, by name or section."),
    },
)
_REPORT = typed(
    "Report on a job",
    JobReport,
    {
        "name": "Name of the job.",
        "rows": "All ways to run a training job; empty for other kinds of job.",
        "findings": "Advice and, for other kinds of job, what would keep the job from running.",
        "price_per_gpu_hour": "The given price; null if no price was given.",
    },
    {"rows": list_of(_WAY), "findings": list_of(_FINDING)},
)
_APP = fields(
    "Environment of the app",
    {
        "python": (str, "Path of its Python."),
        "version": (str, "Version of this Python."),
        "sae_tui": (str, "Version of sae-tui in this environment."),
    },
)
_TRAINER = fields(
    "Environment of the trainer, if it is separate",
    {
        "python": (str, "Path of its Python."),
        "version": (str | None, "Version of this Python; null if it did not respond."),
        "sae_tui": (str | None, "Version of sae-tui in this environment; null if not installed."),
        "torch": (str | None, "Version of PyTorch in this environment; null if not installed."),
        "gpus": (int | None, "Number of GPUs that this PyTorch sees; null if PyTorch is not installed."),
        "problem": (str | None, "Why it cannot train, and the fix; null if it can."),
    },
)
_ENVIRONMENTS = fields(
    "Environments",
    {
        "app": (_APP, "Environment of the app."),
        "trainer": (or_null(_TRAINER), "Environment of the trainer; null if it is the app's."),
    },
)
_DOCTOR = fields(
    "Problems that would prevent training",
    {
        "ok": (bool, "True if there are no errors; if there are, the exit code is 1."),
        "findings": (list_of(_FINDING), "Findings of all checks."),
        "job": (or_null(_REPORT), "With JOB.toml: the ways to run it; null if no job file was given."),
        "environments": (_ENVIRONMENTS, "Python environments of the app and of the trainer."),
    },
)
_MORE_OF_RUNS = {
    "card_rows": (int | None, "Number of rows that the report card covers; null if not evaluated."),
    "starred": (int | None, "Number of latents that you starred; null without notes."),
    "named": (int | None, "Number of latents that you named; null without notes."),
    "tokens": (int | None, "Tokens trained on; null if unknown."),
    "duration_s": (float | None, "Run time, in s; null if it has not started."),
    "peak_memory_bytes": (int | None, "Peak memory of the rank that used most, in bytes; null if not measured."),
    "energy_wh": (float | None, ENERGY["energy_wh"]),
}


def _result(name: str, title: str) -> tuple[object, str]:
    words = metric_words(name) if name in measured_names() else f"{title}; null if unknown."
    return _MORE_OF_RUNS.get(name, (float | None, words))


_RUN = fields(
    "SAE of a run",
    {"id": _ID, "name": (str, "Name of the job."), "state": _STATE}
    | {"sae": (str, 'Label of the SAE in a sweep; "" for a run with one SAE.')}
    | {one.name: _result(one.name, one.title) for one in all_results()}
    | {"metrics": (by_name(float), "Latest value of each metric that the run stored, by name.")}
    | {name: (_ENERGY[name], ENERGY[name]) for name in ("energy_share", "cost", "currency", "co2_g")},
)
_SEEDS_OF_RUN = fields(
    "Seeds of a run",
    {
        "id": _ID,
        "sae": (str, 'Label of the SAEs without the seed; "" if the run has no other SAEs.'),
        **{name: (one, one["description"]) for name, one in SEEDS["properties"].items()},
    },
)
_COMPARED = fields(
    "Comparison of runs",
    {
        "runs": (list_of(_RUN), "One entry for each SAE."),
        "differences": (by_name({"type": "array"}), "Settings that differ, by name, with a value for each of `runs`."),
        "same": (by_name(list_of(str)), "Maps a result to the SAEs whose values do not differ significantly."),
        "same_because": (
            by_name(str),
            "Maps a result to why they are considered equal, and the smallest significant difference.",
        ),
        "seeds": (list_of(_SEEDS_OF_RUN), "SAEs that differ only in the seed, with the spreads of their results."),
    },
)
_WRITTEN = fields(
    "With --svg or --csv: the files",
    {"svg": (str, "Absolute path of the SVG image."), "csv": (str, "Absolute path of the CSV table.")},
    may_lack=["svg", "csv"],
)
_MOVED = typed("Token", LogitChange, {"text": "The token.", "logit": "Change of its logit."})
_CONTEXT = typed(
    "ActivatingExample",
    ActivatingExample,
    {"tokens": "Tokens.", "at": "Index of the token on which the latent fires most."},
    {
        "tokens": list_of(
            typed(
                "Token",
                Token,
                {"text": "The token.", "act": "Activation of the latent on this token; 0 if it does not fire."},
            )
        )
    },
)
_EXPLANATION = typed(
    "Explanation",
    Explanation,
    {
        "latent": "Number of the latent.",
        "text": 'Description of what the latent fires on; "" if the language model gave none.',
        "detection": "Balanced accuracy of finding the texts on which it fires (chance: 0.5); null if not measured.",
        "detection_error": "Standard error of detection; null if not measured.",
        "fuzzing": "Balanced accuracy of finding texts with the right marks (chance: 0.5); null if not measured.",
        "fuzzing_error": "Standard error of fuzzing; null if not measured.",
        "n_examples": "Number of scored examples.",
        "n_unparsed": "Number of answers that could not be read.",
        "problem": 'Why the description or a score is missing; "" if nothing went wrong.',
        "model": "Language model that gave the description.",
        "prompts": "Version of the prompts.",
        "time": "When the description was written.",
        "weights": 'Digest of the weights of the SAE; "" if unknown.',
    },
)
_EXPLAINED = fields(
    "Explanations",
    {
        "n_explained": (int, "Number of latents that this command has explained."),
        "n_failed": (int, "Number of latents with a problem."),
        "n_kept": (int, "Number of latents that were already explained by the same model with the same prompts."),
        "n_requests": (int, "Number of requests."),
        "prompt_tokens": (int | None, "Tokens of all prompts, as the server counts them; null if it does not."),
        "completion_tokens": (int | None, "Tokens of all answers, as the server counts them; null if it does not."),
        "latents": (list_of(_EXPLANATION), "Stored explanations of the chosen latents or, by default, of all."),
    },
)
_WATCHED = typed(
    "WatchedLatent",
    WatchedRow,
    {
        "step": "Steps before the snapshot.",
        "tokens": "Tokens before the snapshot.",
        "sae": 'Label of the SAE in a sweep; "" for a single SAE.',
        "latent": "Number of the latent.",
        "why": "asked (named in the job), new (came alive) or dying.",
        "density": "Share of the training tokens since the last snapshot on which it fired; null if unknown.",
        "heldout_density": "Share of the held-out rows on which it fires; null if unknown.",
        "cosine": "Cosine of the decoder direction with the one at the last snapshot; null at the first.",
        "largest": "Largest activation on the held-out rows; null if unknown.",
        "contexts": "Max-activating examples from the held-out rows; empty if the tokens are unknown.",
    },
    {"contexts": list_of(_CONTEXT)},
)
_FEATURE = typed(
    "Latent",
    Feature,
    {
        "latent": "Number of the latent.",
        "density": "Share of rows on which the latent fires (0 to 1).",
        "largest": "Largest activation.",
        "mean": "Mean activation over the rows on which it fires.",
        "histogram": "Histogram of the activations, in bins of equal width up to the largest.",
        "nearest": "Latents with similar decoder directions and their cosines, nearest first.",
        "contexts": "Max-activating examples.",
        "promoted": "Tokens that it promotes most; empty if the language model was not available.",
        "suppressed": "Tokens that it suppresses most.",
        "family": "silent, dense, token (fires on one token), position, rare or other.",
        "stability": "Mean cosine with the nearest decoder direction of each other seed; null for one seed.",
        "firing_correlation": "Mean correlation of its activations with those of these latents; null if unknown.",
        "effect": "Increase of the language model's loss if it is ablated, in nats per token; null if unknown.",
        "effect_error": "Standard error of the effect over texts; null if unknown.",
        "effect_per_firing": "The same increase per row on which it fires; null if unknown.",
        "parts": "A crosscoder's parts, A first; empty for other SAEs.",
        "part": 'Letter of the only part in which it writes, "shared" or "other"; "" if it is not a crosscoder\'s.',
        "nu_error": "Ratio of latent scaling for the error; null if it is unknown.",
        "nu_reconstruction": "Ratio of latent scaling for the reconstruction; null if it is unknown.",
        "starred": "Whether you have starred the latent.",
        "name": 'Name that you gave the latent; "" if none.',
        "note": 'Your note on the latent; "" if none.',
        "noted_at_tokens": "Tokens that the SAE was trained on when you wrote these; null for these weights.",
        "explanation": "Description by a language model; null if it has none.",
    },
    {
        "explanation": or_null(_EXPLANATION),
        "parts": list_of(
            typed(
                "LatentPart",
                LatentPart,
                {
                    "name": "Hook, model or folder of the part.",
                    "share": "Share of this part of the latent's decoder norms (0 to 1).",
                    "beta_error": "Coefficient of latent scaling for the part's error; null if it is unknown.",
                    "beta_reconstruction": "The same for the part's reconstruction; null if it is unknown.",
                },
            )
        ),
        "histogram": list_of(int),
        "nearest": list_of({"type": "array", "prefixItems": [{"type": "integer"}, {"type": "number"}], "items": False}),
        "contexts": list_of(_CONTEXT),
        "promoted": list_of(_MOVED),
        "suppressed": list_of(_MOVED),
    },
)
_NOTE = typed(
    "Note",
    LatentNote,
    {
        "latent": "Number of the latent.",
        "starred": "Whether the latent is starred.",
        "name": 'Name of the latent; "" if none.',
        "note": 'Note on the latent; "" if none.',
        "tokens": "Tokens that the SAE was trained on when the note was written; null if unknown.",
        "time": "When the note was written; 0 if unknown.",
        "weights": 'Digest of the weights that the note is about; "" if unknown.',
    },
)
_LOGS = fields(
    "Log",
    {"id": _ID, "rank": (int, "Process that wrote the log."), "lines": (list_of(str), "Last lines of the log.")},
)
_STOPPED = fields("Stopped", {"id": _ID, "state": (or_null(_STATE[0]), "State; null if unknown."), "message": _MESSAGE})
_EDITS = ("after", "rename", "eval")
_EDITS_OF_MANY = ("pause", "hold", "release", "priority", "tag", "note")
_IMPORTED = fields(
    "Job of an imported SAE",
    {
        "id": _ID,
        "format": (str, "Format in which the SAE was read."),
        "architecture": (str, "Architecture of the SAE."),
        "notes": (list_of(str), "Notes on the import."),
        **IMPORT_CHECK,
    },
)
_EXPORTED = fields(
    "Exported SAE",
    {
        "checkpoint": (str, "Absolute path of the checkpoint."),
        "step": (int, "Step of the checkpoint."),
        "output_path": (str, "Absolute path of the folder that was written."),
        "saes": (by_name(str), "For a sweep: the folder of each SAE, by label."),
        "left_out": (by_name(str), "For a sweep: why the format cannot store an SAE, by label."),
        "notes": (list_of(str), "What the format cannot store; left out if it can store everything."),
        "checkpoints": (list_of(str), "For a set of transcoders: absolute paths of the checkpoints."),
        "layers": (by_name(int), "For a set of transcoders: the step of each layer, by layer."),
    },
    may_lack=["checkpoint", "step", "saes", "left_out", "notes", "checkpoints", "layers"],
)
_REMOVED = fields(
    "Deleted jobs", {"ids": (list_of(int), "Ids of the deleted jobs."), "bytes": (int, "Freed disk space, in bytes.")}
)
_REPAIRED = fields("Repaired", {"done": (list_of(str), "Repairs, one sentence each; empty if nothing was wrong.")})
_OVER_SEEDS = fields(
    "Figure over seeds",
    {
        "mean": (float | None, "Mean over the seeds, or the value for one seed; null if not measured."),
        "sd": (float | None, "Standard deviation over the seeds; null for one seed."),
    },
)
_ARENA = fields(
    "Arena",
    {
        "recipes": (
            list_of(
                fields(
                    "Recipe",
                    {
                        "id": _ID,
                        "recipe": (str, "Name of the job, and the label of its SAE without the seed."),
                        "seeds": (int, "Number of seeds."),
                        "d_sae": (int, "Number of latents."),
                        "true_l0": (float | None, "Mean number of known features that fire on a row; null if unknown."),
                        "same_as_best": (bool, "Whether the F1 is within two standard errors of the largest."),
                        **{name: (_OVER_SEEDS, f"Figure {name} of the report cards.") for name in FIGURES.values()},
                    },
                )
            ),
            "The recipes, the largest F1 first.",
        )
    },
)
_TEXT = typed(
    "Text",
    TextRead,
    {"tokens": "The tokens of the text."},
    {
        "tokens": list_of(
            typed(
                "Token",
                TextToken,
                {
                    "text": "The token; tokens that share a character are merged.",
                    "latents": "Latents that fire on it, strongest first, at most 256.",
                    "is_counted": "Whether training reads such tokens: not the first token, nor special tokens.",
                },
                {
                    "latents": list_of(
                        typed(
                            "Latent",
                            FiringLatent,
                            {"latent": "Number of the latent.", "act": "Activation, in the units of the activations."},
                        )
                    )
                },
            )
        )
    },
)
_STEERED = typed(
    "Steered generation",
    Generated,
    {
        "plain": "Continuation without steering.",
        "steered": "Continuation with steering.",
        "n_tokens": "Number of tokens of the longer one.",
        "moved": "Possible next tokens after the prompt whose logits moved most.",
        "kl": "KL divergence after each token of the prompt and of the continuation without steering.",
    },
    {
        "moved": list_of(
            typed(
                "Moved token",
                MovedToken,
                {
                    "text": "The token.",
                    "logit": "Change of its logit.",
                    "plain": "Its probability without steering.",
                    "steered": "Its probability with steering.",
                },
            )
        ),
        "kl": list_of(
            typed(
                "KL divergence",
                TokenKl,
                {"text": "The token.", "kl": "KL divergence of the steered prediction after it, in nats."},
            )
        ),
    },
)
_DIFF = fields(
    "A crosscoder of two models",
    {
        "id": _ID,
        "state": (str, "State in which the job ended."),
        "output_path": (str | None, "Folder with the SAE; null if there is none."),
        "error": (str | None, "Why the job failed; null if it did not."),
        "fvu": (float | None, "FVU on held-out rows of both models; null without a report card."),
        "l0": (float | None, "Mean number of latents that fire per token; null without a report card."),
        "parts": (
            by_name({"type": "number"}),
            "Figures of the models A and B on the report card, such as fvu_A and only_B; empty without them.",
        ),
    },
)
_TASK = fields(
    "SkyPilot task",
    {
        "name": (str, "Name of the task; a task with the same name resumes the run."),
        "gpus": (list_of(str), "GPUs to rent, any one of them, such as A100-80GB:2; empty for a job on the CPU."),
        "task": (str, "The task file, in YAML."),
    },
)
_ENDED_MACHINE = fields(
    "Ended machine",
    {
        "name": (str, "Name of the machine."),
        "was_gone": (bool, "Whether the machine had already ended."),
        "cost": (str, 'Cost of the machine, by SkyPilot\'s estimate; "unknown" if SkyPilot does not know it.'),
    },
)
ANSWERS: dict[str, Schema] = {
    "jobs": answer("sae-tui jobs --json; with --watch one line per change", list_of(JOB)),
    "job": answer(
        "sae-tui job --json; with --cards all versions of its report card", _WHOLE_JOB, _CARDS, _ONE_CARD, _DIFFERENCES
    ),
    "logs": answer("sae-tui logs --json", _LOGS),
    "stop": answer("sae-tui stop --json", _STOPPED, _OUTCOMES),
    "validate": answer("sae-tui validate --json", _VALIDATED),
    "launch": answer("sae-tui launch --json: one job, or a list of jobs", *_LAUNCH),
    "adopt": answer("sae-tui adopt --json", _TOLD),
    "run": answer("sae-tui run --json: one job, or a list of jobs", *_LAUNCH),
    "clone": answer("sae-tui clone --json: the new job or, with --print, the job file", *_LAUNCH, _JOB_FILE),
    "resume": answer("sae-tui resume --json", _RESUMED, _TOLD, _OUTCOMES, _ENDED, list_of(_ENDED)),
    "import": answer("sae-tui import --json", _IMPORTED),
    "export": answer("sae-tui export --json", _EXPORTED),
    "doctor": answer("sae-tui doctor --json", _DOCTOR),
    "compare": answer("sae-tui compare --json", _COMPARED, _WRITTEN),
    "arena": answer("sae-tui arena --json", _ARENA),
    "task": answer("sae-tui task --json", _TASK),
    "down": answer("sae-tui down --json", _ENDED_MACHINE),
    "diff": answer("sae-tui diff --json; with --detach the launched job", _DIFF, _LAUNCHED, _JOB_FILE),
    "features": answer(
        "sae-tui features --json: all latents, or the one that you name; with --text the tokens of the text; with"
        " --watched the latents at each snapshot",
        list_of(_FEATURE),
        _FEATURE,
        _TEXT,
        list_of(_WATCHED),
    ),
    "steer": answer("sae-tui steer --json", _STEERED),
    "annotate": answer("sae-tui annotate --json: all notes, or the one on a latent", list_of(_NOTE), _NOTE),
    "explain": answer("sae-tui explain --json", _EXPLAINED),
    "rm": answer("sae-tui rm --json", _REMOVED),
    "repair": answer("sae-tui repair --json", _REPAIRED),
    "stream": {"$schema": DRAFT, "title": "sae-tui stream, one value per line"} | msgspec.json.schema(Message),
    **{name: answer(f"sae-tui {name} --json", _TOLD) for name in _EDITS},
    **{name: answer(f"sae-tui {name} --json: one job, or several", _TOLD, _OUTCOMES) for name in _EDITS_OF_MANY},
}
