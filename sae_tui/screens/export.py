"""Exports a job's SAE for other tools, and imports theirs: asks for the folders, and shows progress and result."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable
from pathlib import Path

from textual import on, work
from textual.app import App, ComposeResult
from textual.binding import Binding
from textual.containers import Horizontal, Vertical
from textual.widgets import Button, Input, Label

from sae_tui.jobs.gpus.occupancy import name_elsewhere
from sae_tui.jobs.launch.exporting import export_sae
from sae_tui.jobs.launch.importing import import_sae
from sae_tui.jobs.launch.trainer_command import OnReached
from sae_tui.jobs.view.reader import JobView
from sae_tui.session import Session
from sae_tui.widgets.dialog import Dialog
from sae_tui.widgets.menu import Menu
from sae_tui.widgets.tick import Tick
from trainer.contract.errors import UserError, sentence
from trainer.contract.paths import working_folder
from trainer.contract.printable import printable
from trainer.contract.progress import Reached
from trainer.contract.settings.catalog import READ_FORMATS, WRITTEN_FORMATS


class _SaeDialog(Dialog[None]):
    """A form for work done by the trainer. Escape closes the dialog, but the work continues."""

    DEFAULT_CSS = """
    _SaeDialog { align: center middle; }
    _SaeDialog > Vertical { width: 76; max-width: 95%; height: auto; max-height: 100%; padding: 1 2; }
    _SaeDialog > Vertical { border: round $primary; background: $surface; }
    _SaeDialog Label { width: 1fr; height: auto; }
    _SaeDialog Input { background: $panel; }
    _SaeDialog Menu { height: auto; width: 1fr; }
    _SaeDialog Horizontal { height: auto; margin-top: 1; align-horizontal: right; }
    _SaeDialog Button { margin-left: 2; min-width: 10; }
    """
    verb, doing = "", ""

    def __init__(self, session: Session) -> None:
        super().__init__()
        self._session = session
        self._is_going = False

    def compose(self) -> ComposeResult:
        with Vertical():
            yield from self.fields()
            yield Label("", markup=False, id="answer")
            with Horizontal():
                yield Button("Close (esc)", id="close", compact=True)
                yield Button(f"{self.verb} (enter)", id="start", variant="primary", compact=True)

    def fields(self) -> ComposeResult:
        """Yield the fields of the form."""
        raise NotImplementedError

    def asked(self) -> Callable[[OnReached], str] | None:
        """Return a function that does the work and returns a sentence; if a field is wrong, say so and return None."""
        raise NotImplementedError

    def on_mount(self) -> None:
        self.query_one("#folder").focus()

    def on_button_pressed(self, event: Button.Pressed) -> None:
        if event.button.id == "start":
            self._start()
        else:
            self.dismiss(None)

    @on(Input.Submitted)
    def _start(self) -> None:
        if self._is_going or self._session.actions.refused():
            return
        if act := self.asked():
            self._is_going = True
            self.say(f"{self.doing} …")
            self._act(act)

    @work(thread=True, group="export", exit_on_error=False)
    def _act(self, act: Callable[[OnReached], str]) -> None:
        app = self.app

        def show(reached: Reached) -> None:
            # The app may have exited.
            with contextlib.suppress(RuntimeError):
                app.call_from_thread(self.say, f"{self.doing}: {reached.words}" if reached.words else f"{self.doing} …")

        try:
            answer = act(show)
        except (UserError, OSError) as error:
            answer = sentence(error)
        except Exception as error:
            answer = f"the {self.verb.lower()} failed because of a bug in sae-tui: {error!r}"
        with contextlib.suppress(RuntimeError):
            app.call_from_thread(self._end, app, answer)

    def _end(self, app: App[object], answer: str) -> None:
        self._is_going = False
        words = answer[:1].upper() + answer[1:]
        if self.is_attached:
            self.say(words)
        else:
            app.notify(words, markup=False)

    def say(self, words: str) -> None:
        """Show the result, unless the dialog was closed."""
        if self.is_attached:
            self.query_one("#answer", Label).update(words)

    def text(self, field: str) -> str:
        """Return the text of a field, without surrounding blanks."""
        return self.query_one(f"#{field}", Input).value.strip()

    @property
    def ticked(self) -> list[str]:
        """The ticked options, as trainer flags."""
        return [f"--{tick.id}" for tick in self.query(Tick) if tick.value]


class ExportDialog(_SaeDialog):
    """Asks for format and folder, and shows the result."""

    BINDINGS = [Binding("escape", "dismiss(None)", "Close", id="export.close", tooltip="Back to the job")]
    verb, doing = "Export", "Exporting"

    def __init__(self, session: Session, job: JobView) -> None:
        super().__init__(session)
        self._job = job

    def fields(self) -> ComposeResult:
        name = re.sub(r"[^\w.-]+", "-", self._job.name).strip("-.") or "sae"
        yield Label(f"Export the SAE of job {self._job.id} as", markup=False)
        yield Menu([(form, form) for form in WRITTEN_FORMATS], value="saelens", allow_blank=False, compact=True)
        yield Label("into the folder", markup=False)
        yield Input(str(self._session.data.root / "exports" / f"{name}-{self._job.id}"), compact=True, id="folder")
        yield Label("and upload it to the Hugging Face hub as (empty: do not)", markup=False)
        yield Input(placeholder="OWNER/NAME, a private repository", compact=True, id="push")
        yield Tick("the checkpoint with the lowest held-out FVU, not the newest", id="best")
        yield Tick("replace the SAE that is already in the folder", id="force")

    def asked(self) -> Callable[[OnReached], str] | None:
        folder = self.text("folder")
        if not folder:
            self.say("Enter the folder to write the SAE to.")
            return None
        out, force = working_folder() / os.path.expanduser(folder), self.query_one("#force", Tick).value
        try:
            is_used = not force and out.is_dir() and any(out.iterdir())
        except OSError as error:
            self.say(f"{out} cannot be used: {sentence(error)}")
            return None
        if is_used:
            self.say(f"{out} is not empty. Enter another folder, or tick the box above.")
            return None
        # In a terminal, the trainer asks before an upload; here, entering the name counts as consent.
        push = [f"--push={name}", "--yes"] if (name := self.text("push")) else []
        arguments = ["--format", str(self.query_one(Menu).value), *self.ticked, *push]
        return lambda show: self._export(out, arguments, show)

    def _export(self, out: Path, arguments: list[str], show: OnReached) -> str:
        done = export_sae(self._session.data, self._job.id, out, arguments, on_reached=show)
        notes = "".join(f"\nNote: {note}." for note in done.notes)
        if command := str(done.pushed.get("command", "")):
            # The app may have exited.
            with contextlib.suppress(RuntimeError):
                self.app.call_from_thread(self.app.copy_to_clipboard, command)
            notes += f"\nThis command opens it, and was sent to the terminal's clipboard:\n{printable(command)}"
        pushed = f", and in {done.pushed['url']}" if "url" in done.pushed else ""
        return f"The SAE of step {done.newest_step} is in {done.output_path}{pushed}{notes}"


class ImportDialog(_SaeDialog):
    """Asks for another tool's SAE and for activations, and creates a job from them."""

    BINDINGS = [Binding("escape", "dismiss(None)", "Close", id="import.close", tooltip="Back to the jobs")]
    verb, doing = "Import", "Importing"

    def fields(self) -> ComposeResult:
        detected = ("detected from the files", "")
        yield Label("Import the SAE in a folder, or from the Hugging Face hub", markup=False)
        yield Input(placeholder="their-sae, or OWNER/NAME/FOLDER", compact=True, id="folder")
        yield Label("with stored activations, to evaluate it and train it further", markup=False)
        yield Input(placeholder="activations/resid_post.12", compact=True, id="data")
        yield Label("in the format", markup=False)
        yield Menu([detected, *((form, form) for form in READ_FORMATS)], value="", allow_blank=False, compact=True)
        yield Tick("it is a transcoder, and its files do not say so", id="transcoder")

    def asked(self) -> Callable[[OnReached], str] | None:
        folder, rows = self.text("folder"), self.text("data")
        if not (folder and rows):
            self.say("Enter the SAE and the folder of activations.")
            return None
        form = str(self.query_one(Menu).value)
        arguments = [*(["--format", form] if form else []), *self.ticked]
        return lambda show: self._import(_path(folder), _path(rows), arguments, show)

    def _import(self, folder: Path, rows: Path, arguments: list[str], show: OnReached) -> str:
        session = self._session
        source = name_elsewhere(session.monitor.source_name, len(session.monitor.latest()))
        job_id, imported = import_sae(
            session.data, folder, [rows], arguments, gpu_source=source, tags=(), python=session.settings.python,
            on_reached=show, in_terminal=False,
        )  # fmt: skip
        doubts = "".join(f"\nWarning: {doubt}." for doubt in imported.warnings)
        return f"job {job_id}: {imported.architecture} SAE, read as {imported.form}; {imported.check}{doubts}"


def _path(text: str) -> Path:
    """Return a path in the working folder, or the unchanged name of a repository on the hub."""
    path = Path(os.path.expanduser(text))
    return working_folder() / path if os.path.lexists(working_folder() / path) else path
