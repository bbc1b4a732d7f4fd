"""Settings for a stream of activations that a language model computes during training and that are never stored."""

from __future__ import annotations

import os
from typing import Annotated, ClassVar, Literal

import msgspec

from trainer.contract.errors import JobFileError, Problem
from trainer.contract.extras import install, is_installed
from trainer.contract.settings.declare import about, show
from trainer.contract.settings.hooks import Hook, ends_of, is_of_transcoder, parse_hook, parts_of, problems_of_hooks
from trainer.contract.settings.language import (
    BatchTokens,
    Column,
    Context,
    Dataset,
    Dtype,
    KeepSpecial,
    RemoteCode,
    SkipFirst,
    Split,
    Subset,
    TextPath,
    lack_of_model,
    lack_of_text,
)
from trainer.contract.settings.model_size import READING_SPEED, ModelSize, model_size
from trainer.contract.settings.sources import (
    DataShape,
    Held,
    HoldOut,
    StreamSettings,
    check_joined_hook,
    each,
    joined_shape,
)
from trainer.contract.wording import plural

_Model = Annotated[str, msgspec.Meta(min_length=1)]


class ModelSettings(StreamSettings, frozen=True, kw_only=True):
    """A language model that reads text during training, on the training devices or on dedicated GPUs."""

    model: Annotated[
        _Model | list[_Model],
        about(
            "Folder, name on the hub, or .gguf file of a language model; a list: a crosscoder of these models.",
            wanted="a string of at least 1 character(s), or a list of such strings",
        ),
    ]
    hook: Annotated[
        str,
        about(
            "Hooks to read, one SAE each: resid_post.12, resid_post.4-12, resid_post for all layers; mlp: transcoders;"
            " resid_post.8+12: a crosscoder.",
            min_length=1,
        ),
    ]
    text: TextPath | None = None
    dataset: Dataset | None = None
    context: Context = 256
    d_in: Annotated[int, about("Width of a row; empty: from the model's files.", advanced=True, ge=1)] | None = None
    revision: (
        Annotated[
            str | list[str],
            about(
                "Branch, tag or commit on the hub; a list: one per model, or a crosscoder of them.",
                wanted="a string or a list of strings",
                advanced=True,
            ),
        ]
        | None
    ) = None
    dtype: Dtype = "auto"
    remote_code: RemoteCode = False
    subset: Subset | None = None
    split: Split = "train"
    column: Column = "auto"
    batch_tokens: BatchTokens = 8192
    skip_first: SkipFirst = 1
    keep_special: KeepSpecial = False
    model_gpus: (
        Annotated[
            int,
            about(
                "GPUs of the job that only run the model; 0: it runs where the SAE trains; auto: the fastest fit.",
                unit="GPUs",
                advanced=True,
                ge=0,
            ),
        ]
        | Literal["auto"]
    ) = "auto"

    paths: ClassVar[tuple[str, ...]] = ("text",)
    hub_paths: ClassVar[tuple[str, ...]] = ("model",)

    @property
    def place(self) -> str:
        return self.text or str(self.dataset)

    @property
    def models(self) -> list[str]:
        """The language models, which all read the same tokens; a model is repeated if it has several revisions."""
        models = each(self.model)
        return models * len(self.revision) if isinstance(self.revision, list) and len(models) == 1 else models

    @property
    def revisions(self) -> list[str | None]:
        """The revision of each model."""
        return [*self.revision] if isinstance(self.revision, list) else [self.revision] * len(self.models)

    def parts(self) -> list[ModelSettings]:
        models, hooks = zip(self.models, self.revisions, strict=False), parts_of(self.hook)
        parts = [
            msgspec.structs.replace(self, model=model, revision=revision, hook=hook)
            for model, revision in models
            for hook in hooks
        ]
        return parts or [self]  # `shape` reports an empty list

    def usual_hold_out(self) -> HoldOut:
        return "texts"

    def shape(self) -> DataShape:
        if problems := self._check_models():
            raise JobFileError(problems)
        if len(parts := self.parts()) == 1 and isinstance(self.model, list):
            return parts[0].shape()
        if len(parts) != 1:
            if problems := problems_of_hooks([self.hook], "data.hook") or self._check_joined_hook():
                raise JobFileError(problems)
            return joined_shape(
                {f"{part.hook} of {with_revision(part.models[0], part.revisions[0])}": part.shape() for part in parts},
                "data.hook",
            )
        problems = [*self._check_hook(), *self._check_text(), *self._check_model()]
        width = self.d_in or (self._size.width if self._size else 0)
        if not width or (self.d_in is None and not problems and self._last_hook.path):
            why = f"the files of {self.model} do not give the width of {self.hook}; set it"
            problems.append(Problem("data.d_in", why))
        if problems:
            raise JobFileError(problems)
        return DataShape(width, width if is_of_transcoder(self.hook) else None, None)

    def held(self, width: int, *, on_cuda: bool) -> Held:
        """Return the memory for the model's weights, a forward pass and, on the CPU, the shuffle buffer.

        A model on dedicated GPUs takes no memory on the training devices.
        """
        mixed = super().held(width, on_cuda=on_cuda)
        if self.model_gpus not in (0, "auto"):
            return mixed
        reads = self.held_alone(width, on_cuda=on_cuda)
        return Held(reads.weights, reads.activations + mixed.activations)

    def held_alone(self, width: int, *, on_cuda: bool) -> Held:
        """Return the memory for all models' weights and a forward pass; 0 if no model's size is recorded.

        The models run one after the other.
        """
        if not (sizes := self._sizes):
            return Held()
        of_values = [size.value_bytes(self.dtype, on_cuda=on_cuda) for size in sizes]
        weights = sum(size.n_parameters * n for size, n in zip(sizes, of_values, strict=True))
        in_pass = max(
            size.pass_bytes(self.batch_tokens, self.context, n) for size, n in zip(sizes, of_values, strict=True)
        )
        # Before concatenation, the rows for all hooks are separate tensors. The rows for the first hook are already
        # included in the pass.
        taken = 2 * self.batch_tokens * (width - (self.d_in or sizes[0].width)) * max(of_values)
        return Held(weights, in_pass + taken)

    def flops_per_token(self) -> float:
        """Return the operations per token in a forward pass, scaled to the matmul throughput in a step.

        The scaled number is larger, because a forward pass has a lower throughput than large matmuls.
        """
        hooks = [parse_hook(ends_of(hook)[1]) for hook in parts_of(self.hook)]
        return sum(size.flops_per_token(hooks) for size in self._sizes) / READING_SPEED

    @property
    def _last_hook(self) -> Hook:
        return parse_hook(ends_of(self.hook)[1])

    @property
    def _sizes(self) -> list[ModelSize]:
        """The sizes of the models whose files are on this machine."""
        sizes = [model_size(*one) for one in zip(self.models, self.revisions, strict=False)]
        return [size for size in sizes if size]

    @property
    def _size(self) -> ModelSize | None:
        return next(iter(self._sizes), None)

    def _check_models(self) -> list[Problem]:
        if not each(self.model):
            return [Problem("data.model", "is an empty list; name a language model")]
        if not self.models:
            return [Problem("data.revision", "is an empty list; name a revision, or leave it out")]
        if len(self.revisions) != len(self.models):
            counts = f"lists {plural(len(self.revisions), 'revision')} of {plural(len(self.models), 'model')}"
            return [Problem("data.revision", f'{counts}; list one for each model, such as "main"')]
        seen: set[tuple[str, str | None]] = set()
        for model, revision in zip(self.models, self.revisions, strict=True):
            version = (os.path.realpath(model), None) if os.path.exists(model) else (model, revision)
            if version in seen:
                where = f"data.{'revision' if isinstance(self.revision, list) else 'model'}"
                why = "name different models, or different revisions of a model on the hub"
                return [Problem(where, f"names {with_revision(model, version[1])} twice; {why}")]
            seen.add(version)
        return []

    def _check_joined_hook(self) -> list[Problem]:
        return check_joined_hook(self.hook) if len(self.models) > 1 else []

    def _check_hook(self) -> list[Problem]:
        if problems := problems_of_hooks([self.hook], "data.hook"):
            return problems
        hook = self._last_hook
        if not hook.path and self._size and hook.layer >= self._size.n_layers:
            layers = f"{plural(self._size.n_layers, 'layer')}, 0 to {self._size.n_layers - 1}"
            return [Problem("data.hook", f"{self.model} has no {show(self.hook)}; it has {layers}")]
        return []

    def _check_text(self) -> list[Problem]:
        if (self.text is None) == (self.dataset is None):
            which = (
                "is missing; set it or data.dataset"
                if self.text is None
                else "is set together with data.dataset; set only one of them"
            )
            return [Problem("data.text", which)]
        if self.text and (lack := lack_of_text(self.text)):
            return [Problem("data.text", lack)]
        if self.context <= self.skip_first:
            return [Problem("data.skip_first", f"must be below data.context, {self.context}, not {self.skip_first}")]
        lack = self._size.lack_of_context(self.context) if self._size else ""
        return [Problem("data.context", lack)] if lack else []

    def _check_model(self) -> list[Problem]:
        if lack := next(filter(None, map(lack_of_model, self.models)), ""):
            return [Problem("data.model", lack)]
        if not is_installed("transformers"):
            return [Problem("data.model", f"reading a language model needs `{install('hf')}`")]
        return []


def with_revision(model: str, revision: str | None) -> str:
    """Return a model's name with its revision, such as EleutherAI/pythia-160m@step1000."""
    return f"{model}@{revision}" if revision else model
