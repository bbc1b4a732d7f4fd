from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from sae_tui.doctor import examine as module
from sae_tui.doctor.base import CheckedMachine, Finding
from sae_tui.doctor.examine import CHECKS, examine, level_words, summary
from sae_tui.doctor.storage import check_space
from sae_tui.gpu.simulated import Simulated


def test_every_finding_that_is_not_ok_has_a_remedy(sandbox) -> None:
    for box in (sandbox.box(), sandbox.box(Simulated(8, faults={3: "lost"}), size=(60, 10), TERM="dumb")):
        findings = list(examine(box, CHECKS[:-1]))
        assert len(findings) > 10
        for finding in findings:
            assert finding.subject
            assert finding.sentence
            assert bool(finding.remedy) == (finding.level != "ok"), finding


def test_every_subject_fits_its_column() -> None:
    assert all(len(check.__name__.removeprefix("check_")) <= 14 for check in CHECKS)


def test_a_failing_check_becomes_a_finding_and_the_others_still_run(sandbox) -> None:
    def check_weather(box: CheckedMachine) -> list[Finding]:
        raise ZeroDivisionError("rain")

    def check_moon(box: CheckedMachine) -> list[Finding]:
        return [Finding("ok", "moon", "full")]

    weather, moon = examine(sandbox.box(), [check_weather, check_moon])
    assert (weather.level, weather.subject) == ("warning", "weather")
    assert "ZeroDivisionError('rain')" in weather.sentence
    assert moon.level == "ok"


def test_a_hanging_check_is_named_and_a_hung_data_folder_skips_its_checks(sandbox, monkeypatch) -> None:
    hung = threading.Event()

    def check_first(box: CheckedMachine) -> Iterator[Finding]:
        yield Finding("ok", "first", "well")
        hung.wait()

    def check_disk(box: CheckedMachine) -> list[Finding]:
        hung.wait()
        return []

    def check_moon(box: CheckedMachine) -> list[Finding]:
        return [Finding("ok", "moon", "full")]

    monkeypatch.setattr(module, "OF_FOLDER", {check_disk, check_space})
    monkeypatch.setattr(module, "LIMITS_S", dict.fromkeys((check_first, check_disk), 0.05))
    box = sandbox.box()
    findings = list(examine(box, [check_first, check_disk, check_space, check_moon]))
    assert [(one.level, one.subject) for one in findings] == [
        ("ok", "first"), ("error", "first"), ("error", "data folder"), ("ok", "moon"), ("note", "not checked"),
    ]  # fmt: skip
    assert findings[2].sentence == f"{sandbox.data.root} does not respond within 10 s, during the check of disk"
    assert findings[4].sentence == "space"
    hung.set()


def test_findings_are_yielded_one_by_one(sandbox) -> None:
    looked = []

    def check_first(box: CheckedMachine) -> list[Finding]:
        looked.append(1)
        return [Finding("ok", "first", "well")]

    def check_second(box: CheckedMachine) -> list[Finding]:
        looked.append(2)
        return [Finding("ok", "second", "well")]

    findings = examine(sandbox.box(), [check_first, check_second])
    assert next(findings).subject == "first"
    assert looked == [1]


@pytest.mark.parametrize(
    ("levels", "words"),
    [
        (["ok"], "1 ok"),
        (["ok", "note", "ok"], "1 note, 2 ok"),
        (["warning", "error", "error"], "2 errors, 1 warning, 0 ok"),
    ],
)
def test_the_summary_counts_the_findings_by_level(levels, words) -> None:
    findings = [Finding(level, "x", "y") for level in levels]
    assert summary(findings) == words
    assert len({level_words(finding) for finding in findings}) == len(set(levels))
