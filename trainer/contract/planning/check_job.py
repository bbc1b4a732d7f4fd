"""Checks a job before launch: `check(job, machine)` returns every reason why it could not run."""

from __future__ import annotations

import contextlib
from pathlib import Path

import msgspec

from trainer.contract.errors import JobFileError, Problem, errors
from trainer.contract.extras import is_installed
from trainer.contract.paths import free_disk
from trainer.contract.planning import memory
from trainer.contract.planning.extraction import ExtractionOutlook, check_extraction, outlook_of_extraction
from trainer.contract.planning.forecast import UNKNOWN_MEMORY, DeviceMemory
from trainer.contract.planning.gpu_vendors import refusal_of_mixture, refusal_of_slices
from trainer.contract.planning.hardware import MeasuredHardware
from trainer.contract.planning.model_placement import refusal_of_model_gpus
from trainer.contract.planning.outlook import NOTHING_MEASURED, Outlook, outlook
from trainer.contract.planning.rates import rate_problems
from trainer.contract.planning.workload import Layout, Workload, ranks_of
from trainer.contract.settings.backends import check_backend
from trainer.contract.settings.catalog import MIRRORS, OPTIMIZERS
from trainer.contract.settings.extract import ExtractJob
from trainer.contract.settings.job import JobConfig, SaeSettings
from trainer.contract.settings.job_file import AnyJob
from trainer.contract.settings.promised import NO_PROMISES, Promises
from trainer.contract.settings.sources import DataShape
from trainer.contract.settings.transcoders import transcoder_problems
from trainer.contract.wording import distinct_sizes, plural

# With fewer steps, architectures with a penalty miss their L0: jumprelu with k = 32 had 40.6 after 147 steps, 33.4
# after 488.
LEAST_STEPS_OF_PENALTY = 300

AnyOutlook = Outlook | ExtractionOutlook


class MachineGpu(msgspec.Struct, frozen=True):
    """A GPU as the checks see it; `busy` and `unhealthy` give reasons, or are empty."""

    index: int
    name: str
    memory_free_bytes: int | None
    busy: str = ""
    unhealthy: str = ""
    memory_total_bytes: int | None = None
    # Key in `VENDORS`, if the machine has GPUs of several vendors.
    vendor: str = ""
    is_slice: bool = False


class Machine(msgspec.Struct, frozen=True):
    """The machine that a job is checked against."""

    gpus: tuple[MachineGpu, ...]
    cpu_count: int
    output_root: Path
    memory: DeviceMemory = UNKNOWN_MEMORY
    speeds: MeasuredHardware = NOTHING_MEASURED
    # Whether jobs run CUDA on its GPUs (simulated GPUs stand for CPU processes), and the reason why CUDA is unusable.
    cuda: bool = True
    cuda_problem: str = ""
    # The folders that other jobs will write before the job starts.
    promises: Promises = NO_PROMISES


def check(job: AnyJob, machine: Machine, expected: AnyOutlook | None = None) -> list[Problem]:
    """Return all problems of a job on this machine, errors and warnings, each with its setting.

    `expected` is the outlook of the job on this machine, if the caller has it already.
    """
    problems = _check_devices(job, machine)
    if isinstance(job, ExtractJob):
        of_extraction = expected if isinstance(expected, ExtractionOutlook) else outlook_of(job, machine)
        return problems + check_extraction(job, of_extraction)
    problems += _check_mirrors(job)
    problems += _check_model_gpus(job)
    problems += _check_mode(Layout(job, wanted_ranks(job)))
    try:
        data = job.data_shape(machine.promises)
    except JobFileError as error:
        return [*error.problems, *problems]
    work = Workload(job, wanted_ranks(job), data)
    problems += _check_rows(job)
    problems += _check_saes(work)
    problems += _check_length(work)
    # If the number of ranks is wrong, only that is reported, since a memory estimate based on it would be meaningless.
    unknown = ("launch.gpus", "parallel.", "data.model_gpus")
    if not any(problem.path.startswith(unknown) for problem in errors(problems)):
        wrong_paths = {problem.path for problem in errors(problems)}
        of_training = expected if isinstance(expected, Outlook) else outlook_on(job, data, machine)
        problems += [problem for problem in of_training.problems(job) if problem.path not in wrong_paths]
        problems += check_division(of_training.settled.work)
    problems += _check_disk(work, machine)
    return problems


def _check_rows(job: JobConfig) -> list[Problem]:
    """Report duplicate rows, and "texts" as hold-out if the shards store no document of each row."""
    problems = list(dict.fromkeys(problem for settings in job.hooks.values() for problem in settings.repeated()))
    with contextlib.suppress(JobFileError):  # the data may be the future output of another job
        if job.data.hold_out == "texts" and any(one.usual_hold_out() != "texts" for one in job.hooks.values()):
            message = 'not all shards store the text of each row (a tensor `document`); use "blocks" or "rows"'
            problems.append(Problem("data.hold_out", message))
    return problems


def _check_mirrors(job: JobConfig) -> list[Problem]:
    """Report mirrors whose library is not installed on the machine that runs the job."""
    missing = [name for name in job.train.mirrors if not is_installed(MIRRORS[name].package)]
    return [
        Problem("train.mirror", f"{name} is not installed; run `pip install {MIRRORS[name].package}`, or leave it out")
        for name in missing
    ]


def chosen_indices(job: AnyJob) -> list[int]:
    """Return the indices of the GPUs that a job file names; empty for "auto", "cpu" and clusters."""
    return list(job.launch.gpus) if isinstance(job.launch.gpus, list) and not job.cluster else []


def wanted_ranks(job: AnyJob) -> int:
    """Return how many ranks the job file requests: its devices, minus the GPUs that only run its language model."""
    return ranks_of(job, wanted_devices(job))


def wanted_devices(job: AnyJob) -> int:
    """Return how many GPUs or processes the job file requests on all nodes; "auto" and "cpu" count as 1 per node."""
    gpus, nodes = job.launch.gpus, job.launch.nodes if job.cluster else 1
    if isinstance(gpus, list):
        return nodes * len(gpus)
    _, _, count = gpus.partition(":")
    return nodes * int(count or 1)


def _check_model_gpus(job: JobConfig) -> list[Problem]:
    refusal = refusal_of_model_gpus(job, wanted_devices(job))
    return [Problem("data.model_gpus", refusal)] if refusal else []


def _check_devices(job: AnyJob, machine: Machine) -> list[Problem]:
    problems = []
    by_index = {gpu.index: gpu for gpu in machine.gpus}
    for index in chosen_indices(job):
        if index not in by_index:
            indices = ", ".join(map(str, by_index)) or "none"
            problems.append(Problem("launch.gpus", f"there is no GPU {index} here; this machine has {indices}"))
        elif by_index[index].unhealthy:
            problems.append(Problem("launch.gpus", f"GPU {index} cannot be used: {by_index[index].unhealthy}"))
        elif by_index[index].busy:
            problems.append(Problem("launch.gpus", f"GPU {index} is busy: {by_index[index].busy}", "warning"))
    problems += _check_vendors(job, machine)
    problems += _check_slices(job, machine)
    problems += check_backend(job)
    problems += [] if job.cluster else _check_count(job, machine)
    if machine.cuda_problem and not job.cluster and machine.gpus and not job.on_cpu:
        problems.append(Problem("launch.gpus", machine.cuda_problem))
    return problems


def _check_vendors(job: AnyJob, machine: Machine) -> list[Problem]:
    """Report GPUs of different vendors among the named ones, or for "auto" among the available ones."""
    if job.cluster or job.on_cpu:
        return []
    named = chosen_indices(job)
    gpus = [(gpu.index, gpu.vendor) for gpu in machine.gpus if not gpu.unhealthy and (not named or gpu.index in named)]
    message = refusal_of_mixture(gpus)
    return [Problem("launch.gpus", message)] if message else []


def _check_slices(job: AnyJob, machine: Machine) -> list[Problem]:
    """Report MIG slices among several GPUs of a job whose ranks exchange tensors; processes of an extraction do not."""
    named = chosen_indices(job)
    gpus = [(gpu.index, gpu.is_slice) for gpu in machine.gpus if gpu.index in named]
    message = refusal_of_slices(gpus) if exchanges(job) else ""
    return [Problem("launch.gpus", message)] if message else []


def exchanges(job: AnyJob) -> bool:
    """Return whether the GPUs of a job exchange tensors, or are all used by one process."""
    return job.model.spread if isinstance(job, ExtractJob) else True


def takes_slices(job: AnyJob) -> bool:
    """Return whether each GPU of a job may be a MIG slice: ranks on slices cannot exchange tensors."""
    return wanted_devices(job) == 1 or not exchanges(job)


def _check_mode(layout: Layout) -> list[Problem]:
    """Report why this number of ranks cannot share the work in the requested mode."""
    mode, ranks, sharing = layout.mode, layout.ranks, layout.latent_ranks
    if mode == "single" and ranks > 1:
        message = f'"single" runs on one device, but launch.gpus asks for {ranks}; use "ddp" or "auto"'
        return [Problem("parallel.mode", message)]
    if mode == "sweep" and (n := len(layout.members)) < ranks:
        message = f'"sweep" needs one SAE for each rank, but the job has {n} for {ranks}; use "auto", or fewer devices'
        return [Problem("parallel.mode", message)]
    if mode == "dp" and ranks > 1:
        message = 'one interpreter drives all devices, which is slower; "dp" is for a box on which "ddp" does not start'
        return [Problem("parallel.mode", message, "warning")]
    if ranks % sharing:
        message = f"{sharing} does not divide {ranks} ranks; use a divisor of {ranks}"
        return [Problem("parallel.latent_ranks", message)]
    shares = layout.job.parallel.shares
    if ":" in shares and (n := shares.count(":") + 1) != ranks:
        message = f'"{shares}" is for {n} ranks, but launch.gpus asks for {ranks}; give a number for each, or "auto"'
        return [Problem("parallel.shares", message)]
    if ":" in shares and not all(map(float, shares.split(":"))):
        return [Problem("parallel.shares", "each rank needs a share; use numbers above 0")]
    if sharing > 1 and not layout.is_elementwise:
        wrong = next(one for one in layout.members.values() if not OPTIMIZERS[one.train.optimizer].elementwise)
        others = " or ".join(f'"{name}"' for name, entry in OPTIMIZERS.items() if entry.elementwise)
        message = f'"{wrong.train.optimizer}" needs whole matrices, but "{mode}" splits them; use {others}, or "ddp"'
        return [Problem("train.optimizer", message)]
    return []


def _check_count(job: AnyJob, machine: Machine) -> list[Problem]:
    """Report when the machine has fewer GPUs or cores than "auto:4" or "cpu:4" requests."""
    devices = wanted_devices(job)
    suited = [gpu for gpu in machine.gpus if takes_slices(job) or not gpu.is_slice]
    usable = sum(not gpu.unhealthy for gpu in suited)
    if str(job.launch.gpus).startswith("auto:") and devices > usable:
        slices = "" if len(suited) == len(machine.gpus) else "; a MIG slice runs a job alone"
        here = f"{usable} that can be used{slices}" if machine.gpus else f'none; use "cpu:{devices}"'
        return [Problem("launch.gpus", f"asks for {plural(devices, 'GPU')}, but this machine has {here}")]
    if str(job.launch.gpus).startswith("cpu:") and devices > machine.cpu_count:
        cores = plural(machine.cpu_count, "core")
        message = f"starts {devices} processes on {cores}, which is slower than one process per core"
        return [Problem("launch.gpus", message, "warning")]
    return []


def _check_saes(work: Workload) -> list[Problem]:
    """Report the problems of each SAE of a sweep, each problem only once."""
    problems = [
        problem
        for member in work.members.values()
        for problem in (*_check_sae(work, member.sae), *_check_rate(work, member), *_check_penalty(work, member))
    ]
    return list(dict.fromkeys(problems))


def _check_rate(work: Workload, member: JobConfig) -> list[Problem]:
    width = member.sae.width(work.d_in)
    return rate_problems(Layout(member, work.ranks), width, is_transcoder=work.shape.d_out is not None)


def _check_penalty(work: Workload, member: JobConfig) -> list[Problem]:
    """Warn about a run that is too short for a penalty to reach the requested L0."""
    steps, settings = Layout(member, work.ranks).total_steps, member.sae.settings
    if getattr(settings, "sparsity_coefficient", None) != "auto" or steps >= LEAST_STEPS_OF_PENALTY:
        return []
    message = (
        f"{member.sae.architecture} steers L0 by a penalty, and after {plural(steps, 'step')} L0 may be far from "
        f"k = {settings.n_active} (L0 was 71 for 32 after 49 steps); take {LEAST_STEPS_OF_PENALTY} steps or more, "
        "with more tokens or a smaller train.batch_size"
    )
    return [Problem("train.n_steps" if member.train.n_steps else "train.n_tokens", message, "warning")]


def _check_sae(work: Workload, sae: SaeSettings) -> list[Problem]:
    data, d_sae, k = work.shape, sae.width(work.d_in), sae.settings.n_active
    problems = []
    if k > d_sae:
        problems.append(Problem("sae.k", f"must be at most the number of latents, {d_sae}, not {k}"))
    problems += transcoder_problems(sae, data.d_in, data.d_out)
    if sae.normalize == "none":
        message = "rates, penalties and thresholds suit data with a spread of about 1 per dimension; check your data"
        problems.append(Problem("sae.normalize", message, "warning"))
    width_path = "sae.d_sae" if sae.d_sae else "sae.expansion_factor"
    if d_sae < (sharing := work.latent_ranks):
        message = f"{d_sae} latents cannot be split over {sharing} ranks; use at least {sharing}"
        problems.append(Problem(width_path, message))
    elif d_sae < data.d_in:
        message = f"{d_sae} latents for {data.d_in} dimensions is not overcomplete; expected at least {data.d_in}"
        problems.append(Problem(width_path, message, "warning"))
    return problems


def check_division(work: Workload) -> list[Problem]:
    """Warn about latents that replicas on GPUs cannot divide evenly; `work` must have its mode settled.

    NCCL then all-reduces full gradients instead of reduce-scattering the rows that each GPU steps.
    """
    if work.device != "cuda" or work.data_ranks == 1:
        return []
    n_ways = work.data_ranks * work.latent_ranks
    problems = []
    for member in work.members.values():
        width = member.sae.width(work.d_in)
        if work.uses_zero(member.train) and width > n_ways and width % n_ways:
            more = -(-width // n_ways) * n_ways
            message = (
                f"{width:,} latents do not divide evenly over {n_ways} GPUs, which doubles the bytes of the gradient "
                f"exchange; choose {more - n_ways:,} or {more:,}"
            )
            problems.append(Problem("sae.d_sae" if member.sae.d_sae else "sae.expansion_factor", message, "warning"))
    return list(dict.fromkeys(problems))


def _check_length(work: Workload) -> list[Problem]:
    n_tokens, fixed = work.shape.n_tokens, work.job.train.global_batch_size
    if n_tokens is not None and (problem := _lack_of_rows(work, n_tokens)):
        return [problem]
    if fixed and fixed < (least := work.data_ranks):
        message = f"{fixed} tokens per step are too few for {least} ranks; use at least {least}"
        return [Problem("train.global_batch_size", message)]
    return [] if n_tokens is None else _check_passes(work, n_tokens)


def _lack_of_rows(work: Workload, n_tokens: int) -> Problem | None:
    """Return a problem if `n_tokens` stored rows are too few for the held-out rows and one step."""
    place, held_out = work.job.data.settings.place, work.job.data.held_out(n_tokens, work.ranks)
    n_train = n_tokens - held_out
    if n_train < 1:
        message = f"holds out all of {place}, which holds {n_tokens:,} tokens; a 20th or less is usual"
        return Problem("data.held_out_tokens", message)
    if work.tokens_per_step <= n_train:
        return None
    kept_back = f", with {held_out:,} held out" if held_out else ""
    message = f"one step takes {work.tokens_per_step:,} tokens, but {place} holds {n_tokens:,}{kept_back}"
    if work.job.train.global_batch_size:
        return Problem("train.global_batch_size", f"{message}; make it at most {n_train:,}")
    most = n_train // work.data_ranks
    return Problem("train.batch_size", f"{message}; make batch_size × accumulate at most {most:,}")


def _check_passes(work: Workload, n_tokens: int) -> list[Problem]:
    train, n_train = work.job.train, n_tokens - work.job.data.held_out(n_tokens, work.ranks)
    if work.total_tokens <= 20 * n_train:
        return []
    passes = f"{work.total_tokens / n_train:,.0f} passes over {n_train:,} stored tokens"
    message = f"{work.total_tokens:,} tokens are {passes}"
    return [Problem("train.n_steps" if train.n_steps else "train.n_tokens", message, "warning")]


def outlook_of(job: ExtractJob, machine: Machine) -> ExtractionOutlook:
    """Return the outlook of an extraction on this machine; for "auto", on the GPUs that it would get now."""
    gpus, ranks = _best_first(machine), wanted_ranks(job)
    return outlook_of_extraction(job, gpus, ranks=ranks, speeds=machine.speeds, cuda=machine.cuda, host=machine.memory)


def outlook_on(job: JobConfig, data: DataShape, machine: Machine) -> Outlook:
    """Return the outlook of the job on this machine; for "auto", on the GPUs that it would get now."""
    gpus, devices = _best_first(machine), wanted_devices(job)
    return outlook(job, data, devices, gpus, speeds=machine.speeds, cuda=machine.cuda, host=machine.memory)


def memory_problems(look: AnyOutlook, job: AnyJob) -> list[Problem]:
    """Return the memory problems in an outlook of the job."""
    if isinstance(look, ExtractionOutlook):
        return look.problems()
    return look.problems(job) if isinstance(job, JobConfig) else []


def _best_first(machine: Machine) -> list[MachineGpu]:
    usable = [gpu for gpu in machine.gpus if not gpu.unhealthy]
    return sorted(usable, key=lambda gpu: (bool(gpu.busy), -(gpu.memory_free_bytes or 0), gpu.index))


def _check_disk(work: Workload, machine: Machine) -> list[Problem]:
    needed = memory.on_disk(work)
    root, free = free_disk(machine.output_root)
    if free is not None and free < needed:
        needs, has = distinct_sizes(needed, free)
        message = f"checkpoints and SAE need about {needs}, but {root} has {has} free"
        message += "; free some space or lower train.keep_checkpoints"
        return [Problem("--data-dir", message)]
    return []
