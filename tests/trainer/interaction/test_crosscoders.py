"""Checks crosscoders in their models against plain transformers loops with hooks and without a cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import transformers
from support.model_saes import acts_of, crosscoder_weights, write_crosscoder
from support.plain_model import N, Plain
from support.tiny_models import D_IN, make_model
from torch import Tensor, nn

from trainer.contract.answers.interaction import Generate, Generated, ReadText, Steered
from trainer.contract.errors import UserError
from trainer.interaction.session import ModelSession

CPU = torch.device("cpu")
LOW, HIGH = "blocks.0.hook_resid_post", "blocks.2.hook_resid_post"
TEXT = "the dog ran over the hill"
# The largest activation of latent 0 in `features_file`.
LARGEST = 4.0


class Part(NamedTuple):
    """A part of a crosscoder's rows: a model, and the block whose output is read."""

    plain: Plain
    block: int

    @property
    def module(self) -> nn.Module:
        return self.plain.blocks()[self.block]


@pytest.fixture
def other(tiny: Callable[[str], Path], tmp_path: Path) -> Path:
    """Return a model with the tokenizer of the tiny GPT-2 and other weights."""
    folder = make_model(tmp_path / "other", "gpt2")
    model = transformers.AutoModel.from_pretrained(folder)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + torch.randn_like(parameter) / 5)
    model.save_pretrained(folder)
    return folder


def rows_of(parts: Sequence[Part], ids: list[int]) -> Tensor:
    """Return the rows that the crosscoder reads, in float64."""
    taken: list[Tensor] = []
    for part in parts:
        part.plain.logits(ids, {part.module: lambda _, rows: taken.append(rows[0].double()) or rows})  # type: ignore[func-returns-value]
    return torch.cat(taken, dim=1)


def weights() -> dict[str, Tensor]:
    return {name: tensor.double() for name, tensor in crosscoder_weights().items()}


def steered_logits(parts: Sequence[Part], changed: Sequence[int], value: float, ids: list[int]) -> Tensor:
    """Return the logits of the model of some parts, with latent 0 set to a value in these parts."""
    own = weights()
    delta = (value - acts_of(rows_of(parts, ids), own)[:, :1]) * own["W_dec"][0]
    delta[0] = 0
    pieces = delta.float().split(D_IN, dim=1)
    changes = {parts[one].module: lambda _, rows, one=one: rows + pieces[one] for one in changed}
    return parts[changed[0]].plain.logits(ids, changes)


def check(interaction: ModelSession, request: Generate, parts: Sequence[Part], changed: Sequence[int]) -> None:
    """Compare both continuations and the KL divergences with those of a loop."""
    *_, found = interaction.generate(request)
    assert isinstance(found, Generated)
    model = parts[changed[0]].plain
    prompt = model.tokenizer(request.prompt).input_ids
    value = request.latents[0].strength * LARGEST
    steered = [*prompt]
    for _ in range(N):
        steered.append(int(steered_logits(parts, changed, value, steered)[-1].argmax()))
    whole = prompt + model.greedy(prompt, {})
    assert found.plain == model.tokenizer.decode(whole[len(prompt) :])
    assert found.steered == model.tokenizer.decode(steered[len(prompt) :])
    assert found.steered != found.plain
    before, after = model.logits(whole, {}), steered_logits(parts, changed, value, whole)
    kl = nn.functional.kl_div(after.log_softmax(-1), before.log_softmax(-1), reduction="none", log_target=True).sum(-1)
    torch.testing.assert_close(torch.tensor([one.kl for one in found.kl]), kl, rtol=1e-3, atol=1e-4)


def check_text(interaction: ModelSession, parts: Sequence[Part]) -> None:
    ids = parts[0].plain.tokenizer(TEXT).input_ids
    wanted = acts_of(rows_of(parts, ids), weights())
    found = torch.zeros_like(wanted)
    for at, token in enumerate(interaction.read(ReadText(TEXT)).tokens):
        for one in token.latents:
            found[at, one.latent] = one.act
    assert (wanted > 0).any()
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["gpt2", "gemma3"])
def test_a_crosscoder_reads_and_changes_all_its_layers(
    family: str, tiny: Callable[[str], Path], tmp_path: Path
) -> None:
    model = tiny(family)
    # The second part comes first in the model.
    interaction = ModelSession(write_crosscoder(tmp_path / "sae", (model, HIGH), (model, LOW)), CPU)
    assert (interaction.ready.model, interaction.ready.hook) == (str(model), f"{HIGH} + {LOW}")
    plain = Plain(model)
    parts = [Part(plain, 2), Part(plain, 0)]
    check_text(interaction, parts)
    request = Generate(TEXT, (Steered(0, 1.5),), n_tokens=N)
    check(interaction, request, parts, [0, 1])
    check(interaction, Generate(TEXT, (Steered(0, 1.5),), n_tokens=N, part=1), parts, [1])
    with pytest.raises(UserError, match="there is no part C; the crosscoder has parts A to B"):
        list(interaction.generate(Generate(TEXT, (Steered(0),), part=2)))


def test_what_is_added_to_a_crosscoder_does_not_depend_on_its_rows(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    model = tiny("gpt2")
    interaction = ModelSession(write_crosscoder(tmp_path / "sae", (model, LOW), (model, HIGH)), CPU)
    *_, found = interaction.generate(Generate(TEXT, (Steered(0, 0.75),), adds=True, n_tokens=N))
    assert isinstance(found, Generated)
    plain = Plain(model)
    pieces = (0.75 * LARGEST * crosscoder_weights()["W_dec"][0]).split(D_IN)

    def adding(piece: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
        return lambda _, rows: torch.cat([rows[:, :1], rows[:, 1:] + piece], dim=1)

    changes = {plain.blocks()[block]: adding(piece) for block, piece in zip((0, 2), pieces, strict=True)}
    assert found.steered == plain.tokenizer.decode(plain.greedy(plain.tokenizer(TEXT).input_ids, changes))
    assert found.steered != found.plain


def test_a_crosscoder_of_two_models_steers_one_of_them(
    tiny: Callable[[str], Path], tmp_path: Path, other: Path
) -> None:
    model = tiny("gpt2")
    folder = write_crosscoder(tmp_path / "sae", (model, LOW), (other, LOW))
    interaction = ModelSession(folder, CPU)
    assert (interaction.ready.model, interaction.ready.hook) == (f"{model.name} + other", LOW)
    parts = [Part(Plain(model), 0), Part(Plain(other), 0)]
    check_text(interaction, parts)
    request = Generate(TEXT, (Steered(0, 2.0),), n_tokens=N)
    check(interaction, request, parts, [0])
    check(interaction, Generate(TEXT, (Steered(0, 2.0),), n_tokens=N, part=1), parts, [1])
    with pytest.raises(UserError, match="--model: the crosscoder reads 2 models; leave --model out"):
        ModelSession(folder, CPU, str(model))


def test_a_crosscoder_whose_models_are_unknown_is_refused(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    model = tiny("gpt2")
    same = write_crosscoder(tmp_path / "same", (model, LOW), (model, LOW))
    with pytest.raises(UserError, match="its parts are revisions of one model, which its metadata does not name"):
        ModelSession(same, CPU)
    apart = write_crosscoder(tmp_path / "apart", (model, LOW), (tiny("llama"), LOW))
    with pytest.raises(UserError, match=r"have different tokenizers: [^;]*$"):
        ModelSession(apart, CPU)
