"""Tests that a job file is read back as it was written, and that each mistake is reported with its setting."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from trainer.contract.errors import JobFileError, Problem
from trainer.contract.printable import CONTROL
from trainer.contract.settings.catalog import ARCHITECTURES, MIRRORS
from trainer.contract.settings.declare import Setting, settings_of
from trainer.contract.settings.job import JobConfig, SweepAxis
from trainer.contract.settings.job_file import (
    apply_override,
    dump_job,
    load_job,
    parse_any,
    parse_job,
    to_table,
)
from trainer.contract.settings.sections import CHOSEN, choices_of, section_settings

MINIMAL = {"data": {"path": "acts"}}
PRESETS = sorted((Path(__file__).parents[3] / "data" / "presets").glob("*.toml"))


def values(kind: msgspec.inspect.Type) -> st.SearchStrategy[Any]:
    """Draw a value of the given type. Integers have up to 64 bits."""
    match kind:
        case msgspec.inspect.Metadata():
            return values(kind.type)
        case msgspec.inspect.UnionType():
            return st.one_of(*map(values, kind.types))
        case msgspec.inspect.LiteralType():
            return st.sampled_from(kind.values)
        case msgspec.inspect.NoneType():
            return st.none()
        case msgspec.inspect.BoolType():
            return st.booleans()
        case msgspec.inspect.IntType():
            return st.integers(-(2**63) if kind.ge is None else kind.ge, 2**63 - 1 if kind.le is None else kind.le)
        case msgspec.inspect.FloatType():
            low = kind.ge if kind.gt is None else kind.gt
            high = next((bound for bound in (kind.le, kind.lt) if bound is not None), 2.0**62)
            return st.floats(low, high, exclude_min=kind.gt is not None, exclude_max=kind.lt is not None)
        case msgspec.inspect.ListType():
            return st.lists(values(kind.item_type), max_size=3)
        case msgspec.inspect.StrType(pattern=str()):
            return st.from_regex(kind.pattern, fullmatch=True)
        case msgspec.inspect.StrType():
            return st.text(min_size=kind.min_length or 0, max_size=kind.max_length)
    raise NotImplementedError(kind)


GPUS = st.one_of(
    st.sampled_from(["auto", "auto:1", "auto:16", "cpu", "cpu:2"]),
    st.lists(st.integers(0, 15), min_size=1, unique=True),
)

MIRROR_NAMES = st.sampled_from(sorted(MIRRORS))
MIRROR_CHOICES = st.one_of(st.none(), MIRROR_NAMES, st.lists(MIRROR_NAMES, unique=True))


# Arbitrary text might be parsed as several hooks, which would make the setting a sweep axis.
HOOKS = st.sampled_from(["resid_post.12", "blocks.0.hook_mlp_out", "model.layers.3.mlp"])
OF_THEIR_OWN = {
    "launch.gpus": GPUS,
    "train.mirror": MIRROR_CHOICES,
    "data.hook": HOOKS,
    # Only crosscoders have parts.
    "sae.rank_by": st.just("sae"),
    # A cross-layer transcoder needs several hooks.
    "sae.cross_layer": st.just(False),
    # Only the layers of a cross-layer transcoder can share k.
    "sae.share_k": st.just(False),
    # `random_twin` is shorthand for a sweep over sae.freeze.
    "train.random_twin": st.just(False),
}


def allowed(path: str, setting: Setting) -> st.SearchStrategy[Any]:
    if path in OF_THEIR_OWN:
        return OF_THEIR_OWN[path]
    choices = choices_of(path, setting)
    return st.sampled_from(choices) if choices else values(msgspec.inspect.type_info(setting.annotation))


@st.composite
def tables(draw: st.DrawFn) -> dict[str, Any]:
    """Draw a job table with a valid value for every setting of every section."""
    (name_setting,) = settings_of(JobConfig)
    table: dict[str, Any] = {"name": draw(allowed("name", name_setting).filter(lambda text: not CONTROL.search(text)))}
    for section in JobConfig.sections:
        chosen = {}
        if section in CHOSEN:
            field, registry = CHOSEN[section]
            chosen = {field: draw(st.sampled_from(sorted(registry)))}
        declared = section_settings(section, *chosen.values())
        drawn = {setting.name: draw(allowed(f"{section}.{setting.name}", setting)) for setting in declared}
        table[section] = {key: value for key, value in (drawn | chosen).items() if value is not None}
    if table["sae"]["freeze"] != "off":
        table["sae"]["resample_every_tokens"] = 0
    return table


@given(tables())
@settings(max_examples=150, suppress_health_check=[HealthCheck.too_slow])
def test_a_written_job_is_read_back_unchanged(table: dict[str, Any]) -> None:
    job, problems = parse_job(table)
    assert job is not None, problems
    assert parse_job(tomllib.loads(dump_job(job))) == (job, [])
    assert to_table(job) == table


def test_a_written_job_contains_all_settings_with_a_value() -> None:
    job, _ = parse_job(MINIMAL)
    assert job is not None
    table = to_table(job)
    for section in JobConfig.sections:
        with_default = {
            setting.name for setting in section_settings(section) if setting.required or setting.default is not None
        }
        assert set(table[section]) == with_default
    assert table["name"] == "sae"
    assert table["sae"]["k"] == 32


def test_a_written_file_can_be_loaded_again(tmp_path: Path) -> None:
    acts = tmp_path / "acts"
    acts.mkdir()
    job, _ = parse_job(
        {"name": "ü \"'", "data": {"path": str(acts)}, "train": {"lr": 1e-5}, "launch": {"gpus": [3, 0]}}
    )
    assert job is not None
    file = tmp_path / "job.toml"
    file.write_text(dump_job(job), encoding="utf-8")
    assert load_job(file) == job


@pytest.mark.parametrize("preset", PRESETS, ids=lambda path: path.stem)
def test_a_preset_is_a_valid_job(preset: Path) -> None:
    job, problems = parse_any(tomllib.loads(preset.read_text()))
    assert problems == []
    assert job is not None


BAD = [
    ("name", "", 'must be a string of at least 1 character(s) and of at most 80 characters, not ""'),
    ("name", 5, "must be a string"),
    ("name", "x" * 81, "of at most 80 characters"),
    ("data.source", "shard", 'must be "shards" or "requests" or "synthetic" or "model", not "shard"'),
    ("data.source", 5, 'must be "shards" or "requests" or "synthetic" or "model", not 5'),
    ("data.path", "", "at least 1 character"),
    ("data.path", 5, "must be a string"),
    ("sae.architecture", "topkk", f'must be {" or ".join(map(json.dumps, ARCHITECTURES))}, not "topkk"'),
    ("sae.architecture", [], "must be a string, not []"),
    ("sae.d_sae", 0, "must be an integer of at least 1 (latents), not 0"),
    ("sae.d_sae", 3072.0, "must be an integer of at least 1 (latents), not 3072.0"),
    ("sae.expansion_factor", 0, "must be a number above 0, not 0"),
    ("sae.expansion_factor", float("inf"), "must be finite, not Infinity"),
    ("sae.k", -1, "must be an integer of at least 1 (latents), not -1"),
    ("sae.k", "32", 'must be an integer of at least 1 (latents), not "32"'),
    ("sae.b_dec_init", "median", 'must be "geometric_median", "mean" or "zeros", not "median"'),
    ("train.batch_size", True, 'must be an integer of at least 1 or "auto" (tokens), not true'),
    ("train.batch_size", 10**30, "must be at most 9,223,372,036,854,775,807, not 1000"),
    ("train.lr", "fast", 'must be a number above 0 or "auto", not "fast"'),
    ("train.lr", float("nan"), 'must be a number above 0 or "auto", not NaN'),
    ("train.lr", 10**400, "must be at most 9.2e+18"),
    ("train.warmup_fraction", 1.5, "must be a number of at least 0 and of at most 1, not 1.5"),
    ("train.precision", "fp8", 'must be "auto", "fp32", "tf32", "bf16" or "fp16", not "fp8"'),
    ("train.optimizer", "sgd", 'must be "adam" or '),
    ("train.deterministic", 1, "must be true or false, not 1"),
    ("train.batch_size", [64, 128], "not [64, 128]; all SAEs of a sweep share this setting"),
    ("train.n_steps", [], "must be an integer of at least 1 (steps), not []"),
    ("train.seed", -1, "must be an integer of at least 0, not -1"),
    ("train.n_steps", {}, "must be an integer of at least 1 (steps), not {}"),
    (
        "parallel.mode",
        "dpp",
        'must be "auto" or "single" or "dp" or "ddp" or "tensor" or "hybrid" or "sweep", not "dpp"',
    ),
    ("launch.gpus", "gpu", 'must be "auto", "auto:2", "cpu", "cpu:2" or a list like [0, 1], not "gpu"'),
    ("launch.gpus", "auto:0", "or a list like [0, 1]"),
    ("launch.gpus", "cpu:", "or a list like [0, 1]"),
    ("launch.gpus", "cpu:2\n", "or a list like [0, 1]"),
    ("launch.gpus", [], "or a list like [0, 1], not []"),
    ("launch.gpus", [0, 0], "GPU 0 is given twice in [0, 0]"),
    ("launch.gpus", [-1], "or a list like [0, 1], not [-1]"),
    ("launch.gpus", ["0"], "or a list like [0, 1]"),
    ("launch.gpus", 0, "or a list like [0, 1], not 0"),
    ("launch.backend", "slum", 'must be "local" or "slurm" or "skypilot", not "slum"'),
    ("launch.nodes", 0, "must be an integer of at least 1 and of at most 9999 (nodes), not 0"),
    ("launch.time_limit", 90, 'must be a string like "90" (minutes), "4:00:00" or "1-12" (days-hours), not 90'),
    ("launch.sbatch_options", "--qos=high", 'must be a list like ["--qos=high", "--mem=64G"], not "--qos=high"'),
    ("launch.sbatch_options", [1], 'must be a list like ["--qos=high", "--mem=64G"], not [1]'),
    ("launch.max_restarts", -1, "must be an integer of at least 0, not -1"),
]


def table_with(path: str, value: object) -> dict[str, Any]:
    table: dict[str, Any] = {"data": {"path": "acts"}}
    section, _, key = path.rpartition(".")
    (table.setdefault(section, {}) if section else table)[key] = value
    return table


@pytest.mark.parametrize(("path", "value", "said"), BAD, ids=[f"{path} {str(value)[:20]!r}" for path, value, _ in BAD])
def test_a_bad_value_is_reported_as_one_problem_that_names_the_setting(path: str, value: object, said: str) -> None:
    job, problems = parse_job(table_with(path, value))
    assert job is None
    (problem,) = problems
    assert problem.path == path
    assert said in problem.message
    assert "\n" not in str(problem)


ALL_SETTINGS = [
    (f"{section}.{setting.name}", setting) for section in JobConfig.sections for setting in section_settings(section)
]


@pytest.mark.parametrize(("path", "setting"), ALL_SETTINGS, ids=[path for path, _ in ALL_SETTINGS])
def test_no_setting_accepts_a_date_or_a_table(path: str, setting: Setting) -> None:
    for value in ({"a": 1}, tomllib.loads("d = 2024-01-01")["d"]):
        job, problems = parse_job(table_with(path, value))
        assert job is None
        assert [problem.path for problem in problems] == [path]
        wanted = " or ".join(map(json.dumps, choices_of(path, setting)))
        assert problems[0].message.startswith((f"must be {setting.wanted}, not ", f"must be {wanted}, not "))


def test_a_job_file_with_a_byte_order_mark_and_windows_line_endings_is_read(tmp_path: Path) -> None:
    text = dump_job(job := load_job(Path(__file__).parents[3] / "data" / "presets" / "quick.toml"))
    (tmp_path / "job.toml").write_bytes(b"\xef\xbb\xbf" + text.replace("\n", "\r\n").encode())
    assert load_job(tmp_path / "job.toml") == job


def test_all_problems_in_a_file_are_reported_at_once() -> None:
    job, problems = parse_job(
        {
            "nam": "x",
            "name": 3,
            "sae": {"d_sae": 0, "k": 0, "expansion": 2},
            "train": {"batch_size": 0, "lr": -1},
            "launch": {"gpus": "all"},
            "parallel": 5,
        }
    )
    assert job is None
    assert {problem.path for problem in problems} == {
        "nam", "name", "data.path", "sae.d_sae", "sae.k", "sae.expansion", "train.batch_size", "train.lr",
        "launch.gpus", "parallel",
    }  # fmt: skip
    assert len(problems) == 10


@pytest.mark.parametrize(
    ("table", "problem"),
    [
        ({"trian": {}}, Problem("trian", 'is not a known setting; did you mean "train"?')),
        ({"train": {"batchsize": 1}}, Problem("train.batchsize", 'is not a known setting; did you mean "batch_size"?')),
        (
            {"parallel": {"zzz": 1}},
            Problem(
                "parallel.zzz",
                "is not a known setting; the known settings are mode, latent_ranks, shares, rebalance, gradients, zero",
            ),
        ),
        ({"parallel": "ddp"}, Problem("parallel", "must be a section: write [parallel] and its keys below")),
    ],
)
def test_a_misplaced_key_is_refused_with_a_hint(table: dict[str, Any], problem: Problem) -> None:
    assert parse_job(MINIMAL | table) == (None, [problem])


def test_a_missing_data_path_is_reported_with_its_description() -> None:
    _, (problem,) = parse_job({})
    assert problem.path == "data.path"
    assert problem.message.startswith("is missing: Folder or file of shards")


def test_with_unknown_entries_all_other_wrong_settings_are_reported_too() -> None:
    _, problems = parse_job(
        {
            "data": {"source": "synthetik", "n_rows": 0, "rows": 5},
            "sae": {"architecture": "topkk", "k": -3, "d_sae": "wide", "penalty": "loud", "foo": 3},
            "train": {"optimizer": 3, "beta1": -1, "lr": -1},
            "launch": {"backend": "slum", "constraint": 5},
        }
    )
    assert sorted(problem.path for problem in problems) == [
        "data.n_rows", "data.rows", "data.source", "launch.backend", "launch.constraint",
        "sae.architecture", "sae.d_sae", "sae.foo", "sae.k", "sae.penalty",
        "train.beta1", "train.lr", "train.optimizer",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "sae",
    [
        {"architecture": "topkk", "k": [16, 32], "sparsity_coefficient": 2.0},
        {"architecture": 5, "n_levels": 4},
        {"architecture": ["gated", "topkk"], "sparsity_coefficient": [1.0, 2.0], "k_aux": 64},
    ],
)
def test_settings_that_any_architecture_has_are_no_mistakes_if_the_architecture_is_unknown(sae: dict[str, Any]) -> None:
    _, problems = parse_job(MINIMAL | {"sae": sae})
    assert [problem.path for problem in problems] == ["sae.architecture"]


def test_an_integer_is_accepted_as_a_number() -> None:
    job, _ = parse_job(MINIMAL | {"train": {"lr": 1}, "sae": {"expansion_factor": 4}})
    assert job is not None
    assert (job.train.lr, job.sae.expansion_factor) == (1.0, 4.0)


@pytest.mark.parametrize(
    ("override", "path", "value"),
    [
        ("train.lr=3e-4", "train.lr", 3e-4),
        ("train.lr=auto", "train.lr", "auto"),
        (" train.batch_size = 64 ", "train.batch_size", 64),
        ("launch.gpus=[0, 1]", "launch.gpus", [0, 1]),
        ("launch.gpus=cpu:2", "launch.gpus", "cpu:2"),
        ("name=a=b", "name", "a=b"),
        ("sae.d_sae=", "sae.d_sae", None),
    ],
)
def test_an_override_replaces_one_setting(override: str, path: str, value: object) -> None:
    table: dict[str, Any] = {"data": {"path": "acts"}, "sae": {"d_sae": 7}}
    apply_override(table, override)
    job, problems = parse_job(table)
    assert job is not None, problems
    section, _, key = path.rpartition(".")
    written = to_table(job)
    assert (written[section] if section else written).get(key) == value


def test_an_override_with_a_list_creates_a_sweep(tmp_path: Path) -> None:
    file = tmp_path / "job.toml"
    file.write_text('[data]\npath = "acts"\n[sae]\nk = 8\n')
    assert load_job(file, ["sae.k=[16, 32]"]).sweep == (SweepAxis("sae.k", (16, 32)),)
    with pytest.raises(JobFileError, match=r"^sae\.k: must be an integer .*, not 0$"):
        load_job(file, ["sae.k=[16, 0]"])


@pytest.mark.parametrize("override", ["train.lr", "=3", "a.b.c=1", ".lr=1", "train.=1", ""])
def test_the_error_for_a_malformed_override_names_the_expected_form(override: str) -> None:
    with pytest.raises(JobFileError, match=r"^--set: expects section.key=value, like train.lr=3e-4, not "):
        apply_override({}, override)


def test_an_override_under_a_key_that_is_not_a_section_is_refused() -> None:
    with pytest.raises(JobFileError, match=r'^--set: "name" is not a section of the job file$'):
        apply_override({"name": "x"}, "name.x=1")


def test_overrides_are_checked_like_the_settings_in_the_job_file(tmp_path: Path) -> None:
    file = tmp_path / "job.toml"
    file.write_text('[data]\npath = "acts"\n')
    with pytest.raises(JobFileError) as caught:
        load_job(file, ["train.batch_size=0", "sae.kk=3"])
    assert {problem.path for problem in caught.value.problems} == {"train.batch_size", "sae.kk"}


@pytest.mark.parametrize(
    ("content", "said"),
    [(b"a = ", "is not valid TOML"), (b"\xff\xfe", "is not valid TOML"), (None, "cannot be read: No such file")],
)
def test_the_reason_why_a_file_cannot_be_read_is_reported(tmp_path: Path, content: bytes | None, said: str) -> None:
    file = tmp_path / "job.toml"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(JobFileError) as caught:
        load_job(file)
    assert str(caught.value).startswith(f"{file}: {said}")


def test_a_relative_data_path_is_looked_up_in_the_working_directory_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    for folder in (here / "both", there / "both", there / "only"):
        folder.mkdir(parents=True)
    monkeypatch.chdir(here)
    paths = {}
    for name in ("both", "only", "nowhere", "../there/only"):
        (there / "job.toml").write_text(f'[data]\npath = "{name}"\n')
        paths[name] = load_job(there / "job.toml").data.settings.path  # type: ignore[attr-defined]
    assert paths == {
        "both": str(here / "both"),
        "only": str(there / "only"),
        "nowhere": str(here / "nowhere"),
        "../there/only": str(there / "only"),
    }


def test_the_targets_path_is_resolved_like_the_data_path(
    tmp_path: Path, make_job: Callable[..., JobConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "there" / "out").mkdir(parents=True)
    bases = [tmp_path / "here", tmp_path / "there"]
    data = make_job(data={"path": "in", "target_path": "out"}).with_paths(bases).data.settings
    assert (data.path, data.target_path) == (str(tmp_path / "here/in"), str(tmp_path / "there/out"))  # type: ignore[attr-defined]
    made_up = make_job(data={"source": "synthetic"})
    assert made_up.with_paths(bases) == made_up


@pytest.mark.parametrize("path", ["a\0b", "x" * 5000, "~nosuchuser/x"], ids=["nul", "long", "nobody"])
def test_an_impossible_path_raises_no_error(make_job: Callable[..., JobConfig], path: str) -> None:
    job = make_job(data={"path": path}).with_paths([Path("/somewhere")])
    assert job.data.settings.path == f"/somewhere/{path}"  # type: ignore[attr-defined]


def test_the_home_folder_is_expanded(make_job: Callable[..., JobConfig], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/ada")
    job = make_job(data={"path": "~/acts"}).with_paths([Path("/somewhere")])
    assert job.data.settings.path == "/home/ada/acts"  # type: ignore[attr-defined]


@pytest.mark.slow
def test_garbage_collection_between_refusals_does_not_crash() -> None:
    # msgspec 0.19 to 0.22 crash if a `pattern` inside a union is used after a garbage collection.
    code = """
import gc, sys
from trainer.contract.settings.job_file import parse_job
bad = {"data": {"path": ""}, "launch": {"gpus": "x"}, "train": {"lr": "x", "n_steps": -1}, "sae": {"d_sae": "x"}}
for _ in range(400):
    assert len(parse_job(bad)[1]) == 5
    gc.collect()
"""
    done = subprocess.run([sys.executable, "-X", "faulthandler", "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_only_a_crosscoder_ranks_by_the_norms_of_its_parts() -> None:
    sae = {"architecture": "batch_topk", "rank_by": "crosscoder"}
    assert parse_job({"data": {"path": "x", "hook": "resid_post.1+2"}, "sae": sae})[1] == []
    _, (problem,) = parse_job({"data": {"path": "x", "hook": "resid_post.1"}, "sae": sae})
    assert str(problem) == "sae.rank_by: only a crosscoder has parts to sum over; leave it out"
