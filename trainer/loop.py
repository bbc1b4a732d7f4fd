"""The training loop of one rank: data, forward, loss, backward, step, log, save."""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from trainer import log
from trainer.activations.base import Indices, Source
from trainer.activations.batches import Batches
from trainer.activations.order import Order
from trainer.checkpoint import Checkpoints, Position, load
from trainer.contract import catalog
from trainer.contract.config import JobConfig
from trainer.contract.problems import UserError
from trainer.contract.series import Row
from trainer.export import export_sae, origin
from trainer.metrics.base import Observation
from trainer.metrics.interval import Interval
from trainer.optim import adam, autocast, base_lr, clip_gradients, set_matmul_precision
from trainer.parallel.base import Parallel
from trainer.progress import Progress
from trainer.saes.base import Output, Sae
from trainer.saes.initial import initialise
from trainer.schedule import lr_factor

# OpenAI's number of rows for b_dec; 300 MB at d_in 2304.
SAMPLE_TOKENS = 32_768


class Trainer:
    """Trains one SAE; every rank runs the same code on its share of each global batch."""

    def __init__(
        self,
        job: JobConfig,
        *,
        source: Source,
        parallel: Parallel,
        progress: Progress,
        stop: threading.Event,
        checkpoints: Path,
        output: Path,
        resume_from: Path | None = None,
    ) -> None:
        self._job, self._train = job, job.train
        self._source, self._parallel, self._progress, self._stop = source, parallel, progress, stop
        self._checkpoints, self._output = Checkpoints(checkpoints), output
        self._device = parallel.device
        self._order = Order(source.n_tokens, job.train.seed)
        self.total_steps = job.total_steps(parallel.world_size)
        self.tokens_per_step = job.effective_batch(parallel.world_size)
        self.position = Position(step=0, tokens=0)
        self.values: dict[str, float] = {}
        self._saved_step = -1
        self._beat("preparing")
        set_matmul_precision(self._train.precision)
        self.sae = _build_sae(job, source.d_in).to(self._device)
        self._lr = base_lr(self._train, self.sae.d_sae)
        self.optimizer = adam(self.sae.parameters(), self._lr)
        self._start(resume_from)
        self._interval = Interval(("loss", *self.sae.loss_names, "x"))
        self._logged = self.position
        self._stopping = False
        self._grad_norm = torch.zeros(())
        log.say(log.opening(parallel, source, self.sae, self.total_steps, self.tokens_per_step))

    def run(self) -> bool:
        """Trains to the last step, or to a stop that all ranks agree on; True where it is finished."""
        with contextlib.closing(self._batches()) as batches:
            while not self._is_over():
                self._train_step(batches)
                if self._is_due(self._train.log_every) or self._is_due(self._train.checkpoint_every):
                    self._log()
                if self._is_due(self._train.checkpoint_every) and not self._is_over():
                    self._save()
        try:
            self._save()
        finally:
            # What was trained is not lost because its checkpoint could not be written.
            self._export()
        finished = self.position.step >= self.total_steps
        word = "finished" if finished else "stopped"
        self._beat(word)
        log.say(f"{word} at step {self.position.step}/{self.total_steps}")
        return finished

    # before

    def _start(self, resume_from: Path | None) -> None:
        if resume_from:
            self.position = load(resume_from, self.sae, self.optimizer)
            self._saved_step = self.position.step
            self._progress.event("resumed", f"resumed at step {self.position.step}")
            log.say(f"resumed from {resume_from} at step {self.position.step}")
        else:
            sample = self._source.sample(SAMPLE_TOKENS, self._train.seed).to(self._device)
            if not math.isfinite(float(sample.sum())):
                raise self._bad_data([self._source.sampled(SAMPLE_TOKENS, self._train.seed)])
            initialise(self.sae, sample, self._job.sae, self._train.seed)
        self._parallel.copy_from_main_(self.sae.state_dict().values())

    def _batches(self) -> Batches:
        return Batches(
            self._source,
            self._order,
            batch_size=self._train.batch_size,
            rank=self._parallel.rank,
            world_size=self._parallel.world_size,
            start=self.position.tokens,
            device=self._device,
        )

    # a step

    def _train_step(self, batches: Batches) -> None:
        self._begin_interval()
        for _ in range(self._train.accumulate):
            x = batches.next()
            output = self._forward(x)
            loss = self.sae.objective(output.losses)
            self._backward(loss)
            self._observe(x, output, loss)
        self._exchange()
        self._update_weights()
        self.position = Position(self.position.step + 1, self.position.tokens + self.tokens_per_step)
        self._beat("training")

    def _begin_interval(self) -> None:
        """Starts the clocks at the first step of one: neither set-up nor a save is the pace of training."""
        if self.position == self._logged:
            self._parallel.waited_s()
            self._interval.begin()

    def _forward(self, x: Tensor) -> Output:
        with autocast(self._train.precision, self._device):
            output: Output = self.sae(x)
        return output

    def _backward(self, loss: Tensor) -> None:
        """Divides by the tokens of all ranks and micro-batches, so that summed gradients are the global mean's."""
        (loss / self.tokens_per_step).backward()

    def _observe(self, x: Tensor, output: Output, loss: Tensor) -> None:
        with torch.no_grad():
            seen = Observation(x, output.x_hat, output.acts.values, self.sae.dead(), self.sae.x_mean)
            # A NaN or an infinity anywhere in x shows in its sum.
            self._interval.observe(seen, output.losses | {"loss": loss, "x": x.sum()})

    def _exchange(self) -> None:
        gradients = [parameter.grad for parameter in self.sae.parameters() if parameter.grad is not None]
        self._stopping = self._parallel.sum_step_([*gradients, self.sae.step_sums()], stop=self._stop.is_set())

    def _update_weights(self) -> None:
        self.sae.project_gradient()
        self._grad_norm = clip_gradients(self.sae.parameters(), self._train.grad_clip)
        for group in self.optimizer.param_groups:
            group["lr"] = self._lr * self._lr_factor()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.sae.normalise_decoder()
        self.sae.end_step(self.tokens_per_step)

    def _lr_factor(self) -> float:
        train = self._train
        return lr_factor(self.position.step, self.total_steps, train.warmup_fraction, train.decay_fraction)

    # between steps

    def _is_over(self) -> bool:
        return self._stopping or self.position.step >= self.total_steps

    def _is_due(self, every: int) -> bool:
        return self._is_over() or (every > 0 and self.position.step % every == 0)

    def _log(self) -> None:
        """Adds up and records the interval."""
        if self._device.type == "cuda":
            # The clock is read when the steps are done, not when they are queued.
            torch.cuda.synchronize(self._device)
        rate, step_ms = self._interval.pace(self.position.step - self._logged.step, self._parallel.waited_s())
        parts = self._interval.sums() | {
            "rank_tokens_per_s": self._parallel.slot(rate),
            "step_ms": self._parallel.slot(step_ms),
        }
        totals = self._parallel.sum_parts(parts)
        values = self._interval.values(totals)
        if not math.isfinite(values.pop("x")):
            raise self._bad_data(self._steps_since(self._logged))
        self._require_finite_loss(values["loss"])
        self.values = values | {"lr": self.optimizer.param_groups[0]["lr"], "grad_norm": float(self._grad_norm)}
        self._logged = self.position
        self._record(totals)
        self._say(rate)

    def _record(self, totals: dict[str, Tensor]) -> None:
        step = self.position.step
        self._progress.rows([Row(name, step, value) for name, value in self.values.items()])
        for name in ("rank_tokens_per_s", "step_ms"):
            self._progress.rows([Row(name, step, value, rank) for rank, value in enumerate(totals[name].tolist())])

    def _say(self, own_rate: float) -> None:
        main = self._parallel.is_main
        values, rate = (self.values, self.values["tokens_per_s"]) if main else ({"loss": self.values["loss"]}, own_rate)
        log.say(log.row(self.position.step, self.total_steps, values, rate))

    def _steps_since(self, position: Position) -> Iterator[Indices]:
        """The rows of all ranks, step by step."""
        for start in range(position.tokens, self.position.tokens, self.tokens_per_step):
            yield self._order.stretch(start, self.tokens_per_step)

    def _bad_data(self, read: Iterable[Indices]) -> UserError:
        """Names the first bad row among those read, one batch after the other."""
        rows = (self._source.first_not_finite(indices) for indices in read)
        row = next((row for row in rows if row is not None), None)
        where = f" in {self._source.name_of(row)}" if row is not None else ""
        return UserError(f"data.path: {self._source.place} holds NaN or infinite values{where}; extract the data again")

    def _require_finite_loss(self, loss: float) -> None:
        if not math.isfinite(loss):
            raise UserError(f"train.lr: the loss is not finite at step {self.position.step}; choose a lower rate")

    # after

    def _save(self) -> None:
        if not self._parallel.is_main or self._saved_step == self.position.step:
            return
        self._beat("saving")
        folder = self._checkpoints.save(self.sae, self.optimizer, self.position)
        self._saved_step = self.position.step
        self._progress.event("checkpoint", f"checkpoint saved at step {self.position.step}")
        log.say(f"checkpoint saved: {folder}")

    def _export(self) -> None:
        if not self._parallel.is_main:
            return
        measured = {name: self.values[name] for name in ("l0", "fvu", "dead_fraction") if name in self.values}
        trained = {"training_architecture": self._job.sae.architecture, "training_tokens": self.position.tokens}
        self._beat("saving")
        export_sae(self.sae, self._output, origin(self._source.meta) | trained | measured)
        log.say(f"SAE exported: {self._output}")

    def _beat(self, phase: str) -> None:
        self._progress.beat(phase, self.position.step, self.position.tokens)


def _build_sae(job: JobConfig, d_in: int) -> Sae:
    entry = catalog.entry(catalog.ARCHITECTURES, job.sae.architecture, "sae.architecture")
    sae: Sae = entry.load()(d_in, job.sae.width(d_in), **msgspec.structs.asdict(job.sae.knobs))
    return sae
