"""Keys of the launch screen: launching, and job files; always by a review of what is on the screen now."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from textual import on
from textual.app import SuspendNotSupported
from textual.binding import Binding
from textual.screen import Screen
from textual.widgets import Button

from sae_tui.jobs import draft
from sae_tui.jobs.draft import Review
from sae_tui.widgets.ask import Ask
from sae_tui.widgets.confirm import Confirm
from sae_tui.widgets.knob_form import KnobForm
from trainer.contract.job import JobConfig
from trainer.contract.problems import UserError

if TYPE_CHECKING:
    from sae_tui.app import SaeApp


class LaunchKeys(Screen[None]):
    """A screen with a form for a job, which it fills in, has reviewed and launches."""

    BINDINGS = [
        Binding("escape", "back", "Back", id="launch.back", tooltip="To the dashboard; the form is kept"),
        Binding("ctrl+l", "launch", "Launch", id="launch.go", tooltip="Start the training, detached", priority=True),
        Binding("ctrl+t", "advanced", "More", id="launch.advanced", tooltip="Show the settings rarely changed"),
        Binding("ctrl+o", "open_file", "Open", id="launch.open", tooltip="Fill the form from a job file"),
        Binding("ctrl+e", "edit_text", "Edit", id="launch.edit", tooltip="Edit the job file in $EDITOR"),
        Binding("ctrl+g", "launch_each", "Each", show=False, id="launch.each", tooltip="A job for each SAE of a sweep"),
        Binding("ctrl+s", "save_file", "Save", id="launch.save", tooltip="Write the form to a job file"),
    ]
    app: SaeApp
    fill: Callable[[Path], None]
    put_in: Callable[[dict[str, Any]], None]
    once_reviewed: Callable[[Callable[[Review], None]], None]
    launch: Callable[[list[JobConfig]], None]

    def action_back(self) -> None:
        self.app.show_dashboard()

    def action_advanced(self) -> None:
        """Shows all settings, or only the usual ones."""
        self.query(KnobForm).toggle_class("-all")

    def action_open_file(self) -> None:
        self.app.push_screen(
            Ask("Job file to open", "path of a .toml file"), lambda text: self.fill(_path(text)) if text else None
        )

    @on(Button.Pressed, "#launch-button")
    def action_launch(self) -> None:
        """Launches, asking first where the review warns."""
        self.once_reviewed(self._launch)

    def _launch(self, review: Review) -> None:
        job = review.job
        if job is None:
            self.notify(review.text, title="Not launched", severity="error", markup=False)
        elif review.question:
            self.app.push_screen(
                Confirm(review.question, yes="Launch"), lambda yes: self.launch([job]) if yes else None
            )
        else:
            self.launch([job])

    def action_launch_each(self) -> None:
        """Every SAE of a sweep as a job of its own, which wait for GPUs and end one by one."""
        self.once_reviewed(self._launch_each)

    def _launch_each(self, review: Review) -> None:
        if review.job is None:
            self.notify(review.text, title="Not launched", severity="error", markup=False)
            return
        jobs = draft.each_alone(review.job)
        question = f"Launch {len(jobs)} jobs, one for every SAE? They wait for their GPUs in line."
        self.app.push_screen(Confirm(question, yes="Launch"), lambda yes: self.launch(jobs) if yes else None)

    def action_edit_text(self) -> None:
        """The form as a job file in the editor of $VISUAL or $EDITOR, and back."""
        self.once_reviewed(self._edit_text)

    def _edit_text(self, review: Review) -> None:
        if review.job is None:
            self.notify(review.text, title="Mend this first", severity="error", markup=False)
            return
        try:
            with self.app.suspend():
                table = draft.edited_by_hand(review.job)
        except SuspendNotSupported:
            self.notify("There is no terminal to edit in.", severity="error")
        except UserError as error:
            self.notify(str(error), title="Not taken over", severity="error", markup=False)
        else:
            if table is not None:
                self.put_in(table)

    def action_save_file(self) -> None:
        """Asks where to, unless something is wrong with the form."""
        self.once_reviewed(self._ask_where)

    def _ask_where(self, review: Review) -> None:
        job = review.job
        if job is None:
            self.notify(review.text, title="Not saved", severity="error", markup=False)
            return
        question = Ask("Save the job file as", "path of a .toml file", f"{job.name}.toml")
        self.app.push_screen(question, lambda text: self._save(_path(text), job) if text else None)

    def _save(self, path: Path, job: JobConfig) -> None:
        if os.path.exists(path):
            question = f"{path} exists. Write over it?"
            self.app.push_screen(Confirm(question, yes="Write"), lambda yes: self._write(path, job) if yes else None)
        else:
            self._write(path, job)

    def _write(self, path: Path, job: JobConfig) -> None:
        try:
            draft.write_job(path, job)
            self.notify(f"Saved to {path}", markup=False)
        except UserError as error:
            self.notify(str(error), title="Not saved", severity="error", markup=False)


def _path(text: str) -> Path:
    """What was typed, with `~` in place; `Path.expanduser` raises for an unknown user."""
    return Path(os.path.expanduser(text))
