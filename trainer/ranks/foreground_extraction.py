"""The `extract` command: chooses the devices, shows progress, stops on a signal and prints the result."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import torch
from tqdm import tqdm

from trainer.contract.errors import UsageError
from trainer.contract.json_file import read_json
from trainer.contract.output import complain, show_text
from trainer.contract.paths import RunPaths, private_folder, refuse_link
from trainer.contract.planning.check_job import chosen_indices, wanted_ranks
from trainer.contract.planning.gpu_vendors import VENDORS
from trainer.contract.printable import printable_lines
from trainer.contract.process import STOP_SIGNALS
from trainer.contract.runs.lock import RunLock
from trainer.contract.runs.rank_spec import EXIT_FINISHED, EXIT_STOPPED, RankSpec
from trainer.contract.settings.declare import show
from trainer.contract.settings.extract import ExtractJob
from trainer.contract.settings.hook_names import other_names
from trainer.contract.wording import join_words, plural
from trainer.extraction.extraction import ExtractionResult, extract, result_of
from trainer.extraction.peers import Alone
from trainer.extraction.state import stored_state
from trainer.extraction.uploads import METER, restore_progress
from trainer.ranks.device_choice import chosen, here
from trainer.ranks.devices import Device, torch_vendor, visible_gpus
from trainer.ranks.extraction_rank import PEERS, RESULT
from trainer.ranks.foreground import Foreground, write_job

# The name of the run folder in the output folder. It is used only if there are several processes.
RUN = ".run"


def run(job: ExtractJob, *, as_json: bool) -> int:
    """Run an extraction in the foreground, print the result as text or JSON, and return the exit code."""
    job = here(job)
    gpus = _gpus(job)
    restore_progress(job)
    size = len(gpus) or wanted_ranks(job)
    result = _run_alone(job, gpus) if size == 1 or job.model.spread else _run_ranks(job, gpus, size)
    _print(job, result, as_json=as_json)
    return EXIT_FINISHED if result.state == "finished" else EXIT_STOPPED


def _run_alone(job: ExtractJob, gpus: list[Device]) -> ExtractionResult:
    """Extract in this process."""
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGHUP, *STOP_SIGNALS):
        # Under nohup, SIGHUP is ignored and must stay ignored.
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, lambda *_: stop.set())
    if gpus:
        os.environ.update(VENDORS[torch_vendor()].pin(gpu.uuid for gpu in gpus))
    with tqdm(
        total=job.extract.n_tokens, unit="row", unit_scale=True, disable=not sys.stderr.isatty(), dynamic_ncols=True
    ) as bar:

        def advance(n_kept: int) -> None:
            bar.set_postfix_str(METER.words, refresh=False)
            bar.update(n_kept - bar.n)

        peers = Alone(stop, advance)
        return extract(job, torch.device("cuda" if gpus else "cpu"), peers, _tell)


def _run_ranks(job: ExtractJob, gpus: list[Device], size: int) -> ExtractionResult:
    """Extract in several processes, with a temporary run folder inside the output folder."""
    state, output = stored_state(job, size), job.local_output
    if state.is_finished:
        return result_of(job, state, "finished")
    refuse_link(output)
    paths = RunPaths(private_folder(output / RUN, "extract.output"))
    with RunLock(paths.root) as lock:
        # Remove the attempts that a killed extraction left behind.
        for left in paths.root.glob("attempt*"):
            shutil.rmtree(left)
        paths.create()
        write_job(job, paths)
        spec = RankSpec(
            run_dir=paths.root,
            output_dir=output,
            attempt=1,
            world_size=size,
            device="cuda" if gpus else "cpu",
            gpu_uuids=tuple(gpu.uuid for gpu in gpus),
            gpu_vendor=torch_vendor() if gpus else "",
        )
        Foreground(job, spec, lock).run()
        result = read_json(paths.attempt(1) / PEERS / RESULT, ExtractionResult)
        shutil.rmtree(paths.root, ignore_errors=True)
    return result or result_of(job, stored_state(job, size), "stopped")


def _tell(sentence: str) -> None:
    complain(f"{printable_lines(sentence)}\n")


def _gpus(job: ExtractJob) -> list[Device]:
    """Return the GPUs to run on, or [] for the CPU; raise `UsageError` if a requested GPU is missing."""
    asked, count = job.launch.gpus, wanted_ranks(job)
    gpus = [] if job.on_cpu else visible_gpus()
    if not gpus:
        if not job.on_cpu and (isinstance(asked, list) or count > 1):
            instead = f'"cpu:{count}"' if count > 1 else '"cpu" or "auto"'
            raise UsageError(f"launch.gpus: there is no GPU here; use {instead} instead of {show(asked)}")
        return []
    indices = [gpu.index for gpu in gpus]
    if missing := [index for index in chosen_indices(job) if index not in indices]:
        listed = ", ".join(map(str, indices))
        raise UsageError(f"launch.gpus: there is no GPU {missing[0]} here; this machine has {listed}")
    if len(taken := chosen(job, gpus)) < count:
        slices = "" if count > len(gpus) else " that are not MIG slices"
        raise UsageError(f"launch.gpus: asks for {count} GPUs, but this machine has {len(taken)}{slices}")
    return taken


def _of_hook(hook: str, place: str, folder: Path) -> Iterator[str]:
    """Yield a line with a hook's place and, if the hook has other names, a line with these names."""
    yield f"{hook}: {place}"
    if others := other_names(hook, folder):
        yield f"  also called {join_words(others)}"


def _print(job: ExtractJob, result: ExtractionResult, *, as_json: bool) -> None:
    if as_json:
        show_text(json.dumps(msgspec.to_builtins(result)) + "\n")
        return
    lines = [line for hook, place in result.outputs.items() for line in _of_hook(hook, place, job.folder(hook))]
    left_out = ", ".join(f"{n:,} {reason}" for reason, n in result.left_out.items() if n)
    rate = f", {result.tokens_per_s:,.0f} tokens/s" if result.tokens_per_s else ""
    lines.append(f"{result.state}: {plural(result.n_tokens, 'row')} for each hook{rate}")
    if left_out:
        lines.append(f"left out: {left_out}")
    if result.state == "stopped":
        lines.append("run the same command again to continue after the last finished shard")
    elif result.n_tokens < job.extract.n_tokens:
        lines.append(f"the text ran out before the {job.extract.n_tokens:,} rows of extract.n_tokens")
    show_text(printable_lines("\n".join(lines)) + "\n")
