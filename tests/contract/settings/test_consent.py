"""Tests that code in a job file is detected, and runs only with the user's consent."""

from __future__ import annotations

import pytest

from trainer.contract.settings.consent import NO_CONSENT, Consent, code_in, problems_of, refused, without

TABLE = {
    "model": {"path": "org/model", "remote_code": True},
    "launch": {"python": "/given/python", "sbatch_options": ["--qos=high", "--export=ALL"]},
}


@pytest.mark.parametrize(
    "option",
    ["--export=ALL,BASH_ENV=/x", "--exp=ALL", "--export-file=/x", "--get-user-env", "--uid=0", "--container=/x",
     "--prolog=/x", "--bcast", "--input=/x", "--propagate", "--comm=x", "--me=1", "--mem-", "--qos\n--export=x", 7,
     "--mailtype=x", "-x", "--bb=#x", "--burst-buffer-file=/x", "--test-only", "--network=x"],
)  # fmt: skip
def test_an_sbatch_option_not_known_to_be_harmless_needs_consent(option: object) -> None:
    assert [code.name for code in code_in({"launch": {"sbatch_options": [option]}})] == [str(option)]


def test_sbatch_options_that_choose_resources_need_no_consent() -> None:
    options = ["--qos=high", "--mem=64G", "--constraint=a100", "--exclude=n1", "--gres=gpu:2", "--mail-user=me@x"]
    assert not [*code_in({"launch": {"sbatch_options": options}})]


def test_each_consent_allows_only_the_code_that_it_names() -> None:
    paths = ["launch.python", "model.remote_code", "launch.sbatch_options"]
    assert [code.path for code in refused(TABLE, NO_CONSENT)] == paths
    for name, given in zip(("/given/python", "org/model", "--export=ALL"), paths, strict=True):
        rest = [path for path in paths if path != given]
        assert [code.path for code in refused(TABLE, Consent(names=(name,)))] == rest
        assert [code.path for code in refused(TABLE, NO_CONSENT.given([f" {given} = x", "sae.k=2"]))] == rest
    assert not refused(TABLE, Consent(to_all=True))
    # If other users can write to the job file, they could change its code after the user has consented.
    assert len(refused(TABLE, Consent(to_all=True, names=("org/model",)), "others may write to it")) == 3
    assert not refused(without(TABLE, refused(TABLE, NO_CONSENT)), NO_CONSENT)
    assert TABLE["launch"]["python"]


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("env", ["PATH=/evil:/usr/bin"]),
        ("env", ["SEED=1", "LD_PRELOAD=/evil.so"]),
        ("folder", "/evil"),
        ("folder", "x"),
    ],
)
def test_variables_and_a_folder_also_need_consent_because_they_decide_what_a_command_runs(path, value) -> None:
    table = {"kind": "command", "command": {"argv": ["make"], path: value}}
    for consent in (Consent(names=("make",)), NO_CONSENT.given(['command.argv=["make"]'])):
        found = refused(table, consent)
        assert [code.path for code in found] == [f"command.{path}"] * (len(value) if path == "env" else 1)
        named = consent._replace(names=(*consent.names, *(code.name for code in found)))
        assert not refused(table, named)
        assert not refused(without(table, found), consent)


def test_code_is_found_in_a_table_of_any_shape() -> None:
    for odd in (
        {"launch": 3},
        {"model": ["x"]},
        {"launch": {"sbatch_options": "--export=x"}},
        {"data": None},
        {"command": {"env": "A=1", "argv": 3}},
    ):
        assert not refused(odd, NO_CONSENT)
    assert refused({"data": {"remote_code": "yes"}}, NO_CONSENT)


def test_the_error_names_the_code_and_the_ways_to_allow_it() -> None:
    for problem, name in zip(problems_of(refused(TABLE, NO_CONSENT)), ("python", "org/model", "--export"), strict=True):
        assert name in problem.message
        assert "; add --allow-code, or list " in problem.message
