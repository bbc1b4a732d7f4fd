"""Tests that text written by other users cannot control the terminal on any screen or in any command's output."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import pkgutil
import re
import shutil
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import tomli_w
from support.box import CTRL_O, ENTER, ESC, ROOT, Box
from support.driver import environment
from support.far_side import far_side
from support.features import features_file
from support.other_users import PIECES, Texts, leaked, taken_for_markup
from support.report_cards import put_card
from support.terminal import Terminal
from support.tui import record_metrics
from textual.screen import Screen

import sae_tui
from sae_tui.cli_commands.parser import make_parser
from trainer.contract.paths import DataDir
from trainer.contract.process import ProcessRef
from trainer.contract.runs.features import FEATURES
from trainer.contract.store.job_store import Control
from trainer.contract.store.metrics_store import Heartbeat, MetricRow, SeriesWriter
from trainer.contract.store.rows import Event
from trainer.contract.store.states import JobState
from trainer.parser import make_parser as trainer_parser

FOREIGN = """
name = "x"
[data]
path = "shards"
[sae]
d_sae = 768
k = 16
[launch]
gpus = [0]
"""
CTRL_E, CTRL_F = "\x05", "\x06"
# In a valid row, these columns contain only keywords and lists. All other columns contain free text.
OWN_WORDS = {
    "state", "device", "mode", "backend", "gpu_source", "config", "gpu_ids", "gpu_uuids", "after", "tags", "level",
}  # fmt: skip
# In a valid job, only these columns may contain arbitrary text; in an invalid job, every column may.
FREE = {"name", "user", "note", "error", "waits_for", "output_path", "overfitting"}
STATES = (JobState.FINISHED, JobState.FAILED, JobState.QUEUED, JobState.FINISHED, JobState.RUNNING)
USUAL, FAILED, WAITING, ODD, RUNNING = range(1, 6)


class World:
    """A data folder and a machine whose strings were all written by another user. Unique characters identify each
    string.
    """

    def __init__(self, box: Box, drivers: Path, seed: int = 0) -> None:
        self.box, self.texts, self.folder = box, Texts(seed), box.folder
        box.data = DataDir(box.folder / "data")
        self.host = self.texts.line("host")
        self._write_files()
        self._record_jobs()
        self._record_runs()
        self.process = self._start_other_user()
        fake = environment(drivers, GPUS=2, NAME=self.texts.short("GPU"), PIDS=self.process.pid)
        path = f"{self._write_programs()}:{os.environ['PATH']}"
        # An environment variable cannot contain NUL, and for the terminal it must be valid UTF-8.
        self.environment = fake | {"PATH": path, "CUDA_VISIBLE_DEVICES": "0,1", "EDITOR": "cat"}

    def _write_files(self) -> None:
        text, folder = self.texts.text, self.folder
        files = {
            "key": {text("key of a job"): 1},
            "section": {"sae": {text("key of a section"): 1}},
            "word": {"sae": {"architecture": text("architecture")}},
            "cluster": {"launch": {"backend": "slurm", "partition": text("partition asked for")}},
            "name": {"name": text("name in a file")},
            "path": {"data": {"path": self.texts.line("data path")}},
        }
        for name, table in files.items():
            (folder / f"{name}.toml").write_text(tomli_w.dumps({"name": "x", "data": {"path": "x"}} | table))
        asked = {"kind": "extract", "model": {"path": "x", "hooks": [text("hook of a model")]}, "text": {"path": "x"}}
        (folder / "extraction.toml").write_text(tomli_w.dumps(asked))
        (folder / "broken.toml").write_text(f"name = {''.join(PIECES)}")
        (folder / "foreign.toml").write_text(FOREIGN)
        shards = folder / "shards"
        shutil.copytree(ROOT / "data" / "sample", shards)
        (shards / f"{self.texts.file('shard')}.safetensors").write_bytes(b"no shard")
        self.box.data.create()
        settings = {text("setting"): 1, "theme": text("theme"), "on_job_end": [text("hook")]}
        settings |= {"monitor_view_default": "per_gpu", "notify": "off"}
        settings |= {"hosts": ["far"], "ssh_command": self._far_side()}
        self.box.data.settings_file.write_text(tomli_w.dumps(settings))
        alert = {"kind": "x", "place": "x", "place_words": "x", "words": text("alert"), "host": "x", "value": 1}
        self.box.data.alerts("x").write_text(json.dumps([alert | {"raised": time.time()}]))

    def _write_programs(self) -> Path:
        """Write scripts that replace SLURM's programs and print arbitrary text."""
        programs = self.folder / "programs"
        programs.mkdir()
        (self.folder / "partitions").write_text(self.texts.line("partition").replace(" ", ""))
        (programs / "sinfo").write_text(f"#!/bin/sh\ncat {self.folder / 'partitions'}\n")
        (programs / "squeue").write_text("#!/bin/sh\n")
        for program in programs.iterdir():
            program.chmod(0o755)
        return programs

    def _far_side(self) -> list[str]:
        """Return a command that replaces ssh and simulates a remote host that sends arbitrary text."""
        name, holder, job, line = map(self.texts.text, ("far card", "far holder", "far job", "far log"))
        jobs = f'say({{"type": "jobs", "jobs": [JOB | {{"name": {job!r}}}]}})'
        gpus = f'say({{"type": "gpus", "cards": [CARD | {{"name": {name!r}, "holder": {holder!r}}}]}})'
        log = f'say({{"type": "log", "lines": [{line!r}]}})'
        return far_side(self.folder / "far", f"say(HELLO); {jobs}; {gpus}; {log}; stay()")

    def _record_jobs(self) -> None:
        """Record jobs with values that no command writes, but that another group member could write to the store."""
        config = tomli_w.dumps(
            {"name": "x", "data": {"path": self.texts.line("stored data path")}, "sae": {"architecture": "topk"}}
        )
        usual = {"host": self.host, "total_steps": 400, "attempt": 1, "config": config, "world_size": 2}
        for state in STATES:
            self.box.record_job("job", state, supervisor=ProcessRef.current(), **usual)
        with closing(Control(self.box.data.control_db)) as control:
            control.add_event(FAILED, "failed", "?")
        with closing(sqlite3.connect(self.box.data.control_db)) as db, db:
            db.execute(
                f"INSERT INTO ranks(job_id, attempt, rank, pid, start_ticks, ended) VALUES({FAILED}, 1, 0, 1, 1, 1)"
            )
            db.execute(f"INSERT INTO requests(job_id, created) VALUES({FAILED}, 1)")
            for table, column in _texts_of(db):
                odd = f" WHERE id = {ODD}" if table == "jobs" and column not in FREE else ""
                odd = f" WHERE job_id = {FAILED}" if table == "events" else odd
                db.execute(f"UPDATE {table} SET {column} = ?{odd}", [self.texts.text(f"{table}.{column}")])
            # If the job had an error, the error would be shown instead of the reason for waiting.
            db.execute("UPDATE jobs SET error = NULL WHERE id = ?", [WAITING])
            db.execute("UPDATE jobs SET tags = json_array(?)", [self.texts.text("jobs.tags")])

    def _record_runs(self) -> None:
        for job in (USUAL, FAILED, RUNNING):
            record_metrics(self.box.data, job, steps=50, ranks=2)
            run, text = self.box.data.run(job), self.texts.text
            heartbeat = Heartbeat(text("phase"), 50, 400, 50 * 8192, 1_700_000_000.0)
            event = Event(timestamp=1_700_000_000.0, level="info", kind=text("event kind"), message=text("event"))
            with closing(SeriesWriter(run.metrics_db)) as writer:
                writer.write([MetricRow(text("metric"), step, float(step)) for step in (10, 20)], heartbeat, [event])
            run.log(0).write_text(f"a line {self.texts.log('log')}\nValueError: {self.texts.log('log error')}\n")
            run.log(1).write_text(f"a line {self.texts.log('log of rank 1')}\n")
            run.supervisor_log.write_text(f"a line {self.texts.log('log of the supervisor')}\n")
        folder = self.box.data.sae(FAILED)
        folder.mkdir(parents=True)
        (folder / "cfg.json").write_text("{}")
        tokens = {5: "the", 7: self.texts.short("token of a text"), 9: "end"}
        (folder / FEATURES).write_bytes(features_file(tokens))
        fires_on = {"tokens": [self.texts.short("token of an example")], "at": 0, "act": 1.0}
        put_card(folder, name=self.texts.short("card"), latents=[{"latent": 0, "density": 0.1, "texts": [fires_on]}])

    def _start_other_user(self) -> subprocess.Popen[bytes]:
        """Start another user's process on the GPUs, with an arbitrary command line."""
        name = os.fsencode(self.texts.file("process"))
        return subprocess.Popen([name, "-c", "import time; time.sleep(600)"], executable=sys.executable)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


def _texts_of(db: sqlite3.Connection) -> list[tuple[str, str]]:
    """Return all text columns of the store that other users can write to, as (table, column) pairs."""
    tables = [name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
    columns = [(table, *row[1:3]) for table in tables for row in db.execute(f"PRAGMA table_info({table})")]
    return [(table, name) for table, name, kind in columns if kind == "TEXT" and name not in OWN_WORDS]


@pytest.fixture
def world(box: Box, drivers: Path) -> Iterator[World]:
    made = World(box, drivers)
    yield made
    made.close()


class Visit:
    """Runs the app, records the text on its screens, and checks that only the app controls the terminal."""

    def __init__(self, world: World) -> None:
        self.world, box = world, world.box
        program = str(ROOT / "tests" / "support" / "watched_app.py")
        user = world.texts.text("user of a process")
        argv = [sys.executable, program, user, world.host, "--gpu-source", "nvml"]
        env = box.env | world.environment
        self.terminal = Terminal(argv, columns=160, rows=50, env=env, cwd=world.folder)
        box.terminals.append(self.terminal)
        self.seen: set[str] = set()
        self._read = 0
        self.to(world.texts.core("GPU"))

    def to(self, shows: str) -> None:
        """Wait until the screen shows this text, then record and check the screen's content."""
        self.terminal.wait_for(shows)
        self.seen |= self.world.texts.seen(self.terminal.text)
        assert leaked(bytes(self.terminal.raw)) == [], shows
        assert taken_for_markup(self.terminal.text) == [], shows

    def press(self, *keys: str, to: str) -> None:
        for key in keys:
            # Wait longer after a key that may open or close a screen than between the letters of a text.
            self.terminal.press(key, gap_s=0.05 if len(key) == 1 and key.isalnum() and len(keys) > 4 else 0.2)
        self.to(to)

    def press_until(self, key: str, shows: str) -> None:
        """Press a key repeatedly until the screen shows this text."""
        for _ in range(40):
            self.terminal.press(key, gap_s=0.2)
            self.terminal.read_until_quiet(0.2, 5)
            if shows in self.terminal.text:
                break
        self.to(shows)

    @property
    def screens(self) -> set[str]:
        return set((self.world.folder / "screens.txt").read_text().split())


# Maps each job file to the text that appears when the file is opened.
REFUSED = {
    "key": "key of a job", "section": "key of a section", "word": "architecture", "name": "name in a file",
    "cluster": "partition asked for", "path": "data path",
}  # fmt: skip
# Strings that no screen shows.
NOT_ON_SCREENS = [
    "event kind", "events.kind", "hook of a model", "jobs.boot_id", "jobs.host", "jobs.machine_id", "jobs.user",
    "jobs.visible_devices",
    "leases.gpu_uuid", "leases.host", "leases.user", "phase", "ranks.boot_id", "ranks.error", "requests.kind",
]  # fmt: skip


@pytest.mark.slow
def test_no_screen_lets_another_users_text_control_the_terminal(world: World) -> None:
    visit, core = Visit(world), world.texts.core
    goes = visit.press
    for label in ("jobs.name", "setting", "theme", "far card", "far holder"):
        visit.to(core(label))
    goes("V", to="Utilisation")
    goes("0", to="Details")
    visit.to(core("process"))
    goes(ESC, to="Utilisation")
    goes("t", to="Processes on 2 GPUs")
    visit.to(core("process"))
    goes(ENTER, to="host memory")
    goes(ESC, "s", to="kill it immediately")
    goes(ESC, ESC, "s", to="Stop job 5")
    goes(ESC, ENTER, to=core("event"))
    goes(ESC, "\x1b[B", "D", to="Delete job 4")
    goes(ESC, "R", to="Name of job 4")
    goes(ESC, "N", to="Note of job 4")
    goes(ESC, "#", to="Tags of job 4")
    goes(ESC, ENTER, to=core("jobs.output_path"))
    goes(ESC, "\x1b[B", ENTER, to=core("jobs.waits_for"))
    goes(ESC, "\x10", *"open 2", to="Open job 2")
    goes(ESC, ESC, "/", to="esc Clear")
    goes(*core("jobs.name"), ENTER, to="n New job")
    goes(ESC, "\x1b[B", ENTER, to=core("log error"))
    goes("i", "i", to=core("jobs.note"))
    goes("x", to="lowest held-out FVU")
    goes(ESC, "e", to="Other parts of the report card are kept")
    goes(ESC, "a", to=core("metric"))
    goes(ESC, "v", to=core("card"))
    visit.to(core("token of an example"))
    goes(ESC, "f", to=core("token of a text"))
    goes(ESC, "l", to="& Only")
    goes("]", to=core("log of rank 1"))
    goes("]", to=core("log of the supervisor"))
    goes("/", *"line", ENTER, to="with 'line'")
    # The second space moves the cursor to the other host's job.
    goes(ESC, ESC, ESC, " ", " ", "\x1b[A", "c", to="Pareto")
    visit.press_until("M", shows=core("metric"))
    goes(ESC, "y", to="Not cloned")
    goes(ESC, "n", to="F4")
    goes("\x1bOQ", " ", to=core("GPU"))
    goes("n", CTRL_O, to="Job file to open")
    goes(f"{world.folder}/foreign.toml", ENTER, to="✗ data.path")
    for name, label in REFUSED.items():
        goes(CTRL_O, to="Job file to open")
        goes(f"{world.folder}/{name}.toml", ENTER, to=core(label))
    goes(CTRL_E, to="F4")
    visit.terminal.wait_for(lambda _: "# ✗ data.path".encode() in visit.terminal.raw)
    visit.terminal.wait_for(lambda text: "# ✗ data.path" not in text)
    goes(CTRL_F, to="Find a setting")
    goes(ESC, ESC, "d", to=core("partition"))
    goes(ESC, "\x1b[F", to=core("far job"))
    goes(ENTER, to="no values yet")
    goes("v", to="Report card")
    goes(ESC, "l", to=core("far log"))
    goes(ESC, ESC, "C", to="Columns of the jobs list")
    goes(ESC, "I", to="Import the SAE in a folder")
    goes(ESC, "!", to="Messages")
    goes(ESC, ",", to=core("hook"))
    goes(ESC, "\x10", *"alerts", ENTER, to=core("alert"))
    goes(ESC, "?", to="GPUs above")
    assert sorted(world.texts.labels - visit.seen) == NOT_ON_SCREENS
    assert unseen_screens(visit.screens) == []


def unseen_screens(shown: set[str]) -> list[str]:
    """Return the names of the app's screens that have not been shown, except screens with a subclass that has."""
    for module in pkgutil.walk_packages(sae_tui.__path__, "sae_tui."):
        if module.name != "sae_tui.__main__":
            importlib.import_module(module.name)

    def is_shown(kind: type) -> bool:
        return kind.__name__ in shown or any(map(is_shown, kind.__subclasses__()))

    def below(kind: type) -> Iterator[type]:
        for one in kind.__subclasses__():
            yield from (one, *below(one))

    return [one.__name__ for one in below(Screen) if one.__module__.startswith("sae_tui.") and not is_shown(one)]


# Maps each command to the arguments it is tested with; `{...}` stands for a file created by the test.
WORDS = {
    "gpus": [[], ["0"]],
    "export-metrics": [["--once"]],
    "metrics": [[], ["--view", "per_gpu", "--since", "10m"]],
    "recommend": [["{foreign}"]],
    "select": [[], ["--json"]],
    "serve": [["--port", "{hostile}"]],
    "stream": [["--log", "{hostile}"]],
    "validate": [
        ["{key}"],
        ["{section}"],
        ["{word}"],
        ["{cluster}"],
        ["{name}"],
        ["{broken}"],
        ["{path}"],
        ["{foreign}"],
    ],
    "launch": [["{foreign}"], ["{path}", "--after", "1"], ["{hostile}"]],
    "doctor": [["{foreign}"]],
    "jobs": [[], ["{hostile}"]],
    "compare": [["1", "2"], ["1", "--metric", "{hostile}"], ["1", "--svg", "{hostile}.svg"]],
    "eval": [["{hostile}"], ["1"], ["1", "--model", "{hostile}"]],
    "import": [["{hostile}", "--data", "shards"], ["shards", "--data", "{hostile}"]],
    "features": [["1"], [str(FAILED)], [str(FAILED), "0"], ["{hostile}"], [str(FAILED), "--search", "{hostile}"]],
    "job": [["1"], ["2"], ["3"], ["4"], ["5"]],
    "stop": [["3"]],
    "logs": [["2"], ["2", "--rank", "1"]],
    "resume": [["1"]],
    "clone": [["1", "--print"], ["1"]],
    "pause": [["3"]],
    "hold": [["3"]],
    "release": [["3"]],
    "priority": [["3", "5"]],
    "after": [["3", "1"]],
    "rename": [["3", "{hostile}"], ["3", "new"]],
    "tag": [["1", "{hostile}"], ["1", "new"]],
    "note": [["1", "{hostile}"], ["1", "new"]],
    "completion": [["{hostile}"]],
    "export": [["1", "--out", "{hostile}"], ["{hostile}", "--out", "x"]],
    "schema": [["{hostile}"], ["gpus"]],
    "skill": [[]],
    "repair": [[], ["{hostile}"]],
    "rm": [["1", "--yes"]],
    "run": [
        ["--gpus", "{hostile}", "--", "true"],
        ["--gpus", "0", "--hold", "--name", "{hostile}", "--", "echo", "{hostile}"],
        ["--gpus", "0", "--grid", "a={hostile}", "--", "true"],
    ],
    "adopt": [["{hostile}"], ["4194304"]],
    "receive": [["{hostile}"]],
}
TRAINER_WORDS = {
    "run": [["{word}"], ["{path}", "--set", "{hostile}=1"], ["{foreign}", "--out", "{hostile}"]],
    "extract": [["extraction.toml"], ["{path}"], ["{hostile}"]],
    "inspect": [["shards"], ["{hostile}"]],
    "join": [["{path}", "--out", "{hostile}"]],
    "resume": [["{hostile}"], ["data/runs/1"]],
    "stop": [["{hostile}"], ["data/runs/1"], ["data/runs/1", "--finish", "--json"]],
    "export": [
        ["data/runs/1", "--out", "x", "--format", "{hostile}"],
        ["data/runs/1", "--out", "x", "--push", "{hostile}", "--yes"],
    ],
    "import": [["{hostile}", "--out", "x", "--data", "shards"], ["shards", "--out", "x", "--data", "{hostile}"]],
    "eval": [["{hostile}"], ["data/runs/1"]],
    "estimate": [["{foreign}"], ["{path}"], ["{broken}"], ["{path}", "{hostile}"]],
    "bench": [["{path}"]],
    "probe": [["--gpus", "{hostile}"]],
    "self-test": [["--gpus", "{hostile}"]],
    "rank": [["{hostile}"]],
}
# Strings that no command prints.
NOT_BY_COMMANDS = [
    "alert", "card", "far card", "far holder", "far job", "far log", "hook", "jobs.boot_id", "jobs.machine_id",
    "jobs.visible_devices", "leases.gpu_uuid", "leases.host", "leases.user",
    "log of the supervisor", "requests.kind", "stored data path", "token of an example",
]  # fmt: skip
ALL = """
import contextlib, json, sys
from support.watched_app import ask_no_torch, name_other_users
import sae_tui.cli, trainer.cli
user, host, lines = json.load(open("lines.json"))
name_other_users(user, host)
ask_no_torch()
for argv in lines:
    main = trainer.cli.main if argv[0] == "trainer" else sae_tui.cli.main
    sys.argv = argv
    main(argv[1:])
    print("<after>", flush=True)
"""


# A progress bar moves the cursor to the start of the line before it writes or erases text.
PROGRESS = re.compile(rb"\r([ \w]*\|)|\r +\r")


def commands_of(parser: argparse.ArgumentParser) -> set[str]:
    (subparsers,) = [one for one in parser._actions if isinstance(one, argparse._SubParsersAction)]
    return set(subparsers.choices)


def lines_of(world: World) -> list[list[str]]:
    """Return each of the app's command lines twice, for text and JSON output, and each trainer command line once."""
    names = {
        name: f"{name}.toml" for name in ("key", "section", "word", "name", "cluster", "broken", "path", "foreign")
    }
    names["hostile"] = world.texts.file("word")
    filled = {
        program: [
            [command, *(word.format(**names) for word in words)]
            for command, all_words in words_of.items()
            for words in all_words
        ]
        for program, words_of in (("app", WORDS), ("trainer", TRAINER_WORDS))
    }
    shown = [["app", "--gpu-source", "nvml", *line, *form] for line in filled["app"] for form in ([], ["--json"])]
    return [*shown, *(["trainer", *line] for line in filled["trainer"])]


@pytest.mark.slow
def test_no_command_lets_another_users_text_control_the_terminal(world: World) -> None:
    assert commands_of(make_parser(lambda *_: 0)) == WORDS.keys()
    assert commands_of(trainer_parser()) == TRAINER_WORDS.keys()
    lines = lines_of(world)
    user = world.texts.text("user of a process")
    (world.folder / "lines.json").write_text(json.dumps([user, world.host, lines]))
    env = world.box.env | world.environment | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    terminal = Terminal([sys.executable, "-c", ALL], env=env, cwd=world.folder, emulated=False)
    world.box.terminals.append(terminal)
    assert terminal.wait_for_exit(120) == 0, terminal.raw[-2000:].decode(errors="replace")
    raw = bytes(terminal.raw)
    parts = raw.split(b"<after>\r\n")
    assert len(parts) == len(lines) + 1
    for one, line in zip(parts, lines, strict=False):
        shown = PROGRESS.sub(rb"\1", one.replace(b"\r\n", b"").replace(b"\t", b""))
        assert leaked(shown) == [], line
        assert b"Traceback" not in one, line
    assert sorted(world.texts.labels - world.texts.seen(raw.decode())) == NOT_BY_COMMANDS


def test_the_first_start_names_the_group_that_shares_the_data_folder(box: Box) -> None:
    box.data.root.mkdir(parents=True)
    box.data.root.chmod(0o2770)
    terminal = box.app(120, 40)
    terminal.wait_for(f"{box.data.root} is shared with group ")
