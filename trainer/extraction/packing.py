"""Splits documents into contexts of tokens, either packed without padding or with one document per context."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from trainer.contract.errors import UserError
from trainer.extraction.chat_template import chat_ids
from trainer.extraction.text import Document, mended
from trainer.extraction.token_bytes import token_bytes

Ids = NDArray[np.int64]
# The padding value in `positions` and `documents`.
PADDING = -1
# The number of documents per tokenizer call. The tokenizer distributes them over the CPU cores.
_AT_ONCE = 64

# A text that tokenizers with different rules for words, digits, spaces and scripts split differently.
_PROBE = "The cat's 1234567 dogs don't run;  it costs $3.50 (über 20%).\n\n\tdef f(x_1): return x**2  # naïve 你好 🙂 "


class Tokens(NamedTuple):
    """A document's tokens, and the special tokens to put before and after each of its pieces."""

    ids: list[int]
    before: list[int]
    after: list[int]


class ContextBatch(NamedTuple):
    """A batch of contexts, as int64 arrays [n_contexts, n_tokens].

    `positions` restarts at 0 in each piece of a document, and `documents` contains document numbers. At padding tokens,
    both contain `PADDING`.
    """

    ids: Ids
    positions: Ids
    documents: Ids


class Tokenizer:
    """A model's tokenizer, with the special tokens it adds before and after a document."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.name = type(tokenizer).__name__
        # Prevent warnings about documents that exceed the model's maximum length; such documents are split later.
        tokenizer.model_max_length = 10**12
        bare, whole = self._encode(["a"], special=False)[0], self._encode(["a"], special=True)[0]
        start = next((at for at in range(len(whole)) if whole[at : at + len(bare)] == bare), None)
        if not bare or start is None:
            raise UserError("model.path: the tokenizer in its folder cannot tokenize text; add its tokenizer.json")
        self.before, self.after = whole[:start], whole[start + len(bare) :]
        self.special = sorted({*tokenizer.all_special_ids, *self.before, *self.after})
        # The number of documents in which unpaired surrogates were replaced.
        self.n_mended = 0

    def require_context(self, context: int) -> None:
        """Raise `UserError` if the special tokens around a document would fill an entire context."""
        if context <= (n := len(self.before) + len(self.after)):
            around = f"the model's tokenizer puts {n} special tokens around each piece of a text"
            raise UserError(f"text.context: must be above {n}, since {around}")

    def tokens(self, documents: Iterable[Document]) -> Iterator[Tokens]:
        """Yield each document's tokens; raise `UserError` for a chat if the tokenizer has no chat template."""
        remaining = iter(documents)
        while some := [self._whole(one) for one in itertools.islice(remaining, _AT_ONCE)]:
            texts = iter(self._encode([one for one in some if isinstance(one, str)], special=False))
            for one in some:
                if isinstance(one, str):
                    yield Tokens(next(texts), self.before, self.after)
                elif one and isinstance(one[0], dict):
                    yield Tokens(chat_ids(self._tokenizer, one), [], [])
                else:
                    yield Tokens(list(one), [], [])  # type: ignore[arg-type]

    def _whole(self, document: Document) -> Document:
        """Return a document with its unpaired surrogates replaced, and count it in `n_mended` if it had any."""
        is_chat = not isinstance(document, str) and bool(document) and isinstance(document[0], dict)
        if not is_chat and (not isinstance(document, str) or document.isascii()):
            return document
        whole: Document = mended(document)
        self.n_mended += whole != document
        return whole

    def token_bytes(self) -> list[bytes]:
        """Return each token's bytes, in token id order, including a word's leading space."""
        return token_bytes(self._tokenizer)

    def rules(self) -> list[Any]:
        """Return everything that determines token ids, as JSON-compatible values."""
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        own = backend.to_str() if backend else sorted(self._tokenizer.get_vocab().items())
        return [own, self.before, self.after, self._tokenizer.chat_template]

    def chat(self, message: str, *, prompts: bool) -> list[int]:
        """Return the ids of a chat with one message from the user; with `prompts`, the assistant's turn begins."""
        return chat_ids(self._tokenizer, [{"role": "user", "content": message}], prompts=prompts)

    @property
    def end(self) -> int | None:
        """The id of the token that ends a text, or None."""
        end: int | None = self._tokenizer.eos_token_id
        return end

    @property
    def reads_chats(self) -> bool:
        return self._tokenizer.chat_template is not None

    def differs_from(self, other: Tokenizer) -> str:
        """Return how another tokenizer's ids for the same text differ, or "" if both read text in the same way.

        Chat templates and added tokens that only one tokenizer has are not compared.
        """
        if (self.before, self.after) != (other.before, other.after):
            return f"they put {self._around} and {other._around} around a text"
        ids, others = self._tokenizer.get_vocab(), other._tokenizer.get_vocab()
        own, theirs = self._tokenizer.added_tokens_decoder, other._tokenizer.added_tokens_decoder
        added = {*own, *theirs}
        changed = [
            token for token, number in ids.items() if others.get(token, number if number in added else None) != number
        ]
        if changed:
            return f"{changed[0]!r} is token {ids[changed[0]]} of the first, and {others.get(changed[0])} of the second"
        if renamed := [number for number in own if str(theirs.get(number, own[number])) != str(own[number])]:
            number = renamed[0]
            return f"token {number} is {str(own[number])!r} in the first, and {str(theirs[number])!r} in the second"
        n, n_others = (len({*table.values()} - added) for table in (ids, others))
        if n != n_others:
            return f"they have {n:,} and {n_others:,} tokens"
        same = self._encode([_PROBE], special=False) == other._encode([_PROBE], special=False)
        return "" if same else "they split a text into different tokens"

    @property
    def _around(self) -> str:
        return f"the special tokens {[*self.before, *self.after]}" if self.before or self.after else "no special tokens"

    def _encode(self, texts: list[str], *, special: bool) -> list[list[int]]:
        if not texts:
            return []
        encoded = self._tokenizer(texts, add_special_tokens=special, return_attention_mask=False)
        return list(encoded["input_ids"])


def pack(documents: Iterable[Tokens], length: int) -> Iterator[ContextBatch]:
    """Pack consecutive pieces of documents into contexts of `length` tokens, and yield each context as a batch of one.

    The last context may be shorter.
    """
    pieces: list[tuple[int, list[int]]] = []
    left = length
    for number, (ids, before, after) in enumerate(documents):
        at = 0
        while at < len(ids):
            n = max(0, left - len(before) - len(after))
            piece = (before + ids[at : at + n] + after)[:left]
            at += n
            pieces.append((number, piece))
            left -= len(piece)
            if not left:
                yield _context(pieces)
                pieces, left = [], length
    if pieces:
        yield _context(pieces)


def separate(documents: Iterable[Tokens], length: int) -> Iterator[ContextBatch]:
    """Yield contexts of at most `length` tokens, each a piece of a single document and a batch of one."""
    for number, (ids, before, after) in enumerate(documents):
        n = length - len(before) - len(after)
        for at in range(0, len(ids), n):
            yield _context([(number, before + ids[at : at + n] + after)])


def batches(contexts: Iterable[ContextBatch], n: int, *, fills: bool) -> Iterator[ContextBatch]:
    """Yield batches of up to `n` contexts, in order.

    With `fills`, shorter contexts are padded at the end; without it, all contexts in a batch have the same length.
    """
    groups: Iterable[Iterable[ContextBatch]] = [contexts]
    if not fills:
        groups = (of_one_length for _, of_one_length in itertools.groupby(contexts, lambda context: context.ids.size))
    for group in groups:
        remaining = iter(group)
        while some := list(itertools.islice(remaining, n)):
            yield ContextBatch(
                *(_stack([context[field][0] for context in some], 0 if field == 0 else PADDING) for field in range(3))
            )


def _context(pieces: list[tuple[int, list[int]]]) -> ContextBatch:
    ids = np.concatenate([np.asarray(piece, np.int64) for _, piece in pieces])
    positions = np.concatenate([np.arange(len(piece)) for _, piece in pieces])
    documents = np.concatenate([np.full(len(piece), number) for number, piece in pieces])
    return ContextBatch(ids[None], positions[None], documents[None])


def _stack(rows: list[Ids], filling: int) -> Ids:
    stacked = np.full((len(rows), max(map(len, rows))), filling)
    for row, into in zip(rows, stacked, strict=True):
        into[: len(row)] = row
    return stacked
