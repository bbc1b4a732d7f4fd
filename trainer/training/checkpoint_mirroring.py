"""Uploads a run's checkpoints to its mirror, in a thread on rank 0; training neither waits for it nor fails with it."""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from trainer.contract.errors import UserError, first_line
from trainer.contract.json_file import write_json
from trainer.contract.paths import RunPaths
from trainer.contract.runs.checkpoint_manifest import FILES, Position, damage, newest_first
from trainer.contract.runs.checkpoint_mirror import (
    FIELD,
    JOB,
    METRICS,
    PLAN,
    SAE,
    STATUS,
    CheckpointMirror,
    Mirrored,
    MirroredFolder,
    MirrorTaken,
    described,
    read_mirrored,
    step_of,
)
from trainer.contract.runs.rank_spec import RankSpec
from trainer.contract.settings.job import JobConfig
from trainer.contract.store.database import StoreError, copy_store
from trainer.contract.store.metrics_store import MIRRORING
from trainer.contract.wording import gibibytes
from trainer.reporting import rank_log
from trainer.reporting.progress import RunProgress

# The minimum time between two messages about failed uploads, in seconds.
TELL_EVERY_S = 300.0
# How long the end of a run waits for the last uploads, and for the next try after a failed one, in seconds.
LAST_S, RETRY_S = 1800.0, 30.0
# How long the start of a run waits for the store, in seconds; some clients wait for an answer without a limit.
START_S = 120.0
# The folder with hard links to the files that are being uploaded: a removed checkpoint can still be read there.
STAGING = ".mirroring"


class CheckpointMirroring:
    """The mirror of one attempt; `start` checks it, `saved` announces a checkpoint, and `finish` ends the thread."""

    def __init__(self, spec: RankSpec, job: JobConfig, progress: RunProgress) -> None:
        self._spec, self._job, self._progress = spec, job, progress
        self._paths, self._url = RunPaths(spec.run_dir), str(job.train.mirror_checkpoints)
        self._staging = self._paths.root / STAGING
        before = read_mirrored(self._paths.root)
        run = before.run if before else os.urandom(8).hex()
        self._is_known = before is not None and before.url == self._url
        self._state = before if before and self._is_known else Mirrored(self._url, run)
        self._mirror = CheckpointMirror(self._url, run, job.name)
        self._is_claimed = self._is_over = False
        self._wake, self._ending = threading.Event(), threading.Event()
        self._output: Path | None = None
        self._told_at, self._n_failed = float("-inf"), 0
        self._n_sent = self._n_bytes = 0
        self._saved_at, self._busy_since = 0.0, float("inf")
        # The step that this attempt uploaded last. An earlier one would replace it in the mirror.
        self._sent = -1
        self._thread = threading.Thread(target=self._live, name="checkpoint mirror", daemon=True)

    def start(self) -> None:
        """Check the mirror within `START_S`, and start the thread; raise `UserError` if the mirror cannot be used.

        If this run has used the mirror before, an unreachable store is only reported: a restart must not fail with it.
        """
        try:
            self._claim_in_time()
        except MirrorTaken:
            raise
        except UserError as error:
            if not self._is_known:
                raise
            self._tell_failure(error)
        self._note()
        self._thread.start()

    def _claim_in_time(self) -> None:
        failures: list[Exception] = []

        def claim() -> None:
            try:
                self._claim()
            except Exception as error:
                failures.append(error)

        thread = threading.Thread(target=claim, name="mirror check", daemon=True)
        thread.start()
        thread.join(START_S)
        if thread.is_alive():
            raise UserError(f"{FIELD}: {self._url} did not answer within {START_S:g} s; check the network and the URL")
        for error in failures:
            raise error

    def saved(self) -> None:
        """Announce that a checkpoint was saved."""
        self._saved_at = time.monotonic()
        if self._saved_at - self._busy_since > LAST_S:
            minutes = f"{LAST_S / 60:g} minutes"
            self._tell_rarely(f"an upload to {self._url} has taken more than {minutes}; later checkpoints wait for it")
        self._wake.set()

    def finish(self, output: Path | None, stop: threading.Event, at: Position) -> None:
        """Upload the last checkpoint and, if the run is finished, the SAE in `output`; return when this is done.

        The wait ends after `LAST_S`, or at another request to stop. A stopped run does not repeat failed uploads,
        because the machine may be about to end.
        """
        was_stopped, until = stop.is_set(), time.monotonic() + LAST_S
        stop.clear()
        phase = self._progress.place[0]
        self._output = output
        self._ending.set()
        self._wake.set()
        while self._thread.is_alive() and not stop.is_set() and time.monotonic() < until:
            self._progress.heartbeat(f"{MIRRORING}, {self._words()}", at.step, at.tokens)
            self._thread.join(0.5)
        if self._thread.is_alive():
            self._tell(f"the last upload to {self._url} was not complete when the run ended", "warning")
        self._progress.heartbeat(phase, at.step, at.tokens)
        if was_stopped:
            stop.set()

    def _words(self) -> str:
        return f"{gibibytes(min(self._n_sent, self._n_bytes))} of {gibibytes(self._n_bytes)}" if self._n_bytes else "…"

    def _live(self) -> None:
        next_at = 0.0
        while not self._is_over:
            self._wake.wait()
            # Wait until the next upload is due; at the end, nothing is waited for.
            self._ending.wait(max(0.0, next_at - time.monotonic()))
            self._wake.clear()
            # Count from the save, not from the upload: an older checkpoint must be replaced earlier.
            next_at = self._saved_at + 60 * self._job.train.mirror_every_minutes
            is_last = self._ending.is_set()
            is_done = self._tried(self._upload_newest) and (not is_last or self._tried(self._upload_output))
            if not is_last or is_done or self._output is None:
                self._is_over = self._is_over or is_last
                continue
            time.sleep(RETRY_S)
            self._wake.set()

    def _tried(self, upload: Callable[[], None]) -> bool:
        """Upload something, and return whether this succeeded; report a failure."""
        self._busy_since = time.monotonic()
        try:
            self._claim()
            upload()
        except MirrorTaken as error:
            self._is_over = True
            self._state = msgspec.structs.replace(self._state, problem=str(error))
            self._note()
            self._tell(str(error), "error")
        except Exception as error:
            self._is_claimed = False
            self._tell_failure(error)
        else:
            return True
        finally:
            self._busy_since = float("inf")
            shutil.rmtree(self._staging, ignore_errors=True)
        return False

    def _claim(self) -> None:
        if not self._is_claimed:
            self._mirror.claim()
            self._is_claimed = True

    def _upload_newest(self) -> None:
        """Upload the newest intact checkpoint, unless it is already in the mirror."""
        if (newest := self._staged()) is None or step_of(newest) == self._state.step or step_of(newest) <= self._sent:
            return
        resumed = self._spec.resume_from
        if resumed and resumed.name == newest and self._mirror.has(newest):
            # An interrupted upload would destroy the checkpoint that this attempt resumed.
            self._note_sent(newest)
            return
        files = {file.name: file for file in self._staging.iterdir()}
        self._upload(newest, files, step_of(newest), self._job.train.keep_checkpoints)
        is_first = self._state.step is None
        self._note_sent(newest)
        message = f"step {self._state.step:,} is mirrored to {self._url}"
        rank_log.say(message)
        if is_first or self._n_failed:
            again = f", the first after {self._n_failed} failed uploads" if self._n_failed else ""
            self._progress.event("checkpoint-mirror", message + again)
        self._n_failed = 0

    def _note_sent(self, folder: str) -> None:
        self._sent = step_of(folder)
        self._state = Mirrored(self._url, self._state.run, self._sent, time.time())
        self._note()

    def _upload_output(self) -> None:
        """Upload the finished SAE, with its report card and examples."""
        if self._output is None or self._state.step is None:
            return
        found = sorted(file for file in self._output.rglob("*") if file.is_file() and not file.is_symlink())
        names = {str(file.relative_to(self._output)): file for file in found}
        shown = {name: file for name, file in names.items() if not any(part[0] == "." for part in Path(name).parts)}
        self._upload(SAE, shown, self._state.step)
        self._state = msgspec.structs.replace(self._state, has_sae=True, time=time.time(), problem="")
        self._note()
        self._tell(f"the finished SAE is mirrored to {self._url}/{SAE}", "info")

    def _upload(self, folder: str, files: dict[str, Path], step: int, keep: int = 0) -> None:
        spec = self._spec
        about = MirroredFolder(
            self._state.run, step, described(files), spec.world_size, spec.model_gpus, spec.device, spec.as_one_process
        )
        self._n_sent, self._n_bytes = 0, about.n_bytes
        if left := self._mirror.put(folder, files, about, keep, self._count):
            self._tell_rarely(f"older checkpoints stay in the mirror: {left}")

    def _count(self, n_bytes: int) -> None:
        self._n_sent += n_bytes

    def _staged(self) -> str | None:
        """Fill the staging folder with the newest intact checkpoint and what a resume needs; return its name."""
        for folder in newest_first(self._paths.checkpoints):
            if self._is_staged(folder):
                self._stage_rest()
                return folder.name
            if not folder.exists():
                # The run removed it because a later one was saved, so do not take an earlier one.
                return self._staged()
        return None

    def _is_staged(self, folder: Path) -> bool:
        """Fill the staging folder with a checkpoint's files; return False if they are damaged or were removed."""
        shutil.rmtree(self._staging, ignore_errors=True)
        self._staging.mkdir(mode=0o700)
        with contextlib.suppress(FileNotFoundError):
            for name in FILES:
                _link(folder / name, self._staging / name)
            return damage(self._staging) is None
        return False

    def _stage_rest(self) -> None:
        shutil.copyfile(self._paths.job_file, self._staging / JOB)
        with contextlib.suppress(FileNotFoundError):
            shutil.copyfile(self._paths.attempt(self._spec.attempt) / PLAN, self._staging / PLAN)
        # Without the metrics, only the curves up to this checkpoint are missing.
        with contextlib.suppress(StoreError):
            copy_store(self._paths.metrics_db, self._staging / METRICS, "metrics")

    # Reports

    def _tell_failure(self, error: Exception) -> None:
        self._n_failed += 1
        reason = str(error) if isinstance(error, UserError) else first_line(error)
        self._state = msgspec.structs.replace(self._state, problem=reason)
        self._note()
        self._tell_rarely(f"checkpoints are not mirrored: {reason}; the next checkpoint is tried again")

    def _tell_rarely(self, message: str) -> None:
        if time.monotonic() - self._told_at >= TELL_EVERY_S:
            self._told_at = time.monotonic()
            self._tell(message, "warning")

    def _tell(self, message: str, level: str) -> None:
        rank_log.say(message)
        self._progress.event("checkpoint-mirror", message, level)

    def _note(self) -> None:
        """Write the state for the app; the run does not depend on it."""
        with contextlib.suppress(OSError):
            write_json(self._paths.root / STATUS, self._state)


def _link(source: Path, target: Path) -> None:
    """Link a file under another name, or copy it if the file system has no hard links."""
    try:
        os.link(source, target, follow_symlinks=False)
    except FileNotFoundError:
        raise
    except OSError:
        shutil.copyfile(source, target)
