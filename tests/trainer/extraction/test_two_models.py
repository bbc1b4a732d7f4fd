"""Tests of crosscoders over two language models, streamed and stored."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tomli_w
import torch
from safetensors.torch import load_file, save_file
from support.extractions import CPU, extraction_job, run, run_ranks
from support.tiny_models import CHAT, D_IN, make_tokenizer, sentences
from torch import Tensor
from torch.nn.functional import cosine_similarity, normalize

from trainer.activations.open_source import open_source
from trainer.contract.errors import JobFileError, UserError
from trainer.contract.planning.hardware import CPU as CPU_PROCESS
from trainer.contract.planning.memory import estimate
from trainer.contract.planning.workload import Workload
from trainer.contract.runs.evaluation_time import language_model
from trainer.contract.settings.job import JobConfig
from trainer.contract.settings.job_file import members, parse_job
from trainer.evaluation import evaluate_run
from trainer.evaluation.contexts import texts_of
from trainer.parallel.threads import Threads, on_all

ROOT = Path(__file__).parents[3]
# The neuron whose output is edited in the second model, chosen because it fires on a twelfth of the tokens, and the
# norm of the change relative to the neuron's activation.
NEURON, CHANGE = 14, 8.0


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("text") / "text.jsonl"
    file.write_text("".join(json.dumps({"text": one}) + "\n" for one in sentences(3000)))
    return file


@pytest.fixture
def edited(tiny: Callable[[str], Path], tmp_path: Path) -> Callable[[Callable[[dict[str, Tensor]], object]], Path]:
    """Return a function that writes a copy of the tiny GPT-2 with changed weights."""

    def edit(change: Callable[[dict[str, Tensor]], object]) -> Path:
        shutil.copytree(tiny("gpt2"), copy := tmp_path / "edited")
        change(weights := load_file(copy / "model.safetensors"))
        save_file(weights, copy / "model.safetensors", {"format": "pt"})
        return copy

    return edit


def direction() -> Tensor:
    return normalize(torch.randn(D_IN, generator=torch.Generator().manual_seed(1)), dim=0)


def edit_row(weights: dict[str, Tensor]) -> None:
    weights["h.1.mlp.c_proj.weight"][NEURON] += CHANGE * direction()


def edit_token(weights: dict[str, Tensor]) -> None:
    """Make the rows of one token outliers."""
    weights["wte.weight"][token_of(" dog")] *= 1000


def token_of(word: str) -> int:
    (token,) = make_tokenizer("gpt2")(word)["input_ids"]
    return int(token)


def table(models: list[Path], text: Path, hook: str = "resid_post.1", n_steps: int = 150) -> dict[str, Any]:
    return {
        "data": {
            "source": "model", "model": list(map(str, models)), "hook": hook, "text": str(text), "context": 32,
            "batch_tokens": 2048, "shuffle_tokens": 2000, "held_out_tokens": 200,
        },
        "sae": {"architecture": "batch_topk", "d_sae": 64, "k": 4},
        "train": {"batch_size": 256, "n_steps": n_steps, "lr": 5e-3, "checkpoint_every": 10, "report_card": False},
        "launch": {"gpus": "cpu"},
    }  # fmt: skip


def job_from(given: dict[str, Any], **data: Any) -> JobConfig:
    job, problems = parse_job(given | {"data": given["data"] | data})
    assert job, problems
    return job


def begun(given: dict[str, Any], **data: Any) -> Any:
    stream: Any = open_source(job_from(given, **data))
    stream.begin(0, 1, CPU)
    return stream


def some_rows(stream: Any, n: int = 3) -> Tensor:
    return torch.cat([stream.next_rows()[0] for _ in range(n)])


def test_both_models_read_the_same_tokens(tiny, edited, text: Path) -> None:
    both = table([tiny("gpt2"), edited(edit_row)], text)
    stream = begun(both)
    alone = [begun(both, model=model) for model in both["data"]["model"]]
    assert torch.equal(some_rows(stream), torch.cat([some_rows(one) for one in alone], dim=1))
    assert list(stream.part_widths) == [D_IN, D_IN]
    assert stream.meta["model_name"] == "+".join(both["data"]["model"])
    first, second = stream.next_rows()[0].split(D_IN, dim=1)
    assert cosine_similarity(second - first, direction().expand_as(first)).abs().min() > 0.99


def test_every_model_is_read_at_every_hook_in_each_sae_of_a_sweep(tiny, edited, text: Path) -> None:
    hooks = ["resid_post.0+1", "resid_post.1+2"]
    given = table([tiny("gpt2"), edited(edit_row)], text)
    assert list(members(job_from(given, hook=hooks))) == ["hook=L0+L1", "hook=L1+L2"]
    several = begun(given, hook=hooks)
    assert (several.n_hooks, several.d_in, list(several.of_hook(1).part_widths)) == (2, 4 * D_IN, [D_IN] * 4)
    apart = [begun(given, hook=hook) for hook in hooks]
    assert torch.equal(some_rows(several), torch.cat([some_rows(one) for one in apart], dim=1))


def test_ranks_that_share_the_reading_get_the_rows_of_one_rank(tiny, edited, text: Path) -> None:
    given = table([tiny("gpt2"), edited(edit_row)], text)
    alone, *streams = (begun(given) for _ in range(3))
    expected = some_rows(alone, 6)

    def read(group: Threads) -> Tensor:
        streams[group.index].divide(group)
        return some_rows(streams[group.index], 6)

    assert all(torch.equal(rows, expected) for rows in on_all(2, read, timeout_s=60))


def test_models_with_different_tokenizers_are_refused_by_name(tiny, edited, text: Path) -> None:
    other = tiny("llama")
    with pytest.raises(UserError, match=rf"data.model: {tiny('gpt2')} and {other} have different tokenizers: they put"):
        begun(table([tiny("gpt2"), other], text))
    copy = edited(lambda _: None)
    vocabulary = json.loads((copy / "tokenizer.json").read_text())
    ids = vocabulary["model"]["vocab"]
    ids["a"], ids["b"] = ids["b"], ids["a"]
    (copy / "tokenizer.json").write_text(json.dumps(vocabulary))
    with pytest.raises(UserError, match=r"different tokenizers: '[ab]' is token \d+ of the first, and \d+ of the seco"):
        begun(table([tiny("gpt2"), copy], text))


def test_a_token_that_only_one_model_marks_as_special_is_left_out(tiny, edited, text: Path) -> None:
    copy = edited(lambda _: None)
    settings = json.loads((copy / "tokenizer_config.json").read_text())
    (copy / "tokenizer_config.json").write_text(json.dumps(settings | {"eos_token": "Ġhill"}))
    given = table([tiny("gpt2"), copy], text)
    assert len(some_rows(begun(given))) < len(some_rows(begun(given, model=str(tiny("gpt2")))))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"model": ["A", "A"]}, "names .* twice; name different models"),
        ({"model": "A", "revision": []}, "data.revision: is an empty list; name a revision"),
        ({"model": ["A", "B"], "revision": ["main"]}, "data.revision: lists 1 revision of 2 models; list one for"),
        ({"model": "A", "revision": ["a", "b"]}, "data.revision: names .* twice; name different models"),
        ({"model": "ada/tiny", "revision": ["a", "a"]}, "data.revision: names ada/tiny@a twice"),
        ({"model": []}, "data.model: is an empty list; name a language model"),
        ({"model": ["A", "/nowhere"]}, "data.model: there is nothing at /nowhere"),
        ({"hook": "mlp.1"}, "data.hook: mlp.1 stands for a transcoder, but the parts form a crosscoder"),
        ({"hook": "resid_post.7"}, "data.hook: .* has no .*resid_post.7"),
    ],
)
def test_two_models_that_cannot_be_joined_are_refused(
    changes: dict[str, Any], sentence: str, tiny, edited, text: Path
) -> None:
    models = [tiny("gpt2"), edited(edit_row)]
    if model := changes.get("model"):
        named = {"A": str(models[0])}
        changes = changes | {
            "model": named.get(model, model) if isinstance(model, str) else [named.get(one, one) for one in model]
        }
    with pytest.raises(JobFileError, match=sentence):
        job_from(table(models, text), **changes).data_shape()


@pytest.fixture
def cached_hub(tiny, edited, tmp_path: Path) -> dict[str, str]:
    """Return the environment of a hub cache that has two revisions of ada/tiny."""
    kept = tmp_path / "hub" / "models--ada--tiny"
    for revision, folder in (("step1", tiny("gpt2")), ("step2", edited(edit_row))):
        shutil.copytree(folder, kept / "snapshots" / (commit := revision[-1] * 40))
        (kept / "refs").mkdir(exist_ok=True)
        (kept / "refs" / revision).write_text(commit)
    return os.environ | {"HF_HUB_CACHE": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1"}


def test_two_revisions_of_a_model_train_the_crosscoder_of_two_folders(
    tiny, edited, text: Path, cached_hub, tmp_path: Path
) -> None:
    def weights(name: str, **data: Any) -> dict[str, Tensor]:
        given = table([tiny("gpt2"), tmp_path / "edited"], text, n_steps=4)
        (file := tmp_path / f"{name}.toml").write_text(tomli_w.dumps(given | {"data": given["data"] | data}))
        run = [sys.executable, "-m", "trainer", "run", str(file), "--out", str(tmp_path / name)]
        subprocess.run(run, cwd=ROOT, check=True, capture_output=True, env=cached_hub)
        return load_file(tmp_path / name / "sae" / "sae_weights.safetensors")

    of_revisions = weights("revisions", model="ada/tiny", revision=["step1", "step2"])
    assert all(torch.equal(tensor, of_revisions[name]) for name, tensor in weights("folders").items())
    facts = json.loads((tmp_path / "revisions" / "sae" / "cfg.json").read_text())
    assert [part["name"] for part in facts["metadata"]["crosscoder_parts"]] == ["tiny@step1", "tiny@step2"]
    run = [sys.executable, "-m", "trainer", "eval", str(tmp_path / "revisions"), "--device", "cpu", "--json"]
    evaluated = subprocess.run(run, cwd=ROOT, check=True, capture_output=True, env=cached_hub)
    (card,) = json.loads(evaluated.stdout)["cards"]
    assert [part["name"] for part in card["figures"]["crosscoder"]["parts"]] == ["step1", "step2"]


@pytest.mark.parametrize("model", ["ada/tiny", ["ada/tiny"]])
def test_the_time_of_an_evaluation_uses_the_size_of_the_revision(
    model: str | list[str], text: Path, cached_hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", cached_hub["HF_HUB_CACHE"])
    found = language_model(job_from(table([], text), model=model, revision="step2"))
    assert found is not None
    assert (found.path, found.size is not None) == ("ada/tiny", True)


def test_diff_compares_two_revisions_by_name(text: Path, cached_hub) -> None:
    def dry_run(*models: str) -> dict[str, Any]:
        asked = [*models, "--hook", "resid_post.1", "--text", str(text), "--set", "data.context=32", "--dry-run"]
        run = [sys.executable, "-m", "sae_tui", "diff", *asked]
        return tomllib.loads(
            subprocess.run(run, cwd=ROOT, check=True, capture_output=True, env=cached_hub, text=True).stdout
        )

    job = dry_run("ada/tiny@step1", "ada/tiny@step2")
    assert job["data"]["model"] == ["ada/tiny", "ada/tiny"]
    assert job["data"]["revision"] == ["step1", "step2"]


def test_the_memory_estimate_includes_both_models(tiny, edited, text: Path) -> None:
    given = table([tiny("gpt2"), edited(edit_row)], text)
    of_models = [
        job.data.settings.held_alone(width, on_cuda=False).weights
        for job, width in ((job_from(given), 2 * D_IN), (job_from(given, model=str(tiny("gpt2"))), D_IN))
    ]
    assert of_models[0] == 2 * of_models[1] > 0
    job = job_from(given)
    assert estimate(Workload(job, 1, job.data_shape(), CPU_PROCESS)).weights > of_models[0]
    alone = job_from(given, model=str(tiny("gpt2")))
    assert job.data.settings.flops_per_token() == 2 * alone.data.settings.flops_per_token()


@pytest.mark.slow
def test_the_latents_of_the_edited_model_align_with_the_planted_change(
    tiny, edited, text: Path, make_trainer: Callable[..., Any], tmp_path: Path
) -> None:
    trainer = make_trainer(job_from(table([tiny("gpt2"), edited(edit_row)], text)), output=tmp_path / "sae")
    assert trainer.run()
    (file,) = (tmp_path / "sae").glob("*.safetensors")
    of_a, of_b = load_file(file)["W_dec"].split(D_IN, dim=1)
    relative = of_b.norm(dim=1) / (of_a.norm(dim=1) + of_b.norm(dim=1))
    most = relative.topk(2).indices
    cosines = cosine_similarity(of_b[most], direction().expand(2, -1))
    print(f"cosines {cosines.tolist()} of the latents with relative norms {relative[most].tolist()}")
    assert relative[most].min() > 0.6 > relative.median()
    assert cosines.min() > 0.75
    assert cosine_similarity(of_b[most] - of_a[most], direction().expand(2, -1)).min() > 0.95


@pytest.mark.slow
def test_a_killed_run_on_two_models_resumes_to_the_same_weights_on_one_or_two_ranks(
    tiny, edited, text: Path, tmp_path: Path
) -> None:
    given = table([tiny("gpt2"), edited(edit_row)], text, n_steps=40)
    trainer = [sys.executable, "-m", "trainer"]

    def weights(gpus: str, *, is_killed: bool = False) -> dict[str, Tensor]:
        given["launch"]["gpus"], given["parallel"] = gpus, {"mode": "tensor" if gpus == "cpu:2" else "single"}
        (file := tmp_path / "job.toml").write_text(tomli_w.dumps(given))
        place = tmp_path / f"{gpus}-{is_killed}"
        arguments = [*trainer, "run", str(file), "--out", str(place)]
        if not is_killed:
            subprocess.run(arguments, cwd=ROOT, check=True, capture_output=True)
        else:
            with subprocess.Popen(arguments, cwd=ROOT, stdout=subprocess.DEVNULL, start_new_session=True) as process:
                while not [*place.glob("checkpoints/step-*/state.json")]:
                    assert process.poll() is None
                    time.sleep(0.01)
                os.killpg(process.pid, signal.SIGKILL)
            subprocess.run([*trainer, "resume", str(place)], cwd=ROOT, check=True, capture_output=True)
        return load_file(place / "checkpoints" / "step-00000040" / "tensors.safetensors")

    whole, resumed = weights("cpu"), weights("cpu", is_killed=True)
    assert all(torch.equal(tensor, resumed[name]) for name, tensor in whole.items())
    weights("cpu:2")
    by_one, by_two = (
        load_file(tmp_path / f"{gpus}-False" / "sae" / "sae_weights.safetensors") for gpus in ("cpu", "cpu:2")
    )
    torch.testing.assert_close(by_two, by_one, rtol=1e-3, atol=1e-4)


def stored(place: Path) -> dict[int, Tensor]:
    """Return an extraction's rows by their places in the text."""
    rows: dict[int, Tensor] = {}
    for file in place.glob("*.safetensors"):
        tensors = load_file(file)
        rows |= dict(zip(tensors["place"].tolist(), tensors["activations"], strict=True))
    return rows


def tokens_of(place: Path) -> dict[int, int]:
    """Return the tokens of an extraction's rows by their places in the text."""
    shards = [load_file(file) for file in place.glob("*.safetensors")]
    return {at: id_ for one in shards for at, id_ in zip(one["place"].tolist(), one["token_ids"].tolist(), strict=True)}


@pytest.mark.parametrize("n_processes", [1, 2])
def test_rows_that_one_model_leaves_out_are_left_out_of_a_join(
    n_processes: int, tiny, edited, text: Path, tmp_path: Path
) -> None:
    outputs = [tmp_path / "acts-a", tmp_path / "acts-b"]
    for model, output in zip([tiny("gpt2"), edited(edit_token)], outputs, strict=True):
        job = extraction_job(model, text, output, hooks=["resid_post.1"], n_tokens=900)
        # The place of a row does not depend on the number of processes.
        if output == outputs[1] and n_processes > 1:
            run_ranks(job, n_processes, tmp_path / "ranks")
        else:
            run(job)
    (a, b), n_rows = [stored(output / "resid_post.1") for output in outputs], 900
    assert len(a) == len(b) == n_rows
    n_common = len(a.keys() & b.keys())
    assert n_common < n_rows
    data = {"path": [str(output) for output in outputs], "hook": "resid_post.1", "join": True}
    job, problems = parse_job({"data": data, "sae": {"d_sae": 8, "k": 2}, "train": {"n_steps": 9}})
    assert job, problems
    source: Any = open_source(job)
    assert source.n_tokens == n_common
    assert source.notes[-1] == f"left out {n_rows - n_common} rows that not all joined folders have"
    assert source.usual_hold_out == "texts"
    places = {tuple(row.tolist()): place for place, row in a.items()}
    chosen = torch.randperm(n_common, generator=torch.Generator().manual_seed(0)).numpy()
    for row in source.rows(chosen):
        of_a, of_b = row.split(D_IN)
        assert torch.equal(of_b, b[places[tuple(of_a.tolist())]])
    tokens = tokens_of(outputs[0] / "resid_post.1")
    texts = list(texts_of(outputs[0] / "resid_post.1", source=source))
    assert sum(len(one.x) for one in texts) == n_common
    for one in texts:
        # Rows of the same tokens at the start of two texts are equal, so only one of their places is known.
        found = [places[tuple(row[:D_IN].tolist())] for row in one.x]
        assert one.origin.token_ids.tolist() == [tokens[place] for place in found]
        assert one.origin.document.tolist() == sorted(one.origin.document.tolist())
    assert torch.equal(source.rows(chosen[:50].copy()), source.rows(chosen[:50][::-1].copy()))


def test_the_texts_of_two_models_are_read_again_with_the_tokens_of_training(tiny, edited, tmp_path: Path) -> None:
    chat = edited(edit_row)
    settings = json.loads((chat / "tokenizer_config.json").read_text())
    (chat / "tokenizer_config.json").write_text(
        json.dumps(settings | {"chat_template": CHAT, "eos_token": "\u0120hill"})
    )
    chats = [{"messages": [{"role": "user", "content": one}]} for one in sentences(40)]
    (file := tmp_path / "chats.jsonl").write_text("".join(json.dumps(one) + "\n" for one in chats))
    given = table([tiny("gpt2"), chat], file)
    trained = begun(given, column="messages")
    with evaluate_run._texts(job_from(given, column="messages").data.settings, trained, CPU) as texts:
        assert texts
        read = list(texts_of(texts.folder, source=texts.source))
    rows = torch.cat([one.x for one in read])
    expected = some_rows(trained, 2)
    torch.testing.assert_close(rows, expected, rtol=1e-4, atol=1e-4)


def test_extractions_of_different_texts_are_not_joined(tiny, edited, text: Path, tmp_path: Path) -> None:
    (other := tmp_path / "other.jsonl").write_text(
        "".join(json.dumps({"text": one}) + "\n" for one in sentences(200, seed=1))
    )
    paths = [tmp_path / "acts-a", tmp_path / "acts-b"]
    run(extraction_job(tiny("gpt2"), text, paths[0], hooks=["resid_post.1"]))
    run(extraction_job(edited(edit_token), other, paths[1], hooks=["resid_post.1"]))
    data = {"path": list(map(str, paths)), "hook": "resid_post.1", "join": True}
    job, _ = parse_job({"data": data, "sae": {"d_sae": 8, "k": 2}, "train": {"n_steps": 9}})
    with pytest.raises(JobFileError, match="belong to different tokens"):
        open_source(job)  # type: ignore[arg-type]
