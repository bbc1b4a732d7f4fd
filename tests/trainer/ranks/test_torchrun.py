"""Tests for ranks started by torchrun, with two agents on the loopback interface acting as two hosts."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from support.hanging_ranks import HANGING
from support.workloads import stream_of_model

from trainer.cli import main
from trainer.contract.paths import DataDir, RunPaths
from trainer.contract.planning.hardware import CPU, read_box
from trainer.contract.runs.checkpoint_manifest import newest_whole, position_of
from trainer.contract.runs.rank_spec import EXIT_FINISHED, EXIT_USAGE, RankSpec, write_spec
from trainer.contract.settings.job import JobConfig
from trainer.contract.settings.job_file import dump_job, parse_job
from trainer.contract.store.metrics_store import SeriesReader
from trainer.ranks import torchrun
from trainer.ranks.staging import LATER, SENTENCE

MakeJob = Callable[..., JobConfig]


def on_two_hosts(
    job_file: Path, out: Path, *overrides: str, module: str = "trainer", shares_store: bool = True, **variables: str
) -> list[str]:
    """Run both torchrun agents until they exit, and return their outputs.

    With `shares_store`, the first agent hosts the store that the ranks use to find each other; otherwise, rank 0 hosts
    it.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    static = ("--rdzv-backend", "static", "--master-addr", "127.0.0.1", "--master-port", str(port))
    dynamic = ("--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--local-addr", "127.0.0.1")
    agents = []
    for node in range(2):
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--node-rank", str(node)),
            *("--nproc-per-node", "1", *(static if shares_store else dynamic)),
            *("-m", module, "join", str(job_file), "--out", str(out)),
            *(part for override in overrides for part in ("--set", override)),
        ]
        environment = os.environ | {
            "GLOO_SOCKET_IFNAME": "lo",
            "PYTHONPATH": os.pathsep.join(map(str, (Path(__file__).parents[3], Path(__file__).parents[2]))),
            "SAE_TUI_DATA_DIR": str(out.parent / "data"),
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "0" if shares_store else "1",
        }
        agents.append(
            subprocess.Popen(
                command, env=environment | variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )
        )
    try:
        printed = [agent.communicate(timeout=150)[0] for agent in agents]
    finally:
        for agent in agents:
            agent.kill()
    assert [agent.returncode for agent in agents] == [EXIT_FINISHED] * 2, "\n".join(printed)
    return printed


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("hanging", "shares_store"), [("1", True), ("0", False)])
def test_torchrun_ranks_restart_together_if_their_first_exchange_hangs(
    hanging: str, shares_store: bool, make_job: MakeJob, tmp_path: Path
) -> None:
    job = make_job(train={"n_steps": 3}, parallel={"mode": "ddp"}, launch={"gpus": "cpu"})
    job_file, out = tmp_path / "job.toml", tmp_path / "shared"
    job_file.write_text(dump_job(job))
    variables = {HANGING: hanging, "OMP_NUM_THREADS": "1"}
    on_two_hosts(job_file, out, module="support.hanging_ranks", shares_store=shares_store, **variables)
    with contextlib.closing(SeriesReader(out / "metrics.db")) as reader:
        assert [event.message for event in reader.events() if event.kind == "staged"] == [f"{SENTENCE}, {LATER}"]
        assert [point.step for point in reader.points("loss")][-1] == 3
    assert read_box(DataDir(tmp_path / "data").box_file).peers_fail


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_two_hosts_train_like_one_host_and_the_same_command_resumes_the_run(
    make_job: MakeJob, make_trainer: Callable, kept, tmp_path: Path
) -> None:
    train = {"global_batch_size": 240, "n_steps": 20}
    make_trainer(make_job(train=train), kept).run()
    job = make_job(train=train, parallel={"mode": "tensor"}, launch={"gpus": "cpu"})
    job_file, out = tmp_path / "job.toml", tmp_path / "shared"
    job_file.write_text(dump_job(job))
    first, second = on_two_hosts(job_file, out)
    assert "finished at step 20/20" in first
    assert [*read_box(DataDir(tmp_path / "data").box_file).buses] == [f"{CPU} x2"]
    assert "step 20/20" not in second
    assert "finished at step 20/20" in (out / "logs" / "rank1.log").read_text()
    with contextlib.closing(SeriesReader(out / "metrics.db")) as reader:
        assert [point.value for point in reader.points("loss")] == pytest.approx(kept.curve("loss"), rel=1e-3)
    # A stop request for an earlier attempt does not stop the next one.
    RunPaths(out).stop_file(1).touch()
    again, _ = on_two_hosts(job_file, out, "train.n_steps=30")
    assert "resumed from" in again
    assert position_of(newest_whole(out / "checkpoints")).step == 30


def test_join_without_torchrun_says_how_to_start_it(
    make_job: MakeJob, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    (tmp_path / "job.toml").write_text(dump_job(make_job()))
    assert main(["join", str(tmp_path / "job.toml"), "--out", str(tmp_path / "run")]) == EXIT_USAGE
    assert "RANK is not set; start this command with torchrun" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_join_refuses_the_folder_of_a_run_with_a_different_sae(
    make_job: MakeJob, make_trainer: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    make_trainer(make_job(), checkpoints=run_dir / "checkpoints").run()
    (run_dir / "job.toml").write_text(dump_job(make_job()))
    write_spec(RankSpec(run_dir=run_dir, output_dir=run_dir / "sae", attempt=1, world_size=1, device="cpu"))
    for name, value in {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "x", "MASTER_PORT": 1}.items():
        monkeypatch.setenv(name, str(value))
    (tmp_path / "job.toml").write_text(dump_job(make_job(sae={"d_sae": 65})))
    assert main(["join", str(tmp_path / "job.toml"), "--out", str(run_dir)]) == EXIT_USAGE
    assert "sae: [sae] differs from the run in" in capsys.readouterr().err


def test_model_only_gpus_are_refused_under_torchrun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    for name, value in {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 4, "MASTER_ADDR": "x", "MASTER_PORT": 1}.items():
        monkeypatch.setenv(name, str(value))
    data = stream_of_model(tmp_path)
    table = {"data": data | {"model_gpus": 2}, "train": {"n_steps": 9}, "launch": {"gpus": "auto:4"}}
    job, problems = parse_job(table)
    assert job, problems
    (tmp_path / "job.toml").write_text(dump_job(job))
    assert main(["join", str(tmp_path / "job.toml"), "--out", str(tmp_path / "run")]) == EXIT_USAGE
    assert capsys.readouterr().err.startswith("data.model_gpus: torchrun starts a rank for each GPU, so no GPU can be")
    assert not (tmp_path / "run").exists()


def test_variables_that_pytorch_reads_only_once_are_set_before_it_is_loaded(
    make_job: MakeJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Loaded(Exception):
        """Raised when the code would import torch."""

    def load() -> None:
        raise Loaded

    names = "RANK LOCAL_RANK WORLD_SIZE MASTER_ADDR MASTER_PORT LOCAL_WORLD_SIZE"
    monkeypatch.setattr(os, "environ", dict.fromkeys(names.split(), "1"))
    monkeypatch.setattr(torchrun, "load_trainer", load)
    with pytest.raises(Loaded):
        torchrun.join(make_job(), tmp_path / "run")
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert os.environ["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"
