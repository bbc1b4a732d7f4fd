"""The user's settings: a TOML file that can be edited by hand.

Each mistake in the file is reported in one clear sentence.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import msgspec
from msgspec import Meta, field

from trainer.contract.errors import JobFileError, Problem, UserError
from trainer.contract.files import write_whole
from trainer.contract.paths import is_shared
from trainer.contract.settings.consent import SETTING
from trainer.contract.settings.declare import about, settings_of
from trainer.contract.settings.job import PYTHONS
from trainer.contract.settings.job_file import read_toml
from trainer.contract.settings.toml import Judged, parse_toml

# The columns that the jobs list can show.
JobColumnName = Literal[
    "k", "d_sae", "state", "progress", "percent", "step", "tokens", "loss", "fvu", "l0", "dead_fraction",
    "tokens_per_s", "eta", "took", "gpus", "memory", "arch", "started", "user", "host", "note",
]  # fmt: skip
_JOB_COLUMNS: tuple[JobColumnName, ...] = (
    "k", "d_sae", "state", "progress", "percent", "step", "loss", "fvu", "l0", "dead_fraction", "tokens_per_s", "eta",
    "gpus", "tokens", "arch", "memory", "started", "note",
)  # fmt: skip
# Headings in the settings form.
_LOOK, _LAUNCH, _HISTORY, _END = "Appearance", "Launch", "GPUs and their history", "End of a job"
_HOSTS, _ALERTS, _ENERGY = "Other hosts", "Alerts", "Energy"
_PAIR = "a list of two numbers like {}"
_TWO: dict[str, Any] = {"min_length": 2, "max_length": 2}
_Threshold = Annotated[float, Meta(ge=0, le=1000)]
# Settings that run a program or connect to another machine.
_PROGRAMS = ("on_job_end", "on_alert", "ssh_command", "hosts", "python", SETTING)
# tomlkit takes seconds to parse a larger file.
_MOST_CHANGED = 64 << 10
# Settings that are read only when the app starts, so a change takes effect after a restart.
AT_START = frozenset({"look"})


class Settings(msgspec.Struct, frozen=True):
    """All settings of the app; a job's own settings are in its job file."""

    monitor_view_default: Annotated[
        Literal["aggregated", "per_gpu", "map"], about("Dashboard view at start.", group=_LOOK)
    ] = "aggregated"
    job_columns: Annotated[
        list[JobColumnName],
        about(
            "Columns of the list of jobs after the name, in this order; narrow windows show fewer.",
            group=_LOOK,
            wanted=f"a list of {', '.join(get_args(JobColumnName))}",
            commas=True,
        ),
    ] = msgspec.field(default_factory=lambda: list(_JOB_COLUMNS))
    fold_clones: Annotated[
        bool, about("Whether a job and its clones, if at least three in all, are one row.", group=_LOOK)
    ] = False
    default_gpu_selection: Annotated[
        Literal["available", "best", "all", "manual"],
        about(
            "GPUs that the launch screen selects at first: all free ones, as few as suffice unless more are worth it, "
            "all, or none.",
            group=_LAUNCH,
        ),
    ] = "available"
    multi_gpu_enabled: Annotated[bool, about("Whether a job may use several GPUs.", group=_LAUNCH)] = True
    sampling_interval_s: Annotated[
        float, about("Interval between readings of a GPU.", group=_HISTORY, unit="s", ge=0.2, le=60)
    ] = 1.0
    history_hours: Annotated[
        float, about("How long every reading is kept.", group=_HISTORY, unit="hours", gt=0, le=720)
    ] = 24.0
    history_days: Annotated[
        float, about("How long one-minute means are kept.", group=_HISTORY, unit="days", gt=0, le=3650)
    ] = 30.0
    notify: Annotated[
        Literal["bell", "terminal", "off"],
        about("How the app reports that a job has ended; terminal: a desktop notification by OSC 9.", group=_END),
    ] = "bell"
    on_job_end: Annotated[
        list[str],
        about(
            "Command to run when a job ends; SAE_TUI_JOB_ID, _NAME, _STATE, _ERROR, _FVU (held out) and _OUTPUT"
            " describe the job.",
            group=_END,
            wanted='a list of words like ["notify-send", "done"]',
        ),
    ] = []
    hosts: Annotated[
        list[str],
        about(
            "Other hosts whose GPUs and jobs the app also shows, over ssh.",
            group=_HOSTS,
            wanted='a list like ["gpu1", "me@gpu2"]',
            commas=True,
        ),
    ] = []
    ssh_command: Annotated[
        list[str],
        about(
            "Command that connects to these hosts; empty: ssh.",
            group=_HOSTS,
            wanted='a list of words like ["ssh", "-F", "config"]',
        ),
    ] = []
    alert_heat_c: Annotated[
        float,
        about("Alert if a GPU is this close to throttling; 0: off.", group=_ALERTS, unit="°C", ge=0, le=60),
    ] = 4.0
    alert_throttling_s: Annotated[
        float,
        about(
            "Alert if heat or a lack of power throttles a GPU for this long; 0: off.",
            group=_ALERTS,
            unit="s",
            ge=0,
            le=86400,
        ),
    ] = 60.0
    alert_lost_s: Annotated[
        float,
        about("Alert if a GPU cannot be read for this long; 0: off.", group=_ALERTS, unit="s", ge=0, le=86400),
    ] = 15.0
    alert_errors_s: Annotated[
        float,
        about(
            "Alert if a GPU reports memory errors, failing rows or a fatal Xid for this long; 0: off.",
            group=_ALERTS,
            unit="s",
            ge=0,
            le=86400,
        ),
    ] = 1.0
    alert_memory_percent: Annotated[
        float,
        about("Alert if this share of a GPU's memory is in use; 0: off.", group=_ALERTS, unit="%", ge=0, le=100),
    ] = 98.0
    alert_idle_minutes: Annotated[
        float,
        about(
            "Alert if a job holds a GPU without using it for this long (at least 10); 0: off.",
            group=_ALERTS,
            unit="min",
            ge=0,
            le=10080,
        ),
    ] = 30.0
    alert_disk_gib: Annotated[
        float,
        about(
            "Alert if the data folder's disk has less free space than this; 0: off.",
            group=_ALERTS,
            unit="GiB",
            ge=0,
            le=100000,
        ),
    ] = 5.0
    on_alert: Annotated[
        list[str],
        about(
            "Command to run when an alert begins or ends; it receives the alert as JSON on standard input.",
            group=_ALERTS,
            wanted='a list of words like ["/home/me/bin/send-alert"]',
        ),
    ] = []
    python: Annotated[
        str,
        about(
            "Python from another environment for training new jobs; empty: the app's Python.",
            group=_LAUNCH,
            wanted=PYTHONS,
        ),
    ] = ""
    trusted_code: Annotated[
        list[str],
        about(
            "Code that job files may run without asking: commands, Pythons, models with code, sbatch options.",
            group=_LAUNCH,
            wanted='a list like ["/home/me/env/bin/python", "org/model", "--network=x"]',
            commas=True,
        ),
    ] = []
    price_per_kwh: Annotated[
        float, about("Price of a kWh, for the energy cost of jobs; 0: not shown.", group=_ENERGY, ge=0, le=1000)
    ] = 0.0
    currency: Annotated[str, about("Currency of the price.", group=_ENERGY, min_length=1, max_length=8)] = "EUR"
    co2_g_per_kwh: Annotated[
        float, about("CO₂ per kWh of your grid; 0: not shown.", group=_ENERGY, unit="g", ge=0, le=5000)
    ] = 0.0
    theme: Annotated[
        Literal["dark", "light", "high-contrast", "colour-blind", "terminal"],
        about("Colours of the app; terminal: the 16 colours of your terminal.", group=_LOOK),
    ] = "dark"
    look: Annotated[
        Literal["auto", "full", "plain"],
        about("Characters of the app; plain: ASCII only, auto: plain on a vt100 or the Linux console.", group=_LOOK),
    ] = "auto"

    colour_util_percent: Annotated[
        list[_Threshold],
        about("Utilisation shown in yellow, and in red.", group=_LOOK, wanted=_PAIR.format("[50, 90]"), **_TWO),
    ] = field(default_factory=lambda: [50.0, 90.0])
    colour_memory_percent: Annotated[
        list[_Threshold],
        about(
            "Share of used GPU memory shown in yellow, and in red.",
            group=_LOOK,
            wanted=_PAIR.format("[60, 90]"),
            **_TWO,
        ),
    ] = field(default_factory=lambda: [60.0, 90.0])
    colour_power_percent: Annotated[
        list[_Threshold],
        about(
            "Share of the power limit shown in yellow, and in red.",
            group=_LOOK,
            wanted=_PAIR.format("[70, 98]"),
            **_TWO,
        ),
    ] = field(default_factory=lambda: [70.0, 98.0])
    colour_heat_c: Annotated[
        list[_Threshold],
        about(
            "How many °C below the throttling point a temperature turns yellow, and how many below it turns red.",
            group=_LOOK,
            wanted=_PAIR.format("[20, 6]"),
            **_TWO,
        ),
    ] = field(default_factory=lambda: [20.0, 6.0])


def load_settings(path: Path) -> tuple[Settings, list[Problem]]:
    """Return the settings in the file and the problems found. A setting with an invalid value keeps its default."""
    if not os.path.exists(path):
        return Settings(), []
    if not path.is_file():
        # Reading a pipe could block.
        return Settings(), [Problem(str(path), "is not a plain file; remove it")]
    try:
        raw = read_toml(path, judged := Judged())
    except JobFileError as error:
        return Settings(), list(error.problems)
    settings = {setting.name: setting for setting in settings_of(Settings)}
    values: dict[str, Any] = {}
    problems = [
        Problem(name, f"is not a setting; use one of {', '.join(settings)}") for name in raw if name not in settings
    ]
    for name in raw.keys() & settings.keys():
        try:
            values[name] = settings[name].convert(raw[name])
        except ValueError as error:
            problems.append(Problem(name, f"{error} (in {path})"))
    programs = [name for name in _PROGRAMS if values.get(name)]
    if programs and (why := judged.distrust):
        for name in programs:
            del values[name]
            problems.append(Problem(name, f"will not be run, because {why}"))
    return Settings(**values), problems


def save_settings(path: Path, settings: Settings) -> None:
    """Write all settings with their help as comments.

    The write is atomic: a reader sees either the old file or the new one.
    """
    write_whole(path, settings_text(settings))


def read_settings_file(path: Path) -> dict[str, Any]:
    """Return the file's parsed content, even if settings are invalid; raise `UserError` if it cannot be read."""
    return _text_and_table(path, Judged())[1] if os.path.exists(path) else {}


def _text_and_table(path: Path, judged: Judged) -> tuple[str, dict[str, Any]]:
    """Return the file's text and its parsed content. `judged` records whether the file can be trusted."""
    texts: list[str] = []

    def keep(file: Path) -> str:
        texts.append(judged(file))
        return texts[-1]

    try:
        table = read_toml(path, keep)
    except JobFileError as error:
        raise UserError(f"{error}; correct it by hand or remove it") from None
    return texts[-1], table


def change_settings(path: Path, changes: Mapping[str, Any]) -> None:
    """Apply the changes to the file, but keep its comments, its order and invalid entries.

    A value of None removes the setting, restoring its default. Raise `UserError` if the file cannot be changed.
    """
    if not os.path.lexists(path):
        save_settings(path, msgspec.structs.replace(Settings(), **changes))
        return
    text, before = _text_and_table(path, judged := Judged())
    _refuse_to_change(path, before, judged.distrust)
    if len(text) > _MOST_CHANGED:
        raise UserError(f"{path} is larger than {_MOST_CHANGED >> 10} KiB; edit it by hand")
    text, after = _with_changes(text, changes)
    if after != {name: value for name, value in {**before, **changes}.items() if value is not None}:
        names = ", ".join(changes)
        raise UserError(f"the app cannot change {names} in the format of {path}; edit the file by hand")
    write_whole(path, text)


def _with_changes(text: str, changes: Mapping[str, Any]) -> tuple[str, dict[str, Any] | None]:
    """Return the TOML text with the changes, and its parsed content (None if tomlkit fails)."""
    import tomlkit

    try:
        document = tomlkit.parse(text)
        for name, value in changes.items():
            document.pop(name, None) if value is None else document.update({name: value})
        text = tomlkit.dumps(document)
        return text, parse_toml(text)
    except Exception:
        # tomlkit rejects some files that tomllib accepts, with various exceptions.
        return text, None


def _refuse_to_change(path: Path, table: Mapping[str, Any], distrust: str) -> None:
    """Raise `UserError` if writing would replace a symbolic link or run another user's commands as this user."""
    if path.is_symlink():
        raise UserError(f"{path} is a symbolic link, which the app would replace; edit {path.resolve()} by hand")
    if distrust and any(table.get(name) for name in _PROGRAMS) and not is_shared(path.parent):
        raise UserError(f"{distrust}, but read it first: its commands would run as you")


def settings_text(settings: Settings) -> str:
    """Return the settings as a commented TOML file."""
    import tomli_w

    lines = ["# Settings of sae-tui."]
    for setting in settings_of(Settings):
        takes = f" It is {setting.wanted}."
        entry = tomli_w.dumps({setting.name: getattr(settings, setting.name)})
        lines += ["", f"# {setting.help}{takes}", entry.strip()]
    return "\n".join(lines) + "\n"
