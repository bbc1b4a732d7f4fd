"""Settings for hidden states stored by an inference engine: one safetensors file per request, as vLLM writes them.

Each file contains `hidden_states`, of one layer or of several, and `token_ids`. Only the files' headers are read.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, ClassVar

import msgspec

from trainer.contract.errors import JobFileError, Problem
from trainer.contract.json_file import convert_as
from trainer.contract.settings.declare import about
from trainer.contract.settings.rows import DTYPE_BYTES, INT8
from trainer.contract.settings.shards import NUMBERS, TOKENS, HeaderTensor, read_header, shards_at
from trainer.contract.settings.sources import DataShape, HoldOut, SourceSettings
from trainer.contract.wording import plural

HIDDEN_STATES = "hidden_states"


class RequestFile(msgspec.Struct, frozen=True):
    """A request's rows [n_tokens, d_in] of one layer: the offset of its first row, and the bytes from row to row."""

    file: Path
    offset: int
    stride: int
    n_tokens: int
    d_in: int
    dtype: str
    # The offset and the type of the token ids, if the file contains one for each row.
    tokens: tuple[int, str] | None


class _Stored(msgspec.Struct, frozen=True):
    """A file's hidden states and token ids, as in its header."""

    file: Path
    begin: int
    states: HeaderTensor
    tokens: HeaderTensor | None

    @property
    def n_tokens(self) -> int | None:
        """The number of tokens, or None if the file does not contain them."""
        return self.tokens.shape[0] if self.tokens and len(self.tokens.shape) == 1 else None

    def ids_of(self, n_tokens: int) -> tuple[int, str] | None:
        """Return the offset and the type of the token ids, or None unless there is a whole number for each row."""
        if self.tokens is None or (dtype := NUMBERS.get(self.tokens.dtype)) is None:
            return None
        first, last = self.tokens.data_offsets
        return (self.begin + first, self.tokens.dtype) if last - first == n_tokens * int(dtype[-1]) else None

    @property
    def fits(self) -> tuple[bool, bool]:
        """Whether the states may be [n_tokens, layers, d_in], as vLLM stores them, or [layers, n_tokens, d_in]."""
        first, second = self.states.shape[:2]
        return (self.n_tokens in (None, first), self.n_tokens == second)


class RequestSettings(SourceSettings, frozen=True):
    """Settings for hidden states stored by an inference engine, one file per request."""

    path: Annotated[str, about("Folder of safetensors files with hidden_states and token_ids.", min_length=1)]
    layer: (
        Annotated[int, about("Index of the layer among the layers stored in each file, counted from 0.", ge=0)] | None
    ) = None
    paths: ClassVar[tuple[str, ...]] = ("path",)

    @property
    def place(self) -> str:
        return self.path if self.layer is None else f"layer {self.layer} of {self.path}"

    def stored_at(self) -> list[tuple[str, str]]:
        return [("data.path", self.path)]

    def usual_hold_out(self) -> HoldOut:
        return "texts"

    def shape(self) -> DataShape:
        files = self.files()
        return DataShape(files[0].d_in, None, sum(one.n_tokens for one in files))

    def files(self) -> list[RequestFile]:
        """Return the rows in each file; raise `JobFileError` if a file is incomplete or differs from the others."""
        root, names = shards_at(self.path)
        if names[0].suffix != ".safetensors":
            raise _problem(names[0], 'is not a .safetensors file; data.source = "shards" reads other formats')
        stored = [_read(file) for file in names]
        of_layer = functools.partial(self._rows, n_layers=_n_layers(stored))
        found = [one for one in map(of_layer, stored, _are_layers_first(stored)) if one.n_tokens]
        if not found:
            raise _problem(root, "contains no hidden states of any token")
        if other := next((one for one in found if one.d_in != found[0].d_in), None):
            message = f"has rows of {other.d_in} dimensions, but {found[0].file.name} of {found[0].d_in}"
            raise _problem(other.file, f"{message}; give a folder with the requests of one model")
        return found

    def _rows(self, one: _Stored, are_layers_first: bool, *, n_layers: int) -> RequestFile:
        shape, n_bytes = one.states.shape, DTYPE_BYTES[one.states.dtype]
        layer, width = self._chosen(n_layers), shape[-1] * n_bytes
        begin = one.begin + one.states.data_offsets[0]
        if len(shape) == 2:
            offset, stride, n_tokens = begin, width, shape[0]
        elif are_layers_first:
            offset, stride, n_tokens = begin + layer * shape[1] * width, width, shape[1]
        else:
            offset, stride, n_tokens = begin + layer * width, n_layers * width, shape[0]
        return RequestFile(one.file, offset, stride, n_tokens, shape[-1], one.states.dtype, one.ids_of(n_tokens))

    def _chosen(self, n_layers: int) -> int:
        if self.layer is None and n_layers > 1:
            raise JobFileError(
                [Problem("data.layer", f"is missing; the files contain {n_layers} layers, 0 to {n_layers - 1}")]
            )
        if (layer := self.layer or 0) >= n_layers:
            stored = f"the files contain {plural(n_layers, 'layer')}"
            raise JobFileError([Problem("data.layer", f"must be at most {n_layers - 1}, since {stored}")])
        return layer


def _read(file: Path) -> _Stored:
    """Return the header of a file; raise `JobFileError` if the file is incomplete or contains something else."""
    try:
        size = file.stat().st_size
        header, begin = read_header(file)
        tensors = {name: convert_as(one, HeaderTensor) for name, one in header.items() if name != "__metadata__"}
    except OSError as error:
        raise _problem(file, f"cannot be read: {error.strerror}") from None
    except ValueError:
        raise _problem(file, "is incomplete; wait until it is written, or delete it") from None
    states, tokens = tensors.get(HIDDEN_STATES), tensors.get(TOKENS)
    if any(begin + one.data_offsets[1] > size for one in tensors.values()):
        raise _problem(file, "is incomplete; wait until it is written, or delete it")
    if states is None:
        raise _problem(file, f"contains no tensor {HIDDEN_STATES!a}; give a folder of files with hidden states")
    if states.dtype not in DTYPE_BYTES or states.dtype == INT8:
        raise _problem(file, f"stores {states.dtype}; hidden states must be float16, bfloat16, float32 or float64")
    stored = _Stored(file, begin, states, tokens)
    n_dimensions = len(states.shape)
    fits = (n_dimensions == 3 and any(stored.fits)) or (n_dimensions == 2 and stored.fits[0])
    first, last = states.data_offsets
    if not fits or last - first != math.prod(states.shape) * DTYPE_BYTES[states.dtype]:
        of_tokens = "" if stored.n_tokens is None else f" for {plural(stored.n_tokens, 'token')}"
        shape = f"has hidden states of shape {[*states.shape]}{of_tokens}"
        raise _problem(file, f"{shape}; [n_tokens, d_in] or [n_tokens, layers, d_in] can be read")
    return stored


def _are_layers_first(stored: Sequence[_Stored]) -> list[bool]:
    """Return whether each file's states are [layers, n_tokens, d_in]; if both are possible, other files decide."""
    deep = [one.fits for one in stored if len(one.states.shape) == 3]
    usual = any(fits == (False, True) for fits in deep)
    return [usual if all(fits) else fits[1] for fits in (one.fits for one in stored)]


def _n_layers(stored: Sequence[_Stored]) -> int:
    """Return the number of layers in each file; raise `JobFileError` if the files differ."""
    shapes = [one.states.shape for one in stored]
    orders = _are_layers_first(stored)
    counts = [1 if len(shape) == 2 else shape[0 if first else 1] for shape, first in zip(shapes, orders, strict=True)]
    if other := next((place for place, one in enumerate(counts) if one != counts[0]), None):
        message = f"contains {plural(counts[other], 'layer')}, but {stored[0].file.name} contains {counts[0]}"
        raise _problem(stored[other].file, f"{message}; give a folder with the requests of one model")
    return counts[0]


def _problem(file: Path, message: str) -> JobFileError:
    return JobFileError([Problem("data.path", f"{file} {message}")])
