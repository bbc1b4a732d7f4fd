"""Tests for how the amdsmi module is chosen, and for the message if no module can be used."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.driver import ROOT

LOAD = """
import json
from sae_tui.gpu.amd_module import load_amdsmi
from sae_tui.gpu.base import SourceUnavailable
try:
    print(json.dumps(load_amdsmi().MARK))
except SourceUnavailable as error:
    print(json.dumps([error.reason, error.is_broken]))
"""
GOOD = "def amdsmi_get_gpu_vram_usage(): ...\nclass AmdSmiLibraryException(Exception): ...\nMARK = {mark!r}\n"


def load(rocm: Path, installed: Path) -> Any:
    """Return the imported module's `MARK`, or [reason, is_broken] if no module can be used."""
    env = os.environ | {"ROCM_PATH": str(rocm), "PYTHONPATH": f"{installed}:{ROOT}"}
    done = subprocess.run([sys.executable, "-c", LOAD], env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def install(folder: Path, text: str) -> Path:
    (folder / "amdsmi").mkdir(parents=True)
    (folder / "amdsmi" / "__init__.py").write_text(text)
    return folder


def test_rocms_module_takes_precedence_over_an_installed_one(tmp_path: Path) -> None:
    installed = install(tmp_path / "site", GOOD.format(mark="pip"))
    rocm = tmp_path / "rocm"
    assert load(rocm, installed) == "pip"
    install(rocm / "share" / "amd_smi", GOOD.format(mark="rocm"))
    assert load(rocm, installed) == "rocm"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("raise AttributeError('undefined symbol: amdsmi_new')", "undefined symbol: amdsmi_new"),
        (
            "print('Unable to find libamd_smi.so library')\nraise KeyError('libamd_smi.so')",
            "ROCm's library libamd_smi.so is missing",
        ),
        ("", "different module of that name"),
    ],
)
def test_an_unusable_module_is_named_and_its_output_is_suppressed(tmp_path: Path, text: str, words: str) -> None:
    reason, is_broken = load(tmp_path, install(tmp_path / "site", text))
    assert "amdsmi cannot be used" in reason
    assert words in reason
    assert is_broken


def test_output_from_other_threads_during_the_import_is_not_lost(tmp_path: Path) -> None:
    text = (
        "import threading; print('of the module')\n"
        "other = threading.Thread(target=print, args=('of another thread',)); other.start(); other.join()\n"
    )
    installed = install(tmp_path / "site", text + GOOD.format(mark="pip"))
    env = os.environ | {"ROCM_PATH": str(tmp_path), "PYTHONPATH": f"{installed}:{ROOT}"}
    done = subprocess.run([sys.executable, "-c", LOAD], env=env, capture_output=True, text=True, timeout=60)
    assert done.stdout == 'of another thread\n"pip"\n'
