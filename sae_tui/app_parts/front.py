"""Notifies the user, asks questions and runs work off the main thread, for the code that acts on jobs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from textual.app import App
from textual.notifications import SeverityLevel

from sae_tui.job_actions import Also
from sae_tui.widgets.confirm import Confirm
from trainer.contract.errors import UserError, sentence

_BEGINS_WITHIN_S = 2.0
_LEAVE_S = 5.0


class OwnThreads(ThreadPoolExecutor):
    """Runs every call in a new daemon thread, so that a call that hangs never delays another.

    The default executor of asyncio has min(32, cores + 4) threads: a few hung reads would block all actions.
    """

    def __init__(self) -> None:
        super().__init__(max_workers=1)  # never used
        self._own: set[threading.Thread] = set()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()

        def run() -> None:
            try:
                if future.set_running_or_notify_cancel():
                    future.set_result(fn(*args, **kwargs))
            except BaseException as error:
                future.set_exception(error)
            finally:
                self._own.discard(threading.current_thread())

        thread = threading.Thread(target=run, name="worker", daemon=True)
        self._own.add(thread)
        try:
            thread.start()
        except RuntimeError as error:  # the user's thread limit is reached
            self._own.discard(thread)
            future.set_exception(error)
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Wait up to 5 s for running calls; a call that hangs longer does not keep the app from exiting."""
        deadline = time.monotonic() + _LEAVE_S
        for thread in tuple(self._own) if wait else ():
            thread.join(max(0.0, deadline - time.monotonic()))


class AppFront:
    """The part of the app that actions on jobs need; `look` reads the jobs again after an action."""

    def __init__(self, app: App[None], look: Callable[[], object]) -> None:
        self._app = app
        self._look = look

    def notify(self, message: str, *, severity: SeverityLevel) -> None:
        self._app.notify(message, severity=severity)

    def ask(self, question: str, yes: str, then: Callable[[], object], also: Also | None = None) -> None:
        """Ask a question with a button labelled `yes`; call `then` if the answer is yes.

        `also` adds a third button with its own action.
        """
        dialog = Confirm(question, yes=yes, also=also.label if also else "")

        def take(answer: bool | None) -> None:
            if answer:
                (also.act if also and dialog.took_other else then)()

        self._app.push_screen(dialog, take)

    def do(self, act: Callable[[], str]) -> None:
        """Run `act` in a thread; show the sentence that it returns, or why it failed or has not started."""
        begun = threading.Event()

        def run() -> None:
            begun.set()
            try:
                if outcome := act():
                    self._app.call_later(self._tell, outcome)
            except (UserError, OSError) as error:
                self._app.call_later(self._tell, sentence(error), "error")
            except Exception as error:
                self._app.call_later(self._tell, f"this failed because of a bug in sae-tui: {error!r}", "error")

        self._app.run_worker(run, thread=True, group="actions", exit_on_error=False)
        self._app.set_timer(_BEGINS_WITHIN_S, lambda: None if begun.is_set() else self._report_delay())

    def _report_delay(self) -> None:
        why = f"no thread could start, and {threading.active_count()} are running"
        self._app.notify(f"Your last action has not started yet: {why}. Restart the app.", severity="error")

    def _tell(self, outcome: str, severity: SeverityLevel = "information") -> None:
        text = outcome[:1].upper() + outcome[1:]
        text += "" if text.endswith((".", "!", "?")) else "."
        self._app.notify(text, severity=severity, markup=False)
        self._look()
