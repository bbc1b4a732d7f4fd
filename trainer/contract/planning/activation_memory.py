"""Bytes of the tensors of a pass at its peak, on one rank: the largest of a few phases, each a sum of those in it."""

from __future__ import annotations

from typing import Any

from trainer.contract.settings.catalog import ARCHITECTURES
from trainer.contract.settings.job import JobConfig

# How many candidates are sent for each that is chosen (`trainer.saes.kernels.top_k_across_ranks`).
_MARGIN = 4


def of_pass(job: JobConfig, d_in: int, d_out: int | None, world_size: int, device: str) -> int:
    """Of one micro-batch, forward and backward, with the gradients that come of it."""
    is_dense = ARCHITECTURES[job.sae.architecture].dense_matrices and device == "cuda"
    found = (_Dense if is_dense else _Chosen)(job, d_in, d_out, world_size, device)
    return round(found.peak())


def exchanged_bytes(job: JobConfig, d_in: int, d_out: int | None, world_size: int, device: str) -> int:
    """Of what ranks exchange in a pass: candidates or the sum of reconstructions, whichever is more."""
    found = _Pass(job, d_in, d_out, world_size, device)
    return round(max(found.candidates(), found.summed()))


def product_bytes(job: JobConfig, device: str) -> int:
    """Of a number in a matrix product."""
    narrow = job.train.precision in ("bf16", "fp16") or (job.train.precision == "auto" and device == "cuda")
    return 2 if narrow else 4


def candidates_of_token(job: JobConfig, d_in: int, sharing: int) -> int:
    """What each of so many ranks sends for a token, where ranks share the latents and choose among all."""
    k = 0 if ARCHITECTURES[job.sae.architecture].dense_matrices else _most_chosen(job, d_in)
    return min(k, -(-_MARGIN * k // sharing))


class _Pass:
    """Sizes that several phases are made of: tokens of all ranks that share latents, those of one of them once all
    latents were added up, and a rank's own latents."""

    def __init__(self, job: JobConfig, d_in: int, d_out: int | None, world_size: int, device: str) -> None:
        self.job, self.knobs, self.d_in, self.width = job, job.sae.knobs, d_in, d_out or d_in
        self.entry, self.product = ARCHITECTURES[job.sae.architecture], product_bytes(job, device)
        self.replicas, self.sharing = job.data_ranks(world_size), job.latent_ranks(world_size)
        self.n_tokens = job.micro_batch(world_size)
        self.own_tokens = self.n_tokens / self.sharing
        self.d_sae = job.sae.width(d_in)
        self.n_own = self.d_sae / self.sharing
        # Data as it came, normalised and centred; a transcoder's target as it came and normalised.
        self.targets = 4 * (self.n_tokens + self.own_tokens) * (d_out or 0)
        self.rows = 4 * self.n_tokens * d_in * (2 + self.product / 4) + self.targets
        # Of one of the weight matrices on the side of x_hat, in fp32.
        self.matrix = 4 * self.n_own * self.width

    def candidates(self) -> float:
        """As they are sent, come and are laid out, and twice whether they are chosen; of a whole batch's, everybody's,
        whose places have 8 bytes."""
        if self.entry.dense_matrices or self.replicas * self.sharing == 1:
            return 0.0
        if self.entry.per_batch:
            of_token = _most_chosen(self.job, self.d_in) * self.replicas
            return self.n_tokens * of_token * (1.5 * (2 * self.product + 1) + 8)
        of_token = candidates_of_token(self.job, self.d_in, self.sharing)
        return self.n_tokens * of_token * (3 * self.product + 2) * (self.sharing > 1)

    def summed(self) -> float:
        """The reconstruction of all tokens, or its gradient, which is more than a rank needs."""
        return 4 * self.n_tokens * max(1, self.n_levels) * self.width * (self.sharing > 1)

    @property
    def n_levels(self) -> int:
        return getattr(self.knobs, "n_levels", 0)


class _Dense(_Pass):
    """Of those that go on with all pre-activations: in the middle of the backward pass."""

    def peak(self) -> float:
        latents, n_weights = 4 * self.n_tokens * self.n_own, self.entry.dense_weights
        middle = self.matrix * (1 + n_weights * self.product / 4)
        late = 4 * self.n_own * self.d_in + self.matrix * (1 + n_weights)
        # Where ranks share latents, bf16 gradients are widened only when that of the reconstructions is gone.
        first = middle if self.sharing > 1 and self.product == 2 else late
        phases = (
            self.entry.dense_matrices * latents + middle,
            3 * latents + first + self.summed(),
            2 * latents + late,
        )
        return self.rows + 4 * self.own_tokens * self.width + max(phases)


class _Chosen(_Pass):
    """Of those that choose: at the encoder's product, where a reconstruction is summed, in AuxK's passes, or where
    AuxK's gradients join the others."""

    def __init__(self, job: JobConfig, d_in: int, d_out: int | None, world_size: int, device: str) -> None:
        super().__init__(job, d_in, d_out, world_size, device)
        self.has_auxk = bool(getattr(self.knobs, "auxk_alpha", 0.0))
        self.n_aux = min(getattr(self.knobs, "k_aux", None) or max(1, d_in // 2), self.d_sae)
        self.n_candidates = min(2 * self.n_aux, self.d_sae)
        # Places and values of what was chosen, of which a rank has its share.
        self.entries = 32 * self.n_tokens * _most_chosen(job, d_in) / min(self.sharing, 2)
        # Of each weight and its side of the SAE, in the type of the products.
        self.narrow = 2 * self.n_own if self.product == 2 else 0

    def peak(self) -> float:
        of_auxk = (self.explain(), self.explain_backward(), self.joined()) if self.has_auxk else (self.plain(),)
        return max(self.encode(), self.nest(), *of_auxk)

    def encode(self) -> float:
        product = self.product * self.n_tokens * self.n_own
        return self.rows + product + self.narrow * self.d_in + max(self.entries, self.candidates())

    def nest(self) -> float:
        """What all levels add, and the errors of each; or where ranks share latents the sum, and their part of it."""
        n_times = 2 + (self.sharing > 1) / self.sharing
        levels = 4 * self.n_tokens * self.n_levels * self.width * n_times
        return self.rows + levels + self.narrow * self.width + self.entries

    def plain(self) -> float:
        return max(self.rows + self._wide() + self.entries, 4 * self.n_own * self.d_in + self.matrix)

    def explain(self) -> float:
        """The reconstruction from dead latents."""
        of_token = self.product * (self.n_candidates + self.width)
        weights = self.product * self.n_candidates * (self.d_in + self.width) + self.narrow * self.width
        return self.rows + self._wide() + self.n_tokens * of_token + self._of_dead() + weights + self.entries

    def explain_backward(self) -> float:
        """Its gradient, for a few latents and among all."""
        of_token = self.product * self.n_candidates + 8 * self.width / self.sharing
        weights = self.product * self.n_candidates * self.d_in + self.narrow * self.width
        gradients = 4 * min(self.n_candidates, self.n_own) * self.width + 2 * self.matrix
        return self.rows + self.n_tokens * of_token + self._of_dead() + weights + gradients + self.entries

    def joined(self) -> float:
        """AuxK's gradient of each matrix is as large as the other one, and both as their sum."""
        weights = 4 * self.n_own * self.d_in + self.matrix
        beside = 4 * self.n_tokens * (2 * self.d_in + self.width) + self.targets
        levels = self.n_tokens * self.n_levels * self.width * (4 + 2 * (self.product == 2))
        return beside + max(2 * weights, weights + self.matrix + self.narrow * self.width + levels)

    def _wide(self) -> float:
        """Reconstructions and errors; a sum over ranks is in fp32, beside what is added, and what follows of it is of a
        rank's tokens."""
        n_own, n_all = (4 + self.n_levels, 0) if self.sharing == 1 else (3 + self.n_levels, 1)
        return 4 * self.width * (n_own * self.own_tokens + n_all * self.n_tokens)

    def _of_dead(self) -> float:
        """Centred data once more, pre-activations of the dead, and which of them are strongest."""
        n_values = self.d_in + self.n_candidates + self.n_aux * (1 + (self.sharing > 1))
        return self.n_tokens * (self.product * n_values + 10 * self.n_aux)


def _most_chosen(job: JobConfig, d_in: int) -> int:
    """Latents per token, at the start of the run where they become fewer."""
    knobs: Any = job.sae.knobs
    k = getattr(knobs, "k", 0)
    return max(k, knobs.k_anneal_start or d_in) if getattr(knobs, "k_anneal_fraction", 0.0) else k
