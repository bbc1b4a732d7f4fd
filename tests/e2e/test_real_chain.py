"""Tests the complete pipeline with a trained language model: text, activations, SAEs, report cards, other tools.

Each stage is a command as a user would type it, run in a separate process. The assertions hold on every machine because
no asserted value depends on how a sum is rounded.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tomli_w
import torch
from safetensors.torch import load_file
from support.box import ROOT
from support.real_model import D_MODEL, needs_model, write_folder, write_text
from torch import Tensor

from trainer.activations.split import Split

N_ROWS, CONTEXT, D_SAE, K = 2560, 128, 768, 32
# The number and length of the contexts that are also evaluated with SAELens. The model reads these contexts ten times.
N_JUDGED, SHORT = 4, 32
# Maps our names for metrics over all tokens to SAELens's names.
OF_SAELENS = {
    "ce": "ce_loss_without_sae",
    "ce_with_sae": "ce_loss_with_sae",
    "ce_with_zeros": "ce_loss_with_ablation",
    "ce_score": "ce_loss_score",
    "kl_with_sae": "kl_div_with_sae",
    "kl_with_zeros": "kl_div_with_ablation",
    "kl_score": "kl_div_score",
    "explained_variance": "explained_variance",
    "mse": "mse",
    "cosine": "cossim",
    "l0": "l0",
    "l2_ratio": "l2_ratio",
    "relative_reconstruction_bias": "relative_reconstruction_bias",
}
STREAM, MLP_IN, MLP_OUT = "resid_post.6", "mlp_in.6", "mlp_out.6"
LAYERS = range(12, 16)
HOOKS = ["resid_post.3", STREAM, MLP_IN, MLP_OUT]


class Chain:
    """The commands' working directory."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.model = str(write_folder(folder / "SmolLM2"))
        self._env = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "SAE_TUI_DATA_DIR": str(folder)}

    def trainer(self, *arguments: object) -> Any:
        """Run a trainer command and return its last line, parsed as JSON."""
        return json.loads(self._run("trainer", *arguments).splitlines()[-1])

    def app(self, *arguments: object) -> Any:
        """Run an app command and return its output, parsed as JSON."""
        return json.loads(self._run("sae_tui", *arguments))

    def _run(self, module: str, *arguments: object) -> str:
        argv = [sys.executable, "-m", module, *map(str, arguments), "--json"]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=240, env=self._env, cwd=self.folder)
        assert done.returncode == 0, done.stderr
        assert "Traceback" not in done.stderr
        return done.stdout

    def write(self, name: str, **sections: dict[str, Any]) -> str:
        kind = {"kind": "extract"} if "model" in sections else {}
        (self.folder / name).write_text(tomli_w.dumps(kind | sections | {"launch": {"gpus": "cpu"}}))
        return name

    def rows(self, hook: str) -> dict[str, Tensor]:
        """Return a hook's rows [n, d_in] and the origin of each row [n], in file order."""
        shards = [load_file(file) for file in sorted((self.folder / "rows" / hook).glob("*.safetensors"))]
        return {name: torch.cat([shard[name] for shard in shards]) for name in shards[0]}


@pytest.mark.slow
@needs_model
@pytest.mark.timeout(600)
def test_a_real_model_passes_through_the_chain_from_text_to_features(tmp_path: Path) -> None:
    chain = Chain(tmp_path)
    extract(chain)
    inspect(chain)
    train(chain, "sae.toml", "sae-run", path=f"rows/{STREAM}")
    judge(chain)
    browse(chain)


@needs_model
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_other_tools_agree_with_the_saes_of_a_real_model(tmp_path: Path) -> None:
    chain = Chain(tmp_path)
    extract(chain)
    train(chain, "sae.toml", "sae-run", path=f"rows/{STREAM}")
    train(chain, "transcoder.toml", "transcoder-run", path=f"rows/{MLP_IN}", target_path=f"rows/{MLP_OUT}")
    give_to_saelens(chain)
    judge_as_saelens(chain)
    give_to_circuit_tracer(chain)


@needs_model
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_cross_layer_transcoder_of_a_real_model_equals_a_dense_loop_on_1_2_and_4_ranks(tmp_path: Path) -> None:
    chain = Chain(tmp_path)
    write_text(chain.folder / "text.jsonl")
    extraction = chain.write(
        "extract.toml",
        model={"path": chain.model, "hooks": [f"mlp.{LAYERS[0]}-{LAYERS[-1]}"]},
        text={"path": "text.jsonl", "context": CONTEXT},
        extract={"n_tokens": N_ROWS, "batch_tokens": 1024, "output": "rows"},
    )
    chain.trainer("extract", extraction)
    fvus = []
    for n_ranks, mode in ((1, "single"), (2, "tensor"), (4, "hybrid")):
        job = chain.write(
            f"on-{n_ranks}.toml",
            data={"path": "rows", "hook": f"mlp.{LAYERS[0]}-{LAYERS[-1]}", "hold_out": "rows", "held_out_tokens": 512},
            sae={"architecture": "batch_topk", "d_sae": 1152, "k": 16, "cross_layer": True},
            train={"batch_size": 256 if n_ranks < 4 else 128, "n_steps": 24},
            parallel={"mode": mode},
        )
        out = chain.folder / f"run-{n_ranks}"
        chain.trainer("run", job, "--out", out, "--set", f"launch.gpus=cpu:{n_ranks}")
        fvus.append(fvus_of(out))
    # A different order of summation may select other latents, so that the weights differ more than by rounding.
    for others in fvus[1:]:
        assert others == pytest.approx(fvus[0], rel=0.02)
    dense = dense_fvus(chain, chain.folder / "run-1" / "sae")
    assert all(0.1 < one < 1 for one in dense)
    # The run measures each half of these rows with a threshold fitted on the other half, and leaves out outliers.
    assert dense == pytest.approx(fvus[0], rel=0.03)


def fvus_of(run: Path) -> list[float]:
    """Return the held-out FVU of each layer in a run."""
    configs = [json.loads((run / "sae" / f"layer={layer}" / "cfg.json").read_text()) for layer in LAYERS]
    return [config["metadata"]["heldout_fvu"] for config in configs]


def dense_fvus(chain: Chain, saes: Path) -> list[float]:
    """Return each layer's FVU on the held-out rows, by the definition of a cross-layer transcoder in float64."""
    acts, decoders, found = [], [], []
    held_out = torch.from_numpy(Split(N_ROWS, 512, 0).held_out)
    for layer in LAYERS:
        own = {
            name: one.double() for name, one in load_file(saes / f"layer={layer}" / "sae_weights.safetensors").items()
        }
        x, y = (chain.rows(f"{site}.{layer}")["activations"][held_out].double() for site in ("mlp_in", "mlp_out"))
        pre_acts = x @ own["W_enc"] + own["b_enc"]
        acts.append(pre_acts * (pre_acts > own["threshold"]))
        decoders.append(own["W_dec"].split(D_MODEL, dim=1))
        x_hat = own["b_dec"][:D_MODEL]
        for source, written in enumerate(acts):
            x_hat = x_hat + written @ decoders[source][len(acts) - 1 - source]
        found.append(float((y - x_hat).square().sum() / (y - y.mean(0)).square().sum()))
    return found


def extract(chain: Chain) -> None:
    n_documents = write_text(chain.folder / "text.jsonl")
    job = chain.write(
        "extract.toml",
        model={"path": chain.model, "hooks": HOOKS},
        text={"path": "text.jsonl", "context": CONTEXT},
        extract={"n_tokens": N_ROWS, "batch_tokens": 1024, "shard_rows": 1024, "output": "rows"},
    )
    told = chain.trainer("extract", job)
    assert (told["state"], told["n_tokens"], [*told["outputs"]]) == ("finished", N_ROWS, HOOKS)
    # Rows for the first token in a context or document are left out. The upper bound allows for an unused part of the
    # last batch.
    n_contexts = N_ROWS // CONTEXT
    assert n_contexts <= told["left_out"]["first tokens"] <= 2 * n_contexts + n_documents
    origins = []
    for hook in HOOKS:
        rows = chain.rows(hook)
        assert rows["activations"].shape == (N_ROWS, D_MODEL)
        assert int(rows["positions"].min()) == 1
        assert int(rows["positions"].max()) < CONTEXT
        origins.append(torch.stack([rows["token_ids"], rows["positions"], rows["document"]]))
    assert all(torch.equal(one, origins[0]) for one in origins)


def inspect(chain: Chain) -> None:
    for hook in (STREAM, MLP_IN):
        facts = chain.trainer("inspect", f"rows/{hook}")
        assert (facts["n_tokens"], facts["d_in"], facts["not_finite"]) == (N_ROWS, D_MODEL, 0)
        assert facts["constant_dimensions"] == 0
        assert facts["outliers"] < N_ROWS / 100
        # If the rows for first tokens, which have huge norms after some layers, were included, gamma would be at most
        # 0.1.
        assert 0.2 < facts["gamma"] < 2
        assert facts["largest_norm"] < 15 * facts["median_norm"]
        rows = chain.rows(hook)["activations"].double()
        assert facts["median_norm"] == pytest.approx(float(rows.norm(dim=1).median()), rel=0.01)


def train(chain: Chain, name: str, out: str, **data: str) -> None:
    job = chain.write(
        name,
        data=data | {"held_out_tokens": 512},
        sae={"architecture": "batch_topk", "d_sae": D_SAE, "k": K},
        train={"batch_size": 256, "n_steps": 80},
    )
    told = chain.trainer("run", job, "--out", out)
    assert (told["state"], told["steps"], told["tokens"]) == ("finished", 80, 80 * 256)
    assert 0 < told["heldout_fvu"] < 1
    # A threshold learned for an average of k latents keeps about k latents active.
    assert K / 3 < told["heldout_l0"] < 3 * K


def judge(chain: Chain) -> None:
    told = chain.trainer("eval", "sae-run", "--model", "auto", "--tokens", 256, "--contexts", 2)
    (card,) = told["cards"]
    figures, spliced = card["figures"], card["spliced"]
    assert (card["written_to"], figures["d_sae"]) == (str(chain.folder / "sae-run" / "sae"), D_SAE)
    assert card["data"]["is_held_out"]
    assert 0 < figures["fvu"] < 1
    assert figures["explained_variance"] == pytest.approx(1 - figures["fvu"])
    assert spliced["is_unseen"]
    # A model that assigns the same probability to all 49,152 tokens has a loss of ln 49,152 = 10.8 nats.
    assert 0.5 < spliced["ce"] < 5
    assert spliced["ce"] - 0.05 < spliced["ce_with_sae"] < spliced["ce_with_zeros"]
    assert 0 < spliced["kl_with_sae"] < spliced["kl_with_zeros"]
    assert 0 < spliced["kl_score"] < 1
    assert math.isfinite(spliced["ce_with_mean"])


def browse(chain: Chain) -> None:
    features = chain.app("features", "sae-run", "--limit", 5)
    assert len(features) == 5
    for feature in features:
        assert 0 < feature["density"] <= 1
        assert len(feature["promoted"]) == 10
        strongest = feature["contexts"][0]
        assert strongest["tokens"][strongest["at"]]["act"] == pytest.approx(feature["largest"], rel=1e-5)
        assert "".join(token["text"] for token in strongest["tokens"]).strip()
    assert chain.app("features", "sae-run", features[0]["latent"]) == features[0]


def give_to_saelens(chain: Chain) -> None:
    sae_lens = pytest.importorskip("sae_lens")
    chain.trainer("export", "sae-run", "--out", "saelens", "--format", "saelens")
    sae = sae_lens.SAE.load_from_disk(chain.folder / "saelens")
    # TransformerLens does not support this model, so the hook is named after a module in transformers.
    assert sae.cfg.metadata["hook_name"] == "model.layers.6"
    assert sae.cfg.metadata["as_extracted"]["hook_name"] == "blocks.6.hook_resid_post"
    x = ordinary(chain.rows(STREAM)["activations"])
    with torch.no_grad():
        assert_judged_alike(chain, "saelens", STREAM, fvu(x, sae(x)))


def judge_as_saelens(chain: Chain) -> None:
    """Compare each metric that is defined as in SAELens with SAELens's evaluation on the same contexts."""
    sae_lens = pytest.importorskip("sae_lens")
    from datasets import Dataset
    from sae_lens.evals import get_eval_everything_config, run_evals
    from sae_lens.load_model import HookedProxyLM
    from sae_lens.training.activation_scaler import ActivationScaler
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(chain.model)
    model = AutoModelForCausalLM.from_pretrained(chain.model, dtype=torch.float32)
    text = "".join(json.loads(line)["text"] for line in (chain.folder / "text.jsonl").open())
    ids = torch.tensor(tokenizer(text[: 10 * N_JUDGED * SHORT])["input_ids"][: N_JUDGED * SHORT]).view(-1, SHORT)
    # Each context is a separate document.
    (chain.folder / "ids.jsonl").write_text("".join(json.dumps({"input_ids": row}) + "\n" for row in ids.tolist()))
    job = chain.write(
        "judge.toml",
        model={"path": chain.model, "hooks": [STREAM]},
        text={"path": "ids.jsonl", "context": SHORT},
        extract={"n_tokens": ids.numel()},
    )
    (card,) = chain.trainer("eval", "sae-run", "--model", job, "--tokens", ids.numel(), "--contexts", 0)["cards"]
    sae = sae_lens.SAE.load_from_disk(chain.folder / "saelens")
    proxy = HookedProxyLM(model, tokenizer, hook_names=[sae.cfg.metadata.hook_name])
    contexts = Dataset.from_list([{"input_ids": row} for row in ids.tolist()])
    store = sae_lens.ActivationsStore.from_sae(proxy, sae, contexts, streaming=False, context_size=SHORT)
    config = get_eval_everything_config(
        batch_size_prompts=N_JUDGED, n_eval_reconstruction_batches=1, n_eval_sparsity_variance_batches=1
    )
    with torch.no_grad():
        theirs, _ = run_evals(sae, store, proxy, ActivationScaler(), config, exclude_special_tokens=False)
    expected = {name: value for figures in theirs.values() for name, value in figures.items()}
    spliced = card["spliced"]
    assert spliced["left_out"] == "first tokens and special tokens"
    ours = spliced["all_tokens"] | spliced["all_tokens"]["rows"]
    for name, same in OF_SAELENS.items():
        assert ours[name] == pytest.approx(expected[same], rel=2e-3), name
    # The first row in each context is an outlier, which an SAE cannot reconstruct unless it was trained on such rows.
    assert spliced["rows"]["n_rows"] == ours["n_rows"] - N_JUDGED
    assert spliced["ce_score"] > ours["ce_score"]


def give_to_circuit_tracer(chain: Chain) -> None:
    chain.trainer("export", "transcoder-run", "--out", "set", "--format", "circuit-tracer")
    file = chain.folder / "set" / "layer_6.safetensors"
    x, y = (chain.rows(hook)["activations"] for hook in (MLP_IN, MLP_OUT))
    w = load_file(file)
    pre_acts = x @ w["W_enc"].T + w["b_enc"]
    acts = pre_acts * (pre_acts > w["activation_function.threshold"])
    y_hat = acts @ w["W_dec"] + w["b_dec"]
    assert fvu(y, y_hat) < 1
    if importlib.util.find_spec("circuit_tracer"):
        torch.testing.assert_close(loaded_by_circuit_tracer(file, x), y_hat, rtol=1e-3, atol=1e-3)


def loaded_by_circuit_tracer(file: Path, x: Tensor) -> Tensor:
    """Use circuit-tracer to load a transcoder from a file, and return its output for rows x [n, d_in]."""
    from circuit_tracer.transcoder.single_layer_transcoder import load_transcoder_set

    hooks = {"feature_input_hook": "mlp.hook_in", "feature_output_hook": "hook_mlp_out"}
    (transcoder,) = load_transcoder_set({0: str(file)}, scan="", device=torch.device("cpu"), **hooks)
    with torch.no_grad():
        y_hat: Tensor = transcoder.decode(transcoder.encode(x), x)
    return y_hat


def assert_judged_alike(chain: Chain, folder: str, hook: str, expected: float) -> None:
    """Assert that the trainer measures the FVU `expected` for the SAE in a folder, on all rows of a hook."""
    (card,) = chain.trainer("eval", folder, "--data", f"rows/{hook}")["cards"]
    assert card["figures"]["fvu"] == pytest.approx(expected, rel=0.01)


def ordinary(rows: Tensor) -> Tensor:
    """Return the rows whose norm is at most ten times the median norm; metrics use only these rows."""
    norms = rows.norm(dim=1)
    return rows[norms <= 10 * norms.median()]


def fvu(y: Tensor, y_hat: Tensor) -> float:
    """Return Σ‖y − ŷ‖² / Σ‖y − mean‖² for rows [n, d]."""
    exact = y.double()
    return float((exact - y_hat).square().sum() / (exact - exact.mean(0)).square().sum())
