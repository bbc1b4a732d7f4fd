"""Writes a comparison to disk: the curves as an SVG image, or their values as CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator
from pathlib import Path

from sae_tui.compare.lines import CurveView, traces
from sae_tui.compare.run import ComparedSae, Sample
from sae_tui.compare.runs import Comparison, Runs
from sae_tui.compare.svg import svg
from trainer.contract.errors import UserError
from trainer.contract.files import replacing
from trainer.contract.settings.series import title_of

COLUMNS = ("run", "name", "metric", "step", "tokens", "time_s", "value")


def picture_title(comparison: Comparison) -> str:
    """Return the image's title: the metric and the runs' names."""
    names = dict.fromkeys(f"{sae.job.id} {sae.job.name}" for sae in comparison.saes)
    return f"{title_of(comparison.metric)}: {', '.join(names)}"


def write_picture(path: Path, comparison: Comparison, view: CurveView, *, force: bool = False) -> None:
    """Write the curves as SVG; raise `UserError` if the file already exists or cannot be written."""
    write_new(path, [svg(traces(comparison.curves, view), view, picture_title(comparison))], force=force)


def write_table(path: Path, runs: Runs, metric: str = "", *, force: bool = False) -> None:
    """Write every value of one metric, or of all metrics, as tidy CSV; raise `UserError` as `write_picture` does."""
    write_new(path, csv_lines(runs.all_values(metric)), force=force)


def csv_lines(values: Iterable[tuple[ComparedSae, str, Sample]]) -> Iterator[str]:
    """Yield a header line and one line per value; a non-finite value becomes an empty cell."""
    yield _csv_line(COLUMNS)
    for sae, metric, sample in values:
        yield _csv_line(
            (sae.label, sae.job.name, metric, sample.step, round(sample.tokens), round(sample.time_s, 3), sample.value)
        )


def refuse_existing(paths: Iterable[Path]) -> None:
    """Raise `UserError` if any of these files exists."""
    for path in paths:
        if path.exists():
            raise UserError(f"{path} already exists; choose another name, or use --force on the command line")


def write_new(path: Path, parts: Iterable[str], *, force: bool) -> None:
    """Write a file atomically with mode 0600; if it already exists and `force` is not set, raise `UserError`."""
    if not force:
        refuse_existing([path])
    try:
        with replacing(path, 0o600) as stream:
            stream.writelines(part.encode() for part in parts)
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror or error}; choose another path") from None


def _csv_line(cells: Iterable[object]) -> str:
    line = io.StringIO()
    # The csv module quotes a carriage return in a name only if the line terminator contains one too.
    csv.writer(line, lineterminator="\r\n").writerow(cells)
    return line.getvalue().removesuffix("\r\n") + "\n"
