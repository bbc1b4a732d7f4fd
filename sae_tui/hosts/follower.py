"""Threads that start ssh and process its messages: one per host, reconnecting after failures, and one per log."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence

import msgspec

from sae_tui.gpu.past import RecentHistory, past
from sae_tui.gpu.ring import Ring
from sae_tui.hosts.causes import Cause, no_connection, no_message, other_protocol
from sae_tui.hosts.link import Link
from sae_tui.hosts.protocol import PROTOCOL, Hello, Jobs, Log, Message, RemoteGpus, decode
from sae_tui.hosts.view import ConnectionStage, HostView
from trainer.contract.printable import printable

FIRST_WAIT_S, LONGEST_WAIT_S = 1.0, 30.0
# After a connection that lasted longer than this, the delay before reconnecting is reset to its initial value.
_STEADY_S = 30.0
# A host sends data every second. A host that sends nothing for 5 s is shown as silent. After 30 s without data, its
# connection is cut and reopened. The greeting may take 60 s because logins can be slow.
SILENT_AFTER_S, CUT_AFTER_S, GREETING_S = 5.0, 30.0, 60.0
# The number of lines a login script may print before the greeting.
_MOST_NOISE = 50


class HostRefused(Exception):
    """Raised for a host that cannot be monitored; `cause` explains why."""

    def __init__(self, cause: Cause) -> None:
        super().__init__(cause.sentence)
        self.cause = cause


def messages(link: Link) -> Iterator[Message]:
    """Yield the greeting and the messages that follow.

    Raise `HostRefused` for a different protocol, an invalid message, or a host that was silent for too long.
    """
    lines = link.lines()
    try:
        if hello := _greeting(lines):
            link.is_greeted = True
            yield hello
            for line in lines:
                yield decode(line)
    except ValueError as error:
        raise HostRefused(no_message(printable(str(error)))) from None
    if link.cut_for:
        raise HostRefused(link.cut_for)


def cut_if_silent(link: Link) -> None:
    """Stop a connection that has been silent for too long; a host is allowed more time to send its greeting.

    ssh detects a broken connection, but not a host that hangs while the connection itself is fine. Any byte counts as a
    heartbeat, because a message with many jobs can take more than 30 s over a slow connection.
    """
    silent_s = time.monotonic() - link.heard[0]
    if silent_s > (CUT_AFTER_S if link.is_greeted else GREETING_S):
        link.stop(Cause(f"has sent nothing for {silent_s:.0f} s"))


def _greeting(lines: Iterator[bytes]) -> Hello | None:
    """Return the greeting, skipping the output of login scripts, or None if the output ends before the greeting."""
    for _, line in zip(range(_MOST_NOISE), lines, strict=False):
        try:
            hello = decode(line)
        except ValueError:
            continue
        if not isinstance(hello, Hello):
            break
        if hello.protocol != PROTOCOL:
            raise HostRefused(other_protocol(hello.protocol, hello.version, PROTOCOL))
        return hello
    else:
        return None
    raise ValueError("no greeting")


class HostFollower:
    """Keeps a host's `view` and GPU history up to date on a separate thread.

    The thread calls `on_change` when the state or the jobs change, but not for every sample; screens poll for samples.
    """

    def __init__(self, name: str, argv: Sequence[str], on_change: Callable[[], object]) -> None:
        self.view = HostView(name, since=time.time())
        self._argv = argv
        self._on_change = on_change
        self._rings: dict[int, Ring] = {}
        self._stopped = threading.Event()
        self._link: Link | None = None
        self._thread = threading.Thread(target=self._run, name=f"host-{name}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Stop ssh and the thread, without waiting for them."""
        self._stopped.set()
        self.cut()

    def cut(self) -> None:
        """Stop ssh; the thread then restarts it."""
        if link := self._link:
            link.stop()

    def past(self, n: int, interval_s: float) -> RecentHistory:
        """Return each GPU's history over the last `n` intervals, by this machine's clock."""
        return past(self._rings, n, interval_s=interval_s, now=time.time())

    def _run(self) -> None:
        wait_s = FIRST_WAIT_S
        while not self._stopped.is_set():
            began = time.monotonic()
            try:
                cause = self._follow()
            except Exception as error:
                # This thread must survive anything sent by the other host.
                cause = Cause(printable(f"cannot be followed: {error!r}"))
            if self._stopped.is_set():
                return
            wait_s = FIRST_WAIT_S if time.monotonic() - began > _STEADY_S else wait_s
            self._tell_end(cause)
            self._stopped.wait(max(wait_s, cause.wait_s))
            wait_s = min(LONGEST_WAIT_S, 2 * wait_s)

    def _follow(self) -> Cause:
        """Process the messages from one connection until it ends, and return why it ended."""
        try:
            link = self._link = Link(self._argv, self._judge_silence)
        except OSError as error:
            return Cause(f"cannot be contacted: {self._argv[0]}: {error.strerror}; install an ssh client")
        if self._stopped.is_set():
            link.stop()
        try:
            for message in messages(link):
                self._take(message)
        except HostRefused as refusal:
            return refusal.cause
        finally:
            code = link.close()
        return Cause("") if link.is_greeted else no_connection(self.view.name, code, link.complaints)

    def _judge_silence(self) -> None:
        """Mark a host as silent after 5 s without data, and cut a connection after 30 s of silence."""
        if (link := self._link) is None:
            return
        monotonic, heard = link.heard
        if self.view.is_connected and time.monotonic() - monotonic > SILENT_AFTER_S:
            self._change(stage=ConnectionStage.SILENT, since=max(heard, self.view.since), gpus=())
        cut_if_silent(link)

    def _take(self, message: Message) -> None:
        if self.view.stage is ConnectionStage.SILENT:
            self._change(stage=ConnectionStage.CONNECTED, sentence="", since=time.time())
        match message:
            case Hello():
                self._change(stage=ConnectionStage.CONNECTED, sentence="", since=time.time(), problem="")
            case RemoteGpus():
                self._take_gpus(message)
            case Jobs():
                # Keep each id only once, because an untrusted host may send an id several times.
                jobs = tuple({job.id: job.view(self.view.name) for job in message.jobs}.values())
                now = {"jobs": jobs, "more": message.more, "jobs_problem": message.problem}
                if any(getattr(self.view, name) != value for name, value in now.items()):
                    self._change(**now)
            case Log():
                pass

    def _take_gpus(self, message: RemoteGpus) -> None:
        now = time.time()
        # Keep buffers only for the indices in this message, so that a host cannot exhaust memory by sending new
        # indices.
        self._rings = {gpu.index: self._rings.get(gpu.index) or Ring() for gpu in message.gpus}
        for gpu in message.gpus:
            self._rings[gpu.index].append(gpu.sample(now))
        has_changed = message.problem != self.view.problem or len(message.gpus) != len(self.view.gpus)
        self.view = msgspec.structs.replace(self.view, gpus=message.gpus, problem=message.problem)
        if has_changed:
            self._on_change()

    def _tell_end(self, cause: Cause) -> None:
        """Show why there is no connection and, if the connection was cut, since when."""
        if self.view.stage in (ConnectionStage.CONNECTED, ConnectionStage.SILENT):
            since = time.time() if self.view.is_connected else self.view.since
            self._change(stage=ConnectionStage.CUT, sentence=cause.sentence, since=since, gpus=())
        elif self.view.sentence != cause.sentence:
            stage = ConnectionStage.CUT if self.view.stage is ConnectionStage.CUT else ConnectionStage.FAILED
            self._change(stage=stage, sentence=cause.sentence)

    def _change(self, **fields: object) -> None:
        self.view = msgspec.structs.replace(self.view, **fields)
        self._on_change()


class FarLogReader:
    """A thread that passes log lines to `on_lines`; the last line explains why no more lines follow.

    The second argument of `on_lines` is the unfinished line, or None if it has not changed.
    """

    def __init__(self, host: str, argv: Sequence[str], on_lines: Callable[[Sequence[str], str | None], object]) -> None:
        self._host, self._argv, self._on_lines = host, argv, on_lines
        self._stopped = threading.Event()
        self._link: Link | None = None
        self._thread = threading.Thread(target=self._run, name="far-log", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        if link := self._link:
            link.stop()

    def _run(self) -> None:
        try:
            end = self._follow()
        except Exception as error:
            end = f"cannot be followed: {error!r}"
        if not self._stopped.is_set():
            self._on_lines([f"({self._host} {end})"], None)

    def _follow(self) -> str:
        """Pass lines to `on_lines` until the log ends, and return why it ended."""
        try:
            link = self._link = Link(self._argv)
        except OSError as error:
            return f"cannot be contacted: {self._argv[0]}: {error.strerror}"
        if self._stopped.is_set():
            link.stop()
        code = 0
        try:
            for message in messages(link):
                if isinstance(message, Log):
                    self._on_lines(message.lines, message.unfinished)
        except HostRefused as refusal:
            return refusal.cause.sentence
        finally:
            code = link.close()
        return "ended the log" if link.is_greeted else no_connection(self._host, code, link.complaints).sentence
