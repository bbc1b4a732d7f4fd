"""Converts launch form values into a validated job and a one-line summary."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from sae_tui.jobs import environment
from sae_tui.jobs.edits import LONGEST_NAME
from sae_tui.jobs.environment import Environment
from sae_tui.jobs.gpus.availability import GpuChoice
from sae_tui.jobs.launch.best_gpus import BestGpus, best_gpus
from sae_tui.jobs.launch.kinds import launch_kind
from sae_tui.jobs.launch.kinds.command import name_of_command
from sae_tui.jobs.launch.limits import problems_with_policy, with_policy_limit
from sae_tui.jobs.launch.memory_need import FreeMemory, Need, capacity_on_cpu, capacity_on_gpus, used_before
from sae_tui.jobs.launch.placement import propose_here
from sae_tui.jobs.output import command_of
from sae_tui.jobs.queue.after import comes_after
from sae_tui.jobs.queue.promised import promised_by_active, writers_of
from sae_tui.jobs.user import user_name
from sae_tui.policy import read_policy
from trainer.contract.errors import JobFileError, Problem, UserError, errors
from trainer.contract.extras import judged_by, lack_of_trainer
from trainer.contract.paths import DataDir, shipped_data, working_folder
from trainer.contract.planning.check_job import Proposal, propose
from trainer.contract.planning.training import OVERRIDDEN_BY
from trainer.contract.printable import printable, printable_toml
from trainer.contract.settings import consent, job_file
from trainer.contract.settings.catalog import KINDS, TRAINING
from trainer.contract.settings.command import Command, CommandJob
from trainer.contract.settings.declare import Setting, settings_of
from trainer.contract.settings.job import AnyJob
from trainer.contract.settings.sections import CHOSEN, choices_of, job_class, section_settings, words_of
from trainer.contract.settings.toml import Judged
from trainer.contract.store.rows import Job
from trainer.contract.wording import duration, plural

# The form omits this setting: the user chooses the GPUs from a list.
_BY_PICKER = "launch.gpus"
# This line identifies a command's recorded job file, so that files of other kinds need not be parsed, which would take
# 0.5 ms each.
_RUNS_COMMAND = f'kind = "{CommandJob.kind}"'
_MOST_EARLIER = 200
# Settings that apply only to jobs whose processes belong to the trainer.
_OF_RANKS = frozenset(("launch.python", "launch.stalled_after_s", "launch.end_stalled_after_s"))


class Draft(msgspec.Struct, frozen=True):
    """The user's input in the launch form.

    `values` maps setting paths to valid values, and `wrong` maps setting paths to messages about invalid values. `gpus`
    is the value of `launch.gpus`. If the job is not a training job, `values` also contains its `kind`.
    """

    values: dict[str, Any]
    wrong: dict[str, str]
    gpus: list[int] | str


class Review(msgspec.Struct, frozen=True):
    """The result of checking a draft: the job, or None if the draft is invalid, and messages about the draft."""

    job: AnyJob | None = None
    problems: tuple[Problem, ...] = ()
    summary: str = ""
    needed_bytes: int = 0
    need: Need | None = None
    # A message saying that the job would have to wait for GPU memory, or "" if enough memory is free.
    lack: str = ""
    # Maps the paths of overridden settings to their effective values, if known.
    comes_to: dict[str, str] = {}
    # Why no job can be launched here; a job file can still be written.
    refusal: str = ""
    # True until the job's interpreter has reported its packages.
    is_asking: bool = False
    best: BestGpus | None = None
    # A sentence saying that fewer GPUs would suffice, or "" if they would not.
    surplus: str = ""

    @property
    def errors(self) -> list[Problem]:
        return errors(self.problems)

    @property
    def warnings(self) -> list[Problem]:
        return [problem for problem in self.problems if problem.severity == "warning"]

    @property
    def question(self) -> str:
        """The question that the user must confirm before the launch, or "" if there are no warnings."""
        others = [str(problem) for problem in self.warnings if not self.lack or self.lack not in problem.message]
        if self.lack:
            return "\n\n".join([*others, f"{self.lack}. Launch, and wait until it is free?"])
        return "\n".join([*others, "", "Launch anyway?"]) if others else ""

    @property
    def by_field(self) -> dict[str, str]:
        return {problem.path: problem.message for problem in self.errors}

    @property
    def warned_fields(self) -> dict[str, str]:
        return {problem.path: problem.message for problem in self.warnings}

    @property
    def text(self) -> str:
        return "\n".join(self.sentences)

    @property
    def sentences(self) -> list[str]:
        """The summary and the advice about the GPUs, followed by the refusal, all errors and then all warnings."""
        refusal = [f"✗ {self.refusal}"] if self.refusal else []
        lines = [f"✗ {problem}" for problem in self.errors] + [f"! {problem}" for problem in self.warnings]
        return [*filter(None, (self.summary, self.surplus)), *refusal, *lines]


def review(
    candidate: Draft,
    choices: Sequence[GpuChoice],
    data: DataDir,
    past: Sequence[Job],
    *,
    cuda: bool,
    several: bool = True,
    when_known: Callable[[], object] | None = None,
) -> Review:
    """Check whether a draft can run on this machine; this reads the activation shards' or language model's headers.

    If `several` is False, a job may use only one GPU.

    If the draft names an interpreter, that interpreter is run once to list its packages. If `when_known` is given, do
    not wait for this list, but call `when_known` once it is available.
    """
    python = candidate.values.get(environment.SETTING)
    if not isinstance(python, str) or not python:
        lack = lack_of_trainer() if job_class(kind_of(candidate.values)).needs_trainer else ""
        return msgspec.structs.replace(
            _review(candidate, choices, data, past, cuda=cuda, several=several), refusal=lack
        )
    there = environment.glance(python, when_known) if when_known else environment.look(python)
    with judged_by(there.packages):
        reviewed = _review(candidate, choices, data, past, cuda=cuda, several=several)
    return _with_environment(reviewed, there, wants_gpus=cuda and bool(choices) and bool(_n_gpus(candidate.gpus)))


def _with_environment(reviewed: Review, there: Environment, *, wants_gpus: bool) -> Review:
    job = reviewed.job
    if job is not None:
        wrong = there.problems(job, wants_gpus=wants_gpus and not job.cluster)
    else:
        wrong = [Problem(environment.SETTING, lack)] if (lack := there.lack()) else []
    return msgspec.structs.replace(
        reviewed,
        job=None if errors(wrong) else job,
        problems=(*wrong, *reviewed.problems),
        summary=f"{reviewed.summary} · by {there.words}"
        if reviewed.summary and not errors(wrong)
        else reviewed.summary,
        is_asking=there.is_asked,
    )


def _review(
    candidate: Draft, choices: Sequence[GpuChoice], data: DataDir, past: Sequence[Job], *, cuda: bool, several: bool
) -> Review:
    try:
        return _review_files(candidate, choices, data, past, cuda=cuda, several=several)
    except JobFileError as error:
        # The data was deleted or changed during the review.
        return Review(None, tuple(error.problems))


def _review_files(
    candidate: Draft, choices: Sequence[GpuChoice], data: DataDir, past: Sequence[Job], *, cuda: bool, several: bool
) -> Review:
    problems = [Problem(path, message) for path, message in candidate.wrong.items()]
    job, parse_problems = job_file.parse_any(_table(candidate), data_bases())
    wrong_paths = {problem.path for problem in problems}
    problems += [problem for problem in parse_problems if problem.path not in wrong_paths]
    proposal = None
    if job is not None:
        job = job.with_paths(data_bases())
        if job.cluster:
            choices, cuda = (), True
        promises = promised_by_active(past)
        proposal = propose_here(job, choices, data, cuda=cuda, past=past, promises=promises)
    if candidate.wrong:
        # Omit warnings, which would concern the defaults substituted for the invalid values.
        others = errors(proposal.problems()) if proposal else []
        return Review(None, (*problems, *(problem for problem in others if problem.path not in wrong_paths)))
    if candidate.gpus == []:
        problems.append(
            Problem("GPUs", "choose at least one (space), the best (r), all available ones (a), or the CPU")
        )
    if job is None or proposal is None:
        return Review(None, tuple(problems))
    kind = launch_kind(job.kind)
    try:
        look = proposal.outlook
    except JobFileError:
        return Review(None, (*problems, *proposal.problems()))
    problems += proposal.problems()
    policy = read_policy(data)
    problems += problems_with_policy(job, proposal.devices if look.on_gpus else 0, policy, past)
    device: Literal["cuda", "cpu"] = "cuda" if cuda and look.on_gpus else "cpu"
    free = capacity(candidate.gpus, choices, elsewhere=bool(job.cluster))
    takes = kind.need(job, look, free, device=device, past=past)
    # The GPU list shows the memory needed on a GPU, so estimate it even if the job runs on the CPU.
    beside = look
    if choices and not look.on_gpus:
        beside = propose(job.replace("launch", gpus="auto"), proposal.machine, used_before(past)).outlook
    needed_bytes = beside.needs_bytes or 0
    best = best_gpus(job, proposal.machine, used_before(past), several=several)
    if candidate.gpus == []:
        return Review(None, tuple(problems), needed_bytes=needed_bytes, need=takes, best=best)
    text = kind.summary(job, look, device=device, past=past)
    if (limited := with_policy_limit(job, policy)) is not job:
        text = f"{text} · stops after {limited.launch.time_limit}, as this machine's policy requires"
    if waits := comes_after(writers_of(job, past)):
        text = f"{text} · {waits}, whose rows it reads"
    lack = look.lack if look.on_gpus else ""
    if errors(problems):
        return Review(None, tuple(problems), text, needed_bytes, takes, lack, best=best)
    surplus = _surplus(proposal, best, device=device, past=past)
    return Review(
        job, tuple(problems), text, needed_bytes, takes, lack, proposal.comes_to(), best=best, surplus=surplus
    )


def _surplus(proposal: Proposal[Any], best: BestGpus | None, *, device: str, past: Sequence[Job]) -> str:
    """Return a sentence like `48 GPUs, about 1 s; 1 GPU would take 2 s: press F2, then r`, or "" if none is surplus."""
    job, n_gpus = proposal.job, proposal.devices
    if best is None or not best.gpus or not proposal.outlook.on_gpus or n_gpus <= best.count:
        return ""
    fewer = propose(job.replace("launch", gpus=best.setting), proposal.machine, used_before(past))
    times = [launch_kind(job.kind).seconds(one.job, one.outlook, device=device, past=past) for one in (proposal, fewer)]
    now, then = (None if time is None else duration(time) for time in times)
    if now is None or then is None:
        return ""
    fewer_gpus = plural(best.count, "GPU")
    return f"{plural(n_gpus, 'GPU')}, about {now}; {fewer_gpus} would take {then}: press F2, then r"


def capacity(gpus: list[int] | str, choices: Sequence[GpuChoice], *, elsewhere: bool = False) -> FreeMemory:
    """Return the free memory on the chosen devices, or `FreeMemory()` for a cluster, whose memory is unknown."""
    if elsewhere:
        return FreeMemory()
    on_cpu = isinstance(gpus, str) and not _n_gpus(gpus)
    return capacity_on_cpu() if on_cpu else capacity_on_gpus(choices, _likely(gpus, choices))


def _n_gpus(gpus: list[int] | str) -> int:
    """Return the number of GPUs selected by `launch.gpus`, by index or by count, or 0 for the CPU."""
    if isinstance(gpus, list):
        return len(gpus)
    word, _, count = gpus.partition(":")
    return int(count or 1) if word == "auto" else 0


def _likely(gpus: list[int] | str, choices: Sequence[GpuChoice]) -> list[int]:
    """Return the indices of a job's GPUs; if the job may use any GPUs, return the GPUs it would use now."""
    if isinstance(gpus, list):
        return gpus
    usable = [choice for choice in choices if choice.state != "unhealthy"]
    usable.sort(key=lambda choice: (choice.state != "available", -(choice.memory_free_bytes or 0), choice.index))
    return [choice.index for choice in usable[: _n_gpus(gpus)]]


def form_fields(values: Mapping[str, Any]) -> list[tuple[str, Setting, tuple[str, ...]]]:
    """Return the path, the definition and the allowed keywords of every setting in the form.

    The settings depend on the kind of job and on choices such as the SAE architecture.
    """
    kind = kind_of(values)
    (name,) = settings_of(job_class(kind))
    fields: list[tuple[str, Setting, tuple[str, ...]]] = [("name", name, ())]
    for section in job_class(kind).sections:
        for setting in section_settings(section, _chosen(section, values)):
            path = f"{section}.{setting.name}"
            if path != _BY_PICKER and not (KINDS[kind].is_program and path in _OF_RANKS):
                fields.append((path, setting, choices_of(path, setting)))
    return fields


def kind_of(values: Mapping[str, Any]) -> str:
    """Return the kind of job described by these values."""
    return str(values.get("kind", TRAINING))


def chosen_settings(values: Mapping[str, Any]) -> list[list[type[msgspec.Struct]]]:
    """Return lists of the classes that define a job's settings.

    The first list contains the class of each section. For each section that offers a choice, such as the architecture,
    another list contains the class of the chosen entry, or several classes for a sweep.
    """
    sections = job_class(kind_of(values)).sections
    of_entries = [
        [registry[word].settings for word in _chosen(section, values) if word in registry]
        for section, (_, registry) in CHOSEN.items()
        if section in sections
    ]
    return [list(sections.values()), *of_entries]


def _chosen(section: str, values: Mapping[str, Any]) -> list[str]:
    """Return the chosen or default keywords of a section, or [] if the section does not offer a choice."""
    if section not in CHOSEN:
        return []
    field = CHOSEN[section][0]
    default = next(setting.default for setting in section_settings(section) if setting.name == field)
    return words_of(section, {field: values.get(f"{section}.{field}", default)})


def flatten(table: Mapping[str, Any]) -> dict[str, Any]:
    """Flatten `{"train": {"lr": 1}}` to `{"train.lr": 1}`."""
    flat: dict[str, Any] = {}
    for key, value in table.items():
        if isinstance(value, Mapping):
            flat |= {f"{key}.{name}": inner for name, inner in value.items()}
        else:
            flat[key] = value
    return flat


def read_job_table(path: Path) -> dict[str, Any]:
    """Return a job file's table, completed with defaults; raise a `JobFileError` that lists all problems, if any."""
    judged = Judged(pipes=True)
    job, problems = job_file.parse_any(job_file.read_toml(path, judged), job_file.bases_of(path))
    if job is None:
        raise JobFileError(problems)
    table = job_file.to_table(job)
    if judged.distrust and (code := consent.refused(table, consent.NO_CONSENT, judged.distrust)):
        raise JobFileError(consent.problems_of(code, judged.distrust))
    for section, name in job.paths_read():
        where = table[section].get(name) or []
        beside = [_next_to_job_file(path, one) for one in (where if isinstance(where, list) else [where])]
        if where:
            table[section][name] = beside if isinstance(where, list) else beside[0]
    return table


def question_about(code: Sequence[consent.Code], path: Path) -> str:
    """Return the question that the user must confirm before the form is filled from a job file that runs code."""
    lines = [f"  {each.path}: {printable(each.does)}" for each in code]
    asks = "Use these settings? Do this only if you trust the author of the file."
    return "\n".join([f"{printable(str(path))} runs code:", *lines, "", asks])


def _next_to_job_file(job_file: Path, where: str) -> str:
    """Return a path in a job file, adapted for the launch form.

    If the path exists relative to the job file's folder, but not relative to the base folders, return the absolute
    path; otherwise, return it unchanged.
    """
    beside = (working_folder() / job_file).parent / where
    # For a folder that cannot be searched, os.path.exists returns False, whereas Path.exists raises.
    is_there_only = os.path.exists(beside) and not any(os.path.exists(base / where) for base in data_bases())
    return str(beside) if is_there_only else where


def each_alone(job: AnyJob) -> list[AnyJob]:
    """Return one separately named job per SAE in a sweep; return any other job unchanged."""
    if not job.sweep:
        return [job]
    named = {label: f"{job.name} {label}"[:LONGEST_NAME] for label in job_file.members(job)}
    return [msgspec.structs.replace(one, name=named[label]) for label, one in job_file.members(job).items()]


def earlier_commands(jobs: Iterable[Job]) -> list[str]:
    """Return the distinct command lines of this user's jobs, in the order of the jobs."""
    commands = (command_of(job.config) for job in jobs if job.user == user_name() and _RUNS_COMMAND in job.config)
    return list(itertools.islice(dict.fromkeys(command.words for command in commands if command), _MOST_EARLIER))


def as_text(candidate: Draft, typed: dict[str, str]) -> str:
    """Return a draft as a job file's text, which may be incomplete; `typed` contains the invalid input."""
    import tomli_w

    table = _table(msgspec.structs.replace(candidate, values=candidate.values | typed))
    return printable_toml(tomli_w.dumps(table))


def overridden(values: Mapping[str, Any], reviewed: Review) -> dict[str, str]:
    """Return a dict mapping overridden settings to their effective values, like `4.0 (from d_sae)`.

    If the effective value of a setting is unknown, its text omits the number.
    """
    return {
        path: f"{reviewed.comes_to.get(path, '')}(from {by.rpartition('.')[2]})"
        for path, by in OVERRIDDEN_BY.items()
        if values.get(by) is not None
    }


def write_job(path: Path, job: AnyJob) -> None:
    """Write a job file; raise `UserError` if it cannot be written."""
    try:
        path.write_text(job_file.dump_job(job), encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from None


def presets(kind: str | None = None) -> list[Path]:
    """Return the job files shipped with the app, or only those for a kind of job."""
    shipped = sorted((shipped_data() / "presets").glob("*.toml"))
    return [path for path in shipped if kind in (None, str(job_file.read_toml(path).get("kind", TRAINING)))]


def default_preset(kind: str = TRAINING) -> Path | None:
    """Return the job file with the form's initial values, or None if this kind of job has no preset.

    The default training job takes less than a minute on any machine.
    """
    quick = shipped_data() / "presets" / "quick.toml"
    return quick if kind == TRAINING else next(iter(presets(kind)), None)


def empty_command() -> dict[str, Any]:
    """Return the table of a command job whose command line is still empty."""
    return job_file.to_table(CommandJob(command=Command(argv=[])))


def data_bases() -> list[Path]:
    """Return the base folders for relative data paths: the working directory, and the folder containing `data/`."""
    return [working_folder(), shipped_data().parent]


def _table(candidate: Draft) -> dict[str, Any]:
    table: dict[str, Any] = {}
    for path, value in candidate.values.items():
        section, _, key = path.rpartition(".")
        (table.setdefault(section, {}) if section else table)[key] = value
    if KINDS[kind_of(table)].is_program and table.get("name", CommandJob.kind) == CommandJob.kind:
        # Jobs that are all called "command" could not be distinguished.
        table["name"] = name_of_command(table.get("command", {}).get("argv") or [])
    if candidate.gpus != []:
        table.setdefault("launch", {})["gpus"] = candidate.gpus
    return table
