"""Downloads a run from its mirror into a new run folder, where it can be resumed like any other run.

The mirror may belong to another person. Only files of known names are downloaded, every checksum is verified, and no
path in these files decides where something is written.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from trainer.contract import progress
from trainer.contract.errors import UsageError, UserError
from trainer.contract.files import write_own
from trainer.contract.json_file import write_json
from trainer.contract.paths import RunPaths, free_disk, private_folder, refuse_link
from trainer.contract.planning.plan import read_plan
from trainer.contract.printable import printable, printable_toml
from trainer.contract.runs.checkpoint_manifest import FILES, file_facts
from trainer.contract.runs.checkpoint_mirror import (
    JOB,
    LIST,
    METRICS,
    PLAN,
    RUN,
    SAE,
    STATUS,
    CheckpointMirror,
    MirrorDamaged,
    Mirrored,
    MirroredFile,
    MirroredFolder,
    Owner,
    step_of,
    steps_in,
)
from trainer.contract.runs.rank_spec import RankSpec
from trainer.contract.settings.job_file import read_toml
from trainer.contract.settings.toml import read_plain_text
from trainer.contract.store.database import StoreError, open_reader, open_writer
from trainer.contract.wording import distinct_sizes

# The argument that errors name.
FIELD = "URL"
_NEEDED, _ALLOWED = {JOB, *FILES}, {JOB, PLAN, METRICS, *FILES}
_TABLES = {
    "keys": "id, name",
    "metrics": "key_id, rank, step, timestamp, value",
    "rollups": "key_id, rank, level, bucket, n, total, low, high",
    "heartbeat": "id, phase, step, total_steps, tokens, timestamp, dropped",
    "events": "timestamp, level, kind, message",
}


class Fetched(NamedTuple):
    """A downloaded run: its folder, its name, the step of its checkpoint, and whether it has a finished SAE."""

    run_dir: Path
    name: str
    step: int
    has_sae: bool
    notes: tuple[str, ...] = ()


def open_mirror(url: str) -> tuple[CheckpointMirror, Owner]:
    """Return the mirror at a URL, and the run that it belongs to; raise `UserError` if it contains none."""
    mirror = CheckpointMirror(url, "0" * 16, "", FIELD)
    if RUN not in mirror.store.list():
        raise UserError(f"{FIELD}: {mirror.store.url} contains no mirrored run; check the URL, which is the value of "
                        "train.mirror_checkpoints")  # fmt: skip
    return mirror, mirror.owner()


def fetch(url: str, run_dir: Path) -> Fetched:
    """Download the latest intact checkpoint, and the finished SAE, into a new run folder.

    Raise `UserError` if there is no intact checkpoint; nothing is left in this case.
    """
    if os.path.lexists(run_dir):
        raise UsageError(f"--out: {run_dir} already exists; choose another folder, or resume the run in it")
    mirror, owner = open_mirror(url)
    with _new_folder(run_dir) as folder:
        listed = mirror.store.list()
        about, notes = _take_newest(mirror, listed, owner, folder)
        has_sae = _take_sae(mirror, listed, about, folder, notes)
        _arrange(folder, run_dir, about, mirror.store.url, notes)
    return Fetched(run_dir, printable(owner.name), about.step, has_sae, tuple(notes))


@contextlib.contextmanager
def _new_folder(run_dir: Path) -> Iterator[Path]:
    """Yield a private folder, which becomes `run_dir` if the body succeeds."""
    private_folder(run_dir.parent)
    refuse_link(run_dir.parent)
    folder = run_dir.with_name(f".{run_dir.name[:40]}.{os.urandom(8).hex()}.new")
    folder.mkdir(mode=0o700)
    try:
        yield folder
        folder.rename(run_dir)
    except OSError as error:
        raise UserError(f"{run_dir} could not be written: {error.strerror or error}; free some space on its disk, or "
                        "choose another folder") from None  # fmt: skip
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _take_newest(
    mirror: CheckpointMirror, listed: Mapping[str, int], owner: Owner, folder: Path
) -> tuple[MirroredFolder, list[str]]:
    """Download the latest checkpoint that is intact into `folder`; also return notes about later ones."""
    notes: list[str] = []
    for name in steps_in(listed):
        target = private_folder(folder / "checkpoints" / name)
        try:
            about = mirror.read_list(name)
            if about.run != owner.run or not _NEEDED <= set(about.files) <= _ALLOWED:
                raise MirrorDamaged(f"its {LIST} does not list the files of a checkpoint of this run")
            _take(mirror, name, about.files, listed, target)
            return msgspec.structs.replace(about, step=step_of(name)), notes
        except MirrorDamaged as error:
            notes.append(f"{name} in the mirror is damaged and skipped: {error}")
            shutil.rmtree(target)
    reason = f"every checkpoint there is damaged ({notes[0]})" if notes else "it contains no complete checkpoint"
    raise UserError(f"{FIELD}: nothing to resume in {mirror.store.url}: {reason}")


def _take(
    mirror: CheckpointMirror, name: str, files: Mapping[str, MirroredFile], listed: Mapping[str, int], target: Path
) -> None:
    """Download a folder's files and verify them; raise `MirrorDamaged` if one is missing or has other content."""
    total = sum(file.bytes for file in files.values())
    for one, file in files.items():
        if listed.get(f"{name}/{one}") != file.bytes:
            raise MirrorDamaged(f"{printable(one[:80])} is missing or has another size")
    _, free = free_disk(target.parent)
    if free is not None and free < total:
        raise UserError("--out: the run needs {}, but only {} are free there".format(*distinct_sizes(total, free)))
    progress.stage(f"downloading {name}", total)
    for one, file in files.items():
        private_folder((target / one).parent)
        mirror.store.get(f"{name}/{one}", target / one, file.bytes, progress.advance)
        if file_facts(target / one)["sha256"] != file.sha256:
            raise MirrorDamaged(f"{one} does not have the SHA-256 in its {LIST}")


def _take_sae(
    mirror: CheckpointMirror, listed: Mapping[str, int], about: MirroredFolder, folder: Path, notes: list[str]
) -> bool:
    """Download the finished SAE if it belongs to the checkpoint; return whether it did."""
    if f"{SAE}/{LIST}" not in listed:
        return False
    try:
        of_sae = mirror.read_list(SAE)
        if (of_sae.run, of_sae.step) != (about.run, about.step):
            return False
        _take(mirror, SAE, of_sae.files, listed, folder / "sae")
    except MirrorDamaged as error:
        notes.append(f"the SAE in the mirror is damaged and left out: {error}")
        shutil.rmtree(folder / "sae", ignore_errors=True)
        return False
    return True


def _arrange(folder: Path, run_dir: Path, about: MirroredFolder, url: str, notes: list[str]) -> None:
    """Move the downloaded files to their places in a run folder, and write its other files."""
    paths = RunPaths(folder)
    taken = next(paths.checkpoints.iterdir())
    attempt = private_folder(paths.attempt(1))
    if plan := read_plan(taken / PLAN):
        write_json(attempt / PLAN, plan)
    spec = RankSpec(
        run_dir=run_dir, output_dir=run_dir / "sae", attempt=1, world_size=about.world_size, device=about.device,
        as_one_process=about.as_one_process, model_gpus=about.model_gpus,
    )  # fmt: skip
    write_own(paths.rank_spec(1), msgspec.json.encode(spec, enc_hook=os.fspath))
    write_own(paths.job_file, _job_text(taken / JOB, url))
    if (taken / METRICS).exists():
        _copy_metrics(taken / METRICS, paths.metrics_db, notes)
    write_json(folder / STATUS, Mirrored("", about.run))
    for name in (JOB, PLAN, METRICS):
        (taken / name).unlink(missing_ok=True)
    private_folder(paths.logs)


def _job_text(file: Path, url: str) -> str:
    """Return a job file that mirrors to where it was downloaded from, whatever the file says.

    The path of a Python on another machine has no meaning here, so this setting is left out.
    """
    import tomli_w

    raw: dict[str, Any] = read_toml(file, read_plain_text)
    if raw.get("kind", "train") != "train" or not isinstance(raw.get("train", {}), dict):
        raise UserError(f"{FIELD}: {url} contains a job that is not a training job")
    raw["train"] = raw.get("train", {}) | {"mirror_checkpoints": url}
    if isinstance(launch := raw.get("launch"), dict):
        raw["launch"] = {name: value for name, value in launch.items() if name != "python"}
    return printable_toml(tomli_w.dumps(raw))


def _copy_metrics(source: Path, target: Path, notes: list[str]) -> None:
    """Copy the rows of a metrics store into a new store, because the mirror's store may contain triggers and views."""
    try:
        with (
            contextlib.closing(open_reader(source, "metrics")) as old,
            contextlib.closing(open_writer(target, "metrics")) as new,
        ):
            old.execute("PRAGMA trusted_schema=OFF")
            tables = {row["name"] for row in old.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
            new.execute("BEGIN")
            for table in tables & _TABLES.keys():
                columns = _TABLES[table]
                marks = ", ".join("?" * len(columns.split(",")))
                rows = map(tuple, old.execute(f"SELECT {columns} FROM {table}"))
                new.executemany(f"INSERT OR IGNORE INTO {table}({columns}) VALUES({marks})", rows)
            new.execute("COMMIT")
            new.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    except (StoreError, sqlite3.Error, OverflowError) as error:
        for file in target.parent.glob(f"{target.name}*"):
            file.unlink()
        reason = printable(str(error))
        notes.append(f"the curves up to this checkpoint are missing: the mirror's {METRICS} cannot be read ({reason})")
