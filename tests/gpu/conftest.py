"""Fixtures that run scripts with the real pynvml and a fake version of NVIDIA's library, and one for polling."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.driver import ROOT, build_drivers, environment

READ_ALL = """
import json
from dataclasses import asdict
from sae_tui.gpu.nvml import Nvml
nvml = Nvml()
print(json.dumps([asdict(nvml.sample(index, processes=True)) for index in range(nvml.open())]))
"""


@pytest.fixture(scope="session")
def drivers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build a folder with the fake driver libraries `new`, `old` and `none`."""
    return build_drivers(tmp_path_factory.mktemp("fake_nvml"))


@pytest.fixture(scope="session")
def on_nvml(drivers: Path) -> Callable[..., Any]:
    """Return a function that runs a script with the fake driver and returns its JSON output."""

    def run(script: str, driver: str = "new", path: Path | None = None, **variables: Any) -> Any:
        env = environment(drivers, driver, **variables)
        if path is not None:
            env["PYTHONPATH"] = f"{path}:{ROOT}"
        done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return run


@pytest.fixture(scope="session")
def read_all(on_nvml: Callable[..., Any]) -> Callable[..., list[dict[str, Any]]]:
    """Return a function that samples every GPU once, including its processes."""

    def read(faults: dict[int, str] | None = None, **options: Any) -> list[dict[str, Any]]:
        specs = ",".join(f"{index}:{fault}" for index, fault in (faults or {}).items())
        samples: list[dict[str, Any]] = on_nvml(READ_ALL, FAULTS=specs, **options)
        return samples

    return read


@pytest.fixture(scope="session")
def until() -> Callable[..., Any]:
    """Return a function that polls a condition until it is true and returns its value, or fails after ten seconds."""

    def poll(condition: Callable[[], Any], timeout: float = 10.0) -> Any:
        deadline = time.monotonic() + timeout
        while not (value := condition()):
            assert time.monotonic() < deadline, "the condition was not met in time"
            time.sleep(0.005)
        return value

    return poll
