"""Tests for findings about other users' access to a data folder."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from sae_tui.doctor.base import CheckedMachine, Finding
from sae_tui.doctor.examine import CHECKS, examine
from sae_tui.doctor.trust import check_hook, check_links, check_owner, check_readers
from trainer.contract.paths import DataDir, open_private

OTHER_USER = 61_003
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")


@pytest.fixture
def box(sandbox) -> Iterator[CheckedMachine]:
    """Yield a machine whose data folder contains a run and is inside a folder that all users can enter."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        sandbox.data = DataDir(Path(folder) / "data")
        sandbox.data.create()
        sandbox.data.run(7).create()
        os.close(open_private(sandbox.data.run(7).job_file, os.O_WRONLY))
        yield sandbox.box()


def of_trust(box: CheckedMachine) -> list[Finding]:
    """Return the findings of the first four checks, which all concern other users' access."""
    return list(examine(box, CHECKS[:4]))


def may_read(file: Path) -> bool:
    """Return whether a user who shares no group with this user can read a file."""
    reader = subprocess.run(["cat", str(file)], user=OTHER_USER, group=OTHER_USER, extra_groups=[], capture_output=True)
    return reader.returncode == 0


def test_a_new_data_folder_is_private_and_a_missing_folder_produces_no_finding(box: CheckedMachine) -> None:
    assert [(finding.level, finding.subject) for finding in of_trust(box)] == [("ok", "owner"), ("ok", "readers")]
    # A file's mode does not matter if other users cannot enter one of its parent folders.
    box.data.run(7).job_file.chmod(0o644)
    assert [finding.level for finding in of_trust(box)] == ["ok", "ok"]
    assert of_trust(CheckedMachine(DataDir(box.data.root / "none"), box._source)) == []


def test_readable_files_in_a_private_folder_are_not_reported(box: CheckedMachine) -> None:
    for path in (box.data.root, box.data.root / "runs", box.data.run(7).root):
        path.chmod(0o755)
    box.data.run(7).job_file.chmod(0o644)
    assert [finding.level for finding in check_readers(box)] == ["warning"]
    box.data.root.parent.chmod(0o700)
    assert [finding.level for finding in check_readers(box)] == ["ok"]


@as_root
def test_readable_files_are_reported_until_the_remedy_is_applied(box: CheckedMachine) -> None:
    root, file = box.data.root, box.data.run(7).job_file
    for path in (root, root / "runs", file.parent):
        path.chmod(0o755)
    assert not may_read(file)
    assert [finding.level for finding in check_readers(box)] == ["ok"]
    file.chmod(0o644)
    assert may_read(file)
    (finding,) = check_readers(box)
    assert (finding.level, finding.sentence) == (
        "warning",
        f"1 file in {root} is open to group and others, such as runs/7/job.toml",
    )
    subprocess.run(finding.remedy.strip("`").split(), check=True)
    assert not may_read(file)
    assert [finding.level for finding in check_readers(box)] == ["ok"]


def test_a_folder_deliberately_shared_with_a_group_is_a_note(box: CheckedMachine) -> None:
    root, file = box.data.root, box.data.run(7).job_file
    for path in (root, root / "runs", file.parent):
        path.chmod(0o2770)
    file.chmod(0o660)
    assert [finding.level for finding in check_readers(box)] == ["ok"]
    (finding,) = check_owner(box)
    assert finding.level == "note"
    assert finding.sentence.startswith(f"{root} is shared with group ")
    assert f"`chmod 700 {root}`" in finding.remedy
    for path in (root, root / "runs", file.parent, file):
        path.chmod(0o2775)
    (finding,) = check_readers(box)
    assert (finding.level, finding.remedy) == ("warning", f"`chmod -R o= {root}`")


@as_root
def test_a_folder_owned_by_another_user_or_writable_by_everyone_is_an_error(box: CheckedMachine) -> None:
    root = box.data.root
    root.chmod(0o777)
    (finding,) = check_owner(box)
    assert (finding.level, finding.sentence, finding.remedy) == (
        "error",
        f"any user may write to {root}",
        "`chmod o-w` it",
    )
    root.chmod(0o700)
    os.chown(root, OTHER_USER, OTHER_USER)
    (finding,) = check_owner(box)
    assert finding.level == "error"
    assert finding.sentence == f"{root} belongs to uid {OTHER_USER} and is shared with no group"


@pytest.mark.parametrize("place", ["trash", "runs", "runs/7/checkpoints"])
def test_a_link_in_place_of_a_data_folder_is_an_error(box: CheckedMachine, place: str) -> None:
    folder = box.data.root / place
    if folder.exists():
        folder.rename(folder.with_name("moved"))
    folder.symlink_to("/tmp")
    (finding,) = check_links(box)
    sentence = f"{folder} is a symbolic link, and symbolic links are not followed"
    assert (finding.level, finding.sentence) == ("error", sentence)
    assert finding.remedy.startswith("remove it")


@as_root
def test_an_untrusted_on_job_end_command_is_reported_with_the_reason(box: CheckedMachine) -> None:
    file = box.data.settings_file
    file.write_text('on_job_end = ["id"]\n')
    file.chmod(0o600)
    assert list(check_hook(box)) == []
    file.chmod(0o660)
    (finding,) = check_hook(box)
    assert (finding.level, finding.subject) == ("warning", "on_job_end")
    assert (finding.sentence, finding.remedy) == (
        f"will not be run, because others may write to {file}",
        "`chmod go-w` it",
    )
    os.chown(file, OTHER_USER, OTHER_USER)
    (finding,) = check_hook(box)
    assert finding.sentence == f"will not be run, because {file} belongs to uid {OTHER_USER}"
    assert finding.remedy == f"write it to a {file} that you own"
