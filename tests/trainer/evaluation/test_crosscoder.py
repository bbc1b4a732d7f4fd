"""Tests of a crosscoder's report: figures of its parts, norms of its latents, latent scaling, and its texts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.crosscoders import HOOKS, N_ROWS, ONLY_B, plant
from support.features import features_file
from support.report_cards import card_table
from support.tiny_models import D_IN, sentences
from torch import Tensor

from trainer.activations.open_source import continue_from, open_source
from trainer.cli import main
from trainer.contract.errors import UserError
from trainer.contract.runs.crosscoder import kind_of, part_names
from trainer.contract.runs.features import Features
from trainer.contract.runs.report_card import Card, card_from, facts, read_card
from trainer.contract.settings.job import JobConfig
from trainer.contract.settings.job_file import dump_job, parse_job
from trainer.evaluation import evaluate_run
from trainer.evaluation.card import model_card
from trainer.evaluation.contexts import texts_of
from trainer.evaluation.crosscoder import CrosscoderRows, LatentScaling, crosscoder_figures, ratios, shares_of
from trainer.evaluation.figures import Grouped, Levels, measure
from trainer.saes.sparse_acts import DenseActs

N, F = 300, 24


def job_of(data: dict[str, Any], n_steps: int = 200, d_sae: int = 64) -> JobConfig:
    raw = {
        "name": "cross",
        "data": data,
        "sae": {"architecture": "batch_topk", "d_sae": d_sae, "k": 2},
        "train": {"batch_size": 512, "n_steps": n_steps},
        "launch": {"gpus": "cpu"},
    }
    job, problems = parse_job(raw)
    assert job, problems
    return job


def test_the_report_finds_and_confirms_the_directions_that_one_part_has_alone(
    make_trainer: Callable[..., Any], tmp_path: Path
) -> None:
    plant(tmp_path / "acts")
    job = job_of({"path": str(tmp_path / "acts"), "hook": "resid_post.1+2"})
    assert make_trainer(job).run()
    (tmp_path / "job.toml").write_text(dump_job(job))
    assert main(["eval", str(tmp_path), "--device", "cpu", "--contexts", "5"]) == 0
    card = read_card(tmp_path / "sae")
    assert card
    _check_report(card)
    _check_latents(Features(tmp_path / "sae" / "features.safetensors"))


def _check_report(card: Card) -> None:
    report = card.figures.crosscoder
    assert report
    first, second = report.parts
    assert [(part.name, part.width) for part in report.parts] == [(HOOKS[0], 24), (HOOKS[1], 32)]
    assert first.scale == 1
    assert second.scale == pytest.approx(1 / 8, rel=0.2)
    assert [part.n_confirmed for part in report.parts] == [first.n_only, second.n_only] == [8, 8]
    # All rows are used, because there are fewer than 100,000.
    assert report.n_rows == N_ROWS
    assert max(part.fvu for part in report.parts) < 0.05
    assert all(0 < part.fvu_error < part.fvu for part in report.parts)
    n_dead = first.n_only_dead + second.n_only_dead + report.n_shared_dead + report.n_other_dead
    assert n_dead == round(card.figures.dead * 64)
    assert n_dead + first.n_only + second.n_only + report.n_shared + report.n_other == 64
    # Within a part, all dimensions have the same scale.
    assert card.data.dimensions == f"parts scaled by 1 ({HOOKS[0]}) and {second.scale:.3g} ({HOOKS[1]})"
    text = dict(facts(card))
    assert text["latents by part"].startswith("8 only in A, 8 only in B, ")
    assert f"| part B | {text['part B']} |" in model_card(card)


def _check_latents(features: Features) -> None:
    assert features.part_names == HOOKS
    only = features.search("part:B")
    assert len(only) == 8
    assert sorted(features.search("confirmed:B")) == sorted(features.search("norm:>0.9")) == sorted(only)
    assert features.search(f"part:{HOOKS[1]}") == only
    assert sorted(features.order("norm")[:8]) == sorted(only)
    # Most examples are on the word of a direction that only the second part has.
    contexts = [context for latent in only for context in features.feature(latent).contexts]
    words = [context.tokens[context.at].text for context in contexts]
    assert sum(word in {f" w{number}" for number in range(48)[ONLY_B]} for word in words) > len(words) / 2
    one = features.feature(only[0])
    assert (one.part, [part.name for part in one.parts]) == ("B", [*HOOKS])
    assert one.parts[1].share > 0.9
    assert one.parts[1].beta_error == pytest.approx(1, abs=0.1)
    assert one.nu_error == pytest.approx(0, abs=0.2)
    with pytest.raises(UserError, match="part:C is unknown; write part: and one of A, B, shared, other"):
        features.search("part:C")


def test_latent_filters_are_refused_for_an_sae_without_parts(tmp_path: Path) -> None:
    (tmp_path / "features.safetensors").write_bytes(features_file())
    features = Features(tmp_path / "features.safetensors")
    for words in ("part:A", "norm:>0.5", "confirmed:B"):
        with pytest.raises(UserError, match="is not a crosscoder"):
            features.search(words)


@pytest.mark.parametrize("widths", [(10, 10), (8, 14)])
def test_latent_scaling_matches_a_dense_loop_in_float64(widths: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(0)
    w_dec = torch.randn(F, sum(widths), generator=generator)
    w_dec[: F // 2, : widths[0]] *= 0.05
    acts = torch.rand(N, F, generator=generator) * (torch.rand(N, F, generator=generator) < 0.2)
    rows = acts @ w_dec + 0.3 * torch.randn(N, sum(widths), generator=generator)
    rebuilt = acts @ w_dec
    scaling = LatentScaling(w_dec, widths)
    for first in range(0, N, 128):
        which = slice(first, first + 128)
        # The activations are twice as large in training.
        scaling.add(DenseActs(2 * acts[which]), rows[which] - rebuilt[which], rebuilt[which], scale=0.5)
    errors, rebuilds = scaling.betas()
    for latent in range(F):
        own = [part.double() for part in w_dec[latent].split(widths)]
        largest = max(own, key=lambda part: float(part.norm()))
        f = acts[:, latent].double()
        for part, (x, x_hat) in enumerate(
            zip(rows.double().split(widths, dim=1), rebuilt.double().split(widths, dim=1), strict=True)
        ):
            u = largest if widths[0] == widths[1] else own[part] * (largest.norm() / own[part].norm())
            without = x - (x_hat - f[:, None] * own[part])
            for found, target in ((errors, without), (rebuilds, x_hat)):
                # β minimises ‖β f u - y‖².
                design = (f[:, None] * u).flatten()[:, None]
                wanted = torch.linalg.lstsq(design, target.flatten()[:, None]).solution
                assert float(found[latent, part]) == pytest.approx(float(wanted), rel=1e-4, abs=1e-5)
    nu = ratios(errors, shares_of(w_dec, widths))
    assert float(nu[0]) == pytest.approx(float(errors[0, 0] / errors[0, 1]))


def test_a_latent_that_never_fires_has_no_coefficients_and_is_not_confirmed() -> None:
    scaling = LatentScaling(torch.ones(3, 4), (2, 2))
    scaling.add(DenseActs(torch.tensor([[1.0, 0.0, 2.0]])), torch.zeros(1, 4), torch.zeros(1, 4))
    assert scaling.betas()[0][1].isnan().all()
    assert scaling.betas()[0][0].tolist() == pytest.approx([1, 1])


def test_each_part_has_its_own_fvu_with_an_error_over_texts() -> None:
    generator = torch.Generator().manual_seed(1)
    rows, w_dec = torch.randn(N, 5, generator=generator), torch.randn(F, 5, generator=generator)
    x_hat = rows * torch.tensor([0.9, 0.9, 0.5, 0.5, 0.5])
    acts = torch.rand(N, F, generator=generator)

    def grouped(error: Tensor, spread: Tensor, *others: Tensor) -> Grouped:
        each = [one.double().reshape(30, -1).sum(1) for one in (error, spread, *others)]
        return Grouped(each[0], each[1], "texts", tuple(each[2:]))

    parts = CrosscoderRows(("a", "b"), (2, 3))
    levels = Levels((3,), lambda x, y: (DenseActs(acts), [x_hat]))
    figures = measure(_never, lambda: [(rows, rows)], w_dec, grouped, levels=levels, parts=parts)
    assert figures.crosscoder
    assert [at.k for at in figures.by_k] == [3]
    for part, which in zip(figures.crosscoder.parts, (slice(0, 2), slice(2, 5)), strict=True):
        alone = measure(
            lambda x, y, which=which: (DenseActs(acts), x_hat[:, which]),
            lambda which=which: [(rows[:, which], rows[:, which])],
            w_dec[:, which],
            grouped,
        )
        assert (part.fvu, part.fvu_error) == pytest.approx((alone.fvu, alone.fvu_error))


def _never(x: Tensor, y: Tensor) -> tuple[DenseActs, Tensor]:
    raise AssertionError


def test_latents_of_three_parts_are_counted_by_kind() -> None:
    norms = torch.tensor([[1.0, 0.0, 0.0], [0.01, 1.0, 0.01], [1.0, 1.0, 1.1], [1.0, 0.5, 0.0], [0.0, 0.0, 0.0]])
    w_dec = norms.repeat_interleave(torch.tensor([2, 1, 3]), dim=1) / torch.tensor([2, 2, 1, 3, 3, 3]).sqrt()
    fires = torch.tensor([True, True, True, True, False])
    parts = CrosscoderRows(("a", "b", "c"), (2, 1, 3))
    found = crosscoder_figures(w_dec, fires, parts, torch.tensor([1, 1, 0.5, 0.2, 0.25, 0.2]), [(0.1, 0.01)] * 3)
    assert [part.n_only for part in found.parts] == [1, 1, 0]
    assert (found.n_shared, found.n_other, found.n_shared_dead) == (1, 1, 1)
    assert [part.scale for part in found.parts] == [1, 0.5, 0.25]
    assert sum(found.norms) == 4
    assert [kind_of(row) for row in shares_of(w_dec, parts.widths).tolist()] == ["A", "B", "shared", "other", "shared"]


def test_an_old_report_card_has_no_parts_and_stays_readable() -> None:
    card = card_from(card_table())
    assert isinstance(card, Card)
    assert card.figures.crosscoder is None


@pytest.mark.parametrize(
    ("data", "names"),
    [
        ({"path": "a", "hook": "resid_post.8+12"}, ("resid_post.8", "resid_post.12")),
        ({"path": ["/x/base/resid_post.8", "/x/chat/resid_post.8"], "join": True}, ("base", "chat")),
        ({"path": ["/x/base/old", "/y/base"], "join": True}, ("old", "base")),
        ({"path": ["/x/a/b", "/x/c/b/b"], "join": True}, ("a", "b")),
        ({"path": "a", "hook": "resid_post.8"}, ()),
    ],
)
def test_parts_are_named_after_what_differs_between_them(data: dict[str, Any], names: tuple[str, ...]) -> None:
    assert part_names(job_of(data).data.settings) == names


def test_joined_texts_have_the_rows_of_all_parts_in_text_order(tmp_path: Path) -> None:
    plant(tmp_path)
    source = open_source(job_of({"path": [str(tmp_path / hook) for hook in HOOKS], "join": True}))
    (whole,) = texts_of(tmp_path / HOOKS[0], 500, source)
    parts = [next(iter(texts_of(tmp_path / hook, 500))) for hook in HOOKS]
    assert torch.equal(whole.x, torch.cat([part.x for part in parts], dim=1))
    assert torch.equal(whole.origin.token_ids, parts[1].origin.token_ids)


def test_joined_texts_keep_their_rows_after_the_data_has_grown(tmp_path: Path) -> None:
    plant(tmp_path)
    whole = {hook: load_file(tmp_path / hook / "shard-00000.safetensors") for hook in HOOKS}

    def write(shard: str, first: int, last: int) -> None:
        for hook, tensors in whole.items():
            some = {name: tensor[first:last].clone() for name, tensor in tensors.items()}
            save_file(some, tmp_path / hook / f"{shard}.safetensors")

    # Two processes have each written a shard. Later, the first process writes another one.
    write("shard-00000", 0, 100)
    write("shard-00001", 100, 200)
    job = job_of({"path": str(tmp_path), "hook": "resid_post.1+2"})
    before = continue_from(open_source(job), job, None)
    write("shard-00000-001", 200, 300)
    continue_from(source := open_source(job), job, before)
    texts = list(texts_of(tmp_path / HOOKS[0], source=source))
    rows, tokens = torch.cat([one.x for one in texts]), torch.cat([one.origin.token_ids for one in texts])
    assert torch.equal(rows, torch.cat([tensors["activations"][:300] for tensors in whole.values()], dim=1))
    assert torch.equal(tokens, whole[HOOKS[0]]["token_ids"][:300])


def test_the_texts_of_a_stream_are_read_again_at_every_hook(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    text = tmp_path / "text.jsonl"
    text.write_text("".join(f'{{"text": "{one}"}}\n' for one in sentences(40)))
    data = {"source": "model", "model": str(tiny("llama")), "hook": "resid_post.0+1", "text": str(text), "context": 32}
    settings = job_of(data).data.settings
    cpu = torch.device("cpu")
    with evaluate_run._texts(settings, open_source(job_of(data)), cpu) as texts:
        assert texts
        (whole,) = texts_of(texts.folder, source=texts.source)
        other = next(iter(texts_of(texts.folder.parent / "resid_post.1")))
        assert whole.x.shape[1] == 2 * D_IN
        assert torch.equal(whole.x[:, D_IN:], other.x)
    assert not texts.folder.exists()
