"""Runs one rank of an extraction. After a resume, progress (in rows) is reported from the last complete shard on."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import torch

from trainer.contract.json_file import write_json
from trainer.contract.settings.extract import ExtractJob
from trainer.contract.store.metrics_store import LOADING_MODEL, MetricRow
from trainer.extraction.extraction import ExtractionResult, extract
from trainer.extraction.peers import Alone, Peers, PeersStopped
from trainer.extraction.state import stored_state
from trainer.extraction.uploads import METER, restore_progress
from trainer.metrics.pace import memory_bytes
from trainer.reporting import rank_log
from trainer.reporting.progress import RunProgress

# The intervals between tokens/s values and between log lines, in seconds.
ROW_EVERY_S, LINE_EVERY_S = 1.0, 10.0
# The name of the file with the result of an extraction by several ranks.
RESULT = "result.json"
# The ranks' rendezvous folder, a subfolder of the attempt's folder.
PEERS = "peers"


def extract_rows(
    job: ExtractJob,
    rank: int,
    size: int,
    device: torch.device,
    folder: Path,
    progress: RunProgress,
    stop: threading.Event,
) -> bool:
    """Extract this rank's share; return True once there are enough rows or the text has run out, False after a stop.

    Ranks find each other in `folder`, which must be new; rank 0 writes the result there.
    """
    waiting = Peers(folder, rank, size, stop) if size > 1 else Alone(stop)
    try:
        waiting.begin(lambda: restore_progress(job), "restored")
    except PeersStopped:
        return False
    n_stored = stored_state(job, size).n_stored
    progress.heartbeat(LOADING_MODEL, n_stored, n_stored)
    reporter = Reporter(progress, device, job.extract.n_tokens, n_stored)
    peers = Peers(folder, rank, size, stop, reporter.advance) if size > 1 else Alone(stop, reporter.advance)
    result = extract(job, device, peers, rank_log.say)
    reporter.end(result)
    if size > 1 and rank == 0:
        write_json(folder / RESULT, result)
    return result.state == "finished"


class Reporter:
    """Reports to the store and the log how many of the `n_wanted` rows are kept, starting at `n_kept`."""

    def __init__(self, progress: RunProgress, device: torch.device, n_wanted: int, n_kept: int) -> None:
        self._progress, self._device, self._n_wanted = progress, device, n_wanted
        self._n_before, self._line_at = n_kept, 0.0
        # The start of the current interval, or None before the first batch, so that the time to load the model is
        # excluded.
        self._since: float | None = None

    def advance(self, n_kept: int) -> None:
        """Report that `n_kept` rows are kept; called after every batch."""
        now = time.monotonic()
        self._progress.heartbeat("extracting", n_kept, n_kept)
        if self._since is None:
            self._n_before, self._since = n_kept, now
        if now - self._since < ROW_EVERY_S:
            return
        rate = (n_kept - self._n_before) / (now - self._since)
        self._progress.rows([MetricRow("tokens_per_s", n_kept, rate), self._memory(n_kept)])
        self._n_before, self._since = n_kept, now
        if now >= self._line_at:
            self._line_at = now + LINE_EVERY_S
            upload = f"  {METER.words}" if METER.words else ""
            rank_log.say(f"row {n_kept:,}/{self._n_wanted:,}  {rate:,.0f} rows/s{upload}")

    def _memory(self, n_kept: int) -> MetricRow:
        return MetricRow("memory_bytes", n_kept, memory_bytes(self._device))

    def end(self, result: ExtractionResult) -> None:
        """Report the extraction result."""
        left_out = "".join(f", left out {n:,} {reason}" for reason, n in result.left_out.items() if n)
        sentence = f"{result.state}: {result.n_tokens:,} rows for each hook{left_out}"
        self._progress.heartbeat(result.state, result.n_tokens, result.n_tokens)
        self._progress.rows([self._memory(result.n_tokens)])
        self._progress.event("extraction", sentence)
        rank_log.say(sentence)
        for hook, folder in result.outputs.items():
            rank_log.say(f"{hook}: {folder}")
