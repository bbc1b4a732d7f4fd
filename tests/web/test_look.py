"""Tests for browser sessions with the real app: output, input, read-only use, and processes that end."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from support import chromium
from support.box import CTRL_L, CTRL_O, Box
from support.browser import Served, wait_until

from trainer.contract.store.states import JobState

Serve = Callable[..., Served]
without_chromium = pytest.mark.skipif(chromium.PROGRAM is None or "CI" in os.environ, reason="no Chromium is installed")


def widest(text: str) -> int:
    return max(map(len, text.splitlines()))


@pytest.mark.slow
async def test_a_job_outlives_its_browser_session_and_only_write_mode_can_stop_it(box: Box, serve: Serve) -> None:
    may = serve("--write")
    async with may.look(120, 40) as look:
        await look.wait_for("RTX 3080")
        for keys, shows in (
            ("n", "Review"),
            (CTRL_O, "Job file to open"),
            (f"{box.job_file(1_000_000)}\r", "3 GPUs, "),
            (CTRL_L, "Launch anyway?"),
            ("y", "1 running"),
        ):
            await look.press(keys)
            await look.wait_for(shows)
        (app,) = may.below
        may.process.send_signal(signal.SIGKILL)
        await wait_until(lambda: not app.is_running())

    only = serve()
    async with only.look() as look:
        await look.wait_for("read-only")
        await look.wait_for("▶ running")
        for key in ("s", "p", "D", "y", "n", "R", "#"):
            await look.press(key)
        # Open the list of messages. A question opened by an earlier key would cover this list.
        await look.press("!")
        await look.wait_for("This view is read-only")
        assert "Stop job" not in look.text

    may = serve("--write")
    async with may.look() as look:
        await look.wait_for("e2e")
        assert box.shell("job", "1")["state"] == "running"
        await look.press("s")
        await look.wait_for("Stop job 1")
        await look.press("y")
        await look.wait_for("◼ stopped")


async def test_a_session_has_the_size_of_its_window_and_accepts_pasted_text(box: Box, serve: Serve) -> None:
    box.record_job("pasted-name", JobState.FINISHED)
    box.record_job("other", JobState.FINISHED)
    served = serve()
    async with served.look(90, 30) as look, served.look(120, 40) as second:
        await look.wait_for("pasted-name")
        assert widest(look.text) == 90
        await second.wait_for("pasted-name")
        await look.resize(130, 42)
        await look.wait_for(lambda text: widest(text) == 130 and "pasted-name" in text)
        await look.press("/")
        await look.press("\x1b[200~pasted\x1b[201~")
        await look.wait_for(lambda text: "other" not in text)
        await look.press("\r\x1b")
        await look.wait_for("other")
        await look.press("q")
        await look.wait_until_closed()
        assert "other" in second.text


async def test_no_process_is_left_after_the_client_or_the_server_ends(serve: Serve) -> None:
    served = serve()
    async with served.look() as look:
        await look.wait_for("RTX 3080")
        (app,) = served.below
        assert os.getsid(app.pid) == app.pid
    await wait_until(lambda: not app.is_running())
    async with served.look() as look:
        await look.wait_for("RTX 3080")
        (app,) = served.below
        assert await asyncio.to_thread(served.end, signal.SIGINT) == 130
        assert not app.is_running()
        assert served.process.stderr.read() == ""


@without_chromium
async def test_a_real_browser_shows_the_app_and_sends_keys_without_a_click(
    box: Box, serve: Serve, tmp_path: Path
) -> None:
    served = serve()
    async with chromium.Chromium(tmp_path) as browser:
        await browser.open(served.url)
        await browser.wait_for("document.body.classList.contains('-first-byte')")
        loaded = await browser.value("performance.getEntriesByType('resource').map(entry => entry.name)")
        assert len(loaded) >= 5
        assert all(name.startswith(served.url) for name in loaded)
        (app,) = served.below
        await browser.press("q")
        await browser.wait_for("document.body.classList.contains('-closed')")
        await wait_until(lambda: not app.is_running())
        await browser.open(served.url)
        await wait_until(lambda: served.below)
    await wait_until(lambda: not served.below)
