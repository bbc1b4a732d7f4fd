"""The report cards for a job's SAEs, one at a time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
from textual import on, work
from textual.app import ComposeResult
from textual.binding import Binding
from textual.message import Message

from sae_tui.jobs.energy import energy_words
from sae_tui.jobs.evaluation.report_card import OtherCard, other_cards, whole_cards
from sae_tui.jobs.features import features_of_job, has_features
from sae_tui.jobs.view.watcher import NewsOfJob
from sae_tui.panels.card import CardPanel, CardSheet
from sae_tui.screens.evaluate import Evaluates
from sae_tui.screens.features import FeaturesScreen
from sae_tui.session import Session
from sae_tui.widgets.find import Find
from sae_tui.widgets.footer import Footer, FooterOffer
from sae_tui.widgets.frame import FramedScreen, HeadingLine
from trainer.contract.errors import UserError
from trainer.contract.paths import DataDir
from trainer.contract.runs.card_figures import over_seeds
from trainer.contract.runs.features import Features


def sheets_of(data: DataDir, job_id: int) -> dict[str, CardSheet]:
    """Return a dict mapping a job's SAE labels to their report cards, with the cosines of decoder directions."""
    cards = whole_cards(data.sae(job_id))
    try:
        files = features_of_job(data, job_id)
    except UserError:
        files = {}
    return {
        label: CardSheet(card, tuple(_cosines(files[label])) if label in files else (), tuple(over_seeds(cards, label)))
        for label, card in cards.items()
    }


def _cosines(file: Path) -> list[int]:
    """Return a histogram of the cosines in a features file, or [] if the file cannot be read."""
    try:
        return Features(file).nearest_histogram
    except UserError:
        return []


class CardScreen(Evaluates, FramedScreen):
    """Shows an SAE's complete report card, and reloads it after the job has ended or been evaluated."""

    BINDINGS = [
        Binding("escape", "back", "Back", id="card.back", tooltip="End the comparison, or go to the previous screen"),
        Binding("m", "next_member(1)", "SAE", id="card.member", tooltip="The report card of the next SAE in the sweep"),
        Binding("M", "next_member(-1)", "Previous SAE", show=False, id="card.member_before",
                tooltip="The report card of the previous SAE in the sweep"),
        Binding("f", "open_features", "Features", id="card.features",
                tooltip="Max-activating examples of its latents"),
        Binding("c", "compare", "Compare", id="card.compare",
                tooltip="The difference from an earlier report card, or from another job's"),
        Binding("e", "evaluate", "Evaluate", id="card.evaluate",
                tooltip="Choose what to measure: rows, in the model, probes"),
    ]  # fmt: skip

    class Found(Message):
        """The report cards were read; `sheets` maps each SAE's label to its report card."""

        def __init__(self, sheets: dict[str, CardSheet]) -> None:
            super().__init__()
            self.sheets = sheets

    class Others(Message):
        """The report cards to compare with were read."""

        def __init__(self, others: list[OtherCard]) -> None:
            super().__init__()
            self.others = others

    def __init__(self, session: Session, job_id: int, member: str = "") -> None:
        super().__init__(name="card")
        self.session, self.job_id, self.member = session, job_id, member
        self.against: OtherCard | None = None
        self._sheets: dict[str, CardSheet] = {}
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

    def keys_offered(self) -> FooterOffer:
        """Hide the key for features if there are none; it still works, and then explains why there are none."""
        has_some = has_features(self.session.data, self.job_id)
        return FooterOffer(hidden=frozenset() if has_some else frozenset({"card.features"}))

    def show_gpus(self) -> None:
        """Do nothing because this screen shows no GPUs."""

    def show_jobs(self) -> None:
        """Reload the report cards if the job has changed."""
        if self._news.has_come():
            self._read()

    @work(thread=True, group="card", exit_on_error=False)
    def _read(self) -> None:
        self.post_message(self.Found(sheets_of(self.session.data, self.job_id)))

    @on(Found)
    def _show(self, event: Found) -> None:
        self._sheets = event.sheets
        if self.member not in event.sheets:
            self.member = next(iter(event.sheets), "")
        self._draw()

    def _draw(self) -> None:
        self.refresh_bindings()
        self._title()
        sheet = self._sheets.get(self.member)
        if sheet and self.against:
            sheet = msgspec.structs.replace(sheet, against=self.against.card, against_name=self.against.name)
        none_yet = f"Job {self.job_id} has no report card yet; press e after the job has ended to create one."
        self.query_one(CardPanel).show_card(sheet or none_yet)

    def _title(self) -> None:
        against = f"against {self.against.name}" if self.against else ""
        which = f"Job {self.job_id}{self.session.place}"
        title = " · ".join(filter(None, [which, self.member, "Report card", against]))
        job = next((job for job in self.session.jobs if job.id == self.job_id), None)
        self.entitle(self.query_one(CardPanel), title, energy_words(job, self.session.settings) if job else "")

    def action_back(self) -> None:
        """End the comparison, or return to the job."""
        if self.against:
            self.against = None
            self._draw()
        else:
            self.app.pop_screen()

    def action_next_member(self, by: int) -> None:
        labels = list(self._sheets)
        self.against = None  # it was chosen for the other SAE
        self.member = labels[(labels.index(self.member) + by) % len(labels)]
        self._draw()

    def action_open_features(self) -> None:
        self.app.push_screen(FeaturesScreen(self.session, self.job_id, self.member))

    def action_evaluate(self) -> None:
        self.ask_to_evaluate()

    def action_compare(self) -> None:
        self._read_others(self.member, [job.id for job in self.session.jobs])

    @work(thread=True, group="others", exit_on_error=False)
    def _read_others(self, label: str, job_ids: list[int]) -> None:
        self.post_message(self.Others(other_cards(self.session.data, self.job_id, label, job_ids)))

    @on(Others)
    def _choose(self, event: Others) -> None:
        if not event.others:
            self.notify("There is no other report card; evaluate again or train another SAE.", severity="warning")
        elif self.app.screen is self:
            things = [(one.name, one.words) for one in event.others]
            self.app.push_screen(Find("Compare with which report card?", things), self._compare_with(event.others))

    def _compare_with(self, others: list[OtherCard]) -> Callable[[str | None], None]:
        """Return the function to call with the name of the chosen report card."""
        by_name = {one.name: one for one in others}

        def take(name: str | None) -> None:
            if name is not None:
                self.against = by_name[name]
                self._draw()

        return take

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Offer the keys for switching between SAEs only if there are several, and a comparison only with a card."""
        if action == "compare":
            return bool(self._sheets)
        return action != "next_member" or len(self._sheets) > 1
