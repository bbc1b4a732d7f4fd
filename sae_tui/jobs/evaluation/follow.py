"""The process that evaluates a job: `python -m sae_tui.jobs.evaluation.follow DATA_DIR REQUEST` forks it.

It holds the run's evaluation lock and that of its GPU, runs the trainer's command, and records in the list of jobs how
that ended.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from sae_tui.jobs import named_python
from sae_tui.jobs.background import go_on
from sae_tui.jobs.cards.locks import GpuLocks
from sae_tui.jobs.evaluation.outcome import FAILED, STARTED, failure, outcome
from sae_tui.jobs.evaluation.request import Request
from sae_tui.jobs.supervisor_log import retry
from trainer.contract.errors import UserError
from trainer.contract.json_file import decode_as
from trainer.contract.locks import FileLock
from trainer.contract.paths import DataDir, umask_of
from trainer.contract.planning.gpu_vendors import VENDORS, hide_all
from trainer.contract.prctl import end_with_parent
from trainer.contract.store.job_store import Control


class Evaluation:
    """One evaluation of a job; raise `UserError` where another one is going."""

    def __init__(self, data: DataDir, request: Request) -> None:
        self._data, self._request = data, request
        self._paths = data.run(request.job_id)
        os.umask(umask_of(data.root))
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        self._lock = FileLock(self._paths.evaluation_lock)
        if not self._lock.acquire():
            raise UserError("another one is going")
        self._gpu = self._take_card()
        card = request.card if self._gpu else None
        self._tell(STARTED, f"is being evaluated on {f'GPU {card.index}' if card else 'the CPU'}")

    def run(self, command: Sequence[str] = ()) -> None:
        """Evaluate by the Python of the request, or by this command, and record how that ended."""
        python = self._request.python
        card = self._request.card if self._gpu else None
        pinned = VENDORS[card.vendor].pin([card.uuid]) if card else {}
        model = ["--model", self._request.model] if self._request.model else []
        probe = ["--probe"] if self._request.is_probed else []
        trainer = command or named_python.command(python, "eval")
        argv = [*trainer, str(self._paths.root), "--device", "cuda" if card else "cpu", *model, *probe]
        code = _run(argv, {**named_python.variables(python), **hide_all(), **pinned})
        if code:
            self._tell(FAILED, failure(self._paths, code), "warning")
        else:
            self._tell(*outcome(self._data, self._request.job_id))

    def _take_card(self) -> GpuLocks | None:
        """Reserve the GPU for as long as this process lives; None where another has got it, or none was chosen."""
        if (card := self._request.card) is None or card.vendor not in VENDORS:
            return None
        locks = GpuLocks(Path(card.locks), [card.uuid])
        return locks if locks.take() else None

    def _tell(self, kind: str, message: str, level: str = "info") -> None:
        """Record an event of the job, unless it was deleted meanwhile."""

        def add() -> None:
            with contextlib.closing(Control(self._data.control_db)) as control:
                if control.state(self._request.job_id) is not None:
                    control.add_event(self._request.job_id, kind, message, level)

        retry("recording the evaluation", add)


def _run(argv: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run a command that ends with this process; return its exit code."""
    parent = os.getpid()
    return subprocess.Popen(
        argv, stdin=subprocess.DEVNULL, cwd="/", env=environment, preexec_fn=lambda: end_with_parent(parent)
    ).wait()


def main(arguments: Sequence[str], command: Sequence[str] = ()) -> int:
    """Fork the process that evaluates; return in the first one 0 once it has begun, 1 if it could not."""
    root, request = arguments

    def begin() -> Callable[[], None]:
        evaluation = Evaluation(DataDir(Path(root)), decode_as(request, Request))
        return lambda: evaluation.run(command)

    return go_on(begin)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
