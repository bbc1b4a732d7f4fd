"""The job: one frozen, typed description that the form, the file, the supervisor and the ranks share.

Everything a section can hold is declared once, here or in the catalogue; `parse_job` reads it from
TOML and reports every problem at once, `dump_job` writes it back complete.
"""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from trainer.contract import catalog
from trainer.contract.catalog import Entry
from trainer.contract.knobs import Knob, about, knobs_of, parse_value, show
from trainer.contract.problems import JobFileError, Problem

GPU_CHOICES = '"auto", "auto:2", "cpu", "cpu:2" or a list like [0, 1]'
Choice = str  # a name of a registry; checked against it, so that a new entry needs no change here


class Data(msgspec.Struct, frozen=True):
    """Where the activations come from."""

    knobs: msgspec.Struct
    source: Annotated[Choice, about("Where activations come from.")] = "shards"


class Sae(msgspec.Struct, frozen=True):
    """The dictionary to learn."""

    knobs: msgspec.Struct
    architecture: Annotated[Choice, about("How latents are made sparse.")] = "topk"
    d_sae: Annotated[int, about("Number of latents; overrides the expansion factor.", unit="latents", ge=1)] | None = (
        None
    )
    expansion_factor: Annotated[float, about("Latents per input dimension.", gt=0)] = 8.0
    b_dec_init: Annotated[
        Literal["geometric_median", "mean", "zeros"], about("What the decoder bias starts from.", advanced=True)
    ] = "geometric_median"
    encoder_scale: Annotated[
        float, about("Norm of the encoder's columns at the start, tied to the decoder.", advanced=True, gt=0)
    ] = 0.3

    def width(self, d_in: int) -> int:
        """Number of latents for inputs of this width."""
        return self.d_sae or round(self.expansion_factor * d_in)


class Train(msgspec.Struct, frozen=True):
    """How long, how fast and with which arithmetic."""

    batch_size: Annotated[int, about("Tokens per data-parallel rank and micro-batch.", unit="tokens", ge=1)] = 4096
    accumulate: Annotated[int, about("Micro-batches per optimiser step.", advanced=True, ge=1)] = 1
    n_tokens: Annotated[int, about("Tokens to train on.", unit="tokens", ge=1)] = 2_000_000
    n_steps: Annotated[int, about("Optimiser steps; overrides n_tokens.", unit="steps", ge=1)] | None = None
    lr: Annotated[float, about("Learning rate of Adam.", gt=0)] | Literal["auto"] = "auto"
    warmup_fraction: Annotated[
        float, about("Share of the steps in which the rate rises from 0.", advanced=True, ge=0, le=1)
    ] = 0.05
    decay_fraction: Annotated[
        float, about("Share of the steps, at the end, in which the rate falls to 0.", advanced=True, ge=0, le=1)
    ] = 0.2
    grad_clip: Annotated[float, about("Largest global norm of the gradient; 0 for none.", advanced=True, ge=0)] = 1.0
    precision: Annotated[
        Literal["auto", "fp32", "tf32", "bf16"], about("Arithmetic of the matrix products; weights stay fp32.")
    ] = "auto"
    seed: Annotated[int, about("Fixes initial weights and the order of the data.", ge=0)] = 0
    log_every: Annotated[int, about("Steps between two rows of metrics.", unit="steps", advanced=True, ge=1)] = 10
    checkpoint_every: Annotated[
        int, about("Steps between two checkpoints; 0 for only at stop and end.", unit="steps", advanced=True, ge=0)
    ] = 0


class Parallel(msgspec.Struct, frozen=True):
    """How the ranks share the work."""

    mode: Annotated[Choice, about('"auto" is ddp on more than one device.')] = "auto"


class Launch(msgspec.Struct, frozen=True):
    """Where it runs."""

    gpus: (
        Annotated[str, about("Which devices: chosen for you, by index, or CPU processes.", wanted=GPU_CHOICES)]
        | list[Annotated[int, msgspec.Meta(ge=0)]]
    ) = "auto"
    backend: Annotated[Literal["local"], about("Who starts the processes.", advanced=True)] = "local"
    max_restarts: Annotated[int, about("Automatic restarts after a crash.", advanced=True, ge=0)] = 0


class JobConfig(msgspec.Struct, frozen=True):
    """A training job, complete: every default filled in."""

    data: Data
    sae: Sae
    train: Train = Train()
    parallel: Parallel = Parallel()
    launch: Launch = Launch()
    name: Annotated[str, about("What the job is called.", min_length=1, max_length=80)] = "sae"

    def mode(self, world_size: int) -> str:
        """The parallel mode that `auto` stands for on this many ranks."""
        if self.parallel.mode != "auto":
            return self.parallel.mode
        return "ddp" if world_size > 1 else "single"

    def effective_batch(self, world_size: int) -> int:
        """Tokens per optimiser step over all ranks."""
        return self.train.batch_size * self.train.accumulate * world_size

    def total_steps(self, world_size: int) -> int:
        """Optimiser steps of the whole run."""
        return self.train.n_steps or -(-self.train.n_tokens // self.effective_batch(world_size))

    def replace(self, section: str, **changes: Any) -> JobConfig:
        """A copy with some fields of one section changed."""
        return msgspec.structs.replace(self, **{section: msgspec.structs.replace(getattr(self, section), **changes)})


SECTIONS: dict[str, type[msgspec.Struct]] = {
    "data": Data,
    "sae": Sae,
    "train": Train,
    "parallel": Parallel,
    "launch": Launch,
}
# The field of a section that names a registry entry, and the registry; the entry's knobs join the section.
CHOSEN: dict[str, tuple[str, dict[str, Entry]]] = {
    "data": ("source", catalog.SOURCES),
    "sae": ("architecture", catalog.ARCHITECTURES),
}
OPEN_CHOICES: dict[str, tuple[str, ...]] = {
    "data.source": tuple(catalog.SOURCES),
    "sae.architecture": tuple(catalog.ARCHITECTURES),
    "parallel.mode": ("auto", *catalog.PARALLEL),
}


def section_knobs(section: str, chosen: str | None = None) -> tuple[Knob, ...]:
    """The settings of a section, those of its chosen registry entry included."""
    common = knobs_of(SECTIONS[section])
    if section not in CHOSEN:
        return common
    field, registry = CHOSEN[section]
    name = chosen or next(knob.default for knob in common if knob.name == field)
    first, *rest = common
    own = knobs_of(registry[name].knobs) if name in registry else ()
    return (first, *own, *rest)


def choices_of(path: str, knob: Knob) -> tuple[str, ...]:
    """The words a setting is limited to: a closed list or the names of a registry."""
    return OPEN_CHOICES.get(path, knob.choices)


def parse_job(raw: Mapping[str, Any]) -> tuple[JobConfig | None, list[Problem]]:
    """The job a TOML table describes and everything wrong with it; None when an error stands."""
    problems: list[Problem] = []
    problems += _unknown(raw, ("name", *SECTIONS), "")
    sections = {name: _parse_section(name, raw.get(name, {}), problems) for name in SECTIONS}
    (name_knob,) = knobs_of(JobConfig)
    name = _convert(name_knob, "name", raw, problems)
    if problems:
        return None, problems
    return JobConfig(name=name, **sections), []  # type: ignore[arg-type]


def load_job(path: str | Path, overrides: Sequence[str] = ()) -> JobConfig:
    """Reads a job file and applies `--set` overrides; raises `JobFileError` with every problem.

    A relative path of the data is taken from the working directory, or else from the job file's folder.
    """
    raw = read_toml(Path(path))
    for override in overrides:
        apply_override(raw, override)
    job, problems = parse_job(raw)
    if job is None:
        raise JobFileError(problems)
    return with_data_path(job, [Path.cwd(), Path(path).absolute().parent])


def with_data_path(job: JobConfig, bases: Iterable[Path]) -> JobConfig:
    """The job with its data path made absolute against the first folder in which it exists."""
    path = getattr(job.data.knobs, "path", None)
    if path is None:
        return job
    candidates = [os.path.abspath(base / os.path.expanduser(path)) for base in bases]
    found = next(filter(os.path.exists, candidates), candidates[0])
    return job.replace("data", knobs=msgspec.structs.replace(job.data.knobs, path=found))


def read_toml(path: Path) -> dict[str, Any]:
    """The table in a TOML file; raises `JobFileError` where it cannot be read or parsed."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise JobFileError([Problem(str(path), f"cannot be read: {error.strerror}")]) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise JobFileError([Problem(str(path), f"is not valid TOML: {error}")]) from None


def apply_override(raw: dict[str, Any], override: str) -> None:
    """Puts `train.lr=3e-4` into the table; raises `JobFileError` where it has no such form."""
    path, equals, text = override.partition("=")
    keys = path.strip().split(".")
    if not equals or not all(keys) or len(keys) > 2:
        raise JobFileError([Problem("--set", f'takes section.key=value, like train.lr=3e-4, not "{override}"')])
    table = raw
    for key in keys[:-1]:
        table = table.setdefault(key, {})
        if not isinstance(table, dict):
            raise JobFileError([Problem("--set", f'"{key}" is not a section of the job file')])
    table[keys[-1]] = parse_value(text)


def to_table(job: JobConfig) -> dict[str, Any]:
    """The complete job as a plain TOML table; what is None is left out."""
    table: dict[str, Any] = {"name": job.name}
    for name in SECTIONS:
        section = msgspec.structs.asdict(getattr(job, name))
        own = section.pop("knobs", None)
        section |= msgspec.structs.asdict(own) if own is not None else {}
        ordered = [knob.name for knob in section_knobs(name, _chosen(job, name))]
        table[name] = {key: section[key] for key in ordered if section[key] is not None}
    return table


def dump_job(job: JobConfig) -> str:
    """The job as a TOML file that can be run again."""
    import tomli_w

    return tomli_w.dumps(to_table(job))


def _chosen(job: JobConfig, section: str) -> str | None:
    return getattr(getattr(job, section), CHOSEN[section][0]) if section in CHOSEN else None


def _parse_section(name: str, raw: Any, problems: list[Problem]) -> msgspec.Struct | None:
    if not isinstance(raw, Mapping):
        problems.append(Problem(name, f"must be a section: write [{name}] and its keys below"))
        return None
    struct = SECTIONS[name]
    extra: dict[str, Any] = {}
    if name in CHOSEN:
        field, registry = CHOSEN[name]
        default = next(knob.default for knob in knobs_of(struct) if knob.name == field)
        chosen = raw.get(field, default)
        own = registry[chosen].knobs if isinstance(chosen, str) and chosen in registry else None
        extra["knobs"] = own
    knobs = section_knobs(name, _word(raw, name))
    found = {knob.name: _convert(knob, f"{name}.{knob.name}", raw, problems) for knob in knobs}
    if not extra or extra["knobs"]:
        problems += _unknown(raw, tuple(found), f"{name}.")
    if any(problem.path.startswith(f"{name}.") for problem in problems):
        return None
    if extra.get("knobs"):
        own_names = extra["knobs"].__struct_fields__
        extra["knobs"] = extra["knobs"](**{key: found.pop(key) for key in own_names})
    return struct(**found, **extra)


def _word(raw: Mapping[str, Any], section: str) -> str | None:
    word = raw.get(CHOSEN[section][0]) if section in CHOSEN else None
    return word if isinstance(word, str) else None


def _convert(knob: Knob, path: str, raw: Mapping[str, Any], problems: list[Problem]) -> Any:
    value = raw.get(knob.name, knob.default)
    if knob.required and value is None:
        problems.append(Problem(path, f"is missing: {knob.help}"))
        return None
    try:
        value = knob.convert(value)
    except ValueError as error:
        problems.append(Problem(path, str(error)))
        return None
    choices = OPEN_CHOICES.get(path)
    if choices and value not in choices:
        listed = " or ".join(f'"{choice}"' for choice in choices)
        problems.append(Problem(path, f"must be {listed}, not {show(value)}"))
    if path == "launch.gpus" and not _is_gpu_choice(value):
        problems.append(Problem(path, f"must be {GPU_CHOICES}, not {show(value)}"))
    return value


def _is_gpu_choice(value: str | list[int]) -> bool:
    # A `pattern` in the annotation would say this, but msgspec 0.19 to 0.22 crashes on one inside a union.
    if isinstance(value, str):
        return re.fullmatch(r"(auto|cpu)(:[1-9][0-9]*)?", value) is not None
    return bool(value) and len(set(value)) == len(value)


def _unknown(raw: Mapping[str, Any], known: Sequence[str], prefix: str) -> list[Problem]:
    return [
        Problem(prefix + key, f"is not a known setting{_suggestion(key, known)}") for key in raw if key not in known
    ]


def _suggestion(key: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(key, known, n=1)
    return f'; did you mean "{close[0]}"?' if close else f"; known are {', '.join(known)}"
