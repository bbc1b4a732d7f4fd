"""Memory that is really missing: the address space of a run is limited as it starts."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

JOB = """
name = "tight"
[data]
source = "synthetic"
d_in = 32
held_out_tokens = 1000
[sae]
d_sae = 8192
k = 8
[train]
n_steps = 2
batch_size = "auto"
global_batch_size = 65536
[launch]
gpus = "cpu"
"""


def trained(folder: Path, limit_bytes: int) -> tuple[dict[str, float], str]:
    """The result of the job and the log of its rank."""
    folder.mkdir()
    (folder / "job.toml").write_text(JOB)
    command = [sys.executable, "-m", "trainer", "run", str(folder / "job.toml"), "--out", str(folder / "run"), "--json"]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"},
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (limit_bytes, limit_bytes)),
        timeout=200,
    )
    log = (folder / "run" / "logs" / "rank0.log").read_text()
    assert done.returncode == 0, done.stderr + log
    return json.loads(done.stdout.splitlines()[-1]), log


def test_micro_batches_are_halved_until_they_fit_and_the_step_stays_what_it_is(tmp_path: Path) -> None:
    roomy, plain = trained(tmp_path / "roomy", 2**34)
    tight, told = trained(tmp_path / "tight", 2_600_000_000)
    assert "do not fit" not in plain
    assert "65,536 tokens at a time do not fit: 32,768 are tried" in told
    assert tight["tokens"] == roomy["tokens"] == 2 * 65536
    assert abs(tight["fvu"] - roomy["fvu"]) < 1e-4
