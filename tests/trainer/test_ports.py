"""Tests that a running job opens only the expected sockets on this machine, and unpickles no data."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from support import forked_ranks

from trainer.contract.runs.rank_spec import RankSpec, write_spec
from trainer.contract.settings.job import JobConfig
from trainer.contract.settings.job_file import dump_job

MakeJob = Callable[..., JobConfig]
TESTS = Path(__file__).parents[1]
MODES = {"single": 1, "ddp": 2, "tensor": 2, "hybrid": 4, "dp": 2, "sweep": 2}
# The only sockets expected are abstract Unix sockets with random names.
# Ranks check which user owns each connecting process.
OURS = {"bind unix @sae-ranks-", "listen unix @sae-ranks-"}


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("listened") / "listened.so"
    source = TESTS / "support" / "listened.c"
    subprocess.run(["gcc", "-shared", "-fPIC", "-Wall", "-o", str(target), str(source), "-ldl"], check=True)
    return target


@pytest.fixture
def written_down(library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make new programs record their sockets and the data they unpickle, and return the file with the records."""
    monkeypatch.setenv("LD_PRELOAD", str(library))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, (TESTS / "support/unpickled", TESTS, TESTS.parent))))
    monkeypatch.setenv("WRITTEN_DOWN", str(tmp_path / "written-down"))
    return tmp_path / "written-down"


def lines(file: Path) -> list[tuple[int, str]]:
    """Return the pid and text of each recorded line, without the random part of socket names."""
    entries = file.read_text().splitlines() if file.exists() else []
    pairs = [line.split(" ", 1) for line in entries]
    return [(int(pid), what.split("sae-ranks-")[0] + "sae-ranks-" * ("sae-ranks-" in what)) for pid, what in pairs]


def start(*argv: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *argv],
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_the_recording_covers_sockets_and_unpickled_data(written_down: Path) -> None:
    program = "import pickle, socket; socket.create_server(('0.0.0.0', 0)); pickle.loads(pickle.dumps(OSError))"
    assert start("-c", program).wait() == 0
    bound, listened, *unpickled = (what for _, what in lines(written_down))
    assert bound.startswith("bind inet 0.0.0.0 ")
    assert listened.startswith("listen inet 0.0.0.0 ")
    # There is one entry for unpickling the bytes, and one for looking up the class by its name.
    assert len(unpickled) == 2
    assert all(what.startswith("unpickle __main__") for what in unpickled)


def test_ranks_on_one_machine_open_no_port_and_unpickle_nothing_in_any_mode(
    make_job: MakeJob, written_down: Path, tmp_path: Path
) -> None:
    files = {}
    for mode, n_ranks in MODES.items():
        job = make_job(parallel={"mode": mode}, train={"n_steps": 5}, sae={"k": [2, 4]} if mode == "sweep" else {})
        run_dir = tmp_path / mode
        run_dir.mkdir()
        (run_dir / "job.toml").write_text(dump_job(job))
        spec = RankSpec(
            run_dir, run_dir / "sae", attempt=1, world_size=n_ranks, device="cpu", as_one_process=mode == "dp"
        )
        files[mode] = write_spec(spec)
    ranks = start("-m", forked_ranks.__name__, *map(str, files.values()))
    printed, _ = ranks.communicate(timeout=120)
    assert ranks.returncode == 0, printed
    uses_of = {mode: {what for _, what in lines(file.with_name("written-down"))} for mode, file in files.items()}
    several = {mode: OURS for mode in ("ddp", "tensor", "hybrid", "sweep")}
    assert uses_of == {"single": set(), "dp": set()} | several
    assert lines(written_down) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [
        ["probe", "--gpus", "cpu:2"],
        [
            "bench",
            "--steps",
            "1",
            "--set",
            "launch.gpus=cpu:2",
            "--set",
            "train.batch_size=64",
            "--set",
            "sae.d_sae=768",
        ],
    ],
    ids=["probe", "bench"],
)
def test_probe_and_bench_open_no_port_and_unpickle_nothing(written_down: Path, command: list[str]) -> None:
    measuring = start("-m", "trainer", *command)
    printed, _ = measuring.communicate(timeout=120)
    assert measuring.returncode == 0, printed
    assert {what for _, what in lines(written_down)} == OURS


@pytest.mark.slow
def test_only_torchrun_listens_for_joining_ranks_and_nothing_is_unpickled(
    make_job: MakeJob, written_down: Path, tmp_path: Path
) -> None:
    (tmp_path / "job.toml").write_text(
        dump_job(make_job(parallel={"mode": "ddp"}, train={"n_steps": 5}, launch={"gpus": "cpu"}))
    )
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = str(listener.getsockname()[1])
    agent = start(
        *("-m", "torch.distributed.run", "--nnodes", "1", "--nproc-per-node", "2", "--rdzv-backend", "static"),
        *("--master-addr", "127.0.0.1", "--master-port", port),
        *("-m", "trainer", "join", str(tmp_path / "job.toml"), "--out", str(tmp_path / "run")),
    )
    printed, _ = agent.communicate(timeout=120)
    assert agent.returncode == 0, printed
    of_torchrun = {what for pid, what in lines(written_down) if pid == agent.pid}
    assert of_torchrun == {f"bind inet :: {port}", f"listen inet :: {port}"}
    assert {what for pid, what in lines(written_down) if pid != agent.pid} == OURS
