"""Tests that the widget classes in the app's CSS exist, because Textual ignores selectors with unknown classes."""

import re
from collections.abc import Iterator
from pathlib import Path

import textual.screen
import textual.widgets
from textual.widget import Widget

import sae_tui

ROOT = Path(sae_tui.__file__).parent
STYLES = re.compile(r'CSS[^=\n]*= """(.*?)"""|CSS[^=\n]*= "(.*?)"', re.DOTALL)


def sheets() -> Iterator[tuple[str, str]]:
    """Yield the file name and the text of each style sheet."""
    for file in ROOT.rglob("*.tcss"):
        yield file.name, file.read_text()
    for file in ROOT.rglob("*.py"):
        for found in STYLES.finditer(file.read_text()):
            yield file.name, found[1] or found[2]


def types_in(sheet: str) -> set[str]:
    """Return the widget classes in a style sheet's selectors."""
    selectors = re.sub(r"/\*.*?\*/|\{[^}]*\}", " ", sheet, flags=re.DOTALL)
    return set(re.findall(r"(?<![\w.#:$-])[A-Z]\w*", selectors))


def subclasses(kind: type) -> Iterator[type]:
    for one in kind.__subclasses__():
        yield one
        yield from subclasses(one)


def test_every_widget_class_in_a_css_selector_exists() -> None:
    ours = {
        name for file in ROOT.rglob("*.py") for name in re.findall(r"^ *class (\w+)", file.read_text(), re.MULTILINE)
    }
    known = ours | {one.__name__ for one in subclasses(Widget)} | set(textual.widgets.__all__)
    unknown = {(file, name) for file, sheet in sheets() for name in types_in(sheet) - known}
    assert unknown == set()
    assert sum(len(types_in(sheet)) for _, sheet in sheets()) > 50
