"""Tests for `stream`: the messages it sends to the app on another machine, and when it ends."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO

from support.tui import record_job

from sae_tui.hosts.protocol import PROTOCOL, Hello, Jobs, Log, Message, RemoteGpus, decode
from trainer.contract.store.states import JobState


@contextmanager
def streaming(shell, *words: object) -> Iterator[tuple[subprocess.Popen[bytes], IO[bytes]]]:
    argv = shell.argv("stream", *words)
    process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=shell.env)
    assert process.stdout
    yield process, process.stdout
    process.kill()
    process.wait()


def messages(out: IO[bytes], *, until: type[Message]) -> list[Message]:
    """Read messages up to and including the first one of the type `until`, and return them."""
    read: list[Message] = []
    while not read or not isinstance(read[-1], until):
        line = out.readline()
        assert line, read
        read.append(decode(line))
    return read


def test_gpus_and_jobs_are_sent_until_standard_input_ends(shell) -> None:
    shell.data.create()
    record_job(shell.data, "first", JobState.QUEUED, host="elsewhere", note="\x1b[2J")
    with streaming(shell) as (process, out):
        hello, jobs, gpus = messages(out, until=RemoteGpus)
        assert isinstance(hello, Hello)
        assert isinstance(jobs, Jobs)
        assert isinstance(gpus, RemoteGpus)
        assert hello.protocol == PROTOCOL
        assert [(job.name, job.note) for job in jobs.jobs] == [("first", "�[2J")]
        while not all(gpu.healthy for gpu in gpus.gpus) or not gpus.gpus:
            (*_, gpus) = messages(out, until=RemoteGpus)
        assert [gpu.holder for gpu in gpus.gpus[:3]] == ["idle", "idle", "idle"]
        record_job(shell.data, "second", JobState.QUEUED, host="elsewhere")
        (*_, jobs) = messages(out, until=Jobs)
        assert [job.name for job in jobs.jobs] == ["second", "first"]
        process.stdin.close()
        assert process.wait(20) == 0


def test_the_stream_ends_when_its_output_is_closed(shell) -> None:
    with streaming(shell) as (process, out):
        messages(out, until=RemoteGpus)
        out.close()
        assert process.wait(20) == 141


def test_a_log_is_sent_as_it_grows(shell) -> None:
    shell.data.create()
    log = shell.data.run(3).log(1)
    log.parent.mkdir(parents=True)
    log.write_text("one\ntwo\n")
    with streaming(shell, "--log", 3, "--rank", 1) as (process, out):
        *_, first = messages(out, until=Log)
        assert first == Log(("one", "two"))
        with log.open("a") as more:
            more.write("three \x1b[2J\n")
        *_, second = messages(out, until=Log)
        assert second.lines[0].startswith("three ")
        process.stdin.close()
        assert process.wait(20) == 0


def test_no_line_contains_terminal_control_sequences(shell) -> None:
    shell.data.create()
    record_job(shell.data, "x", JobState.QUEUED, host="elsewhere", note="x\x1b]2;y\x07\u202e")
    done = subprocess.run(
        shell.argv("stream"), stdin=subprocess.DEVNULL, capture_output=True, env=shell.env, timeout=60
    )
    assert done.returncode == 0
    assert all(line.isprintable() for line in done.stdout.decode().splitlines())
    assert json.loads(done.stdout.splitlines()[1])["jobs"][0]["note"] == "x�]2;y��"


def test_the_host_option_works_only_in_the_app_and_is_validated(shell) -> None:
    assert "works only in the app; leave it out" in shell.errors("--host", "gpu1", "jobs", code=2)[0]
    (line,) = shell.errors("--host", "a;b", code=2)
    assert line.startswith('sae-tui: error: --host: "a;b" is not a host name; give one like gpu1')
