"""An attempt's batch script, and the sbatch command that submits it.

No shell interprets text from the job file: options are passed as arguments to sbatch, and the script quotes all other
text.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Sequence
from pathlib import Path

import msgspec

from sae_tui.jobs import named_python
from trainer.contract.paths import RunPaths, umask_of
from trainer.contract.planning.gpu_vendors import VENDORS, hide_all
from trainer.contract.runs.rank_spec import RankSpec
from trainer.contract.settings.job import Launch
from trainer.contract.settings.typed import parse_time_limit
from trainer.contract.store.rows import Device

# A job is asked to save and stop this many seconds before its time limit.
# If the time limit is short, the job is asked to save after three quarters of the limit.
SAVE_S = 120
# The largest value that sbatch accepts.
_LONGEST_SAVE_S = 65535

# The file in an attempt's folder with its SLURM job's number.
ID_FILE = "slurm_job"
# How long a job waits for its supervisor, in seconds.
WAITS_S = 300

# If sbatch answers late, or the supervisor is killed meanwhile, no supervisor knows the job's number. The job must not
# run then: nothing would stop it, and another attempt may use the run folder.
_CLAIM = """\
for ((second = 0; second < {waits_s}; second++)); do
  # A network file system looks for new files when their folder is listed.
  ls {folder} >/dev/null 2>&1
  number=$(cat {id_file} 2>/dev/null)
  [ "$number" = "$SLURM_JOB_ID" ] || [ "$number" = "${{SLURM_ARRAY_JOB_ID}}_$SLURM_ARRAY_TASK_ID" ] && break
  sleep 1
done
if ((second >= {waits_s})); then
  echo "ends, because no supervisor has recorded SLURM job $SLURM_JOB_ID within {waits_s} s" >&2
  exit 1
fi
"""
# The batch shell runs on the first node and receives SIGUSR1 before the time limit. The ranks do not use MPI.
# If the signal arrives during `wait`, the exit code of `wait` is 138 (128 + SIGUSR1), and the script waits again.
_SCRIPT = """\
#!/bin/bash
# {title}
umask {umask:03o}
{claim}\
{packages}
export PYTHONUNBUFFERED=1
{devices}
threads=${{SLURM_CPUS_PER_TASK:-$((${{SLURM_CPUS_ON_NODE:-1}} / {per_node}))}}
export OMP_NUM_THREADS=${{OMP_NUM_THREADS:-$((threads > 0 ? threads : 1))}}
trap {on_limit} USR1
srun --mpi=none --kill-on-bad-exit=1 --wait=0 --distribution=block \\
  --nodes={nodes} --ntasks={processes} --ntasks-per-node={per_node} \\
  ${{SLURM_CPUS_PER_TASK:+--cpus-per-task=$SLURM_CPUS_PER_TASK}} \\
  {command} &
wait $!
code=$?
while [ "$code" -eq 138 ]; do
  wait $!
  code=$?
done
exit "$code"
"""
# A command's program is run by the batch job's first process, so that `scancel --batch` signals only that process.
_PROGRAM_SCRIPT = """\
#!/bin/bash
# {title}
umask {umask:03o}
{claim}\
exec {command}
"""
# Makes ranks on the CPU use huge pages (2 MB).
_ON_CPU = "THP_MEM_ALLOC_ENABLE=${THP_MEM_ALLOC_ENABLE:-1}"


class NodeLayout(msgspec.Struct, frozen=True):
    """The number of nodes, and of processes and devices on each node."""

    nodes: int
    per_node: int
    devices: int

    @classmethod
    def of(cls, spec: RankSpec, launch: Launch) -> NodeLayout:
        return cls(launch.nodes, max(1, spec.n_processes // launch.nodes), max(1, spec.world_size // launch.nodes))

    @property
    def cores(self) -> int:
        """The number of CPU cores per process: one per device."""
        return self.devices // self.per_node


def script(spec: RankSpec, launch: Launch, command: Sequence[str]) -> str:
    """Return a bash script that runs `command` once for every rank in the attempt."""
    layout, stop_file = NodeLayout.of(spec, launch), RunPaths(spec.run_dir).stop_file(spec.attempt)
    return _SCRIPT.format(
        title=f"{_default_name(spec)}, attempt {spec.attempt}",
        umask=umask_of(spec.run_dir),
        claim=_claim(spec),
        packages=named_python.unset_line() if launch.python else "# Use the packages of the app.",
        devices=_exports(spec.device),
        nodes=layout.nodes,
        processes=layout.nodes * layout.per_node,
        per_node=layout.per_node,
        on_limit=shlex.quote(shlex.join(["touch", "--", str(stop_file)])),
        command=shlex.join(command),
    )


def program_script(spec: RankSpec, command: Sequence[str]) -> str:
    """Return a bash script that runs `command` on the first node; a program reaches the other nodes with srun."""
    title = f"{_default_name(spec)}, attempt {spec.attempt}"
    umask, words = umask_of(spec.run_dir), shlex.join(command)
    return _PROGRAM_SCRIPT.format(title=title, umask=umask, claim=_claim(spec), command=words)


def _claim(spec: RankSpec) -> str:
    """Return script lines that end a job whose number is not in the attempt's folder."""
    folder = RunPaths(spec.run_dir).attempt(spec.attempt)
    quoted = {"folder": shlex.quote(str(folder)), "id_file": shlex.quote(str(folder / ID_FILE))}
    return _CLAIM.format(waits_s=WAITS_S, **quoted)


def submission(
    spec: RankSpec,
    launch: Launch,
    name: str,
    log: Path,
    file: Path,
    save_s: float = SAVE_S,
    avoid: Sequence[str] = (),
) -> list[str]:
    """Return the sbatch command that submits the script in `file`; the job's output is appended to `log`.

    SLURM sends SIGUSR1 to the script `save_s` seconds before the time limit. The job does not run on the nodes in
    `avoid`. The user's own options come last so that they override our options.
    """
    layout, own = NodeLayout.of(spec, launch), _avoiding(launch.sbatch_options or [], avoid)
    options = {
        "job-name": re.sub(r"[^\w.+-]+", "-", name).strip("-") or _default_name(spec),
        "nodes": layout.nodes,
        "ntasks-per-node": layout.per_node,
        "cpus-per-task": None if any(option.startswith("--cpus-per") for option in own) else layout.cores,
        "gpus-per-node": layout.devices if spec.device == "cuda" else None,
        "partition": launch.partition,
        "account": launch.account,
        "time": launch.time_limit,
        "chdir": "/",
        # SLURM interprets % in a path as the start of a pattern.
        "output": str(log).replace("%", "%%"),
        "open-mode": "append",
        "signal": f"B:USR1@{_save_s(launch.time_limit, save_s)}",
    }
    arguments = [f"--{option}={value}" for option, value in options.items() if value is not None]
    # SLURM must not requeue the job: the supervisor starts a new attempt, which avoids a failed node. By default, SLURM
    # also holds back a job that it has requeued for two minutes (cred_expire of AuthInfo in slurm.conf).
    return ["sbatch", "--parsable", "--no-requeue", *arguments, *own, str(file)]


def _avoiding(options: Sequence[str], nodes: Sequence[str]) -> list[str]:
    """Return sbatch options that also exclude these nodes; only the last --exclude counts, so combine them."""
    if not nodes:
        return [*options]
    excluded = [option.partition("=")[2] for option in options if option.startswith("--exclude=")]
    others = [option for option in options if not option.startswith("--exclude=")]
    return [*others, f"--exclude={','.join([*excluded, *nodes])}"]


def _save_s(limit: str | None, wanted_s: float) -> int:
    """Return how many seconds before its limit the job is asked to save: `wanted_s`, at most a quarter of the limit."""
    wanted = min(math.ceil(wanted_s), _LONGEST_SAVE_S)
    return wanted if limit is None else min(wanted, int(parse_time_limit(limit)) // 4)


def _exports(device: Device) -> str:
    """Return a script line that sets every vendor's GPU variables, because SLURM chooses the node and the GPUs."""
    if device == "cpu":
        return f"export {' '.join(f'{name}=' for name in hide_all())} {_ON_CPU}"
    orders = [f"{name}={value}" for vendor in VENDORS.values() for name, value in vendor.order.items()]
    return f"export {' '.join(orders)}"


def _default_name(spec: RankSpec) -> str:
    return f"sae-tui-{spec.job_id or 0}"
