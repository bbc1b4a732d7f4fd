"""Estimates the peak memory that one rank's tensors use in a pass: the largest total of live tensors in any phase."""

from __future__ import annotations

import math

from trainer.contract.planning.rows_on_gpu import MOST_TOKENS
from trainer.contract.planning.workload import Workload
from trainer.contract.settings.catalog import ARCHITECTURES, OPTIMIZERS
from trainer.contract.settings.job import JobConfig, SaeSettings

# Pre-activations per group in a GPU top-k; the group maxima are compared first. On an H200, 4,096 rows of 24,576
# columns took 0.21 ms with groups of 8 and 0.14 ms with groups of 32. With 65,536 columns, groups of 64 were slower
# than groups of 32.
GROUP = 32
# Bytes per pre-activation for the two masks that an evaluation uses to count pre-activations above a threshold.
COUNTED_BYTES = 2
# Number of candidates that a CPU rank sends per token, as a multiple of the average number of values selected from that
# rank. A GPU sends all possible candidates. Two ranks that share a CPU and pre-select with a bf16 matmul send a quarter
# more, which this number ignores.
MARGIN_PER_TOKEN = 4

# For architectures with a sparsity penalty: the number of rows from which the initial threshold is found, and the
# maximum number of values in memory at once.
START_ROWS, START_VALUES = 2048, 2**21
# On a CPU, `topk` allocates 16 bytes per value in addition to the 4 bytes for the value itself.
_BYTES_OF_TOPK = 20


# If a penalised architecture keeps all pre-activations, the number of fp32 [n_tokens, d_sae] matrices that a layer of a
# cross-layer transcoder holds until its backward pass, and that the last layer needs in addition.
_HELD_MATRICES, _LAST_MATRICES = 2.5, 1.5


def of_start(work: Workload, sae: SaeSettings) -> int:
    """Return how many bytes, beyond the weights, are needed to find an SAE's threshold before the first step."""
    if not hasattr(sae.settings, "sparsity_coefficient"):
        return 0
    n_own = sae.width(work.d_in) / work.latent_ranks
    at_once = max(n_own, min(START_VALUES, START_ROWS * n_own))
    largest = min(START_ROWS * n_own, START_ROWS * sae.settings.most_active(work.d_in))
    return round(_BYTES_OF_TOPK * (at_once + largest) + 4 * START_ROWS * work.d_in)


def of_pass(work: Workload, sae: SaeSettings, *, keeps_copies: bool = False) -> int:
    """Return the peak memory in bytes for the forward and backward pass of one micro-batch, including its gradients.

    The result excludes the 16-bit copies of weights that are kept between passes.
    """
    is_dense = ARCHITECTURES[sae.architecture].dense_matrices and work.device == "cuda"
    return round((_Dense if is_dense else _SparseArchitecture)(work, sae, keeps_copies=keeps_copies).peak())


def of_layers(work: Workload, sae: SaeSettings, *, keeps_copies: bool = False) -> int:
    """Return the peak bytes of a pass through all layers of a cross-layer transcoder, including their gradients.

    The peak is either at the start of the backward pass, when every layer holds what it needs, or at its end, when all
    gradients are in memory.
    """
    is_dense = ARCHITECTURES[sae.architecture].dense_matrices and work.device == "cuda"
    one, n_layers = _SparseArchitecture(work, sae, keeps_copies=keeps_copies), work.job.n_layers
    latents, of_target = one.n_tokens * one.n_own, 4 * one.own_tokens * work.d_out
    # The raw rows, and each layer's target, reconstruction and the gradient that it passes to earlier layers.
    rows = 4 * one.n_tokens * (work.d_in + work.d_out) + 4 * of_target
    held = one.product * one.n_tokens * one.d_in + of_target + one.narrow * (one.d_in + one.width)
    if is_dense:
        # Only the 16-bit copy of the encoder is kept between passes.
        held += _HELD_MATRICES * 4 * latents + 2 * one.n_own * one.width * (one.product == 2 and keeps_copies)
    else:
        held += one.entries + one.of_auxk + one.of_explained
    of_one = _LAST_MATRICES * 4 * latents if is_dense else one.product * latents
    gradients = 4 * one.n_own * (one.d_in + one.width) + one.row_gradients * (not is_dense)
    return round(n_layers * rows + max(n_layers * held + of_one, n_layers * gradients))


def of_sparse_pass(work: Workload, sae: SaeSettings, *, keeps_copies: bool = False) -> int:
    """Return the peak bytes of a pass that keeps only the selected latents, as does every pass in a CUDA graph."""
    return round(_SparseArchitecture(work, sae, keeps_copies=keeps_copies).peak())


def of_evaluation(work: Workload, job: JobConfig) -> int:
    """Return the peak memory in bytes for an evaluation on one batch of held-out tokens.

    The result excludes the 16-bit copies of weights that are kept between passes.
    """
    sae, entry = job.sae, ARCHITECTURES[job.sae.architecture]
    at_once = _SparseArchitecture(work, sae, keeps_copies=kept_copies(work, job) > 0)
    pre_acts = at_once.n_tokens * at_once.n_own
    bounded = at_once.rows + (at_once.product + COUNTED_BYTES) * pre_acts
    phases = (
        (bounded,)
        if entry.dense_matrices
        else (bounded * entry.per_batch, at_once.encode(), at_once.nest(learns=False))
    )
    return round(min(1.0, MOST_TOKENS / at_once.n_tokens) * max(phases))


def kept_copies(work: Workload, job: JobConfig) -> int:
    """Return the size in bytes of the 16-bit weight copies that an SAE's optimizer steps write for later passes.

    Replicas that each update only a shard of the latents keep these copies only if they exchange them.
    """
    shares_steps = work.uses_zero(job.train) and work.data_ranks > 1
    if not _writes_copies(work, job) or (shares_steps and not exchanges_copies(work, job)):
        return 0
    # Dense matmuls convert the decoder themselves, so only the encoder is copied.
    width = work.d_in + (0 if ARCHITECTURES[job.sae.architecture].dense_matrices else work.written_width)
    return round(2 * job.sae.width(work.d_in) * width / work.latent_ranks)


def exchanges_copies(work: Workload, job: JobConfig) -> bool:
    """Return whether replicas exchange 16-bit copies of updated weights and keep only their own latents in fp32.

    Replicas do this if their passes read nothing but these copies.
    """
    shares_steps = work.uses_zero(job.train) and work.data_ranks > 1
    return shares_steps and _writes_copies(work, job) and not ARCHITECTURES[job.sae.architecture].dense_matrices


def _writes_copies(work: Workload, job: JobConfig) -> bool:
    return work.device == "cuda" and work.product_bytes == 2 and OPTIMIZERS[job.train.optimizer].writes_copies


def exchanged_bytes(work: Workload, sae: SaeSettings) -> int:
    """Return how many bytes a rank exchanges in a pass: candidates or summed reconstructions, whichever is larger."""
    model = _StepSizes(work, sae)
    return round(max(model.candidates(), model.summed()))


def candidates_of_token(work: Workload, sae: SaeSettings) -> int:
    """Return how many top-k candidates per token each rank sends to the ranks holding the other latents."""
    k = 0 if ARCHITECTURES[sae.architecture].dense_matrices else sae.settings.most_active(work.d_in)
    return k if work.device == "cuda" else min(k, -(-MARGIN_PER_TOKEN * k // work.latent_ranks))


class _StepSizes:
    """Tensor sizes shared by several phases of a step; all sizes in this class are in bytes.

    `n_tokens` is the number of tokens over all ranks sharing the latents. `own_tokens` is one rank's share of these
    tokens after the outputs of all latents are summed. `n_own` is the number of latents on the rank.
    """

    def __init__(self, work: Workload, sae: SaeSettings, *, keeps_copies: bool = False) -> None:
        self.work, self.sae, self.entry = work, sae, ARCHITECTURES[sae.architecture]
        self.d_in, self.width, self.product = work.d_in, work.written_width, work.product_bytes
        self.replicas, self.sharing, self.n_tokens = work.data_ranks, work.latent_ranks, work.micro_batch
        self.own_tokens = self.n_tokens / self.sharing
        self.d_sae = sae.width(self.d_in)
        self.n_own = self.d_sae / self.sharing
        self.most_active, self.n_prefixes = sae.settings.most_active(self.d_in), sae.settings.n_prefixes
        # Three copies of the data (raw, normalised and centred); for a transcoder, also the raw and normalised targets.
        self.targets = 4 * (self.n_tokens + self.own_tokens) * (work.shape.d_out or 0)
        self.rows = 4 * self.n_tokens * self.d_in * (2 + self.product / 4) + self.targets
        # A skip connection keeps its centred input for the backward pass.
        self.rows += self.product * self.own_tokens * self.d_in * sae.skip
        # The decoder in fp32.
        self.matrix = 4 * self.n_own * self.width
        # Bytes per input or output dimension for a 16-bit weight copy used only by this pass.
        self.narrow = 2 * self.n_own if self.product == 2 and not keeps_copies else 0

    def candidates(self) -> float:
        """Return the size of the candidate buffers: sent, received and reordered copies, and two bool masks.

        Architectures that select latents per batch also gather the candidates from every rank, with int64 indices. From
        each rank, a GPU gathers as many candidates as all ranks select in total. The GPU pre-selects them by group
        maxima.
        """
        n_ranks = self.replicas * self.sharing
        if self.entry.dense_matrices or n_ranks == 1:
            return 0.0
        if self.entry.per_batch:
            of_token = self.most_active * self.replicas
            on_cpu = self.work.device == "cpu"
            of_all = (1.5 if on_cpu else n_ranks) * (self.product + 1)
            by_groups = 0 if on_cpu else 16 + self.product
            return self.n_tokens * of_token * (of_all + 2 * self.product + 24 + by_groups)
        of_token = candidates_of_token(self.work, self.sae)
        return self.n_tokens * of_token * (3 * self.product + 2) * (self.sharing > 1)

    def summed(self) -> float:
        """Return the size of the reconstructions for all tokens, or of their gradient; 0 unless ranks share latents."""
        return 4 * self.n_tokens * max(1, self.n_prefixes) * self.work.d_out * (self.sharing > 1)


class _Dense(_StepSizes):
    """The memory used by a pass through an architecture that keeps all pre-activations."""

    def peak(self) -> float:
        latents, n_weights = 4 * self.n_tokens * self.n_own, self.entry.dense_weights
        middle = self.matrix * (1 + n_weights * self.product / 4)
        late = 4 * self.n_own * self.d_in + self.matrix * (1 + n_weights)
        # If ranks share latents, bf16 gradients are converted to fp32 only after the reconstruction gradient is freed.
        first = max(middle + self.summed() * self.product / 4, late if self.sharing == 1 or self.product == 4 else 0)
        phases = (
            self.entry.dense_matrices * latents + middle,
            (2.5 + self.product / 8) * latents + first,
            2 * latents + middle + (self.summed() if self.product == 2 else 0),
            2 * latents + late,
        )
        return self.rows + 4 * self.own_tokens * self.width + max(phases)


class _SparseArchitecture(_StepSizes):
    """The memory used by a pass through an architecture that selects active latents.

    Memory use peaks in one of four phases: the encoder matmul, summing the reconstructions, the AuxK passes, or adding
    the AuxK gradients to the other gradients.
    """

    def __init__(self, work: Workload, sae: SaeSettings, *, keeps_copies: bool = False) -> None:
        super().__init__(work, sae, keeps_copies=keeps_copies)
        self.n_aux = min(sae.settings.n_aux(self.d_in), self.d_sae)
        self.n_candidates = min(2 * self.n_aux, self.d_sae)
        # The number of weights belonging to the AuxK candidates, and the size of their gradients in bytes; if ranks
        # share the latents, the gradients are summed in fp32.
        self.of_candidates = self.n_candidates * (self.d_in + work.d_out)
        self.row_gradients = self.of_candidates * (self.product if self.sharing == 1 else 4)
        # Bytes that AuxK keeps until its backward pass: the candidates' weights, and the values and reconstruction for
        # each token.
        self.of_auxk = self.product * self.of_candidates
        self.of_explained = self.product * self.own_tokens * (self.n_candidates + work.d_out) * (self.n_aux > 0)
        # Indices and values of the active latents; each rank stores the entries for its shard. With BatchTopK on
        # several GPUs, each rank allocates memory for all entries because they could all belong to its shard.
        of_rank = self.n_tokens * self.most_active
        is_unknown = work.device == "cuda" and self.replicas > 1 and self.entry.per_batch
        self.spare = 48 * of_rank * (self.replicas - 1) if is_unknown else 0.0
        own_entries = of_rank / (1 if work.device == "cuda" else min(self.sharing, 2))
        self.entries = self.spare + 32 * own_entries
        # The scaled copy of the encoder, and its gradient.
        is_scaled = getattr(sae.settings, "rank_by", "sae") == "crosscoder"
        self.scaled = 8 * self.n_own * self.d_in * is_scaled
        # If entries are grouped by level, their tokens are stored a second time, also in the order of the latents.
        self.regrouped = 16 * own_entries * (self.n_prefixes > 0)

    def peak(self) -> float:
        of_auxk = self.agree(), self.score(), self.explain_backward(), self.backward()
        of_shared = (self.decode_backward(),) if self.sharing > 1 else ()
        peak: float = max(self.encode(), self.nest(), *(of_auxk if self.n_aux else (self.plain(),)), *of_shared)
        return self.scaled + peak

    def encode(self) -> float:
        product = self.product * self.n_tokens * self.n_own
        chosen = max(self.entries, self.candidates(), self._of_groups(), self._in_order())
        return self.rows + product + self.narrow * self.d_in + chosen + self.of_auxk

    def _in_order(self) -> float:
        """Return the memory used while GPUs sharing latents move the selected entries to the front of a buffer."""
        is_known = self.work.device == "cpu" or self.sharing == 1 or self.entry.per_batch
        return 0.0 if is_known else 57 * self.n_tokens * self.most_active

    def agree(self) -> float:
        """Return the memory used while ranks sharing the latents agree on the AuxK candidates."""
        of_own = 2 * self.sharing * self.n_candidates if self.sharing > 1 else 0
        return self.rows + of_own * min(self.n_candidates, self.n_own)

    def _of_groups(self) -> float:
        """Return the size of the group maxima in a GPU top-k, plus the group indices if selection is per batch."""
        if self.work.device != "cuda" or (self.entry.per_batch and self.replicas * self.sharing > 1):
            return 0.0
        if not self.entry.per_batch:
            return self.product * self.n_tokens * self.n_own / GROUP
        return self.n_tokens * (self.product * math.sqrt(self.n_own * self.most_active) + 24 * self.most_active)

    def nest(self, *, learns: bool = True) -> float:
        """Return the memory used while the outputs of the Matryoshka levels are summed.

        Each level has an output and an error or, if ranks share the latents, a sum and the rank's shard of the sum. In
        the backward pass, each level has an error and a gradient, in addition to x_hat; if ranks share the latents, the
        backward pass needs less memory than the forward pass. A single GPU that trains without a skip connection stores
        no outputs, only errors, and gradients in the matmul dtype.
        """
        by_kernels = learns and self.work.device == "cuda" and self.sharing == 1 and not self.sae.skip
        n_times = 1 + self.product / 4 if by_kernels else 1 + 1 / self.sharing
        levels = 4 * self.n_tokens * self.n_prefixes * self.width * n_times
        # Ranks that share latents keep x_hat and its error for their own tokens.
        beside = 4 * self.own_tokens * self.width * (self.n_prefixes > 0) * (1 + (self.sharing > 1))
        explained = self.of_auxk + self.of_explained if learns else 0
        return self.rows + levels + beside + self.narrow * self.width + self.entries + explained

    def plain(self) -> float:
        return max(self.rows + self._wide() + self.entries, 4 * self.n_own * self.d_in + self.matrix)

    def score(self) -> float:
        """Return the memory used while errors are compared with the AuxK reconstruction."""
        copies = self.narrow * (self.d_in + self.width)
        wide = self._wide() - 4 * self.own_tokens * self.width
        return self.rows + wide + copies + self.entries + self.of_auxk + self.of_explained

    def explain_backward(self) -> float:
        """Return the memory used in the AuxK backward pass, including the candidates' weights and gradients."""
        of_token = self.product * (self.n_candidates + self.width) + 4 * self.width
        made = self.row_gradients + self.product * self.of_candidates * (self.sharing > 1)
        explained = self.of_auxk + self.of_explained + self.own_tokens * of_token
        return self.rows + explained + made + self.matrix + self.narrow * self.width + self.entries

    def decode_backward(self) -> float:
        """Return the memory used to compute the W_dec gradient from the reconstruction gradient for all tokens."""
        # A GPU receives the gradient in the matmul dtype; a CPU converts its fp32 gradient.
        of_value = self.product if self.work.device == "cuda" else 4 + 2 * (self.product == 2)
        of_output = self.n_tokens * max(1, self.n_prefixes) * self.width * of_value
        explained = self.of_auxk + self.of_explained
        # Sorting entries by latent adds a quarter of their size.
        made = of_output + 1.25 * self.entries + self.matrix + self.narrow * self.width
        return self.rows + made + 8 * self.own_tokens * self.width + explained

    def backward(self) -> float:
        """Return the memory used to compute the gradients of all weights, including the AuxK gradients."""
        weights = 4 * self.n_own * self.d_in + self.matrix + self.row_gradients
        # On CPU, the 16-bit gradients of the AuxK candidates are converted to fp32, one matrix at a time.
        widened = 4 * self.n_candidates * max(self.d_in, self.width)
        widened *= self.product == 2 and self.work.device == "cpu"
        beside = 4 * self.n_tokens * (2 * self.d_in + self.width) + self.targets + self.entries
        decoded = self.matrix + self.narrow * self.width + self._levels_backward() + self.of_auxk + self.of_explained
        return beside + max(weights + widened, decoded) + self.regrouped

    def _levels_backward(self) -> float:
        """Return the size of the gradient with respect to the outputs of all Matryoshka levels.

        A single GPU computes this gradient from the levels' errors while the centred data is in memory. GPUs sharing
        latents gather the gradient in the matmul dtype. On CPU, the gradient and its 16-bit copy coexist in memory.
        """
        levels = self.n_tokens * self.n_prefixes * self.width
        if self.work.device == "cuda" and self.sharing > 1:
            return levels * (self.product + 4 / self.sharing)
        if self.work.device == "cuda" and levels:
            return levels * (4 + self.product) + self.product * self.n_tokens * self.d_in
        return levels * (4 + 2 * (self.product == 2))

    def _wide(self) -> float:
        """Return the size of reconstructions and errors.

        A sum over ranks coexists in memory with its addends. Tensors computed later contain only the rank's own tokens.
        """
        n_own, n_all = (4 + self.n_prefixes, 0) if self.sharing == 1 else (3 + self.n_prefixes, 1)
        return 4 * self.width * (n_own * self.own_tokens + n_all * self.n_tokens)
