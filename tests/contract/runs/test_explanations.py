"""Tests for `explanations.jsonl`, the descriptions of an SAE's latents."""

from __future__ import annotations

import json
import multiprocessing
import os
import stat
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.stub_llm import explained_file

from trainer.contract import json_file
from trainer.contract.errors import UserError
from trainer.contract.files import write_whole
from trainer.contract.json_file import read_json_lines
from trainer.contract.runs.explanations import EXPLANATIONS, Explanation, read_explanations, record
from trainer.contract.runs.features import FEATURES, Features

KEYS = ["latent", "text", "detection", "detection_error", "fuzzing", "fuzzing_error", "n_examples", "n_unparsed",
        "problem", "model", "prompts", "time", "weights"]  # fmt: skip


def one(latent: int, text: str = "kings", weights: str = "w", **more: object) -> Explanation:
    return Explanation(latent=latent, text=text, weights=weights, **more)  # type: ignore[arg-type]


def test_the_file_has_a_line_per_latent_in_ascending_order_with_fixed_keys(tmp_path: Path) -> None:
    for latent in (30, 4, 17, 4):
        record(tmp_path, one(latent, f"text {latent}"))
    record(tmp_path, one(17, "new"))
    file = tmp_path / EXPLANATIONS
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [(line["latent"], line["text"]) for line in lines] == [(4, "text 4"), (17, "new"), (30, "text 30")]
    assert [list(line) for line in lines] == [KEYS] * 3
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert [entry.name for entry in tmp_path.iterdir()] == [EXPLANATIONS]


def test_a_failure_replaces_no_description_of_the_same_weights(tmp_path: Path) -> None:
    record(tmp_path, one(1), one(2, weights="old"), one(3, "", problem="first"))
    record(tmp_path, *(one(latent, "", problem="refused") for latent in (1, 2, 3)))
    known = read_explanations(tmp_path)
    assert [(known[latent].text, known[latent].problem) for latent in (1, 2, 3)] == [
        ("kings", ""), ("", "refused"), ("", "refused")
    ]  # fmt: skip


def _record_many(folder: Path, first: int) -> None:
    for latent in range(first, 40, 2):
        record(folder, one(latent))


def test_two_processes_that_write_at_once_lose_no_line(tmp_path: Path) -> None:
    spawn = multiprocessing.get_context("fork")
    writers = [spawn.Process(target=_record_many, args=(tmp_path, first)) for first in (0, 1)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert list(read_explanations(tmp_path)) == list(range(40))


def test_damaged_lines_are_left_out_and_the_others_are_kept(tmp_path: Path) -> None:
    record(tmp_path, one(1), one(2))
    good = (tmp_path / EXPLANATIONS).read_bytes()
    bad = [b"", b"{", b"[]", b'{"latent": -1, "text": ""}', b'{"latent": 3, "text": "x", "detection": 2}', b"\xff\xfe"]
    write_whole(tmp_path / EXPLANATIONS, b"\n".join([*bad, good.splitlines()[0], good.splitlines()[1][:-5]]))
    assert list(read_explanations(tmp_path)) == [1]
    record(tmp_path, one(5))
    assert list(read_explanations(tmp_path)) == [1, 5]
    # What a person or another program has written is never removed.
    kept = (tmp_path / EXPLANATIONS).read_bytes().splitlines()
    assert kept[0] == good.splitlines()[0]
    assert json.loads(kept[1])["latent"] == 5
    assert kept[2:] == [*filter(None, bad), good.splitlines()[1][:-5]]


def test_keys_of_other_programs_are_kept(tmp_path: Path) -> None:
    line = b'{"latent": 1, "text": "kings", "checked_by": "ada"}'
    (tmp_path / EXPLANATIONS).write_bytes(line)
    record(tmp_path, one(5))
    assert (tmp_path / EXPLANATIONS).read_bytes().splitlines()[0] == line


def test_a_file_with_a_merge_conflict_is_not_changed(tmp_path: Path) -> None:
    record(tmp_path, one(1))
    content = b"<<<<<<< HEAD\n" + (tmp_path / EXPLANATIONS).read_bytes() + b"=======\n>>>>>>> theirs\n"
    (tmp_path / EXPLANATIONS).write_bytes(content)
    with pytest.raises(UserError, match="has marks of a merge conflict; delete them first"):
        record(tmp_path, one(5))
    assert (tmp_path / EXPLANATIONS).read_bytes() == content


def test_no_file_is_written_that_is_too_large_to_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record(tmp_path, one(1))
    monkeypatch.setattr(json_file, "LARGEST", (tmp_path / EXPLANATIONS).stat().st_size + 50)
    with pytest.raises(UserError, match="would be larger than 0 MiB; move it away"):
        record(tmp_path, one(2))
    assert list(read_explanations(tmp_path)) == [1]


def test_texts_from_others_are_cut_and_cannot_control_a_terminal(tmp_path: Path) -> None:
    record(tmp_path, one(0))
    line = json.loads((tmp_path / EXPLANATIONS).read_text()) | {"text": "a\x1b[2J\nb" + "x" * 5000, "model": "m\u202e"}
    (tmp_path / EXPLANATIONS).write_text(json.dumps(line))
    read = read_explanations(tmp_path)[0]
    assert read.text.startswith("a�[2J b")
    assert (len(read.text), read.model) == (300, "m�")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read every file")
def test_an_unreadable_file_is_reported_and_not_replaced(tmp_path: Path) -> None:
    record(tmp_path, one(0))
    (tmp_path / EXPLANATIONS).chmod(0)
    with pytest.raises(UserError, match="cannot be read: Permission denied"):
        record(tmp_path, one(1))


def test_a_folder_in_place_of_the_file_is_reported(tmp_path: Path) -> None:
    (tmp_path / EXPLANATIONS).mkdir()
    with pytest.raises(UserError, match="cannot be read: "):
        record(tmp_path, one(1))
    (tmp_path / FEATURES).write_bytes(explained_file())
    assert Features(tmp_path / FEATURES).feature(0).explanation is None


@given(st.binary(max_size=300))
def test_any_content_yields_only_valid_explanations(content: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / EXPLANATIONS).write_bytes(content)
        assert all(isinstance(one, Explanation) for one in read_json_lines(Path(folder) / EXPLANATIONS, Explanation))


def test_latents_have_only_explanations_of_the_same_weights(tmp_path: Path) -> None:
    file = tmp_path / FEATURES
    file.write_bytes(explained_file(weights="new"))
    features = Features(file)
    assert (features.weights, features.explanations) == ("new", {})
    record(tmp_path, one(0, "old", "old"), one(1, "rivers", "new"), one(2, "", "new"), one(999, "beyond", "new"))
    assert features.feature(1).explanation == one(1, "rivers", "new")
    assert {latent for latent in range(12) if features.feature(latent).explanation} == {1}
    # An open file shows explanations that are added or replaced later.
    record(tmp_path, one(1, "a river", "new"))
    assert features.feature(1).explanation == one(1, "a river", "new")


def test_a_search_finds_words_of_explanations(tmp_path: Path) -> None:
    (tmp_path / FEATURES).write_bytes(explained_file(weights="new"))
    features = Features(tmp_path / FEATURES)
    assert features.search_apart("monarch") == ([], [])
    record(tmp_path, one(0, "Monarchs", "new"), one(3, "monarch butterflies", "new"), one(4, "monarch", "old"))
    assert features.search_apart("MONARCH") == ([], [0, 3])
    assert features.search_apart("king")[0] == [0]
    assert features.search_apart("family:other monarchs") == ([], [0])
