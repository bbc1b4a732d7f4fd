from __future__ import annotations

from itertools import accumulate

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


@given(PARTS, st.integers(0, 200))
def test_the_bar_is_full_and_every_boundary_is_to_scale(parts: Memory, width: int) -> None:
    widths = cells(parts, width)
    sizes = {name: n_bytes for name, n_bytes in msgspec.structs.asdict(parts).items() if n_bytes}
    assert widths.keys() == sizes.keys()
    assert sum(widths.values()) == (width if parts.total else 0)
    for n_cells, n_bytes in zip(accumulate(widths.values()), accumulate(sizes.values()), strict=True):
        assert abs(n_cells - width * n_bytes / parts.total) <= 0.5 + 1e-9


def test_parts_smaller_than_a_cell_do_not_get_a_whole_cell() -> None:
    parts = Memory(1 << 20, 2 << 20, 1 << 20, 3 << 20, 0, 128 << 20, 512 << 20)
    assert list(cells(parts, 20).values()) == [0, 0, 0, 0, 4, 16]


def test_segment_widths_are_proportional_to_memory_if_the_bar_is_long_enough() -> None:
    parts = Memory(3 << 30, 3 << 30, 6 << 30, 2 << 30, 0, 1 << 30, 1 << 30)
    assert list(cells(parts, 32).values()) == [6, 6, 12, 4, 2, 2]
