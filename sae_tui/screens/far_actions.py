"""The actions on other hosts' jobs: stop, pause and resume; for the rest, a message says what to run on that host."""

from __future__ import annotations

from functools import partial

from textual.app import App

from sae_tui.actions import FINISH_EARLY, Actions, Also, early_words, steps_to_finish
from sae_tui.hosts.hosts import Hosts
from sae_tui.hosts.view import HostView
from sae_tui.jobs.evaluation.offer import EvaluationOffer
from sae_tui.jobs.states import ENDED, stands
from sae_tui.jobs.view.reader import JobView
from sae_tui.panels.far_jobs import there
from sae_tui.session import Session
from trainer.contract.errors import UserError
from trainer.contract.store.states import JobState


class FarActions(Actions):
    """Actions on another host's jobs."""

    def __init__(self, session: Session, host: str, app: App[None]) -> None:
        super().__init__(session, app)
        self._home, self._host = session, host

    def act(self, verb: str, job: JobView) -> None:
        """Stop, pause or resume a job; if that is impossible, say why."""
        hosts, view = self._home.hosts, view_of(self._home, self._host)
        if self._home.actions.refused():
            return
        if hosts is None or view is None or not view.is_connected:
            self._app.notify(f"{self._host} is not connected.", severity="warning")
        elif obstacle := _obstacle(verb, job):
            self._app.notify(f"Job {job.id} on {self._host} {obstacle}.", severity="warning")
        else:
            self._run(hosts, verb, job)

    def offer_evaluation(self, job_id: int) -> EvaluationOffer | None:
        raise UserError(there(self._host, job_id, "eval ID").removesuffix("."))

    def _run(self, hosts: Hosts, verb: str, job: JobView) -> None:
        words = _words(verb, job)
        errand = partial(hosts.run, self._host, *words)
        actions = self._home.actions
        if verb == "stop":
            early = partial(hosts.run, self._host, *words, "--finish")
            also = None if _early_steps(job) is None else Also(FINISH_EARLY, early)
            actions.ask(*_stop_question(self._host, job), errand, also)
        else:
            actions.do(errand)


def view_of(session: Session, host: str) -> HostView | None:
    """Return the latest view of a host, or None if it is no longer monitored."""
    views = session.hosts.views if session.hosts else ()
    return next((view for view in views if view.name == host), None)


def _words(verb: str, job: JobView) -> list[str]:
    """Return the `sae-tui` arguments for this action."""
    if verb == "continue":
        return ["release" if job.state is JobState.QUEUED else "resume", str(job.id)]
    ends_now = verb == "stop" and _is_stopping(job)
    return [verb, str(job.id), *(["--kill"] if ends_now else [])]


def _is_stopping(job: JobView) -> bool:
    return job.state is JobState.STOPPING or job.stop_requested


def _obstacle(verb: str, job: JobView) -> str:
    """Return why the job's state forbids the action, in words that follow the job's name, or "" if it does not."""
    if verb == "continue":
        return "" if job.state is JobState.QUEUED or job.state.is_final else stands(job)
    return ENDED[job.state] if job.state.is_final else ""


def _early_steps(job: JobView) -> int | None:
    """Return the number of cool-down steps, or None if the job cannot finish early.

    Other hosts do not send a job's config with the list, but a job with a loss is a training job.
    """
    return None if job.loss is None or _is_stopping(job) else steps_to_finish(job)


def _stop_question(host: str, job: JobView) -> tuple[str, str]:
    """Return the question to ask before stopping a job, and the label of the yes button."""
    which = f"job {job.id} ({job.name}) on {host}"
    if _is_stopping(job):
        return f"J{which[1:]} is stopping. Kill it now? Unsaved progress is lost.", "Kill it"
    if job.state is JobState.QUEUED and not job.attempt:
        return f"Cancel {which}? It has not started, so nothing is lost.", "Cancel it"
    steps = _early_steps(job)
    early = "" if steps is None else f"\n\n{early_words(steps)}"
    return f"Stop {which}? It saves first.{early}", "Stop"
