"""Tests for reading facts from recorded job files."""

from __future__ import annotations

import pytest

from sae_tui.jobs import output
from sae_tui.jobs.output import kind_of
from trainer.contract.settings.catalog import KINDS

SECTIONS = '[data]\npath = "rows"\n[sae]\nk = 32\n'


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        (f'name = "x"\n\n{SECTIONS}', "train"),
        (SECTIONS, "train"),
        ('kind = "extract"\nname = "x"\n[model]\npath = "m"\n', "extract"),
        ('name = "[x]"\nkind = "command"\n[command]\nargv = ["a"]\n', "command"),
        ('name = """\n[x]\n"""\nkind = "command"\n[command]\nargv = ["a"]\n', "command"),
        ('[launch]\nkind = "command"\n', "train"),
        ("", "train"),
        ("not a job file", "train"),
    ],
)
def test_the_kind_of_a_job_is_the_value_above_all_sections(config: str, kind: str) -> None:
    assert kind_of(config) is KINDS[kind]


def test_the_kinds_of_a_thousand_jobs_are_found_without_parsing_their_sections(monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: list[str] = []
    read = output.table_of
    monkeypatch.setattr(output, "table_of", lambda text: parsed.append(text) or read(text))
    configs = [f'name = "job {number}"\n\n{SECTIONS}' for number in range(1000)]
    for config in configs * 2:
        kind_of(config)
    assert len(parsed) == len(configs)
    assert not any("[data]" in text for text in parsed)
