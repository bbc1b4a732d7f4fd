"""Tells when something has been bad for long enough, and good again for long enough: in between nothing changes."""

from __future__ import annotations

from typing import NamedTuple


class Rule(NamedTuple):
    """Bad from `raise_at` up for `raise_s` seconds; over below `clear_at` for `clear_s` seconds."""

    raise_at: float
    clear_at: float
    raise_s: float
    clear_s: float


class Hysteresis:
    """Follows one value; times are seconds of any clock that does not go back."""

    def __init__(self, rule: Rule, *, is_raised: bool = False) -> None:
        self.is_raised = is_raised
        self._rule = rule
        self._since: float | None = None

    def changes(self, value: float | None, now: float) -> bool:
        """Take a value, None where it is unknown, and tell whether there is an alert from now on, or none any more."""
        if not self._is_leaving(value):
            self._since = None
            return False
        self._since = now if self._since is None else self._since
        if now - self._since < (self._rule.clear_s if self.is_raised else self._rule.raise_s):
            return False
        self.is_raised, self._since = not self.is_raised, None
        return True

    def _is_leaving(self, value: float | None) -> bool:
        """Tell whether the value is on the other side: bad while there is no alert, good while there is one."""
        if self.is_raised:
            return value is None or value < self._rule.clear_at
        return value is not None and value >= self._rule.raise_at
