"""Reads the size of a language model from its files, without loading it, and estimates the cost of running it.

The model is a Hugging Face folder, possibly in the hub cache, or a GGUF file.
"""

from __future__ import annotations

import functools
import math
import mmap
import os
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from trainer.contract.files import open_plain
from trainer.contract.json_file import read_json
from trainer.contract.settings.hooks import Hook
from trainer.contract.settings.shards import read_header

# The `struct` format of each GGUF value type. Type 8 is a string, and type 9 is a list.
_GGUF_TYPES = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_TEXT, _LIST = 8, 9
_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
_BYTES_AS_ASKED = {"fp32": 4, "bf16": 2, "fp16": 2}
# The number of values per token at the peak of a block, as a multiple of the model's width: the input, queries, keys
# and values, and the hidden layer of the MLP with its gate.
_WIDTHS_PER_TOKEN = 20
# The throughput of a forward pass, as a share of the throughput of large matmuls.
READING_SPEED = 0.5
_CONTEXTS = ("max_position_embeddings", "n_positions")
_WIDTHS, _LAYERS = ("hidden_size", "n_embd", "d_model"), ("num_hidden_layers", "n_layer", "num_layers")


class ModelSize(msgspec.Struct, frozen=True):
    """The size of a language model.

    `width` is the dimension of the residual stream, and `stored` is the dtype of the stored weights. `longest` is the
    length in tokens of the longest context that the model supports, or 0 if its files do not record it.
    """

    n_parameters: int
    width: int
    n_layers: int
    stored: str = ""
    longest: int = 0

    def lack_of_context(self, context: int) -> str:
        """Return a message if a context is longer than the model supports; otherwise ""."""
        if not 0 < self.longest < context:
            return ""
        return f"must be at most {self.longest}, the model's context length, not {context}"

    def value_bytes(self, dtype: str, *, on_cuda: bool) -> int:
        """Return the bytes per weight and per activation for a dtype setting, which may be "auto"."""
        if dtype != "auto":
            return _BYTES_AS_ASKED[dtype]
        return _BYTES.get(self.stored.removeprefix("torch."), 4) if on_cuda else 4

    def pass_bytes(self, n_tokens: int, context: int, value_bytes: int) -> int:
        """Return the peak size in bytes of the activations in a forward pass over contexts of `context` tokens."""
        tokens = max(n_tokens, context)
        mask = tokens * context
        return (tokens * self.width * _WIDTHS_PER_TOKEN + mask) * value_bytes

    def flops_per_token(self, hooks: Iterable[Hook]) -> float:
        """Return the number of matmul operations per token: two for each parameter up to the last hook."""
        last = max(self.n_layers - 1 if hook.path else hook.layer for hook in hooks)
        return 2.0 * self.n_parameters * min(1.0, (last + 1) / self.n_layers)


def model_size(path: str, revision: str | None = None) -> ModelSize | None:
    """Return a local model's size; None if the model is not on this machine or its files do not record the size."""
    try:
        head = Path(path) if path.endswith(".gguf") else _folder(path, revision or "main") / "config.json"
        return _size_by(head, head.stat().st_mtime_ns)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, struct.error, RecursionError):
        return None


@functools.lru_cache(maxsize=16)
def _size_by(head: Path, _changed: int) -> ModelSize:
    # Cache the result: planning a job requests it hundreds of times, and skipping the vocabulary in a GGUF file takes
    # 50 ms.
    return _of_gguf(head) if head.suffix == ".gguf" else _of_folder(head.parent)


def _folder(path: str, revision: str) -> Path:
    """Return a model's folder: its path, or its snapshot in the hub cache."""
    if os.path.isdir(path):
        return Path(path)
    home = Path(os.environ.get("HF_HOME") or Path(os.path.expanduser("~"), ".cache", "huggingface"))
    kept = Path(os.environ.get("HF_HUB_CACHE") or home / "hub") / f"models--{path.replace('/', '--')}"
    branch = kept / "refs" / revision
    return kept / "snapshots" / (branch.read_text().strip() if branch.is_file() else revision)


def _of_folder(folder: Path) -> ModelSize:
    config = read_json(folder / "config.json", dict[str, Any]) or {}
    own = config.get("text_config") or config
    stored = str(own.get("dtype") or own.get("torch_dtype") or config.get("torch_dtype") or "")
    shards = sorted(folder.glob("*.safetensors"))
    if shards:
        headers = [read_header(shard)[0] for shard in shards]
        n = sum(math.prod(one["shape"]) for header in headers for name, one in header.items() if name != "__metadata__")
    else:
        n = sum(file.stat().st_size for file in folder.glob("pytorch_model*.bin")) // _BYTES.get(stored, 4)
    longest = next((own[name] for name in _CONTEXTS if isinstance(own.get(name), int)), 0)
    return _checked(ModelSize(n, _first(own, _WIDTHS), _first(own, _LAYERS), stored, longest))


def _of_gguf(file: Path) -> ModelSize:
    with open_plain(file) as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as content:
        reader = _Gguf(content)
        facts, n_parameters = reader.facts, reader.n_parameters
    architecture = facts["general.architecture"]
    width, n_layers = (facts[f"{architecture}.{name}"] for name in ("embedding_length", "block_count"))
    longest = facts.get(f"{architecture}.context_length")
    return _checked(ModelSize(n_parameters, width, n_layers, longest=longest if isinstance(longest, int) else 0))


def _checked(size: ModelSize) -> ModelSize:
    """Return the size unchanged; raise `ValueError` if it contains an implausible number."""
    numbers = (size.n_parameters, size.width, size.n_layers)
    if not all(isinstance(number, int) and 0 < number < 2**50 for number in numbers):
        raise ValueError("not the size of a model")
    return size


def _first(config: dict[str, Any], names: tuple[str, ...]) -> int:
    return int(next((config[name] for name in names if name in config), 0))


class _Gguf:
    """Parses the header of a GGUF file; the `gguf` package's reader takes seconds because it processes every tensor."""

    def __init__(self, content: mmap.mmap) -> None:
        self._content, self._at = content, 4
        if content[:4] != b"GGUF":
            raise ValueError("not a GGUF file")
        self._number("I")
        n_tensors, n_facts = self._number("Q"), self._number("Q")
        self.facts = {self._text(): self._value(self._number("I")) for _ in range(n_facts)}
        self.n_parameters = sum(self._n_values() for _ in range(n_tensors))

    def _n_values(self) -> int:
        """Read a tensor's description and return its number of values."""
        self._text()
        sizes = [self._number("Q") for _ in range(self._number("I"))]
        self._at += struct.calcsize("<IQ")
        return math.prod(sizes)

    def _value(self, kind: int) -> Any:
        if kind == _TEXT:
            return self._text()
        if kind != _LIST:
            return self._number(_GGUF_TYPES[kind])
        of, n = self._number("I"), self._number("Q")
        if of in _GGUF_TYPES:
            self._skip(n * struct.calcsize(_GGUF_TYPES[of]))
        else:
            for _ in range(n):
                self._value(of)
        return None

    def _text(self) -> str:
        length = self._number("Q")
        start = self._at
        self._skip(length)
        return self._content[start : self._at].decode(errors="replace")

    def _skip(self, n_bytes: int) -> None:
        self._at += n_bytes
        if self._at > len(self._content):
            raise ValueError("a truncated GGUF file")

    def _number(self, form: str) -> Any:
        (number,) = struct.unpack_from(f"<{form}", self._content, self._at)
        self._at += struct.calcsize(form)
        return number
