"""The line of keys at the bottom: current actions on the left, quit and help on the right."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from rich.cells import cell_len
from textual import events
from textual.app import App
from textual.binding import ActiveBinding, Binding
from textual.screen import Screen
from textual.widgets import Input

from sae_tui.widgets.lines import Line, LineView, Span

# Keys that are never omitted, even on a narrow terminal.
_ALWAYS = ("quit", "help")
# Keys that type a character into a text field but that Textual 8.2 does not treat as printable.
_TYPED = ("slash", "plus", "minus", "less_than_sign", "greater_than_sign")
_APART = "  "


@dataclass(frozen=True, slots=True)
class FooterOffer:
    """The keys offered by a screen, by binding id: which to show first, which to hide, and alternative labels."""

    first: Sequence[str] = ()
    hidden: frozenset[str] = frozenset()
    words: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class FooterKey:
    """A key as displayed, its label, and the key to press."""

    shown: str
    word: str
    key: str
    enabled: bool = True

    @property
    def width(self) -> int:
        return cell_len(self.shown) + cell_len(self.word) + bool(self.word)

    @property
    def spans(self) -> tuple[Span, ...]:
        key = "title accent" if self.enabled else "dim"
        return (self.shown, key), (f" {self.word}" if self.word else "", "text" if self.enabled else "dim")


class Footer(LineView):
    """Shows the active bindings with `show`; the screen's `keys_offered` can hide, order and rename them.

    Entries that do not fit are omitted entirely, starting from the end.
    """

    DEFAULT_CSS = "Footer { dock: bottom; height: 1; background: $panel; }"

    def on_mount(self) -> None:
        self.screen.bindings_updated_signal.subscribe(self, self._bindings_updated)

    def on_unmount(self) -> None:
        self.screen.bindings_updated_signal.unsubscribe(self)

    def on_resize(self, _: events.Resize) -> None:
        self._draw()

    def _bindings_updated(self, screen: Screen[object]) -> None:
        # While the terminal is in the background, nothing has the focus, and the footer should not change.
        if self.is_attached and screen is self.screen and self.app.app_focus:
            self.call_after_refresh(self._draw)

    def _draw(self) -> None:
        if self.size.width and self.is_attached:
            self._places = arrange(*_entries(self.screen), self.size.width)
            self.show([_line(self._places, self.size.width)])

    def on_click(self, event: events.Click) -> None:
        for x, entry in self._places:
            if x <= event.x < x + entry.width:
                self.app.simulate_key(entry.key)


def arrange(left: Sequence[FooterKey], right: Sequence[FooterKey], width: int) -> list[tuple[int, FooterKey]]:
    """Return each entry with its column.

    The right entries lose their labels if space is short; the left ones fill the remaining space.
    """
    if _length(right) + 2 > width:
        right = [FooterKey(entry.shown, "", entry.key, entry.enabled) for entry in right]
    end = max(0, width - 1 - _length(right))
    places = _place(left, 1)
    fitting = [(x, entry) for x, entry in places if x + entry.width + len(_APART) <= end]
    return [*fitting, *_place(right, end)]


def _place(entries: Iterable[FooterKey], x: int) -> list[tuple[int, FooterKey]]:
    places = []
    for entry in entries:
        places.append((x, entry))
        x += entry.width + len(_APART)
    return places


def _length(entries: Sequence[FooterKey]) -> int:
    return sum(entry.width for entry in entries) + len(_APART) * max(0, len(entries) - 1)


def _line(places: Sequence[tuple[int, FooterKey]], width: int) -> Line:
    spans: list[Span] = []
    at = 0
    for x, entry in places:
        spans += [(" " * (x - at), "text"), *entry.spans]
        at = x + entry.width
    return (*spans, (" " * max(0, width - at), "text"))


def _entries(screen: Screen[object]) -> tuple[list[FooterKey], list[FooterKey]]:
    """Return the entries for active bindings, for the left and right ends."""
    offer = screen.keys_offered() if hasattr(screen, "keys_offered") else FooterOffer()
    typing = isinstance(screen.focused, Input)
    active = [one for key, one in screen.active_bindings.items() if not (typing and key in _TYPED)]
    shown = {one.binding.action: one for one in reversed(active) if one.binding.action in _ALWAYS}
    shown |= {one.binding.action: one for one in reversed(active) if one.binding.show}
    right = [_entry(screen.app, shown.pop(action), {}) for action in _ALWAYS if action in shown]
    order = {name: place for place, name in enumerate(offer.first)}
    # After the given ones, the key for going back comes first, so that a narrow terminal shows it. Otherwise, the
    # focused widget's bindings precede the screen's, which precede the app's.
    left = [one for one in active if shown.get(one.binding.action) is one and one.binding.id not in offer.hidden]
    left.sort(key=lambda one: (order.get(one.binding.id or "", len(order)), one.binding.key != "escape"))
    return [_entry(screen.app, one, offer.words) for one in left], right


def _entry(app: App[object], active: ActiveBinding, words: Mapping[str, str]) -> FooterKey:
    binding: Binding = active.binding
    word = words.get(binding.id or "", binding.description)
    return FooterKey(app.get_key_display(binding), word, binding.key, active.enabled)
