"""What an imported SAE makes of rows, by which it is checked."""

from __future__ import annotations

import msgspec

from trainer.contract.wording import number


class ImportCheck(msgspec.Struct, frozen=True):
    """How many rows there were, latents active per row, and the share of the variance that is unexplained.

    That is None where reconstructions are not finite.
    """

    rows: int
    l0: float
    fvu: float | None

    def __str__(self) -> str:
        fvu = "not finite" if self.fvu is None else number(self.fvu)
        return f"on {self.rows:,} rows: L0 {self.l0:.1f}, FVU {fvu}"
