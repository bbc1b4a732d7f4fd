"""Launching in the order of a person's thought: which GPUs, what to train, a last look."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from textual import on, work
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Horizontal, VerticalScroll
from textual.message import Message
from textual.screen import Screen
from textual.widgets import Button, Footer, Label, Select, Static

from sae_tui.jobs import draft
from sae_tui.jobs.draft import Draft, Review
from sae_tui.panels.gpu_picker import GpuPicker
from sae_tui.widgets.ask import Ask
from sae_tui.widgets.confirm import Confirm
from sae_tui.widgets.knob_form import Field, KnobForm
from trainer.contract.problems import UserError

if TYPE_CHECKING:
    from sae_tui.app import SaeApp


class LaunchScreen(Screen[None]):
    """GPUs, form and review on one page; the line at the bottom follows every change."""

    BINDINGS = [
        Binding("escape", "back", "Back", id="launch.back", tooltip="To the dashboard; the form is kept"),
        Binding("ctrl+l", "launch", "Launch", id="launch.go", tooltip="Start the training, detached", priority=True),
        Binding("ctrl+t", "advanced", "All settings", id="launch.advanced", tooltip="Show the settings rarely changed"),
        Binding("ctrl+o", "open_file", "Open", id="launch.open", tooltip="Fill the form from a job file"),
        Binding("ctrl+s", "save_file", "Save", id="launch.save", tooltip="Write the form to a job file"),
    ]
    app: SaeApp

    class Reviewed(Message):
        """A draft has been checked, off the main thread."""

        def __init__(self, number: int, review: Review) -> None:
            super().__init__()
            self.number = number
            self.review = review

    def __init__(self) -> None:
        super().__init__(id="launch")
        self.review = Review()
        self._values: dict[str, Any] = {}
        self._all = False
        self._asked = 0

    def compose(self) -> ComposeResult:
        several = self.app.settings.multi_gpu_enabled
        yield Label(" 1  GPUs", classes="heading")
        yield GpuPicker(self._recommended, several=several, id="picker")
        with Horizontal(id="preset-row"):
            yield Label(" 2  Data and training", classes="heading")
            yield Select([(path.stem, path) for path in draft.presets()], prompt="preset", compact=True, id="preset")
        with VerticalScroll(id="form-scroll"):
            yield KnobForm(self._fields(), self._values, id="form")
        yield Label(" 3  Review", classes="heading")
        with Horizontal(id="review-row"):
            yield Static("", id="review", markup=False)
            yield Button("Launch", id="launch-button", variant="primary", compact=True)
        yield Footer(show_command_palette=False)

    def on_mount(self) -> None:
        self.query_one("#picker").focus()
        self.show_gpus()
        self._preselect()
        self.query_one("#preset", Select).value = draft.default_preset()

    def show_gpus(self) -> None:
        """Draws the GPUs as they are now."""
        for picker in self.query(GpuPicker):
            picker.show_choices(self.app.choices(), self.review.needed_bytes)

    def show_jobs(self) -> None:
        """A job that ends frees its cards."""
        self.show_gpus()

    def fill(self, path: Path) -> None:
        """Puts a job file into the form; raises `UserError` where it cannot be read."""
        self._values = draft.flatten(draft.read_job_table(path))
        self.query_one(KnobForm).set_values(self._values)
        self._check()

    @on(Select.Changed, "#preset")
    def _preset_chosen(self, event: Select.Changed) -> None:
        event.stop()
        if isinstance(event.value, Path):
            self.fill(event.value)

    @on(KnobForm.Edited)
    @on(GpuPicker.Changed)
    def _check(self) -> None:
        """Checks the draft in the background; only the newest answer counts."""
        self._asked += 1
        values, wrong = self.query_one(KnobForm).values()
        self._values = values
        picker = self.query_one(GpuPicker)
        chosen = sorted(picker.chosen) if picker.choices else None
        self._review(self._asked, Draft(values, wrong, chosen))

    @work(thread=True, exclusive=True, group="review", exit_on_error=False)
    def _review(self, number: int, candidate: Draft) -> None:
        review = draft.review(candidate, self.app.choices(), self.app.data, self.app.jobs, cuda=self.app.cuda)
        self.post_message(self.Reviewed(number, review))

    @on(Reviewed)
    def _show_review(self, event: Reviewed) -> None:
        if event.number != self._asked:
            return
        self.review = event.review
        self.query_one(KnobForm).say(event.review.by_field)
        self.query_one("#review", Static).update(event.review.text)
        self.query_one("#review").set_class(bool(event.review.errors), "-wrong")
        self.query_one("#review").set_class(bool(event.review.warnings), "-warned")
        self.query_one("#launch-button", Button).disabled = bool(event.review.errors)
        self.show_gpus()

    @on(Button.Pressed, "#launch-button")
    def action_launch(self) -> None:
        """Launches, asking first where the review warns."""
        if self.review.job is None or self.review.errors:
            self.notify(
                self.review.text or "Fill in the form first.", title="Not launched", severity="error", markup=False
            )
            return
        if not self.review.warnings:
            self._go()
            return
        warned = "\n".join(str(problem) for problem in self.review.warnings)
        self.app.push_screen(Confirm(f"{warned}\n\nLaunch all the same?", yes="Launch"), lambda yes: yes and self._go())

    def _go(self) -> None:
        assert self.review.job is not None
        self.app.launch(self.review.job)

    def action_back(self) -> None:
        self.app.show_dashboard()

    def action_advanced(self) -> None:
        """Shows all settings, or only the usual ones."""
        self._values = self.query_one(KnobForm).values()[0]
        self._all = not self._all
        self.run_worker(self._rebuild(), exclusive=True, group="rebuild")

    async def _rebuild(self) -> None:
        scroll = self.query_one("#form-scroll")
        await self.query_one(KnobForm).remove()
        await scroll.mount(KnobForm(self._fields(), self._values, id="form"))
        self._check()

    def action_open_file(self) -> None:
        self.app.push_screen(Ask("Job file to open", "path of a .toml file"), self._open)

    def _open(self, text: str | None) -> None:
        if not text:
            return
        try:
            self.fill(Path(text).expanduser())
        except UserError as error:
            self.notify(str(error), title="Not opened", severity="error", markup=False)

    def action_save_file(self) -> None:
        name = self._values.get("name", "job")
        self.app.push_screen(Ask("Save the job file as", "path of a .toml file", f"{name}.toml"), self._save)

    def _save(self, text: str | None) -> None:
        if not text:
            return
        if self.review.job is None:
            self.notify(self.review.text, title="Not saved", severity="error", markup=False)
            return
        path = Path(text).expanduser()
        if path.exists():
            question = f"{path} exists. Write over it?"
            self.app.push_screen(Confirm(question, yes="Write"), lambda yes: yes and self._write(path))
        else:
            self._write(path)

    def _write(self, path: Path) -> None:
        assert self.review.job is not None
        try:
            draft.write_job(path, self.review.job)
            self.notify(f"Saved to {path}", markup=False)
        except UserError as error:
            self.notify(str(error), title="Not saved", severity="error", markup=False)

    def _fields(self) -> list[Field]:
        return [
            Field(path, knob, choices)
            for path, knob, choices in draft.form_fields(self._values)
            if self._all or not knob.advanced
        ]

    def _recommended(self) -> tuple[int, ...]:
        return self.app.recommended(self.review.needed_bytes)

    def _preselect(self) -> None:
        """Ticks what the settings say."""
        picker, wish = self.query_one(GpuPicker), self.app.settings.default_gpu_selection
        if wish == "available":
            picker.action_available()
        elif wish == "all":
            picker.choose([choice.index for choice in picker.choices if choice.state != "unhealthy"])
