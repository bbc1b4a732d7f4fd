"""The order of the tests: what takes long begins at once, and what waits runs beside what calculates.

No example of a property has a deadline, and torch one thread: the machine is shared. A run tries the examples of the
run before, so that it fails for what has changed; `make explore` tries others, and many more.
"""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator

import pytest
from hypothesis import settings

from sae_tui.gpu.once import THREAD_NAME
from trainer.contract import paths

# Threads wait for each other by spinning, and several processes of tests share the cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
settings.register_profile("same", deadline=None, max_examples=60, derandomize=True)
settings.register_profile("explore", deadline=None, max_examples=2000)
settings.load_profile(os.environ.get("EXAMPLES", "same"))

# What three of the processes begin with: keys typed into an app and a real model, jobs that are killed and waited
# for, and trainings. In the order of the files the first two would follow each other, and the cores stand still during
# the second.
FIRST = (
    ("tests/e2e/test_monkey", "tests/e2e/test_real_chain"),
    ("tests/faults/", "tests/slurm/", "tests/jobs/"),
    ("tests/trainer/",),
)


@pytest.fixture(autouse=True)
def _hung_drivers() -> Iterator[None]:
    """Let a driver that hangs on purpose hang for its own test alone: the next `main` would leave by `os._exit`."""
    yield
    for thread in threading.enumerate():
        if thread.name == THREAD_NAME:
            thread.name = f"{THREAD_NAME} of a test that is over"


@pytest.fixture(autouse=True)
def _kept_folders(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget below which folders other tests of this process follow no links."""
    monkeypatch.setattr(paths, "_KEPT", set())


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the tests of each group at the head of the part of the list that one process gets."""
    n_processes = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 1))
    heads: list[list[pytest.Item]] = [[] for _ in range(n_processes)]
    others: list[pytest.Item] = []
    for item in items:
        group = next((number for number, paths in enumerate(FIRST) if item.nodeid.startswith(paths)), None)
        (others if group is None else heads[group % n_processes]).append(item)
    part = len(items) // n_processes
    items.clear()
    for head in heads:
        room = max(0, part - len(head))
        items += head + others[:room]
        others = others[room:]
    items += others


def pytest_collection_finish() -> None:
    """Let no garbage collection look through all modules and tests again: a test takes a twentieth less."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure(config: pytest.Config) -> None:
    """Name the tests that passed on a second try only, in the last line."""
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if reporter is not None and config.getoption("lf", default=False):
        print("flaky:", ", ".join(report.nodeid for report in reporter.stats.get("passed", [])) or "none")
