"""Tests for command-line errors: which command's help they refer to, and their exit codes."""

from __future__ import annotations

import pytest

from sae_tui.cli_commands.parser import COMMAND_EXAMPLES, make_parser
from trainer.contract.errors import BadUsage
from trainer.parser import make_parser as make_trainer_parser


@pytest.mark.parametrize("command", COMMAND_EXAMPLES)
def test_an_unknown_flag_of_a_command_refers_to_that_commands_help(command: str) -> None:
    with pytest.raises(BadUsage) as refused:
        make_parser(lambda *_: 0).parse_args([command, "--no-such-flag"])
    assert refused.value.sentence.endswith(f"; see sae-tui {command} --help\n")


def test_an_unknown_flag_before_a_jobs_command_is_named(shell) -> None:
    (line,) = shell.errors("run", "--cpu", "--", "true", code=2)
    assert line == "sae-tui: error: unrecognized arguments: --cpu; see sae-tui run --help"
    (line,) = shell.errors("--no-such-flag", "jobs", code=2)
    assert line == "sae-tui: error: unrecognized arguments: --no-such-flag; see sae-tui --help"


def test_an_unknown_flag_of_a_trainer_command_refers_to_that_commands_help() -> None:
    with pytest.raises(BadUsage) as refused:
        make_trainer_parser().parse_args(["run", "job.toml", "--no-such-flag"])
    assert refused.value.fix.endswith(" run --help")


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        (["stop", 1, "--kill", "--finish"], "--finish"),
        (["stop", 1, "--evaluation", "--kill"], "--evaluation"),
        (["metrics", "--csv"], "--csv"),
        (["schema", "no-such-command"], "COMMAND"),
        (["priority", 1, "--to", 101], "--to"),
    ],
)
def test_contradictory_or_invalid_arguments_exit_with_2(shell, arguments: list[object], field: str) -> None:
    assert shell.json(*arguments, code=2)["error"]["field"] == field


def test_an_invalid_job_file_is_not_a_usage_error(shell) -> None:
    shell.job_file.write_text('kind = "command"\n[command]\nargv = []\n')
    assert shell.json("launch", shell.job_file, code=1)["error"]["field"] == "command.argv"
