"""Language models in transformers with hooks that change rows, without a cache, to compare the trainer with."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

# The number of tokens that `Plain.greedy` adds.
N = 6


class Plain:
    """The unchanged model in transformers; `changes` maps modules to functions of their input and output."""

    def __init__(self, folder: Path) -> None:
        self.model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(folder)

    def blocks(self) -> Sequence[nn.Module]:
        base = getattr(self.model, "transformer", None) or self.model.model
        blocks: Sequence[nn.Module] = getattr(base, "h", None) or base.layers
        return blocks

    @contextlib.contextmanager
    def changed(self, changes: dict[nn.Module, Callable[[Tensor, Tensor], Tensor]]) -> Iterator[None]:
        def hook(change: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Any]:
            def after(_: object, inputs: Any, output: Any) -> Any:
                first = output if isinstance(output, Tensor) else output[0]
                new = change(inputs[0], first)
                return new if isinstance(output, Tensor) else (new, *output[1:])

            return after

        handles = [module.register_forward_hook(hook(change)) for module, change in changes.items()]
        yield
        for handle in handles:
            handle.remove()

    @torch.inference_mode()
    def logits(self, ids: list[int], changes: dict[nn.Module, Callable[[Tensor, Tensor], Tensor]]) -> Tensor:
        with self.changed(changes):
            logits: Tensor = self.model(input_ids=torch.tensor([ids])).logits[0]
        return logits

    def greedy(self, ids: list[int], changes: dict[nn.Module, Callable[[Tensor, Tensor], Tensor]]) -> list[int]:
        """Continue with the most likely tokens, without a cache."""
        written = [*ids]
        for _ in range(N):
            written.append(int(self.logits(written, changes)[-1].argmax()))
        return written[len(ids) :]
