"""Tests for copying a job from another host. Child processes replace ssh; most run the real `sae-tui stream`."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from support.far_side import HELLO, far_side, real_side
from support.features import features_file
from support.report_cards import put_card
from support.stub_llm import explained_file
from support.tui import NOW, record_job, record_metrics

from sae_tui.hosts import follower, job_copy, sent_job
from sae_tui.hosts.hosts import Hosts
from sae_tui.hosts.job_copy import CopiedFiles, CopyState, JobCopy
from sae_tui.hosts.protocol import MOST_CURVES, CurvePart, Curves, FilePart, RunState, Stamp, decode
from sae_tui.hosts.sent_job import SentJob
from sae_tui.jobs.evaluation.report_card import whole_cards
from sae_tui.jobs.view.reader import JobReader
from trainer.contract.errors import UserError
from trainer.contract.paths import DataDir
from trainer.contract.printable import printable_json
from trainer.contract.process import ProcessRef
from trainer.contract.runs.explanations import EXPLANATIONS, Explanation, record
from trainer.contract.runs.features import FEATURES, Features
from trainer.contract.runs.latent_notes import NOTES
from trainer.contract.store.database import StoreError
from trainer.contract.store.job_store import Control
from trainer.contract.store.metrics_store import Heartbeat, MetricRow, Point, SeriesReader, SeriesWriter
from trainer.contract.store.rows import Event, Rank
from trainer.contract.store.states import JobState

ROW = {"id": 1, "name": "theirs", "config": "", "user": "", "host": "", "device": "cpu", "gpu_source": "none"}


@pytest.fixture(autouse=True)
def _in_own_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(job_copy, "FIRST_WAIT_S", 0.05)
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))


@pytest.fixture
def there(tmp_path: Path) -> DataDir:
    """Return the other host's data folder, with one running job."""
    data = DataDir(tmp_path / "there")
    data.create()
    job_id = record_job(data, "theirs", JobState.RUNNING, step=200, total_steps=2000)
    record_metrics(data, job_id)
    data.run(job_id).job_file.write_text('name = "theirs"\n')
    data.run(job_id).log(0).write_text("first line\nsecond line\n")
    return data


@contextlib.contextmanager
def copied(ssh: list[str], job_id: int = 1) -> Iterator[JobCopy]:
    copy = Hosts(["gpu1"], ssh).copy("gpu1", job_id)
    copy.start()
    try:
        yield copy
    finally:
        copy.close()


def wait_for(holds: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@contextlib.contextmanager
def followed(there: DataDir, tmp_path: Path) -> Iterator[Callable[[], DataDir]]:
    """Yield a function that sends what has changed over one connection, and returns the copy's data folder."""
    here = DataDir(tmp_path / "here")
    sent, files = SentJob(there, 1), CopiedFiles(here, 1)
    files.begin()

    def follow() -> DataDir:
        for message in sent.messages():
            files.take(decode(printable_json(msgspec.json.encode(message).decode()).encode()))
        return here

    yield follow
    sent.close()
    files.close()


def beat(step: int) -> Heartbeat:
    return Heartbeat("training", step, 2000, 10 * step, NOW)


def state_of(copy: JobCopy, holds: Callable[[CopyState], object]) -> CopyState:
    wait_for(lambda: holds(copy.state))
    return copy.state


def curve(data: DataDir, name: str) -> list[tuple[int, float | None]]:
    """Return one of job 1's curves in a data folder."""
    reader = SeriesReader(data.run(1).metrics_db)
    with contextlib.closing(reader):
        return [(point.step, point.value) for point in reader.points(name)]


def series_of(data: DataDir) -> list[tuple[str, int]]:
    with contextlib.closing(SeriesReader(data.run(1).metrics_db)) as reader:
        return reader.series()


def test_a_job_is_copied_and_followed(there: DataDir, tmp_path: Path) -> None:
    with copied(real_side(tmp_path / "ssh", there.root)) as copy:
        state_of(copy, lambda state: state.is_complete)
        reader, theirs = JobReader(copy.data, 1), JobReader(there, 1)
        assert reader.poll()
        assert theirs.poll()
        assert reader.view
        assert (reader.view.name, reader.view.state, reader.view.heldout_fvu) == (
            "theirs",
            "running",
            theirs.view.heldout_fvu,
        )
        assert reader.series == theirs.series
        assert reader.events == theirs.events
        assert reader.log_tail(0, 5) == ["first line", "second line"]
        assert copy.data.run(1).job_file.read_text() == 'name = "theirs"\n'
        assert copy.data.run(1).job_file.stat().st_mode & 0o777 == 0o600
        assert copy.data.root.parent.stat().st_mode & 0o777 == 0o700
        # Measurements keep the other host's timestamps, so that curves can be drawn over time.
        ours, original = (SeriesReader(data.run(1).metrics_db) for data in (copy.data, there))
        with contextlib.closing(ours), contextlib.closing(original):
            assert ours.timestamps("fvu", [10, 200]) == original.timestamps("fvu", [10, 200])

        with contextlib.closing(SeriesWriter(there.run(1).metrics_db)) as writer:
            beat = Heartbeat("training", 210, 2000, 2100, time.time())
            writer.write(
                [MetricRow("fvu", 210, 0.5)], beat, [Event(timestamp=NOW, level="info", kind="x", message="new")]
            )
        with contextlib.closing(Control(there.control_db)) as control:
            control.request(1, "stop")
            control.add_event(1, "edited", "was renamed")
        with there.run(1).log(0).open("a") as log:
            log.write("third line\n")
        wait_for(lambda: reader.poll() and reader.view and reader.view.stop_requested and reader.view.step == 210)
        wait_for(lambda: reader.log_tail(0, 1) == ["third line"])
        # The step and the metrics arrive in separate messages.
        wait_for(lambda: (reader.poll(), reader.series["fvu", 0][-1].value)[1] == 0.5)
        assert [event.message for event in reader.events].count("new") == 1
        assert [event.message for event in reader.events].count("was renamed") == 1
        reader.close()
        theirs.close()
    assert not copy.data.root.parent.exists()


def test_the_report_card_is_copied_at_once_and_features_only_on_request(there: DataDir, tmp_path: Path) -> None:
    put_card(there.sae(1))
    (there.sae(1) / FEATURES).write_bytes(features_file())
    (there.sae(1) / NOTES).write_text('{"latent": 0, "name": "sheep"}\n')
    with copied(real_side(tmp_path / "ssh", there.root)) as copy:
        size = len(features_file())
        assert state_of(copy, lambda state: state.is_complete).features[""].bytes == size
        assert whole_cards(copy.data.sae(1)).keys() == {""}
        assert not (copy.data.sae(1) / FEATURES).exists()
        seen: list[tuple[int, int]] = []
        copy.fetch_features(lambda received, total: seen.append((received, total)))
        assert seen == [(size, size)]
        assert (copy.data.sae(1) / FEATURES).read_bytes() == features_file()
        assert Features(copy.data.sae(1) / FEATURES).feature(0).name == "sheep"
        copy.fetch_features(lambda received, total: seen.append((received, total)))
        assert len(seen) == 1


def test_explanations_are_copied_filtered_and_sent_again_only_at_a_limited_rate(
    there: DataDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_card(there.sae(1), weights="w")
    (there.sae(1) / FEATURES).write_bytes(explained_file(weights="w"))
    line = {"latent": 0, "text": "kings\x1b[2J", "detection": 0.9, "model": "m", "weights": "w"}
    stale = line | {"latent": 1, "weights": "old"}
    (there.sae(1) / EXPLANATIONS).write_text(f"{json.dumps(line)}\n{json.dumps(stale)}\nno JSON\n")
    with followed(there, tmp_path) as follow:
        here = follow().sae(1)
        (here / FEATURES).write_bytes(explained_file(weights="w"))
        features = Features(here / FEATURES)
        assert {latent: one.text for latent, one in features.explanations.items()} == {0: "kings�[2J"}
        (card,) = whole_cards(here).values()
        assert card.explained
        assert card.explained.n_latents == 1
        # The limit is now 100 s for 100 bytes.
        monkeypatch.setattr(sent_job, "_EXPLANATIONS_BYTES_S", 1)
        record(there.sae(1), Explanation(latent=2, text="rivers", weights="w"))
        wait_for(lambda: follow() and 2 in features.explanations)
        record(there.sae(1), Explanation(latent=3, text="trains", weights="w"))
        follow()
        assert [*features.explanations] == [0, 2]


def test_explanations_of_many_latents_are_copied_completely(there: DataDir, tmp_path: Path) -> None:
    there.sae(1).mkdir(parents=True)
    line = {"latent": 0, "text": "kings", "problem": "x" * 290, "weights": "w"}
    lines = [json.dumps(line | {"latent": latent}) for latent in range(30_000)]
    size = (there.sae(1) / EXPLANATIONS).write_text("\n".join(lines))
    assert size > 9 << 20
    with followed(there, tmp_path) as follow:
        assert (follow().sae(1) / EXPLANATIONS).stat().st_size == size


def test_any_sae_of_a_sweep_is_copied_and_other_folders_are_left_out(there: DataDir, tmp_path: Path) -> None:
    label = "k=" + "3" * 253
    for name in (label, "no label", ".hidden", "line\nend"):
        put_card(there.sae(1) / name)
        (there.sae(1) / name / FEATURES).write_bytes(features_file())
    with copied(real_side(tmp_path / "ssh", there.root)) as copy:
        assert state_of(copy, lambda state: state.is_complete or state.sentence).features.keys() == {label}
        copy.fetch_features(lambda received, total: None)
        for name in ("card.json", FEATURES):
            assert [file.parent.name for file in copy.data.sae(1).rglob(name)] == [label]


def test_copied_curves_are_rewound_when_the_run_resumes(there: DataDir, tmp_path: Path) -> None:
    with copied(real_side(tmp_path / "ssh", there.root)) as copy:
        state_of(copy, lambda state: state.is_complete)
        with contextlib.closing(SeriesWriter(there.run(1).metrics_db)) as writer:
            writer.rewind(Heartbeat("training", 100, 2000, 1000, time.time()))
        wait_for(lambda: [step for step, _ in curve(copy.data, "fvu")][-1:] == [100])
        with contextlib.closing(SeriesWriter(there.run(1).metrics_db)) as writer:
            writer.write([MetricRow("fvu", 110, 0.25)], Heartbeat("training", 110, 2000, 1100, time.time()))
        wait_for(lambda: curve(copy.data, "fvu") == curve(there, "fvu"))


@pytest.mark.parametrize("reached", [700, 1300])
def test_a_run_rewound_between_two_reads_has_the_same_curves_in_the_copy(
    there: DataDir, tmp_path: Path, reached: int
) -> None:
    def train(first: int, last: int, value: float) -> None:
        writer.write([MetricRow("fvu", step, value) for step in range(first, last, 10)], beat(last))

    with contextlib.closing(SeriesWriter(there.run(1).metrics_db)) as writer, followed(there, tmp_path) as follow:
        train(210, 1010, 1.0)
        data = follow()
        watched = JobReader(data, 1)
        watched.poll()
        writer.rewind(beat(500))
        train(510, reached, 0.5)
        follow()
        assert curve(data, "fvu") == curve(there, "fvu")
        watched.poll()
        assert [(point.step, point.value) for point in watched.series["fvu", 0]] == curve(there, "fvu")
        watched.close()
        train(reached, reached + 100, 0.5)
        follow()
        assert curve(data, "fvu") == curve(there, "fvu")


def test_a_read_that_fails_halfway_loses_neither_points_nor_events(
    there: DataDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with contextlib.closing(SeriesWriter(there.run(1).metrics_db)) as writer:
        writer.write([], beat(200), [Event(timestamp=NOW, level="info", kind="x", message="new")])
    read = SeriesReader.history

    def fails_once(reader: SeriesReader, name: str, rank: int = 0, *, most: int = 500) -> list[Point]:
        if name == "loss":
            monkeypatch.undo()
            raise StoreError("the store is locked")
        return read(reader, name, rank, most=most)

    with followed(there, tmp_path) as follow:
        monkeypatch.setattr(SeriesReader, "history", fails_once)
        follow()
        data = follow()
        assert curve(data, "fvu") == curve(there, "fvu")
        assert curve(data, "loss") == curve(there, "loss")
        with contextlib.closing(SeriesReader(data.run(1).metrics_db)) as reader:
            assert [event.message for event in reader.events()].count("new") == 1


def test_rows_with_many_long_texts_are_visibly_truncated_to_fit_in_a_line(there: DataDir, tmp_path: Path) -> None:
    me = ProcessRef.current()
    with contextlib.closing(Control(there.control_db)) as control:
        control.update(1, config="#" * 200_000, error="\x1b" * 100_000)
        for rank in range(500):
            process = {"pid": me.pid, "start_ticks": me.start_ticks, "boot_id": me.boot_id}
            control.record_rank(Rank(job_id=1, attempt=1, rank=rank, **process, error="DistBackendError" + "e" * 1500))
        for _ in range(150):
            control.add_event(1, "failed", "m" * 11_000)
    with contextlib.closing(SeriesWriter(there.run(1).metrics_db)) as writer:
        long = [Event(timestamp=NOW, level="info", kind="x", message="m" * 11_000)] * 99
        writer.write([MetricRow(f"fvu@{number:0290}", 1, 0.5) for number in range(3000)], beat(200), long)
    with followed(there, tmp_path) as follow:
        data = follow()
        with contextlib.closing(Control(data.control_db)) as control:
            job, ranks, events = control.job(1), control.ranks(1), control.events(1)
        with contextlib.closing(SeriesReader(data.run(1).metrics_db)) as reader:
            assert reader.series() == sorted(series_of(there))
            events += reader.events()
        assert (len(job.config), len(ranks)) == (200_000, 500)
        cut = [
            job.error,
            *(rank.error for rank in ranks),
            *(event.message for event in events if len(event.message) > 30),
        ]
        assert len(cut) == 750
        assert all(text and len(text) > 100 and text.endswith("…") for text in cut)


def test_a_copy_limits_the_number_of_curves_and_the_length_of_lists(tmp_path: Path) -> None:
    files = CopiedFiles(DataDir(tmp_path / "here"), 1)
    files.begin()
    many = {"gpu_ids": [0] * 1000, "gpu_uuids": ["x"] * 1000, "after": [1] * 1000, "tags": ["x"] * 1000}
    files.take(decode(json.dumps({"type": "job", "job": ROW | many}).encode()))
    with contextlib.closing(Control(tmp_path / "here" / "control.db")) as control:
        job = control.job(1)
    assert [len(getattr(job, name)) for name in many] == [64, 64, 100, 20]
    files.take(RunState(beat(1)))
    curves = [CurvePart(f"fvu@{number}", 0, (1,), (1.0,), (0.5,)) for number in range(MOST_CURVES + 1)]
    files.take(Curves(tuple(curves[:-1])))
    with pytest.raises(ValueError, match="too many curves"):
        files.take(Curves((curves[-1],)))
    files.close()


def test_excess_curves_and_curves_with_names_that_are_too_long_are_not_sent(
    there: DataDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = series_of(there)
    monkeypatch.setattr(sent_job, "MOST_CURVES", len(known) + 1)
    with contextlib.closing(SeriesWriter(there.run(1).metrics_db)) as writer, followed(there, tmp_path) as follow:
        writer.write([MetricRow(name, 201, 0.5) for name in ("~" * 301, "~2", "~3")], beat(201))
        assert series_of(follow()) == [*known, ("~2", 0)]
        writer.write([MetricRow(name, 202, 0.5) for name in ("~1", "~2")], beat(202))
        data = follow()
        assert series_of(data) == [*known, ("~2", 0)]
        assert curve(data, "~2") == [(201, 0.5), (202, 0.5)]


def test_files_behind_symbolic_links_are_not_sent(there: DataDir, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("the secret\n")
    put_card(tmp_path / "sae")
    for file in (there.run(1).job_file, there.run(1).log(0)):
        file.unlink()
        file.symlink_to(secret)
    there.sae(1).symlink_to(tmp_path / "sae")
    with copied(real_side(tmp_path / "ssh", there.root)) as copy:
        state_of(copy, lambda state: state.is_complete)
        kept = [file.name for file in copy.data.root.rglob("*") if file.is_file()]
        assert {"job.toml", "rank0.log", "card.json"}.isdisjoint(kept)
        assert "metrics.db" in kept


def test_a_file_that_grows_while_it_is_copied_is_eventually_copied_in_full(there: DataDir, tmp_path: Path) -> None:
    put_card(there.sae(1))
    card, ends = there.sae(1) / "card.json", threading.Event()
    whole = card.read_bytes() + b" " * (3 << 20)

    def grow() -> None:
        with card.open("wb", buffering=0) as stream:
            for start in range(0, len(whole), 1 << 10):
                stream.write(whole[start : start + (1 << 10)])
                if start % (64 << 10) == 0:
                    time.sleep(0.02)
        ends.set()

    threading.Thread(target=grow, daemon=True).start()
    with copied(real_side(tmp_path / "ssh", there.root)) as copy:
        ours, read = copy.data.sae(1) / "card.json", set()
        while not (ends.is_set() and ours.exists() and ours.stat().st_size == len(whole)):
            read |= {ours.read_bytes()} if ours.exists() else set()
            time.sleep(0.02)
        assert ours.read_bytes() == whole
        assert all(whole.startswith(one) for one in read)


def test_files_deleted_on_the_other_host_are_deleted_from_the_copy(there: DataDir, tmp_path: Path) -> None:
    put_card(there.sae(1))
    there.run(1).exit_file.write_text("{}")

    def names() -> set[str]:
        return {file.name for file in copy.data.root.rglob("*") if file.is_file()}

    with copied(real_side(tmp_path / "ssh", there.root)) as copy:
        state_of(copy, lambda state: state.is_complete)
        assert names() >= {"exit.json", "card.json", "rank0.log"}
        changed = threading.Event()
        copy.on_change = changed.set
        there.run(1).exit_file.unlink()
        (there.sae(1) / "card.json").unlink()
        wait_for(lambda: names().isdisjoint({"exit.json", "card.json"}))
        assert changed.wait(60)
        assert "rank0.log" in names()
        # The next connection notices what was deleted while there was none.
        there.run(1).log(0).unlink()
        for link in copy._links:
            link.stop()
        wait_for(lambda: "rank0.log" not in names())
        assert "job.toml" in names()


def test_a_broken_connection_is_reported_with_the_time_and_the_copy_catches_up_afterwards(
    there: DataDir, tmp_path: Path
) -> None:
    pids = tmp_path / "pids"
    ssh = real_side(tmp_path / "ssh", there.root)
    program = tmp_path / "ssh" / "1"
    program.write_text(f"open({str(pids)!r}, 'a').write(f'{{__import__(\"os\").getpid()}}\\n'); {program.read_text()}")
    with copied(ssh) as copy:
        before = state_of(copy, lambda state: state.is_complete)
        os.kill(int(pids.read_text().split()[-1]), signal.SIGKILL)
        broken = state_of(copy, lambda state: state.sentence)
        assert broken.is_complete
        assert broken.since >= before.since
        assert curve(copy.data, "fvu") == curve(there, "fvu")
        again = state_of(copy, lambda state: not state.sentence)
        assert again.since > broken.since
        wait_for(lambda: curve(copy.data, "fvu") == curve(there, "fvu"))
        reader = JobReader(copy.data, 1)
        reader.poll()
        assert len(reader.events) == len({(event.kind, event.message) for event in reader.events})
        reader.close()


@pytest.mark.parametrize(("greeting", "limit"), [(f"say({HELLO!r})", "CUT_AFTER_S"), ("pass", "GREETING_S")])
def test_a_silent_host_is_reported_as_in_the_list_of_hosts(
    greeting: str, limit: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follower, limit, 0.3)
    with copied(far_side(tmp_path / "ssh", f"{greeting}; sys.stdin.read()")) as copy:
        assert state_of(copy, lambda state: state.sentence).sentence.startswith("has sent nothing for ")


def test_an_older_host_and_a_missing_job_are_reported_in_one_sentence(there: DataDir, tmp_path: Path) -> None:
    old = "sys.stderr.write('sae-tui: error: unrecognized arguments: --job 1; see sae-tui stream --help'); sys.exit(2)"
    with copied(far_side(tmp_path / "old", old)) as copy:
        assert (
            "has an older sae-tui, which sends only the logs" in state_of(copy, lambda state: state.sentence).sentence
        )
    with copied(real_side(tmp_path / "ssh", there.root), job_id=9) as copy:
        assert "there is no job 9" in state_of(copy, lambda state: state.sentence).sentence


@pytest.mark.parametrize(
    "message",
    [
        {"type": "file", "path": "run/../../../evil", "data": "AA==", "total": 1},
        {"type": "file", "path": "sae/..\\/features.safetensors", "data": "AA==", "total": 1},
        {"type": "file", "path": "sae//card.json", "data": "AA==", "total": 1},
        {"type": "file", "path": "run/job.toml\n", "data": "AA==", "total": 1},
        {"type": "file", "path": "run/job.toml", "data": "AA==", "total": 100 << 20},
        {"type": "file", "path": "run/job.toml", "data": "AAAA", "total": 1},
        {"type": "file", "path": "run/job.toml", "data": "AA==", "offset": 5, "total": 9},
        {"type": "curves", "parts": [{"name": "fvu", "rank": 0, "steps": [1], "times": [1], "values": [0.5]}]},
        {"type": "run", "first": 7, "events": []},
        {"type": "run", "heartbeat": {"phase": "x", "step": -1, "total_steps": 0, "tokens": 0, "timestamp": 0}},
        {"type": "job", "job": ROW | {"id": 8}},
        {"type": "job", "job": ROW, "requests": ["stop"] * 6},
    ],
)  # fmt: skip
def test_a_message_that_no_sae_tui_sends_closes_the_connection_and_writes_nothing(
    message: dict, tmp_path: Path
) -> None:
    with copied(far_side(tmp_path / "ssh", f"say({HELLO!r}); say({message!r}); sys.stdin.read()")) as copy:
        assert "sent an invalid message" in state_of(copy, lambda state: state.sentence).sentence
        names = {file.name for file in tmp_path.rglob("*") if file.is_file()}
        assert names.isdisjoint({"evil", "job.toml", "card.json", FEATURES})


def test_a_full_local_disk_is_reported_in_one_sentence(there: DataDir, tmp_path: Path) -> None:
    there.run(1).job_file.write_text("# " + "x" * 200_000)
    # A file size limit makes writes fail halfway, as a full disk does.
    program = f"""
import resource, signal, sys, tempfile, time
from sae_tui.hosts.hosts import Hosts
tempfile.tempdir = {str(tmp_path / "tmp")!r}
copy = Hosts(["gpu1"], {real_side(tmp_path / "ssh", there.root)!r}).copy("gpu1", 1)
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (150_000, 150_000))
copy.start()
while not copy.state.sentence:
    time.sleep(0.02)
print(copy.state.sentence)
copy.close()
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert ran.stderr == ""
    assert "cannot be copied to" in ran.stdout
    assert "File too large" in ran.stdout


def test_features_that_do_not_fit_on_the_local_disk_are_not_requested(there: DataDir, tmp_path: Path) -> None:
    (there.sae(1)).mkdir()
    (there.sae(1) / FEATURES).write_bytes(features_file())
    with copied(real_side(tmp_path / "ssh", there.root)) as copy:
        state_of(copy, lambda state: state.is_complete)
        copy.state = CopyState(True, 1.0, "", {"": Stamp(1 << 60, 1)})
        with pytest.raises(UserError, match="free, but the features of job 1 need"):
            copy.fetch_features(lambda received, total: None)


def test_features_that_are_too_large_for_a_copy_are_not_requested(there: DataDir, tmp_path: Path) -> None:
    with copied(real_side(tmp_path / "ssh", there.root)) as copy:
        state_of(copy, lambda state: state.is_complete)
        copy.state = CopyState(True, 1.0, "", {name: Stamp(400 << 20, 1) for name in ("k=16", "k=32", "k=64")})
        with pytest.raises(UserError, match="GiB, but a copy of a job from another host has at most"):
            copy.fetch_features(lambda received, total: None)


def test_features_that_become_too_large_leave_no_files_and_the_rest_is_still_copied(
    there: DataDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_copy, "_MOST_BYTES", 1 << 20)
    for label in ("k=16", "k=32", "k=64"):
        (there.sae(1) / label).mkdir(parents=True)
        (there.sae(1) / label / FEATURES).write_bytes(bytes(400 << 10))
    with copied(real_side(tmp_path / "ssh", there.root)) as copy:
        state_of(copy, lambda state: state.is_complete)
        copy.state = CopyState(True, 1.0, "", {"k=16": Stamp(1, 1)})
        with pytest.raises(UserError, match="files that are too large"):
            copy.fetch_features(lambda received, total: None)
        assert not [file for file in copy.data.sae(1).rglob("*") if file.is_file()]
        with there.run(1).log(0).open("a") as log:
            log.write("third line\n")
        wait_for(lambda: "third line" in copy.data.run(1).log(0).read_text())
        assert not copy.state.sentence


def test_a_killed_apps_copy_is_deleted_by_the_next_app(tmp_path: Path) -> None:
    program = f"""
import tempfile, time
tempfile.tempdir = {str(tmp_path / "tmp")!r}
from sae_tui.hosts.hosts import Hosts
copy = Hosts(["gpu1"]).copy("gpu1", 1)
print(copy.data.root.parent, flush=True)
time.sleep(600)
"""
    app = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert app.stdout
    folder = Path(app.stdout.readline().strip())
    old = time.time() - 2 * job_copy._LOCKED_AFTER_S
    os.utime(folder, (old, old))
    job_copy.remove_abandoned()
    assert folder.exists()
    app.kill()
    app.wait()
    job_copy.remove_abandoned()
    assert not folder.exists()
    app.stdout.close()


def test_a_long_log_is_kept_within_its_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_copy, "_LARGEST_LOG", 10)
    files = CopiedFiles(DataDir(tmp_path / "data"), 1)
    files.begin()
    log = tmp_path / "data" / "runs" / "1" / "logs" / "rank0.log"
    for text, kept in (("12345\n", "12345\n"), ("678\n", "12345\n678\n"), ("9\n", "9\n"), ("10\n", "9\n10\n")):
        files.take(FilePart("run/logs/rank0.log", text.encode(), offset=1))
        assert log.read_text() == kept
    files.close()


def test_a_file_message_is_decoded_to_the_bytes_that_were_sent() -> None:
    line = json.dumps({"type": "file", "path": "run/job.toml", "data": "bmFtZQ==", "total": 4}).encode()
    assert decode(line) == FilePart("run/job.toml", b"name", 0, 4)
