"""The curves of a job over steps."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from textual.app import ComposeResult
from textual.containers import Grid

from sae_tui.format import number, share
from sae_tui.jobs.view.sweeps import in_order
from sae_tui.jobs.view.watcher import JobDetail
from sae_tui.widgets.plot import Plot


@dataclass(frozen=True, slots=True)
class Curve:
    """A metric by its name in the store and the title it has on the screen."""

    name: str
    title: str
    from_zero: bool = False
    least_top: float = -math.inf
    word: Callable[[float | None], str] = number


CURVES = (
    Curve("loss", "loss"),
    Curve("fvu", "FVU", from_zero=True),
    Curve("l0", "L0", from_zero=True),
    # The axis goes up to 1 % at least: one dead latent of thousands must not look like a cliff.
    Curve("dead_fraction", "dead fraction", from_zero=True, least_top=0.01, word=share),
)


class CurvePlot(Plot):
    """The plot of one curve of a job."""

    def __init__(self, curve: Curve) -> None:
        super().__init__(
            curve.title,
            from_zero=curve.from_zero,
            least_top=curve.least_top,
            word=curve.word,
            id=f"curve-{curve.name}",
        )
        self.curve = curve

    def show_detail(self, detail: JobDetail) -> None:
        """Draw the curve of the job, or of the SAE of its sweep that is shown."""
        member = detail.member
        points = detail.series.get((of_member(self.curve.name, member), 0), ())
        held_out = detail.series.get((of_member(f"heldout_{self.curve.name}", member), 0), ())
        note = f"held-out {self.curve.word(held_out[-1].value)}" if held_out else ""
        nothing = "no values" if detail.view.state.is_final else "no values yet"
        self.show_points([(point.step, point.value) for point in points], note, nothing)


class CurvesPanel(Grid):
    """All curves, in rows of two."""

    DEFAULT_CSS = "CurvesPanel { grid-size: 2 2; grid-gutter: 0 1; height: 3fr; min-height: 6; }"

    def compose(self) -> ComposeResult:
        for curve in CURVES:
            yield CurvePlot(curve)

    def show_detail(self, detail: JobDetail) -> None:
        for plot in self.query(CurvePlot):
            plot.show_detail(detail)


def newest(detail: JobDetail, name: str, member: str = "") -> float | None:
    """Return the last value of a metric; None where there is none yet."""
    points = detail.series.get((of_member(name, member), 0), ())
    return points[-1].value if points else None if member else getattr(detail.view, name)


def of_member(name: str, member: str) -> str:
    """Return a metric's name in the store: of the run, or of one SAE of a sweep."""
    return f"{name}@{member}" if member else name


def members_of(detail: JobDetail) -> list[str]:
    """Return the labels of a sweep's SAEs, like "k=16", in the order of the job file; empty for a run of one."""
    labels = [name.removeprefix("fvu@") for name, rank in detail.series if name.startswith("fvu@") and rank == 0]
    return in_order(labels, detail.view.config)
