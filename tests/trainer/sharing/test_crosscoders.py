"""Tests of exported crosscoders: their metadata, the formats for them, and reading them back."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.saes import KINDS, new_sae, put_bar_into_a_gap
from torch import Tensor

from trainer.activations.side_by_side import joined_meta
from trainer.cli import main
from trainer.contract.errors import UserError
from trainer.contract.paths import RunPaths
from trainer.contract.runs.rank_spec import EXIT_USAGE, RankSpec, write_spec
from trainer.contract.settings.catalog import FORMATS
from trainer.contract.settings.job_file import dump_job, parse_job
from trainer.evaluation.exported import ExportedSae
from trainer.saes.base import Sae
from trainer.saes.batch_topk import BatchTopK
from trainer.sharing.base import SCALES, SharedSae, scales_in, shared_form
from trainer.sharing.parts import PARTS
from trainer.sharing.saelens import SaeLens, origin
from trainer.training.thresholds import threshold_facts

WIDTHS, K = (16, 16), 4
HOOKS = ("resid_post.1", "resid_post.2")


@torch.no_grad()
def crosscoder(kind: str = "batch_topk", widths: tuple[int, ...] = WIDTHS, heavy: tuple[int, ...] = ()) -> Sae:
    """Create a crosscoder with random weights, parts of different scales and, in `heavy`, dimensions scaled down."""
    torch.manual_seed(0)
    kind_class, settings, _ = KINDS[kind]
    sae: Sae = new_sae(kind_class, sum(widths), 64, n_parts=len(widths), scales_dimensions=True, **settings)
    for parameter in sae.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    sae.normalise_decoder()
    assert sae.part_widths is not None
    sae.part_widths.copy_(torch.tensor(widths))
    scales = torch.cat([torch.full((width,), 0.7 / 3**number) for number, width in enumerate(widths)])
    scales[list(heavy)] *= 0.31
    sae.x_scale.copy_(scales)
    sae.y_scale.copy_(scales)
    return sae.eval()


def rows_for(sae: Sae, n: int = 400) -> Tensor:
    """Return raw rows with a mean far from 0; all dimensions vary by about 1 once they are scaled."""
    return (torch.randn(n, sae.d_in) + 5 * torch.randn(sae.d_in)) / sae.x_scale


def shared(sae: Sae, **metadata: Any) -> SharedSae:
    return shared_form(sae, {"training_architecture": "batch_topk", **metadata}, k=K)


def test_only_dimensions_that_differ_within_their_part_have_a_scale_of_their_own() -> None:
    plain, with_heavy = shared(crosscoder()), shared(crosscoder(heavy=(3, 20)))
    assert [(part.name, part.width) for part in plain.parts] == [("part 1", 16), ("part 2", 16)]
    assert [part.scale for part in plain.parts] == pytest.approx([1, 1 / 3])
    assert SCALES not in plain.metadata
    assert with_heavy.parts == plain.parts
    assert with_heavy.metadata[SCALES] == pytest.approx({"3": 0.31, "20": 0.31})


def test_the_scales_read_from_metadata_are_exactly_those_of_training() -> None:
    for widths in (WIDTHS, (5, 40, 7)):
        sae = crosscoder(widths=widths)
        # The first dimension of each part keeps the part's scale.
        sae.y_scale.mul_(torch.cat([torch.cat([torch.ones(1), torch.rand(width - 1)]) for width in widths]))
        metadata = json.loads(json.dumps(shared(sae).metadata))
        found, own = scales_in(metadata, sae.d_in), sae.dimension_scales
        assert found is not None
        assert own is not None
        assert torch.equal(found, own)


@pytest.mark.parametrize(
    "parts",
    [None, 3, [], [{"width": 32, "scale": 1.0}], [{"width": 16, "scale": 1.0}] * 3, [{"width": 16, "scale": 0}] * 2,
     [{"width": 16}, {"width": 16}], [{"width": "16", "scale": 1}] * 2, [{"width": 16, "scale": 1, "name": 5}] * 2],
)  # fmt: skip
def test_malformed_parts_in_a_file_are_ignored(parts: Any) -> None:
    assert scales_in({PARTS: parts}, 32) is None


def test_parts_are_named_after_what_differs_between_them() -> None:
    a, b = ({"model": f"org/{name}", "hook": "resid_post.1", "hook_name": "blocks.1.hook_resid_post"} for name in "ab")
    other = a | {"hook": "resid_post.2", "hook_name": "blocks.2.hook_resid_post"}
    for metas, names in (((a, b), ["a", "b"]), ((a, other), [*HOOKS]), ((a, b, other), None), (({}, {}), None)):
        parts = origin(joined_meta(metas))[PARTS]
        assert names is None or [part["name"] for part in parts] == names
        assert len({part["name"] for part in parts}) == len(metas)
    assert parts == [{"name": "part 1"}, {"name": "part 2"}]
    assert origin(joined_meta((a, b)))[PARTS][1]["model_name"] == "org/b"


@torch.no_grad()
def toolkit(folder: Path, x: Tensor) -> tuple[Tensor, Tensor]:
    """Compute what `BatchTopKCrossCoder` computes for x [n, parts, d], in float64, one token and part at a time."""
    own = {name: tensor.double() for name, tensor in load_file(folder / "model.safetensors").items()}
    config = json.loads((folder / "config.json").read_text())
    assert {type(one) for one in (config["k"], config["num_layers"], config["dict_size"])} == {int}
    kinds = {"CROSSCODER": 1, "NONE": 4}
    assert kinds[config["code_normalization"]] == int(own["code_normalization_id"])
    norms = torch.ones(config["dict_size"]).double()
    if config["code_normalization"] == "CROSSCODER":
        norms = own["decoder.weight"].norm(dim=2).sum(dim=0)
    acts, x_hat = torch.zeros(len(x), config["dict_size"]).double(), torch.zeros_like(x).double()
    scales = own["activation_global_scale"]
    of_std = own["target_rms"] / (own["activation_std"].square().sum(dim=-1) + 1e-8).sqrt()
    torch.testing.assert_close(of_std, scales)
    for token, row in enumerate(x.double()):
        pre_acts = own["encoder.bias"].clone()
        for part, values in enumerate(row):
            pre_acts += ((values - own["activation_mean"][part]) * scales[part]) @ own["encoder.weight"][part]
        acts[token] = torch.where(pre_acts.relu() * norms > own["threshold"], pre_acts.relu(), 0)
        for part in range(config["num_layers"]):
            decoded = acts[token] @ own["decoder.weight"][part] + own["decoder.bias"][part]
            x_hat[token, part] = decoded / (scales[part] + 1e-8) + own["activation_mean"][part]
    return acts.float(), x_hat.float()


@pytest.mark.parametrize("heavy", [(), (3, 20)], ids=["plain", "heavy"])
@pytest.mark.parametrize("kind", ["batch_topk", "matryoshka_batch_topk"])
@torch.no_grad()
def test_the_diffing_toolkit_computes_the_same_results_as_the_trainer(
    kind: str, heavy: tuple[int, ...], tmp_path: Path
) -> None:
    sae = crosscoder(kind, (16, 16, 16), heavy)
    x = rows_for(sae)
    put_bar_into_a_gap(sae, x * sae.x_scale)
    output = sae(x * sae.x_scale, x * sae.x_scale)
    form = FORMATS["diffing-toolkit"].load()()
    assert form.refusal(shared(sae)) is None
    assert form.write(shared(sae, hook_name="a+b", model_name="m"), tmp_path / "sae") == []
    acts, x_hat = toolkit(tmp_path / "sae", x.unflatten(1, (3, 16)))
    assert torch.equal(acts > 0, output.acts.dense() > 0)
    assert (acts > 0).sum(dim=1).float().mean() > 1
    torch.testing.assert_close(acts, output.acts.dense() / sae.acts_scale, rtol=1e-5, atol=1e-4)
    spread = (x - x.mean(dim=0)).square().sum().sqrt()
    assert (x_hat.flatten(1) - sae.raw(output.x_hat)).square().sum().sqrt() < 1e-5 * spread
    decoder = load_file(tmp_path / "sae" / "model.safetensors")["decoder.weight"].transpose(0, 1).flatten(1)
    assert heavy or torch.allclose(decoder, sae.W_dec, atol=1e-6)
    trainer = json.loads((tmp_path / "sae" / "trainer_config.json").read_text())
    assert trainer["trainer"]["dict_class"] == "BatchTopKCrossCoder"
    assert [part["width"] for part in trainer["metadata"][PARTS]] == [16, 16, 16]


@torch.no_grad()
def ranked_by_parts(heavy: tuple[int, ...] = ()) -> Sae:
    """Create a crosscoder that ranks activations times the sum of the norms of their decoder rows' parts."""
    sae = crosscoder(widths=(16, 16, 16), heavy=heavy)
    sae.settings = msgspec.structs.replace(sae.settings, rank_by="crosscoder")
    # Latents that write in one part alone have a sum of 1, and those that write equally in three parts √3.
    sae.W_dec[:20, 16:] = 0
    sae.normalise_decoder()
    assert isinstance(sae, BatchTopK)
    sae.set_thresholds.copy_(torch.tensor([2.0, 2.2, 1.8]))
    return sae


@torch.no_grad()
def test_the_diffing_toolkit_ranks_by_the_sum_of_norms_as_the_trainer_does(tmp_path: Path) -> None:
    sae = ranked_by_parts()
    x = rows_for(sae)
    output = sae(x * sae.x_scale, x * sae.x_scale)
    form, found = FORMATS["diffing-toolkit"].load()(), shared(sae, **threshold_facts(sae))
    assert form.refusal(found) is None
    form.write(found, tmp_path / "sae")
    acts, _ = toolkit(tmp_path / "sae", x.unflatten(1, (3, 16)))
    assert torch.equal(acts > 0, output.acts.dense() > 0)
    assert 1 < (acts > 0).sum(dim=1).float().mean() < 40
    heavy = ranked_by_parts(heavy=(3,))
    assert "would rank latents by other norms" in form.refusal(shared(heavy, **threshold_facts(heavy)))


@torch.no_grad()
def test_an_export_ranked_by_the_sum_of_norms_has_a_threshold_for_each_latent_and_half() -> None:
    sae = ranked_by_parts()
    x = rows_for(sae)
    exported = ExportedSae(shared(sae, **threshold_facts(sae)), torch.device("cpu"))
    for half in (None, 0, 1):
        context = contextlib.nullcontext() if half is None else sae.measuring_half(half)
        of_exported = contextlib.nullcontext() if half is None else exported.measuring_half(half)
        with context, of_exported:
            own, theirs = sae(x * sae.x_scale, x * sae.x_scale).acts.dense(), exported.encode(x).values
        assert torch.equal(own > 0, theirs > 0)


def test_training_keeps_the_largest_activations_times_their_norms() -> None:
    sae = ranked_by_parts().train()
    sae.k_now, sae.batch_tokens = 4.0, 50
    x = torch.randn(50, 48)
    norms = sum(part.norm(dim=1) for part in sae.W_dec.detach().split(16, dim=1))
    pre_acts = (x - sae.b_dec.detach()) @ sae.W_enc.detach() + sae.b_enc.detach()
    least = (pre_acts * norms).flatten().topk(4 * 50).values[-1]
    W_enc, b_dec = (one.detach().double().requires_grad_() for one in (sae.W_enc, sae.b_dec))
    acts = ((x - b_dec) @ W_enc + sae.b_enc.detach().double()) * (pre_acts * norms >= least)
    (acts @ sae.W_dec.detach().double() + b_dec - x).square().sum().backward()
    output = sae(x, x)
    assert torch.equal(output.acts.dense() > 0, (acts > 0) & (pre_acts > 0))
    output.losses["mse"].backward()
    torch.testing.assert_close(sae.W_enc.grad.double(), W_enc.grad, rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(sae.b_dec.grad.double(), b_dec.grad, rtol=1e-4, atol=1e-3)
    # The largest values differ from the largest activations, so the test can fail.
    assert not torch.equal(pre_acts * norms >= least, pre_acts >= pre_acts.flatten().topk(4 * 50).values[-1])


@pytest.mark.parametrize(
    ("form", "kind", "widths", "reason"),
    [
        ("diffing-toolkit", "batch_topk", (12, 20), "the diffing toolkit needs parts of one width, but these have 12"),
        ("diffing-toolkit", "topk", WIDTHS, "BatchTopKCrossCoder has a k and one threshold; train with"),
        ("sparsify", "topk", WIDTHS, "sparsify has no crosscoders (this one reads 16 + 16 dimensions); use --format "),
        ("circuit-tracer", "batch_topk", WIDTHS, "circuit-tracer has no crosscoders (this one"),
        ("dictionary_learning", "batch_topk", WIDTHS, "dictionary_learning has no crosscoders (this one"),
        ("neuronpedia", "batch_topk", WIDTHS, "neuronpedia has no crosscoders (this one"),
    ],
)
def test_a_format_that_cannot_hold_the_crosscoder_says_what_to_use(
    form: str, kind: str, widths: tuple[int, ...], reason: str
) -> None:
    refusal = FORMATS[form].load()().refusal(shared(crosscoder(kind, widths)))
    assert refusal is not None
    assert refusal.startswith(reason)


@pytest.mark.parametrize("form", ["diffing-toolkit", "saelens-parts"])
def test_a_format_for_crosscoders_refuses_other_saes(form: str) -> None:
    sae = new_sae(KINDS["batch_topk"][0], 32, 64, **KINDS["batch_topk"][1]).eval()
    assert "for crosscoders, but this SAE reads a single hook" in FORMATS[form].load()().refusal(shared(sae))


@torch.no_grad()
def test_the_files_of_all_parts_together_hold_the_crosscoder(tmp_path: Path) -> None:
    sae = crosscoder(widths=(12, 20))
    x, names = rows_for(sae), [{"name": "a", "hook_name": "blocks.1.hook_resid_post", "model_name": "gpt2"}, {}]
    whole = shared(sae, crosscoder_parts=names, heldout_fvu=0.1, training_tokens=9)
    SaeLens().write(whole, tmp_path / "sae")
    (note,) = FORMATS["saelens-parts"].load()().write(whole, tmp_path / "sae")
    assert "only a part" in note
    assert sorted(file.name for file in (tmp_path / "sae").iterdir()) == ["part-1", "part-2"]
    pre_acts, parts = whole.weights["b_enc"], []
    for number, own in enumerate(x.split((12, 20), dim=1), start=1):
        folder = tmp_path / "sae" / f"part-{number}"
        weights, config = load_file(folder / "sae_weights.safetensors"), json.loads((folder / "cfg.json").read_text())
        pre_acts = pre_acts + (own - weights["b_dec"]) @ weights["W_enc"]
        assert weights["W_dec"].shape == (64, config["d_in"]) == (64, own.shape[1])
        parts.append(config["metadata"])
    acts = pre_acts * (pre_acts > whole.weights["threshold"])
    torch.testing.assert_close(acts, ExportedSae(whole, torch.device("cpu")).encode(x).values, rtol=1e-4, atol=1e-3)
    assert [one["crosscoder_part"]["scale"] for one in parts] == pytest.approx([1, 1 / 3])
    assert (parts[0]["hook_layer"], parts[0]["model_class_name"], "hook_name" in parts[1]) == (
        1,
        "HookedTransformer",
        False,
    )
    assert parts[1]["training_tokens"] == 9
    assert not any("heldout_fvu" in one for one in parts)
    with pytest.raises(UserError, match="holds one part of a crosscoder, whose activations need all parts; export the"):
        SaeLens().read(tmp_path / "sae" / "part-1")


@torch.no_grad()
def test_saelens_loads_each_part_and_the_whole_crosscoder(tmp_path: Path) -> None:
    sae_lens = pytest.importorskip("sae_lens")
    sae = crosscoder()
    x = rows_for(sae)
    put_bar_into_a_gap(sae, x * sae.x_scale)
    FORMATS["saelens-parts"].load()().write(shared(sae, hook_name="blocks.1.attn.hook_z"), tmp_path / "parts")
    loaded = [sae_lens.SAE.load_from_disk(tmp_path / "parts" / f"part-{number}") for number in (1, 2)]
    torch.testing.assert_close(torch.cat([one.W_dec for one in loaded], dim=1), sae.raw_decoder())
    assert loaded[1].cfg.metadata.crosscoder_part["n_parts"] == 2
    SaeLens().write(shared(sae, hook_name="blocks.1.attn.hook_z"), tmp_path / "sae")
    x_hat = sae_lens.SAE.load_from_disk(tmp_path / "sae")(x)
    torch.testing.assert_close(x_hat, sae.raw(sae(x * sae.x_scale, x * sae.x_scale).x_hat), rtol=1e-4, atol=1e-3)


def test_parts_of_an_earlier_export_are_removed(tmp_path: Path) -> None:
    form = FORMATS["saelens-parts"].load()()
    for widths in ((8, 8, 8), (12, 12)):
        form.write(shared(crosscoder(widths=widths)), tmp_path)
    assert [one.parent.name for one in sorted(tmp_path.glob("part-*/cfg.json"))] == ["part-1", "part-2"]


def test_an_evaluation_refuses_the_parts_in_another_order(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    SaeLens().write(shared(crosscoder(widths=(8, 12))), tmp_path / "sae")
    for width in (8, 12):
        (tmp_path / str(width)).mkdir()
        save_file({"activations": torch.randn(300, width)}, tmp_path / str(width) / "shard-00000.safetensors")
    folders = [str(tmp_path / str(width)) for width in (12, 8)]
    code = main(["eval", str(tmp_path / "sae"), "--data", folders[0], "--data", folders[1]])
    assert code == EXIT_USAGE
    assert "parts with 8 + 12 dimensions; give --data for each part, in order" in capsys.readouterr().err


@pytest.fixture(scope="module")
def acts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the rows of two hooks, at scales of 1 and 8, with a folder for each hook."""
    folder, generator = tmp_path_factory.mktemp("acts"), torch.Generator().manual_seed(0)
    fires = (torch.rand(3000, 24, generator=generator) < 0.1) * torch.rand(3000, 24, generator=generator)
    for hook, scale in zip(HOOKS, (1.0, 8.0), strict=True):
        rows = scale * (fires @ torch.randn(24, 16, generator=generator) + torch.randn(16, generator=generator))
        rows += 0.1 * scale * torch.randn(rows.shape, generator=generator)
        (folder / hook).mkdir()
        save_file({"activations": rows}, folder / hook / "a.safetensors")
        meta = {"hook": hook, "hook_name": f"blocks.{hook[-1]}.hook_resid_post", "model_name": "gpt2"}
        (folder / hook / "meta.json").write_text(json.dumps(meta))
    return folder


@pytest.fixture
def run(acts: Path, make_trainer: Callable[..., Any], tmp_path: Path) -> Path:
    """Train a crosscoder, and return its run folder."""
    job, problems = parse_job(
        {
            "data": {"path": str(acts), "hook": "resid_post.1+2", "held_out_tokens": 1000},
            "sae": {"architecture": "batch_topk", "d_sae": 48, "k": K},
            "train": {"batch_size": 256, "n_steps": 60, "report_card": False},
            "launch": {"gpus": "cpu"},
        }
    )
    assert job, problems
    paths = RunPaths(tmp_path / "run")
    assert make_trainer(job, checkpoints=paths.checkpoints, output=paths.root / "sae").run()
    paths.job_file.write_text(dump_job(job))
    write_spec(RankSpec(paths.root, paths.root / "sae", attempt=1, world_size=1, device="cpu"))
    return paths.root


def test_an_exported_crosscoder_has_the_fvu_of_its_run_wherever_it_is_read(
    run: Path, acts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def fvu(path: Path, *flags: str) -> float:
        assert main(["eval", str(path), "--device", "cpu", "--json", *flags]) == 0
        (card,) = json.loads(capsys.readouterr().out.splitlines()[-1])["cards"]
        return float(card["figures"]["fvu"])

    data = [word for hook in HOOKS for word in ("--data", str(acts / hook))]
    metadata = json.loads((run / "sae" / "cfg.json").read_text())["metadata"]
    assert [part["name"] for part in metadata[PARTS]] == [*HOOKS]
    assert [part["hook_name"][:8] for part in metadata[PARTS]] == ["blocks.1", "blocks.2"]
    assert [part["scale"] for part in metadata[PARTS]] == pytest.approx([1, 1 / 8], rel=0.1)
    assert not {SCALES, "model_class_name", "hook_layer"} & metadata.keys()
    assert fvu(run / "sae") == pytest.approx(fvu(run), rel=1e-5)
    assert main(["export", str(run), "--out", str(tmp_path / "copy")]) == 0
    on_all_rows = fvu(tmp_path / "copy", *data)
    assert on_all_rows < 0.5
    assert main(["import", str(tmp_path / "copy"), "--out", str(tmp_path / "imported"), *data]) == 0
    assert "do not have norm 1" not in capsys.readouterr().out
    assert main(["export", str(tmp_path / "imported"), "--out", str(tmp_path / "again")]) == 0
    assert fvu(tmp_path / "again", *data) == pytest.approx(on_all_rows, rel=1e-5)
    again = json.loads((tmp_path / "again" / "cfg.json").read_text())["metadata"]
    for own, before in zip(again[PARTS], metadata[PARTS], strict=True):
        assert own == before | {"scale": pytest.approx(before["scale"], rel=1e-6)}
    capsys.readouterr()
    (acts / "wide").mkdir(exist_ok=True)
    save_file({"activations": torch.randn(64, 32)}, acts / "wide" / "a.safetensors")
    words = ["import", str(tmp_path / "copy"), "--out", str(tmp_path / "no"), "--data", str(acts / "wide")]
    assert main(words) == EXIT_USAGE
    assert "the SAE is a crosscoder of parts with 16 + 16 dimensions; give --data for" in capsys.readouterr().err
