"""A launcher in a process of its own: for every line it reads, it tries to start the job of that number."""

import sys
from pathlib import Path

from sae_tui.jobs.queue.waiting_job import Line
from trainer.contract.errors import UserError
from trainer.contract.paths import DataDir
from trainer.contract.store.job_store import Control


def main(root: str) -> None:
    data = DataDir(Path(root))
    control = Control(data.control_db)
    print("ready", flush=True)
    for word in sys.stdin:
        line = Line(data, control, control.job(int(word)))
        try:
            started = line.try_start()
        except UserError:
            started = False
        print(",".join(line.job.gpu_uuids) if started else "-", flush=True)
        # The locks are held until the round is over.
        sys.stdin.readline()
        line.locks.release()
        print("released", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
