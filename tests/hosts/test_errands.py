from __future__ import annotations

from pathlib import Path

import pytest
from support.far_side import far_side, runs_of

from sae_tui.hosts.hosts import Hosts
from trainer.contract.errors import UserError


def hosts(folder: Path, **programs: str) -> Hosts:
    for name, program in programs.items():
        (folder / name).write_text(program)
    return Hosts(["far"], far_side(folder), demo=True)


def test_an_errand_runs_a_command_there_and_tells_its_last_line(tmp_path: Path) -> None:
    there = hosts(tmp_path, stop="say('warned'); say('job 7 stops \\x1b[2J')")
    assert there.run("far", "stop", "7") == "on far: job 7 stops �[2J"
    assert runs_of(tmp_path) == [["stop", "7", "--demo"]]


def test_a_job_is_launched_there_from_the_file_that_is_sent(tmp_path: Path) -> None:
    there = hosts(tmp_path, launch="say(f'job 3 of {len(sys.stdin.read())} characters is queued')")
    assert there.launch("far", "name = 'x'\n" * 20_000, "auto:2") == "on far: job 3 of 220000 characters is queued"
    assert runs_of(tmp_path) == [["launch", "/dev/stdin", "--gpus", "auto:2", "--demo"]]


@pytest.mark.parametrize(
    ("program", "sentence"),
    [
        ("sys.stderr.write('sae-tui: error: there is no job 7\\n'); sys.exit(1)", "^on far: there is no job 7$"),
        (
            "sys.stderr.write('x: Permission denied (publickey).\\n'); sys.exit(255)",
            "^host far takes none of your keys",
        ),
        ("sys.exit(127)", "^host far has no sae-tui on its PATH"),
        ("[say('x' * 99) for _ in range(10**6)]", "^on far: x+$"),
    ],
)
def test_an_errand_that_fails_says_why_however_much_is_written(tmp_path: Path, program, sentence) -> None:
    with pytest.raises(UserError, match=sentence):
        hosts(tmp_path, stop=program).run("far", "stop", "7")
