"""Measures how long it takes to search an SAE's stored max-activating examples, and how large these examples are.

PYTHONPATH=. python tests/benchmarks/feature_search.py [--latents 65536]

The frequencies of the 50,000 distinct tokens follow Zipf's law. Each latent has 20 examples of 20 tokens. The target is
0.3 s, which still feels instant.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import torch

from trainer.contract.runs.features import FEATURES, Features
from trainer.evaluation.contexts import WIDTH, Contexts, write_features

N_TOKENS, N_CONTEXTS, TIMES = 50_000, 20, 5
SEARCHES = ("w1x", "w123x", "x9", "1", "w", "nothing")


def write(folder: Path, n_latents: int) -> float:
    """Write examples that consist of random tokens; return the CPU seconds spent computing the tensors."""
    contexts = Contexts(n_latents, N_CONTEXTS)
    weights = 1 / torch.arange(1, N_TOKENS + 1, dtype=torch.float64)
    tokens = torch.multinomial(weights, n_latents * N_CONTEXTS * WIDTH, replacement=True)
    contexts._token_ids = tokens.reshape(n_latents, N_CONTEXTS, WIDTH).int()
    contexts._acts = torch.ones(contexts._token_ids.shape)
    contexts._entries.append((torch.arange(n_latents, dtype=torch.int32), torch.ones(n_latents)))
    begun = time.process_time()
    tensors = contexts.tensors(
        torch.randn(n_latents, 16), [f" w{number}x{number % 97}".encode() for number in range(N_TOKENS)]
    )
    took = time.process_time() - begun
    write_features(folder, tensors)
    return took


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--latents", type=int, default=65_536)
    n_latents = parser.parse_args().latents
    with tempfile.TemporaryDirectory() as folder:
        took = write(Path(folder), n_latents)
        features = Features(Path(folder) / FEATURES)
        sizes = {name: entry.data_offsets[1] - entry.data_offsets[0] for name, entry in features._entries.items()}
        index = sizes["index_ends"] + sizes["index_latents"]
        print(f"{sum(sizes.values()) >> 20} MiB, including the index of {index >> 20} MiB; made in {took:.1f} s")
        for words in SEARCHES:
            took = min(_time(features, words) for _ in range(TIMES))
            print(f"{words:>8}  {len(features.search(words)):>6} latents  {took:.3f} s")


def _time(features: Features, words: str) -> float:
    """Return a search's CPU time rather than its wall time, because the machine may be under other load."""
    begun = time.process_time()
    features.search(words)
    return time.process_time() - begun


if __name__ == "__main__":
    main()
