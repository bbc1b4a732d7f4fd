from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from trainer.contract.planning.memory import Memory
from trainer.contract.planning.memory_bar import LETTERS, cells

SIZES = st.one_of(st.just(0), st.integers(1, 2**40))
PARTS = st.builds(Memory, *[SIZES] * len(LETTERS))


def test_every_component_has_a_unique_letter() -> None:
    assert list(LETTERS) == [field.name for field in msgspec.structs.fields(Memory)]
    assert len(set(LETTERS.values())) == len(LETTERS)


@given(PARTS, st.integers(len(LETTERS), 200))
def test_the_memory_components_fill_the_bar_and_each_is_visible(parts: Memory, width: int) -> None:
    widths = cells(parts, width)
    assert sum(widths.values()) == (width if parts.total else 0)
    assert widths.keys() == {name for name, n_bytes in msgspec.structs.asdict(parts).items() if n_bytes}
    assert all(n_cells >= 1 for n_cells in widths.values())


@given(PARTS, st.integers(0, len(LETTERS)))
def test_a_bar_too_short_for_all_components_keeps_its_width(parts: Memory, width: int) -> None:
    assert sum(cells(parts, width).values()) <= width


def test_segment_widths_are_proportional_to_memory_if_the_bar_is_long_enough() -> None:
    parts = Memory(3 << 30, 3 << 30, 6 << 30, 2 << 30, 0, 1 << 30, 1 << 30)
    assert list(cells(parts, 32).values()) == [6, 6, 12, 4, 2, 2]
