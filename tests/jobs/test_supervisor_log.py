"""Tests that a supervisor logs a store error only once and retries."""

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
    """A function that fails `n_failures` times and then returns the number of calls."""

    def __init__(self, n_failures: int) -> None:
        self.n_failures, self.n_calls = n_failures, 0

    def __call__(self) -> int:
        self.n_calls += 1
        if self.n_calls <= self.n_failures:
            raise StoreError("control.db is locked")
        return self.n_calls


def test_a_failing_call_is_logged_once_and_retried_until_it_succeeds(capsys: pytest.CaptureFixture[str]) -> None:
    assert retry("pausing", Failing(3)) == 4
    assert capsys.readouterr().err.count("pausing: control.db is locked\n") == 1


def test_an_error_is_raised_after_too_many_attempts() -> None:
    failing = Failing(1000)
    with pytest.raises(StoreError, match="is locked"):
        retry("pausing", failing)
    assert failing.n_calls == supervisor_log.STORE_TRIES


def test_a_programming_error_is_not_retried() -> None:
    with pytest.raises(ZeroDivisionError):
        retry("pausing", lambda: 1 // 0)
