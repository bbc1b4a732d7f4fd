"""The screen for trying a text: its tokens shaded by one latent, and the strongest latents on one token."""

from __future__ import annotations

from collections.abc import Callable

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Vertical
from textual.widgets import Label

from sae_tui.format import UNKNOWN, fit
from sae_tui.jobs.features import label
from sae_tui.jobs.loaded_model import ChosenSae
from sae_tui.panels.latents import SHADES, shade
from sae_tui.panels.tokens import TokenText, quoted
from sae_tui.screens.model_screen import ModelScreen, message_lines
from sae_tui.session import Session
from sae_tui.widgets.footer import Footer, FooterOffer
from sae_tui.widgets.frame import entitle
from sae_tui.widgets.lines import Line
from sae_tui.widgets.table import Column, KeyedTable, Row
from sae_tui.widgets.text_field import TextField
from trainer.contract.answers.interaction import Continued, Generated, ReadText, TextRead, TextToken
from trainer.contract.runs.features import Features
from trainer.contract.wording import plural

# The number of latents listed for a token.
N_STRONGEST = 10
_COLUMNS = (
    Column("LATENT", 7, right=True),
    Column("ACTIVATION", 10, right=True),
    Column("OF LARGEST", 10, right=True),
    Column("FIRES ON", 10, grow=True),
)
_LEFT_OUT, _LEFT_OUT_OF_CHAT = "dim: not trained on", "first and special tokens: not trained on"
_NO_TEMPLATE = "The model's tokenizer has no chat template, so that texts can only be read as they are."
_NONE_YET = "Type or paste a text and press Enter. Its tokens are then shaded by the latent's activations."


class TextScreen(ModelScreen):
    """Reads a text with the SAE. `go_to` moves the cursor of the feature browser below to a latent."""

    BINDINGS = [
        Binding("escape", "back", "Back", id="text.back", tooltip="To the feature browser"),
        Binding("ctrl+e", "edit", "Edit", id="text.edit", tooltip="Edit the text"),
        Binding("f12", "chat", "Chat", id="text.chat",
                tooltip="Read the text as a user's message in the model's chat template, or as it is"),
        Binding("f", "browse", "Features", id="text.features",
                tooltip="To the feature browser, with the cursor on the selected latent"),
        Binding("S", "steer", "Steer", id="text.steer", tooltip="Continue the text with the selected latent changed"),
    ]  # fmt: skip
    DEFAULT_CSS = """
    TextScreen > #text-title { width: 100%; height: 1; background: $panel; text-style: bold; }
    TextScreen > #text-title { text-wrap: nowrap; text-overflow: ellipsis; }
    TextScreen #text-panel { height: auto; }
    TextScreen TextField { height: 3; }
    TextScreen.-bare TextField { height: 2; }
    TextScreen TokenText { height: 1fr; }
    TextScreen.-framed TokenText { padding: 0 1; }
    TextScreen #strongest { height: 12; }
    TextScreen.-framed #strongest { height: 13; padding: 0 1; }
    TextScreen.-bare #strongest { height: 7; }
    """

    def __init__(
        self, session: Session, sae: ChosenSae, features: Features, latent: int, go_to: Callable[[int], object]
    ) -> None:
        super().__init__("text", session, sae, features, latent)
        self._go_to = go_to
        self._asked = ""  # the text of the latest request
        self._is_chat = False

    def compose(self) -> ComposeResult:
        yield Label("", id="text-title", markup=False)
        with Vertical(id="text-panel", classes="panel"):
            yield TextField(earlier=self.session.model.texts, placeholder="A text", id="text-field")
        yield TokenText(id="tokens").add_class("panel")
        yield KeyedTable(_COLUMNS, id="strongest").add_class("panel")
        yield Footer()

    def on_mount(self) -> None:
        self.query_one(TextField).focus()

    def on_resize(self) -> None:
        if self.is_mounted:
            self.show_state()

    @on(TextField.Submitted)
    def _read_text(self, event: TextField.Submitted) -> None:
        text = event.field.text
        if not text.strip():
            self.ask(None)
            return
        self._asked = text
        self.session.model.remember(text)
        event.field.forget_place()
        self._ask_again()

    def _ask_again(self) -> None:
        self.ask(ReadText(self._asked, self._is_chat, (self.latent,)))

    def take_answer(self, answer: TextRead | Continued | Generated) -> None:
        super().take_answer(answer)
        self.query_one(TokenText).cursor = self._first
        field = self.query_one(TextField)
        if field.has_focus and field.text == self._asked:
            self.query_one(TokenText).focus()

    @property
    def _read(self) -> TextRead | None:
        return self.answer if isinstance(self.answer, TextRead) else None

    @property
    def _first(self) -> int:
        """The token on which the selected latent fires most, or the first counted one."""
        tokens = self._read.tokens if self._read else ()
        return max(
            range(len(tokens)),
            key=lambda at: (tokens[at].is_counted, _act_of(tokens[at], self.latent), -at),
            default=0,
        )

    def show_state(self) -> None:
        self.query_one("#text-title", Label).update(f" {self._title}")
        entitle(self.query_one("#text-panel"), "A user's message" if self._is_chat else "Text", "↑ earlier texts")
        view = self.query_one(TokenText)
        title = f"Shaded by latent {self.latent}"
        if self._read is None:
            view.show_instead(self._lines_instead, ((title, "title"),))
        else:
            tokens = self._read.tokens
            is_any_left_out = not all(token.is_counted for token in tokens)
            hint = _LEFT_OUT_OF_CHAT if self._is_chat else _LEFT_OUT
            view.show_tokens(
                [token.text for token in tokens], self._styles(), self._shade_title, hint * is_any_left_out
            )
        self._show_token()
        self.refresh_bindings()

    @property
    def _title(self) -> str:
        of_sae = f"Job {self.sae.job_id}{f' · {self.sae.label}' if self.sae.label else ''}"
        return " · ".join(filter(None, (of_sae, "try a text", self.model_words)))

    def _lines_instead(self, width: int) -> list[Line]:
        return self.state_lines(width) or message_lines(_NONE_YET, "dim", width)

    @property
    def _shade_title(self) -> Line:
        """Name the latent, and show each shade with the largest share of the latent's largest activation it means."""
        feature = self.feature(self.latent)
        shades = [part for most, name in SHADES for part in ((f"{most:.0%}", name), (" ", "text"))]
        meaning = fit(label(feature), 24 if self.size.width >= 100 else 12).rstrip() if feature else ""
        largest = f"of {feature.largest:.2f}" if feature else ""
        return ((f"Latent {self.latent} {meaning}  ", "title"), *shades, (largest, "dim"))

    def _styles(self) -> list[str]:
        """Return the style of each token; tokens left out in training are only shaded in a chat's template."""
        assert self._read is not None
        feature = self.feature(self.latent)
        acts = [_act_of(token, self.latent) for token in self._read.tokens]
        largest = (feature.largest if feature else 0.0) or max(acts)
        return [shade(act, largest) if self._is_shaded(at) else "dim" for at, act in enumerate(acts)]

    def _is_shaded(self, at: int) -> bool:
        assert self._read is not None
        return self._read.tokens[at].is_counted or (self._is_chat and at > 0)

    @on(TokenText.Moved)
    def _show_token(self) -> None:
        """List the strongest latents on the token under the cursor."""
        table, token = self.query_one(KeyedTable), self._token
        fires = sorted(token.latents, key=lambda one: -one.act)[:N_STRONGEST] if token else ()
        table.empty = "" if token is None else "No latent fires on this token."
        has_share = self._read is not None and token is not None and self._is_shaded(self.query_one(TokenText).cursor)
        table.show_rows([self._row(one.latent, one.act, has_share=has_share) for one in fires])
        title = "Strongest latents"
        if token is not None and self._read is not None:
            place = f"token {self.query_one(TokenText).cursor + 1} of {len(self._read.tokens)}"
            how_many = f"{plural(len(token.latents), 'latent')} on {quoted(token.text)}"
            title = f"{how_many}, {place}{'' if token.is_counted else ', not trained on'}"
        entitle(table, fit(title, 120).rstrip(), "enter: shade by this latent")

    @property
    def _token(self) -> TextToken | None:
        at = self.query_one(TokenText).cursor
        return self._read.tokens[at] if self._read and at < len(self._read.tokens) else None

    def _row(self, latent: int, act: float, *, has_share: bool) -> Row:
        feature = self.feature(latent)
        share = f"{act / feature.largest:.0%}" if has_share and feature and feature.largest else UNKNOWN
        cells = str(latent), f"{act:.2f}", share, label(feature) if feature else ""
        if latent != self.latent:
            return Row(str(latent), tuple((cell, "text") for cell in cells))
        return Row(str(latent), tuple((cell, "accent") for cell in (f"▸ {latent}", *cells[1:])))

    # The following methods handle keys.

    @on(TokenText.Chosen)
    def _choose_latent(self) -> None:
        self.query_one(KeyedTable).focus()

    @on(KeyedTable.Chosen)
    def _shade_by(self, event: KeyedTable.Chosen) -> None:
        self.latent = int(event.key)
        self.show_state()

    @property
    def _selected(self) -> int:
        """The latent under the cursor if the list of latents has the focus; otherwise, the latent that shades."""
        table = self.query_one(KeyedTable)
        return int(table.cursor) if table.has_focus and table.cursor is not None else self.latent

    def action_back(self) -> None:
        self.app.pop_screen()

    def action_edit(self) -> None:
        self.query_one(TextField).focus()

    def action_chat(self) -> None:
        """Read the text as a chat message, or as it is again."""
        if self.loaded and not self.loaded.ready.reads_chats:
            self.notify(_NO_TEMPLATE, severity="warning")
            return
        self._is_chat = not self._is_chat
        if self._asked:
            self._ask_again()
        else:
            self.show_state()

    def keys_offered(self) -> FooterOffer:
        """Name the key for chats after what it does now, and hide it if the model has no chat template."""
        is_known = self.loaded is not None and not self.loaded.ready.reads_chats
        return FooterOffer(
            hidden=frozenset(["text.chat"] * is_known), words={"text.chat": "Plain"} if self._is_chat else {}
        )

    def action_browse(self) -> None:
        latent = self._selected
        self.app.pop_screen()
        self._go_to(latent)

    def action_steer(self) -> None:
        from sae_tui.screens.steer import SteerScreen

        self.app.push_screen(
            SteerScreen(self.session, self.sae, self.features, self._selected, self._asked, is_chat=self._is_chat)
        )


def _act_of(token: TextToken, latent: int) -> float:
    return next((one.act for one in token.latents if one.latent == latent), 0.0)
