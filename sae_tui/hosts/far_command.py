"""Runs a `sae-tui` command on another host, shows its output, and returns its exit code."""

from __future__ import annotations

import contextlib
import os
import re
import selectors
import subprocess
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import IO

import msgspec

from sae_tui.hosts.causes import Cause, has_ssh_failed, no_connection, other_protocol
from sae_tui.hosts.link import end
from sae_tui.hosts.protocol import PROTOCOL, Hello, decode
from sae_tui.ssh import by_hand, login_argv
from trainer.contract.errors import UsageError, UserError, sentence
from trainer.contract.output import complain, has_done, show_text
from trainer.contract.printable import printable

# A request contains the text of job files, each of at most 1 MiB.
LONGEST_REQUEST = 64 << 20
LONGEST_LINE = 1 << 20
# The number of lines a login script may print before the greeting.
_MOST_NOISE = 200
_CHUNK = 64 << 10
# Matches a command that a message advises the user to run, in text or in JSON.
_ADVISED = re.compile(r"`(?:sae-tui|sae-train|chmod|kill|loginctl|pip|pipx|sudo|uv) [^`]+`")
_KEPT_COMPLAINTS = 20
# How long ssh may take to exit after Ctrl-C, and after its output has ended.
_LEAVE_S, _EXIT_S = 1.0, 10.0


class CommandRequest(msgspec.Struct, frozen=True):
    """A command for another host: its arguments, its working directory, and the text of its job files.

    It is sent as one line of JSON to the standard input of `sae-tui receive`, so that no argument appears on a command
    line there.
    """

    arguments: list[str]
    folder: str
    jobs: list[str] = []

    def encoded(self) -> bytes:
        try:
            return msgspec.json.encode(self) + b"\n"
        except UnicodeEncodeError:
            raise UsageError("a command for another host must be UTF-8") from None


class FarCommand:
    """A command on another host. The host is not trusted: its output is filtered before it reaches the terminal."""

    def __init__(self, host: str, request: CommandRequest, ssh: Sequence[str], *, prefix: str = "") -> None:
        """Prepare the command; `prefix` is prepended to each line of its output."""
        self._host, self._request, self._prefix = host, request.encoded(), prefix
        self._argv = login_argv(host, ["receive"], ssh)
        self._is_greeted, self._noise = False, 0
        self._complaints: list[str] = []

    def run(self) -> int:
        """Run the command and return its exit code; raise `UserError` if the host cannot be reached or is too old.

        The command exits when its standard input closes, even if this process is killed. Its jobs keep running.
        """
        try:
            process = subprocess.Popen(
                self._argv,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                start_new_session=True,
            )
        except OSError as error:
            raise UserError(f"{self._argv[0]} cannot be started: {sentence(error)}; install an ssh client") from None
        patience_s = _LEAVE_S
        try:
            self._follow(process)
            patience_s = _EXIT_S
        finally:
            for stream in (process.stdin, process.stdout, process.stderr):
                if stream:
                    stream.close()
            code = end(process, patience_s)
        if not self._is_greeted:
            raise UserError(f"host {self._host} {no_connection(self._host, code, self._complaints).sentence}")
        if has_ssh_failed(code):
            see = f"`{by_hand(self._host, 'jobs')}` shows its jobs, which keep running"
            raise UserError(f"the connection to host {self._host} was lost; {see}")
        return code

    def _follow(self, process: subprocess.Popen[bytes]) -> None:
        """Show the output until it ends."""
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        takers: dict[IO[bytes], Callable[[str], object]] = {
            process.stdout: lambda line: show_text(f"{self._prefix}{self._with_host(line)}\n"),
            process.stderr: lambda line: complain(f"{self._prefix}{self._with_host(line)}\n"),
        }
        for stream, line in _lines_of(takers):
            if self._is_greeted:
                takers[stream](printable(line.decode(errors="replace")))
            elif stream is process.stderr:
                self._complaints = [*self._complaints, printable(line.decode(errors="replace"))][-_KEPT_COMPLAINTS:]
            elif self._is_greeting(line):
                self._is_greeted = True
                has_done(f"host {self._host} has received the command")
                with contextlib.suppress(BrokenPipeError):
                    process.stdin.write(self._request)

    def _with_host(self, line: str) -> str:
        """Add the host to the commands in a message, because the same job id belongs to a different job here."""
        return _ADVISED.sub(rf"\g<0> on {self._host}", line)

    def _is_greeting(self, line: bytes) -> bool:
        """Return whether a line is the greeting rather than a login script's output; refuse other protocols."""
        try:
            hello = decode(line)
        except ValueError:
            self._noise += 1
            if self._noise > _MOST_NOISE:
                raise self._refusal(Cause("prints too much when you log in; silence its login scripts")) from None
            return False
        if not isinstance(hello, Hello):
            raise self._refusal(Cause("sent an invalid greeting"))
        if hello.protocol != PROTOCOL:
            raise self._refusal(other_protocol(hello.protocol, hello.version, PROTOCOL))
        return True

    def _refusal(self, cause: Cause) -> UserError:
        return UserError(f"host {self._host} {cause.sentence}")


def _lines_of(streams: Iterable[IO[bytes]]) -> Iterator[tuple[IO[bytes], bytes]]:
    """Yield each line of these streams as soon as it is complete; a line that is too long is split into several."""
    partial = dict.fromkeys(streams, b"")
    with selectors.DefaultSelector() as ready:
        for stream in partial:
            ready.register(stream, selectors.EVENT_READ, stream)
        while ready.get_map():
            for key, _ in ready.select():
                chunk = os.read(key.fd, _CHUNK)
                *lines, partial[key.data] = (partial[key.data] + chunk).split(b"\n")
                if not chunk:
                    ready.unregister(key.fileobj)
                if partial[key.data] and (not chunk or len(partial[key.data]) > LONGEST_LINE):
                    lines, partial[key.data] = [*lines, partial[key.data]], b""
                yield from ((key.data, line) for line in lines)
