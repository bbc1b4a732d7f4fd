"""The GPU memory of rows outside a step: batches that are read ahead, and cached held-out rows."""

from __future__ import annotations

from trainer.contract.planning.workload import Workload

# The number of batches that are read ahead. The step uses one batch while a thread reads the next. More batches would
# not help if the disk is too slow on average.
READ_AHEAD = 2
# If the held-out rows of all hooks on a rank take more bytes than this, every evaluation reads them again. With d_in
# 4096, the usual 32,768 rows in 16 bits take half of it.
MOST_KEPT_BYTES = 2**29
# The held-out rows per evaluation batch. Larger batches are no faster and could use more memory than training.
MOST_TOKENS = 8192


def bytes_of_rows(work: Workload) -> int:
    """Return the maximum bytes that read-ahead batches and held-out rows take on a training rank, if stored in fp32."""
    width = len(work.job.hooks) * work.shape.width
    n_held_out = work.job.data.held_out(work.shape.n_tokens, work.ranks)
    # Ranks that each read a shard of every batch hold their shards of two batches, their shard of a third batch that is
    # being exchanged, and the entire third batch.
    n_ahead = max(READ_AHEAD, 1 + (READ_AHEAD + 1) / work.latent_ranks) if work.latent_ranks > 1 else READ_AHEAD
    sent_ahead = round(n_ahead * 4 * work.micro_batch * width)
    return sent_ahead + most_kept(n_held_out, work.data_ranks, width)


def most_kept(n_held_out: int, n_ranks: int, width: int) -> int:
    """Return the maximum bytes of held-out rows, each of `width` values, that each of `n_ranks` GPUs caches."""
    return min(4 * -(-n_held_out // n_ranks) * width, MOST_KEPT_BYTES)
