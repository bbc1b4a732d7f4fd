"""One job: how it stands, its curves, what happened to it, and its log, live."""

from __future__ import annotations

from typing import TYPE_CHECKING

from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Grid, Horizontal, Vertical
from textual.screen import Screen

from sae_tui.panels.cause import CausePanel
from sae_tui.panels.curves import CURVES, CurvePlot, members_of
from sae_tui.panels.events import EventsPanel
from sae_tui.panels.headline import Headline
from sae_tui.panels.log import LogPanel
from sae_tui.panels.ranks import RanksPanel
from sae_tui.screens.log import LogScreen
from sae_tui.screens.offers import offered
from sae_tui.widgets.footer import Footer, Offer

if TYPE_CHECKING:
    from sae_tui.app import SaeApp


class JobScreen(Screen[None]):
    """Follows one job; every panel pulls from the detail that the watcher keeps."""

    BINDINGS = [
        Binding("escape", "app.show_dashboard", "Back", id="job.back", tooltip="To the dashboard"),
        Binding("s", "stop_job", "Stop", id="job.stop", tooltip="Save a checkpoint and stop; again to end it at once"),
        Binding("p", "pause_job", "Pause", id="job.pause", tooltip="Save, free the GPUs and wait in the queue"),
        Binding("g", "continue_job", "Resume", id="job.continue", tooltip="Release it, or resume it from a checkpoint"),
        Binding("y", "clone_job", "Clone", id="job.clone", tooltip="A new job with the settings of this one"),
        Binding("l", "open_log", "Log", id="job.log", tooltip="The logs over the whole screen: follow, search, filter"),
        Binding("r", "next_rank", "Rank", id="job.rank", tooltip="Show the log of the next rank"),
        Binding("m", "next_member", "SAE", id="job.member", tooltip="Show the next SAE of a sweep"),
    ]
    app: SaeApp

    def __init__(self, job_id: int) -> None:
        super().__init__(id="job")
        self.job_id = job_id
        self.log_rank = 0
        self.member = ""

    def compose(self) -> ComposeResult:
        yield Headline(id="headline")
        yield CausePanel(id="cause", classes="-none")
        with Grid(id="curves"):
            for curve in CURVES:
                yield CurvePlot(curve)
        with Horizontal(id="middle"):
            yield RanksPanel(id="ranks")
            yield EventsPanel(id="events")
        with Vertical(id="log-box"):
            yield LogPanel(id="log")
        yield Footer()

    def on_mount(self) -> None:
        self.query_one(LogPanel).focus()
        self.show_jobs()

    def show_gpus(self) -> None:
        """The GPUs are on the dashboard."""

    def show_jobs(self) -> None:
        """Draws what is known of the job now."""
        detail = self.app.detail
        if not self.is_mounted or detail is None or detail.view.id != self.job_id:
            return
        members = members_of(detail)
        if self.member not in members and (self.member or members):
            self.member = next(iter(members), "")
            self.refresh_bindings()
        headline = self.query_one(Headline)
        headline.member = self.member
        headline.show_detail(detail)
        for plot in self.query(CurvePlot):
            plot.show_detail(detail, self.member)
        self.query_one(CausePanel).show_detail(detail)
        self.query_one(RanksPanel).show_detail(detail)
        self.query_one(EventsPanel).show_detail(detail)
        self.query_one(LogPanel).show_detail(detail)

    def keys_offered(self) -> Offer:
        """Only what can be done to the job as it stands."""
        detail = self.app.detail
        if detail is None or detail.view.id != self.job_id:
            return Offer()
        verbs = offered(detail.view)
        hidden = {f"job.{verb}" for verb in ("stop", "pause", "continue") if verb not in verbs}
        return Offer(hidden=frozenset(hidden), words={f"job.{verb}": word for verb, word in verbs.items()})

    def action_stop_job(self) -> None:
        self.app.stop_job(self.job_id)

    def action_pause_job(self) -> None:
        self.app.pause_job(self.job_id)

    def action_continue_job(self) -> None:
        self.app.continue_job(self.job_id)

    def action_clone_job(self) -> None:
        self.app.clone_job(self.job_id)

    def action_open_log(self) -> None:
        detail = self.app.detail
        if detail and detail.view.id == self.job_id:
            found = detail.postmortem
            rank = found.rank if found and found.rank is not None else self.log_rank
            self.app.push_screen(LogScreen(self.job_id, detail.view.world_size, str(rank)))

    def action_next_rank(self) -> None:
        detail = self.app.detail
        if detail:
            self.log_rank = (self.log_rank + 1) % detail.view.world_size
            self.app.follow(self.job_id, self.log_rank)

    def action_next_member(self) -> None:
        members = members_of(self.app.detail) if self.app.detail else []
        if members:
            self.member = members[(members.index(self.member) + 1) % len(members)]
            self.show_jobs()

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """The key for a sweep's SAEs is only offered where there are several."""
        return action != "next_member" or bool(self.member)
