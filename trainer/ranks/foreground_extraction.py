"""The command `extract`: chooses the device, shows how far it is, stops on a signal, and prints what it came to."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading

import msgspec
import torch
from tqdm import tqdm

from trainer.contract.errors import UsageError
from trainer.contract.output import complain, show_text
from trainer.contract.printable import printable_lines
from trainer.contract.runs.rank_spec import EXIT_FINISHED, EXIT_STOPPED
from trainer.contract.settings.extract import ExtractJob
from trainer.contract.wording import plural
from trainer.extraction.extraction import Result, extract
from trainer.ranks.devices import visible_gpus


def run(job: ExtractJob, *, as_json: bool) -> int:
    """Run an extraction in the foreground and return its exit code; print JSON in the last line, or words."""
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # Under nohup SIGHUP is ignored, and stays so.
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, lambda *_: stop.set())
    device = _device(job)
    with tqdm(
        total=job.extract.n_tokens, unit="row", unit_scale=True, disable=not sys.stderr.isatty(), dynamic_ncols=True
    ) as bar:
        result = extract(job, torch.device(device), stop, lambda n: bar.update(n - bar.n), _tell)
    _print(job, result, as_json=as_json)
    return EXIT_FINISHED if result.state == "finished" else EXIT_STOPPED


def _tell(sentence: str) -> None:
    complain(f"{printable_lines(sentence)}\n")


def _device(job: ExtractJob) -> str:
    """Return the device to run on, and hide all other GPUs from this process."""
    asked = job.launch.gpus
    if str(asked).startswith("cpu"):
        return "cpu"
    gpus = visible_gpus()
    if not gpus:
        if isinstance(asked, list):
            raise UsageError(f'launch.gpus: there is no GPU here; give "cpu" or "auto" instead of {asked}')
        return "cpu"
    by_index = {gpu.index: gpu for gpu in gpus}
    index = asked[0] if isinstance(asked, list) else gpus[0].index
    if index not in by_index:
        raise UsageError(f"launch.gpus: there is no GPU {index} here; this machine has {', '.join(map(str, by_index))}")
    os.environ["CUDA_VISIBLE_DEVICES"] = by_index[index].uuid
    return "cuda"


def _print(job: ExtractJob, result: Result, *, as_json: bool) -> None:
    if as_json:
        show_text(json.dumps(msgspec.to_builtins(result)) + "\n")
        return
    lines = [f"{hook}: {folder}" for hook, folder in result.outputs.items()]
    left_out = ", ".join(f"{n:,} {reason}" for reason, n in result.left_out.items() if n)
    rate = f", {result.tokens_per_s:,.0f} tokens/s" if result.tokens_per_s else ""
    lines.append(f"{result.state}: {plural(result.n_tokens, 'row')} for each hook{rate}")
    if left_out:
        lines.append(f"left out: {left_out}")
    if result.state == "stopped":
        lines.append("the same command goes on after the last finished shard")
    elif result.n_tokens < job.extract.n_tokens:
        lines.append(f"the text has ended before the {job.extract.n_tokens:,} rows of extract.n_tokens")
    show_text(printable_lines("\n".join(lines)) + "\n")
