"""Makes the README's picture: the app's own SVG of the demo box while a real training runs on it.

python tests/support/picture.py OUT.svg
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from pathlib import Path

from sae_tui.app import SaeApp
from sae_tui.gpu.monitor import Monitor
from sae_tui.jobs import edits
from sae_tui.jobs.cards.occupancy import Occupancy, gpu_source
from sae_tui.jobs.launch import launching
from sae_tui.jobs.launch.job_form import shipped_data
from sae_tui.jobs.launch.placement import place
from sae_tui.settings import Settings
from trainer.contract.paths import DataDir
from trainer.contract.settings.job_file import load_job


async def main(out: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        data = DataDir(Path(folder))
        data.create()
        occupancy = Occupancy(data)
        monitor = Monitor(gpu_source("simulated", occupancy), data, occupancy.jobs_by_uuid)
        app = SaeApp(data, monitor, Settings())
        async with app.run_test(size=(120, 40)) as pilot:
            await pilot.pause(20)
            for preset, gpus in (("minilm-topk", [2]), ("quick", [0, 1])):
                job = load_job(shipped_data() / "presets" / f"{preset}.toml", [f"launch.gpus={gpus}"])
                where = place(job, app.session.choices(), source_cuda=False)
                launching.launch(data, job, where, gpu_source="simulated")
                await pilot.pause(1)
            while not (len(app.session.jobs) == 2 and all(job.progress > 0.35 for job in app.session.jobs)):
                await pilot.pause(0.5)
            out.write_text(app.export_screenshot(title="sae-tui --demo"))
            for started in app.session.jobs:
                edits.stop(data, started.id)
            while not all(job.state.is_final for job in app.session.jobs):
                await pilot.pause(0.5)


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
