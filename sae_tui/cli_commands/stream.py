"""`sae-tui stream`: sends this machine's GPUs and jobs to an app on another machine."""

from __future__ import annotations

import argparse
import os
import select
import sys
import time
from importlib.metadata import version

from sae_tui.cli_commands.context import CommandContext
from sae_tui.cli_commands.output import show_json
from sae_tui.gpu import faults
from sae_tui.gpu.sampler import Sampler, SamplerStatus
from sae_tui.gpu.visible import visible
from sae_tui.hosts.protocol import (
    MOST_GPUS,
    PROTOCOL,
    Hello,
    Jobs,
    Log,
    Message,
    RemoteGpus,
    jobs_message,
    log_messages,
    remote_gpu,
)
from sae_tui.hosts.sent_job import SentJob, feature_parts
from sae_tui.jobs.files import LogFollower
from sae_tui.jobs.gpus.availability import choices, describe_use, with_other_users
from sae_tui.jobs.gpus.locks import lock_folder
from sae_tui.jobs.gpus.occupancy import Occupancy, gpu_source
from sae_tui.jobs.view.reader import JobsReader
from trainer.contract.errors import UsageError
from trainer.contract.exits import Exit

EVERY_S = 1.0
_RECONCILE_EVERY = 5
_LOG_EVERY_S, _JOB_EVERY_S = 0.25, 2.0
_FIRST_LINES = 2000


def stream(context: CommandContext, flags: argparse.Namespace) -> int:
    """Write messages about GPUs and jobs, about one job, or from its log, until standard input or output is closed."""
    if flags.features and flags.job is None:
        raise UsageError("--features needs --job with the id of a job")
    _tell(Hello(PROTOCOL, version("sae-tui")))
    if flags.log is not None:
        return _stream_log(context, flags)
    if flags.job is not None:
        return _stream_features(context, flags) if flags.features else _stream_job(context, flags)
    source = GpuSide(context)
    jobs, sent, count = JobsReader(context.data), Jobs(problem="not read yet"), 0
    while True:
        began = time.monotonic()
        if count % _RECONCILE_EVERY == 0:
            context.mend()
        jobs.poll()
        now = jobs_message(jobs.jobs, jobs.problem or jobs.passed_over)
        if now != sent:
            _tell(now)
            sent = now
        _tell(source.gpus())
        count += 1
        if _is_over(EVERY_S - (time.monotonic() - began)):
            source.close()
            return Exit.DONE


class GpuSide:
    """Reads this machine's GPUs, each in a separate thread, and determines who is using each GPU."""

    def __init__(self, context: CommandContext) -> None:
        self._data = context.data
        self._occupancy = Occupancy(context.data)
        source = gpu_source(context.source_name, self._occupancy, count=context.gpu_count)
        self._name = source.name
        self._sampler = Sampler(source, EVERY_S)
        self._sampler.start()
        self._has_waited = False

    def gpus(self) -> RemoteGpus:
        """Return the latest sample from every GPU; the first call waits up to `EVERY_S` for the samples."""
        if not self._has_waited:
            self._wait_for_all()
        samples = visible(self._sampler.latest(), self._name)[:MOST_GPUS]
        held = with_other_users(self._occupancy.holders(), lock_folder(self._data, self._name), samples)
        uses = map(describe_use, choices(samples, held))
        sampled = tuple(remote_gpu(sample, *use) for sample, use in zip(samples, uses, strict=True))
        opening = self._sampler.status is SamplerStatus.OPENING
        problem = "asking the driver…" if opening else str(self._sampler.problem or "")
        return RemoteGpus(sampled, "" if sampled else problem)

    def _wait_for_all(self) -> None:
        self._has_waited, deadline = True, time.monotonic() + EVERY_S
        while time.monotonic() < deadline and not self._have_answered:
            time.sleep(0.02)

    @property
    def _have_answered(self) -> bool:
        answers = [sample.reason != faults.NO_ANSWER_YET for sample in self._sampler.latest()]
        return self._sampler.status is not SamplerStatus.OPENING and all(answers)

    def close(self) -> None:
        """Stop reading; if a thread hangs in the driver, exit the process, because Python would wait for the thread."""
        if not self._sampler.stop(timeout=0.2):
            os._exit(Exit.DONE)


def _stream_log(context: CommandContext, flags: argparse.Namespace) -> int:
    path = context.data.run(flags.log).log(flags.rank)
    lines, follower = LogFollower.from_end(path, _FIRST_LINES)
    if not lines:
        _tell(Log())
    shown = ""
    while True:
        unfinished = follower.unfinished
        for message in log_messages(lines, unfinished if unfinished != shown else None):
            _tell(message)
        shown = unfinished
        if _is_over(_LOG_EVERY_S):
            return Exit.DONE
        lines = follower.new_lines()


def _stream_job(context: CommandContext, flags: argparse.Namespace) -> int:
    sent = SentJob(context.data, flags.job)
    while True:
        for message in sent.messages():
            _tell(message)
        if _is_over(_JOB_EVERY_S):
            sent.close()
            return Exit.DONE


def _stream_features(context: CommandContext, flags: argparse.Namespace) -> int:
    for message in feature_parts(context.data, flags.job):
        _tell(message)
        if _is_over(0):
            break
    return Exit.DONE


def _tell(message: Message) -> None:
    show_json(message, in_a_line=True)


def _is_over(wait_s: float) -> bool:
    """Wait up to `wait_s`; return whether standard input has ended, meaning that the client has disconnected."""
    deadline = time.monotonic() + max(0.0, wait_s)
    while True:
        ready, _, _ = select.select([sys.stdin], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            return False
        if not os.read(sys.stdin.fileno(), 4096):
            return True
