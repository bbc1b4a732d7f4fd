"""Tests k-sparse probing with latents known to separate two classes, and against scikit-learn."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from support.combinations import slow_except
from support.extractions import CPU, extraction_job, run
from support.probe_texts import two_classes, write_set
from support.tiny_models import FAMILIES, make_model, sentences
from torch import Tensor

from trainer.cli import main
from trainer.contract.errors import UserError
from trainer.contract.settings.job import JobConfig
from trainer.contract.settings.job_file import dump_job
from trainer.evaluation.command import evaluate
from trainer.evaluation.probing import LabelledRows, auc_of_probe, by_difference, last_rows, probe, probe_rows
from trainer.extraction.language_model import LanguageModel
from trainer.training.loop import Trainer

N, D_IN = 180, 24
CONTEXT = 16


def labelled(seed: int, told_by: Tensor) -> LabelledRows:
    """Return noise rows [N, D_IN], with the direction `told_by` [D_IN] added to the rows of class 1."""
    generator = torch.Generator().manual_seed(seed)
    labels = [0] * (N // 2) + [1] * (N // 2)
    rows = torch.randn(N, D_IN, generator=generator) + torch.tensor(labels)[:, None] * told_by
    return LabelledRows(f"set {seed}", rows, labels)


def only(dimension: int, size: float) -> Tensor:
    told_by = torch.zeros(D_IN)
    told_by[dimension] = size
    return told_by


def test_one_latent_that_separates_the_classes_is_as_good_as_all_activations() -> None:
    result = probe(probe_rows([labelled(0, only(3, 8.0)), labelled(1, only(5, 8.0))]), torch.relu)
    assert result.k["1"].auc > 0.99
    assert result.dense.auc > 0.99
    assert (result.n_sets, result.n_seeds, result.n_texts) == (2, 3, 2 * N)


@pytest.mark.slow
def test_noise_scores_at_chance_level_and_spread_out_information_needs_many_latents() -> None:
    nothing = probe(probe_rows([labelled(seed, torch.zeros(D_IN)) for seed in range(4)]), torch.relu)
    assert abs(nothing.k["1"].auc - 0.5) < 0.12
    spread = probe(probe_rows([labelled(0, torch.full((D_IN,), 0.5))]), lambda rows: rows)
    assert spread.k["1"].auc < spread.k["16"].auc <= 1
    assert spread.k["1"].set_error is None


def test_latents_are_ranked_as_in_a_naive_loop() -> None:
    from scipy import sparse

    generator = np.random.default_rng(0)
    acts = np.maximum(generator.normal(size=(60, 9)), 0) * generator.uniform(0.1, 10, size=9)
    acts[:, 7] = 0
    labels = np.arange(60) % 2
    scores = []
    for latent in range(9):
        column = acts[:, latent]
        size = column[column > 0].mean() if (column > 0).any() else 1.0
        scores.append(abs(column[labels == 1].mean() - column[labels == 0].mean()) / size)
    order = by_difference(sparse.csr_matrix(acts), labels)
    assert order.tolist() == sorted(range(9), key=lambda latent: -scores[latent])
    assert order[-1] == 7


def test_a_probe_matches_scikit_learn_with_the_penalty_that_is_best_on_the_last_fifth() -> None:
    from sklearn.linear_model import LogisticRegression
    from sklearn.metrics import roc_auc_score

    one, generator = labelled(2, torch.full((D_IN,), 0.3)), np.random.default_rng(1)
    order = generator.permutation(N)
    x, y = one.rows.double().numpy()[order], np.array(one.labels)[order]
    x_train, y_train, x_test, y_test = x[:120], y[:120], x[120:], y[120:]

    def auc(strength: float, n: int, x_to: np.ndarray, y_to: np.ndarray) -> float:
        mean, std = x_train[:n].mean(0), x_train[:n].std(0)
        model = LogisticRegression(C=strength, max_iter=1000).fit((x_train[:n] - mean) / std, y_train[:n])
        return float(roc_auc_score(y_to, model.predict_proba((x_to - mean) / std)[:, 1]))

    strengths = [10.0**power for power in range(1, -6, -1)]
    best = max(strengths, key=lambda strength: auc(strength, 96, x_train[96:], y_train[96:]))
    assert auc_of_probe(x_train, y_train, x_test, y_test) == pytest.approx(auc(best, 120, x_test, y_test), abs=0.01)


def test_standard_errors_are_computed_over_seeds_and_over_data_sets() -> None:
    result = probe(probe_rows([labelled(seed, torch.full((D_IN,), 0.3)) for seed in range(3)]), torch.relu)
    of_sets = np.array([*result.dense.of_sets.values()])
    assert result.dense.auc == pytest.approx(of_sets.mean())
    assert result.dense.set_error == pytest.approx(of_sets.std(ddof=1) / 3**0.5)
    assert 0 < result.dense.seed_error < 0.1


@pytest.mark.parametrize(("family", "has_loss"), [("gpt2", True), pytest.param("bert", False, marks=pytest.mark.slow)])
def test_a_runs_report_card_contains_the_probing_results(
    family: str,
    has_loss: bool,
    make_job: Callable[..., JobConfig],
    make_trainer: Callable[..., Trainer],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (text := tmp_path / "corpus.txt").write_text("\n\n".join(sentences(80)))
    extraction = extraction_job(make_model(tmp_path / family, family), text, tmp_path / "rows", hooks=["resid_post.1"])
    run(extraction)
    folder = tmp_path / "run"
    job = make_job(data={"path": str(tmp_path / "rows" / "resid_post.1")}, train={"batch_size": 64, "n_steps": 60})
    assert make_trainer(job, checkpoints=folder / "checkpoints", output=folder / "sae").run()
    (folder / "job.toml").write_text(dump_job(job))
    write_set(tmp_path / "packages", "1_animals", two_classes(70, "the cat sat on", "a dog ran over"))
    monkeypatch.syspath_prepend(tmp_path / "packages")
    (told,) = evaluate(folder, best=False, device="cpu", model="auto", is_probed=True, n_sets=1)
    card, last = told["card"], told["lines"][-2]
    assert (card["spliced"] is not None) == has_loss
    assert (last == "no loss: the language model does not predict next tokens") != has_loss
    probing = card["probing"]
    assert {*probing["k"]} == {"1", "16"}
    assert probing["dense"]["auc"] > 0.9
    assert [*probing["dense"]["of_sets"]] == ["1_animals"]
    assert "| probing (AUC) |" in (folder / "sae" / "README.md").read_text()


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--probe"], "--probe: needs --model"),
        (["--sets", "3"], "--sets: requires --probe"),
    ],
)
def test_probing_is_refused_if_its_requirements_are_not_met(
    flags: list[str], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["eval", str(tmp_path), *flags]) == 2
    assert sentence in capsys.readouterr().err


def load(folder: Path, *, whole: bool = False) -> LanguageModel:
    job = extraction_job(folder, Path("text"), Path("rows"), hooks=["resid_post.1"], context=CONTEXT)
    return LanguageModel(job, CPU, whole=whole)


def alone(folder: Path, text: str) -> torch.Tensor:
    """Run a text through the model unbatched, and return the second block's output [d] for its last token."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModel.from_pretrained(folder).eval()
    ids = tokenizer(text)["input_ids"]
    own = tokenizer(text, add_special_tokens=False)["input_ids"]
    first = next(at for at in range(len(ids)) if ids[at : at + len(own)] == own)
    before, after = ids[:first], ids[first + len(own) :]
    own = own[-(CONTEXT - len(before) - len(after)) :]
    with torch.inference_mode():
        output = model(input_ids=torch.tensor([before + own + after]), output_hidden_states=True)
    return output.hidden_states[2][0, len(before) + len(own) - 1]


@pytest.mark.parametrize("family", slow_except([*FAMILIES][:2], FAMILIES))
def test_each_text_gets_the_same_row_as_without_batching(tiny: Callable[[str], Path], family: str) -> None:
    texts = sentences(12)
    rows = last_rows(load(tiny(family)), texts, CONTEXT)
    expected = torch.stack([alone(tiny(family), text) for text in texts])
    torch.testing.assert_close(rows, expected, rtol=1e-4, atol=1e-4)


def test_the_full_model_produces_the_same_rows_and_stops_at_the_hook(tiny: Callable[[str], Path]) -> None:
    texts, model = sentences(5), load(tiny("gpt2"), whole=True)
    reads: list[object] = []
    model._model.get_output_embeddings().register_forward_pre_hook(lambda *_: reads.append(1))
    reads.clear()
    rows = last_rows(model, texts, CONTEXT)
    assert not reads
    torch.testing.assert_close(rows, last_rows(load(tiny("gpt2")), texts, CONTEXT))


def test_a_text_without_tokens_is_refused(tiny: Callable[[str], Path]) -> None:
    with pytest.raises(UserError, match="tokenizer produces no tokens for the text"):
        last_rows(load(tiny("gpt2")), ["the cat", ""], CONTEXT)
