"""Tests that for any bytes, each reader returns a value or a one-sentence error, quickly and with little memory."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from fuzz.inputs import inputs
from fuzz.judged import home, judge
from fuzz.readers import READERS, Reader
from fuzz.uses import CORPUS, Home
from hypothesis import HealthCheck, Phase, given, settings

# The tests for all readers take 6 core-seconds in total; `python -m fuzz` runs as long as requested.
EXAMPLES = 50


@pytest.fixture(scope="module", name="place")
def _place() -> Iterator[Home]:
    with home() as place:
        yield place


@pytest.mark.parametrize("reader", READERS, ids=lambda reader: reader.name)
def test_any_bytes_produce_a_value_or_a_one_sentence_error(reader: Reader, place: Home) -> None:
    for file in sorted((CORPUS / reader.seeds).iterdir()):
        judge(reader, place, file.read_bytes())

    @settings(
        max_examples=EXAMPLES, database=None, derandomize=True, phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(inputs(CORPUS / reader.seeds))
    def read(content: bytes) -> None:
        judge(reader, place, content)

    try:
        read()
    finally:
        place.put(reader.seeds, (CORPUS / reader.seeds / "real").read_bytes())


@pytest.mark.parametrize("reader", READERS, ids=lambda reader: reader.name)
def test_files_written_by_sae_tui_are_read(reader: Reader, place: Home) -> None:
    for file in sorted((CORPUS / reader.seeds).glob("real*")):
        place.put(reader.seeds, file.read_bytes())
        assert reader.read(place) is not None
    place.put(reader.seeds, (CORPUS / reader.seeds / "real").read_bytes())
