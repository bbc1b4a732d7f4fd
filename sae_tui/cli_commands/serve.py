"""`sae-tui serve`: serves the app to browsers on this machine only."""

from __future__ import annotations

import argparse
import asyncio
import os
import socket
import stat
import sys

from sae_tui.cli_commands.context import CommandContext
from sae_tui.cli_commands.output import say, show_json, warn
from sae_tui.jobs.user import user_name
from sae_tui.web.page import MISSING
from trainer.contract.errors import UserError


def serve(context: CommandContext, flags: argparse.Namespace) -> int:
    """Serve browser sessions of the app until interrupted."""
    try:
        from sae_tui.web.server import run_server
    except ModuleNotFoundError:
        raise UserError(MISSING) from None

    def tell(port: int, url: str) -> None:
        if stat.S_ISREG(status := os.fstat(sys.stdout.fileno()).st_mode) and status & (stat.S_IRGRP | stat.S_IROTH):
            warn("the address is written to a file that other users can read; run `chmod go-r` on it")
        if context.as_json:
            show_json({"url": url, "pid": os.getpid(), "port": port, "read_only": not flags.write})
            return
        say(url)
        say("Anyone who has this address sees what you see, and " + _WHAT[flags.write])
        say("It works only on this machine. To use it from your own computer, run this there and leave it running:")
        say(f"  ssh -L {port}:127.0.0.1:{port} {user_name()}@{socket.gethostname()}")
        say("Ctrl-C stops it; jobs keep running.")

    return asyncio.run(run_server(_argv(context, write=flags.write), flags.port, tell, warn))


_WHAT = {
    True: "can launch, stop and delete jobs as you.",
    False: "cannot change anything (--write allows it).",
}


def _argv(context: CommandContext, *, write: bool) -> list[str]:
    """Return the command for a browser session.

    The command includes -P because other users may be able to write to the current folder.
    """
    argv = [sys.executable, "-P", "-m", "sae_tui", *context.words]
    return argv if write else [*argv, "--readonly"]
