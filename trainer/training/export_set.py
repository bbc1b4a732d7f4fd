"""Exports transcoders from one or more runs, one for each model layer, as a transcoder set for circuit-tracer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from trainer.checkpoints.checkpoint import load, usable
from trainer.contract.errors import UsageError
from trainer.contract.paths import RunPaths
from trainer.contract.runs.checkpoint_manifest import read_state
from trainer.contract.runs.run_job import load_run_job
from trainer.contract.settings import catalog
from trainer.sharing.base import SharedSae
from trainer.sharing.circuit_tracer import CircuitTracer, layer_of, member_of, notes_of_set, refusal_of_set
from trainer.training.export_checkpoint import (
    checkpoint_of,
    kept_in,
    labels_of,
    notes_on_unfinished,
    output_of,
    refuse_to_overwrite,
    refuse_where_none_fits,
    shared_saes,
)


def is_set(paths: Sequence[Path], form: str) -> bool:
    """Return whether an export is a set of SAEs: it covers several runs, or several hooks in circuit-tracer's format.

    Raise `UserError` if a path is not a run.
    """
    if len(paths) > 1:
        return True
    if catalog.entry(catalog.FORMATS, form, "--format").load() is not CircuitTracer:
        return False
    run_dir, _ = checkpoint_of(paths[0].absolute(), best=False)
    return len(load_run_job(RunPaths(run_dir).job_file).hooks) > 1


def export_set(
    paths: Sequence[Path], out: Path, *, form: str, best: bool, force: bool, only: Sequence[str] = ()
) -> dict[str, Any]:
    """Write the transcoders from runs or checkpoints to one folder; return the folder, the steps by layer, and notes.

    With `only`, just the transcoders with these labels are written. Transcoders that the format cannot represent are
    left out, with a note. Raise `UserError`, and write nothing, if the remaining transcoders do not form a set.
    """
    chosen = catalog.entry(catalog.FORMATS, form, "--format").load()()
    if not isinstance(chosen, CircuitTracer):
        raise UsageError("--format: only circuit-tracer accepts a set of several runs; export each run separately")
    out = out.resolve() if out.is_symlink() else out.absolute()
    refuse_to_overwrite(out, {"": out}, force)
    checkpoints = [checkpoint_of(path.absolute(), best) for path in paths]
    if only and len(paths) > 1:
        raise UsageError("--only: selects SAEs of a single run; leave it out, or export one run")
    members, steps, left_out, asked = [], {}, {}, []
    for name, step, sae in _transcoders(checkpoints, only):
        asked.append(name)
        if reason := chosen.refusal(sae):
            left_out[name] = reason
            continue
        members.append(member_of(sae))
        steps[sae.layer.number if sae.layer else layer_of(sae)] = step
    refuse_where_none_fits(form, left_out, asked)
    if reason := refusal_of_set(members):
        raise UsageError(f"--format: {reason}")
    chosen.write_set((sae for name, _, sae in _transcoders(checkpoints, only) if name not in left_out), out)
    unfinished = [
        f"{run_dir.name}: {note}" if len(checkpoints) > 1 else note
        for run_dir, checkpoint in checkpoints
        for note in notes_on_unfinished(run_dir, load_run_job(RunPaths(run_dir).job_file), read_state(checkpoint))
    ]
    return {
        "checkpoints": [str(checkpoint) for _, checkpoint in checkpoints],
        "output_path": str(out),
        "layers": steps,
        **({"left_out": left_out} if left_out else {}),
        "notes": [
            *(f"{name} is not written: {reason}" for name, reason in left_out.items()),
            *unfinished,
            *notes_of_set(members),
        ],
    }


def _transcoders(checkpoints: Sequence[tuple[Path, Path]], only: Sequence[str]) -> Iterator[tuple[str, int, SharedSae]]:
    """Yield the name, step and SAE of each transcoder, one at a time, since they may not all fit in memory."""
    for run_dir, checkpoint in checkpoints:
        job = load_run_job(RunPaths(run_dir).job_file)
        (tensors, position), state = load(checkpoint), read_state(checkpoint)
        with usable(checkpoint):
            labels = labels_of(job, only, kept_in(output_of(run_dir), position), state.halved.dropped)
            for label, sae in shared_saes(run_dir, job, tensors, state, None, labels):
                name = " ".join(word for word in (run_dir.name if len(checkpoints) > 1 else "", label) if word)
                yield name, position.step, sae
