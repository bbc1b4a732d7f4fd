"""Downloads SAEs by name from the Hugging Face hub into the hub client's cache."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path, PurePath, PurePosixPath
from typing import Any, NamedTuple

from trainer.contract.errors import UsageError, UserError, first_line
from trainer.contract.output import complain
from trainer.contract.settings import catalog
from trainer.sharing.base import count_saes, format_named
from trainer.sharing.circuit_tracer import LAYER_FILE
from trainer.sharing.hub import hub_client

_PART = r"[A-Za-z0-9_][\w.-]*"
_NAME = re.compile(rf"(hf:/*)?({_PART}/{_PART})(?:@({_PART}))?((?:/{_PART})*)/?", re.ASCII)
# The timeout for a hub request, in seconds.
_TIMEOUT_S = 15


class HubName(NamedTuple):
    """An SAE's name on the hub: a repository, a revision, and a folder or file in the repository."""

    repository: str
    revision: str | None
    path: str


def parse(text: str) -> HubName | None:
    """Parse [hf:]OWNER/NAME[@REVISION][/FOLDER]; return None for any other string."""
    match = _NAME.fullmatch(text)
    return HubName(match[2], match[3], match[4].strip("/")) if match and ".." not in text else None


def fetch(text: str) -> Path | None:
    """Return the cached path of an SAE on the hub, downloading it if necessary; None if `text` is not a hub name.

    Raise `UsageError` if the hub has no such SAE and `UserError` if the hub cannot be reached.
    """
    name = parse(text)
    if name is None or _is_mistyped_path(text):
        return None
    hub = hub_client(f"FOLDER: there is nothing at {text}, and a download from the hub requires its client")
    cached = _cached(hub, name)
    # Caching an SAE also creates its parent folders, so a folder is considered cached only if it contains weights.
    if cached is not None and (cached.is_file() or any(map(_is_weights, _files(cached)))):
        return cached
    try:
        return _download(hub, name)
    except UserError:
        raise
    except Exception as error:
        if cached is not None:
            return cached
        # `error` may come from the client, from HTTP or from the disk.
        raise UserError(f"FOLDER: there is nothing at {text}, and {_reason(name, error)}") from None


def _is_mistyped_path(text: str) -> bool:
    """Return whether a name is probably a mistyped path, such as `saes/9` if there is a local folder `saes`."""
    return not text.startswith("hf:") and Path(text.partition("/")[0]).is_dir()


def _cached(hub: Any, name: HubName) -> Path | None:
    """Return the cached folder or file for a hub name, or None if it is not in the cache."""
    try:
        folder = Path(hub.snapshot_download(name.repository, revision=name.revision, local_files_only=True))
    except Exception:
        # The error type depends on the client version.
        return None
    return place if (place := folder / name.path).exists() else None


def _files(folder: Path) -> list[Path]:
    return [one for one in folder.iterdir() if one.is_file()] if folder.is_dir() else []


def _download(hub: Any, name: HubName) -> Path:
    # `list_repo_files` would list the same files, but it retries many times if there is no network.
    info = hub.HfApi().model_info(name.repository, revision=name.revision, timeout=_TIMEOUT_S)
    there = [PurePosixPath(one.rfilename) for one in info.siblings or ()]
    path = PurePosixPath(name.path)
    if path in there:
        wanted = [path, *(one for one in there if one.name.startswith("config.") and one.parent in path.parents)]
    else:
        wanted = [one for one in there if one.parent == path and _is_of_sae(one.name)]
    if not any(_is_weights(one) for one in wanted):
        raise UsageError(f"FOLDER: {_elsewhere(name, there)}")
    if sum(bool(LAYER_FILE.fullmatch(one.name)) for one in wanted) > 1:
        raise UsageError(f"FOLDER: {name.repository} has a file for each layer; give one, such as {wanted[0]}")
    if any(one.name == "cfg.json" for one in wanted):
        # sparsify stores the run's settings in a parent folder.
        wanted += [one for one in there if one.name == "config.json" and one.parent in path.parents]
    for number, one in enumerate(wanted, start=1):
        complain(f"{name.repository}: file {number} of {len(wanted)}, {one}\n")
        file = Path(hub.hf_hub_download(name.repository, str(one), revision=name.revision))
    return file.parents[len(one.parts) - 1] / name.path


def _is_of_sae(name: str) -> bool:
    sets = (names for form in catalog.READ_FORMATS for names in format_named(form).reads)
    return LAYER_FILE.fullmatch(name) is not None or any(name in names for names in sets)


def _is_weights(file: PurePath) -> bool:
    return file.suffix in (".safetensors", ".pt", ".npz") and (_is_of_sae(file.name) or "ae_" in file.name)


def _elsewhere(name: HubName, there: Iterable[PurePosixPath]) -> str:
    below = [one for one in there if one.is_relative_to(name.path) and _is_weights(one)]
    folders = list(dict.fromkeys(str(one.parent) for one in below))
    what = f"{name.repository}/{name.path}".rstrip("/")
    if not folders:
        return f"{what} on the hub contains no SAE that can be imported"
    return f"{what} contains {count_saes(folders)}; give {name.repository}/FOLDER"


def _reason(name: HubName, error: Exception) -> str:
    """Return why an SAE cannot be downloaded and how to fix it."""
    kinds = {kind.__name__ for kind in type(error).__mro__}
    if "GatedRepoError" in kinds:
        where = f"https://huggingface.co/{name.repository}"
        return f"{name.repository} is gated on the hub; accept its licence at {where} and log in with `hf auth login`"
    if "RepositoryNotFoundError" in kinds:
        return f"the hub has no model {name.repository} you can access; check the name, or log in with `hf auth login`"
    if "RevisionNotFoundError" in kinds:
        return f"{name.repository} has no revision {name.revision} on the hub; leave it out"
    why = "HF_HUB_OFFLINE is set" if "OfflineModeIsEnabled" in kinds else first_line(error)
    return f"the hub cannot be reached ({why}); run `hf download {name.repository}` once it can be reached"
