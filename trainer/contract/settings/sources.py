"""The settings of each source of activations, and the shape of its data; the registry in `catalog` names them."""

from __future__ import annotations

from typing import Annotated, ClassVar, NamedTuple

import msgspec

from trainer.contract.errors import JobFileError, Problem
from trainer.contract.settings.knobs import about
from trainer.contract.settings.shards import inspect_shards


class DataShape(NamedTuple):
    """The number and widths of rows: `d_in`, and for a transcoder `d_out` of each row's target.

    `n_tokens` is None where the data is a stream.
    """

    d_in: int
    d_out: int | None
    n_tokens: int | None


class SourceKnobs(msgspec.Struct, frozen=True):
    """Settings of a source, which can tell the shape of its data without loading it."""

    # The settings that name a file or folder.
    paths: ClassVar[tuple[str, ...]] = ()

    @property
    def place(self) -> str:
        """The name of the data in messages."""
        raise NotImplementedError

    def shape(self) -> DataShape:
        """Return the shape of the data from file headers alone; raise `JobFileError` where something is wrong."""
        raise NotImplementedError


class StreamKnobs(SourceKnobs, frozen=True, kw_only=True):
    """Settings of a source whose rows come once, in an order of its own; the base of those of each stream."""

    shuffle_tokens: Annotated[
        int,
        about("Tokens of a stream that each rank holds to mix them.", unit="tokens", advanced=True, ge=1),
    ] = 262_144


class ShardKnobs(SourceKnobs, frozen=True):
    """Activations on disk."""

    path: Annotated[
        str,
        about(
            "Folder or file of shards [n_tokens, d_in]: .safetensors, .npy, .pt, .arrow or .parquet.",
            min_length=1,
        ),
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
        shards = inspect_shards(self.path)
        if self.target_path is None:
            return DataShape(shards.d_in, None, shards.n_tokens)
        targets = inspect_shards(self.target_path, "data.target_path")
        if targets.n_tokens != shards.n_tokens:
            counts = f"holds {targets.n_tokens:,} rows, but {self.path} has {shards.n_tokens:,}"
            message = f"{self.target_path} {counts}; every row needs its target"
            raise JobFileError([Problem("data.target_path", message)])
        return DataShape(shards.d_in, targets.d_in, shards.n_tokens)


# Numbers in the directions of all synthetic features: 4 GB in fp32.
MOST_SYNTHETIC = 10**9


class SyntheticKnobs(SourceKnobs, frozen=True):
    """Rows made from a known sparse dictionary (Sharkey et al. 2022, "Taking features out of superposition")."""

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
