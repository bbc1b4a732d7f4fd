"""How long a step takes, from a job's settings and the speed of the machine: products, memory traffic, transfers.

A model to choose a mode by and to predict times before anything ran; `tests/benchmarks/cost_model.py` compares it with
real steps. Sizes are per rank and step.
"""

from __future__ import annotations

from typing import Any

import msgspec

from trainer.contract.planning import activation_memory, first_look, memory
from trainer.contract.planning.hardware import Speeds
from trainer.contract.settings.catalog import ARCHITECTURES
from trainer.contract.settings.job import JobConfig
from trainer.contract.settings.job_file import deals_steps, dealt_members, members

# How many rows of the decoder and of the data are read or written for each latent that is active on a token: for the
# reconstruction, the gradients of activations, and those of both weight matrices, whose rows are read and written.
_DECODER_ROWS, _DATA_ROWS = 4, 3
# The share of these rows that is not in a cache: 34 ms where memory alone would take 176 (one core, d_in 384, k 32).
_FROM_MEMORY = 0.2
# How often all pre-activations go through memory until the largest are found, and the data until its error is measured
# (one core: 3 ns per pre-activation, of which the product's own traffic is a third). The last number: how many of the
# passes over the data come after the sum over latents, and so are over a rank's own tokens only.
_CHOICE_PASSES, _ROW_PASSES, _OWN_ROW_PASSES = 8, 20, 12
# Products as large as the encoder's in a step of an architecture that keeps all pre-activations.
_DENSE_PRODUCTS = 5
# Seconds of Python for a pass and for an update of an SAE, however small it is; a GPU works at the same time.
_HOST_PASS_S, _HOST_UPDATE_S = 1e-3, 0.5e-3
# Bytes read and written per weight in a step beside the optimizer's state: the weight twice, its gradient four times.
_WEIGHT_BYTES = 24


class StepTime(msgspec.Struct, frozen=True):
    """Seconds of a step: passes, the optimizer's update, and what is exchanged."""

    passes_s: float
    update_s: float
    exchange_s: float

    @property
    def total_s(self) -> float:
        return self.passes_s + self.update_s + self.exchange_s


class Wire(msgspec.Struct, frozen=True):
    """What a rank exchanges in a step: the bytes it sends, and how often it waits for other ranks."""

    n_bytes: float
    n_waits: int


def step_time(
    job: JobConfig, d_in: int, ranks: int, speeds: Speeds, *, d_out: int | None = None, device: str = "cuda"
) -> StepTime:
    """Return the expected time of a step of a job whose mode is settled, on `ranks` ranks of the same speed."""
    wire = wire_of(job, d_in, ranks, d_out=d_out, device=device)
    exchange_s = wire.n_bytes / speeds.bus_bytes_per_s + wire.n_waits * speeds.latency_s
    of_ranks = []
    for saes in dealt_members(job, ranks)[: ranks if job.parallel.mode == "sweep" else 1]:
        passes = [_passes_s(sae, d_in, d_out or d_in, ranks, speeds, device) for sae in saes.values()]
        updates = [_update_bytes(sae, d_in, d_out, ranks) / speeds.memory_bytes_per_s for sae in saes.values()]
        work = StepTime(sum(passes), sum(updates), exchange_s)
        host = StepTime(_HOST_PASS_S * job.micro_batches(ranks) * len(saes), _HOST_UPDATE_S * len(saes), exchange_s)
        of_ranks.append(max(work, host, key=_total) if device == "cuda" else _both(work, host))
    return max(of_ranks, key=_total)


def _total(time: StepTime) -> float:
    return time.total_s


def _both(work: StepTime, host: StepTime) -> StepTime:
    return StepTime(work.passes_s + host.passes_s, work.update_s + host.update_s, work.exchange_s)


def wire_of(job: JobConfig, d_in: int, ranks: int, *, d_out: int | None = None, device: str = "cuda") -> Wire:
    """Return what a rank exchanges in a step: bytes sent, and waits.

    Ranks with the same latents exchange gradients once a step; ranks that share the latents exchange candidates and
    reconstructions for each micro-batch. A ring all-reduce sends 2 (n - 1) / n of what it sums.
    """
    wires = [_wire_of_one(sae, d_in, d_out, ranks, device) for sae in members(job).values()]
    return Wire(sum(one.n_bytes for one in wires), sum(one.n_waits for one in wires) + (ranks > 1))


def _wire_of_one(job: JobConfig, d_in: int, d_out: int | None, ranks: int, device: str) -> Wire:
    with_tokens, sharing = job.data_ranks(ranks), job.latent_ranks(ranks)
    n_bytes, n_waits = 0.0, 0
    if with_tokens > 1:
        of_value = 2 if job.parallel.gradients == "bf16" else 4
        # Both ways: where replicas share the optimizer's work, weights come back instead, which stay fp32.
        back = 4 if deals_steps(job) else of_value
        n_bytes += _ring(with_tokens) / 2 * (of_value + back) * memory.n_parameters(job, d_in, d_out) / sharing
        n_waits += 3 if deals_steps(job) else 1
    if sharing > 1:
        tokens = job.effective_batch(ranks) / with_tokens
        n_sums = max(1, getattr(job.sae.knobs, "n_levels", 0))
        n_bytes += _ring(sharing) * 4 * n_sums * tokens * (d_out or d_in)
        # One byte comes back for each candidate.
        candidates = tokens * activation_memory.candidates_of_token(job, d_in, sharing)
        n_bytes += _ring(sharing) / 2 * candidates * (_bytes_of(job, device) + 1)
        n_waits += 4 * job.micro_batches(ranks)
    return Wire(n_bytes, n_waits)


def _ring(n: int) -> float:
    return 2 * (n - 1) / n


def _passes_s(job: JobConfig, d_in: int, d_out: int, ranks: int, speeds: Speeds, device: str) -> float:
    """Return the seconds of the forward and backward passes of a rank's tokens through its latents."""
    tokens, sharing = job.effective_batch(ranks) / job.data_ranks(ranks), job.latent_ranks(ranks)
    own = job.sae.width(d_in) / sharing
    product_s = 2 * tokens * d_in * own / speeds.flops_per_s
    pre_acts = tokens * own * _bytes_of(job, device)
    row_passes = _ROW_PASSES - _OWN_ROW_PASSES * (1 - 1 / sharing)
    rows = 4 * tokens * row_passes * (d_in + d_out) / 2
    if (matrices := ARCHITECTURES[job.sae.architecture].dense_matrices) and device == "cuda":
        return _DENSE_PRODUCTS * product_s + (2 * matrices * pre_acts + rows) / speeds.memory_bytes_per_s
    knobs: Any = job.sae.knobs
    k = getattr(knobs, "k", 0)
    active = tokens * k / sharing
    is_exact = device == "cpu" and job.train.precision in ("auto", "fp32")
    n_seen = first_look.n_seen(k, sharing)
    if is_exact and not matrices and first_look.pays(n_seen, int(own)):
        # The rounded product's pre-activations have half the bytes.
        product_s *= first_look.ROUNDED + first_look.COST * n_seen / own
        pre_acts /= 2
    gathered = _FROM_MEMORY * 4 * active * (_DECODER_ROWS * d_out + _DATA_ROWS * d_in)
    return product_s + (_CHOICE_PASSES * pre_acts + rows + gathered) / speeds.memory_bytes_per_s


def _update_bytes(job: JobConfig, d_in: int, d_out: int | None, ranks: int) -> float:
    own = memory.n_parameters(job, d_in, d_out) / job.latent_ranks(ranks)
    own /= job.data_ranks(ranks) if deals_steps(job) else 1
    return own * (_WEIGHT_BYTES + 2 * memory.state_bytes(job.train))


def _bytes_of(job: JobConfig, device: str) -> int:
    """Return the bytes of one pre-activation."""
    return activation_memory.product_bytes(job, device)
