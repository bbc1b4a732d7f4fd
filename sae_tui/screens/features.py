"""The features screen: a list of an SAE's latents next to the max-activating examples of the selected latent."""

from __future__ import annotations

import threading
from typing import get_args

from msgspec.structs import replace
from textual import on, work
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Horizontal
from textual.message import Message
from textual.widgets import Label

from sae_tui.format import fit
from sae_tui.jobs.evaluation.outcome import has_features
from sae_tui.jobs.evaluation.request import offer
from sae_tui.jobs.features import Found, counts, features_of_job, search, where_else
from sae_tui.jobs.loaded_model import ChosenSae
from sae_tui.jobs.view.watcher import NewsOfJob
from sae_tui.panels.far_jobs import there
from sae_tui.panels.latents import LatentDetail, LatentList
from sae_tui.screens.evaluate import Evaluates
from sae_tui.screens.model_screen import may_ask
from sae_tui.session import Session
from sae_tui.widgets.ask import Ask, AskText
from sae_tui.widgets.footer import Footer, FooterOffer
from sae_tui.widgets.frame import FramedScreen, entitle
from sae_tui.widgets.old_keys import old_key
from trainer.contract.errors import UserError
from trainer.contract.paths import DataDir
from trainer.contract.runs.features import Features, Order, is_filter
from trainer.contract.runs.latent_notes import Change, Changed, change_note
from trainer.contract.wording import plural

ORDERS: tuple[Order, ...] = get_args(Order)
WORDS: dict[Order, str] = {
    "sparse": "0.01 to 1 % first",
    "starred": "starred and named first",
    "density": "most frequent first",
    "largest": "strongest first",
    "stable": "stable over seeds first",
    "effect": "most helpful first",
    "norm": "by relative norm",
    "latent": "by number",
}


_NOTES = frozenset({"star", "name", "note", "undo"})
_OF_LATENTS = _NOTES | {"search", "next_order", "go_to", "go_to_nearest", "try_text", "steer"}


class Opened(Message):
    """The feature files for a job's SAEs were opened; `opened` maps each SAE's label to its feature file.

    If opening failed, `problem` explains why. A non-empty `question` offers to create the files.
    """

    def __init__(self, opened: dict[str, Features], problem: str = "", question: str = "") -> None:
        super().__init__()
        self.opened = opened
        self.problem = problem
        self.question = question


def open_features(data: DataDir, job_id: int) -> Opened:
    """Open the feature files for a job's SAEs; if there are none, determine how they could be created.

    Raise `UserError` if a file cannot be read.
    """
    if not has_features(data.sae(job_id)):
        problem, question = offer(data, job_id)
        return Opened({}, f"{problem[:1].upper()}{problem[1:]}.", question)
    opened = {label: Features(file) for label, file in features_of_job(data, job_id).items()}
    for features in opened.values():
        features.read_notes_again()  # in this thread, since the disk may be slow
    return Opened(opened)


class Noted(Message):
    """A note on a latent was changed; the features contain the new notes. `undoes` says whether it was undone."""

    def __init__(self, features: Features, changed: Changed, undoes: bool) -> None:
        super().__init__()
        self.features, self.changed, self.undoes = features, changed, undoes


class FeaturesScreen(Evaluates, FramedScreen):
    """Shows the latents of one SAE at a time."""

    BINDINGS = [
        Binding("escape", "back", "Back", id="features.back", tooltip="End the search, or go to the previous screen"),
        Binding("slash", "search", "Search", key_display="/", id="features.search",
                tooltip="Latents with these words in notes or examples, starred:, stable:>0.7, effect:>0.01"),
        Binding("T", "try_text", "Text", id="features.text",
                tooltip="Try a text: where the selected latent fires on it"),
        Binding("S", "steer", "Steer", id="features.steer",
                tooltip="Continue a prompt with the selected latent set to another value"),
        Binding("o", "next_order", "Order", id="features.sort",
                tooltip="0.01 to 1 % first, starred, density, largest activation, stability, effect, norm, number"),
        Binding("colon", "go_to", "Go to", key_display=":", id="features.go", tooltip="Go to a latent by its number"),
        Binding("equals_sign", "go_to_nearest", "Nearest", key_display="=", id="features.nearest",
                tooltip="To the latent with the most similar decoder direction"),
        old_key("s", "next_order"),
        old_key("g", "go_to"),
        old_key("n", "go_to_nearest"),
        Binding("asterisk", "star", "Star", key_display="*", id="features.star",
                tooltip="Star the latent, or remove its star"),
        Binding("R", "name", "Rename", id="features.name", tooltip="Give the latent a name"),
        Binding("N", "note", "Note", id="features.note", tooltip="Write a note on the latent"),
        Binding("u", "undo", "Undo", show=False, id="features.undo", tooltip="Undo the last star, name or note"),
        Binding("m", "next_member", "SAE", id="features.member", tooltip="The next SAE: another setting or seed"),
    ]  # fmt: skip
    DEFAULT_CSS = """
    FeaturesScreen > Label { width: 100%; height: 1; background: $panel; text-style: bold; }
    FeaturesScreen Horizontal { height: 1fr; }
    FeaturesScreen LatentList { width: 2fr; height: 1fr; margin-right: 2; }
    FeaturesScreen.-framed LatentList { margin-right: 0; }
    FeaturesScreen.-framed LatentDetail { padding: 0 1; }
    FeaturesScreen LatentDetail { width: 3fr; height: 1fr; }
    """

    def __init__(self, session: Session, job_id: int, member: str = "") -> None:
        super().__init__(name="features")
        self.session, self.job_id, self.member = session, job_id, member
        self.order: Order = ORDERS[0]
        self.words = ""
        self._opened: dict[str, Features] = {}
        self._asked = False
        self._news = NewsOfJob(session.watcher, job_id)
        # The changes of notes that can be undone, with the SAE's features.
        self._changes: list[tuple[Features, Changed]] = []
        self._one_change = threading.Lock()

    def compose(self) -> ComposeResult:
        yield Label("", id="features-title", markup=False)
        with Horizontal():
            yield LatentList(id="latents").add_class("panel")
            yield LatentDetail(id="latent").add_class("panel")
        yield Footer()

    def on_mount(self) -> None:
        self.query_one(LatentList).focus()
        self.query_one(LatentDetail).show_instead("Reading …")
        self._title()
        self._open()

    def on_resize(self) -> None:
        self._title()

    def show_gpus(self) -> None:
        """Do nothing because this screen shows no GPUs."""

    def show_jobs(self) -> None:
        """Reload the features after an evaluation of the job has ended."""
        if self._news.has_come():
            self._open()

    @work(thread=True, group="features", exit_on_error=False)
    def _open(self) -> None:
        try:
            opened = open_features(self.session.data, self.job_id)
        except UserError as error:
            opened = Opened({}, str(error))
        self.post_message(opened)

    @on(Opened)
    def _show_opened(self, event: Opened) -> None:
        self._opened = event.opened
        if not event.opened:
            self.query_one(LatentDetail).show_instead(event.problem)
            if event.question and not self._asked:
                self._asked = True
                self.ask_to_evaluate(self._say_that_it_goes_on)
            return
        if self.member not in event.opened:
            self.member = next(iter(event.opened))
        if problem := next((one.notes.problem for one in event.opened.values() if one.notes.problem), ""):
            self.notify(f"{problem}.", title="Notes", severity="warning", markup=False)
        self.refresh_bindings()
        self._show()

    def _say_that_it_goes_on(self) -> None:
        self.query_one(LatentDetail).show_instead(f"Job {self.job_id} is being evaluated …")

    def keys_offered(self) -> FooterOffer:
        """Hide the keys that write notes if they cannot be used."""
        cannot = self.session.readonly or bool(self.session.place)
        return FooterOffer(hidden=frozenset(f"features.{name}" for name in _NOTES) if cannot else frozenset())

    @property
    def _features(self) -> Features | None:
        return self._opened.get(self.member)

    def _show(self, latent: int | None = None) -> None:
        """List the latents in the chosen order, with the cursor on `latent`."""
        if self._features is not None:
            try:
                found = self._found(self._features, self.words)
            except UserError:  # an evaluation has replaced the file
                self.words, found = "", self._found(self._features, "")
            self._list(found, latent)

    def _found(self, features: Features, words: str) -> Found:
        return search(features, words) if words else Found([], features.order(self.order), [])

    def _list(self, found: Found, latent: int | None) -> None:
        if self._features is not None:
            self._last = found
            latents = [*found.noted, *found.firing]
            has_effects = "effect:" in self.words or (self.order == "effect" and not self.words)
            listed = self.query_one(LatentList)
            listed.show_latents(self._features, latents, found.others, latent, has_effects=has_effects)
            self._title()

    def _title(self) -> None:
        listed = self.query_one(LatentList)
        parts = [f"Job {self.job_id}{self.session.place}", self.member]
        if self._features is None:
            parts.append("Features")
        elif self.words:
            found = (
                plural(listed.n_firing, "latent")
                if is_filter(self.words)
                else self._last.counted(where_else(self._features))
            )
            parts.append(f"'{self.words}': {found}")
        else:
            parts += [plural(len(listed.latents), "latent"), counts(self._features), WORDS[self.order]]
        self.query_one("#features-title", Label).update(fit(" " + " · ".join(filter(None, parts)), self.size.width))
        entitle(self.query_one(LatentList), "Latents")

    @on(LatentList.Moved)
    def _show_latent(self, event: LatentList.Moved) -> None:
        if self._features is not None and event.latent is not None:
            self.query_one(LatentDetail).show_feature(self._features.feature(event.latent), self._features)
        elif self._features is not None:
            self.query_one(LatentDetail).show_instead("None of its latents has fired.")

    # The following methods handle keys.

    def action_back(self) -> None:
        """End a search, or return to the previous screen."""
        if self.words:
            self.words, latent = "", self.query_one(LatentList).latent
            self._show(latent)
        else:
            self.app.pop_screen()

    def action_next_order(self) -> None:
        self.words, latent = "", self.query_one(LatentList).latent
        has = {"stable": self._features and self._features.has_stability}
        has |= {"effect": self._features and self._features.has_effects}
        has |= {"norm": self._features and self._features.has_parts}
        has |= {"starred": self._features and bool(self._features.notes.by_latent)}
        known = [order for order in ORDERS if has.get(order, True)]
        self.order = known[(known.index(self.order) + 1) % len(known)] if self.order in known else known[0]
        self._show(latent)

    def action_search(self) -> None:
        self.app.push_screen(
            Ask(
                "Find in notes and texts",
                "words or parts of words, or starred:, stable:>0.7, effect:>0.001, part:B",
                self.words,
            ),
            self._search,
        )

    def _search(self, words: str | None) -> None:
        if words is None or self._features is None:
            return
        try:
            found = self._found(self._features, words)
        except UserError as error:
            self.notify(str(error), severity="warning", markup=False)
            return
        self.words = words
        self._list(found, None)

    def action_go_to(self) -> None:
        self.app.push_screen(Ask("Go to latent", "its index"), self._go_to)

    def _go_to(self, text: str | None) -> None:
        features = self._features
        if not text or features is None:
            return
        if not text.isdecimal() or int(text[:18]) >= features.n_latents:
            message = f"There is no latent {text}; the indices range from 0 to {features.n_latents - 1:,}."
            self.notify(message, severity="warning", markup=False)
        elif int(text) not in (latents := features.order(self.order)):
            self.notify(f"Latent {int(text)} has not fired.", severity="warning")
        else:
            self.words = ""
            self._list(Found([], latents, []), int(text))

    def action_go_to_nearest(self) -> None:
        latent = self.query_one(LatentList).latent
        if self._features is not None and latent is not None:
            nearest = self._features.feature(latent).nearest
            self._go_to(str(nearest[0][0]) if nearest else None)

    def action_try_text(self) -> None:
        from sae_tui.screens.text import TextScreen

        latent = self.query_one(LatentList).latent
        if self._features is not None and latent is not None and may_ask(self.session, self):
            self.app.push_screen(
                TextScreen(self.session, self._sae, self._features, latent, lambda one: self._go_to(str(one)))
            )

    def action_steer(self) -> None:
        from sae_tui.screens.steer import SteerScreen

        latent = self.query_one(LatentList).latent
        if self._features is not None and latent is not None and may_ask(self.session, self):
            texts = self.session.model.texts
            prompt = texts[-1] if texts else ""
            self.app.push_screen(SteerScreen(self.session, self._sae, self._features, latent, prompt))

    @property
    def _sae(self) -> ChosenSae:
        return self.session.model.chosen(self.job_id, self.member)

    def action_next_member(self) -> None:
        labels = list(self._opened)
        self.member = labels[(labels.index(self.member) + 1) % len(labels)]
        self.words = ""
        self._show()

    def action_star(self) -> None:
        self._change(lambda note: replace(note, starred=not note.starred))

    def action_name(self) -> None:
        self._ask_for("Name of latent", "a few words; an empty name removes it", "name", Ask)

    def action_note(self) -> None:
        self._ask_for("Note on latent", "what you know about it; an empty note removes it", "note", AskText)

    def _ask_for(self, question: str, placeholder: str, field: str, dialog: type[Ask]) -> None:
        """Ask for a field of the note on the latent under the cursor, and write it."""
        features, latent = self._features, self.query_one(LatentList).latent
        if features is None or latent is None or self._refused():
            return

        now = getattr(features.feature(latent), field)

        def take(text: str | None) -> None:
            # Another process may have changed a text that the user has left as it was.
            if text not in (None, now):
                self._write(features, latent, lambda note: replace(note, **{field: text}))

        self.app.push_screen(dialog(f"{question} {latent}", placeholder, now), take)

    def action_undo(self) -> None:
        if self._refused():
            return
        if not self._changes:
            self.notify("No star, name or note has been changed since this screen was opened.", severity="warning")
            return
        features, changed = self._changes.pop()
        self._write(features, changed.before.latent, changed.undo, undoes=True)

    def _refused(self) -> bool:
        """Return whether notes cannot be written here; if so, say why."""
        if self.session.place and not self.session.actions.refused():
            host = self.session.place.removeprefix(" on ")
            self.notify(there(host, self.job_id, "annotate ID LATENT"), severity="warning", markup=False)
        return bool(self.session.place) or self.session.actions.refused()

    def _change(self, change: Change) -> None:
        """Change the note on the latent under the cursor."""
        features, latent = self._features, self.query_one(LatentList).latent
        if features is not None and latent is not None and not self._refused():
            self._write(features, latent, change)

    def _write(self, features: Features, latent: int, change: Change, *, undoes: bool = False) -> None:
        def write() -> str:
            # Without the lock, an earlier change could be shown after a later one.
            with self._one_change:
                changed = change_note(features.folder, latent, change, features.weights)
                features.read_notes_again()
                self.post_message(Noted(features, changed, undoes))
            return f"the last change of latent {latent} is undone" if undoes else ""

        self.session.actions.do(write)

    @on(Noted)
    def _show_noted(self, event: Noted) -> None:
        if not event.undoes and event.changed.before != event.changed.after:
            self._changes.append((event.features, event.changed))
        if event.features is self._features:
            listed = self.query_one(LatentList)
            listed.show_notes()
            if (latent := listed.latent) is not None:
                self.query_one(LatentDetail).show_feature(event.features.feature(latent), event.features)

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Offer the keys for latents only if there are some, and for switching between SAEs if there are several."""
        if action in _OF_LATENTS:
            return bool(self._opened)
        return action != "next_member" or len(self._opened) > 1
