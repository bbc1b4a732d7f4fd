"""Runs `sae-tui` commands in forks of a process with all modules imported; each command starts in 5 ms.

Starting Python and importing the modules would take 0.15 core-seconds per command.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import importlib
import json
import os
import pkgutil
import socket
import socketserver
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

TESTS = Path(__file__).parents[1]
# Prefixes of variables that may differ between commands. Any other variable may affect how modules are imported.
FREE = ("SAE_TUI_", "PYTEST_")


def run_command(
    arguments: Sequence[str], env: Mapping[str, str], cwd: Path, timeout: float
) -> subprocess.CompletedProcess[str]:
    """Run `python -m sae_tui` with these arguments and return its exit code and output.

    The command is forked if its environment equals that of the preloaded process, except for `FREE` variables.
    Otherwise, a new Python process is started.
    """
    if _loading(env) != _loading(os.environ):
        argv = [sys.executable, "-m", "sae_tui", *arguments]
        return subprocess.run(argv, capture_output=True, text=True, timeout=timeout, env=dict(env), cwd=cwd)
    with socket.socket(socket.AF_UNIX) as connection, contextlib.ExitStack() as pipes:
        connection.settimeout(timeout)
        connection.connect(_server(tuple(sorted(_loading(env).items()))))
        readers, writers = zip(*(os.pipe() for _ in range(2)), strict=True)
        outputs = [pipes.enter_context(os.fdopen(reader, "rb")) for reader in readers]
        request = json.dumps({"arguments": list(arguments), "env": dict(env), "cwd": str(cwd)}).encode()
        socket.send_fds(connection, [len(request).to_bytes(4, "big")], writers)
        connection.sendall(request)
        for writer in writers:
            os.close(writer)
        stdout, stderr = _read_both(outputs)
        code = int(connection.makefile().read())
    return subprocess.CompletedProcess(arguments, code, stdout, stderr)


def _loading(env: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in env.items() if not name.startswith(FREE)}


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
def _server(environment: tuple[tuple[str, str], ...]) -> str:
    """Start the preloaded process in this environment and return the path of its socket."""
    folder = tempfile.TemporaryDirectory(prefix="sae-tui-")
    path = f"{folder.name}/socket"
    argv = [sys.executable, __file__, path]
    python_path = os.pathsep.join(filter(None, [str(TESTS.parent), os.environ.get("PYTHONPATH")]))
    process = subprocess.Popen(
        argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, env=dict(environment) | {"PYTHONPATH": python_path}
    )
    assert process.stdout
    assert process.stdout.readline() == b"listens\n"

    def end() -> None:
        process.kill()
        process.wait()
        folder.cleanup()

    atexit.register(end)
    return path


class Server(socketserver.ForkingMixIn, socketserver.UnixStreamServer):
    """Forks a process for every request so that commands run concurrently."""

    max_children = 1000
    request_queue_size = 100


class Request(socketserver.BaseRequestHandler):
    """A request to run a command."""

    def handle(self) -> None:
        """Run the command in a child process, so that its exit code is known no matter how it exits."""
        size, outputs, _, _ = socket.recv_fds(self.request, 4, 2)
        request = json.loads(self.request.makefile("rb").read(int.from_bytes(size, "big")))
        pid = os.fork()
        if pid == 0:
            self.request.close()
            _become(outputs, **request)
        for output in outputs:
            os.close(output)
        _, status = os.waitpid(pid, 0)
        self.request.sendall(str(os.waitstatus_to_exitcode(status)).encode())


def _become(outputs: Sequence[int], arguments: list[str], env: dict[str, str], cwd: str) -> None:
    """Make this process equivalent to `python -m sae_tui` in this folder, as far as the command can observe."""
    from sae_tui import __main__, cli

    for descriptor, output in enumerate(outputs, start=1):
        os.dup2(output, descriptor)
        os.close(output)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    sys.path[0] = cwd
    sys.argv = [__main__.__file__, *arguments]
    code = 1
    try:
        code = cli.main()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def serve(path: str) -> None:
    """Import the modules that commands use, and fork a process for every request until this process is killed."""
    import sae_tui.__main__
    import sae_tui.cli_commands

    for module in pkgutil.iter_modules(sae_tui.cli_commands.__path__, "sae_tui.cli_commands."):
        importlib.import_module(module.name)
    gc.freeze()
    with Server(path, Request) as server:
        sys.stdout.write("listens\n")
        sys.stdout.flush()
        server.serve_forever()


if __name__ == "__main__":
    serve(sys.argv[1])
