"""`sae-tui explain`: describes latents with a language model, and shows the stored descriptions."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Sequence
from pathlib import Path

from sae_tui.cli_commands.context import CommandContext
from sae_tui.cli_commands.features import chosen_file
from sae_tui.cli_commands.output import say, show_json, show_table, warn
from sae_tui.cli_commands.selection import confirm, refuse_without_terminal
from sae_tui.explain.client import Client, key_from_environment
from sae_tui.explain.run import Explainer, Run, TokenEstimate
from sae_tui.jobs.features import score_words
from trainer.contract.errors import UsageError, UserError
from trainer.contract.exits import Exit
from trainer.contract.progress import Progress, Reached
from trainer.contract.runs.explanations import CHANCE, Explanation, read_explanations, summary_of
from trainer.contract.runs.features import Features
from trainer.contract.settings.typed import cut
from trainer.contract.wording import count, plural

# A run with more requests or tokens asks for confirmation.
MANY_REQUESTS, MANY_TOKENS = 2000, 2_000_000
_MOST_PARALLEL = 256


def explain(context: CommandContext, flags: argparse.Namespace) -> int:
    """Explain latents if a server is given, and print the stored explanations."""
    _refuse_contradictions(flags)
    file = chosen_file(context, flags)
    features = Features(file)
    for latent in flags.latent:
        features.feature(latent)
    if flags.url is None:
        _show(context, features, file.parent, flags.latent, None)
        return Exit.DONE
    session = _Session(context, flags, features, file.parent)
    problem = session.run()
    if not (problem and context.as_json):
        _show(context, features, file.parent, session.latents, session)
    if problem:
        raise problem
    return Exit.FAILED if session.n_failed and session.n_failed == session.n_explained else Exit.DONE


def _refuse_contradictions(flags: argparse.Namespace) -> None:
    if (flags.url is None) != (flags.model is None):
        has, lacks = ("--url", "--model") if flags.model is None else ("--model", "--url")
        raise UsageError(f"{has}: needs {lacks} too, as in --url http://localhost:8000/v1 --model NAME")
    if flags.model is not None and not flags.model.strip():
        raise UsageError("--model: must be the name of a language model on the server")
    if flags.parallel > _MOST_PARALLEL:
        raise UsageError(f"--parallel: must be at most {_MOST_PARALLEL}")
    if not flags.timeout:
        raise UsageError("--timeout: must be longer than 0 s")


class _Session:
    """A run of `sae-tui explain` with a server: its latents, its progress and its totals."""

    def __init__(self, context: CommandContext, flags: argparse.Namespace, features: Features, folder: Path) -> None:
        self._context, self._flags, self._folder = context, flags, folder
        self.latents: list[int] = flags.latent or features.order()[: flags.latents]
        self._explainer = Explainer(features, flags.model, flags.seed)
        self.client = Client(
            flags.url, flags.model, key=key_from_environment(), timeout_s=flags.timeout, max_tokens=flags.max_tokens
        )
        self._left = list(self.latents) if flags.again else self._explainer.missing(folder, self.latents)
        self.n_kept = len(self.latents) - len(self._left)
        self.n_explained = self.n_failed = 0

    def run(self) -> UserError | None:
        """Explain the latents, and return why the run ended early, or None."""
        if not self._left:
            return None
        if not os.access(self._folder, os.W_OK):
            raise UserError(f"{self._folder} is not writable, so that no explanation can be stored; make it writable")
        estimate = self._explainer.estimate(self._left)
        self._ask_for_consent(estimate)
        run = Run(self._explainer, self.client, self._folder, self._flags.parallel)
        try:
            with Progress("explain", to_descriptor=False) as progress:
                began = ends = time.monotonic()
                for one in run.explain(self._left):
                    now = time.monotonic()
                    if one:
                        ends = now + (now - began) * (estimate.n_latents - run.n_done) / run.n_done
                    progress.reach(self._reached(run, estimate, max(0.0, ends - now) if run.n_done else None))
        except UserError as error:
            return error
        except KeyboardInterrupt:
            warn(f"{plural(run.n_done, 'latent')} explained; the same command continues with the others")
            raise
        finally:
            self.n_explained, self.n_failed = run.n_done, run.n_failed
        return None

    def _ask_for_consent(self, estimate: TokenEstimate) -> None:
        words = estimate_words(estimate)
        if not self._context.as_json:
            say(f"{words}; {self.n_kept:,} explained before" if self.n_kept else words)
        is_large = estimate.n_requests > MANY_REQUESTS or estimate.prompt_tokens > MANY_TOKENS
        if is_large and not (self._flags.yes or self._context.as_json):
            refuse_without_terminal("explain")
            confirm(f"Send {estimate.n_requests:,} requests?", "no request was sent")

    def _reached(self, run: Run, estimate: TokenEstimate, left_s: float | None) -> Reached:
        share, n_requests = run.n_done / estimate.n_latents, self.client.n_requests
        tokens = self.client.prompt_tokens + self.client.completion_tokens
        parts = [f"{run.n_done:,} of {plural(estimate.n_latents, 'latent')}"]
        parts += [f"{count(tokens)} tokens" if tokens else plural(n_requests, "request")]
        parts += [f"{run.n_failed:,} failed"] if run.n_failed else []
        return Reached(", ".join(parts), share, left_s)


def estimate_words(estimate: TokenEstimate) -> str:
    """Return the expected costs of a run as a clause."""
    tokens = f"{count(estimate.prompt_tokens)} prompt tokens and {count(estimate.completion_tokens)} answer tokens"
    requests = plural(estimate.n_requests, "request")
    return f"{plural(estimate.n_latents, 'latent')}: about {requests}, {tokens}"


def _show(
    context: CommandContext, features: Features, folder: Path, latents: Sequence[int], session: _Session | None
) -> None:
    """Print the explanations of these latents (all, if empty), in the order of `latents`, and the totals of a run."""
    known = {latent: one for latent, one in read_explanations(folder).items() if one.weights == features.weights}
    shown = [known[latent] for latent in dict.fromkeys(latents or features.order()) if latent in known]
    if context.as_json:
        show_json(_totals(session) | {"latents": shown})
        return
    n_stale = len(read_explanations(folder)) - len(known)
    if shown:
        show_table(("LATENT", "DETECTION", "FUZZING", "DESCRIPTION"), map(_cells, shown))
        say(_summary(shown))
    elif session is None:
        say("no latent is explained; add --url and --model to explain latents")
    elif not session.latents:
        say("no latent fires, so none is explained")
    if n_stale:
        say(f"{plural(n_stale, 'explanation')} of other weights left out; explain these latents again")
    if session is not None and session.n_explained:
        say(_cost_words(session))


def _cells(one: Explanation) -> tuple[object, ...]:
    problem = cut(one.problem)
    text = one.text or f"failed: {problem}"
    if one.text and problem:
        text += f" (not all scored: {problem})"
    detection, fuzzing = (one.detection, one.detection_error), (one.fuzzing, one.fuzzing_error)
    return one.latent, score_words(*detection), score_words(*fuzzing), text


def _summary(shown: Sequence[Explanation]) -> str:
    """Return the number of explained latents, and the mean scores with their standard errors over latents."""
    found = summary_of(shown)
    if found is None:
        return "0 latents explained"
    unscored = sum(bool(one.text) and one.detection is None and not one.problem for one in shown)
    few = f"; {plural(unscored, 'latent')} with too few texts to hold some back for the scores" if unscored else ""
    scores = f"; mean {found.means} (chance {CHANCE})" if found.means else ""
    return f"{plural(found.n_latents, 'latent')} explained{scores}{few}"


def _totals(session: _Session | None) -> dict[str, object]:
    names = ("n_explained", "n_failed", "n_kept")
    client = session.client if session else None
    totals: dict[str, object] = {name: getattr(session, name, 0) for name in names}
    totals["n_requests"] = client.n_requests if client else 0
    for name in ("prompt_tokens", "completion_tokens"):
        totals[name] = getattr(client, name) if client and client.is_counted else None
    return totals


def _cost_words(session: _Session) -> str:
    client = session.client
    used = f"{client.prompt_tokens:,} prompt tokens and {client.completion_tokens:,} answer tokens"
    lacking = "" if client.is_counted else " (the server did not count the tokens of all answers)"
    return f"{plural(client.n_requests, 'request')}, {used}{lacking}; {session.n_failed:,} failed"
