"""Replaces a training rank: writes the same files and exits with the same codes. The job's name controls its behaviour.

The name is a list of commands. `crash=1@5` kills rank 1 at step 5, and `crash=1@5#2` does so only in attempt 2. The
same syntax works for `fail` (raises an error), `oom`, `hang` (halts the process, so that its peers wait) and `idle`
(waits for SIGTERM). `save=5` saves a checkpoint every 5 steps, `mute` stores no metrics, and `judge` never finishes the
report card after training.
"""

import contextlib
import ctypes
import json
import os
import re
import signal
import sys
import time
import tomllib
from pathlib import Path

# The value of `trainer.contract.runs.grant.CHANNEL`. Most ranks start without that module, and so twice as fast.
CHANNEL = "SAE_TUI_CHANNEL"
STEP_S = 0.02


def main(spec_file: str) -> int:
    if channel := os.environ.pop(CHANNEL, None):
        _wait_for_turn(int(channel))
    spec = json.loads(Path(spec_file).read_text())
    rank = int(os.environ["RANK"])
    run_dir = Path(spec["run_dir"])
    words = tomllib.loads((run_dir / "job.toml").read_text())["name"].split()
    signals = []
    signal.signal(signal.SIGTERM, (lambda *_: None) if "deaf" in words else (lambda *_: signals.append(1)))
    if "orphan" in words:
        import subprocess

        child = subprocess.Popen(["sleep", "600"], start_new_session=True)
        (run_dir / "orphan.pid").write_text(str(child.pid))
    print(f"rank {rank} of {os.environ['WORLD_SIZE']} begins", flush=True)
    with _exclusive(spec["gpu_uuids"], rank, run_dir), _writer(run_dir, rank, {"quick", "mute"} & {*words}) as write:
        return _train(spec, rank, run_dir, words, signals, write)


def _wait_for_turn(channel):
    from trainer.contract.runs.grant import receive_grant

    if not (grant := receive_grant(channel)):
        os._exit(0)
    for output in (1, 2):
        os.dup2(grant.descriptors[0], output)
    os.environ.update(grant.environment)


def _train(spec, rank, run_dir, words, told, write):
    total = tomllib.loads((run_dir / "job.toml").read_text())["train"].get("n_steps", 200)
    step = first = _resumed_at(spec)
    while step < total or "deaf" in words:
        step += 1
        time.sleep(STEP_S)
        write(step, total)
        happens = _events_at(words, step, spec["attempt"])
        if reason := next((_REASONS[kind] for kind, who in happens if kind in _REASONS and who == rank), None):
            _last_word(spec, rank, run_dir, reason)
            return 1
        if ("crash", rank) in happens:
            print(f"step {step} will be the last", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        if ("hang", rank) in happens:
            os.kill(os.getpid(), signal.SIGSTOP)
        while not told and any(kind in ("hang", "idle") for kind, _ in happens):
            time.sleep(STEP_S)
        if f"cut-off={rank}" in words and any(run_dir.glob("attempt*/rank*.exit.json")):
            _last_word(spec, rank, run_dir, "connection closed by peer")
            return 1
        if "deaf" not in words and (told or _asked_to_stop(spec)):
            # Like a real rank, report the step that is saved.
            write(step, total, last=True)
            _save(run_dir, rank, step)
            return 3
        if step % _number(words, "save", total + 1) == 0:
            _save(run_dir, rank, step)
    write(total, total, last=True)
    if rank == 0 and "quick" not in words:
        print(f"made the steps {first + 1} to {total}", flush=True)
        _save(run_dir, rank, total)
        Path(spec["output_dir"]).mkdir(parents=True, exist_ok=True)
        (Path(spec["output_dir"]) / "cfg.json").write_text("{}")
        if "judge" in words:
            write(total, total, last=True, phase="judging")
            while True:
                time.sleep(STEP_S)
    return 0


_REASONS = {
    "fail": "RuntimeError: the loss is not finite",
    "oom": "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB",
}


def _events_at(words, step, attempt):
    """Return the events that the job's name specifies for this step and attempt, as (kind, rank) pairs."""
    matches = [re.fullmatch(r"([a-z]+)=(\d+)@(\d+)(?:#(\d+))?", word) for word in words]
    return [(m[1], int(m[2])) for m in matches if m and int(m[3]) == step and int(m[4] or attempt) == attempt]


def _resumed_at(spec):
    if not spec["resume_from"]:
        return 0
    return json.loads((Path(spec["resume_from"]) / "state.json").read_text())["position"]["step"]


def _save(run_dir, rank, step):
    folder = run_dir / "checkpoints" / f"step-{step:08d}"
    if rank or folder.exists():
        return
    from trainer.contract.runs.checkpoint_manifest import FILES, MANIFEST, STATE, manifest_of

    temporary = folder.with_name(f".{folder.name}")
    temporary.mkdir()
    for name in {*FILES} - {MANIFEST, STATE}:
        (temporary / name).touch()
    (temporary / STATE).write_text(json.dumps({"position": {"step": step, "tokens": 100 * step}}))
    (temporary / MANIFEST).write_text(json.dumps(manifest_of(temporary)))
    temporary.rename(folder)


def _last_word(spec, rank, run_dir, error):
    path = run_dir / f"attempt{spec['attempt']}" / f"rank{rank}.exit.json"
    path.write_text(json.dumps({"error": error, "traceback": "..."}))
    # Real ranks take a while to shut down after an error, so their peers may exit first.
    time.sleep(0.3 if error.startswith("RuntimeError") else 0)


def _asked_to_stop(spec):
    import sqlite3

    # If the store was deleted, there are no requests.
    with (
        contextlib.suppress(sqlite3.OperationalError),
        contextlib.closing(sqlite3.connect(f"file:{spec['control_db']}?mode=ro", uri=True, timeout=5)) as db,
    ):
        return db.execute(_ASKED, (spec["job_id"],)).fetchone()


_ASKED = "SELECT 1 FROM requests WHERE job_id = ? AND kind IN ('stop', 'pause') AND handled IS NULL"


def _number(words, name, default):
    matches = [re.fullmatch(rf"{name}=(\d+)", word) for word in words]
    return next((int(match[1]) for match in matches if match), default)


@contextlib.contextmanager
def _exclusive(uuids, rank, run_dir):
    """Create the file `double-booking` if two jobs use one GPU at the same time."""
    marks = [run_dir.parent / f"in-use-{uuid}" for uuid in uuids] if rank == 0 else []
    for mark in marks:
        try:
            with mark.open("x") as stream:
                stream.write(run_dir.name)
        except FileExistsError:
            # An earlier attempt of this job may have left the file behind when it was killed.
            if mark.read_text() != run_dir.name:
                (run_dir.parent / "double-booking").touch()
    yield
    for mark in marks:
        mark.unlink(missing_ok=True)


@contextlib.contextmanager
def _writer(run_dir, rank, mute):
    if rank or mute:
        yield lambda *_, **__: None
        return
    from trainer.contract.store.metrics_store import Heartbeat, MetricRow, SeriesWriter
    from trainer.contract.store.rows import Event

    series = SeriesWriter(run_dir / "metrics.db")
    series.write([], events=[Event(timestamp=time.time(), level="info", kind="begin", message="training begins")])

    def write(step, total, last=False, phase="training"):
        if step % 5 == 0 or last:
            values = {
                "loss": 1 / step,
                "fvu": 0.5,
                "heldout_fvu": 0.75,
                "heldout_l0": 36.5,
                "l0": 32.0,
                "dead_fraction": 0.1,
                "tokens_per_s": 1000.0,
                "memory_bytes": step * 2**20,
            }
            rows = [MetricRow(name, step, value) for name, value in values.items()]
            series.write(rows, Heartbeat(phase, step, total, 100 * step, time.time()))

    yield write
    series.close()


def run(arguments: list[str]) -> int:
    ctypes.CDLL(None).prctl(15, b"fake-rank", 0, 0, 0)
    return main(arguments[0])


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
