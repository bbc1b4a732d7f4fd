"""Tests `sae-tui export`: errors, and sets of transcoders; `test_skill` exports a single SAE."""

from __future__ import annotations

import json

import pytest
from support.answers import check_output
from support.layered_rows import write_layers


@pytest.mark.slow
def test_an_impossible_export_names_the_reason_and_writes_nothing(shell) -> None:
    out = shell.folder / "out"
    assert shell.errors("export", 7, "--out", out, code=1) == [
        "sae-tui: error: there is no job 7; `sae-tui jobs` lists them"
    ]
    job_id = shell.json("launch", shell.job_file, "--gpus", "cpu", "--hold")["id"]
    error = shell.json("export", job_id, "--out", out, "--only", "k=3", code=1)["error"]
    assert "checkpoint" in error["message"]
    assert not out.exists()


def test_the_layers_of_a_cross_layer_transcoder_are_exported_for_circuit_tracer(shell) -> None:
    write_layers(shell.folder / "rows")
    job_file = shell.folder / "layers.toml"
    job_file.write_text(
        f"""
        [data]
        path = "{shell.folder / "rows"}"
        hook = "mlp.2-4"
        [sae]
        architecture = "batch_topk"
        d_sae = 48
        k = 3
        cross_layer = true
        [train]
        n_steps = 10
        batch_size = 64
        report_card = false
        """
    )
    job_id = shell.json("launch", job_file, "--gpus", "cpu", "--wait")["id"]
    command = ["export", str(job_id), "--out", str(shell.folder / "set"), "--format", "circuit-tracer"]
    answer = shell.json(*command)
    check_output(["sae-tui", *command, "--json"], json.dumps(answer))
    assert answer["layers"] == {"0": 10, "1": 10, "2": 10}
    assert {file.name for file in (shell.folder / "set").glob("W_*")} == {
        f"W_{end}_{layer}.safetensors" for end in ("enc", "dec") for layer in range(3)
    }
    again = shell.run("export", job_id, "--out", shell.folder / "set", "--format", "circuit-tracer", "--force").stdout
    assert again.splitlines()[0] == f"layer 0 of step 10 -> {shell.folder / 'set'}"
