from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch
from support.toy_stream import ToyKnobs, ToyStream

from trainer.activations.shards import Shards
from trainer.activations.training_data import IndexedData, Read, StreamData
from trainer.contract.errors import UserError
from trainer.contract.runs.checkpoint_manifest import BufferPlace
from trainer.parallel.base import Parallel
from trainer.parallel.group import Group

SAMPLE = 60


@pytest.fixture(autouse=True)
def small_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.activations.training_data.SAMPLE_TOKENS", SAMPLE)


class OneOf(Group):
    """A group of several ranks in which all others have what this one has."""

    def __init__(self, index: int, size: int) -> None:
        self.index, self.size = index, size

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.expand(self.size, *tensor.shape).clone()


def toy(**settings: int) -> ToyStream:
    knobs = ToyKnobs(**{"shuffle_tokens": 50} | settings)
    return ToyStream(**{name: getattr(knobs, name) for name in knobs.__struct_fields__})


def stream_data(
    index: int = 0, size: int = 1, *, places: list[BufferPlace] | None = None, **settings: int
) -> StreamData:
    parallel = Parallel(torch.device("cpu"), data=OneOf(index, size))
    return StreamData(toy(**settings), 45, 0, parallel, places)


def go(data: StreamData, n: int, position: int = 0) -> list[tuple[float, ...]]:
    rows: Read = data.read(position, n)
    data.note_trained(rows)
    return rows_of(rows.x)


def rows_of(x: torch.Tensor) -> list[tuple[float, ...]]:
    return [tuple(row) for row in x.tolist()]


def held_out(data: StreamData) -> list[tuple[float, ...]]:
    return [row for x, _ in data.of_hook(0).held_out(8) for row in rows_of(x)]


def test_the_parts_of_a_stream_and_what_they_hold_out_share_no_row() -> None:
    parts = [stream_data(index, 2) for index in range(2)]
    kept_back = [held_out(part) for part in parts]
    assert list(map(len, kept_back)) == [23, 22]
    trained = [go(part, 130) + go(part, 9) for part in parts]
    every = [row for rows in kept_back + trained for row in rows]
    assert len(set(every)) == len(every) == 45 + 2 * 139


def test_rows_held_out_and_the_sample_are_the_same_at_a_later_place() -> None:
    first = stream_data()
    go(first, 333)
    later = stream_data(places=first.stream_places())
    assert held_out(first) == held_out(later)
    assert torch.equal(first.of_hook(0).sample(0)[0], later.of_hook(0).sample(1)[0])
    assert len(first.of_hook(0).sample(0)[0]) == SAMPLE
    assert go(first, 70) == go(later, 70)


def test_what_was_read_ahead_is_read_again_after_a_rewind() -> None:
    data = stream_data()
    go(data, 20)
    ahead = rows_of(data.read(20, 30).x)
    data.rewind()
    assert go(data, 30) == ahead


def test_a_stream_that_ends_or_is_of_other_parts_is_refused_by_the_setting_to_change() -> None:
    data = stream_data(ends_after=300)
    assert len(go(data, 255)) == 255
    with pytest.raises(UserError, match=r"^train\.n_tokens: a toy stream has ended before the run; train on fewer"):
        data.read(255, 1)
    with pytest.raises(UserError, match=r"has ended \(part 2 of 2\) before the run"):
        stream_data(1, 2, ends_after=45)
    with pytest.raises(UserError, match=r"^launch\.gpus: the stream was read in 1 parts, .* 2 cannot go on"):
        stream_data(0, 2, places=data.stream_places())


def test_a_bad_row_is_told_as_long_as_the_steps_are_asked_for_in_which_it_was() -> None:
    data = stream_data(first_bad=130, bad_rows=2)
    for position in range(0, 200, 20):
        go(data, 20, position)
    # Whichever of the two is trained on first.
    assert str(data.bad_row(0, 200, 20)) in [
        f"a toy stream holds NaN or infinite values in row {n}" for n in (130, 131)
    ]
    # Without what is held out they are rows 85 and 86, of the block of 50 to 99.
    steps = {start for start in range(0, 200, 20) if data.bad_row(start, start + 20, 20)}
    assert steps
    assert steps <= {40, 60, 80}


def test_stored_rows_are_read_at_any_position_and_a_checkpoint_keeps_nothing_of_them(activations: Path) -> None:
    data = IndexedData(Shards(path=str(activations)), 100, 0, Group())
    first = data.read(64, 64)
    data.read(10_000, 64)
    assert torch.equal(data.read(64, 64).x, first.x)
    assert data.stream_places() is msgspec.UNSET
    assert sum(len(x) for x, _ in data.of_hook(0).held_out(7)) == data.n_held_out == 100
