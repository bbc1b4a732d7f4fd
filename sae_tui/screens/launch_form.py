"""The launch form, from top to bottom: the GPUs, the job's settings, and a review."""

from __future__ import annotations

import contextlib
import os
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from textual import on
from textual.app import ComposeResult
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.content import Content
from textual.message import Message
from textual.timer import Timer
from textual.widgets import Button, Label, Static

from sae_tui.format import wrap_quantities
from sae_tui.jobs.launch import job_form
from sae_tui.jobs.launch.job_form import Draft, Review
from sae_tui.jobs.launch.kept_draft import KeptDraft
from sae_tui.jobs.launch.kept_draft import file_of as kept_file
from sae_tui.jobs.launch.kinds import launch_kind
from sae_tui.jobs.launch.placement import recommend
from sae_tui.jobs.program_environment import active_environment
from sae_tui.jobs.shard_headers import announcing
from sae_tui.jobs.user import user_name
from sae_tui.panels.gpu_picker import GpuPicker
from sae_tui.panels.memory_bar import MemoryBar
from sae_tui.session import Session
from sae_tui.settings import change_settings
from sae_tui.widgets.confirm import Confirm
from sae_tui.widgets.find import Find
from sae_tui.widgets.frame import HeadingLine, entitle, frame_of
from sae_tui.widgets.menu import Menu
from sae_tui.widgets.setting_form import CommandLine, Field, FieldHelp, SettingForm
from trainer.contract.errors import UserError
from trainer.contract.files import write_own
from trainer.contract.settings.backends import cluster_of
from trainer.contract.settings.catalog import KINDS, TRAINING
from trainer.contract.settings.consent import COMMAND, Consent, refused, without
from trainer.contract.settings.declare import Setting
from trainer.contract.settings.job import AnyJob
from trainer.contract.settings.job_file import to_table
from trainer.contract.settings.sections import meanings_of
from trainer.contract.settings.sweep import may_differ
from trainer.contract.wording import plural

if TYPE_CHECKING:
    from sae_tui.jobs.gpus.availability import GpuChoice
    from trainer.contract.paths import DataDir
    from trainer.contract.store.rows import Job


_WITHOUT_LIMIT = 1000
# The keys that show the launch form for each kind of job.
KIND_KEYS = {"train": "f7", "extract": "f8", "command": "f9"}


class KindSwitch(Static):
    """One line with all kinds of job and their keys; a click on a kind shows its form."""

    def show_kind(self, shown: str) -> None:
        """Mark a kind as the one whose form is shown."""
        words = {kind: f" {KIND_KEYS.get(kind, '').upper()} {kind} " for kind in KINDS}
        marked = (
            f"[bold reverse]{text}[/]" if kind == shown else f"[@click=screen.show_kind({kind!r})]{text}[/]"
            for kind, text in words.items()
        )
        self.update(Content.from_markup(f" {' '.join(marked)}"))


class ReviewText(Static):
    """The job's summary and problems, within the lines available in its row."""

    def __init__(self, *, id: str | None = None) -> None:  # noqa: A002
        super().__init__("", markup=False, id=id)
        self._review = Review()

    def show_review(self, review: Review) -> None:
        self._review = review
        self._show()

    def on_resize(self) -> None:
        self._show()

    def _show(self) -> None:
        limit = self.parent.styles.max_height if self.parent else None
        n_lines = int(limit.value) if limit else _WITHOUT_LIMIT
        text = "\n".join(review_lines(self._review, max(20, self.content_size.width), n_lines))
        if text != str(self.content):
            self.update(text)


def review_lines(review: Review, width: int, n_lines: int) -> list[str]:
    """Return the review in full or, if it does not fit, without remedies, or else only its first problems."""
    in_full = review.sentences
    short = [text if text == review.surplus else text.partition("; ")[0] for text in in_full]
    for paragraphs in (in_full, short):
        wrapped = [wrap_quantities(paragraph, width) for paragraph in paragraphs]
        if sum(map(len, wrapped)) <= n_lines:
            return [line for lines in wrapped for line in lines]
    shown: list[str] = []
    for number, lines in enumerate(wrapped):
        if len(shown) + len(lines) > n_lines - 1:
            return [*shown, f"… {len(wrapped) - number} more; ctrl+l shows all"]
        shown += lines
    return shown


# On a machine with more GPUs, or with other users, selecting all free GPUs is rarely what people want.
_MANY_GPUS = 8
_OFFER_S = 8.0
# From this window size on, all of a job's settings are shown, in three columns.
_WIDE_COLUMNS, _WIDE_ROWS = 180, 50
# Opening a job file changes about twenty fields at once but should cause only one review.
_SETTLE_S = 0.05


class ClonedJob(msgspec.Struct, frozen=True):
    """The job being cloned: its original settings, and the initial settings of the new form.

    `host` is the job's host if it is not this one, or "".
    """

    job_id: int
    was: AnyJob
    start: AnyJob
    host: str = ""

    @property
    def which(self) -> str:
        return f"job {self.job_id} on {self.host}" if self.host else f"job {self.job_id}"

    @property
    def parent(self) -> int | None:
        """The id to store with the clone, or None for another host's job, because its id means nothing here."""
        return None if self.host else self.job_id


class LaunchForm(VerticalScroll, can_focus=False):
    """GPUs, settings and review, from top to bottom. The review is updated after every change."""

    class Reviewed(Message):
        """A draft was checked on another thread."""

        def __init__(self, number: int, review: Review, overridden: dict[str, str]) -> None:
            super().__init__()
            self.number = number
            self.review = review
            self.overridden = overridden

    def __init__(
        self, session: Session, kind: str, origin: ClonedJob | None = None, preset: Path | None = None
    ) -> None:
        super().__init__()
        self.session = session
        self.origin = origin
        # The settings may name another Python by the time the form is shown again.
        self.python = session.settings.python
        self._original = None if origin is None else job_form.flatten(to_table(origin.was))
        self.review = Review()
        # The job-file entries determining the job kind. The form has no field for the kind.
        self._kind: dict[str, Any] = {} if kind == TRAINING else {"kind": kind}
        self._settings = job_form.chosen_settings(self._kind)
        self._building = False
        # The numbers of the latest draft and of the latest reviewed draft.
        self._asked = self._reviewed = 0
        self._soon: Timer | None = None
        self._then: Callable[[Review], None] | None = None
        # True if the next review is to choose the best GPUs.
        self._wants_best = False
        # The values and preset used to fill the form. Any value that differs from these was changed by the user.
        self._start: dict[str, Any] = {}
        self._preset = preset
        self._kept = KeptDraft(session.data)
        # Whether the last draft had several SAEs; the footer reads this dozens of times per key press.
        self.is_sweep = False

    def compose(self) -> ComposeResult:
        several = self.session.settings.multi_gpu_enabled
        yield KindSwitch(id="kinds")
        yield HeadingLine(f" {self._gpus_title}", classes="heading", markup=False)
        yield GpuPicker(several=several, id="picker").add_class("panel")
        with Vertical(id="settings-panel", classes="panel"):
            with Horizontal(id="preset-row"):
                yield Label("", id="about")
                none = f"– (clone of {self.origin.which})" if self.origin else "none"
                yield Menu(_presets(self.kind), prompt=none, compact=True, id="preset")
                yield Static("", id="environment", markup=False)
                yield Static("", id="changes")
            with VerticalScroll(id="form-scroll", can_focus=False):
                yield SettingForm(_fields(self._kind), self._kind, id="form", original=self._original)
            yield FieldHelp()
        with Vertical(id="review-panel", classes="panel"):
            yield MemoryBar(id="memory")
            with Horizontal(id="review-row"):
                yield ReviewText(id="review")
                yield Button("Launch", id="launch-button", variant="primary", compact=True)

    @property
    def _gpus_title(self) -> str:
        return "F2 GPUs" + (f" · clone of {self.origin.which} ({self.origin.was.name})" if self.origin else "")

    def on_resize(self) -> None:
        self._entitle()
        width, height = self.screen.size
        for form in self.query(SettingForm):
            form.widen(is_wide=width >= _WIDE_COLUMNS and height >= _WIDE_ROWS)

    def _entitle(self) -> None:
        """Write the titles with their keys into the frames, or into the panels themselves if there are no frames."""
        about = f"F3 {launch_kind(self.kind).heading}"
        frame = frame_of(*self.screen.size)
        entitle(self.query_one(GpuPicker), self._gpus_title)
        entitle(self.query_one("#settings-panel"), about)
        entitle(self.query_one("#review-panel"), "F4 Review")
        self.query_one(KindSwitch).show_kind(self.kind)
        row = "environment" if self._is_program else "preset"
        self.query_one("#about", Label).update(about if frame == "bare" else row)
        self.query_one(MemoryBar).heading = " " if frame == "framed" else " F4 Review  "

    def on_mount(self) -> None:
        self.query_one("#picker").focus()
        self.show_gpus()
        if self.origin is not None:
            self._start_from(to_table(self.origin.start))
        elif preset := self._preset or job_form.default_preset(self.kind):
            self.fill(preset)
        else:
            self._start_from(job_form.empty_command())
        if self._is_program:
            self.query_one(SettingForm).focus_field(COMMAND)

    def show_gpus(self) -> None:
        """Draw the current state of the GPUs. When the first GPUs appear, select GPUs as the app's settings specify."""
        for picker in self.query(GpuPicker):
            if picker.elsewhere:
                self._show_memory(picker)
                continue
            first = not picker.choices
            picker.show_choices(self.session.choices(), self.review.needed_bytes)
            if first and picker.choices and not picker.gpus:
                self._preselect(picker)
            elif first and self.session.monitor.problem and not picker.cpu_processes:
                picker.choose_cpu(1)
            self._show_memory(picker)

    def _show_memory(self, picker: GpuPicker) -> None:
        """Show the required and free memory; recheck the draft if it no longer fits, or fits again."""
        need, capacity = (
            self.review.need,
            job_form.capacity(picker.gpus, picker.choices, elsewhere=bool(picker.elsewhere)),
        )
        for bar in self.query(MemoryBar):
            bar.show_need(need, capacity)
        if need and need.lacks(capacity) != need.judged_lacking:
            self._check()

    # The following methods fill in the form.

    @property
    def changed(self) -> list[str]:
        """The paths of settings changed by the user since the form was filled."""
        return [path for form in self.query(SettingForm) for path in form.changed_from(job_form.flatten(self._start))]

    @property
    def kind(self) -> str:
        """The kind of job in the form."""
        return job_form.kind_of(self._kind)

    @property
    def _is_program(self) -> bool:
        return KINDS[self.kind].is_program

    def replace(self, what: str, fill: Callable[[], None]) -> None:
        """Replace the form's content; ask first if changes would be lost."""
        if not self.changed:
            fill()
            return
        question = f"Replace your {plural(len(self.changed), 'changed setting')} with {what}?"
        self.app.push_screen(Confirm(question, yes="Replace"), lambda yes: fill() if yes else self._show_preset())

    def fill(self, path: Path) -> None:
        """Load a job file into the form. If the file cannot be read, notify the user and leave the form unchanged."""
        try:
            table = job_form.read_job_table(path)
        except UserError as error:
            self.notify(str(error), title="Not opened", severity="error", markup=False)
        else:
            settings = self.session.settings
            code = refused(table, Consent(names=(settings.python, *settings.trusted_code)))
            if not code or path == kept_file(self.session.data, job_form.kind_of(table)):
                self._fill(path, table)
                return
            harmless = without(table, code)
            question = Confirm(job_form.question_about(code, path), yes="Take over", no="Leave out")
            self.app.push_screen(question, lambda yes: self._fill(path, table if yes else harmless))
        self._show_preset()

    def _fill(self, path: Path, table: dict[str, Any]) -> None:
        self._preset = path if path in job_form.presets() else None
        if KINDS[job_form.kind_of(table)].is_program:
            table["command"].setdefault("argv", [])  # left out by the user
        elif self.session.settings.python:
            table["launch"].setdefault("python", self.session.settings.python)
        self._start_from(table)
        self._kept.note_filled(path, self.kind)
        self._show_preset()

    def _start_from(self, table: dict[str, Any]) -> None:
        self._start = table
        self.put_in(table)

    def _show_preset(self) -> None:
        """Reset the menu to the preset used to fill the form, even if the user selected another."""
        menu = self.query_one("#preset", Menu)
        menu.value = Menu.NULL if self._preset is None else self._preset

    def reset(self) -> None:
        """Undo all changes after a confirmation."""
        if not self.changed:
            self.notify("No setting was changed.")
            return
        question = f"Reset {plural(len(self.changed), 'changed setting')}?"
        self.app.push_screen(Confirm(question, yes="Reset"), lambda yes: self.put_in(self._start) if yes else None)

    def tell_draft(self) -> None:
        """Notify the user that the draft was kept, and how many of its settings differ from the initial values."""
        if self._kept.is_left and not self.changed:
            self.notify("Your draft is restored; pick a preset to start over.")
        elif self.changed:
            self.notify(f"Draft kept: {plural(len(self.changed), 'setting')} changed; ctrl+r resets.")

    def put_in(self, table: dict[str, Any]) -> None:
        """Put a complete job into the form and the GPU picker."""
        values = job_form.flatten(table)
        before = self.kind
        self._kind = {path: values[path] for path in ("kind",) if path in values}
        if self.kind != before:
            self.query_one("#preset", Menu).set_options(_presets(self.kind))
        if job_form.chosen_settings(values) != self._settings:
            self._build(values)
        else:
            self.query_one(SettingForm).set_values(values)
        self._entitle()
        picker = self.query_one(GpuPicker)
        picker.show_elsewhere(cluster_of(table["launch"]["backend"]))
        if not picker.choices:
            self.show_gpus()
        self._choose(picker, table["launch"]["gpus"])
        self._check()

    def _choose(self, picker: GpuPicker, gpus: list[int] | str) -> None:
        """Select the GPUs requested by a job file, if available; "auto" leaves the selection unchanged."""
        word, _, count = gpus.partition(":") if isinstance(gpus, str) else ("", "", "")
        if gpus != "auto":
            self._wants_best = False
        if word == "cpu":
            picker.choose_cpu(int(count or 1))
        elif count:
            picker.choose_any(int(count))
        elif picker.elsewhere:
            picker.choose_any(len(gpus) if isinstance(gpus, list) else 1)
        elif isinstance(gpus, list):
            usable = {choice.index for choice in picker.choices if choice.state == "available"}
            picker.choose(usable & set(gpus))
            self._tell_missing(sorted(set(gpus) - usable))
        picker.start_at(gpus)

    def _tell_missing(self, indices: list[int]) -> None:
        if indices:
            asked = ", ".join(f"GPU {index}" for index in indices)
            whose = f"J{self.origin.which[1:]} had" if self.origin else "The job file requests"
            self.notify(f"{whose} {asked}, not available now; choose other GPUs.", severity="warning", markup=False)

    @on(Menu.Picked, "#preset")
    def _preset_picked(self, event: Menu.Picked) -> None:
        event.stop()
        if isinstance(path := event.value, Path):
            self.replace(f"preset {path.stem}", lambda: self.fill(path))
        else:
            self._show_preset()

    # The following methods check the draft.

    @on(SettingForm.Edited)
    @on(GpuPicker.Changed)
    def _check(self) -> None:
        """Check the draft once the user has stopped changing it; only the latest result is shown."""
        self._asked += 1
        if self._soon is not None:
            self._soon.stop()
        self._soon = self.set_timer(_SETTLE_S, self._review)

    def _review(self) -> None:
        # There is no form while it is being built or while the screen is closing.
        forms = list(self.query(SettingForm))
        if self._building or not forms:
            return
        values, wrong = self._typed_into(forms[0])
        if job_form.chosen_settings(values) != self._settings:
            self._build(values)
            return
        picker = self.query_one(GpuPicker)
        picker.show_elsewhere(cluster_of(values.get("launch.backend")))
        candidate = Draft(values, wrong, picker.gpus)
        self._show_changes(forms[0])
        self._kept.follow(candidate, is_changed=bool(self.changed))
        # Use a daemon thread, because a data path on a dead file server must not keep the app from exiting.
        several = self.session.settings.multi_gpu_enabled
        here = (self.session.choices(), self.session.data, self.session.jobs, self.session.cuda, several)
        threading.Thread(target=self._review_now, args=(self._asked, candidate, *here), daemon=True).start()

    def _review_now(
        self,
        number: int,
        candidate: Draft,
        choices: Sequence[GpuChoice],
        data: DataDir,
        jobs: Sequence[Job],
        cuda: bool,
        several: bool,
    ) -> None:
        def check_again() -> None:
            with contextlib.suppress(RuntimeError):
                self.call_later(self._check)

        def show_reading(place: Path) -> None:
            with contextlib.suppress(RuntimeError):
                self.call_later(self._show_reading, number, place)

        with announcing(show_reading):
            review = job_form.review(candidate, choices, data, jobs, cuda=cuda, several=several, when_known=check_again)
        overridden = job_form.overridden(candidate.values, review)
        # The app and its event loop may have exited in the meantime.
        with contextlib.suppress(RuntimeError):
            self.post_message(self.Reviewed(number, review, overridden))

    def _show_reading(self, number: int, place: Path) -> None:
        """Show that the review is waiting for a process reading the headers at a data path."""
        if number == self._asked:
            self.query_one(ReviewText).show_review(Review(summary=f"reading the headers in {place} …"))

    @on(Reviewed)
    def _show_review(self, event: Reviewed) -> None:
        if event.number != self._asked:
            return
        self.review, self._reviewed = event.review, event.number
        if self._wants_best and self._choose_best():
            return
        for form in self.query(SettingForm):
            form.say(event.review.by_field, event.overridden, event.review.warned_fields)
        self.query_one(ReviewText).show_review(event.review)
        self.query_one("#review").set_class(bool(event.review.errors), "-wrong")
        self.query_one("#review").set_class(bool(event.review.warnings), "-warned")
        self.query_one("#launch-button", Button).disabled = bool(event.review.errors)
        self.show_gpus()
        then, self._then = self._then, None
        if then is not None:
            then(event.review)

    def _show_changes(self, form: SettingForm) -> None:
        """Show how many settings were changed, and update the sweep-only key."""
        count = len(self.changed)
        self.query_one("#changes", Static).update(f"{count} changed · ctrl+r resets" if count else "")
        self.query_one("#preset").display = not self._is_program
        environment = self.query_one("#environment", Static)
        environment.display = self._is_program
        if self._is_program:
            environment.update(self._environment_words(is_clean=form.texts["command.clean_env"] == "true"))
        if form.is_sweep != self.is_sweep:
            self.is_sweep = form.is_sweep
            self.screen.refresh_bindings()

    def _environment_words(self, *, is_clean: bool) -> str:
        """Return a description of the program's environment."""
        if self.origin is not None and self.origin.parent:
            return f"as for {self.origin.which}"
        active = "clean" if is_clean else active_environment(os.environb)
        return ", ".join(filter(None, ("this app's" * (not is_clean), active)))

    @on(CommandLine.EarlierAsked)
    def _ask_earlier(self, event: CommandLine.EarlierAsked) -> None:
        """Offer the command lines of this user's jobs; without any, go to the previous field, as in other fields."""
        event.stop()
        if lines := job_form.earlier_commands(self.session.jobs):
            question = Find("Earlier command lines, the newest first", [(line, "") for line in lines])
            self.app.push_screen(question, lambda line: event.line.take(line) if line else None)
        else:
            self.screen.focus_previous()

    @property
    def has_to_answer(self) -> bool:
        """Whether a key press is still waiting for a review, in which case later key presses must wait too."""
        return self._then is not None or self._wants_best

    def _typed_into(self, form: SettingForm) -> tuple[dict[str, Any], dict[str, str]]:
        """Return two dicts by path: the valid values, including the kind of job, and the errors in other fields."""
        values, wrong = form.values()
        return self._kind | values, wrong

    def draft_as_text(self, *, elsewhere: bool = False) -> str:
        """Return the form as a job file; invalid values appear as typed.

        With `elsewhere`, omit this machine's Python, because the other host has its own.
        """
        form = self.query_one(SettingForm)
        values, wrong = self._typed_into(form)
        if elsewhere and values.get("launch.python") == self.session.settings.python:
            values = {path: value for path, value in values.items() if path != "launch.python"}
        typed = {path: form.texts[path] for path in wrong}
        return job_form.as_text(Draft(values, wrong, self.query_one(GpuPicker).gpus), typed)

    def once_reviewed(self, then: Callable[[Review], None]) -> None:
        """Check the draft in its current state, and call `then` with the review."""
        self._then = then
        self._check()

    def _build(self, values: dict[str, Any]) -> None:
        """Rebuild the form for another architecture or source, which has other settings, and check it afterwards."""
        self._settings, self._building = job_form.chosen_settings(values), True
        self.run_worker(self._rebuild(values), exclusive=True, group="rebuild")

    async def _rebuild(self, values: dict[str, Any]) -> None:
        place, focused = self.query_one("#form-scroll"), self._focused_field()
        classes = " ".join(name for form in self.query(SettingForm) for name in form.classes)
        await place.remove_children()
        await place.mount(SettingForm(_fields(values), values, id="form", classes=classes, original=self._original))
        self._building = False
        for form in self.query(SettingForm):
            form.focus_field(focused)
        self._check()

    def _focused_field(self) -> str:
        """Return the path of the setting being edited, or "" if another widget has the focus."""
        rows = [row for form in self.query(SettingForm) for row in form.rows if row.has_focus_within]
        return rows[0].field.path if rows else ""

    def _preselect(self, picker: GpuPicker) -> None:
        """Select GPUs as the app's settings specify."""
        default = self.session.settings.default_gpu_selection
        if default == "best" or (default != "manual" and self._is_program):
            self._want_best()
        elif default == "available":
            picker.action_available()
            # Wait for a clone or a job file that names its own GPUs.
            self.call_after_refresh(self._offer_best, picker)
            if not picker.gpus:
                picker.choose_any(1)  # the job waits in the queue
        elif default == "all":
            picker.choose(
                [choice.index for choice in picker.choices if choice.state == "busy" or choice.may_be_offered]
            )

    @on(GpuPicker.BestAsked)
    def _best_asked(self, event: GpuPicker.BestAsked) -> None:
        event.stop()
        if event.always:
            self._always_best()
        self._want_best()

    def _want_best(self) -> None:
        """Choose the best GPUs, at once if the last review still applies, otherwise after a new review."""
        best, picker = self.review.best, self.query_one(GpuPicker)
        free = {choice.index for choice in picker.choices if choice.may_be_offered}
        self._wants_best = True
        if best is not None and self._reviewed == self._asked and best.gpus and free.issuperset(best.gpus):
            self._choose_best()
        else:
            self._check()

    def _choose_best(self) -> bool:
        """Choose the GPUs recommended by the review, or else one free GPU; return whether the selection has changed."""
        self._wants_best = False
        picker, best = self.query_one(GpuPicker), self.review.best
        before = picker.gpus
        if best is not None and not best.gpus:
            picker.choose_any(best.count)
        elif gpus := best.gpus if best else recommend(picker.choices, 0, 1).gpus:
            picker.choose(gpus)
        return picker.gpus != before

    def _always_best(self) -> None:
        """Change the settings so that the launch screen selects the best GPUs."""
        if self.session.actions.refused():
            return
        try:
            change_settings(self.session.data.settings_file, {"default_gpu_selection": "best"})
        except UserError as error:
            self.notify(str(error), title="Not saved", severity="error", markup=False)
        else:
            self.session.settings = msgspec.structs.replace(self.session.settings, default_gpu_selection="best")
            self.notify("Saved: new jobs start with the best GPUs (setting default_gpu_selection).")

    def _offer_best(self, picker: GpuPicker) -> None:
        """Offer once, on a machine with many GPUs or other users, to select the best GPUs from now on."""
        choices = picker.choices
        if not picker.has_every_free_gpu:
            return
        is_shared = len(choices) > _MANY_GPUS or any(map(_is_of_another_user, choices))
        mark = self.session.data.root / f"best-offered-{os.getuid()}"
        if not is_shared or self.session.readonly or os.path.lexists(mark):
            return
        self.notify(
            "All free GPUs are selected. Press F2, then R, to select only the GPUs that speed up the job, from now on.",
            timeout=_OFFER_S,
        )
        with contextlib.suppress(OSError, UserError):
            if not self.session.data.root.exists():
                self.session.data.create()
            write_own(mark, "", durable=False)


def _is_of_another_user(choice: GpuChoice) -> bool:
    """Return whether another user's program or job uses this GPU, or the GPU is reserved for others."""
    is_foreign = choice.state == "busy" and choice.job_id is None
    return choice.withheld or (is_foreign and not choice.reason.startswith(f"used by {user_name()} "))


def _label(path: str, setting: Setting, names: Counter[str]) -> str:
    """Return a setting's name, with its section if several sections have a setting with this name."""
    if setting.is_command_line:
        return "command line"
    return path if names[setting.name] > 1 else setting.name


def _presets(kind: str) -> list[tuple[str, Path]]:
    """Return the entries of the preset menu."""
    return [(path.stem, path) for path in job_form.presets(kind)]


def _fields(values: dict[str, Any]) -> list[Field]:
    fields = job_form.form_fields(values)
    names = Counter(setting.name for _, setting, _ in fields)
    return [
        Field(path, setting, choices, may_differ(path), _label(path, setting, names), meanings=meanings_of(path))
        for path, setting, choices in fields
    ]
