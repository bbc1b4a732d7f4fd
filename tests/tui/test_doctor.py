from __future__ import annotations

import threading
from collections.abc import Iterator

from support.tui import title_of, wait_until

from sae_tui.doctor.base import Finding
from sae_tui.screens.doctor import DoctorScreen
from sae_tui.widgets.lines import LineView
from sae_tui.widgets.table import KeyedTable

WELL = Finding("ok", "disk", "72.1 GiB free of 252.0 GiB in /home/ada")
WRONG = Finding("warning", "logout", "jobs end when you log out", "run `loginctl enable-linger`")


def text(app, selector: str) -> str:
    return app.screen.query_one(selector, LineView).plain


async def test_findings_appear_one_by_one_while_the_app_stays_responsive(make_app) -> None:
    go_on = threading.Event()

    def examine() -> Iterator[Finding]:
        yield WELL
        go_on.wait(20)
        yield WRONG

    app = make_app()
    async with app.run_test(size=(80, 24)) as pilot:
        screen = DoctorScreen(examine)
        app.session.go.show(screen)
        await wait_until(pilot, lambda: screen.findings == [WELL])
        assert "disk" in text(app, "#findings")
        assert "logout" not in text(app, "#findings")
        assert "1 ok, checking…" in title_of(screen.query_one("#findings"))
        go_on.set()
        await wait_until(pilot, lambda: screen.done)
        assert "logout" in text(app, "#findings")
        assert title_of(screen.query_one("#findings")).strip() == "Doctor · 1 warning, 1 ok"


async def test_the_worst_finding_is_the_first_row_and_the_cursor_stays_where_it_was_moved(make_app) -> None:
    go_on = threading.Event()

    def examine() -> Iterator[Finding]:
        yield WELL
        yield Finding("note", "SQLite", "an old version")
        go_on.wait(20)
        yield WRONG

    app = make_app()
    async with app.run_test(size=(80, 24)) as pilot:
        screen = DoctorScreen(examine)
        app.session.go.show(screen)
        await wait_until(pilot, lambda: len(screen.findings) == 2)
        assert "an old version" in text(app, "#chosen")
        await pilot.press("down")
        go_on.set()
        await wait_until(pilot, lambda: screen.done)
        table = screen.query_one(KeyedTable)
        assert [screen.findings[int(row.key)].level for row in table.rows] == ["warning", "note", "ok"]
        assert WELL.sentence in text(app, "#chosen")


async def test_the_selected_finding_is_shown_below_in_full_with_its_remedy(make_app) -> None:
    long = Finding("note", "SQLite", "a sentence that goes on " * 6, "a remedy")
    app = make_app()
    async with app.run_test(size=(80, 24)) as pilot:
        screen = DoctorScreen(lambda: [WELL, long])
        app.session.go.show(screen)
        await wait_until(pilot, lambda: screen.done)
        shown = " ".join(text(app, "#chosen").split())
        assert shown == f"{long.sentence.strip()} → a remedy"
        await pilot.press("down")
        await pilot.pause()
        assert WELL.sentence in text(app, "#chosen")


async def test_ctrl_n_checks_again_and_late_findings_from_an_earlier_check_are_dropped(make_app) -> None:
    late, looks = threading.Event(), []

    def examine() -> Iterator[Finding]:
        looks.append(len(looks))
        if looks[-1] == 0:
            yield WELL
            late.wait(20)
        yield WRONG

    app = make_app()
    async with app.run_test(size=(80, 24)) as pilot:
        screen = DoctorScreen(examine)
        app.session.go.show(screen)
        await wait_until(pilot, lambda: screen.findings == [WELL])
        await pilot.press("ctrl+n")
        await wait_until(pilot, lambda: screen.done)
        late.set()
        await wait_until(pilot, lambda: all(thread.name != "doctor" for thread in threading.enumerate()))
        await pilot.pause()
        assert screen.findings == [WRONG]


async def test_p_checks_again_with_the_probes(make_app) -> None:
    bus = Finding("ok", "bus", "8 GPUs exchange 180.2 GB/s in an all-reduce")
    app = make_app()
    async with app.run_test(size=(80, 24)) as pilot:
        screen = DoctorScreen(lambda: [WELL], lambda: [WELL, bus])
        app.session.go.show(screen)
        await wait_until(pilot, lambda: screen.done)
        assert screen.findings == [WELL]
        await pilot.press("p")
        await wait_until(pilot, lambda: screen.done and screen.findings == [WELL, bus])
        assert "180.2 GB/s" in text(app, "#findings")


async def test_simulated_gpus_are_not_probed(make_app, monkeypatch) -> None:
    monkeypatch.setattr("sae_tui.doctor.torch_build.LIMIT_S", 0.001)
    app = make_app(4)
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.press("d")
        await wait_until(pilot, lambda: isinstance(app.screen, DoctorScreen) and app.screen.done)
        assert all(finding.subject != "bus" for finding in app.screen.findings)
        await pilot.press("p")
        await wait_until(pilot, lambda: app.screen.done and app.screen.findings[-1].subject == "bus")
        assert "no real GPUs" in app.screen.findings[-1].sentence


async def test_d_opens_the_doctor_for_this_machine_and_escape_returns(make_app, monkeypatch) -> None:
    monkeypatch.setattr("sae_tui.doctor.torch_build.LIMIT_S", 0.001)
    app = make_app(4)
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.press("d")
        await wait_until(pilot, lambda: isinstance(app.screen, DoctorScreen) and app.screen.done)
        assert "this machine has 4 simulated GPUs" in text(app, "#findings")
        assert app.screen.query_one(KeyedTable).has_focus
        await pilot.press("escape")
        await pilot.pause()
        assert app.screen.id == "dashboard"


async def test_the_doctor_is_in_the_palette_and_in_the_help(make_app) -> None:
    app = make_app()
    async with app.run_test(size=(80, 24)) as pilot:
        assert "Doctor" in [command.title for command in app.get_system_commands(app.screen)]
        await pilot.press("question_mark")
        await pilot.pause()
        assert "Check this machine for problems" in app.screen.query_one("Page").plain


async def test_leaving_the_screen_ends_the_check(make_app) -> None:
    go_on, begun = threading.Event(), []

    def examine() -> Iterator[Finding]:
        for step in range(3):
            begun.append(step)
            yield WELL
            go_on.wait(20)

    app = make_app()
    async with app.run_test(size=(80, 24)) as pilot:
        app.session.go.show(DoctorScreen(examine))
        await wait_until(pilot, lambda: begun == [0])
        await pilot.press("escape")
        await wait_until(pilot, lambda: app.screen.id == "dashboard")
        go_on.set()
        await wait_until(pilot, lambda: all(thread.name != "doctor" for thread in threading.enumerate()))
        assert len(begun) < 3
