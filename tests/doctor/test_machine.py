from __future__ import annotations

import resource

import pytest


def test_a_low_open_file_limit_is_reported_with_the_command_to_raise_it(in_process) -> None:
    (finding,) = in_process("machine:check_open_files", limits={resource.RLIMIT_NOFILE: (256, 4096)})
    assert finding["level"] == "warning"
    assert "only 256 files" in finding["sentence"]
    assert finding["remedy"] == "run `ulimit -n 4096` before sae-tui"


def test_a_low_hard_limit_on_open_files_needs_the_administrator(in_process) -> None:
    (finding,) = in_process("machine:check_open_files", limits={resource.RLIMIT_NOFILE: (256, 512)})
    assert "administrator" in finding["remedy"]


def test_a_sufficient_open_file_limit_is_ok(in_process) -> None:
    (finding,) = in_process("machine:check_open_files", limits={resource.RLIMIT_NOFILE: (2048, 2048)})
    assert (finding["level"], finding["sentence"]) == ("ok", "a process may open 2,048 files")


@pytest.mark.parametrize(("infiniband", "level"), [(True, "warning"), (False, "ok")])
def test_a_low_limit_on_locked_memory_matters_only_with_infiniband(
    in_process, sandbox, infiniband: bool, level: str
) -> None:
    if infiniband:
        sandbox.file("sys/class/infiniband/mlx5_0/node_type")
    limits = {resource.RLIMIT_MEMLOCK: (65536, 65536)}
    (finding,) = in_process("machine:check_locked_memory", limits=limits, root=sandbox.root)
    assert finding["level"] == level
    assert "0.1 MiB" in finding["sentence"] or "0 MiB" in finding["sentence"]


def test_small_shared_memory_is_a_warning(in_process, sandbox, mounts) -> None:
    shm = sandbox.root / "dev/shm"
    shm.mkdir(parents=True)
    mount = f"mount -t tmpfs -o size=64m none {shm}"
    (finding,) = in_process("machine:check_shared_memory", root=sandbox.root, mount=mount)
    assert finding["level"] == "warning"
    assert "64 MiB free of 64 MiB" in finding["sentence"]
    assert "--shm-size" in finding["remedy"]


def test_for_full_shared_memory_the_remedy_lists_the_files_in_it(in_process, sandbox, mounts) -> None:
    shm = sandbox.root / "dev/shm"
    shm.mkdir(parents=True)
    mount = f"mount -t tmpfs -o size=1100m none {shm} && fallocate -l 200m {shm}/left-behind"
    (finding,) = in_process("machine:check_shared_memory", root=sandbox.root, mount=mount)
    assert finding["level"] == "warning"
    assert "ls -l /dev/shm" in finding["remedy"]


def test_missing_shared_memory_is_an_error(in_process, sandbox) -> None:
    (finding,) = in_process("machine:check_shared_memory", root=sandbox.root)
    assert finding["level"] == "error"
