"""Reads a text and steers a tiny language model from the app, with the real trainer."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest
import torch
import transformers
from support.features import features_file
from support.model_screens import record_sae
from support.saes import new_sae
from support.scenes import same_everywhere, still_app
from support.tiny_models import D_IN, make_model
from support.tui import StillMonitor, wait_until
from textual.widgets import Input

from sae_tui.panels.latents import LatentList, shade
from sae_tui.panels.steered import SteeredText
from sae_tui.panels.tokens import TokenText
from sae_tui.screens.features import FeaturesScreen
from sae_tui.widgets.text_field import TextField
from trainer.contract.paths import DataDir
from trainer.contract.runs.features import FEATURES
from trainer.saes.topk import TopK
from trainer.sharing.saelens import export_sae

TEXT = "the red cat sat on a hill and saw the blue dog"


def export(folder: Path, model: Path) -> torch.Tensor:
    """Export an SAE of two latents that reads block 1; return its encoder's weights."""
    sae = new_sae(TopK, D_IN, 2, k=2)
    # With this seed, latent 0 fires on some of the tokens.
    torch.manual_seed(6)
    with torch.no_grad():
        for weights in (sae.W_enc, sae.W_dec):
            weights.copy_(torch.randn(weights.shape) / 8)
    export_sae(sae, folder, {"model_name": str(model), "hook_name": "blocks.1.hook_resid_post"})
    return sae.W_enc.detach().clone()


def expected_acts(model: Path, W_enc: torch.Tensor) -> list[float]:
    """Return latent 0's activation on each token, from transformers."""
    loaded = transformers.AutoModel.from_pretrained(model).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    with torch.no_grad():
        states = loaded(**tokenizer(TEXT, return_tensors="pt"), output_hidden_states=True).hidden_states
    return (states[2][0] @ W_enc)[:, 0].relu().tolist()


async def test_a_text_is_shaded_and_steered_by_the_real_trainer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    same_everywhere(monkeypatch)
    data = DataDir(tmp_path / "data")
    data.create()
    folder = data.sae(record_sae(data))
    acts = expected_acts(model := make_model(tmp_path / "gpt2", "gpt2"), export(folder, model))
    largest = max(acts)
    assert largest > 0
    of_two = {"largest": ("F32", "f", [2], [largest, largest]), "acts_scale": ("F32", "f", [1], [1.0])}
    (folder / FEATURES).write_bytes(features_file(**of_two))
    app = still_app(data, StillMonitor(1))
    async with app.run_test(size=(120, 40)) as pilot:
        await wait_until(pilot, lambda: app.session.jobs)
        app.session.go.show(browser := FeaturesScreen(app.session, app.session.jobs[0].id))
        await wait_until(pilot, lambda: browser.query(LatentList) and browser.query_one(LatentList).latent == 0)
        await pilot.press("T")
        await wait_until(pilot, lambda: app.screen.name == "text" and app.screen.query(TextField))
        app.screen.query_one(TextField).text = TEXT
        await pilot.press("enter")
        view = app.screen.query_one(TokenText)
        await wait_until(pilot, lambda: view._texts, seconds=120)
        assert "".join(view._texts) == TEXT
        assert list(view._token_styles) == ["dim", *(shade(act, largest) for act in acts[1:])]
        await pilot.press("S")
        await wait_until(pilot, lambda: app.screen.name == "steer" and app.screen.query("#tokens"))
        app.screen.query_one("#tokens", Input).value = "3"
        await pilot.press("enter")
        answer = app.screen.query_one(SteeredText)
        await wait_until(pilot, lambda: "KL DIVERGENCE" in answer.plain, seconds=60)
        assert "3 of 3 tokens" in answer.plain
    assert not [one for one in psutil.Process().children(recursive=True) if "interact" in one.cmdline()]
