"""The jobs table with keys for editing jobs (name, tags, note, queue position) and comparing them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from textual.binding import Binding

from sae_tui.jobs import edits
from sae_tui.jobs.states import stands
from sae_tui.jobs.view.arrays import ArrayView
from sae_tui.jobs.view.reader import JobView
from sae_tui.panels.finder import FIND, JobsFinder
from sae_tui.panels.jobs import JOBS
from sae_tui.session import Session
from sae_tui.widgets.ask import Ask
from trainer.contract.paths import DataDir
from trainer.contract.store.job_store import Control
from trainer.contract.store.states import JobState
from trainer.contract.wording import plural

QUEUE = Binding.Group("Queue")


class JobEdits(JobsFinder):
    """The jobs table with keys for editing jobs.

    Tags apply to all marked jobs, other edits only to the job under the cursor.
    """

    BINDINGS = [
        Binding("c", "compare", "Compare", id="jobs.compare", group=JOBS,
                tooltip="Compare the marked jobs: curves, settings, results"),
        Binding("number_sign", "tag", "Tags", key_display="#", show=False, id="jobs.tag", group=JOBS,
                tooltip="Add or remove tags on the marked jobs, or on this job"),
        Binding("R", "rename", "Rename", show=False, id="jobs.rename", group=JOBS, tooltip="Rename the job"),
        Binding("N", "note", "Note", show=False, id="jobs.note", group=JOBS, tooltip="Write a note on the job"),
        Binding("I", "import_sae", "Import", show=False, id="jobs.import", group=JOBS,
                tooltip="Create a job from another tool's SAE, to evaluate, compare or train it"),
        Binding("C", "choose_columns", "Columns", show=False, id="jobs.columns", group=FIND,
                tooltip="Choose and order the columns, and sort by any of them"),
        Binding("F", "fold_clones", "Families", show=False, id="jobs.families", group=FIND,
                tooltip="Show a job and its clones as one row, or each on its own"),
        Binding("plus", "prioritise(1)", "Sooner", key_display="+", id="jobs.sooner", group=QUEUE,
                tooltip="Raise the priority of the queued job"),
        Binding("minus", "prioritise(-1)", "Later", key_display="-", show=False, id="jobs.later", group=QUEUE,
                tooltip="Lower the priority of the queued job"),
        Binding("A", "come_after", "After", id="jobs.after", group=QUEUE,
                tooltip="Start the queued job after other jobs have finished"),
        Binding("h", "hold", "Hold", id="jobs.hold", group=QUEUE,
                tooltip="Hold the queued job, or release it"),
    ]  # fmt: skip

    def __init__(self, session: Session, *, id: str | None = None) -> None:  # noqa: A002
        super().__init__(id=id)
        self.session = session
        # If the job under the cursor is on another host, opens it and calls an action of its screen.
        self.open_elsewhere: Callable[[str], bool] = lambda action: False

    def show_jobs(self, jobs: Sequence[JobView], problem: str = "") -> None:
        settings = self.session.settings
        self.columns, self.families = settings.job_columns, settings.fold_clones
        super().show_jobs(jobs, problem)

    @property
    def selected(self) -> JobView | None:
        """The job under the cursor."""
        job_id = self.table.selected
        return next((job for job in self.session.jobs if job.id == job_id), None)

    @property
    def targets(self) -> list[int]:
        """The marked jobs or, if there are none, the job under the cursor, or all jobs in the array there."""
        array = self.selected_array
        return self.marked or [job.id for job in (array.jobs if array else [self.selected]) if job]

    @property
    def selected_array(self) -> ArrayView | None:
        """The array under the cursor."""
        return self.table.selected_array

    def refuse_elsewhere(self, command: str) -> bool:
        """If the job under the cursor is on another host, say that a command, such as `rm ID`, must run there.

        Return False for a local job.
        """
        if not self._far:
            return False
        from sae_tui.panels.far_jobs import parse_key, there

        at = parse_key(self.table.cursor)
        job = next((view.job(at[1]) for view in self._far if at and view.name == at[0]), None)
        if job and job.held and command == "hold ID":
            command = "release ID"
        if at and not self.session.actions.refused():
            self.notify(there(*at, command), severity="warning", markup=False)
        return at is not None

    def action_mark(self) -> None:
        """Mark or unmark the job or array under the cursor and move to the next row."""
        if self._far and self.table.cursor and not (self.selected or self.selected_array):
            words = (
                "Only jobs on this host can be marked; c compares them with the job under the cursor on another host."
            )
            self.notify(words, severity="warning")
        super().action_mark()

    def action_compare(self) -> None:
        if self.open_elsewhere("compare"):
            return
        from sae_tui.screens.compare import MOST_RUNS, CompareScreen, is_sweep

        ids = self.targets
        if len(ids) > MOST_RUNS:
            self.notify(
                f"{len(ids)} jobs are marked, but at most {MOST_RUNS} can be compared; unmark some.", severity="warning"
            )
        elif len(ids) > 1 or any(is_sweep(job) for job in self.session.jobs if job.id in ids):
            self.session.go.show(CompareScreen(self.session, ids))
        else:
            self.notify("Mark two or more jobs with space, then press c.", severity="warning")

    def action_import_sae(self) -> None:
        from sae_tui.screens.export import ImportDialog

        if not self.session.actions.refused():
            self.app.push_screen(ImportDialog(self.session))

    def action_choose_columns(self) -> None:
        from sae_tui.panels.job_columns import ColumnsDialog

        def take(names: tuple[str, ...] | None) -> None:
            if names is not None and names != self.table.chosen:
                self.session.actions.keep("Columns", job_columns=list(names))
                self.show_jobs(self.session.jobs, self.session.watcher.problem)

        def sort(order: str, reverse: bool) -> None:
            self.sort_by(order, reverse=reverse)

        self.app.push_screen(ColumnsDialog(self.table.chosen, sort, (self.order, self.reverse)), take)

    def action_fold_clones(self) -> None:
        folds = not self.session.settings.fold_clones
        self.session.actions.keep("Families", fold_clones=folds)
        self.show_jobs(self.session.jobs, self.session.watcher.problem)
        self.notify("Three or more clones of a job are now one row." if folds else "Each clone is a row.")

    def action_tag(self) -> None:
        ids = self.targets
        if not ids and self.refuse_elsewhere("tag ID --add WORD"):
            return
        if not ids or self.session.actions.refused():
            return
        tags = sorted({tag for job in self.session.jobs if job.id in ids for tag in job.tags})
        whose = f"job {ids[0]}" if len(ids) == 1 else plural(len(ids), "job")
        question = f"Tags of {whose}: {', '.join(tags) or 'none'}"

        def take(text: str | None) -> None:
            if text:
                add, remove = edits.tag_words(text)
                self.session.actions.edit(
                    ids, lambda data, control, job_id: edits.retag(data, control, job_id, add, remove)
                )

        self.app.push_screen(Ask(question, "+good -bad"), take)

    def action_rename(self) -> None:
        if not self.refuse_elsewhere("rename ID NAME"):
            self._ask("Name", lambda job: job.name, edits.rename)

    def action_note(self) -> None:
        if not self.refuse_elsewhere("note ID TEXT"):
            self._ask("Note", lambda job: job.note, edits.write_note)

    def action_prioritise(self, by: int) -> None:
        def change(data: DataDir, control: Control, job_id: int) -> str:
            return edits.prioritise(data, control, job_id, control.job(job_id).priority + by)

        if array := self.selected_array:
            queued = [job.id for job in array.jobs if job.state == JobState.QUEUED]
            self.session.actions.edit(queued, change)
        elif job := self._in_line("priority ID --to N"):
            self.session.actions.edit([job.id], change)

    def action_hold(self) -> None:
        if array := self.selected_array:
            self.session.actions.hold_array(array)
        elif job := self._in_line("hold ID"):
            self.session.actions.edit([job.id], edits.release if job.held else edits.hold)

    def action_come_after(self) -> None:
        job = self._in_line("after ID OTHER")
        if job is None:
            return

        def take(text: str | None) -> None:
            if text is None:
                return
            words = text.replace(",", " ").split()
            if not all(word.isdecimal() for word in words):
                self.notify(f'Enter job ids like "7 12", not "{text}".', severity="error", markup=False)
                return
            self.session.actions.edit(
                [job.id], lambda data, control, job_id: edits.come_after(data, control, job_id, map(int, words))
            )

        now = " ".join(map(str, job.after))
        self.app.push_screen(
            Ask(f"Job {job.id} waits until these have finished", "ids like 7 12; empty: wait for no job", now), take
        )

    def _in_line(self, command: str) -> JobView | None:
        """Return the job under the cursor if it is queued; otherwise say why nothing is done."""
        if self.refuse_elsewhere(command):
            return None
        job = self.selected
        if job and self.session.actions.refused():
            return None
        if job and job.state != JobState.QUEUED:
            self.notify(f"Job {job.id} {stands(job)}; only a queued job can be moved or held.", severity="warning")
            return None
        return job

    def _ask(self, what: str, now: Callable[[JobView], str], edit: Callable[[DataDir, Control, int, str], str]) -> None:
        job = self.selected
        if job is None or self.session.actions.refused():
            return
        job_id = job.id

        def take(text: str | None) -> None:
            if text is not None:
                self.session.actions.edit([job_id], lambda data, control, job_id: edit(data, control, job_id, text))

        self.app.push_screen(Ask(f"{what} of job {job.id}", what.lower(), now(job)), take)
