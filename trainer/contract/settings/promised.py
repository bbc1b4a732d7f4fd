"""Describes rows that a job has yet to write, so that jobs reading these rows can be checked in advance."""

from __future__ import annotations

import os
from collections.abc import Mapping

import msgspec

from trainer.contract.errors import JobFileError, Problem
from trainer.contract.object_paths import local_path
from trainer.contract.wording import join_words


class Promise(msgspec.Struct, frozen=True):
    """A folder's future rows, and the job that will write them, such as "job 3".

    `d_in` is None if the dimension is not known yet. Like `ShardSet`, it has attributes `d_in` and `n_tokens`.
    """

    d_in: int | None
    n_tokens: int
    by: str


# Maps the real path of each folder to its promise.
Promises = Mapping[str, Promise]
NO_PROMISES: Promises = {}


class Width(msgspec.Struct, frozen=True):
    """The shape of promised rows with a known dimension, used in place of a folder of shards."""

    d_in: int
    n_tokens: int


def is_promised(path: str, promises: Promises) -> bool:
    """Return whether a job will write rows to a folder."""
    return _place(path) in promises


def promised(path: str, promises: Promises, field: str) -> Width | None:
    """Return the shape of a folder's future rows, or None if no job will write the folder.

    Raise `JobFileError` for the setting `field` if the dimension of the rows is unknown, or if the folder will contain
    only subfolders.
    """
    place = _place(path)
    if promise := promises.get(place):
        if promise.d_in is None:
            message = f"{promise.by} has yet to write {path}, and the width of its rows is not known until then"
            raise JobFileError([Problem(field, f"{message}; launch this job after that job has finished")])
        return Width(promise.d_in, promise.n_tokens)
    if inside := sorted(folder for folder in promises if os.path.dirname(folder) == place):
        names = join_words([os.path.basename(folder) for folder in inside])
        message = f"{promises[inside[0]].by} writes a folder for every hook in {path}; give one of them: {names}"
        raise JobFileError([Problem(field, message)])
    return None


def _place(path: str) -> str:
    return os.path.realpath(os.path.expanduser(local_path(path)))
