"""How the screens look. After a deliberate change: `pytest tests/tui/test_snapshots.py --snapshot-update`."""

from __future__ import annotations

import pytest
from support.tui import NOW, StillMonitor, record_job, record_metrics, wait_until

from sae_tui.doctor.base import Finding
from sae_tui.gpu.simulated import Simulated
from sae_tui.panels.preview import PreviewPanel, PreviewText
from sae_tui.screens.compare import CompareScreen
from sae_tui.screens.doctor import DoctorScreen
from trainer.contract.settings.job_file import dump_job, parse_job
from trainer.contract.store.states import JobState

SMALL, LARGE = (80, 24), (120, 40)


@pytest.fixture
def box(data):
    """Record two jobs of the past and one that runs."""
    record_job(
        data, "gpt2-l6-k64", JobState.FAILED, error="rank 1 was killed (SIGKILL)", gpu_ids=(0,), gpu_uuids=("a",)
    )
    record_job(data, "minilm-l3", JobState.FINISHED, step=400, total_steps=400, loss=21.5, fvu=0.142, l0=32.0,
               tokens=1_638_400, tokens_per_s=15_100.0, output_path="saes/2")  # fmt: skip
    uuids = ("GPU-51a0-sim-0", "GPU-51a0-sim-1")
    running = record_job(data, "minilm-l3-wide", JobState.RUNNING, world_size=2, mode="ddp", total_steps=400,
                         gpu_ids=(0, 1), gpu_uuids=uuids, distributed=True,
                         estimated_memory_bytes=310 << 20)  # fmt: skip
    record_metrics(data, running)
    return running


def monitor(gpus: int = 4, faults: dict | None = None, *, busy: bool = True) -> StillMonitor:
    clock = [NOW]
    ours = {"GPU-51a0-sim-0": (1, 3 << 30), "GPU-51a0-sim-1": (2, 3 << 30)} if busy else {}
    still = StillMonitor(
        source=Simulated(
            gpus,
            clock=lambda: clock[0],
            occupied=lambda: ours,
            faults=faults or {},
        ),
        samples=0,
    )
    for _ in range(90):
        clock[0] += 1
        still.step()
    return still


async def dashboard(pilot) -> None:
    """Wait until the dashboard shows the cards, the three jobs and, where there is room, the one under the cursor."""
    app = pilot.app
    await wait_until(pilot, lambda: len(app.session.jobs) == 3 and app.session.jobs[0].step == 200)
    app.screen.show_gpus()
    app.screen.show_jobs()
    preview = app.screen.query_one(PreviewText)
    await wait_until(pilot, lambda: not app.screen.query_one(PreviewPanel).display or preview.plain)
    await pilot.pause()


@pytest.mark.parametrize("size", [SMALL, LARGE], ids=["80x24", "120x40"])
@pytest.mark.parametrize("view", ["aggregated", "per_gpu"])
@pytest.mark.parametrize("gpus", [4, 8])
def test_dashboard(snap_compare, make_app, box, size, view, gpus) -> None:
    app = make_app(monitor=monitor(gpus, {5: "lost", 6: "no_power"}), monitor_view_default=view)
    assert snap_compare(app, terminal_size=size, run_before=dashboard)


def test_dashboard_in_light_colours(snap_compare, make_app, box) -> None:
    app = make_app(monitor=monitor(), theme="light")
    assert snap_compare(app, terminal_size=LARGE, run_before=dashboard)


@pytest.mark.parametrize("size", [SMALL, LARGE], ids=["80x24", "120x40"])
def test_launch(snap_compare, make_app, size) -> None:
    app = make_app(monitor=monitor(4, {2: "lost"}, busy=False))

    async def ready(pilot) -> None:
        await pilot.press("n")
        await wait_until(pilot, lambda: app.screen.name == "launch" and "GPU" in app.screen.form.review.text)
        await pilot.pause()

    assert snap_compare(app, terminal_size=size, run_before=ready)


def test_launch_with_a_mistake(snap_compare, make_app) -> None:
    app = make_app(monitor=monitor(busy=False))

    async def ready(pilot) -> None:
        await pilot.press("n")
        await wait_until(pilot, lambda: app.screen.name == "launch" and "GPU" in app.screen.form.review.text)
        app.screen.query_one("#row-sae-k Input").value = "0"
        await wait_until(pilot, lambda: app.screen.form.review.errors)
        await pilot.pause()

    assert snap_compare(app, terminal_size=LARGE, run_before=ready)


@pytest.mark.parametrize("size", [SMALL, LARGE], ids=["80x24", "120x40"])
def test_job(snap_compare, make_app, box, size) -> None:
    app = make_app(monitor=monitor())

    async def ready(pilot) -> None:
        await wait_until(pilot, lambda: app.session.jobs and app.session.jobs[0].step == 200)
        app.session.go.open_job(box)
        await wait_until(pilot, lambda: app.session.detail is not None and app.session.detail.log)
        await pilot.pause()

    assert snap_compare(app, terminal_size=size, run_before=ready)


@pytest.mark.parametrize("size", [SMALL, LARGE], ids=["80x24", "120x40"])
def test_compare(snap_compare, make_app, data, size) -> None:
    ids = [record_job(data, name, JobState.FINISHED, l0=l0, config=config(k=int(l0)))
           for name, l0 in (("minilm-k32", 32.0), ("minilm-k64", 64.0), ("minilm-k16", 16.0))]  # fmt: skip
    for job_id, steps in zip(ids, (200, 300, 160), strict=True):
        record_metrics(data, job_id, steps=steps)
    app = make_app(monitor=monitor())

    async def ready(pilot) -> None:
        screen = CompareScreen(app.session, ids)
        app.session.go.switch_to(screen)
        await wait_until(pilot, lambda: len(screen.comparison.curves) == 3)
        await pilot.pause()

    assert snap_compare(app, terminal_size=size, run_before=ready)


def config(**sae: object) -> str:
    return dump_job(parse_job({"name": "x", "data": {"path": "data/sample"}, "sae": sae})[0])


def test_confirmation_before_harm(snap_compare, make_app, box) -> None:
    app = make_app(monitor=monitor())

    async def ready(pilot) -> None:
        await dashboard(pilot)
        await pilot.press("s")
        await pilot.pause()

    assert snap_compare(app, terminal_size=SMALL, run_before=ready)


FINDINGS = (
    Finding("ok", "driver", "NVIDIA driver 570.172.08, for CUDA up to 12.8; 8 GPUs"),
    Finding("error", "GPU 3", "H100: the GPU has fallen off the bus; a reboot is needed", "leave it out of jobs"),
    Finding("note", "NVLink", "GPUs 0-1 and 2-3 are linked by NVLink, the others between CPU sockets (SYS)",
            "give a job linked GPUs, such as --gpus 0,1"),
    Finding("warning", "shared memory", "/dev/shm has 64 MiB free of 64 MiB; jobs on several GPUs may fail below 1 GiB",
            "start the container with --shm-size=1g or --ipc=host"),
    *(Finding("ok", subject, "as it should be") for subject in ("open files", "locked memory", "disk", "SQLite")),
)  # fmt: skip


def test_doctor(snap_compare, make_app) -> None:
    app = make_app(monitor=monitor())

    async def ready(pilot) -> None:
        screen = DoctorScreen(lambda: FINDINGS)
        app.session.go.switch_to(screen)
        await wait_until(pilot, lambda: screen.done)
        await pilot.press("down", "down", "down")
        await pilot.pause()

    assert snap_compare(app, terminal_size=SMALL, run_before=ready)
