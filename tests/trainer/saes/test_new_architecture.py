"""Tests that adding an architecture, with its checks, training and export, takes just one file and one line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support import toy_architecture
from support.steps import ALONE
from support.workloads import workload

from trainer.api import train
from trainer.contract.planning import memory
from trainer.contract.planning.check_job import Machine, check
from trainer.contract.planning.workload import Layout
from trainer.contract.settings.catalog import ARCHITECTURES
from trainer.contract.settings.job import JobConfig
from trainer.contract.settings.job_file import job_of, parse_job, to_table
from trainer.contract.settings.sections import choices_of, find_setting, section_settings
from trainer.measuring.estimate import Estimate
from trainer.parallel.group import Group
from trainer.parallel.latents import Latents
from trainer.saes.base import OVERRIDABLE, Declared, Sae
from trainer.saes.build import build_sae
from trainer.sharing.base import shared_form
from trainer.sharing.saelens import SaeLens, export_sae
from trainer.training.learner import Learner
from trainer.training.loop import Trainer

MakeJob = Callable[..., JobConfig]
PAGE = Path(__file__).parents[3] / "docs" / "contributing" / "add-an-architecture.md"
TRAIN = {"batch_size": 128, "n_steps": 20, "lr": 3e-3, "log_every": 5, "checkpoint_every": 10}


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ARCHITECTURES, "loudest", toy_architecture.ENTRY)


@pytest.fixture
def make_loudest(activations: Path) -> MakeJob:
    """Return a function that creates a job with the new architecture. Its keyword arguments are settings of `[sae]`."""

    def make(**settings: Any) -> JobConfig:
        sae = {"architecture": "loudest", "d_sae": 64, "n_loudest": 4} | settings
        return job_of({"data": {"path": str(activations)}, "sae": sae, "train": TRAIN, "launch": {"gpus": "cpu"}})

    return make


def test_a_new_architecture_can_be_chosen_and_has_its_own_settings() -> None:
    setting = find_setting("sae.architecture")
    assert setting
    assert "loudest" in choices_of("sae.architecture", setting)
    assert {"n_loudest", "price"} <= {setting.name for setting in section_settings("sae", "loudest")}


def test_a_new_architectures_settings_are_checked(make_loudest: MakeJob, tmp_path: Path) -> None:
    _, problems = parse_job({"data": {"path": "x"}, "sae": {"architecture": "loudest", "n_loudest": 0}})
    assert [problem.path for problem in problems] == ["sae.n_loudest"]
    assert job_of(to_table(make_loudest())) == make_loudest()
    here = Machine((), 2, tmp_path)
    assert any("the number of latents, 64, not 65" in str(one) for one in check(make_loudest(n_loudest=65), here))
    assert not [one for one in check(make_loudest(), here) if one.severity == "error"]


def test_a_new_architectures_memory_is_estimated_from_its_registry_entry(
    make_job: MakeJob, make_loudest: MakeJob
) -> None:
    same = make_job(sae={"architecture": "topk", "d_sae": 64, "k": 4, "auxk_alpha": 0.0})
    assert memory.estimate(workload(make_loudest(), 16)) == memory.estimate(workload(same, 16))
    few, many = (memory.estimate(workload(make_loudest(n_loudest=n), 16)).total for n in (4, 60))
    assert few < many
    assert Estimate.of(make_loudest()).as_json()["seconds"] > 0


def test_a_new_architecture_can_be_trained_resumed_and_exported(
    make_loudest: MakeJob, make_trainer: Callable[..., Trainer], kept: Any, tmp_path: Path
) -> None:
    assert make_trainer(make_loudest(), kept).run()
    fvu = kept.curve("fvu")
    assert fvu[-1] < 0.9 * fvu[0]
    middle = tmp_path / "checkpoints" / "step-00000010"
    assert make_trainer(
        make_loudest(), resume_from=middle, checkpoints=tmp_path / "c2", output=tmp_path / "resumed"
    ).run()
    for file in ("sae_weights.safetensors", "cfg.json"):
        assert (tmp_path / "resumed" / file).read_bytes() == (tmp_path / "sae" / file).read_bytes()
    assert load_file(tmp_path / "sae" / "sae_weights.safetensors")["W_dec"].shape == (64, 16)


@pytest.mark.parametrize(
    ("name", "file"), [("loud", "sae_weights.safetensors"), ("topk_transcoder", "sae.safetensors")]
)
def test_an_export_keeps_all_weights_even_if_no_format_supports_the_architecture(
    name: str, file: str, make_loudest: MakeJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sae = build_sae(Layout(make_loudest(), 1), 16).eval()
    monkeypatch.setattr(toy_architecture.Loudest, "export_config", lambda self: {"architecture": name, "k": 4})
    export_sae(sae, tmp_path, {})
    assert load_file(tmp_path / file)["W_dec"].equal(sae.W_dec)
    refusal = SaeLens().refusal(shared_form(sae, {})) or ""
    assert refusal.startswith("SAELens has no architecture loud; " if name == "loud" else "SAELens has no TopK")


def test_an_architectures_author_needs_to_know_at_most_8_names() -> None:
    families = {one for entry in ARCHITECTURES.values() for one in entry.load().__mro__ if issubclass(one, Sae)}
    defined = {name for one in families - {Sae} for name in vars(one)}
    assert {name for name in defined & vars(Sae).keys() if not name.startswith("_")} == OVERRIDABLE
    assert len(OVERRIDABLE) <= 8
    for text in (Sae.__doc__ or "", PAGE.read_text()):
        assert not {name for name in OVERRIDABLE if f"`{name}" not in text}


def test_an_architecture_may_not_override_any_other_name() -> None:
    with pytest.raises(TypeError, match="Eager must not override end_step"):
        type("Eager", (toy_architecture.Loudest,), {"end_step": lambda self, n_tokens: None})


def test_an_architecture_must_declare_which_parameters_have_a_latent_axis(make_loudest: MakeJob) -> None:
    sae = build_sae(Layout(make_loudest(), 1), 16)
    with pytest.raises(TypeError, match="Loudest: add gain to `declared`"):
        sae.gain = torch.nn.Parameter(torch.ones(64))
    sae.declared["gain"] = Declared(0, lowest=2)
    sae.gain = torch.nn.Parameter(torch.ones(64))
    sae.shard(Group(), Group(), Latents(64))
    sae.constrain(slice(60, None))
    assert sae.latent_dims()["gain"] == 0
    assert sae.gain.tolist() == [1] * 60 + [2] * 4


def test_dead_latents_in_a_new_architecture_are_counted(make_loudest: MakeJob) -> None:
    learner, x = Learner(make_loudest(dead_after_tokens=60), 16, None, ALONE), torch.randn(30, 16)
    learner.initialise(x, x)
    with torch.no_grad():
        learner.sae.b_enc[5] = -1e6
    for step in range(2):
        assert not learner.sae.dead().any()
        learner.begin_step(step)
        learner.accumulate(x, x)
        learner.update()
    fired = learner.sae.n_tokens_since_fired == 0
    assert fired.sum() > 32
    assert learner.sae.dead()[5]
    assert not (learner.sae.dead() & fired).any()


def test_a_new_architecture_can_be_trained_from_python() -> None:
    x = torch.randn(1024, 16)
    fitted = train([x], architecture="loudest", n_loudest=4, d_sae=64, n_steps=10, lr=3e-3, device="cpu")
    assert fitted.encode(x).count_nonzero(dim=1).max() <= 4
