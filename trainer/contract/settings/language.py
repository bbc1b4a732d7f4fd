"""Settings for a language model and its text, shared by extractions and streams of activations."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from trainer.contract.files import lfs_pointer_in
from trainer.contract.settings.declare import about

# The suffixes of text files that can be read.
TEXT_SUFFIXES = (".txt", ".md", ".rst", ".jsonl", ".json", ".parquet")
HOOK_LISTS = 'a list like ["resid_post.12", "mlp_out.4-12", "mlp.12"]'

# The suffixes of model files.
_OF_MODELS = (".json", ".safetensors", ".bin", ".pt", ".model", ".txt", ".jinja", ".py")
ModelPath = Annotated[str, about("Folder, name on the hub, or .gguf file of a language model.", min_length=1)]
Revision = Annotated[str, about("Branch, tag or commit on the hub.", advanced=True)]
Dtype = Annotated[
    Literal["auto", "fp32", "bf16", "fp16"],
    about("Dtype of the model's weights; auto: on a GPU as stored, on a CPU fp32.", advanced=True),
]
RemoteCode = Annotated[
    bool, about("Runs Python code that comes with the model; enable only if you trust its author.", advanced=True)
]
TextPath = Annotated[str, about("A .txt, .jsonl, .json or .parquet file, or a folder of them.", min_length=1)]
Dataset = Annotated[str, about("Data set to stream from the hub, instead of a path.", min_length=1)]
Subset = Annotated[str, about("Configuration of the data set.", advanced=True)]
Split = Annotated[str, about("Split of the data set.", advanced=True, min_length=1)]
Column = Annotated[
    str, about("Column with text, the messages of chats, or token ids; auto: the usual names.", min_length=1)
]
Context = Annotated[int, about("Tokens per context of the model.", unit="tokens", ge=2, le=1_048_576)]
BatchTokens = Annotated[
    int, about("Tokens per forward pass; fewer tokens need less memory.", unit="tokens", advanced=True, ge=1)
]
SkipFirst = Annotated[
    int,
    about(
        "Number of tokens to leave out at the start of each document in a context.", unit="tokens", advanced=True, ge=0
    ),
]
KeepSpecial = Annotated[bool, about("Keeps the rows of special tokens such as BOS.", advanced=True)]


class Model(msgspec.Struct, frozen=True):
    """The `[model]` section: the language model, and the hooks at which its activations are read."""

    path: ModelPath
    hooks: Annotated[
        list[str],
        about(
            "Hooks where activations are read; without a number: in all layers.",
            wanted=HOOK_LISTS,
            commas=True,
            min_length=1,
        ),
    ]
    revision: Revision | None = None
    dtype: Dtype = "auto"
    remote_code: RemoteCode = False
    spread: Annotated[
        bool,
        about("Splits one model over all GPUs of the job, for models larger than a GPU.", advanced=True),
    ] = False


class TextSettings(msgspec.Struct, frozen=True):
    """The `[text]` section: the text that the model reads."""

    path: TextPath | None = None
    dataset: Dataset | None = None
    subset: Subset | None = None
    split: Split = "train"
    column: Column = "auto"
    context: Context = 256


def lack_of_model(path: str) -> str:
    """Return why a local path does not contain a model; "" if it may contain one or if `path` is a hub name."""
    if not os.path.exists(path):
        return f"there is nothing at {path}" if os.path.isabs(path) or path.endswith(".gguf") else ""
    if pointer := lfs_pointer_in(Path(path)):
        return f"{pointer} is a git-lfs pointer and not the file itself; run `git lfs pull` in its folder"
    if not os.path.isdir(path):
        return (
            ""
            if path.endswith(".gguf")
            else f"{path} is neither a folder nor a .gguf file; give the folder or file of a model"
        )
    if missing := _missing_file(Path(path)):
        return f"{missing} is a symbolic link to a file that does not exist; download the model again"
    has_config = os.path.exists(os.path.join(path, "config.json"))
    return "" if has_config else f"{path} has no config.json; give the folder of a model, or its .gguf file"


def _missing_file(folder: Path) -> Path | None:
    """Return a dangling link among a model's files, such as one left by an interrupted download, or None."""
    with contextlib.suppress(OSError):
        links = sorted(one for one in folder.iterdir() if one.suffix in _OF_MODELS and one.is_symlink())
        return next((link for link in links if not link.exists()), None)
    return None


def lack_of_text(path: str) -> str:
    """Return why a path does not contain text, or ""; the content of a folder is checked only when it is read."""
    if not os.path.exists(path):
        return f"there is nothing at {path}"
    if os.path.isfile(path) and Path(path).suffix not in TEXT_SUFFIXES:
        return f"{path} must end in {', '.join(TEXT_SUFFIXES)}"
    return ""
