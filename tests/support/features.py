"""A small handwritten file with an SAE's max-activating examples."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from typing import Any

# Two latents with two examples of three tokens each; the middle token has the largest activation.
IDS = [[[5, 7, 9], [-1, 7, -1]], [[9, 5, 5], [-1, -1, -1]]]
ACTS = [[[0.0, 4.0, 1.0], [0.0, 2.0, 0.0]], [[0.0, 3.0, 0.0], [0.0, 0.0, 0.0]]]
TEXTS = {5: " the", 7: " Lämb", 9: "s"}
# The same two latents on text from a byte-level tokenizer: 天 is split into two tokens, and one token includes a space.
SPREAD = {5: b" \xe5\xa4", 7: b"\xa9", 9: "气".encode()}
# Tensors that exist only if the language model was available, with one token for each of the two latents.
MOVED: dict[str, tuple[str, str, list[int], list[Any]]] = {
    "promoted": ("I32", "i", [2, 1], [7, 5]),
    "promoted_logits": ("F32", "f", [2, 1], [1.5, 0.5]),
    "suppressed": ("I32", "i", [2, 1], [9, 7]),
    "suppressed_logits": ("F32", "f", [2, 1], [-2.5, -0.25]),
}

# The effects of the two latents on a language model's loss; the standard error of the first one is unknown.
EFFECTS: dict[str, tuple[str, str, list[int], list[Any]]] = {
    "effect": ("F32", "f", [2], [-0.25, 0.0078125]),
    "effect_error": ("F32", "f", [2], [math.nan, 0.0009765625]),
    "effect_per_firing": ("F32", "f", [2], [-2.5, 0.5]),
}
# Tensors of a crosscoder's latents: latent 0 is shared, and latent 1 is only in the second part.
OF_PARTS: dict[str, tuple[str, str, list[int], list[Any]]] = {
    "part_names": ("U8", "B", [9], list(b"base\nchat")),
    "part_shares": ("F32", "f", [2, 2], [0.5, 0.5, 0.0625, 0.9375]),
}
SCALING: dict[str, tuple[str, str, list[int], list[Any]]] = {
    "nu_error": ("F32", "f", [2], [1.0, 0.125]),
    "nu_reconstruction": ("F32", "f", [2], [1.0, 0.25]),
    "beta_error": ("F32", "f", [2, 2], [1.0, 1.0, 0.125, 1.0]),
    "beta_reconstruction": ("F32", "f", [2, 2], [2.0, 2.0, 0.5, 2.0]),
}


def flat(values: Any) -> list[Any]:
    return [one for value in values for one in flat(value)] if isinstance(values, list) else [values]


def features_file(texts: Mapping[int, str | bytes] = TEXTS, **changes: tuple[str, str, list[int], list[Any]]) -> bytes:
    """Return the bytes of the file; `changes` are tensors as (type, struct code, shape, values)."""
    encoded = [text.encode() if isinstance(text, str) else text for text in texts.values()]
    ends = [sum(map(len, encoded[: number + 1])) for number in range(len(encoded))]
    tensors: dict[str, tuple[str, str, list[int], list[Any]]] = {
        "n_fired": ("I32", "i", [2], [3, 8]),
        "largest": ("F32", "f", [2], [4.0, 3.0]),
        "mean": ("F32", "f", [2], [2.0, 1.5]),
        "histogram": ("I32", "i", [2, 2], [1, 2, 4, 4]),
        "nearest": ("I32", "i", [2, 1], [1, 0]),
        "cosines": ("F32", "f", [2, 1], [0.25, 0.25]),
        "token_ids": ("I32", "i", [2, 2, 3], flat(IDS)),
        "acts": ("F32", "f", [2, 2, 3], flat(ACTS)),
        "n_rows": ("I64", "q", [1], [100]),
        "before": ("I64", "q", [1], [1]),
        "text_ids": ("I32", "i", [3], list(texts)),
        "text_ends": ("I64", "q", [3], ends),
        "text": ("U8", "B", [ends[-1]], list(b"".join(encoded))),
        # " the" and "s" occur in the examples of both latents, " Lämb" only in examples of latent 0.
        "index_ends": ("I64", "q", [3], [2, 3, 5]),
        "index_latents": ("I32", "i", [5], [0, 1, 0, 0, 1]),
    }
    tensors.update(changes)
    header, content = {}, b""
    for name, (dtype, code, shape, values) in tensors.items():
        stored = struct.pack(f"<{len(values)}{code}", *values)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(content), len(content) + len(stored)]}
        content += stored
    encoded_header = json.dumps(header).encode()
    return struct.pack("<Q", len(encoded_header)) + encoded_header + content
