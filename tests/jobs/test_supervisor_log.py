"""What a supervisor does about a store that fails: it notes that once, and tries again."""

from __future__ import annotations

import pytest

from sae_tui.jobs import supervisor_log
from sae_tui.jobs.supervisor_log import retry
from trainer.contract.store.database import StoreError


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor_log, "STORE_PAUSE_S", 0.0)
    monkeypatch.setattr(supervisor_log, "_last", "")


class Failing:
    """Something that fails a number of times and returns how often it was called."""

    def __init__(self, n_failures: int) -> None:
        self.n_failures, self.n_calls = n_failures, 0

    def __call__(self) -> int:
        self.n_calls += 1
        if self.n_calls <= self.n_failures:
            raise StoreError("control.db is locked")
        return self.n_calls


def test_what_fails_is_tried_again_until_it_succeeds_and_noted_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert retry("pausing", Failing(3)) == 4
    assert capsys.readouterr().err.count("pausing: control.db is locked\n") == 1


def test_what_fails_too_often_is_raised() -> None:
    failing = Failing(1000)
    with pytest.raises(StoreError, match="is locked"):
        retry("pausing", failing)
    assert failing.n_calls == supervisor_log.STORE_TRIES


def test_a_fault_of_the_program_is_not_tried_again() -> None:
    with pytest.raises(ZeroDivisionError):
        retry("pausing", lambda: 1 // 0)
