"""Tests for extraction job files: default values, paths and error messages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from trainer.contract.errors import JobFileError
from trainer.contract.settings.extract import ExtractJob
from trainer.contract.settings.hooks import Hook
from trainer.contract.settings.job_file import load_as, parse_as, parse_job

LEAST = {"kind": "extract", "model": {"path": "gpt2", "hooks": ["resid_post.2"]}, "text": {"path": "corpus.txt"}}


def problems(**sections: Any) -> list[str]:
    """Return the problems of a minimal job after the given changes."""
    table = {name: LEAST.get(name, {}) | changed if isinstance(changed, dict) else changed
             for name, changed in sections.items()}  # fmt: skip
    return [str(problem) for problem in parse_as(ExtractJob, LEAST | table)[1]]


def test_an_extraction_job_needs_model_hooks_and_text_and_has_defaults_for_the_rest() -> None:
    job, wrong = parse_as(ExtractJob, LEAST)
    assert wrong == []
    assert isinstance(job, ExtractJob)
    assert job.hooks == (Hook("resid_post", 2),)
    assert (job.text.context, job.extract.n_tokens, job.extract.max_norm, job.extract.skip_first) == (256, 10**6, 10, 1)
    assert not job.extract.keep_special
    assert not job.model.remote_code
    assert job.folder("resid_post.2") == Path("activations/resid_post.2")


@pytest.mark.parametrize(
    ("changed", "wrong"),
    [
        (
            {"model": {"path": None}},
            "model.path: is missing: Folder, name on the hub, or .gguf file of a language model.",
        ),
        ({"model": {"hooks": None}}, "model.hooks: is missing: Hooks where activations are read"),
        (
            {"model": {"hooks": []}},
            'model.hooks: must be a list like ["resid_post.12", "mlp_out.4-12", "mlp.12"], not []',
        ),
        (
            {"model": {"hooks": "resid_post.2"}},
            'model.hooks: must be a list like ["resid_post.12", "mlp_out.4-12", "mlp.12"], not "resid_post.2"',
        ),
        (
            {"model": {"hooks": ["a b"]}},
            'model.hooks: "a b" must be "SITE.LAYER" with SITE one of resid_pre, resid_post, mlp_in, mlp_out, '
            "attn_out, or the path of a module",
        ),
        (
            {"model": {"hooks": ["resid_post.2", "blocks.2.hook_resid_post"]}},
            'model.hooks: "blocks.2.hook_resid_post" is given twice',
        ),
        ({"model": {"hook": ["resid_post.2"]}}, 'model.hook: is not a known setting; did you mean "hooks"?'),
        ({"text": {"path": None}}, "text.path: is missing; set it or text.dataset"),
        ({"text": {"dataset": "c4"}}, "text.path: is set together with text.dataset; set only one of them"),
        ({"text": {"context": 1}}, "text.context: must be an integer of at least 2 and of at most 1048576"),
        ({"model": {"spread": True}, "launch": {"gpus": "cpu:2"}}, "model.spread: works only with GPUs, not"),
        (
            {"model": {"spread": True}, "launch": {"backend": "slurm", "nodes": 2}},
            "model.spread: works only with the GPUs of one node; set launch.nodes = 1",
        ),
        ({"extract": {"skip_first": 256}}, "extract.skip_first: must be below text.context, 256, not 256"),
        ({"extract": {"n_tokens": 0}}, "extract.n_tokens: must be an integer of at least 1 (tokens), not 0"),
        ({"extract": {"max_norm": -1}}, "extract.max_norm: must be a number of at least 0, not -1"),
        ({"extract": {"dtype": "fp8"}}, 'extract.dtype: must be "auto", "fp32", "bf16", "fp16" or "int8", not "fp8"'),
        ({"extract": 5}, "extract: must be a section: write [extract] and its keys below"),
        ({"train": {"n_steps": 5}}, "train: is not a known setting"),
        ({"launch": {"gpus": "tpu"}}, "launch.gpus: must be "),
        ({"launch": {"gpus": []}}, "launch.gpus: "),
        ({"kind": "extrcat"}, 'kind: must be "train", "extract" or "command", not "extrcat"'),
    ],
)
def test_each_mistake_is_reported_in_one_sentence_that_names_the_setting(changed: dict[str, Any], wrong: str) -> None:
    (sentence,) = problems(**changed)
    assert sentence.startswith(wrong)


def test_an_extraction_job_is_not_read_as_a_training_job_or_vice_versa() -> None:
    (as_extraction,) = parse_as(ExtractJob, {"data": {"path": "a"}})[1]
    assert str(as_extraction).startswith('kind: is "train" and not "extract"; ')
    assert str(parse_job(LEAST)[1][0]).startswith('kind: is "extract" and not "train"; ')


def test_all_problems_are_reported_at_once() -> None:
    wrong = problems(model={"hooks": ["a b", "resid_post.2", "resid_post.2"]}, text={"path": None})
    assert [one.split(":")[0] for one in wrong] == ["model.hooks", "model.hooks", "text.path"]


def test_paths_are_relative_to_the_working_folder_or_else_to_the_job_file(tmp_path: Path, monkeypatch) -> None:
    there, here = tmp_path / "there", tmp_path / "here"
    for folder in (there, here):
        folder.mkdir()
    (there / "model").mkdir()
    (there / "corpus.txt").write_text("there")
    file = there / "job.toml"
    file.write_text('kind = "extract"\n[model]\npath = "model"\nhooks = ["h.1"]\n[text]\npath = "corpus.txt"\n')
    monkeypatch.chdir(here)
    job = load_as(ExtractJob, file)
    assert (job.model.path, job.text.path) == (str(there / "model"), str(there / "corpus.txt"))
    assert job.extract.output == str(here / "activations")
    (here / "corpus.txt").write_text("here")
    assert load_as(ExtractJob, file).text.path == str(here / "corpus.txt")
    # A model path that exists in neither folder is treated as a hub name. A text path that exists in neither folder is
    # reported as missing from the working folder.
    job = load_as(ExtractJob, file, ["model.path=org/name", "text.path=none.txt", "extract.n_tokens=10k"])
    assert (job.model.path, job.text.path) == ("org/name", str(here / "none.txt"))
    assert job.extract.n_tokens == 10_000


def test_hooks_can_be_given_on_the_command_line(tmp_path: Path) -> None:
    (file := tmp_path / "job.toml").write_text(
        'kind = "extract"\n[model]\npath = "gpt2"\nhooks = ["h.1"]\n[text]\npath = "a.txt"\n'
    )
    assert load_as(ExtractJob, file, ['model.hooks=["resid_pre.0", "h.2"]']).model.hooks == ["resid_pre.0", "h.2"]
    assert load_as(ExtractJob, file, ["model.hooks=resid_pre.0, h.2"]).model.hooks == ["resid_pre.0", "h.2"]
    with pytest.raises(JobFileError, match=r"^model.hooks: "):
        load_as(ExtractJob, file, ["model.hooks=resid_pre.0,"])
