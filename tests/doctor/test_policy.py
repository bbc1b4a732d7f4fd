"""Tests for findings about the machine's policy."""

from __future__ import annotations

import pytest

from sae_tui.doctor.base import Finding
from sae_tui.doctor.policy import check_policy


def findings(sandbox) -> list[Finding]:
    return list(check_policy(sandbox.box()))


def test_without_a_policy_there_are_no_limits(sandbox):
    assert findings(sandbox) == [Finding("ok", "policy", "no policy limits the jobs on this machine")]


def test_the_policy_in_force_is_shown_with_its_file_and_owner(sandbox):
    sandbox.file("etc/sae-tui/policy.toml", 'gpus_per_user = 4\nmax_time = "1d"\nstop_idle_after = "2h"\n')
    (finding,) = findings(sandbox)
    file = sandbox.root / "etc/sae-tui/policy.toml"
    assert finding.level == "ok"
    assert finding.sentence == (
        "4 GPUs for each user, jobs of at most 24 h 00 min; jobs that leave their GPUs idle stop after 2 h 00 min"
        f" ({file}, owned by {file.owner()})"
    )


@pytest.mark.parametrize(("end", "n_gpus"), [("24:00", 8), ("00:01", 8)])
def test_the_limits_that_apply_now_come_first(sandbox, end, n_gpus):
    start = "00:00" if end == "24:00" else "00:01"
    text = f'gpus_per_user = 4\n[[hours]]\nstart = "{start}"\nend = "{end}"\ngpus_per_user = {n_gpus}\n'
    sandbox.file("etc/sae-tui/policy.toml", text)
    (finding,) = findings(sandbox)
    assert finding.sentence.startswith("now 8 GPUs for each user; usually 4 GPUs for each user; daily 00:0")


def test_a_note_says_that_group_members_can_remove_a_policy_in_a_shared_folder(sandbox):
    sandbox.data.create()
    sandbox.data.root.chmod(0o2770)
    file = sandbox.data.root / "policy.toml"
    file.write_text("gpus_per_user = 4\n")
    file.chmod(0o644)
    (finding,) = findings(sandbox)
    assert finding.level == "note"
    assert "any member of the group can remove it" in finding.remedy


def test_every_mistake_is_a_warning_with_a_remedy_and_the_other_settings_apply(sandbox):
    sandbox.file("etc/sae-tui/policy.toml", 'gpus_per_user = 4\nmax_time = "soon"\n')
    wrong, in_force = findings(sandbox)
    assert (wrong.level, in_force.level) == ("warning", "ok")
    assert wrong.sentence == 'max_time: must be a time like 90s, 10m, 2h or 1d, not "soon"; it is ignored'
    assert wrong.remedy == f"correct {sandbox.root / 'etc/sae-tui/policy.toml'}"


def test_a_policy_that_others_may_write_to_is_reported_with_the_command_that_helps(sandbox):
    sandbox.file("etc/sae-tui/policy.toml", "gpus_per_user = 4\n")
    (sandbox.root / "etc/sae-tui/policy.toml").chmod(0o666)
    (wrong,) = findings(sandbox)
    assert wrong.sentence.startswith("policy.toml is ignored, because others may write to ")
    assert wrong.remedy == "`chmod go-w` it"


def test_a_policy_that_is_not_valid_toml_is_reported(sandbox):
    sandbox.file("etc/sae-tui/policy.toml", "gpus_per_user = \n")
    (wrong,) = findings(sandbox)
    assert "is ignored, because it is not valid TOML" in wrong.sentence
    assert wrong.remedy == f"correct {sandbox.root / 'etc/sae-tui/policy.toml'}"
