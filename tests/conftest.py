"""Orders the tests so that slow tests start first and tests that wait run in parallel with tests that compute.

Property tests have no deadline, and torch uses one thread, because tests run in parallel. Property tests use the same
examples in every run, so that only code changes cause failures. `make explore` tries many new examples.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings
from support.forked_commands import fork_detached_programs

from sae_tui.jobs.gpus.locks import lock_holder
from sae_tui.threads import THREAD_NAME
from trainer.contract import paths

# Use one thread, because several test processes share the cores, and PyTorch's threads spin while they wait for each
# other.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Under `nohup`, programs that tests start would inherit an ignored SIGHUP. A signal handler is not inherited, so set
# one.
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, lambda *_: None)
settings.register_profile("same", deadline=None, max_examples=30, derandomize=True)
settings.register_profile("explore", deadline=None, max_examples=2000)
settings.load_profile(os.environ.get("EXAMPLES", "same"))

# The tests that each of three processes runs first: the app with keys and a real model; killed jobs; training runs. In
# file order, the first two groups would run back to back, and the cores would be idle during the second group.
FIRST = (
    ("tests/e2e/test_monkey", "tests/e2e/test_real_chain"),
    ("tests/faults/", "tests/slurm/", "tests/jobs/"),
    ("tests/trainer/",),
)


@pytest.fixture(autouse=True)
def _hung_drivers() -> Iterator[None]:
    """Prevent a deliberately hung driver from making later calls to `main` exit with `os._exit`."""
    yield
    for thread in threading.enumerate():
        if thread.name == THREAD_NAME:
            thread.name = f"{THREAD_NAME} of an ended test"


@pytest.fixture(autouse=True)
def _kept_folders(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget the folders where other tests in this process have forbidden symbolic links."""
    monkeypatch.setattr(paths, "_KEPT", set())


@pytest.fixture(autouse=True)
def _no_queue_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """Kill the queue processes that a test has started; otherwise, they wait until the test's folder is deleted."""
    folder: Path | None = request.getfixturevalue("tmp_path") if "tmp_path" in request.fixturenames else None
    yield
    for depth in ("*", "*/*", "*/*/*"):
        for lock in folder.glob(f"{depth}/locks/queue-*.lock") if folder else ():
            if (pid := lock_holder(lock)) and pid != os.getpid():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


@pytest.fixture(autouse=True, scope="session")
def _forked_programs() -> None:
    fork_detached_programs()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Move each group of tests in `FIRST` to the start of one process's tests."""
    n_processes = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 1))
    heads: list[list[pytest.Item]] = [[] for _ in range(n_processes)]
    others: list[pytest.Item] = []
    for item in items:
        group = next((number for number, paths in enumerate(FIRST) if item.nodeid.startswith(paths)), None)
        (others if group is None else heads[group % n_processes]).append(item)
    part = len(items) // n_processes
    items.clear()
    for head in heads:
        capacity = max(0, part - len(head))
        items += head + others[:capacity]
        others = others[capacity:]
    items += others


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection() -> Iterator[None]:
    """Collect no garbage while tests are collected, which takes a fifth of that time, and rarely afterwards.

    Modules and tests are excluded from later garbage collections, which makes tests 5 % faster.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        # By default, tests of the app would spend a fifth of their time on garbage collection.
        gc.set_threshold(20_000, 20, 20)
        gc.enable()


def pytest_unconfigure(config: pytest.Config) -> None:
    """As the last line, print the tests that passed only on the second attempt."""
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if reporter is not None and config.getoption("lf", default=False):
        print("flaky:", ", ".join(report.nodeid for report in reporter.stats.get("passed", [])) or "none")
