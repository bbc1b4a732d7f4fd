"""Trains the transcoders of all layers together, as a cross-layer transcoder.

The latents of layer l read the MLP input of layer l, and write to the MLP outputs of layers l and later (Anthropic,
"Circuit tracing", March 2025). A layer's target is complete once the latents of this layer and of all earlier layers
are decoded, so the layers run in order, and each passes on what has been written to later targets.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from torch import Tensor

from trainer.runtime.phases import BACKWARD, FORWARD, METRICS, phase
from trainer.saes.batch_topk import BatchTopK, choose_together
from trainer.training.learner import GradientMeasures, Learner, LearnerOutput


class Layers:
    """The learners of a cross-layer transcoder, in the order of their layers."""

    def __init__(self, learners: Sequence[Learner]) -> None:
        self.learners = learners

    @property
    def hook(self) -> int:
        """The number of the hook; its rows are the joined rows of all layers."""
        return self.learners[0].hook

    @property
    def tokens_per_step(self) -> int:
        """The number of tokens per step, over all ranks."""
        return self.learners[0].tokens_per_step

    def outputs(self, x: Tensor, y: Tensor) -> Iterator[LearnerOutput]:
        """Run all layers on raw joined inputs [n, n_layers * d_in] and targets [n, n_layers * d_out]."""
        before: Tensor | None = None
        self._choose_together(x, y)
        for learner in self.learners:
            sae = learner.sae
            inputs, target = learner.normalised(x, y)
            sae.written_before = before
            output = learner.forward(inputs, target)
            before, sae.written_before, sae.written_later = sae.written_later, None, None
            yield LearnerOutput(learner, target, output)

    def _choose_together(self, x: Tensor, y: Tensor) -> None:
        """In training, choose the latents of all layers at once if the layers share k."""
        saes = [learner.sae for learner in self.learners]
        sharing = [sae for sae in saes if isinstance(sae, BatchTopK) and sae.shares_k and sae.training]
        if sharing:
            inputs = [learner.normalised(x, y)[0] for learner in self.learners]
            with self.learners[0].autocast():
                choose_together(sharing, inputs)

    def accumulate(self, x: Tensor, y: Tensor, of_all: int | None = None, *, is_last: bool = False) -> None:
        """Run the forward and backward pass of a micro-batch of raw joined rows; see `Learner.accumulate`."""
        for learner in self.learners:
            # The gradients of all layers become known in one backward pass, so none is sent early.
            learner.begin_pass(of_all or len(x), is_last=False)
        with phase(FORWARD):
            outputs = list(self.outputs(x, y))
            losses = [learner.sae.objective(output.losses) for learner, _, output in outputs]
        with phase(BACKWARD):
            scaled = [
                learner.loss_scale.mean(loss, self.tokens_per_step)
                for (learner, _, _), loss in zip(outputs, losses, strict=True)
            ]
            sum(scaled[1:], scaled[0]).backward()
            for learner in self.learners:
                learner.sae.row_gradients.add()
        with phase(METRICS):
            for (learner, target, output), loss in zip(outputs, losses, strict=True):
                learner.observe(target, output, loss)

    def update(self) -> None:
        """Update the weights of all layers, or skip the step in all of them: the layers share their errors."""
        found = GradientMeasures.total([learner.measure() for learner in self.learners])
        for learner in self.learners:
            learner.step_by(found)


def trained_together(learners: Collection[Learner]) -> Collection[Learner | Layers]:
    """Return the units that process a batch: each SAE, or all layers of a cross-layer transcoder together."""
    is_cross_layer = any(learner.layer for learner in learners)
    return [Layers([*learners])] if is_cross_layer else learners
