"""Chooses the step at which a value is stored, and the total number of steps, from everything a program reports."""

from __future__ import annotations

import msgspec

from sae_tui.jobs.program_metrics.lines import Reading, StepSource

# A smaller step begins another pass, such as the next epoch, only if the current pass has had at least this many
# different steps. When several processes print to one log, their steps rarely differ by this many.
FEWEST_IN_PASS = 5
# A progress bar is short if even this multiple of its total is smaller than the leading bar's total.
SHORT = 10


class StepAxis(msgspec.Struct):
    """Tracks a program's steps. It is stored with the read positions so that a restart continues in the same way.

    A step stated in a line is preferred to a progress bar's position, an epoch or the line number. A line without the
    best kind of step seen so far is assigned to the latest step.
    """

    source: StepSource = StepSource.LINE
    step: int = 0
    highest: int = 0
    total: int | None = None
    # The steps in earlier passes, then this pass's first step, latest step and number of steps.
    before: int = 0
    first: int | None = None
    latest: int = 0
    n_steps: int = 0
    # The leading progress bar, its total and its position.
    bar: str = ""
    bar_total: int | None = None
    bar_step: int = 0
    # Whether the program has been started again and has not reported a step since.
    is_restarted: bool = False
    # All values after this step are from an earlier attempt that got further; None if there are no such values.
    rewind_to: int | None = None

    def restart(self) -> None:
        """Prepare for a program that was started again, perhaps from its first step."""
        self.is_restarted = True
        self.before, self.first, self.n_steps, self.bar_step = 0, None, 0, 0

    def place(self, reading: Reading, line: int) -> int:
        """Return the step for a reading from a line of output."""
        source = reading.source
        if reading.bar and not self._follows_bar(reading):
            source = StepSource.LINE
        if source < self.source:
            return self.step
        if source is StepSource.LINE:
            return self._reach(line)
        if source > self.source:
            self.source, self.before, self.first, self.n_steps, self.total = source, 0, None, 0, None
        step = self._reach(self._in_pass(reading))
        if reading.total:
            self.total = self.before + reading.total
        return step

    def place_file(self, step: int) -> int:
        """Return the step for a value from a file, which states the step as `step`."""
        self.source = StepSource.STEP
        return self._reach(step) if step >= self.step or self.is_restarted else step

    @property
    def progress(self) -> tuple[int, int | None]:
        """The position to display: the step, and the total number of steps or None if that is unknown."""
        total = self.total
        if self.source is StepSource.STEP and total is None and (self.bar_total or 0) > self.step:
            # The bar counts the same steps, but it may be ahead of the values, which are reported only from time to
            # time.
            return max(self.step, self.bar_step), self.bar_total
        return self.step, total if total and total >= self.step else None

    def _follows_bar(self, reading: Reading) -> bool:
        """Return whether a reading belongs to the leading bar: the unfinished bar with the largest total."""
        total, led = reading.total or 0, self.bar_total or 0
        has_finished = not led or self.bar_step >= led
        if reading.bar != self.bar:
            # After a restart, a much shorter bar belongs to preparation; any other bar may count only the remaining
            # steps.
            if self.is_restarted and self.source is StepSource.BAR and SHORT * total >= led:
                self.is_restarted, self.before = False, self.highest
            elif not (has_finished or total > led):
                return False
        self.bar, self.bar_total, self.bar_step = reading.bar, reading.total, reading.step
        return True

    def _in_pass(self, reading: Reading) -> int:
        """Return a reading's step, counting the steps of earlier passes; a pass begins when the steps start over."""
        step = reading.step
        first = self.first if self.first is not None else step
        is_whole = reading.total is not None and self.latest >= reading.total
        if step <= first and step < self.latest and (is_whole or self.n_steps >= FEWEST_IN_PASS):
            self.before, self.n_steps, first = self.highest + (step == 0 and not is_whole), 0, step
        self.n_steps += step != self.latest or not self.n_steps
        self.first, self.latest = min(first, step), step
        return self.before + step

    def _reach(self, step: int) -> int:
        if self.is_restarted and self.source is not StepSource.LINE:
            self.is_restarted = False
            if step <= self.highest:
                self.rewind_to, self.highest = max(0, step - 1), step
        self.step = step
        self.highest = max(self.highest, step)
        return step
