"""The settings for each optimizer; `catalog` maps optimizer names to these classes."""

from __future__ import annotations

import math
from typing import Annotated, Literal, Self

import msgspec

from trainer.contract.settings.declare import about

Beta1 = (
    Annotated[
        float,
        about("Adam's decay of the mean gradient; auto: depends on the number of steps.", advanced=True, ge=0, lt=1),
    ]
    | Literal["auto"]
)
Beta2 = (
    Annotated[
        float,
        about(
            "Adam's decay of the mean squared gradient; auto: depends on the number of steps.",
            advanced=True,
            ge=0,
            lt=1,
        ),
    ]
    | Literal["auto"]
)


class OptimizerSettings(msgspec.Struct, frozen=True):
    """The settings for an optimizer, and the derived values that estimates and runs use."""

    def state_dtype(self, device: str) -> str:
        """Return the dtype of the optimizer state ("fp32", "bf16" or "int8") on a device type ("cuda" or "cpu")."""
        return "fp32"

    def for_run(self, n_steps: int, device: str) -> Self:
        """Return the settings with each "auto" resolved for a run of `n_steps` steps on a device type."""
        return self

    def auto_lr(self, d_sae: int) -> float:
        """Return the peak learning rate for a dictionary of `d_sae` latents."""
        raise NotImplementedError


class AdamSettings(OptimizerSettings, frozen=True):
    """Adam (Kingma & Ba 2014, arXiv 1412.6980)."""

    beta1: Beta1 = "auto"
    beta2: Beta2 = "auto"
    state: Annotated[
        Literal["auto", "fp32", "bf16", "int8"],
        about("Type of the moments: 8, 4 or 2 bytes per weight; auto: bf16 on GPUs, fp32 on CPUs.", advanced=True),
    ] = "auto"

    def state_dtype(self, device: str) -> str:
        if self.state == "auto":
            return "fp32" if device == "cpu" else "bf16"
        return self.state

    def for_run(self, n_steps: int, device: str) -> Self:
        return msgspec.structs.replace(self, state=self.state_dtype(device), **_decays_left_open(self, n_steps))

    def auto_lr(self, d_sae: int) -> float:
        """Return the learning rate according to the 1/√d_sae law of Gao et al., scaled to match measurements.

        With 3,072 latents, k = 32 and 150 steps of 4,096 tokens, the held-out FVU was 0.122 at 4e-3, 0.112 at 6e-3 and
        0.109 at 9e-3. At 9e-3, however, 4 % of the latents died instead of 1 %. Short runs need no lower rate: with
        1,536 latents and 50 steps of 1,024 tokens, the FVU was 0.205 at 8.5e-3 (the rate given by this rule), 0.221 at
        4e-3, 0.264 at 2e-3 and 0.212 at 1.6e-2.
        """
        return 6e-3 * math.sqrt(3072 / d_sae)


class SignumSettings(OptimizerSettings, frozen=True):
    """Signum (Bernstein et al. 2018, arXiv 1802.04434), schedule-free (Defazio et al. 2024, arXiv 2405.15682)."""

    momentum: Annotated[
        float,
        about(
            "Weights at which gradients are computed: from 0 (stepped weights) to 1 (averaged weights).",
            advanced=True,
            gt=0,
            le=1,
        ),
    ] = 0.95

    def auto_lr(self, d_sae: int) -> float:
        """Return the learning rate according to the rule in EleutherAI's sparsify, which gives the lowest FVU here too.

        With 3,072 latents, k = 32 and batches of 4,096 tokens, the held-out FVU after 150 steps was 0.145 at 4e-3,
        0.121 at 1.15e-2 (the rate given by this rule), and 0.131 with 5 % of the latents dead at 2.5e-2. After 500
        steps, the FVU was 0.104, compared with 0.092 for Adam.
        """
        return 5e-3 * math.sqrt(2**14 / d_sae)


class MuonSettings(OptimizerSettings, frozen=True):
    """Muon (Jordan et al. 2024)."""

    momentum: Annotated[
        float, about("Decay of the running mean of a matrix's gradients.", advanced=True, ge=0, lt=1)
    ] = 0.95
    beta1: Beta1 = "auto"
    beta2: Beta2 = "auto"

    def for_run(self, n_steps: int, device: str) -> Self:
        return msgspec.structs.replace(self, **_decays_left_open(self, n_steps))

    def auto_lr(self, d_sae: int) -> float:
        """Return the same learning rate for all widths, as does EleutherAI's sparsify, which uses 2e-3.

        With 3,072 latents, k = 32 and batches of 4,096 tokens, the held-out FVU after 150 steps was 0.126 at 6e-3,
        0.114 at 2e-2 and 0.173 at 6e-2. After 500 steps at 2e-2, the FVU was 0.096, compared with 0.092 for Adam in
        less time.
        """
        return 2e-2


# The number of steps beyond which Adam's averaging windows no longer grow.
LONG_RUN = 10_000


def _decays_left_open(settings: AdamSettings | MuonSettings, n_steps: int) -> dict[str, float]:
    """Return values for the Adam decays set to "auto", for a run of `n_steps` steps."""
    fitting = {"beta1": gradients_decay(n_steps), "beta2": squares_decay(n_steps)}
    return {name: decay for name, decay in fitting.items() if getattr(settings, name) == "auto"}


def gradients_decay(n_steps: int) -> float:
    """Return Adam's β1 for a run of `n_steps` steps.

    It averages over 1/125 of the steps, but at least 4 and at most 10.

    After 391 steps of 512 tokens, the held-out FVU was 0.154 with this rule and 0.156 with 0.9; see docs/quality.md.
    With 0.5 the FVU was 0.152, but in SAEs with many latents, several times as many latents never fired.
    """
    return 1 - 1 / min(max(n_steps / 125, 4), 10)


def squares_decay(n_steps: int) -> float:
    """Return Adam's β2 for a run of `n_steps` steps.

    It averages over a tenth of the steps, but at least 20 and at most 1,000.

    After 391 steps of 512 tokens, the held-out FVU was 0.156 with this rule and 0.158 with 0.999; see docs/quality.md.
    """
    return 1 - 1 / min(max(n_steps / 10, 20), 1000)
