"""Estimates the GPU memory that rows use outside a step: prefetched batches and cached held-out rows."""

from __future__ import annotations

from trainer.contract.planning.workload import Workload

# The number of prefetched batches. Each step uses one batch while a thread reads the next. If the disk is too slow on
# average, more batches would not help.
READ_AHEAD = 2
# If the held-out rows for all hooks on a rank take more bytes than this, every evaluation rereads them. With d_in 4096,
# the default 32,768 rows in 16 bits need half of this limit.
MOST_KEPT_BYTES = 2**29
# The maximum number of held-out rows per evaluation batch. Larger batches are no faster and could use more memory than
# training.
MOST_TOKENS = 8192


def bytes_of_rows(work: Workload) -> int:
    """Return the maximum size in bytes of a training rank's prefetched batches and held-out rows if all are fp32."""
    width = len(work.job.hooks) * work.shape.width
    n_held_out = work.job.data.held_out(work.shape.n_tokens, work.ranks)
    # If each rank reads only a shard of every batch, the rank stores its shards of two batches, its shard of a third
    # batch that is being exchanged, and that entire third batch.
    n_ahead = max(READ_AHEAD, 1 + (READ_AHEAD + 1) / work.latent_ranks) if work.latent_ranks > 1 else READ_AHEAD
    sent_ahead = round(n_ahead * 4 * work.micro_batch * width)
    return sent_ahead + most_kept(n_held_out, work.data_ranks, width)


def most_kept(n_held_out: int, n_ranks: int, width: int) -> int:
    """Return the maximum size in bytes of the held-out rows of `width` values cached by each of `n_ranks` GPUs."""
    return min(4 * -(-n_held_out // n_ranks) * width, MOST_KEPT_BYTES)
