"""Creates the README.md for SAEs on the Hugging Face hub, with metadata for the hub and evaluation results."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path

from safetensors import safe_open

from trainer.contract.files import open_plain
from trainer.contract.paths import RunPaths
from trainer.contract.printable import in_markdown, printable_lines
from trainer.contract.runs.checkpoint_manifest import TENSORS, CheckpointState, read_state
from trainer.contract.runs.explanations import ExplanationsFile
from trainer.contract.runs.how_far import exported_tokens
from trainer.contract.runs.recipe import recipe_lines
from trainer.contract.runs.report_card import explanation_facts, read_card, with_explanations
from trainer.contract.runs.run_job import load_run_job
from trainer.contract.settings import catalog
from trainer.contract.settings.job import JobConfig
from trainer.contract.settings.job_file import members
from trainer.sharing.base import CARD_REST, CARD_TITLE, MODEL_CARD, public_name
from trainer.training.export_checkpoint import how_far_of_sae, output_of, recipe_of_run

_LARGEST_CARD = 4 * 2**20
_HTML = re.compile(r"(?<!\\)<")
_ON_THE_HUB = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*", re.ASCII)


def hub_card(
    checkpoints: Sequence[Path], form: str, name: str, labels: Collection[str] | None = None, k: int | None = None
) -> str:
    """Return the README.md for the repository `name`, with SAEs from `checkpoints` exported in the format `form`.

    `labels` contains the exported SAEs' labels; None means all. `k` is the exported k, if it replaces the SAEs' own.
    The README.md includes the model card of each SAE that was evaluated with these weights and this k.
    """
    runs = [(path, _job_of(path), read_state(path)) for path in checkpoints]
    models = {
        str(state.origin_of(label).get("model_name", "")) for _, job, state in runs for label in _chosen(job, labels)
    }
    kind = "transcoder" if any(state.d_out is not None for *_, state in runs) else "sparse-autoencoder"
    kinds = dict.fromkeys([*_special_kinds(job for _, job, _ in runs), kind])
    facts = {"library_name": form, "tags": [*kinds, form]}
    if len(models) == 1 and is_on_the_hub(model := models.pop()):
        facts["base_model"] = model
    # JSON strings and lists are valid YAML.
    front = "".join(f"{key}: {json.dumps(value)}\n" for key, value in facts.items())
    sections = [section for run in runs for section in _sections(*run, labels, k)]
    body = "\n".join(sections)
    load = f"run `hf download {name} --local-dir my-sae`, and then, in {form}, `{catalog.FORMATS[form].use}`."
    return f"---\n{front}---\n\n{body}\nTo load it, {load}\n"


def _special_kinds(jobs: Iterable[JobConfig]) -> Iterator[str]:
    """Yield hub tags for the kinds of SAEs that need more than an SAE's or a transcoder's code."""
    for job in jobs:
        if job.n_layers > 1:
            yield "cross-layer-transcoder"
        elif any(len(settings.parts()) > 1 for settings in job.hooks.values()):
            yield "crosscoder"


def local_paths(checkpoints: Sequence[Path]) -> list[str]:
    """Return the absolute local paths that the SAEs' metadata in the checkpoints would reveal."""
    states = [read_state(path) for path in checkpoints]
    origins = [origin for state in states for origin in (state.origin, *(state.origins or {}).values())]
    values = [str(value) for origin in origins for value in origin.values()]
    return sorted({value for value in values if Path(value).is_absolute()})


def is_on_the_hub(model: str) -> bool:
    """Return whether `model` looks like a hub name and is not a local folder or file."""
    is_name = len(model) <= 96 and _ON_THE_HUB.fullmatch(model) is not None and not model.endswith(".gguf")
    return is_name and not Path(model).exists()


def _job_of(checkpoint: Path) -> JobConfig:
    return load_run_job(RunPaths(checkpoint.parent.parent).job_file)


def _chosen(job: JobConfig, labels: Collection[str] | None) -> dict[str, JobConfig]:
    return {label: member for label, member in members(job).items() if labels is None or label in labels}


def _sections(
    checkpoint: Path, job: JobConfig, state: CheckpointState, labels: Collection[str] | None, k: int | None
) -> Iterator[str]:
    output = output_of(checkpoint.parent.parent)
    for label, member in _chosen(job, labels).items():
        card = output / label / MODEL_CARD
        is_judged = exported_tokens(output / label) == state.position.tokens and card.is_file()
        # The figures on the model card are those at the SAE's own k.
        has_other_k = k is not None and k != member.sae.settings.n_active
        text = _card_text(card) if is_judged and not has_other_k else ""
        if text.startswith(CARD_TITLE):
            # Omit the sentence about `card.json`, because this file is not uploaded.
            yield text.replace(CARD_REST, "") + _explanations(output / label)
        else:
            yield _plain(checkpoint, member, state, label, k)


def _explanations(folder: Path) -> str:
    """Return a paragraph about the explanations of the SAE in a folder, which are written after its model card."""
    card = read_card(folder)
    facts = explanation_facts(with_explanations(card, ExplanationsFile(folder))) if card else []
    return "".join(f"\n{title.capitalize()}: {in_markdown(words, 1000)}.\n" for title, words in facts)


def _card_text(card: Path) -> str:
    """Return a model card's text with all HTML escaped, or "" if the file is too large or cannot be read.

    The run may come from another person, so the text is not trusted.
    """
    with contextlib.suppress(OSError), open_plain(card) as stream:
        content = stream.read(_LARGEST_CARD + 1)
        # Model cards written by `eval` contain no HTML, so every < can be escaped.
        return (
            _HTML.sub(r"\\<", printable_lines(content.decode(errors="replace")))
            if len(content) <= _LARGEST_CARD
            else ""
        )
    return ""


def _plain(checkpoint: Path, job: JobConfig, state: CheckpointState, label: str, k: int | None) -> str:
    """Return the section for an SAE that was not evaluated, at least not with this k."""
    origin = state.origin_of(label)
    recipe = recipe_of_run(checkpoint.parent.parent, state, label, _d_in(checkpoint, label), k)
    lines = [
        f"- {fact.replace('_', ' ')}: {in_markdown(str(public_name(origin[fact])))}"
        for fact in ("model_name", "hook_name")
        if fact in origin
    ]
    title = f"{CARD_TITLE}: {in_markdown(' '.join(word for word in (job.name, label) if word))}"
    with_k = "" if k is None else f", with k = {k}"
    what = f"{job.sae.architecture}, trained on {state.position.tokens:,} tokens{with_k}."
    trained = [f"- {name}: {in_markdown(value, 1000)}" for name, value in recipe_lines(recipe)] if recipe else []
    run_dir, is_transcoder = checkpoint.parent.parent, state.d_out is not None
    how_far = how_far_of_sae(run_dir, _job_of(checkpoint), label, state, is_transcoder=is_transcoder)
    trained += [f"- {name}: {in_markdown(words, 1000)}" for name, words in how_far.facts()] if how_far else []
    return "\n".join([title, "", what, *lines, *trained, ""])


def _d_in(checkpoint: Path, label: str) -> int:
    with safe_open(checkpoint / TENSORS, framework="pt") as tensors:
        return int(tensors.get_slice(f"{label}/sae.W_enc").get_shape()[0])
