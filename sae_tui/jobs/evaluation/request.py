"""Evaluates a job's SAEs with `sae-train eval`, in a process that outlives the app and the terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable

import msgspec

from sae_tui.jobs import named_python
from sae_tui.jobs.detach import SlowStart, start_detached
from sae_tui.jobs.edits import NotApplicable
from sae_tui.jobs.evaluation.outcome import NO_TOKENS, is_judged
from sae_tui.jobs.going import DONE, ENDS, STARTED, Evaluations
from sae_tui.jobs.gpus.availability import GpuChoice
from sae_tui.jobs.gpus.locks import lock_folder
from sae_tui.jobs.output import may_tell_tokens, why_no_sae
from sae_tui.jobs.states import stands
from sae_tui.jobs.store_access import existing
from trainer.contract.errors import UserError
from trainer.contract.extras import refuse_without_trainer
from trainer.contract.paths import DataDir
from trainer.contract.planning.gpu_vendors import VENDORS
from trainer.contract.progress import Progress, Reached
from trainer.contract.runs.lock import is_held
from trainer.contract.runs.report_card import EFFECTS, IN_MODEL, PROBES, ROWS
from trainer.contract.settings.consent import FLAG, code_in
from trainer.contract.settings.job_file import read_toml
from trainer.contract.settings.toml import Judged, read_plain_text
from trainer.contract.store.rows import Job

FOLLOWER = (sys.executable, "-P", "-m", "sae_tui.jobs.evaluation.follow")
# The value of `--model` that stands for the language model used to produce the data.
AUTO = "auto"
POLL_S = 0.1


class ReservedGpu(msgspec.Struct, frozen=True):
    """An idle GPU for an evaluation; `locks` is the folder that contains the GPU's lock file."""

    index: int
    uuid: str
    vendor: str
    locks: str


class EvaluationRequest(msgspec.Struct, frozen=True):
    """A requested evaluation.

    If `model` names a job file or is `AUTO`, the SAE is also evaluated in the language model if `is_spliced`, with
    probes if `is_probed`, and the effects of its latents are measured if `has_effects`. Without a `gpu`, the evaluation
    runs on the CPU, unless it `waits` for a free GPU from `gpu_source`. With `refine`, activations are also measured
    after that many steps of refinement. Parts that are not requested remain unchanged in the report card. `python` is
    the job's interpreter, or "" for the app's own.
    """

    job_id: int
    model: str | None = None
    # The request file calls this field `card`, as in earlier versions.
    gpu: ReservedGpu | None = msgspec.field(default=None, name="card")
    is_probed: bool = False
    python: str = ""
    waits: bool = False
    gpu_source: str = "auto"
    keeps_rows: bool = False
    is_spliced: bool = True
    refine: int = 0
    allows_code: bool = False
    has_effects: bool = False

    @property
    def parts(self) -> tuple[str, ...]:
        """The names of the report card parts measured by the evaluation."""
        asked = {
            ROWS: not self.keeps_rows, IN_MODEL: self.model and self.is_spliced, EFFECTS: self.has_effects,
            PROBES: self.is_probed,
        }  # fmt: skip
        return tuple(part for part, is_asked in asked.items() if is_asked)

    @property
    def flags(self) -> list[str]:
        """The flags for the trainer's `eval` command."""
        model = ["--model", self.model] if self.model else []
        flags = {
            "--effects": self.has_effects, "--probe": self.is_probed, "--keep-rows": self.keeps_rows,
            FLAG: self.allows_code,
        }  # fmt: skip
        spliced = ["--tokens", "0"] if self.model and not self.is_spliced else []
        refined = ["--refine", str(self.refine)] if self.refine else []
        return [*model, *spliced, *refined, *(flag for flag, is_given in flags.items() if is_given)]


def evaluate(data: DataDir, request: EvaluationRequest) -> str:
    """Start evaluating a job's SAEs and return a message; raise `UserError` if it cannot be started."""
    with existing(data, request.job_id) as control:
        refuse(data, control.job(request.job_id))
    python, allows_code = python_of(data, request.job_id), request.allows_code or _runs_code(data, request.job_id)
    request = msgspec.structs.replace(request, python=python, allows_code=allows_code)
    arguments = [*FOLLOWER, str(data.root), msgspec.json.encode(request).decode()]
    try:
        start_detached(arguments, data.run(request.job_id).evaluation_log, "the evaluation")
    except SlowStart:
        raise
    except UserError:
        # The evaluation may have failed to start because another process has already started one.
        if is_going(data, request.job_id):
            raise UserError(f"job {request.job_id} is already being evaluated") from None
        raise
    if request.waits and not request.gpu:
        return f"job {request.job_id} will be evaluated once a GPU is free, even if you quit"
    where = f"GPU {request.gpu.index}" if request.gpu else "the CPU"
    return f"job {request.job_id} is being evaluated on {where}; the evaluation continues if you quit"


def stop(data: DataDir, job_id: int) -> str:
    """Ask a job's evaluation to stop, and return a message; raise `UserError` if no evaluation is running."""
    with existing(data, job_id) as control:
        control.job(job_id)
        if not is_going(data, job_id):
            raise NotApplicable(f"job {job_id} is not being evaluated")
        control.request(job_id, "stop-evaluation")
    return f"the evaluation of job {job_id} is being stopped; earlier results are kept"


def refuse(data: DataDir, job: Job) -> None:
    """Raise `UserError` if a job has no SAE that can be evaluated now."""
    if words := why_no_sae(job):
        raise UserError(words)
    if not job.state.is_final:
        raise UserError(f"job {job.id} {stands(job)}; it can be evaluated once it has ended")
    if data.exported_folder(job.id) is None:
        raise UserError(f"job {job.id} has no SAE to evaluate in {data.sae(job.id)}")
    if is_going(data, job.id):
        raise UserError(f"job {job.id} is already being evaluated")
    if not python_of(data, job.id):
        refuse_without_trainer()


def python_of(data: DataDir, job_id: int) -> str:
    """Return the interpreter that trained a job, or "" if it is the app's own.

    Raise `UserError` if that interpreter must not be run.
    """
    judged, file = Judged(), data.run(job_id).job_file
    if not file.exists():
        return ""
    launch = read_toml(file, judged).get("launch")
    python = launch.get("python") if isinstance(launch, dict) else None
    if not isinstance(python, str) or not python:
        return ""
    if judged.distrust:
        raise UserError(f"refusing to run the Python interpreter of job {job_id}: {judged.distrust}")
    named_python.refuse(python)
    return named_python.whole(python)


def _runs_code(data: DataDir, job_id: int) -> bool:
    """Return whether the job runs custom model code, which the user allowed when launching the job."""
    file = data.run(job_id).job_file
    return file.exists() and any(code.path == "data.remote_code" for code in code_in(read_toml(file, read_plain_text)))


def offer(data: DataDir, job_id: int) -> tuple[str, str]:
    """Return a message saying that a job has no features, and a question that offers to evaluate the job now.

    The question is "" if the job cannot be evaluated, or if an evaluation would find no features.
    """
    with existing(data, job_id) as control:
        job = control.job(job_id)
    try:
        refuse(data, job)
    except UserError as error:
        return str(error), ""
    if is_judged(data.sae(job_id)) and not may_tell_tokens(job.config):
        return f"job {job_id} was evaluated, but {NO_TOKENS}", ""
    none_yet = f"job {job_id} has no max-activating examples yet"
    return (
        none_yet,
        f"{none_yet.capitalize()}. Evaluate it now? This takes seconds to minutes, and continues if you quit.",
    )


def wait_for_end(data: DataDir, job_id: int, since: float = 0.0) -> tuple[bool, str]:
    """Show a job's evaluation progress until the evaluation ends; `since` is the time of the request.

    Return whether the evaluation succeeded, and a message about its result.
    """
    evaluations = Evaluations(data)
    with Progress(f"evaluating job {job_id}", to_descriptor=False) as progress:
        while is_going(data, job_id):
            if evaluations.poll() and (now := evaluations.going.get(job_id)):
                waits = Reached(f"waits: {now.waits_for}")
                progress.reach(waits if now.waits_for else now.reached)
            time.sleep(POLL_S)
    with existing(data, job_id) as control:
        # An evaluation killed while waiting for a GPU records no event, so ignore events from earlier evaluations.
        events = [one for one in control.events(job_id) if one.kind in (STARTED, *ENDS) and one.timestamp >= since]
    if not events or events[-1].kind == STARTED:
        return False, f"job {job_id} was not evaluated: its process was killed; see {data.run(job_id).evaluation_log}"
    return events[-1].kind == DONE, f"job {job_id} {events[-1].message}"


def is_going(data: DataDir, job_id: int) -> bool:
    """Return whether the job is being evaluated now."""
    return bool(is_held(data.run(job_id).evaluation_lock))


def idle_gpu(data: DataDir, job: Job, choices: Iterable[GpuChoice], source_name: str) -> ReservedGpu | None:
    """Return the idle GPU with the most free memory, or None if no GPU is idle or the job ran on the CPU."""
    idle = [one for one in choices if one.may_be_offered and (one.vendor or source_name) in VENDORS]
    if job.device != "cuda" or not idle:
        return None
    best = max(idle, key=lambda one: one.memory_free_bytes or 0)
    return ReservedGpu(best.index, best.uuid, best.vendor or source_name, str(lock_folder(data, source_name)))
