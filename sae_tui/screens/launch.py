"""The launch screen: launches the form's job or saves it as a job file, in both cases after a review."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import TYPE_CHECKING

from textual import on
from textual.app import ComposeResult, SuspendNotSupported
from textual.binding import Binding
from textual.message import Message
from textual.widgets import Button
from textual.worker import get_current_worker

from sae_tui.format import fit, visible, wrap_quantities
from sae_tui.jobs.environment import SETTING
from sae_tui.jobs.launch import job_form
from sae_tui.jobs.launch.editor import edit_by_hand
from sae_tui.jobs.launch.inspecting import Inspected, Inspections
from sae_tui.jobs.launch.job_form import Review
from sae_tui.screens.launch_form import KIND_KEYS, ClonedJob, LaunchForm
from sae_tui.session import Session
from sae_tui.terminal.driver import give_away
from sae_tui.widgets.ask import Ask
from sae_tui.widgets.confirm import Confirm
from sae_tui.widgets.find import Find
from sae_tui.widgets.footer import Footer, FooterOffer
from sae_tui.widgets.frame import FramedScreen
from sae_tui.widgets.lines import Line
from sae_tui.widgets.reading import LinesScreen
from sae_tui.widgets.setting_form import SettingForm, SettingRow
from trainer.contract.errors import UserError, sentence
from trainer.contract.settings.catalog import KINDS, TRAINING
from trainer.contract.settings.job import AnyJob
from trainer.contract.wording import join_words, plural

if TYPE_CHECKING:
    from sae_tui.hosts.view import HostView


# The name and the tooltip of the key for each kind of job.
_KINDS = {
    "train": ("Train", "The form for training SAEs"),
    "extract": ("Extract", "The form for extracting activations of a language model"),
    "command": ("Command", "The form for running any program"),
}
_STYLES = {"error": "bad", "warning": "warn"}


def inspection_lines(place: str, inspected: Inspected, width: int) -> list[Line]:
    """Return the inspection lines, wrapped to `width` cells, with every finding in full."""
    looked = "all" if inspected.n_looked_at == inspected.n_tokens else f"{inspected.n_looked_at:,} of them checked"
    facts = (
        f"{inspected.n_tokens:,} rows ({looked}), d_in {inspected.d_in}, {inspected.dtype}",
        f"median norm {inspected.median_norm:.4g}, largest {inspected.largest_norm:.4g}; gamma {inspected.gamma:.2f}",
    )
    lines: list[Line] = [((fit(place, width), "title"),)]
    lines += [((text, "text"),) for fact in facts for text in _wrap(fact, width)]
    for one in inspected.findings:
        remedy = f"; {one.remedy}" if one.remedy else ""
        style = _STYLES.get(one.severity, "text")
        lines += [(), *(((text, style),) for text in _wrap(f"{one.severity}: {one.sentence}{remedy}", width))]
    return lines if inspected.findings else [*lines, (), (("No problems found.", "good"),)]


def _wrap(text: str, width: int) -> list[str]:
    return wrap_quantities(visible(text), max(10, width))


class Looked(Message):
    """Stored activations were inspected; if the inspection failed, `problem` explains why."""

    def __init__(self, place: str, inspected: Inspected | None, problem: str = "") -> None:
        super().__init__()
        self.place = place
        self.inspected = inspected
        self.problem = problem


class LaunchScreen(FramedScreen):
    """Shows the launch form, has it reviewed, and launches the job."""

    BINDINGS = [
        Binding("escape", "app.pop_screen", "Back", id="launch.back", tooltip="To the previous screen; keeps the form"),
        Binding("ctrl+l", "launch", "Launch", id="launch.go", tooltip="Start the job in the background", priority=True),
        Binding("ctrl+g", "launch_each", "Each", id="launch.each", tooltip="Launch one job for each SAE of the sweep"),
        Binding("ctrl+t", "advanced", "More", id="launch.advanced", tooltip="Show rarely changed settings"),
        Binding("ctrl+o", "open_file", "Open", id="launch.open", tooltip="Fill the form from a job file"),
        Binding("ctrl+e", "edit_text", "Edit", id="launch.edit", tooltip="Edit the job file in $EDITOR"),
        Binding("ctrl+s", "save_file", "Save", id="launch.save", tooltip="Write the form to a job file"),
        Binding("ctrl+f", "find_setting", "Find", show=False, id="launch.find",
                tooltip="Go to a setting by part of its name"),
        Binding("ctrl+r", "reset", "Reset", show=False, id="launch.reset",
                tooltip="Undo all changes since the preset or file was loaded"),
        Binding("f2,alt+1", "to_gpus", "GPUs", show=False, id="launch.gpus", tooltip="To the GPUs"),
        Binding("f3,alt+2", "to_settings", "Settings", show=False, id="launch.settings", tooltip="To the settings"),
        Binding("f4,alt+3", "to_review", "Review", show=False, id="launch.review",
                tooltip="To the launch button, or the first invalid setting"),
        *(Binding(key, f"show_kind('{kind}')", _KINDS[kind][0], show=False, id=f"launch.{kind}",
                  tooltip=_KINDS[kind][1]) for kind, key in KIND_KEYS.items()),
        Binding("f5", "inspect", "Inspect", show=False, id="launch.inspect",
                tooltip="Problems in the stored activations, and their remedies"),
        Binding("f6", "launch_there", "On host", show=False, id="launch.there",
                tooltip="Start the job on another host; that host checks the settings"),
        Binding("up", "app.focus_previous", show=False),
        Binding("down", "app.focus_next", show=False),
    ]  # fmt: skip

    def __init__(
        self, session: Session, kind: str = TRAINING, origin: ClonedJob | None = None, preset: Path | None = None
    ) -> None:
        super().__init__(name="launch")
        self.session = session
        self.form = LaunchForm(session, kind, origin, preset)
        self._inspections = Inspections()

    def compose(self) -> ComposeResult:
        yield self.form
        yield Footer()

    @property
    def has_to_answer(self) -> bool:
        """Whether a key press is still waiting for a review, in which case later key presses must wait too."""
        return self.form.has_to_answer

    def show_gpus(self) -> None:
        """Draw the current state of the GPUs."""
        self.form.show_gpus()

    def show_jobs(self) -> None:
        """Redraw the GPUs, because a job that ends frees its GPUs."""
        self.form.show_gpus()

    def keys_offered(self) -> FooterOffer:
        """Put the launch keys first, before the focused widget's keys."""
        return FooterOffer(("launch.go", "launch.each"))

    def action_show_kind(self, kind: str) -> None:
        """Show the form for another kind of job; each kind keeps its own draft."""
        if kind != self.form.kind:
            self.session.go.new_job(kind)

    def action_advanced(self) -> None:
        """Show all settings, or only the usual ones."""
        for form in self.query(SettingForm):
            form.toggle_all()

    def action_to_review(self) -> None:
        """Go to the first invalid setting, or to the launch button if all settings are valid."""
        wrong = [row.field.path for row in self.query(SettingRow) if row.has_class("-wrong")]
        if wrong:
            self.query_one(SettingForm).focus_field(wrong[0])
        else:
            self.query_one("#launch-button").focus()

    def action_open_file(self) -> None:

        def take(text: str | None) -> None:
            if text:
                self.form.replace(f"the content of {text}", lambda: self.form.fill(_path(text)))

        self.app.push_screen(Ask("Job file to open", "path of a .toml file"), take)

    def action_reset(self) -> None:
        """Undo all changes after a confirmation."""
        self.form.reset()

    def action_find_setting(self) -> None:
        """Ask for part of a setting's name, and go to that setting."""
        self.query_one(SettingForm).find()

    def action_to_gpus(self) -> None:
        self.query_one("#picker").focus()

    def action_to_settings(self) -> None:
        """Go to the field that last had the cursor, or to the first one."""
        self.query_one(SettingForm).focus_again()

    @on(Button.Pressed, "#launch-button")
    def action_launch(self) -> None:
        """Launch the job; ask first if the review has warnings."""
        self.form.once_reviewed(self._launch_reviewed)

    def _refuse(self, what: str, review: Review) -> None:
        """Name the settings to correct in one line that soon disappears, because more text would cover the review."""
        wrong = [problem.path for problem in review.errors if not (review.is_asking and problem.path == SETTING)]
        which = list(dict.fromkeys(wrong))
        why = f"correct {join_words(which)} first" if which else "its Python is still being checked"
        self.notify(f"Not {what}: {why}.", severity="warning", markup=False)

    def _launch_reviewed(self, review: Review, *, each: bool = False) -> None:
        """Launch the reviewed job, or each of its SAEs as a separate job; a clone becomes a child of its original."""
        if review.refusal:
            self.notify(review.refusal, title="Not launched", severity="error", markup=False)
            return
        if review.job is None:
            self._refuse("launched", review)
            return
        jobs, question = [review.job], review.question
        if each:
            jobs = job_form.each_alone(review.job)
            question = f"Launch {len(jobs)} jobs, one per SAE? They will queue for GPUs."
        origin = self.form.origin
        self.session.actions.launch_jobs(jobs, question, None if origin is None else origin.parent)

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Offer the sweep key only if there are several SAEs, and the host key only if there are other hosts."""
        if action == "launch_there":
            return self.session.hosts is not None
        if action == "inspect":
            return not KINDS[self.form.kind].is_program
        return action != "launch_each" or self.form.is_sweep

    def action_launch_each(self) -> None:
        """Launch every SAE in a sweep as a separate job; the jobs queue for GPUs and finish independently."""
        self.form.once_reviewed(functools.partial(self._launch_reviewed, each=True))

    def action_launch_there(self) -> None:
        """Ask for a host and its GPUs, and launch the form's job there."""
        if (hosts := self.session.hosts) is None or self.session.actions.refused():
            return
        offered = [(view.name, _of_host(view)) for view in hosts.views if view.is_connected]
        if not offered:
            self.notify("No other host is connected.", severity="warning")
            return
        self.app.push_screen(Find("Launch on which host?", offered), self._ask_gpus)

    def _ask_gpus(self, host: str | None) -> None:
        if host is not None:
            question = Ask(f"Which GPUs on {host}? auto, auto:2, 0,1 or cpu", "auto", "auto")
            self.app.push_screen(question, lambda gpus: self._launch_there(host, gpus) if gpus else None)

    def _launch_there(self, host: str, gpus: str) -> None:
        # Send the form as typed, because values invalid here, such as paths, may be valid on the other host.
        if self.session.hosts:
            launch = functools.partial(self.session.hosts.launch, host, self.form.draft_as_text(elsewhere=True), gpus)
            self.session.actions.do(launch)

    def action_inspect(self) -> None:
        """Inspect the stored activations named in the form."""
        self.form.once_reviewed(self._inspect)

    def _inspect(self, review: Review) -> None:
        job = review.job
        if job is None:
            self._refuse("inspected", review)
        elif (place := job.stored_rows) is None:
            self.notify("Only shards of activations can be inspected; this job reads other data.", severity="warning")
        else:
            self.notify(f"Inspecting {place} …", markup=False)
            look = functools.partial(self._look, place, job.launch.python)
            self.run_worker(look, thread=True, exclusive=True, group="inspect", exit_on_error=False)

    def _look(self, place: str, python: str | None) -> None:
        worker = get_current_worker()
        try:
            inspected = self._inspections.inspect(place, lambda: worker.is_cancelled, python)
        except (UserError, OSError) as error:
            self.post_message(Looked(place, None, sentence(error)))
        else:
            self.post_message(Looked(place, inspected))

    @on(Looked)
    def _show_looked(self, event: Looked) -> None:
        if event.inspected is not None and self.is_current:
            lines = functools.partial(inspection_lines, event.place, event.inspected)
            self.app.push_screen(LinesScreen("Stored activations", lines))
        elif event.problem:
            self.notify(event.problem, title="Not inspected", severity="error", markup=False)

    def action_edit_text(self) -> None:
        """Edit the form as a job file in $VISUAL or $EDITOR, and read the result back."""
        self.form.once_reviewed(self._edit_text)

    def _edit_text(self, review: Review) -> None:
        wrong = [str(problem) for problem in review.errors]
        try:
            text = self.form.draft_as_text()
            with give_away(self.app):
                table = edit_by_hand(text, wrong)
        except SuspendNotSupported:
            self.notify(
                "There is no terminal to edit in; save the form with ctrl+s and edit the file.", severity="error"
            )
        except UserError as error:
            self.notify(str(error), title="Not applied", severity="error", markup=False)
        else:
            if table is not None:
                self.form.put_in(table)

    def action_save_file(self) -> None:
        """Ask where to save the form, unless it contains errors."""
        self.form.once_reviewed(self._ask_where)

    def _ask_where(self, review: Review) -> None:
        job = review.job
        if job is None:
            self._refuse("saved", review)
            return
        question = Ask("Save the job file as", "path of a .toml file", f"{job.name}.toml")
        self.app.push_screen(question, lambda text: self._save(_path(text), job) if text else None)

    def _save(self, path: Path, job: AnyJob) -> None:
        if os.path.exists(path):
            question = f"{path} exists. Overwrite it?"
            self.app.push_screen(
                Confirm(question, yes="Overwrite"), lambda yes: self._write(path, job) if yes else None
            )
        else:
            self._write(path, job)

    def _write(self, path: Path, job: AnyJob) -> None:
        try:
            job_form.write_job(path, job)
            self.notify(f"Saved to {path}", markup=False)
        except UserError as error:
            self.notify(str(error), title="Not saved", severity="error", markup=False)


def _of_host(view: HostView) -> str:
    """Return a short host description for the list of choices."""
    idle = sum(gpu.use == "dim" and gpu.healthy for gpu in view.gpus)
    return f"{plural(len(view.gpus), 'GPU')}, {idle} idle" if view.gpus else "no GPU"


def _path(text: str) -> Path:
    """Return the typed text as a path, with `~` expanded; `Path.expanduser` would raise for an unknown user."""
    return Path(os.path.expanduser(text))
