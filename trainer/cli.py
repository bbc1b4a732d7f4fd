"""The `sae-train` command: train in the foreground, resume, export, estimate, measure, or run as a rank."""

from __future__ import annotations

import argparse
import json
import os
import pkgutil
import re
import socket
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from trainer.activations import foreign
from trainer.contract.errors import BadUsage, UsageError, UserError
from trainer.contract.exits import Exit
from trainer.contract.extras import lack_of_trainer
from trainer.contract.failure import asks_for_json, show_failure
from trainer.contract.imports import without_collection
from trainer.contract.output import OutputLost, complain, run_command, show_text
from trainer.contract.paths import RunPaths, keep_own_access, keep_run, leave_deleted_folder
from trainer.contract.planning.check_job import wanted_devices
from trainer.contract.planning.gpu_vendors import VENDORS
from trainer.contract.planning.workload import ONE_PROCESS, ranks_of
from trainer.contract.printable import printable_json, printable_lines
from trainer.contract.process import take_back_signals
from trainer.contract.progress import Progress
from trainer.contract.runs import cuda_variables
from trainer.contract.runs.grant import CHANNEL
from trainer.contract.runs.lock import RunLock
from trainer.contract.runs.mirrored_run import fetch, open_mirror
from trainer.contract.runs.rank_spec import (
    EXIT_FAILED,
    EXIT_FINISHED,
    EXIT_STOPPED,
    EXIT_USAGE,
    RankSpec,
    read_own_spec,
    read_spec,
)
from trainer.contract.runs.resume import StoredRun, data_notes, length_notes, stored_job, stored_run, with_same_step
from trainer.contract.settings.catalog import KINDS
from trainer.contract.settings.consent import refuse_code
from trainer.contract.settings.extract import ExtractJob
from trainer.contract.settings.inspectors import inspecting_by
from trainer.contract.settings.job import J, JobConfig
from trainer.contract.settings.job_file import load_any, load_as, load_job, to_table
from trainer.contract.settings.series import CRITERION, held_out, held_out_metrics, log_words, result_metrics
from trainer.contract.settings.shards import ShardSet, inspect_shards
from trainer.contract.settings.toml import read_plain_text
from trainer.contract.wording import join_words
from trainer.parser import make_parser
from trainer.ranks.device_choice import chosen, devices_again, here, parse_target, refuse_bad, with_places
from trainer.ranks.devices import torch_vendor, visible_gpus
from trainer.ranks.foreground import (
    Foreground,
    ask_by_file,
    new_run,
    own_box_file,
    result,
    running_spec,
    write_job,
)

if TYPE_CHECKING:
    from trainer.training.push import Push

# Commands that start without torch. `rank` is one of them, so that it can record a missing package as the reason for
# its failure.
_WITHOUT_TORCH = ("estimate", "rank", "fetch")
# The default parent folder for runs.
RUNS = Path("runs")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; print user errors, one line per problem."""
    take_back_signals()
    keep_own_access()
    with inspecting_by(foreign.inspect):
        return run_command(lambda: _main(argv))


def _main(argv: Sequence[str] | None) -> int:
    given = sys.argv[1:] if argv is None else argv
    try:
        flags = make_parser().parse_args(given)
        leave_deleted_folder(paths := _paths(flags))
        for path in paths.values():
            keep_run(path)
        if flags.command not in _WITHOUT_TORCH and (lack := lack_of_trainer()):
            raise UsageError(lack)
        return _COMMANDS[flags.command](flags)
    except (OutputLost, BrokenPipeError):
        raise
    except (UserError, OSError) as error:
        return _refuse(error, as_json=asks_for_json(given))
    except KeyboardInterrupt:
        return EXIT_STOPPED


def _refuse(error: UserError | OSError, *, as_json: bool) -> Exit:
    """Report an error, in JSON or as one line per problem, and return the exit code."""
    if isinstance(error, OSError):
        # The cause may be a full or read-only disk, or a folder that belongs to another user.
        error = UserError(f"{error.filename or 'failed'}: {error.strerror or error}")
    if as_json:
        show_failure(error)
    elif isinstance(error, BadUsage):
        complain(error.sentence)
    else:
        _warn(str(error))
    return EXIT_USAGE if isinstance(error, UsageError) else EXIT_FAILED


def _say(text: str) -> None:
    show_text(f"{printable_lines(text)}\n")


def _warn(text: str) -> None:
    complain(f"{printable_lines(text)}\n")


def _paths(flags: argparse.Namespace) -> dict[str, Path]:
    """Return a dict mapping each path argument to its `Path`; for `run` without `--out`, add the default folder."""
    values = [*vars(flags).values(), *getattr(flags, "paths", ())]
    paths = {str(value): value for value in values if isinstance(value, Path)}
    creates = flags.command == "run" or (flags.command == "resume" and not isinstance(flags.run_dir, Path))
    return paths | ({"--out": RUNS} if creates and not flags.out else {})


def _run(flags: argparse.Namespace) -> int:
    job = here(_allowed(load_job(flags.job, flags.overrides), flags))
    gpus = [] if job.on_cpu else visible_gpus()
    run_dir = (flags.out or RUNS / _folder_name(job.name)).absolute()
    refuse_bad(job, gpus, run_dir)
    taken = chosen(job, gpus)
    spec = RankSpec(
        run_dir=run_dir,
        output_dir=run_dir / "sae",
        attempt=1,
        world_size=len(taken) or wanted_devices(job),
        device="cuda" if taken else "cpu",
        gpu_uuids=tuple(gpu.uuid for gpu in taken),
        gpu_vendor=torch_vendor() if taken else "",
        as_one_process=job.parallel.mode in ONE_PROCESS,
        box_file=own_box_file(),
    )
    spec = with_places(spec, job, taken)
    with new_run(job, run_dir) as lock:
        return _train(job, spec, lock, flags)


def _allowed(job: J, flags: argparse.Namespace) -> J:
    """Return the job; raise `JobFileError` if the job would run a model's own code and no flag allows it."""
    # The job's Python interpreter and sbatch options need no check here: only `sae-tui` uses them.
    refuse_code(to_table(job), allows=flags.allow_code, overrides=flags.overrides)
    return job


def _extract(flags: argparse.Namespace) -> int:
    with without_collection():
        from trainer.ranks.foreground_extraction import run

    return run(_allowed(load_as(ExtractJob, flags.job, flags.overrides), flags), as_json=flags.json)


def _inspect(flags: argparse.Namespace) -> int:
    if flags.headers:
        _say_headers(inspect_shards(flags.data), as_json=flags.json)
        return EXIT_FINISHED
    with without_collection():
        from trainer.measuring.inspection import inspect_data, table

    with Progress("inspecting"):
        facts = inspect_data(flags.data)
    _say(msgspec.json.encode(facts).decode() if flags.json else table(facts))
    return EXIT_FAILED if any(finding.severity == "error" for finding in facts.findings) else EXIT_FINISHED


def _pairs(flags: argparse.Namespace) -> int:
    with without_collection():
        from trainer.evaluation.pairs import write_pairs

    with Progress("reading"):
        n_pairs = write_pairs(flags.data, flags.file, flags.before, flags.after, flags.rows)
    answer = json.dumps({"file": str(flags.file), "n_pairs": n_pairs})
    _say(answer if flags.json else f"{n_pairs:,} pairs in {flags.file}")
    return EXIT_FINISHED


def _say_headers(found: ShardSet, *, as_json: bool) -> None:
    if not as_json:
        dtypes = join_words(sorted({shard.dtype for shard in found.shards}))
        _say("\n".join([f"{found.n_tokens:,} rows, d_in {found.d_in}, {dtypes}", *found.notes]))
        return
    try:
        show_text(f"{printable_json(msgspec.json.encode(found, enc_hook=str).decode())}\n")
    except UnicodeEncodeError:
        raise UserError("a file name is not UTF-8, and JSON cannot represent it; rename the file") from None


def _join(flags: argparse.Namespace) -> int:
    from trainer.ranks.torchrun import join

    job = _allowed(load_job(flags.job, flags.overrides), flags)
    run_dir = flags.out.absolute()
    refuse_bad(job, [], run_dir, only=("data.", "sae.", "train."))
    return join(job, run_dir)


def _train(job: JobConfig, spec: RankSpec, lock: RunLock, flags: argparse.Namespace, first_step: int = 0) -> int:
    foreground = Foreground(job, spec, lock, first_step)
    code = foreground.run()
    _print_result(result(job, spec), code, foreground.cards(), as_json=flags.json)
    return code


def _fetch(flags: argparse.Namespace) -> int:
    with Progress("downloading"):
        done = fetch(flags.url, flags.out.absolute())
    if flags.json:
        _say(msgspec.json.encode(done._asdict(), enc_hook=str).decode())
        return EXIT_FINISHED
    for note in done.notes:
        _warn(f"warning: {note}")
    _say(f"{done.name} at step {done.step:,} -> {done.run_dir}")
    _say(f"resume it: sae-train resume {done.run_dir}")
    return EXIT_FINISHED


def _fetched(url: str, out: Path | None) -> Path:
    """Download a run from its mirror, and return the new run folder."""
    run_dir = (out or RUNS / _folder_name(open_mirror(url)[1].name)).absolute()
    with Progress("downloading"):
        done = fetch(url, run_dir)
    for note in (*done.notes, f"downloaded step {done.step:,} to {run_dir}"):
        _warn(note)
    return run_dir


def _resume(flags: argparse.Namespace) -> int:
    if flags.out and isinstance(flags.run_dir, Path):
        raise UsageError("--out: only for the URL of a mirror; leave it out")
    run_dir = flags.run_dir.absolute() if isinstance(flags.run_dir, Path) else _fetched(flags.run_dir, flags.out)
    was, job = stored_job(run_dir, []), _allowed(stored_job(run_dir, flags.overrides), flags)
    with RunLock(run_dir) as lock:
        run = stored_run(run_dir)
        if run.is_finished(was) and (was.train.n_steps, was.train.n_tokens) == (job.train.n_steps, job.train.n_tokens):
            return _already_finished(job, run, flags)
        devices, kind, taken, vendor = devices_again(job, run.last, flags.overrides)
        spec = run.next_attempt(devices, kind, tuple(gpu.uuid for gpu in taken), vendor)
        as_one = job.parallel.mode in ONE_PROCESS
        spec = msgspec.structs.replace(spec, as_one_process=as_one, box_file=own_box_file())
        job, shared = with_same_step(was, job, run.last.n_devices, devices)
        spec = with_places(spec, job, taken)
        for note in (*run.notes, *length_notes(was, job, run, devices), *shared, *data_notes(job, run)):
            _warn(f"warning: {note}")
        write_job(job, RunPaths(run_dir))
        if flags.finish:
            ask_by_file(run_dir, spec.attempt, finish=True)
        return _train(job, spec, lock, flags, run.position.step)


def _stop(flags: argparse.Namespace) -> int:
    run_dir = flags.run_dir.absolute()
    spec = running_spec(run_dir)
    ask_by_file(run_dir, spec.attempt, finish=flags.finish)
    does = "cools down and then finishes" if flags.finish else "saves a checkpoint and stops at its next step"
    answer = {"run_dir": str(run_dir), "message": f"the run {does}"}
    _say(json.dumps(answer) if flags.json else answer["message"])
    return EXIT_FINISHED


def _already_finished(job: JobConfig, run: StoredRun, flags: argparse.Namespace) -> int:
    outcome = result(job, run.last)
    if flags.json:
        _say(json.dumps(outcome | {"state": "finished"}))
    else:
        _say(f"already finished after {outcome['steps']} steps; the SAE is in {outcome['output_path']}")
        _say(f"to train it for longer: {run.longer}")
    return EXIT_FINISHED


def _folder_name(name: str) -> str:
    safe = re.sub(r"[^\w.-]+", "-", name)[:60].strip("-.") or "run"
    return f"{safe}-{time.strftime('%Y%m%d-%H%M%S')}"


def _print_result(result: dict[str, Any], code: int, cards: Sequence[str], *, as_json: bool) -> None:
    word = "finished" if code == EXIT_FINISHED else "stopped"
    if as_json:
        _say(json.dumps(result | {"state": word}))
        return
    for label, values in (result.get("saes") or {"": result}).items():
        _say(f"{label or 'SAE'}: {_quality(values)}")
    for card in cards:
        _say(card)
    what = "the SAEs are" if "saes" in result else "the SAE is"
    _say(f"{word} after {result['steps']} steps; {what} in {result['output_path']}")
    if code == EXIT_STOPPED:
        again = f"sae-train resume {result['run_dir']}"
        _say(f"let it cool down and finish early: {again} --finish")
        _say(f"resume it: {again}")


def _quality(values: dict[str, Any]) -> str:
    """Format an SAE's results, e.g. `held-out FVU 0.1463, L0 32.0, 1.2% dead`."""
    where = "held-out " if values[held_out(CRITERION)] is not None else ""
    if not where and values[CRITERION] is None:
        return "not measured"
    words = []
    for name, series in result_metrics().items():
        value = values[held_out(name) if where and name in held_out_metrics() else name]
        if value is not None:
            text = log_words(value, series)
            words.append(f"{text} {series.short or name}" if series.is_share else f"{series.title} {text}")
    return where + ", ".join(words)


def _export(flags: argparse.Namespace) -> int:
    push = _push_of(flags)
    with Progress("exporting"):
        done, lines = _exported(flags)
    from trainer.sharing.base import format_named

    if not push and (command := format_named(flags.format).opening("OWNER/NAME")):
        note = f"once it is uploaded with --push OWNER/NAME, this command opens it: {command}"
        done["notes"] = [*done.get("notes", ()), note]
        lines.append(f"note: {note}")
    if not flags.json:
        _say("\n".join(lines))
    if push:
        checkpoints = [Path(path) for path in done.get("checkpoints", [done.get("checkpoint")])]
        out = Path(done["output_path"])
        tell = _warn if flags.json else _say
        done["pushed"] = push.send(out, checkpoints, flags.format, tell, done.get("saes"), flags.k)
    if flags.json:
        _say(json.dumps(done))
    return EXIT_FINISHED


def _exported(flags: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    """Export one checkpoint's SAEs, or a set from several runs; return the result as a dict and as lines of text."""
    with without_collection():
        from trainer.evaluation.contexts import firings_of
        from trainer.training.export_checkpoint import export_checkpoint
        from trainer.training.export_set import export_set, is_set

    if is_set(flags.paths, flags.format):
        if flags.k is not None:
            raise UsageError("--k: not supported for a set of transcoders; leave it out")
        of_set = export_set(
            flags.paths, flags.out, form=flags.format, best=flags.best, force=flags.force, only=flags.only
        )
        layers = [f"layer {layer} of step {step}" for layer, step in of_set["layers"].items()]
        return of_set, [*layers, *of_set["notes"], f"-> {of_set['output_path']}"]
    done = export_checkpoint(
        flags.paths[0],
        flags.out,
        form=flags.format,
        best=flags.best,
        force=flags.force,
        only=flags.only,
        k=flags.k,
        firings=firings_of,
    )
    folders = done.get("saes", {"SAE": done["output_path"]})
    lines = [f"{label} of step {done['step']} -> {folder}" for label, folder in folders.items()]
    return done, [*lines, *(f"note: {note}" for note in done.get("notes", ()))]


def _push_of(flags: argparse.Namespace) -> Push | None:
    """Return the uploader for `--push`, or None without that flag, to avoid contacting the hub."""
    if flags.push is None:
        for flag, is_given in (("--public", flags.public), ("--yes", flags.yes)):
            if is_given:
                raise UsageError(f"{flag}: requires --push REPO")
        return None
    from trainer.training.push import Push

    return Push(flags.push, flags.out, public=flags.public, confirmed=flags.yes)


def _import(flags: argparse.Namespace) -> int:
    with without_collection():
        from trainer.sharing.base import Given
        from trainer.sharing.reading import parsed_config
        from trainer.training.import_sae import import_sae

    given = Given(parsed_config(flags.config), flags.transcoder)
    with Progress("importing"):
        done = import_sae(flags.folder, flags.out.absolute(), flags.data, flags.overrides, flags.format, given)
    if flags.json:
        _say(msgspec.json.encode(done._asdict(), enc_hook=str).decode())
        return EXIT_FINISHED
    _say(f"{done.architecture} SAE, read as {done.form} -> {done.run_dir}")
    _say(f"{done.check}")
    for doubt in done.warnings:
        _say(f"warning: {doubt}")
    for note in done.notes:
        _say(f"note: {note}")
    _say(f"evaluate it: sae-train eval {done.run_dir}")
    return EXIT_FINISHED


def _eval(flags: argparse.Namespace) -> int:
    with without_collection():
        from trainer.evaluation.command import evaluate
        from trainer.sharing.base import Given
        from trainer.sharing.reading import parsed_config

    cards = evaluate(
        flags.path,
        best=flags.best,
        device=flags.device,
        model=flags.model,
        n_tokens=flags.tokens,
        n_contexts=flags.contexts,
        data=flags.data,
        targets=flags.targets,
        given=Given(parsed_config(flags.config), flags.transcoder),
        has_effects=flags.effects,
        n_effect_tokens=flags.effect_tokens,
        is_probed=flags.probe,
        n_sets=flags.sets,
        keeps_rows=flags.keep_rows,
        refine=flags.refine,
        allows_code=flags.allow_code,
    )
    for card in [] if flags.json else cards:
        _say("\n".join(card["lines"]))
    if flags.json:
        _say(
            msgspec.json.encode(
                {"cards": [card["card"] | {"written_to": card["written_to"]} for card in cards]}
            ).decode()
        )
    return EXIT_FINISHED


def _bench(flags: argparse.Namespace) -> int:
    with without_collection():
        from trainer.measuring.bench import bench_job, measure, table

    if flags.job:
        _allowed(load_job(flags.job, flags.overrides), flags)
    job, shape = bench_job(flags.job, flags.overrides)
    job = here(job)
    gpus = [] if job.on_cpu else visible_gpus()
    # Without a job file, there is no data to check.
    refuse_bad(job, gpus, Path.cwd(), only="" if flags.job else ("launch.", "parallel."))
    uuids = tuple(gpu.uuid for gpu in chosen(job, gpus))
    with Progress(f"measuring {flags.steps} steps"):
        figures = measure(
            job, shape, flags.steps, world_size=ranks_of(job, len(uuids) or wanted_devices(job)), gpu_uuids=uuids
        )
    _say(json.dumps(figures) if flags.json else table(figures))
    return EXIT_FINISHED


def _probe(flags: argparse.Namespace) -> int:
    from trainer.measuring.bench import probe_table, run_ranks

    world_size, uuids = parse_target(flags.gpus)
    module = "trainer.measuring.probe_rank"
    with Progress("measuring"):
        figures = run_ranks(module, [flags.precision], job=None, world_size=world_size, gpu_uuids=uuids)
    _say(json.dumps(figures) if flags.json else probe_table(figures))
    return EXIT_FINISHED


def _self_test(flags: argparse.Namespace) -> int:
    world_size, uuids = parse_target(flags.gpus)
    if world_size != 1:
        raise UsageError("--gpus: name one GPU, or cpu")
    if not uuids and flags.gpus != "cpu":
        raise UsageError("--gpus: this machine has no GPU; cpu checks its CPU")
    # Set the same environment variables as a run does, so that memory use and matmuls are the same.
    cuda_variables.set_here()
    with without_collection():
        from trainer.self_test.base import Check
        from trainer.self_test.run import run

    def tell(check: Check) -> None:
        if not flags.json and not check.ok:
            _say(f"wrong: {check.part}: {check.name}: {json.dumps(check.found)}")

    found = run(VENDORS[torch_vendor()].pin(uuids) if uuids else {}, full=flags.full, tell=tell)
    right = "trains correctly" if found["ok"] else f"failed {len(found['failed'])} checks"
    seconds = f"{found['checks']} checks in {found['seconds']:.0f} s"
    _say(json.dumps(found) if flags.json else f"{found['device']} {right}: {seconds}")
    return EXIT_FINISHED if found["ok"] else EXIT_FAILED


def _interact(flags: argparse.Namespace) -> int:
    with without_collection():
        from trainer.evaluation.command import device_of
        from trainer.interaction.serve import serve

    serve(flags.path, device_of(flags.device), flags.model, flags.idle)
    return EXIT_FINISHED


def _estimate(flags: argparse.Namespace) -> int:
    job = load_any(flags.job, flags.overrides)
    if not KINDS[job.kind].estimate:
        raise UsageError(f'the needs of a job with kind = "{job.kind}" cannot be estimated')
    with Progress("estimating"):
        estimate = pkgutil.resolve_name(KINDS[job.kind].estimate)(job)
    _say(json.dumps(estimate.as_json()) if flags.json else "\n".join(estimate.lines()))
    return EXIT_FINISHED


def _rank(flags: argparse.Namespace) -> int:
    if CHANNEL in os.environ:
        from trainer.ranks.loading import wait_for_turn

        wait_for_turn()
    try:
        spec = (read_spec if flags.any_owner else read_own_spec)(flags.spec)
    except FileNotFoundError:
        way_out = "put the data folder (--data-dir) on a file system that all nodes share"
        raise UserError(f"{flags.spec} does not exist on {socket.gethostname()}; {way_out}") from None
    if spec.by_files:
        from trainer.ranks.launched import join_launched

        return join_launched(spec)
    from trainer.ranks.rank import main as run_rank

    job = load_any(RunPaths(spec.run_dir).job_file, read=read_plain_text) if flags.any_owner else None
    return run_rank(spec, job)


_COMMANDS: dict[str, Callable[[argparse.Namespace], int]] = {
    "run": _run,
    "extract": _extract,
    "inspect": _inspect,
    "pairs": _pairs,
    "join": _join,
    "resume": _resume,
    "fetch": _fetch,
    "stop": _stop,
    "export": _export,
    "import": _import,
    "eval": _eval,
    "interact": _interact,
    "estimate": _estimate,
    "bench": _bench,
    "probe": _probe,
    "self-test": _self_test,
    "rank": _rank,
}
