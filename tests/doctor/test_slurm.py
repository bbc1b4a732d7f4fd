from __future__ import annotations

import time

from sae_tui.doctor.slurm import check_slurm


def test_without_slurm_the_finding_is_ok(sandbox) -> None:
    (finding,) = check_slurm(sandbox.box())
    assert finding.level == "ok"


def test_outside_an_allocation_a_note_lists_the_partitions_of_the_cluster(sandbox) -> None:
    sandbox.program("sinfo", "echo main*; echo debug")
    sandbox.program("squeue", "true")
    (finding,) = check_slurm(sandbox.box())
    assert finding.level == "note"
    assert "partitions: main*, debug" in finding.sentence
    assert "salloc" in finding.remedy


def test_an_unresponsive_cluster_is_a_warning_with_slurms_message(sandbox) -> None:
    sandbox.program("sinfo", "echo 'slurm_load_partitions: Unable to contact slurm controller' >&2; exit 1")
    sandbox.program("squeue", "true")
    (finding,) = check_slurm(sandbox.box())
    assert finding.level == "warning"
    assert "Unable to contact slurm controller" in finding.sentence


def test_an_incomplete_slurm_installation_is_a_warning(sandbox) -> None:
    sandbox.program("sinfo", "true")
    (finding,) = check_slurm(sandbox.box())
    assert (finding.level, finding.sentence.split()[0]) == ("warning", "squeue")


def test_jobs_inside_an_allocation_end_with_it(sandbox) -> None:
    end = str(int(time.time()) + 7230)
    box = sandbox.box(SLURM_JOB_ID="42", SLURM_JOB_NODELIST="gpu07", SLURM_JOB_GPUS="0,1", SLURM_JOB_END_TIME=end)
    (finding,) = check_slurm(box)
    assert finding.level == "note"
    assert finding.sentence == "inside allocation 42 on gpu07 with GPU 0,1; jobs end with it in 2 h 00 min"
