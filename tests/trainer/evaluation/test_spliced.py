"""Checks a language model's loss with an SAE patched in against a loop over documents and against SAELens."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

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
from trainer.contract.runs.features import FEATURES, Features
from trainer.contract.runs.report_card import ROWS, read_card
from trainer.contract.settings.extract import ExtractJob
from trainer.contract.settings.job import JobConfig
from trainer.contract.settings.job_file import dump_job
from trainer.evaluation.spliced import N_MOVED, SplicedModel, hook_of_data, job_of_data, moved_tokens
from trainer.saes.sparse_acts import DenseActs
from trainer.saes.topk import TopK
from trainer.sharing.saelens import export_sae
from trainer.training.loop import Trainer

HOOK = "resid_post.1"
D_SAE = 7
W_DEC = torch.randn(D_SAE, D_IN, generator=torch.Generator().manual_seed(1))
# Maps each family to its final norm's path, whether the norm subtracts the mean, and the number added to its weight.
NORMS = {
    "gpt2": ("transformer.ln_f", True, 0.0),
    "llama": ("model.norm", False, 0.0),
    "gemma3": ("model.norm", False, 1.0),
    "qwen3": ("model.norm", False, 0.0),
}


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "gpt2", "gpt2")


@pytest.fixture
def job(gpt2: Path, tmp_path: Path) -> ExtractJob:
    text = tmp_path / "corpus.jsonl"
    text.write_text("".join(json.dumps({"text": one}) + "\n" for one in sentences(80)))
    return extraction_job(gpt2, text, tmp_path / "rows", hooks=[HOOK, "mlp_out.0"])


def half(x: Tensor) -> Tensor:
    return 0.5 * x + 0.1


def halved(x: Tensor, _: Tensor) -> tuple[DenseActs, Tensor]:
    return DenseActs(x), half(x)


class Spied:
    """The unmodified model, with a hook that can change the output of block 1."""

    def __init__(self, folder: Path) -> None:
        self.model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        self._block = self.model.transformer.h[1]

    @contextlib.contextmanager
    def changed(self, change: Callable[[Tensor], Tensor] | None) -> Iterator[None]:
        def after(_: object, __: object, output: Any) -> Any:
            first = output if isinstance(output, Tensor) else output[0]
            new = change(first) if change else first
            return new if isinstance(output, Tensor) else (new, *output[1:])

        handle = self._block.register_forward_hook(after)
        yield
        handle.remove()

    @torch.inference_mode()
    def logits(self, ids: Tensor, change: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        with self.changed(change):
            return self.model(input_ids=ids).logits.double()


def keep_first(change: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda rows: torch.cat([rows[:, :1], change(rows[:, 1:])], 1)


def test_losses_match_a_loop_over_individual_documents(gpt2: Path, job: ExtractJob) -> None:
    spied, mean = Spied(gpt2), torch.linspace(-1, 1, D_IN)
    changes = {"sae": half, "zeros": torch.zeros_like, "mean": lambda rows: mean.expand_as(rows)}
    ce: dict[str, list[float]] = {"clean": [], **{name: [] for name in changes}}
    kl: dict[str, list[float]] = {name: [] for name in changes}
    for piece in pieces_of(spied, length=64):
        ids = torch.tensor([piece])
        clean = spied.logits(ids).log_softmax(-1)[0].numpy()
        of_each = {
            name: spied.logits(ids, keep_first(change)).log_softmax(-1)[0].numpy() for name, change in changes.items()
        }
        # The first token of each document is neither patched nor included in the means.
        for at in range(1, ids.shape[1]):
            for name, changed in of_each.items():
                kl[name].append(np.sum(np.exp(clean[at]) * (clean[at] - changed[at])))
                if at + 1 < ids.shape[1]:
                    ce[name].append(-changed[at, ids[0, at + 1]])
            if at + 1 < ids.shape[1]:
                ce["clean"].append(-clean[at, ids[0, at + 1]])
    whole = msgspec.structs.replace(job, text=msgspec.structs.replace(job.text, context=64))
    spliced = SplicedModel(whole, HOOK, CPU).measure(halved, mean=mean, n_tokens=10**6)
    for name, value in (("clean", spliced.ce), ("sae", spliced.ce_with_sae), ("zeros", spliced.ce_with_zeros)):
        assert value == pytest.approx(np.mean(ce[name]), rel=1e-4), name
    assert spliced.ce_with_mean == pytest.approx(np.mean(ce["mean"]), rel=1e-4)
    assert spliced.kl_with_sae == pytest.approx(np.mean(kl["sae"]), rel=1e-4)
    assert spliced.kl_with_zeros == pytest.approx(np.mean(kl["zeros"]), rel=1e-4)
    assert spliced.n_tokens == len(ce["clean"])
    assert spliced.ce_score == pytest.approx(
        (spliced.ce_with_zeros - spliced.ce_with_sae) / (spliced.ce_with_zeros - spliced.ce)
    )


def test_the_standard_errors_of_scores_match_a_bootstrap_over_texts(gpt2: Path, job: ExtractJob) -> None:
    spied = Spied(gpt2)
    changes = {"clean": None, "sae": keep_first(half), "zeros": keep_first(torch.zeros_like)}
    lengths = [len(spied.tokenizer(one).input_ids) for one in sentences(80)]
    by_text = {name: np.zeros((len(lengths), 2)) for name in changes}
    text = n_read = 0
    # A text that does not fit in one context continues in the next.
    for ids in (torch.tensor([piece]) for pieces in contexts_of(spied, length=64) for piece in pieces):
        logits = {name: spied.logits(ids, change).log_softmax(-1)[0, 1:] for name, change in changes.items()}
        for name, own in logits.items():
            by_text[name][text, 0] -= own[:-1].gather(1, ids[0, 2:, None]).sum().item()
            by_text[name][text, 1] += (logits["clean"].exp() * (logits["clean"] - own)).sum().item()
        n_read += ids.shape[1]
        text, n_read = (text + 1, 0) if n_read == lengths[text] else (text, n_read)
    assert text == len(lengths)
    generator, scores = np.random.default_rng(0), []
    for _ in range(2000):
        drawn = generator.integers(0, len(lengths), len(lengths))
        clean, sae, zeros = (by_text[name][drawn].sum(0) for name in ("clean", "sae", "zeros"))
        scores.append((zeros - sae)[1] / (zeros - clean)[1])
    whole = msgspec.structs.replace(job, text=msgspec.structs.replace(job.text, context=64))
    spliced = SplicedModel(whole, HOOK, CPU).measure(halved, n_tokens=10**6)
    assert spliced.n_texts == len(lengths)
    assert spliced.kl_score_error == pytest.approx(np.std(scores), rel=0.15)
    # Zero-ablating the hook barely changes an untrained model's loss, so bootstrapped CE scores would be meaningless.
    # The expected error is therefore computed from its definition.
    clean, sae, zeros = (by_text[name][:, 0] for name in ("clean", "sae", "zeros"))
    left = (zeros - sae) - spliced.ce_score * (zeros - clean)
    error = math.sqrt(sum(left**2) * len(left) / (len(left) - 1)) / abs(sum(zeros - clean))
    assert spliced.ce_score_error == pytest.approx(error, rel=1e-3)


def test_a_transcoders_output_replaces_the_output_of_a_different_hook(gpt2: Path, job: ExtractJob) -> None:
    spied = Spied(gpt2)
    mlp = spied.model.transformer.h[1].mlp
    read: list[Tensor] = []

    def first(_: object, arguments: tuple[Tensor, ...]) -> None:
        read.append(arguments[0])

    def after(_: object, __: object, output: Tensor) -> Tensor:
        return torch.cat([output[:, :1], half(read.pop()[:, 1:])], 1)

    ce: dict[str, list[float]] = {"clean": [], "sae": []}
    for piece in pieces_of(spied, length=64):
        ids = torch.tensor([piece])
        of_each = {"clean": spied.logits(ids).log_softmax(-1)[0]}
        handles = [mlp.register_forward_pre_hook(first), mlp.register_forward_hook(after)]
        of_each["sae"] = spied.logits(ids).log_softmax(-1)[0]
        for handle in handles:
            handle.remove()
        for at in range(1, ids.shape[1] - 1):
            for name, values in of_each.items():
                ce[name].append(-values[at, ids[0, at + 1]].item())
    whole = msgspec.structs.replace(job, text=msgspec.structs.replace(job.text, context=64))
    spliced = SplicedModel(whole, "mlp_in.1", CPU, "mlp_out.1").measure(halved, n_tokens=10**6)
    assert spliced.ce == pytest.approx(np.mean(ce["clean"]), rel=1e-4)
    assert spliced.ce_with_sae == pytest.approx(np.mean(ce["sae"]), rel=1e-4)
    with pytest.raises(UserError, match="does not run before"):
        SplicedModel(whole, "mlp_out.1", CPU, "mlp_in.1").measure(halved, n_tokens=10)


def pieces_of(spied: Spied, length: int) -> list[list[int]]:
    """Return the document pieces for all contexts of `length` tokens."""
    return [piece for context in contexts_of(spied, length) for piece in context]


def contexts_of(spied: Spied, length: int) -> list[list[list[int]]]:
    """Split the concatenated documents every `length` tokens, and return each resulting context's document pieces."""
    stream = [(number, one) for number, text in enumerate(sentences(80)) for one in spied.tokenizer(text)["input_ids"]]
    contexts = [stream[first : first + length] for first in range(0, len(stream), length)]
    return [
        [[one for _, one in piece] for _, piece in itertools.groupby(context, lambda two: two[0])]
        for context in contexts
    ]


class LensModel:
    """The part of TransformerLens's model interface used by SAELens's evaluation."""

    def __init__(self, spied: Spied) -> None:
        self._spied = spied

    def __call__(self, tokens: Tensor, **_: Any) -> tuple[Tensor, Tensor]:
        return self.run_with_hooks(tokens)

    def run_with_hooks(self, tokens: Tensor, fwd_hooks: Any = (), **_: Any) -> tuple[Tensor, Tensor]:
        change = (lambda rows: fwd_hooks[0][1](rows, None)) if fwd_hooks else None
        logits = self._spied.logits(tokens, change)
        of_next = logits[:, :-1].log_softmax(-1).gather(-1, tokens[:, 1:, None])[..., 0]
        return logits, -of_next


def test_losses_and_scores_match_saelens(gpt2: Path, job: ExtractJob, tmp_path: Path) -> None:
    sae_lens = pytest.importorskip("sae_lens")
    evals = pytest.importorskip("sae_lens.evals")
    from sae_lens.training.activation_scaler import ActivationScaler

    torch.manual_seed(0)
    sae = new_sae(TopK, D_IN, 64, k=8)
    export_sae(sae, tmp_path / "sae", {"hook_name": "blocks.1.hook_resid_post"})
    theirs = sae_lens.SAE.load_from_disk(tmp_path / "sae")
    # Each context contains one document of fixed length, and a special token ends each document.
    spied = Spied(gpt2)
    texts = [" ".join(text.split()[:3]) for text in sentences(60)]
    ids = [spied.tokenizer(text)["input_ids"] for text in texts]
    length = min(map(len, ids))
    rows = [[*one[: length - 1], spied.tokenizer.eos_token_id] for one in ids]
    (tmp_path / "ids.jsonl").write_text("".join(json.dumps({"input_ids": one}) + "\n" for one in rows))
    ours = extraction_job(
        gpt2, tmp_path / "ids.jsonl", tmp_path / "none", hooks=[HOOK], context=length, skip_first=0, batch_tokens=length
    )
    tokens = torch.tensor(rows)

    class Store:
        def get_batch_tokens(self, _: int) -> Tensor:
            return tokens

    with torch.no_grad():
        spliced = SplicedModel(ours, HOOK, CPU).measure(lambda x, _: (sae(x, x).acts, sae(x, x).x_hat))
    assert (spliced.left_out, spliced.ce_with_mean) == ("special tokens", None)
    for view, ignored in ((spliced, list(spied.tokenizer.all_special_ids)), (spliced.all_tokens, None)):
        expected = evals.get_downstream_reconstruction_metrics(
            sae=theirs, model=LensModel(spied), activation_store=Store(), activation_scaler=ActivationScaler(),
            compute_kl=True, compute_ce_loss=True, n_batches=1, eval_batch_size_prompts=len(rows),
            ignore_tokens=ignored,
        )  # fmt: skip
        assert view is not None
        assert view.ce == pytest.approx(expected["ce_loss_without_sae"], rel=1e-4)
        assert view.ce_with_sae == pytest.approx(expected["ce_loss_with_sae"], rel=1e-4)
        assert view.ce_with_zeros == pytest.approx(expected["ce_loss_with_ablation"], rel=1e-4)
        assert view.ce_score == pytest.approx(expected["ce_loss_score"], rel=1e-3)
        assert view.kl_with_sae == pytest.approx(expected["kl_div_with_sae"], rel=1e-3)
        assert view.kl_score == pytest.approx(expected["kl_div_score"], rel=1e-3)


def test_an_identity_reconstruction_has_perfect_scores(job: ExtractJob) -> None:
    spliced = SplicedModel(job, "mlp_out.0", CPU).measure(lambda x, _: (DenseActs(x), x))
    assert (spliced.ce_score, spliced.kl_score) == (pytest.approx(1), pytest.approx(1))
    assert spliced.kl_with_sae == pytest.approx(0, abs=1e-6)
    assert not spliced.is_unseen


def test_a_hooks_ablations_are_measured_once_for_all_its_saes(job: ExtractJob) -> None:
    mean = torch.linspace(-1, 1, D_IN)
    shared, passes = SplicedModel(job, HOOK, CPU), []
    read = shared._model.logits
    shared._model.logits = lambda batch: passes.append(batch) or read(batch)  # type: ignore[method-assign]
    reconstructs = [halved, lambda x, _: (DenseActs(x), 0.9 * x)]
    together = [shared.measure(one, mean=mean) for one in reconstructs]
    n_batches = len({id(batch) for batch in passes})
    assert len(passes) == n_batches * (6 + 3)
    assert together == [SplicedModel(job, HOOK, CPU).measure(one, mean=mean) for one in reconstructs]


def test_text_beyond_the_extracted_part_is_used_if_there_is_any(job: ExtractJob) -> None:
    run(job)
    unseen = SplicedModel(job, HOOK, CPU).measure(halved)
    assert unseen.is_unseen
    seen = SplicedModel(msgspec.structs.replace(job, extract=msgspec.structs.replace(job.extract, output="/nothing")),
                        HOOK, CPU).measure(halved)  # fmt: skip
    assert not seen.is_unseen
    assert unseen.n_tokens < seen.n_tokens


@pytest.mark.parametrize("family", ["bert", "qwen3"])
def test_a_model_without_an_unembedding_is_refused(family: str, tmp_path: Path, job: ExtractJob) -> None:
    other = extraction_job(make_model(tmp_path / family, family), Path(job.text.path or ""), tmp_path / "rows")
    with pytest.raises(UserError, match=r"model.path: .* choose"):
        SplicedModel(other, HOOK, CPU)


def test_the_extraction_that_wrote_the_data_is_found_but_another_hook_is_refused(job: ExtractJob) -> None:
    run(job)
    known = job_of_data(job.folder(HOOK))
    assert (known.model, known.text, known.extract) == (job.model, job.text, job.extract)
    assert hook_of_data(job, {"hook_name": "blocks.1.hook_resid_post"}) == HOOK
    with pytest.raises(
        UserError, match=r"--model: its job reads resid_post.1, mlp_out.0, but this SAE's hook is resid_pre.0"
    ):
        hook_of_data(job, {"hook": "resid_pre.0"})
    with pytest.raises(UserError, match="--model: no extraction wrote"):
        job_of_data(Path("/nothing/here"))


def test_data_from_another_user_cannot_run_remote_code(job: ExtractJob) -> None:
    run(job)
    file = Path(job.extract.output) / "extraction.json"
    state = json.loads(file.read_text())
    state["job"]["model.remote_code"] = True
    file.write_text(json.dumps(state))
    assert not job_of_data(job.folder(HOOK)).model.remote_code


def test_measured_parts_are_kept_when_a_later_part_fails(
    job: ExtractJob, make_job: Callable[..., JobConfig], make_trainer: Callable[..., Trainer], tmp_path: Path, capsys
) -> None:
    run(job)
    training = make_job(data={"path": str(job.folder(HOOK))}, train={"batch_size": 64, "n_steps": 5})
    folder = tmp_path / "run"
    assert make_trainer(training, checkpoints=folder / "checkpoints", output=folder / "sae").run()
    (folder / "job.toml").write_text(dump_job(training))
    # The document has a single token, so there is no next token to predict.
    (tmp_path / "short.jsonl").write_text(json.dumps({"text": "a"}) + "\n")
    short = msgspec.structs.replace(job, text=msgspec.structs.replace(job.text, path=str(tmp_path / "short.jsonl")))
    (tmp_path / "short.toml").write_text(dump_job(short))
    assert main(["eval", str(folder), "--device", "cpu", "--model", str(tmp_path / "short.toml")]) == 1
    assert "text.path: " in capsys.readouterr().err
    card = read_card(folder / "sae")
    assert card
    assert card.parts.keys() == {ROWS}
    assert card.spliced is None


@pytest.mark.parametrize("architecture", ["topk", "batch_topk"])
def test_a_transcoder_with_a_skip_connection_replaces_its_mlp(
    architecture: str,
    job: ExtractJob,
    make_job: Callable[..., JobConfig],
    make_trainer: Callable[..., Trainer],
    tmp_path: Path,
    capsys,
) -> None:
    hooks = ["mlp_in.0", "mlp_out.0"]
    both = msgspec.structs.replace(job, model=msgspec.structs.replace(job.model, hooks=hooks))
    run(both)
    read, written = (str(both.folder(hook)) for hook in hooks)
    data, sae = {"path": read, "target_path": written}, {"architecture": architecture, "skip": True}
    training = make_job(data=data, sae=sae, train={"batch_size": 64, "n_steps": 60})
    folder = tmp_path / "run"
    assert make_trainer(training, checkpoints=folder / "checkpoints", output=folder / "sae").run()
    (folder / "job.toml").write_text(dump_job(training))
    assert main(["eval", str(folder), "--device", "cpu", "--model", "auto", "--json"]) == 0
    (card,) = json.loads(capsys.readouterr().out.splitlines()[-1])["cards"]
    spliced = card["spliced"]
    assert spliced["kl_with_sae"] < spliced["kl_with_zeros"]
    assert spliced["ce_with_mean"] is not None
    assert Features(folder / "sae" / FEATURES).n_latents == 64


def test_the_report_card_of_a_run_on_extracted_rows_contains_the_model_loss(
    job: ExtractJob, make_job: Callable[..., JobConfig], make_trainer: Callable[..., Trainer], tmp_path: Path, capsys
) -> None:
    run(job)
    training = make_job(data={"path": str(job.folder(HOOK))}, train={"batch_size": 64, "n_steps": 60})
    folder = tmp_path / "run"
    assert make_trainer(training, checkpoints=folder / "checkpoints", output=folder / "sae").run()
    (folder / "job.toml").write_text(dump_job(training))
    assert main(["eval", str(folder), "--device", "cpu", "--model", "auto", "--json"]) == 0
    (card,) = json.loads(capsys.readouterr().out.splitlines()[-1])["cards"]
    spliced = card["spliced"]
    assert spliced["is_unseen"]
    assert spliced["ce_with_mean"] is not None
    assert spliced["kl_with_sae"] < spliced["kl_with_zeros"]
    assert not math.isnan(spliced["ce_score"])
    model_card = (folder / "sae" / "README.md").read_text()
    assert "| CE score |" in model_card
    assert "/" not in next(line for line in model_card.splitlines() if line.startswith("| measured on |"))
    features = Features(folder / "sae" / FEATURES)
    feature = features.feature(features.order()[0])
    assert len(feature.promoted) == len(feature.suppressed) == N_MOVED
    assert feature.promoted[0].logit >= feature.promoted[-1].logit > feature.suppressed[-1].logit
    # Promoted tokens are stored as text, even if they occur in no context.
    assert not any(one.text.startswith("[") for one in feature.promoted)


def make_causal(folder: Path, family: str) -> Any:
    """Write a causal model whose norm weights are far from 1, and return the model."""
    torch.manual_seed(0)
    tokenizer = make_tokenizer(family)
    model = transformers.AutoModelForCausalLM.from_config(make_config(family, len(tokenizer)))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name.lower() or "ln_" in name:
                parameter.copy_(torch.randn_like(parameter))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model


def job_of(folder: Path, hook: str = "resid_post.1") -> ExtractJob:
    text = folder / "corpus.jsonl"
    text.write_text("".join(json.dumps({"text": one}) + "\n" for one in sentences(5)))
    return extraction_job(folder, text, folder / "rows", hooks=[hook])


def in_a_loop(model: Any, family: str) -> list[list[float]]:
    """Return the logits for each decoder direction, computed one at a time from the definition in float64."""
    path, takes_mean, added = NORMS[family]
    scale = (model.get_submodule(path).weight.double() + added).tolist()
    w_u = model.lm_head.weight.double().tolist()
    logits = []
    for direction in W_DEC.double().tolist():
        mean = sum(direction) / D_IN if takes_mean else 0.0
        moved = [(one - mean) * factor for one, factor in zip(direction, scale, strict=True)]
        logits.append([sum(a * b for a, b in zip(moved, of_token, strict=True)) for of_token in w_u])
    return logits


@pytest.mark.parametrize("family", NORMS)
def test_the_most_affected_tokens_match_a_loop_over_the_model_parameters(tmp_path: Path, family: str) -> None:
    logits = in_a_loop(make_causal(tmp_path, family), family)
    told = SplicedModel(job_of(tmp_path), "resid_post.1", CPU).moved_tokens(W_DEC)
    for latent, of_tokens in enumerate(logits):
        order = sorted(range(len(of_tokens)), key=lambda token: -of_tokens[token])
        for name, best in (("promoted", order[:N_MOVED]), ("suppressed", order[: -N_MOVED - 1 : -1])):
            assert told[name][latent].tolist() == best
            values = torch.tensor([of_tokens[token] for token in best])
            torch.testing.assert_close(told[f"{name}_logits"][latent], values, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("hook", ["mlp_in.1", "transformer.h.1.attn.c_proj"])
def test_hooks_outside_the_residual_stream_have_no_promoted_tokens(tmp_path: Path, hook: str) -> None:
    make_causal(tmp_path, "gpt2")
    assert SplicedModel(job_of(tmp_path, hook), hook, CPU).moved_tokens(W_DEC) == {}


def test_a_model_with_more_than_a_norm_before_its_unembedding_has_no_promoted_tokens(tmp_path: Path) -> None:
    tokenizer = make_tokenizer("bert")
    config = make_config("bert", len(tokenizer))
    config.is_decoder = True
    transformers.BertLMHeadModel(config).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    assert SplicedModel(job_of(tmp_path), "resid_post.1", CPU).moved_tokens(W_DEC) == {}


def test_directions_processed_in_batches_promote_the_same_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    w_u = torch.randn(D_IN, 50, generator=torch.Generator().manual_seed(2))
    whole = moved_tokens(W_DEC, w_u)
    monkeypatch.setattr("trainer.evaluation.spliced._LOGITS_AT_ONCE", 100)
    parts = moved_tokens(W_DEC, w_u)
    for name in whole:
        torch.testing.assert_close(whole[name], parts[name])
    few: dict[str, Tensor] = moved_tokens(W_DEC, w_u[:, :4])
    assert few["promoted"].shape == (D_SAE, 4)
