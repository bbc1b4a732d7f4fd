"""Writes a job's SAE for other tools: asks for format and folder, and shows progress and result."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

from textual import on, work
from textual.app import App, ComposeResult
from textual.binding import Binding
from textual.containers import Horizontal, Vertical
from textual.widgets import Button, Input, Label

from sae_tui.jobs.launch.exporting import Exported, export_sae
from sae_tui.jobs.view.reader import JobView
from sae_tui.session import Session
from sae_tui.widgets.dialog import Dialog
from sae_tui.widgets.menu import Menu
from sae_tui.widgets.tick import Tick
from trainer.contract.errors import UserError, sentence
from trainer.contract.paths import working_folder
from trainer.contract.progress import Reached
from trainer.contract.settings.catalog import WRITTEN_FORMATS


class ExportDialog(Dialog[None]):
    """Asks for format and folder, and shows the result. Escape closes the dialog, but a running export continues."""

    BINDINGS = [Binding("escape", "dismiss(None)", "Close", id="export.close", tooltip="Back to the job")]
    DEFAULT_CSS = """
    ExportDialog { align: center middle; }
    ExportDialog > Vertical { width: 76; max-width: 95%; height: auto; padding: 1 2; }
    ExportDialog > Vertical { border: round $primary; background: $surface; }
    ExportDialog Label { width: 1fr; height: auto; }
    ExportDialog Input { background: $panel; }
    ExportDialog Menu { height: auto; width: 1fr; }
    ExportDialog Horizontal { height: auto; margin-top: 1; align-horizontal: right; }
    ExportDialog Button { margin-left: 2; min-width: 10; }
    """

    def __init__(self, session: Session, job: JobView) -> None:
        super().__init__()
        self._session, self._job = session, job
        self._is_going = False

    def compose(self) -> ComposeResult:
        name = re.sub(r"[^\w.-]+", "-", self._job.name).strip("-.") or "sae"
        with Vertical():
            yield Label(f"Export the SAE of job {self._job.id} as", markup=False)
            yield Menu([(form, form) for form in WRITTEN_FORMATS], value="saelens", allow_blank=False, compact=True)
            yield Label("into the folder", markup=False)
            yield Input(str(working_folder() / f"{name}-{self._job.id}"), compact=True, id="folder")
            yield Label("and upload it to the Hugging Face hub as (empty: do not)", markup=False)
            yield Input(placeholder="OWNER/NAME, a private repository", compact=True, id="push")
            yield Tick("the checkpoint with the lowest held-out FVU, not the newest", id="best")
            yield Tick("replace the SAE that is already in the folder", id="force")
            yield Label("", markup=False, id="answer")
            with Horizontal():
                yield Button("Close (esc)", id="close", compact=True)
                yield Button("Export (enter)", id="export", variant="primary", compact=True)

    def on_mount(self) -> None:
        self.query_one("#folder").focus()

    def on_button_pressed(self, event: Button.Pressed) -> None:
        if event.button.id == "export":
            self._start()
        else:
            self.dismiss(None)

    @on(Input.Submitted)
    def _start(self) -> None:
        folder = self.query_one("#folder", Input).value.strip()
        if self._is_going or self._session.actions.refused():
            return
        if not folder:
            self._show("Enter the folder to write the SAE to.")
            return
        out, force = working_folder() / os.path.expanduser(folder), self.query_one("#force", Tick).value
        try:
            is_used = not force and out.is_dir() and any(out.iterdir())
        except OSError as error:
            self._show(f"{out} cannot be used: {sentence(error)}")
            return
        if is_used:
            self._show(f"{out} is not empty. Enter another folder, or tick the box above.")
            return
        self._is_going = True
        self._show("Exporting …")
        ticked = [f"--{tick.id}" for tick in self.query(Tick) if tick.value]
        name = self.query_one("#push", Input).value.strip()
        # The trainer asks in a terminal; here, the typed name is the consent.
        push = [f"--push={name}", "--yes"] if name else []
        self._export(out, ["--format", str(self.query_one(Menu).value), *ticked, *push])

    @work(thread=True, group="export", exit_on_error=False)
    def _export(self, folder: Path, arguments: list[str]) -> None:
        app = self.app

        def show(reached: Reached) -> None:
            # The app may have exited.
            with contextlib.suppress(RuntimeError):
                app.call_from_thread(self._show, f"Exporting: {reached.words}" if reached.words else "Exporting …")

        try:
            answer = self._words(export_sae(self._session.data, self._job.id, folder, arguments, on_reached=show))
        except (UserError, OSError) as error:
            answer = sentence(error)
        except Exception as error:
            answer = f"the export failed because of a bug in sae-tui: {error!r}"
        with contextlib.suppress(RuntimeError):
            app.call_from_thread(self._end, app, answer)

    @staticmethod
    def _words(done: Exported) -> str:
        notes = "".join(f"\nNote: {note}." for note in done.notes)
        pushed = f", and in {done.pushed['url']}" if "url" in done.pushed else ""
        return f"The SAE of step {done.step} is in {done.output_path}{pushed}{notes}"

    def _end(self, app: App[object], answer: str) -> None:
        self._is_going = False
        words = answer[:1].upper() + answer[1:]
        if self.is_attached:
            self._show(words)
        else:
            app.notify(words, markup=False)

    def _show(self, words: str) -> None:
        """Show the result, unless the dialog was closed."""
        if self.is_attached:
            self.query_one("#answer", Label).update(words)
