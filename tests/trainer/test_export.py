from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest
import torch

from trainer.export import export_sae, origin
from trainer.saes.topk import TopK


@pytest.fixture
def sae() -> TopK:
    torch.manual_seed(0)
    sae = TopK(32, 128, k=8, k_aux=None, auxk_alpha=0.0, dead_after_tokens=10)
    for parameter in sae.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    sae.normalise_decoder()
    return sae


def test_saelens_reconstructs_what_the_trainer_does(sae: TopK, tmp_path: Path) -> None:
    sae_lens = pytest.importorskip("sae_lens")
    export_sae(sae, tmp_path / "sae", {"model_name": "gpt2", "hook_name": "blocks.6.hook_resid_post", "l0": 8.0})
    loaded = sae_lens.SAE.load_from_disk(tmp_path / "sae")
    x = torch.randn(500, 32) * 3
    with torch.no_grad():
        output = sae.eval()(x)
        torch.testing.assert_close(loaded.encode(x), output.acts.dense(128), rtol=0, atol=1e-5)
        torch.testing.assert_close(loaded(x), output.x_hat, rtol=0, atol=1e-5)
    assert loaded.cfg.architecture() == "topk"
    assert loaded.cfg.metadata.hook_name == "blocks.6.hook_resid_post"
    assert loaded.cfg.metadata.l0 == 8.0


def test_the_folder_is_private_and_holds_just_the_two_files(sae: TopK, tmp_path: Path) -> None:
    folder = tmp_path / "saes" / "7"
    export_sae(sae, folder, {})
    assert {file.name: stat.S_IMODE(file.stat().st_mode) for file in folder.iterdir()} == {
        "cfg.json": 0o600,
        "sae_weights.safetensors": 0o600,
    }
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_an_sae_of_an_earlier_attempt_is_replaced_whole(sae: TopK, tmp_path: Path) -> None:
    for tokens in (1, 2):
        export_sae(sae, tmp_path / "sae", {"training_tokens": tokens})
    assert json.loads((tmp_path / "sae" / "cfg.json").read_text())["metadata"]["training_tokens"] == 2
    assert [entry.name for entry in tmp_path.iterdir()] == ["sae"]


def test_where_the_activations_are_from_gets_saelens_names() -> None:
    meta = {"model": "gpt2", "hook_name": "blocks.6", "n_tokens": 5}
    assert origin(meta) == {"model_name": "gpt2", "hook_name": "blocks.6"}
    assert origin({}) == {}
