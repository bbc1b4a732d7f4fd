"""Plans a command job: its devices, and the memory that its job file states."""

from __future__ import annotations

import os
import shutil
from functools import cached_property

import msgspec

from trainer.contract.errors import Problem
from trainer.contract.planning.check_job import Proposal
from trainer.contract.settings.catalog import LAUNCH_BACKENDS
from trainer.contract.settings.command import CommandJob
from trainer.contract.wording import gibibytes

# The environment variables that `command.clean_env` keeps; they say who runs the program and where, but hold no
# settings.
KEPT = ("HOME", "LANG", "LOGNAME", "SHELL", "TERM", "TMPDIR", "TZ", "USER", "XDG_RUNTIME_DIR")
# Words that connect commands and files in a shell; without a shell, they are passed as arguments.
_OF_SHELL = frozenset(("|", "||", "&", "&&", ";", "<", ">", ">>", "2>", "2>&1", "&>"))
USUAL_PATH = "/usr/local/bin:/usr/bin:/bin"


class CommandOutlook(msgspec.Struct, frozen=True):
    """The resources that a command needs; `needs_bytes` is None if the job does not state its memory."""

    on_gpus: bool
    ranks: int
    needs_bytes: int | None = None
    lack: str = ""
    mode: str = "single"


class CommandProposal(Proposal[CommandJob]):
    """The plan for a command job, which may run any program."""

    @cached_property
    def outlook(self) -> CommandOutlook:
        on_gpus = bool(self.gpus) and not self.job.on_cpu
        needed = self.job.command.memory_bytes if on_gpus else None
        return CommandOutlook(on_gpus, self.devices, needed, self._lack(needed))

    def _lack(self, needed: int | None) -> str:
        """Return a message if too few GPUs have enough free memory now, or ""."""
        if needed is None or self.job.cluster:
            return ""
        fitting = [gpu for gpu in self.gpus if gpu.memory_free_bytes is None or gpu.memory_free_bytes >= needed]
        if len(fitting) >= self.devices:
            return ""
        return f"needs {gibibytes(needed)} on {self.devices} GPUs, but only {len(fitting)} have that much free"

    def memory_problems(self) -> list[Problem]:
        """Return an error if no GPU is large enough, or a warning if too few have enough free memory now."""
        needed = self.outlook.needs_bytes
        if needed is None or self.job.cluster:
            return []
        sizes = [gpu.memory_total_bytes for gpu in self.gpus]
        large = sum(size is None or size >= needed for size in sizes)
        if large < self.devices:
            most = gibibytes(max((size for size in sizes if size), default=0))
            message = f"is {gibibytes(needed)} on each GPU, but the largest GPU here has {most}"
            return [Problem("command.memory", message)]
        return [Problem("command.memory", self.outlook.lack, "warning")] if self.outlook.lack else []

    def problems(self) -> list[Problem]:
        return [*super().problems(), *self._program_problems()]

    def device_problems(self) -> list[Problem]:
        # Ignore the problem that this PyTorch cannot use the GPUs, because the program need not use this PyTorch.
        return [problem for problem in super().device_problems() if problem.message != self.machine.cuda_problem]

    def _program_problems(self) -> list[Problem]:
        """Report a missing working folder or program, except on a cluster, whose nodes may have other files."""
        command, backend = self.job.command, self.job.launch.backend
        if not LAUNCH_BACKENDS[backend].program:
            return [Problem("launch.backend", f'"{backend}" cannot run commands; use "local"')]
        problems: list[Problem] = []
        if self.job.cluster:
            return problems
        if not os.path.isdir(command.folder):
            problems.append(Problem("command.folder", f"is not a folder: {command.folder}"))
        program = command.argv[0]
        path = command.variables.get("PATH") or (USUAL_PATH if command.clean_env else os.environ.get("PATH"))
        there = os.path.join(command.folder, program) if "/" in program else program
        if control := next((word for word in command.argv[1:] if word in _OF_SHELL), None):
            message = f"passes {control} to the program as an argument; to use a shell, write sh -c 'the whole line'"
            problems.append(Problem("command.argv", message, "warning"))
        if "{" not in program and shutil.which(there, path=path) is None:
            where = f"in {command.folder}" if "/" in program else "on $PATH"
            problems.append(Problem("command.argv", f"there is no program {program} {where}"))
        return problems
