"""Reads, without torch or numpy, the features files in which evaluations record what each latent fires on."""

from __future__ import annotations

import bisect
import contextlib
import math
import mmap
import operator
import re
from array import array
from collections.abc import Container, Iterable, Iterator, Sequence
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from trainer.contract.errors import UserError
from trainer.contract.files import open_plain
from trainer.contract.json_file import convert_as
from trainer.contract.printable import printable
from trainer.contract.runs.crosscoder import OTHER, SHARED, is_confirmed, kind_of, letter, relative_norm
from trainer.contract.runs.explanations import Explanation, ExplanationsFile
from trainer.contract.runs.how_far import exported_tokens
from trainer.contract.runs.latent_notes import LatentNote, LatentNotes, read_notes
from trainer.contract.settings.shards import read_header


def runs_of_tokens(tokens: Sequence[bytes]) -> list[range]:
    """Return the index ranges of the shortest token sequences that do not split a character."""
    starts, ends = _starts(b"".join(tokens)), list(accumulate(map(len, tokens)))
    runs, first = [], 0
    for number, end in enumerate(ends):
        if end in starts or number == len(ends) - 1:
            runs.append(range(first, number + 1))
            first = number + 1
    return runs


def _starts(text: bytes) -> Container[int]:
    """Return the offset of each character and of the end of the text; an invalid byte counts as a character."""
    if text.isascii():
        return range(len(text) + 1)
    characters = text.decode("utf-8", "surrogateescape")
    return {0, *accumulate(len(char.encode("utf-8", "surrogateescape")) for char in characters)}


def whole_characters(text: bytes, begin: int, end: int) -> tuple[int, int]:
    """Extend a byte range to character boundaries, and return its new start and end."""
    while 0 < begin < len(text) and _continues(text[begin]):
        begin -= 1
    while end < len(text) and _continues(text[end]):
        end += 1
    return begin, end


def _continues(byte: int) -> bool:
    """Return whether a byte is a UTF-8 continuation byte."""
    return 0x80 <= byte < 0xC0


def without_cut_ends(tokens: Sequence[bytes], at: int) -> list[bytes]:
    """Return the tokens without incomplete characters at both ends of the text; keep the token at index `at` whole."""
    before, after = b"".join(tokens[:at]), b"".join(tokens[at + 1 :])
    first = next((n for n, byte in enumerate(before) if not _continues(byte)), len(before))
    last = sum(map(len, tokens)) - _unfinished(after)
    kept, begin = [], 0
    for token in tokens:
        kept.append(token[max(0, first - begin) : max(0, last - begin)])
        begin += len(token)
    return kept


def _unfinished(text: bytes) -> int:
    """Return how many bytes at the end of the text belong to an incomplete character."""
    for n, byte in enumerate(reversed(text[-3:]), 1):
        if byte >= 0xC0:
            return n if n < 2 + (byte >= 0xE0) + (byte >= 0xF0) else 0
        if byte < 0x80:
            break
    return 0


# The names of the files that an evaluation writes next to an SAE's weights.
FEATURES, CARD = "features.safetensors", "card.json"
Order = Literal["sparse", "starred", "density", "largest", "stable", "effect", "norm", "latent"]
# Latents are most often interpretable if the share of rows they fire on is within `SPARSE`. Latents that fire on a
# larger share of the rows than `DENSE` are called dense.
SPARSE, DENSE = (1e-4, 1e-2), 0.1
COSINE_BINS = 12
NO_TOKEN = -1
# The maximum number of latents whose tokens are joined in a search for words spanning tokens, starting with the latents
# that fire most often. If there are more candidates, latents already found are skipped. With this limit, a search is
# fast enough to run at each keystroke.
_MOST_JOINED = 1024

# For each tensor: its dtype in the file, the type code for its `array`, and 1 if it has one value per latent, otherwise
# None.
_LAYOUT: dict[str, tuple[str, str, int | None]] = {
    "n_fired": ("I32", "i", 1),
    "largest": ("F32", "f", 1),
    "mean": ("F32", "f", 1),
    "histogram": ("I32", "i", None),
    "nearest": ("I32", "i", None),
    "cosines": ("F32", "f", None),
    "token_ids": ("I32", "i", None),
    "acts": ("F32", "f", None),
    "n_rows": ("I64", "q", None),
    "before": ("I64", "q", None),
    "text_ids": ("I32", "i", None),
    "text_ends": ("I64", "q", None),
    "text": ("U8", "B", None),
    # An inverted index: index_latents[index_ends[k - 1] : index_ends[k]] are the latents with the k-th known token in
    # one of their contexts.
    "index_ends": ("I64", "q", None),
    "index_latents": ("I32", "i", None),
}
# Additional tensors if the evaluation used the language model: token ids and the changes in their logits.
_MOVED: dict[str, tuple[str, str, int | None]] = {
    "promoted": ("I32", "i", None),
    "promoted_logits": ("F32", "f", None),
    "suppressed": ("I32", "i", None),
    "suppressed_logits": ("F32", "f", None),
}
# An additional tensor if the SAE was trained with several seeds: for each latent, the largest cosine with any decoder
# direction of another seed, averaged over the other seeds.
STABILITY = "stability"
_STABLE: dict[str, tuple[str, str, int | None]] = {STABILITY: ("F32", "f", 1)}
# An additional tensor in newer files. Each latent has a partner in every other seed, the latent with the nearest
# direction. The tensor contains the correlation of the activations of a latent and its partner, averaged over the other
# seeds; NaN if the latent never fires.
FIRING = "firing_correlation"
_FIRING: dict[str, tuple[str, str, int | None]] = {FIRING: ("F32", "f", 1)}
# Additional tensors if the evaluation measured the effects of latents on the language model's loss, in nats: the effect
# per token, its standard error over texts (NaN if there are too few texts), and the effect per row on which the latent
# fires. An effect is positive if ablating the latent increases the loss.
EFFECT, EFFECT_ERROR, EFFECT_FIRING = "effect", "effect_error", "effect_per_firing"
_EFFECTS: dict[str, tuple[str, str, int | None]] = dict.fromkeys((EFFECT, EFFECT_ERROR, EFFECT_FIRING), ("F32", "f", 1))
# Additional tensors for a crosscoder: the names of its parts, one a line, and for each latent, each part's share of the
# norms of its scaled decoder rows. For two parts, latent scaling adds the ratios ν and, for each part, β.
PART_NAMES, PART_SHARES = "part_names", "part_shares"
_PARTS: dict[str, tuple[str, str, int | None]] = {PART_NAMES: ("U8", "B", None), PART_SHARES: ("F32", "f", None)}
SCALING: dict[str, tuple[str, str, int | None]] = {
    "nu_error": ("F32", "f", 1),
    "nu_reconstruction": ("F32", "f", 1),
    "beta_error": ("F32", "f", None),
    "beta_reconstruction": ("F32", "f", None),
}
# Additional tensors in newer files: for each latent, the share of its activations on its most common token, and the
# share at its most common position in the text.
_BOUND: dict[str, tuple[str, str, int | None]] = {"token_share": ("F32", "f", 1), "position_share": ("F32", "f", 1)}
# An additional tensor in newer files: the factor from activations of the exported SAE to activations in this file.
ACTS_SCALE = "acts_scale"
_SCALE: dict[str, tuple[str, str, int | None]] = {ACTS_SCALE: ("F32", "f", None)}
# A latent's family is the first one whose condition holds: the latent never fires; it fires on a share of the rows
# above `DENSE`; a share above `BOUND` of its activations is on one token, or at one position; or it fires on a share of
# the rows below the lower limit of `SPARSE`.
FAMILIES = ("silent", "dense", "token", "position", "rare", "other")
Family = Literal["silent", "dense", "token", "position", "rare", "other"]
# With fewer activations than `_LEAST_FIRED`, the most common token or position is meaningless.
BOUND, _LEAST_FIRED = 0.9, 10
_OF_BOUND = ("token", "position")
_FAMILY_FILTER = re.compile(rf"(?<!\S)family:({'|'.join(FAMILIES)})(?!\S)")
_STABLE_FILTER = re.compile(r"(?<!\S)stable:([<>]=?)(\d*\.?\d+)(?!\S)")
_EFFECT_FILTER = re.compile(r"(?<!\S)effect:([<>]=?)(-?\d*\.?\d+(?:e-?\d+)?)(?!\S)")
_NORM_FILTER = re.compile(r"(?<!\S)norm:([<>]=?)(\d*\.?\d+)(?!\S)")
_PART_FILTER = re.compile(r"(?<!\S)(part|confirmed):(\S+)")
_KEEPS = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge}
_STARRED_FILTER = re.compile(r"(?<!\S)starred:(|yes|no)(?!\S)")
_NAMED_FILTER = re.compile(r"(?<!\S)named:(\S*)")
# The order of a list that a filter selects; the first filter that is used counts.
_ORDER_OF: dict[re.Pattern[str], Order] = {
    _STABLE_FILTER: "stable",
    _EFFECT_FILTER: "effect",
    _NORM_FILTER: "norm",
    _STARRED_FILTER: "starred",
    _NAMED_FILTER: "starred",
}
_FILTERS = re.compile(r"(?<!\S)(?:stable|effect|family|norm|part|confirmed|starred|named):\S*")
NO_STABILITY = "no stability across seeds is stored; with several seeds (train.seed = [0, 1, 2]), an evaluation adds it"
NO_EFFECTS = "no effects of latents are stored; `sae-tui eval ID --model auto --effects` measures them"
NO_PARTS = "this SAE is not a crosscoder, so its latents have no parts"
NO_SCALING = "latent scaling was not measured; an evaluation measures it for a crosscoder of two parts"
_CODES = {
    name: code
    for name, (_, code, _) in (
        _LAYOUT | _MOVED | _STABLE | _FIRING | _EFFECTS | _BOUND | _PARTS | SCALING | _SCALE
    ).items()
}


def is_filter(words: str) -> bool:
    """Return whether a search consists only of filters like `stable:>0.7`."""
    return not _FILTERS.sub("", words).strip()


class LogitChange(msgspec.Struct, frozen=True):
    """A token, and how much a latent's decoder direction changes the token's logit; only relative sizes matter."""

    text: str
    logit: float


class Token(msgspec.Struct, frozen=True):
    """A token in a context and the latent's activation on this token, 0 if the latent does not fire.

    Tokens sharing a character are merged into one token with their largest activation.
    """

    text: str
    act: float


class ActivatingExample(msgspec.Struct, frozen=True):
    """A context for a latent; in the context's document, the latent fires most strongly on the token at index `at`."""

    tokens: tuple[Token, ...]
    at: int

    @property
    def act(self) -> float:
        return self.tokens[self.at].act


class LatentPart(msgspec.Struct, frozen=True):
    """A crosscoder's part, its share of a latent's decoder norms, and the latent's β; None if they are unknown."""

    name: str
    share: float
    beta_error: float | None = None
    beta_reconstruction: float | None = None


class Feature(msgspec.Struct, frozen=True):
    """A latent's data: the share of rows on which it fires, its largest and mean activation, and its top contexts.

    `histogram` contains the number of activations in each of several equal bins up to the largest activation. `nearest`
    contains the latents with the most similar decoder directions as pairs (latent, cosine), most similar first.
    `promoted` and `suppressed` are the tokens whose logits the decoder direction changes most, largest change first;
    both are empty if the evaluation did not use the language model. `stability` is the largest cosine with any decoder
    direction of another seed, averaged over the other seeds, or None without other seeds. `firing_correlation` is how
    well its activations correlate with the latents that have these directions, averaged in the same way; None if
    unknown. `family` is one of `FAMILIES`.

    `effect` is the estimated increase of the language model's loss if the latent is ablated, in nats per token, with
    its standard error `effect_error`. `effect_per_firing` is the increase per row on which the latent fires. They are
    None if they were not measured.

    For a crosscoder, `parts` says how much the latent writes in each part, and `part` is the letter of the only part in
    which it writes, "shared" or "other". `nu_error` and `nu_reconstruction` are the ratios of latent scaling: β in the
    part with the smaller share, divided by β in the other part. They are None if they are unknown.

    `starred`, `name` and `note` are the user's own. `noted_at_tokens` is the number of tokens that the SAE had been
    trained on when they were written, or None if they are about the current weights, or if the number is unknown.
    `explanation` is a language model's description of the latent, or None if it has none.
    """

    latent: int
    density: float
    largest: float
    mean: float
    histogram: tuple[int, ...]
    nearest: tuple[tuple[int, float], ...]
    contexts: tuple[ActivatingExample, ...]
    promoted: tuple[LogitChange, ...] = ()
    suppressed: tuple[LogitChange, ...] = ()
    stability: float | None = None
    firing_correlation: float | None = None
    effect: float | None = None
    effect_error: float | None = None
    effect_per_firing: float | None = None
    family: Family = "other"
    parts: tuple[LatentPart, ...] = ()
    part: str = ""
    nu_error: float | None = None
    nu_reconstruction: float | None = None
    starred: bool = False
    name: str = ""
    note: str = ""
    noted_at_tokens: int | None = None
    explanation: Explanation | None = None


class _TokenBytes(dict[int, bytes]):
    """Maps token ids to bytes; an unknown id is mapped to b""."""

    def __missing__(self, token: int) -> bytes:
        return b""


class _FeatureEntry(msgspec.Struct):
    dtype: str
    shape: tuple[Annotated[int, msgspec.Meta(ge=0)], ...]
    data_offsets: tuple[Annotated[int, msgspec.Meta(ge=0)], Annotated[int, msgspec.Meta(ge=0)]]


class Features:
    """The latents of an SAE, read from a features file on demand."""

    def __init__(self, file: Path) -> None:
        # The folder of the SAE. Earlier versions of a features file are in a folder below it, under other names.
        self.folder = file.parent if file.name == FEATURES else file.parent.parent
        self._explained = ExplanationsFile(self.folder)
        try:
            header, self._begin = read_header(file)
            metadata = header.pop("__metadata__", None)
            # The digest of the SAE's weights; "" if it is unknown.
            self.weights = str(metadata.get("weights", "")) if isinstance(metadata, dict) else ""
            self._entries = convert_as(header, dict[str, _FeatureEntry])
            with open_plain(file) as stream:
                self._content = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
            self._check()
        except OSError as error:
            raise UserError(f"{file} cannot be read: {error.strerror or error}") from None
        except (ValueError, KeyError, RecursionError):
            raise UserError(f"{file} was not written by `sae-train eval`; run the command again") from None

    def _check(self) -> None:
        """Raise `ValueError` or `KeyError` if a tensor is missing, truncated, or has the wrong shape."""
        for name, (dtype, code, per_latent) in self._layout.items():
            entry = self._entries[name]
            first, last = entry.data_offsets
            n = math.prod(entry.shape)
            fits = last - first == n * array(code).itemsize and self._begin + last <= len(self._content)
            if entry.dtype != dtype or not fits or (per_latent and entry.shape != (self.n_latents,)):
                raise ValueError(name)
        (n_contexts, width), n_texts = self._entries["token_ids"].shape[1:], self._entries["text_ids"].shape
        same = {
            "acts": (self.n_latents, n_contexts, width),
            "token_ids": (self.n_latents, n_contexts, width),
            "cosines": self._entries["nearest"].shape,
            "text_ends": n_texts,
            "index_ends": n_texts,
            "n_rows": (1,),
            "before": (1,),
        }
        same |= {ACTS_SCALE: (1,)} if ACTS_SCALE in self._entries else {}
        if any(self._entries[name].shape != shape for name, shape in same.items()):
            raise ValueError("shapes")
        if self._tells_moved:
            same_shape = {name: self._entries[name].shape for name in ("promoted", "suppressed")}
            if any(self._entries[f"{name}_logits"].shape != shape for name, shape in same_shape.items()):
                raise ValueError("shapes")
        names = ("nearest", "histogram", *(_MOVED if self._tells_moved else ()))
        per_latent_only = (self._entries[name].shape for name in names)
        if any(len(shape) != 2 or shape[0] != self.n_latents for shape in per_latent_only) or len(n_texts) != 1:
            raise ValueError("shapes")
        if self.has_parts:
            of_parts = [PART_SHARES, *(["beta_error", "beta_reconstruction"] if self.has_scaling else [])]
            if any(self._entries[name].shape != (self.n_latents, len(self.part_names)) for name in of_parts):
                raise ValueError("shapes")
        self._texts, self._ends = self._ints("text_ids"), self._ints("text_ends")
        self._before = self._ints("before")[0]
        if not 0 <= self._before < max(1, width):
            raise ValueError("before")

    @property
    def _tells_moved(self) -> bool:
        """Whether the file contains promoted and suppressed tokens; these require the language model."""
        return self._entries.keys() >= _MOVED.keys()

    @property
    def _layout(self) -> dict[str, tuple[str, str, int | None]]:
        more = (_MOVED if self._tells_moved else {}) | (_STABLE if self.has_stability else {})
        more |= _FIRING if FIRING in self._entries else {}
        more |= (_EFFECTS if self.has_effects else {}) | (_SCALE if ACTS_SCALE in self._entries else {})
        more |= (_PARTS if self.has_parts else {}) | (SCALING if self.has_scaling else {})
        return _LAYOUT | more | (_BOUND if self.has_families else {})

    @property
    def has_parts(self) -> bool:
        """Whether the file says how much each latent writes in each part of a crosscoder."""
        return self._entries.keys() >= _PARTS.keys()

    @property
    def has_scaling(self) -> bool:
        """Whether the file has the results of latent scaling."""
        return self.has_parts and self._entries.keys() >= SCALING.keys()

    @cached_property
    def acts_scale(self) -> float | None:
        """The factor from activations of the exported SAE to activations in this file; None in older files."""
        value = self._floats(ACTS_SCALE)[0] if ACTS_SCALE in self._entries else math.nan
        return value if math.isfinite(value) and value > 0 else None

    @cached_property
    def part_names(self) -> tuple[str, ...]:
        """The names of a crosscoder's parts; empty for other SAEs."""
        if not self.has_parts:
            return ()
        return tuple(map(printable, self._bytes(PART_NAMES, None).decode("utf-8", "replace").split("\n")))

    @cached_property
    def _shares(self) -> list[tuple[float, ...]]:
        n = len(self.part_names)
        flat = self._floats(PART_SHARES)
        return [tuple(flat[first : first + n]) for first in range(0, len(flat), n)]

    @cached_property
    def part_kinds(self) -> list[str]:
        """For each latent, the letter of the only part in which it writes, "shared" or "other"; "" without parts."""
        return list(map(kind_of, self._shares)) if self.has_parts else [""] * self.n_latents

    @property
    def has_families(self) -> bool:
        """Whether the file says how often each latent fires on one token or at one position."""
        return self._entries.keys() >= _BOUND.keys()

    @property
    def has_stability(self) -> bool:
        """Whether the file says how similar each latent is to latents from other seeds."""
        return STABILITY in self._entries

    @cached_property
    def notes(self) -> LatentNotes:
        """The user's notes on latents; `read_notes_again` replaces them."""
        return read_notes(self.folder)

    def read_notes_again(self) -> None:
        """Read the notes again after they have been changed."""
        self.notes = read_notes(self.folder)

    @cached_property
    def _tokens(self) -> int | None:
        """The number of tokens that the SAE was trained on, or None if unknown."""
        return exported_tokens(self.folder)

    @property
    def has_effects(self) -> bool:
        """Whether the file says how much ablating each latent changes the language model's loss."""
        return self._entries.keys() >= _EFFECTS.keys()

    @property
    def n_latents(self) -> int:
        return self._entries["n_fired"].shape[0]

    @property
    def n_rows(self) -> int:
        """The number of rows used to measure the latents."""
        return self._ints("n_rows")[0]

    def order(self, by: Order = "sparse") -> list[int]:
        """Return all latents that fire, in the given order.

        "density", "largest" (activation), "stable" (cosine with other seeds), "effect" (on the loss of the language
        model) and "norm" (a crosscoder's relative norm) put the highest values first; unknown values are 0. "latent"
        sorts by index. With "sparse", the latents that fire on 0.01 to 1 % of the rows come first, sorted by largest
        activation. Rarer latents follow, and then more frequent latents, the densest last. With "starred", all latents
        with a note come first, even if they never fire: the starred ones, then the named ones.
        """
        fired = self._ints("n_fired")
        alive = [latent for latent, n in enumerate(fired) if n > 0]
        if by == "latent":
            return alive
        if by == "sparse":
            return self._sparse_first(alive)
        if by == "starred":
            noted = dict.fromkeys(self._noted)
            return [*noted, *(latent for latent in self._sparse_first(alive) if latent not in noted)]
        keys: Sequence[float] = fired
        if by == "largest":
            keys = self._floats("largest")
        elif by == "stable":
            keys = self.stability
        elif by == "effect":
            keys = self.effects
        elif by == "norm":
            keys = self.relative_norms
        return sorted(alive, key=lambda latent: -keys[latent])

    @property
    def _notes(self) -> dict[int, LatentNote]:
        """The notes on latents that this SAE has."""
        return {latent: note for latent, note in self.notes.by_latent.items() if latent < self.n_latents}

    @property
    def _noted(self) -> list[int]:
        """The latents with a note: starred ones first, then named ones."""
        notes = self._notes
        return sorted(notes, key=lambda latent: (not notes[latent].starred, not notes[latent].name, latent))

    @property
    def relative_norms(self) -> Sequence[float]:
        """The share of the second of two parts, or else the largest share, of each latent's norms; zeros if unknown."""
        return list(map(relative_norm, self._shares)) if self.has_parts else [0.0] * self.n_latents

    @property
    def stability(self) -> Sequence[float]:
        """Each latent's largest decoder cosine with another seed, averaged over the other seeds; zeros if unknown."""
        return self._floats(STABILITY) if self.has_stability else [0.0] * self.n_latents

    @property
    def effects(self) -> Sequence[float]:
        """The increase of the language model's loss if each latent is ablated, in nats per token; zeros if unknown."""
        return self._floats(EFFECT) if self.has_effects else [0.0] * self.n_latents

    def _sparse_first(self, latents: Iterable[int]) -> list[int]:
        """Sort latents by how likely they are to be interpretable."""
        fired, largest, (low, high) = self._ints("n_fired"), self._floats("largest"), SPARSE
        low, high = low * self.n_rows, high * self.n_rows

        def key(latent: int) -> tuple[int, float]:
            n = fired[latent]
            return (2, n) if n > high else (int(n < low), -largest[latent])

        return sorted(latents, key=key)

    @cached_property
    def families(self) -> list[Family]:
        """The family of each latent; without `has_families`, no latent is bound to a token or a position."""
        fired, (low, _) = self._ints("n_fired"), SPARSE
        none = [0.0] * self.n_latents
        tokens, positions = (self._floats(name) if self.has_families else none for name in _BOUND)

        def family(n: int, token: float, position: float) -> Family:
            if n == 0:
                return "silent"
            if n > DENSE * self.n_rows:
                return "dense"
            if n >= _LEAST_FIRED and max(token, position) > BOUND:
                return "token" if token > BOUND else "position"
            return "rare" if n < low * self.n_rows else "other"

        return list(map(family, fired, tokens, positions))

    @property
    def nearest_histogram(self) -> list[int]:
        """The number of latents whose nearest decoder direction has a cosine in each of `COSINE_BINS` bins from 0 to 1.

        A negative cosine counts as 0.
        """
        counts = [0] * COSINE_BINS
        n_nearest = self._entries["cosines"].shape[1]
        for cosine in self._floats("cosines")[:: max(1, n_nearest)]:
            if math.isfinite(cosine):
                counts[max(0, min(COSINE_BINS - 1, int(cosine * COSINE_BINS)))] += 1
        return counts

    def search(self, words: str) -> list[int]:
        """Return the latents whose contexts contain the given words: both lists of `search_apart`, concatenated."""
        return [latent for some in self.search_apart(words) for latent in some]

    def search_apart(self, words: str) -> tuple[list[int], list[int]]:
        """Return the latents whose contexts contain the given words, ignoring case.

        The words may span several tokens. The first list contains latents whose strongest token in a context is part of
        the words, sorted by the number of such contexts. The second list has all other matches, in the order "sparse",
        also latents whose explanation contains the words.
        For words spanning tokens, only the `_MOST_JOINED` most frequent latents are searched.

        `stable:>0.7` and `stable:<0.3` keep only latents whose stability is above or below that cosine, `effect:>0.001`
        keeps latents with a larger effect on the language model's loss, and `family:token` keeps only latents of that
        family. For a crosscoder, `part:B` keeps latents that write only in
        the second part, `confirmed:B` only the ones that latent scaling confirms, and `norm:>0.9` only latents with a
        larger relative norm. `starred:` keeps only latents with a star (`starred:no` the others), and `named:king` only
        latents with "king" in their name (`named:` all with a name). Without other words, the first list contains all
        latents that are kept. Raise `UserError` if the values are unknown.
        """
        filters = [*self._filters(words)]
        if not filters:
            return self._search_words(words)
        rest = _without_filters(words)
        by: Order = next((order for pattern, order in _ORDER_OF.items() if pattern.search(words)), "sparse")
        firing, others = self._search_words(rest) if rest else (self.order(by), [])
        kept = set(range(self.n_latents)).intersection(*filters)
        return [one for one in firing if one in kept], [one for one in others if one in kept]

    def search_notes(self, words: str) -> list[int]:
        """Return the latents whose name or note contains the words, and that all filters keep; [] without words."""
        rest = _without_filters(words)
        if not rest:
            return []
        found = [latent for latent in self._noted if self.notes.by_latent[latent].has(rest)]
        return [latent for latent in found if all(latent in kept for kept in self._filters(words))] if found else []

    def _filters(self, words: str) -> Iterator[set[int]]:
        """Yield the latents that each filter in `words` keeps; raise `UserError` for an unknown filter."""
        for one in _FILTERS.findall(words):
            if not any(pattern.fullmatch(one) for pattern in (*_ORDER_OF, _FAMILY_FILTER, _PART_FILTER)):
                of_crosscoder = "for a crosscoder: norm:>0.9, part:B or confirmed:B"
                families = f"family: and one of {', '.join(FAMILIES)}; starred: or named:WORD; {of_crosscoder}"
                raise UserError(f"{one} is unknown; write stable:>0.7, effect:>0.001, or {families}")
        for sign, than in _STABLE_FILTER.findall(words):
            if not self.has_stability:
                raise UserError(f"stable: {NO_STABILITY}")
            yield {latent for latent, cosine in enumerate(self.stability) if _KEEPS[sign](cosine, float(than))}
        for sign, than in _EFFECT_FILTER.findall(words):
            if not self.has_effects:
                raise UserError(f"effect: {NO_EFFECTS}")
            yield {latent for latent, effect in enumerate(self.effects) if _KEEPS[sign](effect, float(than))}
        for family in _FAMILY_FILTER.findall(words):
            if family in _OF_BOUND and not self.has_families:
                raise UserError(
                    f"family:{family} is unknown for this SAE, which an older version evaluated; evaluate it again"
                )
            yield {latent for latent, own in enumerate(self.families) if own == family}
        for sign, than in _NORM_FILTER.findall(words):
            if not self.has_parts:
                raise UserError(f"norm: {NO_PARTS}")
            yield {latent for latent, norm in enumerate(self.relative_norms) if _KEEPS[sign](norm, float(than))}
        for word, name in _PART_FILTER.findall(words):
            yield self._in_part(word, name)
        for wanted in _STARRED_FILTER.findall(words):
            starred = {latent for latent, note in self._notes.items() if note.starred}
            yield set(range(self.n_latents)) - starred if wanted == "no" else starred
        for name in _NAMED_FILTER.findall(words):
            named = {latent: note.name.casefold() for latent, note in self._notes.items() if note.name}
            yield {latent for latent, own in named.items() if name.casefold() in own}

    def _in_part(self, word: str, name: str) -> set[int]:
        """Return the latents that `part:name` or `confirmed:name` keeps; a part is given by its letter or name."""
        if not self.has_parts:
            raise UserError(f"{word}: {NO_PARTS}")
        letters = [letter(part) for part in range(len(self.part_names))]
        known = dict(zip(map(str.casefold, self.part_names), letters, strict=True))
        known |= {one.casefold(): one for one in letters} | ({SHARED: SHARED, OTHER: OTHER} if word == "part" else {})
        kind = known.get(name.casefold())
        if kind is None:
            raise UserError(
                f"{word}:{name} is unknown; write {word}: and one of {', '.join(dict.fromkeys(known.values()))}"
            )
        own = {latent for latent, of_latent in enumerate(self.part_kinds) if of_latent == kind}
        if word == "part":
            return own
        if not self.has_scaling:
            raise UserError(f"{word}: {NO_SCALING}")
        ratios = list(zip(self._floats("nu_error"), self._floats("nu_reconstruction"), strict=True))
        return {latent for latent in own if is_confirmed(self._shares[latent], *ratios[latent])}

    def _search_words(self, words: str) -> tuple[list[int], list[int]]:
        wanted = words.casefold()
        texts = [self._bytes_at(place) for place in range(len(self._texts))]
        places = [place for place, one in enumerate(texts) if wanted in _folded(one)]
        strongest = self._strongest_on({self._texts[place] for place in places}) if places else {}
        found = {*strongest}
        if len(found) < self.n_latents:
            found |= self._with_tokens(places)
        table = _TokenBytes(zip(self._texts, texts, strict=True))
        fired = self._ints("n_fired")
        joined = sorted(self._with_parts(words, texts, found), key=lambda latent: -fired[latent])[:_MOST_JOINED]
        over_tokens = [latent for latent in joined if self._has(latent, wanted, table)]
        found.update(over_tokens)
        for latent in over_tokens:
            if n_contexts := self._n_contexts_on(latent, wanted, table):
                strongest[latent] = n_contexts
        found.update(one.latent for one in self.explanations.values() if wanted in one.text.casefold())
        # Sorting is stable, so latents with equal keys stay sorted by index.
        firing = sorted(sorted(strongest), key=strongest.__getitem__, reverse=True)
        return firing, self._sparse_first(sorted(found - strongest.keys()))

    def _strongest_on(self, ids: Container[int]) -> dict[int, int]:
        """For each latent, count the contexts in which its strongest token is one of the given tokens."""
        tokens, (n_contexts, width) = self._numbers("token_ids"), self._entries["token_ids"].shape[1:]
        counts: dict[int, int] = {}
        for number, token in enumerate(tokens[self._before :: max(1, width)]):
            if token in ids:
                latent = number // n_contexts
                counts[latent] = counts.get(latent, 0) + 1
        return counts

    def _with_tokens(self, places: Sequence[int]) -> set[int]:
        """Return the latents with one of the given tokens in a context; `places` are indices of known tokens."""
        ends, latents = self._ints("index_ends"), self._numbers("index_latents")
        fire: set[int] = set()
        for place in places:
            fire.update(latents[max(0, ends[place - 1]) if place else 0 : max(0, ends[place])])
            if len(fire) >= self.n_latents:
                break
        return {latent for latent in fire if 0 <= latent < self.n_latents}

    def _with_parts(self, words: str, texts: Sequence[bytes], found: set[int]) -> set[int]:
        """Return the latents whose contexts may contain the words, split over several tokens.

        These contexts have a token ending with the start of the words, and a token starting with their end. If there
        are more than `_MOST_JOINED` candidates, skip latents in `found`.
        """
        forms = {form.encode("utf-8", "replace").lower() for form in (words, words.casefold(), words.upper())}
        begins = tuple(form[:n] for form in forms for n in range(1, len(form)))
        ends = tuple(form[n:] for form in forms for n in range(1, len(form)))
        lowered = [text.lower() for text in texts]
        first = self._with_tokens([place for place, text in enumerate(lowered) if text.endswith(begins)])
        last = self._with_tokens([place for place, text in enumerate(lowered) if text.startswith(ends)])
        both = first & last
        return both if len(both) <= _MOST_JOINED else both - found

    def _has(self, latent: int, wanted: str, table: _TokenBytes) -> bool:
        """Return whether any of a latent's contexts contains the words."""
        # Join the contexts with a byte that never occurs in text.
        return wanted in _folded(b"\xff".join(b"".join(tokens) for tokens in self._tokens_of(latent, table)))

    def _n_contexts_on(self, latent: int, wanted: str, table: _TokenBytes) -> int:
        """Return how many contexts have the latent's strongest token within the words."""
        return sum(_are_on(wanted, list(tokens), self._before) for tokens in self._tokens_of(latent, table))

    def _tokens_of(self, latent: int, table: _TokenBytes) -> Iterator[Iterator[bytes]]:
        """Yield the tokens in each of a latent's contexts."""
        ids, width = self._ints("token_ids", latent), self._entries["token_ids"].shape[2]
        for first in range(0, len(ids), max(1, width)):
            yield map(table.__getitem__, ids[first : first + width])

    def feature(self, latent: int) -> Feature:
        """Return the data for a latent; raise `UserError` if there is no such latent."""
        if not 0 <= latent < self.n_latents:
            raise UserError(f"there is no latent {latent}; the SAE has latents 0 to {self.n_latents - 1:,}")
        nearest = zip(self._ints("nearest", latent), self._floats("cosines", latent), strict=True)
        return Feature(
            latent=latent,
            density=self._ints("n_fired", latent)[0] / max(1, self.n_rows),
            largest=self._floats("largest", latent)[0],
            mean=self._floats("mean", latent)[0],
            histogram=tuple(self._ints("histogram", latent)),
            nearest=tuple(nearest),
            contexts=tuple(self._contexts(latent)),
            promoted=self._moved("promoted", latent),
            suppressed=self._moved("suppressed", latent),
            stability=self._floats(STABILITY, latent)[0] if self.has_stability else None,
            firing_correlation=self._firing_correlation(latent),
            effect=self._effect(EFFECT, latent),
            effect_error=self._effect(EFFECT_ERROR, latent),
            effect_per_firing=self._effect(EFFECT_FIRING, latent),
            family=self.families[latent],
            parts=tuple(self._parts(latent)),
            part=self.part_kinds[latent],
            nu_error=self._ratio("nu_error", latent),
            nu_reconstruction=self._ratio("nu_reconstruction", latent),
            explanation=self._explained.of(self.weights).get(latent),
            **self._own(latent),
        )

    def _own(self, latent: int) -> dict[str, Any]:
        """Return the fields of a latent that the user has written."""
        if (note := self.notes.by_latent.get(latent)) is None:
            return {}
        other = None if note.is_of(self.weights, self._tokens) else note.tokens
        return {"starred": note.starred, "name": note.name, "note": note.note, "noted_at_tokens": other}

    @property
    def explanations(self) -> dict[int, Explanation]:
        """The stored descriptions of this SAE's latents; they are read again if their file has changed."""
        return {latent: one for latent, one in self._explained.of(self.weights).items() if latent < self.n_latents}

    def _firing_correlation(self, latent: int) -> float | None:
        value = self._floats(FIRING, latent)[0] if FIRING in self._entries else math.nan
        return value if math.isfinite(value) else None

    def _effect(self, name: str, latent: int) -> float | None:
        return _finite(self._floats(name, latent)[0]) if self.has_effects else None

    def _parts(self, latent: int) -> Iterator[LatentPart]:
        for number, name in enumerate(self.part_names):
            betas = [
                _finite(self._floats(tensor, latent)[number]) if self.has_scaling else None
                for tensor in ("beta_error", "beta_reconstruction")
            ]
            yield LatentPart(name, self._shares[latent][number], *betas)

    def _ratio(self, name: str, latent: int) -> float | None:
        return _finite(self._floats(name, latent)[0]) if self.has_scaling else None

    def _moved(self, name: str, latent: int) -> tuple[LogitChange, ...]:
        if not self._tells_moved:
            return ()
        logits = self._floats(f"{name}_logits", latent)
        return tuple(
            LogitChange(self.text(one), logit) for one, logit in zip(self._ints(name, latent), logits, strict=True)
        )

    def _contexts(self, latent: int) -> list[ActivatingExample]:
        n_contexts, width = self._entries["token_ids"].shape[1:]
        ids, acts = self._ints("token_ids", latent), self._floats("acts", latent)
        contexts = []
        for first in range(0, n_contexts * width, width):
            if ids[first + self._before] == NO_TOKEN:
                break
            places = [at for at in range(first, first + width) if ids[at] != NO_TOKEN]
            tokens = [self._token(ids[at]) for at in places]
            contexts.append(example_of(tokens, [acts[at] for at in places], places.index(first + self._before)))
        return contexts

    def text(self, token: int) -> str:
        """Return a token's text, or its id in brackets if the text is unknown.

        Bytes of incomplete characters are written as backslash escapes.
        """
        return self._token(token).decode("utf-8", "backslashreplace")

    def _token(self, token: int) -> bytes:
        at = bisect.bisect_left(self._texts, token)
        is_known = at < len(self._texts) and self._texts[at] == token
        return self._bytes_at(at) if is_known else f"[{token}]".encode()

    def _bytes_at(self, place: int) -> bytes:
        """Return the bytes of the known token at index `place`."""
        first, last = self._ends[place - 1] if place else 0, self._ends[place]
        begin = self._begin + self._entries["text"].data_offsets[0]
        return self._content[begin + first : begin + last]

    def _ints(self, name: str, latent: int | None = None) -> array[int]:
        numbers: array[int] = array(_CODES[name])
        numbers.frombytes(self._bytes(name, latent))
        return numbers

    def _floats(self, name: str, latent: int | None = None) -> array[float]:
        numbers: array[float] = array(_CODES[name])
        numbers.frombytes(self._bytes(name, latent))
        return numbers

    def _numbers(self, name: str) -> memoryview[int]:
        """Return a view of an integer tensor without copying it, because the tokens for 65,536 latents take 100 MiB."""
        first, last = (self._begin + offset for offset in self._entries[name].data_offsets)
        return memoryview(self._content)[first:last].cast(_CODES[name])  # type: ignore[call-overload,no-any-return]

    def _bytes(self, name: str, latent: int | None) -> bytes:
        """Return the raw bytes of a tensor, or only the bytes for one latent."""
        entry = self._entries[name]
        first, last = entry.data_offsets
        if latent is not None:
            n_bytes = math.prod(entry.shape[1:]) * array(_CODES[name]).itemsize
            first, last = first + latent * n_bytes, first + (latent + 1) * n_bytes
        return self._content[self._begin + first : self._begin + last]


def _without_filters(words: str) -> str:
    return " ".join(_FILTERS.sub(" ", words).split())


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def is_of_weights(file: Path | None, weights: str) -> bool:
    """Return whether a features file belongs to the given weights; older files record no weights and always match."""
    if file is None:
        return False
    with contextlib.suppress(OSError, ValueError):
        header, _ = read_header(file)
        metadata = header.get("__metadata__")
        return not isinstance(metadata, dict) or metadata.get("weights", weights) == weights
    return False


def example_of(tokens: Sequence[bytes], acts: Sequence[float], at: int) -> ActivatingExample:
    """Convert tokens to a context; `at` is the index of the strongest token."""
    kept = without_cut_ends(tokens, at)
    runs = runs_of_tokens(kept)
    joined = (b"".join(kept[run.start : run.stop]).decode("utf-8", "replace") for run in runs)
    strongest = (max(acts[run.start : run.stop]) for run in runs)
    pieces = tuple(Token(text, act) for text, act in zip(joined, strongest, strict=True))
    return ActivatingExample(pieces, next(number for number, run in enumerate(runs) if at in run))


def _are_on(wanted: str, tokens: Sequence[bytes], at: int) -> bool:
    """Return whether the words occur in the text and overlap the token at `at`."""
    text = b"".join(tokens)
    if wanted not in _folded(text):
        return False
    begin = len(b"".join(tokens[:at]))
    begin, end = whole_characters(text, begin, begin + len(tokens[at]))
    before, own, after = (_folded(part) for part in (text[:begin], text[begin:end], text[end:]))
    reach = len(wanted) - 1
    return wanted in before[max(0, len(before) - reach) :] + own + after[:reach]


def _folded(text: bytes) -> str:
    return text.decode("utf-8", "replace").casefold()
