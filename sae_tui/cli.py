"""The `sae-tui` program. Without a command, it opens the app; the commands offer the app's functions to scripts."""

# ruff: noqa: E402
from __future__ import annotations

from sae_tui import own_trainer

own_trainer.refuse_another()

import argparse
import functools
import gc
import os
import re
import shlex
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from sae_tui.cli_commands.parser import Command, CommandParser, make_parser
from sae_tui.threads import is_stuck
from sae_tui.web import BROWSER_DRIVER
from trainer.contract.errors import BadUsage, JobFileError, UsageError, UserError
from trainer.contract.exits import Exit
from trainer.contract.output import OutputLost, can_show, complain, run_command
from trainer.contract.paths import keep_own_access
from trainer.contract.process import take_back_signals
from trainer.contract.settings.inspectors import Inspector, inspecting_by

if TYPE_CHECKING:
    from sae_tui.cli_commands.context import CommandContext
    from sae_tui.jobs.shard_headers import ShardHeaders
    from trainer.contract.paths import DataDir

# When the shell requests completions, it sets the first variable, and sets the second one to the command line.
_ASKED, _LINE = "_ARGCOMPLETE", "COMP_LINE"
_GARBAGE = 10_000  # new objects before garbage is collected


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. Print each user error on one line."""
    take_back_signals()
    keep_own_access()
    is_process = argv is None
    if is_process:
        # At the usual threshold, a short command looks for garbage dozens of times while it loads its modules.
        gc.set_threshold(_GARBAGE)
    code = run_command(lambda: _main(argv), teller="sae-tui: error: ")
    if is_stuck():
        os._exit(code)
    if is_process:
        # Otherwise the process would look for garbage in all modules before it ends.
        gc.freeze()
    return code


def _main(argv: Sequence[str] | None) -> int:
    given = sys.argv[1:] if argv is None else argv
    try:
        return _run(_flags(given))
    except BadUsage as error:
        from trainer.contract.failure import asks_for_json

        return _refuse(error, as_json=asks_for_json(given))
    except KeyboardInterrupt:
        return Exit.INTERRUPTED


def _flags(given: Sequence[str]) -> argparse.Namespace:
    asked = _ASKED in os.environ
    parser = make_parser(_open_app, re.findall(r"[\w-]+", os.environ.get(_LINE, "")) if asked else given)
    if asked:
        _complete(parser)
    flags = parser.parse_args(given)
    flags.given = [*given]
    if hasattr(flags, "only_gpus") and not flags.takes_only:
        parser.error("--only: works only in the app, in gpus and in metrics; leave it out")
    for name in ("readonly", "plain", "host"):
        if getattr(flags, name) and flags.command is not _open_app:
            parser.error(f"--{name}: works only in the app; leave it out, or leave out the command")
    return flags


def _complete(parser: CommandParser) -> None:
    """Print the completions requested by the shell, and exit."""
    import argcomplete

    # Also complete the flags listed only in the main program's help.
    argcomplete.autocomplete(parser, print_suppressed=True)


def _run(flags: argparse.Namespace) -> int:
    command: Command = flags.command
    try:
        from sae_tui.cli_commands.context import CommandContext

        context = CommandContext(flags)
        with inspecting_by(_inspector(context.data)):
            return command(context, flags)
    except OutputLost:
        raise
    except UserError as error:
        return _refuse(error, as_json=getattr(flags, "json", False))


def _inspector(data: DataDir) -> Inspector:
    """Return the inspector for shards that need torch or pyarrow; its module is loaded when it is first called."""

    @functools.cache
    def headers() -> ShardHeaders:
        from sae_tui.jobs.shard_headers import ShardHeaders

        return ShardHeaders(data)

    return lambda root, files, field: headers().inspect(root, files, field)


def _refuse(error: UserError, *, as_json: bool) -> Exit:
    """Report the error, as JSON for scripts or as one line per problem for people; return the exit code."""
    from sae_tui.cli_commands.output import warn

    if as_json:
        from trainer.contract.failure import show_failure

        show_failure(error)
    elif isinstance(error, BadUsage):
        complain(error.sentence)
    elif isinstance(error, JobFileError):
        for problem in error.problems:
            warn(f"error: {problem}")
    else:
        warn(f"error: {error}")
    return _exit_of(error)


def _exit_of(error: UserError) -> Exit:
    """Return the exit code for an error; only errors in the command line itself are usage errors."""
    is_usage = error.is_usage if isinstance(error, JobFileError) else isinstance(error, UsageError)
    return Exit.USAGE if is_usage else Exit.FAILED


def _open_app(context: CommandContext, flags: argparse.Namespace) -> int:
    in_browser = os.environ.get("TEXTUAL_DRIVER") == BROWSER_DRIVER
    if in_browser:
        from trainer.contract.prctl import end_with_parent

        # Exit when the server process exits.
        # If the server has already exited, the app finds its standard input closed.
        end_with_parent(os.getppid())
    elif not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise UserError(
            "the app needs a terminal; use sae-tui serve to open it in a browser, "
            "or use a command in a script (see sae-tui --help)"
        )
    elif not flags.plain and not can_show("█▁⣿…", sys.stdout):
        raise UserError(
            f"the app needs characters that this locale ({sys.stdout.encoding}) cannot encode; "
            "start it with LC_ALL=C.UTF-8 or with --plain, or use the commands (see sae-tui --help)"
        )
    context.refuse_missing_gpus()
    # Before the first frame, garbage collection would take a tenth of the startup time and free almost no memory.
    gc.disable()
    from sae_tui.start import run_app

    # Without a command, all arguments are options, so repeating the command line reopens the same app.
    command = shlex.join(["sae-tui", *sys.argv[1:]])
    return run_app(
        data=context.data,
        source_name=context.source_name,
        gpu_count=context.gpu_count,
        only=context.only,
        command=command,
        readonly=flags.readonly,
        plain=flags.plain,
        hosts=flags.host,
        in_browser=in_browser,
    )


if __name__ == "__main__":
    sys.exit(main())
