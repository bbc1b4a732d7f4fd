"""Uploads files to a model repository on the Hugging Face hub, only at the user's request."""

from __future__ import annotations

import contextlib
import importlib
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from trainer.contract.errors import UsageError, UserError, first_line
from trainer.contract.extras import install
from trainer.sharing.base import MODEL_CARD

_NAME = re.compile(r"[A-Za-z0-9]([\w.-]*[A-Za-z0-9_])?", re.ASCII)


class Repository:
    """An upload's target repository; `has_card` says whether it already has a model card.

    The constructor requests only the user's name and the repository's files, and changes nothing on the hub. It raises
    `UsageError` if an upload is impossible, and `UserError` if the hub does not respond.
    """

    def __init__(self, name: str, *, public: bool) -> None:
        _require_name(name)
        self._hub, self._token = _client()
        self._api = self._hub.HfApi(token=self._token)
        self.is_public = public
        with self._explained("a request to the hub"):
            user = self._user()
            self.name = name if "/" in name else f"{user}/{name}"
            there = self._look()
        self.url = f"{self._api.endpoint}/{self.name}"
        self.is_new = there is None
        self.has_card = there is not None and any(one.rfilename == MODEL_CARD for one in there.siblings or ())
        if there is not None and bool(there.private) == public:
            way_out = "is already private; leave out --public" if public else "is already public; add --public"
            raise UsageError(f"--push: {self.url} {way_out}, or choose another name")

    def send(self, files: Mapping[str, Path | bytes]) -> None:
        """Upload all files in one commit; raise `UserError` on failure.

        `files` maps each file name in the repository to the file's path or content.
        """
        added = [
            self._hub.CommitOperationAdd(path_in_repo=name, path_or_fileobj=content) for name, content in files.items()
        ]
        with self._explained(f"uploading to {self.url}"):
            if self.is_new:
                self._api.create_repo(self.name, private=not self.is_public)
            self._api.create_commit(self.name, added, commit_message="Upload an SAE from sae-tui")

    def _user(self) -> str:
        try:
            return str(self._api.whoami()["name"])
        except self._hub.errors.HfHubHTTPError as error:
            if error.response.status_code != 401:
                raise
            raise UsageError("--push: the hub does not accept your token; log in again with `hf auth login`") from None

    def _look(self) -> Any:
        """Return the hub's information about the repository, or None if it does not exist or the user cannot see it."""
        try:
            return self._api.repo_info(self.name)
        except self._hub.errors.RepositoryNotFoundError:
            return None

    @contextlib.contextmanager
    def _explained(self, doing: str) -> Iterator[None]:
        """Convert client, HTTP and upload thread errors to a `UserError`."""
        try:
            yield
        except UserError:
            raise
        except Exception as error:
            raise UserError(f"--push: {doing} failed: {_reason(error).replace(self._token, '…')}") from None


def _require_name(name: str) -> None:
    parts = name.split("/")
    is_name = len(parts) <= 2 and all(_NAME.fullmatch(part) for part in parts) and len(name) <= 96
    if not is_name or "--" in name or ".." in name or name.endswith(".git"):
        raise UsageError(
            f'--push: "{name[:60]}" is not a repository name; use NAME or OWNER/NAME with letters, digits, -, _, .'
        )


def hub_client(missing: str) -> Any:
    """Return the hub's client module; if it is not installed, raise `UsageError` with `missing` and the remedy."""
    try:
        hub: Any = importlib.import_module("huggingface_hub")
        for part in ("constants", "errors", "utils"):
            importlib.import_module(f"huggingface_hub.{part}")
    except ImportError:
        raise UsageError(f"{missing}; {install('hf')}") from None
    # The client's retry warnings contain signed URLs, which grant access to anyone who reads the log.
    hub.utils.logging.set_verbosity_error()
    return hub


def _client() -> tuple[Any, str]:
    """Return the hub's client and the user's token; raise `UsageError` if either is missing."""
    hub = hub_client("--push: requires the hub's client")
    if hub.constants.HF_HUB_OFFLINE:
        raise UsageError("--push: HF_HUB_OFFLINE is set, so nothing is uploaded; unset it")
    token = hub.get_token()
    if not token:
        raise UsageError("--push: you are not logged in to the Hugging Face hub; run `hf auth login`")
    if not sys.stderr.isatty():
        hub.utils.disable_progress_bars()
    return hub, token


def _reason(error: BaseException) -> str:
    """Return why a request failed, on one line and without the URL: an upload's signed URL would grant access."""
    if isinstance(error, RuntimeError) and error.__cause__:
        # The client wraps errors from its upload threads in a RuntimeError.
        error = error.__cause__
    response = getattr(error, "response", None)
    if response is None:
        return first_line(error)
    answer = getattr(error, "server_message", None)
    words = f", {first_line(Exception(answer))}" if answer else ""
    right = "; the token needs write access" if response.status_code in (401, 403) else ""
    return f"HTTP {response.status_code}{words}{right}"
