"""Tests the app as users use it: in a real terminal, with real keys, and with a real training job on two processes."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.box import ROOT, Box, processes_of, wait_for_store


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_job_launched_by_keys_outlives_the_app_and_saelens_loads_its_sae(box: Box) -> None:
    terminal = box.app()
    box.launch_by_keys(terminal, steps=120)
    terminal.wait_for("▶ running", 90)
    terminal.send("q")
    assert terminal.wait_for_exit() == 0

    job = box.wait_for_state(1, "finished", "failed", seconds=240)
    assert job["state"] == "finished", job
    assert job["gpu_ids"] == [0, 1]
    assert job["world_size"] == 2
    assert job["step"] == 120

    again = box.app()
    again.wait_for("✓ finished")
    again.send("\r")
    again.wait_for(lambda text: "FVU" in text and "learning rate" in text and "ms/step" in text)
    assert_saelens_loads(Path(job["output_path"]))
    assert processes_of(box.folder / "data", with_queue=False) == []


@pytest.mark.timeout(400)
def test_a_job_survives_the_apps_death_and_a_closed_terminal_and_can_be_stopped(box: Box) -> None:
    killed = box.app(80, 24)
    box.launch_by_keys(killed, steps=100_000)
    killed.wait_for("▶ running", 90)
    killed.process.kill()
    closed = box.app(80, 24)
    closed.wait_for("▶ running")
    before = box.shell("job", "1")["step"]
    closed.close()

    last = box.app()
    last.wait_for("▶ running")
    wait_for_store(box.data, lambda control: control.job(1).step > before)
    last.send("s")
    last.wait_for("Stop job 1")
    last.send("y")
    last.wait_for("◼ stopped", 60)
    job = box.shell("job", "1")
    assert job["error"] is None
    checkpoints = list((box.folder / "data").rglob("checkpoints/*/manifest.json"))
    assert checkpoints
    assert box.shell("gpus", "0")["current_job"] is None
    assert processes_of(box.folder / "data", with_queue=False) == []


def assert_saelens_loads(folder: Path) -> None:
    import torch
    from sae_lens import SAE
    from safetensors.torch import load_file

    sae = SAE.load_from_disk(folder)
    weights = load_file(folder / "sae_weights.safetensors")
    x = load_file(ROOT / "data/sample/acts-00000.safetensors")["activations"][:256].float()
    pre_acts = (x - weights["b_dec"]) @ weights["W_enc"] + weights["b_enc"]
    top = pre_acts.topk(16)
    acts = torch.zeros_like(pre_acts).scatter(1, top.indices, top.values.relu())
    x_hat = acts @ weights["W_dec"] + weights["b_dec"]
    assert (sae(x) - x_hat).abs().max() < 1e-4
    assert (x - x_hat).pow(2).sum() < 0.6 * (x - x.mean(0)).pow(2).sum()
