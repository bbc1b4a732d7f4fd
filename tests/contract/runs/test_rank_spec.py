"""Tests for the command and the environment variables used to start a rank."""

from __future__ import annotations

import os
import stat
import subprocess
from pathlib import Path

import msgspec
import pytest

from trainer.contract.errors import UserError
from trainer.contract.planning.hardware import MeasuredHardware, write_box
from trainer.contract.runs import cuda_variables
from trainer.contract.runs.rank_spec import (
    RankSpec,
    rank_command,
    rank_environment,
    read_spec,
    srun_environment,
    threads_per_rank,
    write_spec,
)


def spec(run_dir: Path, **changes: object) -> RankSpec:
    fields = {"run_dir": run_dir, "output_dir": run_dir / "out", "attempt": 2, "world_size": 2, "device": "cpu"}
    return RankSpec(**fields | changes)  # type: ignore[arg-type]


def test_a_written_spec_is_read_back_unchanged(tmp_path: Path) -> None:
    lean = spec(tmp_path / "run")
    assert write_spec(lean) == tmp_path / "run" / "attempt2" / "ranks.json"
    assert read_spec(write_spec(lean)) == lean
    full = spec(
        tmp_path / "run ü",
        device="cuda",
        gpu_uuids=("GPU-a", "GPU-b"),
        gpu_vendor="nvml",
        control_db=tmp_path / "control.db",
        job_id=7,
        resume_from=tmp_path / "checkpoints" / "10",
    )
    assert read_spec(write_spec(full)) == full


def test_the_environment_of_a_rank_contains_its_rank_and_the_world_size(tmp_path: Path) -> None:
    environment = rank_environment(spec(tmp_path), 1, {"PATH": "/bin"})
    assert environment["PATH"] == "/bin"
    assert (environment["RANK"], environment["LOCAL_RANK"], environment["WORLD_SIZE"]) == ("1", "1", "2")


def test_a_cpu_rank_sees_no_gpu(tmp_path: Path) -> None:
    assert rank_environment(spec(tmp_path), 0, {"CUDA_VISIBLE_DEVICES": "0"})["CUDA_VISIBLE_DEVICES"] == ""


def test_gpus_are_pinned_by_uuid_in_bus_order(tmp_path: Path) -> None:
    cuda = spec(tmp_path, device="cuda", gpu_uuids=("GPU-b", "GPU-a"), gpu_vendor="nvml")
    environment = rank_environment(cuda, 0, {"CUDA_VISIBLE_DEVICES": "3", "CUDA_DEVICE_ORDER": "FASTEST_FIRST"})
    assert environment["CUDA_VISIBLE_DEVICES"] == "GPU-b,GPU-a"
    assert environment["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"


def test_each_rank_sees_only_its_own_mig_slice(tmp_path: Path) -> None:
    cuda = spec(tmp_path, device="cuda", gpu_uuids=("MIG-b", "MIG-a"), gpu_vendor="nvml")
    environments = [rank_environment(cuda, rank, {}) for rank in (0, 1)]
    assert [one["CUDA_VISIBLE_DEVICES"] for one in environments] == ["MIG-b", "MIG-a"]
    assert [(one["RANK"], one["LOCAL_RANK"]) for one in environments] == [("0", "0"), ("1", "0")]


def test_ranks_on_one_host_use_its_loopback_interface_by_default(tmp_path: Path) -> None:
    cuda = spec(tmp_path, device="cuda", gpu_uuids=("GPU-b", "GPU-a"), gpu_vendor="nvml")
    environment = rank_environment(cuda, 0, {"NCCL_SOCKET_IFNAME": "eth1"})
    assert (environment["NCCL_SOCKET_IFNAME"], environment["NCCL_IB_DISABLE"]) == ("eth1", "1")
    assert "NCCL_P2P_DISABLE" not in environment
    several = msgspec.structs.replace(cuda, on_one_host=False)
    assert not any(name.startswith("NCCL") for name in rank_environment(several, 0, {}))


def test_gpu_ranks_are_configured_for_deterministic_matmuls_when_they_start(tmp_path: Path) -> None:
    cuda = spec(tmp_path, device="cuda")
    srun = {f"SLURM_{name}": value for name, value in dict(NTASKS="2", NNODES="1", PROCID="0", LOCALID="0").items()}
    for environment_of in (lambda base: rank_environment(cuda, 0, base), lambda base: srun_environment(cuda, base)):
        assert environment_of(srun)["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
        assert environment_of(srun | {"CUBLAS_WORKSPACE_CONFIG": ":16:8"})["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"
    assert "CUBLAS_WORKSPACE_CONFIG" not in rank_environment(spec(tmp_path), 0, {})


def test_gpu_memory_segments_are_expandable_unless_the_user_configured_the_allocator(tmp_path: Path) -> None:
    cuda, names = spec(tmp_path, device="cuda"), {"PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"}
    free = rank_environment(cuda, 0, {})
    assert {free[name] for name in names} == {"expandable_segments:True"}
    for name in names:
        chosen = rank_environment(cuda, 0, {name: "backend:cudaMallocAsync"})
        assert {other: chosen[other] for other in names & chosen.keys()} == {name: "backend:cudaMallocAsync"}
    assert not names & rank_environment(spec(tmp_path), 0, {}).keys()


def test_a_rank_under_srun_keeps_the_variables_set_by_slurm(tmp_path: Path) -> None:
    srun = {"SLURM_NTASKS": "4", "SLURM_NNODES": "2", "SLURM_PROCID": "3", "SLURM_LOCALID": "1"}
    several = spec(tmp_path, world_size=4, device="cuda", on_one_host=False)
    environment = srun_environment(several, {**srun, "CUDA_VISIBLE_DEVICES": "2,3"})
    assert [environment[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE")] == ["3", "1", "4"]
    assert (environment["LOCAL_WORLD_SIZE"], environment["CUDA_VISIBLE_DEVICES"]) == ("2", "2,3")
    assert not any(name.startswith("NCCL") for name in environment)
    one_host = srun_environment(spec(tmp_path, world_size=4, device="cuda"), srun | {"SLURM_NNODES": "1"})
    assert one_host["NCCL_SOCKET_IFNAME"] == "lo"


@pytest.mark.parametrize("started", [{}, {"SLURM_NTASKS": "1", "SLURM_PROCID": "0"}])
def test_too_few_srun_processes_are_reported_before_any_rank_waits(tmp_path: Path, started: dict) -> None:
    with pytest.raises(UserError, match=r"srun has started \d processes, but the attempt has 2"):
        srun_environment(spec(tmp_path), started)


def test_gpus_whose_peer_access_fails_communicate_through_the_host(tmp_path: Path) -> None:
    box_file = tmp_path / "box.json"
    write_box(box_file, MeasuredHardware(peers_fail=True))
    cuda = spec(tmp_path, device="cuda", gpu_uuids=("GPU-b", "GPU-a"), gpu_vendor="nvml", box_file=box_file)
    assert rank_environment(cuda, 0, {})["NCCL_P2P_DISABLE"] == "1"
    assert rank_environment(cuda, 0, {"NCCL_P2P_DISABLE": "0"})["NCCL_P2P_DISABLE"] == "0"


@pytest.mark.parametrize(("base", "threads"), [({}, None), ({"OMP_NUM_THREADS": "3"}, "3")])
def test_cores_are_divided_among_ranks_unless_the_user_set_the_number_of_threads(
    tmp_path: Path, base: dict[str, str], threads: str | None
) -> None:
    expected = threads or str(threads_per_rank(2))
    assert rank_environment(spec(tmp_path), 0, base)["OMP_NUM_THREADS"] == expected


def test_every_rank_gets_at_least_one_thread() -> None:
    cores = len(os.sched_getaffinity(0))
    assert threads_per_rank(1) == cores
    assert threads_per_rank(10 * cores) == 1


def test_a_users_file_called_trainer_is_not_run_instead_of_the_trainer(tmp_path: Path) -> None:
    (tmp_path / "trainer.py").write_text("print('a stranger')")
    command = rank_command(tmp_path / "missing.json")
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert "a stranger" not in done.stdout
    assert command[-2:] == ["rank", str(tmp_path / "missing.json")]


def test_only_unset_variables_are_set_in_the_current_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {"CUBLAS_WORKSPACE_CONFIG": ":16:8"})
    cuda_variables.set_here()
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"
    assert os.environ["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"


def test_the_triton_cache_is_private_and_on_a_local_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_variables, "_LOCAL", tmp_path)
    folder = tmp_path / f"sae-tui-{os.getuid()}"

    def chosen(**base: str) -> str | None:
        return (cuda_variables.presets(base) | base).get("TRITON_CACHE_DIR")

    assert [chosen(), chosen()] == [str(folder / "triton")] * 2
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert chosen(TRITON_CACHE_DIR="/mine") == "/mine"
    folder.chmod(0o770)
    assert chosen() is None
    folder.rename(tmp_path / "elsewhere")
    folder.symlink_to(tmp_path / "elsewhere")
    assert chosen() is None
    monkeypatch.setattr(cuda_variables, "_LOCAL", tmp_path / "missing")
    assert chosen() is None
