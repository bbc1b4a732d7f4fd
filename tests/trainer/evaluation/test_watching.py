"""Tests that a run stores correct snapshots of its watched latents, and reports latents that come alive or die."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from trainer.activations.open_source import open_source
from trainer.checkpoints.checkpoint import load
from trainer.contract.errors import JobFileError
from trainer.contract.runs.rank_spec import EXIT_FINISHED
from trainer.contract.runs.watched import WATCHED, WatchedLatent, WatchedSnapshot, append_watched, read_watched
from trainer.contract.settings.job import JobConfig
from trainer.evaluation.contexts import TokenRows, acts_of, contexts_of
from trainer.evaluation.watching import Settling, watch
from trainer.extraction.shard_writer import RowOrigin
from trainer.parallel.base import Parallel
from trainer.training.loop import Trainer
from trainer.training.sharded_state import under

MakeTrainer = Callable[..., Trainer]
MakeJob = Callable[..., JobConfig]
CPU = torch.device("cpu")
EACH = {"eval_every": 5, "checkpoint_every": 10}


@pytest.fixture
def activations(activations: Path) -> Path:
    """Add a token id, a position and a document number to each row. Each document has 50 tokens."""
    names = [f" w{number}" for number in range(40)]
    (activations / "tokens.json").write_text(json.dumps(names))
    for file in activations.glob("*.safetensors"):
        rows = load_file(file)["activations"]
        number = torch.arange(len(rows), dtype=torch.int32)
        origin = {"token_ids": number % len(names), "positions": number % 50, "document": number // 50}
        save_file({"activations": rows, **origin}, file)
    return activations


def watched(make_trainer: MakeTrainer, job: JobConfig, kept: Any, run: Path, **options: Any) -> Trainer:
    trainer = make_trainer(job, kept, **options)
    watch(trainer, job, open_source(job), Parallel(CPU), kept, run)
    return trainer


def steps_of(run: Path) -> list[int]:
    return [one.step for one in read_watched(run)]


def same(one: list[WatchedSnapshot], other: list[WatchedSnapshot]) -> None:
    """Compare two runs' snapshots, except for the last digits of their numbers."""
    assert [(a.step, a.label, a.seen, a.n_rows) for a in one] == [(b.step, b.label, b.seen, b.n_rows) for b in other]
    for mine, theirs in zip(one, other, strict=True):
        assert [(a.latent, a.why) for a in mine.latents] == [(b.latent, b.why) for b in theirs.latents]
        for a, b in zip(mine.latents, theirs.latents, strict=True):
            for name in ("density", "heldout_density", "cosine", "largest"):
                assert getattr(a, name) == pytest.approx(getattr(b, name), rel=1e-3, abs=1e-3), name
            assert [c.texts for c in a.contexts] == [c.texts for c in b.contexts]
            for c, d in zip(a.contexts, b.contexts, strict=True):
                assert c.acts == pytest.approx(d.acts, abs=1e-2)


def test_without_the_setting_nothing_is_stored_or_reported(make_job, make_trainer, kept, tmp_path: Path) -> None:
    assert watched(make_trainer, make_job(train=EACH), kept, tmp_path).run()
    assert not (tmp_path / WATCHED).exists()
    assert not [kind for kind, _, _ in kept.events if kind.startswith(("watch", "latents"))]


@pytest.mark.parametrize("architecture", ["topk", "batch_topk", "jumprelu"])
def test_a_snapshot_equals_a_computation_from_the_checkpoint(
    make_job, make_trainer, kept, tmp_path: Path, activations: Path, architecture: str
) -> None:
    sae: dict[str, Any] = {"architecture": architecture}
    own = {"k": 4} if "topk" in architecture else {}
    job = make_job(train={**EACH, "watch_latents": [3, 40, 12]}, sae=sae | own)
    trainer = watched(make_trainer, job, kept, tmp_path)
    assert trainer.run()
    assert steps_of(tmp_path) == [5, 10, 15, 20]
    snapshot = read_watched(tmp_path)[1]
    assert [one.latent for one in snapshot.latents] == [3, 40, 12]
    tensors, _ = load(tmp_path / "checkpoints" / "step-00000010")
    learner = make_trainer(job, checkpoints=tmp_path / "c2", output=tmp_path / "o2").learners[""]
    learner.state.load(under(tensors, "/"))
    rows, text = held_out_text(trainer, activations)
    assert snapshot.n_rows == len(rows)
    with learner.evaluating(), torch.no_grad():
        acts = acts_of(learner, text.x).dense()
        wanted = contexts_of(partial(acts_of, learner), [text], trainer.outliers[0], 64, 5)
    names = [name.encode() for name in json.loads((activations / "tokens.json").read_text())]
    for one in snapshot.latents:
        column = acts[:, one.latent]
        assert one.heldout_density == pytest.approx(float((column > 0).double().mean()))
        assert one.largest == pytest.approx(float(column.max()), rel=1e-5)
        examples = wanted.examples(one.latent, names)
        assert [c.example.at for c in one.contexts] == [example.at for example in examples]
        for context, example in zip(one.contexts, examples, strict=True):
            assert context.texts == tuple(token.text for token in example.tokens)
            assert context.acts == pytest.approx([token.act for token in example.tokens], abs=1e-4)


def held_out_text(trainer: Trainer, activations: Path) -> tuple[list[int], TokenRows]:
    """Read the first 512 held-out rows and their tokens directly from the shards."""
    shards = [load_file(activations / name) for name in ("a.safetensors", "b.safetensors")]
    rows = sorted(trainer.data.split.held_out.tolist())[:512]  # type: ignore[attr-defined]
    x = torch.cat([shard["activations"].float() for shard in shards])[rows]
    origin = RowOrigin(*(torch.cat([shard[name] for shard in shards])[rows] for name in RowOrigin._fields))
    return rows, TokenRows(x, origin)


def test_density_and_cosine_equal_the_ones_of_each_step(make_job, make_trainer, kept, tmp_path: Path) -> None:
    # The log interval does not divide the evaluation interval.
    job = make_job(train={"eval_every": 5, "log_every": 3, "watch_latents": [7, 8, 9]})
    trainer = watched(make_trainer, job, kept, tmp_path)
    learner, fired, directions = trainer.learners[""], [], []
    update = learner.update

    def noted(**options: Any) -> None:
        fired.append(learner.sae.step_sums[:64].clone())
        update(**options)
        directions.append(learner.sae.W_dec.detach().clone())

    learner.update = noted  # type: ignore[method-assign]
    assert trainer.run()
    for number, snapshot in enumerate(read_watched(tmp_path)):
        total = torch.stack(fired[5 * number : 5 * number + 5]).sum(0) / (5 * 128)
        for one in snapshot.latents:
            assert one.density == pytest.approx(float(total[one.latent]), abs=1e-6)
            if number:
                before, now = directions[5 * number - 1][one.latent], directions[5 * number + 4][one.latent]
                assert one.cosine == pytest.approx(float(torch.cosine_similarity(before, now, dim=0)), abs=1e-6)
            else:
                assert one.cosine is None


def test_a_latent_that_comes_alive_or_dies_is_reported_and_watched(make_job, make_trainer, kept, tmp_path) -> None:
    job = make_job(train={"n_steps": 40, "eval_every": 5, "watch_latents": ["new", "dying"]})
    trainer = watched(make_trainer, job, kept, tmp_path)
    sae = trainer.learners[""].sae
    taken, take = [], trainer._watcher.take  # type: ignore[union-attr]

    def plant(*, must: bool) -> None:
        take(must=must)
        taken.append(trainer.position.step)
        with torch.no_grad():
            if len(taken) == 2:
                # Latent 5 cannot fire any more, and is dead after 600 tokens.
                sae.b_enc[5] -= 1e4
            elif len(taken) == 5:
                sae.b_enc[5] += 1e4

    trainer._watcher.take = plant  # type: ignore[union-attr, method-assign]
    assert trainer.run()
    why = {one.step: {latent.latent: latent.why for latent in one.latents} for one in read_watched(tmp_path)}
    assert 5 not in why[10]
    assert why[15][5] == "dying"
    assert why[30][5] == "new"
    died = [message for kind, _, message in kept.events if kind == "latents_died"]
    born = [message for kind, _, message in kept.events if kind == "latents_born"]
    assert any(message.startswith("latent 5 ") or "(5" in message or " 5," in message for message in died)
    assert any("at step 30" in message and "5" in message for message in born)
    assert len(born) == len({message.rpartition(" ")[2] for message in born})


@pytest.mark.parametrize("lr", [0.1, 1e-6])
def test_only_a_latent_that_had_settled_is_reported_when_it_turns(
    make_job, make_trainer, kept, tmp_path: Path, lr: float
) -> None:
    train = {"n_steps": 40, "eval_every": 5, "lr": lr, "decay_fraction": 0.0, "watch_latents": [7, 8]}
    trainer = watched(make_trainer, make_job(train=train), kept, tmp_path)
    take = trainer._watcher.take  # type: ignore[union-attr]

    def turn(*, must: bool) -> None:
        if trainer.position.step in (10, 25):
            with torch.no_grad():
                trainer.learners[""].sae.W_dec[8] = trainer.learners[""].sae.W_dec[8].roll(1).neg()
        take(must=must)

    trainer._watcher.take = turn  # type: ignore[union-attr, method-assign]
    assert trainer.run()
    cosines = {one.step: [latent.cosine for latent in one.latents] for one in read_watched(tmp_path)}
    assert all((max(cosines[step]) < 0.9) == (lr == 0.1) for step in (10, 15))
    assert [cosines[step][1] < 0.9 for step in (10, 25)] == [True, True]
    reported = [message for kind, _, message in kept.events if kind == "latents_turned"]
    words = "latent 8 had settled and turned to a cosine below 0.9 with the last snapshot at step 25"
    assert reported == ([words] if lr < 0.1 else [])


def test_a_latent_settles_at_two_snapshots_at_which_it_fires_after_the_warm_up() -> None:
    def turned(cosines: list[float], densities: list[float], warm_up: float = 0.0) -> list[int]:
        settling = Settling(warm_up)
        shown = [
            WatchedSnapshot(step, step, step, 0, (WatchedLatent(3, density=density, cosine=cosine),))
            for step, (cosine, density) in enumerate(zip(cosines, densities, strict=True), 1)
        ]
        return [one.step for one in shown if settling.turned(one)]

    fires = [0.1] * 6
    assert turned([0.5, 0.99, 0.99, 0.5, 0.99, 0.5], fires) == [4]
    assert turned([0.5, 0.99, 0.99, 0.5, 0.99, 0.5], fires, warm_up=2) == []
    # A latent that does not fire keeps its direction without having settled.
    assert turned([0.5, 1.0, 1.0, 0.5, 0.99, 0.5], [0.1, 0.0, 0.0, *fires[:3]]) == []


def test_at_most_32_latents_are_watched_at_once(make_job, make_trainer, kept, tmp_path: Path) -> None:
    # With this job, most latents die.
    job = make_job(
        sae={"d_sae": 256, "k": 2}, train={"n_steps": 60, "eval_every": 5, "watch_latents": [1, 2, "new", "dying"]}
    )
    assert watched(make_trainer, job, kept, tmp_path).run()
    found = read_watched(tmp_path)
    assert max(len(one.latents) for one in found) == 32
    assert all([latent.latent for latent in one.latents[:2]] == [1, 2] for one in found)
    assert len([one for one in kept.events if one[0] == "latents_died"]) <= len(found)


def test_a_resumed_run_stores_the_same_snapshots_once(make_job, make_trainer, kept, tmp_path: Path) -> None:
    job = make_job(train={**EACH, "n_steps": 30, "watch_latents": [3, "new", "dying"], "keep_checkpoints": 5})
    assert watched(make_trainer, job, kept, tmp_path).run()
    whole = read_watched(tmp_path)
    start = tmp_path / "checkpoints" / "step-00000010"
    resumed = watched(
        make_trainer, job, kept, tmp_path, resume_from=start, checkpoints=tmp_path / "c2", output=tmp_path / "o2"
    )
    assert steps_of(tmp_path) == [5, 10]
    assert resumed.run()
    assert read_watched(tmp_path) == whole
    assert len((tmp_path / WATCHED).read_text().splitlines()) == len(whole)


def test_a_new_run_replaces_the_snapshots_of_an_earlier_one(make_job, make_trainer, kept, tmp_path: Path) -> None:
    append_watched(tmp_path, [WatchedSnapshot(3, 3, 3, 0, ())])
    assert watched(make_trainer, make_job(train={"watch_latents": [1]}), kept, tmp_path).run()
    assert steps_of(tmp_path) == [20]


@pytest.mark.parametrize("mode", ["ddp", "tensor"])
def test_two_ranks_store_the_same_snapshots_as_one(make_job, start_ranks, tmp_path: Path, mode: str) -> None:
    train = {**EACH, "watch_latents": [3, 40, 12], "precision": "fp32"}
    one = start_ranks(make_job(train=train), 1, run_dir=tmp_path / "one")
    assert one.wait() == [EXIT_FINISHED]
    job = make_job(train=train | {"global_batch_size": 128, "batch_size": 64}, parallel={"mode": mode})
    assert start_ranks(job, 2, run_dir=tmp_path / "two").wait() == [EXIT_FINISHED] * 2
    same(read_watched(tmp_path / "one"), read_watched(tmp_path / "two"))


def test_each_sae_of_a_sweep_over_ranks_has_snapshots(make_job, start_ranks, tmp_path: Path) -> None:
    job = make_job(sae={"k": [2, 4]}, train={**EACH, "watch_latents": [3, 12, "dying"]}, parallel={"mode": "sweep"})
    assert start_ranks(job, 2).wait() == [EXIT_FINISHED] * 2
    found = read_watched(tmp_path / "run")
    assert [(one.step, one.label) for one in found] == [(s, label) for s in (5, 10, 15, 20) for label in ("k=2", "k=4")]
    assert all(one.latents[0].contexts for one in found if one.latents[0].heldout_density)


def test_without_token_ids_everything_but_the_texts_is_stored(make_job, make_trainer, kept, tmp_path, activations):
    for file in activations.glob("*.safetensors"):
        save_file({"activations": load_file(file)["activations"]}, file)
    assert watched(make_trainer, make_job(train={**EACH, "watch_latents": [3]}), kept, tmp_path).run()
    (latent,) = read_watched(tmp_path)[-1].latents
    assert latent.density is not None
    assert latent.cosine is not None
    assert latent.heldout_density is not None
    assert latent.contexts == ()
    said = [message for kind, _, message in kept.events if kind == "watch"]
    assert said == ["watched latents are stored without texts: the data does not record its tokens"]


def test_a_failure_is_one_event_and_the_run_finishes(make_job, make_trainer, kept, tmp_path: Path) -> None:
    (tmp_path / WATCHED).symlink_to(tmp_path / "elsewhere")
    assert watched(make_trainer, make_job(train={**EACH, "watch_latents": [3]}), kept, tmp_path).run()
    ((level, message),) = [(level, message) for kind, level, message in kept.events if kind == "watch_failed"]
    assert level == "warning"
    assert "training continues" in message
    assert "symbolic link" in message
    assert not (tmp_path / "elsewhere").exists()


def test_watching_does_not_change_the_weights(make_job, make_trainer, kept, tmp_path: Path) -> None:
    train = {**EACH, "optimizer": "adam"}
    assert make_trainer(make_job(train=train), output=tmp_path / "plain", checkpoints=tmp_path / "c2").run()
    assert watched(make_trainer, make_job(train=train | {"watch_latents": [3, "new"]}), kept, tmp_path).run()
    plain, own = (load_file(tmp_path / name / "sae_weights.safetensors") for name in ("plain", "sae"))
    assert all(torch.equal(plain[name], own[name]) for name in plain)


def killed(job: JobConfig, start_ranks: Callable[..., Any], run: Path, eventually: Callable[..., None]) -> None:
    """Start a run, and kill it as soon as it has stored a checkpoint and three snapshots."""
    ranks = start_ranks(job, 1, run_dir=run)
    eventually(lambda: (run / "checkpoints" / "step-00000010").exists() and len(read_watched(run)) >= 3)
    ranks.processes[0].kill()
    assert ranks.wait() != [EXIT_FINISHED]


def test_a_killed_run_that_is_resumed_has_the_snapshots_of_a_whole_run(
    make_job, start_ranks, eventually, tmp_path: Path
) -> None:
    train = {**EACH, "n_steps": 400, "watch_latents": [3, "new", "dying"], "checkpoint_every": 10}
    job = make_job(train=train | {"keep_checkpoints": 100, "checkpoint_every_minutes": 0})
    assert start_ranks(job, 1, run_dir=tmp_path / "whole").wait() == [EXIT_FINISHED]
    killed(job, start_ranks, tmp_path / "run", eventually)
    start = tmp_path / "run" / "checkpoints" / "step-00000010"
    assert start_ranks(job, 1, run_dir=tmp_path / "run", attempt=2, resume_from=start).wait() == [EXIT_FINISHED]
    whole, found = ({(one.step, one.label): one for one in read_watched(tmp_path / name)} for name in ("whole", "run"))
    for key in found.keys() & whole.keys():
        assert found[key] == whole[key]
    assert {step for step, _ in whole if step % 5 == 0} <= {step for step, _ in found}
    assert len((tmp_path / "run" / WATCHED).read_text().splitlines()) == len(found)


def test_a_feature_that_appears_only_later_in_the_data_is_reported(
    make_job, make_trainer, kept, tmp_path: Path, activations: Path
) -> None:
    # Four rows per batch have the planted direction, but only after step 17. Latent 11 reads nothing else.
    job = make_job(
        train={"n_steps": 30, "eval_every": 5, "lr": 1e-9, "watch_latents": ["new"]},
    )
    trainer = watched(make_trainer, job, kept, tmp_path)
    sae = trainer.learners[""].sae
    with torch.no_grad():
        sae.b_enc[11] = -1e5
        sae.W_enc[:, 11] = 0.0
        sae.W_enc[0, 11] = 1e3
    accumulate = trainer.learners[""].accumulate

    def planted(x: torch.Tensor, y: torch.Tensor, of_all: int | None = None, *, is_last: bool = False) -> None:
        rows = x.clone()
        rows[:4, 0] += 1e6 * (trainer.position.step >= 17)
        accumulate(rows, rows, of_all, is_last=is_last)

    trainer.learners[""].accumulate = planted  # type: ignore[method-assign]
    assert trainer.run()
    first = next(one.step for one in read_watched(tmp_path) if 11 in [latent.latent for latent in one.latents])
    assert first == 20
    assert any("latent 11 came alive at step 20" in message for kind, _, message in kept.events)


WRITER = """
import sys
from pathlib import Path
from trainer.contract.runs.watched import *
latents = tuple(WatchedLatent(n, contexts=(WatchedContext(("word",) * 2000, (0.5,) * 2000, 0),)) for n in range(32))
print("begins", flush=True)
for step in range(10**6):
    append_watched(Path(sys.argv[1]), [WatchedSnapshot(step, step, step, 1, latents)])
"""


def test_the_file_stays_readable_if_the_writer_is_killed(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE)
    assert process.stdout
    process.stdout.readline()
    while not (tmp_path / WATCHED).exists() or (tmp_path / WATCHED).stat().st_size < 2**20:
        threading.Event().wait(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    content = (tmp_path / WATCHED).read_bytes()
    # Cut the last line in the middle as well, as a power cut would.
    (tmp_path / WATCHED).write_bytes(content[: content.rindex(b"\n", 0, -1) + 1000])
    steps = steps_of(tmp_path)
    assert steps == list(range(len(steps)))
    assert steps
    append_watched(tmp_path, [WatchedSnapshot(10**6, 1, 1, 0, ())])
    assert steps_of(tmp_path) == [*steps, 10**6]
    assert (tmp_path / WATCHED).stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ([64], "train.watch_latents: there is no latent 64; give numbers from 0 to 63"),
        (list(range(33)), "train.watch_latents: names 33 latents, and at most 32 are watched; leave some out"),
    ],
)
def test_a_latent_that_does_not_exist_is_refused(make_job, wanted: list[int], message: str) -> None:
    with pytest.raises(JobFileError, match=message):
        make_job(train={"watch_latents": wanted}).data_shape()
