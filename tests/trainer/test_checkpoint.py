from __future__ import annotations

import os
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from trainer.checkpoint import Checkpoints, Position, load
from trainer.contract.problems import UserError
from trainer.optim import adam
from trainer.saes.topk import TopK


def make_sae(d_sae: int = 24, seed: int = 0) -> tuple[TopK, torch.optim.Adam]:
    """An SAE after one step of Adam."""
    torch.manual_seed(seed)
    sae = TopK(8, d_sae, k=2, k_aux=None, auxk_alpha=0.0, dead_after_tokens=10)
    torch.nn.init.normal_(sae.W_enc)
    torch.nn.init.normal_(sae.W_dec)
    optimizer = adam(sae.parameters(), 1e-3)
    sae.objective(sae(torch.randn(30, 8)).losses).backward()
    optimizer.step()
    return sae, optimizer


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    return Checkpoints(tmp_path / "c").save(*make_sae(), Position(7, 210))


def test_what_is_loaded_is_what_was_saved(saved: Path) -> None:
    sae, optimizer = make_sae()
    expected = torch.rand(1)  # the next number of the generator as it was when saved
    other, other_optimizer = make_sae(seed=1)
    assert load(saved, other, other_optimizer) == Position(7, 210)
    assert torch.equal(torch.rand(1), expected)
    for name, tensor in sae.state_dict().items():
        assert torch.equal(tensor, other.state_dict()[name])
    for mine, theirs in zip(sae.parameters(), other.parameters(), strict=True):
        for kind, value in optimizer.state[mine].items():
            assert torch.equal(value, other_optimizer.state[theirs][kind])


def test_only_the_owner_can_read_a_checkpoint(saved: Path) -> None:
    assert stat.S_IMODE(saved.stat().st_mode) == 0o700
    assert {stat.S_IMODE(file.stat().st_mode) for file in saved.iterdir()} == {0o600}
    assert {file.suffix for file in saved.iterdir()} == {".safetensors", ".json"}


def test_the_newest_two_are_kept(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "c")
    for step in (1, 2, 3, 10):
        checkpoints.save(*make_sae(), Position(step, step))
    assert [folder.name for folder in sorted((tmp_path / "c").iterdir())] == ["step-00000003", "step-00000010"]


def flip_a_byte(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def cut_short(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 1)


@pytest.mark.parametrize("harm", [flip_a_byte, cut_short, Path.unlink])
@pytest.mark.parametrize("name", ["weights.safetensors", "optimizer.safetensors", "state.json"])
def test_a_damaged_checkpoint_is_refused_and_passed_over(
    harm: Callable[[Path], None], name: str, saved: Path, tmp_path: Path
) -> None:
    newer = Checkpoints(tmp_path / "c").save(*make_sae(), Position(9, 270))
    harm(newer / name)
    with pytest.raises(UserError, match=f"step-00000009 cannot be used: .*{name}"):
        load(newer, *make_sae())
    assert load(tmp_path / "c", *make_sae()) == Position(7, 210)


def test_a_folder_without_a_manifest_is_no_checkpoint(saved: Path, tmp_path: Path) -> None:
    (saved / "manifest.json").unlink()
    for path in (saved, saved.parent, tmp_path / "nowhere"):
        with pytest.raises(UserError, match=r"manifest\.json .* cannot be read .*; resume from another one"):
            load(path, *make_sae())


def test_a_checkpoint_of_another_width_is_refused(saved: Path) -> None:
    with pytest.raises(UserError, match="does not fit this job's SAE"):
        load(saved, *make_sae(d_sae=32))


def test_a_save_that_was_cut_off_leaves_no_trace_after_the_next(saved: Path, tmp_path: Path) -> None:
    leftover = tmp_path / "c" / ".step-00000009.new"
    leftover.mkdir()
    (leftover / "weights.safetensors").write_bytes(b"half")
    Checkpoints(tmp_path / "c").save(*make_sae(), Position(9, 270))
    assert not leftover.exists()


SAVE_TWICE = """
import resource, sys
from pathlib import Path
import torch
from trainer.checkpoint import Checkpoints, Position, damage
from trainer.contract.problems import UserError
from trainer.optim import adam
from trainer.saes.topk import TopK

folder, limit = Path(sys.argv[1]), int(sys.argv[2])
checkpoints = Checkpoints(folder)
small, large = (TopK(64, width, k=2, k_aux=None, auxk_alpha=0.0, dead_after_tokens=1) for width in (256, 8192))
first = checkpoints.save(small, adam(small.parameters(), 1e-3), Position(1, 1))
if limit:
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
try:
    checkpoints.save(large, adam(large.parameters(), 1e-3), Position(2, 2))
except UserError as error:
    print(error)
print(sorted(file.name for file in folder.iterdir()), damage(first))
"""


def save_until_full(folder: Path, limit: int) -> list[str]:
    command = [sys.executable, "-c", SAVE_TWICE, str(folder), str(limit)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def require_previous_checkpoint_only(lines: list[str], reason: str) -> None:
    sentence, left = lines
    assert "step-00000002 could not be written: " in sentence
    assert reason in sentence
    assert sentence.endswith("free some space on its disk and resume")
    assert left == "['step-00000001'] None"


def test_a_full_disk_is_one_sentence_and_the_previous_checkpoint_stays(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", disk], capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"no small disk can be mounted here: {mounted.stderr.strip()}")
    try:
        require_previous_checkpoint_only(save_until_full(disk, 0), "No space left on device")
    finally:
        subprocess.run(["umount", disk], check=True)


def test_a_limit_on_file_size_is_told_like_a_full_disk(tmp_path: Path) -> None:
    require_previous_checkpoint_only(save_until_full(tmp_path / "c", 500_000), "File too large")


def test_the_newest_is_the_one_of_the_highest_step_and_not_of_the_last_name(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "c")
    for step in (99_999_998, 99_999_999, 100_000_000):
        checkpoints.save(*make_sae(), Position(step, step))
    (tmp_path / "c" / "step-notes").mkdir()
    assert load(tmp_path / "c", *make_sae()).step == 100_000_000
    assert {folder.name for folder in (tmp_path / "c").iterdir()} == {"step-99999999", "step-100000000", "step-notes"}
