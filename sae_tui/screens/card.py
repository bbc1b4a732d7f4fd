"""The report cards of a job's SAEs, one at a time."""

from __future__ import annotations

from textual import on, work
from textual.app import ComposeResult
from textual.binding import Binding
from textual.message import Message

from sae_tui.jobs.energy import energy_words
from sae_tui.jobs.evaluation.report_card import whole_cards
from sae_tui.jobs.view.watcher import NewsOfJob
from sae_tui.panels.report_card import CardPanel
from sae_tui.screens.evaluate import Evaluates
from sae_tui.screens.features import FeaturesScreen
from sae_tui.session import Session
from sae_tui.widgets.footer import Footer
from sae_tui.widgets.frame import FramedScreen, HeadingLine
from trainer.contract.runs.report_card import Card


class CardScreen(Evaluates, FramedScreen):
    """Shows the complete report card of an SAE; reads it again after the job has ended or been evaluated."""

    BINDINGS = [
        Binding("escape", "app.pop_screen", "Back", id="card.back", tooltip="To the job"),
        Binding("m", "next_member(1)", "SAE", id="card.member", tooltip="The report card of the next SAE in the sweep"),
        Binding("M", "next_member(-1)", "Previous SAE", show=False, id="card.member_before",
                tooltip="The report card of the previous SAE in the sweep"),
        Binding("f", "open_features", "Features", id="card.features",
                tooltip="Max-activating examples of its latents"),
        Binding("e", "evaluate", "Evaluate", id="card.evaluate",
                tooltip="Choose what to measure: rows, in the model, probes"),
    ]  # fmt: skip

    class Found(Message):
        """The report cards were read, by SAE label."""

        def __init__(self, cards: dict[str, Card]) -> None:
            super().__init__()
            self.cards = cards

    def __init__(self, session: Session, job_id: int, member: str = "") -> None:
        super().__init__(name="card")
        self.session, self.job_id, self.member = session, job_id, member
        self._cards: dict[str, Card] = {}
        self._news = NewsOfJob(session.watcher, job_id)

    def compose(self) -> ComposeResult:
        yield HeadingLine(id="card-title")
        yield CardPanel(id="card").add_class("panel")
        yield Footer()

    def on_mount(self) -> None:
        self.query_one(CardPanel).focus()
        self._title()
        self._read()

    def on_resize(self) -> None:
        self._title()

    def show_gpus(self) -> None:
        """Do nothing, since only the dashboard shows GPUs."""

    def show_jobs(self) -> None:
        """Read the report cards again if the job has changed."""
        if self._news.has_come():
            self._read()

    @work(thread=True, group="card", exit_on_error=False)
    def _read(self) -> None:
        self.post_message(self.Found(whole_cards(self.session.data.sae(self.job_id))))

    @on(Found)
    def _show(self, event: Found) -> None:
        self._cards = event.cards
        if self.member not in event.cards:
            self.member = next(iter(event.cards), "")
        self._draw()

    def _draw(self) -> None:
        self.refresh_bindings()
        self._title()
        none_yet = f"Job {self.job_id} has no report card yet; press e after the job has ended to make one."
        self.query_one(CardPanel).show_card(self._cards.get(self.member) or none_yet)

    def _title(self) -> None:
        title = " · ".join(filter(None, [f"Job {self.job_id}", self.member, "Report card"]))
        job = next((job for job in self.session.jobs if job.id == self.job_id), None)
        self.entitle(self.query_one(CardPanel), title, energy_words(job, self.session.settings) if job else "")

    def action_next_member(self, by: int) -> None:
        labels = list(self._cards)
        self.member = labels[(labels.index(self.member) + by) % len(labels)]
        self._draw()

    def action_open_features(self) -> None:
        self.app.push_screen(FeaturesScreen(self.session, self.job_id, self.member))

    def action_evaluate(self) -> None:
        self.ask_to_evaluate()

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Offer the keys that switch between SAEs only if the job has several."""
        return action != "next_member" or len(self._cards) > 1
