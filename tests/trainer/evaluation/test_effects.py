"""Checks the effects of latents on a language model's loss against plain loops over transformers models."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
import torch
import transformers
from support.extractions import CPU, extraction_job, run
from support.saes import new_sae
from support.tiny_models import D_IN, make_config, make_model, make_tokenizer, sentences
from torch import Tensor

from trainer.cli import main
from trainer.contract.errors import UserError
from trainer.contract.runs.features import EFFECT, EFFECT_ERROR, EFFECT_FIRING, FEATURES, Features
from trainer.contract.runs.report_card import EFFECTS, IN_MODEL, ROWS, Card, read_card
from trainer.contract.settings.extract import ExtractJob
from trainer.contract.settings.job import JobConfig
from trainer.contract.settings.job_file import dump_job
from trainer.evaluation.effects import SaeLatents, measure_effects
from trainer.evaluation.exported import read_exported
from trainer.evaluation.spliced import KeptRows, SplicedModel, _random_root, job_of_data
from trainer.extraction.packing import PADDING, ContextBatch
from trainer.saes.sparse_acts import DenseActs
from trainer.saes.topk import TopK
from trainer.training.loop import Trainer

D_SAE = 24
ONE = torch.ones(())
HOOK = "resid_post.1"
# The paths of block 1 and of its MLP, by family.
BLOCKS = {"gpt2": "transformer.h.1", "llama": "model.layers.1", "gemma3": "model.layers.1"}


def weights(scale: float = 0.3) -> tuple[Tensor, Tensor]:
    """Return an encoder [D_IN, D_SAE] whose last latent never fires, and a decoder [D_SAE, D_IN]."""
    generator = torch.Generator().manual_seed(3)
    w_enc, w_dec = (torch.randn(shape, generator=generator) for shape in ((D_IN, D_SAE), (D_SAE, D_IN)))
    w_enc[:, -1] = 0
    return w_enc, scale * w_dec / math.sqrt(D_IN)


def encoded(x: Tensor) -> Tensor:
    """Return activations [n, D_SAE] for rows x, in the dtype of x; about a third of them are above 0."""
    return (x @ weights()[0].to(x) / math.sqrt(D_IN) - 0.5 * x.norm(dim=1, keepdim=True) / math.sqrt(D_IN)).relu()


def latents(scale: float = 0.3) -> SaeLatents:
    return SaeLatents(lambda rows: DenseActs(encoded(rows)), ONE, weights(scale)[1])


def make_causal(folder: Path, family: str) -> Path:
    """Write a causal model whose blocks change the residual stream, and its tokenizer."""
    torch.manual_seed(0)
    tokenizer = make_tokenizer(family)
    model = transformers.AutoModelForCausalLM.from_config(make_config(family, len(tokenizer)))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name.lower() and "ln_" not in name:
                parameter.mul_(8)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    place = tmp_path_factory.mktemp("models")
    return lambda family: place / family if (place / family).exists() else make_causal(place / family, family)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    file = tmp_path / "corpus.jsonl"
    file.write_text("".join(json.dumps({"text": one}) + "\n" for one in sentences(40)))
    return file


def job_on(model: Path, text: Path, **settings: Any) -> ExtractJob:
    return extraction_job(model, text, text.parent / "rows", **{"hooks": [HOOK], "context": 48} | settings)


def patterned(ids: Tensor, predicts: Tensor, n_ids: int) -> Tensor:
    """Return a fixed direction of the logits [..., n_tokens, n_ids], which is 0 where nothing is predicted."""
    return (ids[..., None] + torch.arange(n_ids)).double().cos() * predicts[..., None]


@pytest.fixture
def known_root(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the random direction of the logits with a fixed one."""

    def root(_: object, kept: KeptRows, logits: Tensor) -> Tensor:
        predicts = torch.nn.functional.pad(kept.predicts, (0, 1))
        return patterned(kept.ids, predicts, logits.shape[-1]).to(logits)

    monkeypatch.setattr("trainer.evaluation.spliced._random_root", root)


@pytest.fixture
def no_curvature(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.evaluation.spliced._random_root", lambda _, __, logits: torch.zeros_like(logits))


class Piece(NamedTuple):
    """The tokens of a document in one context, the document's number, and the rows that can be changed."""

    ids: Tensor
    document: int
    kept: Tensor

    @property
    def predicts(self) -> Tensor:
        """Mark the rows after which a token is predicted."""
        return self.kept & (torch.arange(len(self.ids)) < len(self.ids) - 1)


def _loss(piece: Piece, logits: Tensor) -> Tensor:
    log_p = logits.log_softmax(-1)
    losses = [-log_p[at, piece.ids[at + 1]] for at in piece.predicts.nonzero().flatten().tolist()]
    return torch.stack(losses).sum() if losses else torch.zeros((), dtype=torch.float64)


class Loop:
    """The unmodified model in float64 or bf16, which reads one piece of a document at a time."""

    def __init__(
        self, folder: Path, family: str, read: str = "", written: str = "", dtype: torch.dtype = torch.float64
    ) -> None:
        self.model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
        self.special = set(transformers.AutoTokenizer.from_pretrained(folder).all_special_ids)
        block = BLOCKS[family]
        self._read = self.model.get_submodule(f"{block}.{read}" if read else block)
        self._written = self.model.get_submodule(f"{block}.{written}" if written else block)
        self._of_input = bool(read)

    def pieces(self, spliced: SplicedModel, n_tokens: int) -> list[Piece]:
        found = []
        for batch in spliced.batches(n_tokens)[0]:
            for ids, documents in zip(batch.ids, batch.documents, strict=True):
                for document in dict.fromkeys(documents[documents != PADDING].tolist()):
                    own = torch.from_numpy(ids[documents == document])
                    kept = torch.tensor([at > 0 and one not in self.special for at, one in enumerate(own.tolist())])
                    found.append(Piece(own, document, kept))
        return found

    @contextlib.contextmanager
    def _changed(self, change: Callable[[Tensor, Tensor], Tensor]) -> Iterator[None]:
        """Replace the rows that are written with `change(rows that are read, rows that are written)`."""
        rows: list[Tensor] = []

        def first(_: object, arguments: tuple[Tensor, ...]) -> None:
            rows.append(arguments[0][0].double())

        def after(_: object, __: object, output: Any) -> Any:
            own = output if isinstance(output, Tensor) else output[0]
            own_rows = own[0].double()
            new = change(rows[0] if rows else own_rows, own_rows)[None].to(own.dtype)
            return new if isinstance(output, Tensor) else (new, *output[1:])

        handles = [self._read.register_forward_pre_hook(first)] if self._of_input else []
        handles.append(self._written.register_forward_hook(after))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def logits(self, piece: Piece, change: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        with self._changed(change):
            return self.model(piece.ids[None]).logits[0].double()

    def loss(self, piece: Piece, change: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """Return the summed loss of the tokens after kept rows."""
        return _loss(piece, self.logits(piece, change))

    def estimates(self, piece: Piece, w_dec: Tensor) -> tuple[Tensor, Tensor]:
        """Return each latent's estimated effect on the summed loss, [d_sae], and the number of rows it fires on."""
        added = torch.zeros(len(piece.ids), w_dec.shape[1], dtype=torch.float64, requires_grad=True)
        read: list[Tensor] = []

        def change(rows: Tensor, written: Tensor) -> Tensor:
            read.append(rows.detach())
            return written + added

        logits = self.logits(piece, change)
        loss, zeros = _loss(piece, logits), torch.zeros_like(added)
        (gradient,) = torch.autograd.grad(loss, added, retain_graph=True) if loss.requires_grad else (zeros,)
        root = patterned(piece.ids, piece.predicts, logits.shape[-1])
        (second,) = torch.autograd.grad((root * logits).sum(), added)
        acts = encoded(read[0]) * piece.kept[:, None]
        effects = torch.zeros(len(w_dec), dtype=torch.float64)
        for row, of_second, of_row in zip(gradient, second, acts, strict=True):
            for latent, act in enumerate(of_row.tolist()):
                contribution = act * w_dec[latent].double()
                effects[latent] += (of_second @ contribution) ** 2 / 2 - row @ contribution
        return effects, (acts > 0).sum(0)

    @torch.no_grad()
    def curvature(self, piece: Piece, w_dec: Tensor, step: float = 1e-4) -> Tensor:
        """Return half the Gauss-Newton form of each contribution, summed over rows, [d_sae], by finite differences."""
        rows: list[Tensor] = []
        p = self.logits(piece, lambda read, written: rows.append(read) or written).softmax(-1)
        acts = encoded(rows[0]) * piece.kept[:, None]
        found = torch.zeros(len(w_dec), dtype=torch.float64)
        for at, latent in acts.nonzero().tolist():
            step_of = torch.zeros_like(rows[0])
            step_of[at] = step * acts[at, latent] * w_dec[latent].double()
            up, down = (self.logits(piece, lambda _, own, by=by: own + by) for by in (step_of, -step_of))
            slope = (up - down) / (2 * step)
            variances = (p * slope**2).sum(-1) - (p * slope).sum(-1) ** 2
            found[latent] += variances[piece.predicts].sum() / 2
        return found

    def ablated(self, piece: Piece, latent: int, w_dec: Tensor) -> float:
        """Return the change of the summed loss if the latent's contribution is subtracted."""

        def change(rows: Tensor, written: Tensor) -> Tensor:
            act = encoded(rows)[:, latent] * piece.kept
            return written - act[:, None] * w_dec[latent].double()

        with torch.no_grad():
            return float(self.loss(piece, change) - self.loss(piece, lambda _, written: written))


@pytest.mark.usefixtures("known_root")
@pytest.mark.parametrize("family", ["gpt2", "llama", "gemma3"])
def test_estimates_and_errors_match_a_float64_loop_over_documents(
    family: str, models: Callable[[str], Path], text: Path
) -> None:
    spliced, loop = SplicedModel(job_on(models(family), text), HOOK, CPU), Loop(models(family), family)
    sums, fired, n_of = {}, torch.zeros(D_SAE), {}
    for piece in loop.pieces(spliced, 600):
        effects, n_fired = loop.estimates(piece, weights()[1])
        sums[piece.document] = sums.get(piece.document, 0) + effects
        n_of[piece.document] = n_of.get(piece.document, 0) + int(piece.kept[:-1].sum())
        fired += n_fired
    figures, tensors = measure_effects(spliced, latents(), 600)
    n, by_text = sum(n_of.values()), torch.stack([*sums.values()])
    expected = by_text.sum(0) / n
    assert (figures.n_tokens, figures.n_texts) == (n, sum(of > 0 for of in n_of.values()))
    assert figures.n_firing == int((fired > 0).sum()) == D_SAE - 1
    torch.testing.assert_close(tensors[EFFECT].double(), expected, rtol=1e-4, atol=1e-5 * float(expected.abs().max()))
    per_firing = expected * n / fired.clamp(min=1)
    torch.testing.assert_close(tensors[EFFECT_FIRING].double(), per_firing, rtol=1e-4, atol=1e-6)
    left = by_text - expected * torch.tensor([*n_of.values()], dtype=torch.float64)[:, None]
    n_texts = figures.n_texts
    errors = (left.square().sum(0) * n_texts / (n_texts - 1)).sqrt() / n
    torch.testing.assert_close(tensors[EFFECT_ERROR].double(), errors, rtol=1e-3, atol=1e-8)


@pytest.mark.parametrize("family", ["gpt2", "llama", "gemma3"])
def test_ablations_match_a_loop_that_subtracts_each_contribution(
    family: str, models: Callable[[str], Path], text: Path
) -> None:
    spliced, loop = SplicedModel(job_on(models(family), text), HOOK, CPU), Loop(models(family), family)
    figures, _ = measure_effects(spliced, latents(), 300, 300)
    pieces = loop.pieces(spliced, 300)
    assert len(figures.ablated) == 20
    assert figures.n_ablated_tokens == figures.n_tokens
    for one in figures.ablated:
        change = sum(loop.ablated(piece, one.latent, weights()[1]) for piece in pieces)
        assert one.ablation == pytest.approx(change / figures.n_tokens, rel=1e-3, abs=1e-6)
    estimates, ablations = ([getattr(one, name) for one in figures.ablated] for name in ("estimate", "ablation"))
    stats = pytest.importorskip("scipy.stats")
    assert figures.pearson == pytest.approx(stats.pearsonr(estimates, ablations).statistic)
    assert figures.spearman == pytest.approx(stats.spearmanr(estimates, ablations).statistic)
    assert figures.ratio == pytest.approx(np.abs(estimates).sum() / np.abs(ablations).sum())


def test_blocks_are_skipped_only_if_later_blocks_do_not_need_them(models: Callable[[str], Path], text: Path) -> None:
    spliced = SplicedModel(job_on(models("gpt2"), text), HOOK, CPU)
    fast, _ = measure_effects(spliced, latents(), 96, 96)
    assert spliced._skips == {0: True}
    first, _, last = spliced._model._model.transformer.h
    own: list[Tensor] = []

    def need(*_: object) -> None:
        assert own[0] is not None

    handles = [
        first.register_forward_pre_hook(lambda *_: own.clear()),
        first.mlp.register_forward_hook(lambda _, __, output: own.append(output)),
        last.register_forward_pre_hook(need),
    ]
    spliced._skips.clear()
    slow, _ = measure_effects(spliced, latents(), 96, 96)
    assert spliced._skips == {0: False}
    assert [one.ablation for one in slow.ablated] == pytest.approx([one.ablation for one in fast.ablated], abs=1e-6)
    for handle in handles:
        handle.remove()
    assert "forward" not in vars(first)


@pytest.mark.usefixtures("known_root")
def test_a_transcoders_latents_change_the_output_of_its_mlp(models: Callable[[str], Path], text: Path) -> None:
    job = job_on(models("gpt2"), text, hooks=["mlp_in.1", "mlp_out.1"])
    spliced, loop = SplicedModel(job, "mlp_in.1", CPU, "mlp_out.1"), Loop(models("gpt2"), "gpt2", "mlp", "mlp")
    pieces = loop.pieces(spliced, 300)
    figures, tensors = measure_effects(spliced, latents(), 300, 300)
    expected = sum(loop.estimates(piece, weights()[1])[0] for piece in pieces) / figures.n_tokens
    torch.testing.assert_close(tensors[EFFECT].double(), expected, rtol=1e-4, atol=1e-5 * float(expected.abs().max()))
    one = figures.ablated[0]
    change = sum(loop.ablated(piece, one.latent, weights()[1]) for piece in pieces)
    assert one.ablation == pytest.approx(change / figures.n_tokens, rel=1e-3)


def test_the_expected_curvature_matches_finite_differences_of_the_predictions(
    models: Callable[[str], Path], text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spliced, loop = SplicedModel(job_on(models("gpt2"), text), HOOK, CPU), Loop(models("gpt2"), "gpt2")
    expected = sum(loop.curvature(piece, weights()[1]) for piece in loop.pieces(spliced, 48))
    (batch,), _ = spliced.batches(48)
    kept, seeds, found = spliced.kept(batch), itertools.count(), []

    def root(batch: ContextBatch, *more: Any) -> Tensor:
        return _random_root(batch._replace(ids=batch.ids + next(seeds)), *more)

    monkeypatch.setattr("trainer.evaluation.spliced._random_root", root)
    for _ in range(200):
        rows, _, roots, _ = spliced.gradients(batch, kept)
        found.append(((encoded(rows) * (roots @ weights()[1].T)).double() ** 2 / 2).sum(0))
    mean, error = torch.stack(found).mean(0), torch.stack(found).std(0) / len(found) ** 0.5
    assert ((mean - expected).abs() <= 5 * error).all()
    assert float(mean.sum()) == pytest.approx(float(expected.sum()), rel=0.1)


@pytest.mark.usefixtures("no_curvature")
def test_the_error_of_first_order_estimates_falls_quadratically_with_the_activations(
    models: Callable[[str], Path], text: Path
) -> None:
    spliced, errors = SplicedModel(job_on(models("gpt2"), text), HOOK, CPU), []
    for scale in (0.8, 0.4):
        figures, _ = measure_effects(spliced, latents(scale), 300, 300)
        errors.append({one.latent: one.ablation - one.estimate for one in figures.ablated})
    shared = errors[0].keys() & errors[1].keys()
    ratio = sum(abs(errors[0][one]) for one in shared) / sum(abs(errors[1][one]) for one in shared)
    assert 3 < ratio < 5


def test_sparse_and_dense_activations_have_the_same_effects(models: Callable[[str], Path], text: Path) -> None:
    torch.manual_seed(0)
    sae = new_sae(TopK, D_IN, 64, k=8)
    sae.W_enc.data.normal_()
    spliced = SplicedModel(job_on(models("gpt2"), text), HOOK, CPU)

    def acts_of(x: Tensor) -> Any:
        return sae(x, x).acts

    directions = torch.randn(64, D_IN)
    sparse = SaeLatents(acts_of, ONE, directions)
    dense = SaeLatents(lambda x: DenseActs(acts_of(x).dense()), ONE, directions)
    (first, of_sparse), (second, of_dense) = (measure_effects(spliced, one, 400) for one in (sparse, dense))
    assert (of_sparse[EFFECT] != 0).sum() > 20
    for name in of_sparse:
        torch.testing.assert_close(of_sparse[name], of_dense[name], rtol=1e-4, atol=1e-7)
    assert [one.ablation for one in first.ablated] == pytest.approx([one.ablation for one in second.ablated])
    doubled = SaeLatents(acts_of, torch.tensor(0.5), directions / 2)
    torch.testing.assert_close(measure_effects(spliced, doubled, 400)[1][EFFECT], of_sparse[EFFECT])


@pytest.mark.parametrize("family", ["gpt2", "gemma3"])
def test_effects_do_not_depend_on_how_the_text_is_split_into_batches(
    family: str, models: Callable[[str], Path], text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for at_once in (1024, 48):
        monkeypatch.setattr("trainer.evaluation.spliced.TOKENS_AT_ONCE", at_once)
        spliced = SplicedModel(job_on(models(family), text), HOOK, CPU)
        found.append((len(spliced.batches(400)[0]), *measure_effects(spliced, latents(), 400, 400)))
    (n, figures, tensors), (n_split, of_split, split) = found
    assert n < n_split
    for name in tensors:
        torch.testing.assert_close(tensors[name], split[name], rtol=1e-4, atol=1e-7)
    assert (figures.n_texts, figures.n_tokens) == (of_split.n_texts, of_split.n_tokens)
    assert figures.loss == pytest.approx(of_split.loss)
    assert figures.pearson == pytest.approx(of_split.pearson, abs=1e-4)


@pytest.mark.usefixtures("known_root")
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_a_model_in_bf16_has_the_effects_of_a_loop_in_bf16(
    family: str, models: Callable[[str], Path], text: Path
) -> None:
    job = job_on(models(family), text)
    narrow = msgspec.structs.replace(job, model=msgspec.structs.replace(job.model, dtype="bf16"))
    spliced, loop = SplicedModel(narrow, HOOK, CPU), Loop(models(family), family, dtype=torch.bfloat16)
    assert spliced._model.dtype == torch.bfloat16
    figures, tensors = measure_effects(spliced, latents(), 300, 300)
    pieces = loop.pieces(spliced, 300)
    expected = sum(loop.estimates(piece, weights()[1])[0] for piece in pieces) / figures.n_tokens
    torch.testing.assert_close(tensors[EFFECT].double(), expected, rtol=0, atol=0.05 * float(expected.abs().max()))
    found = [one.ablation for one in figures.ablated]
    changes = [sum(loop.ablated(piece, one.latent, weights()[1]) for piece in pieces) for one in figures.ablated]
    ablations = [one / figures.n_tokens for one in changes]
    # The losses of two passes are rounded differently, so small changes cannot be compared.
    assert found == pytest.approx(ablations, rel=0, abs=0.25 * max(map(abs, ablations)))
    assert np.corrcoef(found, ablations)[0, 1] > 0.97


def test_a_latent_that_never_fires_has_no_effect(models: Callable[[str], Path], text: Path) -> None:
    figures, tensors = measure_effects(SplicedModel(job_on(models("gpt2"), text), HOOK, CPU), latents(), 400)
    assert [float(one[-1]) for one in tensors.values()] == [0, 0, 0]
    assert D_SAE - 1 not in [one.latent for one in figures.ablated]
    assert sum(figures.helping) + sum(figures.hurting) == figures.n_firing == D_SAE - 1
    assert figures.n_helping + figures.n_hurting <= figures.n_firing
    largest = [abs(one.effect) for one in figures.largest]
    assert largest == sorted(largest, reverse=True)
    assert largest[0] == pytest.approx(float(tensors[EFFECT].abs().max()))


@pytest.mark.parametrize("length", [1, 2])
def test_batches_without_predictions_are_left_out(
    length: int, models: Callable[[str], Path], text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.evaluation.spliced.TOKENS_AT_ONCE", 48)
    # Only the second token of a document is kept, and only a third token can be predicted from it.
    documents = [*[[5, 6][:length]] * (48 // length), list(range(5, 53))]
    text.write_text("".join(json.dumps({"input_ids": one}) + "\n" for one in documents))
    spliced = SplicedModel(job_on(models("gpt2"), text), HOOK, CPU)
    assert len(spliced.batches(96)[0]) == 2
    figures, _ = measure_effects(spliced, latents(), 96, 1)
    assert (figures.n_tokens, figures.n_ablated_tokens, figures.ablated) == (46, 0, ())
    assert math.isnan(figures.pearson)
    whole, _ = measure_effects(spliced, latents(), 96, 96)
    assert whole.n_ablated_tokens == 46
    assert [one.estimate for one in whole.ablated[:5]] == pytest.approx([one.effect for one in figures.largest])


def test_text_without_predictions_is_refused(models: Callable[[str], Path], text: Path) -> None:
    text.write_text(json.dumps({"text": "a"}) + "\n")
    with pytest.raises(UserError, match=r"text\.path: the text has no rows"):
        measure_effects(SplicedModel(job_on(models("gpt2"), text), HOOK, CPU), latents(), 400)


@pytest.fixture
def trained(
    models: Callable[[str], Path],
    text: Path,
    make_job: Callable[..., JobConfig],
    make_trainer: Callable[..., Trainer],
) -> Callable[..., Path]:
    """Return a function that trains SAEs on rows of GPT-2 and returns the run's folder."""

    def train(hooks: list[str], data: Mapping[str, Any] = MappingProxyType({}), **settings: Any) -> Path:
        extraction = job_on(models("gpt2"), text, hooks=hooks)
        run(extraction)
        places = dict(zip(("path", "target_path"), (str(extraction.folder(hook)) for hook in hooks), strict=False))
        training = make_job(data=places | dict(data), **{"train": {"batch_size": 64, "n_steps": 30}} | settings)
        folder = text.parent / "run"
        assert make_trainer(training, checkpoints=folder / "checkpoints", output=folder / "sae").run()
        (folder / "job.toml").write_text(dump_job(training))
        return folder

    return train


def evaluate(folder: Path, *flags: object) -> Card:
    """Evaluate a run with a command, and return its report card."""
    assert main(["eval", str(folder), "--device", "cpu", *map(str, flags)]) == 0
    card = read_card(folder / "sae")
    assert card
    return card


@pytest.mark.parametrize(
    ("hooks", "data", "sae"),
    [
        ([HOOK], {"drop_dimensions": [3, 5]}, {"architecture": "topk"}),
        ([HOOK], {"scale_dimensions": "auto"}, {"architecture": "batch_topk"}),
        ([HOOK], {}, {"architecture": "jumprelu"}),
        ([HOOK], {}, {"architecture": "gated"}),
        (["mlp_in.1", "mlp_out.1"], {}, {"architecture": "topk", "skip": True}),
        (["mlp_in.1", "mlp_out.1"], {"drop_dimensions": [3]}, {"architecture": "batch_topk"}),
    ],
)
def test_a_runs_effects_are_the_ones_of_its_exported_sae(
    hooks: list[str], data: dict[str, Any], sae: dict[str, Any], trained: Callable[..., Path]
) -> None:
    folder = trained(hooks, data, sae=sae)
    card = evaluate(folder, "--model", "auto", "--tokens", 0, "--effects", "--effect-tokens", 300)
    assert card.effects is not None
    assert card.spliced is None
    exported = read_exported(folder / "sae", CPU)
    job = job_of_data(folder.parent / "rows" / hooks[0])
    spliced = SplicedModel(job, hooks[0], CPU, *hooks[1:])
    figures, tensors = measure_effects(spliced, SaeLatents(exported.encode, ONE, exported.W_dec), 300)
    stored = Features(folder / "sae" / FEATURES)
    assert float(tensors[EFFECT].abs().max()) > 1e-4
    torch.testing.assert_close(torch.tensor(stored.effects), tensors[EFFECT], rtol=1e-3, atol=1e-7)
    assert card.effects.pearson == pytest.approx(figures.pearson, abs=1e-3)
    feature = stored.feature(card.effects.largest[0].latent)
    assert feature.effect == pytest.approx(card.effects.largest[0].effect)
    assert feature.effect_per_firing == pytest.approx(card.effects.largest[0].per_firing)


def test_a_new_evaluation_keeps_the_effects_of_the_same_weights(trained: Callable[..., Path]) -> None:
    folder = trained([HOOK])
    first = evaluate(folder, "--model", "auto", "--tokens", 0, "--effects", "--effect-tokens", 200)
    before = list(Features(folder / "sae" / FEATURES).effects)
    assert {ROWS, EFFECTS} <= first.parts.keys()
    assert IN_MODEL not in first.parts
    assert first.parts[EFFECTS].settings["tokens"] == 200
    second = evaluate(folder, "--model", "auto", "--tokens", 100)
    assert (second.effects, second.parts[EFFECTS]) == (first.effects, first.parts[EFFECTS])
    assert IN_MODEL in second.parts
    assert list(Features(folder / "sae" / FEATURES).effects) == before
    third = evaluate(folder, "--model", "auto", "--keep-rows", "--tokens", 0, "--effects", "--effect-tokens", 300)
    assert third.parts[ROWS] == second.parts[ROWS]
    assert third.spliced == second.spliced
    assert third.effects != first.effects
    assert list(Features(folder / "sae" / FEATURES).effects) != before
    assert Features(folder / "sae" / FEATURES).feature(0).contexts is not None


def test_the_report_card_and_the_model_card_contain_the_effects(trained: Callable[..., Path], capsys: Any) -> None:
    folder = trained([HOOK])
    card = evaluate(folder, "--model", "auto", "--tokens", 0, "--effects", "--effect-tokens", 300)
    shown = capsys.readouterr().out
    assert card.effects is not None
    first = card.effects.largest[0]
    assert f"{first.latent}: {first.effect:+.3g} ± {first.error:.2g}" in shown
    assert f"Spearman {card.effects.spearman:.3f}, Pearson {card.effects.pearson:.3f}" in shown
    model_card = (folder / "sae" / "README.md").read_text()
    assert "| largest effects |" in model_card
    assert "/" not in next(line for line in model_card.splitlines() if line.startswith("| effects on |"))


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--effects"], "--effects: needs --model"),
        (["--model", "auto", "--effect-tokens", "9"], "--effect-tokens: requires --effects"),
    ],
)
def test_effects_without_a_model_are_a_usage_error(flags: list[str], said: str, tmp_path: Path, capsys: Any) -> None:
    assert main(["eval", str(tmp_path), *flags]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line


def test_effects_need_a_model_that_predicts_next_tokens(
    trained: Callable[..., Path], tmp_path: Path, text: Path, capsys: Any
) -> None:
    folder = trained([HOOK])
    bert = make_model(tmp_path / "bert", "bert")
    (tmp_path / "bert.toml").write_text(dump_job(job_on(bert, text)))
    flags = ["--model", str(tmp_path / "bert.toml"), "--effects"]
    assert main(["eval", str(folder), "--device", "cpu", *flags]) == 1
    assert (
        capsys.readouterr()
        .err.splitlines()[-1]
        .endswith("model.path: the model does not predict next tokens, so it has no loss; choose a causal model")
    )
    card = read_card(folder / "sae")
    assert card
    assert card.effects is None
