"""The plan that the ranks in an attempt agree on: how the work is divided, and the expected time and memory.

The plan is stored in `attempt<N>/plan.json`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec

from trainer.contract.json_file import read_json
from trainer.contract.planning.model_placement import words_of_place
from trainer.contract.store.rows import Count, Name

# A rank is late, and delays the other ranks, if its compute time exceeds the median over all ranks by this factor.
LATE = 1.2

Share = Annotated[float, msgspec.Meta(ge=0)]


class Plan(msgspec.Struct, frozen=True):
    """How the ranks share the work.

    `step_s` and `needs_bytes` (per rank) are estimates. Only the ratios within `token_shares` and within
    `latent_shares` matter.

    `model_share` is the fraction of a step during which the language model runs, or 0 if there is no model. The text is
    split into `text_parts` shards, one for each device that runs the model. The model runs on each of `model_gpus`
    separate GPUs, or on every rank if there are no such GPUs. `model_why` is a clause giving the reason for this
    placement.
    """

    mode: Name
    ranks: Count
    latent_ranks: Count
    tokens_per_step: Count
    micro_batch: Count
    micro_batches: Count
    step_s: float
    needs_bytes: Count
    token_shares: tuple[Share, ...] = (1.0,)
    latent_shares: tuple[Share, ...] = (1.0,)
    reason: str = ""
    model_share: float = 0.0
    text_parts: Count = 1
    model_gpus: Count = 0
    model_why: str = ""
    # Resolved job settings: the peak learning rate for each SAE, by its label, and the precision.
    lr: dict[str, Share] = {}
    precision: str = ""

    def sentence(self) -> str:
        """Return a sentence such as `tensor on 4: 2.6× less time than ddp; 2 micro-batches of 4,096 tokens`.

        Uneven shares are listed at the end.
        """
        parts = [self.reason or f"{self.mode} on {self.ranks}"]
        if self.micro_batches > 1:
            parts.append(f"{self.micro_batches} micro-batches of {self.micro_batch:,} tokens")
        if self.model_share or self.model_gpus:
            parts.append(self._words_of_model())
        return "; ".join([*parts, *words_of_shares(self.token_shares, self.latent_shares)])

    def _words_of_model(self) -> str:
        text = "the whole text" if self.text_parts == 1 else f"one of {self.text_parts} parts of the text"
        share = f"{100 * self.model_share:.0f} % of a step"
        if self.model_gpus:
            where = words_of_place(self.model_gpus, self.ranks + self.model_gpus, self.model_why)
            return f"{where}; {'it' if self.model_gpus == 1 else 'each'} reads {text}, for {share}"
        who = f"every rank runs the language model, on {text}" if self.ranks > 1 else "it also runs the language model"
        return f"{who}: {share}{f'; {self.model_why}' if self.model_why else ''}"


def words_of_shares(tokens: Sequence[float], latents: Sequence[float], now: str = "") -> list[str]:
    """Return phrases such as `tokens per rank 60 % / 40 %` for tokens and latents; even shares are omitted.

    In a grid of ranks, the tokens are divided among the rows and the latents among the columns. A grid with only one
    row or column is described as a list of ranks.
    """
    is_grid = len(tokens) > 1 and len(latents) > 1
    phrases = []
    for what, shares, line in (("tokens", tokens, "row"), ("latents", latents, "column")):
        if len(set(shares)) > 1:
            percent = " / ".join(f"{100 * share / sum(shares):.0f} %" for share in shares)
            phrases.append(f"{what} per {f'{line} of ranks' if is_grid else 'rank'}{now} {percent}")
    return phrases


def read_plan(file: Path) -> Plan | None:
    """Return the plan, or None if the file is missing or unreadable."""
    return read_json(file, Plan)
