"""Tests for the file with a machine's policy: where it is, who may write to it, mistakes, and hours in a time zone."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sae_tui.policy import DAYS, NAME, NO_POLICY, Hours, Limits, Policy, read_policy
from trainer.contract.paths import DataDir

BERLIN = ZoneInfo("Europe/Berlin")
OTHER_USER = 61_003
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")
NIGHTS = """
gpus_per_user = 4
max_time = "4h"
time_zone = "Europe/Berlin"

[[hours]]
days = ["mon", "tue", "wed", "thu", "fri"]
start = "20:00"
end = "08:00"
gpus_per_user = 8
max_time = "12h"

[[hours]]
days = ["sat", "sun"]
gpus_per_user = 6
"""


class Place:
    """A machine's root folder, and a data folder that a group shares."""

    def __init__(self, folder: Path) -> None:
        self.root, self.data = folder / "root", DataDir(folder / "data")
        self.system = self.root / "etc" / "sae-tui" / NAME
        self.shared = self.data.root / NAME
        self.data.create()
        self.data.root.chmod(0o2770)

    def write(self, path: Path, text: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o644)

    def read(self, text: str | None = None) -> Policy:
        if text is not None:
            self.write(self.shared, text)
        return read_policy(self.data, self.root)


@pytest.fixture
def place(tmp_path: Path) -> Place:
    (tmp_path / "root").mkdir()
    return Place(tmp_path)


def at(text: str, zone: ZoneInfo = BERLIN) -> float:
    return datetime.fromisoformat(text).replace(tzinfo=zone).timestamp()


def test_without_a_file_there_are_no_limits(place: Place) -> None:
    assert place.read() == NO_POLICY
    assert place.read().limits(0.0) == Limits()


def test_the_systems_file_takes_precedence_over_the_one_in_a_shared_data_folder(place: Place) -> None:
    place.write(place.shared, "gpus_per_user = 2")
    assert (place.read().path, place.read().usual) == (place.shared, Limits(2))
    place.write(place.system, 'max_time = "1d"')
    assert (place.read().path, place.read().usual) == (place.system, Limits(None, 86_400.0))


def test_a_data_folder_that_no_group_shares_has_no_policy_of_its_own(place: Place) -> None:
    place.write(place.shared, "gpus_per_user = 2")
    place.data.root.chmod(0o700)
    assert place.read() == NO_POLICY


@pytest.mark.parametrize("mode", [0o664, 0o646])
def test_a_file_that_others_may_write_to_is_ignored(place: Place, mode: int) -> None:
    place.write(place.shared, "gpus_per_user = 2")
    place.shared.chmod(mode)
    policy = place.read()
    assert policy.usual == Limits()
    (problem,) = policy.problems
    assert str(problem) == (f"{NAME} is ignored, because others may write to {place.shared}; `chmod go-w` it")


@as_root
def test_only_a_file_owned_by_root_or_by_the_shared_folders_owner_is_trusted(place: Place) -> None:
    place.write(place.shared, "gpus_per_user = 2")
    os.chown(place.shared, OTHER_USER, -1)
    assert place.read().usual == Limits()
    assert str(place.read().problems[0]).endswith(f"{place.shared} belongs to uid {OTHER_USER}")
    os.chown(place.data.root, OTHER_USER, -1)
    # `chown` clears the setgid bit.
    place.data.root.chmod(0o2770)
    assert place.read().usual == Limits(2)
    os.chown(place.shared, 0, 0)
    assert place.read().usual == Limits(2)


@as_root
def test_a_user_cannot_write_a_policy_for_the_machine(place: Place) -> None:
    place.write(place.system, "gpus_per_user = 2")
    os.chown(place.system, OTHER_USER, -1)
    assert place.read().usual == Limits()
    os.chown(place.system, 0, -1)
    os.chown(place.system.parent, OTHER_USER, -1)
    assert place.read().usual == Limits()
    assert str(place.read().problems[0]).endswith(f"{place.system.parent} belongs to uid {OTHER_USER}")


def test_a_system_folder_that_others_may_write_to_is_not_trusted(place: Place) -> None:
    place.write(place.system, "gpus_per_user = 2")
    place.system.parent.chmod(0o777)
    assert place.read().usual == Limits()
    assert "`chmod go-w` it" in str(place.read().problems[0])


def test_a_link_or_a_pipe_is_not_read(place: Place, tmp_path: Path) -> None:
    place.write(tmp_path / "real.toml", "gpus_per_user = 2")
    place.shared.symlink_to(tmp_path / "real.toml")
    assert place.read().usual == Limits()
    assert place.read().problems
    place.shared.unlink()
    os.mkfifo(place.shared)
    assert place.read().usual == Limits()
    assert "is not a plain file" in str(place.read().problems[0])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("gpus_per_user = ", "is ignored, because it is not valid TOML: "),
        ("gpus_per_user = 0", "gpus_per_user: must be an integer of at least 1 and of at most 100000 (GPUs), not 0; "),
        ("max_time = 24", "max_time: must be a time like 90s, 10m, 2h or 1d, not 24; it is ignored"),
        ('max_time = "soon"', 'max_time: must be a time like 90s, 10m, 2h or 1d, not "soon"; it is ignored'),
        ('stop_idle_after = "5m"', 'stop_idle_after: must be a time of at least 30m, like 2h or 1d, not "5m"; '),
        ('time_zone = "Moon"', 'time_zone: is not a time zone known to this machine: "Moon"; it is ignored'),
        ("gpu_per_user = 4", "gpu_per_user: is not a setting; use one of gpus_per_user, max_time, stop_idle_after, "),
        ("[[hour]]", "time_zone, [[hours]]; it is ignored"),
        ('stop_idle_after = ""', "stop_idle_after: is empty; leave this line out, or write a time of at least 30m, "),
        ('time_zone = ""', 'time_zone: is empty; leave this line out, or write a name like "Europe/Berlin"; '),
        ('max_time = "366d"', 'max_time: must be at most a year (365d), not "366d"; it is ignored'),
        ('stop_idle_after = "999999999999d"', "stop_idle_after: must be at most a year (365d), not "),
        ("hours = 4", "hours: must be sections: write [[hours]] and its keys below; it is ignored"),
        (
            '[[hours]]\nstart = "25:00"',
            'hours 1: start: must be a time of day like "20:00", not "25:00"; it is ignored',
        ),
        ('[[hours]]\ndays = ["sunday"]', 'hours 1: days: must be a list of days like ["sat", "sun"], not ["sunday"]; '),
    ],
)
def test_a_mistake_is_reported_in_one_sentence_and_ignored(place: Place, text: str, said: str) -> None:
    policy = place.read(text)
    (problem,) = policy.problems
    assert said in str(problem)
    assert policy.largest == Limits()


def test_a_mistake_leaves_the_other_settings_in_force(place: Place) -> None:
    policy = place.read('gpus_per_user = 4\nmax_time = "soon"\n[[hours]]\nend = "x"\ngpus_per_user = 8\n')
    assert len(policy.problems) == 2
    # Hours with a mistake would apply at the wrong times.
    assert (policy.usual, policy.largest) == (Limits(4), Limits(4))


@given(content=st.binary(max_size=200) | st.text(max_size=200).map(str.encode))
def test_no_file_content_raises_an_error(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    folder = tmp_path_factory.mktemp("policy")
    (folder / "root").mkdir()
    place = Place(folder)
    place.shared.write_bytes(content)
    place.shared.chmod(0o644)
    policy = place.read()
    assert all("\n" not in str(problem) for problem in policy.problems)
    policy.limits(time.time())


@pytest.mark.parametrize(
    ("when", "limits"),
    [
        ("2026-11-02 07:59", Limits(4, 4 * 3600.0)),  # a Monday: the hours do not begin on Sunday
        ("2026-11-02 12:00", Limits(4, 4 * 3600.0)),
        ("2026-11-02 19:59:59", Limits(4, 4 * 3600.0)),
        ("2026-11-02 20:00", Limits(8, 12 * 3600.0)),
        ("2026-11-03 00:00", Limits(8, 12 * 3600.0)),
        ("2026-11-03 07:59:59", Limits(8, 12 * 3600.0)),
        ("2026-11-03 08:00", Limits(4, 4 * 3600.0)),
        ("2026-11-07 07:30", Limits(8, 12 * 3600.0)),  # a Saturday: both Friday night and the weekend
        ("2026-11-07 08:30", Limits(6, 4 * 3600.0)),
        ("2026-11-08 23:59", Limits(6, 4 * 3600.0)),
    ],
)
def test_larger_limits_apply_during_their_hours_even_past_midnight(place: Place, when: str, limits: Limits) -> None:
    assert place.read(NIGHTS).limits(at(when)) == limits


def test_hours_follow_daylight_saving_time_in_their_time_zone(place: Place) -> None:
    policy = place.read(NIGHTS)
    # On 25 October 2026, the clocks in Berlin go back: a night lasts 13 hours.
    for day in ("2026-10-23", "2026-10-26"):
        assert policy.limits(at(f"{day} 19:59")).gpus_per_user == 4
        assert policy.limits(at(f"{day} 20:00")).gpus_per_user == 8
    assert datetime.fromtimestamp(at("2026-10-23 20:00"), ZoneInfo("UTC")).hour == 18
    assert datetime.fromtimestamp(at("2026-10-26 20:00"), ZoneInfo("UTC")).hour == 19


def test_every_process_uses_the_machines_time_zone_regardless_of_its_own(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = NIGHTS.replace('time_zone = "Europe/Berlin"\n', "")
    noon_in_tokyo = at("2026-11-04 12:00", ZoneInfo("Asia/Tokyo"))
    localtime = place.root / "etc" / "localtime"
    localtime.parent.mkdir()
    for zone, n_gpus in (("Asia/Tokyo", 4), ("America/New_York", 8)):
        localtime.unlink(missing_ok=True)
        localtime.symlink_to(Path("/usr/share/zoneinfo") / zone)
        if not localtime.exists():
            pytest.skip("this machine has no time zone files")
        for own in ("UTC", "Asia/Tokyo"):
            monkeypatch.setenv("TZ", own)
            time.tzset()
            assert place.read(text).limits(noon_in_tokyo).gpus_per_user == n_gpus


@pytest.fixture(autouse=True)
def _own_time_zone() -> Iterator[None]:
    yield
    time.tzset()


def test_smaller_limits_in_some_hours_have_no_effect(place: Place) -> None:
    policy = place.read('gpus_per_user = 4\n[[hours]]\ngpus_per_user = 1\nmax_time = "1h"\n')
    assert policy.limits(0.0) == policy.largest == Limits(4)
    assert policy.sentences == ["4 GPUs for each user"]
    why = "has no effect, because hours can only raise a limit"
    assert list(map(str, policy.problems)) == [
        f"hours 1: gpus_per_user: {why}; set a lower gpus_per_user at the top of the file, or a higher one here",
        f"hours 1: max_time: {why}, and no limit applies outside of them; set a lower max_time at the top of the file",
    ]


def test_hours_that_set_no_limit_are_reported_and_others_stay_in_force(place: Place) -> None:
    policy = place.read('gpus_per_user = 1\n[[hours]]\nstart = "08:00"\n[[hours]]\ngpus_per_user = 3\n')
    (problem,) = policy.problems
    assert str(problem).startswith("hours 1: has no effect, because it sets no limit; ")
    assert policy.sentences == ["1 GPU for each user", "daily 00:00-24:00: 3 GPUs for each user"]


clocks = st.builds("{:02}:{:02}".format, st.integers(0, 23), st.integers(0, 59)) | st.just("24:00")


@given(
    days=st.lists(st.sampled_from(DAYS), min_size=1),
    start=clocks,
    end=clocks,
    minute=st.integers(0, 7 * 1440 - 1),
)
def test_hours_include_exactly_the_minutes_between_their_start_and_end(days, start, end, minute) -> None:
    def of_day(clock: str) -> int:
        return 60 * int(clock[:2]) + int(clock[3:])

    length = of_day(end) - of_day(start) if of_day(start) < of_day(end) else of_day(end) + 1440 - of_day(start)
    begins = [1440 * DAYS.index(day) + of_day(start) for day in days]
    included = any((minute - begin) % (7 * 1440) < length for begin in begins)
    local = datetime(2026, 11, 2 + minute // 1440, minute % 1440 // 60, minute % 60)
    assert Hours(days=days, start=start, end=end).include(local) == included


def test_the_policy_is_described_in_words(place: Place) -> None:
    assert place.read(NIGHTS).sentences == [
        "4 GPUs for each user, jobs of at most 4 h 00 min",
        "mon-fri 20:00-08:00: 8 GPUs for each user, jobs of at most 12 h 00 min",
        "sat,sun 00:00-24:00: 6 GPUs for each user, jobs of at most 4 h 00 min",
    ]
    idle = place.read('stop_idle_after = "2h"')
    assert idle.sentences == ["no limits", "jobs that leave their GPUs idle stop after 2 h 00 min"]
