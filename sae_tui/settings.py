"""The user's settings: a TOML file that can be edited by hand, checked with one sentence per mistake."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from trainer.contract.errors import JobFileError, Problem, UserError
from trainer.contract.files import write_whole
from trainer.contract.settings.job import PYTHONS
from trainer.contract.settings.job_file import read_toml
from trainer.contract.settings.knobs import about, knobs_of
from trainer.contract.settings.toml import Judged, parse_toml, read_plain_text


class Settings(msgspec.Struct, frozen=True):
    """Everything that can be set; a job's own settings are in its job file."""

    monitor_view_default: Annotated[
        Literal["aggregated", "per_gpu", "map"], about("What the dashboard shows first.")
    ] = "aggregated"
    default_gpu_selection: Annotated[
        Literal["available", "all", "manual"], about("Which GPUs the launch screen ticks: all free ones, all, or none.")
    ] = "available"
    multi_gpu_enabled: Annotated[bool, about("Whether a job may use more than one GPU.")] = True
    sampling_interval_s: Annotated[float, about("Time between two readings of a GPU.", unit="s", ge=0.2, le=60)] = 1.0
    history_hours: Annotated[float, about("How long every reading is kept.", unit="hours", gt=0, le=720)] = 24.0
    history_days: Annotated[float, about("How long one-minute means are kept.", unit="days", gt=0, le=3650)] = 30.0
    notify: Annotated[
        Literal["bell", "terminal", "off"], about("How the app tells that a job has ended; terminal: a note by OSC 9.")
    ] = "bell"
    on_job_end: Annotated[
        list[str],
        about(
            "A command to run when a job ends; SAE_TUI_JOB_ID, _NAME, _STATE, _ERROR, _FVU, _OUTPUT tell it which.",
            wanted='a list of words like ["notify-send", "done"]',
        ),
    ] = []
    hosts: Annotated[
        list[str],
        about("Other hosts whose GPUs and jobs are shown too, over ssh.", wanted='a list like ["gpu1", "me@gpu2"]'),
    ] = []
    ssh_command: Annotated[
        list[str],
        about("The command that reaches them; empty: ssh.", wanted='a list of words like ["ssh", "-F", "config"]'),
    ] = []
    alert_heat_c: Annotated[
        float, about("Alert where a GPU is so near to where it slows down; 0 for none.", unit="°C", ge=0, le=60)
    ] = 4.0
    alert_throttling_s: Annotated[
        float,
        about("Alert where heat or lack of power slow a GPU down for so long; 0 for none.", unit="s", ge=0, le=86400),
    ] = 60.0
    alert_lost_s: Annotated[
        float, about("Alert where a GPU cannot be read for so long; 0 for none.", unit="s", ge=0, le=86400)
    ] = 15.0
    alert_memory_percent: Annotated[
        float, about("Alert where so much of a GPU's memory is in use; 0 for none.", unit="%", ge=0, le=100)
    ] = 98.0
    alert_idle_minutes: Annotated[
        float,
        about(
            "Alert where a job does not use a GPU that it has for so long, 10 at least; 0 for none.",
            unit="min",
            ge=0,
            le=10080,
        ),
    ] = 30.0
    alert_disk_gib: Annotated[
        float,
        about("Alert where so little is left on the disk of the data folder; 0 for none.", unit="GiB", ge=0, le=100000),
    ] = 5.0
    on_alert: Annotated[
        list[str],
        about(
            "A command to run when an alert begins or ends, with what it is as JSON on its standard input.",
            wanted='a list of words like ["/home/me/bin/tell-slack"]',
        ),
    ] = []
    python: Annotated[
        str, about("The Python of another environment that trains new jobs; empty: the app's.", wanted=PYTHONS)
    ] = ""
    price_per_kwh: Annotated[float, about("What a kWh costs, for the price of a job; 0 shows none.", ge=0, le=1000)] = (
        0.0
    )
    currency: Annotated[str, about("What that price is in.", min_length=1, max_length=8)] = "EUR"
    co2_g_per_kwh: Annotated[
        float, about("CO₂ of a kWh, as your grid has it; 0 shows none.", unit="g", ge=0, le=5000)
    ] = 0.0
    theme: Annotated[
        Literal["dark", "light", "high-contrast", "colour-blind", "terminal"],
        about("Colours; terminal uses the 16 of your terminal."),
    ] = "dark"
    look: Annotated[
        Literal["auto", "full", "plain"],
        about("What is drawn with; plain is ASCII only, auto means plain on a vt100 or the Linux console."),
    ] = "auto"


def load_settings(path: Path) -> tuple[Settings, list[Problem]]:
    """Return the settings in the file and what is wrong with it; a wrong value leaves its default in place."""
    if not os.path.exists(path):
        return Settings(), []
    if not path.is_file():
        # Reading a pipe could block.
        return Settings(), [Problem(str(path), "is not a plain file; remove it")]
    try:
        raw = read_toml(path, judged := Judged())
    except JobFileError as error:
        return Settings(), list(error.problems)
    knobs = {knob.name: knob for knob in knobs_of(Settings)}
    values: dict[str, Any] = {}
    problems = [
        Problem(name, f"is not a setting; {path.name} knows {', '.join(knobs)}") for name in raw if name not in knobs
    ]
    for name in raw.keys() & knobs.keys():
        try:
            values[name] = knobs[name].convert(raw[name])
        except ValueError as error:
            problems.append(Problem(name, f"{error} (in {path})"))
    programs = [name for name in ("on_job_end", "on_alert", "ssh_command", "hosts", "python") if values.get(name)]
    if programs and (why := judged.distrust):
        for name in programs:
            del values[name]
            problems.append(Problem(name, f"is not run, for {why}"))
    return Settings(**values), problems


def save_settings(path: Path, settings: Settings) -> None:
    """Write all settings with their help as comments, in one step: a reader sees the old file or the new."""
    write_whole(path, settings_text(settings))


def change_setting(path: Path, name: str, value: str) -> None:
    """Change one line of the file and leave all others, even wrong ones; raise `UserError` where it cannot."""
    if not os.path.exists(path):
        save_settings(path, msgspec.structs.replace(Settings(), **{name: value}))
        return
    before = read_toml(path, read_plain_text)
    line = f'{name} = "{value}"'
    text, count = re.subn(rf"^[ \t]*{name}[ \t]*=.*$", line, read_plain_text(path), count=1, flags=re.MULTILINE)
    if not count:
        text = f"{text.rstrip()}\n{line}\n".lstrip()
    if parse_toml(text) != before | {name: value}:
        raise UserError(f"{path} is written in a way that {name} cannot be changed from here; write {line} yourself")
    write_whole(path, text)


def settings_text(settings: Settings) -> str:
    """Return the settings as a commented TOML file."""
    import tomli_w

    lines = ["# Settings of sae-tui."]
    for knob in knobs_of(Settings):
        takes = f" It is {knob.wanted}."
        entry = tomli_w.dumps({knob.name: getattr(settings, knob.name)})
        lines += ["", f"# {knob.help}{takes}", entry.strip()]
    return "\n".join(lines) + "\n"
