"""All other hosts that are watched, and what can be done on them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from sae_tui.gpu.past import Past
from sae_tui.hosts.errands import Errands
from sae_tui.hosts.follower import HostFollower
from sae_tui.hosts.view import HostView
from sae_tui.ssh import ssh_argv
from trainer.contract.settings.consent import FLAG, code_in
from trainer.contract.settings.toml import table_of


class Hosts:
    """A follower for each host; the pictures they keep may be read by any thread.

    With `demo`, their GPUs are simulated and their jobs those of their demo.
    """

    def __init__(self, names: Sequence[str], ssh: Sequence[str] = ("ssh",), *, demo: bool = False) -> None:
        """Prepare it; raise `UserError` where a name is none that ssh should be given."""
        self._ssh = tuple(ssh)
        self._flags = ("--demo",) if demo else ()
        self._on_change: Callable[[], object] = lambda: None
        self._errands = Errands(ssh)
        self._followers = {
            name: HostFollower(name, self.argv(name, "stream"), lambda: self._on_change())
            for name in dict.fromkeys(names)
        }

    def start(self, on_change: Callable[[], object]) -> None:
        """Connect to all of them; call `on_change`, on any thread, when there is news."""
        self._on_change = on_change
        for follower in self._followers.values():
            follower.start()

    def stop(self) -> None:
        """End all connections, errands as well: whoever leaves does not wait for a host."""
        for follower in self._followers.values():
            follower.stop()
        self._errands.end_all()

    def cut(self) -> None:
        """End the connections, so that the hosts close their GPU drivers; the followers soon connect again."""
        for follower in self._followers.values():
            follower.cut()

    @property
    def views(self) -> tuple[HostView, ...]:
        """Every host as it is known now, in the order they were named."""
        return tuple(follower.view for follower in self._followers.values())

    def past(self, name: str, n: int, interval_s: float) -> Past:
        """Return the last `n` intervals of every GPU of a host."""
        return self._followers[name].past(n, interval_s)

    def argv(self, name: str, *words: str) -> list[str]:
        """Return the argv that runs `sae-tui` with these words on a host."""
        return ssh_argv(name, [*words, *self._flags], self._ssh)

    def run(self, name: str, *words: str) -> str:
        """Run `sae-tui` with these words on a host; return its answer, or raise `UserError`."""
        return self._errands.run(name, [*words, *self._flags])

    def launch(self, name: str, job_file: str, gpus: str) -> str:
        """Launch a job on a host, which checks it; return its answer, or raise `UserError`.

        `gpus` are those of that host, as `--gpus` takes them: `auto:2`, `0,1` or `cpu`.
        """
        # The user has allowed the code in the form. Send the flag only if needed, since older hosts do not know it.
        allows = [FLAG] if any(code_in(table_of(job_file))) else []
        words = ["launch", "/dev/stdin", "--gpus", gpus, *allows, *self._flags]
        return self._errands.run(name, words, job_file)
