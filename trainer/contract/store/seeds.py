"""SAEs in a sweep that differ only in the seed: one experiment, described by means and standard deviations."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import msgspec

from trainer.contract.store.twins import without_twins
from trainer.contract.wording import plural

_SEED = "seed="


class Spread(msgspec.Struct, frozen=True):
    """The mean of a metric over `n` seeds, and its standard deviation with n - 1 in the denominator."""

    mean: float
    sd: float
    n: int


class Seeds(msgspec.Struct, frozen=True):
    """The SAEs in a sweep that differ only in the seed, and the spread of each metric over them.

    `are_all` is True if the sweep has no other SAEs apart from random twins; in that case, none of its SAEs counts as
    the best.
    """

    labels: tuple[str, ...]
    are_all: bool
    spreads: Mapping[str, Spread]

    @property
    def count_words(self) -> str:
        """The number of seeds, like `3 seeds`, or `2 of 3 seeds` if the training of one has failed."""
        of_fvu = self.spreads.get("heldout_fvu") or self.spreads.get("fvu")
        return seed_count(of_fvu.n if of_fvu else 1, len(self.labels))


def seed_count(n: int, n_all: int) -> str:
    """Return the number of seeds, like `3 seeds`, or `2 of 3 seeds` if only two of them have a value."""
    all_seeds = plural(n_all, "seed")
    return all_seeds if n == n_all else f"{n} of {all_seeds}"


def spread_of(values: Sequence[float]) -> Spread | None:
    """Return the mean and the standard deviation, or None if there are fewer than two values or one is not finite."""
    if len(values) < 2 or not all(map(math.isfinite, values)):
        return None
    try:
        # Import late, because it loads `fractions` and `random`, which takes 2 ms in every command.
        from statistics import stdev

        return Spread(mean(values), stdev(values), len(values))
    except OverflowError:
        return None


def names_seed(label: str) -> bool:
    """Return whether the label of an SAE names its seed, like `k=16,seed=1`."""
    return any(part.startswith(_SEED) for part in label.split(","))


def names_layer(label: str) -> bool:
    """Return whether a label names a layer of a cross-layer transcoder."""
    return label.startswith("layer=")


def without_seed(label: str) -> str:
    """Return the label of an SAE without its seed, like `k=16` for `k=16,seed=1`."""
    return ",".join(part for part in label.split(",") if not part.startswith(_SEED))


def by_seeds(labels: Iterable[str]) -> dict[str, list[str]]:
    """Group the labels of SAEs that differ only in the seed (lowest seed first) by the label without the seed.

    An SAE whose label names no seed is in a group of its own.
    """
    groups: dict[str, list[str]] = {}
    for label in labels:
        groups.setdefault(without_seed(label), []).append(label)
    return {group: sorted(own, key=_seed_of) for group, own in groups.items()}


def _seed_of(label: str) -> int:
    seed = next((part.removeprefix(_SEED) for part in label.split(",") if part.startswith(_SEED)), "")
    return int(seed) if seed.isdecimal() else -1


def seeds_of(labels: Iterable[str], label: str) -> list[str]:
    """Return the labels of an SAE and of all SAEs that differ from it only in the seed."""
    return by_seeds(labels).get(without_seed(label), [])


def values_by_seed(latest: Mapping[str, float], name: str, label: str) -> dict[str, float]:
    """Return the values of a metric for an SAE and all SAEs that differ only in the seed, by label.

    `latest` maps names such as `fvu@k=16,seed=0` to values.
    """
    values = {key.removeprefix(f"{name}@"): value for key, value in latest.items() if key.startswith(f"{name}@")}
    return {other: values[other] for other in seeds_of(values, label)}


def seeds_in(latest: Mapping[str, float], label: str) -> Seeds | None:
    """Return an SAE and the SAEs that differ from it only in the seed, with their spreads; None for a single SAE."""
    names, labels = ({key.partition("@")[part] for key in latest if "@" in key} for part in (0, 2))
    own = seeds_of(labels, label)
    if len(own) < 2:
        return None
    found = {name: spread_of(list(values_by_seed(latest, name, label).values())) for name in sorted(names)}
    spreads = {name: spread for name, spread in found.items() if spread}
    return Seeds(tuple(own), len(by_seeds(without_twins(labels))) == 1, spreads)


def as_json(seeds: Seeds) -> dict[str, Any]:
    """Return the labels and, by name, each metric's `mean`, `sd` and `n` for `--json`."""
    return {"labels": list(seeds.labels), "figures": msgspec.to_builtins(seeds.spreads)}


def mean(values: Collection[float]) -> float:
    return math.fsum(values) / len(values)
