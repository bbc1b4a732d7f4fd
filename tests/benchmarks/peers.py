"""Ours, other trainers and plain loops behind one interface, so that benchmarks treat them all alike.

Every recipe keeps its library's own defaults: learning rate, schedule, initial weights, normalisation, AuxK, clipping.
Two defaults cannot be kept in a short run, since dictionary_learning refuses a warm-up that outlasts it: warm-ups of
1,000 steps, and that library's 1,000 steps before it looks for a threshold, become a tenth of the run where that is
less. A library is imported only by its own recipe.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import importlib.util
import io
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Setup:
    """What all recipes of one comparison share."""

    d_in: int
    d_sae: int
    k: int
    batch_size: int
    n_steps: int
    device: str = "cpu"
    bf16: bool = False
    seed: int = 0

    def short(self, n_steps: int) -> int:
        """A default stretch of `n_steps`, or a tenth of a run that is not ten times as long."""
        return max(1, min(n_steps, self.n_steps // 10))


class Seen(NamedTuple):
    """A reconstruction [n_tokens, d_in] and which latents it is made of, bool [n_tokens, d_sae]."""

    x_hat: Tensor
    active: Tensor


RECIPES: dict[str, type[Recipe]] = {}


class Recipe(ABC):
    """One trainer in one configuration; `kind` says whom to compare it with."""

    name: str
    kind = "topk"
    package, module = "torch", "torch"
    # Whether it is one of the trainers to be measured against, not a loop written here.
    is_peer = True

    def __init_subclass__(cls) -> None:
        RECIPES[cls.name] = cls

    @abstractmethod
    def __init__(self, setup: Setup, sample: Tensor) -> None:
        """A fresh SAE for inputs like the rows of `sample` [n_tokens, d_in]."""

    @abstractmethod
    def step(self, x: Tensor) -> None:
        """One training step on x [batch_size, d_in]."""

    @abstractmethod
    def reconstruct(self, x: Tensor) -> Seen:
        """What the library's users get from the SAE at this point of the training."""

    def reconstruct_at_k(self, x: Tensor) -> Seen:
        """With k latents per token on average; differs from `reconstruct` where a threshold decides at inference."""
        return self.reconstruct(x)

    @classmethod
    def missing(cls) -> str | None:
        """What it needs and does not find."""
        return None if importlib.util.find_spec(cls.module) else f"{cls.package} is not installed"

    @classmethod
    def version(cls) -> str:
        """Package and version, as far as it is installed as a package."""
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return f"{cls.package} {importlib.metadata.version(cls.package)}"
        return cls.package


class Ours(Recipe):
    """Nothing but architecture, width, k, batch size and length is given; used through what is exported."""

    name, package, module = "ours topk", "sae-tui", "trainer"
    architecture = "topk"
    is_peer = False

    # The one place that knows the inside of `trainer`: how a step is taken and what comes out.
    def __init__(self, setup: Setup, sample: Tensor) -> None:
        from trainer.contract.config import parse_job
        from trainer.learner import Learner

        train: dict[str, Any] = {"batch_size": setup.batch_size, "n_steps": setup.n_steps, "seed": setup.seed}
        train["precision"] = "bf16" if setup.bf16 else "fp32"
        sae = {"architecture": self.architecture, "d_sae": setup.d_sae, "k": setup.k}
        job, problems = parse_job({"data": {"path": "unused"}, "sae": sae, "train": train})
        assert job is not None, problems
        self._learner = Learner(job, setup.d_in, None, torch.device(setup.device))
        self._learner.initialise(sample, sample)
        self._setup, self._n_done = setup, 0

    def step(self, x: Tensor) -> None:
        self._learner.step(self._n_done, x)
        self._n_done += 1

    def reconstruct(self, x: Tensor) -> Seen:
        weights, acts = self._encode(x)
        if "threshold" in weights:
            return self._decode(weights, acts * (acts > weights["threshold"]))
        return self._decode(weights, largest(acts, self._setup.k))

    def reconstruct_at_k(self, x: Tensor) -> Seen:
        if self.kind == "topk":
            return self.reconstruct(x)
        weights, acts = self._encode(x)
        return self._decode(weights, largest(acts.view(1, -1), self._setup.k * len(x)).view_as(acts))

    def _encode(self, x: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        weights = self._learner.sae.export_weights()
        return weights, torch.addmm(weights["b_enc"], x - weights["b_dec"], weights["W_enc"]).relu()

    def _decode(self, weights: dict[str, Tensor], acts: Tensor) -> Seen:
        return Seen(acts @ weights["W_dec"] + weights["b_dec"], acts > 0)


class OursBatchTopK(Ours):
    name, kind = "ours batchtopk", "batchtopk"
    architecture = "batch_topk"

    @classmethod
    def missing(cls) -> str | None:
        if lacking := super().missing():
            return lacking
        from trainer.contract.catalog import ARCHITECTURES

        return None if cls.architecture in ARCHITECTURES else f"no architecture {cls.architecture} yet"


class SaeLensTopK(Recipe):
    """`SAETrainer.step` on a training SAE: no normalisation, decoder of norm 0.1, Adam at 3e-4, clipped to 1."""

    name, package, module = "SaeLens topk", "sae-lens", "sae_lens"
    sae_class = "topk_sae:TopKTrainingSAE"

    def __init__(self, setup: Setup, sample: Tensor) -> None:
        from sae_lens.config import SAETrainerConfig
        from sae_lens.training.sae_trainer import SAETrainer

        module, _, name = self.sae_class.partition(":")
        saes: Any = importlib.import_module(f"sae_lens.saes.{module}")
        shape = dict(d_in=setup.d_in, d_sae=setup.d_sae, k=setup.k, device=setup.device)
        self.sae = getattr(saes, name)(getattr(saes, f"{name}Config")(**shape))
        config = SAETrainerConfig(
            total_training_samples=setup.n_steps * setup.batch_size,
            train_batch_size_samples=setup.batch_size,
            lr_end=3e-5,  # the runner's default, where a constant schedule never gets
            device=setup.device,
            autocast=setup.bf16,
        )
        self._trainer: Any = SAETrainer(config, self.sae, data_provider=iter(()))

    def step(self, x: Tensor) -> None:
        self._trainer.maybe_reset_sparsity()
        self._trainer.step(x)
        self._trainer.n_training_steps += 1

    def reconstruct(self, x: Tensor) -> Seen:
        acts = self.sae.encode(x)
        return Seen(self.sae.decode(acts), acts > 0)


class SaeLensBatchTopK(SaeLensTopK):
    """Used as the JumpReLU that it is exported as: active is what exceeds the learned threshold."""

    name, kind = "SaeLens batchtopk", "batchtopk"
    sae_class = "batchtopk_sae:BatchTopKTrainingSAE"

    def reconstruct(self, x: Tensor) -> Seen:
        _, pre_acts = self.sae.encode_with_hidden_pre(x)
        acts = pre_acts.relu() * (pre_acts > self.sae.topk_threshold)
        return Seen(self.sae.decode(acts), acts > 0)

    def reconstruct_at_k(self, x: Tensor) -> Seen:
        return super().reconstruct(x)


class Sparsify(Recipe):
    """The step of sparsify's `Trainer.fit`, which itself asks for a language model, with its default optimizer."""

    name, package, module = "sparsify topk Signum", "eai-sparsify", "sparsify"

    def __init__(self, setup: Setup, sample: Tensor) -> None:
        with contextlib.redirect_stdout(io.StringIO()):
            from sparsify import SparseCoder, SparseCoderConfig
        config = SparseCoderConfig(num_latents=setup.d_sae, k=setup.k)
        self.sae = SparseCoder(setup.d_in, config, setup.device, dtype=torch.float32)
        self._started = False
        self._build_optimizer(setup)
        self._tokens_since_fired = torch.zeros(setup.d_sae, dtype=torch.long, device=setup.device)

    def _build_optimizer(self, setup: Setup) -> None:
        from schedulefree import ScheduleFreeWrapper
        from sparsify.sign_sgd import SignSGD

        groups = [dict(params=self.sae.parameters(), lr=5e-3 / (setup.d_sae / 2**14) ** 0.5)]
        self._optimizer: Any = ScheduleFreeWrapper(SignSGD(groups), momentum=0.95)
        self._optimizer.train()

    def step(self, x: Tensor) -> None:
        if not self._started:
            self._started, self.sae.b_dec.data = True, x.mean(0)
        self.sae.set_decoder_norm_to_unit_norm()
        out = self.sae(x=x, y=x, dead_mask=None, total_variance=(x - x.mean(0)).pow(2).sum())
        fired = torch.zeros_like(self._tokens_since_fired, dtype=torch.bool)
        fired[out.latent_indices.flatten()] = True
        float(out.fvu.detach())  # it reads the loss at every step, which makes the host wait for a GPU
        (out.fvu + out.multi_topk_fvu / 8).backward()
        self.sae.remove_gradient_parallel_to_decoder_directions()
        self._update()
        self._tokens_since_fired += len(x)
        self._tokens_since_fired[fired] = 0

    def _update(self) -> None:
        self._optimizer.step()
        self._optimizer.zero_grad()

    def reconstruct(self, x: Tensor) -> Seen:
        with self._averaged():
            out = self.sae(x)
        active = torch.zeros(len(x), self.sae.num_latents, dtype=torch.bool, device=x.device)
        return Seen(out.sae_out, active.scatter(1, out.latent_indices, out.latent_acts > 0))

    @contextlib.contextmanager
    def _averaged(self) -> Iterator[None]:
        """The weights it saves are an average over the steps."""
        self._optimizer.eval()
        yield
        self._optimizer.train()


class SparsifyAdam(Sparsify):
    """Adam at 2e-4·√(2¹⁴/d_sae) with a linear fall to 0, as with `--optimizer adam` without bitsandbytes."""

    name = "sparsify topk Adam"

    def _build_optimizer(self, setup: Setup) -> None:
        from transformers import get_linear_schedule_with_warmup

        groups = [dict(params=self.sae.parameters(), lr=2e-4 / (setup.d_sae / 2**14) ** 0.5)]
        self._optimizer = torch.optim.Adam(groups)
        self._schedule = get_linear_schedule_with_warmup(self._optimizer, setup.short(1000), setup.n_steps)

    def _update(self) -> None:
        super()._update()
        self._schedule.step()

    def _averaged(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


class DictionaryLearningTopK(Recipe):
    """`TopKTrainer.update`: b_dec from the first batch's geometric median, unit decoder, AuxK, Adam, clipped to 1."""

    name, package, module = "dictionary_learning topk", "dictionary-learning", "dictionary_learning"
    trainer_name = "TopKTrainer"

    def __init__(self, setup: Setup, sample: Tensor) -> None:
        from dictionary_learning import trainers

        self._trainer: Any = getattr(trainers, self.trainer_name)(
            steps=setup.n_steps,
            activation_dim=setup.d_in,
            dict_size=setup.d_sae,
            k=setup.k,
            layer=0,
            lm_name="",
            warmup_steps=setup.short(1000),
            threshold_start_step=setup.short(1000),
            device=setup.device,
        )
        self._setup, self._n_done = setup, 0

    def step(self, x: Tensor) -> None:
        with torch.autocast(x.device.type, torch.bfloat16, enabled=self._setup.bf16):
            self._trainer.update(self._n_done, x)
        self._n_done += 1

    def reconstruct(self, x: Tensor) -> Seen:
        x_hat, acts = self._trainer.ae(x, output_features=True)
        return Seen(x_hat, acts > 0)


class DictionaryLearningBatchTopK(DictionaryLearningTopK):
    """Its threshold is an average over about 1,000 steps, so that of a short run lags behind the weights."""

    name, kind = "dictionary_learning batch_topk", "batchtopk"
    trainer_name = "BatchTopKTrainer"

    def reconstruct_at_k(self, x: Tensor) -> Seen:
        acts = self._trainer.ae.encode(x, use_threshold=False)
        return Seen(self._trainer.ae.decode(acts), acts > 0)


class PlainSparse(Recipe):
    """What one writes in an afternoon: tied unit rows, b_dec at the mean, Adam at the published learning rate.

    Only the encoder's product is dense; gradients of the weights come from active latents alone.
    """

    name = "plain sparse loop"
    is_peer = False

    def __init__(self, setup: Setup, sample: Tensor) -> None:
        W_dec = F.normalize(torch.randn(setup.d_sae, setup.d_in), dim=1)
        # W_enc lies as W_dec does: fused Adam reads a gradient's memory in the parameter's order, so that the
        # transpose of what a sparse product returns would be taken for another matrix.
        weights = W_dec.clone(), torch.zeros(setup.d_sae), W_dec, sample.mean(dim=0)
        self._weights = [nn.Parameter(weight.to(setup.device)) for weight in weights]
        self._lr = 2e-4 * (2**14 / setup.d_sae) ** 0.5
        self._optimizer = torch.optim.Adam(self._weights, lr=self._lr, fused=True)
        self._setup, self._n_done = setup, 0

    def step(self, x: Tensor) -> None:
        self._n_done += 1
        self._optimizer.param_groups[0]["lr"] = self._lr * min(1.0, self._n_done / self._setup.short(1000))
        with torch.autocast(x.device.type, torch.bfloat16, enabled=self._setup.bf16):
            self._differentiate(x)
        self._optimizer.step()
        self._optimizer.zero_grad()
        W_dec = self._weights[2].data
        W_dec /= W_dec.norm(dim=1, keepdim=True)

    @torch.no_grad()
    def _differentiate(self, x: Tensor) -> None:
        """Leaves the gradient of the mean squared error in the weights."""
        W_enc, b_enc, W_dec, b_dec = self._weights
        values, latents = self._encode(x)
        x_hat = F.embedding_bag(latents, W_dec, per_sample_weights=values, mode="sum") + b_dec
        grad = (x_hat - x) * (2 / len(x))
        active = self._csr(torch.zeros_like(values), latents)
        grad_values = torch.sparse.sampled_addmm(active, grad, W_dec.T, beta=0).values().view_as(values) * (values > 0)
        W_dec.grad = self._csr(values, latents).t() @ grad
        W_enc.grad = self._csr(grad_values, latents).t() @ (x - b_dec)
        b_enc.grad = torch.zeros_like(b_enc).index_add_(0, latents.flatten(), grad_values.flatten())
        b_dec.grad = grad.sum(dim=0) - b_enc.grad @ W_enc

    def _csr(self, values: Tensor, latents: Tensor) -> Tensor:
        starts = torch.arange(0, latents.numel() + 1, latents.shape[1], device=latents.device)
        return torch.sparse_csr_tensor(
            starts, latents.flatten(), values.flatten(), (len(latents), self._setup.d_sae), check_invariants=False
        )

    def _encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
        W_enc, b_enc, _, b_dec = self._weights
        values, latents = F.linear(x - b_dec, W_enc, b_enc).topk(self._setup.k, dim=1, sorted=False)
        return values.float().relu(), latents

    def reconstruct(self, x: Tensor) -> Seen:
        values, latents = self._encode(x)
        acts = values.new_zeros(len(x), self._setup.d_sae).scatter(1, latents, values)
        return Seen(acts @ self._weights[2] + self._weights[3], acts > 0)


class PlainDense(PlainSparse):
    """The same by autograd through a dense decoder."""

    name = "plain dense loop"

    def _differentiate(self, x: Tensor) -> None:
        (self.reconstruct(x).x_hat - x).square().sum(dim=1).mean().backward()


def largest(values: Tensor, k: int) -> Tensor:
    """The k largest of each row; 0 elsewhere."""
    top = values.topk(k, dim=-1, sorted=False)
    return torch.zeros_like(values).scatter(-1, top.indices, top.values)


def build(name: str, setup: Setup, sample: Tensor) -> Recipe:
    """A recipe at its start, with the random numbers of `setup.seed`."""
    torch.manual_seed(setup.seed)
    torch.set_float32_matmul_precision("highest")
    return RECIPES[name](setup, sample)


def available(names: list[str]) -> list[str]:
    """Those that can run; says in one line of each other what it lacks."""
    lacking = {name: RECIPES[name].missing() for name in names}
    for name, lack in lacking.items():
        if lack:
            print(f"{name}: left out, {lack}", file=sys.stderr)
    return [name for name in names if not lacking[name]]
