"""Tests of crosscoders: SAEs whose rows are joined from several hooks or folders."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.extractions import run
from support.tiny_models import D_IN, sentences
from torch import Tensor
from torch.nn.functional import normalize

from trainer.activations.open_source import continue_from, open_source
from trainer.activations.outliers import Outliers
from trainer.contract.errors import JobFileError
from trainer.contract.runs.data_record import record_of
from trainer.contract.settings.extract import ExtractJob
from trainer.contract.settings.job import JobConfig
from trainer.contract.settings.job_file import members, parse_job
from trainer.contract.settings.promised import Promise

HOOKS = ["resid_post.1", "resid_post.2"]
N_ROWS, WIDTHS, SCALES = 12_000, (24, 32), (1.0, 8.0)
# The planted directions: shared ones, directions that only the first part has, and directions that only the second has.
N_PLANTED, ONLY_A, ONLY_B = 48, slice(32, 40), slice(40, 48)


def parsed(data: dict[str, Any], **train: Any) -> JobConfig:
    sae = {"architecture": "batch_topk", "d_sae": 64, "k": 2}
    job, problems = parse_job(
        {"data": data, "sae": sae, "train": {"batch_size": 512, "n_steps": 300} | train, "launch": {"gpus": "cpu"}}
    )
    assert job, problems
    return job


def folder_of(place: Path, rows: Tensor, /, **numbers: Tensor) -> Path:
    place.mkdir(parents=True)
    save_file({"activations": rows, **numbers}, place / "shard-00000.safetensors")
    return place


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Tensor]:
    """Write the rows of two hooks of different width and scale. Return the folder and the directions [48, 56]."""
    generator = torch.Generator().manual_seed(0)
    directions = [normalize(torch.randn(N_PLANTED, width, generator=generator), dim=1) for width in WIDTHS]
    directions[0][ONLY_B], directions[1][ONLY_A] = 0, 0
    fires = torch.rand(N_ROWS, N_PLANTED, generator=generator) < 0.04
    acts = fires * (0.5 + torch.rand(N_ROWS, N_PLANTED, generator=generator))
    folder = tmp_path_factory.mktemp("planted")
    for hook, of_hook, scale in zip(HOOKS, directions, SCALES, strict=True):
        noise = 0.01 * torch.randn(N_ROWS, of_hook.shape[1], generator=generator)
        folder_of(folder / hook, scale * (acts @ of_hook + noise))
    return folder, torch.cat(directions, dim=1)


def test_every_direction_that_only_one_part_has_is_found(
    planted: tuple[Path, Tensor], make_trainer: Callable[..., Any], tmp_path: Path
) -> None:
    folder, directions = planted
    trainer = make_trainer(parsed({"path": str(folder), "hook": "resid_post.1+2"}), output=tmp_path / "sae")
    assert trainer.run()
    (file,) = (tmp_path / "sae").glob("*.safetensors")
    per_part = torch.tensor(SCALES).repeat_interleave(torch.tensor(WIDTHS))
    decoder = normalize(load_file(file)["W_dec"] / per_part, dim=1)
    cosines, latents = (normalize(directions, dim=1) @ decoder.T).max(dim=1)
    assert cosines.min() >= 0.99
    of_parts = torch.stack([part.norm(dim=1) for part in decoder[latents].split(WIDTHS, dim=1)])
    assert of_parts[1, ONLY_A].max() < 0.1
    assert of_parts[0, ONLY_B].max() < 0.1


def test_each_part_has_its_own_scale(planted: tuple[Path, Tensor], make_trainer: Callable[..., Any]) -> None:
    trainer = make_trainer(parsed({"path": str(planted[0]), "hook": "resid_post.1+2"}, n_steps=1))
    trainer.run()
    (learner,) = trainer.learners.values()
    x = open_source(trainer._job).rows(torch.arange(N_ROWS).numpy()).float() * learner.sae.x_scale
    of_parts = [(part - part.mean(0)).norm(dim=1).mean() / part.shape[1] ** 0.5 for part in x.split(WIDTHS, dim=1)]
    assert torch.stack(of_parts).tolist() == pytest.approx([1, 1], rel=0.05)


def test_folders_are_joined_row_by_row(planted: tuple[Path, Tensor]) -> None:
    folder, _ = planted
    paths = [str(folder / hook) for hook in HOOKS]
    job = parsed({"path": paths, "join": True})
    assert job.data_shape() == (sum(WIDTHS), None, N_ROWS, WIDTHS)
    rows = open_source(job).rows(torch.tensor([5, 700]).numpy())
    stored = [load_file(Path(path) / "shard-00000.safetensors")["activations"][[5, 700]] for path in paths]
    assert torch.equal(rows, torch.cat(stored, dim=1))


def test_a_row_is_left_out_if_one_of_its_parts_is_an_outlier() -> None:
    x = torch.ones(8, sum(WIDTHS)) * torch.tensor(SCALES).repeat_interleave(torch.tensor(WIDTHS))
    x[3, : WIDTHS[0]] *= 20
    x[5, WIDTHS[0] :] *= 20
    assert Outliers(x, x, 10.0, parts=WIDTHS).ordinary(x, x).logical_not().nonzero().flatten().tolist() == [3, 5]
    assert Outliers(x, x, 10.0).ordinary(x, x).logical_not().nonzero().flatten().tolist() == [5]


def test_rows_of_different_tokens_are_refused_by_name(tmp_path: Path) -> None:
    rows, ids, text = torch.randn(64, 8), torch.arange(64), torch.zeros(64, dtype=torch.int64)
    paths = [folder_of(tmp_path / "a", rows, token_ids=ids, document=text)]
    paths.append(folder_of(tmp_path / "same", rows, token_ids=ids, document=text))
    paths.append(folder_of(tmp_path / "other_tokens", rows, token_ids=ids.roll(1), document=text))
    paths.append(folder_of(tmp_path / "other_texts", rows, token_ids=ids, document=(ids > 10).long()))
    paths.append(folder_of(tmp_path / "fewer", rows[:60], token_ids=ids[:60], document=text[:60]))
    a, *others = map(str, paths)
    assert open_source(parsed({"path": [a, others[0]], "join": True})).d_in == 16
    for other in others[1:]:
        with pytest.raises(JobFileError, match=f"data.path: .*{Path(other).name}") as refused:
            open_source(parsed({"path": [a, other], "join": True}))
        assert len(refused.value.problems) == 1


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        ({"hook": "resid_post.1+1"}, 'data.hook: "resid_post.1+resid_post.1" joins a hook with itself'),
        ({"hook": "mlp.1+resid_post.1"}, "name its ends instead, like mlp_in.3+mlp_out.3"),
        ({"hook": "resid_post.1+"}, "data.hook: "),
        ({"path": ["a", "a"], "join": True}, "data.path: joins a folder with itself"),
        ({"path": ["a", "./a/"], "join": True}, "data.path: joins a folder with itself"),
        ({"path": ["a", "b"], "join": True, "weights": [1, 2]}, "data.weights: mixes folders"),
        ({"path": ["a", "b"], "join": True, "target_path": ["c", "d"]}, "data.target_path: gives a transcoder's"),
        ({"path": "a", "join": True}, "data.join: needs a list of at least two folders in data.path"),
        ({"path": ["a"], "hook": "resid_post.1", "join": True}, "data.join: needs a list of at least two folders"),
    ],
)
def test_a_wrong_join_is_refused_in_one_sentence(data: dict[str, Any], sentence: str) -> None:
    job, problems = parse_job({"data": {"path": "acts"} | data, "sae": {"d_sae": 8, "k": 2}, "train": {"n_steps": 9}})
    if job:
        with pytest.raises(JobFileError) as refused:
            job.data_shape()
        problems = refused.value.problems
    assert len(problems) == 1
    assert sentence in str(problems[0])


def numbered(folder: Path, *left_out: int, hook: str = "", n: int = 40) -> Path:
    """Write a hook's rows except those that are left out; each row contains its place in the text."""
    places = torch.tensor([place for place in range(n) if place not in left_out])
    rows = places.float()[:, None].expand(-1, 4).contiguous()
    return folder_of(folder / hook, rows, place=places, token_ids=places.int(), document=places // 10)


def test_several_crosscoders_read_stored_rows(tmp_path: Path) -> None:
    for layer, left_out in enumerate([3, 4, 3, 4, 5, 5]):
        numbered(tmp_path, left_out, hook=f"resid_post.{layer}")
    source: Any = open_source(parsed({"path": str(tmp_path), "hook": ["resid_post.0+1", "resid_post.2+3"]}))
    assert (source.n_hooks, source.d_in, source.n_tokens, source.of_hook(1).part_widths) == (2, 8, 38, (4, 4))
    assert source.rows(torch.arange(38).numpy())[:, ::4].tolist() == [[n] * 4 for n in range(40) if n not in (3, 4)]
    # The hooks of the second crosscoder leave out the same row, so 39 rows are left.
    with pytest.raises(JobFileError, match=r"data.hook: 39 rows are in all of .* train these crosscoders in separate"):
        open_source(parsed({"path": str(tmp_path), "hook": ["resid_post.0+1", "resid_post.4+5"]}))


def test_mixed_folders_of_hooks_with_different_rows_are_not_joined(tmp_path: Path) -> None:
    for folder in ("x", "y"):
        numbered(tmp_path / folder, 3, hook="resid_post.1")
        numbered(tmp_path / folder, 4, hook="resid_post.2")
    with pytest.raises(JobFileError, match=r"data.path: .*x/resid_post.1.* are mixed, .*; extract the hooks together"):
        open_source(parsed({"path": [str(tmp_path / "x"), str(tmp_path / "y")], "hook": "resid_post.1+2"}))


def test_a_join_can_wait_for_a_folder_with_more_rows(tmp_path: Path) -> None:
    a, later = numbered(tmp_path / "a", 3), tmp_path / "b"
    promises = {os.path.realpath(later): Promise(4, 40, "job 3")}
    assert parsed({"path": [str(a), str(later)], "join": True}).data_shape(promises) == (8, None, 39, (4, 4))


def test_every_shard_must_record_places_if_rows_are_left_out(tmp_path: Path) -> None:
    a, b = numbered(tmp_path / "a"), numbered(tmp_path / "b")
    save_file({"activations": torch.ones(5, 4)}, b / "shard-00001.safetensors")
    with pytest.raises(JobFileError, match=r"has 45 rows, but .* has 40"):
        parsed({"path": [str(a), str(b)], "join": True}).data_shape()


def test_a_join_whose_folders_grew_by_different_rows_cannot_continue(tmp_path: Path) -> None:
    a, b = (numbered(tmp_path / name, n=30) for name in "ab")
    added = numbered(tmp_path / "added", *range(30)) / "shard-00000.safetensors"
    shutil.copy(added, b / "shard-00001.safetensors")
    job = parsed({"path": [str(a), str(b)], "join": True})
    assert open_source(job).n_tokens == 30
    before = record_of(job.hooks.values())
    shutil.copy(added, a / "shard-00001.safetensors")
    with pytest.raises(JobFileError, match=r"data.path: rows were added to .*start a new run on the current data"):
        continue_from(open_source(job), job, before)


def test_a_folder_without_texts_is_joined_with_one_that_records_them(tmp_path: Path) -> None:
    paths = [numbered(tmp_path / "a"), folder_of(tmp_path / "b", torch.ones(40, 4))]
    source: Any = open_source(parsed({"path": list(map(str, paths)), "join": True}))
    assert (source.n_tokens, source.usual_hold_out, list(source.texts)) == (40, "blocks", [])


@pytest.mark.parametrize("data", [{"path": []}, {"path": [], "hook": "a+b"}, {"source": "model", "model": []}])
def test_an_empty_list_of_parts_is_refused_in_one_sentence(data: dict[str, Any]) -> None:
    more = {"hook": "resid_post.1", "text": "x"} if "model" in data else {"join": True}
    with pytest.raises(JobFileError, match=r"data.\w+: is an empty list; name a") as refused:
        open_source(parsed(data | more))
    assert len(refused.value.problems) == 1


def test_a_sweep_can_hold_several_crosscoders() -> None:
    job = parsed({"path": "acts", "hook": ["resid_post.1+2", "resid_post.3+4-5"]})
    assert list(members(job)) == ["hook=L1+L2", "hook=L3+L4+L5"]
    assert [one.data.n_parts for one in members(job).values()] == [2, 3]


def test_a_streamed_crosscoder_reads_the_rows_that_an_extraction_stores(
    make: Callable[..., ExtractJob], tmp_path: Path
) -> None:
    text = tmp_path / "text.jsonl"
    text.write_text("".join(f'{{"text": "{one}"}}\n' for one in sentences(60)))
    job = make(n_tokens=600, text=text, hooks=["resid_post.0", "resid_post.1"])
    run(job)
    stored = open_source(parsed({"path": job.extract.output, "hook": "resid_post.0+1"}))
    data = {"source": "model", "model": job.model.path, "hook": "resid_post.0+1", "text": str(text)}
    stream: Any = open_source(parsed(data | {"context": 32, "batch_tokens": 256}))
    stream.begin(0, 1, torch.device("cpu"))
    x, _ = stream.next_rows()
    assert (stream.d_in, list(stream.part_widths), stream.n_hooks) == (2 * D_IN, [D_IN, D_IN], 1)
    # Stored rows are shuffled.
    distances = torch.cdist(x[:50].float(), stored.rows(torch.arange(stored.n_tokens).numpy()).float())
    assert distances.min(dim=1).values.max() < 0.1 < distances.median()
