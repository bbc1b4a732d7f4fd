"""Tests cross-layer transcoders after training: report cards, patched language models and exports."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file
from support.extractions import CPU, extraction_job, run
from support.layered_rows import LAYERS, D, write_layers, write_two_steps
from support.saes import peer
from support.tiny_models import D_IN, make_model, sentences
from torch import Tensor

from trainer.cli import main
from trainer.contract.errors import UsageError, UserError
from trainer.contract.runs.checkpoint_manifest import newest_first
from trainer.contract.runs.features import EFFECT, FEATURES, Features
from trainer.contract.runs.rank_spec import EXIT_FINISHED
from trainer.contract.runs.report_card import facts, read_card, remarks
from trainer.contract.settings.job import JobConfig
from trainer.contract.settings.job_file import parse_job
from trainer.evaluation.cross_layer import ExportedLayers, StoredLayers
from trainer.evaluation.effects import SaeLatents, measure_effects
from trainer.evaluation.evaluate_folder import cards_in
from trainer.evaluation.evaluate_run import evaluations_of
from trainer.evaluation.exported import read_exported
from trainer.evaluation.spliced import SplicedModel
from trainer.saes.sparse_acts import DenseActs
from trainer.training.export_set import export_set
from trainer.training.hub_card import hub_card

SAE = {"cross_layer": True, "architecture": "batch_topk", "d_sae": 48, "k": 3}
LABELS = [f"layer={layer}" for layer in LAYERS]


@pytest.fixture
def finished(make_job: Callable[..., JobConfig], start_ranks: Callable[..., Any], tmp_path: Path) -> Path:
    """Return the folder of a finished run on planted rows, with report cards."""
    write_layers(tmp_path / "rows")
    data = {"path": str(tmp_path / "rows"), "hook": "mlp.2-4"}
    ranks = start_ranks(make_job(data=data, sae=SAE, train={"n_steps": 60, "report_card": True}), 1)
    assert ranks.wait() == [EXIT_FINISHED]
    return Path(ranks.spec.run_dir)


def x_hats(folders: list[Path], xs: list[Tensor]) -> list[Tensor]:
    """Return the reconstruction of each layer's target by the definition, in float64."""
    weights = [
        {name: one.double() for name, one in load_file(folder / "sae_weights.safetensors").items()}
        for folder in folders
    ]
    found = []
    acts = []
    for own, x in zip(weights, xs, strict=True):
        pre_acts = x.double() @ own["W_enc"] + own["b_enc"]
        acts.append(pre_acts * (pre_acts > own["threshold"]))
    d = xs[0].shape[1]
    for target, own in enumerate(weights):
        x_hat = own["b_dec"][:d].expand(len(xs[0]), d)
        for source in range(target + 1):
            first = (target - source) * d
            x_hat = x_hat + acts[source] @ weights[source]["W_dec"][:, first : first + d]
        found.append(x_hat)
    return found


def rows_at(run_dir: Path, site: str) -> list[Tensor]:
    folder = run_dir.parent / "rows"
    return [load_file(folder / f"{site}.{layer}" / "shard-00000.safetensors")["activations"] for layer in LAYERS]


def test_each_layer_has_a_report_card_with_the_fvu_of_its_own_target(finished: Path) -> None:
    assert main(["eval", str(finished), "--device", "cpu"]) == 0
    cards = [read_card(finished / "sae" / label) for label in LABELS]
    for number, card in enumerate(cards):
        assert card is not None
        assert (card.figures.d_in, card.figures.d_sae) == (D, 48)
        assert card.figures.layer is not None
        assert (card.figures.layer.layer, card.figures.layer.n_layers) == (number, 3)
        for texts in (dict(facts(card)), dict(remarks(card))):
            assert texts["cross-layer"].startswith(f"layer {number + 1} of 3; its latents ")
        stated = json.loads((finished / "sae" / LABELS[number] / "cfg.json").read_text())["metadata"]
        # Thresholds are fitted on the other half of the held-out rows in both measurements.
        assert card.figures.fvu == pytest.approx(stated["heldout_fvu"], rel=2e-3)
        assert card.figures.l0 == pytest.approx(stated["heldout_l0"], rel=2e-3)


@pytest.mark.parametrize("is_cross_layer", [True, False])
def test_an_evaluation_measures_the_averaged_weights_that_are_exported(
    is_cross_layer: bool, make_job: Callable[..., JobConfig], start_ranks: Callable[..., Any], tmp_path: Path
) -> None:
    write_layers(tmp_path / "rows")
    data = {"path": str(tmp_path / "rows"), "hook": "mlp.2-4"}
    sae = SAE | {"cross_layer": is_cross_layer}
    ranks = start_ranks(make_job(data=data, sae=sae, train={"n_steps": 60, "optimizer": "signum"}), 1)
    assert ranks.wait() == [EXIT_FINISHED]
    run_dir = Path(ranks.spec.run_dir)
    for evaluation in evaluations_of(run_dir, CPU):
        (card,) = evaluation.cards
        stated = json.loads((run_dir / "sae" / card.label / "cfg.json").read_text())["metadata"]
        assert card.figures.fvu == pytest.approx(stated["heldout_fvu"], rel=1e-3)


def test_a_layer_is_evaluated_although_a_later_one_is_missing(finished: Path) -> None:
    (finished / "sae" / LABELS[2] / "sae_weights.safetensors").unlink()
    (one,) = cards_in(finished / "sae" / LABELS[1], CPU)
    assert one.card.figures.layer is not None
    assert one.card.figures.layer.layer == 1


def test_the_share_from_earlier_layers_is_that_of_what_their_latents_write(finished: Path) -> None:
    layers = StoredLayers({label: finished / "sae" / label for label in LABELS}, CPU).upto(2)
    xs = rows_at(finished, "mlp_in")
    folders = [finished / "sae" / label for label in LABELS]
    found = [layers.reconstruct(number, torch.cat(xs, dim=1))[1] for number in range(3)]
    for one, wanted in zip(found, x_hats(folders, xs), strict=True):
        torch.testing.assert_close(one.double(), wanted, rtol=1e-4, atol=1e-4)
    first, *later = [cast("Any", read_card(folder)) for folder in folders]
    assert first.figures.layer.from_earlier == 0
    assert all(one.figures.layer.from_earlier > 0.05 for one in later)


def test_the_folder_of_a_layer_is_evaluated_with_the_earlier_layers(finished: Path) -> None:
    whole = {one.card.label: one.card for one in cards_in(finished / "sae", CPU)}
    (alone,) = cards_in(finished / "sae" / LABELS[2], CPU)
    assert alone.card.figures.fvu == pytest.approx(whole[LABELS[2]].figures.fvu, rel=1e-6)
    with pytest.raises(UsageError, match="is a layer of a cross-layer transcoder; evaluate its run"):
        list(cards_in(finished / "sae" / LABELS[2], CPU, [str(finished.parent / "rows" / "mlp_in.4")]))


def test_layers_of_different_transcoders_are_not_combined(finished: Path) -> None:
    folders = {label: finished / "sae" / label for label in reversed(LABELS)}
    with pytest.raises(UserError, match="is not layer 0 of a cross-layer transcoder of 3 layers"):
        StoredLayers(folders, CPU).upto(2)


def test_circuit_tracer_computes_the_same_reconstructions(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tracer = peer(monkeypatch, "circuit_tracer.transcoder.cross_layer_transcoder")
    answer = export_set([finished], tmp_path / "set", form="circuit-tracer", best=False, force=False)
    (note,) = answer["notes"]
    assert note.startswith("circuit-tracer numbers the layers of a cross-layer transcoder from 0")
    loaded = tracer.load_clt(str(tmp_path / "set"), dtype=torch.float32, device=CPU)
    xs = rows_at(finished, "mlp_in")
    folders = [finished / "sae" / label for label in LABELS]
    with torch.no_grad():
        found = loaded.decode(loaded.encode(torch.stack(xs)).to_sparse())
    for one, wanted in zip(found, x_hats(folders, xs), strict=True):
        torch.testing.assert_close(one.double(), wanted, rtol=1e-4, atol=1e-3)


def test_a_circuit_tracer_export_has_the_layout_of_its_repository(finished: Path, tmp_path: Path) -> None:
    # Read from github.com/decoderesearch/circuit-tracer at commit 4bb8c0e, `CrossLayerTranscoder.to_safetensors`.
    export_set([finished], tmp_path / "set", form="circuit-tracer", best=False, force=False)
    assert 'model_kind: "cross_layer_transcoder"\n' in (tmp_path / "set" / "config.yaml").read_text()
    for number in range(3):
        encoder = load_file(tmp_path / "set" / f"W_enc_{number}.safetensors")
        decoder = load_file(tmp_path / "set" / f"W_dec_{number}.safetensors")
        shapes = {name.removesuffix(f"_{number}"): tuple(one.shape) for name, one in (encoder | decoder).items()}
        own = {"W_enc": (48, D), "b_enc": (48,), "b_dec": (D,), "threshold": (48,)}
        assert shapes == own | {"W_dec": (48, 3 - number, D)}


def test_a_cross_layer_transcoder_is_exported_only_as_a_whole(finished: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is exported with all its layers"):
        export_set([finished], tmp_path / "set", form="circuit-tracer", best=False, force=False, only=[LABELS[1]])
    assert not (tmp_path / "set").exists()
    for form in ("sparsify", "neuronpedia", "dictionary_learning"):
        assert main(["export", str(finished), "--out", str(tmp_path / form), "--format", form]) == 1


def test_a_topk_transcoder_is_read_back_but_not_written_for_circuit_tracer(
    make_job: Callable[..., JobConfig], start_ranks: Callable[..., Any], tmp_path: Path
) -> None:
    write_layers(tmp_path / "rows")
    data = {"path": str(tmp_path / "rows"), "hook": "mlp.2-4"}
    sae = SAE | {"architecture": "topk"}
    ranks = start_ranks(make_job(data=data, sae=sae, train={"n_steps": 40, "report_card": True}), 1)
    assert ranks.wait() == [EXIT_FINISHED]
    folder = Path(ranks.spec.run_dir) / "sae" / LABELS[1]
    stated = json.loads((folder / "cfg.json").read_text())["metadata"]
    (_, card, _) = (one.card for one in cards_in(folder.parent, CPU))
    assert card.figures.fvu == pytest.approx(stated["heldout_fvu"], rel=1e-3)
    assert card.figures.l0 == pytest.approx(stated["heldout_l0"], rel=1e-3)
    with pytest.raises(UserError, match="circuit-tracer has no TopK cross-layer transcoders"):
        export_set([Path(ranks.spec.run_dir)], tmp_path / "set", form="circuit-tracer", best=False, force=False)


def test_early_latents_write_what_the_model_computes_in_two_steps_and_the_card_shows_it(
    make_job: Callable[..., JobConfig], start_ranks: Callable[..., Any], tmp_path: Path
) -> None:
    write_two_steps(tmp_path / "rows")
    fvus, cards = {}, {}
    for is_cross_layer in (True, False):
        # Most targets are 0, so the others are far larger than the median.
        data = {"path": str(tmp_path / "rows"), "hook": "mlp.0-1", "max_norm": 0}
        sae = {"cross_layer": is_cross_layer, "d_sae": 48, "k": 3}
        train = {"n_steps": 400, "batch_size": 256, "lr": 0.02, "report_card": True, "eval_every": 0}
        ranks = start_ranks(make_job(data=data, sae=sae, train=train), 1, run_dir=tmp_path / str(is_cross_layer))
        assert ranks.wait() == [EXIT_FINISHED]
        label = "layer=1" if is_cross_layer else "hook=L1"
        cards[is_cross_layer] = cast("Any", read_card(Path(ranks.spec.run_dir) / "sae" / label))
        fvus[is_cross_layer] = cards[is_cross_layer].figures.fvu
    # The second MLP's output depends on its own input alone, so the true share from earlier layers is 0.
    assert cards[True].figures.layer.from_earlier > 0.1
    assert fvus[True] < 0.8 * fvus[False]


def test_the_hub_finds_it_as_a_cross_layer_transcoder(finished: Path) -> None:
    card = hub_card(newest_first(finished / "checkpoints")[:1], "circuit-tracer", "ada/my-set")
    assert '"cross-layer-transcoder", "transcoder", "circuit-tracer"' in card.split("---")[1]


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "gpt2", "gpt2")


def test_the_loss_with_all_mlps_replaced_matches_a_loop_over_documents(
    gpt2: Path, make_job: Callable[..., JobConfig], start_ranks: Callable[..., Any], tmp_path: Path
) -> None:
    text = tmp_path / "corpus.jsonl"
    text.write_text("".join(json.dumps({"text": one}) + "\n" for one in sentences(40)))
    extraction = extraction_job(gpt2, text, tmp_path / "rows", hooks=["mlp.0-1"], context=64, n_tokens=400)
    run(extraction)
    data = {"path": str(tmp_path / "rows"), "hook": "mlp"}
    ranks = start_ranks(make_job(data=data, sae=SAE, train={"batch_size": 64}), 1)
    assert ranks.wait() == [EXIT_FINISHED]
    run_dir = Path(ranks.spec.run_dir)
    labels = ["layer=0", "layer=1"]
    folders = [run_dir / "sae" / label for label in labels]
    layers = StoredLayers(dict(zip(labels, folders, strict=True)), CPU).upto(1)
    hooks = [("mlp_in.0", "mlp_out.0"), ("mlp_in.1", "mlp_out.1")]
    patched = patched_model(extraction, hooks, layers)
    ce, ce_with_sae = losses_of_a_loop(gpt2, folders)
    assert patched.ce == pytest.approx(np.mean(ce), rel=1e-4)
    assert patched.ce_with_sae == pytest.approx(np.mean(ce_with_sae), rel=1e-4)
    assert patched.n_replaced == 2
    flags = ["--device", "cpu", "--model", "auto", "--tokens", "200", "--effects", "--effect-tokens", "200"]
    assert main(["eval", str(run_dir), *flags]) == 0
    card = read_card(folders[1])
    assert card is not None
    assert card.together is not None
    assert card.spliced is None
    assert card.together.n_replaced == 2
    (first, last), *others = hooks
    for number, folder in enumerate(folders):
        spliced = SplicedModel(extraction, first, CPU, last, others=others)
        layer = read_exported(folder, CPU)
        _, tensors = measure_effects(spliced, SaeLatents(layer.encode, torch.ones(()), layer.W_dec, number), 200)
        stored = torch.tensor(Features(folder / FEATURES).effects)
        assert stored.abs().max() > 1e-6
        torch.testing.assert_close(stored, tensors[EFFECT], rtol=1e-3, atol=1e-7)


def test_the_effect_of_a_latent_is_its_contribution_to_all_mlps_from_its_layer_on(
    gpt2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.evaluation.spliced._random_root", lambda _, __, logits: torch.zeros_like(logits))
    text = tmp_path / "corpus.jsonl"
    text.write_text("".join(json.dumps({"text": one}) + "\n" for one in sentences(20)))
    job = extraction_job(gpt2, text, tmp_path / "rows", hooks=["mlp.0-2"], context=64, n_tokens=300)
    pairs = [(f"mlp_in.{layer}", f"mlp_out.{layer}") for layer in range(3)]
    spliced = SplicedModel(job, pairs[0][0], CPU, pairs[0][1], others=pairs[1:])
    generator = torch.Generator().manual_seed(1)
    for pair in (0, 1):
        w_enc, w_dec = (torch.randn(shape, generator=generator) for shape in ((D_IN, 3), (3, (3 - pair) * D_IN)))
        latents = SaeLatents(lambda x, w=w_enc: DenseActs((x @ w).relu()), torch.ones(()), 0.02 * w_dec, pair)
        figures, tensors = measure_effects(spliced, latents, 300, 300)
        losses = LayerLosses(gpt2, w_enc, latents.directions, pair, spliced.batches(300)[0])
        assert len(figures.ablated) == 3
        for one in figures.ablated:
            changed = losses.of(one.latent, 1) - losses.of(one.latent, 0)
            slope = (losses.of(one.latent, 1e-4) - losses.of(one.latent, -1e-4)) / 2e-4
            n = figures.n_tokens
            assert one.ablation == pytest.approx(changed / n, rel=1e-3, abs=1e-6)
            assert float(tensors[EFFECT][one.latent]) == pytest.approx(slope / n, rel=1e-3, abs=1e-6)


class LayerLosses:
    """Computes the loss in float64, one document at a time, with a part of a latent's contributions subtracted."""

    def __init__(self, folder: Path, w_enc: Tensor, directions: Tensor, pair: int, batches: Any) -> None:
        self._model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
        self._w_enc, self._parts, self._pair = w_enc.double(), directions.double().split(D_IN, dim=1), pair
        self._pieces = [
            torch.from_numpy(ids[documents == number])
            for batch in batches
            for ids, documents in zip(batch.ids, batch.documents, strict=True)
            for number in dict.fromkeys(documents.tolist())
        ]

    @torch.no_grad()
    def of(self, latent: int, share: float) -> float:
        mlps = [block.mlp for block in self._model.transformer.h][self._pair :]
        total = 0.0
        for ids in self._pieces:
            # A first pass reads the rows of the unchanged model.
            rows: list[Tensor] = []
            handle = mlps[0].register_forward_pre_hook(lambda _, given, rows=rows: rows.append(given[0]))
            self._model(ids[None])
            handle.remove()
            acts = (rows[0] @ self._w_enc).relu()[..., latent, None] * (torch.arange(len(ids)) > 0)[:, None]
            handles = [
                mlp.register_forward_hook(lambda _, __, own, d=part[latent], a=acts: own - share * a * d)
                for mlp, part in zip(mlps, self._parts, strict=True)
            ]
            log_p = self._model(ids[None]).logits[0].log_softmax(-1)
            for one in handles:
                one.remove()
            total -= sum(float(log_p[at, ids[at + 1]]) for at in range(1, len(ids) - 1))
        return total


def patched_model(extraction: Any, hooks: list[tuple[str, str]], layers: ExportedLayers) -> Any:
    # With the extraction's own folder, only text that it has not read would be measured.
    elsewhere = msgspec.structs.replace(extraction.extract, output="/nothing")
    job = msgspec.structs.replace(extraction, extract=elsewhere)
    first, *others = hooks
    return SplicedModel(job, first[0], CPU, first[1], others=others).measure(*layers.in_turn(), n_tokens=10**6)


def losses_of_a_loop(folder: Path, saes: list[Path]) -> tuple[list[float], list[float]]:
    """Return the loss of each prediction without and with all MLPs replaced, one document at a time."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    mlps = [block.mlp for block in model.transformer.h]
    ce: tuple[list[float], list[float]] = ([], [])
    stream = [(number, one) for number, text in enumerate(sentences(40)) for one in tokenizer(text)["input_ids"]]
    for start in range(0, len(stream), 64):
        context = stream[start : start + 64]
        for number in dict.fromkeys(number for number, _ in context):
            ids = torch.tensor([[one for of, one in context if of == number]])
            for values, replaces in zip(ce, (False, True), strict=True):
                handles = replacing(mlps, saes) if replaces else []
                with torch.inference_mode():
                    logits = model(input_ids=ids).logits.double().log_softmax(-1)[0]
                for handle in handles:
                    handle.remove()
                # The first token of a document is neither patched nor included.
                values += [-logits[at, ids[0, at + 1]].item() for at in range(1, ids.shape[1] - 1)]
    return ce


def replacing(mlps: list[Any], saes: list[Path]) -> list[Any]:
    read: list[Tensor] = []

    def before(number: int, arguments: tuple[Tensor, ...]) -> None:
        if number == 0:
            read.clear()
        read.append(arguments[0][0, 1:])

    def after(number: int, output: Tensor) -> Tensor:
        *_, x_hat = x_hats(saes[: number + 1], read[: number + 1])
        return torch.cat([output[:, :1], x_hat[None].to(output)], 1)

    handles = []
    for number, mlp in enumerate(mlps[: len(saes)]):
        handles.append(mlp.register_forward_pre_hook(lambda _, arguments, number=number: before(number, arguments)))
        handles.append(mlp.register_forward_hook(lambda _, __, output, number=number: after(number, output)))
    return handles


@pytest.mark.parametrize("is_cross_layer", [True, False], ids=["cross-layer", "one per layer"])
def test_transcoders_of_all_layers_train_on_a_stream_and_replace_the_mlps_of_its_model(
    is_cross_layer: bool, gpt2: Path, start_ranks: Callable[..., Any], tmp_path: Path
) -> None:
    (tmp_path / "corpus.txt").write_text("\n\n".join(sentences(400)))
    data = {"source": "model", "model": str(gpt2), "text": str(tmp_path / "corpus.txt"), "context": 32}
    data |= {"hook": "mlp" if is_cross_layer else ["mlp.0", "mlp.1", "mlp.2"]}
    train = {"batch_size": 64, "n_steps": 20, "report_card": False}
    sae = SAE | {"cross_layer": is_cross_layer}
    job, problems = parse_job(
        {"data": data | {"held_out_tokens": 200, "shuffle_tokens": 500}, "sae": sae, "train": train}
    )
    assert job is not None, problems
    ranks = start_ranks(job, 1)
    assert ranks.wait() == [EXIT_FINISHED]
    folders = sorted((ranks.spec.run_dir / "sae").iterdir())
    for folder, n_targets in zip(folders, (3, 2, 1) if is_cross_layer else (1, 1, 1), strict=True):
        weights = load_file(folder / "sae_weights.safetensors")
        assert tuple(weights["W_dec"].shape) == (48, n_targets * D_IN)
    assert main(["eval", str(ranks.spec.run_dir), "--device", "cpu", "--model", "auto", "--tokens", "200"]) == 0
    for folder in folders:
        card = read_card(folder)
        assert card is not None
        assert card.together is not None
        assert card.together.n_replaced == 3
