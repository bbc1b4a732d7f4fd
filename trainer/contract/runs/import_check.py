"""The result of checking an imported SAE on activation rows."""

from __future__ import annotations

import msgspec

from trainer.contract.wording import number


class ImportCheck(msgspec.Struct, frozen=True):
    """The number of rows, the mean number of active latents per row, and the FVU (None if not finite)."""

    rows: int
    l0: float
    fvu: float | None

    def __str__(self) -> str:
        fvu = "not finite" if self.fvu is None else number(self.fvu)
        return f"on {self.rows:,} rows: L0 {self.l0:.1f}, FVU {fvu}"
