"""Peak bytes of one rank's tensors in a pass: the largest of a few phases, each the sum of the tensors alive in it."""

from __future__ import annotations

import math

from trainer.contract.planning.rows_on_gpu import MOST_TOKENS
from trainer.contract.planning.workload import Workload
from trainer.contract.settings.catalog import ARCHITECTURES, OPTIMIZERS
from trainer.contract.settings.job import JobConfig, Sae

# Values of a row among which a GPU first looks at the largest alone. An H200 took 0.21 ms for 4,096 rows of 24,576 in
# groups of 8, 0.14 in groups of 32; for 65,536 columns 64 were slower again.
GROUP = 32
# Bytes for each pre-activation while an evaluation counts those above a bound: two masks.
COUNTED_BYTES = 2
# Candidates that a rank sends per token for each value chosen from it on average; on a GPU it sends all that could be.
# Two ranks on one CPU that looks at a rounded product first send a quarter more, which is not counted.
MARGIN_PER_TOKEN = 4

# The start of an architecture with a penalty: rows on which its threshold is found, and the most values at once.
START_ROWS, START_VALUES = 2048, 2**21
# A CPU's topk keeps 16 bytes for each value next to its 4.
_BYTES_OF_TOPK = 20


def of_start(work: Workload, sae: Sae) -> int:
    """Return the bytes in addition to its weights that an SAE needs before its first step to find a threshold."""
    if not hasattr(sae.knobs, "sparsity_coefficient"):
        return 0
    n_own = sae.width(work.d_in) / work.latent_ranks
    at_once = max(n_own, min(START_VALUES, START_ROWS * n_own))
    largest = min(START_ROWS * n_own, START_ROWS * sae.knobs.most_active(work.d_in))
    return round(_BYTES_OF_TOPK * (at_once + largest) + 4 * START_ROWS * work.d_in)


def of_pass(work: Workload, sae: Sae, *, keeps_copies: bool = False) -> int:
    """Return the peak bytes of one micro-batch's forward and backward pass, the gradients it makes included.

    The 16-bit copies of weights that outlive a pass are not.
    """
    is_dense = ARCHITECTURES[sae.architecture].dense_matrices and work.device == "cuda"
    return round((_Dense if is_dense else _Chosen)(work, sae, keeps_copies=keeps_copies).peak())


def of_sparse_pass(work: Workload, sae: Sae, *, keeps_copies: bool = False) -> int:
    """Return the same for a pass of which only the chosen latents are kept, as is every one that is recorded."""
    return round(_Chosen(work, sae, keeps_copies=keeps_copies).peak())


def of_evaluation(work: Workload, job: JobConfig) -> int:
    """Return the peak bytes of evaluating as many held-out tokens as are taken at once.

    The 16-bit copies of weights that outlive a pass are not counted.
    """
    sae, entry = job.sae, ARCHITECTURES[job.sae.architecture]
    at_once = _Chosen(work, sae, keeps_copies=kept_copies(work, job) > 0)
    pre_acts = at_once.n_tokens * at_once.n_own
    bounded = at_once.rows + (at_once.product + COUNTED_BYTES) * pre_acts
    phases = (
        (bounded,)
        if entry.dense_matrices
        else (bounded * entry.per_batch, at_once.encode(), at_once.nest(learns=False))
    )
    return round(min(1.0, MOST_TOKENS / at_once.n_tokens) * max(phases))


def kept_copies(work: Workload, job: JobConfig) -> int:
    """Return the bytes of the 16-bit copies of an SAE's weights that its steps write for the passes that follow.

    Replicas that step a share of the latents each have them only if they exchange them.
    """
    shares_steps = work.uses_zero(job.train) and work.data_ranks > 1
    if not _writes_copies(work, job) or (shares_steps and not exchanges_copies(work, job)):
        return 0
    # Dense products narrow the decoder by themselves.
    width = work.d_in + (0 if ARCHITECTURES[job.sae.architecture].dense_matrices else work.d_out)
    return round(2 * job.sae.width(work.d_in) * width / work.latent_ranks)


def exchanges_copies(work: Workload, job: JobConfig) -> bool:
    """Tell whether replicas exchange 16-bit copies of stepped weights, and keep fp32 weights of their own latents only.

    They do if passes read nothing else.
    """
    shares_steps = work.uses_zero(job.train) and work.data_ranks > 1
    return shares_steps and _writes_copies(work, job) and not ARCHITECTURES[job.sae.architecture].dense_matrices


def _writes_copies(work: Workload, job: JobConfig) -> bool:
    return work.device == "cuda" and work.product_bytes == 2 and OPTIMIZERS[job.train.optimizer].writes_copies


def exchanged_bytes(work: Workload, sae: Sae) -> int:
    """Return the bytes of what ranks exchange in a pass: candidates or summed reconstructions, whichever is more."""
    model = _Pass(work, sae)
    return round(max(model.candidates(), model.summed()))


def candidates_of_token(work: Workload, sae: Sae) -> int:
    """Return how many candidates each of the ranks that share the latents sends per token for the top k."""
    k = 0 if ARCHITECTURES[sae.architecture].dense_matrices else sae.knobs.most_active(work.d_in)
    return k if work.device == "cuda" else min(k, -(-MARGIN_PER_TOKEN * k // work.latent_ranks))


class _Pass:
    """Sizes in bytes that several phases are made of.

    `n_tokens` are those of all ranks that share latents, `own_tokens` one rank's part of them once the latents' outputs
    are summed, `n_own` a rank's own latents.
    """

    def __init__(self, work: Workload, sae: Sae, *, keeps_copies: bool = False) -> None:
        self.work, self.sae, self.entry = work, sae, ARCHITECTURES[sae.architecture]
        self.d_in, self.width, self.product = work.d_in, work.d_out, work.product_bytes
        self.replicas, self.sharing, self.n_tokens = work.data_ranks, work.latent_ranks, work.micro_batch
        self.own_tokens = self.n_tokens / self.sharing
        self.d_sae = sae.width(self.d_in)
        self.n_own = self.d_sae / self.sharing
        self.most_active, self.n_prefixes = sae.knobs.most_active(self.d_in), sae.knobs.n_prefixes
        # The data as read, normalised and centred; a transcoder's target as read and normalised.
        self.targets = 4 * (self.n_tokens + self.own_tokens) * (work.shape.d_out or 0)
        self.rows = 4 * self.n_tokens * self.d_in * (2 + self.product / 4) + self.targets
        # A skip connection keeps its centred input for the backward pass.
        self.rows += self.product * self.own_tokens * self.d_in * sae.skip
        # One fp32 weight matrix of the output's width (decoder).
        self.matrix = 4 * self.n_own * self.width
        # Bytes of a weight matrix's 16-bit copy for the products of this pass, per d_in or width.
        self.narrow = 2 * self.n_own if self.product == 2 and not keeps_copies else 0

    def candidates(self) -> float:
        """Return the bytes of the candidate buffers: sent, received and reordered copies and two bool masks.

        Architectures that choose per batch also gather every rank's candidates, with int64 indices; a GPU gathers from
        each as many as are chosen of all ranks together, and finds them by the largest of groups.
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
        """Return the bytes of all tokens' reconstruction or its gradient; 0 unless ranks share latents and sum it."""
        return 4 * self.n_tokens * max(1, self.n_prefixes) * self.width * (self.sharing > 1)


class _Dense(_Pass):
    """Architectures that keep all pre-activations; their peak is in the middle of the backward pass."""

    def peak(self) -> float:
        latents, n_weights = 4 * self.n_tokens * self.n_own, self.entry.dense_weights
        middle = self.matrix * (1 + n_weights * self.product / 4)
        late = 4 * self.n_own * self.d_in + self.matrix * (1 + n_weights)
        # Where ranks share latents, bf16 gradients become fp32 only after the reconstructions' gradient is freed.
        first = max(middle + self.summed(), late if self.sharing == 1 or self.product == 4 else 0)
        phases = (
            self.entry.dense_matrices * latents + middle,
            (2.5 + self.product / 8) * latents + first,
            # Reconstructions in 16 bits are sent as fp32 copies, and so is their gradient.
            2 * latents + middle + (3 * self.summed() if self.product == 2 else 0),
            2 * latents + late,
        )
        return self.rows + 4 * self.own_tokens * self.width + max(phases)


class _Chosen(_Pass):
    """Architectures that choose some latents; their peak is at the encoder's product, where reconstructions are summed,
    in AuxK's passes, or where AuxK's gradients are added to the others."""

    def __init__(self, work: Workload, sae: Sae, *, keeps_copies: bool = False) -> None:
        super().__init__(work, sae, keeps_copies=keeps_copies)
        self.n_aux = min(sae.knobs.n_aux(self.d_in), self.d_sae)
        self.n_candidates = min(2 * self.n_aux, self.d_sae)
        # Values of their weights, and bytes of the gradients of these: ranks add them up in fp32.
        self.of_candidates = self.n_candidates * (self.d_in + self.width)
        self.row_gradients = self.of_candidates * (self.product if self.sharing == 1 else 4)
        # Bytes of AuxK until its backward pass: weights; what each token chooses, and its reconstruction.
        self.of_auxk = self.product * self.of_candidates
        self.of_explained = self.product * self.own_tokens * (self.n_candidates + self.width) * (self.n_aux > 0)
        # Indices and values of the chosen latents, of which a rank has its share. A GPU of several has room for all
        # that could be chosen of it, which of a batch is as much as is chosen of all ranks.
        of_rank = self.n_tokens * self.most_active
        is_unknown = work.device == "cuda" and self.replicas > 1 and self.entry.per_batch
        self.spare = 48 * of_rank * (self.replicas - 1) if is_unknown else 0.0
        self.entries = self.spare + 32 * of_rank / (1 if work.device == "cuda" else min(self.sharing, 2))

    def peak(self) -> float:
        of_auxk = self.agree(), self.score(), self.explain_backward(), self.backward()
        of_shared = (self.decode_backward(),) if self.sharing > 1 else ()
        return max(self.encode(), self.nest(), *(of_auxk if self.n_aux else (self.plain(),)), *of_shared)

    def encode(self) -> float:
        product = self.product * self.n_tokens * self.n_own
        chosen = max(self.entries, self.candidates(), self._of_groups(), self._in_order())
        return self.rows + product + self.narrow * self.d_in + chosen + self.of_auxk

    def _in_order(self) -> float:
        """Return the bytes while a GPU of several that share the latents puts entries in order, chosen ones first."""
        is_known = self.work.device == "cpu" or self.sharing == 1 or self.entry.per_batch
        return 0.0 if is_known else 57 * self.n_tokens * self.most_active

    def agree(self) -> float:
        """Return the bytes while a rank compares its candidates for AuxK with those of all that share the latents."""
        of_own = 2 * self.sharing * self.n_candidates if self.sharing > 1 else 0
        return self.rows + of_own * min(self.n_candidates, self.n_own)

    def _of_groups(self) -> float:
        """Return the bytes of the groups by which a GPU finds the largest: their maxima, and of a batch the indices."""
        if self.work.device != "cuda" or (self.entry.per_batch and self.replicas * self.sharing > 1):
            return 0.0
        if not self.entry.per_batch:
            return self.product * self.n_tokens * self.n_own / GROUP
        return self.n_tokens * (self.product * math.sqrt(self.n_own * self.most_active) + 24 * self.most_active)

    def nest(self, *, learns: bool = True) -> float:
        """Return the bytes while levels are summed: outputs and errors, or with shared latents the sum and a part.

        In the backward pass they are errors and gradients, beside x_hat; with shared latents, less. A lone GPU that
        learns without a skip connection writes no outputs, so that these are all, and gradients in the products' type.
        """
        by_kernels = learns and self.work.device == "cuda" and self.sharing == 1 and not self.sae.skip
        n_times = 1 + self.product / 4 if by_kernels else 2 + (self.sharing > 1) / self.sharing
        levels = 4 * self.n_tokens * self.n_prefixes * self.width * n_times
        beside = 4 * self.n_tokens * self.width * (self.n_prefixes > 0 and self.sharing == 1)
        explained = self.of_auxk + self.of_explained if learns else 0
        return self.rows + levels + beside + self.narrow * self.width + self.entries + explained

    def plain(self) -> float:
        return max(self.rows + self._wide() + self.entries, 4 * self.n_own * self.d_in + self.matrix)

    def score(self) -> float:
        """Return the bytes while errors are compared with what AuxK has explained."""
        copies = self.narrow * (self.d_in + self.width)
        wide = self._wide() - 4 * self.own_tokens * self.width
        return self.rows + wide + copies + self.entries + self.of_auxk + self.of_explained

    def explain_backward(self) -> float:
        """Return the bytes in AuxK's backward pass: gradients of the candidates beside their weights."""
        of_token = self.product * (self.n_candidates + self.width) + 4 * self.width
        made = self.row_gradients + self.product * self.of_candidates * (self.sharing > 1)
        explained = self.of_auxk + self.of_explained + self.own_tokens * of_token
        return self.rows + explained + made + self.matrix + self.narrow * self.width + self.entries

    def decode_backward(self) -> float:
        """Return the bytes where the gradient of all tokens' reconstruction has arrived and becomes that of W_dec."""
        of_output = self.n_tokens * max(1, self.n_prefixes) * self.width * (4 + 2 * (self.product == 2))
        explained = self.of_auxk + self.of_explained
        # Sorting entries by latent takes a quarter as much again.
        made = of_output + 1.25 * self.entries + self.matrix + self.narrow * self.width
        return self.rows + made + 8 * self.own_tokens * self.width + explained

    def backward(self) -> float:
        """Return the bytes where the gradients of all weights are made, beside what AuxK leaves for its own."""
        weights = 4 * self.n_own * self.d_in + self.matrix + self.row_gradients
        # A CPU widens rows of 16 bits, a matrix at a time.
        widened = 4 * self.n_candidates * max(self.d_in, self.width)
        widened *= self.product == 2 and self.work.device == "cpu"
        beside = 4 * self.n_tokens * (2 * self.d_in + self.width) + self.targets + self.spare
        decoded = self.matrix + self.narrow * self.width + self._levels_backward() + self.of_auxk + self.of_explained
        return beside + max(weights + widened, decoded)

    def _levels_backward(self) -> float:
        """Return the bytes of the gradient of what all levels write.

        A lone GPU makes it of their errors, beside x_hat and the centred data; else it stands beside its 16-bit copy.
        """
        levels = self.n_tokens * self.n_prefixes * self.width
        if self.work.device == "cuda" and self.sharing == 1 and levels:
            return levels * (4 + self.product) + self.n_tokens * (4 * self.width + self.product * self.d_in)
        return levels * (4 + 2 * (self.product == 2))

    def _wide(self) -> float:
        """Return the bytes of reconstructions and errors.

        A sum over ranks is in fp32 and stands beside its addends; everything after it is for a rank's own tokens only.
        """
        n_own, n_all = (4 + self.n_prefixes, 0) if self.sharing == 1 else (3 + self.n_prefixes, 1)
        return 4 * self.width * (n_own * self.own_tokens + n_all * self.n_tokens)
