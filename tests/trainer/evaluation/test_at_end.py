"""Tests that a finished run writes correct report cards at little cost, and does not fail if it cannot write them."""

from __future__ import annotations

import contextlib
import json
import re
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from trainer.activations.open_source import open_source
from trainer.cli import main
from trainer.contract.progress import Planned, Progress
from trainer.contract.runs.features import Features
from trainer.contract.runs.rank_spec import EXIT_FINISHED
from trainer.contract.runs.report_card import read_card
from trainer.contract.settings.job import JobConfig
from trainer.contract.settings.job_file import dump_job
from trainer.contract.store.metrics_store import SeriesReader
from trainer.evaluation import stability
from trainer.evaluation.at_end import MOST_ROWS, Cards, most_rows
from trainer.evaluation.contexts import acts_of, contexts_of, texts_of
from trainer.evaluation.stability import nearest
from trainer.parallel.base import Parallel
from trainer.training.loop import Trainer

MakeTrainer = Callable[..., Trainer]
MakeJob = Callable[..., JobConfig]


def cards_of(trainer: Trainer, job: JobConfig, kept, stop: threading.Event | None = None) -> Cards:
    source = open_source(job)
    return Cards(trainer, job, source, Parallel(torch.device("cpu")), kept, stop or threading.Event())


def trained(make_trainer: MakeTrainer, job: JobConfig, kept) -> Trainer:
    trainer = make_trainer(job, kept)
    assert trainer.run()
    kept.events.clear()
    return trainer


def test_the_report_card_written_by_a_run_equals_the_one_written_by_eval(
    make_job: MakeJob, make_trainer: MakeTrainer, kept, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = make_job()
    cards_of(trained(make_trainer, job, kept), job, kept).write()
    own = json.loads((tmp_path / "sae" / "card.json").read_text())
    ((kind, level, message),) = kept.events
    assert (kind, level) == ("card", "info")
    assert "on 150 held-out rows" in message
    assert kept.place == ("finished", 20)
    (tmp_path / "job.toml").write_text(dump_job(job))
    assert main(["eval", str(tmp_path), "--device", "cpu", "--contexts", "0", "--json"]) == 0
    (by_eval,) = json.loads(capsys.readouterr().out.splitlines()[-1])["cards"]
    for name, value in by_eval["figures"].items():
        assert own["figures"][name] == pytest.approx(value, rel=1e-3), name
    assert own["data"] == pytest.approx(by_eval["data"])
    assert own["step"] == by_eval["step"]


def test_each_sae_in_a_sweep_gets_a_report_card(
    make_job: MakeJob, make_trainer: MakeTrainer, kept, tmp_path: Path
) -> None:
    job = make_job(sae={"k": [2, 4]})
    cards_of(trained(make_trainer, job, kept), job, kept).write()
    assert [message.partition(":")[0] for _, _, message in kept.events] == ["report card of k=2", "report card of k=4"]
    assert {json.loads(file.read_text())["label"] for file in tmp_path.glob("sae/*/card.json")} == {"k=2", "k=4"}


def test_saes_that_differ_only_in_their_seed_are_compared_by_the_run_and_by_eval(
    make_job: MakeJob, make_trainer: MakeTrainer, kept, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = make_job(train={"seed": [0, 1]}, sae={"k": [2, 4]})
    cards_of(trained(make_trainer, job, kept), job, kept).write()
    assert kept.events[-1][2].startswith("latents with a decoder cosine above 0.7 across seeds: ")
    cards = {file.parent.name: json.loads(file.read_text()) for file in tmp_path.glob("sae/*/card.json")}
    assert len(cards) == 4
    for label, card in cards.items():
        k, seed = label.split(",")
        other = f"{k},seed={1 - int(seed[-1])}"
        own, theirs = (load_file(tmp_path / "sae" / one / "sae_weights.safetensors")["W_dec"] for one in (label, other))
        best = nearest(own, theirs)[0].cosine
        assert card["stability"]["others"] == [other]
        assert card["stability"]["share"] == pytest.approx(float((best > 0.7).double().mean()))
        assert card["stability"]["median"] == pytest.approx(float(best.quantile(0.5)), rel=1e-4)
    # No earlier report card is archived, because only the comparison was added.
    assert not list(tmp_path.glob("sae/*/cards/*"))
    (tmp_path / "job.toml").write_text(dump_job(job))
    assert main(["eval", str(tmp_path), "--device", "cpu", "--contexts", "0", "--json"]) == 0
    by_eval = {card["label"]: card for card in json.loads(capsys.readouterr().out.splitlines()[-1])["cards"]}
    for label, card in cards.items():
        own, again = card["stability"], by_eval[label]["stability"]
        assert again["median"] == pytest.approx(own["median"], rel=1e-3)
        assert (own["n_rows"], own["rows"]) == (card["figures"]["n_tokens"], again["rows"])
        assert again["firing_correlation"] == pytest.approx(own["firing_correlation"], rel=1e-3)


def test_the_features_file_has_the_firing_correlation_of_each_latent(
    make_job: MakeJob, make_trainer: MakeTrainer, kept, activations: Path, tmp_path: Path
) -> None:
    tell_tokens(activations)
    job = make_job(train={"seed": [0, 1]})
    cards_of(trained(make_trainer, job, kept), job, kept).write()
    for seed in (0, 1):
        folder = tmp_path / "sae" / f"seed={seed}"
        features, stability = Features(folder / "features.safetensors"), read_card(folder).stability
        found = [features.feature(latent).firing_correlation for latent in range(features.n_latents)]
        known = [one for one in found if one is not None]
        assert sum(known) / len(known) == pytest.approx(stability.firing_correlation, abs=1e-5)


def test_keep_rows_correlates_activations_only_if_that_was_not_done(
    make_job: MakeJob, make_trainer: MakeTrainer, kept, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = make_job(train={"seed": [0, 1]})
    cards_of(trained(make_trainer, job, kept), job, kept).write()
    (tmp_path / "job.toml").write_text(dump_job(job))
    compared, compare = [], stability.firing_correlations

    def note(saes, *others):
        compared.append([*saes])
        return compare(saes, *others)

    monkeypatch.setattr(stability, "firing_correlations", note)
    evaluation = ["eval", str(tmp_path), "--device", "cpu", "--contexts", "0", "--keep-rows"]
    assert main(evaluation) == 0
    assert compared == []
    file = tmp_path / "sae" / "seed=1" / "card.json"
    card = json.loads(file.read_text())
    for name in ("firing_correlation", "n_rows", "rows"):
        del card["stability"][name]
    file.write_text(json.dumps(card))
    assert main(evaluation) == 0
    assert compared == [["seed=0", "seed=1"]]
    assert json.loads(file.read_text())["stability"]["firing_correlation"] is not None


class NotedProgress(Progress):
    """A `Progress` that notes its plan and the names of all stages."""

    def __init__(self, what: str, planned: Mapping[str, Planned] | None = None) -> None:
        super().__init__(what, planned)
        self.plan, self.names = {name: one.times for name, one in (planned or {}).items()}, Counter[str]()
        noted.append(self)

    def stage(self, name: str, total: float | None = None) -> None:
        self.names[name] += 1
        super().stage(name, total)


noted: list[NotedProgress] = []


def test_the_plan_of_an_evaluation_has_every_pass_over_the_saes_that_are_left(
    make_job: MakeJob, make_trainer: MakeTrainer, kept, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.evaluation.command.Progress", NotedProgress)
    train = {"lr": [0.01, 1e-5], "seed": [0, 1], "n_steps": 100, "eval_every": 100, "halving": True}
    job = make_job(train=train)
    trainer = trained(make_trainer, job, kept)
    assert len(trainer.learners) == 2
    (tmp_path / "job.toml").write_text(dump_job(job))
    evaluation = ["eval", str(tmp_path), "--device", "cpu", "--contexts", "0"]
    assert main(evaluation) == 0
    assert noted[-1].names == noted[-1].plan == {"rows": 6, "stability across seeds": 1, "firing across seeds": 1}
    assert main([*evaluation, "--keep-rows"]) == 0
    assert noted[-1].names == noted[-1].plan == {}


def test_report_cards_from_the_run_and_from_eval_include_the_random_twins_figures(
    make_job: MakeJob, make_trainer: MakeTrainer, kept, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = make_job(train={"random_twin": True, "seed": [0, 1]})
    trainer = trained(make_trainer, job, kept)
    cards_of(trainer, job, kept).write()
    assert kept.events[-1][2].startswith("compared with random twins: freeze=off,seed=0: FVU ")
    cards = {file.parent.name: json.loads(file.read_text()) for file in tmp_path.glob("sae/*/card.json")}
    for seed in (0, 1):
        (twin,) = cards[f"freeze=off,seed={seed}"]["twins"]
        own = cards[f"freeze=decoder,seed={seed}"]
        assert (twin["label"], twin["frozen"]) == (f"freeze=decoder,seed={seed}", "decoder")
        assert twin["figures"]["fvu"] == own["figures"]["fvu"]
        assert twin["errors"]["fvu"] == own["figures"]["fvu_error"]
        assert own["twins"] == []
        assert own["stability"] is None
        assert cards[f"freeze=off,seed={seed}"]["stability"]["others"] == [f"freeze=off,seed={1 - seed}"]
    (tmp_path / "job.toml").write_text(dump_job(job))
    assert main(["eval", str(tmp_path), "--device", "cpu", "--contexts", "0", "--json"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])["cards"]
    by_eval = {card["label"]: card for card in found}
    of_twin = by_eval["freeze=off,seed=1"]["twins"][0]["figures"]
    assert of_twin["fvu"] == pytest.approx(cards["freeze=decoder,seed=1"]["figures"]["fvu"], rel=1e-3)


def test_seeds_that_were_not_exported_and_wide_saes_are_not_compared(
    make_job: MakeJob, make_trainer: MakeTrainer, kept, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = make_job(train={"seed": [0, 1, 2]})
    trainer = trained(make_trainer, job, kept)
    (tmp_path / "sae" / "seed=1" / "cfg.json").unlink()
    cards_of(trainer, job, kept).write()
    cards = {file.parent.name: json.loads(file.read_text()) for file in tmp_path.glob("sae/*/card.json")}
    assert {label: card["stability"]["others"] for label, card in cards.items()} == {
        "seed=0": ["seed=2"],
        "seed=2": ["seed=0"],
    }
    kept.events.clear()
    monkeypatch.setattr("trainer.evaluation.stability.MOST_LATENTS", {"cpu": 1})
    cards_of(trainer, job, kept).write()
    (_, level, message) = kept.events[-1]
    assert level == "info"
    assert re.fullmatch(
        "stability across seeds was not measured: comparing [0-9]+ latents .*; `sae-train eval` adds it", message
    )


@pytest.mark.parametrize("change", [{"train": {"report_card": False}}, {"data": {"held_out_tokens": 0}}])
def test_no_report_card_is_written_if_it_is_disabled_or_no_rows_are_held_out(
    change: dict, make_job: MakeJob, make_trainer: MakeTrainer, kept, tmp_path: Path
) -> None:
    job = make_job(**change)
    cards_of(trained(make_trainer, job, kept), job, kept).write()
    assert not kept.events
    assert not (tmp_path / "sae" / "card.json").exists()


def test_a_stop_or_an_error_skips_the_report_card_without_failing_the_run(
    make_job: MakeJob, make_trainer: MakeTrainer, kept, tmp_path: Path
) -> None:
    job, stop = make_job(), threading.Event()
    trainer = trained(make_trainer, job, kept)
    stop.set()
    cards_of(trainer, job, kept, stop).write()
    weights = tmp_path / "sae" / "sae_weights.safetensors"
    weights.write_bytes(b"")
    cards_of(trainer, job, kept).write()
    (_, _, stopped), (_, level, failed) = kept.events
    assert stopped == "no report card: a stop was requested; `sae-train eval` writes it"
    assert level == "warning"
    assert "is not a complete safetensors file" in failed
    assert kept.place == ("finished", 20)
    assert not (tmp_path / "sae" / "card.json").exists()


def test_only_a_small_sample_spread_over_all_held_out_rows_is_measured(
    make_job: MakeJob, make_trainer: MakeTrainer, kept, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert most_rows(10**9, 1) == MOST_ROWS
    assert most_rows(200_000, 4) == 2500
    monkeypatch.setattr("trainer.evaluation.at_end.MOST_ROWS", 40)
    job = make_job()
    cards_of(trained(make_trainer, job, kept), job, kept).write()
    card = json.loads((tmp_path / "sae" / "card.json").read_text())
    # With a limit of 40 rows, every fourth of the 150 held-out rows is measured.
    assert card["figures"]["n_tokens"] == 38
    assert card["data"]["n_held_out"] == 150
    assert "on 38 of 150 held-out rows" in kept.events[0][2]
    # The run records the standard error from the report card. This error applies to all held-out rows, because the
    # measured rows come from the same texts.
    (stored,) = kept.curve("heldout_fvu_error")
    assert stored == pytest.approx(card["figures"]["fvu_error"])


def tell_tokens(activations: Path) -> None:
    """Add a token id, a position and a document number to each row. Each document has 50 tokens."""
    names = [f" w{number}" for number in range(40)]
    (activations / "tokens.json").write_text(json.dumps(names))
    for file in activations.glob("*.safetensors"):
        rows = load_file(file)["activations"]
        number = torch.arange(len(rows), dtype=torch.int32)
        origin = {"token_ids": number % len(names), "positions": number % 50, "document": number // 50}
        save_file({"activations": rows, **origin}, file)


def test_contexts_are_found_if_the_data_records_its_tokens(
    make_job: MakeJob, make_trainer: MakeTrainer, kept, activations: Path, tmp_path: Path
) -> None:
    tell_tokens(activations)
    job = make_job()
    trainer = trained(make_trainer, job, kept)
    cards_of(trainer, job, kept).write()
    features = Features(tmp_path / "sae" / "features.safetensors")
    # The examples in a report card come from 1,024 rows, scaled as in training.
    assert features.n_rows == 1024
    ((learner, outliers),) = [(one, trainer.outliers[one.hook]) for one in trainer.learners.values()]
    with learner.evaluating():
        wanted = contexts_of(partial(acts_of, learner), texts_of(activations, 1024), outliers, 64, 10)
    tensors = wanted.tensors(learner.sae.W_dec, [])
    for latent in range(64):
        feature = features.feature(latent)
        assert feature.density * 1024 == pytest.approx(int(tensors["n_fired"][latent]))
        assert feature.largest == pytest.approx(float(tensors["largest"][latent]), rel=1e-3)
    assert features.search("w7")


def test_a_report_card_contains_randomly_sampled_latents_with_their_texts(
    make_job: MakeJob, make_trainer: MakeTrainer, kept, activations: Path, tmp_path: Path
) -> None:
    tell_tokens(activations)
    job = make_job()
    cards_of(trained(make_trainer, job, kept), job, kept).write()
    features = Features(tmp_path / "sae" / "features.safetensors")
    latents = json.loads((tmp_path / "sae" / "card.json").read_text())["latents"]
    assert len(latents) == min(20, len(features.order()))
    assert {one["latent"] for one in latents} <= {*features.order()}
    readme = (tmp_path / "sae" / "README.md").read_text()
    for one in latents:
        feature = features.feature(one["latent"])
        assert one["density"] == feature.density > 0
        (best, *_) = one["texts"]
        assert best["tokens"] == [token.text for token in feature.contexts[0].tokens]
        assert f"| {one['latent']} | {feature.density:.3%} | " in readme
        assert f"**{best['tokens'][best['at']].strip()}**" in readme


def test_with_too_many_latents_the_run_leaves_the_features_to_eval(
    make_job: MakeJob, make_trainer: MakeTrainer, kept, activations: Path, tmp_path: Path
) -> None:
    tell_tokens(activations)
    job = make_job(sae={"d_sae": 1100})
    cards_of(trained(make_trainer, job, kept), job, kept).write()
    assert (tmp_path / "sae" / "card.json").exists()
    assert not (tmp_path / "sae" / "features.safetensors").exists()


def test_a_report_card_is_written_even_if_its_features_cannot_be_written(
    make_job: MakeJob, make_trainer: MakeTrainer, kept, activations: Path, tmp_path: Path
) -> None:
    tell_tokens(activations)
    job = make_job()
    trainer = trained(make_trainer, job, kept)
    (tmp_path / "sae" / "features.safetensors").mkdir()
    cards_of(trainer, job, kept).write()
    assert kept.events[0][1:] == ("info", kept.events[0][2])
    assert json.loads((tmp_path / "sae" / "card.json").read_text())["latents"] == []


@pytest.mark.parametrize("mode", ["tensor", "ddp", "dp", "sweep"])
def test_a_single_rank_measures_all_rows_in_every_mode(
    mode: str, make_job: MakeJob, start_ranks: Callable, activations: Path, tmp_path: Path
) -> None:
    tell_tokens(activations)
    ranks = start_ranks(make_job(parallel={"mode": mode}, sae={"k": [2, 4]} if mode == "sweep" else {}), 2)
    assert set(ranks.wait()) == {EXIT_FINISHED}
    cards = [json.loads(file.read_text()) for file in tmp_path.rglob("card.json")]
    assert sorted(card["label"] for card in cards) == (["k=2", "k=4"] if mode == "sweep" else [""])
    assert {card["figures"]["n_tokens"] for card in cards} == {150}
    assert all(card["latents"] for card in cards)
    with contextlib.closing(SeriesReader(ranks.spec.run_dir / "metrics.db")) as reader:
        assert [event.kind for event in reader.events()].count("card") == len(cards)
        assert reader.heartbeat().phase == "finished"


def test_a_stop_while_activations_are_correlated_over_seeds_keeps_the_cosines(
    make_job: MakeJob, make_trainer: MakeTrainer, kept, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, stop = make_job(train={"seed": [0, 1]}), threading.Event()

    def stop_after(*directions: torch.Tensor) -> tuple[stability.Nearest, stability.Nearest]:
        stop.set()
        return nearest(*directions)

    monkeypatch.setattr(stability, "nearest", stop_after)
    cards_of(trained(make_trainer, job, kept), job, kept, stop).write()
    level, message = kept.events[-1][1:]
    assert level == "info"
    assert message.startswith("stability across seeds was not fully measured: ")
    for seed in (0, 1):
        found = json.loads((tmp_path / "sae" / f"seed={seed}" / "card.json").read_text())["stability"]
        assert found["share"] is not None
        assert (found["firing_correlation"], found["n_rows"]) == (None, 0)
