"""Runs a launcher in a separate process: it reads job ids from standard input and tries to start each job."""

import sys
from pathlib import Path

from sae_tui.jobs.queue.waiting_job import QueueEntry
from trainer.contract.errors import UserError
from trainer.contract.paths import DataDir
from trainer.contract.store.job_store import Control


def main(root: str) -> None:
    data = DataDir(Path(root))
    control = Control(data.control_db)
    print("ready", flush=True)
    for word in sys.stdin:
        line = QueueEntry(data, control, control.job(int(word)))
        try:
            started = line.try_start()
        except UserError:
            started = False
        print(",".join(line.job.gpu_uuids) if started else "-", flush=True)
        # Hold the locks until the round is over.
        sys.stdin.readline()
        line.locks.release()
        print("released", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
