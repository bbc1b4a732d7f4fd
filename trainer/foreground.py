"""A run in the foreground: starts the ranks as a supervisor would, shows how far they are, and ends them."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import time
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec
from tqdm import tqdm

from trainer.contract.config import JobConfig, dump_job
from trainer.contract.paths import RunPaths
from trainer.contract.problems import UserError
from trainer.contract.ranks import EXIT_FINISHED, EXIT_STOPPED, RankSpec, rank_command, rank_environment, write_spec
from trainer.contract.series import Heartbeat, SeriesReader
from trainer.contract.store import StoreError

POLL_S = 0.2
# What a rank may take to see that a peer is gone and to end by itself.
END_AFTER_FAILURE_S = 5.0
_SHOWN = ("fvu", "l0")
# tqdm's own takes 60 columns beside the bar.
BAR = "{desc} {percentage:.0f}%|{bar}| {n_fmt}/{total_fmt} [{remaining} left{postfix}]"


class Foreground:
    """One attempt of a run whose ranks are our children."""

    def __init__(self, job: JobConfig, spec: RankSpec) -> None:
        self._spec, self._paths = spec, RunPaths(spec.run_dir)
        self._total_steps = job.total_steps(spec.world_size)
        self._ranks: list[subprocess.Popen[bytes]] = []
        self._interrupts = 0
        if self._paths.job_file.exists():
            raise UserError(f"--out: there is a run in {spec.run_dir} already; choose another folder")
        self._paths.create()
        self._paths.job_file.touch(mode=0o600)
        self._paths.job_file.write_text(dump_job(job), encoding="utf-8")

    def run(self) -> int:
        """Trains to the end; Ctrl-C stops with a checkpoint, a second one at once. The exit code of the run."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._on_interrupt)
        spec_file = write_spec(self._spec)
        for rank in range(self._spec.world_size):
            # One by one, so that a Ctrl-C in between reaches those that run already.
            self._ranks.append(self._start(spec_file, rank))
        if self._interrupts:
            self._signal_ranks()
        with self._bar() as bar:
            self._watch(bar)
        codes = {process.returncode for process in self._ranks}
        if codes <= {EXIT_FINISHED, EXIT_STOPPED}:
            return max(codes)
        raise UserError(self._cause())

    def result(self) -> dict[str, Any]:
        """What came of it, for `--json`."""
        names = ("fvu", "l0", "dead_fraction", "tokens_per_s")
        heartbeat, latest = self._read()
        return {
            "output_path": str(self._spec.output_dir),
            "steps": heartbeat.step if heartbeat else None,
            "tokens": heartbeat.tokens if heartbeat else None,
            **{name: latest.get(name) for name in names},
        }

    def _start(self, spec_file: Path, rank: int) -> subprocess.Popen[bytes]:
        with self._paths.log(rank).open("ab") as log:
            return subprocess.Popen(
                rank_command(spec_file),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=rank_environment(self._spec, rank),
                preexec_fn=_ignore_sigint,
            )

    def _on_interrupt(self, _number: int, _frame: FrameType | None) -> None:
        self._interrupts += 1
        self._signal_ranks()

    def _signal_ranks(self) -> None:
        for process in self._ranks:
            process.send_signal(signal.SIGTERM if self._interrupts == 1 else signal.SIGKILL)

    def _bar(self) -> tqdm[Any]:
        return tqdm(total=self._total_steps, disable=None, dynamic_ncols=True, bar_format=BAR)

    def _watch(self, bar: tqdm[Any]) -> None:
        """Until all have ended; when one fails, the others cannot go on."""
        failed_since = None
        while any(process.poll() is None for process in self._ranks):
            self._show(bar)
            if failed_since is None and self._any_failed():
                failed_since = time.monotonic()
            if failed_since is not None and time.monotonic() - failed_since > END_AFTER_FAILURE_S:
                self._kill()
            time.sleep(POLL_S)
        self._show(bar)

    def _read(self) -> tuple[Heartbeat | None, dict[str, float]]:
        """What rank 0 wrote last; nothing where its store cannot be read, which does not make a run fail."""
        try:
            with contextlib.closing(SeriesReader(self._paths.metrics_db)) as reader:
                return reader.heartbeat(), reader.latest()
        except StoreError:
            return None, {}

    def _show(self, bar: tqdm[Any]) -> None:
        heartbeat, latest = self._read()
        if heartbeat:
            bar.set_description_str(heartbeat.phase, refresh=False)
            bar.set_postfix({name: f"{latest[name]:.4g}" for name in _SHOWN if name in latest}, refresh=False)
            bar.update(heartbeat.step - bar.n)
            bar.refresh()

    def _any_failed(self) -> bool:
        return any(process.returncode not in (None, EXIT_FINISHED, EXIT_STOPPED) for process in self._ranks)

    def _kill(self) -> None:
        for process in self._ranks:
            process.kill()

    def _cause(self) -> str:
        """What the rank says that failed first: the others only lost their connection to it."""
        left = [self._paths.rank_exit(self._spec.attempt, rank) for rank in range(self._spec.world_size)]
        found = sorted((file for file in left if file.exists()), key=lambda file: file.stat().st_mtime_ns)
        if found:
            return str(msgspec.json.decode(found[0].read_bytes())["error"])
        if self._interrupts:
            return "interrupted before a checkpoint was saved"
        ended = ", ".join(f"rank {rank} with {process.returncode}" for rank, process in enumerate(self._ranks))
        return f"training failed ({ended}); the logs are in {self._paths.logs}"


def _ignore_sigint() -> None:
    """In a rank before its program starts: Ctrl-C reaches the whole group, and we tell the ranks what it means."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
