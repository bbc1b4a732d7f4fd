"""The settings of each source of activations, and what shape its data has; the registry in `catalog` names them."""

from __future__ import annotations

from typing import Annotated, ClassVar, NamedTuple

import msgspec

from trainer.contract.errors import JobFileError, Problem
from trainer.contract.settings.knobs import about
from trainer.contract.settings.shards import inspect_shards


class DataShape(NamedTuple):
    """Rows of width `d_in`; for a transcoder each has a target of width `d_out`."""

    d_in: int
    d_out: int | None
    n_tokens: int


class SourceKnobs(msgspec.Struct, frozen=True):
    """Settings that tell the shape of their data without loading it."""

    # Those that name a file or folder.
    paths: ClassVar[tuple[str, ...]] = ()

    @property
    def place(self) -> str:
        """How to call the data in a message."""
        raise NotImplementedError

    def shape(self) -> DataShape:
        """Read no more than file headers; raises `JobFileError` where something is amiss."""
        raise NotImplementedError


class ShardKnobs(SourceKnobs, frozen=True):
    """Activations on disk."""

    path: Annotated[
        str, about("Folder or file of .safetensors shards with a tensor `activations` [n_tokens, d_in].", min_length=1)
    ]
    target_path: (
        Annotated[
            str,
            about(
                "Shards with what each row is to become, where a transcoder is trained.", advanced=True, min_length=1
            ),
        ]
        | None
    ) = None
    paths: ClassVar[tuple[str, ...]] = ("path", "target_path")

    @property
    def place(self) -> str:
        return self.path

    def shape(self) -> DataShape:
        found = inspect_shards(self.path)
        if self.target_path is None:
            return DataShape(found.d_in, None, found.n_tokens)
        targets = inspect_shards(self.target_path, "data.target_path")
        if targets.n_tokens != found.n_tokens:
            counts = f"holds {targets.n_tokens:,} rows, but {self.path} has {found.n_tokens:,}"
            message = f"{self.target_path} {counts}; every row needs its target"
            raise JobFileError([Problem("data.target_path", message)])
        return DataShape(found.d_in, targets.d_in, found.n_tokens)


# Numbers in the directions of synthetic features: 4 GB.
MOST_SYNTHETIC = 10**9


class SyntheticKnobs(SourceKnobs, frozen=True):
    """Rows of a sparse dictionary that is known (Sharkey et al. 2022, "Taking features out of superposition")."""

    d_in: Annotated[int, about("Width of a row.", unit="dimensions", ge=1)] = 64
    n_features: Annotated[int, about("Directions that rows are sums of.", unit="features", ge=1)] = 256
    active: Annotated[float, about("Features in a row on average.", unit="features", gt=0)] = 5.0
    skew: Annotated[
        float, about("The j-th most frequent feature fires as j to minus this; 0: all alike.", advanced=True, ge=0)
    ] = 0.5
    noise: Annotated[float, about("Standard deviation of what is added to every number.", advanced=True, ge=0)] = 0.0
    n_rows: Annotated[int, about("Rows before they come again.", unit="tokens", ge=1)] = 10_000_000
    data_seed: Annotated[int, about("Fixes the features and every row.", advanced=True, ge=0)] = 0

    @property
    def place(self) -> str:
        return f"synthetic data of {self.n_features:,} features"

    def shape(self) -> DataShape:
        if self.active > 0.9 * self.n_features:
            message = f"must be at most 0.9 of data.n_features, {self.n_features}, not {self.active:g}"
            raise JobFileError([Problem("data.active", message)])
        if self.d_in * self.n_features > MOST_SYNTHETIC:
            most = MOST_SYNTHETIC // self.d_in
            message = f"must be at most {most:,} of width {self.d_in}, not {self.n_features:,}: a rank holds all"
            raise JobFileError([Problem("data.n_features", message)])
        return DataShape(self.d_in, None, self.n_rows)
