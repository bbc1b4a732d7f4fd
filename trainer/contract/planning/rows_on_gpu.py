"""GPU bytes of rows outside a step: batches that are read ahead, and cached held-out rows."""

from __future__ import annotations

from trainer.contract.planning.workload import Workload

# Batches that are read ahead. The step uses one while a thread reads the next; more would only hide a disk that is too
# slow on average.
READ_AHEAD = 2
# If a rank's held-out rows of all hooks exceed this, every evaluation reads them again. The usual 32,768 rows take half
# of it at d_in 4096 in 16 bits.
MOST_KEPT_BYTES = 2**29
# Held-out rows per evaluation batch. More are no faster and use memory that training may not need.
MOST_TOKENS = 8192


def bytes_of_rows(work: Workload) -> int:
    """Return the most bytes that read-ahead batches and held-out rows take on a training rank, if stored in fp32."""
    width = len(work.job.hooks) * work.shape.width
    n_held_out = work.job.data.held_out(work.shape.n_tokens, work.ranks)
    # Ranks that each read a shard hold the shards of two batches, the shard of a third that is being exchanged, and
    # that batch in full.
    n_ahead = max(READ_AHEAD, 1 + (READ_AHEAD + 1) / work.latent_ranks) if work.latent_ranks > 1 else READ_AHEAD
    sent_ahead = round(n_ahead * 4 * work.micro_batch * width)
    return sent_ahead + most_kept(n_held_out, work.data_ranks, width)


def most_kept(n_held_out: int, n_ranks: int, width: int) -> int:
    """Return the most bytes of held-out rows, each of `width` numbers, that each of `n_ranks` GPUs caches."""
    return min(4 * -(-n_held_out // n_ranks) * width, MOST_KEPT_BYTES)
