"""Bytes of a GPU that rows take beside those of a step: batches sent ahead, and held-out rows that it keeps."""

from __future__ import annotations

from trainer.contract.planning.workload import Workload

# Batches that are read before they are needed. The step takes one while a thread reads the next; more would only hide a
# disk that is too slow on average.
READ_AHEAD = 2
# A rank's held-out rows of all hooks are read anew for every evaluation where they are more. The usual 32,768 take half
# of it at d_in 4096 in 16 bits.
MOST_KEPT_BYTES = 2**29
# Held-out rows that are measured at once. More are no faster; they take memory that training may have no need of.
MOST_TOKENS = 8192


def bytes_of_rows(work: Workload) -> int:
    """Return the most bytes of a rank that trains: as if all rows were stored in fp32."""
    width = len(work.job.hooks) * work.shape.width
    n_held_out = work.job.data.held_out(work.shape.n_tokens, work.ranks)
    # Ranks that read a part each have the parts of two batches and of a third that is exchanged, and all of the latter.
    n_ahead = max(READ_AHEAD, 1 + (READ_AHEAD + 1) / work.latent_ranks) if work.latent_ranks > 1 else READ_AHEAD
    sent_ahead = round(n_ahead * 4 * work.micro_batch * width)
    return sent_ahead + most_kept(n_held_out, work.data_ranks, width)


def most_kept(n_held_out: int, n_ranks: int, width: int) -> int:
    """Return the most bytes that a GPU keeps of the held-out rows that so many ranks share, each of `width` numbers."""
    return min(4 * -(-n_held_out // n_ranks) * width, MOST_KEPT_BYTES)
