"""Tests that `data.source = "model"` trains on the rows that an extraction would store, without storing them."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
import tomli_w
import torch
from safetensors.torch import load_file
from support.extractions import CPU, run
from support.tiny_models import D_IN, sentences
from torch import Tensor

from trainer.activations.base import Pair, StreamSource
from trainer.contract.errors import JobFileError, UserError
from trainer.contract.planning.hardware import CPU as CPU_PROCESS
from trainer.contract.planning.hardware import assumed_speeds
from trainer.contract.planning.memory import estimate
from trainer.contract.planning.plan import Plan
from trainer.contract.planning.step_time import source_s, step_time, text_parts
from trainer.contract.planning.workload import Workload
from trainer.contract.runs.rank_spec import EXIT_FINISHED, RankSpec
from trainer.contract.settings.extract import ExtractJob
from trainer.contract.settings.job import JobConfig
from trainer.contract.settings.job_file import dump_job, load_job, parse_job
from trainer.contract.settings.model_source import ModelSettings
from trainer.contract.store.metrics_store import SeriesReader
from trainer.extraction.language_model import LanguageModel
from trainer.extraction.model_stream import ModelStream
from trainer.extraction.packing import ContextBatch
from trainer.extraction.readers import AHEAD, Readers
from trainer.parallel.threads import Threads, on_all
from trainer.ranks.foreground import Foreground, new_run
from trainer.sharing.saelens import origin

ROOT = Path(__file__).parents[3]
Make = Callable[..., ExtractJob]


def stream_of(job: ExtractJob, **settings: Any) -> ModelStream:
    """Return the stream for the first hook in an extraction job."""
    given = {"model": job.model.path, "hook": job.model.hooks[0], "text": job.text.path, "context": job.text.context}
    return ModelStream(**given | {"batch_tokens": job.extract.batch_tokens} | settings)


def stream_of_hooks(job: ExtractJob, hooks: Sequence[str]) -> ModelStream:
    first, *others = [stream_of(job, hook=hook) for hook in hooks]
    return first.beside(others) if others else first


def assert_same(pairs: Sequence[Pair | None], expected: Sequence[Pair]) -> None:
    """Assert that all batches of rows are bit-identical."""
    assert len(pairs) == len(expected)
    for pair, wanted in zip(pairs, expected, strict=True):
        assert pair
        assert all(map(torch.equal, pair, wanted))


def rest_of(stream: StreamSource) -> Tensor:
    rows = []
    while (pair := stream.next_rows()) is not None:
        rows.append(pair[0])
    return torch.cat(rows)


def pairs_of(stream: StreamSource) -> list[Pair]:
    pairs = []
    while (pair := stream.next_rows()) is not None:
        pairs.append(pair)
    return pairs


def in_order(rows: Tensor) -> list[list[float]]:
    return sorted(rows.tolist())


def table_of(job: ExtractJob, text: Path, n_steps: int = 200) -> dict[str, Any]:
    return {
        "data": {
            "source": "model", "model": job.model.path, "hook": "resid_post.1", "text": str(text), "context": 32,
            "batch_tokens": 256, "shuffle_tokens": 500, "held_out_tokens": 100,
        },
        "sae": {"d_sae": 64, "k": 4},
        "train": {"batch_size": 64, "n_steps": n_steps, "lr": 3e-3, "log_every": 20, "checkpoint_every": 20},
        "launch": {"gpus": "cpu"},
    }  # fmt: skip


@pytest.fixture
def long_text(tmp_path: Path) -> Path:
    """Write a text of about 18,000 tokens."""
    file = tmp_path / "long.jsonl"
    file.write_text("".join(json.dumps({"text": one}) + "\n" for one in sentences(1100)))
    return file


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_a_stream_yields_the_rows_stored_by_an_extraction(make: Make, family: str) -> None:
    job = make(family, n_tokens=10_000, max_norm=0.0, hooks=["resid_post.1"])
    run(job)
    stored = torch.cat([load_file(file)["activations"] for file in sorted(job.folder("resid_post.1").glob("*.saf*"))])
    stream = stream_of(job)
    stream.begin(0, 1, CPU)
    assert in_order(rest_of(stream)) == in_order(stored)
    assert (stream.d_in, stream.meta["hook_name"]) == (D_IN, "blocks.1.hook_resid_post")
    told = json.loads((job.folder("resid_post.1") / "meta.json").read_text())
    assert {name: told[name] for name in stream.meta} == stream.meta
    before = [0] if family == "llama" else []
    assert (stream.meta["tokens_before_text"], origin(stream.meta)["prepend_bos"]) == (before, bool(before))


def test_the_ranks_parts_together_make_up_the_stream_without_overlap(make: Make) -> None:
    whole, first, second = (stream_of(make()) for _ in range(3))
    whole.begin(0, 1, CPU)
    first.begin(0, 2, CPU)
    second.begin(1, 2, CPU)
    parts = [rest_of(first), rest_of(second)]
    assert min(map(len, parts)) > 300
    torch.testing.assert_close(
        torch.tensor(in_order(torch.cat(parts))), torch.tensor(in_order(rest_of(whole))), rtol=1e-4, atol=1e-4
    )


def test_the_state_is_json_and_can_be_restored_in_another_stream(make: Make) -> None:
    stream, other = stream_of(make()), stream_of(make())
    stream.begin(1, 2, CPU)
    for _ in range(3):
        stream.next_rows()
    state = json.loads(json.dumps(stream.state()))
    rest = rest_of(stream)
    other.begin(1, 2, CPU)
    other.restore(state)
    assert torch.equal(rest_of(other), rest)


@pytest.mark.parametrize(("size", "hook"), [(2, "resid_post.1"), (3, "mlp.0")])
def test_ranks_with_the_same_tokens_each_read_a_part_of_the_text_and_get_all_rows(
    size: int, hook: str, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    n_read: Counter[LanguageModel] = Counter()
    read = LanguageModel.rows

    def counted(self: LanguageModel, batch: ContextBatch, indices: Tensor) -> list[Tensor]:
        n_read[self] += 1
        return read(self, batch, indices)

    monkeypatch.setattr(LanguageModel, "rows", counted)
    alone, *streams = (stream_of(make(), hook=hook) for _ in range(1 + size))
    for stream in (alone, *streams):
        stream.begin(0, 1, CPU)
    whole = pairs_of(alone)
    n_batches = len(whole)
    n_read.clear()

    def read_all(group: Threads) -> tuple[list[Pair], list[Pair]]:
        stream = streams[group.index]
        stream.divide(group)
        stream.next_rows()
        state = json.loads(json.dumps(stream.state()))
        for _ in range(3):
            stream.next_rows()
        stream.restore(state)
        rest = pairs_of(stream)
        stream.restore({"batch": 0})
        return rest, pairs_of(stream)

    for rest, again in on_all(size, read_all, timeout_s=60):
        for pairs, expected in ((rest, whole[1:]), (again, whole)):
            assert len(pairs) == len(expected) > 5
            assert all(map(torch.equal, itertools.chain(*pairs), itertools.chain(*expected)))
            assert all((x is y) == (hook != "mlp.0") for x, y in pairs)
    # After the first batch, the remaining text is read twice, each time split across the ranks.
    # Before these two passes, each rank reads at most two batches.
    of_each = [n for n in n_read.values() if n]
    assert len(of_each) == size
    assert max(of_each) <= 2 * -(-n_batches // size) + 2


@pytest.mark.parametrize("hooks", [["resid_post.1"], ["resid_post.0", "resid_post.1"], ["mlp.0"]])
def test_models_on_separate_devices_produce_the_same_rows_in_order(make: Make, hooks: list[str]) -> None:
    alone, several = (stream_of_hooks(make(), hooks) for _ in range(2))
    several.own_devices = [CPU] * 3
    for stream in (alone, several):
        stream.begin(0, 1, CPU)
    whole, others = pairs_of(alone), pairs_of(several)
    assert_same(others, whole)
    assert all((x is y) == (hooks != ["mlp.0"]) for x, y in others)
    assert several.next_rows() is None
    for n in (0, 4, 1):
        several.restore({"batch": n})
        assert_same([several.next_rows() for _ in range(2)], whole[n : n + 2])
        assert several.state() == {"batch": n + 2}
    assert_same(pairs_of(several), whole[3:])


def test_ranks_that_share_the_reading_also_split_their_parts_across_their_devices(make: Make) -> None:
    alone, *streams = (stream_of(make()) for _ in range(3))
    for stream in streams:
        stream.own_devices = [CPU] * 2
    for stream in (alone, *streams):
        stream.begin(0, 1, CPU)
    whole = pairs_of(alone)

    def read_all(group: Threads) -> tuple[list[Pair], list[Pair]]:
        stream = streams[group.index]
        stream.divide(group)
        first = pairs_of(stream)
        stream.restore({"batch": 3})
        return first, pairs_of(stream)

    for first, again in on_all(2, read_all, timeout_s=60):
        assert_same(first, whole)
        assert_same(again, whole[3:])


def test_models_on_separate_devices_read_ahead_only_up_to_a_limit(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    n_devices = 2
    n_read, is_ahead = Counter[LanguageModel](), threading.Event()
    read = LanguageModel.rows

    def counted(self: LanguageModel, batch: ContextBatch, indices: Tensor) -> list[Tensor]:
        rows = read(self, batch, indices)
        n_read[self] += 1
        if n_read.total() == 1 + n_devices * AHEAD:
            is_ahead.set()
        return rows

    monkeypatch.setattr(LanguageModel, "rows", counted)
    stream = stream_of(make())
    stream.own_devices = [CPU] * n_devices
    stream.begin(0, 1, CPU)
    stream.next_rows()
    assert is_ahead.wait(60)
    # Restoring a position stops the reader threads, so the counts stop changing.
    stream.restore({"batch": 0})
    assert sorted(n_read.values()) == [AHEAD, 1 + AHEAD]
    assert not [thread for thread in threading.enumerate() if thread.name == "model-reader"]


def test_an_error_in_one_model_is_raised_only_once_and_after_all_earlier_rows(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone, several = (stream_of(make()) for _ in range(2))
    several.own_devices = [CPU] * 2
    for stream in (alone, several):
        stream.begin(0, 1, CPU)
    whole = pairs_of(alone)
    first_of_fourth = whole[3][0][0]
    read = LanguageModel.rows

    def failing(self: LanguageModel, batch: ContextBatch, indices: Tensor) -> list[Tensor]:
        rows = read(self, batch, indices)
        if torch.equal(rows[0][0], first_of_fourth):
            raise UserError("text.column: contains the token id 7")
        return rows

    monkeypatch.setattr(LanguageModel, "rows", failing)
    assert_same([several.next_rows() for _ in range(3)], whole[:3])
    with pytest.raises(UserError, match="contains the token id 7"):
        several.next_rows()
    assert several.next_rows() is None
    monkeypatch.setattr(LanguageModel, "rows", read)
    several.restore({"batch": 3})
    assert_same(pairs_of(several), whole[3:])


def test_running_out_of_memory_on_a_model_only_device_does_not_blame_the_sae(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    def out_of_memory(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    stream = stream_of(make())
    stream.own_devices = [CPU]
    stream.begin(0, 1, CPU)
    monkeypatch.setattr(LanguageModel, "rows", out_of_memory)
    with pytest.raises(UserError, match=r"^data.batch_tokens: the language model's device has too little memory; use"):
        stream.next_rows()


def test_an_error_in_the_text_is_raised_only_after_all_earlier_rows(make: Make) -> None:
    def cut_off() -> Iterator[int]:
        yield from range(5)
        raise UserError("text.path: cannot be read")

    readers = Readers([lambda number: number] * 2, cut_off())  # type: ignore[arg-type, list-item]
    assert [readers.next() for _ in range(5)] == [*range(5)]
    with pytest.raises(UserError, match=r"^text.path: cannot be read$"):
        readers.next()
    assert readers.next() is None


@pytest.mark.slow
def test_reading_threads_exit_with_their_owner_and_keep_no_process_alive() -> None:
    readers = Readers([lambda number: number], itertools.count())  # type: ignore[arg-type, list-item]
    readers.next()
    threads = list(readers._threads)
    del readers
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    code = (
        "import threading; from trainer.extraction.readers import Readers\n"
        "readers = Readers([lambda number: number and threading.Event().wait()], iter(range(9))); readers.next()"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=60).returncode == 0


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["tensor", "sweep"])
def test_a_run_resumes_to_the_same_weights_after_a_reading_rank_is_killed(
    mode: str, make: Make, long_text: Path, tmp_path: Path
) -> None:
    table = table_of(make(), long_text, n_steps=60)
    table["launch"]["gpus"] = "cpu:2"
    table |= {"parallel": {"mode": mode}, "train": table["train"] | {"deterministic": True}}
    table["sae"]["k"] = [2, 4]
    (file := tmp_path / "job.toml").write_text(tomli_w.dumps(table))
    trainer = [sys.executable, "-m", "trainer"]
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    subprocess.run([*trainer, "run", str(file), "--out", str(whole)], cwd=ROOT, check=True, capture_output=True)
    with subprocess.Popen(
        [*trainer, "run", str(file), "--out", str(killed)], cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    ) as process:
        while not [*killed.glob("checkpoints/step-*/state.json")]:
            assert process.poll() is None
            time.sleep(0.01)
        psutil.Process(process.pid).children()[1].kill()
        _, told = process.communicate(timeout=60)
    # The rest of the message depends on the machine's count of OOM kills, which other tests may also increase.
    assert b"rank 1 was killed" in told
    subprocess.run([*trainer, "resume", str(killed)], cwd=ROOT, check=True, capture_output=True)
    tensors = [load_file(one / "checkpoints" / "step-00000060" / "tensors.safetensors") for one in (whole, killed)]
    assert all(torch.equal(tensor, tensors[1][name]) for name, tensor in tensors[0].items())


@pytest.mark.slow
def test_ranks_with_model_gpus_learn_the_same_weights_as_ranks_without_them(
    make: Make, long_text: Path, tmp_path: Path
) -> None:
    table = table_of(make(), long_text, n_steps=40)
    table |= {"parallel": {"mode": "tensor"}, "train": table["train"] | {"deterministic": True}}
    weights = []
    for model_gpus in (0, 4):
        table["launch"]["gpus"] = f"auto:{2 + model_gpus}"
        job, problems = parse_job(table | {"data": table["data"] | {"model_gpus": model_gpus}})
        assert job, problems
        run_dir = tmp_path / f"{model_gpus}"
        # CPU processes stand in for GPUs.
        spec = RankSpec(run_dir, run_dir / "sae", attempt=1, world_size=2, device="cpu", model_gpus=model_gpus)
        with new_run(job, run_dir) as lock:
            assert Foreground(job, spec, lock).run() == EXIT_FINISHED
        weights.append(load_file(run_dir / "sae" / "sae_weights.safetensors"))
    assert all(torch.equal(tensor, weights[1][name]) for name, tensor in weights[0].items())
    log = (tmp_path / "4" / "logs" / "rank0.log").read_text()
    assert "the language model has 4 of 6 GPUs to itself; each reads one of 4 parts of the text, for " in log


@pytest.mark.slow
def test_a_killed_run_resumes_at_its_position_in_the_text(make: Make, long_text: Path, tmp_path: Path) -> None:
    file = tmp_path / "job.toml"
    file.write_text(tomli_w.dumps(table_of(make(), long_text)))
    trainer = [sys.executable, "-m", "trainer"]
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    subprocess.run([*trainer, "run", str(file), "--out", str(whole)], cwd=ROOT, check=True, capture_output=True)
    with subprocess.Popen(
        [*trainer, "run", str(file), "--out", str(killed)], cwd=ROOT, stdout=subprocess.DEVNULL, start_new_session=True
    ) as process:
        while not [*killed.glob("checkpoints/step-*/state.json")]:
            assert process.poll() is None
            time.sleep(0.01)
        os.killpg(process.pid, signal.SIGKILL)
    subprocess.run([*trainer, "resume", str(killed)], cwd=ROOT, check=True, capture_output=True)
    with contextlib.closing(SeriesReader(killed / "metrics.db")) as reader:
        told = [event.message for event in reader.events() if event.kind == "stream"]
    assert told == [f"reading the held-out rows and a sample, the first rows of {long_text}"] * 2
    tensors = [load_file(one / "checkpoints" / "step-00000200" / "tensors.safetensors") for one in (whole, killed)]
    assert all(torch.equal(tensor, tensors[1][name]) for name, tensor in tensors[0].items())


@pytest.mark.slow
def test_a_sweep_reads_the_text_once(
    make: Make, make_trainer: Callable[..., Any], long_text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    n_read = 0
    read = LanguageModel.rows

    def counted(self: LanguageModel, batch: ContextBatch, indices: Tensor) -> list[Tensor]:
        nonlocal n_read
        n_read += batch.ids.size
        return read(self, batch, indices)

    monkeypatch.setattr(LanguageModel, "rows", counted)
    table = table_of(make(), long_text)
    table["sae"]["k"] = [2, 4, 8]
    job, problems = parse_job(table)
    assert job, problems
    stream = stream_of(make(), text=str(long_text))
    stream.begin(0, 1, CPU)
    rest_of(stream)
    n_all, n_read = n_read, 0
    make_trainer(job).run()
    # The sample covers the entire text, so the text is not reread for the sample.
    assert n_read == n_all > 200 * 64


@pytest.mark.slow
def test_a_text_that_ends_before_the_run_does_is_reported(make: Make, corpus: Path, tmp_path: Path, capsys) -> None:
    from trainer.cli import main

    (file := tmp_path / "job.toml").write_text(tomli_w.dumps(table_of(make(), corpus)))
    assert main(["run", str(file), "--out", str(tmp_path / "run")]) == 1
    assert (
        f"train.n_tokens: {corpus} ran out of rows before the end of the run; start a new run with fewer tokens"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"text": None}, "data.text: is missing; set it or data.dataset"),
        ({"dataset": "wiki"}, "data.text: is set together with data.dataset; set only one of them"),
        ({"text": "/nowhere"}, "data.text: there is nothing at /nowhere"),
        ({"model": "/nowhere"}, "data.model: there is nothing at /nowhere"),
        ({"model": "/"}, "data.model: / has no config.json; give the folder of a model, or its .gguf file"),
        ({"text": __file__}, f"data.text: {__file__} must end in .txt, .md,"),
        ({"hook": "blocks.1.hook_z"}, 'data.hook: "blocks.1.hook_z" has no site hook_z; the known sites are'),
        ({"hook": "h.0.mlp"}, "data.d_in: the files of "),
        ({"model": "nobody/has-this"}, "data.d_in: the files of nobody/has-this do not give the width of "),
        ({"context": 65}, "data.context: must be at most 64, the model's context length, not 65"),
        ({"skip_first": 32}, "data.skip_first: must be below data.context, 32, not 32"),
    ],
)
def test_bad_settings_are_reported_before_a_run(make: Make, changes: dict[str, Any], problem: str) -> None:
    job = make()
    given = {"model": job.model.path, "hook": "resid_post.1", "text": job.text.path, "context": 32}
    with pytest.raises(JobFileError) as error:
        ModelSettings(**given | changes).shape()
    assert str(error.value).startswith(problem)


def test_a_d_in_that_differs_from_the_hooks_width_is_refused(make: Make) -> None:
    stream = stream_of(make(), hook="h.0.mlp", d_in=7)
    stream.begin(0, 1, CPU)
    with pytest.raises(UserError, match=r"^data.d_in: a row of h.0.mlp has 32 values, not 7$"):
        stream.next_rows()


def test_paths_relative_to_the_job_file_are_resolved_and_hub_names_are_kept(make: Make, tmp_path: Path) -> None:
    (tmp_path / "texts.txt").write_text("a cat sat")
    table = table_of(make(), Path("texts.txt"))
    table["data"]["model"] = "somebody/some-model"
    (file := tmp_path / "job.toml").write_text(tomli_w.dumps(table))
    settings = load_job(file).data.settings
    assert isinstance(settings, ModelSettings)
    assert (settings.text, settings.model) == (str(tmp_path / "texts.txt"), "somebody/some-model")


def test_memory_and_time_estimates_include_the_language_model(make: Make, corpus: Path) -> None:
    job, problems = parse_job(table_of(make(), corpus))
    assert job, problems
    assert parse_job(table_from(job))[0] == job
    stream = Workload(job, 1, job.data_shape(), CPU_PROCESS)
    stored = Workload(with_stored_data(job), 1, job.data_shape(), CPU_PROCESS)
    n_parameters = sum(
        tensor.numel() for tensor in load_file(Path(job.data.settings.model) / "model.safetensors").values()
    )  # type: ignore[attr-defined]
    more, less = estimate(stream), estimate(stored)
    assert more.weights - less.weights == 4 * n_parameters
    assert more.activations - less.activations > 4 * 500 * D_IN
    speeds = assumed_speeds(CPU_PROCESS, "fp32")
    assert step_time(stream, speeds).passes_s > step_time(stored, speeds).passes_s


@pytest.mark.parametrize(
    ("mode", "nodes", "n_parts"), [("ddp", 1, 4), ("tensor", 1, 4), ("tensor", 2, 1), ("ddp", 2, 4)]
)
def test_ranks_on_one_machine_split_the_text_and_the_plan_says_so(
    mode: str, nodes: int, n_parts: int, make: Make, corpus: Path
) -> None:
    table = table_of(make(), corpus) | {"parallel": {"mode": mode}}
    job, problems = parse_job(table)
    assert job, problems
    work = Workload(job.replace("launch", nodes=nodes), 4, job.data_shape(), CPU_PROCESS)
    speeds = assumed_speeds(CPU_PROCESS, "fp32")
    # Each of the four ranks reads either a quarter of a step's tokens or all of them.
    flops = job.data.settings.flops_per_token() * work.tokens_per_step / n_parts
    assert text_parts(work) == n_parts
    assert source_s(work, speeds) == pytest.approx(flops / speeds.flops_per_s)
    plan = Plan(mode, 4, 1, 256, 64, 1, step_s=1.0, needs_bytes=1, model_share=0.25, text_parts=n_parts)
    which = "the whole text" if n_parts == 1 else "one of 4 parts of the text"
    assert plan.sentence() == f"{mode} on 4; every rank runs the language model, on {which}: 25 % of a step"
    apart = msgspec.structs.replace(
        plan, ranks=2, reason="ddp on 2", model_gpus=2, text_parts=2, model_why="so it fits"
    )
    assert apart.sentence() == (
        "ddp on 2; the language model has 2 of 4 GPUs to itself: so it fits; each reads one of 2 parts of the text, "
        "for 25 % of a step"
    )
    beside = msgspec.structs.replace(plan, model_why="on 2 of 4 GPUs alone it would not fit")
    assert beside.sentence() == f"{plan.sentence()}; on 2 of 4 GPUs alone it would not fit"


def with_stored_data(job: JobConfig) -> JobConfig:
    stored, problems = parse_job(table_from(job) | {"data": {"source": "synthetic", "d_in": D_IN}})
    assert stored, problems
    return stored


def table_from(job: JobConfig) -> dict[str, Any]:
    return tomllib.loads(dump_job(job))
