"""Measures how fast a language model runs up to a hook in our extraction, a plain transformers loop, and SAELens.

All readers process the same text with the same fp32 weights and number of tokens per forward pass, and skip the blocks
above the highest hook. Loading is not timed. Tokenising is timed, except in the plain loop.
"""

from __future__ import annotations

import json
import logging
import tempfile
import threading
import time
import warnings
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Asked(NamedTuple):
    """The inputs for a reader: the model's folder, a .jsonl file with the text, the layers to read, and the sizes."""

    model: Path
    text: Path
    layers: list[int]
    context: int
    batch_tokens: int
    n_tokens: int

    @property
    def contexts_at_once(self) -> int:
        return max(1, self.batch_tokens // self.context)

    def documents(self) -> list[str]:
        return [json.loads(line)["text"] for line in self.text.read_text().splitlines()]


class Reader(ABC):
    """One way to run a model on text; `does` describes the timed work. Each measurement creates a new reader."""

    name: str
    does: str

    @abstractmethod
    def __init__(self, asked: Asked, folder: Path) -> None:
        """Load the model; `folder` is an empty folder for output files."""

    def tokens_per_s(self) -> float:
        """Read the text and return the tokens per second."""
        began = time.perf_counter()
        return self.read() / (time.perf_counter() - began)

    def read(self) -> int:
        """Read the text and return the number of tokens."""
        raise NotImplementedError


class Ours(Reader):
    name, does = "ours", "reads all hooks, selects rows and writes shards"

    def __init__(self, asked: Asked, folder: Path) -> None:
        from trainer.contract.settings.extract import ExtractJob
        from trainer.contract.settings.job_file import parse_as
        from trainer.extraction.extraction import Extraction
        from trainer.extraction.peers import Alone

        table = {
            "model": {"path": str(asked.model), "hooks": [f"resid_post.{layer}" for layer in asked.layers]},
            "text": {"path": str(asked.text), "context": asked.context},
            "extract": {"n_tokens": asked.n_tokens, "batch_tokens": asked.batch_tokens, "output": str(folder)},
        }
        job, problems = parse_as(ExtractJob, {"kind": "extract", **table})
        assert job is not None, problems
        self._extraction = Extraction(job, torch.device("cpu"), Alone(threading.Event()))

    def tokens_per_s(self) -> float:
        # The extraction counts all tokens in the last batch, although it does not keep all of this batch's rows.
        return self._extraction.run().tokens_per_s or 0.0


class Plain(Reader):
    name, does = "transformers", "reads all hooks, without tokenising, selecting or writing"

    def __init__(self, asked: Asked, folder: Path) -> None:
        import transformers

        tokenizer = transformers.AutoTokenizer.from_pretrained(asked.model)
        ids = [one for text in asked.documents() for one in tokenizer(text)["input_ids"]][: asked.n_tokens]
        n = len(ids) // asked.context
        self._batches = torch.tensor(ids[: n * asked.context]).view(n, asked.context).split(asked.contexts_at_once)
        self._model = transformers.AutoModel.from_pretrained(asked.model, dtype=torch.float32).eval()
        self._model.layers = self._model.layers[: max(asked.layers) + 1]
        self._rows: dict[int, Tensor] = {}
        for layer in asked.layers:
            self._model.layers[layer].register_forward_hook(lambda _, __, output, at=layer: self._keep(at, output))

    def _keep(self, layer: int, output: Any) -> None:
        self._rows[layer] = output if isinstance(output, Tensor) else output[0]

    @torch.inference_mode()
    def read(self) -> int:
        for ids in self._batches:
            self._model(input_ids=ids, use_cache=False)
        return sum(ids.numel() for ids in self._batches)


class SaeLensRunner(Reader):
    """`CacheActivationsRunner` reads one hook at a time, with a buffer as large as the text."""

    name, does = "SAELens cache_activations_runner", "reads one hook and writes Arrow files"

    def __init__(self, asked: Asked, folder: Path) -> None:
        from datasets import Dataset
        from sae_lens import CacheActivationsRunner, CacheActivationsRunnerConfig
        from transformers import AutoConfig

        logging.getLogger("sae_lens").setLevel(logging.ERROR)
        d_in = AutoConfig.from_pretrained(asked.model).hidden_size
        at_once = asked.contexts_at_once * asked.context
        self._n_tokens = asked.n_tokens // at_once * at_once
        config = CacheActivationsRunnerConfig(
            dataset_path="",
            model_name=str(asked.model),
            model_class_name="AutoModelForCausalLM",
            model_from_pretrained_kwargs={"dtype": torch.float32},
            hook_name=f"model.layers.{max(asked.layers)}",
            d_in=d_in,
            context_size=asked.context,
            model_batch_size=asked.contexts_at_once,
            training_tokens=self._n_tokens,
            buffer_size_gb=(self._n_tokens + 0.5) * d_in * 4 / 1e9,
            new_cached_activations_path=str(folder),
            device="cpu",
        )
        texts = Dataset.from_dict({"text": asked.documents()})
        self._runner = CacheActivationsRunner(config, override_dataset=texts)

    def read(self) -> int:
        self._runner.run()
        return self._n_tokens


class SaeLensStore(SaeLensRunner):
    """`ActivationsStore`, which SAELens uses for training, but without its mixing of batches."""

    name, does = "SAELens ActivationsStore", "reads one hook without writing"

    def read(self) -> int:
        n_read = 0
        while n_read < self._n_tokens:
            acts, _ = self._runner.activations_store.get_raw_llm_batch()
            n_read += len(acts)
        return n_read


READERS: tuple[type[Reader], ...] = (Ours, Plain, SaeLensStore, SaeLensRunner)


def measure(kind: type[Reader], asked: Asked) -> float:
    """Return one reader's tokens per second, measured once."""
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        # Ignore warnings about texts that are not tokenised and about too few texts.
        warnings.simplefilter("ignore")
        return kind(asked, Path(folder)).tokens_per_s()
