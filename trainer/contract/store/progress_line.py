"""The lines in `progress.jsonl`, which rank 0 appends every half second if it cannot write to `metrics.db`."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Annotated

import msgspec

from trainer.contract.json_file import decode_as
from trainer.contract.store.metrics_store import Heartbeat, MetricRow
from trainer.contract.store.rows import Count, Event

# The limit is far below 2**63, so that numbers computed from a step also fit in SQLite's integers.
_Step = Annotated[int, msgspec.Meta(ge=0, le=2**62)]
# Name, step, value and rank; a non-finite value is null because JSON cannot represent it.
_Row = tuple[str, _Step, float | None, Count]


class ProgressLine(msgspec.Struct, frozen=True, omit_defaults=True):
    """A report from rank 0.

    `rewind` is set in the first report of a resumed run; stored rows after its step must be deleted.
    """

    rows: tuple[_Row, ...] = ()
    heartbeat: Heartbeat | None = None
    events: tuple[Event, ...] = ()
    rewind: Heartbeat | None = None

    @property
    def series_rows(self) -> list[MetricRow]:
        return [
            MetricRow(name, step, math.nan if value is None else value, rank) for name, step, value, rank in self.rows
        ]


def stored_rows(rows: Iterable[MetricRow]) -> tuple[_Row, ...]:
    return tuple((row.name, row.step, row.value if math.isfinite(row.value) else None, row.rank) for row in rows)


def encode(line: ProgressLine) -> bytes:
    return msgspec.json.encode(line) + b"\n"


def decode(text: bytes) -> ProgressLine | None:
    """Parse a line; return None if a full disk or a killed writer has truncated it."""
    try:
        return decode_as(text, ProgressLine)
    except ValueError:
        return None
