"""The doctor screen: lists the findings, worst first, as soon as each is available, and shows the selected one."""

from __future__ import annotations

import itertools
import textwrap
import threading
from collections.abc import Callable, Iterable, Iterator

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding
from textual.message import Message

from sae_tui.doctor.base import Finding, Level
from sae_tui.doctor.examine import level_words, summary
from sae_tui.widgets.footer import Footer
from sae_tui.widgets.frame import FramedScreen, HeadingLine, entitle
from sae_tui.widgets.lines import Line, LineView
from sae_tui.widgets.old_keys import old_key
from sae_tui.widgets.table import Column, KeyedTable, Row

_COLUMNS = (Column("", 9), Column("WHAT", 13), Column("FINDING", 20, grow=True))
_STYLES: dict[Level, str] = {"error": "bad", "warning": "warn", "note": "accent", "ok": "good"}
_LEVELS = tuple(_STYLES)  # the worst first


class DoctorScreen(FramedScreen):
    """Shows findings as soon as a thread reports them, since the driver may hang and importing torch takes seconds."""

    BINDINGS = [
        Binding("escape", "app.pop_screen", "Back", id="doctor.back", tooltip="To the previous screen"),
        # The app also binds this key, and calls `read_again`.
        Binding("ctrl+n", "app.redraw", "Refresh", id="doctor.look", tooltip="Run all checks again", priority=True),
        old_key("r", "app.redraw"),
        Binding("p", "probe", "Probe", id="doctor.probe", tooltip="Also measure the bus between idle GPUs"),
    ]
    DEFAULT_CSS = """
    DoctorScreen > #chosen { height: 7; }
    DoctorScreen.-framed > #chosen { height: 8; }
    DoctorScreen.-bare > #chosen { height: 6; background: $surface; }
    """

    class Found(Message):
        """A finding from one run of the checks; None marks the end of the run."""

        def __init__(self, look: int, finding: Finding | None) -> None:
            super().__init__()
            self.look = look
            self.finding = finding

    def __init__(
        self, examine: Callable[[], Iterable[Finding]], probe: Callable[[], Iterable[Finding]] | None = None
    ) -> None:
        """Prepare to run two functions that yield findings; `probe` finds more problems, but uses the GPUs."""
        super().__init__(name="doctor")
        self.findings: list[Finding] = []
        self.done = False
        self._examine = examine
        self._probe = probe or examine
        self._look = 0

    def compose(self) -> ComposeResult:
        yield HeadingLine(id="summary")
        yield KeyedTable(_COLUMNS, empty="looking…", id="findings").add_class("panel")
        yield LineView(id="chosen", classes="panel")
        yield Footer()

    def on_mount(self) -> None:
        table = self.query_one(KeyedTable)
        table.focus()
        self.watch(table, "cursor", self._show_chosen)
        self.read_again()

    def on_unmount(self) -> None:
        self._look += 1

    def on_resize(self) -> None:
        self._show()

    def read_again(self) -> None:
        """Run all checks again."""
        self._begin(self._examine)

    def action_probe(self) -> None:
        self._begin(self._probe)

    def _begin(self, examine: Callable[[], Iterable[Finding]]) -> None:
        """Start a new run of the checks; findings from an earlier run are ignored."""
        self._look += 1
        self.findings, self.done = [], False
        # Use a plain thread, because on exit the app would wait for a worker stuck in the driver.
        threading.Thread(target=self._run, args=(self._look, examine), name="doctor", daemon=True).start()
        self._show()

    def _run(self, look: int, examine: Callable[[], Iterable[Finding]]) -> None:
        for finding in itertools.chain(_all_of(examine), [None]):
            if look != self._look:
                return
            self.post_message(self.Found(look, finding))

    @on(Found)
    def _found(self, event: Found) -> None:
        if event.look != self._look:
            return
        if event.finding is None:
            self.done = True
        else:
            self.findings.append(event.finding)
        self._show()

    def _show(self) -> None:
        if not self.is_mounted:
            return
        table = self.query_one(KeyedTable)
        at_top = not table.rows or table.cursor == table.rows[0].key
        by_level = sorted(enumerate(self.findings), key=lambda each: _LEVELS.index(each[1].level))
        rows = [Row(str(index), _cells(finding)) for index, finding in by_level]
        table.show_rows(rows)
        if at_top and rows:  # keep the cursor on the worst finding until the user moves the cursor
            table.cursor = rows[0].key
        self.entitle(table, f"Doctor · {summary(self.findings)}{'' if self.done else ', checking…'}")
        self._show_chosen()

    def _show_chosen(self) -> None:
        cursor = self.query_one(KeyedTable).cursor
        chosen = self.findings[int(cursor)] if cursor and int(cursor) < len(self.findings) else None
        panel = self.query_one("#chosen", LineView)
        entitle(panel, chosen.subject if chosen else "")
        panel.show(_in_full(chosen, max(20, panel.width - 2)) if chosen else [])


def _cells(finding: Finding) -> tuple[tuple[str, str], ...]:
    style = _STYLES[finding.level]
    return (level_words(finding), style), (finding.subject, "text"), (finding.sentence, "text")


def _in_full(finding: Finding, width: int) -> list[Line]:
    """Return the complete sentence and the remedy, wrapped to `width` cells."""
    lines: list[Line] = [
        ((f" {line}", "text"),) for line in textwrap.wrap(finding.sentence, width, break_on_hyphens=False)
    ]
    cure = textwrap.wrap(finding.remedy, width, initial_indent="→ ", subsequent_indent="  ", break_on_hyphens=False)
    return lines + [((f" {line}", "accent"),) for line in cure]


def _all_of(examine: Callable[[], Iterable[Finding]]) -> Iterator[Finding]:
    """Yield the findings. If a check fails, the last finding reports the error."""
    try:
        yield from examine()
    except Exception as error:
        yield Finding("error", "doctor", f"the other checks did not run: {error!r}", "report this as a bug in sae-tui")
