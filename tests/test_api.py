"""Tests for `sae_tui.run`, each with real jobs and its own data folder."""

from __future__ import annotations

import contextlib
import doctest
import math
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import sae_tui
from sae_tui import api
from sae_tui.jobs import detach
from trainer.contract.errors import UserError
from trainer.contract.paths import DataDir
from trainer.contract.settings.toml import table_of
from trainer.contract.store.database import StoreError
from trainer.contract.store.job_store import Control

ROOT = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[DataDir]:
    """Set a new data folder, and kill whatever is left of its jobs afterwards."""
    monkeypatch.setenv("SAE_TUI_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    data = DataDir(tmp_path / "data")
    yield data
    with contextlib.suppress(StoreError), contextlib.closing(Control(data.control_db, readonly=True)) as control:
        for job in control.jobs():
            for ref in [job.supervisor, *(rank.process for rank in control.ranks(job.id))]:
                if ref:
                    ref.send(signal.SIGKILL)


def test_the_examples_in_the_docstrings_are_correct() -> None:
    found = doctest.testmod(api, optionflags=doctest.ELLIPSIS)
    assert (found.failed, found.attempted) == (0, 5)


def test_a_job_gets_its_settings_and_reports_how_it_ended(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("OURS", "inherited")
    script = 'echo "$OURS $N $PWD {job_id}" "$1"; printf "\\033[2J\\n"; exit 5'
    job = sae_tui.run(
        ["sh", "-c", script, "sh", tmp_path / "x"], gpus=0, name="probe", env={"N": 3}, folder=tmp_path, tags=["first"]
    )
    assert (job.id, repr(job)[:14]) == (1, "<job 1 (probe)")
    result = job.wait(60)
    assert (result.state, result.exit_code, result.signal) == ("failed", 5, None)
    assert result.words.startswith("failed: its program ended with exit code 5")
    assert job.result == result
    assert job.state == "failed"
    assert job.log() == f"inherited 3 {tmp_path} {{job_id}} {tmp_path}/x\n\ufffd[2J\n".replace("{job_id}", "1")
    assert job.log(1) == "\ufffd[2J\n"
    assert Path(job.log_file).read_bytes().endswith(b"\x1b[2J\n")


def test_waiting_ends_after_its_timeout_and_leaves_the_job_running() -> None:
    job = sae_tui.run(["sleep", "1000"], gpus=0)
    with pytest.raises(TimeoutError, match=r"job 1 is still \w+ after 0.1 s"):
        job.wait(0.1)
    while job.state != "running":
        assert job.result is None
    assert "job 1 " in job.stop()
    result = job.wait(60)
    assert (result.state, result.exit_code, result.signal) == ("stopped", None, "SIGTERM")


def test_a_job_that_ignores_its_stop_signal_can_be_killed() -> None:
    job = sae_tui.run(["sh", "-c", "trap '' TERM; echo ready; while :; do sleep 0.1; done"], gpus=0)
    while "ready" not in job.log():
        assert job.result is None
    job.kill()
    assert job.wait(60).signal == "SIGKILL"


def test_a_job_waits_for_earlier_jobs_and_another_process_can_follow_it(tmp_path: Path) -> None:
    first = sae_tui.run(["sh", "-c", "while ! test -e go; do sleep 0.1; done"], gpus=0, folder=tmp_path)
    second = sae_tui.run(["echo", "second"], gpus=0, after=[first])
    third = sae_tui.run(["echo", "third"], gpus=0, after=second.id)
    assert (second.state, third.state) == ("queued", "queued")
    (tmp_path / "go").touch()
    code = f"import sae_tui; print(sae_tui.job({third.id}).wait(60).words)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "finished\n"


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"gpus": "many"}, "gpus: must be"),
        ({"memory": "lots"}, "memory: must be a size like 20GiB"),
        ({"time": "soon"}, "time: must be a time"),
        ({"grace": "soon"}, "grace: must be a time"),
        ({"folder": "/nowhere"}, "folder: is not a folder: /nowhere"),
        ({"env": ["X"]}, "env: must be NAME=VALUE"),
        ({"stop_signal": "KILL"}, "stop_signal: must be"),
        ({"retry_on": [999]}, "retry_on"),
        ({"backend": "cloud"}, "backend: must be"),
        ({"settings": ["launch.nods=2"]}, "launch.nods: is not a known setting"),
        ({"gpus": 1.5}, "gpus: must be"),
        ({"gpus": True}, "gpus: must be"),
        ({"time": 0}, "time: must be longer than 0 s"),
        ({"time": -1}, "time: must be longer than 0 s"),
        ({"time": math.nan}, "time: must be a time"),
        ({"time": math.inf}, "time: must be longer than 0 s and at most 10,000 days"),
        ({"grace": math.inf}, "grace: must be finite"),
        ({"retries": "many"}, "retries: must be an integer"),
        ({"requeue": 999}, "requeue: must be a list of exit codes"),
        ({"env": {"A": None}}, "env: A has no value"),
        ({"metrics": "loss"}, 'metrics: "loss" has no name in braces'),
        ({"after": "5"}, "after: must be jobs or job ids, not '5'"),
        ({"after": [None]}, "after: must be jobs or job ids, not None"),
        ({"after": 99}, "there is no job 99"),
        ({"tags": ["two words"]}, "a tag is one word"),
        ({"tags": [1]}, "tags: must be strings, not 1"),
        ({"settings": [1]}, "settings: must be strings, not 1"),
        ({"settings": ["command.grace_s=-1"]}, "command.grace_s: must be a number of at least 0"),
        ({"folder": 5}, "folder: must be a path, not 5"),
        ({"env": {"A=B": 1}}, 'env: must be a name without "=", not "A=B"'),
        ({"memory": 0}, "memory: must be more than 0"),
        ({"memory": True}, "memory: must be a size like 20GiB"),
        ({"memory": -1}, "memory: must be a size like 20GiB"),
        ({"time": True}, "time: must be a time"),
    ],
)
def test_a_wrong_argument_is_refused_in_one_sentence_and_launches_no_job(data: DataDir, options, sentence: str) -> None:
    with pytest.raises(sae_tui.UserError) as refusal:
        sae_tui.run(["true"], **{"gpus": 0} | options)
    assert str(refusal.value).startswith(sentence)
    assert not list((data.root / "runs").glob("*"))


def test_a_single_value_is_treated_as_a_list_of_one(data: DataDir) -> None:
    job = sae_tui.run(["true"], gpus=0, hold=True, retry_on=3, requeue=4, tags="mine", env="A=1", metrics="loss {loss}")
    with contextlib.closing(Control(data.control_db, readonly=True)) as control:
        row = control.job(job.id)
    command = table_of(row.config)["command"]
    assert (command["retry_on"], command["requeue_on"]) == ([3], [4])
    assert (command["env"], command["metrics"], row.tags) == (["A=1"], ["loss {loss}"], ("mine",))


def test_the_name_of_a_job_has_no_secrets_and_no_control_characters(data: DataDir) -> None:
    job = sae_tui.run(["echo", "--token", "s3cr3t", "\x1b[2Jx\n"], gpus=0, hold=True)
    with contextlib.closing(Control(data.control_db, readonly=True)) as control:
        name = control.job(job.id).name
    assert name.startswith("echo --token ")
    assert "s3cr3t" not in name
    assert name.isprintable()


def test_the_requested_number_of_log_lines_is_exact_and_must_not_be_negative() -> None:
    job = sae_tui.run(["printf", "1\n2\n3\n"], gpus=0)
    assert job.wait(60).exit_code == 0
    assert [job.log(lines) for lines in (0, 1, 5, None)] == ["", "3\n", "1\n2\n3\n", "1\n2\n3\n"]
    with pytest.raises(UserError, match="lines: must be at least 0, not -1"):
        job.log(-1)


def test_a_job_stays_queued_with_a_warning_if_the_queue_process_does_not_start(data: DataDir) -> None:
    log = data.root / "queue.log"
    log.mkdir(parents=True)
    with pytest.warns(UserWarning, match="^job 1 is queued, but the queue could not be started: "):
        job = sae_tui.run(["true"], gpus=0)
    assert job.state == "queued"
    log.rmdir()
    detach.start_queue(data)
    assert job.wait(60).state == "finished"


def test_wrong_commands_and_unknown_jobs_are_refused() -> None:
    with pytest.raises(UserError, match="argv: must be a list like"):
        sae_tui.run("echo hello", gpus=0)
    with pytest.raises(UserError, match="argv: must be a list like"):
        sae_tui.run({"echo", "hello"}, gpus=0)
    with pytest.raises(UserError, match=r"command\.argv: is empty"):
        sae_tui.run([], gpus=0)
    with pytest.raises(UserError, match=r"command\.argv: there is no program no-such-program on"):
        sae_tui.run(["no-such-program"], gpus=0)
    with pytest.raises(UserError, match="there is no job 7"):
        sae_tui.job(7)


def test_another_data_folder_can_be_named(tmp_path: Path) -> None:
    other = sae_tui.run(["true"], gpus=0, data_dir=tmp_path / "other")
    assert other.wait(60).state == "finished"
    assert sae_tui.job(1, data_dir=tmp_path / "other").state == "finished"
    assert (tmp_path / "other" / "control.db").exists()


def test_importing_the_package_or_its_functions_loads_no_heavy_library() -> None:
    code = "import sys, sae_tui; sae_tui.run; print(sorted({'torch', 'numpy', 'textual', 'rich'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_a_file_named_trainer_is_reported_instead_of_being_imported(tmp_path: Path) -> None:
    (tmp_path / "trainer.py").write_text("raise SystemExit('imported')")
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", "from sae_tui import run"], cwd=tmp_path, env=env, capture_output=True, text=True
    )
    assert "ImportError: `import trainer` finds " in done.stderr
