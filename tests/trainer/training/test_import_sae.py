"""Tests for `sae-train import`, which turns SAEs from other tools into runs."""

from __future__ import annotations

import json
import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.saes import KINDS, TRANSCODERS, made, peer, put_bar_into_a_gap
from torch import Tensor

from sae_tui.cli_commands.parser import make_parser as make_command_parser
from trainer.checkpoints.checkpoint import load
from trainer.cli import main
from trainer.contract.paths import RunPaths
from trainer.contract.runs.checkpoint_manifest import read_state
from trainer.contract.runs.how_far import exported_tokens
from trainer.contract.runs.latent_notes import NOTES, read_notes
from trainer.contract.runs.rank_spec import EXIT_FAILED, EXIT_FINISHED, EXIT_USAGE
from trainer.contract.settings.catalog import FORMATS, READ_FORMATS
from trainer.contract.settings.job_file import load_job
from trainer.parser import make_parser
from trainer.saes.base import Sae
from trainer.sharing.base import Format, shared_form
from trainer.training.export_checkpoint import checkpoint_of, learners_of

SCALE = 0.4


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Write 1,000 rows with 32 dimensions to one folder, and their 20-dimensional targets to another."""
    rows = torch.randn(1000, 32) * 3 + torch.arange(32)
    for name, x in (("acts", rows), ("targets", rows[:, :20] * 0.5)):
        (tmp_path / name).mkdir()
        save_file({"activations": x.contiguous()}, tmp_path / name / "a.safetensors")
    return tmp_path / "acts"


@torch.no_grad()
def shared(
    name: str, kind: str, folder: Path, x: Tensor, d_out: int | None = None, *, skip: bool = False
) -> tuple[Tensor, Tensor]:
    """Write an SAE in a format, and return its activations and reconstructions for raw x."""
    sae = made(kind, d_out, x_scale=SCALE, y_scale=SCALE, skip=skip)
    put_bar_into_a_gap(sae, x * SCALE)
    FORMATS[name].load()().write(shared_form(sae, {"training_architecture": kind}, k=8), folder)
    output = sae(x * SCALE, torch.zeros(len(x), sae.d_out))
    return output.acts.dense() / SCALE, output.x_hat / SCALE


def command(folder: Path, run: Path, data: Path, *flags: str) -> int:
    return main(["import", str(folder), "--out", str(run), "--data", str(data), *flags])


@torch.no_grad()
def computed(run: Path, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the activations and reconstructions for raw x, computed by the SAE in a run's checkpoint."""
    sae = imported(run)
    output = sae(x * sae.x_scale, torch.zeros(len(x), sae.d_out))
    return output.acts.dense() / sae.y_scale, output.x_hat / sae.y_scale


def imported(run: Path) -> Sae:
    run_dir, checkpoint = checkpoint_of(run, best=False)
    job, (tensors, _) = load_job(RunPaths(run_dir).job_file), load(checkpoint)
    ((_, learner),) = learners_of(job, tensors, read_state(checkpoint))
    return learner.sae.eval()


def assert_same(found: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> None:
    assert torch.equal(found[0] > 0, expected[0] > 0)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=2e-4)


@pytest.mark.parametrize(
    ("name", "kind"),
    [*(("saelens", kind) for kind in KINDS), *(("dictionary_learning", kind) for kind in KINDS), ("sparsify", "topk")],
)
def test_an_imported_sae_produces_the_same_results_as_the_original(
    name: str, kind: str, tmp_path: Path, data: Path
) -> None:
    x = torch.randn(300, 32) * 3
    expected = shared(name, kind, tmp_path / "theirs", x)
    assert command(tmp_path / "theirs", tmp_path / "run", data) == EXIT_FINISHED
    assert_same(computed(tmp_path / "run", x), expected)
    # The SAE uses the data's scale, not the scale stored in its file.
    assert not torch.equal(imported(tmp_path / "run").x_scale, torch.ones(()))


@pytest.mark.parametrize("skip", [False, True], ids=["plain", "skip"])
@pytest.mark.parametrize("kind", TRANSCODERS)
def test_an_imported_transcoder_produces_the_same_results_as_the_original(
    kind: str, skip: bool, tmp_path: Path, data: Path
) -> None:
    x = torch.randn(300, 32) * 3
    expected = shared("saelens", kind, tmp_path / "theirs", x, d_out=20, skip=skip)
    assert command(tmp_path / "theirs", tmp_path / "run", data) == EXIT_USAGE
    targets = f"data.target_path={tmp_path / 'targets'}"
    assert command(tmp_path / "theirs", tmp_path / "run", data, "--set", targets) == EXIT_FINISHED
    assert_same(computed(tmp_path / "run", x), expected)


@pytest.mark.parametrize("skip", [False, True], ids=["plain", "skip"])
def test_an_imported_sparsify_transcoder_can_be_trained_further_and_exported_again(
    skip: bool, tmp_path: Path, data: Path
) -> None:
    x = torch.randn(300, 32) * 3
    expected = shared("sparsify", "topk", tmp_path / "theirs", x, d_out=32, skip=skip)
    settings = [f"data.target_path={data}", "launch.gpus=cpu", "train.batch_size=64", "train.n_steps=3"]
    flags = [flag for one in settings for flag in ("--set", one)]
    assert command(tmp_path / "theirs", tmp_path / "run", data, *flags) == EXIT_FINISHED
    assert_same(computed(tmp_path / "run", x), expected)
    again = ["export", str(tmp_path / "run"), "--out", str(tmp_path / "again"), "--format"]
    assert main([*again, "saelens"]) == EXIT_USAGE
    assert main([*again, "sparsify"]) == EXIT_FINISHED
    before, after = (load_file(tmp_path / one / "sae.safetensors") for one in ("theirs", "again"))
    assert ("W_skip" in before) == skip
    for name, tensor in before.items():
        torch.testing.assert_close(after[name], tensor, rtol=1e-5, atol=1e-5)
    assert main(["resume", str(tmp_path / "run")]) == EXIT_FINISHED
    assert json.loads((tmp_path / "run" / "sae" / "cfg.json").read_text())["metadata"]["training_tokens"] == 3 * 64
    assert json.loads((tmp_path / "run" / "sae" / "card.json").read_text())["architecture"] == "topk"


def test_an_sae_with_a_skip_connection_cannot_be_imported(
    tmp_path: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shared("sparsify", "topk", tmp_path / "theirs", torch.randn(9, 32), d_out=32, skip=True)
    config = json.loads((tmp_path / "theirs" / "cfg.json").read_text())
    (tmp_path / "theirs" / "cfg.json").write_text(json.dumps(config | {"transcode": False}))
    assert command(tmp_path / "theirs", tmp_path / "run", data) == EXIT_USAGE
    assert "skip_connection is 'True' but transcode is not" in capsys.readouterr().err


@pytest.mark.parametrize("kind", KINDS)
def test_an_imported_sae_has_the_same_weights_when_exported_again(kind: str, tmp_path: Path, data: Path) -> None:
    shared("saelens", kind, tmp_path / "theirs", torch.randn(300, 32))
    assert command(tmp_path / "theirs", tmp_path / "run", data) == EXIT_FINISHED
    assert main(["export", str(tmp_path / "run"), "--out", str(tmp_path / "again")]) == EXIT_FINISHED
    before, after = (load_file(tmp_path / one / "sae_weights.safetensors") for one in ("theirs", "again"))
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        torch.testing.assert_close(after[name], tensor, rtol=1e-6, atol=1e-6)


def test_an_imported_sae_for_several_k_can_be_exported_with_a_smaller_k(tmp_path: Path, data: Path) -> None:
    shared("saelens", "hierarchical_topk", tmp_path / "theirs", torch.randn(300, 32))
    assert command(tmp_path / "theirs", tmp_path / "run", data) == EXIT_FINISHED
    job = load_job(tmp_path / "run" / "job.toml")
    assert (job.sae.architecture, job.sae.settings.ks) == ("hierarchical_topk", (2, 4, 8))
    assert main(["export", str(tmp_path / "run"), "--out", str(tmp_path / "again"), "--k", "4"]) == EXIT_FINISHED
    assert json.loads((tmp_path / "again" / "cfg.json").read_text())["k"] == 4
    # An export with a smaller k no longer has the k values of its metadata, so it is imported as a TopK SAE.
    assert command(tmp_path / "again", tmp_path / "other", data) == EXIT_FINISHED
    assert load_job(tmp_path / "other" / "job.toml").sae.architecture == "topk"


SAELENS: dict[str, dict[str, Any]] = {
    "standard": {"apply_b_dec_to_input": False},
    "topk": {"k": 5, "rescale_acts_by_decoder_norm": True},
    "jumprelu": {"apply_b_dec_to_input": True},
    "gated": {"apply_b_dec_to_input": False},
    "skip_transcoder": {"apply_b_dec_to_input": False, "d_out": 20},
    "jumprelu_skip_transcoder": {"apply_b_dec_to_input": False, "d_out": 20},
}


@pytest.mark.parametrize("architecture", SAELENS)
@torch.no_grad()
def test_an_sae_saved_by_saelens_produces_the_same_results(architecture: str, tmp_path: Path, data: Path) -> None:
    sae_lens = pytest.importorskip("sae_lens")
    kind, config = sae_lens.registry.get_sae_class(architecture)
    metadata = sae_lens.saes.sae.SAEMetadata(model_name="gpt2", hook_name="blocks.3.hook_resid_post")
    theirs = kind(config(d_in=32, d_sae=96, metadata=metadata, **SAELENS[architecture]))
    for name, parameter in theirs.named_parameters():
        torch.nn.init.uniform_(parameter, 0 if name == "threshold" else -1, 1)
    theirs.save_model(tmp_path / "theirs")
    targets = ["--set", f"data.target_path={tmp_path / 'targets'}"] if "d_out" in SAELENS[architecture] else []
    assert command(tmp_path / "theirs", tmp_path / "run", data, *targets) == EXIT_FINISHED
    x = torch.randn(100, 32) * 3
    assert_same(computed(tmp_path / "run", x), (theirs.encode(x), theirs(x)))
    metadata = json.loads((tmp_path / "run" / "sae" / "cfg.json").read_text())["metadata"]
    wanted = {"model_name": "gpt2", "hook_name": "blocks.3.hook_resid_post", "imported_from": "saelens"}
    assert {name: metadata[name] for name in wanted} == wanted


THEIRS: dict[str, tuple[Any, ...]] = {
    "AutoEncoder": (),
    "AutoEncoderNew": (),
    "GatedAutoEncoder": (),
    "JumpReluAutoEncoder": (),
    "AutoEncoderTopK": (5,),
    "BatchTopKSAE": (5,),
    "MatryoshkaBatchTopKSAE": (5, [32, 64]),
}


@pytest.mark.parametrize("name", THEIRS)
@torch.no_grad()
def test_a_dictionary_saved_by_dictionary_learning_produces_the_same_results(
    name: str, tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    utils = peer(monkeypatch, "dictionary_learning.utils", "nnsight")
    theirs = getattr(utils, name)(32, 96, *THEIRS[name])
    for part, parameter in theirs.named_parameters():
        torch.nn.init.uniform_(parameter, 0 if part == "threshold" else -1, 1)
    if "threshold" in dict(theirs.named_buffers()):
        theirs.threshold.fill_(0.7)
    folder = tmp_path / "theirs"
    folder.mkdir()
    torch.save(theirs.state_dict(), folder / "ae.pt")
    trainer = {"dict_class": name, "k": 5, "lm_name": "gpt2", "layer": 3} | ({} if THEIRS[name] else {"k": None})
    (folder / "config.json").write_text(json.dumps({"trainer": trainer}))
    assert command(folder, tmp_path / "run", data) == EXIT_FINISHED
    loaded, _ = utils.load_dictionary(str(folder), "cpu")
    x = torch.randn(100, 32) * 3
    assert_same(computed(tmp_path / "run", x), (loaded.encode(x), loaded(x)))


@pytest.mark.slow
def test_an_imported_sae_can_be_evaluated_and_trained_further(
    tmp_path: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shared("dictionary_learning", "topk", tmp_path / "theirs", torch.randn(9, 32))
    settings = ["--set", "launch.gpus=cpu", "--set", "train.batch_size=64", "--set", "train.n_steps=15"]
    assert command(tmp_path / "theirs", tmp_path / "run", data, *settings) == EXIT_FINISHED
    judge = ["eval", str(tmp_path / "run"), "--device", "cpu", "--json"]
    before, after = [], []
    for cards in (before, after):
        capsys.readouterr()
        assert main(judge) == EXIT_FINISHED
        cards += json.loads(capsys.readouterr().out.splitlines()[-1])["cards"]
        if not after:
            assert main(["resume", str(tmp_path / "run")]) == EXIT_FINISHED
    assert (before[0]["tokens"], after[0]["tokens"]) == (0, 15 * 64)
    assert before[0]["written_to"] == str(tmp_path / "run" / "sae")
    assert after[0]["figures"]["fvu"] < before[0]["figures"]["fvu"]


class Trap:
    """An object whose pickle creates a file when it is loaded."""

    def __reduce__(self) -> Any:
        return Path.touch, (Path("sprung"),)


def replaced(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], object]:
    """Return a function that replaces `ae.pt` with the result of applying `change` to its tensors."""

    def tamper(folder: Path) -> None:
        tensors = torch.load(folder / "ae.pt", weights_only=True)
        changed = change(tensors)
        torch.save(tensors if changed is None else changed, folder / "ae.pt")

    return tamper


def compressed(folder: Path) -> None:
    with zipfile.ZipFile(folder / "ae.pt") as whole:
        parts = {one.filename: whole.read(one) for one in whole.infolist()}
    with zipfile.ZipFile(folder / "ae.pt", "w", zipfile.ZIP_DEFLATED) as small:
        for name, content in parts.items():
            small.writestr(name, content)


def linked(folder: Path) -> None:
    (folder / "ae.pt").rename(folder / "elsewhere")
    (folder / "ae.pt").symlink_to(folder / "elsewhere")


def configured(**trainer: Any) -> Callable[[Path], object]:
    def tamper(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        config["trainer"] |= trainer
        (folder / "config.json").write_text(json.dumps(config))

    return tamper


huge = torch.zeros(1).expand(2**40)
TAMPERED: dict[str, tuple[Callable[[Path], object], str]] = {
    "a pickle that runs code": (replaced(lambda _: Trap()), "contains more than tensors"),
    "code among tensors": (replaced(lambda one: one.update(b_dec=Trap())), "contains more than tensors"),
    "a list": (replaced(lambda one: list(one.values())), "is not a state dict"),
    "a tensor larger than its file": (replaced(lambda one: one.update(b_dec=huge)), "is not a state dict"),
    "a compressed file": (compressed, "is compressed"),
    "a file that is not an archive": (
        lambda folder: (folder / "ae.pt").write_bytes(b"\x80\x02."),
        "contains more than tensors",
    ),
    "half a file": (lambda folder: os.truncate(folder / "ae.pt", 3000), "contains more than tensors"),
    "a link": (linked, "ae.pt is a symbolic link, and symbolic links are not followed"),
    "a NaN": (replaced(lambda one: one.update(b_dec=torch.full((32,), torch.nan))), "b_dec contains NaN or inf"),
    "an unknown class": (configured(dict_class="os.system"), "dict_class is 'os.system'; only AutoEncoder, "),
    "another class": (configured(dict_class="GatedAutoEncoder"), "has no tensor"),
    "another k": (configured(k=7), "k is 8, but 7 in its settings"),
    "no settings": (lambda folder: (folder / "config.json").write_text("[]"), "cannot be read"),
    "a tensor with a very long name": (
        replaced(lambda one: one.update({"x" * 9000: one["b_dec"]})),
        f"{60 * 'x'}, which",
    ),
    "another tensor": (replaced(lambda one: one.update(W_skip=torch.ones(2))), "has a tensor W_skip"),
    "whole numbers": (
        replaced(lambda one: one.update(b_dec=torch.ones(32).int())),
        "b_dec is int32, not a floating-point type",
    ),
    "another width": (replaced(lambda one: one.update(b_dec=torch.ones(31))), "b_dec is (31,)"),
    "a number instead of a matrix": (
        replaced(lambda one: one.update({"encoder.weight": torch.ones(())})),
        "is not a weight matrix",
    ),
}


@pytest.mark.parametrize("kind", TAMPERED)
def test_a_tampered_sae_produces_a_one_sentence_error_and_no_run_is_created(
    kind: str, tmp_path: Path, data: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shared("dictionary_learning", "topk", tmp_path / "theirs", torch.randn(9, 32))
    tamper, reason = TAMPERED[kind]
    tamper(tmp_path / "theirs")
    assert command(tmp_path / "theirs", tmp_path / "run", data) in (EXIT_FAILED, EXIT_USAGE)
    (line,) = capsys.readouterr().err.splitlines()
    assert reason in line
    assert not (tmp_path / "run").exists()
    assert not (tmp_path / "sprung").exists()


@pytest.mark.parametrize(
    ("setting", "reason"),
    [
        ({"normalize_activations": "layer_norm"}, "normalize_activations is 'layer_norm': it centres and scales each"),
        ({"architecture": "temporal"}, "architecture is 'temporal'; only"),
        ({"reshape_activations": "hook_q"}, "reshape_activations is 'hook_q'"),
    ],
)
def test_unsupported_saelens_settings_are_refused(
    setting: dict[str, Any], reason: str, tmp_path: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shared("saelens", "standard", tmp_path / "theirs", torch.randn(9, 32))
    file = tmp_path / "theirs" / "cfg.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | setting))
    assert command(tmp_path / "theirs", tmp_path / "run", data) == EXIT_USAGE
    assert reason in capsys.readouterr().err


def test_import_offers_only_readable_formats(capsys: pytest.CaptureFixture[str]) -> None:
    readable = [name for name, entry in FORMATS.items() if entry.load().read is not Format.read]
    assert readable == [*READ_FORMATS]
    for parser in (make_parser(), make_command_parser(print)):
        with pytest.raises(SystemExit):
            parser.parse_args(["import", "--help"])
        assert f"--format {{{','.join(readable)}}}" in capsys.readouterr().out


def test_wrong_flags_are_refused_and_nothing_is_overwritten(
    tmp_path: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    theirs, run = tmp_path / "theirs", tmp_path / "run"
    shared("saelens", "topk", theirs, torch.randn(9, 32))
    for flags, reason in (
        ((tmp_path / "acts", run, data), "FOLDER: "),
        ((theirs, run, tmp_path / "targets"), "--data: has rows of 20 dimensions, but the SAE reads 32"),
        ((theirs, run, data, "--format", "sparsify"), "--format: "),
        ((theirs, run, data, "--set", "sae.d_sae=64"), "--set sae.d_sae: is fixed by the SAE"),
        ((theirs, theirs, data), f"--out: {theirs} already exists"),
    ):
        assert command(*flags) == EXIT_USAGE
        assert capsys.readouterr().err.startswith(reason)
    assert not run.exists()
    assert {file.name for file in theirs.iterdir()} == {"cfg.json", "sae_weights.safetensors"}


@pytest.fixture
def low_rank(tmp_path: Path) -> tuple[Path, dict[str, Tensor]]:
    """Write 1,000 rows in four directions around a point far from the origin. Return the folder and an exact SAE."""
    basis = torch.linalg.qr(torch.randn(32, 4)).Q
    mean = torch.full((32,), 20.0)
    rows = torch.randn(1000, 4) * 3 @ basis.T + mean
    (tmp_path / "low").mkdir()
    save_file({"activations": rows}, tmp_path / "low" / "a.safetensors")
    both = torch.cat([basis, -basis], dim=1)
    return tmp_path / "low", {"W_enc": both, "b_enc": torch.zeros(8), "W_dec": both.T.contiguous(), "b_dec": mean}


def foreign(folder: Path, weights: dict[str, Tensor], **config: Any) -> Path:
    folder.mkdir()
    save_file(weights, folder / "sae_weights.safetensors")
    (folder / "cfg.json").write_text(json.dumps({"d_in": 32, "d_sae": 8, "architecture": "standard"} | config))
    return folder


def test_an_import_is_checked_by_how_well_it_reconstructs_rows(
    low_rank: tuple[Path, dict[str, Tensor]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, weights = low_rank
    facts = {"model_name": "gpt2-small", "hook_name": "blocks.3.hook_resid_pre", "context_size": 128}
    assert command(foreign(tmp_path / "right", weights, **facts), tmp_path / "1", data, "--json") == EXIT_FINISHED
    answer = json.loads(capsys.readouterr().out.splitlines()[-1])
    check = answer["check"]
    assert check["fvu"] < 1e-6
    assert (check["l0"], answer["warnings"]) == (pytest.approx(4, abs=0.01), [])
    again = ["export", str(tmp_path / "1"), "--out", str(tmp_path / "again"), "--format", "dictionary_learning"]
    assert main(again) == EXIT_FINISHED
    config = json.loads((tmp_path / "again" / "config.json").read_text())
    named = {name: config["trainer"][name] for name in ("lm_name", "submodule_name", "layer")}
    assert named == {"lm_name": "gpt2-small", "submodule_name": "blocks.3.hook_resid_pre", "layer": 3}
    assert config["buffer"]["ctx_len"] == 128
    capsys.readouterr()
    # This SAE expects rows scaled to a mean norm of √32.
    # Therefore, the SAE's b_dec, the mean of the rows, is scaled too.
    rows = load_file(data / "a.safetensors")["activations"]
    scaled = weights | {"b_dec": weights["b_dec"] * 32**0.5 / rows.norm(dim=1).mean()}
    for name, changed, config, words in (
        # This SAE's encoder expects x, although its settings say x − b_dec.
        (
            "bias",
            weights | {"b_enc": -weights["b_dec"] @ weights["W_enc"]},
            {},
            ("FVU is ", "read as an encoder of x, not of x − b_dec, its FVU is "),
        ),
        ("dead", weights | {"b_enc": torch.full((8,), -1e6)}, {}, ("no latent fires", "another hook, model or layer")),
        (
            "many",
            weights,
            {"metadata": {"sae_lens_version": "6.20.0", "l0": 60}},
            ("L0 is 4.0 on these rows, but 60 according to its files", "another hook"),
        ),
        ("scale", scaled, {}, ("FVU is ", "with --config norm_scaling_factor=")),
    ):
        folder = foreign(tmp_path / name, changed, **config)
        assert command(folder, tmp_path / f"of-{name}", data) == EXIT_FINISHED
        warnings = [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning: ")]
        for word in words:
            assert any(word in line for line in warnings), (name, warnings)


def test_an_import_warns_about_what_further_training_would_change_immediately(
    tmp_path: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shared("saelens", "topk", tmp_path / "theirs", torch.randn(9, 32))
    weights = load_file(tmp_path / "theirs" / "sae_weights.safetensors")
    save_file(weights | {"W_dec": 2 * weights["W_dec"]}, tmp_path / "theirs" / "sae_weights.safetensors")
    assert command(tmp_path / "theirs", tmp_path / "run", data) == EXIT_FINISHED
    assert "its decoder rows do not have norm 1" in capsys.readouterr().out


@pytest.mark.parametrize(("name", "tokens"), [("saelens", 4), ("sparsify", 4), ("dictionary_learning", 0)])
def test_notes_on_latents_are_imported_and_still_describe_the_weights(
    name: str, tokens: int, tmp_path: Path, data: Path
) -> None:
    theirs = tmp_path / "theirs"
    sae = shared_form(made("topk"), {"training_architecture": "topk", "training_tokens": 5}, k=8)
    FORMATS[name].load()().write(sae, theirs)
    lines = ('{"latent": 1, "name": "of these weights", "tokens": 5}', '{"latent": 2, "starred": true, "tokens": 4}')
    (theirs / NOTES).write_text("\n".join(lines))
    assert command(theirs, tmp_path / "run", data) == EXIT_FINISHED
    notes = read_notes(tmp_path / "run" / "sae").by_latent
    # Not every format states the number of tokens; then all notes are taken to describe the weights.
    assert [(one.latent, one.name, one.starred, one.tokens) for one in notes.values()] == [
        (1, "of these weights", False, exported_tokens(tmp_path / "run" / "sae")), (2, "", True, tokens),
    ]  # fmt: skip
