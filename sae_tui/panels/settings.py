"""A job's settings, tags and note."""

from __future__ import annotations

from collections.abc import Iterator

from sae_tui.format import fit, wrap
from sae_tui.jobs.launch.summary import settled, summary
from sae_tui.jobs.output import names_of_hooks
from sae_tui.jobs.view.reader import JobView
from sae_tui.jobs.view.watcher import JobDetail
from sae_tui.panels.detail import DetailPanel
from sae_tui.panels.headline import memory_words
from sae_tui.widgets.lines import Line

_LONGEST_NAME, _LONGEST_DEFAULT = 16, 22


class SettingsPanel(DetailPanel, can_focus=True):
    """One line per setting. Long values are wrapped, and the panel scrolls if not all lines fit."""

    DEFAULT_CSS = "SettingsPanel { height: 1fr; width: 1fr; }"

    _shows_defaults = False

    def title(self, detail: JobDetail) -> Line:
        return (("Settings", "title"),)

    def toggle_defaults(self) -> None:
        """Show or hide settings with default values."""
        self._shows_defaults = not self._shows_defaults
        self._draw()

    def lines(self, detail: JobDetail) -> list[Line]:
        width = self.size.width
        settings, others = summary(detail.view.config, settled(detail.plan, detail.view.total_steps))
        environment = detail.use.environment if detail.use else ""
        more = [
            *_hooks(detail.view),
            *_more(detail.view, environment),
            *([("energy", detail.energy)] if detail.energy else []),
        ]
        named = (*settings, *more, *(others if self._shows_defaults else ()), ("", ""))
        longest = _LONGEST_DEFAULT if self._shows_defaults else _LONGEST_NAME
        name_width = min(longest, max(len(name) for name, _ in named))
        lines: list[Line] = []
        for name, value in settings:
            lines += _entry(name, value, name_width, width)
        if others:
            what = "hides" if self._shows_defaults else "shows"
            lines += _entry("", f"{len(others)} more at their defaults; ⏎ {what} them", 0, width)
        for name, value in others if self._shows_defaults else ():
            lines += _entry(name, value, name_width, width)
        lines.append((("", "text"),))
        for name, value in more:
            lines += _entry(name, value, name_width, width)
        return lines


def _hooks(job: JobView) -> list[tuple[str, str]]:
    """Return the extraction hooks that have alternative names, each with these names."""
    return [(hook, ", ".join(names)) for hook, names in names_of_hooks(job).items() if names]


def _more(job: JobView, environment: str) -> list[tuple[str, str]]:
    """Return the remaining non-empty fields of the job, as (name, value) pairs.

    `environment` is the virtual environment in which a command runs, or "".
    """
    fields = [
        ("environment", environment),
        ("tags", " ".join(f"#{tag}" for tag in job.tags)),
        ("note", job.note),
        ("clone of", f"job {job.parent}" if job.parent else ""),
        ("output", job.output_path or ""),
        ("memory", next(iter(memory_words(job)), "")),
    ]
    return [(name, value) for name, value in fields if value]


def _entry(name: str, value: str, name_width: int, width: int) -> Iterator[Line]:
    """Yield the lines for a setting, like ` k 32`. A long name is truncated; a long value is wrapped."""
    margin = name_width + 1 if name_width else 0
    space = max(8, width - margin - 2)
    style = "text" if name else "dim"
    for row, part in enumerate(wrap(value, space) or [""]):
        label = fit(fit(name if row == 0 else "", name_width), margin)
        yield (f" {label}", "label"), (fit(part, space), style)
