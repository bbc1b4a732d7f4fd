"""Writes the reference pages of the documentation: `make reference`.

python -m support.reference [FOLDER], with PYTHONPATH=tests. The pages are generated only from the catalogue, the
parsers and the key bindings.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import pkgutil
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from textual.binding import Binding
from textual.keys import format_key

import sae_tui
from sae_tui.cli_commands.parser import COMMAND_EXAMPLES
from sae_tui.cli_commands.parser import make_parser as app_parser
from sae_tui.cli_commands.schema import schemas
from sae_tui.policy import Hours, Rules
from sae_tui.screens.help import _title as title_of_key
from sae_tui.settings import Settings
from trainer.contract.exits import Exit
from trainer.contract.settings import catalog
from trainer.contract.settings.declare import Setting, settings_of
from trainer.contract.settings.sections import CHOSEN, choices_of, job_class, section_settings
from trainer.help import OVERVIEW
from trainer.parser import make_parser as trainer_parser

FOLDER = Path(__file__).parents[2] / "docs" / "reference"
_CATALOGUE: dict[str, tuple[str, Mapping[str, Any]]] = {
    "Architectures": ("sae.architecture", catalog.ARCHITECTURES),
    "Optimizers": ("train.optimizer", catalog.OPTIMIZERS),
    "Sources of activations": ("data.source", catalog.SOURCES),
    "Parallel modes": ("parallel.mode", catalog.PARALLEL),
    "Launch backends": ("launch.backend", catalog.LAUNCH_BACKENDS),
    "Mirrors of metrics": ("train.mirror", catalog.MIRRORS),
    "Formats of SAEs": ("`--format` of `export` and `import`", catalog.FORMATS),
}
_TITLES = {
    "Gpu": "One GPU",
    "Gpus": "GPUs",
    "Reading": "Text windows",
    "Ask": "Questions",
    "Confirm": "Questions",
    "Form": "Forms",
    "Card": "Report card",
}
# The subjects listed first in the list of keys.
_FIRST_KEYS = ("Everywhere", "Jobs", "Job", "Launch", "GPUs")
# Matches a string like `an integer of at least 1 and of at most 16 or "auto" (tokens)`.
_BOUNDED = re.compile(
    r"(?P<type>an integer|a number)(?: (?P<low>of at least|above) (?P<least>[-\d.]+))?"
    r"(?: and (?P<high>of at most|below) (?P<most>[-\d.]+))?(?P<auto> or \"auto\")?(?: \((?P<unit>[^)]+)\))?"
)
_SIGNS = {"up": "↑", "down": "↓", "left": "←", "right": "→", "enter": "⏎", "escape": "esc"}


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="support.reference", description="Write the generated reference.")
    parser.add_argument("folder", type=Path, nargs="?", default=FOLDER)
    folder = parser.parse_args(words).folder
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in pages().items():
        (folder / name).write_text(text)
        print(folder / name)
    return 0


def pages() -> dict[str, str]:
    """Return a dict that maps the file name of each generated page to its text."""
    made = {
        "job-file.md": _job_file(),
        "settings.md": _settings(),
        "catalogue.md": _catalogue(),
        "commands.md": _commands(app_parser(lambda *_: 0), "Commands of sae-tui", COMMAND_EXAMPLES),
        "trainer.md": _commands(trainer_parser(), "Commands of the trainer", {}),
        "keys.md": _keys(),
        "exit-codes.md": _exit_codes(),
        "json.md": _answers(),
    }
    note = "<!-- Made by `make reference` from the code; change it there. -->\n\n"
    return {name: f"{note}{text.rstrip()}\n" for name, text in made.items()}


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(map(_cell, line))} |" for line in lines)


def _cell(text: str) -> str:
    """Return text as a single table cell: without line breaks, and with bars escaped."""
    return re.sub(r"\s+", " ", text).replace("|", "\\|").strip()


def _code(text: str) -> str:
    return f"`{text}`" if text else ""


def _plain(text: str) -> str:
    """Escape the characters in a help text that have a special meaning in Markdown."""
    return re.sub(r"([<*\[\]]|(?<!\w)_)", r"\\\1", text) if "`" not in text else text.replace("<", "&lt;")


def _setting_table(section: str, settings: Iterable[Setting]) -> str:
    head = ("key", "default", "values", "meaning")
    return _table(
        head,
        ([_code(setting.name), _default(setting), _takes(section, setting), _about(setting)] for setting in settings),
    )


def _default(setting: Setting) -> str:
    if setting.required:
        return "required"
    if setting.default is msgspec.NODEFAULT:  # a list field, created separately for each struct
        return "`[]`"
    return "none" if setting.default is None else _code(msgspec.json.encode(setting.default).decode())


def _takes(section: str, setting: Setting) -> str:
    words = choices_of(f"{section}.{setting.name}", setting)
    return ", ".join(f'`"{word}"`' for word in words) if words else _plain(_range(setting.wanted))


def _range(wanted: str) -> str:
    """Shorten `a number of at least 0 and of at most 86400 (s)` to `0–86,400 s`; return any other text unchanged."""
    found = _BOUNDED.fullmatch(wanted)
    if not found:
        return wanted.replace(" of at least 1 character(s)", "").replace(" and of at most ", ", at most ")
    least, most = (found[name] and f"{float(found[name]):,.10g}".replace("-", "−") for name in ("least", "most"))
    if least and most and (found["low"], found["high"]) == ("of at least", "of at most"):
        bounds = f"{least}–{most}" if not least.startswith("−") else f"{least} to {most}"
    else:
        low = least and f"{'≥' if found['low'] == 'of at least' else '>'} {least}"
        high = most and f"{'≤' if found['high'] == 'of at most' else '<'} {most}"
        bounds = " and ".join(filter(None, [low, high]))
    words = ["integer" if found["type"] == "an integer" else "" if bounds else "number", bounds, found["unit"]]
    return " ".join(filter(None, words)) + (found["auto"] or "")


def _about(setting: Setting) -> str:
    return _plain(setting.help) + (" *Rarely changed.*" if setting.advanced else "")


def _job_file() -> str:
    parts = [
        "# The job file",
        "A job file is TOML. Every key has a default unless it is marked as required. Unknown keys are errors."
        " `--set section.key=value` overrides any key. For keys that accept a list, a list of values creates a sweep."
        " If a default comes from a paper, the help text cites it. *Rarely changed* keys are behind `ctrl+t` on the"
        " launch screen.",
    ]
    whose = {"train": "", "extract": " of an extraction", "command": " of a command job"}
    for kind, entry in catalog.KINDS.items():
        parts += [f"## kind = {kind}", entry.summary]
        for name in job_class(kind).sections:
            parts += _section(name, heading=f"### [{name}]{whose[kind]}")
    return "\n\n".join(parts)


def _section(name: str, heading: str) -> Iterator[str]:
    yield heading
    if name not in CHOSEN:
        yield _setting_table(name, section_settings(name))
        return
    field, registry = CHOSEN[name]
    own = {word: settings_of(entry.settings) for word, entry in registry.items()}
    # A catalog entry's settings are documented with that entry.
    of_entries = {setting.name for settings in own.values() for setting in settings}
    yield _setting_table(name, (setting for setting in section_settings(name) if setting.name not in of_entries))
    for word, settings in own.items():
        if settings:
            yield f'**`{field} = "{word}"`** {registry[word].summary}'
            yield _setting_table(name, settings)


def _settings() -> str:
    return "\n\n".join(
        [
            "# Settings",
            "`settings.toml` in the data folder is read when `sae-tui` starts. `,` in the app edits it. An invalid"
            " value is reported, and the default is used instead.",
            _setting_table("settings", settings_of(Settings)),
            "## policy.toml",
            "[The policy of a machine](../how-to/shared-box.md#a-policy-for-all-users) is in"
            " `/etc/sae-tui/policy.toml`, or in a data folder that a group shares. An invalid value is reported by"
            " `sae-tui doctor`, and ignored.",
            _setting_table("policy", settings_of(Rules)),
            "Each `[[hours]]` section contains hours in which larger limits apply. A limit that it does not set is the"
            " usual one.",
            _setting_table("policy", settings_of(Hours)),
        ]
    )


def _catalogue() -> str:
    parts = ["# The catalogue", "The names that job files and flags accept."]
    for title, (path, registry) in _CATALOGUE.items():
        named = path if path.startswith("`") else _code(path)
        parts += [f"## {title}", f"For {named}.", _table(("name", "meaning"), _entries(registry))]
    metrics = (
        [_code(name), entry.series.title, _plain(entry.summary), entry.series.better or "", _yes(entry.held_out)]
        for name, entry in catalog.METRICS.items()
    )
    parts += ["## Metrics", _table(("name", "title", "meaning", "better", "also held out"), metrics)]
    return "\n\n".join(parts)


def _entries(registry: Mapping[str, Any]) -> Iterator[list[str]]:
    for name, entry in registry.items():
        use = f"; `{entry.use}` reads it" if isinstance(entry, catalog.FormatEntry) else ""
        yield [_code(name), _plain(entry.summary) + use]


def _yes(value: bool) -> str:
    return "yes" if value else ""


def _commands(parser: argparse.ArgumentParser, title: str, examples: Mapping[str, Sequence[str]]) -> str:
    """Return the page for a program: the global options, then each command with its arguments, options and examples."""
    program = parser.prog
    parts = [f"# {title}", _plain(parser.description or ""), _arguments(parser)]
    if not examples:
        parts.append(_console(OVERVIEW.partition("\n\n")[0].splitlines()[1:]))
    listed = _subcommands(parser)
    linked = ([f"[`{name}`](#{name})", _plain(told)] for name, _, told in listed)
    parts.append(_table(("command", "what it does"), linked))
    for name, command, _ in listed:
        usage = re.sub(r"\s+", " ", command.format_usage()).removeprefix("usage: ").strip()
        parts += [f"## {name}", _plain(command.description or ""), f"```text\n{usage}\n```", _arguments(command)]
        if name in examples:
            parts.append(_console(f"{program} {line}" for line in examples[name]))
    return "\n\n".join(part for part in parts if part)


def _console(lines: Iterable[str]) -> str:
    """Return commands as a code block. The text after two spaces in a line becomes a comment."""
    commented = (re.sub(r"\s{2,}(?=\S)", "  # ", line.strip(), count=1) for line in lines)
    return "```bash\n" + "\n".join(commented) + "\n```"


def _subcommands(parser: argparse.ArgumentParser) -> list[tuple[str, argparse.ArgumentParser, str]]:
    """Return the name, parser and help of each command that `--help` lists."""
    (group,) = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    told = {action.dest: action.help or "" for action in group._choices_actions}
    return [(name, command, told[name]) for name, command in group.choices.items() if name in told]


def _arguments(parser: argparse.ArgumentParser) -> str:
    rows = [row for action in parser._actions if (row := _argument(parser, action))]
    return _table(("argument", "meaning"), rows) if rows else ""


def _argument(parser: argparse.ArgumentParser, action: argparse.Action) -> list[str] | None:
    hidden = action.help == argparse.SUPPRESS or isinstance(action, argparse._HelpAction | argparse._SubParsersAction)
    if hidden:
        return None
    value = "" if action.nargs == 0 else _value_of(action)
    name = ", ".join(f"{flag} {value}".strip() for flag in action.option_strings) or value
    told = parser._get_formatter()._expand_help(action) if action.help else ""
    if action.choices and not isinstance(action.metavar, str):
        told = "; ".join(filter(None, [told, "one of " + ", ".join(map(str, action.choices))]))
    return [_code(name), _plain(told)]


def _value_of(action: argparse.Action) -> str:
    metavar = action.metavar if isinstance(action.metavar, str) else action.dest.upper()
    return {"*": f"[{metavar}...]", "+": f"{metavar}...", "?": f"[{metavar}]"}.get(str(action.nargs), metavar)


def _keys() -> str:
    parts = ["# Keys", "In the app, `?` shows the keys of the current screen. Here, all keys are listed by subject."]
    by_title: dict[str, dict[tuple[str, str], list[str]]] = {}
    for binding in bindings():
        title = title_of_key(binding)
        told = by_title.setdefault(_TITLES.get(title, title), {})
        told.setdefault((binding.description, binding.tooltip), []).append(_keys_of(binding))
    order = {title: place for place, title in enumerate(_FIRST_KEYS)}
    for title, rows in sorted(by_title.items(), key=lambda entry: (order.get(entry[0], len(order)), entry[0])):
        listed = ([" ".join(dict.fromkeys(keys)), name, _plain(what)] for (name, what), keys in rows.items())
        parts += [f"## {title}", _table(("key", "name", "what it does"), listed)]
    return "\n\n".join(parts)


def bindings() -> list[Binding]:
    """Return every key binding with a tooltip in the app, its screens, panels and widgets, without duplicates."""
    found: dict[tuple[str | None, str], Binding] = {}
    for _, binding in declared():
        if binding.tooltip:
            found.setdefault((binding.id, binding.key), binding)
    return list(found.values())


def declared() -> Iterator[tuple[type, Binding]]:
    """Yield every key binding in the app, its screens, panels and widgets, with the class that declares it."""
    for node in _nodes():
        yield from ((node, each) for each in vars(node).get("BINDINGS", []) if isinstance(each, Binding))


def _nodes() -> Iterator[type]:
    names = sorted(module.name for module in pkgutil.walk_packages(sae_tui.__path__, "sae_tui."))
    for name in names:
        if name.split(".")[1] in ("app", "app_parts", "screens", "panels", "widgets"):
            module = importlib.import_module(name)
            yield from (each for each in vars(module).values() if inspect.isclass(each) and each.__module__ == name)


def _keys_of(binding: Binding) -> str:
    shown = [binding.key_display] if binding.key_display else map(_sign, binding.key.split(","))
    return " ".join(_code(each) for each in shown)


def _sign(key: str) -> str:
    return _SIGNS.get(key) or (key if "+" in key else format_key(key))


def _exit_codes() -> str:
    return "\n\n".join(
        [
            "# Exit codes",
            "These are the exit codes of `sae-tui` and `sae-train`. They will not change.",
            _table(("code", "name", "meaning"), ((str(int(one)), one.short, one.meaning) for one in Exit)),
        ]
    )


def _answers() -> str:
    parts = [
        "# JSON output",
        "The fields that each command prints with `--json`, one level deep. `sae-tui schema COMMAND` prints the whole"
        " JSON Schema.",
    ]
    for name, schema in schemas().items():
        command, asked, rest = schema["title"].partition("--json")
        told = f"{_code(command + asked)}{rest}." if asked else f"{command}."
        parts += [f"## {name}", _plain(told)]
        tables = [_table(("field", "type", "meaning"), rows) for rows in _objects(schema, schema)]
        parts += dict.fromkeys(tables)
    return "\n\n".join(parts)


def _objects(shown: Mapping[str, Any], schema: Mapping[str, Any]) -> Iterator[list[list[str]]]:
    """Yield the fields of each object that JSON output can be, or can contain as a list element."""
    shown = _resolved(shown, schema)
    if "properties" in shown:
        fields = shown["properties"].items()
        yield [[_code(name), _type(field, schema), _plain(field.get("description", ""))] for name, field in fields]
    for part in [*shown.get("anyOf", []), shown.get("items")]:
        if isinstance(part, dict):
            yield from _objects(part, schema)


def _resolved(shown: Mapping[str, Any], schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the definition that a schema reference refers to."""
    while "$ref" in shown:
        shown = schema["$defs"][shown["$ref"].rpartition("/")[2]]
    return shown


def _type(field: Mapping[str, Any], schema: Mapping[str, Any]) -> str:
    field = _resolved(field, schema)
    if "anyOf" in field:
        return " or ".join(dict.fromkeys(_type(part, schema) for part in field["anyOf"]))
    if "enum" in field:
        return ", ".join(_code(json.dumps(word)) for word in field["enum"])
    if field.get("type") == "array":
        each = field.get("items")
        return f"list of {_type(each, schema)}" if isinstance(each, dict) else "list"
    return str(field.get("type", "any"))


if __name__ == "__main__":
    sys.exit(main())
