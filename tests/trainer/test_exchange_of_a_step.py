"""Tests how many bytes ranks exchange per step, counted by running the process group code."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.exchange_table import (
    CASES,
    COLUMNS,
    LATENCY,
    LINK,
    MODES,
    CountedRanks,
    counted_collectives,
    rows,
    step_of,
    times_of,
)
from support.step_ops import Op, Operand, OpLog, Step

TABLE = Path(__file__).with_name("exchange_of_a_step.csv")
OF_8 = torch.zeros(16, 1000)
# Each collective processes a tensor of 64,000 bytes.
# In a ring, each of 8 ranks sends 7/8 of the tensor, or twice that in an all-reduce.
SENT: dict[str, Callable[[CountedRanks], object]] = {
    "sum": lambda ranks: ranks.sum_(OF_8),
    "broadcast": lambda ranks: ranks.copy_from_first_([OF_8]),
    "gather": lambda ranks: ranks.spread_parts_([OF_8]),
    "all to all": lambda ranks: ranks.to_owners(OF_8),
}
EXPECTED = {"sum": 112_000, "broadcast": 64_000, "gather": 56_000, "all to all": 56_000}


@pytest.mark.parametrize("shape", [pytest.param("A", marks=pytest.mark.slow), "B"])
def test_a_steps_exchanges_match_those_in_the_table(shape: str) -> None:
    now, (columns, *listed) = list(rows([shape])), TABLE.read_text().splitlines()
    before = [columns, *(row for row in listed if row.split(",")[2] == shape)]
    changed = [f"- {row}" for row in before if row not in now] + [f"+ {row}" for row in now if row not in before]
    words = "if the change is intended, update the table with support/exchange_table.py"
    assert now == before, f"{words}: {COLUMNS}\n" + "\n".join(changed)


@pytest.mark.parametrize("kind", SENT)
def test_a_collectives_bytes_are_counted_as_in_a_ring(kind: str) -> None:
    log, ask = OpLog(), SENT[kind]
    with counted_collectives():
        ask(CountedRanks("world", 8, log))
    (one,) = log.exchanges
    assert (one.kind, one.sent) == (kind, {torch.float32: EXPECTED[kind]})


def operation(n_bytes: int) -> Op:
    operand = Operand((n_bytes,), (1,), torch.uint8, torch.device("cpu"))
    return Op("mul", (operand,), (), "")


def counted(work: Callable[[CountedRanks, OpLog], None]) -> Step:
    log = OpLog()
    with counted_collectives():
        work(CountedRanks("world", 8, log), log)
    return Step(tuple(log.ops), (), tuple(log.exchanges))


def test_a_transfer_overlaps_with_operations_before_its_wait() -> None:
    tensor, work = torch.zeros(2**20), operation(2**32)
    sum_s = LATENCY + 1.75 * tensor.nbytes / LINK

    def hidden(ranks: CountedRanks, log: OpLog) -> None:
        transfers = ranks.start_sums([tensor])
        log.ops.append(work)
        ranks.finish(transfers)

    def exposed(ranks: CountedRanks, log: OpLog) -> None:
        ranks.sum_(tensor)
        log.ops.append(work)

    first, second = times_of(counted(hidden), 1), times_of(counted(exposed), 1)
    assert first.step_s == pytest.approx(first.computing_s)
    assert second.step_s == pytest.approx(second.computing_s + sum_s)


@pytest.mark.parametrize("case", CASES)
def test_replicas_encode_while_receiving_the_decoder(case: str) -> None:
    step = step_of(next(mode for mode in MODES if (mode.name, mode.ranks) == ("ddp", 8)), "B", case)
    (decoder,) = (one for one in step.exchanges if one.ends_later)
    assert "addmm" in {op.name for op in step.ops[: decoder.ends]}
