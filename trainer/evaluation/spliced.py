"""Measures how much a language model degrades when an SAE's reconstructions replace the rows at a hook.

The definitions follow SAELens and SAEBench: cross-entropy and KL divergence of the unchanged model, with the SAE
spliced in, and with the hook's rows set to zero (zero ablation). A score is the fraction of the zero-ablation loss
increase that the SAE avoids. The main metrics replace and include only rows that training could use; for example, they
may leave out first tokens. `all_tokens` replaces and includes every row, as SAELens does.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, log_softmax, pad

from trainer.contract.errors import UserError
from trainer.contract.json_file import read_json
from trainer.contract.progress import advance, stage
from trainer.contract.runs.evaluation_time import MODEL_TOKENS
from trainer.contract.runs.report_card import IN_MODEL, PART_TITLES, AllTokens, PatchedModel
from trainer.contract.settings.extract import STATE, ExtractJob
from trainer.contract.settings.hooks import parse_hook
from trainer.contract.settings.job_file import parse_as
from trainer.evaluation.figures import Rebuilt, Reconstruct, by_label, ratio_error
from trainer.evaluation.probing import last_rows
from trainer.extraction.extraction import contexts_at_once, contexts_of
from trainer.extraction.language_model import REFUSALS, LanguageModel, NoLoss
from trainer.extraction.packing import PADDING, ContextBatch, batches
from trainer.extraction.state import ExtractionState

# The number of tokens per forward pass. Two fp32 copies of the logits for these tokens are kept in memory.
TOKENS_AT_ONCE = 1024
# Sites whose rows are in the residual stream or are added to it. An MLP's input is excluded because it is normalised.
_IN_STREAM = ("resid_pre", "resid_post", "attn_out", "mlp_out")

# The number of promoted tokens, and also of suppressed tokens, to keep for each direction.
N_MOVED = 10
# The maximum number of fp32 logits for decoder directions to hold in memory at once.
_LOGITS_AT_ONCE = 2**25

# Marks tokens that are not predicted.
_IGNORED = -100
_NOTHING = torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.float64)

# Returns new rows [n, d_out], given the rows [n, d_in] at the hook that is read and the rows [n, d_out] to replace.
Change = Callable[[Tensor, Tensor], Tensor]


class LossSums:
    """Cross-entropy and KL divergence, summed over the counted tokens."""

    def __init__(self) -> None:
        # For each batch: each counted token's text number and value.
        self._ce, self._kl = [_NOTHING], [_NOTHING]
        self._n_ce = self._n_kl = 0

    def add(self, reading: ReadContexts, logits: Tensor) -> None:
        """Add a forward pass with `logits` [n_contexts, n_tokens, n_ids]."""
        ce = cross_entropy(logits[:, :-1].flatten(0, 1), reading.ids[:, 1:].flatten(), reduction="none")
        self._ce.append(_with_texts(ce[reading.predicts.flatten()], reading.documents[:, :-1][reading.predicts]))
        self._n_ce += int(reading.predicts.sum())
        own, clean = log_softmax(logits[reading.counts], -1), reading.log_probabilities[reading.counts]
        self._kl.append(_with_texts((clean.exp() * (clean - own)).sum(-1), reading.documents[reading.counts]))
        self._n_kl += int(reading.counts.sum())

    @property
    def n_tokens(self) -> int:
        return self._n_ce

    @property
    def ce_by_text(self) -> Tensor:
        return _by_text(self._ce)

    @property
    def kl_by_text(self) -> Tensor:
        return _by_text(self._kl)

    @property
    def ce(self) -> float:
        return float(self.ce_by_text.sum()) / max(1, self._n_ce)

    @property
    def kl(self) -> float:
        return float(self.kl_by_text.sum()) / max(1, self._n_kl)


def _with_texts(values: Tensor, documents: Tensor) -> tuple[Tensor, Tensor]:
    """Return the text numbers [n] and the values [n] of tokens, both on the CPU; the values are in float64."""
    return documents.cpu(), values.double().cpu()


def _by_text(parts: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Return the sum of each text's values, [n_texts], in text number order."""
    documents, values = (torch.cat(column) for column in zip(*parts, strict=True))
    return by_label(documents.numpy(), values)


class KeptRows(NamedTuple):
    """A batch of contexts, and which of its rows an extraction would keep; tensors are [n_contexts, n_tokens].

    `counts` is a mask of the kept rows. `predicts` [n_contexts, n_tokens - 1] is a mask of the kept rows followed by a
    token from the same document.
    """

    ids: Tensor
    documents: Tensor
    counts: Tensor
    predicts: Tensor


class Gradients(NamedTuple):
    """The kept rows of a batch, and the gradient and curvature of the summed loss with respect to them.

    `rows` [n, d_in] are read at the hook, and `gradient` [n, d_out] belongs to the rows that the SAE's output replaces.
    `root` [n, d_out] is random; its expected outer product in each row is the row's block of the Gauss-Newton matrix.
    All are in fp32. `loss` is the loss in each context, float64 [n_contexts] on the CPU.
    """

    rows: Tensor
    gradient: Tensor
    root: Tensor
    loss: Tensor


class ReadContexts(NamedTuple):
    """`KeptRows` after a forward pass of the unchanged model.

    `log_probabilities` is [n_contexts, n_tokens, n_ids].
    """

    ids: Tensor
    documents: Tensor
    counts: Tensor
    predicts: Tensor
    log_probabilities: Tensor


class PatchedSums:
    """Sums over one selection of rows: for the unchanged model, for each change, and for the rows themselves.

    `known` contains sums for changes already measured with another SAE on the same text; these changes are not
    remeasured.
    """

    def __init__(
        self,
        reconstructs: Sequence[Reconstruct],
        names: Sequence[str],
        mean: Tensor | None = None,
        known: Mapping[str, LossSums] = MappingProxyType({}),
    ) -> None:
        self.clean, self.rows = LossSums(), Rebuilt()
        self.of_each = {name: known.get(name) or LossSums() for name in names}
        n = len(reconstructs)
        # For each name, a change of every output that is replaced.
        changes: dict[str, list[Change]] = {
            "sae": [partial(self._with_sae, one) for one in reconstructs],
            "zeros": [lambda _, rows: torch.zeros_like(rows)] * n,
        }
        if mean is not None:
            changes["mean"] = [lambda _, rows: mean.to(rows).expand_as(rows)] * n
        self.changes = {name: changes[name] for name in names if name not in known}

    def _with_sae(self, reconstruct: Reconstruct, read: Tensor, rows: Tensor) -> Tensor:
        acts, x_hat = reconstruct(read, rows)
        self.rows.add_all(rows, x_hat, acts)
        return x_hat

    @property
    def without_sae(self) -> dict[str, LossSums]:
        """The sums common to all SAEs."""
        return {name: sums for name, sums in self.of_each.items() if name != "sae"}

    def losses(self) -> dict[str, Any]:
        """Return cross-entropies, KL divergences and scores, named as in `PatchedModel`."""
        clean, sae, zeros = self.clean, self.of_each["sae"], self.of_each["zeros"]
        ce_zeros, kl_zeros = zeros.ce_by_text, zeros.kl_by_text
        return {
            "n_tokens": clean.n_tokens,
            "ce": clean.ce,
            "ce_with_sae": sae.ce,
            "ce_with_zeros": zeros.ce,
            "ce_score": _share(zeros.ce - sae.ce, zeros.ce - clean.ce),
            "ce_score_error": ratio_error(ce_zeros - sae.ce_by_text, ce_zeros - clean.ce_by_text),
            "kl_with_sae": sae.kl,
            "kl_with_zeros": zeros.kl,
            "kl_score": _share(zeros.kl - sae.kl, zeros.kl),
            "kl_score_error": ratio_error(kl_zeros - sae.kl_by_text, kl_zeros),
        }


class SplicedModel:
    """A language model with its unembedding; its rows at one hook can be replaced during a forward pass.

    New rows are computed from the rows at `hook`. They replace the rows at `hook_out` if it is given, otherwise the
    rows at `hook`. `others` are further pairs of such hooks, whose rows are replaced in the same pass. If the model
    does not predict next tokens, the constructor raises `NoLoss` or, if `only_reads` is set, sets `has_loss` to False.
    """

    def __init__(
        self,
        job: ExtractJob,
        hook: str,
        device: torch.device,
        hook_out: str | None = None,
        *,
        others: Sequence[tuple[str, str]] = (),
        only_reads: bool = False,
    ) -> None:
        hooks = [hook] if hook_out is None else [hook, hook_out, *itertools.chain(*others)]
        only = msgspec.structs.replace(job, model=msgspec.structs.replace(job.model, hooks=hooks, spread=False))
        self._job = job
        # Results cached by token count: the text, and the ablation sums for both selections of rows.
        self._texts: dict[int, tuple[list[ContextBatch], bool]] = {}
        self._ablated: dict[int, tuple[dict[str, LossSums], dict[str, LossSums]]] = {}
        try:
            self._model, self.has_loss = LanguageModel(only, device, whole=True), True
        except NoLoss:
            if not only_reads:
                raise
            self._model, self.has_loss = LanguageModel(only, device), False
        self._n_pairs = 1 + len(others)
        # For each pair of hooks, whether the blocks before it can be skipped.
        self._skips: dict[int, bool] = {}
        self._in_stream = only.hooks[-1].site in _IN_STREAM
        self._special = torch.tensor(self._model.tokenizer.special, dtype=torch.int64)

    @property
    def name(self) -> str:
        return self._job.model.path

    @property
    def settings(self) -> dict[str, Any]:
        """The extraction settings that affect the metrics."""
        return {"context": self._job.text.context, "skip_first": self._job.extract.skip_first}

    @property
    def text(self) -> str:
        """The name of the text that the model reads."""
        return self._job.text.path or str(self._job.text.dataset)

    @property
    def device(self) -> torch.device:
        return self._model.device

    @torch.inference_mode()
    def measure(
        self, *reconstructs: Reconstruct, mean: Tensor | None = None, n_tokens: int | None = None
    ) -> PatchedModel:
        """Measure an SAE on about `n_tokens` tokens: first replace the extracted rows, then all rows, as in SAELens.

        Each of `reconstructs`, one for each output that is replaced, takes rows [n, d_in] in fp32 and their targets.
        The model calls them in this order. `mean` [d_out] is the mean of the targets; it must be the same in each call.
        `n_tokens` defaults to `MODEL_TOKENS` for the device. Ablations are measured only in
        the first call, so later calls need three passes instead of six. Raise `UserError` if no rows remain.
        """
        names = ["sae", "zeros", *(["mean"] if mean is not None else [])]
        wanted = n_tokens or MODEL_TOKENS[self._model.device.type]
        text, is_unseen = self.batches(wanted)
        known = self._ablated.get(wanted, ({}, {}))
        own, whole = (
            PatchedSums(reconstructs, names, mean, known[0]),
            PatchedSums(reconstructs, names[:2], known=known[1]),
        )
        left_out = self._left_out()
        n_passes = 1 + len(own.changes) + (len(whole.changes) if left_out else 0)
        stage(PART_TITLES[IN_MODEL], len(text) * n_passes)
        for batch in text:
            reading, logits = self._read(batch)
            own.clean.add(reading, logits)
            advance()
            if left_out:
                whole.clean.add(everything := self._everything(reading, batch), logits)
            del logits
            self._splice(own, batch, reading)
            if left_out:
                self._splice(whole, batch, everything)
        if not own.clean.n_tokens:
            raise UserError("text.path: the text has no rows to measure on; provide more text")
        self._ablated[wanted] = own.without_sae, whole.without_sae
        of_all = whole if left_out else own
        return PatchedModel(
            text=self.text,
            is_unseen=is_unseen,
            left_out=left_out,
            n_texts=len(own.clean.ce_by_text),
            all_tokens=AllTokens(**of_all.losses(), rows=of_all.rows.text_rows()),
            rows=own.rows.text_rows(),
            ce_with_mean=own.of_each["mean"].ce if mean is not None else None,
            n_replaced=len(reconstructs),
            **own.losses(),
        )

    def _left_out(self) -> str:
        """Return a phrase naming the tokens that are not extracted, or "" if all tokens are extracted."""
        settings = self._job.extract
        first = "first tokens" if settings.skip_first == 1 else f"the first {settings.skip_first} tokens"
        names = [*([first] if settings.skip_first else []), *([] if settings.keep_special else ["special tokens"])]
        return " and ".join(names)

    def _splice(self, view: PatchedSums, batch: ContextBatch, reading: ReadContexts) -> None:
        """Run the model on a batch once for each change in `view`, and add the results."""
        for name, changes in view.changes.items():
            with self._model.replacing(*(partial(_replaced, reading.counts, change) for change in changes)):
                view.of_each[name].add(reading, self._model.logits(batch))
            advance()

    def _everything(self, reading: ReadContexts, batch: ContextBatch) -> ReadContexts:
        """Return a copy of `reading` with every token counted."""
        counts = torch.from_numpy(batch.positions).to(reading.ids.device) != PADDING
        return reading._replace(counts=counts, predicts=_predicts(counts, reading.documents))

    def last_rows(self, texts: Sequence[str], pair: int = 0) -> Tensor:
        """Return the rows [n, d_in] for the texts' last tokens at the hook that is read, in fp32 on the CPU.

        With several pairs of hooks, `pair` is the number of the pair.
        """
        return last_rows(self._model, texts, self._job.text.context, 2 * pair)

    def moved_tokens(self, w_dec: Tensor) -> dict[str, Tensor]:
        """Return the tokens that decoder directions [d_sae, d] promote and suppress, or {} if they are undefined.

        Promotion is defined for directions in the residual stream of a model with at most one norm before its
        unembedding.
        """
        w_u = self._model.unembedding() if self._in_stream and self.has_loss else None
        return {} if w_u is None or w_dec.shape[1] != len(w_u) else moved_tokens(w_dec, w_u)

    def gradients(self, batch: ContextBatch, kept: KeptRows, pair: int = 0) -> Gradients:
        """Run the unchanged model on a batch; return the first and second derivatives of the loss for the kept rows.

        With several pairs of hooks, the rows are read at pair `pair`, and the derivatives of the rows that this and all
        later pairs replace are joined. The model does not run in inference mode. The graph begins at the hook, because
        no parameter has a gradient.
        """
        rows: list[Tensor] = []
        added: list[Tensor] = []

        def add_zeros(read: Tensor, written: Tensor) -> Tensor:
            rows.append(_rows(kept, read.detach()))
            added.append(torch.zeros_like(written, requires_grad=True))
            return written + added[-1]

        with torch.enable_grad(), self._model.replacing(*self._from(pair, [add_zeros] * (self._n_pairs - pair))):
            logits = self._model.logits(batch)
            loss = _loss_by_context(kept, logits)
            gradients = torch.autograd.grad(loss.sum(), added, retain_graph=True)
            roots = torch.autograd.grad(logits, added, _random_root(batch, kept, logits.detach()))
        gradient, root = (torch.cat([_rows(kept, one) for one in parts], dim=1) for parts in (gradients, roots))
        return Gradients(rows[0], gradient, root, loss.detach().cpu())

    def _from(self, pair: int, changes: Sequence[Change]) -> list[Change]:
        """Return a change for each pair of hooks: none before `pair`, then `changes`."""
        return [*[lambda _, written: written] * pair, *changes]

    @torch.inference_mode()
    def rows(self, batch: ContextBatch, kept: KeptRows, pair: int = 0) -> Tensor:
        """Return the kept rows [n, d_in] at the hook that is read, in fp32."""
        return self._model.rows(batch, kept.counts.flatten().nonzero().flatten())[2 * pair].float()

    @torch.inference_mode()
    def loss_by_context(self, batch: ContextBatch, kept: KeptRows, added: Tensor, pair: int = 0) -> Tensor:
        """Return the loss in each context, float64 [n_contexts], with `added` [n, d] added to the kept rows.

        With several pairs of hooks, `added` joins what is added to the rows that `pair` and all later pairs replace.
        """
        parts = added.tensor_split(self._n_pairs - pair, dim=1)
        changes = self._from(pair, [partial(_replaced, kept.counts, partial(_sum, part)) for part in parts])
        with self._model.replacing(*changes):
            return _loss_by_context(kept, self._model.logits(batch)).cpu()

    @contextlib.contextmanager
    def skipping(self, batch: ContextBatch, kept: KeptRows, pair: int = 0) -> Iterator[None]:
        """Skip the blocks before a pair of hooks whenever the model runs on `batch`, if this does not change its loss.

        For a hook in the middle of a model, this saves about a third of the time.
        """
        if pair not in self._skips:
            self._skips[pair] = self._can_skip(batch, kept, pair)
        with torch.inference_mode(), self._model.skipping(batch, 2 * pair) if self._skips[pair] else nullcontext():
            yield

    @torch.inference_mode()
    def _can_skip(self, batch: ContextBatch, kept: KeptRows, pair: int) -> bool:
        whole = _loss_by_context(kept, self._model.logits(batch))
        try:
            with self._model.skipping(batch, 2 * pair):
                return torch.allclose(_loss_by_context(kept, self._model.logits(batch)), whole, rtol=1e-5)
        except REFUSALS:
            return False

    def batches(self, n_tokens: int) -> tuple[list[ContextBatch], bool]:
        """Return batches with about `n_tokens` tokens in total, and whether their text is new to the extraction.

        The batches come from the text after the extracted part or, if no text is left, from the beginning of the text.
        """
        if n_tokens not in self._texts:
            self._texts[n_tokens] = self._batches(n_tokens)
        return self._texts[n_tokens]

    def _batches(self, n_tokens: int) -> tuple[list[ContextBatch], bool]:
        output = self._job.extract.output
        state = read_json(self._job.local_output / STATE, ExtractionState) if output else None
        extracted = (state.batch + 1) * contexts_at_once(self._job) if state else 0
        n_contexts = -(-n_tokens // self._job.text.context)
        unseen = list(self._contexts(extracted, n_contexts)) if state else []
        contexts = iter(unseen) if unseen else self._contexts(0, n_contexts)
        at_once = max(1, TOKENS_AT_ONCE // self._job.text.context)
        return list(batches(contexts, at_once, fills=not self._model.packs)), bool(unseen)

    def _contexts(self, first: int, n: int) -> Iterator[ContextBatch]:
        return itertools.islice(contexts_of(self._job, self._model), first, first + n)

    def _read(self, batch: ContextBatch) -> tuple[ReadContexts, Tensor]:
        """Run the unchanged model on a batch; return its `ReadContexts`, for later comparisons, and its logits."""
        logits = self._model.logits(batch)
        return ReadContexts(*self.kept(batch), log_softmax(logits, -1)), logits

    def kept(self, batch: ContextBatch) -> KeptRows:
        """Return the rows of a batch that an extraction would keep."""
        ids, positions, documents = (torch.from_numpy(one).to(self._model.device) for one in batch)
        special = torch.isin(ids, self._special.to(ids.device)) & (not self._job.extract.keep_special)
        counts = (positions != PADDING) & ~special & (positions >= self._job.extract.skip_first)
        return KeptRows(ids, documents, counts, _predicts(counts, documents))


def _predicts(counts: Tensor, documents: Tensor) -> Tensor:
    """Return a mask [n_contexts, n_tokens − 1] of counted rows followed by a token from the same document."""
    return counts[:, :-1] & (documents[:, 1:] == documents[:, :-1])


def _rows(kept: KeptRows, tensor: Tensor) -> Tensor:
    """Return the kept rows [n, d] of a tensor at a hook, in fp32."""
    return tensor.reshape(*kept.counts.shape, -1)[kept.counts].float()


def _loss_by_context(kept: KeptRows, logits: Tensor) -> Tensor:
    """Return the cross-entropy of the predictions in each context, summed, float64 [n_contexts]."""
    # Ignoring the other targets is faster than selecting the predictions, since it does not copy the logits.
    targets = torch.full_like(kept.ids, _IGNORED)
    targets[:, :-1] = kept.ids[:, 1:].where(kept.predicts, _IGNORED)
    ce = cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none", ignore_index=_IGNORED)
    return ce.view(targets.shape).sum(1, dtype=torch.float64)


def _random_root(batch: ContextBatch, kept: KeptRows, logits: Tensor) -> Tensor:
    """Return a random tensor like `logits`; in each prediction, its expected outer product is the loss's Hessian.

    The Hessian for probabilities p is diag(p) − ppᵀ = BBᵀ with B = diag(√p) − p√pᵀ. The tensor contains Bv, with random
    signs v.
    """
    found, predicts = torch.zeros_like(logits), pad(kept.predicts, (0, 1))
    for context, own in enumerate(found):
        # The seed depends on the tokens alone, so that the result does not depend on how contexts are batched.
        seed = int(batch.ids[context][batch.documents[context] != PADDING].sum())
        generator = torch.Generator(logits.device).manual_seed(seed)
        signs = torch.randint(0, 2, own.shape, dtype=torch.int8, device=own.device, generator=generator)
        p = logits[context].softmax(-1)
        own.copy_(signs).mul_(2).sub_(1).mul_(p.sqrt())
        own.sub_(p.mul_(own.sum(-1, keepdim=True))).mul_(predicts[context, :, None])
    return found


def _sum(added: Tensor, _: Tensor, rows: Tensor) -> Tensor:
    return rows + added


def _share(part: float, whole: float) -> float:
    return part / whole if whole else math.nan


def _replaced(counts: Tensor, change: Change, read: Tensor, written: Tensor) -> Tensor:
    """Return the tensor at a hook, [n_contexts, n_tokens, d_out], with the counted rows changed."""
    inputs, rows = (one.reshape(*counts.shape, -1) for one in (read, written))
    changed = rows.clone()
    changed[counts] = change(inputs[counts].float(), rows[counts].float()).to(rows.dtype)
    return changed.reshape(written.shape)


def job_of_data(folder: Path) -> ExtractJob:
    """Return the extraction that wrote a folder of shards; raise `UserError` if the extraction is unknown.

    The folder may come from another user, so it cannot allow a model's own code to run; only a job file can allow this.
    """
    output = folder.parent
    state = read_json(output / STATE, ExtractionState)
    table: dict[str, Any] = {"kind": "extract"}
    for path, value in (state.job if state else {}).items():
        section, _, name = path.partition(".")
        if value is not None:
            table.setdefault(section, {})[name] = value
    table.setdefault("extract", {})["output"] = str(output)
    table.setdefault("model", {})["remote_code"] = False
    job, _ = parse_as(ExtractJob, table)
    if job is None:
        raise UserError(
            f"--model: no extraction wrote {folder}; give the job file of a similar extraction instead of auto"
        )
    return job


def hook_of_data(job: ExtractJob, meta: dict[str, Any]) -> str:
    """Return the job's name for the hook in a meta.json; raise `UserError` if the job does not read this hook."""
    written = str(meta.get("hook") or meta.get("hook_name") or "")
    with contextlib.suppress(ValueError):
        for hook in job.model.hooks:
            if parse_hook(hook) == parse_hook(written):
                return hook
    raise UserError(
        f"--model: its job reads {', '.join(job.model.hooks)}, but this SAE's hook is {written or 'not known'}"
    )


@torch.inference_mode()
def moved_tokens(w_dec: Tensor, w_u: Tensor) -> dict[str, Tensor]:
    """Return the tokens that each decoder direction promotes and suppresses most (the logit lens), and their logits.

    The logit lens is from nostalgebraist 2020, "interpreting GPT: the logit lens". As in SAEDashboard and Neuronpedia,
    it is applied to decoder directions: W_dec @ W_U. Here, W_U includes the weight of the model's final norm, like
    `fold_ln` in TransformerLens. Each result has the shape [d_sae, n].

    `trainer.contract.runs.features` reads the results under the same names. `w_dec` [d_sae, d_model] contains the
    directions, and `w_u` [d_model, n_ids] maps them to logits.
    """
    n, at_once = min(N_MOVED, w_u.shape[1]), max(1, _LOGITS_AT_ONCE // w_u.shape[1])
    up, down = [], []
    for directions in w_dec.to(w_u).split(at_once):
        logits = directions @ w_u
        up.append(logits.topk(n, dim=1))
        down.append(logits.topk(n, dim=1, largest=False))
    tensors = {}
    for name, parts in (("promoted", up), ("suppressed", down)):
        tensors[name] = torch.cat([one.indices for one in parts]).int().cpu()
        tensors[f"{name}_logits"] = torch.cat([one.values for one in parts]).cpu()
    return tensors
