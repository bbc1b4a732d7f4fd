"""Checks reading and steering against plain transformers loops with hooks and without a cache."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.features import features_file
from support.model_saes import acts_of, weights_of, write_sae
from support.plain_model import N, Plain
from support.tiny_models import CHAT, D_IN
from torch import Tensor, nn

from trainer.contract.answers.interaction import (
    Continued,
    Generate,
    Generated,
    ReadText,
    Refused,
    Steered,
    Stop,
    TextRead,
)
from trainer.contract.errors import UserError
from trainer.contract.runs.features import FEATURES
from trainer.interaction import session
from trainer.interaction.serve import _Requests
from trainer.interaction.session import ModelSession

CPU = torch.device("cpu")
# The largest activations of the two latents in `features_file`.
LARGEST = torch.tensor([4.0, 3.0])


def setting(latent: int, value: float, first: int = 1) -> Callable[[Tensor, Tensor], Tensor]:
    """Return a change that sets a latent of an SAE to a value at all positions from `first` on."""
    weights = weights_of()

    def change(_: Tensor, rows: Tensor) -> Tensor:
        delta = (value - acts_of(rows, weights)[..., latent : latent + 1]) * weights["W_dec"][latent]
        delta[:, :first] = 0
        return rows + delta

    return change


def generated(interaction: ModelSession, request: Generate) -> Generated:
    *steps, last = interaction.generate(request)
    assert all(isinstance(one, Continued) for one in steps)
    assert isinstance(last, Generated)
    assert (steps[-1].plain, steps[-1].steered) == (last.plain, last.steered)
    return last


@pytest.mark.parametrize("family", ["gpt2", "llama", "gemma3", "qwen3"])
def test_a_text_is_shaded_by_what_the_sae_encodes(family: str, tiny: Callable[[str], Path], tmp_path: Path) -> None:
    folder = write_sae(tmp_path / "sae", tiny(family), "blocks.1.hook_resid_post")
    text = "the dog sat on a small mat"
    read = ModelSession(folder, CPU).read(ReadText(text))
    plain = Plain(tiny(family))
    ids = plain.tokenizer(text).input_ids
    taken: list[Tensor] = []
    plain.logits(ids, {plain.blocks()[1]: lambda _, rows: taken.append(rows) or rows})  # type: ignore[func-returns-value]
    wanted = acts_of(taken[0][0], weights_of())
    found = torch.zeros_like(wanted)
    for at, token in enumerate(read.tokens):
        for one in token.latents:
            found[at, one.latent] = one.act
    assert [token.text for token in read.tokens] == [plain.tokenizer.decode([one]) for one in ids]
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    special = set(plain.tokenizer.all_special_ids)
    assert [token.is_counted for token in read.tokens] == [at > 0 and one not in special for at, one in enumerate(ids)]


def test_tokens_that_share_a_character_are_merged(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    folder = write_sae(tmp_path / "sae", tiny("gpt2"), "blocks.1.hook_resid_post")
    read = ModelSession(folder, CPU).read(ReadText("a 天🙂 b"))
    assert "".join(token.text for token in read.tokens) == "a 天🙂 b"
    assert {"天", "🙂"} <= {token.text.strip() for token in read.tokens}


@pytest.mark.parametrize("family", ["gpt2", "gemma3"])
@pytest.mark.parametrize("latent", [0, 1])
def test_a_steered_continuation_equals_a_loop_that_sets_the_latent(
    family: str, latent: int, tiny: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = write_sae(tmp_path / "sae", tiny(family), "blocks.1.hook_resid_post")
    request = Generate("the dog ran over the hill", (Steered(latent, 2.5),), n_tokens=N)
    found = generated(ModelSession(folder, CPU), request)
    plain = Plain(tiny(family))
    ids = plain.tokenizer(request.prompt).input_ids
    change = {plain.blocks()[1]: setting(latent, 2.5 * float(LARGEST[latent]))}
    assert found.plain == plain.tokenizer.decode(plain.greedy(ids, {}))
    assert found.steered == plain.tokenizer.decode(plain.greedy(ids, change))


@pytest.mark.parametrize("family", ["gpt2", "gemma3"])
def test_the_result_depends_neither_on_the_cache_nor_on_the_size_of_its_parts(
    family: str, tiny: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_sae(tmp_path / "sae", tiny(family), "blocks.1.hook_resid_post")
    interaction = ModelSession(folder, CPU)
    request = Generate("the dog ran over the hill", (Steered(0, 2.0),), n_tokens=N)
    whole = generated(interaction, request)
    monkeypatch.setattr(session, "AT_ONCE", 3)
    in_parts = generated(interaction, request)
    monkeypatch.setattr(interaction._model, "new_cache", lambda: None)
    without_cache = generated(interaction, request)
    for one in (in_parts, without_cache):
        assert (one.plain, one.steered) == (whole.plain, whole.steered)
        assert [kl.kl for kl in one.kl] == pytest.approx([kl.kl for kl in whole.kl], rel=1e-3, abs=1e-4)
        assert [token.logit for token in one.moved] == pytest.approx([token.logit for token in whole.moved], rel=1e-3)


def test_a_latent_that_a_request_names_is_in_the_answer_however_weak_it_is(
    tiny: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interaction = ModelSession(write_sae(tmp_path / "sae", tiny("gpt2"), "blocks.1.hook_resid_post"), CPU)
    text = "the dog sat on a small mat"
    all_latents = interaction.read(ReadText(text))
    monkeypatch.setattr(session, "MOST_LATENTS", 1)
    assert all(len(token.latents) <= 1 for token in interaction.read(ReadText(text)).tokens)
    named = interaction.read(ReadText(text, latents=(0, 1, 99)))
    assert named == all_latents
    assert any(len(token.latents) == 2 for token in named.tokens)


def test_a_tiny_temperature_chooses_the_most_likely_token(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    interaction = ModelSession(write_sae(tmp_path / "sae", tiny("gpt2"), "blocks.1.hook_resid_post"), CPU)
    request = Generate("the dog ran over the hill", (Steered(0, 2.0),), n_tokens=N)
    cold = Generate("the dog ran over the hill", (Steered(0, 2.0),), n_tokens=N, temperature=1e-40)
    assert generated(interaction, cold) == generated(interaction, request)


def test_the_effect_on_predictions_equals_that_of_a_loop(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    folder = write_sae(tmp_path / "sae", tiny("gpt2"), "blocks.1.hook_resid_post")
    request = Generate("a cat saw the dog", (Steered(0, 2.0), Steered(1, 0.0)), n_tokens=N)
    found = generated(ModelSession(folder, CPU), request)
    plain = Plain(tiny("gpt2"))
    prompt = plain.tokenizer(request.prompt).input_ids
    whole = prompt + plain.greedy(prompt, {})

    def both(inputs: Tensor, rows: Tensor) -> Tensor:
        # The activations of both latents are computed from the same unchanged rows.
        return setting(0, 8.0)(inputs, rows) + setting(1, 0.0)(inputs, rows) - rows

    before, after = plain.logits(whole, {}), plain.logits(whole, {plain.blocks()[1]: both})
    kl = nn.functional.kl_div(after.log_softmax(-1), before.log_softmax(-1), reduction="none", log_target=True).sum(-1)
    torch.testing.assert_close(torch.tensor([one.kl for one in found.kl]), kl, rtol=1e-3, atol=1e-4)
    assert found.kl[0].kl == pytest.approx(0, abs=1e-5)
    at = len(prompt) - 1
    moves = after[at] - before[at]
    chances = before[at].softmax(-1), after[at].softmax(-1)
    likely = (torch.maximum(*chances) >= 1e-3).nonzero().flatten().tolist()
    most = sorted(likely, key=lambda token: -abs(float(moves[token])))[:10]
    assert [one.text for one in found.moved] == [plain.tokenizer.decode([token]) for token in most]
    for one, token in zip(found.moved, most, strict=True):
        values = [float(each[token]) for each in (moves, *chances)]
        assert [one.logit, one.plain, one.steered] == pytest.approx(values, rel=1e-3, abs=1e-4)


@pytest.mark.parametrize("family", ["gpt2", "gemma3"])
def test_a_model_in_bf16_is_read_and_steered_like_a_loop_in_bf16(
    family: str, tiny: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A model keeps the dtype of its files only on a GPU.
    monkeypatch.setattr("trainer.extraction.language_model._dtype", lambda *_: torch.bfloat16)
    interaction = ModelSession(write_sae(tmp_path / "sae", tiny(family), "blocks.1.hook_resid_post"), CPU)
    assert interaction._model.dtype == torch.bfloat16
    plain, text = Plain(tiny(family)), "the dog ran over the hill"
    plain.model.to(torch.bfloat16)
    ids, block, taken = plain.tokenizer(text).input_ids, plain.blocks()[1], list[Tensor]()
    before = plain.logits(ids, {block: lambda _, rows: taken.append(rows) or rows}).float()  # type: ignore[func-returns-value]
    wanted = acts_of(taken[0][0].float(), weights_of())
    found = torch.zeros_like(wanted)
    for at, token in enumerate(interaction.read(ReadText(text)).tokens):
        for one in token.latents:
            found[at, one.latent] = one.act
    torch.testing.assert_close(found, wanted, rtol=0, atol=0.02 * float(wanted.max()))
    change = setting(0, 2.0 * float(LARGEST[0]))
    steered = plain.logits(ids, {block: lambda x, rows: change(x, rows.float()).to(rows.dtype)}).float()
    answer = generated(interaction, Generate(text, (Steered(0, 2.0),), n_tokens=N))
    both = steered.log_softmax(-1), before.log_softmax(-1)
    kl = nn.functional.kl_div(*both, reduction="none", log_target=True).sum(-1)
    assert answer.kl[0].kl == pytest.approx(0, abs=1e-3)
    assert [one.kl for one in answer.kl[: len(ids)]] == pytest.approx(kl.tolist(), rel=0.1, abs=0.05)
    moves = (steered - before)[-1]
    assert answer.moved
    for one in answer.moved:
        alike = [token for token in range(len(moves)) if plain.tokenizer.decode([token]) == one.text]
        assert min(abs(float(moves[token]) - one.logit) for token in alike) < 0.15 + 0.05 * abs(one.logit)


def test_a_transcoder_changes_the_output_of_its_mlp(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    folder = write_sae(tmp_path / "sae", tiny("gpt2"), "blocks.1.mlp.hook_in", "blocks.1.hook_mlp_out")
    request = Generate("the dog ran over the hill", (Steered(0, 3.0),), n_tokens=N)
    found = generated(ModelSession(folder, CPU), request)
    plain, weights = Plain(tiny("gpt2")), weights_of()

    def change(inputs: Tensor, written: Tensor) -> Tensor:
        delta = (12.0 - acts_of(inputs, weights, is_transcoder=True)[..., :1]) * weights["W_dec"][0]
        delta[:, :1] = 0
        return written + delta

    ids = plain.tokenizer(request.prompt).input_ids
    mlp = plain.model.transformer.h[1].mlp
    assert found.steered == plain.tokenizer.decode(plain.greedy(ids, {mlp: change}))
    assert found.steered != found.plain


def test_a_layer_of_a_cross_layer_transcoder_changes_all_later_mlps(
    tiny: Callable[[str], Path], tmp_path: Path
) -> None:
    for layer in range(3):
        hooks = f"blocks.{layer}.mlp.hook_in", f"blocks.{layer}.hook_mlp_out"
        place = {"layer": layer, "n_layers": 3}
        write_sae(tmp_path / f"layer={layer}", tiny("gpt2"), *hooks, cross_layer=place, n_targets=3 - layer)
    request = Generate("the dog ran over the hill", (Steered(0, 3.0),), n_tokens=N)
    found = generated(ModelSession(tmp_path / "layer=1", CPU), request)
    plain, weights = Plain(tiny("gpt2")), weights_of(2)
    own, later = weights["W_dec"][0].split(D_IN)
    factors: list[Tensor] = []

    def first(inputs: Tensor, written: Tensor) -> Tensor:
        factor = 12.0 - acts_of(inputs, weights, is_transcoder=True)[..., :1]
        factor[:, :1] = 0
        factors[:] = [factor]
        return written + factor * own

    changes = {
        plain.model.transformer.h[1].mlp: first,
        plain.model.transformer.h[2].mlp: lambda _, written: written + factors[0] * later,
    }
    ids = plain.tokenizer(request.prompt).input_ids
    assert found.steered == plain.tokenizer.decode(plain.greedy(ids, changes))
    (tmp_path / "layer=2" / "cfg.json").unlink()
    with pytest.raises(UserError, match="has no layer 2 of the cross-layer transcoder"):
        ModelSession(tmp_path / "layer=1", CPU)


def test_adding_nothing_changes_nothing_even_if_tokens_are_sampled(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    folder = write_sae(tmp_path / "sae", tiny("gpt2"), "blocks.1.hook_resid_post")
    interaction = ModelSession(folder, CPU)
    how = {"adds": True, "temperature": 1.5, "n_tokens": 12}
    texts = [
        generated(interaction, Generate("the cat", (Steered(0, 0.0),), seed=seed, **how)).plain for seed in (3, 3, 4)
    ]
    found = generated(interaction, Generate("the cat", (Steered(0, 0.0),), seed=3, **how))
    assert found.plain == found.steered == texts[0] == texts[1] != texts[2]
    assert all(one.kl == 0 for one in found.kl)
    assert not found.moved


def test_the_prompt_can_be_read_unchanged(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    folder = write_sae(tmp_path / "sae", tiny("gpt2"), "blocks.1.hook_resid_post")
    request = Generate("the dog ran over the hill", (Steered(0, 5.0),), only_generated=True, n_tokens=N)
    found = generated(ModelSession(folder, CPU), request)
    n_prompt = len(Plain(tiny("gpt2")).tokenizer(request.prompt).input_ids)
    assert all(one.kl == pytest.approx(0, abs=1e-5) for one in found.kl[:n_prompt])
    assert any(one.kl > 0.01 for one in found.kl[n_prompt:])


def test_a_generation_can_be_ended_early(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    folder = write_sae(tmp_path / "sae", tiny("gpt2"), "blocks.1.hook_resid_post")
    checks = iter([False, True])
    answers = [*ModelSession(folder, CPU).generate(Generate("the cat", (Steered(0),)), lambda: next(checks))]
    assert [type(one) for one in answers] == [Continued, Continued, Generated]


def test_a_chat_is_read_with_the_template_of_the_model(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    model = shutil.copytree(tiny("gpt2"), tmp_path / "model")
    (model / "chat_template.jinja").write_text(CHAT + "{% if add_generation_prompt %}assistant: a dog{% endif %}")
    interaction = ModelSession(write_sae(tmp_path / "sae", model, "blocks.1.hook_resid_post"), CPU)
    assert interaction.ready.reads_chats
    read = interaction.read(ReadText("the cat", is_chat=True))
    plain = Plain(model)
    ids = plain.tokenizer.apply_chat_template(
        [{"role": "user", "content": "the cat"}], add_generation_prompt=True, return_dict=False
    )
    assert [token.text for token in read.tokens] == [plain.tokenizer.decode([one]) for one in ids]
    assert "".join(token.text for token in read.tokens) == "user: the cat<eos>assistant: a dog"
    assert [token.text for token in read.tokens[1:] if not token.is_counted] == ["<eos>"]
    # The continuation begins where the model answers.
    request = Generate("the cat", (Steered(0, 2.0),), is_chat=True, n_tokens=N)
    assert generated(interaction, request).plain == plain.tokenizer.decode(plain.greedy(ids, {}))
    other = ModelSession(write_sae(tmp_path / "other", tiny("gpt2"), "blocks.1.hook_resid_post"), CPU)
    assert not other.ready.reads_chats
    with pytest.raises(UserError, match="tokenizer has no chat template; read"):
        other.read(ReadText("the cat", is_chat=True))


@pytest.mark.parametrize(
    ("request_", "problem"),
    [
        (Generate("a cat", (Steered(2),)), "latent 2 does not exist; the SAE has latents 0 to 1"),
        (Generate("", (Steered(0),)), "the text is empty"),
        (ReadText(""), "the text is empty"),
        (ReadText(("the cat " * 40).strip()), r"the text has 80 tokens; enter at most 64"),
        (Generate(("the cat " * 31).strip(), (Steered(0),), n_tokens=4), r"has 62 tokens.* enter at most 60"),
    ],
    ids=str,
)
def test_a_request_that_cannot_be_fulfilled_is_refused_in_a_sentence(
    request_: Any, problem: str, tiny: Callable[[str], Path], tmp_path: Path
) -> None:
    interaction = ModelSession(write_sae(tmp_path / "sae", tiny("gpt2"), "blocks.1.hook_resid_post"), CPU)
    with pytest.raises(UserError, match=problem):
        list(interaction.generate(request_)) if isinstance(request_, Generate) else interaction.read(request_)


def test_steering_needs_the_largest_activations(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    folder = write_sae(tmp_path / "sae", tiny("gpt2"), "blocks.1.hook_resid_post")
    silent = features_file(largest=("F32", "f", [2], [0.0, 3.0]))
    (folder / FEATURES).write_bytes(silent)
    interaction = ModelSession(folder, CPU)
    with pytest.raises(UserError, match="latent 0 never fired"):
        list(interaction.generate(Generate("a cat", (Steered(0, 2.0),))))
    (folder / FEATURES).unlink()
    with pytest.raises(UserError, match="which stores the largest activations; evaluate the SAE"):
        list(interaction.generate(Generate("a cat", (Steered(0, 2.0),))))
    # Ablation needs no unit.
    assert [*interaction.generate(Generate("a cat", (Steered(0, 0.0),), n_tokens=1))]


def test_a_model_without_an_unembedding_reads_texts_but_does_not_generate(
    tiny: Callable[[str], Path], tmp_path: Path
) -> None:
    interaction = ModelSession(write_sae(tmp_path / "sae", tiny("bert"), "resid_post.1"), CPU)
    assert not interaction.ready.generates
    assert isinstance(interaction.read(ReadText("the cat")), TextRead)
    with pytest.raises(UserError, match="does not predict next tokens"):
        list(interaction.generate(Generate("a cat", (Steered(0),))))


@pytest.mark.parametrize(
    ("names", "problem"),
    [
        ({"model_name": "/nowhere/model"}, "^the language model: there is nothing at /nowhere/model"),
        ({"model_name": None}, "--model: the SAE's metadata names no language model"),
        ({"hook_name": None}, "its metadata names no hook"),
        ({"hook_name": "blocks.9.hook_resid_post"}, "^the language model: (?!model)"),
    ],
    ids=str,
)
def test_an_sae_whose_model_is_unknown_is_refused_in_a_sentence(
    names: dict[str, Any], problem: str, tiny: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = write_sae(tmp_path / "sae", tiny("gpt2"), "blocks.1.hook_resid_post")
    config = json.loads((folder / "cfg.json").read_text())
    config["metadata"] |= names
    (folder / "cfg.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=problem):
        ModelSession(folder, CPU)


def test_requests_are_parsed_and_a_stop_does_not_end_later_ones() -> None:
    lines = [b'{"request": "stop"}', b"nonsense", b'{"request": "read", "text": "a"}', b'{"request": "stop"}']
    requests = _Requests(io.BytesIO(b"\n".join(lines) + b"\n"))
    refused = requests.next(10)
    assert isinstance(refused, Refused)
    assert refused.message.startswith("the request is not valid: ")
    assert requests.next(10) == ReadText("a")
    assert requests.next(10) is None
    assert Stop() != requests.next(0)
