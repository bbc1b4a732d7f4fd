"""What was set for a job, and what people have written to it: tags and a note."""

from __future__ import annotations

from collections.abc import Iterator

from sae_tui.format import fit, wrap
from sae_tui.jobs.launch.summary import summary
from sae_tui.jobs.output import names_of_hooks
from sae_tui.jobs.view.reader import JobView
from sae_tui.jobs.view.watcher import JobDetail
from sae_tui.panels.detail import DetailPanel
from sae_tui.panels.headline import memory_words
from sae_tui.widgets.lines import Line

_LONGEST_NAME = 16


class SettingsPanel(DetailPanel, can_focus=True):
    """A line per setting, long values below each other; scrolls where there are more than fit."""

    DEFAULT_CSS = "SettingsPanel { height: 1fr; width: 1fr; }"

    def title(self, detail: JobDetail) -> Line:
        return (("Settings", "title"),)

    def lines(self, detail: JobDetail) -> list[Line]:
        width = self.size.width
        settings, n_others = summary(detail.view.config)
        more = [*_hooks(detail.view), *_more(detail.view), *([("energy", detail.energy)] if detail.energy else [])]
        name_width = min(_LONGEST_NAME, max(len(name) for name, _ in (*settings, *more, ("", ""))))
        lines: list[Line] = []
        for name, value in settings:
            lines += _entry(name, value, name_width, width)
        if n_others:
            lines += _entry("", f"{n_others} more at their defaults", 0, width)
        lines.append((("", "text"),))
        for name, value in more:
            lines += _entry(name, value, name_width, width)
        return lines


def _hooks(job: JobView) -> list[tuple[str, str]]:
    """Return for each hook of an extraction, with its name, the other names of its place."""
    return [(hook, ", ".join(names)) for hook, names in names_of_hooks(job).items() if names]


def _more(job: JobView) -> list[tuple[str, str]]:
    """Return (name, value) of what else is known of a job, each where there is any."""
    fields = [
        ("tags", " ".join(f"#{tag}" for tag in job.tags)),
        ("note", job.note),
        ("clone of", f"job {job.parent}" if job.parent else ""),
        ("output", job.output_path or ""),
        ("memory", next(iter(memory_words(job)), "")),
    ]
    return [(name, value) for name, value in fields if value]


def _entry(name: str, value: str, name_width: int, width: int) -> Iterator[Line]:
    """Yield the lines of a setting, like ` k             32`; cut a long name, wrap a long value."""
    margin = name_width + 1 if name_width else 0
    room = max(8, width - margin - 2)
    style = "text" if name else "dim"
    for row, part in enumerate(wrap(value, room) or [""]):
        label = fit(name if row == 0 else "", margin)
        yield (f" {label}", "label"), (fit(part, room), style)
