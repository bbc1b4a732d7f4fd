"""Inspects stored activations by running `sae-train inspect` in a separate process, because this needs torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from sae_tui.jobs import named_python
from sae_tui.jobs.shard_headers import Fingerprint, answer_of, fingerprint, of_url
from trainer.contract.errors import UserError
from trainer.contract.json_file import decode_as
from trainer.contract.object_paths import absolute, is_url
from trainer.contract.paths import working_folder
from trainer.contract.settings.shards import shards_at


class DataFinding(msgspec.Struct, frozen=True):
    """One finding about the data; `remedy` is "" if no action is necessary."""

    severity: str
    sentence: str
    remedy: str = ""


class Inspected(msgspec.Struct, frozen=True):
    """Properties of stored activations, measured on a sample of `n_looked_at` rows; `gamma` is ‖mean‖/‖std‖."""

    n_tokens: int
    d_in: int
    dtype: str
    n_looked_at: int
    gamma: float
    median_norm: float
    largest_norm: float
    findings: tuple[DataFinding, ...] = ()


class Inspections:
    """Inspects stored activations, and caches each result until the files change."""

    def __init__(self, command: Sequence[str] = ()) -> None:
        self._command = command
        self._of: dict[Fingerprint, Inspected] = {}

    def inspect(
        self, place: str, is_over: Callable[[], bool] = lambda: False, python: str | None = None
    ) -> Inspected | None:
        """Return the properties of the activations at `place`, or None if `is_over` returns True before they are known.

        `python` is the interpreter to use instead of the app's own. Raise `UserError` if the activations cannot be
        read.
        """
        place = absolute(place, working_folder())
        if (state := of_url(place) if is_url(place) else fingerprint(shards_at(place)[1])) not in self._of:
            named_python.refuse(python)
            command = self._command or named_python.command(python, "inspect")
            # The command prints its result even if it exits with 1 to report bad data.
            answer = answer_of([*command, place, "--json"], python, is_over)
            if answer is None:
                return None
            try:
                self._of[state] = decode_as(answer, Inspected)
            except ValueError as error:
                raise UserError(f"the output of `trainer inspect` cannot be read: {error}") from None
        return self._of[state]
