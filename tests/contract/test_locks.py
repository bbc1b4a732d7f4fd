"""Tests, with real processes, that a lock excludes other processes, and is released when its holder dies."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trainer.contract.errors import UserError
from trainer.contract.locks import FileLock, try_lock
from trainer.contract.paths import DataDir

HOLDER = """
import os, sys
from trainer.contract.locks import try_lock
print(try_lock(os.open(sys.argv[1], os.O_RDONLY), shared=sys.argv[2] == "shared"), flush=True)
input()
"""


@pytest.mark.parametrize(("theirs", "shared", "alone"), [("shared", True, False), ("alone", False, False)])
def test_a_lock_is_shared_on_request_and_can_be_exclusive_once_other_holders_have_died(
    theirs: str, shared: bool, alone: bool, tmp_path: Path, child: Callable[..., Any]
) -> None:
    (tmp_path / "lock").touch()
    holder = child(HOLDER, tmp_path / "lock", theirs)
    assert holder.hear() == "True"
    descriptor = os.open(tmp_path / "lock", os.O_RDONLY)
    assert try_lock(descriptor, shared=True) is shared
    assert try_lock(descriptor) is alone
    holder.process.kill()
    holder.process.wait()
    assert try_lock(descriptor)
    os.close(descriptor)


def test_a_lock_has_only_one_holder_until_it_is_released(tmp_path: Path) -> None:
    data = DataDir(tmp_path / "data")
    data.create()
    first, second = (FileLock(data.locks / "a.lock") for _ in range(2))
    assert (first.acquire(), first.acquire(), second.acquire()) == (True, True, False)
    assert (first.held, second.held) == (True, False)
    first.release()
    assert second.acquire()
    second.release()


def test_a_lock_that_cannot_be_opened_raises_a_user_error(tmp_path: Path) -> None:
    data = DataDir(tmp_path / "data")
    data.create()
    (data.locks / "a.lock").mkdir(parents=True)
    with pytest.raises(UserError, match=r"the lock .*a\.lock cannot be opened"):
        FileLock(data.locks / "a.lock").acquire()
