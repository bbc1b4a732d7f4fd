"""Fixtures that run `sae-tui serve` as a separate process, with the app or with a test program."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.box import Box
from support.browser import Served


@pytest.fixture
def box(tmp_path: Path) -> Iterator[Box]:
    made = Box(tmp_path)
    yield made
    made.close()


@pytest.fixture
def serve(box: Box) -> Iterator[Callable[..., Served]]:
    """Return a function that starts `sae-tui --demo serve` with the box's data folder."""
    started: list[Served] = []

    def start(*options: str) -> Served:
        argv = [sys.executable, "-m", "sae_tui", "--demo", "serve", "--json", *options]
        started.append(Served(argv, box.env))
        return started[-1]

    yield start
    for one in started:
        one.close()


FAKE = """
import asyncio, sys
from sae_tui.cli_commands.output import show_json, warn
from sae_tui.web.server import run_server
argv = [sys.executable, "-c", "import os, sys, time\\n" + sys.argv[1]]
report = lambda port, url: show_json({"url": url, "port": port})
sys.exit(asyncio.run(run_server(argv, 0, report, warn)))
"""
READY = 'os.write(1, b"__GANGLION__\\n")\ndef packet(kind, body): return kind + len(body).to_bytes(4, "big") + body\n'


@pytest.fixture
def serve_fake() -> Iterator[Callable[[str], Served]]:
    """Return a function that starts the server with a test program in place of the app."""
    started: list[Served] = []

    def start(script: str) -> Served:
        started.append(Served([sys.executable, "-c", FAKE, READY + script], dict(os.environ)))
        return started[-1]

    yield start
    for one in started:
        one.close()
