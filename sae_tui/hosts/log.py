"""Follows the log of a job on another host, so that a screen can show it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from sae_tui.hosts.causes import no_connection
from sae_tui.hosts.follower import Refused, messages
from sae_tui.hosts.link import Link
from sae_tui.hosts.protocol import Log


class FarLogReader:
    """A thread that passes lines to `on_lines`; the last line says why there are no more."""

    def __init__(self, host: str, argv: Sequence[str], on_lines: Callable[[Sequence[str]], object]) -> None:
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
            self._on_lines([f"({self._host} {end})"])

    def _follow(self) -> str:
        """Pass lines to `on_lines` until there are no more, and return why they ended."""
        try:
            link = self._link = Link(self._argv)
        except OSError as error:
            return f"cannot be contacted: {self._argv[0]}: {error.strerror}"
        if self._stopped.is_set():
            link.stop()
        greeted, code = False, 0
        try:
            for message in messages(link):
                greeted = True
                if isinstance(message, Log):
                    self._on_lines(message.lines)
        except Refused as refusal:
            return refusal.cause.sentence
        finally:
            code = link.close()
        return "ended the log" if greeted else no_connection(self._host, code, link.complaints).sentence
