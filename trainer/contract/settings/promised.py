"""Rows that another job is still to write: what a job that comes after it is checked against."""

from __future__ import annotations

import os
from collections.abc import Mapping

import msgspec

from trainer.contract.errors import JobFileError, Problem
from trainer.contract.wording import join_words


class Promise(msgspec.Struct, frozen=True):
    """The rows that a folder is to hold, and who writes them, like "job 3"; `d_in` is None where only they will tell.

    A stored set of shards has a width and a number of rows by the same names.
    """

    d_in: int | None
    n_tokens: int
    by: str


# By the real path of the folder.
Promises = Mapping[str, Promise]
NO_PROMISES: Promises = {}


class Width(msgspec.Struct, frozen=True):
    """A promise whose width is known, as it stands for a folder of shards."""

    d_in: int
    n_tokens: int


def is_promised(path: str, promises: Promises) -> bool:
    """Return whether somebody is to write a folder."""
    return _place(path) in promises


def promised(path: str, promises: Promises, field: str) -> Width | None:
    """Return what a folder is to hold; None where nobody is to write it.

    Raise `JobFileError` naming `field` where the width of its rows is not known, or where it is to hold only folders.
    """
    place = _place(path)
    if promise := promises.get(place):
        if promise.d_in is None:
            message = f"{promise.by} has yet to write {path}, and only its rows tell how wide they are"
            raise JobFileError([Problem(field, f"{message}; launch this once that has finished")])
        return Width(promise.d_in, promise.n_tokens)
    if inside := sorted(folder for folder in promises if os.path.dirname(folder) == place):
        names = join_words([os.path.basename(folder) for folder in inside])
        message = f"{promises[inside[0]].by} writes a folder for every hook in {path}; give one of them: {names}"
        raise JobFileError([Problem(field, message)])
    return None


def _place(path: str) -> str:
    return os.path.realpath(os.path.expanduser(path))
