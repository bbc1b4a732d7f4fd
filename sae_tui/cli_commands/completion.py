"""Completion of commands, flags and job ids in bash, zsh and fish; argcomplete asks this program for the words."""

from __future__ import annotations

import argparse
import os
import pwd
import shlex
from pathlib import Path

from sae_tui.cli_commands.context import Context
from sae_tui.cli_commands.output import say, show_json, text
from sae_tui.jobs.states import describe_state
from sae_tui.jobs.user import home_folder
from sae_tui.jobs.view.reader import JobsReader
from trainer.contract.errors import BadUsage, UserError, sentence
from trainer.contract.exits import Exit
from trainer.contract.files import open_plain, write_own
from trainer.contract.json_file import LARGEST
from trainer.contract.output import show_text
from trainer.contract.paths import private_folder
from trainer.contract.trust import distrust_of_program, distrust_of_searched

SHELLS = ("bash", "zsh", "fish")
PROGRAM = "sae-tui"
_MARK = f"# Written by `{PROGRAM} completion --install`."
# Set by the shell while it asks.
_ASKED = "_ARGCOMPLETE"


def complete(parser: argparse.ArgumentParser) -> None:
    """Answer the shell and exit, where the shell asks for completions; else do nothing, at no cost."""
    if _ASKED in os.environ:
        import argcomplete

        # Complete also the flags that only the help of the whole program describes.
        argcomplete.autocomplete(parser, print_suppressed=True)


def job_ids(parsed_args: argparse.Namespace, **_: object) -> dict[str, str]:
    """Return the id of every job with its name and state."""
    reader = JobsReader(Context(parsed_args).data)
    reader.poll()
    return {str(job.id): f"{text(job.name)} ({describe_state(job).word})" for job in reader.jobs}


def complete_in_shell(context: Context, flags: argparse.Namespace) -> int:
    """Print the code that belongs into the shell's start-up file, or with `--install` write the file it looks for."""
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
    message, fix = "SHELL: it is not known which one", "name bash, zsh or fish"
    return BadUsage(message, f"{PROGRAM}: error: {message}; {fix}\n", fix)


def _script(shell: str) -> str:
    import argcomplete

    script: str = argcomplete.shell_integration.shellcode([PROGRAM], shell=shell)
    return script


def _own_shell() -> str:
    """Return the name of the shell of $SHELL, which containers and services leave out, or else of the login."""
    return os.path.basename(os.environ.get("SHELL") or _login_shell())


def _login_shell() -> str:
    """Return the path of the shell that this user logs in with; empty where the user is not known to the system."""
    try:
        return pwd.getpwuid(os.getuid()).pw_shell
    except KeyError:
        return ""


def _install(context: Context, shell: str) -> int:
    """Write the script where the shell looks for it; refuse a file that is not ours."""
    file, content = file_for(shell), _marked(_script(shell), shell)
    try:
        # What lies there is run by each shell that starts.
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
    say(f"{file} {'is written' if changed else 'was there already'}")
    say(left)
    say(f"`{undo}` takes it back")
    return Exit.DONE


def file_for(shell: str) -> Path:
    """Return the file of this user in which a shell looks for what completes this program."""
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
            f"put `fpath=({shlex.quote(str(file.parent))} $fpath)` into ~/.zshrc, above compinit, and open a new shell"
        )
    needs = ", which needs the package bash-completion" if shell == "bash" else ""
    return f"a new shell completes {PROGRAM}{needs}"


def _marked(script: str, shell: str) -> str:
    """Return the script with our mark in its second line, since the first of zsh has to be its own."""
    first, _, rest = script.lstrip("\n").partition("\n")
    return f"{first}\n{_MARK}\n{rest}" if shell == "zsh" else f"{_MARK}\n{script}"


def _text_of_ours(file: Path) -> str | None:
    """Return what is in the file, None where there is none; raise `UserError` where it is a link or not ours."""
    try:
        if file.is_symlink():
            raise UserError(f"{file} is a link; remove it first")
        with open_plain(file) as stream:
            content = stream.read(LARGEST).decode(errors="replace")
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UserError(f"{file} cannot be read: {sentence(error)}") from None
    if _MARK not in content.splitlines()[:2]:
        raise UserError(f"{file} is not by {PROGRAM} completion --install; remove it first")
    return content
