from __future__ import annotations

import json
import math

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sae_tui.hosts.protocol import (
    LONGEST_LINE,
    LONGEST_LOG_LINE,
    LONGEST_TEXT,
    MOST_JOBS,
    MOST_SEEDS,
    FarJob,
    FarProcess,
    FarSeeds,
    FarSpread,
    Hello,
    Jobs,
    Log,
    Message,
    RemoteGpu,
    RemoteGpus,
    decode,
    far_job,
    jobs_message,
    log_messages,
)
from sae_tui.hosts.view import ConnectionStage, HostView
from sae_tui.jobs.view.reader import JobView, judged_value
from sae_tui.panels.far_gpus import FarHost, process_lines, state_words
from sae_tui.panels.gpu_lines import gpu_lines
from sae_tui.panels.gpu_row import GpuRow
from sae_tui.panels.job_columns import judged_span
from sae_tui.panels.jobs import job_row
from trainer.contract.printable import printable_json
from trainer.contract.store.seeds import Seeds, Spread
from trainer.contract.store.states import JobState

TEXTS = st.text(max_size=20) | st.sampled_from(
    ["\x1b]52;c;UFdORUQ=\x07", "\u202eabc", "a\r\nb\tc", "\x9b31m", "x" * 5000]
)
COUNTS = st.integers(0, 2**63 - 1)
PROCESSES = st.builds(
    FarProcess, pid=st.integers(1, 2**22), user=TEXTS, name=st.none() | TEXTS, memory_used_bytes=st.none() | COUNTS
)
GPUS = st.builds(
    RemoteGpu,
    index=st.integers(0, 100_000), uuid=TEXTS, name=TEXTS, utilization=st.none() | st.integers(0, 100),
    memory_used_bytes=st.none() | COUNTS, memory_total_bytes=st.none() | COUNTS,
    temperature_c=st.none() | st.integers(-1000, 100_000), power_w=st.none() | st.floats(0, 1e9),
    power_limit_w=st.none() | st.floats(0, 1e9), healthy=st.booleans(), reason=TEXTS, holder=TEXTS,
    use=st.sampled_from(["dim", "good", "warn"]), processes=st.lists(PROCESSES, max_size=2).map(tuple),
)  # fmt: skip
FINITE = st.floats(allow_nan=False, allow_infinity=False)
SEEDS = st.builds(
    FarSeeds,
    labels=st.lists(TEXTS, min_size=1, max_size=3).map(tuple), are_all=st.booleans(),
    spreads=st.dictionaries(
        st.sampled_from(["fvu", "heldout_fvu", "from a newer version"]),
        st.builds(FarSpread, mean=FINITE, sd=FINITE.map(abs), n=st.integers(0, 100_000)), max_size=2,
    ),
)  # fmt: skip
JOBS = st.builds(
    FarJob,
    id=st.integers(0, 999_999_999), name=TEXTS, state=st.sampled_from(JobState), user=TEXTS,
    gpu_ids=st.lists(st.integers(0, 100_000), max_size=4).map(tuple), world_size=st.integers(1, 100_000),
    step=COUNTS, total_steps=st.none() | COUNTS, loss=st.none() | FINITE, heldout_fvu=st.none() | FINITE,
    tokens_per_s=st.none() | st.floats(0, 1e12), progress=st.floats(0, 1), eta_s=st.none() | st.floats(0, 1e12),
    priority=st.integers(-(2**63), 2**63 - 1), held=st.booleans(), waits_for=st.none() | TEXTS,
    tags=st.lists(TEXTS, max_size=3).map(tuple), note=TEXTS, seeds=st.none() | SEEDS,
)  # fmt: skip
MESSAGES: st.SearchStrategy[Message] = st.one_of(
    st.builds(Hello, protocol=st.integers(0, 100_000), version=TEXTS),
    st.builds(RemoteGpus, gpus=st.lists(GPUS, max_size=3).map(tuple), problem=TEXTS),
    st.builds(Jobs, jobs=st.lists(JOBS, max_size=3).map(tuple), more=COUNTS, problem=TEXTS),
    st.builds(Log, lines=st.lists(TEXTS, max_size=4).map(tuple)),
)


def line_of(message: Message) -> bytes:
    return printable_json(msgspec.json.encode(message).decode()).encode()


def texts_in(value: object) -> list[str]:
    if isinstance(value, msgspec.Struct):
        return [text for name in value.__struct_fields__ for text in texts_in(getattr(value, name))]
    if isinstance(value, tuple):
        return [text for one in value for text in texts_in(one)]
    return [value] if isinstance(value, str) else []


@given(MESSAGES)
def test_a_decoded_message_equals_the_original_except_for_unsafe_characters(message) -> None:
    line = line_of(message)
    assert b"\n" not in line
    read = decode(line)
    assert type(read) is type(message)
    longest = LONGEST_LOG_LINE if isinstance(read, Log) else LONGEST_TEXT
    assert all(text.isprintable() and len(text) <= longest for text in texts_in(read))
    # If all its strings are harmless, a message is unchanged.
    assert read == message or texts_in(read) != texts_in(message)
    assert decode(line_of(read)) == read


@given(st.binary(max_size=300) | st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.sampled_from(["type", "cards", "jobs", "lines"]), inner),
).map(lambda value: json.dumps(value).encode()))  # fmt: skip
def test_any_invalid_line_is_rejected_with_a_one_line_reason(line) -> None:
    reason = ""
    try:
        draw(decode(line))
    except ValueError as error:
        reason = str(error)
    assert "\n" not in reason


FIELDS = [
    *((kind, name) for kind, of in (("gpus", RemoteGpu), ("jobs", FarJob)) for name in of.__struct_fields__)
]  # fmt: skip
ODD = [-1, 1.5, 2**64, 10**400, -1e308, "x", "\x1b", None, True, [], [[]], {}, [2**70], "running" * 3]


@given(st.sampled_from(FIELDS), st.sampled_from(ODD))
@settings(max_examples=300)
def test_a_value_out_of_range_is_rejected_and_any_other_value_can_be_drawn(field, value) -> None:
    kind, name = field
    gpu = {"index": 0, "uuid": "x", "name": "x"}
    job = {"id": 1, "name": "x", "state": "queued"}
    table = (gpu if kind == "gpus" else job) | {name: value}
    try:
        message = decode(json.dumps({"type": kind, "cards" if kind == "gpus" else "jobs": [table]}).encode())
    except ValueError:
        return
    draw(message)


@given(MESSAGES)
def test_every_message_can_be_drawn(message) -> None:
    draw(decode(line_of(message)))


def draw(message: Message) -> None:
    """Draw a message as the dashboard does."""
    if isinstance(message, RemoteGpus):
        rows = [GpuRow(gpu.sample(1e9), gpu.holder, gpu.use, lambda name, n: []) for gpu in message.gpus]
        gpu_lines(rows, rows, 120)
        view = HostView("far", ConnectionStage.CONNECTED, problem=message.problem, gpus=message.gpus)
        state_words(FarHost(view, tuple(rows)))
        process_lines(view, 80)
    elif isinstance(message, Jobs):
        for job in message.jobs:
            view = job.view("far")
            assert not math.isnan(view.progress)
            job_row(view)


def test_a_line_longer_than_1_mib_is_rejected() -> None:
    text = b'{"type": "log", "lines": ["' + b"x" * LONGEST_LINE + b'"]}'
    with pytest.raises(ValueError, match="longer than 1 MiB"):
        decode(text)


def job(number: int, **fields) -> JobView:
    usual = {"name": "x", "config": "", "user": "me", "host": "here", "device": "cpu", "gpu_source": "none"}
    return JobView(id=number, progress=1.01, **(usual | {"state": JobState.FINISHED} | fields))


def test_only_the_newest_jobs_and_all_running_jobs_are_sent() -> None:
    jobs = [job(number) for number in range(MOST_JOBS + 5, 1, -1)] + [job(1, state=JobState.RUNNING)]
    message = decode(line_of(jobs_message(jobs, "")))
    assert isinstance(message, Jobs)
    assert [one.id for one in message.jobs] == [*range(MOST_JOBS + 5, 6, -1), 1]
    assert message.more == 5


def test_messages_with_long_texts_stay_below_the_line_limit() -> None:
    text = "\x1b\U000e0041名" * 10_000
    jobs = [job(number, name=text, note=text, error=text, tags=(text,) * 99) for number in range(MOST_JOBS, 0, -1)]
    message = decode(line_of(jobs_message(jobs, text)))
    assert isinstance(message, Jobs)
    assert len(message.jobs) + message.more == MOST_JOBS
    assert message.jobs[0].id == MOST_JOBS
    for told in log_messages([text] * 500):
        assert isinstance(decode(line_of(told)), Log)


def test_held_out_values_are_sent_and_older_hosts_messages_without_them_are_read() -> None:
    row = {"id": 7, "name": "far", "config": "", "user": "me", "host": "gpu1", "device": "cpu", "gpu_source": "none"}
    known = {"fvu": 0.08, "heldout_fvu": 0.1341, "heldout_l0": 36.4, "k": "32", "d_sae": "1,536"}
    view = JobView(**row, **known, state=JobState.RUNNING)
    (told,) = decode(msgspec.json.encode(jobs_message([view], ""))).jobs
    far = told.view("gpu1")
    assert (far.fvu, far.heldout_fvu, far.heldout_l0, far.k, far.d_sae) == (0.08, 0.1341, 36.4, "32", "1,536")
    (older,) = decode(b'{"type":"jobs","jobs":[{"id":7,"name":"far","state":"running","fvu":0.08}]}').jobs
    assert (judged_value(older.view("gpu1"), "fvu"), older.view("gpu1").k) == ((0.08, True), "")


def test_the_spread_over_seeds_is_sent_and_messages_without_it_or_with_unknown_fields_are_read() -> None:
    labels = tuple(f"seed={seed}" for seed in range(MOST_SEEDS + 1))
    spreads = {"heldout_fvu": Spread(0.146, 0.0017, 3), "no column": Spread(1.0, 2.0, 3)}
    view = job(7, heldout_fvu=0.146, seeds=Seeds(labels, True, spreads))
    line = line_of(jobs_message([view], ""))
    (sent,) = decode(line).jobs
    far = sent.view("gpu1")
    assert far.seeds == Seeds(labels[:MOST_SEEDS], True, {"heldout_fvu": Spread(0.146, 0.0017, 3)})
    assert judged_span(far, "fvu") == judged_span(view, "fvu") == ("0.146(2)", "text")
    table = json.loads(line)
    # An older host sends no seeds, and an older app does not know this field.
    table["jobs"][0]["from_a_newer_version"] = table["jobs"][0].pop("seeds")
    (older,) = decode(json.dumps(table).encode()).jobs
    assert older.view("gpu1").seeds is None
    assert judged_span(older.view("gpu1"), "fvu") == ("0.146", "text")


@pytest.mark.parametrize(
    "seeds",
    [
        {"labels": [], "are_all": True, "spreads": {}},
        {"labels": ["seed=0"] * (MOST_SEEDS + 1), "are_all": True, "spreads": {}},
        {"labels": ["seed=0"], "are_all": True, "spreads": {"fvu": {"mean": 0.1, "sd": -0.1, "n": 2}}},
        {"labels": ["seed=0"], "are_all": True, "spreads": {"fvu": {"mean": 1e999, "sd": 0.1, "n": 2}}},
    ],
)
def test_impossible_spreads_over_seeds_are_rejected(seeds) -> None:
    row = {"id": 7, "name": "far", "state": "running", "fvu": 0.08, "seeds": seeds}
    with pytest.raises(ValueError, match="seeds"):
        decode(json.dumps({"type": "jobs", "jobs": [row]}).replace("Infinity", "1e999").encode())


def test_an_imported_job_appears_finished_to_older_apps_and_imported_to_this_one() -> None:
    where = {"config": "", "user": "ada", "host": "h", "device": "cpu", "gpu_source": "none"}
    job = JobView(id=1, name="theirs", state=JobState.IMPORTED, **where)
    sent = far_job(job)
    assert sent.state is JobState.FINISHED
    (message,) = [decode(msgspec.json.encode(jobs_message([job], "")))]
    assert isinstance(message, Jobs)
    assert message.jobs[0].view("h").state is JobState.IMPORTED
