"""Prints the modelled waits in docs/performance.md for a language model on a GPU, by the model of evaluation times.

The app predicts the duration of an evaluation with the same model, `trainer.contract.runs.evaluation_time.ModelTime`.
No GPU has confirmed it.
"""

from __future__ import annotations

from collections.abc import Callable

from trainer.contract.runs.evaluation_time import ABLATED_TOKENS, ModelTime, model_time
from trainer.contract.settings.model_size import ModelSize

GPUS = ("NVIDIA H100 80GB HBM3", "NVIDIA H200")
# Parameters, width and blocks; both are stored in bf16.
SIZES = {
    "SmolLM2-135M": ModelSize(134_515_008, 576, 30, "bfloat16"),
    "Llama-3.1-8B": ModelSize(8_030_261_248, 4_096, 32, "bfloat16"),
}
N_TEXT, N_EFFECTS = 30, 20_000
WAITS: dict[str, Callable[[ModelTime], float]] = {
    "start and load the model": lambda of: of.loading_s,
    f"read a text of {N_TEXT} tokens": lambda of: of.pass_s(N_TEXT),
    f"answer with {N_TEXT} tokens, plain and steered": lambda of: of.answer_s(N_TEXT, N_TEXT),
    f"effects of all latents on {N_EFFECTS:,} tokens": lambda of: of.effects_s(N_EFFECTS, ABLATED_TOKENS["cuda"]),
}


def table() -> str:
    """Return the modelled waits as a Markdown table."""
    models = {
        f"{name}, {gpu.split()[1]}": model_time(size, "cuda", gpu) for name, size in SIZES.items() for gpu in GPUS
    }
    # The H100 and the H200 have the same times as long as no wait is limited by memory bandwidth.
    lines = [["seconds", *models], ["---"] * (1 + len(models))]
    lines += [[wait, *(f"{seconds(of):.2g}" for of in models.values())] for wait, seconds in WAITS.items()]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    print(table())
