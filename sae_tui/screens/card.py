"""The report cards for a job's SAEs, one at a time."""

from __future__ import annotations

from textual import on, work
from textual.app import ComposeResult
from textual.binding import Binding
from textual.message import Message

from sae_tui.format import fit, wrap
from sae_tui.jobs.energy import energy_words
from sae_tui.jobs.evaluation.report_card import whole_cards
from sae_tui.jobs.features import readable
from sae_tui.jobs.view.watcher import NewsOfJob
from sae_tui.panels.latents import cut_around
from sae_tui.screens.evaluate import Evaluates
from sae_tui.screens.features import FeaturesScreen
from sae_tui.session import Session
from sae_tui.widgets.footer import Footer
from sae_tui.widgets.frame import FramedScreen, HeadingLine
from sae_tui.widgets.lines import Line, LineView, Span
from trainer.contract.runs.report_card import Card, SampledLatent, facts, title_lines

_LATENT_CELLS = 18


class CardPanel(LineView, can_focus=True):
    """Shows a report card, or why it is missing. The cursor keys scroll the card."""

    DEFAULT_CSS = "CardPanel { height: 1fr; }"

    def __init__(self, *, id: str | None = None) -> None:  # noqa: A002
        super().__init__(id=id)
        self._shown: Card | str = ""

    def show_card(self, card: Card | str) -> None:
        if card != self._shown:
            self._shown = card
            self.scroll_home(animate=False)
            self._draw()

    def on_resize(self) -> None:
        self._draw()

    def _draw(self) -> None:
        # Reserve a column for the scrollbar shown if there are more lines than rows.
        width = max(20, self.size.width - 1)
        if isinstance(self._shown, Card):
            self.show(card_lines(self._shown, width))
        else:
            self.show([((f" {line}", "dim"),) for line in wrap(self._shown, width - 1)])


def card_lines(card: Card, width: int) -> list[Line]:
    """Return a report card as lines of at most `width` cells."""
    known = facts(card)
    column = max(len(title) for title, _ in known) + 2
    lines: list[Line] = [((f" {line}", "label"),) for text in title_lines(card) for line in wrap(text, width - 1)]
    for title, value in known:
        first, *others = wrap(value, width - column - 1) or [""]
        lines.append(((f" {title:<{column}}", "label"), (first, "text")))
        lines += [((" " * (column + 1), "label"), (line, "text")) for line in others]
    if card.latents:
        heading = f" {len(card.latents)} random latents that fire, each with its max-activating example"
        lines += [((" ", "text"),), ((fit(heading, width), "label"),)]
    return lines + [_latent_line(one, width) for one in card.latents]


def _latent_line(one: SampledLatent, width: int) -> Line:
    """Return a latent with its density and its first text, with the strongest token highlighted."""
    spans: list[Span] = [(fit(f" {one.latent:>6} {one.density:>8.3%}", _LATENT_CELLS), "label")]
    if one.texts:
        text = one.texts[0]
        styled = [(readable(token), "title" if at == text.at else "dim") for at, token in enumerate(text.tokens)]
        spans += cut_around(styled, text.at, max(0, width - _LATENT_CELLS))
    return tuple(spans)


class CardScreen(Evaluates, FramedScreen):
    """Shows an SAE's complete report card, and reloads it after the job has ended or been evaluated."""

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
        """The report cards were read; `cards` maps each SAE's label to its card."""

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
        """Do nothing because this screen shows no GPUs."""

    def show_jobs(self) -> None:
        """Reload the report cards if the job has changed."""
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
        """Offer the keys for switching between SAEs only if the job has several."""
        return action != "next_member" or len(self._cards) > 1
