"""The log of a job on another host."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from sae_tui.hosts.follower import FarLogReader
from sae_tui.hosts.hosts import Hosts
from sae_tui.jobs.view.logs import LogLine
from sae_tui.jobs.view.reader import JobView
from sae_tui.screens.far_actions import view_of
from sae_tui.screens.log import LogScreen
from sae_tui.session import Session


class FarLogScreen(LogScreen):
    """Follows the log of one rank over ssh."""

    def __init__(self, session: Session, hosts: Hosts, host: str, job: JobView) -> None:
        super().__init__(session, job.id, job.world_size)
        self._hosts, self._host, self._far_job = hosts, host, job

    @property
    def sources(self) -> list[str]:
        return [str(rank) for rank in range(self._far_job.world_size)]

    @property
    def job(self) -> JobView | None:
        view = view_of(self.session, self._host)
        self._far_job = (view and view.job(self.job_id)) or self._far_job
        return self._far_job

    @property
    def place(self) -> str:
        return f" on {self._host}"

    def reader(self, on_lines: Callable[[Sequence[LogLine]], object]) -> FarLogReader:
        rank = self.source
        argv = self._hosts.argv(self._host, "stream", "--log", str(self.job_id), "--rank", rank)

        def pass_on(texts: Sequence[str], unfinished: str | None) -> None:
            last = [] if unfinished is None else [LogLine(rank, unfinished, is_unfinished=True)]
            on_lines([*(LogLine(rank, text) for text in texts), *last])

        return FarLogReader(self._host, argv, pass_on)
