"""Tests for the `doctor` command."""

from __future__ import annotations

import json
import os
import tempfile
import threading
from pathlib import Path

import pytest

from sae_tui import cli
from sae_tui.cli_commands import context
from sae_tui.cli_commands import doctor as command
from sae_tui.cli_commands.parser import make_parser
from sae_tui.doctor.machine import check_open_files
from sae_tui.doctor.storage import check_space
from sae_tui.doctor.trust import check_owner
from trainer.contract.paths import DataDir


@pytest.fixture
def quick_torch(shell):
    """Install a fake package named torch that imports instantly."""
    site = shell.folder / "site"
    site.mkdir()
    (site / "torch.py").write_text(
        "from types import SimpleNamespace as N\n__version__ = '2.9.0+cpu'\nversion = N(cuda=None)\n"
        "distributed = N(is_available=lambda: False)\n"
        "cuda = N(is_available=lambda: False, device_count=lambda: 0, get_arch_list=list)\n"
    )
    shell.env["PYTHONPATH"] = f"{site}:{shell.env.get('PYTHONPATH', '')}"
    return shell


def test_every_finding_has_a_level_a_subject_and_a_sentence(quick_torch) -> None:
    report = quick_torch.json("doctor")
    assert report["ok"] is True
    assert report["job"] is None
    assert {"driver", "shared memory", "disk", "SQLite", "SLURM", "logout", "torch"} <= {
        finding["subject"] for finding in report["findings"]
    }
    for finding in report["findings"]:
        assert finding.keys() == {"level", "subject", "sentence", "remedy"}
        assert finding["level"] in ("ok", "note", "warning", "error")


def test_a_finding_shows_a_sign_and_its_level_and_is_followed_by_its_remedy(quick_torch) -> None:
    lines = quick_torch.run("doctor").stdout.splitlines()
    (driver,) = [place for place, line in enumerate(lines) if " driver " in line]
    assert lines[driver].startswith("• note     driver         this machine has 4 simulated GPUs")
    assert lines[driver + 1] == " " * 26 + "→ leave out --demo to check the real machine"
    assert lines[-1].endswith(" ok")


def test_an_error_finding_results_in_exit_code_1(quick_torch) -> None:
    report = quick_torch.json("doctor", code=1, SAE_TUI_SIMULATED_FAULTS="1:lost")
    assert report["ok"] is False
    (error,) = [finding for finding in report["findings"] if finding["level"] == "error"]
    assert (error["subject"], "fallen off the bus" in error["sentence"]) == ("GPU 1", True)


def test_a_torch_that_cannot_be_imported_is_an_error(quick_torch) -> None:
    (quick_torch.folder / "site" / "torch.py").write_text("import no_such_library")
    assert "✗ error    torch          it cannot be imported" in quick_torch.run("doctor", code=1).stdout


def test_the_shells_locale_is_checked(quick_torch) -> None:
    report = quick_torch.json("doctor", LANG="C", LC_ALL="", LC_CTYPE="")
    (characters,) = [finding for finding in report["findings"] if finding["subject"] == "characters"]
    assert (characters["level"], characters["sentence"].split(",")[0]) == ("warning", "LANG=C is not UTF-8")


def test_without_gpus_the_doctor_says_that_jobs_run_on_the_cpu(quick_torch) -> None:
    report = quick_torch.json("--gpu-source", "none", "doctor")
    (driver,) = [finding for finding in report["findings"] if finding["subject"] == "driver"]
    assert "jobs run on the CPU" in driver["sentence"]


def test_access_by_other_users_is_reported_first(quick_torch) -> None:
    # Unlike a test's temporary folder, this one can be made accessible to all users.
    with tempfile.TemporaryDirectory() as folder:
        data = DataDir(Path(folder) / "demo")
        data.create()
        for place in (data.root.parent, data.root):
            place.chmod(0o755)
        data.settings_file.write_text("")
        data.settings_file.chmod(0o644)
        owner, readers = quick_torch.json("--data-dir", folder, "doctor")["findings"][:2]
    assert (owner["subject"], owner["level"], readers["level"]) == ("owner", "ok", "warning")
    assert readers["sentence"].endswith("is open to group and others, such as settings.toml")


def test_for_a_job_file_the_memory_time_and_cost_on_1_to_8_gpus_are_shown(quick_torch) -> None:
    job = quick_torch.json("doctor", quick_torch.job_file, "--price-per-gpu-hour", "2.5")["job"]
    assert (job["name"], job["price_per_gpu_hour"]) == ("from-the-shell", 2.5)
    assert sorted({row["n_gpus"] for row in job["rows"]}) == [1, 2, 4, 8]
    assert all(row["memory_bytes"] > 0 for row in job["rows"])
    for row in job["rows"]:
        assert row["cost"] == pytest.approx(row["n_gpus"] * row["seconds"] * 2.5 / 3600)
        assert row["efficiency"] == pytest.approx(row["speed_up"] / row["n_gpus"])
        assert row["is_measured"] is False
    assert [finding["subject"] for finding in job["findings"]] == ["speeds", "job"]
    out = quick_torch.run("doctor", quick_torch.job_file, "--gpus", "1,2").stdout
    assert "fits on GPU 1,2" in out
    (headings,) = [line.split() for line in out.splitlines() if line.startswith("GPUS")]
    assert headings == ["GPUS", "MODE", "MEMORY", "TIME", "TOKENS/S", "SPEED-UP", "EFFICIENCY", "HERE"]


@pytest.mark.parametrize(
    ("arguments", "level", "said"),
    [
        ((), "ok", "memory unknown, so it gets idle GPUs; it can start now with --gpus 0"),
        (
            ("--gpus", "auto:2", "--set", "command.memory=9GiB"),
            "ok",
            "9.0 GiB on each GPU; it can start now with --gpus 0,1",
        ),
        (("--gpus", "cpu"), "ok", "it runs on the CPU: --gpus cpu"),
        (("--gpus", "3"), "warning", "no GPU is available (GPU 3: used by mallory"),
        (
            ("--set", "command.memory=99GiB"),
            "error",
            "command.memory: is 99.0 GiB on each GPU, but the largest GPU here",
        ),
        (("--set", "command.folder=/nowhere"), "error", "command.folder: is not a folder: /nowhere"),
    ],
)
def test_for_a_command_the_doctor_says_where_it_can_start_or_why_not(
    shell, monkeypatch, capsys, arguments, level, said
):
    monkeypatch.setattr(command, "CHECKS", ())
    monkeypatch.setenv("SAE_TUI_DATA_DIR", shell.env["SAE_TUI_DATA_DIR"])
    shell.job_file.write_text('kind = "command"\n[command]\nargv = ["sleep", "1"]\n')
    code = cli.main(["--demo", "doctor", str(shell.job_file), "--allow-code", "--json", *arguments])
    report = json.loads(capsys.readouterr().out)["job"]
    last = report["findings"][-1]
    assert (code, report["name"], report["rows"], last["level"]) == (level == "error", "sleep 1", [], level)
    assert said in last["sentence"]
    cli.main(["--demo", "doctor", str(shell.job_file), "--allow-code", *arguments])
    assert "SPEED-UP" not in (text := capsys.readouterr().out)
    assert text.startswith("\nsleep 1:\n")


@pytest.mark.slow
def test_for_a_job_on_the_cpu_the_rows_list_only_numbers_of_processes(quick_torch) -> None:
    job = quick_torch.json("doctor", quick_torch.job_file, "--gpus", "cpu")["job"]
    assert job["rows"]
    assert all(row["n_gpus"] == 0 for row in job["rows"])
    out = quick_torch.run("doctor", quick_torch.job_file, "--gpus", "cpu", "--price-per-gpu-hour", "2").stdout
    (headings,) = [line.split() for line in out.splitlines() if line.startswith("PROCESSES")]
    assert "COST" not in headings


@pytest.mark.slow
def test_the_bus_is_probed_only_on_request(quick_torch) -> None:
    assert all(finding["subject"] != "bus" for finding in quick_torch.json("doctor")["findings"])
    bus = quick_torch.json("doctor", "--probe")["findings"][-1]
    assert (bus["subject"], bus["level"]) == ("bus", "note")


@pytest.mark.parametrize("price", ["-1", "free", "inf", "nan"])
def test_an_invalid_price_is_a_usage_error(shell, price) -> None:
    (line,) = shell.errors("doctor", f"--price-per-gpu-hour={price}", code=2)
    assert f'must be a price like 2.5, not "{price}"' in line


def test_a_job_file_with_an_error_is_rejected_before_any_check(shell) -> None:
    shell.job_file.write_text("[sae]\nk = 0\n")
    done = shell.run("doctor", shell.job_file, code=1)
    assert done.stdout == ""
    assert "sae.k" in done.stderr


def test_the_doctor_creates_no_files(quick_torch) -> None:
    quick_torch.run("doctor")
    assert not quick_torch.data.root.exists()


def test_an_unresponsive_data_folder_makes_commands_exit_but_not_the_doctor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hung, listdir = threading.Event(), os.listdir

    def hang(folder: object) -> list[str]:
        if folder == tmp_path:
            hung.wait()
        return listdir(folder)

    monkeypatch.setattr(context.os, "listdir", hang)
    monkeypatch.setattr(context, "_LIMIT_S", 0.05)
    monkeypatch.setattr(command, "CHECKS", (check_owner, check_space, check_open_files))
    parser = make_parser(lambda *_: 0)
    flags = parser.parse_args(["jobs", "--data-dir", str(tmp_path)])
    assert cli._run(flags) == 1
    assert f"the data folder {tmp_path} does not respond within 0.05 s: its disk or file server hangs" in (
        capsys.readouterr().err
    )
    flags = parser.parse_args(["doctor", "--json", "--data-dir", str(tmp_path)])
    flags.folder_limit_s = 0.05
    assert cli._run(flags) == 1
    findings = json.loads(capsys.readouterr().out)["findings"]
    assert [(one["level"], one["subject"]) for one in findings] == [
        ("error", "data folder"), ("ok", "open files"), ("note", "not checked"),
    ]  # fmt: skip
    assert findings[-1]["sentence"] == "owner and space"
    hung.set()
