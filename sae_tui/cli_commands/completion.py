"""Completes commands, flags and job ids in bash, zsh and fish. argcomplete runs this program to get the candidates."""

from __future__ import annotations

import argparse
import os
import pwd
import shlex
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from sae_tui.cli_commands.context import CommandContext
from sae_tui.cli_commands.output import say, show_json, text
from sae_tui.cli_commands.parser import SHELLS
from trainer.contract.errors import BadUsage, UserError, sentence
from trainer.contract.exits import Exit
from trainer.contract.files import open_plain, write_own
from trainer.contract.json_file import LARGEST
from trainer.contract.output import show_text
from trainer.contract.paths import private_folder
from trainer.contract.trust import distrust_of_program, distrust_of_searched
from trainer.contract.wording import plural

if TYPE_CHECKING:
    from sae_tui.jobs.view.reader import JobsReader

PROGRAM = "sae-tui"
_MARK = f"# Written by `{PROGRAM} completion --install`."


def job_ids(parsed_args: argparse.Namespace, **_: object) -> dict[str, str]:
    """Return a dict mapping each job id to the job's name and state."""
    return _described(_jobs(parsed_args))


def _jobs(parsed_args: argparse.Namespace) -> JobsReader:
    from sae_tui.jobs.view.reader import JobsReader

    reader = JobsReader(CommandContext(parsed_args).data)
    reader.poll()
    return reader


def _described(reader: JobsReader) -> dict[str, str]:
    from sae_tui.jobs.states import describe_state

    return {str(job.id): f"{text(job.name)} ({describe_state(job).word})" for job in reader.jobs}


def ids_and_tags(parsed_args: argparse.Namespace, **_: object) -> dict[str, str]:
    """Return the dict from `job_ids`, extended with each tag and the number of jobs that have it."""
    reader = _jobs(parsed_args)
    tags = Counter(tag for job in reader.jobs for tag in job.tags)
    named = {f"#{text(tag)}": plural(number, "job") for tag, number in tags.items()}
    return _described(reader) | named


def complete_in_shell(context: CommandContext, flags: argparse.Namespace) -> int:
    """Print the code for the shell's start-up file; with `--install`, write the file that the shell loads."""
    shell = flags.shell or (_own_shell() if flags.install else None)
    if shell not in SHELLS:
        raise _which_shell()
    if flags.install:
        return _install(context, shell)
    if context.as_json:
        show_json({"shell": shell, "script": _script(shell)})
    else:
        show_text(_script(shell))
    return Exit.DONE


def _which_shell() -> BadUsage:
    message, fix = "SHELL: the shell is unknown", "give bash, zsh or fish"
    return BadUsage(message, f"{PROGRAM}: error: {message}; {fix}\n", fix)


def _script(shell: str) -> str:
    import argcomplete

    script: str = argcomplete.shell_integration.shellcode([PROGRAM], shell=shell)
    return script


def _own_shell() -> str:
    """Return the name of the shell in $SHELL or, if that is unset (as in containers), of the user's login shell."""
    return os.path.basename(os.environ.get("SHELL") or _login_shell())


def _login_shell() -> str:
    """Return the path to this user's login shell, or "" if the system does not know the user."""
    try:
        return pwd.getpwuid(os.getuid()).pw_shell
    except KeyError:
        return ""


def _install(context: CommandContext, shell: str) -> int:
    """Write the completion script to the file that the shell loads; refuse to overwrite another program's file."""
    file, content = file_for(shell), _marked(_script(shell), shell)
    try:
        # Every new shell runs this file, so its folder must be trustworthy.
        if why := distrust_of_searched(private_folder(file.parent)):
            raise UserError(why)
        if changed := _text_of_ours(file) != content:
            write_own(file, content)
        elif why := distrust_of_program(file):
            raise UserError(why)
    except OSError as error:
        raise UserError(f"{file} cannot be written: {sentence(error)}") from None
    left, undo = _left_to_do(shell, file), shlex.join(["rm", str(file)])
    if context.as_json:
        show_json({"shell": shell, "file": str(file), "changed": changed, "next": left, "undo": undo})
        return Exit.DONE
    say(f"wrote {file}" if changed else f"{file} is up to date")
    say(left)
    say(f"`{undo}` undoes this")
    return Exit.DONE


def file_for(shell: str) -> Path:
    """Return the path in the user's home folder from which a shell loads this program's completions."""
    from sae_tui.jobs.user import home_folder

    home = home_folder()
    data = Path(os.environ.get("XDG_DATA_HOME") or home / ".local" / "share")
    config = Path(os.environ.get("XDG_CONFIG_HOME") or home / ".config")
    of_bash = Path(os.environ.get("BASH_COMPLETION_USER_DIR") or data / "bash-completion")
    return {
        "bash": of_bash / "completions" / PROGRAM,
        "zsh": data / "zsh" / "site-functions" / f"_{PROGRAM}",
        "fish": config / "fish" / "completions" / f"{PROGRAM}.fish",
    }[shell]


def _left_to_do(shell: str, file: Path) -> str:
    if shell == "zsh":
        return (
            f"add `fpath=({shlex.quote(str(file.parent))} $fpath)` to ~/.zshrc, before compinit, and open a new shell"
        )
    needs = " (if the package bash-completion is installed)" if shell == "bash" else ""
    return f"new shells complete {PROGRAM}{needs}"


def _marked(script: str, shell: str) -> str:
    """Return the script with `_MARK` in the first line, or in the second for zsh, where `#compdef` must be first."""
    first, _, rest = script.lstrip("\n").partition("\n")
    return f"{first}\n{_MARK}\n{rest}" if shell == "zsh" else f"{_MARK}\n{script}"


def _text_of_ours(file: Path) -> str | None:
    """Return the file's content, or None if it is missing; raise `UserError` for a link or another program's file."""
    try:
        if file.is_symlink():
            raise UserError(f"{file} is a symbolic link; remove it first")
        with open_plain(file) as stream:
            content = stream.read(LARGEST).decode(errors="replace")
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UserError(f"{file} cannot be read: {sentence(error)}") from None
    if _MARK not in content.splitlines()[:2]:
        raise UserError(f"{file} was not written by {PROGRAM} completion --install; remove it first")
    return content
