"""The settings for each SAE architecture; `catalog` maps architecture names to these classes."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from trainer.contract.settings.declare import about


class ArchitectureSettings(msgspec.Struct, frozen=True):
    """The settings for an architecture, and the derived numbers that memory and time estimates use."""

    @property
    def n_active(self) -> int:
        """The mean number of active latents per token."""
        raise NotImplementedError

    @property
    def target_l0(self) -> int | None:
        """The requested L0, or None if the penalty is fixed or if layers share k."""
        return self.n_active if getattr(self, "sparsity_coefficient", "auto") == "auto" else None

    def most_active(self, d_in: int) -> int:
        """Return the highest mean number of active latents per token at any time during a run."""
        return self.n_active

    def n_aux(self, d_in: int) -> int:
        """Return how many dead latents per token the auxiliary loss uses; 0 without an auxiliary loss."""
        return 0

    @property
    def ks(self) -> tuple[int, ...]:
        """The values of k that a single SAE is trained for, ascending; () for most architectures."""
        return ()

    @property
    def n_prefixes(self) -> int:
        """The number of partial sums over latents that are each trained to reconstruct; 0 for most architectures."""
        return 0


# Settings for TopK and architectures derived from it.
KAux = Annotated[
    int, about("Number of dead latents that reconstruct the residual; default d_in / 2.", advanced=True, ge=1)
]
AuxKAlpha = Annotated[
    float, about("Weight of the AuxK loss (1/32 in Gao et al.); 0 turns it off.", advanced=True, ge=0)
]
KAnnealFraction = Annotated[
    float,
    about(
        "Share of the steps over which k is annealed to its final value (0.1 in llamascopium); 0: no annealing.",
        advanced=True,
        ge=0,
        le=1,
    ),
]
KAnnealStart = Annotated[
    int,
    about("Initial k of the annealing; default d_in, as in llamascopium and dictionary_learning.", advanced=True, ge=1),
]
ThresholdRate = Annotated[
    float,
    about(
        "Rate of the threshold's moving average (with 0.01, as in SAELens, L0 is 27 for k = 32 after 150 steps).",
        advanced=True,
        gt=0,
        le=1,
    ),
]


class _SelectsTopK:
    """The derived numbers for an architecture that selects k latents and revives dead latents with AuxK."""

    __slots__ = ()
    k: int
    k_aux: int | None
    auxk_alpha: float
    k_anneal_fraction: float
    k_anneal_start: int | None

    @property
    def n_active(self) -> int:
        return self.k

    def most_active(self, d_in: int) -> int:
        """Return k, or its initial value if k is annealed."""
        return max(self.k, self.k_anneal_start or d_in) if self.k_anneal_fraction else self.k

    def n_aux(self, d_in: int) -> int:
        return (self.k_aux or max(1, d_in // 2)) if self.auxk_alpha else 0


class TopKSettings(_SelectsTopK, ArchitectureSettings, frozen=True):
    """TopK with AuxK (Gao et al. 2024, arXiv 2406.04093)."""

    k: Annotated[int, about("Latents active per token.", unit="latents", ge=1)] = 32
    k_aux: KAux | None = None
    auxk_alpha: AuxKAlpha = 1 / 32
    k_anneal_fraction: KAnnealFraction = 0.0
    k_anneal_start: KAnnealStart | None = None


class HierarchicalTopKSettings(_SelectsTopK, ArchitectureSettings, frozen=True):
    """HierarchicalTopK with AuxK (Balagansky et al. 2025, arXiv 2505.24473)."""

    k: Annotated[int, about("Latents active per token; the SAE can be used with fewer.", unit="latents", ge=1)] = 64
    n_levels: Annotated[
        int, about("Number of k values that the SAE is trained for: k, k / 2, k / 4 and so on.", ge=1, le=16)
    ] = 4
    k_aux: KAux | None = None
    auxk_alpha: AuxKAlpha = 1 / 32
    k_anneal_fraction: KAnnealFraction = 0.0
    k_anneal_start: KAnnealStart | None = None

    @property
    def ks(self) -> tuple[int, ...]:
        return tuple(sorted({max(1, self.k // 2**level) for level in range(self.n_levels)}))

    @property
    def n_prefixes(self) -> int:
        return len(self.ks)


class BatchTopKSettings(_SelectsTopK, ArchitectureSettings, frozen=True):
    """BatchTopK with AuxK (Bussmann et al. 2024, arXiv 2412.06410)."""

    k: Annotated[int, about("Latents active per token, on average over a batch.", unit="latents", ge=1)] = 32
    k_aux: KAux | None = None
    auxk_alpha: AuxKAlpha = 1 / 32
    threshold_rate: ThresholdRate = 0.2
    k_anneal_fraction: KAnnealFraction = 0.0
    k_anneal_start: KAnnealStart | None = None
    rank_by: Annotated[
        Literal["sae", "crosscoder"],
        about(
            "Ranks a crosscoder's activations times the norm of the whole decoder row (sae), or times the sum of its"
            " parts' norms (crosscoder; favours shared latents).",
            advanced=True,
        ),
    ] = "sae"
    share_k: Annotated[
        bool,
        about(
            "Lets the layers of a cross-layer transcoder share k: the largest activations of all layers are kept, k per"
            " layer and token on average.",
            advanced=True,
        ),
    ] = False

    @property
    def target_l0(self) -> int | None:
        return None if self.share_k else self.k


class MatryoshkaSettings(_SelectsTopK, ArchitectureSettings, frozen=True):
    """Matryoshka BatchTopK with AuxK (Bussmann et al. 2025, arXiv 2503.17547)."""

    k: Annotated[int, about("Latents active per token, on average over a batch.", unit="latents", ge=1)] = 32
    n_levels: Annotated[
        int,
        about(
            "Number of nested prefixes, each twice as wide as the previous one (5 in the paper: 1/16 to 1).",
            ge=1,
            le=16,
        ),
    ] = 5
    k_aux: KAux | None = None
    auxk_alpha: AuxKAlpha = 1 / 32
    threshold_rate: ThresholdRate = 0.2
    k_anneal_fraction: KAnnealFraction = 0.0
    k_anneal_start: KAnnealStart | None = None

    @property
    def n_prefixes(self) -> int:
        return self.n_levels


# Settings for architectures with a sparsity penalty.
TargetL0 = Annotated[
    int, about("Target L0: the penalty is adjusted until k latents are active per token.", unit="latents", ge=1)
]
SparsityCoefficient = (
    Annotated[float, about("Weight of the sparsity penalty; auto adjusts it so that k latents are active.", gt=0)]
    | Literal["auto"]
)
SparsityWarmup = Annotated[
    float,
    about("Share of the steps over which the penalty rises from 0.", advanced=True, ge=0, le=1),
]


class StandardSettings(ArchitectureSettings, frozen=True):
    """ReLU and L1 (Bricken et al. 2023; weighted by decoder norms as in Anthropic's April 2024 update)."""

    k: TargetL0 = 32
    sparsity_coefficient: SparsityCoefficient = "auto"
    sparsity_warmup_fraction: SparsityWarmup = 0.1

    @property
    def n_active(self) -> int:
        return self.k


class GatedSettings(ArchitectureSettings, frozen=True):
    """Gated SAE (Rajamanoharan et al. 2024, arXiv 2404.16014)."""

    k: TargetL0 = 32
    sparsity_coefficient: SparsityCoefficient = "auto"
    sparsity_warmup_fraction: SparsityWarmup = 0.1

    @property
    def n_active(self) -> int:
        return self.k


class JumpReLUSettings(ArchitectureSettings, frozen=True):
    """JumpReLU (Rajamanoharan et al. 2024, arXiv 2407.14435; tanh from Anthropic's January 2025 update)."""

    k: TargetL0 = 32
    sparsity_coefficient: SparsityCoefficient = "auto"
    sparsity_warmup_fraction: SparsityWarmup = 0.1
    penalty: Annotated[
        Literal["l0", "tanh"],
        about("Penalised quantity: the number of active latents, or the tanh of their activations.", advanced=True),
    ] = "l0"
    tanh_scale: Annotated[float, about("Scale of activations inside tanh (4 at Anthropic).", advanced=True, gt=0)] = 4.0
    bandwidth: Annotated[
        float,
        about(
            "Width of the window around a threshold in which the threshold gets a gradient (data spread: 1).",
            advanced=True,
            gt=0,
        ),
    ] = 0.1

    @property
    def n_active(self) -> int:
        return self.k
