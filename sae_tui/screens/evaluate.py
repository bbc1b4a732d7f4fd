"""Asks which parts of a job's report card to measure, and shows how long each part takes."""

from __future__ import annotations

import itertools
from collections.abc import Callable

from textual import work
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Horizontal, Vertical
from textual.screen import Screen
from textual.widgets import Button, Label

from sae_tui.jobs.evaluation.offer import EvaluationChoice, EvaluationOffer
from sae_tui.session import Session
from sae_tui.widgets.dialog import Dialog
from sae_tui.widgets.tick import Tick
from trainer.contract.errors import UserError, sentence


class EvaluateDialog(Dialog[EvaluationChoice | None]):
    """Shows the parts as checkboxes; Enter or the button starts the evaluation, Escape cancels."""

    BINDINGS = [
        Binding("escape", "dismiss(None)", "Cancel", id="evaluate.cancel", tooltip="Measure nothing"),
        Binding("enter", "start", "Start", id="evaluate.start", tooltip="Measure the selected parts", priority=True),
        Binding("down,j", "app.focus_next", show=False),
        Binding("up,k", "app.focus_previous", show=False),
    ]
    DEFAULT_CSS = """
    EvaluateDialog { align: center middle; }
    EvaluateDialog > Vertical { width: 76; max-width: 95%; height: auto; padding: 1 2; }
    EvaluateDialog > Vertical { border: round $primary; background: $surface; }
    EvaluateDialog Label { width: 1fr; height: auto; }
    EvaluateDialog .why-not { padding: 0 4; color: $text-muted; }
    EvaluateDialog Horizontal { height: auto; margin-top: 1; align-horizontal: right; }
    EvaluateDialog Button { margin-left: 2; min-width: 10; }
    """

    def __init__(self, offer: EvaluationOffer) -> None:
        super().__init__()
        self._offer = offer

    def compose(self) -> ComposeResult:
        with Vertical():
            yield Label(f"Evaluate job {self._offer.job_id} on {self._offer.device}. Measure:", markup=False)
            for part, after in itertools.zip_longest(self._offer.parts, self._offer.parts[1:]):
                can_be = not part.why_not
                yield Tick(part.words, part.is_default and can_be, id=part.name, disabled=not can_be)
                if not can_be and (after is None or after.why_not != part.why_not):
                    yield Label(part.why_not, markup=False, classes="why-not")
            if self._offer.other_device:
                yield Tick(f"on {self._offer.other_device} instead", id="on-cpu")
            yield Label("Other parts of the report card are kept. The evaluation continues if you quit.", markup=False)
            with Horizontal():
                yield Button("Cancel (esc)", id="cancel", compact=True)
                yield Button("Start (enter)", id="start", variant="primary", compact=True)

    def on_button_pressed(self, event: Button.Pressed) -> None:
        if event.button.id == "start":
            self.action_start()
        else:
            self.dismiss(None)

    def action_start(self) -> None:
        """Start the selected parts; if the Cancel button has the focus, cancel instead."""
        focused = self.focused
        if focused is not None and focused.id == "cancel":
            self.dismiss(None)
            return
        ticked = frozenset(box.id or "" for box in self.query(Tick) if box.value and box.id != "on-cpu")
        if not ticked:
            self.notify("Tick at least one part with space.", severity="warning")
            return
        on_cpu = any(box.value for box in self.query("#on-cpu").results(Tick))
        self.dismiss(EvaluationChoice(ticked, on_gpu=self._offer.wants_gpu and not on_cpu))


class Evaluates(Screen[None]):
    """A screen with a key for opening the job's evaluation dialog."""

    session: Session
    job_id: int

    def ask_to_evaluate(self, then: Callable[[], object] = lambda: None) -> None:
        """Ask which parts to measure and start them; call `then` unless the dialog is cancelled."""
        if not self.session.actions.refused():
            self._offer_evaluation(then)

    @work(thread=True, group="evaluate", exclusive=True, exit_on_error=False)
    def _offer_evaluation(self, then: Callable[[], object]) -> None:
        # This call reads the headers of the data files and model files.
        try:
            offer = self.session.actions.offer_evaluation(self.job_id)
        except (UserError, OSError) as error:
            words = sentence(error)
            self.app.call_from_thread(self.notify, words, severity="warning", markup=False)
            return
        if offer is not None:
            self.app.call_from_thread(self._ask, offer, then)

    def _ask(self, offer: EvaluationOffer, then: Callable[[], object]) -> None:
        def take(asked: EvaluationChoice | None) -> None:
            if asked:
                self.session.actions.evaluate(self.job_id, asked)
                then()

        if self.app.screen is self:
            self.app.push_screen(EvaluateDialog(offer), take)
