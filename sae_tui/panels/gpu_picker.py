"""The list for choosing GPUs: their models, their free memory, and why a GPU is unavailable."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from dataclasses import replace

from textual.binding import Binding
from textual.message import Message

from sae_tui.format import gibibytes
from sae_tui.gpu.visible import ranges
from sae_tui.jobs.gpus.availability import GpuChoice, fit
from sae_tui.panels.gpu_row import short_name
from sae_tui.widgets.confirm import Confirm
from sae_tui.widgets.table import Column, KeyedTable, Row
from trainer.contract.wording import plural

COLUMNS = (
    Column("", 3),
    Column("GPU", 5),
    Column("NAME", 13),
    Column("TOTAL", 9, right=True, drop=1),
    Column("FREE", 9, right=True),
    Column("", 22, grow=True),
)


_ANY = "any"
# No vendor sells nodes with more GPUs than this.
MOST_PER_NODE = 16


class GpuPicker(KeyedTable):
    """A list for selecting GPUs. Selecting a busy GPU asks for confirmation.

    Space toggles a GPU, and `a` selects all available ones. The form handles `r` and `R`, because it knows the job.
    """

    BINDINGS = [
        Binding("space", "toggle", "Toggle", id="picker.toggle", tooltip="Select or deselect this GPU"),
        Binding("a", "available", "All free", id="picker.available", tooltip="Select every free GPU"),
        Binding("r", "best", "Best", id="picker.recommended",
                tooltip="Select the fewest GPUs that suffice, or more if they are worth it"),
        Binding("R", "best(True)", "Always", show=False, id="picker.always",
                tooltip="Select the best GPUs now and for every new job"),
    ]  # fmt: skip
    DEFAULT_CSS = "GpuPicker { height: auto; max-height: 11; }"

    class Changed(Message):
        """The selection of GPUs has changed."""

    class BestAsked(Message):
        """The user asked for the best GPUs; with `always`, for every new job."""

        def __init__(self, *, always: bool) -> None:
            super().__init__()
            self.always = always

    def __init__(self, *, several: bool, id: str | None = None) -> None:  # noqa: A002
        super().__init__(COLUMNS, id=id)
        self.several = several
        self.chosen: frozenset[int] = frozenset()
        self.cpu_processes = 0
        self.any_gpus = 0
        self.elsewhere = ""
        self.choices: tuple[GpuChoice, ...] = ()
        self._needed_bytes = 0

    def show_choices(self, choices: Sequence[GpuChoice], needed_bytes: int) -> None:
        """Draw the current state of the GPUs; a lost GPU is deselected."""
        had_gpus = bool(self.choices)
        self.choices, self._needed_bytes = tuple(choices), needed_bytes
        if had_gpus != bool(choices):
            self.refresh_bindings()
        usable = {choice.index for choice in choices if choice.state != "unhealthy"}
        if not self.chosen <= usable:
            self._choose(self.chosen & usable)
        self._show()

    def show_elsewhere(self, elsewhere: str) -> None:
        """Set the cluster that chooses the GPUs, or "" for none.

        For a cluster, only the number of GPUs per node can be selected.
        """
        if elsewhere == self.elsewhere:
            return
        self.elsewhere, count = elsewhere, len(self.chosen)
        self.choices = ()
        self.refresh_bindings()
        # A number of GPUs per cluster node does not apply to this machine.
        self.choose_any((count or self.any_gpus or int(not self.cpu_processes)) if elsewhere else 0)
        self._show()

    @property
    def gpus(self) -> list[int] | str:
        """The selection in the format of `launch.gpus`, or an empty list if nothing is selected."""
        if self.cpu_processes:
            return f"cpu:{self.cpu_processes}" if self.cpu_processes > 1 else "cpu"
        if self.any_gpus:
            return f"auto:{self.any_gpus}"
        return sorted(self.chosen)

    def choose_cpu(self, processes: int) -> None:
        """Select `processes` CPU processes and no GPUs; 0 selects none."""
        if processes != self.cpu_processes:
            self.cpu_processes, self.any_gpus, self.chosen = processes, 0, frozenset()
            self._show()
            self.post_message(self.Changed())

    def choose_any(self, count: int) -> None:
        """Make the job wait for any `count` GPUs that fit; 0 selects none."""
        if count != self.any_gpus:
            self.any_gpus, self.cpu_processes, self.chosen = count, 0, frozenset()
            self._show()
            self.post_message(self.Changed())

    def choose(self, indices: Collection[int]) -> None:
        """Select these GPUs, or only the first if a job may use only one."""
        allowed = sorted(indices) if self.several else sorted(indices)[:1]
        self._choose(frozenset(allowed))

    def start_at(self, gpus: list[int] | str) -> None:
        """Put the cursor on the first of these GPUs, in the format of `launch.gpus`, even if it is not available.

        Otherwise the first space on a job's clone would move it to GPU 0.
        """
        named = sorted(gpus) if isinstance(gpus, list) else sorted(self.chosen)
        present = {choice.index for choice in self.choices}
        row = (
            "cpu"
            if self.cpu_processes
            else _ANY
            if self.any_gpus
            else next((str(one) for one in named if one in present), "")
        )
        if row:
            self.select(row)

    @property
    def has_every_free_gpu(self) -> bool:
        """Whether the selected GPUs are exactly the free ones."""
        return bool(self.chosen) and self.chosen == set(self._free)

    @property
    def _free(self) -> list[int]:
        return [choice.index for choice in self.choices if choice.may_be_offered]

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Offer the keys for several GPUs only if this machine has GPUs to choose from."""
        return action not in ("available", "best") or bool(self.choices)

    def action_toggle(self) -> None:  # type: ignore[override]
        choice = next((one for one in self.choices if str(one.index) == self.cursor), None)
        if self.cursor == _ANY:
            most = (MOST_PER_NODE if self.elsewhere else len(self.choices)) if self.several else 1
            self.choose_any((self.any_gpus + 1) % (most + 1))
            return
        if choice is None and self.cursor == "withheld":
            return
        if choice is None:
            most = _cores() if self.several else 1
            self.choose_cpu((self.cpu_processes + 1) % (most + 1))
            return
        if choice.index in self.chosen:
            self._choose(self.chosen - {choice.index})
        elif choice.state == "unhealthy":
            self.notify(f"GPU {choice.index} cannot be used: {choice.reason}", severity="warning", markup=False)
        elif choice.state == "busy":
            question = f"GPU {choice.index} is busy: {choice.reason}. Choose it anyway? The job will wait for it."
            self.app.push_screen(
                Confirm(question, yes="Choose it"), lambda yes: self._add(choice.index) if yes else None
            )
        else:
            self._add(choice.index)

    def action_available(self) -> None:
        if not self.elsewhere:
            self.choose(self._free)

    def action_best(self, always: bool = False) -> None:
        if not self.elsewhere:
            self.post_message(self.BestAsked(always=always))

    def _add(self, index: int) -> None:
        self._choose(self.chosen | {index} if self.several else frozenset({index}))

    def _choose(self, indices: frozenset[int]) -> None:
        if indices != self.chosen or self.cpu_processes or self.any_gpus:
            self.chosen, self.cpu_processes, self.any_gpus = indices, 0, 0
            self._show()
            self.post_message(self.Changed())

    def _show(self) -> None:
        anyone = [self._any_row()] if self.choices or self.elsewhere else []
        rows = [*(self._row(choice) for choice in self.choices if not choice.withheld), *anyone, self._cpu_row()]
        if withheld := [choice for choice in self.choices if choice.withheld]:
            words = f"{ranges([choice.index for choice in withheld])}: {withheld[0].reason}"
            cells = (" – ", "other", "", "", "", words)
            rows.append(Row("withheld", tuple((text, "dim") for text in cells)))
        # Never truncate a GPU index, because users choose GPUs by index.
        longest = max(len(row.cells[1][0]) for row in rows)
        self.columns = tuple(replace(one, width=longest) if one.title == "GPU" else one for one in COLUMNS)
        self.show_rows(rows)

    def _row(self, choice: GpuChoice) -> Row:
        text, style = self._state_text(choice)
        chosen = choice.index in self.chosen
        return Row(
            key=str(choice.index),
            cells=(
                ("[x]" if chosen else " – " if choice.state == "unhealthy" else "[ ]", "title"),
                (f"GPU {choice.index}", "title" if chosen else "text"),
                (short_name(choice.name), "text"),
                (gibibytes(choice.memory_total_bytes), "text"),
                (gibibytes(choice.memory_free_bytes), "text"),
                (text, style),
            ),
        )

    def _state_text(self, choice: GpuChoice) -> tuple[str, str]:
        """Return why a GPU is unsuitable, or that it is available, and the text style."""
        if choice.state == "unhealthy":
            return choice.reason, "bad"
        short = fit(choice, self._needed_bytes)
        if choice.state == "busy":
            return "; ".join(filter(None, (choice.reason, short))), "warn"
        return (short, "warn") if short else (choice.reason or "available", "good")

    def _any_row(self) -> Row:
        count = self.any_gpus
        words = "queues for the first that fit; space for one more" if count else "space to queue for any that fit"
        if self.elsewhere:
            words = f"per node, chosen by {self.elsewhere}; space for one more"
        mark, which = ("[x]", f"any {count}") if count else ("[ ]", "any")
        cells = (mark, which, "", "", "", words)
        return Row(_ANY, tuple((text, "title" if count and text == which else "dim") for text in cells))

    def _cpu_row(self) -> Row:
        count = self.cpu_processes
        words = f"{count} process{'es' * (count > 1)}; space for one more" if count else "space for CPU processes"
        mark = "[x]" if count else "[ ]"
        cells = (mark, "CPU", plural(_cores(), "core"), "", "", words)
        return Row("cpu", tuple((text, "title" if count and text == "CPU" else "dim") for text in cells))


def _cores() -> int:
    """Return the number of CPU cores this process may use."""
    return len(os.sched_getaffinity(0))
