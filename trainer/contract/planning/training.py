"""Plans a training job: its workload, its outlook, and problems with its data, SAEs, mode, memory and length."""

from __future__ import annotations

import contextlib
from functools import cached_property

import msgspec

from trainer.contract.errors import JobFileError, Problem, errors
from trainer.contract.extras import is_installed
from trainer.contract.object_store import url_problem
from trainer.contract.paths import free_disk
from trainer.contract.planning import memory, model_placement
from trainer.contract.planning.check_job import Machine, Proposal
from trainer.contract.planning.forecast import DeviceMemory
from trainer.contract.planning.halving import halving_problems
from trainer.contract.planning.hardware import MeasuredHardware
from trainer.contract.planning.model_placement import ModelPlacement, refusal_of_model_gpus
from trainer.contract.planning.outlook import Outlook, outlook
from trainer.contract.planning.rates import rate_problems
from trainer.contract.planning.workload import Layout, Workload, ranks_of, steps_of
from trainer.contract.settings.catalog import MIRRORS, OPTIMIZERS
from trainer.contract.settings.job import CROSS_LAYER, JobConfig, SaeSettings
from trainer.contract.settings.transcoders import transcoder_problems
from trainer.contract.wording import distinct_sizes, plural

# In runs shorter than this number of steps, architectures with a sparsity penalty miss the requested L0: jumprelu with
# k = 32 had an L0 of 40.6 after 147 steps and 33.4 after 488 steps.
LEAST_STEPS_OF_PENALTY = 300


# Maps each setting to the setting that overrides it.
OVERRIDDEN_BY = {
    "sae.expansion_factor": "sae.d_sae",
    "train.n_tokens": "train.n_steps",
    "train.accumulate": "train.global_batch_size",
}


class TrainingProposal(Proposal[JobConfig]):
    """The plan for a training job on a machine; it determines the job's steps, SAEs and data only once."""

    @cached_property
    def layout(self) -> Layout:
        """How the job is split across its ranks; this does not depend on the data."""
        return Layout(self.job, self.ranks)

    @cached_property
    def work(self) -> Workload:
        """The job with its ranks and data shape; may raise `JobFileError`."""
        return self.layout.on_data(self.job.data_shape(self.machine.promises))

    @cached_property
    def outlook(self) -> Outlook:
        on, shape = self.machine, self.work.shape
        look = outlook(self.job, shape, self.devices, self.gpus, speeds=on.speeds, cuda=on.cuda, host=on.memory)
        # Simulated GPUs use the memory of CPU processes, which says nothing about GPU memory.
        if self._used_before is None or not look.on_gpus or not on.cuda:
            return look
        return msgspec.structs.replace(look, took=self._used_before(self.job, shape, look))

    def memory_problems(self) -> list[Problem]:
        return self.outlook.problems(self.job)

    def problems(self) -> list[Problem]:
        job = self.job
        problems = [*self.device_problems(), *_check_nodes(job), *_check_mirrors(job), *_check_checkpoint_mirror(job)]
        problems += _check_model_gpus(job, self.devices)
        problems += _check_mode(self.layout)
        try:
            work = self.work
        except JobFileError as error:
            return [*error.problems, *problems]
        problems += _check_rows(job)
        problems += _check_saes(work)
        problems += _check_layers(job)
        problems += _check_length(work)
        problems += halving_problems(work)
        # If the number of ranks is wrong, skip the memory problems, because an estimate for the wrong number would be
        # meaningless.
        unknown = ("launch.gpus", "parallel.", "data.model_gpus")
        wrong_paths = {problem.path for problem in errors(problems)}
        if not any(path.startswith(unknown) for path in wrong_paths):
            problems += [problem for problem in self.memory_problems() if problem.path not in wrong_paths]
            problems += check_division(self.outlook.settled.work)
        return [*problems, *_check_disk(work, self.machine)]

    def comes_to(self) -> dict[str, str]:
        if any(axis.path in (*OVERRIDDEN_BY, *OVERRIDDEN_BY.values()) for axis in self.job.sweep):
            return {}
        of_batch = "" if self.job.train.batch_size == "auto" else f"{self.layout.micro_batches} "
        return {
            "sae.expansion_factor": f"{self.job.sae.width(0) / self.work.d_in:.4g} ",
            "train.n_tokens": f"{self.layout.total_tokens:,} ",
            "train.accumulate": of_batch,
        }

    @staticmethod
    def total_steps(job: JobConfig, devices: int) -> int:
        return steps_of(job, devices)

    @staticmethod
    def place_model(
        job: JobConfig, devices: int, device_name: str, box: MeasuredHardware, capacity: DeviceMemory,
        memory_of: str | None, ranks_before: int | None,
    ) -> ModelPlacement:  # fmt: skip
        return model_placement.place_model(
            job, job.data_shape(), devices, device_name, box, capacity, memory_of, ranks_before=ranks_before
        )

    @staticmethod
    def half_batch(job: JobConfig, devices: int) -> list[str]:
        train = job.train
        if train.batch_size == "auto":
            layout = Layout(job, ranks_of(job, devices))
            half = [f"train.batch_size={layout.micro_batch // 2}"]
            return [*half, f"train.global_batch_size={layout.tokens_per_step}"] if layout.micro_batch > 1 else []
        if train.batch_size % 2:
            return []
        half = [f"train.batch_size={train.batch_size // 2}"]
        return half if train.global_batch_size else [*half, f"train.accumulate={2 * train.accumulate}"]


def _check_nodes(job: JobConfig) -> list[Problem]:
    if job.cluster and job.parallel.mode == "dp" and job.launch.nodes > 1:
        message = '"dp" runs as one process on one node; use "ddp" or "auto", or launch.nodes = 1'
        return [Problem("parallel.mode", message)]
    return []


def _check_rows(job: JobConfig) -> list[Problem]:
    """Report duplicate rows, and `hold_out = "texts"` if the shards do not store the document of each row."""
    problems = list(dict.fromkeys(problem for settings in job.hooks.values() for problem in settings.repeated()))
    with contextlib.suppress(JobFileError):  # the data may be the future output of another job
        if job.data.hold_out == "texts" and any(one.usual_hold_out() != "texts" for one in job.hooks.values()):
            message = 'not all shards store the text of each row (a tensor `document`); use "blocks" or "rows"'
            problems.append(Problem("data.hold_out", message))
    return problems


def _check_mirrors(job: JobConfig) -> list[Problem]:
    """Report each metrics mirror whose package is not installed on the machine running the job."""
    missing = [name for name in job.train.mirrors if not is_installed(MIRRORS[name].package)]
    return [
        Problem("train.mirror", f"{name} is not installed; run `pip install {MIRRORS[name].package}`, or leave it out")
        for name in missing
    ]


def _check_checkpoint_mirror(job: JobConfig) -> list[Problem]:
    """Report a mirror of the checkpoints that is no URL, or whose package is not installed."""
    url = job.train.mirror_checkpoints
    problem = url_problem(url) if url else ""
    return [Problem("train.mirror_checkpoints", problem)] if problem else []


def _check_model_gpus(job: JobConfig, devices: int) -> list[Problem]:
    refusal = refusal_of_model_gpus(job, devices)
    return [Problem("data.model_gpus", refusal)] if refusal else []


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
        message = 'one interpreter drives all devices, which is slower; use "dp" only if "ddp" does not start here'
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


def _check_saes(work: Workload) -> list[Problem]:
    """Return the problems with all SAEs in a sweep, without duplicates."""
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
    """Warn if a run is too short for a sparsity penalty to reach the requested L0."""
    steps, settings = Layout(member, work.ranks).total_steps, member.sae.settings
    if getattr(settings, "sparsity_coefficient", None) != "auto" or steps >= LEAST_STEPS_OF_PENALTY:
        return []
    message = (
        f"{member.sae.architecture} controls L0 with a penalty, and after {plural(steps, 'step')} L0 may be far from "
        f"k = {settings.n_active} (L0 was 71 instead of 32 after 49 steps); train for at least "
        f"{LEAST_STEPS_OF_PENALTY} steps, with more tokens or a smaller train.batch_size"
    )
    return [Problem("train.n_steps" if member.train.n_steps else "train.n_tokens", message, "warning")]


def _check_sae(work: Workload, sae: SaeSettings) -> list[Problem]:
    data, d_sae, k = work.shape, sae.width(work.d_in), sae.settings.n_active
    problems = []
    if k > d_sae:
        problems.append(Problem("sae.k", f"must be at most the number of latents, {d_sae}, not {k}"))
    problems += transcoder_problems(sae, data.d_in, data.d_out)
    if sae.normalize == "none":
        message = "learning rates, penalties and thresholds assume a spread of about 1 per dimension; check the data"
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
    """Warn if replicas on GPUs cannot divide the latents evenly; the mode of `work` must be resolved.

    If the division is uneven, NCCL all-reduces entire gradients instead of reduce-scattering the rows that each GPU
    updates.
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


def _check_layers(job: JobConfig) -> list[Problem]:
    """Warn that a cross-layer transcoder may represent a computation in several steps as a single sum."""
    if job.n_layers == 1:
        return []
    message = (
        "early latents may write what the model computes step by step; train per-layer transcoders too (leave it out), "
        "and compare the two"
    )
    return [Problem(CROSS_LAYER, message, "warning")]


def _check_length(work: Workload) -> list[Problem]:
    n_tokens, fixed = work.shape.n_tokens, work.job.train.global_batch_size
    if n_tokens is not None and (problem := _lack_of_rows(work, n_tokens)):
        return [problem]
    if fixed and fixed < (least := work.data_ranks):
        message = f"{fixed} tokens per step are too few for {least} ranks; use at least {least}"
        return [Problem("train.global_batch_size", message)]
    return [] if n_tokens is None else _check_passes(work, n_tokens)


def _lack_of_rows(work: Workload, n_tokens: int) -> Problem | None:
    """Return a problem if `n_tokens` stored rows are too few for the held-out rows and one training step."""
    place, held_out = work.job.data.settings.place, work.job.data.held_out(n_tokens, work.ranks)
    n_train = n_tokens - held_out
    if n_train < 1:
        message = f"holds out all of {place}, which has {n_tokens:,} tokens; usually, at most a 20th is held out"
        return Problem("data.held_out_tokens", message)
    if work.tokens_per_step <= n_train:
        return None
    kept_back = f", with about {held_out:,} held out" if held_out else ""
    message = f"one step needs {work.tokens_per_step:,} tokens, but {place} has only {n_tokens:,}{kept_back}"
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


def _check_disk(work: Workload, machine: Machine) -> list[Problem]:
    needed = memory.on_disk(work)
    root, free = free_disk(machine.output_root)
    if free is not None and free < needed:
        needs, has = distinct_sizes(needed, free)
        message = f"the checkpoints and the SAE need about {needs}, but {root} has {has} free"
        message += "; free some space or lower train.keep_checkpoints"
        return [Problem("--data-dir", message)]
    return []
