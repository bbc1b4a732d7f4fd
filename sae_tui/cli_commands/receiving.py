"""`sae-tui receive`: runs a command that `sae-tui` on another host has sent over ssh."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import NoReturn

from sae_tui.cli_commands.context import CommandContext
from sae_tui.cli_commands.output import show_json
from sae_tui.cli_commands.parser import make_parser
from sae_tui.hosts.far_command import LONGEST_REQUEST, CommandRequest
from sae_tui.hosts.protocol import PROTOCOL, Hello
from trainer.contract.errors import UserError
from trainer.contract.files import write_own
from trainer.contract.json_file import decode_as


def receive(context: CommandContext, flags: argparse.Namespace) -> int:
    """Send the greeting, read a `run` or `launch` command as one line of JSON, run it, and return its exit code."""
    show_json(Hello(PROTOCOL, version("sae-tui")), in_a_line=True)
    request = _read_request()
    command = make_parser(_refuse).parse_args(request.arguments)
    # Errors are reported in the format that the command asks for.
    flags.json = getattr(command, "json", False)
    if not hasattr(command, "on_host"):
        _refuse(context, command)
    _end_with_client()
    command.on_host = None
    _enter(request.folder, is_required=not request.jobs)
    if not request.jobs:
        command.folder = request.folder
    with _job_files(request.jobs) as files:
        if files:
            command.jobs = files
        code: int = command.command(CommandContext(command), command)
    return code


def _read_request() -> CommandRequest:
    try:
        return decode_as(sys.stdin.buffer.readline(LONGEST_REQUEST), CommandRequest)
    except ValueError as error:
        raise UserError(f"the command from the other host is invalid: {error}") from None


def _end_with_client() -> None:
    """Interrupt this process, as Ctrl-C would, when standard input ends because the connection is closed."""
    signal.signal(signal.SIGINT, signal.default_int_handler)

    def wait() -> None:
        while os.read(sys.stdin.fileno(), 4096):
            pass
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=wait, name="client", daemon=True).start()


def _enter(folder: str, *, is_required: bool) -> None:
    """Change to the folder in which the user entered the command, if it exists here or is required."""
    try:
        os.chdir(folder)
    except (OSError, ValueError):  # `ValueError`: the path contains a zero byte
        if is_required:
            there = f"{folder} is not a folder that you may enter on {socket.gethostname()}"
            raise UserError(f"--folder: {there}; create it there, or name another one") from None


@contextlib.contextmanager
def _job_files(texts: Sequence[str]) -> Iterator[list[Path]]:
    """Write the texts to job files that only this user can read, yield the files, and remove them afterwards."""
    with tempfile.TemporaryDirectory(prefix="sae-tui-") as folder:
        files = [Path(folder) / f"{number}.toml" for number in range(len(texts))]
        for file, text in zip(files, texts, strict=True):
            write_own(file, text)
        yield files


def _refuse(_: CommandContext, __: argparse.Namespace) -> NoReturn:
    raise UserError("only `run` and `launch` can be sent to another host")
