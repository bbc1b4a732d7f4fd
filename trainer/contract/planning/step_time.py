"""Estimates the time for a step's matmuls, memory traffic and transfers from the settings and measured speeds.

The estimates are used to choose a mode and to predict times before a run; `tests/benchmarks/cost_model.py` compares
them with real steps. Sizes are per rank and step.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from trainer.contract.planning import activation_memory, first_look, graph_capture, latent_capacity, memory
from trainer.contract.planning.halving import trained_share
from trainer.contract.planning.hardware import Speeds
from trainer.contract.planning.workload import Workload
from trainer.contract.settings.catalog import ARCHITECTURES
from trainer.contract.settings.job import JobConfig, SaeSettings

# The number of decoder rows and data rows read or written per active latent of a token: for the reconstruction, for the
# activation gradients, and for the gradients of both weight matrices. Weight gradient rows are both read and written.
_DECODER_ROWS, _DATA_ROWS = 4, 3
# The fraction of these rows that misses the caches. On one core with d_in 384 and k 32, the rows took 34 ms instead of
# the 176 ms that they would have taken without caches.
_FROM_MEMORY = 0.2
# The number of passes over all pre-activations to find the largest ones, and over the data to measure the error. On one
# core, these passes took 3 ns per pre-activation, a third of which was the matmul's memory traffic. The last number
# counts the passes over the data after the sum over latents, which include only a rank's own tokens.
_CHOICE_PASSES, _ROW_PASSES, _OWN_ROW_PASSES = 8, 20, 12
# The number of passes over the data for a skip connection: for centring, the matmul, the sum and the gradient.
_SKIP_PASSES = 8
# The bytes read and written per encoder weight when a pre-selection rounds the encoder; with 16,384 latents, this takes
# 5 ms on one core.
_ROUNDED_BYTES = 28
# The number of matmuls per step with the encoder and the decoder, for an architecture that keeps all pre-activations.
_ENCODING_PRODUCTS, _DECODING_PRODUCTS = 2, 3
# The number of passes that AuxK makes over its candidates' activations and over reconstructions, and the bytes per
# candidate weight. These bytes are for reading and copying the weight, and for adding its gradient to the full gradient
# over all latents.
_AUXK_PASSES, _AUXK_ROW_PASSES, _AUXK_BYTES = 8, 8, 24
# The time in seconds that Python takes per pass, per SAE update (for an SAE of any size) and per captured step,
# measured on the slow host of an H200. The GPU runs concurrently.
_HOST_PASS_S, _HOST_UPDATE_S, _HOST_RECORDED_S = 1e-3, 0.5e-3, 0.4e-3
# Bytes read and written per weight in a step, without the optimizer state. In the backward pass, each rank with a copy
# of the weight reads or writes its gradient twice. The rank that updates the weight reads or writes the weight twice,
# and the gradient twice more.
_SUMMED_BYTES, _STEPPED_BYTES = 8, 16

# The memory bandwidth shared by all ranks on a host (here, two sockets with 8 DDR4 channels each), and how often a row
# is moved in host memory: out of the page cache, into pinned memory, and to the GPU.
_HOST_BYTES_PER_S, _TIMES_MOVED = 400e9, 3
# The size of a stored activation value in bytes.
_STORED_BYTES = 2
# The fraction of the pass time spent in the encoder matmul, before the first exchange in a step.
_BEFORE_EXCHANGE = 0.25


class StepTime(msgspec.Struct, frozen=True):
    """The time in seconds for a step's passes, update and communication, and for AuxK once latents have died."""

    passes_s: float
    update_s: float
    exchange_s: float
    auxk_s: float = 0.0

    @property
    def total_s(self) -> float:
        return self.passes_s + self.update_s + self.exchange_s

    @property
    def with_dead_s(self) -> float:
        """The time for a step with AuxK, in seconds."""
        return self.total_s + self.auxk_s


class Wire(msgspec.Struct, frozen=True):
    """A rank's communication in a step: the bytes that the rank sends, and how often it waits for other ranks.

    `node_bytes` is the number of bytes that all ranks of a node send to other nodes, and `node_waits` how often a rank
    waits for other nodes.
    """

    n_bytes: float
    n_waits: int
    node_bytes: float = 0.0
    node_waits: int = 0

    def seconds(self, speeds: Speeds) -> float:
        """Return the time for this communication; exchanges in a node and between nodes run at the same time."""
        transfers_s = max(self.n_bytes / speeds.bus_bytes_per_s, self.node_bytes / speeds.node_bytes_per_s)
        inner = self.n_waits - self.node_waits
        return transfers_s + inner * speeds.latency_s + self.node_waits * max(speeds.latency_s, speeds.node_latency_s)


class _Exchange(msgspec.Struct, frozen=True):
    """A kind of exchange in a step, in groups of `size` ranks whose numbers differ by `stride`.

    `n_bytes` is what each rank sends in a ring. With `in_levels`, ranks first exchange inside each node, and thus send
    less between nodes than a ring over all ranks: NCCL for all-reduces, and CPU ranks also if they share the optimizer
    step.
    """

    size: int
    stride: int
    n_bytes: float
    n_waits: int
    in_levels: bool = False

    def on(self, ranks: int, nodes: int) -> Wire:
        """Return this communication on nodes with the same number of consecutive ranks each."""
        on_node = ranks / nodes
        here = self._ranks_on_node(on_node)
        if here >= self.size or nodes == 1:
            return Wire(self.n_bytes, self.n_waits)
        spanned, rings = self.size / here, on_node / here
        ring, between = (self.size - 1) / self.size, (spanned - 1) / spanned
        n_bytes = self.n_bytes * rings * (between / ring if self.in_levels else 1.0)
        return Wire(self.n_bytes, self.n_waits, n_bytes, self.n_waits)

    def _ranks_on_node(self, on_node: float) -> float:
        """Return how many ranks of a group are on a node; if nodes cut groups unevenly, some groups are cut in half."""
        if self.size * self.stride <= on_node:
            return self.size if on_node % (self.size * self.stride) == 0 else max(1.0, self.size / 2)
        return max(1.0, on_node / self.stride)


def step_time(work: Workload, speeds: Speeds) -> StepTime:
    """Return the expected step time for a job with its mode resolved, on ranks of equal speed."""
    exchange_s = sum(wire.seconds(speeds) for wire in _wires(work, speeds.nodes))
    of_ranks, made_s = [], 0.0 if work.model_gpus else source_s(work, speeds)
    for saes in work.members_by_rank[: work.ranks if work.mode == "sweep" else 1]:
        passes = [_passes_s(work, one.sae, speeds) + _skip_s(work, one.sae, speeds) for one in saes.values()]
        updates = [_update_bytes(work, one) / speeds.memory_bytes_per_s for one in saes.values()]
        busy = StepTime(sum(passes) + made_s, sum(updates), exchange_s)
        host = _host(work, len(saes), exchange_s)
        time = max(busy, host, key=_total) if work.device == "cuda" else _both(busy, host)
        of_auxk = sum(_auxk_s(work, one.sae, speeds) for one in saes.values())
        of_ranks.append(msgspec.structs.replace(time, auxk_s=of_auxk))
    slowest = max(of_ranks, key=_total)
    if not work.model_gpus:
        return slowest
    # The model GPUs compute the next rows during a step. If that takes longer than the step, the ranks wait for the
    # rows before their passes.
    busy_s = slowest.update_s + slowest.exchange_s
    return msgspec.structs.replace(slowest, passes_s=max(slowest.passes_s, source_s(work, speeds) - busy_s))


def run_seconds(work: Workload, time: StepTime) -> float:
    """Return the expected duration of all steps in seconds; dropped SAEs shorten the later steps."""
    return work.total_steps * time.total_s * trained_share(work)


def source_s(work: Workload, speeds: Speeds) -> float:
    """Return the seconds per step that a device spends running the language model; 0 if activations are read from disk.

    A rank that runs the language model itself has to wait for the model, whereas separate model GPUs run it while the
    SAEs train. If the model takes `a` seconds and the SAEs take `b` seconds on one GPU, then `m` model GPUs and `n - m`
    training GPUs take `max(a / m, b / (n - m))` seconds. This is never less than `(a + b) / n`, the time taken by `n`
    GPUs that do both. Separate GPUs can be faster only through effects that this formula omits: fewer ranks exchange
    less data, and without the model the SAE may fit into memory, or fit with larger micro-batches.
    """
    # A forward pass up to the last hook produces the rows for all hooks.
    flops = max(settings.flops_per_token() for settings in work.job.hooks.values())
    return flops * work.tokens_per_step / text_parts(work) / speeds.flops_per_s


def reads_parts(work: Workload, speeds: Speeds, ranks_of_host: int) -> bool:
    """Return whether ranks with the same tokens are faster if each of them reads only a shard of the stored rows.

    Otherwise, each of the `ranks_of_host` ranks on a host reads all rows: eight ranks sharing 65,536 latents then move
    3.6 GB in host memory for a 6 ms step. Exchanging the shards must take less time than it saves, and must finish
    before the first exchange in the step to avoid delaying it. On CPUs, an exchange uses the same memory bandwidth as
    reading, so exchanging saves nothing.
    """
    if work.device != "cuda" or work.latent_ranks == 1:
        return False
    n_bytes = _STORED_BYTES * work.micro_batch * len(work.job.hooks) * work.shape.width
    of_others = n_bytes * (1 - 1 / work.latent_ranks)
    exchange_s = of_others / speeds.bus_bytes_per_s + speeds.latency_s
    saved_s = _TIMES_MOVED * ranks_of_host * of_others / _HOST_BYTES_PER_S
    hidden_s = _BEFORE_EXCHANGE * step_time(work, speeds).passes_s / work.micro_batches
    return exchange_s < min(saved_s, hidden_s)


def text_parts(work: Workload) -> int:
    """Return the number of shards into which the text for the language models is split.

    Each separate model GPU has one shard. Without such GPUs, there is one shard per rank on a single machine, and one
    per data-parallel rank on several machines.
    """
    return work.model_gpus or (work.ranks if work.job.launch.nodes == 1 else work.data_ranks)


def _total(time: StepTime) -> float:
    return time.total_s


def _host(work: Workload, n_saes: int, exchange_s: float) -> StepTime:
    """Return the host time for a step, which is independent of tensor sizes; a graph replay includes the update."""
    on_cuda = work.device == "cuda"
    if on_cuda and graph_capture.pays(work, work.d_in, work.d_out, precision=work.precision):
        return StepTime(_HOST_RECORDED_S, 0.0, exchange_s)
    return StepTime(_HOST_PASS_S * work.micro_batches * n_saes, _HOST_UPDATE_S * n_saes, exchange_s)


def _both(busy: StepTime, host: StepTime) -> StepTime:
    return StepTime(busy.passes_s + host.passes_s, busy.update_s + host.update_s, busy.exchange_s)


def wire_of(work: Workload, nodes: int = 1) -> Wire:
    """Return how many bytes a rank and a node send in a step, and how often a rank waits for others.

    Ranks with the same latents exchange gradients once per step. Ranks sharding the latents exchange candidates and
    reconstructions for each micro-batch. A ring all-reduce sends 2 (n - 1) / n times the bytes that it sums.
    """
    wires = _wires(work, nodes)
    fields = ("n_bytes", "n_waits", "node_bytes", "node_waits")
    return Wire(*(sum(getattr(wire, field) for wire in wires) for field in fields))


def _wires(work: Workload, nodes: int) -> list[Wire]:
    exchanges = [exchange for one in work.members.values() for exchange in _exchanges_of_one(work, one)]
    if work.ranks > 1:
        # In every step, all ranks agree on requests.
        exchanges.append(_Exchange(work.ranks, 1, 0.0, 1, in_levels=True))
    return [exchange.on(work.ranks, nodes) for exchange in exchanges]


def _exchanges_of_one(work: Workload, member: JobConfig) -> Iterator[_Exchange]:
    sae, has_zero = member.sae, work.uses_zero(member.train)
    with_tokens, sharing = work.data_ranks, work.latent_ranks
    if with_tokens > 1:
        of_value = 2 if work.job.parallel.gradients == "bf16" else 4
        # The bytes received per value. If replicas share the optimizer step, they receive weights instead of gradients,
        # in fp32 or as 16-bit copies.
        back = (2 if activation_memory.exchanges_copies(work, member) else 4) if has_zero else of_value
        of_latents = memory.n_parameters(work, sae, sharing) - memory.n_skip(work, sae)
        n_bytes = _ring(with_tokens) / 2 * (of_value + back) * of_latents
        # Consecutive ranks share latents, so ranks with the same latents are `sharing` ranks apart.
        in_levels = work.device == "cpu" or not has_zero
        yield _Exchange(with_tokens, sharing, n_bytes, 3 if has_zero else 1, in_levels)
    # Each rank computes the skip connection's gradient from its own tokens.
    of_all = with_tokens * sharing
    if of_all > 1:
        yield _Exchange(of_all, 1, _ring(of_all) * 4 * memory.n_skip(work, sae), 0, in_levels=True)
    if sharing > 1:
        tokens = work.tokens_per_step / with_tokens
        # A GPU sends parts of reconstructions in bf16 if the matmuls use it, and gathers their gradient in the matmul
        # dtype. CPU ranks send fp32.
        of_gradient = work.product_bytes if work.device == "cuda" else 4
        of_part = 2 if work.device == "cuda" and work.precision == "bf16" else 4
        n_bytes = _ring(sharing) / 2 * (of_part + of_gradient) * max(1, sae.settings.n_prefixes) * tokens * work.d_out
        # For each candidate, one byte is returned.
        candidates = tokens * activation_memory.candidates_of_token(work, sae)
        n_bytes += _ring(sharing) / 2 * candidates * (work.product_bytes + 1)
        yield _Exchange(sharing, 1, n_bytes, 4 * work.micro_batches)


def _ring(n: int) -> float:
    return 2 * (n - 1) / n


def _passes_s(work: Workload, sae: SaeSettings, speeds: Speeds) -> float:
    """Return the time in seconds for the forward and backward passes of a rank's tokens through its latents."""
    tokens, sharing = work.tokens_per_step / work.data_ranks, work.latent_ranks
    own = sae.width(work.d_in) / sharing
    product_s = 2 * tokens * work.d_in * own / speeds.flops_per_s
    pre_acts = tokens * own * work.product_bytes
    row_passes = _ROW_PASSES - _OWN_ROW_PASSES * (1 - 1 / sharing)
    rows = 4 * tokens * row_passes * (work.d_in + work.d_out) / 2
    matrices, per_token = ARCHITECTURES[sae.architecture].dense_matrices, sae.settings.n_active / sharing
    if matrices and work.device == "cuda" and not (per_token := latent_capacity.per_token(per_token, int(own)) or 0):
        decoding = _DECODING_PRODUCTS * work.written_width / work.d_out
        return (_ENCODING_PRODUCTS + decoding) * product_s + (
            2 * matrices * pre_acts + rows
        ) / speeds.memory_bytes_per_s
    active = tokens * per_token
    n_exact = first_look.EXACT * first_look.n_seen(sae.settings.n_active, sharing)
    is_exact = work.device == "cpu" and work.precision == "fp32"
    if is_exact and not matrices and (cost := first_look.costs()) and first_look.pays(n_exact, int(own)):
        # The pre-activations from the bf16 matmul take half the bytes.
        product_s *= cost.rounded + cost.alone * n_exact / own
        product_s += work.micro_batches * _ROUNDED_BYTES * work.d_in * own / speeds.memory_bytes_per_s
        pre_acts /= 2
    gathered = _FROM_MEMORY * 4 * active * (_DECODER_ROWS * work.written_width + _DATA_ROWS * work.d_in)
    return product_s + (_CHOICE_PASSES * pre_acts + rows + gathered) / speeds.memory_bytes_per_s


def _auxk_s(work: Workload, sae: SaeSettings, speeds: Speeds) -> float:
    """Return the time in seconds that AuxK adds once latents have died, including memory traffic and communication.

    Each rank multiplies its own tokens by all candidates. Ranks sharing the latents gather the ranking of the
    candidates, and sum the candidates' weights and gradients in fp32. On a CPU, the time is ignored because only the
    few dead latents are computed.
    """
    n_aux = sae.settings.n_aux(work.d_in)
    if work.device == "cpu" or not n_aux:
        return 0.0
    sharing, n = work.latent_ranks, min(2 * n_aux, sae.width(work.d_in))
    tokens, widths = work.tokens_per_step / (work.data_ranks * sharing), work.d_in + work.d_out
    flops = 2 * tokens * n * (2 * work.d_in + 3 * work.d_out)
    n_bytes = (
        work.product_bytes * tokens * (_AUXK_PASSES * n + _AUXK_ROW_PASSES * work.d_out) + _AUXK_BYTES * n * widths
    )
    sent = _ring(sharing) * (work.product_bytes + 4) * n * widths
    waits = 3 * work.micro_batches if sharing > 1 else 0
    exchange_s = _Exchange(sharing, 1, sent, waits).on(work.ranks, speeds.nodes).seconds(speeds)
    return flops / speeds.flops_per_s + n_bytes / speeds.memory_bytes_per_s + exchange_s


def _skip_s(work: Workload, sae: SaeSettings, speeds: Speeds) -> float:
    """Return the time in seconds for a skip connection's two matmuls: its output and its weight gradient."""
    tokens = work.tokens_per_step / (work.data_ranks * work.latent_ranks)
    rows = 4 * tokens * _SKIP_PASSES * (work.d_in + work.d_out) / 2 if sae.skip else 0.0
    return 4 * tokens * memory.n_skip(work, sae) / speeds.flops_per_s + rows / speeds.memory_bytes_per_s


def _update_bytes(work: Workload, member: JobConfig) -> float:
    replicas = work.data_ranks if work.uses_zero(member.train) else 1
    own = memory.n_parameters(work, member.sae, work.latent_ranks)
    stepped = memory.n_parameters(work, member.sae, work.latent_ranks * replicas)
    return own * _SUMMED_BYTES + stepped * (_STEPPED_BYTES + 2 * memory.state_bytes(member.train, work.device))
