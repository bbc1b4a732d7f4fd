"""The settings of each optimizer; the registry in `catalog` says which belong to which."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from trainer.contract.knobs import about


class AdamKnobs(msgspec.Struct, frozen=True):
    """Adam (Kingma & Ba 2014, arXiv 1412.6980)."""

    beta1: Annotated[float, about("Memory of the gradient's mean.", advanced=True, ge=0, lt=1)] = 0.9
    beta2: Annotated[float, about("Memory of the gradient's square.", advanced=True, ge=0, lt=1)] = 0.999
    state: Annotated[
        Literal["fp32", "bf16", "int8"], about("What the moments are kept in; 8, 4 or 2 bytes a weight.", advanced=True)
    ] = "fp32"


class SignumKnobs(msgspec.Struct, frozen=True):
    """Signum (Bernstein et al. 2018, arXiv 1802.04434), schedule-free (Defazio et al. 2024, arXiv 2405.15682)."""

    momentum: Annotated[
        float, about("How far gradients are taken from the stepped to the averaged weights.", advanced=True, gt=0, le=1)
    ] = 0.95


class MuonKnobs(msgspec.Struct, frozen=True):
    """Muon (Jordan et al. 2024)."""

    momentum: Annotated[float, about("Memory of a matrix's gradient.", advanced=True, ge=0, lt=1)] = 0.95
    beta1: Annotated[float, about("The biases' Adam: memory of the mean.", advanced=True, ge=0, lt=1)] = 0.9
    beta2: Annotated[float, about("The biases' Adam: memory of the square.", advanced=True, ge=0, lt=1)] = 0.999
