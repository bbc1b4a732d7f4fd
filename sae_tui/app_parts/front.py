"""Asks and tells the person in front of the app, and works off the main thread, for those who act on jobs."""

from __future__ import annotations

from collections.abc import Callable

from textual.app import App
from textual.notifications import SeverityLevel

from sae_tui.job_actions import Also
from sae_tui.widgets.confirm import Confirm
from trainer.contract.errors import UserError, sentence


class AppFront:
    """What actions on jobs need of the app; `look` reads the jobs anew once something was done."""

    def __init__(self, app: App[None], look: Callable[[], object]) -> None:
        self._app = app
        self._look = look

    def notify(self, message: str, *, severity: SeverityLevel) -> None:
        self._app.notify(message, severity=severity)

    def ask(self, question: str, yes: str, then: Callable[[], object], also: Also | None = None) -> None:
        """Ask a question, with `yes` as the label of that button; call `then` where the answer is yes.

        `also` offers another way than yes.
        """
        dialog = Confirm(question, yes=yes, also=also.label if also else "")

        def take(answer: bool | None) -> None:
            if answer:
                (also.act if also and dialog.took_other else then)()

        self._app.push_screen(dialog, take)

    def do(self, act: Callable[[], str]) -> None:
        """Run `act` on a thread; notify of the sentence it returns, if any, or of its `UserError` or `OSError`."""

        def run() -> None:
            try:
                if outcome := act():
                    self._app.call_later(self._tell, outcome)
            except (UserError, OSError) as error:
                self._app.call_later(self._tell, sentence(error), "error")

        self._app.run_worker(run, thread=True, group="actions", exit_on_error=False)

    def _tell(self, outcome: str, severity: SeverityLevel = "information") -> None:
        text = outcome[:1].upper() + outcome[1:]
        text += "" if text.endswith((".", "!", "?")) else "."
        self._app.notify(text, severity=severity, markup=False)
        self._look()
