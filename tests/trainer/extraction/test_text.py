"""Tests for reading documents from local files, and for the one-sentence errors about unreadable files."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.compute
import pyarrow.parquet
import pytest

from trainer.contract.errors import UserError
from trainer.contract.settings.extract import TextSettings
from trainer.extraction import text
from trainer.extraction.text import documents, mended

CHAT = [{"role": "user", "content": "a cat"}, {"role": "assistant", "content": "sat"}]


def read(path: Path, **settings: Any) -> list[Any]:
    return list(documents(TextSettings(path=str(path), **settings)))


def write(file: Path, content: str | bytes) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(content.encode() if isinstance(content, str) else content)
    return file


def lines_of(file: Path, *rows: Any) -> Path:
    return write(file, "".join(json.dumps(row) + "\n" for row in rows))


def test_a_short_text_file_is_one_document(tmp_path: Path) -> None:
    assert read(write(tmp_path / "a.txt", "a cat\n\nsat – here\n")) == ["a cat\n\nsat – here\n"]
    assert read(write(tmp_path / "empty.txt", "")) == []


def test_a_long_text_file_is_split_at_line_ends_without_losing_text(tmp_path: Path) -> None:
    content = "".join(f"{number} a cat sät\n" for number in range(200_000))
    pieces = read(write(tmp_path / "a.txt", content))
    assert "".join(pieces) == content
    assert len(pieces) == 1 + len(content.encode()) // 2**20
    assert all(piece.endswith("\n") and len(piece.encode()) < 2**20 + 30 for piece in pieces)


def test_a_byte_order_mark_is_not_part_of_a_text(tmp_path: Path) -> None:
    mark = b"\xef\xbb\xbf"
    for name, content in (("a.txt", b"a cat"), ("b.jsonl", b'{"text": "a cat"}\n'), ("c.json", b'[{"text": "a cat"}]')):
        assert read(write(tmp_path / name, mark + content)) == ["a cat"]


@pytest.mark.parametrize("form", ["parquet", "datasets"])
def test_a_text_with_invalid_utf_8_does_not_stop_other_texts_from_being_read(form: str, tmp_path: Path) -> None:
    raw = [b"a cat", b"the \xed\xa0\xbd cat", b"caf\xe9", None]
    table = pyarrow.table({"text": pyarrow.array(raw, pyarrow.binary()), "id": [1, 2, 3, 4]})
    buffers = table.column("text").chunk(0).buffers()
    texts = pyarrow.Array.from_buffers(pyarrow.string(), 4, buffers, null_count=1)
    table = table.set_column(0, "text", texts)
    if form == "parquet":
        pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    else:
        datasets = pytest.importorskip("datasets")
        datasets.Dataset(table).save_to_disk(tmp_path / "set")
    found = read(tmp_path / ("a.parquet" if form == "parquet" else "set"))
    assert [mended(text) for text in found] == ["a cat", "the \ufffd cat", "caf\ufffd"]


def test_a_chat_with_invalid_utf_8_does_not_stop_other_chats_from_being_read(tmp_path: Path) -> None:
    def chats(text: pyarrow.DataType) -> pyarrow.DataType:
        return pyarrow.list_(pyarrow.struct([("role", pyarrow.string()), ("content", text)]))

    raw = [[{"role": "user", "content": text}] for text in (b"a cat", b"caf\xe9")]
    as_texts = pyarrow.compute.CastOptions(chats(pyarrow.string()), allow_invalid_utf8=True)
    column = pyarrow.array(raw, chats(pyarrow.binary())).cast(options=as_texts)
    pyarrow.parquet.write_table(pyarrow.table({"messages": column}), tmp_path / "a.parquet")
    found = mended(read(tmp_path / "a.parquet"))
    assert found == [[{"role": "user", "content": text}] for text in ("a cat", "caf\ufffd")]


def test_rows_in_jsonl_and_json_files_are_documents(tmp_path: Path) -> None:
    rows = [{"text": "a cat", "id": 1}, {"text": "sat", "id": 2}]
    assert read(lines_of(tmp_path / "a.jsonl", *rows)) == ["a cat", "sat"]
    assert read(write(tmp_path / "a.json", json.dumps(rows))) == ["a cat", "sat"]
    assert read(write(tmp_path / "one.json", json.dumps(rows[0]))) == ["a cat"]
    assert read(write(tmp_path / "strings.json", json.dumps(["a cat", "sat"]))) == ["a cat", "sat"]
    assert read(write(tmp_path / "gaps.jsonl", '\n{"text": "a cat"}\n\n')) == ["a cat"]


def test_rows_without_a_value_are_skipped(tmp_path: Path) -> None:
    file = lines_of(tmp_path / "a.jsonl", {"text": None}, {"text": "a cat"}, {"text": None}, {"text": "sat"})
    assert read(file) == read(file, column="text") == ["a cat", "sat"]


@pytest.mark.parametrize("column", ["text", "content", "document", "messages", "conversations", "input_ids", "tokens"])
def test_columns_with_common_names_are_found(tmp_path: Path, column: str) -> None:
    assert read(lines_of(tmp_path / "a.jsonl", {"id": 1, column: "a cat"})) == ["a cat"]


def test_chats_and_token_ids_are_passed_through_unchanged(tmp_path: Path) -> None:
    assert read(lines_of(tmp_path / "a.jsonl", {"messages": CHAT})) == [CHAT]
    assert read(lines_of(tmp_path / "b.jsonl", {"input_ids": [5, 6]}, {"input_ids": []})) == [[5, 6], []]
    assert read(lines_of(tmp_path / "c.jsonl", {"text": "a", "mine": [1]}), column="mine") == [[1]]


def test_a_sharegpt_chat_is_converted_to_chat_template_roles(tmp_path: Path) -> None:
    theirs = [
        {"from": "system", "value": "be short"}, {"from": "human", "value": "a cat"}, {"from": "gpt", "value": "sat"},
    ]  # fmt: skip
    ours = [{"role": "system", "content": "be short"}, *CHAT]
    assert read(lines_of(tmp_path / "a.jsonl", {"id": "1", "conversations": theirs})) == [ours]
    named = [{"from": "user", "value": "a cat"}, {"from": "assistant", "value": "sat", "weight": 1}]
    assert read(lines_of(tmp_path / "b.jsonl", {"conversations": named})) == [CHAT]
    with pytest.raises(UserError, match=r'^text.column: "conversations" of row 0 of .* is not text, a chat'):
        read(lines_of(tmp_path / "c.jsonl", {"conversations": [{"from": "human"}]}))


def test_padding_ids_are_dropped(tmp_path: Path) -> None:
    rows = [
        {"input_ids": [5, 6, 0, 0], "attention_mask": [1, 1, 0, 0]},
        {"input_ids": [0, 7], "attention_mask": [0, 1]},
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    for file in (lines_of(tmp_path / "a.jsonl", *rows), tmp_path / "a.parquet"):
        assert read(file) == read(file, column="input_ids") == [[5, 6], [7]]
    with pytest.raises(
        UserError, match=r"^text.column: attention_mask of row 0 of .* does not have a number for each of its"
    ):
        read(lines_of(tmp_path / "b.jsonl", {"input_ids": [5, 6], "attention_mask": [1]}))


def test_parquet_is_read_from_the_default_or_any_given_column(tmp_path: Path) -> None:
    table = pyarrow.table({"id": range(3000), "text": [f"cat {n}" for n in range(3000)], "messages": [CHAT] * 3000})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet", row_group_size=700)
    assert read(tmp_path / "a.parquet") == [f"cat {n}" for n in range(3000)]
    assert read(tmp_path / "a.parquet", column="messages") == [CHAT] * 3000
    with pytest.raises(UserError, match=r'^text.column: row 0 of .* has no "prose", only id, text, messages$'):
        read(tmp_path / "a.parquet", column="prose")


def test_a_folder_is_read_in_file_name_order_and_other_files_are_ignored(tmp_path: Path) -> None:
    write(tmp_path / "b" / "x.txt", "second")
    write(tmp_path / "a.md", "first")
    lines_of(tmp_path / "c.jsonl", {"text": "third"})
    write(tmp_path / "picture.png", b"\xff")
    assert read(tmp_path) == ["first", "second", "third"]


def test_data_saved_by_the_datasets_library_is_read(tmp_path: Path) -> None:
    import datasets

    train, test = (datasets.Dataset.from_dict({"text": [word, "cat"]}) for word in ("a", "the"))
    train.save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"train": train, "test": test}).save_to_disk(tmp_path / "splits")
    assert read(tmp_path / "one") == ["a", "cat"]
    assert read(tmp_path / "splits", split="test") == ["the", "cat"]
    with pytest.raises(UserError, match=r'^text.split: .* has no "validation", only train, test$'):
        read(tmp_path / "splits", split="validation")
    for file in (tmp_path / "one").glob("*.arrow"):
        file.write_bytes(b"damaged")
    with pytest.raises(UserError, match=r"^text.path: .*/one cannot be read: [^\n]+$"):
        read(tmp_path / "one")


def test_an_unreadable_hub_data_set_produces_a_one_sentence_error() -> None:
    # The name is invalid, so no request is sent to the hub.
    with pytest.raises(UserError, match=r"^text.dataset: no//name cannot be read: [^\n]+$"):
        list(documents(TextSettings(dataset="no//name")))


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("a.jsonl", '{"text": "a"}\n{"text": \n', "text.path: {} cannot be read: Expecting value"),
        ("a.json", '["a"', "text.path: {} cannot be read: "),
        ("a.parquet", "no parquet", "text.path: {} cannot be read: "),
        ("a.txt", b"caf\xe9", "text.path: {} is not UTF-8"),
        ("a.jsonl", b'{"text": "caf\xe9"}', "text.path: {} is not UTF-8"),
        ("a.jsonl", "5\n", "text.path: row 0 of {} is not an object with a text column"),
        ("a.jsonl", '{"prose": "a", "id": 1}\n', "text.column: row 0 of {} has none of"),
        ("a.jsonl", '{"text": "a"}\n{"prose": "a"}\n', 'text.column: row 1 of {} has no'),
        ("a.jsonl", '{"text": 5}\n', 'text.column: "text" of row 0 of {} is not text, a chat or token ids'),
        ("a.jsonl", '{"messages": [{"from": "a"}]}\n', 'text.column: "messages" of row 0 of {} is not text'),
        ("a.csv", "a,b", "text.path: {} must end in .txt, .md, .rst, .jsonl, .json, .parquet"),
    ],
)  # fmt: skip
def test_unreadable_input_produces_a_one_sentence_error(
    tmp_path: Path, name: str, content: str | bytes, sentence: str
) -> None:
    file = write(tmp_path / name, content)
    with pytest.raises(UserError) as error:
        read(file)
    assert "\n" not in str(error.value)
    assert str(error.value).startswith(sentence.format(file))


def test_deeply_nested_json_produces_a_one_sentence_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^text.path: .*/a.json cannot be read: [^\n]*$"):
        read(write(tmp_path / "a.json", "[" * 100_000))


def test_a_parquet_file_that_would_exceed_memory_produces_a_one_sentence_error(tmp_path: Path, monkeypatch) -> None:
    one = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * 4096, pyarrow.int32()), pyarrow.array(["A" * 2**21]))
    nested = pyarrow.array([[{"role": "user", "content": "hi"}]] * 4096)
    numbers = pyarrow.array([[7] * 2**19] * 4)
    file = tmp_path / "a.parquet"
    monkeypatch.setattr(text, "_LONGEST_ROW", 2**20)
    monkeypatch.setattr(text, "_LARGEST_GROUP", 2**23)
    for column, sentence in (
        (one, "row 0 of {} is longer than "),
        (numbers, "{} claims 2,097,152 values of text.list"),
    ):
        pyarrow.parquet.write_table(pyarrow.table({"text": column}), file, compression="zstd")
        assert file.stat().st_size < 10_000
        with pytest.raises(UserError, match=re.escape(sentence.format(file))):
            read(file)
    pyarrow.parquet.write_table(pyarrow.table({"messages": nested}), file)
    assert len(read(file)) == 4096


@pytest.mark.slow
def test_token_ids_are_read_even_next_to_constant_or_huge_columns(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(text, "_LARGEST_GROUP", 2**10)
    ids = [[7 * at % 5003 for at in range(4000)]] * 64
    ones, zeros = [[1] * 4000] * 64, [[0] * 4000] * 64
    columns = {
        "input_ids": ids,
        "attention_mask": ones,
        "token_type_ids": zeros,
        "input_ids_of_more": [[0] * 10**6] * 64,
    }
    pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / "a.parquet")
    assert read(tmp_path / "a.parquet") == ids


def test_an_overlong_json_row_is_an_error_and_a_long_line_of_text_is_split(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(text, "_LONGEST_ROW", 1000)
    monkeypatch.setattr(text, "_LARGEST_JSON", 2000)
    monkeypatch.setattr(text, "_LONGEST", 999)
    (tmp_path / "a.jsonl").write_text('{"text": "ok"}\n{"text": "' + "A" * 1000 + '"}\n')
    (tmp_path / "a.json").write_text(json.dumps(["A" * 900] * 3))
    (tmp_path / "a.txt").write_text(whole := "\u20ac" * 5000)
    for name, sentence in (("a.jsonl", "line 2 of {} is longer than"), ("a.json", "{} is larger than")):
        with pytest.raises(UserError, match=re.escape(sentence.format(tmp_path / name))):
            read(tmp_path / name)
    pieces = read(tmp_path / "a.txt")
    assert "".join(pieces) == whole
    assert max(map(len, pieces)) < 1000


def test_a_path_without_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=rf"^text.path: there is nothing at {tmp_path}/none$"):
        read(tmp_path / "none")
    write(tmp_path / "picture.png", b"\xff")
    with pytest.raises(UserError, match=rf"^text.path: {tmp_path} contains no file that ends in .txt, "):
        read(tmp_path)


def test_a_pipe_is_refused_without_blocking(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.txt")
    with pytest.raises(UserError, match=r"^text.path: "):
        read(tmp_path / "a.txt")
