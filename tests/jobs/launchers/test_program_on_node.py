from __future__ import annotations

from pathlib import Path

import pytest

from sae_tui.jobs.launchers.program_on_node import gpus_given, main, with_variables_of_node
from sae_tui.jobs.launchers.sbatch import program_script, submission
from sae_tui.jobs.launchers.slurm_program import submitted
from sae_tui.jobs.program_environment import ProgramEnvironment
from trainer.contract.runs.rank_spec import RankSpec
from trainer.contract.settings.job_file import any_job_of


def test_slurm_gets_only_the_variables_that_python_and_sbatch_need() -> None:
    kept = {"PATH": "/bin", "PYTHONPATH": "/p", "SLURM_CONF": "/c", "SBATCH_QOS": "high"}
    assert submitted(kept | {"TOKEN": "x", "TMPDIR": "/tmp/of-this-host", "CUDA_VISIBLE_DEVICES": "3"}) == kept


def test_node_and_slurm_variables_come_from_the_node_rather_than_from_the_shell() -> None:
    shell = {b"TOKEN": b"x", b"PATH": b"/mine", b"TMPDIR": b"/here", b"SLURM_JOB_ID": b"1", b"SLURM_NTASKS": b"9"}
    node = {b"PATH": b"/usr/bin", b"TMPDIR": b"/scratch", b"SLURM_JOB_ID": b"2", b"CUDA_VISIBLE_DEVICES": b"0"}
    stored = with_variables_of_node(ProgramEnvironment([*shell.items()], {}, 0o22), node)
    assert dict(stored.variables) == {
        b"TOKEN": b"x",
        b"PATH": b"/mine",
        b"TMPDIR": b"/scratch",
        b"SLURM_JOB_ID": b"2",
        b"CUDA_VISIBLE_DEVICES": b"0",
    }


@pytest.mark.parametrize(
    ("environ", "given"),
    [
        ({}, ("", ())),
        ({"CUDA_VISIBLE_DEVICES": ""}, ("", ())),
        ({"CUDA_VISIBLE_DEVICES": "0,1", "ROCR_VISIBLE_DEVICES": "0,1"}, ("nvml", ("0", "1"))),
        ({"CUDA_VISIBLE_DEVICES": "MIG-a, MIG-b"}, ("nvml", ("MIG-a", "MIG-b"))),
        ({"ROCR_VISIBLE_DEVICES": "3"}, ("amdsmi", ("3",))),
    ],
)
def test_a_programs_gpus_are_the_ones_that_slurm_made_visible(environ, given) -> None:
    assert gpus_given(environ) == given


def test_a_program_gets_one_task_with_one_core_per_gpu_and_time_for_its_grace_period(tmp_path: Path) -> None:
    table = {"kind": "command", "command": {"argv": ["a b", "$(c)"]}, "launch": {"backend": "slurm", "gpus": "auto:2"}}
    job = any_job_of(table)
    spec = RankSpec(tmp_path, tmp_path, attempt=1, world_size=2, device="cuda", as_one_process=True)
    argv = submission(spec, job.launch, "job", tmp_path / "log", tmp_path / "job.sbatch", 61.5)
    wanted = {"--ntasks-per-node=1", "--cpus-per-task=2", "--gpus-per-node=2", "--signal=B:USR1@62"}
    assert wanted <= set(argv)
    assert submission(spec, job.launch, "job", tmp_path / "log", tmp_path / "x", 1e9)[-2].endswith("@65535")
    assert program_script(spec, ["run", "it's"]).splitlines()[-1] == """exec run 'it'"'"'s'"""


def test_a_node_that_cannot_see_the_run_folder_says_how_to_fix_it(tmp_path: Path, capsys) -> None:
    assert main([str(tmp_path / "ranks.json")]) == 1
    said = capsys.readouterr().err
    assert said.rstrip().endswith("put the data folder (--data-dir) on a file system that all nodes share")
