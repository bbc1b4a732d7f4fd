"""A job's logs in the full window: one rank, all ranks, or the supervisor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding
from textual.message import Message
from textual.widgets import Input

from sae_tui.jobs.output import kind_of
from sae_tui.jobs.states import describe_state
from sae_tui.jobs.view.logs import EVALUATION, LogLine, LogReader, log_sources
from sae_tui.jobs.view.reader import JobView
from sae_tui.session import Session
from sae_tui.widgets.footer import Footer
from sae_tui.widgets.frame import FramedScreen, HeadingLine
from sae_tui.widgets.log_view import HINT, LogView
from sae_tui.widgets.old_keys import old_key
from trainer.contract.wording import plural

ALL = "all"


class Reader(Protocol):
    """A thread that reads log lines."""

    def start(self) -> None: ...
    def stop(self) -> None: ...


class LogScreen(FramedScreen):
    """Follows the end of the log until the user scrolls up. A search does not move the view."""

    BINDINGS = [
        Binding("escape", "back", "Back", id="logs.back", tooltip="End the search, or go to the previous screen"),
        Binding("right_square_bracket", "next_source(1)", "Rank", key_display="]", id="logs.rank",
                tooltip="The log of the next rank, the supervisor or all ranks"),
        Binding("left_square_bracket", "next_source(-1)", "Previous rank", key_display="[", show=False,
                id="logs.rank_before", tooltip="The log of the previous rank"),
        old_key("r", "next_source(1)"),
        Binding("slash", "search", "Search", key_display="/", id="logs.search", tooltip="Search for text"),
        Binding("n", "jump(1)", "Next", id="logs.next", tooltip="Down to the next match"),
        Binding("N", "jump(-1)", "Previous", show=False, id="logs.previous", tooltip="Up to the previous match"),
        Binding("ampersand", "only", "Only", key_display="&", id="logs.only", tooltip="Show only matching lines"),
        old_key("f", "follow"),
    ]  # fmt: skip
    DEFAULT_CSS = """
    LogScreen > Input { display: none; dock: bottom; margin-bottom: 1; }
    LogScreen.-searching > Input { display: block; }
    """

    class Lines(Message):
        """New log lines; `number` identifies the reader they come from."""

        def __init__(self, number: int, lines: Sequence[LogLine]) -> None:
            super().__init__()
            self.number = number
            self.lines = lines

    def __init__(self, session: Session, job_id: int, world_size: int, source: str = "0") -> None:
        super().__init__(name="logs")
        self.session = session
        self.job_id = job_id
        self.source = source
        self._paths = log_sources(session.data.run(job_id), world_size)
        self._reader: Reader | None = None
        self._number = 0
        self._only = False

    def compose(self) -> ComposeResult:
        yield HeadingLine(id="log-title")
        yield LogView(id="log-view").add_class("panel")
        yield Input(placeholder="text to find", compact=True, id="log-search")
        yield Footer()

    def on_mount(self) -> None:
        self.query_one(LogView).focus()
        self._open()

    def on_unmount(self) -> None:
        if self._reader:
            self._reader.stop()

    def show_gpus(self) -> None:
        """Do nothing because this screen shows no GPUs."""

    def show_jobs(self) -> None:
        self._title()

    def on_resize(self) -> None:
        self._title()

    @property
    def sources(self) -> list[str]:
        several = [ALL] if len(self._paths) > 2 else []
        return [*self._paths, *several]

    def action_next_source(self, by: int) -> None:
        self.source = self.sources[(self.sources.index(self.source) + by) % len(self.sources)]
        self._open()

    def _open(self) -> None:
        if self._reader:
            self._reader.stop()
        self._number += 1
        number, view = self._number, self.query_one(LogView)
        view.names, view.follows = self.source == ALL, True
        view.clear()
        self._reader = self.reader(lambda lines: self.post_message(self.Lines(number, lines)))
        self._reader.start()
        self._title()

    def reader(self, on_lines: Callable[[Sequence[LogLine]], object]) -> Reader:
        """Return a reader that follows the chosen log; it may call `on_lines` from any thread."""
        chosen = self._paths if self.source == ALL else {self.source: self._paths[self.source]}
        return LogReader(chosen, on_lines)

    @property
    def job(self) -> JobView | None:
        """The job's latest state, or None if the job is not listed."""
        return next((one for one in self.session.jobs if one.id == self.job_id), None)

    @property
    def place(self) -> str:
        """Text that follows the job's number to name its host, or "" for this host."""
        return ""

    @on(Lines)
    def _add(self, event: Lines) -> None:
        if event.number == self._number:
            view = self.query_one(LogView)
            view.append([(line.source, line.text) for line in event.lines if not line.is_unfinished])
            view.show_unfinished({line.source: line.text for line in event.lines if line.is_unfinished})
            view.say_if_empty(
                "no process has written anything" if self.source == ALL else f"{self._whose} has written nothing"
            )
            self._title()

    @property
    def _whose(self) -> str:
        return {ALL: "all ranks", "supervisor": "the supervisor", EVALUATION: "the evaluation"}.get(
            self.source, self._rank_words
        )

    @property
    def _rank_words(self) -> str:
        is_program = self.job is not None and kind_of(self.job.config).is_program
        return "the program" if is_program else f"rank {self.source}"

    def _title(self) -> None:
        """Write the title. The log's source comes first because the job name can be long."""
        job = self.job
        state = f" · {describe_state(job).word} · {job.name}" if job else ""
        hint = HINT if any(view.has_long_lines for view in self.query(LogView)) else ""
        text = f"Job {self.job_id}{self.place} · log of {self._whose}{self._match_count()}{state}"
        for view in self.query(LogView):
            self.entitle(view, text, hint)

    def action_search(self) -> None:
        self.add_class("-searching")
        self.query_one("#log-search").focus()

    @on(Input.Changed, "#log-search")
    def _look_for(self, event: Input.Changed) -> None:
        event.stop()
        self.query_one(LogView).search(event.value)
        self._title()

    def _match_count(self) -> str:
        """Return how many lines match the search, in words, or "" without a search."""
        (text,) = [search.value for search in self.query("#log-search").results(Input)] or [""]
        count = sum(view.n_found for view in self.query(LogView))
        return f" · {plural(count, 'line') if count else 'no line'} with {text!r}" if text else ""

    @on(Input.Submitted, "#log-search")
    def _end_search(self, event: Input.Submitted) -> None:
        event.stop()
        self.remove_class("-searching")
        view = self.query_one(LogView)
        view.focus()
        if view.pattern:
            # Go to the last match first because the view was at the end of the log.
            _ = view.jump(-1) or view.jump(1)

    def action_jump(self, direction: int) -> None:
        view = self.query_one(LogView)
        if view.pattern is None:
            self.action_search()
        elif not view.jump(direction):
            way = "further down (N: up)" if direction > 0 else "further up (n: down)"
            self.notify(f"No match {way}." if view.n_found else "No line matches.", severity="warning")

    def action_only(self) -> None:
        self._only = not self._only
        self.query_one(LogView).show_only_matches(self._only)

    def action_follow(self) -> None:
        self.query_one(LogView).action_follow()

    def action_back(self) -> None:
        search = self.query_one("#log-search", Input)
        if self.has_class("-searching") or search.value:
            self.remove_class("-searching")
            search.value = ""
            self.query_one(LogView).focus()
        else:
            self.app.pop_screen()
