"""The base of the screens that put an SAE into its language model: requests, their answers, and loading."""

from __future__ import annotations

import time
from functools import partial

from textual import on
from textual.binding import Binding
from textual.message import Message
from textual.screen import Screen

from sae_tui.format import measured_duration, wrap
from sae_tui.jobs.loaded_model import ChosenSae, Failed, Loading, ModelLoaded, News
from sae_tui.session import Session
from sae_tui.widgets.ask import Ask
from sae_tui.widgets.frame import FramedScreen
from sae_tui.widgets.lines import Line
from trainer.contract.answers.interaction import Continued, Generate, Generated, ReadText, TextRead
from trainer.contract.errors import UserError
from trainer.contract.runs.features import Feature, Features

_TICK_S = 0.5
_AGAIN = "Press Enter to start again, or F2 to name another folder for the language model."
_MEANWHILE = "You can type meanwhile. Enter asks as soon as the model is loaded."
NO_SCALE = "Evaluate the SAE again: its features do not record the scale of their activations, so these may be wrong."


class ModelNews(Message):
    """The model's thread has news about the request with this number."""

    def __init__(self, number: int, news: News) -> None:
        super().__init__()
        self.number = number
        self.news = news


def may_ask(session: Session, screen: Screen[None]) -> bool:
    """Return whether a process for the model may be started; if not, notify the user."""
    if session.place:
        words = f"This SAE is{session.place}. Start sae-tui there to use it in its language model."
        screen.notify(words, severity="warning", markup=False)
        return False
    return not session.actions.refused()


class ModelScreen(FramedScreen):
    """Loads the model as soon as it is opened, and shows only the answer to its latest request."""

    BINDINGS = [
        Binding("f2", "choose_model", "Model", id="model.choose", show=False,
                tooltip="Name the folder of the language model"),
    ]  # fmt: skip

    def __init__(self, name: str, session: Session, sae: ChosenSae, features: Features, latent: int) -> None:
        super().__init__(name=name)
        self.session, self.sae, self.features, self.latent = session, sae, features, latent
        self.being_loaded: Loading | None = None
        self.loaded: ModelLoaded | None = None
        self.failed: Failed | None = None
        self.answer: TextRead | Continued | Generated | None = None  # to the latest request
        self.is_waiting = False  # whether the latest request has no final answer yet
        self._n_requests = 0

    def on_mount(self) -> None:
        self.set_interval(_TICK_S, self._tick)
        self.ask(None)

    def on_unmount(self) -> None:
        self.session.model.forget(self)

    def show_gpus(self) -> None:
        """Do nothing because this screen shows no GPUs."""

    def show_jobs(self) -> None:
        """Do nothing because this screen shows no jobs."""

    def ask(self, request: ReadText | Generate | None) -> None:
        """Send a request, or only load the model; answers to earlier requests are ignored from now on."""
        self._n_requests += 1
        self.failed, self.answer, self.is_waiting = None, None, request is not None
        self.session.model.ask(self, self.sae, request, partial(self._post, self._n_requests))
        self.show_state()

    def _post(self, number: int, news: News) -> None:
        self.post_message(ModelNews(number, news))

    @on(ModelNews)
    def _take(self, event: ModelNews) -> None:
        news = event.news
        if isinstance(news, Loading):
            self.being_loaded, self.loaded = news, None
        elif isinstance(news, ModelLoaded):
            self.being_loaded, self.loaded = None, news
        elif event.number != self._n_requests:
            return
        elif isinstance(news, Failed):
            self.failed, self.being_loaded, self.is_waiting = news, None, False
            self.loaded = self.loaded if news.is_loaded else None
        else:
            self.is_waiting, self.answer = isinstance(news, Continued), news
            self.take_answer(news)
        self.show_state()

    def action_choose_model(self) -> None:
        question = "Language model (empty: the one that the SAE's metadata names)"
        self.app.push_screen(Ask(question, "a folder, or a name on the hub", self.sae.model), self._choose_model)

    def _choose_model(self, model: str | None) -> None:
        if model is not None:
            self.sae = self.session.model.name_model(self.sae, model)
            self.ask(None)

    def _tick(self) -> None:
        if self.being_loaded:
            self.show_state()

    def show_state(self) -> None:
        """Draw the screen after a change of its state."""
        raise NotImplementedError

    def take_answer(self, answer: TextRead | Continued | Generated) -> None:
        """Note a new answer before it is drawn."""
        if self.doubts and not isinstance(answer, Continued):
            self.notify(self.doubts, severity="warning")

    @property
    def model_words(self) -> str:
        """The name of the language model and the device it runs on, or "" until it is loaded."""
        if self.loaded is None:
            return ""
        ready = self.loaded.ready
        return f"{ready.model.rstrip('/').rpartition('/')[2]}, {ready.hook}, on {self.loaded.device}"

    def state_lines(self, width: int) -> list[Line]:
        """Return what to show instead of an answer: how far loading is, or why the request failed."""
        if self.failed:
            again = "" if self.failed.is_loaded else f" {_AGAIN}"
            message = self.failed.message.rstrip(".")
            return message_lines(f"{message[:1].upper()}{message[1:]}.{again}", "warn", width)
        if self.being_loaded:
            stage = f": {self.being_loaded.stage}" if self.being_loaded.stage else ""
            seconds = measured_duration(time.monotonic() - self.being_loaded.since)
            begun = message_lines(f"Loading the SAE and its language model, {seconds}{stage}", "text", width)
            return [*begun, *message_lines(_MEANWHILE, "dim", width)]
        return message_lines("Waiting for the model …", "dim", width) if self.is_waiting else []

    @property
    def doubts(self) -> str:
        """Say that activations cannot be compared with the stored largest ones, or return ""."""
        return NO_SCALE if self.loaded and not self.loaded.ready.has_scale else ""

    def feature(self, latent: int) -> Feature | None:
        """Return a latent's stored data, or None if its file is from an SAE with fewer latents."""
        try:
            return self.features.feature(latent)
        except UserError:
            return None


def message_lines(text: str, style: str, width: int) -> list[Line]:
    """Wrap a message to the width."""
    return [((f" {line}", style),) for line in wrap(text, max(10, width - 2))]
