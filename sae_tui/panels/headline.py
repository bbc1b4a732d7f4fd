"""The first panel of a job's screen: name, state and progress, and why the job ended."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from rich.cells import cell_len

from sae_tui.format import bar, clock_time, count, duration, fit, gibibytes, measure, number, wrap
from sae_tui.jobs import states
from sae_tui.jobs.launch.memory_need import COUNTED
from sae_tui.jobs.output import kind_of
from sae_tui.jobs.view.find import waits
from sae_tui.jobs.view.reader import JobView, overfitting_words, spread_of
from sae_tui.jobs.view.shape import dead_after_words
from sae_tui.jobs.view.watcher import JobDetail
from sae_tui.panels.curves import judged, members_of, of_member
from sae_tui.panels.detail import DetailPanel
from sae_tui.panels.job_columns import devices
from sae_tui.widgets.lines import Line, Span, cut
from trainer.contract import wording
from trainer.contract.runs.spread_words import spread_words
from trainer.contract.settings.series import (
    OF_BATCH,
    held_out_metrics,
    key_metrics,
    own_series,
    series_named,
    title_of,
)
from trainer.contract.store.metrics_store import TRAINING
from trainer.contract.store.rows import DROPPED, Job
from trainer.contract.store.seeds import without_seed
from trainer.contract.store.states import JobState

# The maximum number of a program's metrics in the headline.
_MOST_OWN = 3
# Phases that say no more than the state, so the forecast may replace them.
_ROUTINE = (TRAINING, "evaluating", "saving")


class Headline(DetailPanel):
    """Shows the job in the title and, below it, the job's progress and its result or why it ended."""

    DEFAULT_CSS = "Headline { height: auto; min-height: 3; max-height: 6; }"

    def title(self, detail: JobDetail) -> Line:
        # The frame and a space take two cells at each end.
        return headline_title(detail, self.width - 4)

    def lines(self, detail: JobDetail) -> list[Line]:
        return [cut(line, self.width) for line in headline(detail, self.width)]


def headline_title(detail: JobDetail, width: int) -> Line:
    """Return the job's name, its state and its host; a long name is truncated first."""
    job, member, members = detail.view, detail.member, members_of(detail)
    is_ranked = states.is_ranked(job) and not (job.seeds and job.seeds.are_all)
    dropped = detail.series.get((of_member(DROPPED, member), 0), ())
    note = f"dropped at step {count(dropped[-1].step)}" if dropped else ""
    shown = _which(member, members, note or "the best" * (is_ranked and member == job.best_sae))
    word, sign, style = states.describe_state(job)
    mode = "" if kind_of(job.config).is_program else f", {job.mode}"
    where = f"{'GPU ' if job.gpu_ids else ''}{devices(job)}{mode}"
    head: Span = (f"Job {job.id} · ", "title")
    rest: tuple[Span, ...] = (
        (f"  {sign} {word}", style),
        (f"  {where}", "label"),
        (f"  {shown}" if shown else "", "accent"),
    )
    space = max(8, width - sum(cell_len(text) for text, _ in (head, *rest)))
    name = job.name if cell_len(job.name) <= space else fit(job.name, space)
    spans: Line = (head, (name, "title"), *rest)
    return (*spans, (_memory(job, width - sum(cell_len(text) for text, _ in spans)), "label"))


def headline(detail: JobDetail, width: int) -> list[Line]:
    """Return the job's progress, and its activity, its result or the reason why it ended."""
    job, member = detail.view, detail.member
    if job.state is JobState.IMPORTED:
        return [_imported(job), *_ending(detail, width)]
    kind = kind_of(job.config)
    if kind.is_program and not job.step:
        return [_ran(detail), *_ending(detail, width)]
    total = count(job.total_steps) if job.total_steps else "?"
    left = "" if job.eta_s is None else f"  {duration(job.eta_s)} left"
    start: Line = (
        (" ", "text"),
        (bar(job.progress, max(10, width - 80)), "bar rail"),
        (fit(wording.done(job.progress), 5, right=True), "title"),
        (f"  {kind.unit} {count(job.step)}/{total}", "text"),
    )
    is_known = job.tokens_per_s is not None or not kind.is_program
    speed: Span = (f"  {count(job.tokens_per_s)} {kind.rate}" if is_known else "", "text")
    end: Line = (*_metrics(detail, member), (left, "text"))
    first = (*start, speed, *end)
    if _cells(first) > width:
        # Omit the speed, because it is also shown as a curve.
        first = (*start, *end)
    for more in (_dead(detail, member), f"  {detail.energy.partition(',')[0].partition(' (')[0]}"):
        if more.strip() and _cells(first) + cell_len(more) <= width:
            first = (*first, (more, "text"))
    return [first, *_of_seeds(job, member), *_mirrored(detail), *_ending(detail, width)]


def _mirrored(detail: JobDetail) -> Iterator[Line]:
    """Yield when and where checkpoints were last mirrored, like `mirrored: step 5,000, 3 min ago, to hf://ada/saes`."""
    if (mirrored := detail.mirrored) and mirrored.url:
        yield ((f" mirrored: {mirrored.words(time.time())}", "warn" if mirrored.problem else "dim"),)


def _of_seeds(job: JobView, member: str) -> Iterator[Line]:
    """Yield the means over the seeds of the SAE `member`, like `3 seeds: held-out FVU 0.1460 ± 0.0015`."""
    figures = []
    if job.seeds is None or (member and member not in job.seeds.labels):
        return
    for name, series in key_metrics().items():
        if spread := spread_of(job, name):
            figures.append(f"{'held-out ' * (name in held_out_metrics())}{series.title} {spread_words(spread, series)}")
    if figures:
        which = ", ".join(filter(None, [without_seed(job.seeds.labels[0]), job.seeds.count_words]))
        yield ((f" {which}: {'  '.join(figures)}", "text"),)


def _ran(detail: JobDetail) -> Line:
    """Return how long a command that reports no steps has run, in which attempt, and the energy used by its GPUs."""
    job = detail.view
    end = job.ended if job.state.is_final else time.time()
    took = "" if job.started is None or end is None else duration(max(0.0, end - job.started))
    parts = [
        took and f"{'ran' if job.state.is_final else 'has run'} for {took}",
        f"started {clock_time(job.started)}" if job.started else "",
        f"attempt {job.attempt}" if job.attempt > 1 else "",
        detail.energy.partition(",")[0].partition(" (")[0],
    ]
    return ((f" {'  '.join(filter(None, parts)) or 'not started yet'}", "text"),)


def _cells(line: Line) -> int:
    return sum(cell_len(text) for text, _ in line)


def _imported(job: JobView) -> Line:
    """Return the metrics on an imported SAE's report card or, without a card, the key for creating one."""
    if job.heldout_fvu is None:
        return ((" not evaluated yet; press e to measure FVU and L0", "dim"),)
    figures = [f"trained on {count(job.tokens)} tokens"] if job.tokens else []
    figures += [f"FVU {number(job.heldout_fvu)}"]
    figures += [] if job.heldout_l0 is None else [f"L0 {number(job.heldout_l0)}"]
    return ((" " + "  ".join(figures), "text"),)


def _metrics(detail: JobDetail, member: str) -> Iterator[Span]:
    """Yield text like `held-out FVU 0.1341`, `L0 32`; before the first evaluation, dim text like `FVU ~0.0801`.

    For a program, yield its first metrics, like `loss 0.31`.
    """
    kind = kind_of(detail.view.config)
    if kind.is_program:
        for name in own_series(detail.view.others)[:_MOST_OWN]:
            yield f"  {title_of(name)} {number(detail.view.others[name])}", "text"
        return
    before = "held-out "
    for name, series in key_metrics().items() if kind.trains else ():
        value, is_of_batch = judged(detail, name, member)
        if is_of_batch:
            yield f"  {series.title} {OF_BATCH * (value is not None)}{measure(value, series)}", "dim"
        else:
            yield f"  {before * (name in held_out_metrics())}{series.title} {measure(value, series)}", "text"
            before = ""


def _dead(detail: JobDetail, member: str) -> str:
    """Return the share of dead latents and how "dead" is defined, or "" if unknown."""
    value, _ = judged(detail, "dead_fraction", member)
    window = dead_after_words(detail.view)
    return (
        f"  {measure(value, series_named('dead_fraction'))} dead (silent for {window})"
        if value is not None and window
        else ""
    )


def _which(member: str, members: Sequence[str], note: str) -> str:
    """Return which SAE of a sweep is shown, like `k=16 (2 of 3, the best)`, or "" for a single SAE."""
    if member not in members:
        return ""
    return f"{member} ({members.index(member) + 1} of {len(members)}{note and f', {note}'})"


def _failure_text(job: Job) -> str:
    took = duration(job.ended - job.started) if job.ended and job.started else ""
    left = f"; its partial output is in {job.output_path}" if job.output_path else ""
    when = f" {took} after it was resumed" if states.was_resumed(job) else f" after {took}"
    return f"{job.state}{when if took else ''}{left}"


def memory_words(job: JobView) -> list[str]:
    """Return texts for a rank's peak memory and its estimate, most detailed first, or [] if both are unknown."""
    # Before the launch, show the memory needed on a GPU, because a process on a simulated GPU needs a different amount.
    used, expected = job.peak_memory_bytes, job.card_memory_bytes or job.estimated_memory_bytes
    most = f"{gibibytes(used)} used" if used else ""
    guess = f"{gibibytes(expected)} expected" if expected else ""
    both = ", ".join(filter(None, (most, guess)))
    wordings = [f"{both} ({COUNTED[job.device]})" if used else "", both, most or guess]
    if job.device == "cpu" and used and expected and expected < used / 2:
        # Unlike the estimate, the measured size of a process includes Python and PyTorch themselves.
        what = "the SAEs" if job.best_sae else "the SAE"
        wordings = [f"{most} ({guess} for {what}, the rest is Python and libraries)", f"{most} ({guess} for {what})"]
        wordings.append(most)
    return list(filter(None, wordings))


def _memory(job: JobView, width: int) -> str:
    """Return the most detailed memory text that fits into `width` cells."""
    wordings = (f"  memory: {words}" for words in memory_words(job))
    return next((words for words in wordings if cell_len(words) <= width), "")


def _ending(detail: JobDetail, width: int) -> list[Line]:
    """Return the job's failure, result or current activity in full, followed by a warning if the job overfits."""
    job = detail.view
    lost = f" {count(job.dropped)} rows of metrics were lost" if job.dropped else ""
    # For a queued job, show why it is waiting instead of the last activity in its previous attempt.
    message, style = waits(job) or states.phase_words(job), "dim"
    if job.evaluation:
        message, style = f"{'◌' if job.evaluation.waits_for else '▶'} {job.evaluation.words}", "good"
    elif detail.postmortem:
        # The panel below shows the reason.
        message = _failure_text(job)
    elif job.error:
        message, style = f"✗ {job.error}", "bad"
    elif job.output_path and job.state.is_final:
        message, style = job.output_path, "accent"
    space = max(10, width - len(lost) - 1)
    if detail.member in detail.forecasts and detail.forecasts[detail.member].end:
        expected = detail.forecasts[detail.member].words
        wordings = [f"{message}; {expected}", *[expected] * (message in _ROUTINE), message]
        message = next((words for words in wordings if cell_len(words) <= space), message)
    first, *more = wrap(message, space) or [""]
    overfits = wrap(overfitting_words(job), max(10, width - 1)) if job.overfitting else []
    return [
        ((fit(f" {first}", space + 1), style), (lost, "warn")),
        *(((f" {text}", style),) for text in more),
        *(((f" {text}", "warn"),) for text in overfits),
    ]
