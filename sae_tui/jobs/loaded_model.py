"""Keeps one SAE and its language model loaded for the app's screens, in a process that one thread starts and ends."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import NamedTuple

from sae_tui.jobs.evaluation.request import ReservedGpu, python_of
from sae_tui.jobs.interaction import Interaction
from sae_tui.jobs.store_access import existing
from sae_tui.threads import on_thread
from trainer.contract.answers.interaction import Continued, Generate, Generated, ReadText, Ready, TextRead
from trainer.contract.errors import UserError, sentence
from trainer.contract.extras import refuse_without_trainer
from trainer.contract.paths import DataDir
from trainer.contract.progress import Reached
from trainer.contract.runs.features import FEATURES
from trainer.contract.store.rows import Job

# The process ends if nothing was asked for this long. A process with a GPU keeps other jobs from using it.
IDLE_S, IDLE_ON_GPU_S = 600.0, 120.0
# How long the process may take to end when the app exits; it has nothing to save.
_LEAVE_S = 0.3
_MOST_TEXTS = 50


class ChosenSae(NamedTuple):
    """An SAE of a job; `label` is its folder, or "" if the job has only one. `model` replaces its language model."""

    job_id: int
    label: str = ""
    model: str = ""


class Loading(NamedTuple):
    """The SAE and its language model are being loaded since `since`, a `time.monotonic`."""

    stage: str
    since: float


class ModelLoaded(NamedTuple):
    """The model is in memory; `device` is like `GPU 3` or `the CPU`."""

    ready: Ready
    device: str


class Failed(NamedTuple):
    """A request has failed. Unless the model `is_loaded`, the next request loads it again."""

    message: str
    is_loaded: bool


News = Loading | ModelLoaded | TextRead | Continued | Generated | Failed


class _Pending(NamedTuple):
    asker: Hashable
    sae: ChosenSae
    request: ReadText | Generate | None
    report: Callable[[News], object]


class LoadedModel:
    """Answers requests of screens on one thread, in order; starts a process for the SAE whenever it needs another one.

    Each asker has one request: a newer one replaces it. `gpu_of` chooses an idle GPU for a job, or None for the CPU.
    A process that has ended is started again at the next request.
    """

    def __init__(
        self,
        data: DataDir,
        gpu_of: Callable[[Job], ReservedGpu | None],
        idle_s: float = IDLE_S,
        idle_on_gpu_s: float = IDLE_ON_GPU_S,
    ) -> None:
        self._data, self._gpu_of, self._idle_s, self._idle_on_gpu_s = data, gpu_of, idle_s, idle_on_gpu_s
        self.command: Sequence[str] = ()  # replaces the trainer's command
        self.texts: list[str] = []  # texts entered in this session, latest last
        self._named: dict[tuple[int, str], str] = {}
        self._changed = threading.Condition()
        self._waiting: dict[Hashable, _Pending] = {}
        self._now: _Pending | None = None
        self._interaction: Interaction | None = None
        self._loaded: tuple[ChosenSae, ModelLoaded] | None = None
        # The state of the files that the process has read.
        self._read_from: list[tuple[int, int]] = []
        self._has_thread = self._is_closed = self._has_gpu = False

    def ask(
        self, asker: Hashable, sae: ChosenSae, request: ReadText | Generate | None, report: Callable[[News], object]
    ) -> None:
        """Answer a request, or only load the model if it is None; `report` is called on a thread with all news.

        The asker's last request ends early, and the loading of another SAE is given up.
        """
        with self._changed:
            if self._is_closed:
                return
            self._waiting.pop(asker, None)
            self._waiting[asker] = _Pending(asker, sae, request, report)
            self._interrupt(asker)
            if self._now and self._now.sae != sae and not self._loaded and self._interaction:
                on_thread(self._interaction.close)
            if not self._has_thread:
                self._has_thread = True
                threading.Thread(target=self._run, name="model", daemon=True).start()
            self._changed.notify_all()

    def stop(self, asker: Hashable) -> None:
        """End the asker's generation early, with what has been generated so far."""
        with self._changed:
            self._interrupt(asker)

    def forget(self, asker: Hashable) -> None:
        """Drop the asker's request, and end its generation; the model stays loaded."""
        with self._changed:
            self._waiting.pop(asker, None)
            self._interrupt(asker)

    def remember(self, text: str) -> None:
        """Add a text to the latest texts of the session."""
        self.texts[:] = [*(one for one in self.texts if one != text), text][-_MOST_TEXTS:]

    def chosen(self, job_id: int, label: str) -> ChosenSae:
        """Return an SAE, with the language model that the user named for it in this session."""
        return ChosenSae(job_id, label, self._named.get((job_id, label), ""))

    def name_model(self, sae: ChosenSae, model: str) -> ChosenSae:
        """Use another language model for an SAE in this session; "" is the model that the SAE's metadata names."""
        self._named[sae.job_id, sae.label] = model
        return self.chosen(sae.job_id, sae.label)

    def close(self) -> None:
        """End the process and answer nothing more."""
        with self._changed:
            self._is_closed = True
            self._waiting.clear()
            interaction = self._interaction
            self._changed.notify_all()
        if interaction:
            interaction.close(_LEAVE_S)

    def _interrupt(self, asker: Hashable) -> None:
        """Take back the asker's current request; the thread sees this before it sends it, and at the next token."""
        if self._now and self._now.asker == asker:
            self._now = self._now._replace(request=None)

    # The following methods run on the thread.

    def _run(self) -> None:
        is_over = False
        while not is_over:
            if (pending := self._next()) is not None:
                self._serve(pending)
                continue
            self._end()
            with self._changed:
                is_over = not self._waiting
                self._has_thread = not is_over

    def _next(self) -> _Pending | None:
        """Wait for the next request; return None if none comes for long or the app exits."""
        with self._changed:
            self._now = None
            idle_s = self._idle_on_gpu_s if self._has_gpu else self._idle_s
            self._changed.wait_for(lambda: self._waiting or self._is_closed, idle_s)
            if self._waiting:
                self._now = self._waiting.pop(next(iter(self._waiting)))
            return self._now

    def _serve(self, pending: _Pending) -> None:
        try:
            self._answer(pending)
        except (UserError, OSError) as error:
            self._fail(pending, sentence(error))
        except Exception as error:
            self._fail(pending, f"the model cannot be used because of a bug in sae-tui: {error!r}")

    def _answer(self, pending: _Pending) -> None:
        interaction, loaded = self._opened(pending)
        self._report(pending, loaded)
        for answer in interaction.ask(request) if (request := self._wanted()) else ():
            assert isinstance(answer, TextRead | Continued | Generated)
            self._report(pending, answer)
            if isinstance(answer, Continued) and not self._wanted():
                interaction.stop()

    def _wanted(self) -> ReadText | Generate | None:
        """Return the current request, or None if the asker has taken it back."""
        with self._changed:
            return self._now.request if self._now else None

    def _opened(self, pending: _Pending) -> tuple[Interaction, ModelLoaded]:
        """Return the process that has the SAE loaded; start one if necessary."""
        files = self._files(pending.sae)
        is_same = self._loaded is not None and self._loaded[0] == pending.sae and self._read_from == files
        if self._interaction and self._loaded and is_same and not self._interaction.has_ended:
            return self._interaction, self._loaded[1]
        self._end()
        self._read_from = files
        since = time.monotonic()
        self._report(pending, Loading("", since))
        interaction, device = self._started(pending.sae)
        with self._changed:
            self._interaction = interaction
            is_unwanted = self._is_closed or any(one.sae != pending.sae for one in self._waiting.values())
        if is_unwanted:
            interaction.close(_LEAVE_S)
        ready = interaction.start(partial(self._report_stage, pending, since))
        loaded = ModelLoaded(ready, device)
        with self._changed:
            self._loaded = pending.sae, loaded
        return interaction, loaded

    def _files(self, sae: ChosenSae) -> list[tuple[int, int]]:
        """Return the state of the SAE's files, which an evaluation or another export replaces."""
        folder = self._data.sae(sae.job_id) / sae.label
        with contextlib.suppress(OSError):
            return [(one.stat().st_ino, one.stat().st_mtime_ns) for one in (folder / "cfg.json", folder / FEATURES)]
        return []

    def _started(self, sae: ChosenSae) -> tuple[Interaction, str]:
        """Start the process, and describe the device it uses."""
        with existing(self._data, sae.job_id) as control:
            job = control.job(sae.job_id)
        if not (python := python_of(self._data, sae.job_id)):
            refuse_without_trainer()
        gpu, folder = self._gpu_of(job), self._data.sae(sae.job_id) / sae.label
        if not folder.is_dir():
            raise UserError(f"job {sae.job_id} has no SAE in {folder}")
        process = Interaction(folder, python, gpu, sae.model or None, command=self.command)
        self._has_gpu = gpu is not None
        on_cpu = "the CPU, since no GPU is idle" if job.device == "cuda" else "the CPU"
        return process, f"GPU {gpu.index}" if gpu else on_cpu

    def _report_stage(self, pending: _Pending, since: float, reached: Reached) -> None:
        self._report(pending, Loading(reached.words, since))

    def _report(self, pending: _Pending, news: News) -> None:
        with contextlib.suppress(RuntimeError):  # the app has exited
            pending.report(news)

    def _fail(self, pending: _Pending, message: str) -> None:
        """Report a failure; if the process has ended, all waiting requests for its SAE have failed too."""
        is_loaded = bool(self._loaded and self._interaction and not self._interaction.has_ended)
        failed = [pending]
        if not is_loaded:
            self._end()
            with self._changed:
                failed += [one for one in self._waiting.values() if one.sae == pending.sae]
                self._waiting = {asker: one for asker, one in self._waiting.items() if one.sae != pending.sae}
        # The screens have no such flag or setting.
        message = message.removeprefix("--model: ").removeprefix("model.path: ")
        for one in failed:
            self._report(one, Failed(message, is_loaded))

    def _end(self) -> None:
        with self._changed:
            interaction, self._interaction, self._loaded = self._interaction, None, None
        if interaction:
            interaction.close()
