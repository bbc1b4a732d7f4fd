"""An example of a new kind of job, which runs a command: its settings, its plan, a rank's work and the form's texts.

python -P toy_kind.py DATA_DIR JOB_ID        a job's supervisor with this kind registered
python -P toy_kind.py rank SPEC              a rank with this kind registered
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import msgspec

from sae_tui.jobs.launch.kinds import LaunchKind
from trainer.contract.errors import Problem
from trainer.contract.planning.check_job import Proposal
from trainer.contract.planning.outlook import UnknownNeeds
from trainer.contract.settings.catalog import KINDS, KindEntry
from trainer.contract.settings.declare import about
from trainer.contract.settings.job import AnyJob, Launch
from trainer.ranks.rank import RankWork

if TYPE_CHECKING:
    from trainer.reporting.progress import RunProgress


class CommandSettings(msgspec.Struct, frozen=True):
    """The settings of this kind."""

    line: Annotated[list[str], about("The command and its arguments.", wanted='a list like ["make"]')]
    times: Annotated[int, about("How often the command runs.", ge=1)] = 1


class CommandJob(AnyJob, frozen=True, kw_only=True):
    """A job that runs a command."""

    kind: ClassVar[str] = "command"
    sections: ClassVar[Mapping[str, type[msgspec.Struct]]] = {"command": CommandSettings, "launch": Launch}

    command: CommandSettings

    @classmethod
    def conflicts(cls, sections: Mapping[str, Any], raw: Mapping[str, Any]) -> list[Problem]:
        settings: CommandSettings | None = sections["command"]
        is_empty = settings is not None and not settings.line
        return [Problem("command.line", "is empty; give a command")] if is_empty else []


class CommandProposal(Proposal[CommandJob]):
    """The proposal for a job that runs a command."""

    def problems(self) -> list[Problem]:
        often = [Problem("command.times", "is large", "warning")] if self.job.command.times > 100 else []
        return [*super().problems(), *often]

    @staticmethod
    def total_steps(job: CommandJob, devices: int) -> int:
        return job.command.times


class CommandWork(RankWork[CommandJob]):
    """A rank that runs the command."""

    def run(self, progress: RunProgress) -> bool:
        for n_done in range(1, self.total_steps + 1):
            subprocess.run(self.job.command.line, check=True)
            progress.heartbeat("running", n_done, 0)
        return True


class LaunchCommand(LaunchKind[CommandJob, UnknownNeeds]):
    """The launch form and messages for a job that runs a command."""

    heading = "Command"


ENTRY = KindEntry(
    f"{__name__}:CommandJob",
    "A command.",
    proposal=f"{__name__}:CommandProposal",
    rank=f"{__name__}:CommandWork",
    estimate="",
    launch=f"{__name__}:LaunchCommand",
    run_by="run it with `sae-tui launch`",
)


def main(argv: Sequence[str]) -> int:
    """Run a rank, or a supervisor that starts ranks with this file."""
    KINDS["command"] = ENTRY
    if argv[0] == "rank":
        from trainer.cli import main

        return main(argv)
    from sae_tui.jobs.supervisor import supervise

    return supervise.main(argv, command=lambda spec: [sys.executable, "-P", __file__, "rank", str(spec)])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
