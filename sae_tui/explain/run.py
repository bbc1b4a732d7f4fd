"""Explains latents in several threads, and stores the explanations as they are done."""

from __future__ import annotations

import contextlib
import functools
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from sae_tui.explain import prompts
from sae_tui.explain.client import Client, NoAnswer, Stopped
from sae_tui.explain.examples import Chosen, Question, balanced_accuracy, choose
from sae_tui.explain.prompts import Prompt, UnreadableAnswer, description_in, numbers_in
from trainer.contract.errors import UserError
from trainer.contract.runs.explanations import EXPLANATIONS, Explanation, read_explanations, record
from trainer.contract.runs.features import Features

# This many failed latents in a row end a run.
MOST_FAILED = 10
# The size of a file, in bytes, above which results are stored together; about 10,000 explanations.
LARGE_FILE = 4 << 20
# The costs of all latents are estimated from this number of latents, with descriptions of this length.
_SAMPLED, _DESCRIPTION = 50, "x" * 100
_TICK_S = 0.5
T = TypeVar("T")


class TokenEstimate(NamedTuple):
    """The expected numbers of latents, requests, and tokens."""

    n_latents: int
    n_requests: int
    prompt_tokens: int
    completion_tokens: int


class Explainer:
    """Explains the latents of one features file; several threads may use it at once."""

    def __init__(self, features: Features, model: str, seed: int = 0) -> None:
        self._features, self._model, self._seed = features, model, seed
        self._alive = features.order("latent")

    def missing(self, folder: Path, latents: Sequence[int]) -> list[int]:
        """Return the latents without an explanation by this model with these prompts, for these weights."""
        known, of = read_explanations(folder), (self._model, prompts.VERSION, self._features.weights)
        done = {one.latent for one in known.values() if not one.problem and (one.model, one.prompts, one.weights) == of}
        return [latent for latent in latents if latent not in done]

    def estimate(self, latents: Sequence[int]) -> TokenEstimate:
        """Return the expected costs, from the prompts of some of the latents."""
        sample = latents[:: max(1, len(latents) // _SAMPLED)]
        asked = [prompt for latent in sample for prompt in self._prompts(latent)]
        scale = len(latents) / max(1, len(sample))
        sums = len(asked), sum(one.n_tokens for one in asked), sum(one.n_answer_tokens for one in asked)
        return TokenEstimate(len(latents), *(round(scale * one) for one in sums))

    def _prompts(self, latent: int) -> Iterator[Prompt]:
        chosen, largest = self._chosen(latent)
        yield prompts.explain(chosen.shown, largest)
        yield from (prompts.detect(_DESCRIPTION, [one.text for one in some]) for some in chosen.detection)
        yield from (prompts.fuzz(_DESCRIPTION, [one.text for one in some]) for some in chosen.fuzzing)

    def _chosen(self, latent: int) -> tuple[Chosen, float]:
        feature = self._features.feature(latent)
        return choose(self._features, feature, self._alive, self._seed), feature.largest

    def explain(self, client: Client, latent: int) -> Explanation:
        """Describe a latent and score the description; an explanation with a `problem` says what failed."""
        chosen, largest = self._chosen(latent)
        asking = _Asking(client)
        description, problem = "", ""
        scores: dict[str, float] = {}
        try:
            if not chosen.shown:
                raise UnreadableAnswer("no text is stored on which it fires")
            description = asking.ask(prompts.explain(chosen.shown, largest), description_in)
            for name, template, requests in (
                ("detection", prompts.detect, chosen.detection),
                ("fuzzing", prompts.fuzz, chosen.fuzzing),
            ):
                scores |= asking.score(name, description, template, requests)
        except (NoAnswer, UnreadableAnswer) as error:
            problem = str(error)
        n_examples = sum(map(len, (*chosen.detection, *chosen.fuzzing))) if scores else 0
        return Explanation(
            latent=latent, text=description, problem=problem, n_examples=n_examples, n_unparsed=asking.n_unreadable,
            model=self._model, prompts=prompts.VERSION, time=time.time(), weights=self._features.weights,
            **scores,
        )  # fmt: skip


class _Asking:
    """Asks about one latent, each question once more if the answer cannot be read, and counts such answers."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self.n_unreadable = 0

    def ask(self, prompt: Prompt, read: Callable[[str], T]) -> T:
        first, then = prompt.schemas
        try:
            return self._read(prompt.text, first, read)
        except (NoAnswer, UnreadableAnswer) as error:
            if isinstance(error, NoAnswer) and not error.may_repeat:
                raise
        # Bound to a schema, some models write spaces until the answer is cut off; others need it to end at all.
        return self._read(f"{prompt.text}\n\n{prompts.AGAIN.format(form=prompt.form)}", then, read)

    def _read(self, text: str, schema: Mapping[str, Any] | None, read: Callable[[str], T]) -> T:
        answer = self._client.ask(text, schema).text
        try:
            return read(answer)
        except UnreadableAnswer:
            self.n_unreadable += 1
            raise

    def score(
        self,
        name: str,
        description: str,
        template: Callable[[str, Sequence[str]], Prompt],
        requests: Sequence[Sequence[Question]],
    ) -> dict[str, float]:
        """Return a score and its error, or {} if there are no questions."""
        answers: list[tuple[bool, bool]] = []
        for questions in requests:
            read = functools.partial(numbers_in, n=len(questions))
            chosen = self.ask(template(description, [one.text for one in questions]), read)
            answers += [(one.is_right, number in chosen) for number, one in enumerate(questions, 1)]
        found = balanced_accuracy(answers)
        return {name: found[0], f"{name}_error": found[1]} if found else {}


def _next(done: queue.SimpleQueue[Explanation | Exception]) -> Explanation | Exception | None:
    with contextlib.suppress(queue.Empty):
        return done.get(timeout=_TICK_S)
    return None


class Run:
    """Explains latents with a client, `parallel` at a time, and stores them as they are done."""

    def __init__(self, explainer: Explainer, client: Client, folder: Path, parallel: int) -> None:
        self._explainer, self._client, self._folder, self._parallel = explainer, client, folder, parallel
        self._lock = threading.Lock()
        # The explanations that are not stored yet, and when they are.
        self._pending: list[Explanation] = []
        self._store_at = 0.0
        self.n_failed = self.n_done = 0

    def explain(self, latents: Sequence[int]) -> Iterator[Explanation | None]:
        """Yield the explanations in the order in which they are done, and None after `_TICK_S` without one.

        Raise `UserError` if the run cannot continue.
        """
        waiting: queue.SimpleQueue[int] = queue.SimpleQueue()
        for latent in latents:
            waiting.put(latent)
        done: queue.SimpleQueue[Explanation | Exception] = queue.SimpleQueue()
        for number in range(min(self._parallel, len(latents))):
            # Daemon threads, since a thread that connects to a server cannot be interrupted.
            threading.Thread(target=self._work, args=(waiting, done), name=f"explain-{number}", daemon=True).start()
        in_a_row = 0
        try:
            for _ in latents:
                while (one := _next(done)) is None:
                    yield None
                if isinstance(one, Exception):
                    raise one
                in_a_row = in_a_row + 1 if one.problem else 0
                yield one
                if in_a_row >= MOST_FAILED:
                    raise UserError(f"{in_a_row} latents in a row failed; the last one because {one.problem}")
        finally:
            self._client.stop()
            with self._lock:
                self._store()

    def _work(self, waiting: queue.SimpleQueue[int], done: queue.SimpleQueue[Explanation | Exception]) -> None:
        with contextlib.suppress(queue.Empty, Stopped):
            while True:
                latent = waiting.get_nowait()
                try:
                    done.put(self._explain(latent))
                except Stopped:
                    raise
                except Exception as error:
                    done.put(error)
                    return

    def _explain(self, latent: int) -> Explanation:
        """Explain a latent, and store the result at once unless the file is large."""
        one = self._explainer.explain(self._client, latent)
        with self._lock:
            self._pending.append(one)
            if time.monotonic() >= self._store_at:
                self._store()
            self.n_done += 1
            self.n_failed += bool(one.problem)
        return one

    def _store(self) -> None:
        began = time.monotonic()
        pending, self._pending = self._pending, []
        if pending:
            record(self._folder, *pending)
            # Storing rewrites the file, which takes 1 s with 131,072 latents. It may take a tenth of the time.
            is_large = (self._folder / EXPLANATIONS).stat().st_size > LARGE_FILE
            self._store_at = time.monotonic() + 9 * (time.monotonic() - began) * is_large
