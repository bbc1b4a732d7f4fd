"""Tests that training at several hooks produces the same SAEs as one run per hook, but reads the text only once."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import tomli_w
import torch
from safetensors.torch import load_file, save_file
from support.combinations import slow_unless
from support.extractions import CPU, run
from support.saes import peer
from support.tiny_models import D_IN, sentences

from trainer.activations.open_source import open_source
from trainer.cli import main
from trainer.contract.errors import JobFileError
from trainer.contract.planning.hardware import CPU as CPU_PROCESS
from trainer.contract.planning.hardware import assumed_speeds
from trainer.contract.planning.memory import estimate
from trainer.contract.planning.step_time import step_time
from trainer.contract.planning.workload import Workload
from trainer.contract.runs.checkpoint_manifest import read_state
from trainer.contract.settings.extract import ExtractJob
from trainer.contract.settings.hooks import ends_of
from trainer.contract.settings.job import JobConfig
from trainer.contract.settings.job_file import members, parse_job
from trainer.contract.settings.language import TextSettings
from trainer.contract.store.metrics_store import SeriesReader
from trainer.evaluation.evaluate_folder import cards_in
from trainer.evaluation.evaluate_run import evaluations_of
from trainer.evaluation.exported import read_exported
from trainer.evaluation.spliced import SplicedModel
from trainer.extraction.language_model import LanguageModel
from trainer.extraction.packing import ContextBatch
from trainer.saes.sparse_acts import DenseActs
from trainer.training.export_checkpoint import export_checkpoint

ROOT = Path(__file__).parents[3]
# One hook name is in this project's notation, and the other is in TransformerLens's.
HOOKS = ["resid_post.0", "blocks.1.hook_resid_post"]
LABELS = ["hook=L0", "hook=L1"]
TRANSCODERS = ["mlp.0", "mlp.1"]
Make = Callable[..., ExtractJob]


@pytest.fixture(scope="module")
def long_text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a text of about 8,000 tokens."""
    file = tmp_path_factory.mktemp("text") / "long.jsonl"
    file.write_text("".join(json.dumps({"text": one}) + "\n" for one in sentences(500)))
    return file


def table_of(data: dict[str, Any], n_steps: int = 40, **train: Any) -> dict[str, Any]:
    return {
        "data": {"held_out_tokens": 100} | data,
        "sae": {"d_sae": 64, "k": 4, "dead_after_tokens": 400, "resample_every_tokens": 640},
        "train": {"batch_size": 64, "n_steps": n_steps, "lr": 3e-3, "log_every": 10, "checkpoint_every": 20} | train,
        "launch": {"gpus": "cpu"},
    }


def streamed(job: ExtractJob, text: Path, hook: Any) -> dict[str, Any]:
    """Return data settings for streaming rows from an extraction job's model."""
    sizes = {"context": 32, "batch_tokens": 256, "shuffle_tokens": 500}
    return {"source": "model", "model": job.model.path, "hook": hook, "text": str(text)} | sizes


def parsed(table: dict[str, Any]) -> JobConfig:
    job, problems = parse_job(table)
    assert job, problems
    return job


def weights(folder: Path) -> dict[str, torch.Tensor]:
    (file,) = folder.glob("*.safetensors")
    return load_file(file)


def hook_name(folder: Path) -> str:
    metadata = json.loads((folder / "cfg.json").read_text())["metadata"]
    return str((metadata | metadata.get("as_extracted", {}))["hook_name"])


@pytest.fixture
def count_forwards(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Count the contexts that models read. Return a function that returns the count and resets it."""
    n_read = [0]
    read = LanguageModel.rows

    def counted(self: LanguageModel, batch: ContextBatch, indices: torch.Tensor) -> list[torch.Tensor]:
        n_read[0] += len(batch.ids)
        return read(self, batch, indices)

    def take() -> int:
        n, n_read[0] = n_read[0], 0
        return n

    monkeypatch.setattr(LanguageModel, "rows", counted)
    return take


@pytest.fixture
def stored(make: Make, long_text: Path) -> Path:
    """Extract rows from both hooks and from the inputs and outputs of two MLPs, and return the output folder."""
    ends = [f"mlp_{end}.{layer}" for layer in (0, 1) for end in ("in", "out")]
    job = make(n_tokens=3000, text=long_text, hooks=[*HOOKS, *ends], shard_rows=1000)
    run(job)
    return Path(job.extract.output)


@pytest.mark.parametrize(
    ("source", "hooks"),
    slow_unless(
        lambda source, hooks: (source == "model") == (hooks is HOOKS),
        [(source, hooks) for source in ("model", "shards") for hooks in (HOOKS, TRANSCODERS)],
    ),
)
def test_each_sae_equals_an_sae_trained_at_its_hook_alone(
    source: str,
    hooks: list[str],
    make: Make,
    make_trainer: Callable[..., Any],
    long_text: Path,
    request: pytest.FixtureRequest,
    tmp_path: Path,
    kept: Any,
) -> None:
    def data(hook: Any) -> dict[str, Any]:
        if source == "model":
            return streamed(make(), long_text, hook)
        return {"path": str(request.getfixturevalue("stored")), "hook": hook}

    both = make_trainer(parsed(table_of(data(hooks))), kept, output=tmp_path / "both")
    assert both.run()
    for hook, label in zip(hooks, LABELS, strict=True):
        alone_kept = type(kept)()
        job = parsed(table_of(data(hook)))
        alone = make_trainer(job, alone_kept, output=tmp_path / label, checkpoints=tmp_path / f"{label}-checkpoints")
        assert alone.run()
        together, single = weights(tmp_path / "both" / label), weights(tmp_path / label)
        assert together.keys() == single.keys()
        assert all(torch.equal(tensor, single[name]) for name, tensor in together.items())
        for name in ("loss", "fvu", "heldout_fvu", "heldout_l0", "outlier_fraction"):
            assert kept.curve(f"{name}@{label}") == alone_kept.curve(name), name
        assert hook_name(tmp_path / "both" / label) == hook_name(tmp_path / label)
    assert not torch.equal(*(weights(tmp_path / "both" / label)["W_dec"] for label in LABELS))
    assert "resampled" in {kind for kind, _, _ in kept.events}


def test_a_batch_of_text_is_read_once_for_all_hooks(
    make: Make, make_trainer: Callable[..., Any], long_text: Path, count_forwards: Callable[[], int]
) -> None:
    counts = []
    for hook in ("resid_post.1", ["resid_post.0", "resid_post.1", "mlp_out.1"], TRANSCODERS):
        make_trainer(parsed(table_of(streamed(make(), long_text, hook), 20))).run()
        counts.append(count_forwards())
    assert counts[0] == counts[1] == counts[2] > 20 * 64 / 32


def test_reading_a_streams_first_rows_is_reported_so_that_it_is_not_a_stall(
    make: Make, make_trainer: Callable[..., Any], long_text: Path, kept: Any
) -> None:
    make_trainer(parsed(table_of(streamed(make(), long_text, "resid_post.0"), 3)), kept).run()
    before = kept.phases[: kept.phases.index("training")]
    n_rows = [int(phase.removeprefix("reading rows, ").replace(",", "")) for phase in before if "reading" in phase]
    assert len(n_rows) > 2
    assert n_rows == sorted({*n_rows})


def test_a_sweep_trains_all_its_saes_at_each_hook(
    make: Make, make_trainer: Callable[..., Any], long_text: Path, tmp_path: Path
) -> None:
    table = table_of(streamed(make(), long_text, "blocks.0-1.hook_resid_post"), 4)
    table["sae"]["k"] = [2, 4]
    job = parsed(table)
    labels = ["hook=L0,k=2", "hook=L0,k=4", "hook=L1,k=2", "hook=L1,k=4"]
    assert list(members(job)) == labels
    make_trainer(job).run()
    names = [f"blocks.{layer}.hook_resid_post" for layer in (0, 0, 1, 1)]
    assert [hook_name(tmp_path / "sae" / label) for label in labels] == names


@pytest.mark.slow
def test_a_killed_run_at_two_hooks_resumes_to_the_same_weights(make: Make, long_text: Path, tmp_path: Path) -> None:
    file = tmp_path / "job.toml"
    file.write_text(tomli_w.dumps(table_of(streamed(make(), long_text, HOOKS), 60, checkpoint_every=10)))
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
    for file_name in ("tensors.safetensors", "state.json"):
        both = [(one / "checkpoints" / "step-00000060" / file_name).read_bytes() for one in (whole, killed)]
        assert both[0] == both[1], file_name
    for label in LABELS:
        assert (killed / "sae" / label / "card.json").exists()
    with contextlib.closing(SeriesReader(killed / "metrics.db")) as reader:
        assert {"fvu@hook=L0", "fvu@hook=L1", "heldout_fvu@hook=L1"} <= {*reader.latest()}


@pytest.mark.slow
def test_the_checkpoint_and_the_report_cards_record_the_hook_for_each_sae(
    stored: Path, make_trainer: Callable[..., Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = [f"blocks.{layer}.hook_resid_post" for layer in (0, 1)]
    (file := tmp_path / "job.toml").write_text(
        tomli_w.dumps(table_of({"path": str(stored), "hook": HOOKS}) | {"name": "both"})
    )
    assert main(["run", str(file), "--out", str(tmp_path / "run")]) == 0
    capsys.readouterr()
    state = read_state(tmp_path / "run" / "checkpoints" / "step-00000040")
    assert [state.origin_of(label)["hook_name"] for label in LABELS] == names
    export_checkpoint(tmp_path / "run", tmp_path / "out", form="saelens", best=False, force=False)
    assert [hook_name(tmp_path / "out" / label) for label in LABELS] == names
    at_end = [json.loads((tmp_path / "run" / "sae" / label / "card.json").read_text()) for label in LABELS]
    again = [msgspec.to_builtins([*one.cards][-1]) for one in evaluations_of(tmp_path / "run", CPU)]
    by_folder = [msgspec.to_builtins(one.card) for one in cards_in(tmp_path / "run" / "sae", CPU)]
    one_folder = [msgspec.to_builtins(next(cards_in(tmp_path / "run" / "sae" / label, CPU)).card) for label in LABELS]
    for name, *cards in zip(names, at_end, again, by_folder, one_folder, strict=True):
        assert [card["origin"]["hook_name"] for card in cards] == [name] * 4
        for card in cards:
            assert card["figures"]["fvu"] == pytest.approx(cards[0]["figures"]["fvu"], rel=1e-3)
            assert card["data"]["gamma"] == pytest.approx(cards[0]["data"]["gamma"], rel=1e-3)
    assert at_end[0]["data"]["gamma"] != pytest.approx(at_end[1]["data"]["gamma"], rel=1e-2)


@pytest.mark.slow
def test_transcoders_from_one_run_form_a_set_for_circuit_tracer(
    stored: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    table = table_of({"path": str(stored), "hook": "mlp.0-1"}, 20)
    table["sae"] = {"architecture": "jumprelu", "d_sae": 64, "skip": True}
    (file := tmp_path / "job.toml").write_text(tomli_w.dumps(table))
    assert main(["run", str(file), "--out", str(tmp_path / "run")]) == 0
    export = ["export", str(tmp_path / "run"), "--out", str(tmp_path / "set"), "--format", "circuit-tracer"]
    assert main(export) == 0
    assert {one.name for one in (tmp_path / "set").iterdir()} == {
        "config.yaml", "layer_0.safetensors", "layer_1.safetensors",
    }  # fmt: skip
    config = (tmp_path / "set" / "config.yaml").read_text()
    assert 'feature_input_hook: "mlp.hook_in"' in config
    assert 'feature_output_hook: "hook_mlp_out"' in config
    tracer = peer(monkeypatch, "circuit_tracer.transcoder.single_layer_transcoder")
    files = {layer: str(tmp_path / "set" / f"layer_{layer}.safetensors") for layer in (0, 1)}
    hooks = {"feature_input_hook": "mlp.hook_in", "feature_output_hook": "hook_mlp_out"}
    loaded = tracer.load_transcoder_set(files, scan="", device=torch.device("cpu"), **hooks)
    x = torch.randn(50, D_IN)
    for layer, label in enumerate(LABELS):
        own = read_exported(tmp_path / "run" / "sae" / label, torch.device("cpu")).reconstruct(x)[1]
        torch.testing.assert_close(loaded[layer](x), own, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_the_spliced_loss_is_measured_in_the_model_that_the_run_streams_from(
    make: Make, long_text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (file := tmp_path / "job.toml").write_text(tomli_w.dumps(table_of(streamed(make(), long_text, TRANSCODERS))))
    assert main(["run", str(file), "--out", str(tmp_path / "run")]) == 0
    capsys.readouterr()
    assert main(["eval", str(tmp_path / "run"), "--model", "auto", "--device", "cpu", "--json"]) == 0
    told = [card["spliced"] for card in json.loads(capsys.readouterr().out.splitlines()[-1])["cards"]]
    for hook, spliced in zip(TRANSCODERS, told, strict=True):
        ends = list(ends_of(hook))
        job = msgspec.structs.replace(make(hooks=ends), text=TextSettings(path=str(long_text), context=32))
        clean = SplicedModel(job, ends[0], CPU, ends[1]).measure(lambda x, y: (DenseActs(x), torch.zeros_like(y)))
        assert (spliced["n_tokens"], spliced["text"]) == (clean.n_tokens, str(long_text))
        assert spliced["ce"] == pytest.approx(clean.ce, rel=1e-5)
        assert spliced["kl_with_zeros"] == pytest.approx(clean.kl_with_zeros, rel=1e-4)
        assert spliced["kl_with_sae"] != pytest.approx(spliced["kl_with_zeros"], rel=1e-3)
        assert not spliced["is_unseen"]


def write_hooks(folder: Path, **rows: torch.Tensor) -> Path:
    for name, x in rows.items():
        (folder / name).mkdir(parents=True)
        save_file({"activations": x}, folder / name / "a.safetensors")
    return folder


def test_a_row_that_is_an_outlier_at_one_hook_is_kept_at_the_other(
    make_trainer: Callable[..., Any], tmp_path: Path, kept: Any
) -> None:
    first, second = torch.randn(2, 2000, 16).unbind()
    first[::40] *= 1000
    data = {"path": str(write_hooks(tmp_path / "acts", a=first, b=second)), "hook": ["a", "b"]}
    table = table_of(data, 20)
    table["train"]["deterministic"] = True
    trainer = make_trainer(parsed(table), kept)
    seen: dict[int, list[torch.Tensor]] = {0: [], 1: []}
    for learner in trainer.learners.values():
        accumulate = learner.accumulate

        def note(x: torch.Tensor, *rest: Any, own: Any = (learner.hook, accumulate), **named: Any) -> None:
            seen[own[0]].append(x)
            own[1](x, *rest, **named)

        learner.accumulate = note
    trainer.run()
    of_first, of_second = (torch.cat(seen[hook]) for hook in (0, 1))
    assert of_first.shape == of_second.shape == (20 * 64, 16)
    assert of_first.norm(dim=1).max() < 100
    # Both hooks' rows belong to the same token, except where the first hook's row was replaced.
    indices = {tuple(row): place for place, row in enumerate(second.tolist())}
    tokens = torch.tensor([indices[tuple(row)] for row in of_second.tolist()])
    own = torch.tensor([token % 40 != 0 for token in tokens.tolist()])
    assert torch.equal(of_first[own], first[tokens[own]])
    assert not own.all()
    assert 0.01 < kept.curve("outlier_fraction@hook=a")[-1] < 0.04
    assert kept.curve("outlier_fraction@hook=b")[-1] == 0
    assert kept.curve("outlier_fraction") == kept.curve("outlier_fraction@hook=a")
    ((_, _, told),) = [event for event in kept.events if event[0] == "outliers"]
    assert " % of a sample of 1,900 rows at a have a norm of more than 10 times the median" in told


def test_a_non_finite_row_at_one_hook_is_reported(make_trainer: Callable[..., Any], tmp_path: Path) -> None:
    first, second = torch.randn(2, 2000, 16).unbind()
    second[17] = torch.nan
    folder = write_hooks(tmp_path / "acts", a=first, b=second)
    trainer = make_trainer(parsed(table_of({"path": str(folder), "hook": ["a", "b"], "held_out_tokens": 0}, 40)))
    assert trainer.data.bad_row(0, 40 * 64, 64) == (
        f"{folder}/a and {folder}/b contains NaN or infinite values in row 17 of a.safetensors, or in the same row of "
        "another hook"
    )


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        ({"hook": ["a", "c"]}, "data.hook: c has 2,000 rows of 8 dimensions, and a 2,000 rows of 16 dimensions; train"),
        (
            {"hook": ["a", "mlp.0"]},
            "data.hook: mlp.0 has 2,000 rows of 16 dimensions with targets of 16, and a 2,000 rows",
        ),
        ({"hook": "mlp.1"}, "data.path: there is nothing at {path}/mlp_out.1"),
        ({"hook": "mlp.2"}, "data.path: {path}/mlp_out.2 has 1,999 rows, but {path}/mlp_in.2 has 2,000; every row"),
        ({"hook": ["mlp_in.0", "mlp.0"]}, "data.hook: mlp.0 has 2,000 rows of 16 dimensions with targets of 16, and"),
        ({"hook": ["a", "d"]}, "data.hook: d has 1,999 rows of 16 dimensions, and a 2,000 rows of 16 dimensions"),
        ({"hook": ["a", "e"]}, "data.path: there is nothing at {path}/e"),
        ({"hook": "../a"}, 'data.hook: "../a" must be "SITE.LAYER" with SITE one of'),
        (
            {"hook": "a", "target_path": "b"},
            "data.hook: cannot be combined with data.target_path; leave out one of them",
        ),
    ],
)
def test_incompatible_hooks_produce_a_one_sentence_error(data: dict[str, Any], problem: str, tmp_path: Path) -> None:
    x = torch.randn(2000, 16)
    path = write_hooks(
        tmp_path / "acts",
        a=x,
        b=x,
        c=x[:, :8].contiguous(),
        d=x[1:],
        **{"mlp_in.0": x, "mlp_out.0": x, "mlp_in.1": x, "mlp_in.2": x, "mlp_out.2": x[1:]},
    )
    with pytest.raises(JobFileError) as error:
        open_source(parsed(table_of({"path": str(path)} | data)))
    assert str(error.value).startswith(problem.format(path=path))


def test_a_layer_out_of_range_is_refused_before_the_model_is_loaded(make: Make, long_text: Path) -> None:
    job = parsed(table_of(streamed(make(), long_text, "resid_post.1-3")))
    with pytest.raises(JobFileError, match=r'^data.hook: .* has no "resid_post.3"; it has 3 layers'):
        job.data_shape()


def test_a_folder_is_found_by_any_name_of_its_hook(stored: Path) -> None:
    for names in (["blocks.0.hook_resid_post", "resid_post.1"], HOOKS):
        source = open_source(parsed(table_of({"path": str(stored), "hook": names})))
        assert source.place == f"{stored}/resid_post.0 and {stored}/blocks.1.hook_resid_post"
        assert [source.of_hook(hook).meta["hook"] for hook in (0, 1)] == ["resid_post.0", "resid_post.1"]


def test_estimates_count_the_rows_from_all_hooks_but_only_one_forward_pass(make: Make, long_text: Path) -> None:
    def work(hook: Any) -> Workload:
        job = parsed(table_of(streamed(make(), long_text, hook)))
        return Workload(job, 1, job.data_shape(), CPU_PROCESS)

    one, two, three = (work(hook) for hook in ("resid_post.2", ["resid_post.0", "resid_post.2"], "resid_post.0-2"))
    more, most = (estimate(work).activations for work in (two, three))
    # Memory grows by the size of a shuffle buffer, twice the rows from a forward pass, and one batch.
    assert most - more >= 4 * D_IN * (500 + 2 * 256 + 64)
    assert estimate(two).weights - estimate(one).weights == estimate(three).weights - estimate(two).weights
    speeds = assumed_speeds(CPU_PROCESS, "fp32")
    times = [step_time(work, speeds).passes_s for work in (one, two, three)]
    of_forward = times[0] - step_time(work("resid_post.0"), speeds).passes_s
    assert of_forward > 0
    assert times[2] - times[1] == pytest.approx(times[1] - times[0])


def test_memory_estimates_count_both_the_input_and_the_output_rows_of_an_mlp(make: Make, long_text: Path) -> None:
    def activations(hook: str) -> int:
        job = parsed(table_of(streamed(make(), long_text, hook)))
        return estimate(Workload(job, 1, job.data_shape(), CPU_PROCESS)).activations

    assert activations("mlp.1") - activations("mlp_in.1") >= 4 * D_IN * (500 + 2 * 256 + 64)
