"""Resumes a run from its latest intact checkpoint as a new attempt; does not import torch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from trainer.contract.errors import JobFileError, Problem, UserError
from trainer.contract.paths import RunPaths
from trainer.contract.planning.plan import read_plan
from trainer.contract.planning.workload import Layout, ranks_of, steps_of
from trainer.contract.runs.checkpoint_manifest import CheckpointState, Position, damage, newest_first, read_state
from trainer.contract.runs.data_record import news_of_data, record_of
from trainer.contract.runs.rank_spec import RankSpec, read_spec
from trainer.contract.runs.run_job import settings_since
from trainer.contract.settings.following import decay_fraction
from trainer.contract.settings.job import JobConfig
from trainer.contract.settings.job_file import load_job
from trainer.contract.settings.schedule import CoolDown, Schedule
from trainer.contract.settings.toml import read_plain_text
from trainer.contract.store.rows import Device

_LENGTH = ("train.n_steps", "train.n_tokens")
_CADENCE = (
    "train.log_every",
    "train.eval_every",
    "train.checkpoint_every",
    "train.checkpoint_every_tokens",
    "train.checkpoint_every_minutes",
    "train.keep_checkpoints",
    "train.mirror",
    "train.mirror_checkpoints",
    "train.mirror_every_minutes",
)
# Where the data is on this machine; allowed only if the checkpoint recorded the shards, since `data_notes` then checks
# that they are the same.
_DATA = ("data.path", "data.target_path")
# The setting for the devices that compute the rows; it does not affect the rows themselves.
_PLACE = "data.model_gpus"


class StoredRun(msgspec.Struct, frozen=True):
    """A stopped or finished run: the spec of its last attempt, the checkpoint to resume from, and its state.

    Without a checkpoint, the run starts from the beginning.
    """

    run_dir: Path
    last: RankSpec
    checkpoint: Path | None
    state: CheckpointState
    notes: tuple[str, ...]

    @property
    def position(self) -> Position:
        return self.state.position

    def cool_down(self, job: JobConfig, devices: int) -> CoolDown | None:
        """Return the run's cool-down, or None if it has no cool-down or the length of `job` has changed."""
        return self.state.cool_down_of(steps_of(job, devices))

    def total_steps(self, job: JobConfig, devices: int) -> int:
        """Return the total number of steps in the run if it is resumed with `job` on `devices` devices."""
        cool_down = self.cool_down(job, devices)
        return cool_down.end if cool_down else steps_of(job, devices)

    def is_finished(self, was: JobConfig) -> bool:
        """Return whether the run has completed all steps of `was` (its job in the last attempt) and written its SAE."""
        is_over = self.position.step >= self.total_steps(was, self.last.n_devices)
        return is_over and any(self.last.output_dir.glob("**/cfg.json"))

    @property
    def longer(self) -> str:
        """The command-line option to make a finished run train for longer."""
        cool_down = self.state.cool_down
        planned = f", but not {cool_down.planned}, the original number" if cool_down else ""
        return f"--set train.n_steps=N with N above {self.position.step}{planned}"

    def next_attempt(
        self, world_size: int, device: Device, gpu_uuids: tuple[str, ...], gpu_vendor: str = ""
    ) -> RankSpec:
        return RankSpec(
            run_dir=self.run_dir,
            output_dir=self.last.output_dir,
            attempt=max(_attempts(self.run_dir), default=0) + 1,
            world_size=world_size,
            device=device,
            gpu_uuids=gpu_uuids,
            gpu_vendor=gpu_vendor,
            resume_from=self.checkpoint,
        )


def stored_run(run_dir: Path) -> StoredRun:
    """Read the data needed to resume a run; raise `UserError` if the run cannot be resumed."""
    checkpoint, notes = _newest_whole(RunPaths(run_dir).checkpoints)
    state = read_state(checkpoint) if checkpoint else CheckpointState(Position(0, 0))
    return StoredRun(run_dir, last_spec(run_dir), checkpoint, state, tuple(notes))


def stored_job(run_dir: Path, overrides: Sequence[str], read: Callable[[Path], str] = read_plain_text) -> JobConfig:
    """Return a run's job with overrides applied; raise `JobFileError` for settings that a resumed run cannot change."""
    if not (job_file := RunPaths(run_dir).job_file).exists():
        raise JobFileError([Problem("RUN_DIR", f"there is no run in {run_dir}: it contains no job.toml")])
    changed = [override.partition("=")[0].strip() for override in overrides]
    free = (*_LENGTH, *_CADENCE, _PLACE, *_DATA)
    refused = [path for path in changed if path not in free and not path.startswith(("launch.", "parallel."))]
    if refused:
        allowed = ", ".join((*free, "launch.*", "parallel.*"))
        reason = f"the config of a run is frozen; resume accepts only {allowed}; all other changes require a new run"
        raise JobFileError([Problem(f"--set {path}", reason) for path in refused])
    if (moved := [path for path in changed if path in _DATA]) and not _records_data(run_dir):
        reason = "no checkpoint of the run says which shards it was trained on, so it cannot be checked that the data "
        raise JobFileError([Problem(f"--set {moved[0]}", f"{reason}is the same; start a new run")])
    # `train.n_steps` takes precedence over `n_tokens`, so clear it if only `n_tokens` has changed.
    by_tokens = "train.n_tokens" in changed and "train.n_steps" not in changed
    since = settings_since(job_file)
    was = load_job(job_file, since, read=read)
    as_before = [*(["train.n_steps="] if by_tokens else []), *since, *_step_since(run_dir, was)]
    return load_job(job_file, [*overrides, *as_before], read=read)


def _records_data(run_dir: Path) -> bool:
    """Return whether the run's latest checkpoint records its shards."""
    with contextlib.suppress(UserError):
        return any(read_state(folder).data_before for folder in newest_first(RunPaths(run_dir).checkpoints)[:1])
    return False


def _step_since(run_dir: Path, was: JobConfig) -> list[str]:
    """Return an override that keeps the run's tokens per step if "auto" would now choose a different number."""
    if was.train.batch_size != "auto" or was.train.global_batch_size:
        return []
    plans = (read_plan(RunPaths(run_dir).attempt(number) / "plan.json") for number in _attempts(run_dir))
    plan = next(filter(None, plans), None)
    if plan is None or _whole_step(was, plan.ranks + plan.model_gpus) == plan.tokens_per_step:
        return []
    return [f"train.global_batch_size={plan.tokens_per_step}"]


def _whole_step(job: JobConfig, devices: int) -> int:
    """Return the number of tokens per step on the given number of devices."""
    return Layout(job, ranks_of(job, devices)).tokens_per_step


def _attempts(run_dir: Path) -> list[int]:
    """Return the attempt numbers, latest first."""
    numbers = (folder.name.removeprefix("attempt") for folder in run_dir.glob("attempt*"))
    return sorted((int(number) for number in numbers if number.isdecimal()), reverse=True)


def last_spec(run_dir: Path) -> RankSpec:
    """Return the spec of the last attempt that has a readable spec; a supervisor that is killed early writes none.

    The output folder is changed to `sae` in this run folder, unless the run belongs to a launched job.
    """
    reasons = []
    for number in _attempts(run_dir):
        file = RunPaths(run_dir).rank_spec(number)
        try:
            last = read_spec(file)
            break
        except (OSError, ValueError) as error:
            reasons.append(f"{file} cannot be read ({error})")
    else:
        reason = reasons[0] if reasons else f"{run_dir} contains no attempts"
        raise UserError(f"nothing to resume: {reason}; start a new run in another folder")
    return last if _was_launched(last, run_dir) else msgspec.structs.replace(last, output_dir=run_dir / "sae")


def _was_launched(last: RankSpec, run_dir: Path) -> bool:
    """Return whether this is the original run folder of a launched job, whose SAE is in `saes/` next to `runs/`.

    A copied run folder may come from another user, so nothing must be written to the paths in its spec.
    """
    try:
        here = run_dir.resolve()
        sae = here.parent.parent / "saes" / here.name
        return last.output_dir.resolve() == sae and last.run_dir.samefile(here)
    except (OSError, ValueError, RuntimeError):
        return False


def _newest_whole(checkpoints: Path) -> tuple[Path | None, list[str]]:
    """Return the latest intact checkpoint (None if none was saved), and notes about later, damaged checkpoints.

    Raise `UserError` if all checkpoints are damaged.
    """
    notes: list[str] = []
    for folder in newest_first(checkpoints):
        reason = damage(folder)
        if reason is None:
            return folder, notes
        notes.append(f"{folder.name} is damaged and skipped: {reason}")
    if notes:
        raise UserError(
            f"nothing to resume: every checkpoint in {checkpoints} is damaged ({notes[0]}); start a new run in another "
            "folder"
        )
    return None, ["the run had saved no checkpoint, so it starts from the beginning"]


def data_notes(job: JobConfig, run: StoredRun) -> list[str]:
    """Return notes about data added since the checkpoint; raise `JobFileError` if a recorded shard changed."""
    if run.checkpoint is None:
        return []
    before = run.state.data_before
    news = news_of_data(before, record_of(job.hooks.values(), before))
    return [news] if news else []


def with_same_step(was: JobConfig, job: JobConfig, before: int, now: int) -> tuple[JobConfig, list[str]]:
    """Adapt a job so that its tokens per step stay the same with a different mode or number of ranks.

    Return the adapted job, and notes about the change. The job `was` ran on `before` devices, and `job` will run on
    `now` devices. Micro-batches never become larger.
    """
    before, now = ranks_of(was, before), ranks_of(job, now)
    whole = Layout(was, before).tokens_per_step
    if Layout(job, now).tokens_per_step == whole:
        return job, []
    job = job.replace("train", global_batch_size=whole)
    layout = Layout(job, now)
    changed = f"launch.gpus: {now} ranks instead of {before}" if now != before else _other_change(was, job)
    cut = f"{layout.micro_batches} micro-batches of {layout.micro_batch:,} tokens per rank"
    return job, [f"{changed}; a step still has {whole:,} tokens (train.global_batch_size), now in {cut}"]


def _other_change(was: JobConfig, job: JobConfig) -> str:
    """Return the setting whose change affects the tokens per step, given that the number of ranks is unchanged."""
    has_another_length = (was.train.n_steps, was.train.n_tokens) != (job.train.n_steps, job.train.n_tokens)
    of_length = "train.n_steps" if job.train.n_steps else "train.n_tokens"
    return f"{of_length if has_another_length else 'parallel.mode'}: changed"


def length_notes(was: JobConfig, job: JobConfig, run: StoredRun, devices: int) -> list[str]:
    """Return a note if the run length has changed; raise `JobFileError` if the run is already past the new end."""
    before, now = run.total_steps(was, run.last.n_devices), run.total_steps(job, devices)
    position = run.position
    if before == now or run.checkpoint is None:
        return []
    if now <= position.step:
        message = (
            f"the run is already at step {position.step}, but this would end it at step {now}; choose a larger number"
        )
        raise JobFileError([Problem("train.n_steps" if job.train.n_steps else "train.n_tokens", message)])
    fractions = job.train.warmup_fraction, decay_fraction(job, is_transcoder=run.state.d_out is not None)
    of_both = (was, run.last.n_devices), (job, devices)
    schedules = [Schedule(steps_of(*one), *fractions, run.cool_down(*one)) for one in of_both]
    old, new = (one.lr_factor(min(position.step, one.total_steps - 1)) for one in schedules)
    rate = f": the learning rate continues at {new:.0%} of its peak instead of {old:.0%}" if new != old else ""
    return [f"train.n_steps: the run ends at step {now} instead of {before}, and its schedules change{rate}"]
