"""The registry of launch backends."""

from __future__ import annotations

import importlib

import pytest

from sae_tui.jobs.launchers import LAUNCHERS
from sae_tui.jobs.launchers.base import Attempt


@pytest.mark.parametrize("backend", LAUNCHERS)
def test_every_backend_has_all_that_a_supervisor_asks_of_an_attempt(backend):
    module, _, name = LAUNCHERS[backend].partition(":")
    loaded = getattr(importlib.import_module(module), name)
    wanted = {member for member in vars(Attempt) if not member.startswith("_")}
    assert wanted
    assert not [member for member in wanted if not hasattr(loaded, member)]
