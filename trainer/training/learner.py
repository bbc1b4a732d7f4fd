"""One SAE as it learns: forward, backward, update. A sweep is several of these on the same batches."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import msgspec
import torch
from torch import Tensor

from trainer.contract.errors import UserError
from trainer.contract.planning import memory
from trainer.contract.settings import catalog
from trainer.contract.settings.job import JobConfig
from trainer.contract.settings.job_file import deals_steps
from trainer.contract.settings.schedule import lr_factor
from trainer.metrics.base import Observation
from trainer.metrics.interval import Interval
from trainer.optimizers.base import LatentAxis, Optimizer
from trainer.parallel.base import Parallel, StepSums
from trainer.parallel.group import dense, own_part, summed
from trainer.parallel.latents import Latents
from trainer.runtime.precision import autocast, resolved
from trainer.saes.base import Output, Sae
from trainer.saes.build import build_sae
from trainer.saes.initial_weights import initialise
from trainer.saes.resample import resample
from trainer.training.gradients import LossScale, prepare, total_square
from trainer.training.zero_shards import Stepped, SteppedShare


class Learner:
    """An SAE with its optimizer, its metrics and everything else that a checkpoint of it has to hold."""

    def __init__(self, job: JobConfig, d_in: int, d_out: int | None, parallel: Parallel) -> None:
        self._job, self._train, self._device = job, job.train, parallel.device
        self._shape, device, world_size = (d_in, d_out), parallel.device, parallel.world_size
        self.total_steps = job.total_steps(world_size)
        self.tokens_per_step = job.effective_batch(world_size)
        self.sae = build_sae(job, d_in, d_out, world_size)
        self.latents = Latents(self.sae.d_sae, parallel.latents, parallel.shares.latents)
        self.sae.deal(parallel.data, parallel.peers, self.latents)
        self.sae.to(device)
        entry = catalog.entry(catalog.OPTIMIZERS, self._train.optimizer, "train.optimizer")
        lr = entry.load().auto_lr(self.sae.d_sae) if self._train.lr == "auto" else self._train.lr
        self._lr = lr * job.lr_scale(world_size)
        knobs = msgspec.structs.asdict(self._train.knobs)
        shares_steps = deals_steps(job) and parallel.data.size > 1
        self.stepped = SteppedShare(self.sae, parallel.data) if shares_steps else Stepped(self.sae)
        self._replica = parallel.data.index
        stepped, dims = self.stepped.parameters, self.sae.latent_dims()
        self.optimizer: Optimizer = entry.load()(stepped.values(), self._lr, **knobs)
        self.optimizer.unit_rows = (stepped["W_dec"],) if self.sae.unit_decoder else ()
        self.optimizer.latent_axes = {
            one: LatentAxis(dims[name], self.stepped.ids) for name, one in stepped.items() if name in dims
        }
        self._precision = resolved(self._train.precision, device)
        self.loss_scale = LossScale(device, enabled=self._precision == "fp16")
        self.interval = Interval(("loss", *self.sae.loss_names))
        # Steps skipped in this log interval, and those in a row up to now.
        self.skipped, self.skipped_in_a_row = torch.zeros((), device=device), torch.zeros((), device=device)
        self.grad_norm = torch.zeros((), device=device)

    def initialise(self, x: Tensor, y: Tensor) -> None:
        """Start from a sample of the data, x [n, d_in] and targets y [n, d_out]."""
        initialise(self.sae, x, y, self._job.sae, self._train.seed)

    def step(self, step: int, x: Tensor, y: Tensor | None = None) -> None:
        """A whole step on one batch of raw data, where nobody else has a part in it."""
        self.begin_step(step)
        self.accumulate(x, x if y is None else y)
        self.update()

    def begin_step(self, step: int) -> None:
        """Set what changes over a run."""
        self.sae.begin_step(step / self.total_steps)
        decay = 0.0 if self.optimizer.is_schedule_free else self._train.decay_fraction
        for group in self.optimizer.param_groups:
            group["lr"] = self._lr * lr_factor(step, self.total_steps, self._train.warmup_fraction, decay)

    def accumulate(self, x: Tensor, y: Tensor, of_all: int | None = None) -> None:
        """Forward and backward pass of a micro-batch of raw data; `y` is `x` but for a transcoder.

        Where other ranks have tokens of it too, `of_all` is how many there are.
        """
        self.sae.batch_tokens = of_all or len(x)
        normalised = x * self.sae.x_scale
        own = own_part(normalised if y is x else y, self.latents.group)
        target = own if y is x else own * self.sae.y_scale
        output = self.forward(normalised, target)
        loss = self.sae.objective(output.losses)
        # The tokens expected of all ranks and micro-batches; `update` corrects by those that came.
        (loss * (self.loss_scale.factor / self.tokens_per_step)).backward()
        self._observe(target, output, loss)

    @property
    def state_bytes(self) -> int:
        """Of what the optimizer remembers from its first step on."""
        n_values = sum(parameter.numel() for parameter in self.stepped.parameters.values())
        return round(n_values * memory.state_bytes(self._train))

    @torch.no_grad()
    def forget_pass(self) -> None:
        """As if `accumulate` had not been called since the last update."""
        self.sae.zero_grad()
        self.sae.step_sums.zero_()
        self.interval = Interval(("loss", *self.sae.loss_names))

    def forward(self, x: Tensor, y: Tensor) -> Output:
        """The SAE's own pass over normalised data and this rank's part of the targets, in the run's arithmetic."""
        with autocast(self._precision, self._device):
            output: Output = self.sae(x, y)
        return output

    @torch.no_grad()
    def _observe(self, y: Tensor, output: Output, loss: Tensor) -> None:
        seen = Observation(y, output.x_hat, output.acts, self.sae.dead(), self.sae.y_mean)
        self.interval.observe(seen, output.losses | {"loss": loss})

    def exchanged(self) -> StepSums:
        """What is summed over ranks between the last backward pass and `update`."""
        dims, counts = self.sae.latent_dims(), self.sae.step_sums
        shared = [one.grad for name, one in self.sae.named_parameters() if name not in dims and one.grad is not None]
        return StepSums(
            of_latents=[*self.stepped.summed(), counts[: self.sae.n_own]],
            dealt=self.stepped.dealt(),
            of_all=[*shared, counts[self.sae.n_own :]],
        )

    @torch.no_grad()
    def update(self) -> None:
        """Take the step, unless a gradient is not finite: then nothing changes but the count of such steps."""
        self.stepped.begin()
        self.sae.project_gradient(self.stepped.rows)
        share = self.sae.n_tokens_in_step() / self.tokens_per_step
        scale = self.loss_scale.factor * share
        norm = self._total_norm()
        self.grad_norm, self.optimizer.grad_scale, bad = prepare(norm, scale, self._train.grad_clip)
        self.loss_scale.update(bad)
        self.optimizer.found_inf = bad
        self.optimizer.step()
        self.sae.constrain(bad > 0, self.stepped.rows)
        self.stepped.end()
        self.sae.zero_grad()
        self.sae.step_sums.copy_(torch.where(bad > 0, 0, self.sae.step_sums))
        self.sae.end_step(self.tokens_per_step)
        self.skipped += bad
        self.skipped_in_a_row = (self.skipped_in_a_row + bad) * bad

    def _total_norm(self) -> Tensor:
        """The gradient's norm over all latents, 0-dim, in one pass over it that only reads."""
        dims = self.sae.latent_dims()
        parts: dict[bool, list[Tensor]] = {True: [], False: []}
        for name, parameter in self.stepped.parameters.items():
            if parameter.grad is not None:
                parts[name in dims].append(dense(parameter.grad))
        of_latents, of_all = (total_square(parts[is_own]) for is_own in (True, False))
        of_latents = summed(summed(of_latents, self.stepped.others), self.latents.group)
        return (of_latents + of_all).sqrt().float()

    def is_resampled_after(self, step: int) -> bool:
        """Whether dead latents are to be resampled when so many steps are done: what is revived needs time to learn."""
        every, tokens = self._job.sae.resample_every_tokens, step * self.tokens_per_step
        return every > 0 and step <= self.total_steps / 2 and tokens // every > (tokens - self.tokens_per_step) // every

    def resample(self, step: int, x: Tensor, y: Tensor) -> Tensor:
        """Revive dead latents by rows of raw data; which ones, bool [d_sae]. Then `forget` them."""
        generator = torch.Generator().manual_seed(self._train.seed + step)
        return resample(self.sae, x * self.sae.x_scale, y * self.sae.y_scale, generator)

    def forget(self, revived: Tensor) -> None:
        """Let the optimizer start anew with latents (bool [d_sae]) whose weights were replaced, on all ranks alike."""
        self.optimizer.forget(self.stepped.own(revived, 0))

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """The SAE as it will be exported, for as long as the context lasts."""
        self.sae.eval()
        self.optimizer.use_trained_weights()
        try:
            yield
        finally:
            self.optimizer.use_stepped_weights()
            self.sae.train()

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Everything that training changes, by name: what a checkpoint holds."""
        yield from (("sae." + name, value) for name, value in self.sae.state_dict().items())
        for name, parameter in self.stepped.parameters.items():
            for kind, value in self.optimizer.state.get(parameter, {}).items():
                yield f"optimizer.{kind}.{name}", value
        yield from (("loss_scale." + name, value) for name, value in self.loss_scale.state().items())

    def collected(self) -> dict[str, Tensor] | None:
        """`tensors` with all latents on the first of the ranks that share them, None on the others; all have to ask."""
        return self._collected(dict(self.tensors()))

    def _collected(self, tensors: dict[str, Tensor]) -> dict[str, Tensor] | None:
        of_replica = {name: self._of_replica(name, tensor) for name, tensor in tensors.items()}
        # Other replicas have the same.
        if self._replica:
            return None
        found = {name: self._whole(name, tensor) for name, tensor in of_replica.items() if tensor is not None}
        if self.latents.group.index:
            return None
        return {name: tensor for name, tensor in found.items() if tensor is not None}

    def _of_replica(self, name: str, tensor: Tensor) -> Tensor | None:
        """With all latents of this replica, where the optimizer has a share of them."""
        dim = self._latent_dim(name, tensor) if name.startswith("optimizer.") else None
        return tensor if dim is None else self.stepped.collected(tensor, dim)

    def _whole(self, name: str, tensor: Tensor) -> Tensor | None:
        dim = self._latent_dim(name, tensor)
        return tensor if dim is None or not self.latents.is_shared else self.latents.collected(tensor, dim)

    def _latent_dim(self, name: str, tensor: Tensor) -> int | None:
        """Along which dimension the latents of a checkpoint's tensor lie; it is named after what it belongs to."""
        dim = self.sae.latent_dims().get(name.rpartition(".")[2])
        return dim if dim is not None and tensor.dim() > dim else None

    def whole_sae(self) -> Sae | None:
        """The SAE with all its latents where `collected` gives them, elsewhere None; from `evaluating` as exported."""
        if not self.latents.is_shared:
            return self.sae
        tensors = self._collected({name: one for name, one in self.tensors() if name.startswith("sae.")})
        if tensors is None:
            return None
        sae = build_sae(self._job, *self._shape)
        sae.load_state_dict(under(tensors, "sae."))
        return sae.eval()

    def load(self, tensors: dict[str, Tensor]) -> None:
        """Put back this rank's part of what `collected` gave; raises `UserError` where it is another SAE's."""
        silence = tensors.get("sae.n_tokens_since_fired")
        tensors = {name: self._part(name, tensor) for name, tensor in tensors.items()}
        saved = under(tensors, "sae.")
        try:
            self.sae.load_state_dict(saved)
        except RuntimeError as error:
            reason = str(error).splitlines()[-1].strip()
            raise UserError(f"the checkpoint does not fit this job's SAE: {reason}") from error
        if silence is not None:
            self.sae.note_silence(silence)
        state = under(tensors, "optimizer.")
        for name, parameter in self.stepped.parameters.items():
            found = {key.partition(".")[0]: value for key, value in state.items() if key.partition(".")[2] == name}
            if found:
                # A fused Adam keeps its step count beside the parameters.
                placed = {kind: _laid_out_like(parameter, value) for kind, value in found.items()}
                self.optimizer.state[parameter] = placed
        self.loss_scale.load(under(tensors, "loss_scale."))

    def _part(self, name: str, tensor: Tensor) -> Tensor:
        dim = self._latent_dim(name, tensor)
        if dim is None:
            return tensor
        if self.latents.is_shared and tensor.shape[dim] != self.sae.d_sae:
            has = f"{name} has {tensor.shape[dim]} latents instead of {self.sae.d_sae}"
            raise UserError(f"the checkpoint does not fit this job's SAE: {has}")
        part = self.latents.part(tensor, dim)
        return self.stepped.own(part, dim) if name.startswith("optimizer.") else part

    def agree(self) -> None:
        """Copy from one rank what others have too: unlike cards round differently."""
        state, own = self.sae.state_dict(), self.sae.latent_dims()
        self.latents.group.copy_from_first_(tensor for name, tensor in state.items() if name not in own)
        self.sae.data.copy_from_first_(state.values())

    def values(self, totals: dict[str, Tensor]) -> dict[str, float]:
        """What a log interval has given, from sums added over ranks."""
        lr = float(self.optimizer.param_groups[0]["lr"])
        return self.interval.values(totals) | {"lr": lr, "grad_norm": float(self.grad_norm)}

    def take_skipped(self) -> tuple[int, int]:
        """Steps skipped since the last call, and how many in a row up to now."""
        skipped, self.skipped = int(self.skipped), torch.zeros_like(self.skipped)
        return skipped, int(self.skipped_in_a_row)

    @property
    def has_loss_scale(self) -> bool:
        return self.loss_scale.enabled

    @property
    def architecture(self) -> str:
        return self._job.sae.architecture


def _laid_out_like(parameter: Tensor, value: Tensor) -> Tensor:
    """A fused optimizer goes through the memory of all its tensors in one order, which a file does not keep."""
    if value.shape != parameter.shape:
        return value.to(parameter.device)
    return torch.empty_like(parameter, dtype=value.dtype).copy_(value)


def under(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Those whose name begins so, by the rest of their name."""
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
