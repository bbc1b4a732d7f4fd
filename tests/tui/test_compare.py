from __future__ import annotations

import csv
import re
from contextlib import closing
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.tui import record_job, record_metrics, wait_until

from sae_tui.panels.differences import DifferencesPanel, ResultsPanel
from sae_tui.panels.overlay import Overlay
from sae_tui.panels.pareto import ParetoPanel, front
from sae_tui.screens.compare import CompareScreen
from sae_tui.widgets.footer import Footer
from trainer.contract.settings.job_file import dump_job, parse_job
from trainer.contract.store.job_store import Control
from trainer.contract.store.metrics_store import Heartbeat, MetricRow, SeriesWriter
from trainer.contract.store.states import JobState

few = st.integers(0, 6).map(float)  # only a few values, so that points often share coordinates


COMMAND = 'kind = "command"\n[command]\nargv = ["{}"]\n'


def job_file(**sae: object) -> str:
    return dump_job(parse_job({"name": "x", "data": {"path": "data/sample"}, "sae": sae})[0])


@pytest.fixture
def jobs(data) -> tuple[int, int]:
    """Record two runs with k = 16 and k = 64; the second run has taken more steps."""
    first = record_job(data, "narrow", JobState.FINISHED, config=job_file(k=16))
    second = record_job(data, "wide", JobState.RUNNING, config=job_file(k=64))
    record_metrics(data, first, steps=200)
    record_metrics(data, second, steps=400)
    return first, second


def text(app, panel) -> str:
    return app.screen.query_one(panel).plain


async def opened(app, pilot, ids) -> CompareScreen:
    await wait_until(pilot, lambda: len(app.session.jobs) >= len(ids))
    screen = CompareScreen(app.session, ids)
    app.session.go.show(screen)
    await wait_until(pilot, lambda: screen.comparison.saes)
    await pilot.pause()
    return screen


async def drawn_pareto(make_app, ids) -> str:
    """Return the text of the Pareto panel for these jobs."""
    app = make_app(2)
    async with app.run_test(size=(80, 24)) as pilot:
        await opened(app, pilot, ids)
        await pilot.press("4")
        await pilot.pause()
        return text(app, ParetoPanel)


async def test_marked_jobs_are_compared_and_a_single_marked_job_needs_a_second_mark(make_app, jobs) -> None:
    app = make_app(2)
    async with app.run_test(size=(80, 24)) as pilot:
        await wait_until(pilot, lambda: len(app.session.jobs) == 2)
        await pilot.pause()
        await pilot.press("c")
        assert app.screen.id == "dashboard"
        assert any("Mark two or more" in note.message for note in app._notifications)
        await pilot.press("space", "space", "c")
        assert isinstance(app.screen, CompareScreen)
        assert app.screen.job_ids == jobs
        await wait_until(pilot, lambda: "narrow" in text(app, Overlay))
        await pilot.press("escape")
        assert app.screen.id == "dashboard"


async def test_a_sweep_can_be_compared_alone_and_at_most_eight_jobs_at_once(make_app, data) -> None:
    record_job(data, "sweep", JobState.FINISHED, config=job_file(k=[8, 16]))
    app = make_app(2)
    async with app.run_test(size=(80, 24)) as pilot:
        await wait_until(pilot, lambda: len(app.session.jobs) == 1)
        await pilot.pause()
        await pilot.press("c")
        assert isinstance(app.screen, CompareScreen)
        await pilot.press("escape")
        for number in range(8):
            record_job(data, f"run {number}", JobState.FINISHED)
        app.session.watcher.poke()
        await wait_until(pilot, lambda: len(app.session.jobs) == 9)
        await pilot.pause()
        await pilot.press("home", *["space"] * 9, "c")
        assert app.screen.id == "dashboard"
        assert any(
            "9 jobs are marked, but at most 8 can be compared; unmark some." in note.message
            for note in app._notifications
        )


async def test_a_small_terminal_shows_one_view_and_a_large_one_all_of_them(make_app, jobs) -> None:
    app = make_app(2)
    async with app.run_test(size=(80, 24)) as pilot:
        screen = await opened(app, pilot, jobs)
        views = (Overlay, DifferencesPanel, ResultsPanel, ParetoPanel)
        for key, chosen in zip("1234", views, strict=True):
            await pilot.press(key)
            assert [view for view in views if screen.query_one(view).display] == [chosen]
        await pilot.resize_terminal(120, 40)
        await pilot.pause()
        assert all(screen.query_one(view).display and screen.query_one(view).region.area for view in views)
        await pilot.press("4")
        await pilot.pause()
        assert [view for view in views if screen.query_one(view).display] == [ParetoPanel]
        await pilot.press("4")
        await pilot.pause()
        assert all(screen.query_one(view).display for view in views)


async def test_each_curve_has_a_glyph_and_its_newest_value(make_app, jobs) -> None:
    app = make_app(2)
    async with app.run_test(size=(80, 24)) as pilot:
        await opened(app, pilot, jobs)
        drawn = text(app, Overlay)
        assert "● 1 narrow 0.1754" in drawn
        assert "▲ 2 wide 0.17" in drawn
        plot = "".join(drawn.splitlines()[1:-2])
        assert plot.count("●") >= 1
        assert plot.count("▲") >= 2
        assert drawn.splitlines()[-2].split() == ["0", "100", "200", "300", "step"]
        # The FVU axis starts at 0, as on the job screen.
        labels = [line.split("┤")[0].strip() for line in drawn.splitlines()[1:-2] if "┤" in line]
        assert labels == ["0.4", "0.3", "0.2", "0.1", "0"]


async def test_the_curves_of_a_job_without_values_have_a_title(make_app, data) -> None:
    job_id = record_job(data, "new", JobState.RUNNING, config=job_file(k=16))
    app = make_app(2)
    async with app.run_test(size=(80, 24)) as pilot:
        await opened(app, pilot, [job_id])
        assert text(app, Overlay).startswith("Curves over step")


async def test_keys_change_metric_axis_smoothing_and_scale(make_app, jobs) -> None:
    app = make_app(2)
    async with app.run_test(size=(80, 24)) as pilot:
        screen = await opened(app, pilot, jobs)
        assert text(app, Overlay).startswith("held-out FVU over step")
        await pilot.press("m")
        await wait_until(pilot, lambda: screen.comparison.metric == "fvu")
        await pilot.press(*"mmmm")
        await wait_until(pilot, lambda: screen.comparison.metric == "loss")
        await pilot.press("a", "w", "w", "S")
        heading, *_ = text(app, Overlay).splitlines()
        assert heading.strip() == "loss over tokens · smoothed 0.9 · log"
        assert text(app, Overlay).splitlines()[-2].split()[0::6] == ["0", "tokens"]
        await pilot.press("a", "w", "w", "S")
        assert text(app, Overlay).splitlines()[0].strip() == "loss over time"


async def test_curves_are_extended_while_a_run_continues(make_app, data, jobs) -> None:
    app = make_app(2)
    async with app.run_test(size=(80, 24)) as pilot:
        await opened(app, pilot, jobs)
        writer = SeriesWriter(data.run(jobs[1]).metrics_db)
        writer.write([MetricRow("heldout_fvu", 500, 0.0125)], Heartbeat("training", 500, 600, 500, 0.0))
        writer.close()
        await wait_until(pilot, lambda: "▲ 2 wide 0.0125" in text(app, Overlay))


async def test_different_settings_and_results_are_shown_as_tables(make_app, data, jobs) -> None:
    app = make_app(2)
    async with app.run_test(size=(80, 24)) as pilot:
        await opened(app, pilot, jobs)
        await pilot.press("2")
        await pilot.pause()
        rows = {line.split()[0]: line.split()[1:] for line in text(app, DifferencesPanel).splitlines()}
        assert rows["SETTING"] == ["●", "1", "▲", "2"]
        assert rows["sae.k"] == ["16", "64"]
        assert "train.lr" not in rows
        await pilot.press("3")
        await pilot.pause()
        results = text(app, ResultsPanel).splitlines()
        assert ["held-out", "FVU", "0.1754", "0.17", "unfinished"] in [line.split() for line in results]
        assert all(line.startswith(" ") and not line.startswith("  ") for line in results)
        with closing(Control(data.control_db)) as control:
            assert control.transition(jobs[1], JobState.FINISHED)
        app.session.watcher.poke()
        leading = ["held-out", "FVU", "0.1754", "0.17", "★"]
        await wait_until(pilot, lambda: leading in [line.split() for line in text(app, ResultsPanel).splitlines()])


async def test_tables_with_too_many_saes_to_fit_can_be_scrolled_sideways(make_app, data) -> None:
    job = record_job(data, "sweep", JobState.FINISHED, config=job_file(k=[8, 16, 32, 64, 128, 256, 300, 400]))
    app = make_app(2)
    async with app.run_test(size=(60, 24)) as pilot:
        screen = await opened(app, pilot, [job])
        await pilot.press("2")
        panel = screen.query_one(DifferencesPanel)
        heading = panel.plain.splitlines()[0]
        assert heading.startswith(" SETTING ")
        assert re.search(r" \d more →", heading)
        assert "k=8 " in heading
        assert "k=400" not in heading
        await pilot.press(*["right"] * 9)
        heading = panel.plain.splitlines()[0]
        assert "k=8 " not in heading
        assert "k=400" in heading
        assert re.search(r"← \d more", heading)
        await pilot.press(*["left"] * 9)
        assert "k=8 " in panel.plain.splitlines()[0]


async def test_a_long_name_is_truncated_in_the_legend_but_not_its_value(make_app, data) -> None:
    names = ("a rather long name that goes on and on and on and on and on and on and on and on", "short")
    ids = [record_job(data, name, JobState.FINISHED) for name in names]
    for job_id in ids:
        record_metrics(data, job_id)
    app = make_app(2)
    async with app.run_test(size=(80, 24)) as pilot:
        await opened(app, pilot, ids)
        long, short = text(app, Overlay).splitlines()[-2:]
        assert re.match(r" ● 1 a rather long name .*… 0\.1754 *$", long)
        assert "▲ 2 short 0.1754" in short


async def test_runs_with_equal_values_are_drawn_side_by_side_in_the_plot(make_app, data) -> None:
    ids = [
        record_job(data, name, JobState.FINISHED, heldout_fvu=0.1, heldout_l0=32.0) for name in ("one", "two", "three")
    ]
    ids.append(record_job(data, "beaten", JobState.FINISHED, heldout_fvu=0.2, heldout_l0=64.0))
    heading, *plot = (await drawn_pareto(make_app, ids)).splitlines()[:-2]
    assert "★ Pareto front" in heading
    (row,) = (line for line in plot if "●" in line)
    assert {"●", "▲", "■"} <= set(row)
    assert any("◆" in line for line in plot)


async def test_the_pareto_front_is_marked(make_app, data) -> None:
    values = {"good": (0.1, 32.0), "sparse": (0.3, 8.0), "beaten": (0.4, 32.0)}
    ids = [
        record_job(data, name, JobState.FINISHED, heldout_fvu=fvu, heldout_l0=l0) for name, (fvu, l0) in values.items()
    ]
    drawn = await drawn_pareto(make_app, ids)
    assert "● 1 good · L0 32 · FVU 0.1 ★" in drawn
    assert "▲ 2 sparse · L0 8 · FVU 0.3 ★" in drawn
    assert "■ 3 beaten · L0 32 · FVU 0.4" in drawn
    assert "0.4 ★" not in drawn


async def test_training_batch_values_form_no_pareto_front(make_app, data) -> None:
    ids = [record_job(data, name, JobState.FINISHED, fvu=0.1, l0=k) for name, k in (("one", 8.0), ("two", 9.0))]
    drawn = await drawn_pareto(make_app, ids)
    assert "batch FVU against batch L0 no Pareto front before an evaluation" in drawn
    assert "★" not in drawn


async def test_runs_without_values_can_be_compared(make_app, data) -> None:
    ids = [record_job(data, name, JobState.QUEUED) for name in ("one", "two")]
    app = make_app(2)
    async with app.run_test(size=(120, 40)) as pilot:
        await opened(app, pilot, ids)
        assert "no values yet" in text(app, Overlay)
        assert "no values" in text(app, ParetoPanel)
        await pilot.press("m", "a", "w", "S", "1", "2", "3", "4")
        assert app.screen.name == "compare"


@pytest.mark.parametrize("size", [(20, 6), (80, 24), (200, 60)])
async def test_every_window_size_is_filled_without_overlap(make_app, jobs, size) -> None:
    app = make_app(2)
    async with app.run_test(size=size) as pilot:
        screen = await opened(app, pilot, jobs)
        for key in "1234":
            await pilot.press(key)
            await pilot.pause()
            for panel in screen.query("#views > *"):
                for y in range(panel.size.height if panel.display else 0):
                    assert panel.render_line(y).cell_length == panel.size.width


async def test_curves_are_exported_as_picture_and_csv_without_overwriting_files(make_app, jobs, tmp_path) -> None:
    app = make_app(2)
    base = tmp_path / "out"
    async with app.run_test(size=(80, 24)) as pilot:
        await opened(app, pilot, jobs)
        await pilot.press("x")
        assert app.screen.query_one("Input").value == "compare-1-2-heldout_fvu"
        app.screen.query_one("Input").value = str(base)
        await pilot.press("enter")
        await wait_until(pilot, lambda: any(note.message.startswith("Wrote ") for note in app._notifications))
        assert ElementTree.parse(f"{base}.svg").getroot().tag.endswith("svg")
        with open(f"{base}.csv") as stream:
            rows = list(csv.DictReader(stream))
        assert {row["name"] for row in rows} == {"narrow", "wide"}
        await pilot.press("x")
        app.screen.query_one("Input").value = str(base)
        await pilot.press("enter")
        await wait_until(pilot, lambda: any("already exists" in note.message for note in app._notifications))


@given(st.lists(st.tuples(few, few), max_size=25))
def test_the_pareto_front_matches_a_comparison_of_every_pair(points) -> None:
    beaten = {
        place for place, (x, y) in enumerate(points) if any(a <= x and b <= y and (a, b) != (x, y) for a, b in points)
    }
    assert front(points) == set(range(len(points))) - beaten


def test_the_pareto_front_of_no_points_is_empty() -> None:
    assert front([]) == set()


async def test_programs_are_compared_by_the_metrics_they_report_losses_first(make_app, data) -> None:
    ids = [record_job(data, name, JobState.FINISHED, config=COMMAND.format(name)) for name in ("one", "two")]
    for at, job_id in enumerate(ids):
        data.run(job_id).create()
        with closing(SeriesWriter(data.run(job_id).metrics_db)) as writer:
            rows = [
                MetricRow(name, step, step / (8 + at)) for name in ("acc", "val/loss", "cpu_percent") for step in (1, 2)
            ]
            writer.write([*rows, MetricRow("memory_bytes", 2, 3e9)], Heartbeat("", 2, 2, 2, 1.7e9))
    app = make_app(2)
    async with app.run_test(size=(120, 40)) as pilot:
        screen = await opened(app, pilot, ids)
        assert screen.comparison.metrics[:2] == ("val/loss", "acc")
        shown = text(app, ResultsPanel)
        assert "val/loss" in shown
        assert "0.25" in shown
        assert not any(word in shown for word in ("FVU", "L0", "tokens"))


async def test_different_l0_values_are_named_below_the_results(make_app, data) -> None:
    ids = []
    for k in (16, 64):
        ids.append(record_job(data, f"k{k}", JobState.FINISHED, config=job_file(k=k)))
        data.run(ids[-1]).create()
        values = {"heldout_fvu": 4 / k, "heldout_l0": float(k), "fvu": 4 / k, "l0": float(k)}
        with closing(SeriesWriter(data.run(ids[-1]).metrics_db)) as writer:
            writer.write(
                [MetricRow(name, 100, value) for name, value in values.items()],
                Heartbeat("finished", 100, 100, 9, 0.0),
            )
    app = make_app(2)
    async with app.run_test(size=(120, 40)) as pilot:
        await opened(app, pilot, ids)
        await pilot.press("2")
        results = app.screen.query_one(ResultsPanel)
        words = " ".join(results.plain.split())
        assert "the L0 values differ, and a higher L0 alone lowers the held-out FVU" in words
        keys = [row.key for row in results.rows]
        results.focus()
        await pilot.press("end")
        assert results.cursor == next(key for key in reversed(keys) if not key.startswith("note"))


def footer(app) -> str:
    return app.screen.query_one(Footer).plain


CURVE_KEYS = ("m Metric", "a Axis", "w Smooth", "S Scale")


@pytest.mark.parametrize("size", [(80, 24), (160, 50)])
async def test_the_footer_shows_the_keys_for_curves_only_while_curves_are_shown(make_app, jobs, size) -> None:
    app = make_app(2)
    async with app.run_test(size=size) as pilot:
        screen = await opened(app, pilot, jobs)
        await wait_until(pilot, lambda: all(key in footer(app) for key in CURVE_KEYS))
        for key in "234":
            # On a large terminal, the second press shows this view alone.
            await pilot.press(*key * (1 if size == (80, 24) else 2))
            await wait_until(pilot, lambda: not any(key in footer(app) for key in CURVE_KEYS))
            assert "x Export" in footer(app)
            before = screen.view
            await pilot.press("a", "w", "S")
            assert screen.view is before
        await pilot.press("1")
        await wait_until(pilot, lambda: all(key in footer(app) for key in CURVE_KEYS))


async def test_the_footer_shows_the_keys_for_other_runs_if_some_do_not_fit(make_app, data) -> None:
    ids = [record_job(data, f"run-{k}", JobState.FINISHED, config=job_file(k=k)) for k in range(2, 10)]
    app = make_app(2)
    async with app.run_test(size=(60, 24)) as pilot:
        await opened(app, pilot, ids)
        assert "Other runs" not in footer(app)
        await pilot.press("3")
        await pilot.pause()
        await wait_until(pilot, lambda: "← → Other runs" in footer(app))
        await pilot.resize_terminal(90, 24)
        await wait_until(pilot, lambda: "Other runs" not in footer(app))
