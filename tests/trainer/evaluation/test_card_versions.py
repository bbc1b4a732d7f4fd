"""Tests that an evaluation updates a report card, but keeps earlier versions and the parts that it does not measure."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch
from support.report_cards import PROBING, SPLICED

from tests.trainer.evaluation.test_at_end import tell_tokens
from tests.trainer.evaluation.test_evaluate_run import finished_run
from trainer.cli import main
from trainer.contract.runs.card_versions import FOLDER, MOST_CARDS, versions, weights_of
from trainer.contract.runs.features import FEATURES, Features
from trainer.contract.runs.latent_notes import NOTES, change_note
from trainer.contract.runs.report_card import IN_MODEL, PROBES, ROWS, Card, Part, PatchedModel, Probing, read_card
from trainer.evaluation.card import write_card
from trainer.evaluation.contexts import moved_alone

WORDS = [f" w{number}".encode() for number in range(40)]
MODEL = Part(measured=1.0, step=20, n=4000, unit="tokens", text="corpus.jsonl", model="smol")
MOVED = {
    "promoted": torch.tensor([[1, 2]] * 64, dtype=torch.int32),
    "promoted_logits": torch.tensor([[2.0, 1.0]] * 64),
    "suppressed": torch.tensor([[3, 0]] * 64, dtype=torch.int32),
    "suppressed_logits": torch.tensor([[-2.0, -1.0]] * 64),
}


@pytest.fixture
def run(make_job: Callable, make_trainer: Callable, kept: object, activations: Path, tmp_path: Path) -> Path:
    """Return the folder of a finished run with two checkpoints, trained on data with tokens and evaluated on rows."""
    tell_tokens(activations)
    run = finished_run(make_job(train={"checkpoint_every": 10}), make_trainer, tmp_path / "run", kept)
    evaluate(run)
    return run


def evaluate(path: Path, *flags: str) -> None:
    assert main(["eval", str(path), "--device", "cpu", "--contexts", "2", *flags]) == 0


def card_of(folder: Path) -> Card:
    card = read_card(folder)
    assert card
    return card


def add(folder: Path, *, step: int | None = None, **parts: object) -> None:
    """Update the report card as an evaluation that measures only the given parts would."""
    there = card_of(folder)
    names = {"spliced": IN_MODEL, "probing": PROBES}
    measured = {names[name]: MODEL for name in parts}
    bare = msgspec.structs.replace(there, spliced=None, probing=None, parts=measured)
    write_card(folder, msgspec.structs.replace(bare, step=there.step if step is None else step, **parts))


def test_an_evaluation_on_rows_keeps_model_figures_and_promoted_tokens(run: Path) -> None:
    sae = run / "sae"
    add(sae, spliced=msgspec.convert(SPLICED, PatchedModel), probing=msgspec.convert(PROBING, Probing))
    write_card(sae, card_of(sae), moved_alone(MOVED, WORDS))
    before = card_of(sae)
    for flags in ([], ["--keep-rows"]):
        evaluate(run, *flags)
        after = card_of(sae)
        assert (after.spliced, after.probing) == (before.spliced, before.probing)
        assert after.parts[IN_MODEL] == MODEL
        features = Features(sae / FEATURES)
        latent = features.feature(features.order()[0])
        assert [one.text for one in latent.promoted] == [" w1", " w2"]
        assert latent.contexts
        assert features.search("w7")
    # Only the first of the two evaluations remeasures the rows.
    assert after.parts[ROWS].measured > before.parts[ROWS].measured
    evaluate(run, "--keep-rows")
    assert card_of(sae).parts[ROWS] == after.parts[ROWS]
    # An evaluation of the SAE's folder does not know the step, so the report card keeps its existing step.
    assert main(["eval", str(sae), "--device", "cpu"]) == 0
    assert card_of(sae).step == before.step
    assert card_of(sae).spliced == before.spliced


def test_figures_for_replaced_weights_are_archived_and_restored_with_those_weights(run: Path) -> None:
    sae, (older, newest) = run / "sae", sorted((run / "checkpoints").iterdir())
    add(sae, spliced=msgspec.convert(SPLICED, PatchedModel))
    fvu = card_of(sae).figures.fvu
    assert main(["export", str(older), "--out", str(sae), "--force"]) == 0
    assert read_card(sae) is None
    evaluate(older)
    card = card_of(sae)
    assert (card.step, card.spliced, card.figures.fvu != fvu) == (10, None, True)
    assert card.weights == weights_of(sae)
    found = [(one.number, one.card.step, one.card.spliced is None, one.is_current) for one in versions(sae)]
    assert found == [(3, 10, True, True), (2, 20, False, False), (1, 20, True, False)]
    assert all(one.features and Features(one.features).n_latents == 64 for one in versions(sae))
    assert main(["export", str(newest), "--out", str(sae), "--force"]) == 0
    evaluate(run, "--keep-rows")
    assert (card_of(sae).figures.fvu, card_of(sae).spliced) == (fvu, msgspec.convert(SPLICED, PatchedModel))


def test_notes_on_latents_survive_evaluations_and_replaced_weights(run: Path) -> None:
    sae, older = run / "sae", min((run / "checkpoints").iterdir())
    change_note(sae, 3, lambda note: msgspec.structs.replace(note, name="mine"))
    written = (sae / NOTES).read_bytes()
    evaluate(run)
    assert Features(sae / FEATURES).feature(3).noted_at_tokens is None
    assert main(["export", str(older), "--out", str(sae), "--force"]) == 0
    evaluate(older)
    assert (sae / NOTES).read_bytes() == written
    feature = Features(sae / FEATURES).feature(3)
    assert (feature.name, feature.noted_at_tokens) == ("mine", 2560)


def test_no_report_card_is_written_next_to_an_sae_replaced_during_the_evaluation(run: Path) -> None:
    sae, older = run / "sae", min((run / "checkpoints").iterdir())
    card = card_of(sae)
    assert main(["export", str(older), "--out", str(sae), "--force"]) == 0
    with pytest.raises(Exception, match="another SAE was written there during the evaluation"):
        write_card(sae, card)
    assert read_card(sae) is None


def test_a_report_card_that_cannot_be_archived_is_not_left_next_to_other_weights(run: Path) -> None:
    sae, older = run / "sae", min((run / "checkpoints").iterdir())
    (sae / FEATURES).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 135\n")
    assert main(["export", str(older), "--out", str(sae), "--force"]) == 0
    assert read_card(sae) is None
    assert not (sae / "README.md").exists()


def test_a_damaged_features_file_is_replaced_and_all_figures_are_kept(run: Path) -> None:
    sae = run / "sae"
    whole = (sae / FEATURES).read_bytes()
    (sae / FEATURES).write_bytes(whole[: len(whole) // 2])
    write_card(sae, card_of(sae), moved_alone(MOVED, WORDS))
    assert card_of(sae).parts[ROWS]
    assert not (sae / FEATURES).exists()
    evaluate(run, "--keep-rows")
    assert Features(sae / FEATURES).n_latents == 64


def test_all_parts_of_one_evaluation_form_one_version(run: Path) -> None:
    sae, before = run / "sae", card_of(run / "sae")
    first = write_card(sae, msgspec.structs.replace(before, step=21))
    spliced = msgspec.convert(SPLICED, PatchedModel)
    second = write_card(sae, msgspec.structs.replace(first, spliced=spliced), replaces=first)
    assert [(one.number, one.card.step, one.card.spliced) for one in versions(sae)] == [(2, 21, spliced), (1, 20, None)]
    # A report card written by another evaluation in the meantime becomes an older version.
    write_card(sae, msgspec.structs.replace(second, step=22), replaces=first)
    assert [one.card.step for one in versions(sae)] == [22, 21, 20]


def _add_many(folder: Path, name: str, begin: object) -> None:
    begin.wait()
    part = {"spliced": msgspec.convert(SPLICED, PatchedModel), "probing": msgspec.convert(PROBING, Probing)}[name]
    for _ in range(5):
        add(folder, **{name: part})


def test_the_results_of_two_concurrent_evaluations_are_both_kept(run: Path) -> None:
    context = multiprocessing.get_context("fork")
    begin = context.Barrier(2)
    both = [context.Process(target=_add_many, args=(run / "sae", name, begin)) for name in ("spliced", "probing")]
    for process in both:
        process.start()
    for process in both:
        process.join()
        assert process.exitcode == 0
    card = card_of(run / "sae")
    assert card.spliced
    assert card.probing
    assert card.parts.keys() >= {ROWS, IN_MODEL, PROBES}


def test_identical_content_is_stored_only_once_and_the_oldest_versions_are_removed(run: Path) -> None:
    sae = run / "sae"
    for _ in range(2):
        evaluate(run)
    assert [one.number for one in versions(sae)] == [1]
    for step in range(100, 100 + MOST_CARDS + 3):
        write_card(sae, msgspec.structs.replace(card_of(sae), step=step))
    numbers = [one.number for one in versions(sae)]
    assert numbers == list(range(MOST_CARDS + 4, 3, -1))
    assert len(list((sae / FOLDER).glob("*.safetensors"))) == 1
