from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from support.toy_stream import ToySettings, ToyStream

from trainer.activations.copies import copies_in
from trainer.activations.shards import Shards
from trainer.activations.training_data import HALVES, HowHeldOut, IndexedData, ReadRows, StreamData
from trainer.contract.errors import UserError
from trainer.contract.runs.checkpoint_manifest import BufferPlace
from trainer.parallel.base import Parallel
from trainer.parallel.group import Group
from trainer.parallel.threads import on_all

SAMPLE = 60


@pytest.fixture(autouse=True)
def small_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.activations.training_data.SAMPLE_TOKENS", SAMPLE)


class OneOf(Group):
    """One rank of a simulated process group in which all ranks hold the same tensor."""

    def __init__(self, index: int, size: int) -> None:
        self.index, self.size = index, size

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.expand(self.size, *tensor.shape).clone()


def toy(**values: int) -> ToyStream:
    settings = ToySettings(**{"shuffle_tokens": 50} | values)
    return ToyStream(**{name: getattr(settings, name) for name in settings.__struct_fields__})


def stream_data(
    index: int = 0,
    size: int = 1,
    *,
    places: list[BufferPlace] | None = None,
    how: HowHeldOut | None = None,
    **settings: int,
) -> StreamData:
    parallel = Parallel(torch.device("cpu"), data=OneOf(index, size))
    return StreamData(toy(**settings), 45, 0, parallel, places, how)


def go(data: StreamData, n: int, position: int = 0) -> list[tuple[float, ...]]:
    rows: ReadRows = data.read(position, n)
    data.note_trained(rows)
    return rows_of(rows.x)


def rows_of(x: torch.Tensor) -> list[tuple[float, ...]]:
    return [tuple(row) for row in x.tolist()]


def held_out(data: StreamData, half: int | None = None) -> list[tuple[float, ...]]:
    return [row for x, _ in data.of_hook(0).held_out(8, half) for row in rows_of(x)]


def test_the_parts_of_a_stream_and_their_held_out_rows_are_disjoint() -> None:
    parts = [stream_data(index, 2) for index in range(2)]
    kept_back = [held_out(part) for part in parts]
    assert list(map(len, kept_back)) == [23, 22]
    trained = [go(part, 130) + go(part, 9) for part in parts]
    every = [row for rows in kept_back + trained for row in rows]
    assert len(set(every)) == len(every) == 45 + 2 * 139


def test_held_out_rows_and_the_sample_stay_the_same_at_a_later_position() -> None:
    first = stream_data()
    go(first, 333)
    later = stream_data(places=first.stream_places())
    assert held_out(first) == held_out(later)
    assert torch.equal(first.of_hook(0).sample(0)[0], later.of_hook(0).sample(1)[0])
    assert len(first.of_hook(0).sample(0)[0]) == SAMPLE
    assert go(first, 70) == go(later, 70)


BY_TEXTS = HowHeldOut("texts", 0)


def numbers_of(rows: list[tuple[float, ...]]) -> list[int]:
    """Look up the row numbers of rows from the toy stream."""
    every = {row: number for number, row in enumerate(rows_of(toy()._made.rows(np.arange(4000))))}
    return [every[row] for row in rows]


@pytest.mark.parametrize("size", [1, 2])
def test_a_stream_with_known_texts_holds_out_entire_texts_in_all_its_parts(size: int) -> None:
    parts = [stream_data(index, size, how=BY_TEXTS, text_rows=6) for index in range(size)]
    kept_back = [numbers_of(held_out(part)) for part in parts]
    assert sum(map(len, kept_back)) == 45
    trained = [numbers_of(go(part, 500)) for part in parts]
    of_texts, trained_on = ({number // 6 for of_part in one for number in of_part} for one in (kept_back, trained))
    assert of_texts.isdisjoint(trained_on)
    # The held-out texts are not simply the first texts in the stream. During training, fewer than four texts are
    # skipped for each held-out text.
    assert max(of_texts) > 25
    assert len({*range(max(trained_on))} - trained_on) < 4 * len(of_texts)
    assert len({number for of_part in (*kept_back, *trained) for number in of_part}) == 45 + 500 * size
    assert [part.hold_out for part in parts] == ["texts"] * size
    assert parts[0].of_hook(0).clusters().labels.tolist() == [number // 6 for number in kept_back[0]]


def test_no_text_in_a_stream_is_in_different_halves_on_different_ranks() -> None:
    def begin(group: Group) -> StreamData:
        return StreamData(toy(text_rows=6), 45, 0, Parallel(torch.device("cpu"), data=group), None, BY_TEXTS)

    parts = on_all(2, begin)
    first, second = ({number // 6 for part in parts for number in numbers_of(held_out(part, half))} for half in HALVES)
    assert first
    assert second
    assert first.isdisjoint(second)
    assert [part.n_texts for part in parts] == [len(first | second)] * 2


def test_a_single_reader_holds_out_no_text_that_two_readers_have_trained_on() -> None:
    alone = {number // 6 for number in numbers_of(held_out(stream_data(how=BY_TEXTS, text_rows=6)))}
    parts = [stream_data(index, 2, how=BY_TEXTS, text_rows=6) for index in range(2)]
    assert alone.isdisjoint(number // 6 for part in parts for number in numbers_of(go(part, 900)))


def test_a_stream_with_held_out_texts_continues_exactly_from_a_later_position() -> None:
    first = stream_data(how=BY_TEXTS, text_rows=6)
    go(first, 333)
    later = stream_data(places=first.stream_places(), how=BY_TEXTS, text_rows=6)
    assert held_out(first) == held_out(later)
    assert torch.equal(first.of_hook(0).sample(0)[0], later.of_hook(0).sample(1)[0])
    assert go(first, 170) == go(later, 170)
    assert held_out(first) != held_out(stream_data(how=HowHeldOut("texts", 1), text_rows=6))


def test_a_stream_of_few_long_texts_holds_out_its_first_rows_or_raises_an_error() -> None:
    data = stream_data(how=BY_TEXTS, text_rows=3000)
    assert numbers_of(held_out(data)) == list(range(45))
    assert data.hold_out == "rows"
    assert min(numbers_of(go(data, 100))) >= 45
    for text_rows, reason in ((3000, "are too few or too long"), (0, "are unknown")):
        with pytest.raises(UserError, match=rf'^data\.hold_out: the texts of a toy stream {reason}; use "rows"$'):
            stream_data(how=HowHeldOut("texts", 0, is_asked=True), text_rows=text_rows)


def test_rows_read_ahead_are_read_again_after_a_rewind() -> None:
    data = stream_data()
    go(data, 20)
    ahead = rows_of(data.read(20, 30).x)
    data.rewind()
    assert go(data, 30) == ahead


def test_the_error_for_a_stream_that_ended_or_was_split_differently_names_the_setting() -> None:
    data = stream_data(ends_after=300)
    assert len(go(data, 255)) == 255
    with pytest.raises(
        UserError,
        match=r"^train\.n_tokens: a toy stream ran out of rows before the end of the run; start a new run with fewer",
    ):
        data.read(255, 1)
    with pytest.raises(UserError, match=r"ran out of rows \(part 2 of 2\) before the end of the run"):
        stream_data(1, 2, ends_after=45)
    with pytest.raises(UserError, match=r"^launch\.gpus: the stream was read in 1 parts, .* 2 cannot continue"):
        stream_data(0, 2, places=data.stream_places())


def test_a_bad_row_is_reported_only_for_the_steps_that_contain_it() -> None:
    data = stream_data(first_bad=130, bad_rows=2)
    for position in range(0, 200, 20):
        go(data, 20, position)
    # Either of the two bad rows may come first in the shuffled order.
    assert str(data.bad_row(0, 200, 20)) in [
        f"a toy stream contains NaN or infinite values in row {n}" for n in (130, 131)
    ]
    # Not counting held-out rows, the two bad rows are rows 85 and 86. Rows 50 to 99 are shuffled among themselves.
    steps = {start for start in range(0, 200, 20) if data.bad_row(start, start + 20, 20)}
    assert steps
    assert steps <= {40, 60, 80}


def test_stored_rows_can_be_read_at_any_position_and_need_no_checkpoint_state(activations: Path) -> None:
    data = IndexedData(Shards(path=str(activations)), 100, 0, Group())
    first = data.read(64, 64)
    data.read(10_000, 64)
    assert torch.equal(data.read(64, 64).x, first.x)
    assert data.stream_places() is msgspec.UNSET
    assert sum(len(x) for x, _ in data.of_hook(0).held_out(7)) == data.n_held_out == 100


def test_zero_rows_do_not_count_as_copies(tmp_path: Path) -> None:
    rows = torch.randn(400, 8, generator=torch.Generator().manual_seed(0))
    rows[::2] = 0
    save_file({"activations": rows}, tmp_path / "a.safetensors")
    data = IndexedData(Shards(path=str(tmp_path)), 100, 0, Group())
    assert copies_in(data.of_hook(0), 0) == 0
