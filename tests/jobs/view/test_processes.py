"""Tests for how GPU processes are listed: folded, sorted, filtered, or as a tree."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from sae_tui.gpu.processes import Ancestor, ProcessDetails
from sae_tui.jobs.gpus.availability import Holders
from sae_tui.jobs.view.processes import ORDERS, ProcessRow, arrange
from sae_tui.panels.processes import describe
from trainer.contract.store.rows import Job

GIB = 1 << 30
JOB = Job(
    id=7, name="gemma-l12", config="", user="ada", host="box", device="cuda", gpu_source="nvml", gpu_ids=(0, 1),
    gpu_uuids=("GPU-0", "GPU-1"),
)  # fmt: skip
HELD = Holders(jobs={"GPU-0": JOB, "GPU-1": JOB}, pids={"GPU-0": 10, "GPU-1": 11}, owners={9: JOB, 10: JOB, 11: JOB})
SHELL, SSH = Ancestor(5, "bob", "bash"), Ancestor(4, "bob", "sshd")
RANKS = (
    ProcessDetails(11, "ada", "python rank 1", (1,), 3 * GIB, 80, 20.0, GIB, 200.0),
    ProcessDetails(10, "ada", "python rank 0", (0,), 2 * GIB, 60, 10.0, GIB, 100.0),
)
BOB = ProcessDetails(20, "bob", "python Train.py", (2,), 4 * GIB, 99, ancestors=(SHELL, SSH), container="docker 3f2a")
EVE = ProcessDetails(21, "eve", None, (3,), None)
ALL = (*RANKS, BOB, EVE)


def keys(entries: list[ProcessRow]) -> list[str]:
    return [entry.key for entry in entries]


def test_ranks_are_folded_under_a_job_row_showing_their_totals() -> None:
    entries = arrange(ALL, HELD)
    assert keys(entries) == ["job:7", "pid:20", "pid:21"]
    head = entries[0]
    assert (head.n_below, head.process.gpus, head.process.memory_used_bytes) == (2, (0, 1), 5 * GIB)
    assert (head.process.sm_percent, head.process.cpu_percent, head.process.started) == (70, 30.0, 100.0)
    entries = arrange(ALL, HELD, opened=frozenset({"job:7"}))
    assert keys(entries) == ["job:7", "pid:10", "pid:11", "pid:20", "pid:21"]
    assert [(entry.rank, entry.depth) for entry in entries[1:3]] == [(0, 1), (1, 1)]


def test_a_job_with_one_rank_is_shown_as_one_row() -> None:
    (entry,) = arrange(RANKS[:1], HELD)
    assert (entry.key, entry.rank, entry.job, entry.n_below) == ("pid:11", 1, JOB, 0)


COMMAND = msgspec.structs.replace(
    JOB, id=8, name="finetune", config='kind = "command"\n[command]\nargv = ["torchrun", "finetune.py"]\n',
    gpu_uuids=("GPU-4", "GPU-5"),
)  # fmt: skip
OF_COMMAND = Holders(jobs={"GPU-4": COMMAND, "GPU-5": COMMAND}, pids={"GPU-4": 30}, owners={29: COMMAND, 30: COMMAND})
LAUNCHER, SUPERVISOR = Ancestor(30, "ada", "torchrun finetune.py"), Ancestor(29, "ada", "supervisor")
WORKERS = (
    ProcessDetails(31, "ada", "python finetune.py", (4,), 3 * GIB, ancestors=(LAUNCHER, SUPERVISOR)),
    # This process outlived its parent, so the supervisor adopted it.
    ProcessDetails(32, "ada", "python left.py", (5,), GIB, ancestors=(SUPERVISOR,)),
)


def test_all_processes_below_a_commands_program_are_folded_under_its_job() -> None:
    (head,) = arrange(WORKERS, OF_COMMAND)
    assert (head.key, head.n_below, head.process.gpus) == ("job:8", 2, (4, 5))
    assert describe(head) == ("▸ job 8, 2 processes: finetune", "good")
    _, *below = arrange(WORKERS, OF_COMMAND, opened=frozenset({"job:8"}))
    assert [describe(entry)[0] for entry in below] == ["job 8: python finetune.py", "job 8: python left.py"]
    assert keys(arrange(WORKERS, OF_COMMAND, words="job:8 left")) == ["pid:32"]


def test_in_a_tree_a_commands_processes_belong_to_its_job() -> None:
    entries = arrange((*WORKERS, BOB), OF_COMMAND, as_tree=True)
    assert {entry.process.pid: entry.job and entry.job.id for entry in entries if not entry.is_parent} == {
        31: 8, 32: 8, 20: None
    }  # fmt: skip
    assert [describe(entry)[0] for entry in entries] == [
        "bash", "[docker 3f2a] python Train.py", "supervisor", "torchrun finetune.py", "job 8: python finetune.py",
        "job 8: python left.py",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("order", "first", "last"),
    [("memory", "job:7", "pid:21"), ("SM", "pid:20", "pid:21"), ("GPU", "job:7", "pid:21"), ("pid", "job:7", "pid:21")],
)
def test_process_rows_can_be_sorted(order, first, last) -> None:
    found = keys(arrange(ALL, HELD, order=order))
    assert (found[0], found[-1]) == (first, last)


@pytest.mark.parametrize("order", ORDERS)
def test_processes_with_unknown_values_can_be_sorted_in_every_order(order) -> None:
    unknown = (ProcessDetails(1, None, None), ProcessDetails(2, None, None))
    assert len(arrange((*unknown, *ALL), HELD, order=order)) == 5


@pytest.mark.parametrize(
    ("order", "found"),
    [
        ("memory", ["pid:20", "job:7", "pid:21"]),
        ("run time", ["job:7", "pid:20", "pid:21"]),
        ("user", ["pid:21", "pid:20", "job:7"]),
    ],
)
def test_in_a_reversed_order_unknown_values_still_come_last(order, found) -> None:
    assert keys(arrange(ALL, HELD, order=order, is_reversed=True)) == found


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("type:g", ["pid:1", "pid:2"]),
        ("type:C", ["pid:2", "pid:3"]),
        ("type:c+g", []),
        ("g", []),
    ],
)
def test_a_filter_finds_processes_by_type(words, found) -> None:
    kinds = {1: "G", 2: "C+G", 3: "C", 4: None}
    processes = [ProcessDetails(pid, "ann", "x", (0,), kind=kind) for pid, kind in kinds.items()]
    assert keys(arrange(processes, Holders(), words=words)) == found


def test_a_job_row_shows_mean_gpu_shares_and_the_sum_of_host_memory() -> None:
    shares = dict(kind="C", bandwidth_percent=10, encoder_percent=None, decoder_percent=4, host_memory_percent=1.5)
    (head,) = arrange([replace(one, **shares) for one in RANKS], HELD)
    whole = head.process
    assert (whole.kind, whole.bandwidth_percent, whole.encoder_percent, whole.decoder_percent) == ("C", 10, None, 4)
    assert whole.host_memory_percent == 3.0


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("train", ["pid:20"]),
        ("TRAIN bob", ["pid:20"]),
        ("train ada", []),
        ("gpu:3", ["pid:21"]),
        ("user:eve", ["pid:21"]),
        ("user:ev", []),
        ("job:7", ["job:7"]),
        ("gemma", ["job:7"]),
        ("gpu:1", ["pid:11"]),
        ("3f2a", ["pid:20"]),
    ],
)
def test_a_filter_finds_the_processes_that_match_all_of_its_words(words, found) -> None:
    assert keys(arrange(ALL, HELD, words=words)) == found


def test_a_tree_shows_processes_under_their_nearest_relevant_parents() -> None:
    twin = ProcessDetails(22, "bob", "python other.py", (2,), GIB, ancestors=(SHELL, SSH))
    child = ProcessDetails(23, "bob", "worker", (2,), GIB, ancestors=(Ancestor(22, "bob", "python"), SHELL, SSH))
    entries = arrange((BOB, child, twin, EVE), Holders(), as_tree=True)
    assert [(entry.process.pid, entry.depth, entry.is_parent) for entry in entries] == [
        (5, 0, True), (20, 1, False), (22, 1, False), (23, 2, False), (21, 0, False)
    ]  # fmt: skip
    assert entries[2].process.command == "python other.py"
