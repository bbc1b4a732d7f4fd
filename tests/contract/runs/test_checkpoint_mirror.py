"""Tests mirrors of checkpoints: what counts as complete, what is kept, and downloads from another person's mirror."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sqlite3
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from support.hub import TOKEN, Hub

from trainer.contract.errors import UsageError, UserError
from trainer.contract.json_file import write_json
from trainer.contract.object_store import ObjectStore
from trainer.contract.paths import RunPaths
from trainer.contract.runs.checkpoint_manifest import (
    FILES,
    MANIFEST,
    STATE,
    CheckpointState,
    Position,
    damage,
    manifest_of,
)
from trainer.contract.runs.checkpoint_mirror import (
    JOB,
    LIST,
    METRICS,
    SAE,
    CheckpointMirror,
    Mirrored,
    MirroredFolder,
    MirrorTaken,
    described,
    read_mirrored,
    steps_in,
)
from trainer.contract.runs.mirrored_run import fetch
from trainer.contract.runs.rank_spec import read_spec
from trainer.contract.store.metrics_store import Heartbeat, MetricRow, SeriesReader, SeriesWriter

RUN = "0123456789abcdef"
JOB_TEXT = (
    'name = "n"\n[data]\npath = "x"\n[train]\nmirror_checkpoints = "file:///elsewhere"\n[launch]\npython = "/x"\n'
)


class Mirror:
    """A mirror in a folder, and the checkpoints that are uploaded to it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.place = folder, folder / "mirror"
        self.url = f"file://{self.place}"
        self.mirror = CheckpointMirror(self.url, RUN, "n")

    def put(self, step: int, fvu: float = 0.5, keep: int = 2, job: str = JOB_TEXT) -> str:
        files = self.checkpoint(step, fvu, job)
        name = f"step-{step:08d}"
        about = MirroredFolder(RUN, step, described(files), world_size=4, device="cuda")
        return self.mirror.put(name, files, about, keep)

    def checkpoint(self, step: int, fvu: float, job: str) -> dict[str, Path]:
        folder = self.folder / f"local-{step}"
        folder.mkdir(exist_ok=True)
        for name in {*FILES} - {MANIFEST, STATE}:
            (folder / name).write_bytes(f"{name} {step}".encode())
        write_json(folder / STATE, CheckpointState(Position(step, 10 * step), fvu, held_out="rows"))
        (folder / MANIFEST).unlink(missing_ok=True)
        write_json(folder / MANIFEST, manifest_of(folder))
        (self.folder / JOB).write_text(job)
        files = {name: folder / name for name in FILES} | {JOB: self.folder / JOB}
        if not (self.folder / METRICS).exists():
            with contextlib.closing(SeriesWriter(self.folder / METRICS)) as writer:
                writer.write([MetricRow("fvu", step, fvu)], Heartbeat("training", step, 100, 1, 0.0))
        return files | {METRICS: self.folder / METRICS}

    @property
    def steps(self) -> list[str]:
        return steps_in(self.mirror.store.list())


@pytest.fixture
def mirror(tmp_path: Path) -> Mirror:
    one = Mirror(tmp_path)
    one.mirror.claim()
    return one


def test_the_latest_checkpoints_and_the_best_are_kept(mirror: Mirror) -> None:
    for step, fvu in ((1, 0.3), (2, 0.2), (3, 0.4), (4, 0.5), (5, 0.6)):
        mirror.put(step, fvu)
    assert mirror.steps == ["step-00000005", "step-00000004", "step-00000002"]
    # A resumed run goes back to an earlier step, and a folder without a list was left by an interrupted upload.
    mirror.mirror.store.put(b"part", "step-00000003/tensors.safetensors")
    mirror.put(4, 0.5)
    assert mirror.steps == ["step-00000004", "step-00000002"]
    assert {path.name for path in mirror.place.glob("step-*")} == set(mirror.steps)


def test_the_list_is_removed_before_any_other_file(mirror: Mirror, monkeypatch: pytest.MonkeyPatch) -> None:
    removed: list[str] = []
    mirror.put(1)
    mirror.put(2)
    with monkeypatch.context() as patch:
        patch.setattr(ObjectStore, "remove", lambda _, names, first="": removed.extend(names))
        mirror.put(3, keep=1)
    assert removed[:2] == [f"step-00000001/{LIST}", f"step-00000002/{LIST}"]
    assert len(removed) == 2 * (len(FILES) + 3)


def test_an_interrupted_upload_does_not_count(mirror: Mirror, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mirror.put(1)
    put = ObjectStore.put

    def cut(store: ObjectStore, source: Path | bytes, name: str, *more: object) -> None:
        if name.startswith("step-") and name.endswith(f"/{STATE}"):
            raise UserError("the network is gone")
        put(store, source, name)

    with monkeypatch.context() as patch:
        patch.setattr(ObjectStore, "put", cut)
        with pytest.raises(UserError, match="network is gone"):
            mirror.put(2)
    assert mirror.steps == ["step-00000001"]
    # The same step is uploaded again over a complete copy: an interruption must not leave a mixture of both.
    with monkeypatch.context() as patch:
        patch.setattr(ObjectStore, "put", cut)
        with pytest.raises(UserError, match="network is gone"):
            mirror.put(1, 0.1)
    assert mirror.steps == []
    with pytest.raises(UserError, match=r"URL: nothing to resume in file://.*it contains no complete checkpoint"):
        fetch(mirror.url, tmp_path / "run")
    assert not list(tmp_path.glob("*run*"))


def test_a_failed_removal_does_not_undo_an_upload(mirror: Mirror, monkeypatch: pytest.MonkeyPatch) -> None:
    mirror.put(1)

    def refuse(store: ObjectStore, names: list[str], first: str = "") -> None:
        if names:
            raise UserError("access was denied")

    monkeypatch.setattr(ObjectStore, "remove", refuse)
    assert mirror.put(2, keep=1) == "access was denied"
    assert mirror.steps[0] == "step-00000002"


def test_a_mirror_of_another_run_or_with_other_files_is_refused(mirror: Mirror, tmp_path: Path) -> None:
    CheckpointMirror(mirror.url, "f" * 16, "other").claim()  # there is no checkpoint yet
    mirror.mirror = CheckpointMirror(mirror.url, RUN, "n")
    mirror.mirror.claim()
    mirror.put(1)
    with pytest.raises(MirrorTaken, match=r"already contains the run n; choose another folder, or resume that run"):
        CheckpointMirror(mirror.url, "f" * 16, "other").claim()
    (tmp_path / "full" / "sae").mkdir(parents=True)
    (tmp_path / "full" / "sae" / "cfg.json").write_text("{}")
    with pytest.raises(MirrorTaken, match=r"already contains other files, such as sae/cfg.json; choose another folder"):
        CheckpointMirror(f"file://{tmp_path}/full", RUN, "n").claim()


def test_the_attempt_that_started_last_is_the_only_writer(mirror: Mirror) -> None:
    later = CheckpointMirror(mirror.url, RUN, "n")
    later.claim()
    CheckpointMirror(mirror.url, "f" * 16, "other").claim()  # there is no checkpoint yet
    with pytest.raises(MirrorTaken, match=r": the run other now mirrors to"):
        later.put(SAE, {}, MirroredFolder(RUN, 1, {}))
    CheckpointMirror(mirror.url, RUN, "n").claim()
    for act in (lambda: mirror.put(1), mirror.mirror.claim):
        with pytest.raises(MirrorTaken, match=r"another attempt of this run, maybe on another machine, now mirrors to"):
            act()
    assert mirror.steps == []


def test_a_downloaded_run_has_its_files_and_its_curves(mirror: Mirror, tmp_path: Path) -> None:
    mirror.put(7)
    (tmp_path / "cfg.json").write_text("{}")
    of_sae = {"k=2/cfg.json": tmp_path / "cfg.json"}
    mirror.mirror.put(SAE, of_sae, MirroredFolder(RUN, 7, described(of_sae)))
    fetched = fetch(mirror.url, tmp_path / "new" / "run")
    assert (fetched.step, fetched.has_sae, fetched.notes) == (7, True, ())
    paths = RunPaths(fetched.run_dir)
    assert damage(paths.checkpoints / "step-00000007") is None
    assert (paths.root / "sae" / "k=2" / "cfg.json").read_text() == "{}"
    spec = read_spec(paths.rank_spec(1))
    assert (spec.world_size, spec.device, spec.run_dir, spec.output_dir) == (4, "cuda", paths.root, paths.root / "sae")
    with contextlib.closing(SeriesReader(paths.metrics_db)) as reader:
        assert reader.latest() == {"fvu": 0.5}
    # The run continues to mirror to where it came from, and the path of the other machine's Python is gone.
    job = paths.job_file.read_text()
    assert f'mirror_checkpoints = "{mirror.url}"' in job
    assert "python" not in job
    assert read_mirrored(paths.root) == Mirrored("", RUN)
    assert {path.stat().st_mode & 0o077 for path in paths.root.rglob("*")} == {0}
    with pytest.raises(UsageError, match=r"--out: .*run already exists"):
        fetch(mirror.url, paths.root)


def spoil(mirror: Mirror, step: int, name: str, content: bytes) -> None:
    (mirror.place / f"step-{step:08d}" / name).write_bytes(content)


@pytest.mark.parametrize(
    ("name", "content", "why"),
    [
        ("tensors.safetensors", b"tensors.safetensors 3", "does not have the SHA-256 in its mirrored.json"),
        ("tensors.safetensors", b"cut", "is missing or has another size"),
        (LIST, b"{", "cannot be read"),
        (LIST, b'{"run": "0123456789abcdef", "step": 2, "files": {}}', "does not list the files of a checkpoint"),
        (LIST, b'{"run": "ffffffffffffffff", "step": 2, "files": {}}', "does not list the files of a checkpoint"),
    ],
)
def test_a_damaged_checkpoint_is_skipped(mirror: Mirror, tmp_path: Path, name: str, content: bytes, why: str) -> None:
    mirror.put(1)
    mirror.put(2)
    spoil(mirror, 2, name, content)
    fetched = fetch(mirror.url, tmp_path / "run")
    assert fetched.step == 1
    assert "step-00000002 in the mirror is damaged and skipped" in fetched.notes[0]
    assert why in fetched.notes[0]
    shutil.rmtree(mirror.place / "step-00000001")
    with pytest.raises(UserError, match=r"every checkpoint there is damaged"):
        fetch(mirror.url, tmp_path / "other")
    assert not list(tmp_path.glob("*other*"))


@pytest.mark.parametrize("name", ["../../up", "/tmp/up", "a/../../up", ".hidden", "checkpoint.pkl"])
def test_a_strangers_list_writes_no_other_file(mirror: Mirror, tmp_path: Path, name: str) -> None:
    mirror.put(1)
    listed = json.loads((mirror.place / "step-00000001" / LIST).read_text())
    listed["files"][name] = listed["files"][STATE]
    spoil(mirror, 1, LIST, json.dumps(listed).encode())
    before = set(tmp_path.rglob("*"))
    with pytest.raises(UserError, match=r"does not list the files of a checkpoint"):
        fetch(mirror.url, tmp_path / "run")
    assert set(tmp_path.rglob("*")) == before
    of_sae = {"cfg.json": tmp_path / JOB}
    mirror.put(2)
    about = MirroredFolder(RUN, 2, {name: described(of_sae)["cfg.json"]})
    (mirror.place / "sae").mkdir()
    (mirror.place / "sae" / LIST).write_bytes(msgspec.json.encode(about))
    fetched = fetch(mirror.url, tmp_path / "run")
    assert not fetched.has_sae
    assert "the SAE in the mirror is damaged and left out" in fetched.notes[-1]


def test_a_strangers_job_of_another_kind_is_refused(mirror: Mirror, tmp_path: Path) -> None:
    mirror.put(1, job='kind = "command"\nname = "n"\n[command]\nargv = ["rm"]\n')
    with pytest.raises(UserError, match=r"contains a job that is not a training job"):
        fetch(mirror.url, tmp_path / "run")


def test_a_strangers_metrics_bring_no_triggers_and_no_views(mirror: Mirror, tmp_path: Path) -> None:
    mirror.checkpoint(1, 0.5, JOB_TEXT)
    with contextlib.closing(sqlite3.connect(tmp_path / METRICS)) as db:
        db.execute("CREATE TRIGGER t AFTER INSERT ON events BEGIN DELETE FROM metrics; END")
        db.execute("DROP TABLE heartbeat")
        db.execute("CREATE VIEW heartbeat AS WITH RECURSIVE x AS (SELECT 1 UNION ALL SELECT 1 FROM x) SELECT * FROM x")
        db.commit()
    mirror.put(1)
    paths = RunPaths(fetch(mirror.url, tmp_path / "run").run_dir)
    with contextlib.closing(sqlite3.connect(paths.metrics_db)) as db:
        kinds = {kind for (kind,) in db.execute("SELECT type FROM sqlite_master")}
        assert db.execute("SELECT count(*) FROM metrics").fetchone() == (1,)
    assert kinds <= {"table", "index"}


def test_metrics_that_are_no_store_cost_only_the_curves(mirror: Mirror, tmp_path: Path) -> None:
    (tmp_path / METRICS).write_bytes(b"no store" * 1000)
    mirror.put(1)
    fetched = fetch(mirror.url, tmp_path / "run")
    assert "the curves up to this checkpoint are missing" in fetched.notes[0]
    assert not list(fetched.run_dir.glob("metrics.db*"))


def test_a_url_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"URL: file://.*/empty contains no mirrored run; check the URL"):
        fetch(f"file://{tmp_path}/empty", tmp_path / "run")
    assert list(tmp_path.iterdir()) == []


def test_the_words_say_when_where_and_why_not() -> None:
    one = Mirrored("hf://ada/saes", RUN, 5000, 1000.0)
    assert one.words(1180) == "step 5,000, 3 min ago, to hf://ada/saes"
    failed = msgspec.structs.replace(one, problem="no \x1bnetwork", has_sae=True)
    assert failed.words(1010) == "step 5,000 and the SAE, 10 s ago, to hf://ada/saes; not since then: no �network"
    assert Mirrored("hf://ada/saes", RUN).words(0) == "nothing yet, to hf://ada/saes"


_ON_THE_HUB = """
import sys
from pathlib import Path
from tests.contract.runs.test_checkpoint_mirror import Mirror
from trainer.contract.runs.checkpoint_mirror import RUN, CheckpointMirror

one = Mirror(Path(sys.argv[1]))
one.url = "hf://ada/saes/run1"
one.mirror = CheckpointMirror(one.url, "0123456789abcdef", "n")
one.mirror.claim()
for step in (1, 2, 3):
    one.put(step, keep=1)
from trainer.contract.runs.mirrored_run import fetch
print(fetch(one.url, Path(sys.argv[1]) / "run").step, *one.steps)
from huggingface_hub.utils import get_session
print(get_session().timeout.read)
"""


def test_each_checkpoint_on_the_hub_is_one_commit_without_the_token(tmp_path: Path) -> None:
    hub = Hub()
    try:
        hub.private["ada/saes"], hub.files["ada/saes"] = True, {"README.md": b"kept"}
        here = {"PYTHONPATH": os.pathsep.join(sys.path)}
        env = os.environ | hub.environment(str(tmp_path / "home")) | here
        command = [sys.executable, "-c", _ON_THE_HUB, str(tmp_path)]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    finally:
        hub.close()
    assert (done.stdout, done.stderr) == ("3 step-00000003\n100.0\n", "")
    # The claim is the first commit.
    assert len([one for one in hub.asked if "/commit/" in one]) == 4
    names = {name for name in hub.files["ada/saes"] if "/" in name}
    assert {name.split("/")[1] for name in names} == {"run.json", "step-00000003"}
    assert not any(TOKEN.encode() in content for content in hub.files["ada/saes"].values())
    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert not any(TOKEN.encode() in path.read_bytes() for path in files)
