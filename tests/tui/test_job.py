from __future__ import annotations

import json
import re
import time
from contextlib import closing

import msgspec
import pytest
from support import toy_backend
from support.extractions import extraction_job
from support.tui import record_job, record_metrics, title_of, wait_until
from textual.screen import Screen

from sae_tui.format import number
from sae_tui.jobs.ending import JobEnding, RankEnding, write_ending
from sae_tui.jobs.view.reader import JobView
from sae_tui.panels.cause import CausePanel
from sae_tui.panels.curves import CurvePlot, CurvesPanel
from sae_tui.panels.events import EventsPanel
from sae_tui.panels.headline import Headline, memory_words
from sae_tui.panels.job_columns import judged_span
from sae_tui.panels.log import LogPanel
from sae_tui.panels.metric_grid import MetricPlot
from sae_tui.panels.ranks import RanksPanel
from sae_tui.panels.settings import SettingsPanel
from sae_tui.screens.launch import LaunchScreen
from sae_tui.screens.metrics import MetricsScreen
from sae_tui.widgets.footer import Footer
from sae_tui.widgets.log_view import LogView
from sae_tui.widgets.reading import LinesScreen, Page
from trainer.contract.planning.plan import Plan
from trainer.contract.settings.catalog import LAUNCH_BACKENDS
from trainer.contract.settings.job_file import dump_job, parse_job
from trainer.contract.store.job_store import Control
from trainer.contract.store.metrics_store import Heartbeat, MetricRow, SeriesWriter
from trainer.contract.store.states import JobState


def job_file(seed: object = 3, **sae: object) -> str:
    train = {"n_steps": 400, "seed": seed}
    return dump_job(parse_job({"name": "x", "data": {"path": "data/sample"}, "sae": sae, "train": train})[0])


async def opened(pilot, app, job_id: int):
    await wait_until(pilot, lambda: app.session.jobs)
    app.session.go.open_job(job_id)
    await wait_until(pilot, lambda: app.session.detail is not None)
    await pilot.pause()
    return app.screen


def shown_plots(screen: Screen[object]) -> list[CurvePlot]:
    return [plot for plot in screen.query(CurvePlot) if plot.display]


async def test_a_running_job_shows_curves_ranks_events_and_its_log(make_app, data) -> None:
    job_id = record_job(data, "minilm", JobState.RUNNING, world_size=2, total_steps=400)
    record_metrics(data, job_id)
    app = make_app(4)
    async with app.run_test(size=(120, 40)) as pilot:
        screen = await opened(pilot, app, job_id)
        assert "50%" in screen.query_one(Headline).plain
        assert re.search(r"FVU .* \d+ (s|min) left", screen.query_one(Headline).plain)
        for plot in shown_plots(screen):
            assert any(0x2800 < ord(char) < 0x2900 for char in plot.plain), plot.id
        late, other = screen.query_one(RanksPanel).plain.splitlines()[2:4]
        assert late.startswith("▲  0")
        assert other.startswith("   1")
        assert "2 ranks, ddp, gloo" in screen.query_one(EventsPanel).plain
        assert "step 200" in screen.query_one(LogPanel).plain


async def test_the_times_of_each_rank_add_up_to_the_step_in_the_title(make_app, data) -> None:
    job_id = record_job(data, "minilm", JobState.RUNNING, world_size=2, total_steps=400)
    record_metrics(data, job_id)
    app = make_app(4)
    async with app.run_test(size=(200, 60)) as pilot:
        title, columns, *ranks = (await opened(pilot, app, job_id)).query_one(RanksPanel).plain.splitlines()
        assert columns.split() == ["rank", "busy", "wait", "data", "share", "memory", "speed"]
        times = [sum(map(float, re.findall(r"\d+\.\d(?= )", line)[:3])) for line in ranks[:2]]
        assert times == pytest.approx([1.3 * 131, 131], abs=0.15)  # the steps of both ranks
        assert title.strip() == "Ranks · 150.7 ms/step"


@pytest.mark.parametrize(("width", "is_shown"), [(120, True), (80, True), (60, False)])
async def test_a_running_job_shows_the_fvu_expected_at_its_end_if_there_is_space(make_app, data, width, is_shown):
    fields = {"config": job_file(), "total_steps": 400, "d_in": 384, "d_out": None}
    for gain in (0.79, 0.8, 0.81):
        past = record_job(data, "past", JobState.FINISHED, step=400, **fields)
        data.run(past).create()
        rows = [MetricRow("heldout_fvu", step, fvu) for step, fvu in ((100, 0.3), (200, 0.2), (400, 0.2 * gain))]
        with closing(SeriesWriter(data.run(past).metrics_db)) as writer:
            writer.write(rows, Heartbeat("finished", 400, 400, 0, 0.0))
    job_id = record_job(data, "minilm", JobState.RUNNING, **fields)
    record_metrics(data, job_id)
    app = make_app(4)
    async with app.run_test(size=(width, 24)) as pilot:
        headline = (await opened(pilot, app, job_id)).query_one(Headline)
        await wait_until(pilot, lambda: "50%" in headline.plain)
        words = "held-out FVU 0.140 (0.137–0.144) expected at the end, from 3 past runs"
        assert (words in headline.plain) == is_shown


async def test_details_that_arrive_before_the_plots_exist_are_drawn_later(make_app, data) -> None:
    job_id = record_job(data, "minilm", JobState.FINISHED, total_steps=400)
    record_metrics(data, job_id)
    app = make_app(1)
    async with app.run_test(size=(120, 40)) as pilot:
        screen = await opened(pilot, app, job_id)
        await wait_until(pilot, lambda: app.session.detail and app.session.detail.series)
        panel = CurvesPanel()
        panel.show_detail(app.session.detail)
        await screen.query_one("#middle").mount(panel)
        await wait_until(pilot, lambda: "batch" in title_of(panel.query(CurvePlot).first()))


async def test_a_job_shows_its_energy_and_its_price(make_app, data) -> None:
    measured = {"energy_wh": 1234.0, "energy_s": 100.0, "energy_known_s": 83.0, "energy_counted_s": 83.0}
    job_id = record_job(data, "minilm", JobState.FINISHED, total_steps=400, **measured)
    app = make_app(4, price_per_kwh=0.3, currency="CHF")
    async with app.run_test(size=(140, 40)) as pilot:
        screen = await opened(pilot, app, job_id)
        assert "  at least 1.234 kWh" in screen.query_one(Headline).plain
        settings = " ".join(screen.query_one(SettingsPanel).plain.split())
        assert "energy at least 1.234 kWh, 0.37 CHF (measured for 83 % of its time)" in settings


async def test_an_extraction_shows_its_speed_and_no_training_values(make_app, data, tmp_path) -> None:
    config = dump_job(extraction_job(tmp_path / "model", tmp_path / "text", tmp_path / "rows"))
    job_id = record_job(data, "rows", JobState.RUNNING, total_steps=400, config=config)
    record_metrics(data, job_id, ranks=1)
    app = make_app(4)
    async with app.run_test(size=(120, 40)) as pilot:
        screen = await opened(pilot, app, job_id)
        (plot,) = shown_plots(screen)
        assert "rows/s" in plot.plain
        assert any(0x2800 < ord(char) < 0x2900 for char in plot.plain)
        headline = screen.query_one(Headline).plain
        assert "FVU" not in headline
        assert re.search(r" row \d+/400 .* rows/s", headline)
        assert "step" not in headline
        assert "tok/s" not in headline
        assert not screen.query_one(RanksPanel).display
        settings = screen.query_one(SettingsPanel).plain
        shown = [line.split()[0] for line in settings.splitlines()[1:] if line[1:2].strip()]
        assert shown[:4] == ["model.path", "hooks", "text.path", "context"]
        assert re.search(r"\d+ more at their defaults", settings)
        assert "remote_code" not in settings
        assert "blocks.1.hook_resid_post" in settings
        assert "blocks.0.hook_mlp_out" in settings
        await pilot.press("y")
        await wait_until(pilot, lambda: isinstance(app.screen, LaunchScreen) and app.screen.query("#row-model-hooks"))


async def test_new_trainer_output_is_on_the_screen_within_seconds(make_app, data) -> None:
    job_id = record_job(data, "minilm", JobState.RUNNING, world_size=2, total_steps=400)
    record_metrics(data, job_id)
    app = make_app(4)
    async with app.run_test(size=(120, 40)) as pilot:
        screen = await opened(pilot, app, job_id)
        writer = SeriesWriter(data.run(job_id).metrics_db)
        writer.write([MetricRow("heldout_fvu", 300, 0.1234)], Heartbeat("training", 300, 400, 9, 0.0))
        with data.run(job_id).log(0).open("a") as log:
            log.write("a new line\n")
        writer.close()
        await wait_until(pilot, lambda: "75%" in screen.query_one(Headline).plain, seconds=5)
        assert "held-out FVU 0.1234 " in screen.query_one("#curve-fvu").plain
        await wait_until(pilot, lambda: "a new line" in screen.query_one(LogPanel).plain, seconds=5)


async def test_a_registered_launch_backend_is_among_a_jobs_settings(make_app, data, monkeypatch) -> None:
    monkeypatch.setitem(LAUNCH_BACKENDS, "nice", toy_backend.ENTRY)
    launch = {"backend": "nice", "niceness": 7}
    job, _ = parse_job({"name": "x", "data": {"path": "data/sample"}, "launch": launch})
    app = make_app(2)
    async with app.run_test(size=(120, 40)) as pilot:
        screen = await opened(pilot, app, record_job(data, "x", JobState.RUNNING, config=dump_job(job)))
        await wait_until(pilot, lambda: screen.query_one(SettingsPanel).plain)
        lines = [line.split() for line in screen.query_one(SettingsPanel).plain.splitlines()]
        assert ["backend", "nice"] in lines
        assert ["niceness", "7"] in lines


async def test_lost_metric_rows_are_reported_next_to_the_phase(make_app, data) -> None:
    job_id = record_job(data, "minilm", JobState.RUNNING, world_size=2, total_steps=400)
    record_metrics(data, job_id)
    writer = SeriesWriter(data.run(job_id).metrics_db)
    writer.write([], Heartbeat("training", 210, 400, 9, 0.0, dropped=1234))
    writer.close()
    app = make_app(4)
    async with app.run_test(size=(80, 24)) as pilot:
        screen = await opened(pilot, app, job_id)
        last = screen.query_one(Headline).plain.splitlines()[2]
        assert re.fullmatch(r" training +1234 rows of metrics were lost", last.rstrip())


async def test_the_job_screen_fits_80_by_24(make_app, data) -> None:
    job_id = record_job(data, "minilm", JobState.RUNNING, world_size=2, total_steps=400)
    record_metrics(data, job_id)
    app = make_app(4)
    async with app.run_test(size=(80, 24)) as pilot:
        screen = await opened(pilot, app, job_id)
        for plot in shown_plots(screen):
            assert plot.size.height >= 3
        assert screen.query_one(LogPanel).size.height >= 3
        assert screen.query_one(EventsPanel).size.height >= 2
        regions = [widget.region for widget in screen.query("LineView") if widget.display]
        for number, one in enumerate(regions):
            assert not any(one.overlaps(other) for other in regions[number + 1 :])


async def test_a_failed_job_shows_its_cause_first(make_app, data) -> None:
    job_id = record_job(data, "minilm", JobState.FAILED, error="rank 1 was killed (SIGKILL)")
    app = make_app(4)
    async with app.run_test(size=(120, 40)) as pilot:
        screen = await opened(pilot, app, job_id)
        await wait_until(pilot, lambda: screen.query_one(CausePanel).display)
        assert "✗ rank 1 was killed (SIGKILL)" in screen.query_one(CausePanel).plain
        assert "SIGKILL" not in screen.query_one(Headline).plain


async def test_l_shows_the_logs_full_screen_and_a_bracket_the_next_rank_or_all_together(make_app, data) -> None:
    job_id = record_job(data, "minilm", JobState.RUNNING, world_size=2)
    record_metrics(data, job_id)
    data.run(job_id).log(1).write_text("hello from rank one\n")
    app = make_app(4)
    async with app.run_test(size=(80, 24)) as pilot:
        screen = await opened(pilot, app, job_id)
        await pilot.press("l")
        view = app.screen.query_one(LogView)
        assert view.size.height > 15
        await pilot.press("right_square_bracket")
        await wait_until(pilot, lambda: view.plain == "hello from rank one")
        with data.run(job_id).log(1).open("a") as log:
            log.write("and another\n")
        await wait_until(pilot, lambda: view.plain.endswith("and another"))
        await pilot.press("right_square_bracket", "right_square_bracket")
        await wait_until(pilot, lambda: "1: hello from rank one" in view.plain)
        await pilot.press("left_square_bracket")
        await wait_until(pilot, lambda: view.plain == "the supervisor has written nothing")
        await pilot.press("escape")
        assert app.screen is screen


async def test_brackets_show_the_log_of_the_next_and_the_previous_rank(make_app, data) -> None:
    job_id = record_job(data, "minilm", JobState.RUNNING, world_size=3)
    record_metrics(data, job_id)
    for rank in range(3):
        data.run(job_id).log(rank).write_text(f"hello from rank {rank}\n")
    app = make_app(4)
    async with app.run_test(size=(120, 40)) as pilot:
        screen = await opened(pilot, app, job_id)
        for key, rank in (("right_square_bracket", 1), ("left_square_bracket", 0), ("left_square_bracket", 2)):
            await pilot.press(key)
            words = f"hello from rank {rank}"
            await wait_until(pilot, lambda words=words: words in screen.query_one("#log").plain)


async def test_a_bar_at_the_end_of_a_log_is_updated_in_place(make_app, data) -> None:
    job_id = record_job(data, "minilm", JobState.RUNNING)
    data.run(job_id).create()
    data.run(job_id).log(0).write_text("start\n\r10% |#")
    app = make_app(4)
    async with app.run_test(size=(80, 24)) as pilot:
        await opened(pilot, app, job_id)
        await pilot.press("l")
        view = app.screen.query_one(LogView)
        await wait_until(pilot, lambda: view.plain == "start\n10% |#")
        await pilot.press("slash", *"10%", "enter")
        assert view.n_found == 1
        with data.run(job_id).log(0).open("a") as log:
            log.write("\r20% |##")
        await wait_until(pilot, lambda: view.plain == "start\n20% |##")
        assert view.n_found == 0
        with data.run(job_id).log(0).open("a") as log:
            log.write("\r30% |###\nend\n")
        await wait_until(pilot, lambda: view.plain == "start\n30% |###\nend")


COMMAND = 'kind = "command"\n[command]\nargv = ["true"]\n'


async def test_a_programs_own_metrics_are_shown_losses_first_and_machine_use_by_second(make_app, data) -> None:
    job_id = record_job(data, "probe", JobState.RUNNING, config=COMMAND)
    data.run(job_id).create()
    with closing(SeriesWriter(data.run(job_id).metrics_db)) as writer:
        rows = [MetricRow(name, step, step / 8) for name in ("acc", "val/loss", "loss") for step in range(5)]
        rows += [MetricRow("cpu_percent", second, 50.0) for second in range(0, 500, 5)]
        writer.write(rows, Heartbeat("running", 4, 10, 4, time.time()))
    app = make_app(4)
    async with app.run_test(size=(130, 40)) as pilot:
        screen = await opened(pilot, app, job_id)
        own = [plot for plot in screen.query(MetricPlot) if plot.display]
        assert [plot.plot_title for plot in own] == ["loss", "val/loss", "acc"]
        shown = screen.query_one(Headline).plain
        assert "loss 0.5  val/loss 0.5  acc 0.5" in shown
        assert not any(word in shown for word in ("FVU", "L0", "dead"))
        await pilot.press("a")
        await wait_until(pilot, lambda: isinstance(app.screen, MetricsScreen) and app.screen.query(MetricPlot))
        plots = [plot for plot in app.screen.query(MetricPlot) if plot.display]
        assert plots[-1].plot_title == "CPU, % of a core, by second"
        assert app.screen._all_steps() == (0, 4)


async def test_a_log_can_be_searched_and_filtered_and_escape_ends_the_search_first(make_app, data) -> None:
    job_id = record_job(data, "minilm", JobState.RUNNING)
    data.run(job_id).create()
    lines = [f"step {number}" + (" [WARNING]" if number % 100 == 7 else "") for number in range(1000)]
    data.run(job_id).log(0).write_text("\n".join(lines) + "\n")
    (data.run(job_id).logs / "supervisor.log").write_text("one [warning]\n")
    app = make_app(4)
    async with app.run_test(size=(80, 24)) as pilot:
        await opened(pilot, app, job_id)
        await pilot.press("l")
        view = app.screen.query_one(LogView)
        await wait_until(pilot, lambda: "step 999" in view.plain)
        assert view.follows
        await pilot.press("slash", *"[warn", "enter")
        assert "10 lines with '[warn'" in title_of(view)
        await pilot.press("right_square_bracket")
        await wait_until(pilot, lambda: "log of the supervisor · 1 line with '[warn'" in title_of(view))
        with (data.run(job_id).logs / "supervisor.log").open("a") as log:
            log.write("two [warning]\n")
        await wait_until(pilot, lambda: "log of the supervisor · 2 lines with '[warn'" in title_of(view))
        await pilot.press("right_square_bracket")
        await wait_until(pilot, lambda: "10 lines with '[warn'" in title_of(view))
        positions = [round(view.scroll_y)]
        for _ in range(2):
            await pilot.press("N")
            positions.append(round(view.scroll_y))
        assert positions == sorted(positions, reverse=True)
        assert not view.follows
        await pilot.press("ampersand")
        assert view.plain.splitlines() == [line for line in lines if "WARNING" in line]
        await pilot.press("escape")
        assert app.screen.name == "logs"
        await pilot.press("escape")
        assert app.screen.name == "job"


async def test_a_failed_job_shows_the_failed_rank_its_exception_and_a_remedy(make_app, data) -> None:
    error = "rank 1: RuntimeError: CUDA out of memory. Tried to allocate 2 GiB"
    job_id = record_job(data, "minilm", JobState.FAILED, error=error, world_size=2, attempt=1)
    paths = data.run(job_id)
    paths.create()
    paths.attempt(1).mkdir()
    paths.rank_exit(1, 1).write_text(json.dumps({"error": "x", "traceback": "frame 1\nRuntimeError: CUDA [red]"}))
    paths.log(1).write_text("step 8\nstep 9\n")
    ranks = (RankEnding(0, None, 15), RankEnding(1, 1, None, error))
    write_ending(paths.exit_file, JobEnding(JobState.FAILED, 1.0, error, None, ranks, first_failed=1))
    app = make_app(4)
    async with app.run_test(size=(120, 40)) as pilot:
        screen = await opened(pilot, app, job_id)
        await wait_until(pilot, lambda: screen.query_one(CausePanel).display)
        text = screen.query_one(CausePanel).plain
        for part in ("half the train.batch_size", "CUDA [red]", "rank 0 was ended (SIGTERM)"):
            assert part in text
        await wait_until(pilot, lambda: screen.query_one(LogPanel).plain.startswith("Log of rank 1"))
        assert "step 9" in screen.query_one(LogPanel).plain
        await pilot.press("l")
        assert app.screen.source == "1"


async def test_a_log_with_markup_and_control_characters_is_shown_as_text(make_app, data) -> None:
    job_id = record_job(data, "minilm", JobState.RUNNING)
    record_metrics(data, job_id)
    data.run(job_id).log(0).write_bytes(b"[bold]x[/] \x1b[2J \xff\n")
    app = make_app(4)
    async with app.run_test(size=(80, 24)) as pilot:
        screen = await opened(pilot, app, job_id)
        assert "[bold]x[/]" in screen.query_one(LogPanel).plain
        assert "\x1b" not in screen.query_one(LogPanel).plain


async def test_the_log_follows_its_end_through_a_resize_until_it_is_scrolled_up(make_app, data) -> None:
    job_id = record_job(data, "minilm", JobState.RUNNING, total_steps=400)
    record_metrics(data, job_id)
    log_file = data.run(job_id).log(0)

    def write(name: str) -> None:
        with log_file.open("a") as log:
            log.write("".join(f"{name} {number}\n" for number in range(100)))

    write("early")
    app = make_app(4)
    async with app.run_test(size=(120, 40)) as pilot:
        screen = await opened(pilot, app, job_id)
        panel = screen.query_one(LogPanel)
        await wait_until(pilot, lambda: panel.scroll_y == panel.max_scroll_y > 0)
        await pilot.resize_terminal(80, 24)
        write("later")
        await wait_until(pilot, lambda: "later 99" in panel.plain and panel.scroll_y == panel.max_scroll_y, seconds=5)
        await pilot.press("pageup")
        await wait_until(pilot, lambda: panel.scroll_y < panel.max_scroll_y)
        place = panel.scroll_y
        write("last")
        await wait_until(pilot, lambda: "last 99" in panel.plain, seconds=5)
        await pilot.pause()
        assert panel.scroll_y == place < panel.max_scroll_y
        await pilot.press("end")
        await wait_until(pilot, lambda: panel.scroll_y == panel.max_scroll_y)


async def test_m_shows_the_next_sae_in_a_sweep_and_is_hidden_for_a_single_sae(make_app, data) -> None:
    single = record_job(data, "one", JobState.RUNNING, total_steps=400)
    sweep = record_job(data, "three", JobState.RUNNING, total_steps=400, config=job_file(k=[8, 16, 32]))
    for job_id in (single, sweep):
        record_metrics(data, job_id)
    writer = SeriesWriter(data.run(sweep).metrics_db)
    values = {"k=8": 0.13, "k=16": 0.22, "k=32": 0.31}
    writer.write([MetricRow(f"fvu@{label}", step, fvu) for label, fvu in values.items() for step in (10, 20)])
    writer.write([MetricRow(f"heldout_fvu@{label}", 20, fvu + 0.05) for label, fvu in values.items()])
    writer.close()
    app = make_app(4)
    async with app.run_test(size=(120, 40)) as pilot:
        screen = await opened(pilot, app, sweep)
        for place, (label, fvu) in enumerate([*values.items(), ("k=8", 0.13)]):
            # While the sweep runs, no SAE is marked as the best.
            assert f"{label} ({place % 3 + 1} of 3)" in screen.query_one(Headline).plain
            assert f"held-out FVU {number(fvu + 0.05)}" in screen.query_one(Headline).plain
            heading = screen.query_one("#curve-fvu").plain.splitlines()[0]
            assert heading == f"held-out FVU {fvu + 0.05:.2f} · batch {fvu}"
            assert "m" in screen.active_bindings
            await pilot.press("m")
            await pilot.pause()
        await pilot.press("M", "M")
        assert "k=32 (3 of 3)" in screen.query_one(Headline).plain
        await pilot.press("escape")
        app.session.go.open_job(single)
        await wait_until(pilot, lambda: app.session.detail is not None and app.session.detail.view.id == single)
        await pilot.pause()
        assert "m" not in app.screen.active_bindings


async def test_the_key_for_the_next_sae_of_a_sweep_is_in_a_narrow_footer(make_app, data) -> None:
    sweep = record_job(data, "two", JobState.RUNNING, total_steps=400, config=job_file(k=[8, 16]))
    record_metrics(data, sweep)
    with closing(SeriesWriter(data.run(sweep).metrics_db)) as writer:
        writer.write([MetricRow(f"fvu@k={k}", step, 0.1) for k in (8, 16) for step in (10, 20)])
    app = make_app(2)
    async with app.run_test(size=(80, 24)) as pilot:
        screen = await opened(pilot, app, sweep)
        await wait_until(pilot, lambda: screen.query_one(Footer).plain.startswith(" esc Back  m SAE "))


async def test_a_sweep_over_seeds_shows_means_with_deviations_and_no_best_sae(make_app, data) -> None:
    job_id = record_job(data, "seeds", JobState.FINISHED, config=job_file(seed=[0, 1]))
    data.run(job_id).create()
    writer = SeriesWriter(data.run(job_id).metrics_db)
    values = {"fvu": 0.15, "fvu@seed=0": 0.15, "fvu@seed=1": 0.14, "l0": 8.0, "l0@seed=0": 8.0, "l0@seed=1": 8.1}
    values |= {f"heldout_{name}": value for name, value in values.items()}
    writer.write([MetricRow(name, 20, value) for name, value in values.items()], Heartbeat("finished", 20, 20, 9, 0.0))
    writer.close()
    app = make_app(4)
    async with app.run_test(size=(120, 40)) as pilot:
        await wait_until(pilot, lambda: app.session.jobs and app.session.jobs[0].seeds)
        assert judged_span(app.session.jobs[0], "fvu") == ("0.145(7)", "text")
        screen = await opened(pilot, app, job_id)
        await wait_until(pilot, lambda: "2 seeds" in screen.query_one(Headline).plain)
        words = screen.query_one(Headline).plain
        assert "2 seeds: held-out FVU 0.1450 ± 0.0071  held-out L0 8.050 ± 0.071" in words
        assert "best" not in words


async def test_a_sweep_opens_at_its_best_sae_and_the_list_shows_that_saes_values(make_app, data) -> None:
    config = job_file(k=[8, 16, 32])
    ended = record_job(data, "as it was stored", JobState.FINISHED, config=config, fvu=0.2184, loss=30.0)
    running = record_job(data, "live", JobState.RUNNING, config=config)
    for job_id in (ended, running):
        data.run(job_id).create()
        writer = SeriesWriter(data.run(job_id).metrics_db)
        fvu = {
            "fvu": 0.2184,
            "fvu@k=8": 0.2184,
            "fvu@k=16": 0.18,
            "fvu@k=32": 0.1463,
            "loss@k=8": 30.0,
            "loss@k=32": 12.5,
        }
        writer.write([MetricRow(name, 20, value) for name, value in fvu.items()], Heartbeat("training", 20, 40, 9, 0.0))
        writer.close()
    app = make_app(4)
    async with app.run_test(size=(80, 24)) as pilot:
        await wait_until(pilot, lambda: len(app.session.jobs) == 2)
        assert [(job.fvu, job.loss, job.best_sae) for job in app.session.jobs] == [(0.1463, 12.5, "k=32")] * 2
        screen = await opened(pilot, app, ended)
        assert "k=32 (3 of 3, the best)" in screen.query_one(Headline).plain


async def test_i_shows_settings_tags_and_note_instead_of_or_next_to_the_plots(make_app, data) -> None:
    note = "compare it with job 1 before Friday, and look at the dead latents of the last third of the run"
    job_id = record_job(
        data, "clone", JobState.RUNNING, config=job_file(k=[8, 16], d_sae=1536), note=note, tags=("good",), parent=7
    )
    record_metrics(data, job_id)
    app = make_app(4)
    async with app.run_test(size=(80, 24)) as pilot:
        screen = await opened(pilot, app, job_id)
        panel, plots = screen.query_one(SettingsPanel), screen.query_one("#live")
        assert (panel.display, plots.display) == (False, True)
        await pilot.press("i")
        await wait_until(pilot, lambda: panel.plain)
        assert (panel.display, plots.display, panel.has_focus) == (True, False, True)
        shown = " ".join(panel.plain.split())
        for part in ("k [8, 16]", "d_sae 1536", "seed 3", "n_steps 400", "tags #good", "clone of job 7", note):
            assert part in shown
        assert "expansion_factor" not in shown
        assert re.search(r"\d+ more at their defaults", shown)
        await pilot.press("i")
        await wait_until(pilot, lambda: plots.display)
        await pilot.resize_terminal(120, 40)
        await wait_until(pilot, lambda: not panel.display)
        await pilot.press("i")
        await wait_until(pilot, lambda: panel.display and plots.display and panel.region.x >= plots.region.right)


async def test_the_settings_are_shown_by_default_in_a_wide_terminal(make_app, data) -> None:
    job_id = record_job(data, "wide", JobState.RUNNING)
    app = make_app(4)
    async with app.run_test(size=(120, 40)) as pilot:
        screen = await opened(pilot, app, job_id)
        await wait_until(pilot, lambda: "topk" in screen.query_one(SettingsPanel).plain)
        await pilot.resize_terminal(119, 40)
        await wait_until(pilot, lambda: not screen.query_one(SettingsPanel).display)


async def test_settings_show_resolved_auto_values_and_enter_also_shows_defaults(make_app, data) -> None:
    config = dump_job(parse_job({"name": "x", "data": {"path": "data/sample"}})[0])
    job_id = record_job(data, "done", JobState.FINISHED, total_steps=521, attempt=1, config=config)
    folder = data.run(job_id).attempt(1)
    folder.mkdir(parents=True)
    plan = Plan("single", 1, 1, 576, 576, 1, step_s=0.1, needs_bytes=1, lr={"": 0.013}, precision="fp32")
    (folder / "plan.json").write_bytes(msgspec.json.encode(plan))
    app = make_app(4)
    async with app.run_test(size=(80, 24)) as pilot:
        screen = await opened(pilot, app, job_id)
        await pilot.press("i")
        await pilot.pause()

        def shown() -> list[str]:
            return [" ".join(line.split()) for line in screen.query_one(SettingsPanel).plain.splitlines()]

        assert {"lr 0.013 (auto)", "batch_size 576 = 521 steps (auto)"} <= set(shown())
        assert not [line for line in shown() if line.startswith("seed")]
        await pilot.press("enter")
        await pilot.pause()
        assert {"seed 0", "precision fp32 (auto)", "dead_after_tokens 30,009 (auto)"} <= set(shown())
        await pilot.press("enter")
        await pilot.pause()
        assert not [line for line in shown() if line.startswith("seed")]


async def test_the_first_curve_is_the_held_out_fvu_in_front_of_a_dimmed_batch_fvu(make_app, data) -> None:
    job_id = record_job(data, "minilm", JobState.RUNNING, total_steps=400)
    data.run(job_id).create()
    app = make_app(4)
    async with app.run_test(size=(80, 24)) as pilot:
        screen = await opened(pilot, app, job_id)
        plot = screen.query_one("#curve-fvu")

        async def styles_after(rows: list[MetricRow], step: int) -> set[str]:
            with closing(SeriesWriter(data.run(job_id).metrics_db)) as writer:
                writer.write(rows, Heartbeat("training", step, 400, 100 * step, 0.0))
            await wait_until(pilot, lambda: screen.session.detail.view.step == step and plot._steps[1] == step)
            spans = [span for line in plot._lines for span in line]
            return {style for text, style in spans if any(0x2800 < ord(char) < 0x2900 for char in text)}

        assert await styles_after([MetricRow("fvu", step, 0.4 - step / 1000) for step in (10, 50, 90)], 90) == {"dim"}
        assert "none yet · batch 0.31" in plot.plain.splitlines()[0]
        assert "FVU ~0.31" in screen.query_one(Headline).plain
        measured = [
            MetricRow("heldout_fvu", 100, 0.38),
            MetricRow("heldout_fvu", 200, 0.36),
            MetricRow("fvu", 200, 0.2),
        ]
        assert await styles_after(measured, 200) == {"dim", "spark"}
        assert plot.plain.splitlines()[0].strip() == "held-out FVU 0.36 · batch 0.2"
        assert "held-out FVU 0.36" in screen.query_one(Headline).plain


async def test_one_dead_latent_is_drawn_near_zero_in_percent(make_app, data) -> None:
    job_id = record_job(data, "alive", JobState.RUNNING)
    data.run(job_id).create()
    writer = SeriesWriter(data.run(job_id).metrics_db)
    writer.write(
        [MetricRow("dead_fraction", step, 1 / 1536) for step in (10, 20)], Heartbeat("training", 20, 40, 9, 0.0)
    )
    writer.close()
    app = make_app(4)
    async with app.run_test(size=(80, 24)) as pilot:
        screen = await opened(pilot, app, job_id)
        heading, top, *_ = screen.query_one("#curve-dead_fraction").plain.splitlines()
        assert heading == "dead 0.1% · silent 1 tokens"
        assert top.split("┤")[0].strip() == "1%"
        assert not any(0x2800 < ord(char) < 0x2900 for char in top)


@pytest.mark.parametrize(
    ("device", "used", "expected", "said"),
    [
        ("cuda", 600, 700, "0.6 GiB used, 0.7 GiB expected (without the CUDA context)"),
        ("cpu", 600, 580, "0.6 GiB used, 0.6 GiB expected (libraries included)"),
        ("cpu", 600, 29, "0.6 GiB used (29 MiB expected for the SAE, the rest is Python and libraries)"),
        ("cpu", None, 29, "29 MiB expected"),
        ("cuda", 600, None, "0.6 GiB used (without the CUDA context)"),
    ],
)
def test_used_and_expected_memory_are_shown(device, used, expected, said) -> None:
    sizes = {"peak_memory_bytes": used and used << 20, "estimated_memory_bytes": expected and expected << 20}
    job = JobView(name="x", config="", user="ada", host="here", device=device, gpu_source="none", **sizes)
    assert memory_words(job)[0] == said


ERROR = (
    'launch.gpus: PyTorch 2.8 sees 0 GPUs, so rank 0 has none; install a PyTorch built for this driver, or choose "cpu"'
)


def fail(data, job_id: int, error: str, traceback: str = "", log: str = "") -> None:
    """Write the files that a failed job's rank and supervisor would write."""
    paths = data.run(job_id)
    paths.create()
    paths.job_file.write_text(job_file())
    paths.attempt(1).mkdir()
    paths.rank_exit(1, 0).write_text(json.dumps({"error": error, "traceback": traceback}))
    paths.log(0).write_text(log)
    ranks = (RankEnding(0, 1, None, error),)
    write_ending(paths.exit_file, JobEnding(JobState.FAILED, 1.0, error, None, ranks, first_failed=0))
    control = Control(data.control_db)
    control.add_event(job_id, "failed", error, "error")
    control.close()


async def test_a_user_error_is_shown_once_and_in_full_without_a_traceback(make_app, data) -> None:
    job_id = record_job(data, "cpu", JobState.FAILED, error=ERROR, attempt=1)
    fail(data, job_id, ERROR, f"Traceback\n  File x\ntrainer.contract.problems.UserError: {ERROR}", f"{ERROR}\n")
    app = make_app(4)
    async with app.run_test(size=(80, 24)) as pilot:
        screen = await opened(pilot, app, job_id)
        await wait_until(pilot, lambda: screen.query_one(CausePanel).display)
        cause = " ".join(screen.query_one(CausePanel).plain.split())
        assert ERROR in cause
        assert "→ the PyTorch build does not match this driver; see `sae-tui doctor`" in cause
        others = [panel.plain for panel in screen.query("LineView") if not isinstance(panel, CausePanel | LogPanel)]
        assert "sees 0 GPUs" not in " ".join([*others, cause.replace(ERROR, "")])
        assert "Traceback" not in cause


async def test_a_killed_ranks_last_line_is_only_in_the_log_and_a_remedy_is_shown(make_app, data) -> None:
    last = "12:35:35  step 10/1465  loss 0.8312  fvu 0.5123  l0 32.0  dead 12.1%  lr 1e-3  12,345 tok/s"
    error = f"rank 0 was killed (SIGKILL); its last log line: {last}"
    job_id = record_job(data, "killed", JobState.FAILED, error=error, attempt=1)
    fail(data, job_id, error, log=f"begins\n{last}\n")
    saved = data.run(job_id).checkpoints / "step-00001000"
    saved.mkdir(parents=True)
    (saved / "state.json").write_text('{"position": {"step": 1000, "tokens": 5}}')
    app = make_app(4)
    async with app.run_test(size=(80, 24)) as pilot:
        screen = await opened(pilot, app, job_id)
        await wait_until(pilot, lambda: screen.query_one(CausePanel).display)
        heading, cause, oom, more, resume = screen.query_one(CausePanel).plain.splitlines()
        assert heading.strip() == "Why it failed"
        assert cause.strip() == "✗ rank 0 was killed (SIGKILL)"
        assert "dmesg -T | grep -i oom" in " ".join(f"{oom} {more}".split())
        assert resume.strip() == "→ g resumes it from step 1,000"
        log = screen.query_one(LogPanel)
        assert "12,345 tok/s" not in log.plain
        assert "← → long lines" in log.plain
        await pilot.press("right", "right")
        assert "12,345 tok/s" in log.plain
        await pilot.press("left", "left", "left")
        assert "12:35:35" in log.plain


async def test_the_log_title_shows_its_source_and_an_empty_log_has_a_message(make_app, data) -> None:
    job_id = record_job(data, "a rather long name that goes on and on " * 2, JobState.RUNNING)
    record_metrics(data, job_id)
    data.run(job_id).log(0).write_text(f"{'x' * 200} the end\nshort\n")
    app = make_app(4)
    async with app.run_test(size=(80, 24)) as pilot:
        await opened(pilot, app, job_id)
        await pilot.press("l")
        view = app.screen.query_one(LogView)
        await wait_until(pilot, lambda: "short" in view.plain)
        assert title_of(view).startswith(f" Job {job_id} · log of rank 0 · running · a rather long")
        assert title_of(view).endswith("← → long lines ")
        await pilot.press("slash", *"short", "enter", "n")
        assert "! No match further down (N: up)." in [note.message for note in app._notifications]
        await pilot.press("escape", "right_square_bracket")
        await wait_until(pilot, lambda: view.plain == "the supervisor has written nothing")


async def test_a_key_shows_all_of_a_jobs_metrics_and_escape_returns(make_app, data) -> None:
    job_id = record_job(data, "one", JobState.RUNNING, total_steps=400)
    record_metrics(data, job_id)
    app = make_app(4)
    async with app.run_test(size=(80, 24)) as pilot:
        screen = await opened(pilot, app, job_id)
        await pilot.press("b")
        assert app.screen.name == "compare"
        await wait_until(pilot, lambda: "tokens_per_s" in app.screen.comparison.metrics)
        # With a single SAE there is nothing to compare, and its curve fills the window.
        await pilot.press("2")
        assert [view.id for view in app.screen.query("#views > *") if view.display] == ["curves"]
        await pilot.press("escape")
        assert app.screen is screen
        writer = SeriesWriter(data.run(job_id).metrics_db)
        writer.write([MetricRow("heldout_fvu", 300, 0.1234)], Heartbeat("training", 300, 400, 9, 0.0))
        writer.close()
        await wait_until(pilot, lambda: "75%" in screen.query_one(Headline).plain, seconds=5)


async def test_keys_copy_the_command_that_launches_the_job_and_python_that_loads_its_sae(make_app, data) -> None:
    job_id = record_job(data, "minilm", JobState.FINISHED)
    folder = data.sae(job_id)
    folder.mkdir(parents=True)
    for name in ("cfg.json", "sae_weights.safetensors"):
        (folder / name).write_text("{}")
    app = make_app(4)
    async with app.run_test(size=(80, 24)) as pilot:
        await opened(pilot, app, job_id)
        await pilot.press("Y")
        assert app.clipboard == "sae-tui launch /dev/null --set name=minilm --set data.path=data/sample"
        await pilot.press("L")
        assert app.clipboard == f"from sae_lens import SAE\n\nsae = SAE.load_from_disk('{folder}')\n"
        assert isinstance(app.screen, LinesScreen)
        await pilot.pause()
        shown = "\n".join(strip.text for strip in app.screen._compositor.render_strips())
        assert "Load the SAE with SAELens; sent to the terminal's clipboard" in shown
        assert "sae = SAE.load_from_disk(" in app.screen.query_one(Page).plain
        await pilot.press("escape", "L")
        assert "load_file('" in app.clipboard


async def test_a_job_without_an_sae_has_nothing_to_load(make_app, data) -> None:
    job_id = record_job(data, "minilm", JobState.RUNNING)
    app = make_app(4)
    async with app.run_test(size=(120, 40)) as pilot:
        await opened(pilot, app, job_id)
        await pilot.press("L")
        assert app.clipboard == ""
        assert any("has no SAE to load yet" in note.message for note in app._notifications)


@pytest.mark.parametrize(
    ("size", "shown"),
    [
        ((80, 24), ["fvu", "dead_fraction", "tokens_per_s"]),
        ((120, 40), ["fvu", "dead_fraction", "tokens_per_s", "lr"]),
        ((200, 60), ["fvu", "dead_fraction", "tokens_per_s", "lr"]),
        ((50, 24), ["fvu", "dead_fraction"]),
    ],
)
async def test_the_held_out_fvu_is_the_largest_curve_and_all_curves_have_the_same_steps(
    make_app, data, size, shown
) -> None:
    job_id = record_job(data, "minilm", JobState.RUNNING, config=job_file(architecture="topk"))
    record_metrics(data, job_id)
    app = make_app(4)
    async with app.run_test(size=size) as pilot:
        screen = await opened(pilot, app, job_id)
        await wait_until(pilot, lambda: [plot.series_name for plot in shown_plots(screen)] == shown)
        largest, *others = shown_plots(screen)
        assert all(largest.size.area > plot.size.area for plot in others) or size[0] < 80
        assert {plot._steps for plot in (largest, *others)} == {(0, 200)}
