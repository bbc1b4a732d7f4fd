from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import re
import shlex
import signal
import stat
import statistics
import subprocess
import sys
from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from support.combinations import slow_except, slow_unless
from support.tiny_models import sentences
from tqdm import tqdm

from trainer.checkpoints.checkpoint import Checkpoints
from trainer.cli import main
from trainer.contract.paths import DataDir
from trainer.contract.planning.hardware import CPU, MeasuredHardware, Speeds, write_box
from trainer.contract.planning.plan import read_plan
from trainer.contract.runs.checkpoint_manifest import Position
from trainer.contract.runs.rank_spec import EXIT_FAILED, EXIT_FINISHED, EXIT_STOPPED, EXIT_USAGE, RankSpec, read_spec
from trainer.contract.settings.job import JobConfig
from trainer.contract.settings.job_file import dump_job, load_job, parse_job
from trainer.contract.store.metrics_store import Heartbeat, MetricRow, SeriesReader, SeriesWriter
from trainer.parser import make_parser
from trainer.ranks.devices import Device
from trainer.ranks.foreground import BAR, Foreground, new_run

FIELDS = {
    "run_dir", "output_path", "steps", "tokens", "fvu", "l0", "dead_fraction", "tokens_per_s", "heldout_fvu",
    "heldout_l0",
}  # fmt: skip
ENDLESS = ("--set", "train.n_steps=10000000", "--out", "out")


@pytest.fixture
def job_file(make_job: Callable[..., JobConfig], tmp_path: Path) -> Path:
    file = tmp_path / "job.toml"
    file.write_text(dump_job(make_job(launch={"gpus": "cpu"})))
    return file


def start(*arguments: object, cwd: Path, **options: Any) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "trainer", *map(str, arguments)]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=cwd, env=environment, **options
    )


@pytest.mark.parametrize("command", slow_except(["extract"], ["eval", "extract", "inspect", "export"]))
def test_objects_created_by_imports_are_exempt_from_garbage_collection(command: str, tmp_path: Path) -> None:
    out = ["--out", "out"] if command == "export" else []
    code = f"import gc; from trainer.cli import main; main({[command, 'nowhere', *out]}); print(gc.get_freeze_count())"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert int(done.stdout) > 10_000


def test_a_foreground_run_prints_its_result_last_and_stores_measured_speeds(
    job_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SAE_TUI_DATA_DIR", str(tmp_path / "home" / "data"))
    process = start("run", job_file, "--set", "launch.gpus=cpu:2", "--json", cwd=tmp_path)
    output, errors = process.communicate(timeout=120)
    assert process.returncode == EXIT_FINISHED, errors
    result = json.loads(output.splitlines()[-1])
    assert result.keys() >= FIELDS
    assert (result["steps"], result["tokens"]) == (20, 20 * 128 * 2)
    assert 0 < result["fvu"] < 1
    assert 0 < result["heldout_fvu"] < 1
    assert result["heldout_l0"] == pytest.approx(4, abs=0.1)
    assert "saes" not in result
    assert load_file(Path(result["output_path"]) / "sae_weights.safetensors")["W_enc"].shape == (16, 64)
    (run_dir,) = (tmp_path / "runs").iterdir()
    assert load_job(run_dir / "job.toml").launch.gpus == "cpu:2"
    plan = read_plan(run_dir / "attempt1" / "plan.json")
    assert plan
    with contextlib.closing(SeriesReader(run_dir / "metrics.db")) as reader:
        rates = [point.value or 0.0 for point in reader.points("lr")]
    assert 0 < max(rates) <= plan.lr[""] * (1 + 1e-6)
    assert main(["estimate", str(job_file), "--set", "launch.gpus=cpu:2", "--json"]) == EXIT_FINISHED
    assert json.loads(capsys.readouterr().out)["is_measured"]
    assert stat.S_IMODE((tmp_path / "home" / "data").stat().st_mode) == 0o700
    assert stat.S_IMODE(DataDir(tmp_path / "home" / "data").box_file.stat().st_mode) == 0o600


@pytest.mark.slow
def test_a_run_shorter_than_its_log_interval_still_reports_excluded_rows(
    job_file: Path, activations: Path, tmp_path: Path
) -> None:
    rows = load_file(activations / "a.safetensors")["activations"]
    rows[::50] *= 1000
    save_file({"activations": rows}, activations / "a.safetensors")
    process = start("run", job_file, "--set", "train.n_steps=3", "--set", "train.log_every=10", "--json", cwd=tmp_path)
    output, errors = process.communicate(timeout=120)
    assert process.returncode == EXIT_FINISHED, errors
    json.loads(output)
    (told,) = (line for line in errors.splitlines() if "left out" in line)
    assert re.match(r"[\d.]+ % of a sample of \d,\d+ rows have a norm of more than 10 times the median", told)
    assert told.endswith("are left out (data.max_norm)")
    assert " % of a sample" in (next((tmp_path / "runs").iterdir()) / "logs" / "rank0.log").read_text()


@pytest.mark.slow
def test_a_sweeps_result_is_its_best_sae_and_lists_all_saes(job_file: Path, tmp_path: Path) -> None:
    process = start("run", job_file, "--set", "sae.k=[2,4]", "--out", "out", "--json", cwd=tmp_path)
    output, errors = process.communicate(timeout=120)
    assert process.returncode == EXIT_FINISHED, errors
    result = json.loads(output.splitlines()[-1])
    assert list(result["saes"]) == ["k=2", "k=4"]
    for k, of_sae in zip((2, 4), result["saes"].values(), strict=True):
        assert {*of_sae} >= {"output_path", "fvu", "l0", "dead_fraction", "heldout_fvu", "heldout_l0"}
        assert of_sae["heldout_l0"] == pytest.approx(k, abs=0.1)
        assert (Path(of_sae["output_path"]) / "cfg.json").exists()
    assert result["saes"]["k=2"]["heldout_fvu"] > result["saes"]["k=4"]["heldout_fvu"] == result["heldout_fvu"]
    assert result["best_sae"] == "k=4"


@pytest.mark.slow
def test_the_result_of_several_seeds_is_their_mean_and_no_seed_is_called_the_best(
    job_file: Path, tmp_path: Path
) -> None:
    process = start("run", job_file, "--set", "train.seed=[0,1,2]", "--out", "out", "--json", cwd=tmp_path)
    output, errors = process.communicate(timeout=120)
    assert process.returncode == EXIT_FINISHED, errors
    result = json.loads(output.splitlines()[-1])
    values = [of_sae["heldout_fvu"] for of_sae in result["saes"].values()]
    assert len(set(values)) == 3
    assert result["best_sae"] is None
    assert result["heldout_fvu"] == pytest.approx(sum(values) / 3)
    spread = result["seeds"]["figures"]["heldout_fvu"]
    assert (spread["mean"], spread["n"]) == (pytest.approx(sum(values) / 3), 3)
    assert spread["sd"] == pytest.approx(statistics.stdev(values))


# Signals that batch systems send to all processes in a job. The next test also sends the signals for Ctrl-C and for a
# closed terminal.
BATCH_SYSTEMS = [signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU, signal.SIGXCPU]


@pytest.mark.parametrize(
    "numbers",
    [
        pytest.param([signal.SIGINT], marks=pytest.mark.slow),
        [*BATCH_SYSTEMS, signal.SIGTERM, signal.SIGHUP, signal.SIGTERM],
    ],
)
def test_ctrl_c_a_batch_system_or_a_closed_terminal_stops_a_run_after_a_checkpoint(
    numbers: list[signal.Signals], job_file: Path, tmp_path: Path, eventually: Callable
) -> None:
    process = start("run", job_file, *ENDLESS, cwd=tmp_path, process_group=0)
    eventually((tmp_path / "out" / "metrics.db-wal").exists)
    for number in numbers:
        os.killpg(process.pid, number)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == EXIT_STOPPED, errors
    quality, ended, finish, resume = output.splitlines()
    assert re.fullmatch(r"SAE: (held-out )?FVU \d\.\d{4}, L0 \d+\.\d, \d+\.\d% dead", quality)
    assert ended.startswith("stopped after ")
    command = f"sae-train resume {tmp_path / 'out'}"
    assert (finish, resume) == (f"let it cool down and finish early: {command} --finish", f"resume it: {command}")
    assert list((tmp_path / "out" / "checkpoints").glob("step-*/manifest.json"))


@pytest.mark.slow
def test_a_second_ctrl_c_ends_a_run_immediately_even_if_a_rank_does_not_respond(
    job_file: Path, tmp_path: Path, eventually: Callable
) -> None:
    process = start("run", job_file, *ENDLESS, cwd=tmp_path)
    eventually((tmp_path / "out" / "metrics.db-wal").exists)
    (rank,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(int(rank), signal.SIGSTOP)
    for n_interrupts in (1, 2):
        process.send_signal(signal.SIGINT)
        if n_interrupts == 1:
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(1)
    output, errors = process.communicate(timeout=10)
    assert (process.returncode, output) == (EXIT_FAILED, "")
    assert errors.splitlines()[-1] == "stopped immediately, without saving a checkpoint of the latest steps"
    assert not Path(f"/proc/{rank}").exists()


@pytest.mark.parametrize(
    ("killed", "fix"),
    [pytest.param(0, "", marks=pytest.mark.slow), (1, "resume it: sae-train resume {}/out; ")],
)
def test_the_error_for_a_killed_rank_shows_its_last_log_line_and_how_to_resume(
    killed: int, fix: str, job_file: Path, tmp_path: Path, eventually: Callable
) -> None:
    every = ["--set", f"train.checkpoint_every={3 if fix else 0}"]
    process = start("run", job_file, "--set", "launch.gpus=cpu:2", *ENDLESS, *every, cwd=tmp_path)
    log = tmp_path / "out" / "logs" / f"rank{killed}.log"
    eventually(lambda: process.poll() is not None or (log.exists() and "step 5/" in log.read_text()), timeout_s=120)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    (rank,) = (int(pid) for pid in children if f"\0RANK={killed}\0" in Path(f"/proc/{pid}/environ").read_text())
    os.kill(rank, signal.SIGKILL)
    output, errors = process.communicate(timeout=60)
    assert (process.returncode, output) == (EXIT_FAILED, "")
    last = errors.splitlines()[-1]
    fix = re.escape(fix.format(tmp_path))
    assert re.match(rf"rank {killed} was killed \(SIGKILL\); {fix}its last log line: [\d:]{{8}}  .+", last), errors
    assert "connection" not in last
    assert "Traceback" not in errors


def test_ctrl_c_while_ranks_are_starting_ends_all_of_them_without_a_traceback(
    job_file: Path, tmp_path: Path, eventually: Callable
) -> None:
    process = start("run", job_file, "--set", "launch.gpus=cpu:2", *ENDLESS, cwd=tmp_path, process_group=0)
    eventually((tmp_path / "out" / "logs" / "rank0.log").exists)
    os.killpg(process.pid, signal.SIGINT)
    output, errors = process.communicate(timeout=60)
    assert process.returncode in (EXIT_STOPPED, EXIT_FAILED), errors
    logs = [file.read_text() for file in (tmp_path / "out" / "logs").iterdir()]
    assert "Traceback" not in "".join([output, errors, *logs])
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)


def test_the_progress_bar_fits_80_columns() -> None:
    postfix = "held-out FVU=0.108, l0=32"
    line = tqdm.format_meter(12_345, 100_000, 60, ncols=80, prefix="training", bar_format=BAR, postfix=postfix)
    assert len(line) <= 80
    assert len(line.split("|")[1]) >= 10


def test_the_progress_bar_shows_held_out_values_as_soon_as_they_are_known(
    job_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = load_job(job_file)
    run_dir = tmp_path / "out"
    spec = RankSpec(run_dir=run_dir, output_dir=run_dir / "sae", attempt=1, world_size=1, device="cpu")
    with new_run(job, run_dir) as lock, contextlib.closing(SeriesWriter(run_dir / "metrics.db")) as writer:
        shown = []
        for rows in ([MetricRow("fvu", 5, 0.25), MetricRow("l0", 5, 4.0)], [MetricRow("heldout_fvu", 10, 0.275)]):
            writer.write(rows, Heartbeat("training", 10, 20, 1280, 1.0))
            with tqdm(total=20, file=io.StringIO(), bar_format=BAR) as bar:
                Foreground(job, spec, lock)._show(bar)
                shown.append((bar.n, str(bar)))
    assert shown[0][1].endswith(", batch FVU=0.25, l0=4]")
    assert shown[1][1].endswith(", held-out FVU=0.275, l0=4]")
    assert shown[0][0] == 10


def test_the_cause_of_a_failed_rank_is_reported_even_if_sigchld_is_ignored(
    job_file: Path, activations: Path, tmp_path: Path
) -> None:
    shard = activations / "a.safetensors"
    content = bytearray(shard.read_bytes())
    # A single NaN row would only be replaced, so the last 100 rows are NaN.
    content[-100 * 16 * 4 :] = 100 * 16 * b"\x00\x00\xc0\x7f"  # NaN
    shard.write_bytes(content)
    # Some daemons ignore SIGCHLD, which makes the kernel discard the exit codes of their child processes.
    ignored = functools.partial(signal.signal, signal.SIGCHLD, signal.SIG_IGN)
    process = start("run", job_file, "--json", cwd=tmp_path, preexec_fn=ignored)
    output, errors = process.communicate(timeout=120)
    assert (process.returncode, errors) == (EXIT_FAILED, "")
    told = json.loads(output)["error"]
    assert told["field"] == "data.path"
    assert re.match(rf"{activations} contains NaN or infinite values in row 16\d\d of a\.safetensors", told["message"])


def test_every_problem_in_a_bad_job_file_is_reported_on_its_own_line(
    job_file: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    job_file.write_text('[data]\npath = "gone"\n[sae]\nkk = 1\nd_sae = "wide"\n[train]\nlr = -1\n')
    assert main(["run", str(job_file), "--out", str(tmp_path / "out")]) == EXIT_USAGE
    paths = {line.partition(":")[0] for line in capsys.readouterr().err.splitlines()}
    assert paths == {"sae.kk", "sae.d_sae", "train.lr"}
    assert not (tmp_path / "out").exists()


def test_problems_detectable_only_on_this_machine_are_reported_before_the_run_starts(
    job_file: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    arguments = ["run", str(job_file), "--out", str(tmp_path / "out"), "--set", "sae.k=1000", "--set", "data.path=gone"]
    assert main(arguments) == EXIT_USAGE
    assert capsys.readouterr().err.startswith("data.path: there is nothing at")
    assert main(arguments[:-2]) == EXIT_USAGE
    assert capsys.readouterr().err == "sae.k: must be at most the number of latents, 64, not 1000\n"
    assert not (tmp_path / "out").exists()


def test_a_run_folder_is_never_overwritten(job_file: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "job.toml").rename(tmp_path / "other.toml")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "job.toml").write_text("mine")
    assert main(["run", str(tmp_path / "other.toml"), "--out", str(tmp_path / "out")]) == EXIT_USAGE
    assert capsys.readouterr().err.startswith(f"--out: {tmp_path / 'out'} already contains a run")
    assert (tmp_path / "out" / "job.toml").read_text() == "mine"


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Set the reported load average to 0, and return a function that changes it."""

    def set_to(load: float) -> None:
        monkeypatch.setattr(os, "getloadavg", lambda: (load, 0.0, 0.0))

    set_to(0.0)
    return set_to


def test_an_estimate_on_busy_cores_says_that_the_job_will_be_slower(
    job_file: Path, load: Callable[[float], None], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    for busy, times in ((20.0, "2 cores, load 20: the job may take about 10 times as long"), (2.0, None)):
        load(busy)
        assert main(["estimate", str(job_file)]) == EXIT_FINISHED
        told = [line for line in capsys.readouterr().out.splitlines() if "times as long" in line]
        assert told == ([times] if times else [])


def test_the_error_for_a_checkout_that_is_not_installed_says_how_to_install_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, job_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkout = Path(__file__).parents[2]
    monkeypatch.setattr(
        sys, "path", [str(checkout), *(one for one in sys.path if not (Path(one) / "trainer").is_dir())]
    )
    assert main(["run", str(job_file), "--out", str(tmp_path / "run")]) == EXIT_USAGE
    assert f"install it first: pip install -e {checkout}" in capsys.readouterr().err


def test_an_estimates_parts_are_named_and_add_up_to_the_total(
    job_file: Path, load: Callable[[float], None], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["estimate", str(job_file), "--json"]) == EXIT_FINISHED
    estimate = json.loads(capsys.readouterr().out)
    per_gpu = estimate["per_gpu"]
    total = per_gpu.pop("total")
    parts = ["weights", "gradients", "optimizer", "activations", "communication", "slack", "context"]
    assert list(per_gpu) == parts
    assert total == sum(per_gpu.values())
    assert per_gpu["weights"] == 4 * (2 * 16 * 64 + 64 + 16)
    assert main(["estimate", str(job_file)]) == EXIT_FINISHED
    lines = capsys.readouterr().out.splitlines()
    bar = next(line for line in lines if line.startswith("  ["))
    table = lines[: lines.index(bar)]
    assert "total" in table[-1]
    letters = {line.split()[1]: line.split()[0] for line in table[1:-1]}
    assert list(letters) == parts
    # The bar is to scale, so it shows only the parts that fill at least one cell, in this order. Here, Python and its
    # libraries use the most memory.
    shown = [letter for letter, _ in groupby(bar.strip(" []"))]
    assert shown == [letters[name] for name in parts if letters[name] in shown]
    assert all(per_gpu[name] < total / 40 for name in parts if letters[name] not in shown)
    assert bar.count(letters["context"]) > 40
    assert len(bar) < 80


def test_an_estimate_warns_about_latents_that_do_not_divide_evenly(
    job_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    replicas = ["--set", "launch.gpus=auto:3", "--set", "parallel.mode=ddp"]
    assert main(["estimate", str(job_file), *replicas]) == EXIT_FINISHED
    assert "warning: sae.d_sae: 64 latents do not divide evenly over 3 GPUs" in capsys.readouterr().out


def test_an_estimate_uses_measured_speeds_if_there_are_any_and_otherwise_assumed_ones(
    job_file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def estimate() -> tuple[dict[str, Any], str]:
        arguments = ["estimate", str(job_file), "--set", "launch.gpus=cpu:2"]
        assert main([*arguments, "--json"]) == EXIT_FINISHED
        answer = json.loads(capsys.readouterr().out)
        assert main(arguments) == EXIT_FINISHED
        return answer, capsys.readouterr().out.splitlines()[-1]

    monkeypatch.setenv("SAE_TUI_DATA_DIR", str(tmp_path))
    forecast, line = estimate()
    assert (forecast["device"], forecast["is_measured"]) == (CPU, False)
    assert forecast["tokens_per_s"] * forecast["seconds"] == pytest.approx(20 * 128 * 2)
    assert line.endswith(f" tokens/s, {forecast['mode']}) by assumed speeds of a typical CPU process")
    slow = Speeds(1e6, 1e6, 1e6, 1.0, is_measured=True)
    write_box(tmp_path / "box.json", MeasuredHardware().with_measured(CPU, "fp32", 2, slow))
    measured, line = estimate()
    assert measured["is_measured"]
    assert measured["seconds"] > 20 > forecast["seconds"]
    assert line.endswith(" by speeds measured here")


def test_a_sweeps_estimate_covers_all_its_saes(job_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def per_gpu(*settings: str) -> dict[str, int]:
        overrides = [part for setting in settings for part in ("--set", setting)]
        assert main(["estimate", str(job_file), "--json", *overrides]) == EXIT_FINISHED
        return dict(json.loads(capsys.readouterr().out)["per_gpu"])

    small, large = per_gpu("sae.d_sae=64"), per_gpu("sae.d_sae=256")
    both = per_gpu("sae.d_sae=[64,256]")
    for name in ("weights", "gradients", "optimizer"):
        assert both[name] == small[name] + large[name], name
    # The SAEs' forward and backward passes run sequentially, so their activations share memory.
    assert large["activations"] <= both["activations"] < small["activations"] + large["activations"]
    assert both["total"] == sum(value for name, value in both.items() if name != "total")
    assert main(["estimate", str(job_file), "--set", "sae.d_sae=[64,256]"]) == EXIT_FINISHED
    assert "for 2 SAEs" in capsys.readouterr().out


@pytest.mark.parametrize("command", [[], ["run"], ["resume"], ["export"], ["estimate"], ["bench"]])
def test_every_example_in_the_help_texts_parses(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*command, "--help"]) == 0
    text = capsys.readouterr().out
    assert all(len(line) <= 120 for line in text.splitlines())
    examples = [line.strip() for line in text.splitlines() if line.startswith("  sae-train ")]
    assert examples
    for example in examples:
        words = shlex.split(re.split(r"\s{2,}", example)[0])
        make_parser().parse_args(words[1:])


def test_help_texts_and_messages_name_the_console_script(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for words in (["--help"], ["run", "--help"], ["run"], ["stop", str(tmp_path), "--finish"]):
        main(words)
        output = "".join(capsys.readouterr())
        assert output
        assert "python -m" not in output
        assert "sae-train" in output or words[0] == "stop"


def test_a_read_only_disk_is_reported_in_one_line(
    job_file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(30, "Read-only file system", "/mnt/out")

    monkeypatch.setattr("trainer.cli.new_run", refuse)
    assert main(["run", str(job_file), "--out", str(tmp_path / "out")]) == EXIT_FAILED
    assert capsys.readouterr().err == "/mnt/out: Read-only file system\n"


def run_where_the_folder_was_deleted(tmp_path: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run the trainer from a deleted working folder."""
    gone = tmp_path / "gone"
    gone.mkdir()
    command = ["sh", "-c", 'rmdir "$PWD"; exec "$@"', "sh", sys.executable, "-m", "trainer", *map(str, arguments)]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    return subprocess.run(command, cwd=gone, env=environment, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize(
    ("arguments", "named"),
    slow_unless(
        lambda arguments, named: named == "--out" or arguments[0] in ("resume", "export", "rank"),
        [
            (["run", "job.toml"], "job.toml"),
            (["run", "JOB"], "--out"),
            (["run", "JOB", "--out", "out"], "out"),
            (["join", "JOB", "--out", "out"], "out"),
            (["resume", "out"], "out"),
            (["export", "out", "--out", "/tmp/sae"], "out"),
            (["export", "/out", "--out", "sae"], "sae"),
            (["estimate", "job.toml"], "job.toml"),
            (["bench", "job.toml"], "job.toml"),
            (["rank", "ranks.json"], "ranks.json"),
        ],
    ),
)
def test_a_relative_path_in_a_deleted_working_folder_produces_a_one_sentence_error(
    arguments: list[str], named: str, job_file: Path, tmp_path: Path
) -> None:
    words = [str(job_file) if argument == "JOB" else argument for argument in arguments]
    done = run_where_the_folder_was_deleted(tmp_path, *words)
    way_out = "change to another folder, or give an absolute path"
    assert (done.returncode, done.stdout) == (EXIT_USAGE, "")
    assert done.stderr == f"{named}: the working folder was deleted; {way_out}\n"


@pytest.mark.slow
def test_a_run_with_absolute_paths_works_in_a_deleted_working_folder(job_file: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = run_where_the_folder_was_deleted(tmp_path, "run", job_file, "--out", out)
    assert done.returncode == EXIT_FINISHED, done.stderr
    exported = run_where_the_folder_was_deleted(tmp_path, "export", out, "--out", tmp_path / "sae")
    assert exported.returncode == EXIT_FINISHED, exported.stderr
    assert (tmp_path / "sae" / "cfg.json").exists()


@pytest.fixture
def on_four_gpus(tiny: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write a job that runs a language model, and simulate four GPUs and ranks that only print their environment."""
    gpus = [Device(index, f"GPU-{index}", "NVIDIA H100", 80 * 2**30) for index in range(4)]
    for module in ("trainer.cli", "trainer.ranks.device_choice"):
        monkeypatch.setattr(f"{module}.visible_gpus", lambda: gpus)
        monkeypatch.setattr(f"{module}.torch_vendor", lambda: "nvml")
    names = ("RANK", "WORLD_SIZE", "CUDA_VISIBLE_DEVICES")
    code = f"import os; print(*(os.environ[name] for name in {names}))"
    monkeypatch.setattr("trainer.ranks.foreground.rank_command", lambda *_, **__: [sys.executable, "-c", code])
    monkeypatch.setenv("SAE_TUI_DATA_DIR", str(tmp_path / "data"))
    (text := tmp_path / "text.txt").write_text("\n".join(sentences(9)))
    data = {"source": "model", "model": str(tiny("gpt2")), "hook": "resid_post.1", "text": str(text), "context": 32}
    job, problems = parse_job({"data": data, "sae": {"d_sae": 64, "k": 4}, "train": {"n_steps": 20}})
    assert job, problems
    (file := tmp_path / "job.toml").write_text(dump_job(job.replace("launch", gpus="auto:4")))
    return file


def test_model_only_gpus_have_no_rank_and_a_resumed_run_may_change_their_number(
    on_four_gpus: Path, tmp_path: Path
) -> None:
    out, apart = tmp_path / "out", ["--set", "data.model_gpus=2"]
    assert main(["run", str(on_four_gpus), "--out", str(out), *apart]) == EXIT_FINISHED
    logs = [file.read_text() for file in sorted((out / "logs").glob("rank*"))]
    assert logs == [f"{rank} 2 GPU-0,GPU-1,GPU-2,GPU-3\n" for rank in range(2)]
    Checkpoints(out / "checkpoints").save({}, Position(10, 1280))
    placed = []
    for attempt, overrides in enumerate(
        ([], ["data.model_gpus=auto"], ["data.model_gpus=3"], ["data.model_gpus=0"]), 2
    ):
        assert main(["resume", str(out), *(part for one in overrides for part in ("--set", one))]) == EXIT_FINISHED
        spec = read_spec(out / f"attempt{attempt}" / "ranks.json")
        placed.append((spec.world_size, spec.model_gpus, len(spec.gpu_uuids)))
    assert placed == [(2, 2, 4), (2, 2, 4), (1, 3, 4), (4, 0, 4)]


def test_an_estimate_shows_the_memory_on_a_model_only_gpu(
    on_four_gpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def estimate(*overrides: str) -> dict[str, Any]:
        arguments = ["estimate", str(on_four_gpus), *overrides]
        assert main([*arguments, "--json"]) == EXIT_FINISHED
        answer = json.loads(capsys.readouterr().out)
        assert main(arguments) == EXIT_FINISHED
        return dict(answer | {"lines": capsys.readouterr().out})

    # Without ZeRO-1, every rank holds all weights in fp32, regardless of the number of ranks.
    whole = "--set", "parallel.zero=false"
    apart = estimate(*whole, "--set", "data.model_gpus=2")
    together = estimate(*whole, "--set", "data.model_gpus=0")
    assert (apart["model_gpus"], together["model_gpus"], together["per_model_gpu"]) == (2, 0, None)
    assert apart["per_gpu"]["weights"] < together["per_gpu"]["weights"]
    assert apart["per_gpu"]["weights"] + apart["per_model_gpu"]["weights"] == together["per_gpu"]["weights"]
    assert "\nper GPU that only runs the language model: " in apart["lines"]
    assert "\nthe language model has 2 of 4 GPUs to itself\n" in apart["lines"]
    assert "\nthe language model shares the training GPUs: with " in estimate()["lines"]
