"""Records an animation of the app: selects GPUs, launches and watches a training job, and compares it with a second
job.

`make pictures` runs `PYTHONPATH=tests python -m support.tour FILE.svg [--keep FOLDER]`. The GPUs are simulated, but the
two training jobs are real: each takes about half a minute on two cores.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support.doc_blocks import ROOT
from support.film import Picture, compose
from support.pictures import as_png
from support.scenes import same_everywhere
from support.tui import StillHost
from textual.pilot import Pilot

from sae_tui.app import SaeApp
from sae_tui.gpu.monitor import Monitor
from sae_tui.jobs.gpus.occupancy import Occupancy, gpu_source
from sae_tui.settings import Settings
from sae_tui.widgets.setting_form import SettingRow
from trainer.contract.paths import DataDir

SIZE = (112, 34)
# The maximum size of the animation.
LARGEST_BYTES = 900_000
_WARM_UP_S = 50.0  # the time until the plots of all GPUs are full
_LATEST_S = 600.0


class Camera:
    """Presses keys in the app and takes pictures of the screen."""

    def __init__(self, pilot: Pilot[Any]) -> None:
        self.pilot = pilot
        self.app: Any = pilot.app
        self.pictures: list[Picture] = []

    async def take(self, caption: str, seconds: float) -> None:
        """Take a picture once the app has drawn all pending updates."""
        await self.pilot.pause(0.3)
        self.pictures.append(Picture(self.app.export_screenshot(), seconds, caption))

    async def press(self, *keys: str, caption: str, seconds: float = 0.6, ready: Callable[[], object] = bool) -> None:
        """Press keys in sequence and take a picture after each; before the last picture, wait for `ready`."""
        for key in keys:
            await self.pilot.press(key)
            if key == keys[-1] and ready is not bool:
                await self.until(ready)
            await self.take(caption, seconds)

    async def go_to(self, path: str, caption: str) -> None:
        """Move down in the form until the cursor is in the setting's field."""
        while self.field() != path:
            await self.pilot.press("down")
            await self.take(caption, 0.2)

    def field(self) -> str:
        """Return the setting whose field has the cursor."""
        rows = [node for node in self.app.focused.ancestors_with_self if isinstance(node, SettingRow)]
        return rows[0].field.path if rows else ""

    async def type(self, text: str, caption: str) -> None:
        """Replace the content of the focused field, and take a picture after every third letter."""
        await self.pilot.press("ctrl+u")
        for place, letter in enumerate(text, 1):
            await self.pilot.press({"-": "minus"}.get(letter, letter))
            if place % 3 == 0 or place == len(text):
                await self.take(caption, 0.25)

    async def until(self, condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + _LATEST_S
        while not condition():
            assert time.monotonic() < deadline, self.app.screen
            await self.pilot.pause(0.05)

    def job(self, job_id: int) -> Any:
        return next((job for job in self.app.session.jobs if job.id == job_id), None)

    async def follow(self, job_id: int, caption: str, seconds: float, share: float) -> None:
        """Take a picture whenever a job has advanced by this fraction of its steps, until the job has ended."""
        while not (job := self.job(job_id)).state.is_final:
            due = job.step + max(1, int(share * (job.total_steps or 100)))
            await self.until(partial(self.has_come_to, job_id, due))
            await self.take(caption, seconds)

    def has_come_to(self, job_id: int, step: int) -> bool:
        job = self.job(job_id)
        return bool(job.state.is_final or job.step >= step)


async def tour(camera: Camera) -> int:
    """Run the tour; return the index of the picture shown without animation."""
    await camera.pilot.pause(_WARM_UP_S)
    await camera.take("see what every GPU does", 2.5)
    await choose(camera)
    await camera.press("ctrl+l", caption="ctrl+l: launch", seconds=1.2, ready=lambda: camera.job(1))
    await camera.until(lambda: camera.job(1).step)
    await camera.take("it runs without the app", 1.2)
    await camera.press("enter", caption="enter: watch", ready=lambda: camera.app.session.detail is not None)
    await camera.follow(1, "watch", 0.5, 0.1)
    # This picture is the last one in which the job is still running.
    still = len(camera.pictures) - 2
    await camera.take("watch", 1.5)
    await camera.press("f", caption="f: what its latents fire on", seconds=2.0, ready=lambda: shows(camera, "features"))
    await camera.press("down", "down", "down", caption="f: what its latents fire on", seconds=1.0)
    await camera.press("escape", caption="back", seconds=0.5)
    await again(camera)
    await compare(camera)
    return still


def shows(camera: Camera, screen: str) -> bool:
    return type(camera.app.screen).__name__.lower().startswith(screen)


def is_reviewed(camera: Camera) -> bool:
    return shows(camera, "launch") and "GPU" in camera.app.screen.form.review.text


async def choose(camera: Camera) -> None:
    """Open the launch screen, deselect the third GPU, and name the job."""
    await camera.press("n", caption="n: a new job", seconds=1.5, ready=lambda: is_reviewed(camera))
    await camera.press("down", "down", "space", caption="choose GPUs", seconds=0.7)
    await camera.press("f3", caption="settings, checked as you type", seconds=0.6)
    await camera.go_to("name", "settings, checked as you type")
    await camera.type("topk-32", "settings, checked as you type")
    await camera.take("memory and time before anything runs", 2.0)


async def again(camera: Camera) -> None:
    """Launch the same job with more active latents."""
    await camera.press("y", caption="y: again, but different", seconds=1.0, ready=lambda: shows(camera, "launch"))
    await camera.press("f3", caption="y: again, but different", seconds=0.4)
    await camera.go_to("name", "y: again, but different")
    await camera.type("topk-64", "y: again, but different")
    await camera.go_to("sae.k", "y: again, but different")
    await camera.type("64", "y: again, but different")
    await camera.take("what is changed is marked", 1.5)
    await camera.press("ctrl+l", caption="ctrl+l: launch", seconds=0.8, ready=lambda: camera.job(2))
    await camera.until(lambda: camera.job(2).step)
    await camera.follow(2, "quit, and it goes on", 0.5, 0.3)


async def compare(camera: Camera) -> None:
    """Show the curves of both runs in one plot."""
    if not shows(camera, "dashboard"):
        await camera.press("escape", caption="back", seconds=0.5)
    await camera.press("space", "down", "space", caption="space: mark", seconds=0.6)
    await camera.press(
        "c", caption="c: compare", seconds=1.5, ready=lambda: len(camera.app.screen.comparison.curves) == 2
    )
    await camera.press("3", caption="3: results", seconds=2.0)
    await camera.press("4", caption="4: FVU against L0", seconds=2.0)


async def film(folder: Path) -> tuple[list[Picture], int]:
    """Run the app on simulated GPUs in an empty folder, as `sae-tui --demo` does, and record the tour."""
    data = DataDir(folder / "sae-tui")
    data.create()
    occupancy = Occupancy(data)
    monitor = Monitor(gpu_source("simulated", occupancy), data, occupancy.jobs_by_uuid, interval_s=1.0)
    app = SaeApp(data, monitor, Settings(notify="off"))
    app.session.host = StillHost()
    async with app.run_test(size=SIZE) as pilot:
        camera = Camera(pilot)
        still = await tour(camera)
    return camera.pictures, still


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="support.tour", description="Film the app.")
    parser.add_argument("file", type=Path)
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="write each picture to this folder")
    flags = parser.parse_args(words)
    file, folder_of_each = flags.file.absolute(), flags.keep and flags.keep.absolute()
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory(prefix="demo-") as folder:
        same_everywhere(patch)
        patch.setenv("LOGNAME", "ada")
        # Copy the data so that no picture shows a path on this machine.
        shutil.copytree(ROOT / "data/sample", Path(folder, "data/sample"))
        patch.chdir(folder)
        pictures, still = asyncio.run(film(Path(folder)))
    text = compose(pictures, still=still)
    assert len(text.encode()) < LARGEST_BYTES, f"{len(text.encode()):,} bytes"
    file.write_text(text)
    if folder_of_each:
        keep(folder_of_each, pictures)
    seconds = sum(picture.seconds for picture in pictures)
    print(f"{file}: {len(pictures)} pictures, {seconds:.0f} s, {len(text.encode()) / 1000:.0f} kB")
    return 0


def keep(folder: Path, pictures: Sequence[Picture]) -> None:
    """Write each picture to a file, exactly as it appears in the animation."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(len(pictures)):
        file = folder / f"{number:03}.svg"
        file.write_text(compose(pictures, still=number, moves=False))
        as_png(file)


if __name__ == "__main__":
    sys.exit(main())
