"""Jobs on other hosts as rows in the jobs table, below a heading for each host."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from sae_tui.hosts.view import ConnectionStage, HostView
from sae_tui.jobs.view.find import find
from sae_tui.jobs.view.reader import JobView
from sae_tui.panels.job_columns import columns_of
from sae_tui.panels.jobs import job_row
from sae_tui.ssh import by_hand
from sae_tui.widgets.lines import Span
from sae_tui.widgets.table import Row
from trainer.contract.wording import plural

_SEPARATOR = " "  # separates the host from the id in a row's key; host names contain no space


def key_of(host: str, job_id: int) -> str:
    return f"{host}{_SEPARATOR}{job_id}"


def parse_key(key: str | None) -> tuple[str, int] | None:
    """Return the host and job id from a row's key, or None if the row is not a remote job."""
    host, _, job_id = (key or "").rpartition(_SEPARATOR)
    return (host, int(job_id)) if host and job_id.isdecimal() else None


def there(host: str, job_id: int, command: str) -> str:
    """Return a sentence with the command to run on a job's host, such as `rm ID`."""
    return f"Job {job_id} is on {host}, so use `{by_hand(host, command.replace('ID', str(job_id)))}`."


class FarRows:
    """Builds the rows for remote jobs, reusing the row of any unchanged job."""

    def __init__(self) -> None:
        self._made: dict[str, tuple[JobView, Row]] = {}
        self._columns: Sequence[str] = ()

    def rows(self, views: Sequence[HostView], words: str, sort: tuple[str, bool], columns: Sequence[str]) -> list[Row]:
        """Return, for each host, a heading and its matching jobs; `sort` is an order and whether it is reversed."""
        order, reverse = sort
        if columns != self._columns:
            self._made, self._columns = {}, columns
        made: dict[str, tuple[JobView, Row]] = {}
        rows: list[Row] = []
        for view in views:
            matches = find(view.jobs, words, order, reverse=reverse)
            rows.append(heading(view.name, columns, _note(view, len(matches), filtered=bool(words))))
            for job in matches:
                key = key_of(view.name, job.id)
                old = self._made.get(key)
                made[key] = old if old and old[0] == job else (job, replace(job_row(job, columns), key=key))
                rows.append(made[key][1])
        self._made = made
        return rows


def heading(name: str, columns: Sequence[str], note: str) -> Row:
    """Return a heading with a host name and a note; the cursor skips this row."""
    text: Span = (f" {name}{' · ' if note else ''}{note}", "accent")
    empty: Span = ("", "text")
    n_others = len(columns_of(tuple(columns))) - 1
    return Row(f"{name}{_SEPARATOR}", (text, *[empty] * n_others), spill=(0,), is_heading=True)


def _note(view: HostView, n_matching: int, *, filtered: bool) -> str:
    if view.stage in (ConnectionStage.SILENT, ConnectionStage.CUT):
        return f"as of {time.strftime('%H:%M:%S', time.localtime(view.since))}"
    if not view.is_connected:
        return "connecting…" if view.stage is ConnectionStage.CONNECTING else "not connected"
    if view.jobs_problem:
        return f"⚠ {view.jobs_problem}"
    if filtered:
        return f"{n_matching} of {len(view.jobs)}"
    older = f"and {view.more} older" if view.more else ""
    return older if view.jobs else "no jobs"


def local_note(n_jobs: int) -> str:
    """Return the note after this host's name."""
    return f"this host, {plural(n_jobs, 'job')}" if n_jobs else "this host, no jobs yet: n launches one"
