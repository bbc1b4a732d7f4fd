"""The curves of a job over steps."""

from __future__ import annotations

from dataclasses import dataclass

from sae_tui.jobs.watcher import JobDetail
from sae_tui.widgets.plot import Plot


@dataclass(frozen=True, slots=True)
class Curve:
    """A metric by its name in the store and the title it has on the screen."""

    name: str
    title: str
    from_zero: bool = False


CURVES = (
    Curve("loss", "loss"),
    Curve("fvu", "FVU", from_zero=True),
    Curve("l0", "L0", from_zero=True),
    Curve("dead_fraction", "dead fraction", from_zero=True),
)


class CurvePlot(Plot):
    """One curve."""

    def __init__(self, curve: Curve) -> None:
        super().__init__(curve.title, from_zero=curve.from_zero, id=f"curve-{curve.name}")
        self.curve = curve

    def show_detail(self, detail: JobDetail) -> None:
        points = detail.series.get((self.curve.name, 0), ())
        self.show_points([(point.step, point.value) for point in points])
