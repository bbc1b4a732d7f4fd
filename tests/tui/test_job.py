from __future__ import annotations

import json
import re

from support.tui import record_job, record_metrics, wait_until

from sae_tui.format import number
from sae_tui.jobs.ending import Ending, RankEnding, write_ending
from sae_tui.panels.cause import CausePanel
from sae_tui.panels.curves import CurvePlot
from sae_tui.panels.events import EventsPanel
from sae_tui.panels.headline import Headline
from sae_tui.panels.log import LogPanel
from sae_tui.panels.ranks import RanksPanel
from sae_tui.widgets.log_view import LogView
from trainer.contract.series import Heartbeat, Row, SeriesWriter
from trainer.contract.states import JobState


async def opened(pilot, app, job_id: int):
    await wait_until(pilot, lambda: app.jobs)
    app.open_job(job_id)
    await wait_until(pilot, lambda: app.detail is not None)
    await pilot.pause()
    return app.screen


async def test_a_running_job_shows_curves_ranks_events_and_its_log(make_app, data) -> None:
    job_id = record_job(data, "minilm", JobState.RUNNING, world_size=2, total_steps=400)
    record_metrics(data, job_id)
    app = make_app(4)
    async with app.run_test(size=(120, 40)) as pilot:
        screen = await opened(pilot, app, job_id)
        assert "50%" in screen.query_one(Headline).plain
        assert re.search(r"FVU .* \d+ (s|min) left", screen.query_one(Headline).plain)
        for plot in screen.query(CurvePlot):
            assert any(0x2800 < ord(char) < 0x2900 for char in plot.plain), plot.curve.name
        late, other = screen.query_one(RanksPanel).plain.splitlines()[1:3]
        assert late.startswith("▲  0")
        assert other.startswith("   1")
        assert "127.4" in late
        assert "98.0" in other
        assert "2 ranks, ddp, gloo" in screen.query_one(EventsPanel).plain
        assert "step 200" in screen.query_one(LogPanel).plain


async def test_what_the_trainer_writes_is_on_the_screen_within_a_second(make_app, data) -> None:
    job_id = record_job(data, "minilm", JobState.RUNNING, world_size=2, total_steps=400)
    record_metrics(data, job_id)
    app = make_app(4)
    async with app.run_test(size=(120, 40)) as pilot:
        screen = await opened(pilot, app, job_id)
        writer = SeriesWriter(data.run(job_id).metrics_db)
        writer.write([Row("loss", 300, 0.1234)], Heartbeat("training", 300, 400, 9, 0.0))
        with data.run(job_id).log(0).open("a") as log:
            log.write("a new line\n")
        writer.close()
        await wait_until(pilot, lambda: "75%" in screen.query_one(Headline).plain, seconds=5)
        assert "0.1234" in screen.query_one("#curve-loss").plain
        await wait_until(pilot, lambda: "a new line" in screen.query_one(LogPanel).plain, seconds=5)


async def test_rows_that_were_lost_are_told_beside_the_phase(make_app, data) -> None:
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


async def test_everything_fits_80_by_24(make_app, data) -> None:
    job_id = record_job(data, "minilm", JobState.RUNNING, world_size=2, total_steps=400)
    record_metrics(data, job_id)
    app = make_app(4)
    async with app.run_test(size=(80, 24)) as pilot:
        screen = await opened(pilot, app, job_id)
        for plot in screen.query(CurvePlot):
            assert plot.size.height >= 3
        assert screen.query_one(LogPanel).size.height >= 3
        assert screen.query_one(EventsPanel).size.height >= 2
        regions = [widget.region for widget in screen.query("LineView") if widget.display]
        for number, one in enumerate(regions):
            assert not any(one.overlaps(other) for other in regions[number + 1 :])


async def test_a_failed_job_opens_at_its_cause(make_app, data) -> None:
    job_id = record_job(data, "minilm", JobState.FAILED, error="rank 1 was killed (SIGKILL)")
    app = make_app(4)
    async with app.run_test(size=(120, 40)) as pilot:
        screen = await opened(pilot, app, job_id)
        assert "✗ rank 1 was killed (SIGKILL)" in screen.query_one(Headline).plain


async def test_l_gives_the_logs_the_whole_screen_r_the_next_rank_then_all_together(make_app, data) -> None:
    job_id = record_job(data, "minilm", JobState.RUNNING, world_size=2)
    record_metrics(data, job_id)
    data.run(job_id).log(1).write_text("hello from rank one\n")
    app = make_app(4)
    async with app.run_test(size=(80, 24)) as pilot:
        screen = await opened(pilot, app, job_id)
        await pilot.press("l")
        view = app.screen.query_one(LogView)
        assert view.size.height > 15
        await pilot.press("r")
        await wait_until(pilot, lambda: view.plain == "hello from rank one")
        with data.run(job_id).log(1).open("a") as log:
            log.write("and another\n")
        await wait_until(pilot, lambda: view.plain.endswith("and another"))
        await pilot.press("r", "r")
        await wait_until(pilot, lambda: "1: hello from rank one" in view.plain)
        await pilot.press("escape")
        assert app.screen is screen


async def test_a_log_is_searched_and_filtered_and_escape_ends_the_search_first(make_app, data) -> None:
    job_id = record_job(data, "minilm", JobState.RUNNING)
    data.run(job_id).create()
    lines = [f"step {number}" + (" [WARNING]" if number % 100 == 7 else "") for number in range(1000)]
    data.run(job_id).log(0).write_text("\n".join(lines) + "\n")
    app = make_app(4)
    async with app.run_test(size=(80, 24)) as pilot:
        await opened(pilot, app, job_id)
        await pilot.press("l")
        view = app.screen.query_one(LogView)
        await wait_until(pilot, lambda: "step 999" in view.plain)
        assert view.follows
        await pilot.press("slash", *"[warn", "enter")
        assert "10 lines with '[warn'" in str(app.screen.query_one("#log-title").content)
        seen = [round(view.scroll_y)]
        for _ in range(2):
            await pilot.press("N")
            seen.append(round(view.scroll_y))
        assert seen == sorted(seen, reverse=True)
        assert not view.follows
        await pilot.press("ampersand")
        assert view.plain.splitlines() == [line for line in lines if "WARNING" in line]
        await pilot.press("escape")
        assert app.screen.name == "logs"
        await pilot.press("escape")
        assert app.screen.name == "job"


async def test_a_failed_job_shows_the_rank_that_failed_its_exception_and_what_to_do(make_app, data) -> None:
    error = "rank 1: RuntimeError: CUDA out of memory. Tried to allocate 2 GiB"
    job_id = record_job(data, "minilm", JobState.FAILED, error=error, world_size=2, attempt=1)
    paths = data.run(job_id)
    paths.create()
    paths.attempt(1).mkdir()
    paths.rank_exit(1, 1).write_text(json.dumps({"error": "x", "traceback": "frame 1\nRuntimeError: CUDA [red]"}))
    paths.log(1).write_text("step 8\nstep 9\n")
    ranks = (RankEnding(0, None, 15), RankEnding(1, 1, None, error))
    write_ending(paths.exit_file, Ending(JobState.FAILED, 1.0, error, None, ranks, first_failed=1))
    app = make_app(4)
    async with app.run_test(size=(120, 40)) as pilot:
        screen = await opened(pilot, app, job_id)
        await wait_until(pilot, lambda: screen.query_one(CausePanel).display)
        told = screen.query_one(CausePanel).plain
        for part in ("half the train.batch_size", "CUDA [red]", "step 9", "rank 0 was ended (SIGTERM)"):
            assert part in told
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


async def test_the_log_follows_its_end_through_a_resize_until_one_scrolls_up(make_app, data) -> None:
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


async def test_m_shows_the_next_sae_of_a_sweep_and_is_not_offered_for_a_single_one(make_app, data) -> None:
    single, sweep = (record_job(data, name, JobState.RUNNING, total_steps=400) for name in ("one", "three"))
    for job_id in (single, sweep):
        record_metrics(data, job_id)
    writer = SeriesWriter(data.run(sweep).metrics_db)
    values = {"k=16": 0.31, "k=32": 0.22, "k=64": 0.13}
    writer.write([Row(f"fvu@{label}", step, fvu) for label, fvu in values.items() for step in (10, 20)])
    writer.write([Row(f"heldout_fvu@{label}", 20, fvu + 0.05) for label, fvu in values.items()])
    writer.close()
    app = make_app(4)
    async with app.run_test(size=(120, 40)) as pilot:
        screen = await opened(pilot, app, sweep)
        for place, (label, fvu) in enumerate([*values.items(), ("k=16", 0.31)]):
            assert f"{label} ({place % 3 + 1} of 3)" in screen.query_one(Headline).plain
            assert f"FVU {number(fvu)}" in screen.query_one(Headline).plain
            assert f"{fvu}" in screen.query_one("#curve-fvu").plain
            assert f"held-out {fvu + 0.05:.2f}" in screen.query_one("#curve-fvu").plain
            assert "m" in screen.active_bindings
            await pilot.press("m")
            await pilot.pause()
        await pilot.press("escape")
        app.open_job(single)
        await wait_until(pilot, lambda: app.detail is not None and app.detail.view.id == single)
        await pilot.pause()
        assert "m" not in app.screen.active_bindings
