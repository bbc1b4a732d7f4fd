"""Renders every screen in every size and theme as an SVG, and writes a page that shows all of them.

python -m support.pictures FOLDER [--only WORD] [--theme NAME] [--size 120x40], with PYTHONPATH=tests; `make pictures`.

Also writes PNGs if `rsvg-convert` or cairosvg is installed. `support.tour` makes the README's animation.
"""

from __future__ import annotations

import argparse
import asyncio
import html
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from importlib import import_module
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path

import pytest
from support.scenes import SCENES, Scene, same_everywhere
from support.tui import NOW

from sae_tui.theme import THEMES, ThemeName
from trainer.contract.paths import DataDir

SIZES = ("80x24", "120x40", "200x60")
# The cell width on the page, in pixels. Text is readable at this size, and three screenshots fit in a row.
_CELL = 4
_STYLE = "body{background:#888;font:14px sans-serif} figure{display:inline-block;margin:6px;vertical-align:top}"


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="support.pictures", description="Draw every screen.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", default="", help="only scenes whose name contains this word")
    parser.add_argument("--theme", action="append", choices=THEMES, help="only this theme; can be repeated")
    parser.add_argument("--size", action="append", choices=SIZES, help="only this size; can be repeated")
    flags = parser.parse_args(words)
    begin = time.monotonic()
    flags.folder.mkdir(parents=True, exist_ok=True)
    scenes = [scene for scene in SCENES if flags.only in scene.name]
    sizes, themes = flags.size or SIZES, flags.theme or list(THEMES)
    # Use a new process per scene, because an app leaves threads behind.
    with ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("spawn"), max_tasks_per_child=1) as pool:
        asked = [pool.submit(draw, SCENES.index(scene), flags.folder, sizes, themes) for scene in scenes]
        for one in asked:
            one.result()
    (flags.folder / "index.html").write_text(page(scenes, sizes, themes))
    n_pictures = len(scenes) * len(sizes) * len(themes)
    print(f"{n_pictures} pictures in {time.monotonic() - begin:.0f} s: {flags.folder / 'index.html'}")
    return 0


def draw(number: int, folder: Path, sizes: Sequence[str], themes: Sequence[ThemeName]) -> None:
    """Render a scene in every size and theme, each to an SVG."""
    with pytest.MonkeyPatch.context() as patch:
        same_everywhere(patch)
        # Fix the clock so that the times on the screen never change.
        patch.setattr(time, "time", lambda: NOW + 100)
        asyncio.run(_draw(SCENES[number], folder, sizes, themes))


async def _draw(scene: Scene, folder: Path, sizes: Sequence[str], themes: Sequence[ThemeName]) -> None:
    for size in sizes:
        columns, rows = map(int, size.split("x"))
        with tempfile.TemporaryDirectory() as place:
            data = DataDir(Path(place))
            data.create()
            app = scene.app(data)
            async with app.run_test(size=(columns, rows)) as pilot:
                await scene.show(pilot)
                for theme in themes:
                    app.redraw.choose_theme(theme)
                    await pilot.pause()
                    svg = app.export_screenshot(title=f"{scene.name} · {size} · {theme}")
                    file = folder / file_of(scene, size, theme)
                    file.write_text(svg)
                    as_png(file)


def file_of(scene: Scene, size: str, theme: str) -> str:
    """Return the file name of a scene's picture."""
    words = scene.name.replace(",", "").replace(" ", "-").lower()
    return f"{words}-{size}-{theme}.svg"


def page(scenes: Sequence[Scene], sizes: Sequence[str], themes: Sequence[str]) -> str:
    """Return the page: a row of pictures for each scene and theme, in the order of `sizes`."""
    parts = [f"<!doctype html><meta charset=utf-8><title>sae-tui</title><style>{_STYLE}</style>"]
    for scene in scenes:
        parts.append(f"<h2>{html.escape(scene.name)}</h2>")
        for theme in themes:
            parts += [_figure(file_of(scene, size, theme), size, theme) for size in sizes]
            parts.append("<br>")
    return "\n".join(parts)


def _figure(file: str, size: str, theme: str) -> str:
    width = int(size.split("x")[0]) * _CELL
    picture = f'<a href="{file}"><img src="{file}" width="{width}" loading="lazy" alt="{file}"></a>'
    return f"<figure>{picture}<figcaption>{size}, {theme}</figcaption></figure>"


def as_png(file: Path) -> None:
    """Write a PNG next to an SVG, if a converter is installed."""
    if program := shutil.which("rsvg-convert"):
        subprocess.run([program, "--output", str(file.with_suffix(".png")), str(file)], check=True)
    elif find_spec("cairosvg"):
        import_module("cairosvg").svg2png(url=str(file), write_to=str(file.with_suffix(".png")))


if __name__ == "__main__":
    sys.exit(main())
