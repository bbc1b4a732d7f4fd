"""The last release's keys that had other meanings elsewhere. They work for one more release, but are not shown."""

from __future__ import annotations

from textual.binding import Binding

OLD = Binding.Group("Keys of the last release")


def old_key(key: str, action: str) -> Binding:
    """Return a binding for the old key of `action`; the footer, help and reference show only keys with a name."""
    return Binding(key, action, show=False, group=OLD)
