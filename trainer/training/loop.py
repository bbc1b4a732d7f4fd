"""The training loop for one rank: it reads data, takes steps, logs, evaluates and saves."""

from __future__ import annotations

import contextlib
import math
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from msgspec import UNSET
from torch import Tensor

from trainer.activations.base import Source, StreamSource, data_digest
from trainer.activations.batches import Batches
from trainer.activations.copies import copies_in
from trainer.activations.open_source import continue_from, shape_for_saes
from trainer.activations.outliers import LeftOut
from trainer.activations.shards import ShardCutError
from trainer.activations.side_by_side import JOINED
from trainer.activations.training_data import open_data
from trainer.checkpoints.checkpoint import Checkpoints, load
from trainer.checkpoints.reserve import Reserve, reserved_bytes
from trainer.contract.errors import UserError
from trainer.contract.paths import RESERVE
from trainer.contract.planning.memory import last_bytes
from trainer.contract.planning.rows_on_gpu import most_kept
from trainer.contract.planning.workload import Layout, Workload
from trainer.contract.runs.checkpoint_manifest import NONE_HALVED, Best, CheckpointState, Position, resumed_state
from trainer.contract.runs.data_record import news_of_data
from trainer.contract.runs.how_far import RESUMED, HowFar
from trainer.contract.runs.recipe import Recipe, recipe_of
from trainer.contract.runs.report_card import copies_sentence
from trainer.contract.settings.catalog import ARCHITECTURES
from trainer.contract.settings.job import JobConfig
from trainer.contract.settings.schedule import CoolDown
from trainer.contract.settings.series import CRITERION, held_out
from trainer.contract.store.metrics_store import COOLING, READING, TRAINING, is_before_first_step
from trainer.contract.wording import join_words, plural
from trainer.parallel.base import Parallel
from trainer.parallel.calibrate import synchronise
from trainer.parallel.group import gather_bytes
from trainer.parallel.rebalancer import Balancer
from trainer.parallel.shares import Shares
from trainer.reporting import rank_log
from trainer.reporting.progress import RunProgress
from trainer.reporting.report import Report
from trainer.runtime.out_of_memory import hand_back
from trainer.runtime.precision import resolve_precision, set_deterministic, set_matmul_precision
from trainer.sharing.saelens import origin
from trainer.training.bad_rows import BadRows
from trainer.training.batch_size_trial import LEAST_TOKENS, fits_everywhere
from trainer.training.data_watch import DataWatch
from trainer.training.evaluate import evaluate
from trainer.training.export_saes import Exporter
from trainer.training.final_writes import FinalWrites, Write
from trainer.training.graph_replay import replay_for
from trainer.training.halving import Halving
from trainer.training.held_out import HeldOut
from trainer.training.intervals import EndedInterval, IntervalRecorder, PendingIntervals, Watching
from trainer.training.learner import Learner, layer_in
from trainer.training.row_sample import RowSampler
from trainer.training.saving import Saving
from trainer.training.sharded_state import under
from trainer.training.step import cut_of, take_step


def halved_sentence(job: JobConfig, whole: int, size: int) -> str:
    """Return a message saying that micro-batches were reduced to fit in memory, and whether this changes the SAE."""
    kinds = {one.sae.architecture for one in Layout(job, 1).members.values()}
    by_batch = sorted(kind for kind in kinds if ARCHITECTURES[kind].per_batch)
    changes = (
        f"with {join_words(by_batch)}, latents are selected within each micro-batch, "
        f"so a run with {whole:,} would train a different SAE"
        if by_batch
        else "the SAE is not affected"
    )
    return f"{whole:,} tokens do not fit in memory at once, so micro-batches have {size:,} tokens; {changes}"


# How long a thread waits for a shard before the wait is reported, in seconds.
_LONG_WAIT_S = 1.0


class Trainer:
    """Trains one SAE or a sweep's SAEs; every rank runs the same code on its part of each global batch."""

    def __init__(
        self,
        job: JobConfig,
        *,
        source: Source,
        parallel: Parallel,
        progress: RunProgress,
        stop: threading.Event,
        checkpoints: Path,
        output: Path,
        resume_from: Path | None = None,
        expected_step_s: float | None = None,
        tries_batch: bool = False,
        finish: threading.Event | None = None,
    ) -> None:
        self._job, self._train = job, job.train
        self._source, self._parallel, self._progress, self._stop = source, parallel, progress, stop
        self._finish = finish or threading.Event()
        self._device, self.output = parallel.device, output
        self._planned_steps = self._layout.total_steps
        self.tokens_per_step = self._layout.tokens_per_step
        self._cut = cut_of(self._layout, parallel)
        self.position = Position(step=0, tokens=0)
        resumed = resumed_state(resume_from) if resume_from else None
        at = resumed.position if resumed else self.position
        # The cool-down, if the run was asked to finish early.
        self._cool_down = resumed.cool_down_of(self._planned_steps) if resumed else None
        if self._cool_down:
            progress.shorten(self._cool_down.end)
        self._halving = Halving(self._layout, resumed.halved if resumed else NONE_HALVED)
        if self._cool_down:
            self._halving.stop()
        progress.heartbeat("preparing", at.step, at.tokens)
        self._shape = shape_for_saes(source, job)
        self._open_data(resumed)
        set_matmul_precision(resolve_precision(self._train.precision, self._device))
        set_deterministic(self._train.deterministic)
        self.learners = self._new_learners()
        self._start(resume_from)
        if tries_batch:
            self._cut_until_it_fits()
            hand_back(self._device)
        for learner in self.learners.values():
            learner.whole_steps = replay_for(
                learner, self._job, parallel, self.outliers[learner.hook],
                lambda words: progress.event("plain-steps", words, "warning"),
            )  # fmt: skip
        # Ranks training different SAEs cannot share work.
        rebalance = job.parallel.rebalance and not (parallel.learns_alone or job.train.deterministic)
        self._balancer = Balancer(parallel.shares, rebalance=rebalance, capacity=parallel.capacity)
        self._wanted_shares: Shares | None = None
        kept = [label for label in self._layout.members if label not in self._halving.done.dropped]
        self.report = Report(progress, parallel.is_main, kept, expected_step_s)
        self._prepare_writes(checkpoints, resumed)
        bad_rows = BadRows(self.data, self.report, self.tokens_per_step)
        self._report_data(resumed, bad_rows)
        self._evaluated = self.position
        self._recorder = IntervalRecorder(
            self._job, source, parallel, self.learners, self.outliers, self.report, bad_rows, self.position
        )
        is_alone = parallel.world_size == 1
        # Ranks training different SAEs exchange interval results, so all of them wait anyway.
        reads_late = self._device.type == "cuda" and (is_alone or not parallel.learns_alone)
        self._pending = PendingIntervals(
            self._recorder.sum_paces, self._record, reads_late=reads_late, is_alone=is_alone
        )
        self._stopping = self._has_reported_held_out = False
        self._is_finishing = self._cool_down is not None
        self._watcher: Watching | None = None
        for label, learner in self.learners.items():
            rank_log.say(rank_log.opening(parallel, source, learner.sae, self.total_steps, self.tokens_per_step, label))

    def watch(self, watcher: Watching) -> None:
        """Let `watcher` follow latents from now on; call this before `run`."""
        self._watcher = self._recorder.watcher = watcher

    def call_when_saved(self, on_saved: Callable[[], object]) -> None:
        """Call `on_saved` after each checkpoint is saved; call this before `run`."""
        self._saving.on_saved = on_saved

    def run(self) -> bool:
        """Train to the last step, or until all ranks agree to stop; return True if the run is finished."""
        self._reserve.hold()
        try:
            return self._run()
        finally:
            self._reserve.release()

    def _run(self) -> bool:
        self._batches = self._open_batches()
        try:
            while not self._is_over():
                self._train_step()
                self._pending.follow()
                self._resample()
                if self._is_interval_over():
                    self._end_interval()
                self._halve()
                if self._is_due(self._train.eval_every) or self._is_save_due():
                    self._pending.drain()
                    self._evaluate()
                    if self._watcher:
                        self._watcher.take(must=self._is_over() or self._is_save_due())
                if self._is_save_due():
                    self._heartbeat("saving")
                    self._progress.settle()
                    self._saving.try_save(self.learners, self.position)
                    self._reshard_latents()
                    # Reset the stall timer, since a save may take arbitrarily long, but a step may not.
                    self._heartbeat(self._phase)
        except BaseException as error:
            self._batches.abandon()
            is_cut = isinstance(error, ShardCutError) and self._parallel.world_size == 1
            if is_cut:
                # The weights are valid, since they come from the last complete step. If there are several ranks,
                # another rank may be in the middle of an exchange.
                self._reserve.release()
                with contextlib.suppress(Exception):
                    self._saving.save(self.learners, self.position)
            if self._parallel.world_size == 1:
                # The last steps' metrics are the most useful for explaining a failure. If there are several ranks,
                # other ranks may not respond.
                with contextlib.suppress(Exception):
                    self._pending.drain()
            if not (is_cut and self._stop.is_set()):
                raise
            self._heartbeat("stopped")
            rank_log.say(f"stopped at step {self.position.step}/{self.total_steps}, while waiting for shards")
            return False
        self._batches.close()
        self._heartbeat("saving")
        self._reserve.release()
        last = self._saving.last(self.learners, self.position)
        FinalWrites(self._parallel, self.report, self._stop, self._heartbeat).write([*last, *self._exports()])
        self._report_overfitting()
        self._recorder.share_news()
        if self._watch.fault:
            raise UserError(self._watch.fault)
        finished = self.position.step >= self.total_steps
        word = "finished" if finished else "stopped"
        self._heartbeat(word)
        rank_log.say(f"{word} at step {self.position.step}/{self.total_steps}")
        return finished

    # Set-up

    def _open_data(self, resumed: CheckpointState | None) -> None:
        """Open the data, detect outliers, and record the state of the shards so that changes can be detected."""
        source, job = self._source, self._job
        if isinstance(source, StreamSource) and self._parallel.is_main:
            self._progress.event("stream", f"reading the held-out rows and a sample, the first rows of {source.place}")
        if isinstance(source, StreamSource):
            source.report = self._note_reading
        self.record = continue_from(source, job, resumed.data_before if resumed else None, self._smallest)
        # A resumed run has other caches than before `continue_from`.
        for cache in source.caches:
            cache.on_wait = self._note_waiting
        self._watch = DataWatch(self.record if self._parallel.is_main else [])
        self.data = open_data(source, job, self._parallel, resumed)
        # The lists below have one element per hook.
        rows = [self.data.of_hook(hook) for hook in range(source.n_hooks)]
        self._samplers = [RowSampler(of_hook, self._device) for of_hook in rows]
        self.outliers = [one.find_outliers(job) for one in self._samplers]
        # Each rank checks its own held-out rows.
        self.copies = [copies_in(of_hook, self._train.seed) for of_hook in rows]
        self._held_out = HeldOut(self.data, self.outliers, self._device)

    def _prepare_writes(self, checkpoints: Path, resumed: CheckpointState | None) -> None:
        """Create the checkpoint and SAE writers, and the disk space reserve for the final writes."""
        source, parallel = self._source, self._parallel
        origins = self._origins()
        own = Checkpoints(
            checkpoints,
            self._train.keep_checkpoints,
            d_out=self._shape.d_out,
            origin=origin(source.meta) | data_digest(source),
            origins=origins if len(self._job.hooks) > 1 else UNSET,
            data=self._watch.record,
            n_train_rows=self.data.n_train,
        )
        saved = self.position if resumed else None
        self._saving = Saving(self._train, own, parallel, self.report, self.data, saved)
        self._saving.cool_down, self._saving.halved = self._cool_down, self._halving.done
        if resumed and resumed.best and resumed.held_out == self.data.held_out_key():
            self._saving.best = resumed.best
        self._exporter = Exporter(self.output, origins, self.recipe_of, self.report)
        work = Workload(self._job, parallel.world_size, self._shape)
        n_bytes = reserved_bytes(last_bytes(work), 1 + len(work.members))
        self._reserve = Reserve(checkpoints / RESERVE, n_bytes if parallel.is_main else 0)

    def _start(self, resume_from: Path | None) -> None:
        if resume_from:
            tensors, self.position = load(resume_from)
            for label, learner in self.learners.items():
                learner.state.load(under(tensors, f"{label}/"))
            self._progress.event(RESUMED, f"resumed at step {self.position.step}")
            rank_log.say(f"resumed from {resume_from} at step {self.position.step}")
        else:
            for sampler, learners in self._of_hooks(self.learners):
                x, y = sampler.sample(self._train.seed)
                for learner in learners.values():
                    learner.initialise(x, y)
        for learner in self.learners.values():
            learner.agree()

    def _cut_until_it_fits(self) -> None:
        """Halve the micro-batches until a pass fits in memory on all ranks, without changing the tokens per step."""
        sample, learners = self._samplers[0].sample(self._train.seed), list(self.learners.values())
        # The copies for a comparison have to fit as well.
        learners += [self._new_learner(label) for label in self._halving.competing]
        width = self._source.n_hooks * (self._source.d_in + (self._source.d_out or 0))
        kept = most_kept(self.data.n_held_out, self._parallel.data.size, width) if self._held_out.keeps else 0
        for learner in learners:
            learner.begin_step(self.position.step)
        whole = self._layout.micro_batch
        # All ranks halve the same micro-batch size, and each rank tests its part of a micro-batch.
        while (most := self._layout.micro_batch) > LEAST_TOKENS:
            if fits_everywhere(learners, self._parallel, sample, self._cut.longest, self.data.n_hooks, kept):
                break
            self._job = self._job.replace("train", batch_size=-(-most // 2), global_batch_size=self.tokens_per_step)
            self._parallel.most_tokens = None
            self._cut = cut_of(self._layout, self._parallel)
            rank_log.say(f"{most:,} tokens at a time do not fit: trying {-(-most // 2):,}")
        if most < whole and self._parallel.is_main:
            self._progress.event("halved", halved_sentence(self._job, whole, most), "warning")

    @property
    def _layout(self) -> Layout:
        return Layout(self._job, self._parallel.world_size)

    def _new_learners(self) -> dict[str, Learner]:
        own = self._layout.members_by_rank[self._parallel.rank]
        learners = {label: self._new_learner(label) for label in own if label not in self._halving.done.dropped}
        if self._cool_down:
            for learner in learners.values():
                learner.cool_down(self._cool_down)
        return learners

    def _new_learner(self, label: str) -> Learner:
        member, shape = self._layout.members[label], self._shape
        hook, layer = self._job.hook_number(member), layer_in(self._job, member)
        return Learner(member, shape.d_in, shape.d_out, self._parallel, hook, layer)

    def _origins(self) -> dict[str, dict[str, Any]]:
        """Return metadata about each SAE's data, by label."""
        sources = [self._source.of_hook(hook) for hook in range(self._source.n_hooks)]
        if self._job.n_layers > 1:
            # The rows of all layers are joined.
            digest = data_digest(self._source)
            origins = [origin(meta) | digest for meta in self._source.meta[JOINED]]
        else:
            origins = [origin(source.meta) | data_digest(source) for source in sources]
        return {label: origins[self._job.layer_number(member)] for label, member in self._layout.members.items()}

    def recipe_of(self, label: str) -> Recipe:
        """Return an SAE's training recipe up to the current step."""
        return recipe_of(
            self._layout,
            self._layout.members[label],
            self.position,
            self._shape.d_in,
            is_transcoder=self._source.d_out is not None,
            n_rows=self.data.n_train,
            device=self._device.type,
        )

    def _of_hooks(self, learners: Mapping[str, Learner]) -> Iterator[tuple[RowSampler, dict[str, Learner]]]:
        """Yield each hook's sampler with the learners that train on this hook; skip hooks without learners."""
        for hook, sampler in enumerate(self._samplers):
            if own := {label: one for label, one in learners.items() if one.hook == hook}:
                yield sampler, own

    def _report_data(self, resumed: CheckpointState | None, bad_rows: BadRows) -> None:
        """Report new shards, held-out rows, and data problems that make the metrics misleading."""
        if resumed and (news := news_of_data(resumed.data_before, self.record)):
            self.report.log("data", news)
        for note in self._source.notes:
            self.report.log("data", note)
        self.report.held_out(self.data.n_held_out, self.data.hold_out, self.data.n_texts, self._job.data.hold_out)
        for name, share in zip(self._job.row_names, self.copies, strict=True):
            self.report.copies(copies_sentence(share), name)
        for name, sampler in zip(self._job.row_names, self._samplers, strict=True):
            found = sampler.left_out
            bad_rows.sampled(found.not_finite, found.n_seen, sampler.first_bad, name)
            self.report.sampled(found, sampler.n_zero, self._job.data.max_norm, name)
            if sampler.heavy:
                self.report.heavy(sampler.heavy, name)
            self.report.scaled(sampler.scaled, name)

    def _open_batches(self) -> Batches:
        replaces = not all(learner.whole_steps for learner in self.learners.values())
        start, outliers = self.position.tokens, self.outliers
        return Batches(self.data, self._cut, start=start, device=self._device, outliers=outliers, replaces=replaces)

    def _reopen_batches(self) -> None:
        """Reopen the batches after this rank's share of the work has changed."""
        self._batches.close()
        self._batches = self._open_batches()

    # One step

    def _train_step(self) -> None:
        self._recorder.begin_step(self.position, self._batches.waited_s)
        batches = (self._batches.next() for _ in self._cut.token_slices)
        learners = [*self.learners.values(), *self._halving.copies.values()]
        agreed = take_step(learners, self._parallel, self.position.step, batches, self._requests)
        self._stopping, self._saving.granted, finishing = agreed
        self.position = Position(self.position.step + 1, self.position.tokens + self.tokens_per_step)
        if finishing and not self._is_finishing and not self._is_over():
            self._begin_cool_down()
        self._heartbeat(self._phase)

    def _requests(self) -> tuple[bool, bool, bool]:
        """Return whether this rank requests to stop, to save (only on rank 0) and to finish early."""
        return self._stop.is_set(), self._saving.take_request(), self._finish.is_set()

    def _begin_cool_down(self) -> None:
        """Start the cool-down, and request a save so that the run has the same last step even if it is resumed."""
        self._is_finishing = True
        self._halving.stop()
        hand_back(self._device)
        self._cool_down = CoolDown.after(self.position.step, self.total_steps)
        if self._cool_down is None:
            left = plural(self.total_steps - self.position.step, "step")
            self.report.event("cool_down", f"finishing early was requested, but the run ends in {left} anyway")
            return
        share = max((one.lr_factor(self.position.step) for one in self.learners.values()), default=1.0)
        for learner in self.learners.values():
            learner.cool_down(self._cool_down)
        self._progress.shorten(self.total_steps)
        self._saving.cool_down, self._saving.granted = self._cool_down, True
        words = f"cools down from step {self.position.step}, with the learning rate at {share:.0%}"
        message = f"{words}, and ends at step {self.total_steps} instead of {self._cool_down.planned}"
        self.report.event("cool_down", message)
        rank_log.say(message)

    @property
    def total_steps(self) -> int:
        """The number of steps after which the run ends."""
        return self._cool_down.end if self._cool_down else self._planned_steps

    @property
    def _phase(self) -> str:
        return COOLING if self._cool_down else TRAINING

    def _resample(self) -> None:
        """Revive dead latents if resampling is due."""
        due = {label: one for label, one in self.learners.items() if one.is_resampled_after(self.position.step)}
        if due:
            self._heartbeat("resampling")
            for sampler, learners in self._of_hooks(due):
                sampler.revive(learners, self.position.step, self._train.seed, self.report)

    def _halve(self) -> None:
        """Start to compare the competing SAEs if this is due, or end a comparison and drop the worse SAEs."""
        step = self.position.step
        if self._halving.begins_after(step):
            self._halving.begin(step, self._copy_of)
        elif self._is_comparison_over():
            self._pending.drain()
            self._heartbeat("evaluating")
            fvus = self._fvus_of_copies()
            decisions = self._halving.decide(step, fvus)
            # From now on, fewer SAEs contribute to the mean FVU, so it cannot be compared with earlier values.
            self._saving.halved, self._saving.best = self._halving.done, None
            for label in [label for label in self.learners if label in self._halving.done.dropped]:
                del self.learners[label]
            # Learners are in reference cycles, so their memory is not freed before a collection.
            hand_back(self._device)
            self.report.halved(step, fvus, self._halving.done.dropped, [one.words for one in decisions])

    def _is_comparison_over(self) -> bool:
        return self._halving.ends_after(self.position.step)

    def _fvus_of_copies(self) -> dict[str, float]:
        """Return the held-out FVU of each cooled-down copy, the same on all ranks; NaN if the SAE has diverged."""
        measured = evaluate(self._halving.copies, self._held_out, self._parallel, self._cut.largest)
        fvus = {label: values[held_out(CRITERION)] for label, values in measured.items()}
        fvus |= dict.fromkeys(fvus.keys() & self._recorder.given_up, math.nan)
        values = torch.tensor(list(fvus.values()), dtype=torch.float64, device=self._device)
        # Sums may differ in the last digits between GPU models, and all ranks must drop the same SAEs.
        self._parallel.world.copy_from_first_([values])
        return dict(zip(fvus, values.tolist(), strict=True))

    def _copy_of(self, label: str) -> Learner:
        copy = self._new_learner(label)
        copy.state.copy_from(self.learners[label].state)
        return copy

    # Between steps

    def _is_over(self) -> bool:
        return self._stopping or self.position.step >= self.total_steps

    def _is_due(self, every: int) -> bool:
        return self._is_over() or (every > 0 and self.position.step % every == 0)

    def _is_interval_over(self) -> bool:
        # A snapshot of latents contains the firings since the last one, so it must be at the end of an interval.
        is_watched = self._watcher is not None and self._is_due(self._train.eval_every)
        is_over = self._is_due(self._train.log_every) or self._is_save_due() or self._is_comparison_over()
        return is_over or is_watched

    def _is_save_due(self) -> bool:
        before = Position(self.position.step - 1, self.position.tokens - self.tokens_per_step)
        return not self._is_over() and self._saving.is_due(self.position, before)

    def _end_interval(self) -> None:
        """End the log interval at this step; if the host reads results late, later steps record the interval."""
        if not self._pending.reads_late:
            # Wait for the device, so that the clock is read when the steps are done rather than queued.
            synchronise(self._device)
        self._pending.add(self._recorder.end(self.position, self._cut.own_tokens, self._batches.waited_s))
        # Change shares only between intervals, so that they are constant within an interval.
        if self._wanted_shares and len(self._wanted_shares.latents) == 1:
            self._adopt(self._wanted_shares)
            self._reopen_batches()

    def _record(self, ended: EndedInterval, paces: dict[str, Tensor]) -> None:
        """Record a log interval with all ranks' `paces`, and balance the work across ranks."""
        self._recorder.record(ended, paces, self.total_steps)
        if ended.shares == self._parallel.shares:
            self._balance(paces)

    def _balance(self, paces: dict[str, Tensor]) -> None:
        """Report ranks that keep other ranks waiting, and request new shares of the work if that saves time."""
        _, seconds, _, ranks = paces["pace"].tolist()
        balance = self._balancer.look(paces, seconds / ranks)
        for kind, message, level in balance.events:
            self.report.event(kind, message, level=level)
            rank_log.say(message)
        self._wanted_shares = balance.shares or self._wanted_shares

    def _adopt(self, shares: Shares) -> None:
        self._parallel.shares, self._wanted_shares = shares, None
        self._balancer.adopt(shares)
        self._cut = cut_of(self._layout, self._parallel)
        self.report.event("rebalanced", f"{shares.sentence()} (from step {self.position.step})")

    def _reshard_latents(self) -> None:
        """Redistribute the latents by loading the checkpoint just saved; this works for any distribution."""
        if not self._wanted_shares or self._saving.has_failed_anywhere():
            return
        self._heartbeat("rebalancing")
        synchronise(self._device)
        self._adopt(self._wanted_shares)
        # The copies still have the old shards.
        self._halving.discard()
        # Change the dict in place, since the interval recorder uses it too.
        self.learners.clear()
        self.learners |= self._new_learners()
        tensors, _ = load(self._saving.folder(self.position))
        for label, learner in self.learners.items():
            learner.state.load(under(tensors, f"{label}/"))
        self._reopen_batches()

    def _look_at_data(self) -> None:
        """Report shards that have changed; request a stop if a shard was modified in place."""
        self._watch.look(self.position, self.report)
        if self._watch.fault:
            self._stop.set()

    def _evaluate(self) -> None:
        """Evaluate every SAE on the held-out rows, but only once per step."""
        self._look_at_data()
        if self._evaluated == self.position or not self.data.n_held_out:
            return
        self._heartbeat("evaluating")
        began = time.monotonic()
        measured = evaluate(self.learners, self._held_out, self._parallel, self._cut.largest)
        self.report.heldout(self.position.step, self._parallel.all_gather(measured))
        self._report_held_out_once()
        self._evaluated = self.position
        self._note_best(time.monotonic() - began)

    def _note_best(self, took_s: float) -> None:
        """Record the current held-out FVU and the best held-out FVU of the run."""
        fvu, step = self.report.mean(held_out(CRITERION)), self.position.step
        if fvu is not None:
            best = Best(step, fvu, self._lr_share(), self.data.n_held_out)
            self._saving.measured(best, self.passes, took_s)
            self.report.how_far(step, self._saving.best, self.passes)

    @property
    def passes(self) -> float | None:
        """The number of completed passes over the training rows; None for a stream, which is read only once."""
        return self.position.tokens / self.data.n_train if self.data.n_train else None

    def _lr_share(self) -> float | None:
        """Return the current fraction of the full learning rate, the same for all SAEs, or None without a schedule."""
        schedule = next((one.schedule for one in self.learners.values() if not one.optimizer.is_schedule_free), None)
        return schedule.lr_factor(self.position.step) if schedule else None

    def how_far(self, label: str = "") -> HowFar:
        """Return the training progress for the SAE `label`.

        Without a label, return the run's progress, averaged over its SAEs.
        """
        values = self.report.values.get(label, {})
        names = CRITERION, held_out(CRITERION)
        fvu, heldout_fvu = (values.get(name) if label else self.report.mean(name) for name in names)
        share, best = self._lr_share(), self._saving.best
        # A sweep's best FVU is a mean over its SAEs, so it cannot be compared with a single SAE's FVU.
        is_comparable = not label or len(self.report.values) == 1
        is_behind = best and is_comparable and heldout_fvu is not None and best.is_clearly_below(heldout_fvu, share)
        return HowFar(
            step=self.position.step,
            total_steps=self.total_steps,
            lr_share=share,
            passes=self.passes,
            fvu=fvu,
            heldout_fvu=heldout_fvu,
            best=best if is_behind else None,
        )

    def _report_overfitting(self) -> None:
        """Warn if the held-out FVU is clearly worse than the FVU on training rows, or than earlier in the run."""
        how_far = self.how_far()
        if not self._parallel.is_main or not (words := how_far.overfitting):
            return
        saved = self._saving.best_saved() if how_far.best else None
        if how_far.best:
            is_better = saved and how_far.heldout_fvu and (saved.heldout_fvu or math.inf) < how_far.heldout_fvu
            kept = f"`--best` exports the checkpoint of step {saved.position.step}" if saved and is_better else ""
            words += f"; {kept or 'no checkpoint was saved at that step (train.checkpoint_every)'}"
        self.report.overfitting(words)

    def _report_held_out_once(self) -> None:
        """Report, once per run, how many held-out rows are left out, summed over ranks."""
        if self._has_reported_held_out:
            return
        self._has_reported_held_out = True
        own = [self._held_out.left_out(hook) for hook in range(self._source.n_hooks)]
        counts = torch.tensor(own, dtype=torch.float64, device=self._device).flatten()
        (totals,) = self._parallel.sum_parts({"outliers": counts}, self._parallel.data).values()
        for name, found in zip(self._job.row_names, totals.view(-1, 4), strict=True):
            self.report.heldout_left_out(LeftOut.of(found), name)

    # At the end

    def _exports(self) -> list[Write]:
        if self._parallel.is_main:
            # A dropped SAE may have been exported when the run was stopped.
            for label in self._halving.done.dropped:
                shutil.rmtree(self.output / label, ignore_errors=True)
        # Only one replica exports, since all replicas have the same SAEs.
        if self._parallel.data.index:
            return []
        learning = {label: one for label, one in self.learners.items() if label not in self._recorder.given_up}
        return self._exporter.writes(learning, self.position, self.how_far)

    def _note_reading(self, n_rows: int) -> None:
        """Report that a stream's first rows are being read, which can take minutes; later, steps show progress."""
        if is_before_first_step(self._progress.place[0]):
            self._heartbeat(f"{READING}, {n_rows:,}")

    def _note_waiting(self, waited_s: float) -> None:
        """Report that a thread waits for shards from a URL."""
        caches = self._source.caches
        if self._stop.is_set() and self._parallel.world_size == 1:
            for cache in caches:
                cache.is_interrupted = True
        if waited_s < _LONG_WAIT_S:
            return
        n_bytes, rate = sum(cache.n_read for cache in caches), sum(cache.rate for cache in caches)
        done = f"{n_bytes / 1e6:,.0f} MB at {rate / 1e6:,.0f} MB/s"
        is_before = is_before_first_step(self._progress.place[0])
        self._heartbeat(f"{READING}, {done}" if is_before else f"downloading shards, {done}")

    def _smallest(self, n: int) -> int:
        """Return the smallest number that a rank passes."""
        return min(map(int, gather_bytes(self._parallel.world, str(n).encode(), self._device)))

    def _heartbeat(self, phase: str) -> None:
        self._progress.heartbeat(phase, self.position.step, self.position.tokens)
