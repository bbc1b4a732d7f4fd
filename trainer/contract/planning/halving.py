"""Successive halving of a sweep: which SAEs compete, and when the worse half of them is dropped.

The FVU at the full learning rate ranks learning rates wrongly, because most of the quality is gained while the rate
decays. Therefore, copies of the SAEs are cooled down for some steps, and the copies are compared (Jamieson & Talwalkar
2016, arXiv 1502.07943, with cooled-down copies instead of unfinished runs).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import msgspec

from trainer.contract.errors import Problem
from trainer.contract.planning.workload import Layout, Workload
from trainer.contract.settings.catalog import ARCHITECTURES
from trainer.contract.settings.job import JobConfig
from trainer.contract.settings.schedule import FEWEST_COOL_DOWN_STEPS
from trainer.contract.store.seeds import by_seeds
from trainer.contract.store.twins import without_twins
from trainer.contract.wording import join_words

# The share of a run's steps after which the last comparison begins, and the length of the copies' cool-down as a share
# of the steps before it. A shorter cool-down favours rates that are too low, and an earlier comparison favours rates
# that are too high.
LAST_SHARE, COOL_DOWN_SHARE = 0.15, 0.75
# The minimum number of steps before the first comparison.
LEAST_BEGIN = 15
# The settings in [sae] in which the SAEs of a contest may differ. With a difference in any other setting, an SAE may
# have a lower FVU without being better, as with k, or copies may not differ yet, as with settings for dead latents.
_MAY_DIFFER = ("b_dec_init", "encoder_init", "encoder_scale", "encoder_follows")
_PATH = "train.halving"

# The labels of the SAEs in a contest, by candidate. The SAEs of one candidate differ only in the seed.
Contest = dict[str, list[str]]


class Rung(msgspec.Struct, frozen=True):
    """A comparison: copies of the SAEs cool down from step `begin` to step `end`; then, the worse half is dropped."""

    begin: int
    end: int

    @property
    def length(self) -> int:
        return self.end - self.begin


def contests(members: Mapping[str, JobConfig]) -> list[Contest]:
    """Return the groups of SAEs whose FVUs can be compared; each group has at least two candidates.

    SAEs with a sparsity penalty are in no group, because their L0 depends on the penalty. They train to the end.
    """
    return [contest for contest, is_penalised in _alike(members) if not is_penalised]


def _alike(members: Mapping[str, JobConfig]) -> Iterator[tuple[Contest, bool]]:
    """Yield the groups of at least two candidates that differ only in learning settings, and if they are penalised."""
    groups: dict[str, Contest] = {}
    for candidate, labels in by_seeds(without_twins(members)).items():
        groups.setdefault(_terms(members[labels[0]]), {})[candidate] = labels
    for group in groups.values():
        if len(group) > 1:
            first, *_ = next(iter(group.values()))
            yield group, bool(ARCHITECTURES[members[first].sae.architecture].dense_matrices)


def contests_of(layout: Layout) -> list[Contest]:
    """Return the contests in a job; [] without `train.halving`."""
    return contests(layout.members) if layout.job.train.halving else []


def _terms(member: JobConfig) -> str:
    """Return a string with all settings that must be the same in a contest.

    The copies' cool-down replaces the decay, so a comparison says nothing about `decay_fraction`.
    """
    sae = {**msgspec.structs.asdict(member.sae), **msgspec.structs.asdict(member.sae.settings)}
    terms = {name: value for name, value in sae.items() if name not in (*_MAY_DIFFER, "settings")}
    return repr((member.data, terms, member.train.decay_fraction))


def rungs_of(layout: Layout) -> list[Rung]:
    """Return the comparisons in a job, in order; after the last one, each contest has one candidate left."""
    most = max(map(len, contests_of(layout)), default=1)
    return rungs(layout.total_steps, most)


def rungs(total_steps: int, n_candidates: int) -> list[Rung]:
    """Return the comparisons that reduce `n_candidates` to one; each begins at twice the step of the one before."""
    n_rungs = math.ceil(math.log2(n_candidates))
    begins = [int(total_steps * LAST_SHARE / 2**left) for left in reversed(range(n_rungs))]
    return [Rung(begin, begin + _cool_down_steps(begin)) for begin in begins]


def _cool_down_steps(begin: int) -> int:
    return max(FEWEST_COOL_DOWN_STEPS, math.ceil(COOL_DOWN_SHARE * begin))


def survivors(n_candidates: int) -> int:
    """Return how many of a contest's candidates a comparison keeps."""
    return -(-n_candidates // 2)


def trained_share(layout: Layout) -> float:
    """Return the steps of all SAEs and their copies, as a share of the steps that the SAEs take without halving."""
    steps, n_saved = layout.total_steps, 0
    for contest in contests_of(layout):
        n_left, n_seeds = len(contest), max(map(len, contest.values()))
        for rung in rungs_of(layout):
            n_dropped = n_left - survivors(n_left)
            n_saved += n_seeds * (n_dropped * (steps - rung.end) - (n_left * rung.length if n_dropped else 0))
            n_left -= n_dropped
    return 1 - n_saved / (steps * len(layout.members))


def halving_problems(work: Workload) -> list[Problem]:
    """Return the reasons why `train.halving` cannot be used in a job."""
    if not work.job.train.halving:
        return []
    groups = contests_of(work)
    if not groups:
        return [Problem(_PATH, _nothing_to_compare(work))]
    compared = [work.members[labels[0]] for contest in groups for labels in contest.values()]
    if work.mode == "sweep":
        message = (
            f'"sweep" gives each GPU its own SAEs, and the GPUs of SAEs dropped by {_PATH} would be idle; use "auto"'
        )
        return [Problem("parallel.mode", message)]
    if not work.job.data.held_out(work.shape.n_tokens):
        return [Problem("data.held_out_tokens", f"leaves no held-out rows, which {_PATH} needs; raise it")]
    warmup = max(one.train.warmup_fraction for one in compared)
    problems = _too_short(work, max(map(len, groups))) or _too_long_a_warmup(work, warmup)
    if free := _penalised(work):
        message = f"drops no {join_words(free)} SAEs, because their L0 depends on a penalty; these train to the end"
        problems.append(Problem(_PATH, message, severity="warning"))
    return problems


def _nothing_to_compare(layout: Layout) -> str:
    if free := _penalised(layout):
        message = f"compares SAEs by FVU at the same L0, but the L0 of {join_words(free)} depends on a penalty"
        return f"{message}; use a TopK variant, or leave it out"
    return (
        "compares SAEs of the same architecture, size and k in one sweep, and this job has no two of them; "
        "give a learning setting several values, like train.lr = [0.003, 0.01], or leave it out"
    )


def _penalised(layout: Layout) -> list[str]:
    """Return the architectures of the SAEs that would compete if their L0 did not depend on a penalty."""
    labels = [next(iter(contest.values()))[0] for contest, is_penalised in _alike(layout.members) if is_penalised]
    return sorted({layout.members[label].sae.architecture for label in labels})


def _too_short(layout: Layout, n_candidates: int) -> list[Problem]:
    first, *later = rungs(layout.total_steps, n_candidates)
    if first.begin >= LEAST_BEGIN:
        return []
    least = math.ceil(LEAST_BEGIN * 2 ** len(later) / LAST_SHARE)
    message = f"needs at least {least:,} steps to compare {n_candidates} SAEs, and the run has {layout.total_steps:,}"
    return [Problem(_PATH, f"{message}; train for longer, or leave it out")]


def _too_long_a_warmup(layout: Layout, warmup_fraction: float) -> list[Problem]:
    begin, steps = rungs_of(layout)[0].begin, layout.total_steps
    if warmup_fraction * steps <= begin:
        return []
    message = (
        f"is {warmup_fraction:g}, but {_PATH} compares the SAEs after {begin:,} of {steps:,} steps, in the warm-up"
    )
    return [
        Problem("train.warmup_fraction", f"{message}; set it to at most {math.floor(1000 * begin / steps) / 1000:g}")
    ]
