"""Follows chosen latents while an SAE is trained, and stores a snapshot of them at evaluations and checkpoints."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from trainer.activations.base import IndexedSource, Indices, Pair, Source, on_device
from trainer.activations.training_data import IndexedData
from trainer.contract.errors import first_line
from trainer.contract.json_file import convert_as, read_json
from trainer.contract.runs.checkpoint_manifest import Position
from trainer.contract.runs.watched import (
    WatchedContext,
    WatchedLatent,
    WatchedSnapshot,
    Why,
    append_watched,
    keep_until,
)
from trainer.contract.settings.job import MOST_WATCHED, JobConfig
from trainer.contract.settings.tokens_of_data import META, folder_of, tells_tokens
from trainer.contract.wording import plural
from trainer.evaluation.contexts import ActivationEntries, Contexts, TokenRows, origin_of
from trainer.extraction.shard_writer import RowOrigin, order_of_shard
from trainer.extraction.token_bytes import read_tokens
from trainer.parallel.base import Parallel
from trainer.parallel.group import PeerLost
from trainer.reporting import rank_log
from trainer.reporting.progress import RunProgress
from trainer.saes.sparse_acts import Acts, DenseActs, active_entries
from trainer.training.layers import trained_together
from trainer.training.learner import Learner
from trainer.training.loop import Trainer

# The number of held-out rows to read for a snapshot: a fiftieth of the training tokens between two evaluations, within
# these limits. Reading a row takes a third as long as training on it.
LEAST_ROWS, MOST_ROWS, SHARE_OF_TOKENS = 512, 4096, 50
# The number of rows per forward pass.
_AT_ONCE = 1024
# The number of contexts to store for each latent.
N_CONTEXTS = 5
# The number of snapshots of a run's SAEs, not counting the ones at checkpoints. In longer runs, some evaluations have
# none, because the file would become too large.
MOST_SNAPSHOTS = 400
# A latent whose direction has at least the first cosine with the one at the snapshot before, at so many snapshots in
# a row, has settled. A cosine below `TURNED` is then reported. Most latents turn at every early snapshot.
SETTLED, N_SETTLED, TURNED = 0.97, 2, 0.9
# The maximum number of latents that an event names.
_NAMED = 8


class WatchedRows(NamedTuple):
    """One hook's rows for all snapshots, without outliers; `origin` is None if their tokens are unknown."""

    pair: Pair
    origin: RowOrigin | None


class SinceFired(NamedTuple):
    """What a snapshot needs to know about the last one, each a tensor [d_sae] on the CPU.

    `silent` latents are dead or have never fired. `fading` latents are silent, or have not fired for half of the tokens
    after which a latent is dead.
    """

    silent: Tensor
    fading: Tensor


class ChangedLatents(NamedTuple):
    """The latents that came alive since the last snapshot, the ones that died, and the ones that started to fade."""

    born: list[int]
    died: list[int]
    fading: list[int]


class Settling:
    """Counts at how many snapshots in a row each watched latent of an SAE has kept its direction.

    Snapshots until step `warm_up` do not count, nor snapshots since which a latent has not fired: at a low learning
    rate, or without gradients, every direction stays the same.
    """

    def __init__(self, warm_up: float) -> None:
        self._warm_up = warm_up
        self._n_settled: dict[int, int] = {}

    def turned(self, snapshot: WatchedSnapshot) -> list[int]:
        """Return the latents that had settled before the next snapshot, and have turned at it."""
        before, self._n_settled = self._n_settled, {}
        for one in snapshot.latents:
            keeps = one.cosine is not None and one.cosine >= SETTLED and one.density != 0
            if keeps and snapshot.step > self._warm_up:
                self._n_settled[one.latent] = before.get(one.latent, 0) + 1
        settled = {latent for latent, n in before.items() if n >= N_SETTLED}
        turned = (one for one in snapshot.latents if one.cosine is not None and one.cosine < TURNED)
        return [one.latent for one in turned if one.latent in settled]


class WatchedFirings:
    """The number of tokens on which each latent of an SAE has fired in training since the last snapshot."""

    def __init__(self, d_sae: int, seen: int) -> None:
        self.n_fired = torch.zeros(d_sae, dtype=torch.float64)
        self.n_tokens, self.seen = 0, seen

    def add(self, sums: Tensor) -> None:
        """Add the sums of a log interval, [d_sae + 1]: the firings of each latent, and the number of tokens."""
        self.n_fired += sums[:-1]
        self.n_tokens += round(float(sums[-1]))
        self.seen += round(float(sums[-1]))

    def reset(self) -> None:
        self.n_fired.zero_()
        self.n_tokens = 0


class WatchedSae:
    """What is known about one SAE of a run: the latents to watch, and their state at the last snapshot."""

    def __init__(self, wanted: Sequence[int | str], d_sae: int, stored: WatchedSnapshot | None, at: Position) -> None:
        self.d_sae, self._wanted = d_sae, wanted
        # The reason for watching each latent.
        self.why: dict[int, Why] = {one: "asked" for one in wanted if isinstance(one, int) and one < d_sae}
        before = stored.latents if stored else ()
        self.why |= {one.latent: one.why for one in before if one.why != "asked" and one.latent < d_sae}
        self.firings = WatchedFirings(d_sae, stored.seen if stored else at.tokens)
        self.last: SinceFired | None = None
        self.directions: dict[int, Tensor] = {}

    def state_of(self, since: Tensor, dead_after: int) -> SinceFired:
        """Return the state from `n_tokens_since_fired` [d_sae]."""
        silent = (since >= dead_after) | (since >= self.firings.seen)
        if self.last:
            # Resampling resets the counts of latents that have not fired yet.
            silent |= self.last.silent & (self.firings.n_fired == 0)
        return SinceFired(silent, silent | (since >= dead_after // 2))

    def look(self, state: SinceFired) -> ChangedLatents:
        """Compare a new state with the last one, and choose the latents to watch from now on."""
        last, self.last = self.last, state
        if last is None:
            return ChangedLatents([], [], [])
        fires = self.firings.n_fired > 0
        born, died = last.silent & fires & ~state.silent, ~last.silent & state.silent
        found = ChangedLatents(*(_numbers(one) for one in (born, died, ~last.fading & state.fading)))
        self._choose(found)
        return found

    def _choose(self, found: ChangedLatents) -> None:
        """Watch the latents just found; in the remaining places, watch the ones found before, newest first."""
        n_fired = self.firings.n_fired.tolist()
        born = sorted(found.born, key=lambda latent: (-n_fired[latent], latent))
        fresh: dict[int, Why] = {}
        fresh |= dict.fromkeys(born, "new") if "new" in self._wanted else {}
        fresh |= dict.fromkeys(sorted({*found.died, *found.fading}), "dying") if "dying" in self._wanted else {}
        asked = {one: why for one, why in self.why.items() if why == "asked"}
        before = {one: why for one, why in self.why.items() if one not in fresh and why != "asked"}
        self.why = dict([*asked.items(), *(fresh | before).items()][:MOST_WATCHED]) | asked


class LatentWatcher:
    """Takes the snapshots of a run's watched latents; every rank makes the same calls, and rank 0 writes.

    A failure ends the watching with an event, but not the run. All ranks read the same rows, so the snapshots do not
    depend on the number of ranks.
    """

    def __init__(
        self, trainer: Trainer, job: JobConfig, source: Source, parallel: Parallel, progress: RunProgress, run: Path
    ) -> None:
        self._trainer, self._job, self._source = trainer, job, source
        self._parallel, self._progress, self._run = parallel, progress, run
        self._saes: dict[str, WatchedSae] = {}
        # On rank 0, for each label.
        self._settling: dict[str, Settling] = {}
        self._rows: list[WatchedRows] = []
        self._tokens: Sequence[bytes] = ()
        every, n_saes = max(1, job.train.eval_every), len(trainer.report.values)
        self._every = every * -(-trainer.total_steps * n_saes // (every * MOST_SNAPSHOTS))
        self._is_off = False
        stored: list[WatchedSnapshot] = []
        with self._guarded():
            stored = keep_until(run, trainer.position.step) if parallel.is_main else []
            for one in stored:
                self._turned(one)
            self._rows = self._read_rows()
        if not self._is_off:
            with self._guarded():
                self._begin({one.label: one for one in stored})

    def count(self, label: str, sums: Tensor) -> None:
        """Add a log interval's firings, [d_sae + 1], of one of this rank's SAEs."""
        if not self._is_off and label in self._saes:
            self._saes[label].firings.add(sums)

    def take(self, *, must: bool) -> None:
        """Store a snapshot if it is due or if it `must` be taken, as at a checkpoint or at the end; never raise."""
        at = self._trainer.position
        if self._is_off or not (must or (self._job.train.eval_every and at.step % self._every == 0)):
            return
        own: dict[str, tuple[object, ChangedLatents]] = {}
        with self._guarded():
            own = self._measured(at)
        if not self._is_off:
            gathered = self._parallel.all_gather(own)
            with self._guarded():
                self._store(at.step, gathered)

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[None]:
        """Stop watching on all ranks if the body fails on one of them, and report the error once."""
        problem = ""
        try:
            yield
        except PeerLost:
            raise
        except Exception as error:
            problem = first_line(error)
            rank_log.say(f"latents are no longer watched: {problem}")
        failed = torch.full((1,), float(bool(problem)), device=self._parallel.device)
        self._parallel.world.sum_(failed)
        if bool(failed):
            self._is_off = True
            reason = problem or "an error on another rank, which is in its log"
            self._event("watch_failed", f"latents are no longer watched: {reason}; training continues", "warning")

    def _event(self, kind: str, message: str, level: str = "info") -> None:
        if self._parallel.is_main:
            self._progress.event(kind, message, level)

    def _begin(self, latest: Mapping[str, WatchedSnapshot]) -> None:
        """Prepare for the first snapshot, given rank 0's last ones by label, if the run was resumed."""
        at, wanted = self._trainer.position, self._job.train.watch_latents or []
        stored = self._of_first(latest)
        for label, learner in self._trainer.learners.items():
            sae = self._saes[label] = WatchedSae(wanted, learner.sae.d_sae, stored.get(label), at)
            if at.step:
                sae.last = sae.state_of(*_since_fired(learner))
                with learner.evaluating():
                    sae.directions = self._directions(learner, sae)

    def _of_first(self, latest: Mapping[str, WatchedSnapshot]) -> dict[str, WatchedSnapshot]:
        """Return rank 0's value on all ranks."""
        if self._parallel.world_size == 1:
            return dict(latest)
        content = msgspec.json.encode([msgspec.structs.replace(one, latents=_bare(one)) for one in latest.values()])
        size = torch.tensor([len(content)], device=self._parallel.device)
        self._parallel.world.copy_from_first_([size])
        data = torch.zeros(int(size), dtype=torch.uint8, device=self._parallel.device)
        if self._parallel.is_main:
            data.copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))
        self._parallel.world.copy_from_first_([data])
        known = msgspec.json.decode(bytes(data.tolist()), type=list[WatchedSnapshot])
        return {one.label: one for one in known}

    # The rows

    def _read_rows(self) -> list[WatchedRows]:
        """Read the held-out rows for all snapshots, in text order if their tokens are known."""
        between = max(1, self._job.train.eval_every) * self._trainer.tokens_per_step
        most = min(MOST_ROWS, max(LEAST_ROWS, between // SHARE_OF_TOKENS))
        data, source = self._trainer.data, self._source
        if not isinstance(data, IndexedData) or not isinstance(source, IndexedSource) or not data.n_held_out:
            lack = "a stream's rows have no stored tokens" if data.n_held_out else "no rows are held out"
            self._event("watch", f"watched latents are stored without texts: {lack}")
            return []
        held_out = data.split.held_out
        found = _in_text_order(self._job, source, held_out, most)
        if found is None:
            self._event("watch", "watched latents are stored without texts: the data does not record its tokens")
        else:
            folder = folder_of(next(iter(self._job.hooks.values())))
            self._tokens = read_tokens(folder) if folder else ()
        rows, origin = found or (held_out[:most], None)
        return [self._of_hook(source.of_hook(hook), hook, rows, origin) for hook in range(source.n_hooks)]

    def _of_hook(self, source: IndexedSource, hook: int, rows: Indices, origin: RowOrigin | None) -> WatchedRows:
        ascending = np.sort(rows)
        order = torch.from_numpy(np.searchsorted(ascending, rows))
        x, y = source.pairs(ascending)
        inputs = x[order]
        pair = inputs, inputs if y is x else y[order]
        moved = on_device(pair, self._parallel.device)
        kept = torch.nonzero(self._trainer.outliers[hook].ordinary(*moved)).flatten().cpu()
        inputs = pair[0][kept]
        pair = inputs, inputs if pair[1] is pair[0] else pair[1][kept]
        return WatchedRows(pair, RowOrigin(*(one[kept] for one in origin)) if origin else None)

    # A snapshot

    @torch.no_grad()
    def _measured(self, at: Position) -> dict[str, tuple[object, ChangedLatents]]:
        """Return the snapshots of this rank's SAEs, by label, and the latents that came alive or died."""
        learners, measured = self._trainer.learners, dict[str, tuple[object, ChangedLatents]]()
        found = {label: self._saes[label].look(self._state(label, one)) for label, one in learners.items()}
        acts = self._acts(learners)
        for label, learner in learners.items():
            sae = self._saes[label]
            with learner.evaluating():
                directions = self._directions(learner, sae)
            snapshot = self._snapshot(label, learner, at, acts.get(label), directions)
            measured[label] = msgspec.to_builtins(snapshot), found[label]
            sae.directions = directions
            sae.firings.reset()
        return measured

    def _store(self, step: int, gathered: Mapping[str, tuple[object, Sequence[list[int]]]]) -> None:
        """On rank 0, store the snapshots of all ranks' SAEs, and report the events."""
        if self._parallel.is_main:
            snapshots = {label: convert_as(one, WatchedSnapshot) for label, (one, _) in gathered.items()}
            append_watched(self._run, snapshots.values())
            self._report(step, snapshots, {label: ChangedLatents(*of) for label, (_, of) in gathered.items()})

    def _state(self, label: str, learner: Learner) -> SinceFired:
        return self._saes[label].state_of(*_since_fired(learner))

    def _acts(self, learners: Mapping[str, Learner]) -> dict[str, Tensor]:
        """Return the watched latents' activations on the rows, by label, [n_rows, n_watched] on the CPU."""
        labels = {learner: label for label, learner in learners.items()}
        found: dict[str, list[Tensor]] = {label: [] for label in learners}
        with contextlib.ExitStack() as stack:
            for learner in learners.values():
                stack.enter_context(learner.evaluating())
            for unit in trained_together(learners.values()) if self._rows else ():
                x, y = self._rows[unit.hook].pair
                for start in range(0, len(x), _AT_ONCE):
                    inputs = x[start : start + _AT_ONCE]
                    pair = inputs, inputs if y is x else y[start : start + _AT_ONCE]
                    for learner, _, output in unit.outputs(*on_device(pair, self._parallel.device)):
                        own = _of_latents(learner, output.acts, [*self._saes[labels[learner]].why], len(inputs))
                        found[labels[learner]].append(own)
        return {label: torch.cat(parts).cpu() for label, parts in found.items() if parts}

    def _directions(self, learner: Learner, sae: WatchedSae) -> dict[int, Tensor]:
        """Return the decoder directions of the watched latents on all ranks, on the CPU in fp32."""
        places, own = _places(learner, [*sae.why])
        W_dec = learner.sae.W_dec.detach().flatten(1)
        rows = torch.zeros(len(sae.why), W_dec.shape[1], device=W_dec.device)
        rows[own] = W_dec[places].float()
        learner.latents.group.sum_(rows)
        return dict(zip(sae.why, rows.cpu(), strict=True))

    def _snapshot(
        self, label: str, learner: Learner, at: Position, acts: Tensor | None, directions: Mapping[int, Tensor]
    ) -> WatchedSnapshot:
        sae = self._saes[label]
        rows = self._rows[learner.hook] if self._rows else None
        contexts = _contexts(acts, rows.origin) if acts is not None and rows and rows.origin else None
        shares = largest = None
        if acts is not None and len(acts):
            shares, largest = (acts > 0).double().mean(0).tolist(), acts.amax(0).tolist()
        latents = []
        for place, (latent, why) in enumerate(sae.why.items()):
            last = sae.directions.get(latent)
            n = sae.firings.n_tokens
            examples = contexts.examples(place, self._tokens) if contexts else []
            latents.append(
                WatchedLatent(
                    latent,
                    why,
                    density=float(sae.firings.n_fired[latent]) / n if n else None,
                    heldout_density=None if shares is None else shares[place],
                    cosine=None if last is None else float(cosine_similarity(last, directions[latent], dim=0)),
                    largest=None if largest is None else largest[place],
                    contexts=tuple(map(WatchedContext.of, examples)),
                )
            )
        n_rows = 0 if acts is None else len(acts)
        return WatchedSnapshot(at.step, at.tokens, sae.firings.seen, n_rows, tuple(latents), label)

    def _turned(self, snapshot: WatchedSnapshot) -> list[int]:
        """Return the settled latents that have turned at the next snapshot of an SAE."""
        warm_up = self._job.train.warmup_fraction * self._trainer.total_steps
        return self._settling.setdefault(snapshot.label, Settling(warm_up)).turned(snapshot)

    def _report(self, step: int, snapshots: Mapping[str, WatchedSnapshot], found: Mapping[str, ChangedLatents]) -> None:
        """Report the latents that came alive, died or turned, with at most one event each."""
        turned = {label: self._turned(of_sae) for label, of_sae in snapshots.items()}
        for kind, words, latents in (
            ("latents_born", "came alive", {label: one.born for label, one in found.items()}),
            ("latents_died", "died", {label: one.died for label, one in found.items()}),
            ("latents_turned", f"had settled and turned to a cosine below {TURNED} with the last snapshot", turned),
        ):
            if any(latents.values()):
                self._event(kind, f"{_named(latents)} {words} at step {step}")


def _named(latents: Mapping[str, Sequence[int]]) -> str:
    """Return words like "latent 77" or "3 latents (12, 77, 80)", with the labels of a sweep's SAEs."""
    parts = []
    for label, numbers in latents.items():
        if numbers:
            listed = ", ".join(map(str, numbers[:_NAMED])) + (", …" if len(numbers) > _NAMED else "")
            words = f"latent {numbers[0]}" if len(numbers) == 1 else f"{plural(len(numbers), 'latent')} ({listed})"
            parts.append(f"{words} of {label}" if label else words)
    return "; ".join(parts)


def _numbers(mask: Tensor) -> list[int]:
    numbers: list[int] = torch.nonzero(mask).flatten().tolist()
    return numbers


def _bare(snapshot: WatchedSnapshot) -> tuple[WatchedLatent, ...]:
    return tuple(WatchedLatent(one.latent, one.why) for one in snapshot.latents)


def _since_fired(learner: Learner) -> tuple[Tensor, int]:
    """Return `n_tokens_since_fired` of all latents on the CPU, and the number after which a latent is dead."""
    return learner.latents.whole(learner.sae.n_tokens_since_fired).cpu(), learner.sae.dead_after_tokens


def _places(learner: Learner, latents: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return where this rank stores its part of some latents, and their indices among these latents."""
    ids, own = torch.tensor(latents, dtype=torch.int64), learner.latents.own
    if not len(own) or not len(ids):
        return torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.int64)
    places = torch.searchsorted(own, ids).clamp(max=len(own) - 1)
    is_own = torch.nonzero(own[places] == ids).flatten()
    device = learner.sae.W_dec.device
    return places[is_own].to(device), is_own.to(device)


def _of_latents(learner: Learner, acts: Acts, latents: Sequence[int], n_rows: int) -> Tensor:
    """Return the activations of some latents on all ranks, [n_rows, n_latents]."""
    places, own = _places(learner, latents)
    device = learner.sae.W_dec.device
    found = torch.zeros(n_rows, len(latents), device=device)
    if isinstance(acts, DenseActs):
        found[:, own] = acts.values[:, places].float().clamp(min=0)
    else:
        columns = torch.full((acts.d_sae,), -1, dtype=torch.int64, device=device)
        columns[places] = own
        which, tokens, values = active_entries(acts)
        kept = columns[which] >= 0
        found[tokens[kept], columns[which[kept]]] = values[kept].float()
    learner.latents.group.sum_(found)
    return found


def _contexts(acts: Tensor, origin: RowOrigin) -> Contexts:
    """Return the contexts in which the latents fire most strongly; acts [n_rows, n_latents] are in text order."""
    latents, rows = torch.nonzero(acts.T > 0, as_tuple=True)
    contexts = Contexts(acts.shape[1], N_CONTEXTS)
    entries = ActivationEntries(latents, rows, acts[rows, latents], len(acts))
    contexts.add(TokenRows(torch.empty(0), origin), entries)
    return contexts


def _in_text_order(
    job: JobConfig, source: IndexedSource, held_out: Indices, most: int
) -> tuple[Indices, RowOrigin] | None:
    """Return the first held-out rows in text order, with their origin; None if the data does not record its tokens."""
    folder = folder_of(next(iter(job.hooks.values())))
    if folder is None or not folder.is_dir() or not tells_tokens(folder):
        return None
    meta, begin, n_found = read_json(folder / META, dict[str, object]) or {}, 0, 0
    found: list[Indices] = []
    origins: list[RowOrigin] = []
    for number, shard in enumerate(source.first_shards()):
        if (origin := origin_of(shard, number)) is None:
            break
        # A join leaves out the rows that not all of its folders have.
        rows, numbers = source.of_first_folder(begin, begin + shard.n_tokens)
        rows, numbers = rows[kept := np.isin(rows, held_out)], numbers[kept]
        if meta.get("shuffled") and isinstance(seed := meta.get("seed"), int):
            order = np.argsort(order_of_shard(seed, shard.file.stem, shard.n_tokens).numpy()[numbers])
            rows, numbers = rows[order], numbers[order]
        rows, numbers = rows[: most - n_found], numbers[: most - n_found]
        begin, n_found = begin + shard.n_tokens, n_found + len(rows)
        found.append(rows)
        origins.append(RowOrigin(*(one[torch.from_numpy(numbers)] for one in origin)))
        if n_found >= most:
            break
    if not n_found:
        return None
    return np.concatenate(found), RowOrigin(*(torch.cat(column) for column in zip(*origins, strict=True)))


def watch(
    trainer: Trainer, job: JobConfig, source: Source, parallel: Parallel, progress: RunProgress, run: Path
) -> None:
    """Let a trainer store snapshots of the latents that `train.watch_latents` names, if there are any."""
    if job.train.watch_latents:
        trainer.watch(LatentWatcher(trainer, job, source, parallel, progress, run))
