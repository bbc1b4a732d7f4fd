"""Functions that read a file in a data folder and use its content as sae-tui does."""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec

from sae_tui.cli_commands import values
from sae_tui.cli_commands.job_files import examine_job
from sae_tui.compare.run import settings_of
from sae_tui.gpu import nvml
from sae_tui.gpu.base import GpuSample
from sae_tui.gpu.owner import command_line
from sae_tui.gpu.visible import visible
from sae_tui.jobs.ending import read_ending
from sae_tui.jobs.files import LogFollower
from sae_tui.jobs.gpus import locks
from sae_tui.jobs.gpus.availability import Holders
from sae_tui.jobs.known_failures import remedy
from sae_tui.jobs.launchers.cluster import SlurmJob
from sae_tui.jobs.launchers.ingest import Ingest
from sae_tui.jobs.queue import gpu_reader
from sae_tui.jobs.record import read_record
from sae_tui.jobs.upkeep import repair, trash
from sae_tui.jobs.view.find import architectures, find, orders, waits
from sae_tui.jobs.view.postmortem import examine
from sae_tui.jobs.view.reader import _view
from sae_tui.jobs.view.sweeps import labels
from sae_tui.jobs.view.watcher import JobDetail
from sae_tui.panels.headline import headline
from sae_tui.settings import change_settings, load_settings, settings_text
from sae_tui.widgets.log_view import LogView
from trainer.contract.errors import Problem, UserError
from trainer.contract.paths import DataDir
from trainer.contract.planning.check_job import Machine, MachineGpu, check
from trainer.contract.planning.hardware import read_box
from trainer.contract.planning.plan import read_plan
from trainer.contract.printable import printable
from trainer.contract.runs.checkpoint_manifest import FORMAT, position_of
from trainer.contract.runs.log_tail import last_line, tail
from trainer.contract.runs.rank_spec import rank_environment, read_spec, srun_environment
from trainer.contract.runs.remote_rank_status import read_mark
from trainer.contract.runs.resume import stored_run
from trainer.contract.settings.consent import NO_CONSENT
from trainer.contract.settings.job_file import dump_job, load_job
from trainer.contract.settings.shards import inspect_shards
from trainer.contract.settings.toml import table_of
from trainer.contract.settings.typed import parse_number
from trainer.contract.store import database
from trainer.contract.store.job_store import Control
from trainer.contract.store.metrics_store import SeriesReader
from trainer.contract.store.migrations import Schema
from trainer.contract.store.rows import Job
from trainer.contract.store.states import JobState

CORPUS = Path(__file__).with_name("corpus")
CHECKPOINT = "runs/1/checkpoints/step-00000040"
# Maps kinds of corpus files to their paths in a data folder; other kinds of files are at its root.
PLACES = {
    "box": "box.json",
    "cards": f"cards-{DataDir(Path()).host_word}-auto.json",
    "exit": "runs/1/exit.json",
    "job": "runs/1/job.toml",
    "log": "runs/1/logs/rank0.log",
    "manifest": f"{CHECKPOINT}/manifest.json",
    "mark": "runs/1/attempt1/rank0.json",
    "meta": "acts/meta.json",
    "plan": "runs/1/attempt1/plan.json",
    "progress": "runs/1/attempt1/progress.jsonl",
    "random": f"{CHECKPOINT}/random.safetensors",
    "rank_exit": "runs/1/attempt1/rank0.exit.json",
    "ranks": "runs/1/attempt1/ranks.json",
    "record": "runs/1/record.json",
    "row": "trash/1/row.json",
    "settings": "settings.toml",
    "shards": "acts/acts.safetensors",
    "state": f"{CHECKPOINT}/state.json",
    "tensors": f"{CHECKPOINT}/tensors.safetensors",
}
MACHINE = Machine(
    gpus=(MachineGpu(0, "NVIDIA H100", 80 << 30), MachineGpu(1, "NVIDIA T4", None, busy="used by ann")),
    cpu_count=8,
    output_root=Path("/tmp"),
)


class Home:
    """A data folder as sae-tui writes it, except that one file contains the bytes to read."""

    def __init__(self, root: Path) -> None:
        self.data = DataDir(root)
        self.run = self.data.run(1)
        for kind in PLACES:
            self.put(kind, (CORPUS / kind / "real").read_bytes())

    def put(self, kind: str, content: bytes) -> None:
        file = self.path(kind)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)

    def path(self, kind: str) -> Path:
        return self.data.root / PLACES.get(kind, kind)

    def made(self, schema: Schema) -> Path:
        """Return the path to an empty store that is created only once."""
        path = self.data.root / f"empty-{schema}.db"
        if not path.exists():
            database.open_writer(path, schema).close()
        return path

    def text(self, kind: str) -> str:
        """Return the bytes as Python decodes them from a terminal or the environment."""
        return self.path(kind).read_bytes().replace(b"\0", b"").decode(errors="surrogateescape")


def restored(home: Home, job: Job, events: Iterable[Any] = (), ranks: Iterable[Any] = ()) -> Job:
    """Restore a job that is missing from a store, and return it as read from the store."""
    control = Control(home.made("control"))
    try:
        control.restore(job, events, ranks)
        control.ranks(job.id)
        return control.job(job.id)
    finally:
        for table in ("jobs", "ranks", "leases", "events"):
            control._db.execute(f"DELETE FROM {table}")
        control.close()


def shown(job: Job) -> str:
    """Return a job's text as screens and commands show it."""
    view = _view(job, None, False)
    detail = JobDetail(view, "", {}, (), (), 0, None)
    texts = [
        waits(job),
        architectures(job),
        *labels(job.config),
        *(text for line in headline(detail, 80) for text, _ in line),
    ]
    for by in orders():
        find([job, job], "a", by)
    return " ".join(texts)


def job_file(home: Home) -> list[Problem]:
    job = load_job(home.path("job"))
    dump_job(job)
    return check(job, MACHINE)


def examined(home: Home) -> list[Problem]:
    job, problems, _ = examine_job(home.path("job"), [], None, NO_CONSENT)
    return [*problems, *(check(job, MACHINE) if job else ())]


def override(home: Home) -> list[Problem]:
    return check(load_job(home.path("job"), [home.text("override")]), MACHINE)


def stored_config(home: Home) -> dict[str, Any]:
    text = home.path("job").read_bytes().decode(errors="replace")
    labels(text)
    settings_of(text)
    return table_of(text)


def shards(home: Home) -> int:
    return inspect_shards(home.data.root / "acts").n_tokens


def checkpoint(home: Home) -> int | None:
    with contextlib.suppress(UserError):
        stored_run(home.run.root)
    return position_of(home.run.checkpoints).step


def tensors(home: Home) -> dict[str, Any]:
    """Export a checkpoint whose tensors have arbitrary content and whose manifest is valid."""
    from trainer.training.export_checkpoint import export_checkpoint

    folder = home.path("manifest").parent
    home.path("manifest").unlink(missing_ok=True)
    # `manifest_of` refuses git-lfs pointers, which Hypothesis generates because it uses string constants from our code.
    files = {file.name: file.read_bytes() for file in folder.iterdir()}
    described = {
        name: {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()} for name, content in files.items()
    }
    home.put("manifest", msgspec.json.encode({"format": FORMAT, "files": described}))
    out = home.data.root / "out"
    shutil.rmtree(out, ignore_errors=True)
    return export_checkpoint(home.run.root, out, form="saelens", best=False, force=True)


def box(home: Home) -> float:
    speeds = read_box(home.data.box_file)
    speeds.with_measured("a", "bf16", 2, speeds.speeds("CPU process", "fp32", 2))
    return (check(load_job(home.path("job")), msgspec.structs.replace(MACHINE, speeds=speeds)) and 1.0) or 0.0


def plan(home: Home) -> str | None:
    plan_read = read_plan(home.path("plan"))
    if plan_read is None:
        return None
    restored(home, msgspec.structs.replace(JOB, mode=plan_read.mode))
    return plan_read.sentence()


JOB = Job(id=1, name="a", config="", user="a", host="h", device="cpu", gpu_source="none")


def mark(home: Home) -> bool | None:
    mark_read = read_mark(home.path("mark"))
    return mark_read and (mark_read.has_ended, mark_read.process.is_alive())[0]


def row(home: Home) -> str | None:
    record = trash._read(home.data, 1)
    return record and shown(restored(home, record.job, record.events, record.ranks))


def record(home: Home) -> str | None:
    record_read = read_record(home.run)
    return record_read and shown(restored(home, record_read))


def repaired(home: Home) -> str | None:
    lost_job = repair._recover_job(home.data, 1)
    return lost_job and shown(restored(home, lost_job))


def ending(home: Home) -> str | None:
    ending_read = read_ending(home.run.exit_file)
    if ending_read is None:
        return None
    return shown(restored(home, msgspec.structs.replace(JOB, state=ending_read.state, **ending_read.fields())))


def why(home: Home) -> str | None:
    failed = msgspec.structs.replace(JOB, state=JobState.FAILED, error="rank 0: CUDA out of memory", attempt=1)
    cause = examine(home.data, failed)
    return cause and cause.error


def ranks(home: Home) -> dict[str, str]:
    spec = read_spec(home.path("ranks"))
    with contextlib.suppress(UserError):
        stored = stored_run(home.run.root)
        stored.is_finished(load_job(home.run.job_file))
    repair._last_spec(home.run)
    return rank_environment(spec, 0, {})


def meta(home: Home) -> str:
    from trainer.activations.shards import _read_meta
    from trainer.sharing.saelens import origin

    return json.dumps(origin(_read_meta(home.path("meta"))))


def progress(home: Home) -> int:
    db = home.run.metrics_db
    shutil.copy(home.made("metrics"), db)
    home.path("progress").with_suffix(".offset").unlink(missing_ok=True)
    ingest = Ingest(home.path("progress"), db)
    try:
        while ingest.poll():
            pass
    finally:
        ingest.close()
    with contextlib.closing(SeriesReader(db)) as reader:
        for name, rank in reader.series():
            reader.history(name, rank)
        reader.heartbeat()
        return len(reader.events())


def log(home: Home) -> list[str]:
    file = home.path("log")
    remedy(last_line(file))
    lines = LogFollower(file).new_lines()
    assert all(isinstance(line, str) for line in lines)
    return tail(file, 20)


def search(home: Home) -> int:
    """Search all lines of a log for its first line; return the number of matches."""
    lines = [line.decode(errors="replace") for line in home.path("log").read_bytes().split(b"\n")]
    view = LogView()
    view._resize = lambda: None  # type: ignore[method-assign]
    view.append([("0", line) for line in lines])
    view.search(lines[0])
    view.show_only_matches(True)
    return view.n_found


class NvmlStub(SimpleNamespace):
    NVMLError = type("NVMLError", (Exception,), {})


def driver(home: Home) -> list[str]:
    """Query a driver that returns these bytes as a GPU's name, as its UUID and as a command line."""
    name, uuid, command, *_ = *home.path("nvml").read_bytes().split(b"\n"), b"", b""
    answers: dict[str, Callable[..., Any]] = {
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlDeviceGetName": lambda _: name,
        "nvmlDeviceGetUUID": lambda _: uuid.decode(errors="surrogateescape"),
    }
    gpu = nvml._NvmlGpu(NvmlStub(**answers), 0)  # type: ignore[arg-type]
    sample = gpu.sample(processes=True)
    command_text = printable(command_line(command.decode(errors="surrogateescape").split("\0")))
    visible([sample], "nvml", {"CUDA_VISIBLE_DEVICES": "GPU-5"})
    texts = [sample.uuid, sample.name, command_text]
    assert all(text == printable(text) for text in texts), texts
    locks.lock_holders(home.data.root, [sample.uuid])
    return texts


def read_gpus(home: Home) -> int:
    """Parse a GPU list printed by another process, share it as the queue does, and return the number of GPUs."""
    reader = gpu_reader.GpuReader(home.data, "auto")
    reader._read = lambda: None  # type: ignore[method-assign]
    samples = reader.samples()
    gpu_reader.gpus(samples, Holders(), [], {})
    return len(samples)


def settings(home: Home) -> str:
    loaded, problems = load_settings(home.data.settings_file)
    assert all(str(problem) for problem in problems)
    with contextlib.suppress(UserError):
        change_settings(home.data.settings_file, {"theme": "light"})
    return settings_text(loaded)


def held_locks(home: Home) -> dict[str, int]:
    return locks.pids_by_lock(home.path("locks").read_bytes())


def squeue(home: Home) -> str | None:
    job = SlurmJob("1")
    text = home.path("squeue").read_bytes().decode(errors="replace")
    job._take(text, "")
    job._take("", text)
    return job.seen and job.seen.state


def sbatch(home: Home) -> str:
    return SlurmJob.submit(["cat", str(home.path("sbatch"))]).id


def slurm_id(home: Home) -> str:
    return SlurmJob.read(home.path("slurm_job")).id


def srun(home: Home) -> dict[str, str]:
    variables = dict(line.partition("=")[::2] for line in home.text("srun").split("\n"))
    return srun_environment(msgspec.structs.replace(read_spec(CORPUS / "ranks" / "real")), variables)


def devices(home: Home) -> list[int]:
    value = home.text("devices")
    cards = [GpuSample(index, f"GPU-{index}f0b7c3e", "RTX 3090", 0.0) for index in range(4)]
    return [gpu.index for gpu in visible(cards, "nvml", {"CUDA_VISIBLE_DEVICES": value})]


def words(home: Home) -> list[int]:
    text = home.text("words")
    jobs = [JOB, msgspec.structs.replace(JOB, id=2, tags=("good",), config='[sae]\narchitecture = ["topk"]\n')]
    first = text.split(" ")[0]
    with contextlib.suppress(UserError):
        find(jobs, "", first)
    return [job.id for job in find(jobs, text)]


def number(home: Home) -> int:
    """Parse text as numbers, as flags and form fields do."""
    text = home.text("seconds")
    for word in (text, *text.split(" ")):
        for several in (False, True):
            with contextlib.suppress(ValueError):
                parse_number(word, several=several, whole=several)
        for kind in (values.positive, values.rank, values.share, values.price, values.seconds, values.step):
            with contextlib.suppress(argparse.ArgumentTypeError):
                kind(word)
    return len(text)
