"""The interface for SAE architectures."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterator
from functools import partial
from types import ModuleType
from typing import Any, NamedTuple

import msgspec
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainer.contract.settings.architectures import ArchitectureSettings
from trainer.parallel.group import Group, local_shard, reduce_scatter
from trainer.parallel.latents import Latents
from trainer.saes.kernels.buffer_sizer import BufferSizer
from trainer.saes.kernels.encode import Choose, centre, encode
from trainer.saes.kernels.select import above
from trainer.saes.kernels.since_fired import add_tokens, count
from trainer.saes.kernels.sparse import decode, decoded_by_kernels, dots, gradient_dtype
from trainer.saes.losses import Errors, Sums, errors_of, errors_of_decoded, triton_for
from trainer.saes.row_gradients import RowGradients
from trainer.saes.sparse_acts import Acts

# Selects all latents.
ALL = slice(None)


class SaeSpec(msgspec.Struct, frozen=True):
    """An SAE's specification; `d_out` is set only for a transcoder, and is the width of a single target."""

    d_in: int
    d_sae: int
    settings: ArchitectureSettings
    d_out: int | None = None
    # Add a linear skip connection to a transcoder, so that latents need to explain only the nonlinear remainder.
    has_skip: bool = False
    # Give each dimension its own scale, and store the raw mean of dimensions with scale 0.
    scales_dimensions: bool = False
    # The number of parts that a crosscoder's rows are joined from.
    n_parts: int = 1
    # For a layer of a cross-layer transcoder, the number of layers that its latents write to: its own and all later
    # ones. All layers have the same `d_out`.
    n_targets: int = 1
    # The number of tokens without firing after which a latent is considered dead.
    dead_after_tokens: int = 400_000


class Output(NamedTuple):
    """The result of one forward pass.

    `acts` are the activations of this rank's latents, and `x_hat` [n_tokens, d_out] is the reconstruction of its
    tokens. `losses` are sums over this rank's tokens and latents; the caller sums them over ranks. The loss "mse" is
    Σ‖y − x_hat‖². `sums` contains sums of the errors of x_hat, so that metrics do not have to recompute them. In
    training, `own_sums` are the 0-dim sums that the architecture's `learn_from` needs.
    """

    acts: Acts
    x_hat: Tensor
    losses: dict[str, Tensor]
    sums: Sums | None = None
    own_sums: tuple[Tensor, ...] = ()


class Traits(NamedTuple):
    """An architecture's constants."""

    # Names of the loss terms.
    losses: tuple[str, ...] = ("mse",)
    # The number of `Output.own_sums`.
    n_own_sums: int = 0
    # Keep the rows of W_dec at unit norm.
    unit_decoder: bool = True
    # The initial norm of the encoder columns, unless the job sets one.
    encoder_scale: float = 0.3
    # A revived latent's encoder norm, as a fraction of the live latents' mean norm. Bricken et al. 2023 use 0.2, so
    # that a revived latent does not immediately fire on everything.
    revived_share: float = 0.2
    # Sparse matmuls read W_enc and W_dec only in the matmul dtype.
    reads_narrow: bool = False
    # `forward` calls `encode_above`, which may lose activations; a step that loses any is skipped.
    encodes_above: bool = False


class Declared(NamedTuple):
    """How a parameter or buffer is indexed by latent."""

    # The dimension that has one entry per latent; None if all latents share the tensor.
    latent_dim: int | None
    # Whether the tensor has the shape [d_sae] and the units of pre-activations. When a latent is revived, its biases
    # are set to a fraction of the live latents' mean, and its other parameters, except W_enc and W_dec, to 0.
    is_bias: bool = False
    # The lower bound, enforced by clamping after each step; only for tensors with `latent_dim` 0.
    lowest: float | None = None


def saelens_name(of_sae: str, *, is_transcoder: bool, has_skip: bool = False) -> str:
    """Return an architecture's SAELens name; `of_sae` is the name used for SAEs that are not transcoders.

    Transcoder names omit "standard".
    """
    if not is_transcoder:
        return of_sae
    kind = "skip_transcoder" if has_skip else "transcoder"
    return kind if of_sae == "standard" else f"{of_sae}_{kind}"


class Sae(nn.Module, ABC):
    """An SAE, or a transcoder if the target differs from the input.

    An architecture defines `forward`, `objective` and `export_config`, and optionally `traits`, `export_weights`,
    `calibrate`, `begin_step` and `learn_from`. It must not override anything else, and it needs its own constructor
    only if it has additional parameters or buffers. This constructor takes the same `SaeSpec`, and adds these tensors
    to `declared` before it sets them.

    The model works on normalised data: x · `x_scale` for the input, y · `y_scale` for the target. Both scales are
    0-dim, or vectors if each dimension has its own scale. A dimension with scale 0 is left out; its reconstruction is
    its mean, stored in `dropped_mean`. `x_mean` [d_in], `y_mean` [d_out] and `y_variance` (total, per token) are
    computed from a sample of the normalised data and stay fixed, so that neither the loss nor the gradients depend on
    how a batch is split.

    Every quantity learnt without a gradient is computed from `step_sums`, a tensor summed over micro-batches and ranks.
    It contains the number of tokens on which each latent fired [n_own], the total number of tokens, Σ‖y − x_hat‖²,
    whether activations were lost (if `traits.encodes_above`), and `Output.own_sums`.

    A rank may hold only `n_own` of the d_sae latents; a tensor documented as [d_sae] then has entries only for these
    latents. Ranks that share latents encode the same tokens. After these ranks have summed their decoded contributions,
    each rank continues with its own part of the tokens: x_hat and everything computed from it, such as the squared
    error, cover only the `local_shard` of the tokens.
    """

    traits = Traits()

    settings: ArchitectureSettings
    # A transcoder's skip connection [d_in, d_out], from the input to the output, or None. W_skip is initialised to 0,
    # as in Paulo, Shabalin & Belrose 2025, arXiv 2501.18823. W_skip has the same learning rate as the other weights:
    # with 0.3 or 3 times that rate, the held-out FVU of SmolLM2's 12th MLP after 150 steps was 0.258 and 0.262,
    # respectively, instead of 0.250.
    W_skip: nn.Parameter | None
    x_scale: Tensor
    y_scale: Tensor
    dropped_mean: Tensor | None
    # The widths of the parts that a crosscoder's rows are joined from, int64 [n_parts]; None for other SAEs.
    part_widths: Tensor | None
    target_scales: Tensor | None
    y_mean: Tensor
    y_variance: Tensor
    x_mean: Tensor
    ids: Tensor
    n_tokens_since_fired: Tensor
    step_sums: Tensor

    def __init__(self, spec: SaeSpec) -> None:
        super().__init__()
        per_latent = dict.fromkeys(("W_dec", "ids", "n_tokens_since_fired"), Declared(0))
        shared = dict.fromkeys(("b_dec", "W_skip"), Declared(None))
        self.declared = {"W_enc": Declared(1), "b_enc": Declared(0, is_bias=True), **per_latent, **shared}
        self.settings, self.dead_after_tokens = spec.settings, spec.dead_after_tokens
        self.d_in, self.d_sae = d_in, d_sae = spec.d_in, spec.d_sae
        self.data, self.peers, self.latents = Group(), Group(), Latents(d_sae)
        self.row_gradients = RowGradients()
        self.is_transcoder = spec.d_out is not None
        self.d_out = d_out = spec.d_out or d_in
        self.n_targets = spec.n_targets
        # Store each latent's weights contiguously, as in W_dec. The sparse matmuls produce the gradient in this
        # layout, and copying it into the transposed layout took 17 ms of a 350 ms step with 16,384 latents on two
        # cores.
        self.W_enc = nn.Parameter(torch.zeros(d_sae, d_in).T)
        self.b_enc = nn.Parameter(torch.zeros(d_sae))
        self.W_dec = nn.Parameter(torch.zeros(d_sae, spec.n_targets * d_out))
        self.b_dec = nn.Parameter(torch.zeros(d_out))
        self.register_parameter("W_skip", nn.Parameter(torch.zeros(d_in, d_out)) if spec.has_skip else None)
        self.register_buffer("x_scale", torch.ones(d_in if spec.scales_dimensions else ()))
        self.register_buffer("y_scale", torch.ones(d_out if spec.scales_dimensions else ()))
        self.register_buffer("dropped_mean", torch.zeros(d_out) if spec.scales_dimensions else None)
        self.register_buffer("part_widths", torch.zeros(spec.n_parts, dtype=torch.int64) if spec.n_parts > 1 else None)
        # The scales of the targets that the latents write to, own first; None for other SAEs.
        self.register_buffer("target_scales", torch.ones(spec.n_targets) if spec.n_targets > 1 else None)
        self.register_buffer("x_mean", torch.zeros(d_in))
        self.register_buffer("y_mean", torch.zeros(d_out))
        self.register_buffer("y_variance", torch.ones(()))
        self.register_buffer("ids", torch.arange(d_sae), persistent=False)
        self.register_buffer("n_tokens_since_fired", torch.zeros(d_sae, dtype=torch.int64))
        # Kept in a single tensor so that one all-reduce suffices. Counts in fp32 are exact up to 16 million tokens per
        # step.
        self.register_buffer("step_sums", self._new_sums(), persistent=False)
        # For each latent, the number of tokens on which it fired in the last training pass, float [d_sae].
        self.fired: Tensor | None = None
        # In a cross-layer transcoder, the decoded latents of earlier layers for this layer's target and all later ones,
        # [n_tokens, n_targets * d_out], and the decoded latents of all layers so far for the later targets,
        # [n_tokens, (n_targets - 1) * d_out]. Both are sums over this rank's latents. `Layers` sets the first one.
        self.written_before: Tensor | None = None
        self.written_later: Tensor | None = None
        # The number of tokens in a micro-batch, summed over all ranks; set only if there are several ranks.
        self.batch_tokens = 0
        # Whether the forward pass depends on `may_have_dead`.
        self.reads_dead = False
        # The half of the held-out rows that is being measured, 0 or 1; None outside `measuring_half`.
        self.held_out_half: int | None = None
        self._host_values: Hashable = ()
        self._buffer_sizer = BufferSizer() if self.traits.encodes_above else None
        # An upper bound on `n_tokens_since_fired`, kept on the host so that reading it does not sync with the device.
        self._longest_since_fired = 0
        self.register_load_state_dict_post_hook(lambda *_: self.note_since_fired(self.n_tokens_since_fired))  # type: ignore[no-untyped-call]

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        others = {name for name in vars(Sae) if not name.startswith("_")} - OVERRIDABLE
        if wrong := sorted(others & vars(cls).keys()):
            raise TypeError(f"{cls.__name__} must not override {', '.join(wrong)}")

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        if name not in self.declared:
            raise TypeError(f"{type(self).__name__}: add {name} to `declared` before you set it")
        super().register_parameter(name, param)

    def _new_sums(self) -> Tensor:
        return torch.zeros(self.n_own + 2 + self.traits.encodes_above + self.traits.n_own_sums)

    @property
    def n_own(self) -> int:
        """The number of latents held by this rank."""
        return len(self.ids)

    @property
    def acts_scale(self) -> Tensor:
        """The factor (0-dim) that converts activations from the units of raw data to normalised units: max y_scale."""
        return self.y_scale.max() if self.y_scale.dim() else self.y_scale

    @property
    def raw_scale(self) -> Tensor:
        """The divisor that converts normalised targets to raw ones: `y_scale`, with ∞ for left-out dimensions."""
        return self.y_scale if self.dropped_mean is None else self.y_scale.masked_fill(self.y_scale == 0, torch.inf)

    def raw(self, x_hat: Tensor) -> Tensor:
        """Convert reconstructions [n_tokens, d_out] of normalised targets to the units of raw targets."""
        raw = x_hat / self.raw_scale
        return raw if self.dropped_mean is None else raw + self.dropped_mean

    @property
    def dimension_scales(self) -> Tensor | None:
        """The scale of each target dimension [d_out] relative to `acts_scale`, 0 if left out; None if all are 1."""
        return None if self.dropped_mean is None else self.y_scale / self.acts_scale

    def raw_decoder(self) -> Tensor:
        """Return the latents' output directions for raw data [d_sae, d_out]: W_dec divided by the dimension scales.

        A layer of a cross-layer transcoder has one direction per target: [d_sae, n_targets * d_out].
        """
        if self.target_scales is not None:
            factors = (self.acts_scale / self.target_scales).repeat_interleave(self.d_out)
            return self.W_dec * factors
        return self.W_dec if self.dropped_mean is None else self.W_dec / (self.raw_scale / self.acts_scale)

    @torch.no_grad()
    def shard(self, data: Group, peers: Group, latents: Latents) -> None:
        """Keep only this rank's latents; call this before weights are set. Ranks in `data` hold the same latents."""
        self.data, self.peers, self.latents = data, peers, latents
        for name, dim in self.latent_dims().items():
            whole = getattr(self, name)
            part = latents.part(whole.detach(), dim)
            setattr(self, name, nn.Parameter(part) if isinstance(whole, nn.Parameter) else part)
        self.step_sums = self._new_sums()

    def __call__(self, x: Tensor, y: Tensor) -> Output:
        """Run `forward`; in training, also add the token counts, firing counts and errors to `step_sums`."""
        output: Output = super().__call__(x, y)
        if self.training:
            error, own = output.losses["mse"], output.own_sums
            if self._buffer_sizer:
                overflowed = self._buffer_sizer.overflowed
                own = (error.new_zeros(()) if overflowed is None else overflowed.to(error.dtype), *own)
            self.fired = count(self.step_sums, output.acts, len(y), error, *own)
        return output

    @abstractmethod
    def forward(self, x: Tensor, y: Tensor) -> Output:
        """Encode x [n_tokens, d_in], and reconstruct the target y [n_tokens, d_out]."""

    @abstractmethod
    def objective(self, losses: dict[str, Tensor]) -> Tensor:
        """Return the quantity to minimise, 0-dim, as a sum over the same tokens as `losses`."""

    @abstractmethod
    def export_config(self) -> dict[str, Any]:
        """Return the entries of SAELens's cfg.json that are specific to this architecture."""

    def export_weights(self) -> dict[str, Tensor]:
        """Return the weights by SAELens name, with the scales folded in so that inputs and outputs are raw data.

        The exported activations are in raw target units, so encoder biases and thresholds are divided by `acts_scale`.
        If all dimensions share one scale, W_dec is unchanged. A left-out dimension has a row of zeros in W_enc, a
        column of zeros in W_dec, and its mean in b_dec.
        """
        # Transcoders in SAELens do not subtract a bias from their input.
        folded = self.x_mean @ self.W_enc if self.is_transcoder else 0
        x_scale = self.x_scale.reshape(-1, 1)
        weights = {
            "W_enc": self.W_enc * (x_scale / self.acts_scale),
            "b_enc": (self.b_enc - folded) / self.acts_scale,
            "W_dec": self.raw_decoder(),
            # The biases of later targets belong to later layers.
            "b_dec": F.pad(self.raw(self.b_dec), (0, (self.n_targets - 1) * self.d_out)),
        }
        if self.W_skip is not None:
            # The shape is [d_out, d_in], as in SAELens, sparsify and circuit-tracer.
            weights["W_skip"] = (self.W_skip * (x_scale / self.raw_scale)).T
            weights["b_dec"] = self.raw(self.b_dec - self.x_mean @ self.W_skip)
        return weights

    def saelens_name(self, of_sae: str) -> str:
        return saelens_name(of_sae, is_transcoder=self.is_transcoder, has_skip=self.W_skip is not None)

    @contextlib.contextmanager
    def measuring_half(self, half: int) -> Iterator[None]:
        """Within the context, measure rows from held-out half 0 or 1 without any value fitted on these rows."""
        self.held_out_half = half
        try:
            yield
        finally:
            self.held_out_half = None

    def calibrate(self, x: Tensor) -> None:
        """Set the parameters that depend on the initial pre-activations of normalised x [n, d_in], if there are any."""

    def begin_step(self, progress: float) -> Hashable:
        """Update the values that change during a run, and return any values kept on the host.

        `progress` is the completed fraction of the run, 0 to 1.

        A CUDA graph keeps using the host values from capture time, so it is replayed only while these values are
        unchanged.
        """
        return ()

    def start_step(self, progress: float) -> None:
        """Start a step; `progress` is the completed fraction of the run, 0 to 1."""
        self._host_values = self.begin_step(progress)

    @property
    def input_bias(self) -> Tensor:
        """The vector subtracted from x before encoding: b_dec, or x_mean for a transcoder.

        A transcoder's b_dec is in the output space, so it cannot be subtracted from x. The encoder's bias b_enc cannot
        compensate for a nonzero mean of x: with a mean of twice the spread, all latents died within 64 steps, because
        every update of W_enc shifts all pre-activations by the product of the mean and the update.
        """
        return self.x_mean if self.is_transcoder else self.b_dec

    def encode(self, x: Tensor, choose: Choose) -> Acts:
        """Return the pre-activations of x [n_tokens, d_in] kept by `choose`."""
        return self.encode_centred(centre(x, self.input_bias), choose)

    def encode_centred(self, centred: Tensor, choose: Choose) -> Acts:
        """Return the pre-activations kept by `choose`; `centred` is x − input_bias, from `centre`."""
        return encode(centred, self.W_enc, self.b_enc, self.input_bias, choose)

    def encode_above(self, x: Tensor, bound: Tensor | float) -> Acts:
        """Return the pre-activations of x [n_tokens, d_in] above a bound (a number or [d_sae]).

        The result may include values below the bound, and may be dense.
        """
        assert self._buffer_sizer, "set `encodes_above` in the traits"
        may_wait = not (self.training and x.is_cuda)
        return self.encode(x, partial(above if may_wait else self._buffer_sizer.above, bound=bound))

    def reconstruct(self, acts: Acts, x: Tensor, y: Tensor) -> tuple[Tensor, Errors]:
        """Return x_hat [n_tokens, d_out] for this rank's tokens, and its errors; `acts` are the activations for x.

        If kernels compute x_hat, it has no gradient; training does not need one.
        """
        kernels = self.kernels_of_errors(y)
        if kernels and (decoded := decoded_by_kernels(acts, self.W_dec)):
            return errors_of_decoded(y, decoded, self.b_dec, self.y_mean, kernels)
        of_latents = self._decode(acts)
        x_hat = of_latents + self.offset(local_shard(x, self.latents.group))
        return x_hat, errors_of(y, x_hat, self.y_mean)

    def _decode(self, acts: Acts) -> Tensor:
        """Return the decoded latents of all ranks for this SAE's target and this rank's tokens, [n_tokens, d_out].

        In a cross-layer transcoder, the result includes the latents of earlier layers. Ranks exchange only this layer's
        target, since later layers add to the other targets.
        """
        before, group = self.written_before, self.latents.group
        if self.n_targets == 1 and before is None:
            return decode(acts, self.W_dec, group)
        written = decode(acts, self.W_dec)
        written = written if before is None else written + before
        own, self.written_later = written.split((self.d_out, written.shape[1] - self.d_out), dim=1)
        return reduce_scatter(own.contiguous(), group, gradient_dtype(self.W_dec))

    def kernels_of_errors(self, y: Tensor) -> ModuleType | None:
        """Return the kernels that decode and compute the errors from the targets y in one pass, or None if none apply.

        The kernels apply only in training, and only if x_hat is b_dec plus the contributions of this rank's latents.
        """
        is_alone = self.n_targets == 1 and self.written_before is None
        may = self.training and self.W_skip is None and is_alone and self.latents.group.size == 1
        return triton_for(y, self.b_dec) if may else None

    def offset(self, x: Tensor) -> Tensor:
        """Return the offset added to the latents' output: b_dec [d_out], or [n, d_out] with a skip connection.

        The skip connection reads x − x_mean. If it read x itself, and the mean of x were far from 0, each update of
        W_skip would also shift the mean of the output.
        """
        if self.W_skip is None:
            return self.b_dec
        # Under autocast the product is 16-bit, so add b_dec separately, in fp32.
        return (x - self.x_mean) @ self.W_skip + self.b_dec

    def dead(self) -> Tensor:
        """Return a mask of the dead latents, bool [d_sae], identical on all ranks that hold these latents."""
        return self.n_tokens_since_fired >= self.dead_after_tokens

    def may_have_dead(self) -> bool:
        """Return whether any latent may be dead.

        The result is the same on all ranks, and needs no device sync or communication. A result of False is always
        correct. True may be wrong if the latents are on a GPU or shared among ranks, since the host then knows only an
        upper bound.
        """
        if self.n_tokens_since_fired.is_cuda or self.latents.is_shared:
            return self._longest_since_fired >= self.dead_after_tokens
        return bool(self.dead().any())

    def latent_dims(self) -> dict[str, int]:
        """Return a dict mapping each per-latent parameter or buffer to the dimension that indexes latents."""
        return {name: one.latent_dim for name, one in self.declared.items() if one.latent_dim is not None}

    @torch.no_grad()
    def revive(self, latents: Tensor, reads: Tensor, writes: Tensor) -> None:
        """Set n latents' encoder directions to `reads` [n, d_in], and their decoder directions to `writes` [n, d_out].

        The mask `latents`, bool [d_sae], marks these latents. Their biases are set to a fraction of the live latents'
        mean bias, and their other parameters to 0.
        """
        living = ~self.latents.whole(latents)
        share = self.traits.revived_share
        self.W_enc[:, latents] = share * self._mean(self.W_enc.norm(dim=0), living) * reads.T
        self.W_dec[latents] = self._mean(self.W_dec.norm(dim=1), living) * writes
        for name, own in self.named_parameters(recurse=False):
            dim, is_bias, _ = self.declared[name]
            if name not in ("W_enc", "W_dec") and dim is not None:
                own.movedim(dim, 0)[latents] = share * self._mean(own, living) if is_bias else 0

    def _mean(self, own: Tensor, counted: Tensor) -> Tensor:
        """Return the mean of `own` [n_own] over the latents marked in `counted`, bool [n_total], on all ranks."""
        return self.latents.whole(own)[counted].mean()

    def note_since_fired(self, n_tokens_since_fired: Tensor) -> None:
        """Set the host's upper bound from the counts of all latents, so that all ranks make the same decisions."""
        self._longest_since_fired = int(n_tokens_since_fired.max()) if len(n_tokens_since_fired) else 0

    def note_since_fired_of(self, other: Sae) -> None:
        """Copy the host's upper bound from an SAE with the same counts."""
        self._longest_since_fired = other._longest_since_fired

    @torch.no_grad()
    def since_fired_slack(self) -> Tensor:
        """Return the amount by which the host's upper bound exceeds the true maximum, float64 [1] on the device.

        This is a collective call: all ranks that train this SAE must make it, and all of them get the same result.
        """
        # Add a 0, since a rank may have no latents.
        own = F.pad(self.n_tokens_since_fired, (1, 0)).max()
        return (self._longest_since_fired - self.latents.group.gather(own).max()).double()[None]

    def take_since_fired_slack(self, slack: float) -> None:
        """Lower the host's upper bound using a `since_fired_slack` result that may be several steps old."""
        self._longest_since_fired -= round(slack)

    def has_overflowed(self) -> Tensor | None:
        """Return whether any rank lost activations in this step, 0-dim bool; such a rank has set its gradients to NaN.

        The result is None if this architecture never loses activations. `step_sums` must be summed over all ranks
        before this call.
        """
        return self.step_sums[self.n_own + 2] > 0 if self._buffer_sizer else None

    def forget_passes(self) -> None:
        """Discard the sums and counts from the forward passes since the last step."""
        self.step_sums.zero_()
        if self._buffer_sizer:
            self._buffer_sizer = BufferSizer()

    def n_tokens_in_step(self) -> Tensor:
        """Return the number of tokens in `step_sums`, 0-dim on the device."""
        return self.step_sums[self.n_own]

    @torch.no_grad()
    def end_step(self, n_tokens: Tensor) -> None:
        """Process and clear `step_sums`, already summed over all micro-batches and ranks in the step.

        `n_tokens` (0-dim) is the number of tokens in the step. If the step is skipped, `n_tokens` is 0, and the sums
        are ignored.
        """
        self._steer(n_tokens)
        self.learn_from(add_tokens(self.n_tokens_since_fired, self.step_sums, n_tokens))

    def _steer(self, n_tokens: Tensor) -> None:
        """Process a step's firing counts before they are cleared."""

    def decide(self, n_tokens: int) -> Hashable | None:
        """Make all host-side decisions for the next training pass before it is queued.

        Call this only on a single GPU, and only if each step has a single pass.

        Return a key that identifies the decisions: a CUDA graph of the pass can be replayed whenever the key is the
        same. Return None if the pass takes so long on the GPU that a graph would not be worth its memory.
        """
        own = self._host_values, self.reads_dead and self.may_have_dead()
        if not self._buffer_sizer:
            return own
        capacity = self._buffer_sizer.decide(n_tokens, self.n_own)
        return None if capacity is None else (own, capacity)

    def count_step(self, n_tokens: int) -> None:
        """Record on the host that a step with `n_tokens` tokens is queued, and raise the upper bound accordingly."""
        self._longest_since_fired += n_tokens
        if self._buffer_sizer:
            self._buffer_sizer.queued()

    def learn_from(self, sums: Tensor) -> None:
        """Process the sums from one step: its token count, Σ‖y − x_hat‖², and the sums in `Output.own_sums`."""

    @torch.no_grad()
    def project_gradient(self, rows: slice = ALL) -> None:
        """Remove the component of W_dec's gradient along each decoder row, before the optimizer updates its moments."""
        if self.traits.unit_decoder and self.W_dec.grad is not None:
            grad, weights = self.W_dec.grad[rows], self.W_dec[rows]
            grad.addcmul_(dots(grad, weights)[:, None], weights, value=-1)

    @torch.no_grad()
    def constrain(self, rows: slice = ALL) -> None:
        """Clamp the parameters of the latents `rows` after a step; W_dec is already normalised."""
        for name, of in self.declared.items():
            if of.lowest is not None:
                getattr(self, name)[rows].clamp_min_(of.lowest)

    @torch.no_grad()
    def normalise_decoder(self, skips: Tensor | None = None, rows: slice = ALL) -> None:
        """Scale the rows of W_dec to unit norm, unless `skips` (0-dim bool) marks the step as skipped."""
        if self.traits.unit_decoder:
            weights = self.W_dec[rows]
            norm = weights.norm(dim=1, keepdim=True)
            weights.div_(norm if skips is None else norm.masked_fill(skips, 1))


# The attributes that an architecture may define; it must define the abstract methods.
OVERRIDABLE = Sae.__abstractmethods__ | {"traits", "export_weights", "calibrate", "begin_step", "learn_from"}
