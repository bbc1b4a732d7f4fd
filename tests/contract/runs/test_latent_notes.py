"""Tests for notes on latents: the file's format, several writers at once, and damaged, foreign or unwritable files."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from support.features import features_file
from support.stub_llm import explained_file

from trainer.contract.errors import UserError
from trainer.contract.runs.features import FEATURES, Features
from trainer.contract.runs.latent_notes import NOTES, Change, LatentNote, carry_notes, change_note, read_notes

# Reads edits as lines of JSON (folder, latent, fields), and prints a line after each.
WRITER = """
import json, sys
from pathlib import Path
from msgspec.structs import replace
from trainer.contract.runs.latent_notes import change_note
for line in sys.stdin:
    folder, latent, fields = json.loads(line)
    change_note(Path(folder), latent, lambda note: replace(note, **fields))
    print("done", flush=True)
"""
# Says that it holds the lock, and changes the note after it has read a line.
HOLDER = """
import sys
from pathlib import Path
from msgspec.structs import replace
from trainer.contract.runs.latent_notes import change_note
def change(note):
    print("inside", flush=True)
    input()
    return replace(note, note="by the holder")
change_note(Path(sys.argv[1]), 1, change)
print("done", flush=True)
"""
# Stars `n` latents, and counts in the name of latent 0, as the other writers do.
COUNTER = """
import sys
from pathlib import Path
from msgspec.structs import replace
from trainer.contract.runs.latent_notes import change_note
folder, first, n = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
print("ready", flush=True)
input()
for latent in range(first, first + n):
    change_note(folder, latent, lambda note: replace(note, starred=True))
    change_note(folder, 0, lambda note: replace(note, name=str(int(note.name or 0) + 1)))
print("done", flush=True)
"""
LINES = [
    b'{"latent": 0}', b'{"latent": 0, "name": "a", "time": 3}', b'{"latent": 1, "note": "b", "time": 2}\r',
    b'{"latent": 1, "note": "c", "time": 1}', b'{"latent": 2, "starred": true}', b"  ", b"<<<<<<< x", b"# mine",
]  # fmt: skip
FIELDS = st.fixed_dictionaries(
    {}, optional={"starred": st.booleans(), "name": st.text("ab é", max_size=3), "note": st.text("x\n", max_size=3)}
)


def setting(**fields: Any) -> Change:
    return lambda note: replace(note, **fields)


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / NOTES).read_text().splitlines()]


def without_times(folder: Path) -> list[dict[str, Any]]:
    """Return the lines of a file without the times; [] if there is no file."""
    return [one | {"time": 0} for one in lines(folder)] if (folder / NOTES).exists() else []


def test_a_file_has_one_line_per_latent_in_ascending_order_with_fixed_keys(tmp_path: Path) -> None:
    change_note(tmp_path, 10, setting(starred=True))
    change_note(tmp_path, 9, setting(name="Könige 天", note="first line\nsecond"))
    change_note(tmp_path, 10, setting(note="later"))
    text = (tmp_path / NOTES).read_bytes().decode()
    first, second = lines(tmp_path)
    assert text == "".join(json.dumps(one, ensure_ascii=False) + "\n" for one in (first, second))
    assert [*first] == [*second] == ["latent", "starred", "name", "note", "tokens", "time", "weights"]
    assert [*first.values()][:5] == [9, False, "Könige 天", "first line\nsecond", None]
    assert [*second.values()][:5] == [10, True, "", "later", None]
    assert stat.S_IMODE((tmp_path / NOTES).stat().st_mode) == 0o600
    assert [one.name for one in tmp_path.iterdir()] == [NOTES]


def test_a_note_without_content_is_removed_and_the_last_one_takes_the_file_with_it(tmp_path: Path) -> None:
    change_note(tmp_path, 1, setting())
    assert not (tmp_path / NOTES).exists()
    change_note(tmp_path, 1, setting(starred=True))
    change_note(tmp_path, 2, setting(name="kept"))
    change_note(tmp_path, 1, setting(starred=False))
    assert [one["latent"] for one in lines(tmp_path)] == [2]
    change_note(tmp_path, 2, setting(name=" "))
    assert not [*tmp_path.iterdir()]


def test_an_edit_that_changes_nothing_does_not_touch_the_file(tmp_path: Path) -> None:
    change_note(tmp_path, 1, setting(starred=True))
    before = (tmp_path / NOTES).stat()
    changed = change_note(tmp_path, 1, setting(starred=True))
    assert changed.before == changed.after
    assert (tmp_path / NOTES).stat() == before


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 4), FIELDS), max_size=8))
def test_edits_by_two_processes_give_the_same_file_as_edits_by_one(
    edits: list[tuple[bool, int, dict[str, Any]]],
) -> None:
    with TemporaryDirectory() as by_two, TemporaryDirectory() as by_one:
        for is_first, latent, fields in edits:
            writer = writers()[is_first]
            writer.tell(json.dumps([by_two, latent, fields]))
            assert writer.hear() == "done"
            change_note(Path(by_one), latent, setting(**fields))
        assert without_times(Path(by_two)) == without_times(Path(by_one))


_writers: list[Any] = []


def writers() -> list[Any]:
    """Return two processes that apply edits; they live until the module's tests have ended."""
    if not _writers:
        from contract.conftest import Child

        _writers.extend([Child(WRITER), Child(WRITER)])
    return _writers


@pytest.fixture(scope="module", autouse=True)
def end_writers() -> Iterator[None]:
    yield
    for writer in _writers:
        writer.process.kill()
        writer.process.communicate()
    _writers.clear()


def test_writers_at_the_same_time_lose_none_of_each_others_changes(tmp_path: Path, child: Callable[..., Any]) -> None:
    n = 30
    counters = [child(COUNTER, tmp_path, 100 * number, n) for number in (1, 2, 3)]
    for one in counters:
        assert one.hear() == "ready"
    for one in counters:
        one.tell("go")
    for one in counters:
        assert one.hear() == "done"
    notes = read_notes(tmp_path).by_latent
    assert [*notes] == [0, *(100 * number + k for number in (1, 2, 3) for k in range(n))]
    assert notes[0].name == str(3 * n)


def test_a_writer_waits_for_the_lock_and_then_sees_what_was_written(tmp_path: Path, child: Callable[..., Any]) -> None:
    change_note(tmp_path, 1, setting(name="old"))
    holder = child(HOLDER, tmp_path)
    assert holder.hear() == "inside"
    other = child(WRITER)
    other.tell(json.dumps([str(tmp_path), 1, {"starred": True}]))
    holder.tell("go on")
    assert (holder.hear(), other.hear()) == ("done", "done")
    (note,) = read_notes(tmp_path).by_latent.values()
    assert note.content == (True, "old", "by the holder")


def test_a_killed_writer_changes_nothing_and_blocks_no_other_writer(tmp_path: Path, child: Callable[..., Any]) -> None:
    holder = child(HOLDER, tmp_path)
    assert holder.hear() == "inside"
    holder.process.kill()
    holder.process.wait()
    assert read_notes(tmp_path) == ({}, "")
    change_note(tmp_path, 2, setting(starred=True))
    assert [*read_notes(tmp_path).by_latent] == [2]


def test_an_undo_restores_the_note_unless_it_was_changed_again(tmp_path: Path) -> None:
    change_note(tmp_path, 1, setting(name="first"))
    changed = change_note(tmp_path, 1, setting(name="second"))
    assert change_note(tmp_path, 1, changed.undo).after.name == "first"
    changed = change_note(tmp_path, 1, setting(name="third"))
    change_note(tmp_path, 1, setting(starred=True))
    with pytest.raises(UserError, match="the note on latent 1 has been changed since, so nothing is undone"):
        change_note(tmp_path, 1, changed.undo)
    assert read_notes(tmp_path).by_latent[1].content == (True, "third", "")


def test_of_two_lines_about_a_latent_the_newer_one_counts_and_a_write_keeps_only_it(tmp_path: Path) -> None:
    both = ['{"latent": 3, "name": "new", "time": 20.5}', '{"latent": 3, "name": "old", "time": 10}']
    for order in (both, both[::-1]):
        (tmp_path / NOTES).write_text("\r\n".join(order))
        assert [one.name for one in read_notes(tmp_path).by_latent.values()] == ["new"]
        change_note(tmp_path, 4, setting(starred=True))
        assert [(one["latent"], one.get("name")) for one in lines(tmp_path)] == [(3, "new"), (4, "")]


def test_a_change_is_newer_than_the_line_it_replaces_even_if_a_clock_was_ahead(tmp_path: Path) -> None:
    (tmp_path / NOTES).write_text('{"latent": 3, "name": "from tomorrow", "time": 9000000000}\n')
    change_note(tmp_path, 3, setting(name="now"))
    assert lines(tmp_path)[0]["time"] > 9e9


def test_keys_and_lines_of_other_tools_are_kept_by_a_write(tmp_path: Path) -> None:
    foreign = ['{"latent": "x"}', '{"comment": "mine"}', '{"latent": 5, "name": "cut', "# a remark"]
    own = '{"color": "red", "latent": 7, "starred": true, "time": 1}'
    untouched = '{"time":2,"latent":6,"name":"spaced as it was"}'
    (tmp_path / NOTES).write_text("\n".join([foreign[0], own, *foreign[1:], "", untouched]) + "\n")
    notes, problem = read_notes(tmp_path)
    assert [*notes] == [6, 7]
    assert problem.startswith(f"{tmp_path / NOTES}, line 1 is not a note on a latent, so it is kept but not read")
    assert "like 3 other lines: " in problem
    change_note(tmp_path, 7, setting(starred=False))
    first, second, *others = (tmp_path / NOTES).read_text().splitlines()
    assert (first, others) == (untouched, foreign)
    assert json.loads(second)["color"] == "red"
    change_note(tmp_path, 7, setting(name="a"))
    assert (tmp_path / NOTES).read_text().splitlines()[2:] == foreign


@pytest.mark.parametrize(
    "line",
    [
        b"\xff\xfe", b"null", b"[1]", b"{}", b'{"latent": -1}', b'{"latent": 1.5}', b'{"latent": 1, "starred": "yes"}',
        b'{"latent": 99999999999}', b'{"latent": 1, "name": "' + b"x" * 81 + b'"}', b"[" * 5000,
        b'{"latent": 1, "time": NaN}',
    ],
)  # fmt: skip
def test_a_line_that_is_no_note_is_reported_with_its_number_and_never_destroyed(tmp_path: Path, line: bytes) -> None:
    (tmp_path / NOTES).write_bytes(b'{"latent": 2, "starred": true}\n' + line)
    notes, problem = read_notes(tmp_path)
    assert [*notes] == [2]
    assert f"{NOTES}, line 2 is not a note" in problem
    assert "\n" not in problem
    change_note(tmp_path, 1, setting(starred=True))
    assert (tmp_path / NOTES).read_bytes().endswith(line + b"\n")


@given(st.lists(st.one_of(st.binary(max_size=20), st.sampled_from(LINES)), max_size=6).map(b"\n".join))
def test_any_bytes_are_read_without_an_error_and_a_write_keeps_what_it_cannot_read(content: bytes) -> None:
    with TemporaryDirectory() as name:
        folder = Path(name)
        (folder / NOTES).write_bytes(content)
        notes = read_notes(folder).by_latent
        if any(line.startswith((b"<" * 7, b"|" * 7, b"=" * 7, b">" * 7)) for line in content.split(b"\n")):
            return
        change_note(folder, 0, setting(starred=True))
        kept = (folder / NOTES).read_bytes().split(b"\n")
        assert {line.strip() for line in content.split(b"\n") if line.strip() and not is_note(line)} <= {*kept}
        assert {latent: note for latent, note in read_notes(folder).by_latent.items() if latent} == {
            latent: note for latent, note in notes.items() if latent and not note.is_empty
        }


def is_note(line: bytes) -> bool:
    with contextlib.suppress(ValueError):
        value = json.loads(line)
        return isinstance(value, dict) and isinstance(value.get("latent"), int)
    return False


def test_marks_of_a_merge_conflict_are_reported_and_no_write_sorts_them_away(tmp_path: Path) -> None:
    content = '{"latent": 1}\n<<<<<<< HEAD\n{"latent": 2, "name": "a", "time": 1}\n=======\n'
    content += '{"latent": 2, "name": "b", "time": 2}\n>>>>>>> theirs\n'
    (tmp_path / NOTES).write_text(content)
    notes, problem = read_notes(tmp_path)
    assert notes[2].name == "b"
    words = (
        "line 2 is a mark of a merge conflict; delete the lines with <<<<<<<, ======= and >>>>>>>, and keep the others"
    )
    assert problem == f"{tmp_path / NOTES}, {words}"
    with pytest.raises(UserError, match="line 2 is a mark of a merge conflict"):
        change_note(tmp_path, 1, setting(starred=True))
    assert (tmp_path / NOTES).read_text() == content
    kept = [line for line in content.splitlines() if line.startswith("{")]
    (tmp_path / NOTES).write_text("\n".join(kept))
    change_note(tmp_path, 1, setting(starred=True))
    assert [(one["latent"], one["name"]) for one in lines(tmp_path)] == [(1, ""), (2, "b")]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"name": "x" * 81}, "a name must have at most 80 characters, not 81"),
        ({"note": "x" * 2001}, "a note must have at most 2,000 characters, not 2,001"),
        ({"name": "two\nlines"}, "a name must not contain '\\n'; remove it"),
        ({"name": "\x1b[2J"}, "a name must not contain '\\x1b'; remove it"),
        ({"note": "a\u202eb"}, "a note must not contain '\\u202e'; remove it"),
        ({"note": "\udcff"}, "a note must be UTF-8 text"),
    ],
)
def test_text_that_is_too_long_or_controls_a_terminal_is_refused(
    tmp_path: Path, fields: dict[str, str], words: str
) -> None:
    with pytest.raises(UserError) as error:
        change_note(tmp_path, 1, setting(**fields))
    assert str(error.value) == words
    assert not [*tmp_path.iterdir()]


def test_a_folder_that_cannot_be_written_is_reported_and_its_notes_are_still_read(
    open_folder: Path, ordinary_user: Callable[[], contextlib.AbstractContextManager[None]]
) -> None:
    change_note(open_folder, 1, setting(starred=True))
    before = (open_folder / NOTES).read_bytes()
    (open_folder / NOTES).chmod(0o644)
    with ordinary_user():
        assert [*read_notes(open_folder).by_latent] == [1]
        with pytest.raises(UserError, match=rf"{NOTES} cannot be written: Permission denied"):
            change_note(open_folder, 1, setting(starred=False))
    (open_folder / NOTES).chmod(0o666)
    open_folder.chmod(0o555)
    with ordinary_user(), pytest.raises(UserError, match=rf"{NOTES} cannot be written: Permission denied"):
        change_note(open_folder, 1, setting(starred=False))
    assert (open_folder / NOTES).read_bytes() == before
    with pytest.raises(UserError, match="cannot be written: No such file or directory"):
        change_note(open_folder / "gone", 1, setting(starred=True))


def test_a_full_disk_leaves_the_earlier_notes_and_no_other_file(tmp_path: Path) -> None:
    change_note(tmp_path, 1, setting(note="x" * 400))
    before = (tmp_path / NOTES).read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    for folder in (tmp_path, tmp_path / "empty"):
        folder.mkdir(exist_ok=True)
        resource.setrlimit(resource.RLIMIT_FSIZE, (600, hard))
        try:
            with pytest.raises(UserError, match=rf"{NOTES} cannot be written: File too large"):
                change_note(folder, 2, setting(note="y" * 700))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (tmp_path / NOTES).read_bytes() == before
    assert sorted(one.name for one in tmp_path.rglob("*")) == ["empty", NOTES]


def test_a_link_in_place_of_the_file_is_neither_read_nor_written(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text('{"latent": 1, "name": "not yours"}\n')
    (folder := tmp_path / "sae").mkdir()
    (folder / NOTES).symlink_to(tmp_path / "mine")
    notes, problem = read_notes(folder)
    assert not notes
    assert problem.endswith("cannot be read: it is a symbolic link, and symbolic links are not followed; remove it")
    with pytest.raises(UserError, match=f"cannot be written: {NOTES} is a symbolic link"):
        change_note(folder, 1, setting(starred=True))
    assert (tmp_path / "mine").read_text() == '{"latent": 1, "name": "not yours"}\n'


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_a_pipe_or_folder_in_place_of_the_file_is_reported_without_waiting(
    tmp_path: Path, make: Callable[[Path], None]
) -> None:
    make(tmp_path / NOTES)
    assert f"{NOTES} cannot be read: " in read_notes(tmp_path).problem
    with pytest.raises(UserError, match=f"{NOTES} cannot be written: "):
        change_note(tmp_path, 1, setting(starred=True))


def test_notes_are_merged_into_those_next_to_a_copy_of_the_sae(tmp_path: Path) -> None:
    source, target = tmp_path / "a", tmp_path / "b"
    for folder in (source, target):
        folder.mkdir()
    assert carry_notes(source, target) == []
    assert not [*target.iterdir()]
    (source / NOTES).write_text(
        '{"latent": 1, "name": "old", "time": 1}\n{"latent": 2, "name": "new", "time": 5}\nodd\n'
    )
    (target / NOTES).write_text('{"latent": 1, "name": "newer", "time": 2}\n{"latent": 9, "starred": true}\n')
    assert carry_notes(source, target) == [f"{target / NOTES} keeps 1 note on other latents"]
    merged = (target / NOTES).read_text()
    assert [(note.latent, note.name) for note in read_notes(target).by_latent.values()] == [
        (1, "newer"), (2, "new"), (9, ""),
    ]  # fmt: skip
    carry_notes(source, target)
    assert (target / NOTES).read_text() == merged
    assert carry_notes(target, target) == []
    (source / NOTES).write_text("<<<<<<< HEAD\n")
    (words,) = carry_notes(source, target)
    assert words.startswith("the notes on latents are not copied: ")
    assert (target / NOTES).read_text() == merged


def with_notes(folder: Path, tokens: int) -> Features:
    """Write an SAE's features and the number of its training tokens, and return the features."""
    (folder / FEATURES).write_bytes(features_file())
    (folder / "cfg.json").write_text(json.dumps({"metadata": {"training_tokens": tokens}}))
    return Features(folder / FEATURES)


def test_a_note_says_if_it_was_written_about_other_weights(tmp_path: Path) -> None:
    with_notes(tmp_path, 1000)
    change_note(tmp_path, 0, setting(starred=True, name="sheep", note="Lämb"))
    first = Features(tmp_path / FEATURES).feature(0)
    assert (first.starred, first.name, first.note, first.noted_at_tokens) == (True, "sheep", "Lämb", None)
    # Training went on, and the SAE was exported and evaluated again.
    again = with_notes(tmp_path, 2000).feature(0)
    assert (again.name, again.noted_at_tokens) == ("sheep", 1000)
    change_note(tmp_path, 0, setting(note="still so"))
    assert with_notes(tmp_path, 2000).feature(0).noted_at_tokens is None
    (tmp_path / "cfg.json").unlink()
    assert Features(tmp_path / FEATURES).feature(0).noted_at_tokens is None


def test_the_digest_of_the_weights_decides_what_a_note_is_about_if_it_is_known(tmp_path: Path) -> None:
    (tmp_path / FEATURES).write_bytes(explained_file(weights="new"))
    (tmp_path / "cfg.json").write_text(json.dumps({"metadata": {"training_tokens": 1000}}))
    for latent, weights in enumerate(("new", "old", "")):
        change_note(tmp_path, latent, setting(starred=True), weights)
    # The SAE was exported with another k: its weights have another digest, but as many tokens.
    assert [Features(tmp_path / FEATURES).feature(one).noted_at_tokens for one in range(3)] == [None, 1000, None]
    (tmp_path / "cfg.json").write_text(json.dumps({"metadata": {"training_tokens": 2000}}))
    assert [Features(tmp_path / FEATURES).feature(one).noted_at_tokens for one in range(3)] == [None, 1000, 1000]


def test_starred_and_named_latents_are_found_and_come_first(tmp_path: Path) -> None:
    features = with_notes(tmp_path, 1)
    assert features.order("starred") == features.order("sparse") == [0, 1]
    change_note(tmp_path, 1, setting(name="The LATER one"))
    change_note(tmp_path, 99, setting(starred=True))  # of another SAE, which had more latents
    features = with_notes(tmp_path, 1)
    assert features.order("starred") == [1, 0]
    assert (features.search_notes("later"), features.search_notes("lämb"), features.search_notes("")) == ([1], [], [])
    for words, latents in {
        "starred:": [], "starred:no": [1, 0], "named:": [1], "named:LATER": [1], "named:x": [], "named: lämb": [],
        "starred:no lämb": [0],
    }.items():  # fmt: skip
        assert features.search(words) == latents, words
    assert features.search_notes("later starred:") == []
    assert features.search_notes("starred:no later") == [1]
    with pytest.raises(UserError, match="starred:maybe is unknown; write "):
        features.search("starred:maybe")


def test_a_noted_latent_that_never_fires_is_listed_with_the_starred_ones(tmp_path: Path) -> None:
    (tmp_path / FEATURES).write_bytes(features_file(n_fired=("I32", "i", [2], [3, 0])))
    change_note(tmp_path, 1, setting(starred=True))
    features = Features(tmp_path / FEATURES)
    assert (features.order("starred"), features.order("sparse"), features.search("starred:")) == ([1, 0], [0], [1])


def test_the_notes_of_an_earlier_features_file_are_those_next_to_the_sae(tmp_path: Path) -> None:
    (tmp_path / ".cards").mkdir()
    (tmp_path / ".cards" / "0123456789abcdef.safetensors").write_bytes(features_file())
    change_note(tmp_path, 0, setting(name="sheep"))
    assert Features(tmp_path / ".cards" / "0123456789abcdef.safetensors").feature(0).name == "sheep"
    assert LatentNote(0).is_empty


def test_a_name_that_another_program_has_written_does_not_prevent_other_changes(tmp_path: Path) -> None:
    (tmp_path / NOTES).write_text('{"latent": 3, "name": "\\u001b[2Jred"}\n')
    changed = change_note(tmp_path, 3, lambda note: replace(note, starred=True))
    assert (changed.after.starred, changed.after.name) == (True, "\x1b[2Jred")
    with pytest.raises(UserError, match="a name must not contain"):
        change_note(tmp_path, 3, lambda note: replace(note, name=f"{note.name} door"))
