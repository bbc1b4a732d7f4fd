"""Trains one SAE: forward pass, backward pass, update. A sweep runs several learners on the same batches."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import msgspec
import torch
from torch import Tensor, nn

from trainer.activations.heavy_dimensions import dimension_scales
from trainer.contract.planning import memory
from trainer.contract.planning.rates import full_rate
from trainer.contract.planning.workload import Layout
from trainer.contract.settings import catalog
from trainer.contract.settings.catalog import FollowingRates
from trainer.contract.settings.following import decay_fraction, following_rates
from trainer.contract.settings.job import JobConfig
from trainer.contract.settings.optimizers import LONG_RUN
from trainer.contract.settings.schedule import CoolDown, Schedule
from trainer.metrics.base import Observation
from trainer.metrics.interval import Interval
from trainer.optimizers.base import LatentAxis, Optimizer, RowStep, TiedParameter
from trainer.parallel.base import Parallel, StepSums
from trainer.parallel.group import dense, local_shard, sum_of
from trainer.parallel.latents import Latents
from trainer.runtime import narrow_copy
from trainer.runtime.phases import BACKWARD, FORWARD, METRICS, phase
from trainer.runtime.precision import NARROW, autocast, resolve_precision
from trainer.runtime.triton_kernels import SPARSE_PRODUCTS
from trainer.saes.base import Output, Sae
from trainer.saes.build import build_sae
from trainer.saes.initial_weights import initialise, unit_scale
from trainer.saes.layer import Layer
from trainer.saes.resample import resample
from trainer.training.following import Following
from trainer.training.gradients import GradientCheck, GradientChecks, LossScale, total_square
from trainer.training.sharded_state import ShardedState, under
from trainer.training.zero_shards import Stepped, SteppedShare


class StepState(NamedTuple):
    """The state at the end of a log interval: skipped steps, consecutive skips, gradient norm and learning rate.

    `overflowed` is the number of steps skipped because more latents were active than the buffer can hold.
    """

    skipped: int
    skipped_in_a_row: int
    overflowed: int
    grad_norm: float
    lr: float

    @classmethod
    def of(cls, state: Tensor) -> StepState:
        """Return the state from the result of `Learner.take_state`, copied to the CPU."""
        skipped, in_a_row, overflowed, grad_norm, lr = state.tolist()
        return cls(int(skipped), int(in_a_row), int(overflowed), grad_norm, lr)


def layer_in(job: JobConfig, member: JobConfig) -> Layer | None:
    """Return the layer that a member of a job trains, or None if the job trains no cross-layer transcoder."""
    return Layer(job.layer_number(member), job.n_layers) if job.n_layers > 1 else None


class WholeSteps(Protocol):
    """Takes complete steps for a learner whose steps have a single micro-batch and no communication between ranks."""

    def take(self, x: Tensor, y: Tensor, of_all: int) -> None:
        """Take a step on raw data; the batch has `of_all` tokens."""


class GradientMeasures(NamedTuple):
    """Squared norms of a step's gradient, fp64 and 0-dim: over the per-latent weights, and over the shared weights.

    `overflowed` (0-dim bool) is true if activations were lost, or None if they cannot be lost.
    """

    of_latents: Tensor
    of_shared: Tensor
    overflowed: Tensor | None

    @classmethod
    def total(cls, each: Sequence[GradientMeasures]) -> GradientMeasures:
        """Return the measures of several gradients together."""
        flags = [one.overflowed for one in each if one.overflowed is not None]
        of_latents, of_shared = (torch.stack(list(column)).sum(0) for column in list(zip(*each, strict=True))[:2])
        return cls(of_latents, of_shared, torch.stack(flags).any() if flags else None)


class LearnerOutput(NamedTuple):
    """The output of a learner's forward pass, and its normalised targets [n_tokens, d_out]."""

    learner: Learner
    target: Tensor
    output: Output


class Update:
    """Updates whole matrices in separate passes; used on a CPU and for optimizers without a row-wise step.

    If `normalises`, each step normalises the rows of W_dec.
    """

    def __init__(
        self,
        sae: Sae,
        stepped: Stepped,
        optimizer: Optimizer,
        following: Following | None = None,
        normalises: bool = True,
    ) -> None:
        self._sae, self._stepped, self._optimizer, self._following = sae, stepped, optimizer, following
        self._normalises = normalises

    def measure_latents(self) -> Tensor:
        """Project the gradients for the step, and return Σ‖g‖² over the per-latent weights, fp64, 0-dim."""
        self._sae.project_gradient(self._stepped.rows)
        return self._square(self._stepped.parameters, of_latents=True)

    def measure_shared(self) -> Tensor:
        """Return Σ‖g‖² over the weights that all latents share, fp64, 0-dim."""
        return self._square(self._stepped.parameters, of_latents=False)

    def take(self, check: GradientCheck) -> None:
        """Update the weights and apply their constraints; change nothing if `check.skips`."""
        skips = check.skips
        with self._following.apart(skips) if self._following else contextlib.nullcontext():
            self._optimizer.step()
            if self._normalises:
                self._sae.normalise_decoder(skips, self._stepped.rows)
        self._sae.constrain(self._stepped.rows)

    def _square(self, names: Iterable[str], *, of_latents: bool) -> Tensor:
        """Return Σ‖g‖² over the named parameters that are per latent, or over all others."""
        dims = self._sae.latent_dims()
        gradients = [self._stepped.parameters[name].grad for name in names if (name in dims) == of_latents]
        return total_square([dense(one) for one in gradients if one is not None], self._sae.W_dec.device)


class RowUpdate(Update):
    """Updates matrices and vectors one latent at a time, so each weight is read and written only once.

    The optimizer's `step` updates the remaining parameters, such as a skip connection.
    """

    def __init__(self, sae: Sae, stepped: Stepped, optimizer: Optimizer, by_rows: RowStep) -> None:
        super().__init__(sae, stepped, optimizer)
        self._by_rows = by_rows
        self._others = [name for name, one in stepped.parameters.items() if not by_rows.steps(one)]

    def measure_latents(self) -> Tensor:
        by_rows = self._by_rows.measure_latents()
        return by_rows + self._square(self._others, of_latents=True) if self._others else by_rows

    def measure_shared(self) -> Tensor:
        by_rows = self._by_rows.measure_shared()
        return by_rows + self._square(self._others, of_latents=False) if self._others else by_rows

    def take(self, check: GradientCheck) -> None:
        self._by_rows.step(check.taken)
        self._optimizer.step()
        self._sae.constrain(self._stepped.rows)


class Learner:
    """An SAE with its optimizer and metrics; `state` provides access to everything stored in a checkpoint.

    The SAE is trained on each batch's rows for hook number `hook`. For a `layer` of a cross-layer transcoder, these
    rows are joined from the rows of all layers.
    """

    def __init__(
        self,
        job: JobConfig,
        d_in: int,
        d_out: int | None,
        parallel: Parallel,
        hook: int = 0,
        layer: Layer | None = None,
    ) -> None:
        self.hook, self.layer = hook, layer
        self._job, self._train, self._device = job, job.train, parallel.device
        self._shape = d_in, d_out, layer.n_targets if layer else 1
        device, world_size = parallel.device, parallel.world_size
        self._layout = layout = Layout(job, world_size)
        self.tokens_per_step = layout.tokens_per_step
        self.sae = build_sae(layout, *self._shape)
        self.latents = Latents(self.sae.d_sae, parallel.latents, parallel.shares.latents)
        self.sae.shard(parallel.data, parallel.peers, self.latents)
        self.sae.to(device)
        kind = catalog.entry(catalog.OPTIMIZERS, self._train.optimizer, "train.optimizer").load()
        following = following_rates(job, is_transcoder=self.sae.is_transcoder)
        self._lr = full_rate(layout, self.sae.d_sae, is_transcoder=self.sae.is_transcoder)
        settings = msgspec.structs.asdict(
            self._train.settings.for_run(layout.total_steps if layout.chooses_latents else LONG_RUN, device.type)
        )
        shares_steps = layout.uses_zero(self._train) and parallel.data.size > 1
        self.stepped = SteppedShare(self.sae, parallel.data, parallel.as_sent) if shares_steps else Stepped(self.sae)
        stepped, dims = self.stepped.parameters, self.sae.latent_dims()
        self.optimizer: Optimizer = kind(_groups(stepped, following), self._lr, **settings)
        falls = decay_fraction(job, is_transcoder=self.sae.is_transcoder)
        self.schedule = Schedule(layout.total_steps, self._train.warmup_fraction, falls)
        self.optimizer.unit_rows = (stepped["W_dec"],) if self.sae.traits.unit_decoder else ()
        self.optimizer.latent_axes = {
            one: LatentAxis(dims[name], self.stepped.ids) for name, one in stepped.items() if name in dims
        }
        self._update = self._update_of(following, n_passes=layout.micro_batches)
        self.steps_by_rows = isinstance(self._update, RowUpdate)
        if self.steps_by_rows:
            self._keep_rates_on_device()
        self.precision = resolve_precision(self._train.precision, device)
        if layer and self.precision == "fp16":
            # Each layer has its own loss scale, but the layers share their errors.
            self.precision = "fp32"
        if (dtype := NARROW.get(self.precision)) and self._may_exchange_narrow(dtype):
            self.stepped.exchange_narrow(dtype)
        self.loss_scale = LossScale(device, enabled=self.precision == "fp16")
        self.state = ShardedState(self.sae, self.stepped, self.optimizer, self.loss_scale)
        self.interval = Interval(("loss", *self.sae.traits.losses))
        self._gradient_checks = GradientChecks(device, self.tokens_per_step, self._train.grad_clip)
        # Σ‖g‖² over all ranks' latents, if it is summed in the same exchange as the gradients.
        self._square_of_latents: Tensor | None = None
        # The learning rate at this step for parameter groups without a separate factor; nan before the first step.
        self._rate = math.nan
        # Takes complete steps, some of them by replaying a CUDA graph, if that is possible.
        self.whole_steps: WholeSteps | None = None

    def _may_exchange_narrow(self, dtype: torch.dtype) -> bool:
        """Return whether all replicas' kernels access the matrices only in the 16-bit type `dtype`."""
        W_dec, replicas = self.sae.W_dec, self.stepped.others
        if not W_dec.is_cuda or replicas.size == 1:
            return False
        may = self.steps_by_rows and self.sae.traits.reads_narrow and SPARSE_PRODUCTS.on(W_dec, dtype) is not None
        # All replicas must agree, since they would deadlock if they gathered different dtypes.
        return not bool(replicas.gather(torch.full((), not may, device=W_dec.device)).any())

    def _keep_rates_on_device(self) -> None:
        """Store the optimizer's learning rates as tensors, since a CUDA graph treats Python numbers as constants."""
        for group in self.optimizer.param_groups:
            # Without `capturable`, torch raises an error during the capture; the flag has no other effect on a fused
            # step.
            group.update(lr=torch.full((), self._lr, device=self._device), capturable=True)

    def _update_of(self, rates: FollowingRates | None, n_passes: int) -> Update:
        """Return the object that updates the weights; with `rates`, encoders follow their decoders."""
        of = self.sae, self.stepped, self.optimizer
        asked, parameters = self._job.sae.encoder_scale, self.stepped.parameters
        share = self.sae.traits.encoder_scale if asked == "auto" else asked
        if rates is not None:
            self.optimizer.followers = {parameters["W_dec"]: TiedParameter(parameters["W_enc"], share)}
        if frozen := self._job.sae.frozen:
            # Normalising unit rows again would change their last digits.
            return Update(*of, normalises="W_dec" not in frozen)
        by_rows = self.optimizer.by_rows()
        # With one micro-batch per step and one replica, the gradient that a kernel sums is final, so the same kernel
        # can measure its row norms.
        if by_rows and n_passes == 1 and self.sae.data.size == 1:
            by_rows.allow_fused_norms()
        return RowUpdate(*of, by_rows) if by_rows else Update(*of, Following(share, parameters) if rates else None)

    def initialise(self, x: Tensor, y: Tensor) -> None:
        """Initialise the SAE's weights from a sample of inputs x [n, d_in] and targets y [n, d_out]."""
        if self.layer and self.sae.target_scales is not None:
            scales_each = [unit_scale(one) for one in y.tensor_split(self.layer.n_layers, dim=1)[self.layer.number :]]
            if self._job.sae.normalize == "mean_norm":
                self.sae.target_scales.copy_(torch.stack(scales_each))
        x, y = self._own_rows(x, y)
        data = self._job.data
        parts = data.part_widths
        scales = (
            (dimension_scales(x, data, parts), dimension_scales(y, data, parts)) if data.scales_dimensions else None
        )
        initialise(self.sae, x, y, self._job.sae, self._train.seed, scales, parts)

    def begin_step(self, step: int) -> None:
        """Set the SAE's schedules and the learning rate for step number `step`."""
        self.sae.start_step(self.schedule.progress(step))
        factor = self.lr_factor(step)
        if self._lr * factor == self._rate:
            # The rate is constant for most of a run, and writing it to an H200 would take 0.1 ms of host time per step.
            return
        self._rate = self._lr * factor
        for group in self.optimizer.param_groups:
            rate = self._lr * group.get("rate", 1.0) * factor
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate

    def lr_factor(self, step: int) -> float:
        """Return the fraction of the full learning rate for a step; schedule-free optimizers never decay the rate."""
        if self.optimizer.is_schedule_free:
            return Schedule(self.schedule.planned, self._train.warmup_fraction, decay_fraction=0.0).lr_factor(step)
        return self.schedule.lr_factor(step)

    def cool_down(self, cool_down: CoolDown) -> None:
        """Adapt the schedules and `dead_after_tokens` to a run that ends early.

        Adam's betas are not adapted: the bias correction assumes constant betas, so new betas would distort the next
        steps.
        """
        self.schedule = msgspec.structs.replace(self.schedule, cool_down=cool_down)
        self.sae.dead_after_tokens = self._layout.dead_after(cool_down.end)

    def accumulate(self, x: Tensor, y: Tensor, of_all: int | None = None, *, is_last: bool = False) -> None:
        """Run the forward and backward pass of a micro-batch of raw data; `y` is `x` except for a transcoder.

        If ranks share the micro-batch, `of_all` is its token count over all ranks. In the last micro-batch of a step
        (`is_last`), gradients may be exchanged during the backward pass.
        """
        self.begin_pass(of_all or len(x), is_last=is_last)
        with phase(FORWARD):
            normalised, target = self.normalised(x, y)
            output = self.forward(normalised, target)
            loss = self.sae.objective(output.losses)
        with phase(BACKWARD):
            # Divide by the expected token count over all ranks and micro-batches; `update` corrects for the actual
            # count. If the factor were passed to `backward`, torch would import sympy, which takes 0.6 s and 35 MB.
            self.loss_scale.mean(loss, self.tokens_per_step).backward()
            self.sae.row_gradients.add()
        with phase(METRICS):
            self.observe(target, output, loss)

    def begin_pass(self, n_tokens: int, *, is_last: bool) -> None:
        """Prepare for the passes of a micro-batch, which has `n_tokens` tokens over all ranks."""
        self.sae.batch_tokens = n_tokens
        self.stepped.divide()
        # Gradients of dead latents are added only after the backward pass, too late to be sent during the pass.
        self.stepped.send_early(may=is_last and not self.sae.may_have_dead())

    @property
    def state_bytes(self) -> int:
        """The optimizer state's size in bytes; the state is allocated in the first step."""
        n_values = sum(parameter.numel() for parameter in self.stepped.parameters.values())
        return round(n_values * memory.state_bytes(self._train, self._device.type))

    @torch.no_grad()
    def forget_pass(self) -> None:
        """Undo all `accumulate` calls since the last update."""
        self.drop_gradients()
        self.sae.forget_passes()
        self.interval = Interval(("loss", *self.sae.traits.losses))

    def drop_gradients(self) -> None:
        """Discard the gradients from a backward pass."""
        self.sae.zero_grad()
        self.sae.row_gradients.take()

    def normalised(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return normalised inputs [n, d_in] and this rank's part of their targets, in fp32."""
        x, y = self._own_rows(x, y)
        # Reshape the scale, since a 16-bit tensor times a 0-dim tensor would stay in 16 bits.
        inputs = x * self.sae.x_scale.reshape(-1)
        own = local_shard(inputs if y is x else y, self.latents.group)
        return inputs, own if y is x else own * self.sae.y_scale.reshape(-1)

    def outputs(self, x: Tensor, y: Tensor) -> Iterator[LearnerOutput]:
        """Run the SAE on raw inputs and targets, and yield the result."""
        normalised, target = self.normalised(x, y)
        yield LearnerOutput(self, target, self.forward(normalised, target))

    def _own_rows(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return this layer's part of the joined rows of a cross-layer transcoder, or all rows for other SAEs."""
        return (self.layer.own(x), self.layer.own(y)) if self.layer else (x, y)

    def forward(self, x: Tensor, y: Tensor) -> Output:
        """Run the SAE on normalised data and this rank's part of the targets, in the run's precision."""
        with self.autocast():
            return self.sae(x, y)

    def autocast(self) -> contextlib.AbstractContextManager[object]:
        """Return a context in which matmuls have the run's precision."""
        return autocast(self.precision, self._device)

    @torch.no_grad()
    def observe(self, y: Tensor, output: Output, loss: Tensor) -> None:
        """Add a micro-batch to the log interval, given its normalised targets, output and objective."""
        sae, terms = self.sae, output.losses | {"loss": loss}
        known = sae.y_mean, terms["mse"], sae.fired, output.sums
        seen = Observation(y, output.x_hat, output.acts, sae.dead(), *known)
        self.interval.observe(seen, terms)

    def tensors_to_exchange(self) -> StepSums:
        """Return the tensors to be summed over ranks between the last backward pass and `update`."""
        self._drop_frozen()
        # Gradients of sharded latents are already complete, so their norm is summed in the same exchange as the other
        # small fp32 tensors.
        if self.latents.is_shared and self.sae.data.size == 1:
            self._square_of_latents = self._update.measure_latents().float()
        squares = [] if self._square_of_latents is None else [self._square_of_latents]
        dims, counts = self.sae.latent_dims(), self.sae.step_sums
        shared = [one.grad for name, one in self.sae.named_parameters() if name not in dims and one.grad is not None]
        return StepSums(
            of_latents=[*self.stepped.whole_sums(), counts[: self.sae.n_own]],
            sharded=self.stepped.part_sums(),
            of_all=[*shared, counts[self.sae.n_own :], *squares],
        )

    def _drop_frozen(self) -> None:
        """Discard the gradients of weights that the job freezes."""
        for name in self._job.sae.frozen:
            self.stepped.parameters[name].grad = None

    def update(self, *, counts: bool = True) -> None:
        """Update the weights; if a gradient is not finite, only count the step as skipped.

        Pass `counts=False` while a step is captured, so that the host does not count it.
        """
        self.step_by(self.measure(), counts=counts)

    @torch.no_grad()
    def measure(self) -> GradientMeasures:
        """Measure the step's gradient, which is summed over ranks; `step_by` must follow."""
        self.stepped.begin()
        self._drop_frozen()
        of_latents, self._square_of_latents = self._square_of_latents, None
        if of_latents is None:
            own = self._update.measure_latents()
            of_latents = sum_of(sum_of(own, self.stepped.others), self.latents.group)
        return GradientMeasures(of_latents, self._update.measure_shared(), self.sae.has_overflowed())

    @torch.no_grad()
    def step_by(self, found: GradientMeasures, *, counts: bool = True) -> None:
        """Update the weights, given the measures of their gradient or of a larger gradient that contains it."""
        n_tokens, factor = self.sae.n_tokens_in_step(), self.loss_scale.factor
        check = self._gradient_checks.of(found.of_latents, found.of_shared, factor, n_tokens, found.overflowed)
        self.loss_scale.update(check.bad_gradient)
        self.optimizer.grad_scale, self.optimizer.found_inf = check.divisor, check.bad
        self._update.take(check)
        self.stepped.end()
        self.sae.zero_grad()
        self.sae.end_step(check.n_tokens)
        if counts:
            self.count_step()

    def count_step(self) -> None:
        """Count a queued step on the host."""
        self.sae.count_step(self.tokens_per_step)

    def is_resampled_after(self, step: int) -> bool:
        """Return whether to resample after `step` steps.

        Latents are never resampled in the second half of a run, since they need time to learn.
        """
        every, tokens = self._job.sae.resample_every_tokens, step * self.tokens_per_step
        is_young = self.schedule.cool_down is None and step <= self.schedule.planned / 2
        return every > 0 and is_young and tokens // every > (tokens - self.tokens_per_step) // every

    def resample(self, step: int, x: Tensor, y: Tensor) -> Tensor:
        """Revive dead latents from raw rows; return a mask of the revived latents, bool [d_sae], for `forget`."""
        self.stepped.restore()
        generator = torch.Generator().manual_seed(self._train.seed + step)
        return resample(self.sae, x * self.sae.x_scale, y * self.sae.y_scale, generator)

    def forget(self, revived: Tensor) -> None:
        """Reset the optimizer state of latents whose weights were replaced (bool [d_sae]); all ranks must call this."""
        self.optimizer.forget(self.stepped.own(revived, 0))

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """Convert the SAE to its export form inside the `with` block.

        All replicas must enter the block together, unless no training pass has run since they last entered it.
        """
        self.stepped.restore()
        self.sae.eval()
        self.optimizer.use_trained_weights()
        try:
            yield
        finally:
            self.optimizer.use_stepped_weights()
            self.sae.train()

    def whole_sae(self) -> Sae | None:
        """On the rank where `state.collect` returns the tensors, return the SAE with all latents; on others, None.

        Call this within `evaluating` to get the SAE in its export form.
        """
        if not self.latents.is_shared:
            return self.sae
        tensors = self.state.collect("sae.")
        if tensors is None:
            return None
        sae = build_sae(Layout(self._job, 1), *self._shape)
        sae.load_state_dict(under(tensors, "sae."))
        return sae.eval()

    def agree(self) -> None:
        """Copy replicated state from the first rank, since different GPU models round differently."""
        state, own = self.sae.state_dict(), self.sae.latent_dims()
        self.stepped.restore()
        self.latents.group.copy_from_first_(tensor for name, tensor in state.items() if name not in own)
        self.sae.data.copy_from_first_(state.values())
        for parameter in self.sae.parameters():
            narrow_copy.forget(parameter)

    def sums(self) -> dict[str, Tensor]:
        """Return a log interval's sums by name, for summing over ranks with the same latents, and reset them.

        The result includes every device value that the host needs, so the host does not have to wait for other values.
        """
        return self.interval.sums(self.latents) | {"silence_slack": self.sae.since_fired_slack()}

    def take_state(self) -> Tensor:
        """Return the values of a `StepState` in float64 on the device, and reset the counts of skipped steps."""
        skipped = self._gradient_checks.skipped
        lr = skipped.new_full((1,), self._rate, dtype=torch.float64)
        state = torch.cat([skipped.double(), self.grad_norm.double()[None], lr])
        # Keep the count of consecutive skips.
        skipped[::2].zero_()
        return state

    def values(self, totals: dict[str, Tensor], state: StepState | None = None) -> dict[str, float]:
        """Return a log interval's metrics by name, from sums over ranks and the state at its end.

        If `state` is None, the current state is used.
        """
        # All replicas have the same slack, so divide the sum by the number of replicas.
        self.sae.take_since_fired_slack(float(totals["silence_slack"]) / self.sae.data.size)
        state = state or StepState.of(self.take_state())
        own = {"lr": state.lr, "grad_norm": state.grad_norm, "skipped_steps": float(state.skipped)}
        return self.interval.values(totals) | own

    @property
    def grad_norm(self) -> Tensor:
        """The last gradient's norm, 0-dim."""
        return self._gradient_checks.norm

    @property
    def has_loss_scale(self) -> bool:
        return self.loss_scale.enabled

    @property
    def architecture(self) -> str:
        return self._job.sae.architecture

    @property
    def k(self) -> int:
        """The configured number of active latents per token."""
        return self._job.sae.settings.n_active


def _groups(parameters: Mapping[str, nn.Parameter], following: FollowingRates | None) -> list[dict[str, Any]]:
    """Return the optimizer's parameter groups; the encoder has a separate group if it has a separate rate."""
    if following is None:
        return [{"params": [*parameters.values()]}]
    others = [one for name, one in parameters.items() if name != "W_enc"]
    return [{"params": others}, {"params": [parameters["W_enc"]], "rate": following.encoder}]
