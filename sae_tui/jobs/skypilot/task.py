"""Writes a SkyPilot task file for a job.

SkyPilot reads the file, rents a machine, copies the data to it, and runs `setup` and `run` in bash. All text from the
job file is quoted for YAML, for the shell, or both. Everything on the machine is in `~/sae-tui`.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import socket
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path
from typing import Any

import msgspec

from trainer.contract.errors import JobFileError, Problem
from trainer.contract.planning.rented_machine import choose_gpus, disk_gb, fixed_count, needs_bytes
from trainer.contract.printable import on_one_line
from trainer.contract.settings.command import CommandJob
from trainer.contract.settings.job import AnyJob, Launch
from trainer.contract.settings.job_file import any_job_of, dump_job, to_table
from trainer.contract.settings.skypilot import RentedGpus
from trainer.contract.settings.sources import each
from trainer.contract.wording import gibibytes

# The folder on the rented machine, and a link to it, whose path is the same on every cloud: a run stores its paths, and
# a cloud's home folder depends on the cloud.
HOME, THERE = "~/sae-tui", "/tmp/sae-tui"
# The first word of each line on the machine's output that is meant for the app.
MARK = "@sae-tui"
# The port on which the machines of one job meet; clouds' firewalls close it to all other machines.
PORT = 29500
_PYTHON = "3.12"
# The settings that contain a path, or the name of a model on the hub.
_ON_HUB = ("data.model", "model.path")
_EXTRAS = {"train": "train,hf,eval,parquet", "extract": "train,hf,parquet"}
# The longest slug: clouds allow names of 63 characters, and SkyPilot adds some itself.
_LONGEST = 24
_PLAIN = re.compile(r"(~?/|[A-Za-z])([\w./:~+-]*[\w.+-])?", re.ASCII)
_WORDS = {"null", "true", "false", "yes", "no", "on", "off", "y", "n"}
_PLACEHOLDERS = {"gpus": '"$gpus"', "gpu_list": '"$gpu_list"', "job_id": '"$SKYPILOT_TASK_ID"', "run_dir": '"$run"'}


class Task(msgspec.Struct, frozen=True):
    """A task: the text of its file, and the kinds of GPU that it may use."""

    text: str
    gpus: list[RentedGpus]


def slug(name: str) -> str:
    """Return a name that every cloud accepts: letters, digits and hyphens, beginning with a letter."""
    word = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:_LONGEST].strip("-")
    return word if word[:1].isalpha() else f"sae-{word}".strip("-")


def machine_name(run_dir: Path, name: str) -> str:
    """Return the name of a job's machine, which is the same for all attempts, and differs from other jobs' names."""
    # Several data folders and hosts may use one SkyPilot account, so the job's number is not enough.
    own = hashlib.sha256(f"{socket.gethostname()}:{os.path.realpath(run_dir)}".encode()).hexdigest()[:6]
    return f"{slug(name)}-{own}"


def make_task(job: AnyJob, name: str, given: Mapping[str, str] | None = None) -> Task:
    """Return the task for a job with absolute paths; `given` maps more local paths to mount, by remote path.

    `name` names the run folder, so that a task with the same name resumes the run. Raise `JobFileError` if the job
    cannot run on a rented machine.
    """
    run, launch = f"{THERE}/runs/{name}", job.launch
    gpus = choose_gpus(job)
    there, mounts = _moved(job, run)
    files: dict[str, Any] = {**mounts, **(given or {})}
    if launch.runs_url:
        files[f"{HOME}/runs"] = {"source": launch.runs_url, "mode": "MOUNT_CACHED"}
    wheel = launch.package if launch.package and launch.package.endswith(".whl") else ""
    if wheel:
        files[_wheel_there(wheel)] = os.path.abspath(os.path.expanduser(wheel))
    table: dict[str, Any] = {"name": name, "resources": _resources(job, gpus, mounts.values())}
    table |= {"num_nodes": launch.nodes} if launch.nodes > 1 else {}
    if isinstance(job, CommandJob):
        table |= {"workdir": job.command.folder}
        table |= {"envs": job.command.variables} if job.command.variables else {}
    table |= {"file_mounts": files} if files else {}
    table |= {} if isinstance(job, CommandJob) else {"setup": _setup(job, wheel)}
    table["run"] = _run_text(there, run, launch.nodes)
    return Task(f"{_title(job, gpus, name)}{to_yaml(table)}", gpus)


def _title(job: AnyJob, gpus: Sequence[RentedGpus], name: str) -> str:
    """Return comment lines that say what the task needs, and how to launch it."""
    needed = needs_bytes(job, gpus[0]) if gpus else None
    needs = f", which needs {gibibytes(needed)} on each {gpus[0].kind}" if needed else ""
    lines = [
        f"A SkyPilot task for the job {on_one_line(job.name)}{needs}; made by sae-tui {own_version()}.",
        f"Launch it:  sky launch -c {name} THIS_FILE",
        *(["Rent another machine whenever the cloud takes one back:  sky jobs launch THIS_FILE"] * job.launch.spot),
        f"View it:    sae-tui --host {name}",
        f"End it:     sky down {name}",
    ]
    return "".join(f"# {line}\n" for line in lines)


def _resources(job: AnyJob, gpus: Sequence[RentedGpus], sources: Iterable[str]) -> dict[str, Any]:
    found: dict[str, Any] = {"infra": job.launch.infra} if job.launch.infra else {}
    found |= {"use_spot": True} if job.launch.spot else {}
    found["disk_size"] = disk_gb(job, sources)
    if not gpus:
        return found | {"cpus": f"{max(4, fixed_count(job) or 1)}+"}
    return found | {"any_of": [{"accelerators": f"{one.kind}:{one.per_machine}"} for one in gpus]}


def _moved(job: AnyJob, run: str) -> tuple[AnyJob, dict[str, str]]:
    """Return the job with its paths on the machine, and the local source of each mounted path, by remote path."""
    mounts: dict[str, str] = {}
    table = to_table(job)

    def moved(path: str, setting: str) -> str:
        if "://" in path or (setting in _ON_HUB and not os.path.exists(path)):
            return path
        if "$" in path or not path.isprintable():
            raise JobFileError([Problem(setting, f"{path!a} contains characters that SkyPilot replaces; rename it")])
        if not os.path.exists(path):
            raise JobFileError([Problem(setting, f"there is no {path} on this machine to copy to a rented one")])
        known = next((remote for remote, local in mounts.items() if local == path), None)
        remote = known or f"{HOME}/data/{len(mounts)}{_file_name(path)}"
        mounts[remote] = path
        return THERE + remote.removeprefix(HOME)

    for section, name in dict.fromkeys([*job.paths_read(), *(tuple(setting.split(".")) for setting in _ON_HUB)]):
        given = table.get(section, {}).get(name)
        if given:
            paths = [moved(path, f"{section}.{name}") for path in each(given)]
            table[section][name] = paths[0] if isinstance(given, str) else paths
    if job.writes_rows:
        table["extract"]["output"] = run
    return any_job_of(table), mounts


def _file_name(path: str) -> str:
    """Return "/" and a safe name for a file, whose suffix says what it contains; "" for a folder."""
    if os.path.isdir(path):
        return ""
    return "/" + (re.sub(r"[^\w.-]+", "-", os.path.basename(path)).strip("-.") or "file")


def _wheel_there(wheel: str) -> str:
    return f"{HOME}/wheels/{os.path.basename(wheel)}"


def own_version() -> str:
    try:
        return version("sae-tui")
    except PackageNotFoundError:
        return "0"


def unreleased_from() -> str:
    """Return where this sae-tui was installed from, if that was not a package index; "" otherwise."""
    try:
        text = distribution("sae-tui").read_text("direct_url.json")
    except PackageNotFoundError:
        return "a checkout"
    return str(json.loads(text).get("url", "")).removeprefix("file://") if text else ""


def _setup(job: AnyJob, wheel: str) -> str:
    """Return the script that installs sae-tui; it changes nothing if it has run before."""
    package = f"sae-tui[{_EXTRAS[job.kind]}]"
    if wheel:
        target = '"$HOME/sae-tui/wheels/"' + shlex.quote(f"{os.path.basename(wheel)}[{_EXTRAS[job.kind]}]")
    else:
        target = shlex.quote(job.launch.package or f"{package}=={own_version()}")
    return f"""\
set -e
export PATH="$HOME/.local/bin:$PATH"
command -v uv > /dev/null || curl -LsSf https://astral.sh/uv/install.sh | sh
[ -x "$HOME/sae-tui/venv/bin/python" ] || uv venv --python {_PYTHON} "$HOME/sae-tui/venv"
uv pip install --python "$HOME/sae-tui/venv/bin/python" {target}
mkdir -p "$HOME/.local/bin"
ln -sf "$HOME/sae-tui/venv/bin/sae-tui" "$HOME/.local/bin/sae-tui"
"""


def _run_text(job: AnyJob, run: str, nodes: int) -> str:
    """Return the script that runs the job on each machine; `job` has its paths on the machine."""
    first = f"""\
export PATH="$HOME/sae-tui/venv/bin:$HOME/.local/bin:$PATH"
mkdir -p "$HOME/sae-tui/runs"
ln -sfn "$HOME/sae-tui" {THERE}
run={run}
gpus="${{SKYPILOT_NUM_GPUS_PER_NODE:-0}}"
"""
    if isinstance(job, CommandJob):
        return f"""{first}\
gpu_list="$(seq -s , 0 "$((gpus - 1))")"
{_command_line(job)}
code=$?
[ "${{SKYPILOT_NODE_RANK:-0}}" != 0 ] || echo "{MARK} end $code"
exit "$code"
"""
    text = _job_text(job)
    word = next(word for n in range(1000) if (word := f"END_OF_JOB_{n}") not in text)
    processes = str(fixed_count(job) or 1) if job.on_cpu else "$gpus"
    return f"""{first}\
cat > {THERE}/job.toml <<'{word}'
{text}{word}
{_start(job, nodes, processes)}"""


def _job_text(job: AnyJob) -> str:
    """Return the job file on the machine, where the job is local; the command line sets its devices."""
    kept = {name: getattr(job.launch, name) for name in ("stalled_after_s", "end_stalled_after_s")}
    return dump_job(msgspec.structs.replace(job, launch=Launch(gpus="cpu" if job.on_cpu else "auto", **kept)))


def _start(job: AnyJob, nodes: int, processes: str) -> str:
    """Return the lines that start the trainer, send its progress to the app, and report its exit code.

    The program that sends progress ends when its standard input closes, after everything has been sent.
    """
    devices = f'--set "launch.gpus={"cpu" if job.on_cpu else "auto"}:{processes}"'
    job_file = f"{THERE}/job.toml"
    if job.writes_rows:
        trainer = f"sae-train extract {job_file} {devices} 9>&-"
    elif nodes == 1:
        trainer = f"""\
if [ -f "$run/job.toml" ]; then
  set -- resume "$run"
else
  set -- run {job_file} --out "$run"
fi
sae-train "$@" {devices} 9>&-"""
    else:
        trainer = f"""\
python -m torch.distributed.run --nnodes "$SKYPILOT_NUM_NODES" --node-rank "$SKYPILOT_NODE_RANK" \\
  --nproc-per-node "{processes}" --rdzv-backend static --master-port "${{SAE_TUI_PORT:-{PORT}}}" \\
  --master-addr "$(printf '%s\n' "$SKYPILOT_NODE_IPS" | head -n 1)" \\
  -m trainer join {job_file} --out "$run" 9>&-"""
    return f"""\
if [ "${{SKYPILOT_NODE_RANK:-0}}" = 0 ]; then
  exec 9> >(exec python -P -m sae_tui.jobs.skypilot.stream {job_file} "$run")
  stream=$!
fi
{trainer}
code=$?
if [ "${{SKYPILOT_NODE_RANK:-0}}" = 0 ]; then
  exec 9>&-
  wait "$stream"
  echo "{MARK} end $code"
fi
exit "$code"
"""


def _command_line(job: CommandJob) -> str:
    """Return the command for bash: words are quoted, and placeholders become variables."""
    pattern = re.compile("{(" + "|".join(_PLACEHOLDERS) + ")}")

    def quoted(word: str) -> str:
        parts = pattern.split(word)
        texts = [shlex.quote(text) if text else "" for text in parts[::2]]
        names = [_PLACEHOLDERS[name] for name in parts[1::2]]
        return "".join(text + name for text, name in zip(texts, [*names, ""], strict=True)) or "''"

    return " ".join(map(quoted, job.command.argv))


def to_yaml(table: Mapping[str, Any], indent: str = "") -> str:
    """Return nested dicts, lists of dicts, texts and numbers as block-style YAML; several lines are a block."""
    lines = []
    for key, value in table.items():
        name = f"{indent}{_scalar(key)}:"
        if isinstance(value, Mapping):
            lines.append(f"{name}\n{to_yaml(value, indent + '  ')}")
        elif isinstance(value, list):
            items = [to_yaml(item, indent + "    ") for item in value]
            lines.append(f"{name}\n" + "".join(f"{indent}  - {item.lstrip()}" for item in items))
        elif isinstance(value, str) and _is_block(value):
            text = "".join(f"{indent}  {line}\n" if line else "\n" for line in value.splitlines())
            lines.append(f"{name} |\n{text}")
        else:
            lines.append(f"{name} {_scalar(value)}\n")
    return "".join(lines)


def _is_block(text: str) -> bool:
    """Return whether a text can be a block: several printable lines, and the first is not indented."""
    lines = text.split("\n")
    return len(lines) > 1 and text.endswith("\n") and not text[0].isspace() and all(map(_is_shown, lines))


def _is_shown(text: str) -> bool:
    # A byte order mark is printable in Python, but not in YAML.
    return text.isprintable() and "\ufeff" not in text


def _scalar(value: object) -> str:
    """Return a scalar: a plain word that YAML cannot read as anything else, or a text in double quotes."""
    if not isinstance(value, str):
        return json.dumps(value)
    if _PLAIN.fullmatch(value) and value.lower() not in _WORDS:
        return value
    return '"' + "".join(map(_escaped, value)) + '"'


def _escaped(char: str) -> str:
    if char in '"\\':
        return f"\\{char}"
    return char if _is_shown(char) else f"\\U{ord(char):08X}"
