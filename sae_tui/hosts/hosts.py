"""All monitored hosts, and actions on them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from sae_tui.gpu.past import RecentHistory
from sae_tui.hosts.errands import Errands
from sae_tui.hosts.follower import HostFollower
from sae_tui.hosts.job_copy import JobCopy
from sae_tui.hosts.view import HostView
from sae_tui.ssh import ssh_argv
from trainer.contract.settings.consent import FLAG, code_in
from trainer.contract.settings.toml import table_of


class Hosts:
    """One follower per host. The views may be read from any thread.

    With `demo`, the hosts show simulated GPUs and demo jobs.
    """

    def __init__(self, names: Sequence[str], ssh: Sequence[str] = ("ssh",), *, demo: bool = False) -> None:
        """Create the followers; raise `UserError` if a host name is not safe to pass to ssh."""
        self._ssh = tuple(ssh)
        self._flags = ("--demo",) if demo else ()
        self._on_change: Callable[[], object] = lambda: None
        self._errands = Errands(ssh)
        self._followers = {
            name: HostFollower(name, self.argv(name, "stream"), lambda: self._on_change())
            for name in dict.fromkeys(names)
        }

    def start(self, on_change: Callable[[], object]) -> None:
        """Connect to all hosts; `on_change` is called after each change, possibly from another thread."""
        self._on_change = on_change
        for follower in self._followers.values():
            follower.start()

    def stop(self) -> None:
        """Close all connections and stop running commands, so that the app exits without waiting for a host."""
        for follower in self._followers.values():
            follower.stop()
        self._errands.end_all()

    def cut(self) -> None:
        """Close the connections, so that the hosts close their GPU drivers; the followers soon reconnect."""
        for follower in self._followers.values():
            follower.cut()

    @property
    def views(self) -> tuple[HostView, ...]:
        """The current view of each host, in the order the hosts were named."""
        return tuple(follower.view for follower in self._followers.values())

    def past(self, name: str, n: int, interval_s: float) -> RecentHistory:
        """Return the history of each GPU on a host over the last `n` intervals."""
        return self._followers[name].past(n, interval_s)

    def argv(self, name: str, *words: str) -> list[str]:
        """Return the command for running `sae-tui` with these arguments on a host."""
        return ssh_argv(name, [*words, *self._flags], self._ssh)

    def copy(self, name: str, job_id: int) -> JobCopy:
        """Return a job's copy without starting it; raise `OSError` or `UserError` if there is no space."""
        words = ("stream", "--job", str(job_id))
        argv, features = self.argv(name, *words), self.argv(name, *words, "--features")
        return JobCopy(name, job_id, argv, features, lambda: self._on_change())

    def run(self, name: str, *words: str) -> str:
        """Run `sae-tui` with these arguments on a host and return its output; raise `UserError` on failure."""
        return self._errands.run(name, [*words, *self._flags])

    def launch(self, name: str, job_file: str, gpus: str) -> str:
        """Launch a job on a host, which also validates it, and return the output; raise `UserError` on failure.

        `gpus` selects GPUs on that host in the format of `--gpus`: `auto:2`, `0,1` or `cpu`.
        """
        # The user has already allowed the job's code in the form. Pass the flag only if the job contains code, because
        # older versions lack the flag.
        allows = [FLAG] if any(code_in(table_of(job_file))) else []
        words = ["launch", "/dev/stdin", "--gpus", gpus, *allows, *self._flags]
        return self._errands.run(name, words, job_file)
