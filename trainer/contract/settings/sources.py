"""The settings for each activation source, and the shape of its data; `catalog` maps names to these classes."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, ClassVar, Literal, NamedTuple, TypeVar

import msgspec

from trainer.contract.errors import JobFileError, Problem
from trainer.contract.object_paths import joined, local_path
from trainer.contract.settings.declare import about
from trainer.contract.settings.hooks import ends_of, is_of_transcoder, names_of_hook, parts_of, problems_of_hooks
from trainer.contract.settings.promised import NO_PROMISES, Promises, Width, is_promised, promised
from trainer.contract.settings.shards import PLACE, ShardSet, inspect_shards, is_shuffled, numbers_in, same_shards
from trainer.contract.wording import join_words, plural


class DataShape(NamedTuple):
    """The row dimensions and the number of rows; `d_out` is the dimension of a transcoder's targets.

    `d_out` is None for an SAE. `n_tokens` is None if the data is a stream. `parts` contains the dimensions of the parts
    that a crosscoder's rows are joined from; their sum is `d_in`.
    """

    d_in: int
    d_out: int | None
    n_tokens: int | None
    parts: tuple[int, ...] = ()

    @property
    def width(self) -> int:
        """The row dimension plus the target dimension."""
        return self.d_in + (self.d_out or 0)

    @property
    def words(self) -> str:
        """The shape in words, such as `3,000 rows of 16 dimensions`."""
        n_rows = "" if self.n_tokens is None else f"{self.n_tokens:,} "
        targets = "" if self.d_out is None else f" with targets of {self.d_out}"
        parts = f" ({' + '.join(map(str, self.parts))})" if self.parts else ""
        return f"{n_rows}rows of {plural(self.d_in, 'dimension')}{parts}{targets}"


HoldOut = Literal["texts", "rows", "blocks"]


class Held(NamedTuple):
    """The memory in bytes that an activation source needs on a device, for a model's weights and for activations."""

    weights: int = 0
    activations: int = 0


class SourceSettings(msgspec.Struct, frozen=True):
    """The settings for an activation source, and the shape of its data, which is known without loading the data."""

    # The names of settings containing a file or folder path, and of settings that may contain a hub name instead.
    paths: ClassVar[tuple[str, ...]] = ()
    hub_paths: ClassVar[tuple[str, ...]] = ()

    @property
    def place(self) -> str:
        """The name of the data in user-facing messages."""
        raise NotImplementedError

    def shape(self) -> DataShape:
        """Return the shape of the data, reading only file headers; raise `JobFileError` if the data cannot be used."""
        raise NotImplementedError

    def shape_once_written(self, promises: Promises) -> DataShape:
        """Return the shape of the data, including rows that other jobs have yet to write."""
        return self.shape()

    def parts(self) -> Sequence[SourceSettings]:
        """Return the settings of each part that a crosscoder's rows are joined from; for other SAEs, only these."""
        return [self]

    def repeated(self) -> list[Problem]:
        """Report rows given twice."""
        return []

    def usual_hold_out(self) -> HoldOut:
        """Return the default unit for holding out rows; if rows are independent, the unit is an individual row."""
        return "rows"

    def stored_at(self) -> list[tuple[str, str]]:
        """Return the shard files and folders to read, as pairs (setting, path), inputs before targets."""
        return []

    def held(self, width: int, *, on_cuda: bool) -> Held:
        """Return the memory that the source needs on a rank's device; stored rows need none: the page cache holds them.

        `width` is the number of values per token, including the rows at all hooks and their targets.
        """
        return Held()

    def held_alone(self, width: int, *, on_cuda: bool) -> Held:
        """Return the memory that the source needs on a device that only computes rows, if there is such a device."""
        return Held()

    def flops_per_token(self) -> float:
        """Return the number of operations to compute a row, on the training rank or on a dedicated device."""
        return 0.0


class StreamSettings(SourceSettings, frozen=True, kw_only=True):
    """Settings common to all streams; a stream is a source that produces each row once, in a fixed order."""

    shuffle_tokens: Annotated[
        int,
        about("Number of stream tokens that each rank buffers for shuffling.", unit="tokens", advanced=True, ge=1),
    ] = 262_144

    def held(self, width: int, *, on_cuda: bool) -> Held:
        """Return the size of the fp32 shuffle buffer, which is in host memory unless `on_cuda`."""
        return Held() if on_cuda else Held(activations=4 * self.shuffle_tokens * width)


_Path = Annotated[str, msgspec.Meta(min_length=1)]
Paths = str | list[str]
S = TypeVar("S", bound=ShardSet | Width)
_LARGEST_WEIGHT = 1e6


class ShardSettings(SourceSettings, frozen=True):
    """Settings for activations stored on disk."""

    path: Annotated[
        _Path | list[_Path],
        about(
            "Folder or file of shards [n_tokens, d_in] (.safetensors, .npy, .pt, .arrow, .parquet), or URL"
            " (s3://, gs://, hf://) of .safetensors or .npy shards; a list is mixed.",
            wanted="a string of at least 1 character(s), or a list of such strings",
        ),
    ]
    target_path: (
        Annotated[
            _Path | list[_Path],
            about(
                "Shards that contain the target of each row, for training a transcoder.",
                advanced=True,
                wanted="a string of at least 1 character(s), or a list of such strings",
            ),
        ]
        | None
    ) = None
    weights: (
        Annotated[
            list[Annotated[float, msgspec.Meta(gt=0, le=_LARGEST_WEIGHT)]],
            about(
                "Relative weight of each folder in a list; default: its number of rows.",
                advanced=True,
                wanted="a list of numbers above 0 and of at most a million",
            ),
        ]
        | None
    ) = None
    hook: (
        Annotated[
            str,
            about(
                "Hook with a folder in an extraction's folder; several: one SAE each; mlp.12, mlp: transcoders;"
                " resid_post.8+12: a crosscoder.",
                advanced=True,
                min_length=1,
            ),
        ]
        | None
    ) = None
    join: Annotated[
        bool,
        about(
            "Joins the rows of the folders in a list side by side, for a crosscoder, instead of mixing them.",
            advanced=True,
        ),
    ] = False
    shuffle_shards: (
        Annotated[
            int,
            about(
                "Number of shards whose rows are shuffled together; default: all, or as many as fit in data.cache_gb.",
                advanced=True,
                ge=1,
            ),
        ]
        | None
    ) = None
    cache_gb: (
        Annotated[
            float,
            about(
                "Disk space for copies of shards from a URL; default: 80 % of the free space.",
                unit="GB",
                advanced=True,
                gt=0,
            ),
        ]
        | None
    ) = None
    paths: ClassVar[tuple[str, ...]] = ("path", "target_path")

    @property
    def place(self) -> str:
        return join_words(each(self.places_of(0)))

    @property
    def folders(self) -> Paths:
        """The folders containing the rows: `path`, or the folder in `path` named after the hook, of all parts.

        For a URL, this is the local folder that keeps copies of its objects.
        """
        return _local(self.places_of(0))

    def parts(self) -> list[ShardSettings]:
        paths = each(self.path) if self.join else [self.path]
        hooks = [None] if self.hook is None else parts_of(self.hook)
        if not paths or len(paths) == len(hooks) == 1:
            return [self]  # `shape` reports an empty list
        return [msgspec.structs.replace(self, path=path, hook=hook, join=False) for path in paths for hook in hooks]

    @property
    def targets(self) -> Paths | None:
        """The folders containing a transcoder's targets, found in the same way as `folders`; None for an SAE."""
        return None if (targets := self._targets(NO_PROMISES)) is None else _local(targets)

    def stored_at(self) -> list[tuple[str, str]]:
        targets = [] if self.targets is None else each(self.targets)
        return [("data.path", one) for one in each(self.folders)] + [(self.target_field, one) for one in targets]

    def shape(self) -> DataShape:
        return self.shape_once_written(NO_PROMISES)

    def shape_once_written(self, promises: Promises) -> DataShape:
        if problems := self._check_hook() or self._check_join():
            raise JobFileError(problems)
        if len(parts := self.parts()) > 1:
            shapes = {part.place: part.shape_once_written(promises) for part in parts}
            return joined_shape(shapes, "data.path", are_matched=all(part._tells_places(promises) for part in parts))
        sets = _sets_once_written(self._folders_of(0, promises), "data.path", promises)
        if self.weights is not None and len(self.weights) != len(sets):
            counts = f"{plural(len(self.weights), 'number')} for {plural(len(sets), 'folder')} of data.path"
            raise JobFileError([Problem("data.weights", f"has {counts}; give one for each")])
        n_tokens = sum(one.n_tokens for one in sets)
        if (targets := self._targets(promises)) is None:
            return DataShape(sets[0].d_in, None, n_tokens)
        return DataShape(sets[0].d_in, self._d_out(targets, sets, promises), n_tokens)

    def usual_hold_out(self) -> HoldOut:
        """Return "texts" if all shards store text numbers, "rows" if the shards are shuffled, and otherwise "blocks".

        Blocks are used for rows that are not shuffled, because neighbouring rows mostly belong to the same text.
        """
        if len(parts := self.parts()) > 1:
            usual = {part.usual_hold_out() for part in parts}
            return usual.pop() if len(usual) == 1 else "blocks"
        sets = inspect_sets(self.folders, "data.path")
        if all(numbers_in(shard) for one in sets for shard in one.shards):
            return "texts"
        return "rows" if all(is_shuffled(one) for one in sets) else "blocks"

    def repeated(self) -> list[Problem]:
        """Report rows given twice, because the same row could then be both trained on and held out."""
        if len(parts := self.parts()) > 1:
            return [problem for part in parts for problem in part.repeated()]
        try:
            twice = same_shards(inspect_sets(self.folders, "data.path"))
        except (JobFileError, OSError):
            return []  # `shape` reports the error, or another job writes the data before this job starts
        if twice is None:
            return []
        first, second = (str(file) for file in twice)
        what = f"{first} is given twice" if first == second else f"{second} is the same file as {first}"
        message = (
            f"{what}, so the run would train on held-out rows; give each once (data.weights can favour one of them)"
        )
        return [Problem("data.path", message)]

    @property
    def target_field(self) -> str:
        """The setting that names the target folders."""
        return "data.path" if self.target_path is None else "data.target_path"

    def places_of(self, end: int) -> Paths:
        """Return the folders or URLs for the hook's input (`end` 0) or output (`end` 1), of all parts."""
        if len(parts := self.parts()) > 1:
            return [place for part in parts for place in each(part.places_of(end))]
        return self._folders_of(end, NO_PROMISES)

    def _folders_of(self, end: int, promises: Promises) -> Paths:
        """Return the folders for the hook's input (`end` 0) or output (`end` 1)."""
        if self.hook is None:
            return self.path
        folders = [_folder_of_hook(path, ends_of(self.hook)[end], promises) for path in each(self.path)]
        return folders[0] if isinstance(self.path, str) else folders

    def _targets(self, promises: Promises) -> Paths | None:
        is_pair = self.hook is not None and is_of_transcoder(self.hook)
        return self._folders_of(1, promises) if is_pair else self.target_path

    def _check_hook(self) -> list[Problem]:
        if self.hook is None:
            return []
        if self.target_path is not None:
            message = (
                "cannot be combined with data.target_path; leave out one of them, or name a whole MLP, like mlp.12"
            )
            return [Problem("data.hook", message)]
        return problems_of_hooks([self.hook], "data.hook")

    def _check_join(self) -> list[Problem]:
        if len(parts := self.parts()) == 1:
            alone = self.join and len(each(self.path)) == 1
            return [Problem("data.join", "needs a list of at least two folders in data.path")] if alone else []
        problems = []
        if self.target_path is not None:
            message = "gives a transcoder's targets, but a crosscoder reconstructs its input; leave it out"
            problems.append(Problem("data.target_path", message))
        if self.join and self.hook is not None:
            problems += check_joined_hook(self.hook)
        if len({os.path.realpath(each(part.folders)[0]) for part in parts}) < len(parts):
            problems.append(Problem("data.path", "joins a folder with itself; name different folders"))
        if self.join and self.weights is not None:
            problems.append(
                Problem("data.weights", "mixes folders, but data.join joins them; leave out one of the two")
            )
        return problems

    def _tells_places(self, promises: Promises) -> bool:
        """Return whether each row's place in the text is recorded and identifies it; every extraction records places.

        Places in several mixed folders are not unique.
        """
        folder, *others = each(self._folders_of(0, promises))
        return not others and (
            is_promised(folder, promises)
            or all(numbers_in(shard, PLACE) for shard in inspect_shards(folder, "data.path").shards)
        )

    def _d_out(self, target_path: Paths, sets: list[ShardSet | Width], promises: Promises) -> int:
        """Return the dimension of the targets; raise `JobFileError` if they do not match the rows."""
        field = self.target_field
        targets = _sets_once_written(target_path, field, promises)
        if len(targets) != len(sets):
            counts = f"has {plural(len(targets), 'folder')}, but data.path has {len(sets)}"
            raise JobFileError([Problem(field, f"{counts}; give one for each, in the same order")])
        paths = zip(each(target_path), each(self._folders_of(0, promises)), strict=True)
        for (of_target, of_input), inputs, outputs in zip(paths, sets, targets, strict=True):
            if outputs.n_tokens != inputs.n_tokens:
                counts = f"has {outputs.n_tokens:,} rows, but {of_input} has {inputs.n_tokens:,}"
                raise JobFileError([Problem(field, f"{of_target} {counts}; every row needs its target")])
        return targets[0].d_in


def joined_shape(parts: Mapping[str, DataShape], field: str, *, are_matched: bool = False) -> DataShape:
    """Return the shape of a crosscoder's rows; raise `JobFileError` if the parts, by name, differ in their rows.

    If rows `are_matched` by their places in the text, a part may have additional rows, which are left out.
    """
    (first, shape), *others = parts.items()
    if are_matched:
        shape = min(parts.values(), key=lambda one: one.n_tokens or 0)
    for name, other in others:
        if other.n_tokens != shape.n_tokens and not are_matched:
            counts = f"{name} has {other.n_tokens or 0:,} rows, but {first} has {shape.n_tokens or 0:,}"
            message = f"{counts}; a crosscoder needs the rows of the same tokens from each, so extract them together"
            raise JobFileError([Problem(field, message)])
    widths = tuple(one.d_in for one in parts.values())
    return DataShape(sum(widths), None, shape.n_tokens, widths)


def check_joined_hook(hook: str) -> list[Problem]:
    """Return a problem if a crosscoder's parts, which are its targets too, are read at a transcoder's hook."""
    if not is_of_transcoder(hook):
        return []
    layer = hook.removeprefix("mlp.")
    ends = f"mlp_in.{layer} or mlp_out.{layer}"
    return [Problem("data.hook", f"{hook} stands for a transcoder, but the parts form a crosscoder; name {ends}")]


def _folder_of_hook(path: str, hook: str, promises: Promises) -> str:
    """Return the folder with a hook's rows: the first folder with one of its names that exists or is promised."""
    folders = [joined(path, name) for name in names_of_hook(hook)]
    return next((one for one in folders if os.path.exists(local_path(one)) or is_promised(one, promises)), folders[0])


def _local(paths: Paths) -> Paths:
    return local_path(paths) if isinstance(paths, str) else [local_path(path) for path in paths]


def each(paths: Paths) -> list[str]:
    """Return a list of paths; a single path becomes a one-element list."""
    return [paths] if isinstance(paths, str) else paths


def inspect_sets(paths: Paths, field: str) -> list[ShardSet]:
    """Read the headers of one or several folders of shards; raise `JobFileError` for the setting `field`."""
    return _alike(paths, field, lambda path: inspect_shards(path, field))


def _sets_once_written(paths: Paths, field: str, promises: Promises) -> list[ShardSet | Width]:
    return _alike(paths, field, lambda path: promised(path, promises, field) or inspect_shards(path, field))


def _alike(paths: Paths, field: str, inspect: Callable[[str], S]) -> list[S]:
    """Inspect each path; raise `JobFileError` if there is no path, or if the row dimensions differ."""
    if not paths:
        raise JobFileError([Problem(field, "is an empty list; name a folder of shards")])
    sets = [inspect(path) for path in each(paths)]
    for path, one in zip(each(paths), sets, strict=True):
        if one.d_in != sets[0].d_in:
            message = f"{path} has d_in {one.d_in}, but {each(paths)[0]} has {sets[0].d_in}"
            raise JobFileError([Problem(field, f"{message}; all mixed folders must have the same width")])
    return sets


# The maximum number of values in the directions of all synthetic features (4 GB in fp32).
MOST_SYNTHETIC = 10**9
# The largest mean number of times that a feature without a parent is drawn per row. With this number, the feature fires
# on 95 % of the rows; the number of draws grows without bound as this share approaches 1.
MOST_DRAWS = 3.0
# Of a row's features without a parent, the share that is chosen from the row's topic.
SHARE_OF_TOPIC = 0.5
# The maximum share of a parent's firings on which a child also fires; with a larger share, the two could not be
# distinguished.
MOST_GIVEN_PARENT = 0.5


class SyntheticSettings(SourceSettings, frozen=True):
    """Rows generated from a known sparse dictionary (Sharkey et al. 2022, "Taking features out of superposition").

    Trees are from Bussmann et al. 2025, "Learning multi-level features with Matryoshka sparse autoencoders".
    """

    d_in: Annotated[int, about("Width of a row.", unit="dimensions", ge=1)] = 64
    n_features: Annotated[
        int, about("Number of feature directions, whose sums are the rows.", unit="features", ge=1)
    ] = 256
    active: Annotated[float, about("Mean number of active features per row.", unit="features", gt=0)] = 5.0
    skew: Annotated[
        float, about("Zipf exponent of the feature frequencies; 0: all equally frequent.", advanced=True, ge=0)
    ] = 0.5
    children: Annotated[
        int,
        about(
            "Children of a feature in trees of three levels (the last few features form a fourth); a child fires only"
            " with its parent. 0: no trees.",
            unit="features",
            advanced=True,
            ge=0,
            le=64,
        ),
    ] = 0
    topics: Annotated[
        int,
        about(
            "Groups of features that fire together: half of a row's features are from one group. 0: independent.",
            advanced=True,
            ge=0,
            le=1024,
        ),
    ] = 0
    noise: Annotated[float, about("Standard deviation of the noise added to every value.", advanced=True, ge=0)] = 0.0
    n_rows: Annotated[int, about("Number of rows before they repeat.", unit="tokens", ge=1)] = 10_000_000
    data_seed: Annotated[int, about("Seed of the features and of all rows.", advanced=True, ge=0)] = 0

    @property
    def place(self) -> str:
        return f"synthetic data of {self.n_features:,} features"

    @property
    def n_roots(self) -> int:
        """The number of features without a parent."""
        return max(1, self.n_features // (1 + self.children + self.children**2))

    @property
    def most_active(self) -> float:
        """The mean number of active features if all fire as often as `Synthetic` allows, rounded down to 4 digits."""
        share = 1 / max(1, self.topics)
        inside = MOST_DRAWS * (1 - SHARE_OF_TOPIC + SHARE_OF_TOPIC / share)
        outside = MOST_DRAWS * (1 - SHARE_OF_TOPIC)
        fires = -share * math.expm1(-inside) - (1 - share) * math.expm1(-outside)
        found, left, level = 0.0, self.n_features, self.n_roots
        while left:
            level = min(left, level)
            found, left = found + fires * level, left - level
            fires, level = fires * MOST_GIVEN_PARENT, level * max(1, self.children)
        digits = 10.0 ** (3 - math.floor(math.log10(found)))
        return math.floor(found * digits) / digits

    def shape(self) -> DataShape:
        if self.topics > self.n_roots:
            which = "features without a parent" if self.children else "features"
            raise JobFileError([Problem("data.topics", f"must be at most the number of {which}, {self.n_roots:,}")])
        if self.active > self.most_active:
            message = (
                f"must be at most {self.most_active:.4g} with these features, trees and topics, not {self.active:g}"
            )
            raise JobFileError([Problem("data.active", message)])
        if self.d_in * self.n_features > MOST_SYNTHETIC:
            most = MOST_SYNTHETIC // self.d_in
            message = f"must be at most {most:,} for width {self.d_in}, not {self.n_features:,}, to fit into memory"
            raise JobFileError([Problem("data.n_features", message)])
        return DataShape(self.d_in, None, self.n_rows)
