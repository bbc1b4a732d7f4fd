"""Masks secrets in command lines and environment variables before they reach screens, browsers and other hosts."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

HIDDEN = "…"
# Variables whose values are harmless. All other values are hidden, because a variable with any name may contain a
# secret.
_HARMLESS = re.compile(
    r"(CUDA|HIP|ROCR|ROCM|HSA|NVIDIA_(VISIBLE|DRIVER)|NCCL|RCCL|GLOO|UCX|OMP|MKL|OPENBLAS|KMP|GOMP|NUMEXPR|SLURM"
    r"|TORCHELASTIC|LC|XDG)_\w+"
    r"|(PYTORCH|TORCH|TRITON|PYTHON)\w*|PATH|HOME|USER|LOGNAME|SHELL|PWD|OLDPWD|TERM|COLORTERM|LANG|LANGUAGE|TZ"
    r"|TMPDIR|TMP|TEMP|HOSTNAME|HOST|SHLVL|DISPLAY|EDITOR|VISUAL|PAGER|LD_LIBRARY_PATH|LD_PRELOAD|VIRTUAL_ENV"
    r"|CONDA_(PREFIX|DEFAULT_ENV|SHLVL|EXE)|RANK|LOCAL_RANK|GROUP_RANK|ROLE_RANK|(LOCAL_|GROUP_|ROLE_)?WORLD_SIZE"
    r"|MASTER_(ADDR|PORT)|HF_(HOME|HUB_OFFLINE|HUB_CACHE|DATASETS_CACHE)|TRANSFORMERS_(CACHE|OFFLINE)|TOKENIZERS_PARALLELISM"
    r"|WANDB_(MODE|PROJECT|DIR)|SAE_TUI_(DATA_DIR|JOB_ID)"
)
# Words that indicate a secret value if an option or key name contains them.
_SECRET_WORD = re.compile(
    "key|token|secret|password|passwd|passphrase|pass|pwd|pw|pin|pat|credentials?|cookie|auth|authorization|bearer"
    "|signature|sig|jwt|dsn|session|licen[sc]e|netrc|.*(token|secret|password|passwd|pwd|apikey|passphrase|accesskey)"
)
_WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")
# Tokens for well-known services, recognised by their prefixes.
_TOKEN = re.compile(
    r"\b(hf_|api_org_|gh[pousr]_|github_pat_|glpat-|sk-|pk-|rk_|AKIA|ASIA|xox[a-z]-|eyJ|ya29\.|AIza|pypi-|npm_|dckr_pat_"
    r"|ATATT|nvapi-|lsv2_|dop_v1_|shpat_|r8_|gsk_|SG\.)[\w./+=~-]{3,}"
)
_PRIVATE_KEY = re.compile(r"-----BEGIN[\s\S]*")
# Greedy because a password in a URL may contain a slash, a space or an @.
_IN_ADDRESS = re.compile(r"(\w://)[^\"']*@")
_HOOK = re.compile(r"(hooks?\.[\w.-]+/)\S+", re.IGNORECASE)
# A name and its value within text such as JSON, a query or a header.
_PAIR = re.compile(
    r"([\w.-]+)([\"']?\s*(?:=|:(?!//))\s*(?:(?:Bearer|Basic|Token)\s+)?)(\"[^\"]*\"?|'[^']*'?|[^\s&;,\"']+)"
)
# A name and its value within a shell command or a process title.
_OPTION = re.compile(r"(?<!\S)(--?[A-Za-z][\w-]*)(\s+)(?!-)(\S+)")
_BEHIND_PROGRAM = re.compile(
    r"\b((?:mysql|mysqldump|mariadb)\b[^|;&]*?\s-p|(?:sshpass|login)\b[^|;&]*?\s-p\s*|smbclient\b[^|;&]*?\s-U\s*"
    r"|curl\b[^|;&]*?\s(?:-u|-U|--user|--proxy-user)[\s=]*|redis-cli\b[^|;&]*?\s-a\s*)(?=\S)[^\s;&|]+"
)
_BEARER = re.compile(r"\b(Bearer|Basic)\s+[\w.~+/=-]+")
_SCHEMES = ("Bearer", "Basic", "Token")
# Options whose value is a password, or a user name with a password, by program or subcommand (`docker login`).
_OPTIONS: Mapping[str, tuple[str, ...]] = {
    "mysql": ("-p",), "mysqldump": ("-p",), "mariadb": ("-p",), "sshpass": ("-p",), "login": ("-p",),
    "smbclient": ("-U",), "curl": ("-u", "-U", "--user", "--proxy-user"), "redis-cli": ("-a",),
}  # fmt: skip
# These programs accept a password only directly after -p. If a space follows, the next word is a database name.
_ATTACHED = ("mysql", "mysqldump", "mariadb")
# Longer text is truncated because searching it would take seconds.
_LONGEST = 4096


def is_secret_name(name: str) -> bool:
    """Return whether an option, key or variable name suggests that its value is a secret."""
    return any(_SECRET_WORD.fullmatch(word.lower()) for word in _WORD.findall(name))


def is_harmless(name: str) -> bool:
    """Return whether the value of this environment variable may be shown."""
    return bool(_HARMLESS.fullmatch(name)) and (name in ("PWD", "OLDPWD") or not is_secret_name(name))


def masked(text: str) -> str:
    """Mask everything in `text` that looks like a secret; truncate long text because searching it is slow."""
    text = text if len(text) <= _LONGEST else f"{text[:_LONGEST]}{HIDDEN}"
    text = _PRIVATE_KEY.sub(HIDDEN, text)
    text = _IN_ADDRESS.sub(rf"\1{HIDDEN}@", text)
    text = _HOOK.sub(rf"\1{HIDDEN}", text)
    text = _TOKEN.sub(rf"\1{HIDDEN}", text)
    text = _PAIR.sub(lambda pair: f"{pair[1]}{pair[2]}{HIDDEN}" if is_secret_name(pair[1]) else pair[0], text)
    text = _OPTION.sub(lambda given: f"{given[1]}{given[2]}{HIDDEN if is_secret_name(given[1]) else given[3]}", text)
    text = _BEHIND_PROGRAM.sub(rf"\1{HIDDEN}", text)
    return _BEARER.sub(rf"\1 {HIDDEN}", text)


def masked_arguments(arguments: Iterable[str]) -> list[str]:
    """Mask the secrets in a command line, recognised by option names and token formats.

    A program may start another program (`sudo curl -u …`), so any argument may name a program whose options follow.
    """
    program, hides, previous, shown = "", False, "", []
    for argument in arguments:
        option = _secret_option(program, argument)
        if argument in _SCHEMES:
            shown.append(argument)
            hides = True
        elif hides and not argument.startswith("--"):
            shown.append(HIDDEN)
            hides = False
        elif option:
            is_alone = argument == option
            shown.append(option if is_alone else f"{option}{'=' * option.startswith('--')}{HIDDEN}")
            hides = is_alone and program not in _ATTACHED
        else:
            shown.append(masked(argument))
            hides = _announces_secret(argument) or (previous, argument) == ("wandb", "login")
        base = argument.rpartition("/")[2]
        program, previous = (base if base in _OPTIONS else program), base
    return shown


def masked_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Mask the secrets in a job file's command line and variables; keep its other settings.

    `settings` maps paths like `command.argv` to values.
    """
    shown = dict(settings)
    if isinstance(argv := shown.get("command.argv"), list):
        shown["command.argv"] = masked_arguments(map(str, argv))
    if isinstance(variables := shown.get("command.env"), list):
        shown["command.env"] = [masked(str(entry)) for entry in variables]
    return shown


def _secret_option(program: str, argument: str) -> str:
    """Return the option at the start of an argument if the option's value is secret for this program, otherwise ""."""
    for option in _OPTIONS.get(program, ()):
        if argument == option or argument.startswith(f"{option}=" if option.startswith("--") else option):
            return option
    return ""


def _announces_secret(argument: str) -> bool:
    """Return whether a secret follows this argument, as after `--hf-token`, `token:` or `aws_secret_access_key`."""
    is_name = argument.startswith("-") or argument.endswith(":") or re.fullmatch(r"\w+_\w+", argument)
    return bool(is_name) and "=" not in argument and is_secret_name(argument)
