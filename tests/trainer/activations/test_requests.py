"""Tests reading hidden states that an inference engine stored, one file per request."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save, save_file
from torch import Tensor

from trainer.activations.requests import RequestRows
from trainer.activations.training_data import HowHeldOut, IndexedData
from trainer.contract.errors import JobFileError
from trainer.contract.runs.data_record import record_of
from trainer.contract.settings.requests import RequestSettings
from trainer.parallel.group import Group

ROOT = Path(__file__).parents[3]
LENGTHS = [5, 1, 12, 3]
# A request with as many tokens as layers may have either order; the other requests decide.
N_LAYERS, WIDTH = 3, 6


def requests(folder: Path, order: str = "tokens", dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    """Write requests as vLLM does, or with layers first, or of one layer; return states [n, layers, d_in]."""
    folder.mkdir(exist_ok=True)
    found = []
    for number, n in enumerate(LENGTHS):
        states = torch.randn(n, N_LAYERS, WIDTH, generator=torch.Generator().manual_seed(number)).to(dtype)
        stored = {"tokens": states, "layers": states.transpose(0, 1), "one": states[:, 0]}[order].contiguous()
        tokens = torch.arange(n) + 10 * number
        save_file({"hidden_states": stored, "token_ids": tokens}, folder / f"cmpl-{number}.safetensors")
        (folder / f"cmpl-{number}.safetensors.lock").touch()
        found.append(states)
    return found


@pytest.mark.parametrize(("order", "layer"), [("tokens", 0), ("tokens", 2), ("layers", 1), ("one", 0), ("one", None)])
def test_the_rows_of_one_layer_are_read_with_their_tokens(tmp_path: Path, order: str, layer: int | None) -> None:
    expected = torch.cat([states[:, layer or 0] for states in requests(tmp_path / "r", order)])
    source = RequestRows(path=str(tmp_path / "r"), layer=layer)
    assert (source.n_tokens, source.d_in) == (sum(LENGTHS), WIDTH)
    some = np.array([20, 0, 5, 7, 6])
    assert torch.equal(source.rows(some), expected[np.sort(some)])
    assert source.rows(some).dtype == torch.bfloat16
    ids = [10 * number + place for number, n in enumerate(LENGTHS) for place in range(n)]
    tokens = source.token_ids(np.sort(some))
    assert tokens is not None
    assert tokens.tolist() == [ids[place] for place in sorted(some)]
    assert source.name_of(7) == "row 1 of cmpl-2.safetensors"


def test_whole_requests_are_held_out(tmp_path: Path) -> None:
    (folder := tmp_path / "r").mkdir()
    for number in range(40):
        x = torch.full((5, WIDTH), float(number))
        save_file({"hidden_states": x, "token_ids": torch.arange(5)}, folder / f"{number:02}.safetensors")
    data = IndexedData(RequestRows(path=str(folder)), 20, 0, Group(), HowHeldOut("texts", 0))
    held_out = torch.cat([x for x, _ in data.of_hook(0).held_out(64)])[:, 0]
    trained = data.read(0, data.n_train or 0).x[:, 0]
    assert data.hold_out == "texts"
    assert (torch.unique(held_out, return_counts=True)[1] == 5).all()
    assert not {*held_out.tolist()} & {*trained.tolist()}


def test_requests_added_during_a_run_get_higher_row_numbers(tmp_path: Path) -> None:
    requests(folder := tmp_path / "r")
    settings = RequestSettings(str(folder), 1)
    before = record_of([settings])
    rows = RequestRows(path=str(folder), layer=1).rows(np.arange(sum(LENGTHS)))
    save_file({"hidden_states": torch.ones(4, N_LAYERS, WIDTH), "token_ids": torch.arange(4)}, folder / "a.safetensors")
    source = RequestRows(path=str(folder), layer=1)
    source.continue_from(before)
    assert (source.n_tokens, source.split_sizes) == (sum(LENGTHS) + 4, [sum(LENGTHS)])
    assert torch.equal(source.rows(np.arange(sum(LENGTHS))), rows.float())


def write(folder: Path, name: str, shape: list[int], n_tokens: int = 4, size: int | None = None) -> None:
    whole = save({"hidden_states": torch.zeros(shape), "token_ids": torch.arange(n_tokens)})
    (folder / name).write_bytes(whole[:size])


@pytest.mark.parametrize(
    ("second", "layer", "message"),
    [
        (([4, 2, 6], 4, 150), 0, "data.path: .*b.safetensors is incomplete; wait until it is written, or delete it"),
        (([4, 2, 6], 4, 20), 0, "data.path: .*b.safetensors is incomplete"),
        (([4, 2, 7], 4), 0, "b.safetensors has rows of 7 dimensions, but a.safetensors of 6"),
        (([4, 3, 6], 4), 0, "b.safetensors contains 3 layers, but a.safetensors contains 2"),
        (([4, 2, 6], 5), 0, r"has hidden states of shape \[4, 2, 6\] for 5 tokens"),
        (([4, 2, 6], 4), None, "data.layer: is missing; the files contain 2 layers, 0 to 1"),
        (([4, 2, 6], 4), 2, "data.layer: must be at most 1, since the files contain 2 layers"),
    ],
)
def test_requests_that_cannot_be_read_are_refused_in_one_sentence(
    tmp_path: Path, second: tuple, layer: int | None, message: str
) -> None:
    write(tmp_path, "a.safetensors", [4, 2, 6])
    write(tmp_path, "b.safetensors", *second)
    with pytest.raises(JobFileError, match=message):
        RequestSettings(str(tmp_path), layer).shape()


def test_a_run_on_requests_finds_the_texts_that_latents_fire_on(tmp_path: Path) -> None:
    (folder := tmp_path / "r").mkdir()
    directions = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(0))
    for number in range(60):
        ids = torch.randint(0, 8, (10,), generator=torch.Generator().manual_seed(number))
        states = torch.stack([torch.zeros(10, WIDTH), directions[ids]], dim=1)
        save_file({"hidden_states": states, "token_ids": ids}, folder / f"{number}.safetensors")
    (folder / "tokens.json").write_text(json.dumps([f" word{number}" for number in range(8)]))
    (tmp_path / "job.toml").write_text(
        f'[data]\nsource = "requests"\npath = "{folder}"\nlayer = 1\n[sae]\nd_sae = 16\nk = 1\n'
        '[train]\nn_steps = 60\nbatch_size = 64\n[launch]\ngpus = "cpu"\n'
    )
    command = [sys.executable, "-m", "trainer", "run", tmp_path / "job.toml", "--out", tmp_path / "run", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    card = json.loads((tmp_path / "run" / "sae" / "card.json").read_text())
    assert card["data"]["hold_out"] == "texts"
    texts = [text for latent in card["latents"] for text in latent["texts"]]
    assert texts
    assert all(text["tokens"][text["at"]].startswith(" word") for text in texts)


@pytest.mark.parametrize("tokens", [torch.arange(2.0), torch.zeros(1, 1, dtype=torch.int64)])
def test_token_ids_that_are_not_one_whole_number_per_row_are_ignored(tmp_path: Path, tokens: Tensor) -> None:
    save_file({"hidden_states": torch.ones(2, WIDTH), "token_ids": tokens}, tmp_path / "0.safetensors")
    source = RequestRows(path=str(tmp_path))
    assert source.n_tokens == 2
    assert source.token_ids(np.arange(2)) is None


def test_more_requests_than_a_process_may_open_are_read(tmp_path: Path) -> None:
    for number in range(400):
        save_file({"hidden_states": torch.full((1, WIDTH), float(number))}, tmp_path / f"{number:03}.safetensors")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (300, hard))
    try:
        rows = RequestRows(path=str(tmp_path)).rows(np.arange(400))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert rows[:, 0].tolist() == [*range(400)]
