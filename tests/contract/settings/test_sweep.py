"""Tests that a list of values for a setting creates one SAE per value."""

from __future__ import annotations

import itertools
import tomllib
from collections.abc import Iterator
from typing import Annotated, Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.contract.errors import Problem
from trainer.contract.settings import catalog
from trainer.contract.settings.architectures import ArchitectureSettings
from trainer.contract.settings.catalog import ArchitectureEntry
from trainer.contract.settings.declare import about
from trainer.contract.settings.job import JobConfig, SweepAxis
from trainer.contract.settings.job_file import apply_override, dump_job, members, parse_job, to_table
from trainer.contract.settings.sweep import MOST_MEMBERS, may_differ


class RoundSettings(ArchitectureSettings, frozen=True):
    """Settings for a test architecture: the shared setting k, and a number, a switch and a list of its own."""

    k: Annotated[int, about("Active latents.", ge=1)] = 32
    roundness: Annotated[float, about("How round.", gt=0)] = 0.5
    hollow: Annotated[bool, about("A switch.")] = False
    levels: Annotated[list[int], about("Widths.")] | None = None


@pytest.fixture(autouse=True)
def _round(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(catalog.ARCHITECTURES, "round", ArchitectureEntry("nowhere:Round", "Round.", RoundSettings))


def parse(**sections: dict[str, Any]) -> tuple[JobConfig | None, list[Problem]]:
    return parse_job({"data": {"path": "acts"}} | sections)


def swept(**sections: dict[str, Any]) -> JobConfig:
    job, problems = parse(**sections)
    assert job is not None, problems
    return job


def problem(**sections: dict[str, Any]) -> Problem:
    job, problems = parse(**sections)
    assert job is None
    (refusal,) = problems
    return refusal


def test_each_value_in_a_list_produces_one_sae_with_a_label() -> None:
    configs = members(swept(sae={"k": [16, 32, 64]}))
    assert {label: job.sae.settings.k for label, job in configs.items()} == {"k=16": 16, "k=32": 32, "k=64": 64}


def test_several_lists_are_combined_in_the_order_of_the_settings() -> None:
    job = swept(train={"seed": [0, 1], "lr": [1e-3, "auto"]}, sae={"d_sae": [64, 128], "k": [8]})
    assert [axis.path for axis in job.sweep] == ["sae.d_sae", "train.lr", "train.seed"]
    expected = [f"d_sae={d},lr={lr},seed={s}" for d, lr, s in itertools.product((64, 128), (0.001, "auto"), (0, 1))]
    assert list(members(job)) == expected


def test_the_first_sae_in_a_sweep_is_the_job_itself() -> None:
    job = swept(sae={"k": [16, 32]}, train={"seed": [3, 4]})
    assert msgspec.structs.replace(job, sweep=()) == members(job)["k=16,seed=3"]


def test_a_job_without_a_list_trains_a_single_sae() -> None:
    job = swept(sae={"k": 16})
    assert members(job) == {"": job}
    assert swept(sae={"k": [16]}) == job


def test_an_sae_in_a_sweep_equals_a_job_file_with_the_same_values() -> None:
    for (label, member), (k, seed) in zip(
        members(swept(sae={"k": [4, 8]}, train={"seed": [0, 1]})).items(),
        itertools.product((4, 8), (0, 1)),
        strict=True,
    ):
        assert label == f"k={k},seed={seed}"
        assert member == swept(sae={"k": k}, train={"seed": seed})


def test_architectures_keep_their_own_settings() -> None:
    sae = {"architecture": ["topk", "round"], "k": [4, 8], "auxk_alpha": 0.5, "roundness": [1.0, 2.0], "hollow": True}
    configs = members(swept(sae=sae))
    assert list(configs) == [
        "architecture=topk,k=4",
        "architecture=topk,k=8",
        "architecture=round,k=4,roundness=1.0",
        "architecture=round,k=4,roundness=2.0",
        "architecture=round,k=8,roundness=1.0",
        "architecture=round,k=8,roundness=2.0",
    ]
    assert configs["architecture=topk,k=8"] == swept(sae={"k": 8, "auxk_alpha": 0.5})
    own = {"architecture": "round", "k": 8, "roundness": 2.0, "hollow": True}
    assert configs["architecture=round,k=8,roundness=2.0"] == swept(sae=own)


def test_a_setting_that_only_a_later_architecture_has_is_kept_as_an_axis() -> None:
    job = swept(sae={"architecture": ["topk", "round"], "roundness": 3.0, "levels": [8, 16]})
    assert job.sweep[1:] == (SweepAxis("sae.roundness", (3.0,)), SweepAxis("sae.levels", ([8, 16],)))
    assert list(members(job)) == ["architecture=topk", "architecture=round"]
    assert members(job)["architecture=round"].sae.settings == RoundSettings(roundness=3.0, levels=[8, 16])


def test_a_list_setting_is_swept_by_a_list_of_lists() -> None:
    sae = {"architecture": "round", "levels": [8, 16]}
    assert swept(sae=sae).sae.settings.levels == [8, 16]
    configs = members(swept(sae=sae | {"levels": [[8, 16], [4]]}))
    assert {label: job.sae.settings.levels for label, job in configs.items()} == {
        "levels=8+16": [8, 16],
        "levels=4": [4],
    }


def test_a_swept_switch_is_labelled_true_or_false() -> None:
    assert list(members(swept(sae={"architecture": "round", "hollow": [True, False]}))) == [
        "hollow=true",
        "hollow=false",
    ]


def test_optimizers_keep_their_own_settings() -> None:
    configs = members(swept(train={"optimizer": ["adam", "signum"], "beta1": [0.5, 0.9], "momentum": 0.8}))
    assert list(configs) == ["optimizer=adam,beta1=0.5", "optimizer=adam,beta1=0.9", "optimizer=signum"]
    assert configs["optimizer=signum"] == swept(train={"optimizer": "signum", "momentum": 0.8})


@pytest.mark.parametrize(
    "hook", ["resid_post.4, blocks.12.hook_resid_post", ["resid_post.4", "blocks.12.hook_resid_post"]]
)
def test_hooks_are_the_only_data_setting_that_saes_may_differ_in(hook: str | list[str]) -> None:
    job = swept(data={"path": "acts", "hook": hook}, sae={"k": [4, 8]})
    configs = members(job)
    assert list(configs) == ["hook=L4,k=4", "hook=L4,k=8", "hook=L12,k=4", "hook=L12,k=8"]
    assert list(job.hooks) == ["resid_post.4", "blocks.12.hook_resid_post"]
    assert [job.hook_number(member) for member in configs.values()] == [0, 0, 1, 1]
    assert configs["hook=L12,k=4"] == swept(data={"path": "acts", "hook": "blocks.12.hook_resid_post"}, sae={"k": 4})
    assert parse_job(tomllib.loads(dump_job(job))) == (job, [])
    assert list(swept(data={"path": "acts", "hook": ["resid_post.4"]}).hooks) == [""]


values = st.lists(st.integers(1, 99), min_size=1, max_size=3, unique=True)
rates = st.lists(st.one_of(st.floats(1e-6, 1, exclude_min=True), st.just("auto")), min_size=1, max_size=2, unique=True)


@st.composite
def sweeps(draw: st.DrawFn) -> dict[str, Any]:
    """Draw a job table with lists of values for some settings, in arbitrary order."""
    architectures = draw(st.lists(st.sampled_from(["topk", "round"]), min_size=1, max_size=2, unique=True))
    sae = {"k": draw(values), "d_sae": draw(values), "architecture": architectures}
    if "round" in architectures:
        sae |= {"roundness": draw(rates.filter(lambda found: "auto" not in found)), "levels": [draw(values)]}
    train = {"seed": draw(values), "lr": draw(rates)}
    return {"data": {"path": "acts"}, "sae": dict(draw(st.permutations(list(sae.items())))), "train": train}


@given(sweeps())
@settings(max_examples=60)
def test_a_written_sweep_is_read_back_unchanged(table: dict[str, Any]) -> None:
    job, problems = parse_job(table)
    if job is None:
        assert all("more than" in problem.message for problem in problems)
        return
    assert parse_job(tomllib.loads(dump_job(job))) == (job, [])
    configs = members(job)
    assert 1 <= len(configs) <= MOST_MEMBERS
    assert len({dump_job(member) for member in configs.values()}) == len(configs)
    for member in configs.values():
        assert member.sweep == ()
        assert parse_job(to_table(member)) == (member, [])


@pytest.mark.parametrize(
    ("sections", "path", "said"),
    [
        ({"sae": {"k": [16, 0]}}, "sae.k", "must be an integer of at least 1 (latents), not 0"),
        ({"sae": {"k": [0, 16]}}, "sae.k", "must be an integer of at least 1 (latents), not 0"),
        ({"sae": {"k": [16, "many"]}}, "sae.k", 'must be an integer of at least 1 (latents), not "many"'),
        ({"sae": {"k": [16, [32]]}}, "sae.k", "must be an integer of at least 1 (latents), not [32]"),
        ({"sae": {"k": []}}, "sae.k", "must be an integer of at least 1 (latents), not []"),
        ({"sae": {"architecture": ["topk", "flat"]}}, "sae.architecture", 'not "flat"'),
        ({"sae": {"architecture": ["topk", 5]}}, "sae.architecture", '"standard" or "round", not 5'),
        (
            {"sae": {"architecture": ["topk", "round"], "roundness": [1, 0]}},
            "sae.roundness",
            "must be a number above 0, not 0",
        ),
        ({"sae": {"k": [16, 32, 16]}}, "sae.k", "has a value twice: [16, 32, 16]"),
        ({"train": {"lr": [1, 1.0]}}, "train.lr", "has a value twice: [1, 1.0]"),
        ({"sae": {"architecture": ["topk", "topk"]}}, "sae.architecture", "has a value twice"),
        ({"sae": {"kk": [1, 2]}}, "sae.kk", "is not a known setting"),
        ({"sae": {"architecture": ["topk", "round"], "rounness": 1}}, "sae.rounness", 'did you mean "roundness"?'),
        ({"sae": {"roundness": 1.0}}, "sae.roundness", "is not a known setting"),
        (
            {"sae": {"d_sae": 64, "expansion_factor": [2, 4]}},
            "sae.expansion_factor",
            "has no effect if sae.d_sae is set",
        ),
        ({"train": {"batch_size": [64, 128]}}, "train.batch_size", "not [64, 128]; all SAEs of a sweep share this"),
        ({"train": {"precision": ["fp32", "bf16"]}}, "train.precision", "all SAEs of a sweep share this setting"),
        ({"data": {"path": "a", "max_norm": [5, 10]}}, "data.max_norm", "all SAEs of a sweep share this setting"),
        (
            {"data": {"path": "a", "hook": ["mlp_in.1", "blocks.1.mlp.hook_in"]}},
            "data.hook",
            '"blocks.1.mlp.hook_in" is given twice',
        ),
        ({"data": {"path": "a", "hook": ["mlp_in.1", "a/b"]}}, "data.hook", '"a/b" must be "SITE.LAYER" with SITE one'),
        ({"data": {"path": "a", "hook": "mlp_in.0-99"}}, "data.hook", "makes a sweep of more than 64 SAEs"),
        ({"parallel": {"mode": ["ddp", "single"]}}, "parallel.mode", "all SAEs of a sweep share this setting"),
        (
            {"train": {"seed": list(range(65))}},
            "train.seed",
            f"makes a sweep of more than {MOST_MEMBERS} SAEs; give fewer values, or split the sweep into two jobs",
        ),
        ({"train": {"seed": list(range(9))}, "sae": {"k": list(range(1, 9))}}, "train.seed", "more than 64 SAEs"),
    ],
)
def test_each_mistake_is_reported_as_one_problem_that_names_the_setting(
    sections: dict[str, Any], path: str, said: str
) -> None:
    refusal = problem(**sections)
    assert refusal.path == path
    assert said in refusal.message


def test_a_huge_sweep_is_refused_without_being_built() -> None:
    lists = {"k": list(range(1, 2000)), "d_sae": list(range(1, 2000))}
    assert "more than 64" in problem(sae=lists, train={"seed": list(range(10**5))}).message


def test_the_largest_allowed_sweep_is_accepted() -> None:
    assert len(members(swept(train={"seed": list(range(8))}, sae={"k": list(range(1, 9))}))) == MOST_MEMBERS


def test_problems_of_all_saes_in_a_sweep_are_reported_together_without_duplicates() -> None:
    job, problems = parse(sae={"k": [0, 16, -1], "d_sae": 0}, train={"lr": [1e-3, -1]}, nam={})
    assert job is None
    assert sorted(problem.path for problem in problems) == ["nam", "sae.d_sae", "sae.k", "sae.k", "train.lr"]


def axes_of_everything() -> Iterator[str]:
    for section in ("data", "sae", "train", "parallel", "launch"):
        yield from (f"{section}.{name}" for name in to_table(swept())[section])


def test_data_and_run_length_and_devices_are_the_same_for_all_saes() -> None:
    assert {path for path in axes_of_everything() if may_differ(path) and not path.startswith("sae.")} == {
        "train.lr", "train.optimizer", "train.beta1", "train.beta2", "train.state", "train.warmup_fraction",
        "train.decay_fraction", "train.grad_clip", "train.seed", "train.lr_scaling", "train.lr_tokens",
    }  # fmt: skip
    assert all(may_differ(path) for path in axes_of_everything() if path.startswith("sae."))


@pytest.mark.parametrize("freeze", [None, "off", ["off", "decoder"]])
def test_a_random_twin_is_shorthand_for_a_sweep_over_frozen_weights(freeze: Any) -> None:
    sae = {"k": [8, 16]} | ({} if freeze is None else {"freeze": freeze})
    job = swept(sae=sae, train={"random_twin": True})
    assert [*members(job)] == [f"k={k},freeze={one}" for k in (8, 16) for one in ("off", "decoder")]
    assert job == swept(sae=sae | {"freeze": ["off", "decoder"]})
    assert parse_job(tomllib.loads(dump_job(job)))[0] == job


def test_other_twins_can_be_named_and_are_kept() -> None:
    job = swept(sae={"freeze": ["off", "both"]}, train={"random_twin": True})
    assert [*members(job)] == ["freeze=off", "freeze=both"]


@pytest.mark.parametrize("freeze", ["decoder", ["decoder", "both"]])
def test_a_twin_without_an_sae_that_is_trained_in_full_is_refused(freeze: Any) -> None:
    refusal = problem(sae={"freeze": freeze}, train={"random_twin": True})
    assert refusal.path == "train.random_twin"
    assert "sae.freeze" in refusal.message


def test_weights_cannot_be_frozen_and_resampled() -> None:
    refusal = problem(sae={"resample_every_tokens": 1000}, train={"random_twin": True})
    assert refusal.path == "sae.resample_every_tokens"
    assert 'sae.freeze = "decoder"' in refusal.message


@pytest.mark.parametrize("wrong", ["yes", 1, [True]])
def test_a_wrong_value_for_the_random_twin_is_reported_with_its_setting(wrong: Any) -> None:
    assert problem(train={"random_twin": wrong}).path == "train.random_twin"


def test_comma_separated_words_on_the_command_line_form_a_sweep() -> None:
    table = {"data": {"path": "acts"}}
    apply_override(table, "sae.architecture=topk, batch_topk,jumprelu")
    apply_override(table, "sae.freeze=off,decoder")
    apply_override(table, "data.path=a,b")
    apply_override(table, 'train.optimizer="adam", "muon"')
    assert table["train"]["optimizer"] == ["adam", "muon"]
    assert table["sae"] == {"architecture": ["topk", "batch_topk", "jumprelu"], "freeze": ["off", "decoder"]}
    assert table["data"]["path"] == "a,b"
