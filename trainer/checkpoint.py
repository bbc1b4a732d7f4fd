"""Checkpoints: a folder `step-00000500` of safetensors and JSON with a manifest of sizes and sums."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from trainer.contract.problems import UserError
from trainer.files import replaced_folder, write_json, write_tensors

KEEP = 2
MANIFEST = "manifest.json"
_WEIGHTS, _MOMENTS, _RANDOM, _STATE = "weights.safetensors", "optimizer.safetensors", "random.safetensors", "state.json"


class Position(msgspec.Struct, frozen=True):
    """Where a run is; `tokens` over all ranks is also the place in the order of the data."""

    step: int
    tokens: int


class Checkpoints:
    """The checkpoints of one run; the newest two are kept, so that a damaged one does not lose the run."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def save(self, sae: nn.Module, optimizer: torch.optim.Optimizer, position: Position) -> Path:
        """Writes a checkpoint whole or not at all; raises `UserError` where the disk does not take it."""
        target = self._folder / f"step-{position.step:08d}"
        with replaced_folder(target) as temporary:
            write_tensors(temporary / _WEIGHTS, dict(sae.state_dict()))
            write_tensors(temporary / _MOMENTS, _moments(sae, optimizer))
            write_tensors(temporary / _RANDOM, _random_state())
            write_json(temporary / _STATE, msgspec.structs.asdict(position))
            write_json(temporary / MANIFEST, _manifest(temporary))
        for older in _newest_first(self._folder)[KEEP:]:
            shutil.rmtree(older, ignore_errors=True)
        return target


def load(path: Path, sae: nn.Module, optimizer: torch.optim.Optimizer) -> Position:
    """Puts back a checkpoint, or the newest whole one of a folder of them; raises `UserError` where none fits."""
    folder = _whole(path)
    try:
        sae.load_state_dict(load_file(folder / _WEIGHTS))
    except RuntimeError as error:
        reason = str(error).splitlines()[-1].strip()
        raise UserError(f"the checkpoint {folder} does not fit this job's SAE: {reason}") from error
    _set_moments(sae, optimizer, load_file(folder / _MOMENTS))
    _set_random_state(load_file(folder / _RANDOM))
    return msgspec.json.decode((folder / _STATE).read_bytes(), type=Position)


def _whole(path: Path) -> Path:
    candidates = _newest_first(path) or [path]
    reasons = {}
    for folder in candidates:
        reasons[folder] = damage(folder)
        if reasons[folder] is None:
            return folder
    newest = candidates[0]
    raise UserError(f"the checkpoint {newest} cannot be used: {reasons[newest]}; resume from another one")


def _newest_first(folder: Path) -> list[Path]:
    numbers = {found: found.name.removeprefix("step-") for found in folder.glob("step-*")}
    # By number: beyond 8 digits the names no longer sort like it.
    return sorted((found for found in numbers if numbers[found].isdecimal()), key=lambda found: -int(numbers[found]))


def damage(folder: Path) -> str | None:
    """What is wrong with a checkpoint by its manifest; None where it is whole."""
    try:
        expected = json.loads((folder / MANIFEST).read_text())["files"]
        for name, file in expected.items():
            if _describe(folder / name) != file:
                return f"{name} is not as it was written"
    except (OSError, ValueError, KeyError) as error:
        return f"its {MANIFEST} or a file in it cannot be read ({error})"
    return None


def _manifest(folder: Path) -> dict[str, Any]:
    return {"format": 1, "files": {file.name: _describe(file) for file in sorted(folder.iterdir())}}


def _describe(file: Path) -> dict[str, Any]:
    with file.open("rb") as stream:
        return {"bytes": file.stat().st_size, "sha256": hashlib.file_digest(stream, "sha256").hexdigest()}


def _moments(sae: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Adam's tensors as `exp_avg.W_enc`; before the first step there are none."""
    return {
        f"{kind}.{name}": value
        for name, parameter in sae.named_parameters()
        for kind, value in optimizer.state.get(parameter, {}).items()
    }


def _set_moments(sae: nn.Module, optimizer: torch.optim.Optimizer, moments: dict[str, Tensor]) -> None:
    for name, parameter in sae.named_parameters():
        of_parameter = {key.partition(".")[0]: value for key, value in moments.items() if key.partition(".")[2] == name}
        if of_parameter:
            # A fused Adam keeps its step count beside the parameters.
            optimizer.state[parameter] = {kind: value.to(parameter.device) for kind, value in of_parameter.items()}


def _random_state() -> dict[str, Tensor]:
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def _set_random_state(states: dict[str, Tensor]) -> None:
    torch.set_rng_state(states["cpu"])
    if "cuda" in states and torch.cuda.is_initialized():
        torch.cuda.set_rng_state(states["cuda"])
