"""The interface of an SAE architecture; the training loop does the rest."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterator
from types import ModuleType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainer.parallel.group import Group, own_part
from trainer.parallel.latents import Latents
from trainer.saes.kernels.silence import count, take_in
from trainer.saes.kernels.sparse import decode, decoded_by_kernels, dots
from trainer.saes.losses import Errors, Sums, errors_of, errors_of_decoded, triton_for
from trainer.saes.row_gradients import RowGradients
from trainer.saes.sparse_acts import Acts

# A slice of latents: all of them.
ALL = slice(None)


class Output(NamedTuple):
    """One forward pass: `acts` of this rank's latents, the reconstruction `x_hat` [n_tokens, d_out] of its tokens, and
    loss terms: sums over tokens and latents, to be added up over the ranks that share them. What `sums` has of the
    errors of x_hat metrics need not add up again."""

    acts: Acts
    x_hat: Tensor
    losses: dict[str, Tensor]
    sums: Sums | None = None


def saelens_name(of_sae: str, *, is_transcoder: bool, has_skip: bool = False) -> str:
    """Return SAELens' name of an architecture whose SAE it calls `of_sae`, without the word "standard"."""
    if not is_transcoder:
        return of_sae
    kind = "skip_transcoder" if has_skip else "transcoder"
    return kind if of_sae == "standard" else f"{of_sae}_{kind}"


class Sae(nn.Module, ABC):
    """An SAE, or a transcoder where the target is not the input; a subclass adds an encoder, its loss and its export.

    It works on normalised data: x · `x_scale` for the input, y · `y_scale` for the target. Both are numbers, or after
    `scale_dimensions` vectors: a dimension of scale 0 is left out, and its mean, in `dropped_mean`, is what it gives.
    `x_mean` [d_in], `y_mean` [d_out] and `y_variance` (total, per token) are the normalised data's in a sample and stay
    fixed, so that neither loss nor gradient depends on how a batch is split.

    Whatever is learnt from a step other than by gradient goes through `step_sums`, which is added over micro-batches
    and ranks: how many tokens each latent fired on [n_own], the tokens, Σ‖y − x_hat‖², and a subclass's own.

    A rank may hold only `n_own` of the d_sae latents; a tensor described as [d_sae] then has entries for those only.
    Ranks that share latents encode the same tokens. Once their decoded parts are added up they divide the tokens too:
    x_hat and all that is computed from it, such as the squared error, cover only the rank's `own_part` of the tokens.
    """

    loss_names: tuple[str, ...] = ("mse",)
    # Rows of W_dec are held at length 1.
    unit_decoder = True
    # Norm of the encoder's columns at the start where the job does not say.
    encoder_scale = 0.3
    n_own_sums = 0
    # Parameters [d_sae] in the units of a pre-activation.
    biases: tuple[str, ...] = ("b_enc",)
    # Norm of a revived latent's encoder as a share of the living ones' mean: 0.2 in Bricken et al. 2023, so that it
    # does not fire on everything at once.
    revived_share = 0.2
    # Whether passes of sparse products read W_enc and W_dec only in the type of products.
    reads_narrow = False
    # The L0 that a penalty is steered towards; None without one.
    target_l0: int | None = None
    # A latent that has not fired for so many tokens counts as dead; the job's, set by whoever builds an SAE.
    dead_after_tokens = 400_000
    # Tokens of a micro-batch on all ranks together; set where there are several.
    batch_tokens = 0
    # Buffers [d_sae].
    latent_buffers: tuple[str, ...] = ("ids", "n_tokens_since_fired")

    # A transcoder's skip connection [d_in, d_out], from input to output around the latents; None without one.
    W_skip: nn.Parameter | None
    x_scale: Tensor
    y_scale: Tensor
    dropped_mean: Tensor | None
    y_mean: Tensor
    y_variance: Tensor
    x_mean: Tensor
    ids: Tensor
    n_tokens_since_fired: Tensor
    step_sums: Tensor

    def __init__(self, d_in: int, d_sae: int, d_out: int | None = None) -> None:
        super().__init__()
        self.d_in, self.d_sae = d_in, d_sae
        self.data, self.peers, self.latents = Group(), Group(), Latents(d_sae)
        self.row_gradients = RowGradients()
        self.is_transcoder = d_out is not None
        self.d_out = d_out or d_in
        # A latent's weights lie side by side, as those of W_dec do: so the gradient comes from the sparse products, and
        # a copy of it into the other order took 17 of the 350 ms of a step with 16,384 latents on two cores.
        self.W_enc = nn.Parameter(torch.zeros(d_sae, d_in).T)
        self.b_enc = nn.Parameter(torch.zeros(d_sae))
        self.W_dec = nn.Parameter(torch.zeros(d_sae, self.d_out))
        self.b_dec = nn.Parameter(torch.zeros(self.d_out))
        self.register_parameter("W_skip", None)
        self.register_buffer("x_scale", torch.ones(()))
        self.register_buffer("y_scale", torch.ones(()))
        self.register_buffer("dropped_mean", None)
        self.register_buffer("x_mean", torch.zeros(d_in))
        self.register_buffer("y_mean", torch.zeros(self.d_out))
        self.register_buffer("y_variance", torch.ones(()))
        self.register_buffer("ids", torch.arange(d_sae), persistent=False)
        self.register_buffer("n_tokens_since_fired", torch.zeros(d_sae, dtype=torch.int64))
        # One tensor, so that it crosses the wire in one go; fp32 counts exactly up to 16 million tokens a step.
        self.register_buffer("step_sums", torch.zeros(d_sae + 2 + self.n_own_sums), persistent=False)
        # On how many tokens of the last pass in training each latent fired, float [d_sae].
        self.fired: Tensor | None = None
        # Upper bound on the tokens for which any latent has been silent; the host has it without asking the device.
        self._longest_silence = 0
        self.register_load_state_dict_post_hook(lambda *_: self.note_silence(self.n_tokens_since_fired))  # type: ignore[no-untyped-call]

    @property
    def n_own(self) -> int:
        """How many latents this rank holds."""
        return len(self.ids)

    def add_skip(self) -> None:
        """Let a transcoder add a linear map of its input to the output, and latents explain what is not linear.

        It starts from 0, as in Paulo, Shabalin & Belrose 2025, arXiv 2501.18823. Its learning rate is that of all
        weights: at 0.3 and 3 times that, held-out FVU of SmolLM2's 12th MLP was 0.258 and 0.262 instead of 0.250 after
        150 steps.
        """
        self.W_skip = nn.Parameter(torch.zeros(self.d_in, self.d_out))

    def scale_dimensions(self) -> None:
        """Give each dimension its own scale, and dimensions of scale 0 a mean of raw targets [d_out]."""
        self.x_scale, self.y_scale = torch.ones(self.d_in), torch.ones(self.d_out)
        self.dropped_mean = torch.zeros(self.d_out)

    @property
    def acts_scale(self) -> Tensor:
        """The factor from activations on raw data to activations on normalised data, 0-dim: the largest scale."""
        return self.y_scale.max() if self.y_scale.dim() else self.y_scale

    @property
    def raw_scale(self) -> Tensor:
        """The divisor from normalised to raw targets: `y_scale`, but infinite for dimensions that are left out."""
        return self.y_scale if self.dropped_mean is None else self.y_scale.masked_fill(self.y_scale == 0, torch.inf)

    def raw(self, x_hat: Tensor) -> Tensor:
        """Convert reconstructions [n_tokens, d_out] of normalised targets to the units of raw targets."""
        raw = x_hat / self.raw_scale
        return raw if self.dropped_mean is None else raw + self.dropped_mean

    @property
    def dimension_scales(self) -> Tensor | None:
        """The factors of the target dimensions [d_out] without the common scale, 0 if left out; None if all are 1."""
        return None if self.dropped_mean is None else self.y_scale / self.acts_scale

    def raw_decoder(self) -> Tensor:
        """Return the directions [d_sae, d_out] that latents write into raw data: W_dec without dimension scales."""
        return self.W_dec if self.dropped_mean is None else self.W_dec / (self.raw_scale / self.acts_scale)

    @torch.no_grad()
    def deal(self, data: Group, peers: Group, latents: Latents) -> None:
        """Keep only this rank's latents of an SAE whose weights are not set yet; ranks of `data` hold the same ones."""
        self.data, self.peers, self.latents = data, peers, latents
        for name, dim in self.latent_dims().items():
            whole = getattr(self, name)
            part = latents.part(whole.detach(), dim)
            setattr(self, name, nn.Parameter(part) if isinstance(whole, nn.Parameter) else part)
        self.step_sums = torch.zeros(self.n_own + 2 + self.n_own_sums)

    @abstractmethod
    def forward(self, x: Tensor, y: Tensor) -> Output:
        """Encode x [n_tokens, d_in] and decode towards y [n_tokens, d_out]; in training also call `count`."""

    @abstractmethod
    def objective(self, losses: dict[str, Tensor]) -> Tensor:
        """Return the quantity to minimise, 0-dim, as a sum over the same tokens as `losses`."""

    @abstractmethod
    def export_config(self) -> dict[str, Any]:
        """Return the keys of SAELens' cfg.json that are specific to this architecture."""

    def export_weights(self) -> dict[str, Tensor]:
        """Return SAELens' tensors by name, with the scales folded in so that raw data goes in and comes out.

        Activations are in the target's units: W_dec stays as it is if dimensions share one scale, and all that is
        compared with or added to a pre-activation is divided by `acts_scale`. A dimension that is left out has a row of
        zeros in W_enc, a column of zeros in W_dec, and its mean in b_dec.
        """
        # SAELens' transcoders subtract nothing from their input.
        folded = self.x_mean @ self.W_enc if self.is_transcoder else 0
        x_scale = self.x_scale.reshape(-1, 1)
        weights = {
            "W_enc": self.W_enc * (x_scale / self.acts_scale),
            "b_enc": (self.b_enc - folded) / self.acts_scale,
            "W_dec": self.raw_decoder(),
            "b_dec": self.raw(self.b_dec),
        }
        if self.W_skip is not None:
            # [d_out, d_in], as SAELens, sparsify and circuit-tracer have it.
            weights["W_skip"] = (self.W_skip * (x_scale / self.raw_scale)).T
            weights["b_dec"] = self.raw(self.b_dec - self.x_mean @ self.W_skip)
        return weights

    def saelens_name(self, of_sae: str) -> str:
        return saelens_name(of_sae, is_transcoder=self.is_transcoder, has_skip=self.W_skip is not None)

    @contextlib.contextmanager
    def measuring_half(self, half: int) -> Iterator[None]:
        """Measure rows of held-out half 0 or 1 without anything that was set on that half."""
        yield

    def calibrate(self, x: Tensor) -> None:
        """Set what depends on the first weights' pre-activations of normalised data x [n, d_in]; by default nothing."""

    def begin_step(self, progress: float) -> None:
        """Set what changes over a run; `progress` is the share of it that is over, 0 to 1."""

    @property
    def input_bias(self) -> Tensor:
        """What is subtracted from x before the encoder: b_dec; x_mean of a transcoder, whose b_dec is in another space.

        b_enc could not make up for a mean left in x: with a mean of twice the spread all latents died within 64 steps,
        since every step of W_enc moves all pre-activations by its product with the mean.
        """
        return self.x_mean if self.is_transcoder else self.b_dec

    def decode_acts(self, acts: Acts, x: Tensor) -> Tensor:
        """Decode `acts` of x [n_tokens, d_in] into x_hat [n_tokens, d_out] of this rank's tokens."""
        of_latents = decode(acts, self.W_dec, self.latents.group)
        return of_latents + self.offset(own_part(x, self.latents.group))

    def reconstruct(self, acts: Acts, x: Tensor, y: Tensor) -> tuple[Tensor, Errors]:
        """Decode `acts` of x [n_tokens, d_in] into x_hat [n_tokens, d_out] of this rank's tokens, with its errors.

        By kernels x_hat has no gradient; in training nobody asks it for one.
        """
        kernels = self.kernels_of_errors(y)
        if kernels and (decoded := decoded_by_kernels(acts, self.W_dec)):
            return errors_of_decoded(y, decoded, self.b_dec, self.y_mean, kernels)
        x_hat = self.decode_acts(acts, x)
        return x_hat, errors_of(y, x_hat, self.y_mean)

    def kernels_of_errors(self, y: Tensor) -> ModuleType | None:
        """Return the kernels of the errors of targets y where they may take what is decoded at once, in training.

        That is where nothing is added to what this rank's latents write but b_dec.
        """
        may = self.training and self.W_skip is None and self.latents.group.size == 1
        return triton_for(y, self.b_dec) if may else None

    def offset(self, x: Tensor) -> Tensor:
        """Return what is added to what the latents write for x [n, d_in]: b_dec [d_out]; with a skip [n, d_out].

        The skip sees x − x_mean: of a mean far from 0 each of its steps would move the output's mean, too.
        """
        if self.W_skip is None:
            return self.b_dec
        # b_dec is added in fp32, since under autocast the product is in 16 bits.
        return (x - self.x_mean) @ self.W_skip + self.b_dec

    @torch.no_grad()
    def count(self, acts: Acts, n_tokens: int, error: Tensor, *own: Tensor) -> None:
        """Add a micro-batch to `step_sums` in training: `error` is Σ‖y − x_hat‖², `own` the subclass's own scalars."""
        if self.training:
            self.fired = count(self.step_sums, acts, n_tokens, error, *own)

    def dead(self) -> Tensor:
        """Tell which latents count as dead, bool [d_sae]; the same on every rank that holds them."""
        return self.n_tokens_since_fired >= self.dead_after_tokens

    def may_have_dead(self) -> bool:
        """Tell whether any latent may be dead, alike on all ranks, without asking a GPU or other ranks.

        False is certain. True may be wrong for latents on a GPU or shared by ranks, of which only a bound is known.
        """
        if self.n_tokens_since_fired.is_cuda or self.latents.is_shared:
            return self._longest_silence >= self.dead_after_tokens
        return bool(self.dead().any())

    def latent_dims(self) -> dict[str, int]:
        """Return the dimension along which latents lie, by name of parameter and buffer; omit those without latents."""
        parameters = (name for name, _ in self.named_parameters() if name not in ("b_dec", "W_skip"))
        return dict.fromkeys([*parameters, *self.latent_buffers], 0) | {"W_enc": 1}

    @torch.no_grad()
    def revive(self, latents: Tensor, reads: Tensor, writes: Tensor) -> None:
        """Give the n latents marked in a bool [d_sae] new directions to read [n, d_in] and to write [n, d_out]."""
        living = ~self.latents.whole(latents)
        self.W_enc[:, latents] = self.revived_share * self._mean(self.W_enc.norm(dim=0), living) * reads.T
        self.W_dec[latents] = self._mean(self.W_dec.norm(dim=1), living) * writes
        for name in self.biases:
            bias = getattr(self, name)
            bias[latents] = self.revived_share * self._mean(bias, living)

    def _mean(self, own: Tensor, counted: Tensor) -> Tensor:
        """Return the mean of each rank's numbers [n_own] over all latents marked in `counted`, bool [n_total]."""
        return self.latents.whole(own)[counted].mean()

    def note_silence(self, n_tokens_since_fired: Tensor) -> None:
        """Set the host's bound on silence from the counts of all latents, so that all ranks act alike."""
        self._longest_silence = int(n_tokens_since_fired.max()) if len(n_tokens_since_fired) else 0

    @torch.no_grad()
    def silence_slack(self) -> Tensor:
        """Return how far the host's bound on silence is above the longest there is, float64 [1] on the device.

        All ranks that learn this SAE have to call it, and all get the same.
        """
        # A rank may have no latents.
        own = F.pad(self.n_tokens_since_fired, (1, 0)).max()
        return (self._longest_silence - self.latents.group.gather(own).max()).double()[None]

    def take_silence_slack(self, slack: float) -> None:
        """Lower the bound by what `silence_slack` returned, whichever steps were taken since then."""
        self._longest_silence -= round(slack)

    def has_overflowed(self) -> Tensor | None:
        """Tell whether any rank made the gradients of this step NaN as activations were lost, 0-dim bool; None: never.

        It is known from `step_sums`, once those of all ranks are added.
        """
        return None

    def forget_passes(self) -> None:
        """Undo the forward passes since the last step."""
        self.step_sums.zero_()

    def n_tokens_in_step(self) -> Tensor:
        """Return the number of tokens in `step_sums`, 0-dim on the device."""
        return self.step_sums[self.n_own]

    @torch.no_grad()
    def end_step(self, n_tokens: Tensor) -> None:
        """Take in the sums of all micro-batches and ranks, of `n_tokens` (0-dim), and clear them.

        Those of no tokens, as a step has that is skipped, change nothing.
        """
        self.learn_from(take_in(self.n_tokens_since_fired, self.step_sums, n_tokens))

    def decide(self, n_tokens: int) -> Hashable | None:
        """Decide what the host has to of the next pass in training, before it is queued; on one GPU, with whole steps.

        Return it: a recorded pass serves wherever the same was decided. None: it takes a GPU so long that no recording
        is worth its memory.
        """
        return ()

    def count_step(self, n_tokens: int) -> None:
        """Note on the host that a step of so many tokens is queued: the bound on silence rises."""
        self._longest_silence += n_tokens

    def learn_from(self, sums: Tensor) -> None:
        """Take in the sums of a step: its tokens, Σ‖y − x_hat‖² and the subclass's own."""

    @torch.no_grad()
    def project_gradient(self, rows: slice = ALL) -> None:
        """Remove from gradients what would only change a decoder row's norm, before the optimizer's moments see it."""
        if self.unit_decoder and self.W_dec.grad is not None:
            grad, weights = self.W_dec.grad[rows], self.W_dec[rows]
            grad.addcmul_(dots(grad, weights)[:, None], weights, value=-1)

    def constrain(self, rows: slice = ALL) -> None:
        """Bring what else the latents `rows` have into its allowed range after a step, W_dec's rows having length 1."""

    @torch.no_grad()
    def normalise_decoder(self, skips: Tensor | None = None, rows: slice = ALL) -> None:
        """Scale rows of W_dec back to length 1; where the step was skipped (0-dim bool) do not change a single bit."""
        if self.unit_decoder:
            weights = self.W_dec[rows]
            norm = weights.norm(dim=1, keepdim=True)
            weights.div_(norm if skips is None else norm.masked_fill(skips, 1))
