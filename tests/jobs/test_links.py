"""Tests that symbolic links are never followed if another group member puts them in place of files or folders."""

from __future__ import annotations

import os
import shutil
import stat
import sys
from pathlib import Path

import pytest
from jobs.test_users import ANN, BOB, GROUP, User, place  # noqa: F401

from sae_tui.cli import main as sae_tui_main
from sae_tui.gpu.history import Recorder
from sae_tui.gpu.sampler import Sampler
from sae_tui.gpu.simulated import Simulated
from sae_tui.jobs.live import LiveRun
from sae_tui.jobs.upkeep import trash
from sae_tui.jobs.upkeep.repair import repair
from sae_tui.jobs.view.reader import JobsReader
from trainer.contract import paths
from trainer.contract.errors import UserError
from trainer.contract.files import open_plain, write_own, write_whole
from trainer.contract.paths import DataDir, follow_no_link_below, keep_run, open_private, private_folder
from trainer.contract.store.database import StoreError, open_reader, open_writer
from trainer.contract.store.states import JobState
from trainer.contract.trust import open_own

KEY = "an ssh key\n"

# Writes all the files that a supervisor, a rank and the app write, using the same functions.
WRITES = """
import os, sys, time
from pathlib import Path
from sae_tui.compare.export import write_new
from trainer.contract.locks import FileLock
from sae_tui.jobs import detach
from sae_tui.jobs.ending import JobEnding, write_ending
from sae_tui.jobs.record import write_record
from sae_tui.settings import Settings, save_settings
from trainer.contract.planning.hardware import MeasuredHardware, write_box
from trainer.contract.settings.job_file import parse_job
from trainer.contract.runs.remote_rank_status import RankMark, write_mark
from trainer.contract.paths import DataDir, open_private
from trainer.contract.errors import UserError
from trainer.contract.process import ProcessRef
from trainer.contract.runs.rank_spec import RankSpec, write_spec
from trainer.contract.store.rows import Job
from trainer.contract.store.states import JobState
from trainer.ranks.foreground import write_job
from trainer.contract.runs.lock import hold
from trainer.reporting.jsonl_file import LineFile
from trainer.ranks.rank import report

data = DataDir(Path(sys.argv[1]))
paths = data.run(1)
job, _ = parse_job({"data": {"path": "x"}})
writes = {
    "record": lambda: write_record(paths, Job(name="a", config="", user="", host="", device="", gpu_source="")),
    "ending": lambda: write_ending(paths.exit_file, JobEnding(state=JobState.FAILED, ended=1.0)),
    "box": lambda: write_box(data.box_file, MeasuredHardware()),
    "spec": lambda: write_spec(RankSpec(paths.root, data.sae(1), 1, 1, "cpu")),
    "mark": lambda: write_mark(paths.rank_mark(1, 0), RankMark("host", ProcessRef.current())),
    "job": lambda: write_job(job, paths),
    "report": lambda: report(paths.rank_exit(1, 0), ValueError("no")),
    "picture": lambda: write_new(data.root / "a.svg", ["<svg/>"], force=True),
    "settings": lambda: save_settings(data.settings_file, Settings()),
    "rank's log": lambda: os.write(open_private(paths.log(0), os.O_APPEND), b"line"),
    "supervisor's log": lambda: detach.start(data, 1, ["echo"]),
    "progress": lambda: LineFile(paths.progress_file(1)).write((), None, ()),
    "run's lock": lambda: hold(paths.lock_file),
    "sampler's lock": lambda: FileLock(data.locks / f"gpu-sampler-{data.host_word}.lock").acquire(),
}
print(os.getpid(), flush=True)
while not Path(sys.argv[2]).exists():
    time.sleep(0.02)
for name, write in writes.items():
    try:
        write()
        print(name)
    except (OSError, UserError) as error:
        print(name, "refused:", error)
"""


@pytest.fixture
def shared(place: Path) -> Path:  # noqa: F811
    """Create a data folder that belongs to Ann and is shared with a group.

    The folder contains a started run.
    """
    folder = place / "shared"
    for made in ("", "locks", "runs", "runs/1", "runs/1/logs", "runs/1/attempt1", "saes"):
        (folder / made).mkdir()
        os.chown(folder / made, ANN, GROUP)
        (folder / made).chmod(0o2770)
    return folder


@pytest.fixture
def ann(place: Path, shared: Path) -> User:  # noqa: F811
    return User(ANN, shared, place / "ann")


@pytest.fixture
def key(ann: User) -> Path:
    """Create a file that only its owner, Ann, may read or write."""
    file = ann.home / "key"
    file.write_text(KEY)
    os.chown(file, ANN, GROUP)
    file.chmod(0o600)
    return file


def as_member(link: Path, target: Path) -> None:
    """Create a link as another member of the group."""
    if child := os.fork():
        assert os.waitpid(child, 0)[1] == 0
        return
    try:
        os.setgroups([])
        os.setgid(GROUP)
        os.setuid(BOB)
        os.symlink(target, link)
        os._exit(0)
    finally:
        os._exit(1)


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as two other users")


@needs_root
def test_no_link_created_by_another_member_redirects_a_write_to_a_private_file(
    ann: User, shared: Path, key: Path
) -> None:
    run, attempt, logs = shared / "runs" / "1", shared / "runs" / "1" / "attempt1", shared / "runs" / "1" / "logs"
    with ann.start([sys.executable, "-c", WRITES, str(shared), str(shared.parent / "planted")]) as process:
        pid = int(process.stdout.readline())
        temporaries = [
            run / f".record.json.{pid}", run / f".exit.json.{pid}", run / "job.new",
            shared / f".{DataDir(shared).box_file.name}.{pid}",
            shared / f".a.svg.{pid}", shared / f".settings.toml.{pid}", attempt / ".ranks.json", attempt / "rank0.new",
        ]  # fmt: skip
        # Put links in place of files that are replaced when they are written, and of files that lines are appended to.
        in_place = [run / "record.json", run / "job.toml", attempt / "rank0.exit.json", shared / "a.svg"]
        appended = [
            logs / "rank0.log", logs / "supervisor.log", attempt / "progress.jsonl", run / "run.lock",
            shared / "locks" / f"gpu-sampler-{DataDir(shared).host_word}.lock",
        ]  # fmt: skip
        for link in (*temporaries, *in_place, *appended):
            as_member(link, key)
        (shared.parent / "planted").touch()
        output, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    assert (key.read_text(), stat.S_IMODE(key.stat().st_mode)) == (KEY, 0o600)
    lines = output.splitlines()
    assert len(lines) == 14
    refused = [line.partition(" refused: ")[0] for line in lines if " refused: " in line]
    assert refused == ["rank's log", "supervisor's log", "progress", "sampler's lock"], output
    assert "supervisor.log is a symbolic link, and symbolic links are not followed; remove it" in output
    assert all(link.is_symlink() for link in (*temporaries, *appended))
    written = {link: link.lstat().st_mode for link in in_place}
    assert {stat.S_ISREG(mode) for mode in written.values()} == {True}
    assert stat.S_IMODE(written[run / "record.json"]) == 0o660
    assert stat.S_IMODE(written[shared / "a.svg"]) == 0o600


@needs_root
def test_a_trash_folder_that_is_a_link_to_private_runs_is_never_emptied(ann: User, shared: Path) -> None:
    private = ann.home / "runs" / "7"
    private.mkdir(parents=True)
    (private / "job.toml").write_text("mine")
    for path in (private.parent, private, private / "job.toml"):
        os.chown(path, ANN, GROUP)
    as_member(shared / "trash", private.parent)
    done = ann.run("repair")
    assert done.returncode == 1
    assert f"{shared / 'trash'} is a symbolic link, and symbolic links are not followed; remove it" in done.stderr
    assert "Traceback" not in done.stderr
    assert (private / "job.toml").read_text() == "mine"


def link_to_another(folder: Path, tmp_path: Path) -> Path:
    """Replace a folder with a link to another folder, which contains private files; return that other folder."""
    elsewhere = tmp_path / "elsewhere"
    (elsewhere / "step-00000001").mkdir(parents=True)
    (elsewhere / "thesis.tex").write_text("mine")
    if folder.exists():
        folder.rename(folder.with_name(f"{folder.name}-before"))
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.symlink_to(elsewhere)
    return elsewhere


@pytest.mark.parametrize("name", ["runs", "saes", "trash", "locks"])
def test_a_linked_subfolder_of_the_data_folder_is_rejected_in_one_sentence(box, tmp_path: Path, name: str) -> None:
    elsewhere = link_to_another(box.data.root / name, tmp_path)
    remedy = "make the data folder itself a link to keep everything on another disk"
    sentence = rf"data/{name} is a symbolic link, and symbolic links are not followed; remove it, or {remedy}$"
    for action in (
        lambda: box.launch("steps=1"),
        lambda: list(repair(box.data)),
        lambda: trash.throw_away(box.data, 1),
    ):
        with pytest.raises(UserError, match=sentence):
            action()
    assert {entry.name for entry in elsewhere.iterdir()} == {"step-00000001", "thesis.tex"}


@pytest.mark.parametrize("name", ["runs/1", "saes/1", "runs/1/checkpoints", "runs/1/logs", "runs/1/attempt2"])
def test_a_jobs_linked_folder_is_rejected_in_one_sentence(box, tmp_path: Path, name: str) -> None:
    assert box.record(state=JobState.STOPPED, name="steps=10") == 1
    box.data.run(1).create()
    elsewhere = link_to_another(box.data.root / name, tmp_path)
    for action in (lambda: box.resume(1), lambda: trash.throw_away(box.data, 1)):
        refusal = rf"data/{name} is a symbolic link, and symbolic links are not followed; remove it"
        with pytest.raises(UserError, match=refusal):
            action()
    assert box.job(1).state == JobState.STOPPED
    assert {entry.name for entry in elsewhere.iterdir()} == {"step-00000001", "thesis.tex"}


PLACES = ["runs", "runs/1", "runs/1/logs", "runs/1/attempt1", "runs/1/checkpoints", "runs/1/checkpoints/step-00000010",
          "saes", "saes/1", "saes/1/k=2", "evaluations", "locks"]  # fmt: skip
COMMANDS = ["note 1 hey", "rename 1 new", "tag 1 x", "priority 1 3", "hold 1", "release 1", "after 1 2", "stop 1",
            "pause 1", "resume 1", "job 1", "logs 1", "logs 1 --evaluation", "features 1", "clone 1 --print",
            "export 1 --out ex", "compare 1 1", "eval 1", "rm 1 --yes", "stream --log 1"]  # fmt: skip


def as_it_is(folder: Path) -> dict[Path, tuple[int, ...]]:
    return {each: (status.st_mode, status.st_size, status.st_mtime_ns) for each in folder.rglob("*")
            for status in [each.lstat()]}  # fmt: skip


@pytest.mark.parametrize("where", PLACES)
def test_no_command_reads_or_writes_through_a_symbolic_link(
    box, tmp_path: Path, monkeypatch, capsys, where: str
) -> None:
    assert box.record(state=JobState.STOPPED, name="steps=10") == 1
    box.data.run(1).create()
    for made in PLACES:
        (box.data.root / made).mkdir(parents=True, exist_ok=True)
    for file in (
        "logs/rank0.log",
        "logs/evaluation.log",
        "record.json",
        "job.toml",
        "checkpoints/step-00000010/m.json",
    ):
        (box.data.run(1).root / file).write_text("private\n")
    (box.data.sae(1) / "cfg.json").write_text("private")
    private = tmp_path / "private"
    shutil.copytree(box.data.root, private, ignore=shutil.ignore_patterns("*.db*"))
    shutil.rmtree(box.data.root / where)
    (box.data.root / where).symlink_to(private / where)
    monkeypatch.chdir(tmp_path)
    before = as_it_is(private)
    for command in COMMANDS:
        assert sae_tui_main([*command.split(), "--data-dir", str(box.data.root)]) == 1, command
        out, err = capsys.readouterr()
        assert f"{where} is a symbolic link, and symbolic links are not followed; remove it" in err, command
        assert "private\n" not in out
    for command in ("jobs", "repair"):
        sae_tui_main([*command.split(), "--data-dir", str(box.data.root)])
        assert "private\n" not in capsys.readouterr().out, command
    assert as_it_is(private) == before
    assert box.job(1).name == "steps=10"


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_opening_a_file_under_a_data_folder_follows_no_links(tmp_path: Path, depth: int) -> None:
    data, private = DataDir(tmp_path / "data"), tmp_path / "private"
    below = ["runs", "1", "logs", "x"]
    (private / "/".join(below[depth:-1])).mkdir(parents=True)
    (private / "/".join(below[depth:])).write_text("private")
    link = data.root / "/".join(below[:depth])
    link.parent.mkdir(parents=True)
    link.symlink_to(private)
    file = data.root / "/".join(below)
    before = as_it_is(private)
    for use in (
        lambda: open_plain(file), lambda: open_own(file), lambda: open_private(file, os.O_TRUNC),
        lambda: write_whole(file, b"x"), lambda: write_own(file, b"x"), lambda: open_plain(file.parent / "../logs/x"),
        lambda: private_folder(file.parent / "made"), lambda: open_writer(file.parent / "new.db", "metrics"),
    ):  # fmt: skip
        refusal = "is a symbolic link, and symbolic links are not followed; remove it"
        with pytest.raises((OSError, UserError), match=refusal):
            use()
    assert as_it_is(private) == before
    # Files outside a data folder can be opened, even through a data folder that is itself a link.
    assert open_plain(private / "/".join(below[depth:])).read() == b"private"
    (tmp_path / "again").symlink_to(private)
    follow_no_link_below(tmp_path / "again")
    assert open_plain(tmp_path / "again" / "/".join(below[depth:])).read() == b"private"


@pytest.mark.parametrize(("files", "path", "is_kept"), [
    (("job.toml",), "job.toml", False),
    (("job.toml",), "jobs/wide.toml", False),
    (("job.toml",), "runs", False),
    (("job.toml",), "checkpoints/wide", False),
    (("control.db", "job.toml"), "runs/wide/job.toml", False),
    (("job.toml",), ".", True),
    (("job.toml", "run.lock"), "attempt1/ranks.json", True),
    (("job.toml", "run.lock"), "checkpoints/step-00000001", True),
    (("control.db", "locks", "runs/1/job.toml"), "runs/1", True),
    (("control.db", "locks", "runs/1/checkpoints/job.toml"), "runs/1/checkpoints", True),
])  # fmt: skip
def test_links_next_to_a_job_file_are_followed_but_links_in_a_run_are_not(
    tmp_path, monkeypatch, files, path, is_kept
) -> None:
    monkeypatch.setattr(paths, "_KEPT", set())
    (tmp_path / "scratch").mkdir()
    (tmp_path / "scratch" / "acts").write_text("rows")
    folder = tmp_path / "folder"
    for file in files:
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).touch()
    (folder / "link").symlink_to(tmp_path / "scratch")
    keep_run(folder / path)
    if is_kept:
        with pytest.raises(OSError, match="is a symbolic link, and symbolic links are not followed"):
            open_plain(folder / "link" / "acts")
    else:
        assert open_plain(folder / "link" / "acts").read() == b"rows"


def in_place_of(store: Path, kind: str, elsewhere: Path) -> None:
    """Replace a store with a link to a private file, with a pipe or with a folder."""
    store.unlink(missing_ok=True)
    if kind == "link":
        store.symlink_to(elsewhere)
    elif kind == "pipe":
        os.mkfifo(store)
    else:
        store.mkdir()


@pytest.mark.parametrize("kind", ["link", "pipe", "folder"])
def test_a_store_that_is_not_a_plain_file_is_rejected_in_one_sentence(box, tmp_path: Path, kind: str) -> None:
    job_id = box.record(state=JobState.RUNNING, name="steps=10")
    run = box.data.run(job_id)
    run.create()
    box.control.close()
    private = tmp_path / "key"
    private.write_text(KEY)
    refused_link = "a symbolic link, and symbolic links are not followed"
    what = refused_link if kind == "link" else "not a plain file or has other hard links"
    for store, schema in ((box.data.gpu_db, "gpu"), (run.metrics_db, "metrics"), (box.data.control_db, "control")):
        for suffix in ("-wal", ""):
            file = Path(f"{store}{suffix}")
            in_place_of(file, kind, private)
            for opening in (open_writer, open_reader):
                with pytest.raises(StoreError, match=rf"{file.name} is {what}; rem"):
                    opening(store, schema)
            if suffix:
                file.rmdir() if kind == "folder" else file.unlink()
    assert not LiveRun(run).poll()
    jobs = JobsReader(box.data)
    assert not jobs.poll()
    assert jobs.problem == f"the store {box.data.control_db} is {what}; remove it"
    recorder = Recorder(Sampler(Simulated(1), 1.0), box.data)
    recorder._turn()
    recorder._lock.release()
    assert recorder.problem == f"the store {box.data.gpu_db} is {what}; remove it"
    for action in (
        lambda: box.launch("steps=1"),
        lambda: list(repair(box.data)),
        lambda: trash.throw_away(box.data, 1),
    ):
        with pytest.raises(UserError, match=rf"control.db is {what}; remove it$"):
            action()
    assert private.read_text() == KEY
    box.data.control_db.rmdir() if kind == "folder" else box.data.control_db.unlink()


def test_the_data_folder_itself_may_be_a_link(box, tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir(mode=0o700)
    box.data.root.symlink_to(tmp_path / "disk")
    assert box.wait_ended(box.launch("steps=1")).state == JobState.FINISHED
    assert (tmp_path / "disk" / "runs" / "1" / "job.toml").exists()


def test_only_plain_files_are_opened_for_writing(tmp_path: Path) -> None:
    pipe, twice = tmp_path / "pipe.log", tmp_path / "shared" / "rank0.log"
    os.mkfifo(pipe)
    with pytest.raises(OSError, match="No such device or address"):
        open_private(pipe, os.O_APPEND)
    # If other users may create hard links, a hard link to a file is as dangerous as a symbolic link.
    twice.parent.mkdir()
    (tmp_path / "key").write_text(KEY)
    os.link(tmp_path / "key", twice)
    twice.parent.chmod(0o2770)
    with pytest.raises(OSError, match="is not a plain file or has other hard links; remove it"):
        open_private(twice, os.O_TRUNC)
    assert (tmp_path / "key").read_text() == KEY
