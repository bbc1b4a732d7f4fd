"""The screen for steering: a prompt continued with and without changed latents, and the effect on predictions."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Horizontal, Vertical
from textual.widgets import Input, Label

from sae_tui.jobs.features import label
from sae_tui.jobs.loaded_model import ChosenSae
from sae_tui.panels.steered import SteeredText
from sae_tui.screens.model_screen import ModelScreen, message_lines
from sae_tui.session import Session
from sae_tui.widgets.footer import Footer, FooterOffer
from sae_tui.widgets.frame import entitle
from sae_tui.widgets.text_field import TextField
from sae_tui.widgets.tick import Tick
from trainer.contract.answers.interaction import (
    MOST_GENERATED,
    Continued,
    Generate,
    Generated,
    Steered,
    TextRead,
)
from trainer.contract.errors import UserError
from trainer.contract.runs.crosscoder import letter
from trainer.contract.runs.features import Features

_ABLATE, _ADD, _ONLY_GENERATED, _CHAT, _PART = "ablate", "adds", "only-generated", "chat", "part"
# The rows of the form: for each field, its id, name, width and initial value; then the id and name of each tick. Only a
# crosscoder has parts.
_ROWS = (
    (
        (("latents", "Latents", 0, ""), ("strength", "Strength", 6, "2"), (_PART, "Part", 4, "all")),
        ((_ABLATE, "ablate"), (_ADD, "add, not set")),
    ),
    (
        (("tokens", "Tokens", 5, "30"), ("temperature", "Temperature", 5, "0"), ("seed", "Seed", 7, "0")),
        ((_ONLY_GENERATED, "only generated"), (_CHAT, "chat")),
    ),
)
# A narrower window shows the ticks below the fields.
_WIDE = 76
_HINT = "strength 2: twice the latent's largest activation"
_NO_NEXT_TOKEN = "{} does not predict next tokens, so it cannot continue a prompt. Steering needs a causal model."


class FieldError(UserError):
    """A field has a wrong value; `field` is its id."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


class SteerScreen(ModelScreen):
    """Continues a prompt twice, unchanged and steered; Enter in any field runs it again."""

    BINDINGS = [
        Binding("escape", "back", "Back", id="steer.back", tooltip="Stop generating, or go to the previous screen"),
        Binding("enter", "run", "Run", id="steer.run", priority=True, tooltip="Continue the prompt with these values"),
        Binding("pageup", "scroll_result(-1)", "Previous page", show=False, priority=True),
        Binding("pagedown", "scroll_result(1)", "Next page", show=False, priority=True),
    ]  # fmt: skip
    DEFAULT_CSS = """
    SteerScreen > #steer-title { width: 100%; height: 1; background: $panel; text-style: bold; }
    SteerScreen > #steer-title { text-wrap: nowrap; text-overflow: ellipsis; }
    SteerScreen #steer-form { height: auto; }
    SteerScreen #steer-form Horizontal { height: 1; }
    SteerScreen #steer-form .fields, SteerScreen #steer-form .ticks { width: auto; }
    SteerScreen #steer-form .-fill { width: 1fr; }
    SteerScreen.-narrow #steer-form .row { layout: vertical; height: 2; }
    SteerScreen #steer-form TextField { height: 2; }
    SteerScreen.-framed #steer-form .row { padding: 0 1; }
    SteerScreen #steer-form .fields > Label { margin-right: 1; color: $text-muted; }
    SteerScreen Input { margin-right: 1; padding: 0; background: $panel; }
    SteerScreen Tick, SteerScreen Tick:focus { width: auto; margin-right: 1; background: $background; }
    SteerScreen #steer-about { height: 1; width: 100%; text-wrap: nowrap; text-overflow: ellipsis; color: $text-muted; }
    SteerScreen #steer-about.-wrong { color: $text-error; }
    SteerScreen SteeredText { height: 1fr; }
    SteerScreen.-framed SteeredText { padding: 0 1; }
    """

    def __init__(
        self, session: Session, sae: ChosenSae, features: Features, latent: int, prompt: str = "", *,
        is_chat: bool = False,
    ) -> None:  # fmt: skip
        super().__init__("steer", session, sae, features, latent)
        self._prompt, self._is_chat = prompt, is_chat
        self._n_asked, self._began, self._took_s = 0, 0.0, 0.0
        self._is_stopped = False
        # The values that were refused; a late event about an earlier change must not remove the sentence about them.
        self._refused: tuple[object, ...] = ()

    def compose(self) -> ComposeResult:
        yield Label("", id="steer-title", markup=False)
        with Vertical(id="steer-form", classes="panel"):
            yield TextField(self._prompt, earlier=self.session.model.texts, placeholder="A prompt", id="prompt")
            for fields, ticks in _ROWS:
                with Horizontal(classes="row"):
                    fills = any(not width for _, _, width, _ in fields)
                    with Horizontal(classes="fields -fill" if fills else "fields"):
                        for name, words, width, value in fields:
                            if name == _PART and not self.features.part_names:
                                continue
                            yield Label(words, markup=False)
                            field = Input(value or str(self.latent), id=name, compact=True)
                            field.styles.width = width or "1fr"
                            yield field
                    with Horizontal(classes="ticks"):
                        for name, words in ticks:
                            yield Tick(words, id=name)
            yield Label("", id="steer-about", markup=False)
        yield SteeredText(id="steered").add_class("panel")
        yield Footer()

    def on_mount(self) -> None:
        tick = self.query_one(f"#{_CHAT}", Tick)
        tick.display, tick.value = False, self._is_chat
        self.query_one(TextField).focus()
        self._show_about()

    def on_resize(self) -> None:
        self.set_class(self.size.width < _WIDE, "-narrow")
        if self.is_mounted:
            self.show_state()

    def keys_offered(self) -> FooterOffer:
        """Name the key for going back after what it does now."""
        return FooterOffer(words={"steer.back": "Stop"} if self.is_waiting else {})

    # The following methods read the fields.

    def action_run(self) -> None:
        """Continue the prompt; if a field is wrong, say why and go to the field."""
        if self.loaded and not self.loaded.ready.generates:
            return
        try:
            request = self._request()
        except FieldError as error:
            self._show_about(str(error))
            self.query_one(f"#{error.field}").focus()
            return
        self._show_about()
        self.session.model.remember(request.prompt)
        self.query_one(TextField).forget_place()
        self._is_stopped, self._n_asked = False, request.n_tokens
        self._began = time.monotonic()
        self.ask(request)

    def _request(self) -> Generate:
        """Return the request that the fields describe; raise `FieldError` if a field is wrong."""
        prompt = self.query_one(TextField).text
        if not prompt.strip():
            raise FieldError("prompt", "Prompt: enter at least one word")
        adds, latents = self._is_ticked(_ADD), self._latents()
        if adds and not any(one.strength for one in latents):
            raise FieldError(_ADD, "Add: adding 0 changes nothing; to ablate, set the latent instead")
        return Generate(
            prompt, latents, self._is_ticked(_CHAT), adds, self._is_ticked(_ONLY_GENERATED),
            int(self._number("tokens", "Tokens", 1, MOST_GENERATED, whole=True)),
            self._number("temperature", "Temperature", 0, 100),
            int(self._number("seed", "Seed", 0, 2**63 - 1, whole=True)),
            self._part(),
        )  # fmt: skip

    def _latents(self) -> tuple[Steered, ...]:
        strength = 0.0 if self._is_ticked(_ABLATE) else self._number("strength", "Strength", -math.inf, math.inf)
        return steered_in(self.query_one("#latents", Input).value, strength, self.features.n_latents)

    def _part(self) -> int | None:
        """Return the part of a crosscoder to change, or None for all parts and for other SAEs."""
        names = self.features.part_names
        text = self.query_one(f"#{_PART}", Input).value.strip().upper() if names else ""
        if text in ("", "ALL"):
            return None
        letters = [letter(part) for part in range(len(names))]
        if text not in letters:
            raise FieldError(_PART, f"Part: enter {', '.join(letters)} or all")
        return letters.index(text)

    def _is_ticked(self, name: str) -> bool:
        """Return whether a switch is on; a hidden one, for a model without a chat template, is off."""
        tick = self.query_one(f"#{name}", Tick)
        return tick.value and tick.display

    def _number(self, field: str, name: str, least: float, most: float, *, whole: bool = False) -> float:
        text = self.query_one(f"#{field}", Input).value.strip()
        try:
            value: float = int(text) if whole else float(text)
        except ValueError:
            value = math.nan
        if math.isfinite(value) and least <= value <= most:
            return value
        kind = "a whole number" if whole else "a number"
        limits = f" from {least:,} to {most:,}" if math.isfinite(most) else ""
        raise FieldError(field, f"{name}: enter {kind}{limits}")

    @on(Input.Changed)
    @on(Tick.Changed)
    def _field_changed(self) -> None:
        if self._values() != self._refused:
            self._show_about()

    def _show_about(self, problem: str = "") -> None:
        """Say what activations the latents get and what they fire on, or why a field is refused."""
        line = self.query_one("#steer-about", Label)
        line.set_class(bool(problem), "-wrong")
        self._refused = self._values() if problem else ()
        if not problem:
            problem = self._about()
        line.update(f" {problem}")

    def _values(self) -> tuple[object, ...]:
        return *(field.value for field in self.query(Input)), *(tick.value for tick in self.query(Tick))

    def _about(self) -> str:
        try:
            latents, part = self._latents(), self._part()
        except FieldError as error:
            return str(error)
        how = "+" if self._is_ticked(_ADD) else "→"
        known = ((one, self.feature(one.latent)) for one in latents)
        changes = [
            f"{one.latent} {how} {one.strength * feature.largest:.2f}: {label(feature)}"
            for one, feature in known
            if feature
        ]
        of_part = [] if part is None else [f"only in {self.features.part_names[part]}"]
        return " · ".join(of_part + changes)

    # The following methods show the state and the answer.

    def take_answer(self, answer: TextRead | Continued | Generated) -> None:
        super().take_answer(answer)
        self._took_s = _seconds_since(self._began)

    @property
    def _answer(self) -> Continued | Generated | None:
        return self.answer if isinstance(self.answer, Continued | Generated) else None

    def show_state(self) -> None:
        of_sae = f"Job {self.sae.job_id}{f' · {self.sae.label}' if self.sae.label else ''}"
        title = " · ".join(filter(None, (of_sae, "steer", self.model_words)))
        self.query_one("#steer-title", Label).update(f" {title}")
        entitle(self.query_one("#steer-form"), "Prompt", _HINT)
        ready = self.loaded.ready if self.loaded else None
        if ready:
            self.query_one(f"#{_CHAT}").display = ready.reads_chats
        view = self.query_one(SteeredText)
        if self._answer is not None and not self.failed:
            view.show_answer(self._answer, self._progress)
        elif ready and not ready.generates:
            name = ready.model.rstrip("/").rpartition("/")[2]
            view.show_message(lambda width: message_lines(_NO_NEXT_TOKEN.format(name), "warn", width))
        else:
            view.show_message(self._lines_instead)
        self.refresh_bindings()

    def _lines_instead(self, width: int) -> Sequence[tuple[tuple[str, str], ...]]:
        return self.state_lines(width) or message_lines(
            "Enter continues the prompt, with and without steering.", "dim", width
        )

    @property
    def _progress(self) -> str:
        assert self._answer is not None
        done = f"{self._answer.n_tokens} of {self._n_asked} tokens"
        if self.is_waiting:
            return f"{done}, {'stopping' if self._is_stopped else 'generating'} …"
        return f"{done} in {self._took_s:.1f} s{', stopped' if self._is_stopped else ''}"

    def action_scroll_result(self, pages: int) -> None:
        """Scroll the continuations from any field."""
        view = self.query_one(SteeredText)
        view.scroll_relative(y=pages * max(1, view.size.height - 1), animate=False)

    def action_back(self) -> None:
        """Stop a running generation; otherwise, go to the previous screen."""
        if self.is_waiting and not self._is_stopped:
            self._is_stopped = True
            self.session.model.stop(self)
            self.show_state()
        else:
            self.app.pop_screen()


def _seconds_since(began: float) -> float:
    return time.monotonic() - began


def steered_in(text: str, strength: float, n_latents: int) -> tuple[Steered, ...]:
    """Read latents like `7, 12=0.5`; a latent without its own strength gets `strength`. Raise `FieldError`."""
    found: dict[int, Steered] = {}
    for part in text.replace(",", " ").split():
        number, _, own = part.partition("=")
        if not number.isascii() or not number.isdecimal() or int(number[:18]) >= n_latents:
            raise FieldError(
                "latents", f"Latents: there is no latent {number}; the indices range from 0 to {n_latents - 1:,}"
            )
        try:
            value = float(own) if "=" in part else strength
        except ValueError:
            value = math.nan
        if not math.isfinite(value):
            raise FieldError("latents", f"Latents: the strength of latent {number} is not a number: {own}")
        found[int(number)] = Steered(int(number), value)
    if not found:
        raise FieldError("latents", "Latents: enter at least one number, like 7 or 7, 12=0.5")
    if len(found) > 64:
        raise FieldError("latents", "Latents: enter at most 64")
    return tuple(found.values())
