"""Finds the SAE in a folder, file or hub repository; if there is none, the error lists the files found there."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from trainer.contract.errors import UsageError
from trainer.contract.hub_cache import plain_file
from trainer.contract.printable import printable
from trainer.contract.settings import catalog
from trainer.contract.wording import join_words
from trainer.sharing import from_hub
from trainer.sharing.base import NOTHING_GIVEN, Format, Given, SharedSae, count_saes, format_in, format_named
from trainer.sharing.circuit_tracer import layer_file
from trainer.sharing.reading import positive, with_row_scale

# Limits for the search under a folder: the number of folders and the depth.
_MOST_FOLDERS, _DEEPEST = 5000, 6
# The maximum number of file names in a message.
_MOST_NAMES = 6
_CHECKPOINT = re.compile(r"ae_[0-9]+\.pt")


class FoundSae(NamedTuple):
    """A readable SAE: the name of its format, and its folder or file."""

    form: str
    place: Path

    @property
    def reader(self) -> Format:
        return format_named(self.form)

    def read(self, given: Given = NOTHING_GIVEN) -> SharedSae:
        """Read the SAE and apply the user's `norm_scaling_factor` to its rows.

        The SAELens reader applies this factor itself, because SAELens has a setting of that name.
        """
        shared, said = self.reader.read(self.place, given), given.config.get("norm_scaling_factor")
        if self.form == "saelens" or said is None:
            return shared
        factor = positive(said)
        if shared.is_transcoder or factor is None:
            raise UsageError(
                f"--config norm_scaling_factor: must be a number above 0, and is only for SAEs, not {said!r}"
            )
        return shared._replace(weights=with_row_scale(shared.weights, factor))


def find(name: Path, form: str | None = None) -> FoundSae:
    """Return the SAE at a path or under a name on the hub; `form` is the format, or None to detect it from the files.

    Raise `UsageError` if there is no SAE; the message lists the expected files and the files found.
    """
    return in_folder(name if os.path.lexists(name) else from_hub.fetch(str(name)) or name, form)


def in_folder(place: Path, form: str | None = None) -> FoundSae:
    """Return the SAE in a local folder or file; see `find`."""
    if form is not None:
        catalog.entry(catalog.FORMATS, form, "--format")
        if format_named(form).recognises(place):
            return FoundSae(form, place)
    found = format_in(place)
    if found is None:
        raise UsageError(f"FOLDER: {_nothing(place, form)}")
    if form is not None:
        raise UsageError(f"--format: {place} contains an SAE in the format {found}, not {form}; leave out --format")
    return FoundSae(found, place)


def saes_below(folder: Path) -> list[Path]:
    """Return the folders and files of all SAEs under a folder, in natural order (layers.2 before layers.10)."""
    return sorted(_below(folder), key=lambda place: [_natural(part) for part in place.parts])


def _nothing(place: Path, form: str | None) -> str:
    if not os.path.lexists(place):
        hub = f"hf:{place}" if from_hub.parse(str(place)) else "the OWNER/NAME/FOLDER"
        return f"there is nothing at {place}; give a folder or a file, or {hub} for an SAE on the hub"
    if not place.is_dir():
        return f"{place} is not an SAE file that can be imported; give its folder"
    if refused := _refused(place):
        return f"{place} contains no SAE: {refused}"
    if below := saes_below(place):
        return f"{place} contains {count_saes([str(one.relative_to(place)) for one in below])}; give the path of one"
    forms = [form] if form else catalog.READ_FORMATS
    wanted = [f"{' + '.join(names)} ({one})" for one in forms for names in format_named(one).reads]
    return f"{place} contains no SAE; expected {join_words(wanted)}; found {_listed(place)}"


def _refused(folder: Path) -> str:
    """Return why a file in a complete SAE cannot be read, usually because it is a link; "" if there is no such SAE."""
    for names in (names for form in catalog.READ_FORMATS for names in format_named(form).reads):
        if not all(os.path.lexists(folder / name) for name in names):
            continue
        for name in names:
            try:
                if not plain_file(folder / name).is_file():
                    return f"{name} is not a plain file"
            except ValueError as error:
                return f"{name} {error}"
            except (OSError, RuntimeError):
                return f"{name} is a symbolic link to a missing file; download it again"
    return ""


def _listed(folder: Path) -> str:
    try:
        names = sorted(os.listdir(folder), key=_natural)
    except OSError as error:
        return f"nothing, since the folder cannot be read: {error.strerror}"
    shown = [printable(name)[:60] for name in names[:_MOST_NAMES]]
    rest = [f"{len(names) - len(shown)} more"] if len(names) > len(shown) else []
    return join_words([*shown, *rest]) if names else "no file"


def _below(folder: Path) -> Iterator[Path]:
    for parent, folders, files in itertools.islice(os.walk(folder), _MOST_FOLDERS):
        here = Path(parent)
        if len(here.relative_to(folder).parts) >= _DEEPEST:
            folders.clear()
        if format_in(here):
            yield here
        else:
            yield from (file for name in files if (file := here / name) and _is_alone(file))


def _is_alone(file: Path) -> bool:
    """Return whether a single file contains an SAE: a checkpoint, or a layer of a set."""
    return bool(_CHECKPOINT.fullmatch(file.name) or layer_file(file)) and format_in(file) is not None


def _natural(text: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"([0-9]{1,18})", text)]
