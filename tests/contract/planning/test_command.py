from __future__ import annotations

from pathlib import Path

import pytest
from support.toy_backend import ENTRY

from trainer.contract.planning.check_job import Machine, propose
from trainer.contract.settings.catalog import LAUNCH_BACKENDS
from trainer.contract.settings.job_file import any_job_of


def test_a_command_is_refused_if_its_backend_runs_only_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LAUNCH_BACKENDS, "nice", ENTRY)
    table = {"kind": "command", "command": {"argv": ["true"]}, "launch": {"gpus": "cpu", "backend": "nice"}}
    problems = propose(any_job_of(table), Machine((), 1, tmp_path)).problems()
    assert [str(problem) for problem in problems] == ['launch.backend: "nice" cannot run commands; use "local"']
