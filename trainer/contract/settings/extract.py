"""Settings for extraction jobs, which run text through a language model and store the model's activations.

The job file contains `kind = "extract"`; without this setting, it describes a training job.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import msgspec

from trainer.contract.errors import Problem, UserError
from trainer.contract.object_paths import absolute, is_url, joined, real_paths, staging_folder
from trainer.contract.settings import all_layers
from trainer.contract.settings.declare import about
from trainer.contract.settings.hooks import Hook, parse_hook, problems_of_hooks
from trainer.contract.settings.job import MAX_NORM, AnyJob, Launch
from trainer.contract.settings.language import BatchTokens, KeepSpecial, Model, SkipFirst, TextSettings
from trainer.contract.settings.model_size import model_size
from trainer.contract.settings.promised import Promise, Promises

# The file in the output folder that records the extraction's progress.
STATE = "extraction.json"
# If several processes extract, this folder contains a subfolder for each process's state.
PARTS = ".parts"
# With a URL as output, the number of shards per hook that wait for their upload on the local disk.
SHARDS_IN_FLIGHT = 3


class Extract(msgspec.Struct, frozen=True):
    """The `[extract]` section: which rows to keep, and where to write them."""

    n_tokens: Annotated[int, about("Rows to store per hook.", unit="tokens", ge=1)] = 1_000_000
    output: Annotated[
        str, about("Folder or URL (s3://, gs://, hf://) to write, with one subfolder per hook.", min_length=1)
    ] = "activations"
    batch_tokens: BatchTokens = 8192
    max_norm: Annotated[
        float, about("Leaves out rows whose norm exceeds this multiple of the median norm; 0: keeps all.", ge=0)
    ] = MAX_NORM
    skip_first: SkipFirst = 1
    keep_special: KeepSpecial = False
    dtype: Annotated[
        Literal["auto", "fp32", "bf16", "fp16", "int8"],
        about("Type of the stored rows; auto: the model's. int8: half the bytes of bf16.", advanced=True),
    ] = "auto"
    shard_rows: Annotated[
        int, about("Rows per file, shuffled within the file.", unit="tokens", advanced=True, ge=1)
    ] = 65_536
    seed: Annotated[int, about("Seed of the order of the rows.", advanced=True, ge=0)] = 0


class ExtractJob(AnyJob, frozen=True, kw_only=True):
    """A complete extraction job, with all defaults filled in."""

    kind: ClassVar[str] = "extract"
    sections: ClassVar[Mapping[str, type[msgspec.Struct]]] = {
        "model": Model,
        "text": TextSettings,
        "extract": Extract,
        "launch": Launch,
    }
    writes_rows: ClassVar[bool] = True

    model: Model
    text: TextSettings
    extract: Extract
    name: Annotated[str, about("Name of the job.", min_length=1, max_length=80)] = "activations"

    @property
    def hooks(self) -> tuple[Hook, ...]:
        """The hooks in the model, in job file order."""
        return tuple(map(parse_hook, self.model.hooks))

    @property
    def exchanges(self) -> bool:
        return self.model.spread

    @classmethod
    def with_all_layers(cls, raw: Mapping[str, Any], bases: Sequence[Path]) -> Mapping[str, Any]:
        return all_layers.of_extraction(raw, bases)

    @classmethod
    def conflicts(cls, sections: Mapping[str, Any], raw: Mapping[str, Any]) -> list[Problem]:
        return [] if None in sections.values() else check_extract(cls(**sections))

    def paths_read(self) -> list[tuple[str, str]]:
        return [("model", "path"), ("text", "path")]

    def promises(self, by: str) -> Promises:
        size = model_size(self.model.path, self.model.revision)
        # No file records the output width of a module specified by its path.
        widths = [size.width if size and not hook.path else None for hook in self.hooks]
        folders = real_paths([joined(self.extract.output, name) for name in self.model.hooks])
        return {folder: Promise(d_in, self.extract.n_tokens, by) for folder, d_in in zip(folders, widths, strict=True)}

    def folder(self, hook: str) -> Path:
        """Return the local folder with a hook's rows; `hook` is the name in the job file."""
        return self.local_output / hook

    @property
    def local_output(self) -> Path:
        """The output folder or, for a URL, the folder with the files that wait for their upload."""
        output = self.extract.output
        return staging_folder(output) if is_url(output) else Path(output)

    def with_paths(self, bases: Sequence[Path]) -> ExtractJob:
        """Return the job with absolute paths, each resolved against the first of `bases` in which the path exists.

        The output is resolved against the first of `bases`. A model path that does not exist in any of `bases` is
        treated as a hub name.
        """
        model = _existing(self.model.path, bases) or self.model.path
        text = self.text.path and (_existing(self.text.path, bases) or absolute(self.text.path, bases[0]))
        return msgspec.structs.replace(
            self,
            model=msgspec.structs.replace(self.model, path=model),
            text=msgspec.structs.replace(self.text, path=text),
            extract=msgspec.structs.replace(self.extract, output=absolute(self.extract.output, bases[0])),
        )


def identity(job: ExtractJob) -> dict[str, Any]:
    """Return the settings that determine the stored rows, as a dict mapping each setting's path to its value."""
    sections = {name: msgspec.to_builtins(getattr(job, name)) for name in ("model", "text", "extract")}
    table = {f"{name}.{key}": value for name, section in sections.items() for key, value in section.items()}
    return {path: value for path, value in table.items() if path not in ("extract.output", "model.spread")}


def check_extract(job: ExtractJob) -> list[Problem]:
    """Return problems with combinations of individually valid settings."""
    problems = problems_of_hooks(job.model.hooks, "model.hooks")
    if (job.text.path is None) == (job.text.dataset is None):
        which = (
            "is missing; set it or text.dataset"
            if job.text.path is None
            else "is set together with text.dataset; set only one of them"
        )
        problems.append(Problem("text.path", which))
    if job.text.context <= job.extract.skip_first:
        most = f"must be below text.context, {job.text.context}, not {job.extract.skip_first}"
        problems.append(Problem("extract.skip_first", most))
    if job.model.spread and (job.on_cpu or (job.cluster and job.launch.nodes > 1)):
        where = "GPUs, not the processes of launch.gpus" if job.on_cpu else "the GPUs of one node; set launch.nodes = 1"
        problems.append(Problem("model.spread", f"works only with {where}"))
    return problems


def lack_of_output(job: ExtractJob) -> str:
    """Return why no rows can be written to `extract.output`; "" if no reason is known in advance."""
    if is_url(job.extract.output):
        from trainer.contract.object_store import checked_url

        try:
            checked_url(job.extract.output, "extract.output")
        except UserError as error:
            return str(error).removeprefix("extract.output: ")
        return ""
    output = Path(job.extract.output)
    if output.exists() and not output.is_dir():
        return f"{output} is not a folder; choose another"
    if job.text.path and output.is_relative_to(job.text.path):
        return f"{output} is inside text.path, where all files are read as text; choose another"
    return ""


def _existing(path: str, bases: Sequence[Path]) -> str | None:
    return next((candidate for base in bases if os.path.exists(candidate := absolute(path, base))), None)
