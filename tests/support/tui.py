"""Helpers for tests of the app: a monitor with fixed values, and jobs recorded as supervisors and trainers would."""

from __future__ import annotations

import math
import sqlite3
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from typing import Any

from support.stores import put_store
from textual.pilot import Pilot
from textual.widget import Widget

from sae_tui.gpu.base import GpuSample, ProcessShares
from sae_tui.gpu.details import GpuDetails
from sae_tui.gpu.past import RecentHistory, past
from sae_tui.gpu.ring import Ring
from sae_tui.gpu.simulated import Simulated
from sae_tui.gpu.upkeep import Retention
from sae_tui.host import Host, HostLoad
from sae_tui.widgets.setting_form import SettingRow
from trainer.contract.paths import DataDir
from trainer.contract.process import ProcessRef
from trainer.contract.settings.job_file import dump_job, job_of
from trainer.contract.store.job_store import Control
from trainer.contract.store.metrics_store import Heartbeat, MetricRow, SeriesWriter
from trainer.contract.store.rows import Event, Job
from trainer.contract.store.states import JobState

NOW = 1_700_000_000.0


class StillMonitor:
    """Replaces `Monitor`, and reads its source only when the test requests a sample."""

    source_name = "simulated"
    interval_s = 1.0
    cuda = False
    stuck = False
    opening = False
    problem = ""
    hidden = ""
    looked_at: int | None = None
    shares_wanted = False

    def __init__(self, gpus: int = 4, *, source: Simulated | None = None, samples: int = 60) -> None:
        self.now = 1_700_000_000.0
        self.source = source or Simulated(gpus, clock=lambda: self.now)
        self._rings = [Ring() for _ in range(self.source.open())]
        self._latest: tuple[GpuSample, ...] = ()
        for _ in range(samples):
            self.step()

    def step(self) -> None:
        """Take one more sample from every GPU, one second later."""
        self.now += 1
        self._latest = tuple(self.source.sample(index, processes=True) for index in range(len(self._rings)))
        for ring, sample in zip(self._rings, self._latest, strict=True):
            ring.append(sample)

    def start(self) -> None: ...
    def stop(self) -> None: ...

    def change(self, interval_s: float, retention: Retention) -> None:
        self.retention = retention

    def latest(self) -> tuple[GpuSample, ...]:
        return self._latest

    def readings_s(self) -> dict[int, float]:
        return {index: 0.001 for index in range(len(self._rings))}

    def read_now(self) -> None:
        self.step()

    def want_shares(self, wanted: bool, *, every_sample: bool = False) -> None:
        self.shares_wanted = wanted

    def shares(self, index: int) -> Mapping[int, ProcessShares]:
        return self.source.shares(index, self._latest[index])

    def look_at(self, index: int | None) -> None:
        self.looked_at = index

    def details(self, index: int) -> GpuDetails | None:
        sample = self._latest[index]
        return self.source.details(index, sample) if index == self.looked_at and sample.healthy else None

    def past(self, n: int) -> RecentHistory:
        return past(dict(enumerate(self._rings)), n, interval_s=1.0, now=self.now)


class StillHost(Host):
    """A machine whose values never change."""

    def load(self) -> HostLoad:
        return HostLoad(37.0, 2.1, 8 << 30, 24 << 30, 0, 12e6, 3e6)


def record_job(
    data: DataDir, name: str, state: JobState, *, supervisor: ProcessRef | None = None, **fields: Any
) -> int:
    """Record a job in a given state. By default, its supervisor is this process."""
    written = dump_job(job_of({"name": name, "data": {"path": "data/sample"}}))
    usual: dict[str, Any] = {
        "user": "ada",
        "host": "gpu-box",
        "device": "cpu",
        "gpu_source": "simulated",
        "created": NOW,
    }
    # An imported job did not train its SAE.
    usual |= {"state": state, "ended": NOW} if state is JobState.IMPORTED else {}
    job = Job(name=name, config=str(fields.pop("config", written)), **(usual | fields))
    put_store(data.control_db, "control")
    control = Control(data.control_db)
    job_id = control.create_job(job)
    control.add_event(job_id, "queued", "waits for its GPUs")
    me = supervisor or ProcessRef.current()
    own: dict[str, Any] = {"supervisor_pid": me.pid, "supervisor_start": me.start_ticks, "boot_id": me.boot_id}
    if state is JobState.QUEUED and supervisor:
        control.update(job_id, **own)
    if state not in (JobState.QUEUED, JobState.IMPORTED):
        leased = list(zip(job.gpu_ids, job.gpu_uuids, strict=True))
        assert control.lease(control.job(job_id), leased, started=NOW, **own)
        assert state is JobState.STARTING or control.transition(job_id, JobState.RUNNING)
        assert state in (JobState.STARTING, JobState.RUNNING) or control.transition(job_id, state, ended=NOW + 60)
    control.close()
    with closing(sqlite3.connect(data.control_db)) as db, db:
        db.execute("UPDATE events SET timestamp = ?", (NOW,))
    return job_id


def record_metrics(data: DataDir, job_id: int, steps: int = 200, ranks: int = 2) -> None:
    """Write the curves of a successful run as rank 0 would."""
    paths = data.run(job_id)
    paths.create()
    put_store(paths.metrics_db, "metrics")
    rows = []
    for step in range(10, steps + 1, 10):
        fvu = 0.12 + 0.8 * math.exp(-step / 40)
        values = {"loss": 150 * fvu, "fvu": fvu, "l0": 32.0, "dead_fraction": 0.3 * math.exp(-step / 90)}
        values |= {"heldout_fvu": fvu + 0.05, "heldout_l0": 33.0} if step % 50 == 0 else {}
        rows += [MetricRow(name, step, value) for name, value in (values | {"lr": 1e-3}).items()]
        rows += [MetricRow("rank_tokens_per_s", step, 7000 + 300 * rank + step, rank) for rank in range(ranks)]
        for name, value in (("busy_ms", 98.0), ("data_ms", 1.5), ("step_ms", 131.0), ("rank_memory_bytes", 700 << 20)):
            # The first rank is slower.
            rows += [MetricRow(name, step, value * (1.3 if rank == 0 else 1.0), rank) for rank in range(ranks)]
        rows += [MetricRow("tokens_per_s", step, 14000.0 + step), MetricRow("memory_bytes", step, 700 << 20)]
    writer = SeriesWriter(paths.metrics_db)
    heartbeat = Heartbeat("training", steps, 400, steps * 8192, NOW)
    writer.write(rows, heartbeat, [Event(timestamp=NOW, level="info", kind="start", message="2 ranks, ddp, gloo")])
    writer.close()
    paths.log(0).write_text("".join(f"step {step}  loss {150 / step:.3f}\n" for step in range(10, steps + 1, 10)))


def title_of(panel: Widget) -> str:
    """Return the title in the top border of a panel."""
    return panel._border_title.plain if panel._border_title else ""


async def put_into_row(pilot: Pilot[Any], name: str, text: str) -> None:
    """Replace the text in a row of a form, such as `sae-k`, as if it had been typed; the focus stays where it is."""
    row = pilot.app.screen.query_one(f"#row-{name}", SettingRow)
    editor = row.fill()
    await wait_until(pilot, lambda: editor.is_mounted)
    editor.value = text
    await pilot.pause()


async def wait_until(pilot: Pilot[Any], condition: Callable[[], object], seconds: float = 10) -> None:
    """Let the app run until the condition is true."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, pilot.app.screen.query_one("*")
        await pilot.pause(0.02)
