"""Tests with two real users on one machine who share a data folder or use separate folders."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.jobs.conftest import wait_for, write_shard

ANN, BOB, GROUP = 61_001, 61_002, 61_000
ROOT = Path(__file__).parents[2]

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as two other users"),
    pytest.mark.timeout(200),
]
JOB = """
name = "{name}"
[data]
path = "{data}"
[sae]
d_sae = 16
k = 4
[train]
batch_size = 64
n_steps = {steps}
"""


class User:
    """A group member who runs `sae-tui`."""

    def __init__(self, uid: int, data: Path, home: Path) -> None:
        self.uid, self.data, self.home = uid, data, home
        home.mkdir()
        os.chown(home, uid, GROUP)

    def start(self, argv: list[str]) -> subprocess.Popen[str]:
        """Start a process as this user."""
        environment = {
            "PATH": os.environ["PATH"],
            "PYTHONPATH": str(ROOT),
            "HOME": str(self.home),
            "SAE_TUI_DATA_DIR": str(self.data),
            "SAE_TUI_LOCK_DIR": str(self.home.parent / "locks"),
        }
        # These users can read all files, because Python may be in root's home folder, but can write only to their own
        # files.
        may = ["--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search"]
        become = ["setpriv", f"--reuid={self.uid}", f"--regid={GROUP}", "--clear-groups", *may]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        return subprocess.Popen([*become, *argv], env=environment, cwd=self.home, umask=0o022, **pipes)

    def run(self, *arguments: object) -> subprocess.CompletedProcess[str]:
        argv = [sys.executable, "-m", "sae_tui", "--gpu-source", "simulated", *map(str, arguments)]
        with self.start(argv) as process:
            out, err = process.communicate(timeout=120)
        return subprocess.CompletedProcess(argv, process.returncode, out, err)

    def json(self, *arguments: object) -> object:
        done = self.run(*arguments, "--json")
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def state(self, job_id: int) -> str:
        return self.json("job", job_id)["state"]

    def end_of(self, job_id: int) -> str:
        """Wait for the end of a job in one command, since each command takes 0.15 core-seconds; return the state."""
        return json.loads(self.run("job", job_id, "--wait", "--json").stdout)["state"]


@pytest.fixture
def place() -> Iterator[Path]:
    """Create a folder that both users can access; pytest's own folders are private."""
    with tempfile.TemporaryDirectory(prefix="users-", ignore_cleanup_errors=True) as folder:
        Path(folder).chmod(0o755)
        write_shard(Path(folder) / "acts")
        yield Path(folder)


def job_file(place: Path, name: str, steps: int = 100_000_000) -> Path:
    path = place / f"{name}.toml"
    path.write_text(JOB.format(name=name, data=place / "acts", steps=steps))
    return path


def test_users_sharing_a_folder_see_each_others_jobs_and_wait_for_their_gpus(place):
    shared = place / "shared"
    shared.mkdir()
    os.chown(shared, ANN, GROUP)
    shared.chmod(0o2770)
    ann, bob = User(ANN, shared, place / "ann"), User(BOB, shared, place / "bob")
    first = ann.json("launch", job_file(place, "anns"), "--gpus", "0")["id"]
    try:
        wait_for(lambda: ann.state(first) == "running", "the first job to run", 90)
        second = bob.json("launch", job_file(place, "bobs", steps=3), "--gpus", "0")["id"]
        assert [row["name"] for row in bob.json("jobs")] == ["bobs", "anns"]
        wait_for(lambda: bob.json("job", second)["waits_for"], "a reason for waiting")
        assert f"GPU 0 is held by job {first}" in bob.json("job", second)["waits_for"]
        assert bob.json("job", first)["user"] != bob.json("job", second)["user"]
        # Bob can read the output of Ann's job and ask it to stop.
        assert bob.json("logs", first)["lines"]
        bob.run("stop", first)
        assert bob.end_of(first) == "stopped"
        assert ann.end_of(second) == "finished"
    finally:
        ann.run("stop", first, "--kill")
    for path in (shared / "control.db", shared / "runs" / str(first) / "metrics.db"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o660, path
    assert stat.S_IMODE((shared / "runs" / str(second)).stat().st_mode) == 0o2770
    assert ((shared / "runs" / str(second)).stat().st_uid, (shared / "control.db").stat().st_gid) == (BOB, GROUP)


def test_a_queued_job_whose_file_was_changed_by_another_member_is_not_started(place):
    shared = place / "shared"
    shared.mkdir()
    os.chown(shared, ANN, GROUP)
    shared.chmod(0o2770)
    ann, bob = User(ANN, shared, place / "ann"), User(BOB, shared, place / "bob")
    job_id = ann.json("launch", job_file(place, "anns", steps=3), "--gpus", "cpu", "--hold")["id"]
    file = shared / "runs" / str(job_id) / "job.toml"
    changes = """
import sys, pathlib
file = pathlib.Path(sys.argv[1])
try:
    file.open("a")
except PermissionError:
    print("may not write")
text = file.read_text().replace("n_steps = 3", "n_steps = 1")
file.unlink()
file.write_text(text)
"""
    with bob.start([sys.executable, "-c", changes, str(file)]) as member:
        assert member.communicate()[0] == "may not write\n"
    ann.run("release", job_id)
    assert ann.end_of(job_id) == "failed"
    assert ann.json("job", job_id)["error"] == f"job.toml is ignored, because {file} belongs to uid {BOB}"
    # After Bob has resumed the job, it belongs to him.
    assert bob.run("resume", job_id).returncode == 0
    bob.run("stop", job_id, "--kill")
    assert ann.end_of(job_id) in ("stopped", "finished")
    assert (file.stat().st_uid, stat.S_IMODE(file.stat().st_mode)) == (BOB, 0o640)
    assert stat.S_IMODE((file.parent / "run.lock").stat().st_mode) == 0o660


def test_an_unshared_folder_is_private(place):
    ann = User(ANN, place / "ann" / "data", place / "ann")
    ann.run("launch", job_file(place, "anns", steps=1), "--gpus", "cpu", "--wait")
    modes = {path: stat.S_IMODE(path.stat().st_mode) for path in (ann.data, *ann.data.rglob("*"))}
    assert not {str(path): oct(mode) for path, mode in modes.items() if mode & 0o077}


def test_a_data_folder_prepared_by_another_user_is_rejected_and_its_command_is_not_run(place):
    trap, proof = place / "trap", place / "proof"
    trap.mkdir()
    (trap / "settings.toml").write_text(f'on_job_end = ["touch", "{proof}"]\n')
    os.chown(trap, BOB, GROUP)
    ann = User(ANN, trap, place / "ann")
    trap.chmod(0o777)
    for message in (f"any user may write to {trap}", f"{trap} belongs to uid {BOB} and is shared with no group"):
        done = ann.run("launch", job_file(place, "anns", steps=1), "--gpus", "cpu", "--wait")
        assert (done.returncode, done.stdout) == (1, "")
        assert message in done.stderr
        assert "choose another with --data-dir" in done.stderr
        trap.chmod(0o755)
    assert not proof.exists()
    assert sorted(path.name for path in trap.iterdir()) == ["settings.toml"]


def test_a_gpu_used_from_another_users_data_folder_is_not_taken(place):
    ann, bob = User(ANN, place / "ann" / "data", place / "ann"), User(BOB, place / "bob" / "data", place / "bob")
    locks = place / "locks"
    locks.mkdir()
    locks.chmod(0o1777)
    held = """
import sys, time
from pathlib import Path
from sae_tui.jobs.gpus.locks import GpuLocks
assert GpuLocks(Path(sys.argv[1]), [sys.argv[2]]).take()
print("taken", flush=True)
time.sleep(100)
"""
    with ann.start([sys.executable, "-c", held, str(locks), "GPU-0"]) as holder:
        assert holder.stdout.readline() == "taken\n"
        asked = """
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from sae_tui.gpu.base import GpuSample
from sae_tui.jobs.gpus.availability import Holders, choices, with_other_users
from sae_tui.jobs.gpus.locks import GpuLocks
samples = [GpuSample(0, sys.argv[2], "card", 0.0, processes=())]
(found,) = choices(samples, with_other_users(Holders(), Path(sys.argv[1]), samples))
print(found.state, found.reason, GpuLocks(Path(sys.argv[1]), [sys.argv[2]]).take())
"""
        with bob.start([sys.executable, "-c", asked, str(locks), "GPU-0"]) as answer:
            output = answer.communicate()[0].strip()
        assert output == f"busy held by a job of uid {ANN} (pid {holder.pid}) False"
        holder.kill()
    with bob.start([sys.executable, "-c", asked, str(locks), "GPU-0"]) as answer:
        assert answer.communicate()[0].strip() == "available  True"
