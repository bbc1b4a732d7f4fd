from __future__ import annotations

import csv
import io
from xml.etree import ElementTree

import msgspec
import pytest
from compare.conftest import write
from hypothesis import given
from hypothesis import strategies as st

from sae_tui.compare.export import COLUMNS, csv_lines, picture_title, write_new, write_picture, write_table
from sae_tui.compare.lines import AXES, CurveView
from sae_tui.compare.run import ComparedSae, Sample
from trainer.contract.errors import UserError
from trainer.contract.store.metrics_store import MetricRow
from trainer.contract.store.rows import Job

SVG = "{http://www.w3.org/2000/svg}"
anything = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=12)


def sae(name: str = "x", label: str = "1") -> ComparedSae:
    job = Job(id=1, name=name, config="", user="ada", host="here", device="cpu", gpu_source="none")
    return ComparedSae(label, job, "", {}, {})


@given(
    st.lists(
        st.tuples(anything, anything, anything, st.integers(0, 10**9), st.floats(allow_nan=False) | st.none()),
        max_size=5,
    )
)
def test_written_csv_is_read_back_unchanged(rows) -> None:
    values = [
        (sae(name, label), metric, Sample(step, 2.0 * step, 0.5, value)) for name, label, metric, step, value in rows
    ]
    text = "".join(csv_lines(values))
    read = list(csv.DictReader(io.StringIO(text, newline="")))
    assert text.startswith(",".join(COLUMNS) + "\n")
    points = [
        (row["name"], row["run"], row["metric"], int(row["step"]), float(row["value"]) if row["value"] else None)
        for row in read
    ]
    assert points == rows
    assert all(int(row["tokens"]) == 2 * int(row["step"]) and row["time_s"] == "0.5" for row in read)


def test_the_table_has_every_value_for_every_sae(runs, tmp_path) -> None:
    path = tmp_path / "all.csv"
    write_table(path, runs)
    rows = list(csv.DictReader(path.open()))
    assert [row["value"] for row in rows if row["metric"] == "fvu"] == ["0.4", "0.2", "0.5", "0.1"]
    assert {(row["run"], row["name"]) for row in rows} == {("1", "plain"), ("2 k=8", "sweep"), ("2 k=32", "sweep")}
    assert [row["run"] for row in rows if row["metric"] == "tokens_per_s"] == ["2 k=8"]


def test_a_long_series_is_exported_completely_with_non_finite_values_left_empty(data, pair, runs, tmp_path) -> None:
    write(
        data, pair[0], [MetricRow("fvu", step, float("nan") if step == 5 else 1.0) for step in range(3000)], steps=3000
    )
    write_table(tmp_path / "fvu.csv", runs, "fvu")
    rows = [row for row in csv.DictReader((tmp_path / "fvu.csv").open()) if row["run"] == "1"]
    assert [int(row["step"]) for row in rows] == list(range(3000))
    assert [row["step"] for row in rows if not row["value"]] == ["5"]


@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("log", [False, True])
def test_the_svg_has_a_line_and_a_legend_entry_for_every_curve(runs, tmp_path, axis, log) -> None:
    path = tmp_path / "fvu.svg"
    write_picture(path, runs.read("fvu"), CurveView("fvu", axis, log=log))
    root = ElementTree.parse(path).getroot()
    texts = [element.text for element in root.iter(f"{SVG}text")]
    assert len(list(root.iter(f"{SVG}polyline"))) == 3
    assert {"batch FVU", AXES[axis], "batch FVU: 1 plain, 2 sweep", "1  0.2", "2 k=8  0.5", "2 k=32  0.1"} <= set(texts)
    points = [pair.split(",") for line in root.iter(f"{SVG}polyline") for pair in line.get("points").split()]
    assert all(0 <= float(x) <= 620 and 0 <= float(y) <= 480 for x, y in points)


@given(anything, anything)
def test_the_svg_is_well_formed_for_any_run_name(name, metric) -> None:
    from sae_tui.compare.lines import Trace
    from sae_tui.compare.svg import svg

    traces = [Trace(name, 0, ((0.0, 1.0), (1.0, 2.0))), Trace("empty", 1, ())]
    ElementTree.fromstring(svg(traces, CurveView(metric), name))


@pytest.mark.parametrize("values", [(), ((0.0, 0.0),), ((5.0, 3.0), (6.0, 3.0))])
@pytest.mark.parametrize("log", [False, True])
def test_empty_and_flat_curves_are_drawn_too(values, log) -> None:
    from sae_tui.compare.lines import Trace
    from sae_tui.compare.svg import svg

    shown = tuple(point for point in values if point[1] > 0 or not log)
    ElementTree.fromstring(svg([Trace("1", 0, shown)], CurveView(log=log), ""))


def test_the_title_names_each_run_once(runs) -> None:
    assert picture_title(runs.read("fvu")) == "batch FVU: 1 plain, 2 sweep"
    assert picture_title(msgspec.structs.replace(runs.read("fvu"), saes=())) == "batch FVU: "


def test_a_file_is_private_and_overwritten_only_with_force(tmp_path) -> None:
    path = tmp_path / "out.csv"
    write_new(path, ["one"], force=False)
    assert path.stat().st_mode & 0o777 == 0o600
    with pytest.raises(UserError, match="already exists"):
        write_new(path, ["two"], force=False)
    assert path.read_text() == "one"
    write_new(path, ["two"], force=True)
    assert path.read_text() == "two"


def test_a_failed_write_leaves_no_file(tmp_path) -> None:
    def parts():
        yield "half"
        raise UserError("the store is gone")

    with pytest.raises(UserError, match="gone"):
        write_new(tmp_path / "out.csv", parts(), force=False)
    with pytest.raises(UserError, match="cannot be written: No such file"):
        write_new(tmp_path / "nowhere" / "out.csv", ["x"], force=False)
    assert list(tmp_path.iterdir()) == []
