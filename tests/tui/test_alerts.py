"""Tests for how alerts are shown: the message, the number of active alerts, and the alerts from the last day."""

from __future__ import annotations

from support.tui import NOW, wait_until

from sae_tui.alerts.record import Alert, write_alerts
from sae_tui.app_parts.refresh import AlertsChanged
from sae_tui.panels.alerts import alert_lines
from sae_tui.panels.status import StatusLine

HOT = Alert(
    kind="heat",
    place="GPU-a",
    place_words="GPU 3",
    words="GPU 3 is at 88 °C; it throttles at 90 °C",
    host="gpu-box",
    value=2.0,
    raised=NOW,
)
OVER = Alert(
    kind="disk", place="disk", place_words="the disk", words="[b]little[/b] left", host="x", value=0.0, raised=NOW - 60,
    cleared=NOW,
)  # fmt: skip


def lines(alerts, width: int = 80) -> list[str]:
    return ["".join(text for text, _ in line) for line in alert_lines(alerts, width)]


def test_active_alerts_come_first_and_ended_ones_show_their_duration():
    shown = [line[14:] if line[:1].isdigit() else line for line in lines([OVER, HOT])]
    assert shown == ["Now", f"⚠ {HOT.words}", "", "Cleared", "[b]little[/b] left (for 60 s)"]


def test_a_long_alert_is_wrapped_to_the_right_of_its_time():
    first, second = lines([HOT], 40)[1:3]
    assert (len(first) <= 40, second[:14].strip()) == (True, "")


def test_an_empty_list_of_alerts_shows_a_message():
    assert lines([]) == ["No alerts in the last 24 hours."]


async def test_an_alert_is_shown_counted_in_the_status_line_and_listed_later(make_app, data):
    write_alerts(data, HOT.host, [HOT])
    app = make_app()
    async with app.run_test(size=(100, 30)) as pilot:
        await pilot.pause()
        app.session.alerts.active = app.session.alerts.changed = (HOT,)
        app.post_message(AlertsChanged())
        await pilot.pause()
        await pilot.pause()
        assert [note.message for note in app.notices] == [f"! {HOT.words}."]
        assert "⚠ 1 alert " in app.screen.query_one(StatusLine).plain
        await wait_until(pilot, app.session.alerts.recent)
        app.session.go.show_alerts()
        await pilot.pause()
        assert HOT.words in app.screen.query_one("Page").plain
