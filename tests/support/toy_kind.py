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


class ToySettings(msgspec.Struct, frozen=True):
    """The settings of this kind."""

    line: Annotated[list[str], about("The command and its arguments.", wanted='a list like ["make"]')]
    times: Annotated[int, about("How often the command runs.", ge=1)] = 1


class ToyJob(AnyJob, frozen=True, kw_only=True):
    """A job that runs a command."""

    kind: ClassVar[str] = "toy"
    sections: ClassVar[Mapping[str, type[msgspec.Struct]]] = {"toy": ToySettings, "launch": Launch}

    toy: ToySettings

    @classmethod
    def conflicts(cls, sections: Mapping[str, Any], raw: Mapping[str, Any]) -> list[Problem]:
        settings: ToySettings | None = sections["toy"]
        is_empty = settings is not None and not settings.line
        return [Problem("toy.line", "is empty; give a command")] if is_empty else []


class ToyProposal(Proposal[ToyJob]):
    """The proposal for a job that runs a command."""

    def problems(self) -> list[Problem]:
        often = [Problem("toy.times", "is large", "warning")] if self.job.toy.times > 100 else []
        return [*super().problems(), *often]

    @staticmethod
    def total_steps(job: ToyJob, devices: int) -> int:
        return job.toy.times


class ToyWork(RankWork[ToyJob]):
    """A rank that runs the command."""

    def run(self, progress: RunProgress) -> bool:
        for n_done in range(1, self.total_steps + 1):
            subprocess.run(self.job.toy.line, check=True)
            progress.heartbeat("running", n_done, 0)
        return True


class LaunchToy(LaunchKind[ToyJob, UnknownNeeds]):
    """The launch form and messages for a job that runs a command."""

    heading = "Toy"


ENTRY = KindEntry(
    f"{__name__}:ToyJob",
    "A command.",
    proposal=f"{__name__}:ToyProposal",
    rank=f"{__name__}:ToyWork",
    estimate="",
    launch=f"{__name__}:LaunchToy",
    run_by="run it with `sae-tui launch`",
)


def main(argv: Sequence[str]) -> int:
    """Run a rank, or a supervisor that starts ranks with this file."""
    KINDS["toy"] = ENTRY
    if argv[0] == "rank":
        from trainer.cli import main

        return main(argv)
    from sae_tui.jobs.supervisor import supervise

    return supervise.main(argv, command=lambda spec: [sys.executable, "-P", __file__, "rank", str(spec)])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
