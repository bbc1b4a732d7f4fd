"""Stands in for a training rank: same files, same exit codes, behaviour told by words in the job's name."""

import contextlib
import ctypes
import json
import os
import re
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

STEP_S = 0.02


def main(spec_file: str) -> int:
    spec = json.loads(Path(spec_file).read_text())
    rank = int(os.environ["RANK"])
    run_dir = Path(spec["run_dir"])
    words = tomllib.loads((run_dir / "job.toml").read_text())["name"].split()
    told = []
    signal.signal(signal.SIGTERM, (lambda *_: None) if "deaf" in words else (lambda *_: told.append(1)))
    if "orphan" in words:
        child = subprocess.Popen(["sleep", "600"], start_new_session=True)
        (run_dir / "orphan.pid").write_text(str(child.pid))
    print(f"rank {rank} of {os.environ['WORLD_SIZE']} begins", flush=True)
    with _exclusive(spec["gpu_uuids"], rank, run_dir), _writer(run_dir, rank, "quick" in words) as write:
        return _train(spec, rank, run_dir, words, told, write)


def _train(spec, rank, run_dir, words, told, write):
    total = _number(words, "steps", 10)
    step = 0
    while step < total or "deaf" in words:
        step += 1
        time.sleep(STEP_S)
        write(step, total)
        if f"fail={rank}@{step}" in words:
            _last_word(spec, rank, run_dir, "RuntimeError: the loss is not finite")
            return 1
        if f"crash={rank}@{step}" in words:
            print(f"step {step} will be the last", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        if f"cut-off={rank}" in words and any(run_dir.glob("attempt*/rank*.exit.json")):
            _last_word(spec, rank, run_dir, "connection closed by peer")
            return 1
        if "deaf" not in words and (told or _asked_to_stop(spec)):
            return 3
    write(total, total, last=True)
    if rank == 0 and "quick" not in words:
        Path(spec["output_dir"]).mkdir(parents=True)
        (Path(spec["output_dir"]) / "cfg.json").write_text("{}")
    return 0


def _last_word(spec, rank, run_dir, error):
    path = run_dir / f"attempt{spec['attempt']}" / f"rank{rank}.exit.json"
    path.write_text(json.dumps({"error": error, "traceback": "..."}))
    # A rank that raises takes a while to close down, and its peers may be gone before it.
    time.sleep(0.3 if error.startswith("RuntimeError") else 0)


def _asked_to_stop(spec):
    import sqlite3

    with contextlib.closing(sqlite3.connect(f"file:{spec['control_db']}?mode=ro", uri=True, timeout=5)) as db:
        return db.execute(_ASKED, (spec["job_id"],)).fetchone()


_ASKED = "SELECT 1 FROM requests WHERE job_id = ? AND kind IN ('stop', 'pause') AND handled IS NULL"


def _number(words, name, default):
    found = [re.fullmatch(rf"{name}=(\d+)", word) for word in words]
    return next((int(match[1]) for match in found if match), default)


@contextlib.contextmanager
def _exclusive(uuids, rank, run_dir):
    """Leaves a trace where two jobs use one GPU at a time."""
    marks = [run_dir.parent / f"in-use-{uuid}" for uuid in uuids] if rank == 0 else []
    for mark in marks:
        try:
            os.close(os.open(mark, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            (run_dir.parent / "double-booking").touch()
    yield
    for mark in marks:
        mark.unlink(missing_ok=True)


@contextlib.contextmanager
def _writer(run_dir, rank, quick):
    if rank or quick:
        yield lambda *_, **__: None
        return
    from trainer.contract.control import Event
    from trainer.contract.series import Heartbeat, Row, SeriesWriter

    series = SeriesWriter(run_dir / "metrics.db")
    series.write([], events=[Event(timestamp=time.time(), level="info", kind="begin", message="training begins")])

    def write(step, total, last=False):
        if step % 5 == 0 or last:
            values = {
                "loss": 1 / step,
                "fvu": 0.5,
                "l0": 32.0,
                "dead_fraction": 0.1,
                "tokens_per_s": 1000.0,
                "memory_bytes": step * 2**20,
            }
            rows = [Row(name, step, value) for name, value in values.items()]
            series.write(rows, Heartbeat("training", step, total, 100 * step, time.time()))

    yield write
    series.close()


if __name__ == "__main__":
    ctypes.CDLL(None).prctl(15, b"fake-rank", 0, 0, 0)
    sys.exit(main(sys.argv[1]))
