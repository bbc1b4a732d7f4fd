"""Lists a job's settings for display: first the identifying settings, then other non-default settings."""

from __future__ import annotations

import functools
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from sae_tui.gpu.secrets import masked_settings
from trainer.contract.planning.plan import Plan
from trainer.contract.printable import on_one_line
from trainer.contract.settings.declare import show
from trainer.contract.settings.job import dead_after
from trainer.contract.settings.job_file import parse_any, to_table
from trainer.contract.settings.sections import job_class, section_settings, words_of
from trainer.contract.settings.toml import table_of

_KNOWN_BY = (
    "sae.architecture", "sae.d_sae", "sae.expansion_factor", "sae.k", "train.lr", "data.path", "train.n_tokens",
    "train.n_steps", "train.batch_size",
    "command.argv", "command.folder", "command.memory", "command.env",
    "model.path", "model.hooks", "text.path", "text.dataset", "text.context", "extract.n_tokens",
)  # fmt: skip
_OVERRIDDEN_BY = {"sae.expansion_factor": "sae.d_sae", "train.n_tokens": "train.n_steps"}
_EXACT_BELOW = 10_000


Entries = tuple[tuple[str, str], ...]


@functools.lru_cache(maxsize=16)
def summary(config: str, became: Entries = ()) -> tuple[Entries, Entries]:
    """Return two lists of setting names and values: important settings, and settings with default values.

    The first list is sorted by importance. `became` pairs the path of each "auto" setting with the value chosen for it.
    """
    raw = table_of(config)
    job, _ = parse_any(raw)
    if job is None:  # The job file contains settings from another version.
        return tuple((path, _word(value)) for path, value in _flat(raw)), ()
    table = to_table(job)
    settings = {path: (value, default) for path, value, default in _settings(table, job.kind)}
    hidden = {less for less, path in _OVERRIDDEN_BY.items() if path in settings and settings[path][0] is not None}
    leading = [path for path in _KNOWN_BY if path not in hidden and path in settings and settings[path][0] is not None]
    changed = [
        path for path, (value, default) in settings.items() if value != default and path not in {*leading, *hidden}
    ]
    names = Counter(path.partition(".")[2] for path in settings)
    others = [path for path, (value, default) in settings.items() if value == default and path not in leading]
    found = dict(became)

    def entry(path: str) -> tuple[str, str]:
        value = settings[path][0]
        return _name(path, names), f"{found[path]} (auto)" if value == "auto" and path in found else _word(value)

    return tuple(map(entry, (*leading, *changed))), tuple(map(entry, others))


def settled(plan: Plan | None, total_steps: int | None) -> Entries:
    """Return the path of each setting that can be "auto", paired with the value that a job's ranks chose."""
    if plan is None:
        return ()
    found = {"parallel.mode": plan.mode}
    if rates := sorted(set(plan.lr.values())):
        found["train.lr"] = "…".join(f"{rate:.2g}" for rate in dict.fromkeys((rates[0], rates[-1])))
    steps = f" = {total_steps:,} steps" if total_steps else ""
    found["train.batch_size"] = f"{plan.tokens_per_step:,}{steps}"
    if total_steps:
        found["sae.dead_after_tokens"] = f"{dead_after('auto', total_steps * plan.tokens_per_step):,}"
    if plan.precision:
        found["train.precision"] = plan.precision
    return tuple(found.items())


def _name(path: str, names: Counter[str]) -> str:
    """Return a setting's name, with its section if another section has a setting with the same name."""
    name = path.partition(".")[2]
    return path if names[name] > 1 else name


def _settings(table: Mapping[str, Any], kind: str) -> Iterator[tuple[str, Any, Any]]:
    """Yield the path, value and default of every setting in a job; for a sweep axis, the value is a list.

    In command lines and variables, values that look like secrets are masked.
    """
    for section in job_class(kind).sections:
        for setting in section_settings(section, words_of(section, table[section])):
            path = f"{section}.{setting.name}"
            value = masked_settings({path: table[section].get(setting.name)})[path]
            if setting.is_command_line:
                value = on_one_line(shlex.join(value))
            elif setting.name == "env" and value:
                value = " ".join(value)
            yield path, value, setting.default


def _flat(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def _word(value: Any) -> str:
    """Format a value as in a job file, but omit quotes around strings, and use commas in integers of 10,000 or more."""
    if isinstance(value, str):
        return value
    is_long = isinstance(value, int) and not isinstance(value, bool) and value >= _EXACT_BELOW
    return f"{value:,}" if is_long else show(value)
