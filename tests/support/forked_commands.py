"""Runs `sae-tui` commands, supervisors and queue processes in forks of a process with all modules imported.

Each of them starts in 5 ms. Starting Python and importing the modules would take 0.15 core-seconds per process.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import ctypes
import functools
import gc
import importlib
import json
import os
import pkgutil
import select
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

TESTS = Path(__file__).parents[1]
# Prefixes of variables that affect how Python starts, which libraries it loads, or what modules read at import.
_AT_IMPORT = ("PYTHON", "LD_", "LC_", "LANG", "TQDM_")
# The functions that do the same as these programs, which are given as the arguments after Python's path.
_COMMAND = ("-m", "sae_tui")
_FAKE_SUPERVISOR, _FAKE_QUEUE = (str(TESTS / "jobs" / f"fake_{name}.py") for name in ("supervisor", "queue"))
_PROGRAMS = {
    _COMMAND: "sae_tui.cli:main",
    ("-P", "-m", "sae_tui.jobs.supervisor.supervise"): "sae_tui.jobs.supervisor.supervise:main",
    ("-P", "-m", "sae_tui.jobs.queue_process"): "sae_tui.jobs.queue_process:main",
    (_FAKE_SUPERVISOR,): "tests.jobs.fake_supervisor:run",
    (_FAKE_QUEUE,): "tests.jobs.fake_queue:run",
}
# If this variable is set, jobs launched by a forked command have fake ranks, which saves two core-seconds per rank.
FAKE_RANKS = "FAKE_RANKS"
# The modules that these programs import late.
_LATE = ("sae_tui.jobs.supervisor.end_hook", "sae_tui.jobs.supervisor.program")
# The longest command line that a forked process can show in /proc.
_LONGEST_LINE = 8000
# The environment of the preloaded process; tests change the environment of this process later.
_AT_START = dict(os.environ)
# The socket of the preloaded process, in its forks.
_socket = ""


def run_command(
    arguments: Sequence[str], env: Mapping[str, str], cwd: Path, timeout: float
) -> subprocess.CompletedProcess[str]:
    """Run `python -m sae_tui` with these arguments and return its exit code and output.

    The command is forked unless it has other values than the preloaded process for the variables in `_AT_IMPORT`.
    Otherwise, a new Python process is started.
    """
    argv = [sys.executable, *_COMMAND, *arguments]
    if _read_at_import(env) != _read_at_import(_AT_START):
        return subprocess.run(argv, capture_output=True, text=True, timeout=timeout, env=dict(env), cwd=cwd)
    with contextlib.ExitStack() as pipes:
        readers, writers = zip(*(os.pipe() for _ in range(2)), strict=True)
        outputs = [pipes.enter_context(os.fdopen(reader, "rb")) for reader in readers]
        connection = pipes.enter_context(socket.socket(socket.AF_UNIX))
        _send(connection, _server(), argv, env, cwd, writers, timeout)
        for writer in writers:
            os.close(writer)
        stdout, stderr = _read_both(outputs)
        code = int(connection.makefile().read())
    return subprocess.CompletedProcess(arguments, code, stdout, stderr)


class ForkingSubprocess:
    """The module `subprocess`, except that `run` forks supervisors and queue processes instead of starting Python."""

    def __getattr__(self, name: str) -> Any:
        return getattr(subprocess, name)

    @staticmethod
    def run(argv: Sequence[str], **options: Any) -> subprocess.CompletedProcess[bytes]:
        """Run a program that detaches itself; fork it if its environment allows that."""
        env = {os.fsdecode(name): os.fsdecode(value) for name, value in options["env"].items()}
        if _program(argv) is None or _read_at_import(env) != _read_at_import(_AT_START):
            return subprocess.run(argv, **options)
        with socket.socket(socket.AF_UNIX) as connection:
            outputs = [options["stdout"], options["stderr"]]
            path = _socket or _server()
            try:
                _send(connection, path, argv, env, options["cwd"], outputs, options["timeout"], detached=True)
                code = int(connection.makefile().read())
            except TimeoutError:
                raise subprocess.TimeoutExpired(argv, options["timeout"]) from None
        return subprocess.CompletedProcess(argv, code)


def fork_detached_programs() -> None:
    """Fork supervisors and queue processes that this process starts from now on."""
    from sae_tui.jobs import detach

    vars(detach)["subprocess"] = ForkingSubprocess()


def _program(argv: Sequence[str]) -> tuple[str, ...] | None:
    """Return the program in a command line, or None if it cannot be forked."""
    return next((one for one in _PROGRAMS if tuple(argv[: len(one) + 1]) == (sys.executable, *one)), None)


def _read_at_import(env: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in env.items() if name.startswith(_AT_IMPORT)}


def _send(
    connection: socket.socket,
    path: str,
    argv: Sequence[str],
    env: Mapping[str, str],
    cwd: Path | str,
    outputs: Sequence[int],
    timeout: float,
    *,
    detached: bool = False,
) -> None:
    """Ask the preloaded process to run a program, whose exit code can then be read from the connection."""
    connection.settimeout(timeout)
    connection.connect(path)
    request = {"argv": list(argv), "env": dict(env), "cwd": str(cwd), "detached": detached}
    encoded = json.dumps(request).encode()
    socket.send_fds(connection, [len(encoded).to_bytes(4, "big")], outputs)
    connection.sendall(encoded)


def _read_both(outputs: Sequence[BinaryIO]) -> list[str]:
    """Read both pipes concurrently to their ends, because a full pipe would block the command."""
    texts = ["", ""]

    def read(number: int) -> None:
        texts[number] = outputs[number].read().decode()

    threads = [threading.Thread(target=read, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return texts


@functools.cache
def _server() -> str:
    """Start the preloaded process, and return the path of its socket."""
    folder = tempfile.TemporaryDirectory(prefix="sae-tui-")
    path = f"{folder.name}/socket"
    argv = [sys.executable, __file__, path, _LONGEST_LINE * " "]
    process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, env=_AT_START)
    assert process.stdout
    assert process.stdout.readline() == b"listens\n"
    owner = os.getpid()

    def end() -> None:
        if os.getpid() == owner:
            process.kill()
            process.wait()
            folder.cleanup()

    atexit.register(end)
    return path


def _answer(listener: socket.socket) -> NoReturn:
    """Fork a process for every request, so that programs run concurrently, and return each program's exit code."""
    poller = select.poll()
    poller.register(listener, select.POLLIN)
    running: dict[int, tuple[int, socket.socket]] = {}
    while True:
        for descriptor, _ in poller.poll():
            if descriptor == listener.fileno():
                connection, _ = listener.accept()
                pid = _fork(connection)
                pidfd = os.pidfd_open(pid)
                running[pidfd] = pid, connection
                poller.register(pidfd, select.POLLIN)
            else:
                pid, connection = running.pop(descriptor)
                poller.unregister(descriptor)
                os.close(descriptor)
                _, status = os.waitpid(pid, 0)
                # A client that waited too long may be gone.
                with connection, contextlib.suppress(OSError):
                    connection.sendall(str(os.waitstatus_to_exitcode(status)).encode())


def _fork(connection: socket.socket) -> int:
    """Fork the program that is requested on a connection, and return its pid."""
    size, outputs, _, _ = socket.recv_fds(connection, 4, 2)
    with connection.makefile("rb") as stream:
        request = json.loads(stream.read(int.from_bytes(size, "big")))
    pid = os.fork()
    if pid == 0:
        _become(outputs, **request)
    for output in outputs:
        os.close(output)
    return pid


def _become(outputs: Sequence[int], argv: list[str], env: dict[str, str], cwd: str, detached: bool) -> NoReturn:
    """Make this process equivalent to the program in this folder, as far as the program can observe."""
    program = _program(argv)
    assert program
    if detached:
        os.setsid()
    for descriptor, output in enumerate(outputs, start=1):
        os.dup2(output, descriptor)
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    sys.path[0:1] = [cwd] if program == _COMMAND else []
    if env.get(FAKE_RANKS):
        _fake_ranks()
    become(argv, env, cwd, _function(program), argv[len(program) + 1 :])


def _fake_ranks() -> None:
    from sae_tui.jobs import detach

    for start, program in ((detach.start, _FAKE_SUPERVISOR), (detach.start_queue, _FAKE_QUEUE)):
        start.__defaults__ = ((sys.executable, program),)


def become(
    argv: Sequence[str], env: Mapping[str, str], cwd: str, function: Callable[[list[str]], int], arguments: list[str]
) -> NoReturn:
    """Continue as a program with this command line, which calls a function with the program's arguments."""
    show_command_line(argv)
    os.environ.clear()
    os.environ.update(env)
    time.tzset()
    os.chdir(cwd)
    sys.argv, sys.orig_argv = [argv[0], *arguments], [*argv]
    code = 1
    try:
        code = function(arguments)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _function(program: tuple[str, ...]) -> Callable[[list[str]], int]:
    module, _, name = _PROGRAMS[program].partition(":")
    function: Callable[[list[str]], int] = getattr(importlib.import_module(module), name)
    return function


def show_command_line(argv: Sequence[str]) -> None:
    """Show another command line in /proc, since tests and the app find processes by it."""
    # The number of fields before the start of the arguments, after the name, which may contain spaces.
    before = 45
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = map(int, fields[before : before + 2])
    line = b"".join(os.fsencode(each) + b"\0" for each in argv)[: end - start - 1] + b"\0"
    # The rest of the line stays empty, because only the kernel's capability CAP_SYS_RESOURCE allows a shorter one.
    ctypes.memmove(start, line.ljust(end - start, b"\0"), end - start)


def serve(path: str) -> None:
    """Import the modules that programs use, and fork a process for every request until this process is killed."""
    global _socket
    import sae_tui.__main__
    import sae_tui.cli_commands

    for module in pkgutil.iter_modules(sae_tui.cli_commands.__path__, "sae_tui.cli_commands."):
        importlib.import_module(module.name)
    for name in _LATE:
        importlib.import_module(name)
    for program in _PROGRAMS:
        _function(program)
    # Each parser looks for translations of argparse's words in 90 files.
    vars(argparse)["_"] = str
    fork_detached_programs()
    _socket = path
    gc.freeze()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen(100)
        sys.stdout.write("listens\n")
        sys.stdout.flush()
        _answer(listener)


if __name__ == "__main__":
    # The programs import this module by its name.
    sys.path[1:1] = [str(TESTS.parent), str(TESTS)]
    importlib.import_module("support.forked_commands").serve(sys.argv[1])
