"""Every app screen with fixed data, for snapshots, pictures and screen tests.

A scene records its jobs, sets up its GPUs, and opens its screen by pressing the keys a user would press.
"""

from __future__ import annotations

import socket
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import pytest
from msgspec.structs import replace
from support import model_stub
from support.commands import command_file, record_series
from support.features import features_file
from support.report_cards import put_card
from support.tui import NOW, StillHost, StillMonitor, record_job, record_metrics, wait_until
from support.watched import put_watched, snapshot
from textual.pilot import Pilot
from textual.widgets import Input

from sae_tui.app import SaeApp
from sae_tui.doctor.base import Finding
from sae_tui.gpu.simulated import GIB, Simulated, uuid_of
from sae_tui.hosts.hosts import Hosts
from sae_tui.panels.card import CardPanel
from sae_tui.panels.latents import LatentDetail
from sae_tui.panels.preview import PreviewPanel, PreviewText
from sae_tui.panels.processes import ProcessTable
from sae_tui.panels.program import ProgramPanel
from sae_tui.panels.steered import SteeredText
from sae_tui.panels.tokens import TokenText
from sae_tui.screens import steer
from sae_tui.screens.compare import CompareScreen
from sae_tui.screens.dashboard_panels import DashboardProcesses
from sae_tui.screens.doctor import DoctorScreen
from sae_tui.settings import Settings
from sae_tui.start import other_hosts
from sae_tui.terminal.plain import Plain
from sae_tui.widgets.log_view import LogView
from sae_tui.widgets.text_field import TextField
from trainer.contract.paths import DataDir
from trainer.contract.planning import first_look
from trainer.contract.runs.features import FEATURES
from trainer.contract.runs.latent_notes import change_note
from trainer.contract.settings.job_file import dump_job, job_of
from trainer.contract.store.job_store import Control
from trainer.contract.store.states import JobState

FAULTS = {5: "lost", 6: "no_power"}
FINDINGS = (
    Finding("ok", "driver", "NVIDIA driver 570.172.08, for CUDA up to 12.8; 8 GPUs"),
    Finding("error", "GPU 3", "H100: the GPU has fallen off the bus; a reboot is needed", "do not use it for jobs"),
    Finding("note", "NVLink", "GPUs 0-1 and 2-3 are linked by NVLink, the others between CPU sockets (SYS)",
            "give a job linked GPUs, such as --gpus 0,1"),
    Finding("warning", "shared memory", "/dev/shm has 64 MiB free of 64 MiB; jobs on several GPUs may fail below 1 GiB",
            "start the container with --shm-size=1g or --ipc=host"),
    *(Finding("ok", subject, "as it should be") for subject in ("open files", "locked memory", "disk", "SQLite")),
)  # fmt: skip
_PID = 4_190_000  # not the pid of a process on this machine
_SINCE_S = 58
TRIED = "The shepherd had a lamb and 24 wooly sheep,\nand all of them went up the hill with her."
FAILURE = "rank 1 was killed (SIGKILL)"


def lively_monitor(
    gpus: int = 4,
    faults: Mapping[int, str] | None = None,
    *,
    busy: Sequence[int] = (0, 1),
    pid: int = _PID,
    since: int = 0,
) -> StillMonitor:
    """Return a monitor with 90 s of history.

    The `busy` GPUs have processes with consecutive pids, starting from `pid`. The processes start after `since`
    seconds.
    """
    clock = [NOW]
    ours = {uuid_of(index): (pid + place, 3 * GIB) for place, index in enumerate(busy)}
    source = Simulated(
        gpus, clock=lambda: clock[0], occupied=lambda: ours if clock[0] >= NOW + since else {}, faults=faults or {}
    )
    still = StillMonitor(source=source, samples=0)
    for _ in range(90):
        clock[0] += 1
        still.step()
    return still


def record_running(data: DataDir, name: str = "minilm-l3-wide", gpus: Sequence[int] = (0, 1)) -> int:
    """Record a half-finished job."""
    running = record_job(data, name, JobState.RUNNING, world_size=len(gpus), mode="ddp", total_steps=400,
                         gpu_ids=tuple(gpus), gpu_uuids=tuple(map(uuid_of, gpus)), distributed=len(gpus) > 1,
                         estimated_memory_bytes=310 << 20)  # fmt: skip
    record_metrics(data, running)
    return running


def record_box(data: DataDir) -> int:
    """Record two past jobs and one running job; return the running job's id."""
    record_job(data, "gpt2-l6-k64", JobState.FAILED, error=FAILURE, gpu_ids=(0,), gpu_uuids=("a",))
    record_job(data, "minilm-l3", JobState.FINISHED, step=400, total_steps=400, loss=21.5, fvu=0.142, l0=32.0,
               tokens=1_638_400, tokens_per_s=15_100.0, output_path="saes/2")  # fmt: skip
    return record_running(data)


def _record_command(data: DataDir) -> None:
    """Record a running command that reports its metrics."""
    argv = ("python", "probe.py", "--layer", "12")
    job_id = record_job(data, "probe.py --layer 12", JobState.RUNNING, config=command_file(*argv), total_steps=400,
                        gpu_ids=(0,), gpu_uuids=(uuid_of(0),))  # fmt: skip
    record_series(data, job_id, ["loss", "accuracy", "grad_norm"])
    data.run(job_id).log(0).write_text("".join(f"layer 12, batch {batch}: loss 0.5\n" for batch in range(200)))


def record_sweep(data: DataDir) -> list[int]:
    """Record three finished jobs that differ in k."""
    ids = [record_job(data, f"minilm-k{k}", JobState.FINISHED, l0=float(k), config=_config(k=k)) for k in (32, 64, 16)]
    for job_id, steps in zip(ids, (200, 300, 160), strict=True):
        record_metrics(data, job_id, steps=steps)
    return ids


def _config(**sae: object) -> str:
    return dump_job(job_of({"name": "x", "data": {"path": "data/sample"}, "sae": sae}))


def same_everywhere(patch: pytest.MonkeyPatch) -> None:
    """Make screens the same on every machine: no blinking cursor, a fixed host name, one kind of CPU, colours on."""
    patch.setattr(first_look, "costs", lambda: None)
    patch.setattr(Input, "cursor_blink", False, raising=False)
    patch.setattr(steer, "_seconds_since", lambda _: 4.2)
    patch.setattr(TextField, "cursor_blink", False, raising=False)
    patch.setattr(socket, "gethostname", lambda: "gpu-box")
    for name in ("VIRTUAL_ENV", "CONDA_DEFAULT_ENV", "CONDA_PREFIX"):
        patch.delenv(name, raising=False)
    patch.delenv("NO_COLOR", raising=False)
    patch.setenv("COLORTERM", "truecolor")
    patch.setenv("TZ", "UTC")


@dataclass(frozen=True)
class Scene:
    """A screen of the app: its stored data, its GPUs and the keys that open it."""

    name: str
    record: Callable[[DataDir], object]
    show: Callable[[Pilot[Any]], Awaitable[object]]
    gpus: int = 4
    view: str = "aggregated"
    busy: Sequence[int] = (0, 1)

    def app(self, data: DataDir, plain: Plain | None = None, **settings: Any) -> SaeApp:
        """Record the scene's data in an empty folder, and return an app whose values do not change over time."""
        self.record(data)
        faults = FAULTS if self.gpus > max(FAULTS) else {}
        monitor = lively_monitor(self.gpus, faults, busy=self.busy, since=_SINCE_S)
        return still_app(data, monitor, plain=plain, monitor_view_default=self.view, **settings)


def still_app(
    data: DataDir,
    monitor: StillMonitor,
    problems: tuple[Any, ...] = (),
    *,
    readonly: bool = False,
    plain: Plain | None = None,
    hosts: Hosts | None = None,
    **settings: Any,
) -> SaeApp:
    """Return an app with constant values for GPUs and host."""
    chosen = Settings(sampling_interval_s=60.0, **settings)
    app = SaeApp(
        data,
        cast(Any, monitor),
        chosen,
        problems,
        readonly=readonly,
        plain=plain,
        hosts=hosts,
        make_hosts=partial(other_hosts, (), demo=True),
    )
    app.session.host = StillHost()
    return app


def nothing(data: DataDir) -> None:
    """Record no job."""


def _set_some(data: DataDir) -> None:
    """Write a settings file with two valid settings that differ from the defaults, and an invalid setting."""
    data.settings_file.write_text('theme = "light"\nnotify = "drum"\nprice_per_kwh = 0.31\n')


def _record_two(data: DataDir) -> None:
    record_running(data, "minilm-l3", (2,))
    record_running(data)


def _record_evaluated(data: DataDir) -> None:
    """Record a finished job with a report card and features."""
    job_id = record_job(data, "minilm-l3", JobState.FINISHED, step=400, total_steps=400, fvu=0.142, l0=32.0)
    record_metrics(data, job_id)
    put_card(data.sae(job_id))
    (data.sae(job_id) / FEATURES).write_bytes(features_file())
    change_note(data.sae(job_id), 1, lambda note: replace(note, starred=True, name="articles"))


def _record_watched(data: DataDir) -> None:
    """Record a finished job that stored snapshots of two latents."""
    job_id = record_job(data, "minilm-l3", JobState.FINISHED, step=400, total_steps=400, fvu=0.142, l0=32.0)
    record_metrics(data, job_id)
    put_watched(data.run(job_id).root, *[snapshot(step) for step in (100, 200, 300, 400)])


def _record_failed(data: DataDir) -> None:
    job_id = record_job(data, "gpt2-l6-k64", JobState.FAILED, error=FAILURE, gpu_ids=(0, 1), world_size=2,
                        gpu_uuids=(uuid_of(0), uuid_of(1)), total_steps=400)  # fmt: skip
    record_metrics(data, job_id)
    with closing(Control(data.control_db)) as control:
        control.add_event(job_id, "failed", FAILURE, level="error")


async def show_dashboard(pilot: Pilot[Any]) -> None:
    """Wait until the dashboard shows the GPUs, the jobs and, if displayed, the processes and a job's preview."""
    app: Any = pilot.app
    recorded = _n_jobs(app)
    await wait_until(pilot, lambda: len(app.session.jobs) == recorded)
    running = [job for job in app.session.jobs if job.state is JobState.RUNNING]
    await wait_until(pilot, lambda: all(job.step == 200 for job in app.session.jobs[: len(running)]))
    app.screen.show_gpus()
    app.screen.show_jobs()
    processes = app.screen.query_one(DashboardProcesses)
    is_busy = any(sample.processes for sample in app.session.monitor.latest())
    await wait_until(pilot, lambda: not (processes.display and is_busy) or processes.n_rows)
    preview = app.screen.query_one(PreviewText)
    await wait_until(pilot, lambda: not app.screen.query_one(PreviewPanel).display or preview.plain)
    # The layout depends on the rows that the previous drawing has counted.
    for _ in range(2):
        app.screen.show_gpus()
        app.screen.show_jobs()
        await pilot.pause()


def _n_jobs(app: Any) -> int:
    if not app.session.data.control_db.exists():
        return 0
    with closing(Control(app.session.data.control_db, readonly=True)) as control:
        return len(control.jobs())


def _at(*keys: str, ready: Callable[[Any], object] = bool) -> Callable[[Pilot[Any]], Awaitable[None]]:
    """Return a function that presses keys on the dashboard to open a screen, and waits for each screen in between."""

    async def show(pilot: Pilot[Any]) -> None:
        await show_dashboard(pilot)
        for key in keys:
            await _open(pilot, key)
        await wait_until(pilot, lambda: ready(pilot.app))
        await pilot.pause()

    return show


async def _open(pilot: Pilot[Any], key: str) -> None:
    """Press a key that opens a screen. If the key opens a job, wait until the job is loaded."""
    app: Any = pilot.app
    before = app.screen
    await pilot.press(key)
    await wait_until(pilot, lambda: app.screen is not before and (key != "enter" or app.session.detail is not None))


def _says(panel: type[Any], words: str = "") -> Callable[[Any], bool]:
    """Return a predicate that is true if the content of a panel on the app's screen contains `words`."""
    return lambda app: any(each.plain and words in each.plain for each in app.screen.query(panel))


def _is_reviewed(app: Any) -> bool:
    return app.screen.name == "launch" and "GPU" in app.screen.form.review.text


def _is_checked(app: Any) -> bool:
    return app.screen.name == "launch" and bool(app.screen.form.review.sentences)


async def _compare(pilot: Pilot[Any]) -> None:
    app: Any = pilot.app
    await wait_until(pilot, lambda: len(app.session.jobs) == 3)
    screen = CompareScreen(app.session, sorted(job.id for job in app.session.jobs))
    app.session.go.show(screen)
    await wait_until(pilot, lambda: len(screen.comparison.curves) == 3)
    await pilot.pause()


async def _doctor(pilot: Pilot[Any]) -> None:
    app: Any = pilot.app
    screen = DoctorScreen(lambda: FINDINGS)
    app.session.go.show(screen)
    await wait_until(pilot, lambda: screen.done)
    await pilot.press("down", "down", "down")
    await pilot.pause()


def _with_model(key: str, text: str, ready: Callable[[Any], object]) -> Callable[[Pilot[Any]], Awaitable[None]]:
    """Return a function that opens a screen from the features with a stub of the model's process, and enters a text."""

    async def show(pilot: Pilot[Any]) -> None:
        app: Any = pilot.app
        app.session.model.command = (sys.executable, str(model_stub.__file__), "plain", str(app.session.data.root))
        await _at("enter", "f", ready=_says(LatentDetail, "Latent"))(pilot)
        await _open(pilot, key)
        await wait_until(pilot, lambda: app.screen.loaded)
        app.screen.query_one(TextField).text = text
        await pilot.press("enter")
        await wait_until(pilot, lambda: ready(app))
        await pilot.pause()

    return show


SCENES = (
    Scene("dashboard, no job", nothing, show_dashboard, busy=()),
    Scene("dashboard, one job", record_running, show_dashboard),
    Scene("dashboard, two jobs", _record_two, show_dashboard, busy=(0, 1, 2)),
    Scene("dashboard, eight GPUs", record_box, show_dashboard, gpus=8),
    Scene("dashboard, cards", record_box, show_dashboard, gpus=8, view="per_gpu"),
    Scene("dashboard, 64 GPUs", record_box, show_dashboard, gpus=64),
    Scene("GPU", record_running, _at("3", ready=_says(ProcessTable, "mallory"))),
    Scene("processes", record_running, _at("t", ready=_says(ProcessTable, "mallory"))),
    Scene("job, running", record_running, _at("enter")),
    Scene("job, failed", _record_failed, _at("enter")),
    Scene("metrics", record_running, _at("enter", "a")),
    Scene("log", record_running, _at("enter", "l", ready=_says(LogView, "step 200"))),
    Scene("report card", _record_evaluated, _at("enter", "v", ready=_says(CardPanel))),
    Scene("watched latents", _record_watched, _at("enter", "W", ready=_says(LatentDetail, "last snapshot"))),
    Scene("features", _record_evaluated, _at("enter", "f", ready=_says(LatentDetail, "Latent"))),
    Scene("text", _record_evaluated, _with_model("T", TRIED, _says(TokenText, "shepherd"))),
    Scene("steer", _record_evaluated, _with_model("S", "The king", _says(SteeredText, "KL"))),
    Scene("launch", nothing, _at("n", ready=_is_reviewed), busy=()),
    Scene("launch, command", nothing, _at("r", ready=_is_checked), busy=()),
    Scene("job, command", _record_command, _at("enter", ready=_says(ProgramPanel, "process")), busy=(0,)),
    Scene("settings", _set_some, _at("comma"), busy=()),
    Scene("compare", record_sweep, _compare),
    Scene("doctor", nothing, _doctor, busy=()),
    Scene("help", record_box, _at("question_mark")),
)
