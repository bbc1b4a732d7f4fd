"""What the ranks of an attempt settled on, in `attempt<N>/plan.json`: how they share the work, and what they expect."""

from __future__ import annotations

from pathlib import Path

import msgspec


class Plan(msgspec.Struct, frozen=True):
    """Seconds of a step and bytes of a rank are expected ones; shares count by their ratios."""

    mode: str
    ranks: int
    latent_ranks: int
    tokens_per_step: int
    micro_batch: int
    micro_batches: int
    step_s: float
    needs_bytes: int
    token_shares: tuple[float, ...] = (1.0,)
    latent_shares: tuple[float, ...] = (1.0,)
    reason: str = ""

    def sentence(self) -> str:
        """`tensor on 4: 2.6× less time than ddp (…); 2 micro-batches of 4,096 tokens; shares 60:40`."""
        parts = [self.reason or f"{self.mode} on {self.ranks}"]
        if self.micro_batches > 1:
            parts.append(f"{self.micro_batches} micro-batches of {self.micro_batch:,} tokens")
        for what, shares in (("tokens", self.token_shares), ("latents", self.latent_shares)):
            if len(set(shares)) > 1:
                parts.append(f"{what} shared {':'.join(f'{100 * share / sum(shares):.0f}' for share in shares)}")
        return "; ".join(parts)


def read_plan(file: Path) -> Plan | None:
    """None where there is none yet."""
    try:
        return msgspec.json.decode(file.read_bytes(), type=Plan)
    except (OSError, msgspec.MsgspecError):
        return None
