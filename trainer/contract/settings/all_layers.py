"""Expands hooks without a layer, such as "mlp" or "resid_post", to all layers in the model or the data folders."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from trainer.contract.settings.hooks import all_named, both_ends, ends_of, is_of_all_layers, parse_hook
from trainer.contract.settings.model_size import model_size

Table = Mapping[str, Any]
# Returns a site's layers.
_LayersOf = Callable[[str], Sequence[int]]


def of_training(raw: Table, bases: Sequence[Path]) -> Table:
    """Return the table from a training job file, with each hook that names no layer replaced by one hook per layer.

    If no layers are known, the table is returned unchanged.

    A relative path is resolved against the first of `bases` that contains it.
    """
    data = raw.get("data")
    if not isinstance(data, Mapping) or not _asks(hooks := all_named(data.get("hook"))):
        return raw
    if data.get("source") == "model":
        models = data.get("model")
        each = [
            _layers_of_model(model, data.get("revision"), bases)
            for model in (models if isinstance(models, list) else [models])
        ]
        of_all = min(each, key=len, default=range(0))
        named = _each_layer(hooks, lambda _: of_all)
    else:
        paths = data.get("path")
        folders = [_place(path, bases) for path in (paths if isinstance(paths, list) else [paths])]
        named = _each_layer(hooks, lambda site: _layers_in(folders, site))
    return {**raw, "data": {**data, "hook": named}}


def of_extraction(raw: Table, bases: Sequence[Path]) -> Table:
    """Return the table from an extraction job file with its hooks expanded: ranges, both ends of MLPs, all layers."""
    model = raw.get("model")
    given = model.get("hooks") if isinstance(model, Mapping) else None
    if not isinstance(model, Mapping) or not isinstance(given, list) or not given:
        return raw
    hooks = all_named(given)
    if _asks(hooks):
        of_model = _layers_of_model(model.get("path"), model.get("revision"), bases)
        hooks = _each_layer(hooks, lambda _: of_model)
    return {**raw, "model": {**model, "hooks": [end for hook in hooks for end in both_ends(hook)]}}


def _asks(hooks: Sequence[Any]) -> bool:
    return any(is_of_all_layers(hook) for hook in hooks)


def _each_layer(hooks: Sequence[Any], layers_of: _LayersOf) -> list[Any]:
    named: list[Any] = []
    for hook in hooks:
        layers = layers_of(hook) if is_of_all_layers(hook) else ()
        named += [f"{hook}.{layer}" for layer in layers] or [hook]
    return named


def _layers_of_model(path: Any, revision: Any, bases: Sequence[Path]) -> range:
    if not isinstance(path, str):
        return range(0)
    place = _place(path, bases)
    size = model_size(place if os.path.exists(place) else path, revision if isinstance(revision, str) else None)
    return range(size.n_layers if size else 0)


def _layers_in(folders: Sequence[str], site: str) -> list[int]:
    """Return the layers for which every extraction folder contains rows for a site; for "mlp", rows for both ends."""
    sites = {parse_hook(end).site for end in ends_of(f"{site}.0")}
    of_each = [_stored(folder, one) for folder in folders for one in sites]
    return sorted(set.intersection(*of_each)) if of_each else []


def _stored(folder: str, site: str) -> set[int]:
    layers = set()
    with contextlib.suppress(OSError):
        for name in os.listdir(folder):
            with contextlib.suppress(ValueError):
                hook = parse_hook(name)
                layers |= {hook.layer} if hook.site == site else set()
    return layers


def _place(path: Any, bases: Sequence[Path]) -> str:
    """Return an absolute path, resolved against the first base folder in which the path exists."""
    candidates = [os.path.abspath(base / os.path.expanduser(str(path))) for base in bases]
    return next(filter(os.path.exists, candidates), candidates[0])
