"""A language model with one of its SAEs: reads texts, and continues prompts with some latents set to other values.

Steering uses the delta form: the model's rows x become x + decode(z') − decode(z), so the SAE's reconstruction error
does not change. For a transcoder, the rows are the MLP's outputs, and for a layer of a cross-layer transcoder, the
outputs of this MLP and of all later ones. For a crosscoder, z is encoded from the unchanged rows of the same text,
because the rows of its last part are only known once its first part must already be changed.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from trainer.contract.answers.interaction import (
    Continued,
    FiringLatent,
    Generate,
    Generated,
    MovedToken,
    ReadText,
    Ready,
    TextRead,
    TextToken,
    TokenKl,
)
from trainer.contract.errors import UserError
from trainer.contract.json_file import read_json
from trainer.contract.progress import stage
from trainer.contract.runs.crosscoder import letter
from trainer.contract.runs.evaluation_time import LOADING
from trainer.contract.runs.features import FEATURES, Features, runs_of_tokens
from trainer.contract.settings.extract import Extract, ExtractJob
from trainer.contract.settings.language import Model, TextSettings
from trainer.contract.wording import join_words
from trainer.evaluation.exported import ExportedSae, read_exported
from trainer.extraction.language_model import LanguageModel, NoLoss
from trainer.extraction.model_stream import share_tokenizer
from trainer.extraction.packing import ContextBatch
from trainer.sharing.base import layer_of_metadata
from trainer.sharing.reading import table
from trainer.sharing.saelens import CONFIG
from trainer.sharing.saelens_reading import as_extracted

# The maximum number of latents listed for a token, and of tokens in a text or prompt.
MOST_LATENTS, MOST_TOKENS = 256, 2048
# The context length that the model must support at least.
LEAST_CONTEXT = 32
# The number of tokens listed whose logits change most, and the probability that they need in one of both cases.
N_MOVED, LEAST_PROBABLE = 10, 1e-3
# The number of tokens whose logits are in memory at once.
AT_ONCE = 128
NOT_FINITE = "the predictions of the steered model are not finite; use a smaller strength"
# Smaller changes of logits are rounding errors.
_LEAST_MOVED = 1e-4
# The number of rows in a steered batch: the unchanged continuation and the steered one.
PLAIN, STEERED = 0, 1


class Edit(NamedTuple):
    """Changes the activations of `latents` [m] to `values` [m], or by `values` if it `adds`.

    `parts` are the parts of a crosscoder whose rows are changed, all in the same model.
    """

    sae: ExportedSae
    latents: Tensor
    values: Tensor
    adds: bool
    parts: list[int]

    def delta(self, x: Tensor) -> Tensor:
        """Return decode(z') − decode(z) [n, n_targets * d_out] for rows x [n, d_in] at the hook that is read."""
        change = self.values if self.adds else self.values - self.sae.encode(x).values[:, self.latents]
        return change.expand(len(x), -1) @ self.sae.W_dec[self.latents]


class ReaderModel(NamedTuple):
    """A language model, whether it predicts next tokens, and the numbers of the crosscoder's parts at its hooks.

    An SAE that is no crosscoder has the single part 0, at the model's first hook.
    """

    model: LanguageModel
    generates: bool
    parts: list[int]


class Caches(NamedTuple):
    """The cache of both continuations, and for a crosscoder, each model's cache of the steered one's unchanged rows."""

    both: Any
    unchanged: list[Any]


class ModelSession:
    """An SAE in its language model; raises `UserError` if either cannot be loaded."""

    def __init__(self, folder: Path, device: torch.device, model: str | None = None) -> None:
        self._folder, self._device = folder, device
        self._sae = read_exported(folder, device)
        jobs = _jobs(folder, self._sae, model)
        stage(LOADING)
        self._readers = [ReaderModel(*_load(job, device), parts) for job, parts in jobs]
        _share_tokenizer([reader.model for reader in self._readers])
        # The model that continues prompts.
        self._reader = self._readers[0]
        self._token_bytes = self._model.tokenizer.token_bytes()
        self._special = {*self._model.tokenizer.special}
        scale = Features(folder / FEATURES).acts_scale if (folder / FEATURES).exists() else 1.0
        # The factor from activations of the exported SAE to activations in the features file.
        self._acts_scale = scale or 1.0
        self.ready = Ready(
            *_names([job for job, _ in jobs], is_crosscoder=bool(self._sae.parts)), self._sae.d_sae, device.type,
            self._reader.generates, self._model.tokenizer.reads_chats, scale is not None,
        )  # fmt: skip

    @property
    def _model(self) -> LanguageModel:
        return self._reader.model

    @torch.inference_mode()
    def read(self, request: ReadText) -> TextRead:
        """Return a text's tokens with the latents that fire on them."""
        ids = self._ids(request.text, is_chat=request.is_chat, prompts=request.is_chat)
        batch = ContextBatch(np.array([ids]), np.arange(len(ids))[None], np.zeros((1, len(ids)), np.int64))
        of_models = [reader.model.rows(batch, torch.arange(len(ids))) for reader in self._readers]
        acts = self._sae.encode(self._joined(of_models)).values
        acts = acts * self._acts_scale
        values, latents = acts.topk(min(MOST_LATENTS, self._sae.d_sae), dim=1)
        named = [one for one in request.latents if one < self._sae.d_sae]
        counted = self._counted(ids)
        tokens = []
        for run in runs_of_tokens([self._token_bytes[one] for one in ids]):
            found: dict[int, float] = {}
            for at in run:
                of_token = [*zip(latents[at].tolist(), values[at].tolist(), strict=True)]
                for latent, act in [*of_token, *zip(named, acts[at, named].tolist(), strict=True)]:
                    if act > 0:
                        found[latent] = max(act, found.get(latent, 0.0))
            firing = sorted(found.items(), key=lambda one: -one[1])
            text = b"".join(self._token_bytes[ids[at]] for at in run).decode(errors="replace")
            tokens.append(TextToken(text, tuple(FiringLatent(*one) for one in firing), all(counted[at] for at in run)))
        return TextRead(tuple(tokens))

    def _joined(self, of_models: Sequence[Sequence[Tensor]]) -> Tensor:
        """Return the rows that the SAE reads, given the rows at all hooks of all models."""
        found = {
            part: rows.float()
            for reader, of_hooks in zip(self._readers, of_models, strict=True)
            for part, rows in zip(reader.parts, of_hooks, strict=False)
        }
        return torch.cat([found[part] for part in sorted(found)], dim=1)

    @torch.inference_mode()
    def generate(
        self, request: Generate, is_over: Callable[[], bool] = lambda: False
    ) -> Iterator[Continued | Generated]:
        """Continue a prompt, unchanged and steered, and yield both continuations after each token.

        The last result also contains the effect on predictions. If `is_over` returns True, no further token is
        generated.
        """
        self._reader = self._steered_reader(request.part)
        if not self._reader.generates:
            raise UserError(f"{self._model.name} does not predict next tokens; choose a causal model")
        edit = self._edit(request)
        prompt = self._ids(request.prompt, is_chat=request.is_chat, prompts=True, n_more=request.n_tokens)
        counted = torch.tensor([self._counted(prompt) if not request.only_generated else [False] * len(prompt)])
        plain, steered = [*prompt], [*prompt]
        rows, ended = (plain, steered), [False, False]
        caches, generator = self._new_caches(), torch.Generator().manual_seed(request.seed)
        given, counts = torch.tensor([prompt, prompt]), counted
        for _ in range(request.n_tokens):
            for logits in self._logits(edit, given, counts, caches):
                last = logits[:, -1]
            if not last.isfinite().all():
                raise UserError(NOT_FINITE)
            chosen = _chosen(last, request.temperature, generator)
            for row, token in enumerate(chosen):
                ended[row] |= token in self._model.ends
                if not ended[row]:
                    rows[row].append(token)
            n = max(len(plain), len(steered)) - len(prompt)
            yield Continued(self._text(plain[len(prompt) :]), self._text(steered[len(prompt) :]), n)
            if all(ended) or is_over():
                break
            # A continuation that has ended is still read, but never shown.
            new, new_counts = torch.tensor(chosen)[:, None], torch.ones(1, 1, dtype=torch.bool)
            if caches.both is None:
                given, counts = torch.cat([given, new], dim=1), torch.cat([counts, new_counts], dim=1)
            else:
                given, counts = new, new_counts
        yield self._effect(edit, plain, len(prompt), counted, rows)

    def _steered_reader(self, part: int | None) -> ReaderModel:
        """Return the model that continues a prompt; raise `UserError` if the part does not exist."""
        n = len(self._sae.parts)
        if part is not None and part >= n:
            known = (
                f"the crosscoder has parts A to {letter(n - 1)}" if n else "the SAE is no crosscoder; leave --part out"
            )
            raise UserError(f"--part: there is no part {letter(part)}; {known}")
        return next(reader for reader in self._readers if (part or 0) in reader.parts)

    def _new_caches(self) -> Caches:
        unchanged = [reader.model.new_cache() for reader in self._readers] if self._sae.parts else []
        return Caches(self._model.new_cache(), unchanged)

    def _logits(self, edit: Edit, ids: Tensor, counts: Tensor, caches: Caches) -> Iterator[Tensor]:
        """Yield the logits [2, n, n_ids] of the unchanged and the steered model for ids [2, n_tokens], in parts.

        The logits of 2,048 tokens and 256,000 ids would take 4 GB.
        """
        at_once = max(1, ids.shape[1]) if caches.both is None else AT_ONCE
        for first in range(0, ids.shape[1], at_once):
            part = slice(first, first + at_once)
            rows = self._unchanged(edit, ids[STEERED:, part], caches)
            with self._steering(edit, counts[:, part], rows):
                yield self._model.continued(ids[:, part], caches.both).cpu()

    def _unchanged(self, edit: Edit, ids: Tensor, caches: Caches) -> Tensor:
        """Return the rows [n_tokens, d_in] that a crosscoder reads in the unchanged models, or empty ones if unused."""
        if not self._sae.parts or edit.adds:
            return torch.empty(ids.shape[1], 0)
        pairs = zip(self._readers, caches.unchanged, strict=True)
        return self._joined([reader.model.continued_rows(ids, cache) for reader, cache in pairs])

    def _effect(
        self, edit: Edit, ids: list[int], n_prompt: int, counted: Tensor, rows: Sequence[list[int]]
    ) -> Generated:
        """Compare the predictions of the unchanged and the steered model on a text."""
        counts = torch.cat([counted, torch.ones(1, len(ids) - n_prompt, dtype=torch.bool)], dim=1)
        moved: tuple[MovedToken, ...] = ()
        parts: list[Tensor] = []
        n_read = 0
        for logits in self._logits(edit, torch.tensor([ids, ids]), counts, self._new_caches()):
            if not logits.isfinite().all():
                raise UserError(NOT_FINITE)
            if 0 <= (at := n_prompt - 1 - n_read) < logits.shape[1]:
                moved = self._moved(logits[:, at])
            plain, steered = logits.log_softmax(-1)
            parts.append((plain.exp() * (plain - steered)).sum(-1).clamp_min(0))
            n_read += logits.shape[1]
        kl, runs = torch.cat(parts), runs_of_tokens([self._token_bytes[one] for one in ids])
        return Generated(
            plain=self._text(rows[PLAIN][n_prompt:]),
            steered=self._text(rows[STEERED][n_prompt:]),
            n_tokens=max(map(len, rows)) - n_prompt,
            moved=moved,
            kl=tuple(TokenKl(self._text([ids[at] for at in run]), float(kl[list(run)].max())) for run in runs),
        )

    def _moved(self, logits: Tensor) -> tuple[MovedToken, ...]:
        """Return the likely tokens whose logits [2, n_ids] differ most between the unchanged and the steered model."""
        chances = logits.softmax(-1)
        moves = (logits[STEERED] - logits[PLAIN]).masked_fill(chances.amax(0) < LEAST_PROBABLE, 0)
        most = moves.abs().topk(min(N_MOVED, len(moves))).indices.tolist()
        return tuple(
            MovedToken(self._text([token]), float(moves[token]), *chances[:, token].tolist())
            for token in most
            if abs(moves[token]) > _LEAST_MOVED
        )

    def _edit(self, request: Generate) -> Edit:
        """Return the edit that a request describes; raise `UserError` if a latent is unknown or never fires."""
        known, latents = self._sae.d_sae, request.latents
        if wrong := [one.latent for one in latents if one.latent >= known]:
            raise UserError(f"latent {wrong[0]} does not exist; the SAE has latents 0 to {known - 1:,}")
        values = [one.strength and one.strength * self._largest(one.latent) for one in latents]
        numbers = torch.tensor([one.latent for one in latents], device=self._device)
        parts = self._reader.parts if request.part is None else [request.part]
        return Edit(self._sae, numbers, torch.tensor(values, device=self._device), request.adds, parts)

    def _largest(self, latent: int) -> float:
        """Return a latent's largest activation in the evaluation; raise `UserError` if it is unknown."""
        file = self._folder / FEATURES
        if not file.exists():
            raise UserError(f"{self._folder} has no {FEATURES}, which stores the largest activations; evaluate the SAE")
        largest = Features(file).feature(latent).largest
        if not largest:
            raise UserError(f"latent {latent} never fired in the evaluation, so its largest activation is unknown")
        return largest / self._acts_scale

    @contextlib.contextmanager
    def _steering(self, edit: Edit, counts: Tensor, unchanged: Tensor) -> Iterator[None]:
        """Apply an edit to the second row of a batch at the positions that `counts` [1, n_tokens] marks.

        `unchanged` has the rows [n_tokens, d_in] that a crosscoder reads.
        """
        mask = torch.cat([torch.zeros_like(counts), counts]).to(self._device)
        deltas: list[Tensor] = []
        d_out = edit.sae.W_dec.shape[1] // self._n_targets
        if parts := edit.sae.parts:
            whole = edit.delta(unchanged[counts[0]]).split([part.width for part in parts], dim=1)
            deltas = [whole[part] for part in edit.parts]

        def changed(number: int, read: Tensor, written: Tensor) -> Tensor:
            inputs, rows = (one.reshape(*mask.shape, -1) for one in (read, written))
            if not number and not edit.sae.parts:
                deltas[:] = edit.delta(inputs[mask].float()).split(d_out, dim=1)
            new = rows.clone()
            new[mask] = (rows[mask].float() + deltas[number]).to(rows.dtype)
            return new.reshape(written.shape)

        at = [self._reader.parts.index(part) for part in edit.parts] if parts else None
        n = len(edit.parts) if parts else self._n_targets
        with self._model.replacing(*(partial(changed, number) for number in range(n)), at=at):
            yield

    @property
    def _n_targets(self) -> int:
        layer = layer_of_metadata(self._sae.metadata)
        return layer.n_targets if layer else 1

    def _ids(self, text: str, *, is_chat: bool, prompts: bool, n_more: int = 0) -> list[int]:
        """Return a text's token ids; raise `UserError` if there are none, or too many with `n_more` further tokens."""
        ids = self._chat(text, prompts=prompts) if is_chat else self._plain(text, prompts=prompts)
        longest = [reader.model.longest for reader in self._readers]
        most = min([MOST_TOKENS, *(one - n_more for one in longest if one is not None)])
        if len(ids) > most:
            fewer = ", or generate fewer" if n_more else ""
            raise UserError(f"the text has {len(ids):,} tokens; enter at most {max(0, most):,}{fewer}")
        return ids

    def _plain(self, text: str, *, prompts: bool) -> list[int]:
        (tokens,) = self._model.tokenizer.tokens([text])
        if not tokens.ids:
            raise UserError("the text is empty; enter at least one word")
        return [*tokens.before, *tokens.ids, *([] if prompts else tokens.after)]

    def _chat(self, text: str, *, prompts: bool) -> list[int]:
        if not self._model.tokenizer.reads_chats:
            raise UserError("the model's tokenizer has no chat template; read the text without one")
        try:
            return self._model.tokenizer.chat(text, prompts=prompts)
        except UserError as error:
            # The message names a setting of a job file.
            raise UserError(str(error).removeprefix("text.column: ")) from None

    def _counted(self, ids: Sequence[int]) -> list[bool]:
        return [at > 0 and one not in self._special for at, one in enumerate(ids)]

    def _text(self, ids: Sequence[int]) -> str:
        return b"".join(self._token_bytes[one] for one in ids).decode(errors="replace")


def _load(job: ExtractJob, device: torch.device) -> tuple[LanguageModel, bool]:
    """Return the language model, and whether it predicts next tokens."""
    try:
        with contextlib.suppress(NoLoss):
            return LanguageModel(job, device, whole=True), True
        return LanguageModel(job, device), False
    except UserError as error:
        # The message names a setting of a job file, but the SAE's metadata or a flag names the model and the hook.
        reason = re.sub(r"^model\.\w+: ", "", str(error))
        raise UserError(f"the language model: {reason}") from None


def _share_tokenizer(models: Sequence[LanguageModel]) -> None:
    try:
        share_tokenizer(models)
    except UserError as error:
        # The message ends with a setting to change, but the crosscoder's models cannot be chosen.
        raise UserError(str(error).removeprefix("data.model: ").partition(";")[0]) from None


def _names(jobs: Sequence[ExtractJob], *, is_crosscoder: bool) -> tuple[str, str]:
    """Return the name of the language model and of the hook that is read, or all of them for a crosscoder."""
    if not is_crosscoder:
        return jobs[0].model.path, jobs[0].model.hooks[0]
    paths = [job.model.path if len(jobs) == 1 else Path(job.model.path).name for job in jobs]
    hooks = dict.fromkeys(hook for job in jobs for hook in job.model.hooks)
    return " + ".join(paths), " + ".join(hooks)


def _chosen(logits: Tensor, temperature: float, generator: torch.Generator) -> list[int]:
    """Return the next token of each row of logits [n, n_ids]; all rows use the same random numbers.

    The largest of logit / temperature + Gumbel noise is a sample of the softmax.
    """
    if not temperature:
        return logits.argmax(dim=1).tolist()
    noise = -torch.empty(logits.shape[1]).exponential_(generator=generator).log()
    # With a tiny temperature, the quotients of all other tokens are −∞.
    return ((logits - logits.amax(dim=1, keepdim=True)) / temperature + noise).argmax(dim=1).tolist()


def _jobs(folder: Path, sae: ExportedSae, model: str | None) -> list[tuple[ExtractJob, list[int]]]:
    """Return an extraction at the SAE's hooks for each of its models, with the numbers of the parts at its hooks."""
    if not sae.parts:
        return [(_job(sae.metadata, _hooks(folder, sae), model), [0])]
    if len({(part.model_name, part.hook_name) for part in sae.parts}) < len(sae.parts):
        raise UserError(f"{folder}: its parts are revisions of one model, which its metadata does not name")
    by_model: dict[str, list[int]] = {}
    for number, part in enumerate(sae.parts):
        by_model.setdefault(part.model_name or "", []).append(number)
    if model and len(by_model) > 1:
        names = join_words([*by_model])
        raise UserError(f"--model: the crosscoder reads {len(by_model)} models; leave --model out, and provide {names}")
    jobs = []
    for name, numbers in by_model.items():
        hooks = [hook for number in numbers for hook in _hooks_in(folder, sae.parts[number].origin())]
        jobs.append((_job({"model_name": name}, hooks, model), numbers))
    return jobs


def _hooks(folder: Path, sae: ExportedSae) -> list[str]:
    """Return the hook that an SAE reads and, for a transcoder, the hook it writes to; then hooks of later layers."""
    layer = layer_of_metadata(sae.metadata)
    if layer is None or layer.n_targets == 1:
        return _hooks_in(folder, sae.metadata, is_transcoder=sae.is_transcoder)
    by_number = {}
    for config in sorted(folder.parent.glob(f"*/{CONFIG}")):
        metadata = table(read_json(config, dict[str, Any]) or {}, "metadata")
        if (other := layer_of_metadata(metadata)) and other.n_layers == layer.n_layers:
            by_number[other.number] = _hooks_in(config.parent, metadata, is_transcoder=True)
    numbers = range(layer.number, layer.n_layers)
    if lacking := [number for number in numbers if number not in by_number]:
        raise UserError(f"{folder.parent} has no layer {lacking[0]} of the cross-layer transcoder; export all layers")
    return [hook for number in numbers for hook in by_number[number]]


def _hooks_in(folder: Path, metadata: Mapping[str, Any], *, is_transcoder: bool = False) -> list[str]:
    facts, names = as_extracted(metadata), ["hook_name", *(["hook_name_out"] if is_transcoder else [])]
    hooks = [facts.get(name) for name in names]
    if not all(isinstance(hook, str) and hook for hook in hooks):
        raise UserError(f"{folder}: its metadata names no hook, so the SAE cannot be put into a language model")
    return [str(hook) for hook in hooks]


def _job(metadata: Mapping[str, Any], hooks: list[str], model: str | None) -> ExtractJob:
    """Return an extraction at the SAE's hooks with the model that its metadata names, or with `model`."""
    path = model or metadata.get("model_name")
    if not isinstance(path, str) or not path:
        raise UserError("--model: the SAE's metadata names no language model; give its folder or name on the hub")
    given = metadata.get("model_from_pretrained_kwargs")
    revision = given.get("revision") if isinstance(given, dict) and not model else None
    return ExtractJob(
        model=Model(path=path, hooks=hooks, revision=revision if isinstance(revision, str) else None),
        text=TextSettings(context=LEAST_CONTEXT),
        extract=Extract(output=""),
    )
