from __future__ import annotations

import dataclasses
import errno
import json
import os
import shutil
from contextlib import closing
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support import toy_architecture, toy_optimizer
from support.environments import answer as answer_of_python
from support.environments import stand_in
from support.tui import StillMonitor, put_into_row, record_job, wait_until
from textual.widgets import Button, Input, Static

from sae_tui.format import wrap
from sae_tui.gpu.base import GpuSample
from sae_tui.gpu.none import NoGpus
from sae_tui.gpu.simulated import Simulated
from sae_tui.jobs.gpus.availability import GpuChoice
from sae_tui.jobs.launch import job_form, kept_draft
from sae_tui.jobs.launch.inspecting import DataFinding, Inspected, Inspections
from sae_tui.jobs.shard_headers import ShardHeaders
from sae_tui.panels import gpu_picker
from sae_tui.panels.gpu_picker import GpuPicker
from sae_tui.panels.jobs import JobsPanel
from sae_tui.panels.memory_bar import MemoryBar
from sae_tui.screens.launch import LaunchScreen, inspection_lines
from sae_tui.settings import load_settings
from sae_tui.widgets.ask import Ask
from sae_tui.widgets.confirm import Confirm
from sae_tui.widgets.reading import LinesScreen, Page
from sae_tui.widgets.setting_form import FieldHelp, SettingForm, SettingRow
from trainer.contract.errors import UserError
from trainer.contract.paths import DataDir
from trainer.contract.process import ProcessRef
from trainer.contract.settings.catalog import ARCHITECTURES, OPTIMIZERS, SOURCES
from trainer.contract.settings.extract import ExtractJob
from trainer.contract.settings.inspectors import inspecting_by
from trainer.contract.settings.job_file import load_as, load_job, members
from trainer.contract.settings.shards import Shard, ShardSet
from trainer.contract.store.job_store import Control
from trainer.contract.store.states import JobState

WIDE = (130, 45)


def job_of(screen: LaunchScreen):
    """Return the job from the latest review, or None if the form has errors."""
    return screen.form.review.job


async def opened(pilot, app) -> LaunchScreen:
    await pilot.press("n")
    await wait_until(pilot, lambda: isinstance(app.screen, LaunchScreen))
    screen = app.screen
    await wait_until(
        pilot, lambda: screen.query_one("#row-name", SettingRow).text == "quick" and screen.form.review.needed_bytes
    )
    return screen


async def reviewed(pilot, screen, *words: str) -> str:
    await wait_until(pilot, lambda: all(word in screen.form.review.text for word in words))
    return screen.form.review.text


async def type_into(pilot, screen, path: str, text: str) -> SettingRow:
    row = screen.query_one(f"#row-{path.replace('.', '-')}", SettingRow)
    await put_into_row(pilot, path.replace(".", "-"), text)
    return row


async def test_free_gpus_are_ticked_and_a_busy_one_shows_its_user(make_app) -> None:
    app = make_app(4)
    async with app.run_test(size=WIDE) as pilot:
        screen = await opened(pilot, app)
        picker = screen.query_one(GpuPicker)
        assert picker.chosen == {0, 1, 2}
        lines = picker.plain.splitlines()
        assert lines[1].startswith("[x] GPU 0")
        assert "24.0 GiB" in lines[1]
        assert "available" in lines[1]
        assert lines[4].startswith("[ ] GPU 3")
        assert "mallory" in lines[4]
        assert "31415" in lines[4]


class Hiding(Simulated):
    """Simulated GPUs: GPU 0 is full but has no visible processes, GPU 1 does not report its memory, and GPU 2
    is split.
    """

    def sample(self, index: int, *, processes: bool) -> GpuSample:
        changes = {
            0: {"memory_used_bytes": 20 << 30, "utilization": 98},
            1: {"memory_used_bytes": None, "memory_total_bytes": None, "memory_free_bytes": None},
            2: {"unusable": "it is split into MIG instances"},
        }
        return dataclasses.replace(super().sample(index, processes=processes), **changes.get(index, {}))


@pytest.mark.parametrize("default", ["available", "all"])
async def test_gpus_with_unknown_use_or_memory_can_only_be_ticked_by_hand(make_app, default) -> None:
    app = make_app(monitor=StillMonitor(source=Hiding(5, clock=lambda: 0.0)), default_gpu_selection=default)
    async with app.run_test(size=WIDE) as pilot:
        screen = await opened(pilot, app)
        picker = screen.query_one(GpuPicker)
        assert picker.chosen == ({4} if default == "available" else {0, 3, 4})
        assert "in use (98 %, 20.0 GiB) by an unseen process" in picker.plain.splitlines()[1]
        assert "free memory unknown" in picker.plain.splitlines()[2]
        for key in ("a", "r"):
            await pilot.press(key)
            assert picker.chosen == {4}
        await pilot.press("home", "space")
        assert isinstance(app.screen, Confirm)
        await pilot.press("n", "down", "space")
        assert picker.chosen == {1, 4}


@pytest.mark.parametrize(
    ("default", "expected"),
    [("available", {0, 1, 2}), ("best", {0}), ("all", {0, 1, 2, 3}), ("manual", set())],
)
async def test_a_setting_chooses_which_gpus_are_ticked(make_app, default, expected) -> None:
    app = make_app(4, default_gpu_selection=default)
    async with app.run_test(size=WIDE) as pilot:
        screen = await opened(pilot, app)
        await wait_until(pilot, lambda: screen.query_one(GpuPicker).chosen == expected)


async def test_the_review_says_if_more_gpus_do_not_pay_off_and_a_key_selects_fewer(make_app) -> None:
    app = make_app(16)
    async with app.run_test(size=WIDE) as pilot:
        screen = await opened(pilot, app)
        text = await reviewed(pilot, screen, "12 GPUs, about ", "press F2, then r")
        assert "; 1 GPU would take " in text
        assert "effective batch 768 = 64 × 12 (512 on 1 GPU)" in text
        await pilot.press("r")
        assert screen.query_one(GpuPicker).chosen == {0}
        text = await reviewed(pilot, screen, "1 GPU, single", "effective batch 512 ·")
        assert "press F2" not in text


@pytest.mark.parametrize("default", ["best", "available"])
async def test_if_all_suitable_gpus_are_busy_the_form_waits_for_any_of_them(make_app, default: str) -> None:
    class Taken(Simulated):
        def sample(self, index: int, *, processes: bool) -> GpuSample:
            taken = super().sample(3, processes=processes)
            return dataclasses.replace(taken, index=index, uuid=f"GPU-{index}")

    app = make_app(monitor=StillMonitor(source=Taken(4, clock=lambda: 0.0)), default_gpu_selection=default)
    async with app.run_test(size=WIDE) as pilot:
        screen = await opened(pilot, app)
        await wait_until(pilot, lambda: screen.query_one(GpuPicker).gpus == "auto:1")


async def test_a_clone_keeps_its_gpus_if_the_best_gpus_are_the_default(make_app, data) -> None:
    config = 'name = "first"\n[data]\npath = "data/sample"\n[launch]\ngpus = [1, 2]\n'
    record_job(data, "first", JobState.FINISHED, config=config)
    app = make_app(4, default_gpu_selection="best")
    async with app.run_test(size=WIDE) as pilot:
        await wait_until(pilot, lambda: app.session.jobs)
        await pilot.press("y")
        await wait_until(pilot, lambda: isinstance(app.screen, LaunchScreen) and job_of(app.screen))
        assert app.screen.query_one(GpuPicker).chosen == {1, 2}


@pytest.mark.parametrize(
    ("gpus", "row", "after"),
    [("'cpu'", "cpu", "cpu:2"), ("'auto:2'", "any", "auto:3"), ("[1, 2]", "1", [2]), ("[3, 2]", "2", [])],
)
async def test_space_in_a_clone_changes_the_devices_that_the_job_used(
    make_app, data, monkeypatch, gpus, row, after
) -> None:
    monkeypatch.setattr(gpu_picker, "_cores", lambda: 4)
    config = f'name = "first"\n[data]\npath = "data/sample"\n[launch]\ngpus = {gpus}\n'
    record_job(data, "first", JobState.FINISHED, config=config)
    app = make_app(4)
    async with app.run_test(size=WIDE) as pilot:
        await wait_until(pilot, lambda: app.session.jobs)
        await pilot.press("y")
        await wait_until(pilot, lambda: isinstance(app.screen, LaunchScreen) and app.screen.form.review.summary)
        picker = app.screen.query_one(GpuPicker)
        await pilot.press("f2")
        assert picker.cursor == row
        await pilot.press("space")
        assert picker.gpus == after
        offered = [note.message for note in app._notifications if note.message.startswith("All free GPUs are selected")]
        assert not offered


async def test_on_a_shared_machine_the_best_gpus_are_offered_once_as_the_default(make_app, data) -> None:
    offers = "All free GPUs are selected. Press F2, then R"
    app = make_app(4)
    async with app.run_test(size=WIDE) as pilot:
        screen = await opened(pilot, app)
        assert [note.message for note in app._notifications if note.message.startswith(offers)]
        await pilot.press("R")
        await wait_until(pilot, lambda: screen.query_one(GpuPicker).chosen == {0})
        assert load_settings(data.settings_file)[0].default_gpu_selection == "best"
    app = make_app(4)
    async with app.run_test(size=WIDE) as pilot:
        await opened(pilot, app)
        assert not [note.message for note in app._notifications if note.message.startswith(offers)]


async def test_only_one_gpu_can_be_ticked_if_multi_gpu_is_disabled(make_app) -> None:
    app = make_app(4, multi_gpu_enabled=False)
    async with app.run_test(size=WIDE) as pilot:
        screen = await opened(pilot, app)
        picker = screen.query_one(GpuPicker)
        assert picker.chosen == {0}
        await pilot.press("down", "space")
        assert picker.chosen == {1}
        await pilot.press("r")
        assert len(picker.chosen) == 1


async def test_a_busy_gpu_is_ticked_only_after_confirmation(make_app) -> None:
    app = make_app(4)
    async with app.run_test(size=WIDE) as pilot:
        screen = await opened(pilot, app)
        picker = screen.query_one(GpuPicker)
        await pilot.press("end", "up", "up", "space")
        assert isinstance(app.screen, Confirm)
        assert "mallory" in app.screen.question
        await pilot.press("n")
        assert picker.chosen == {0, 1, 2}
        await pilot.press("space", "y")
        assert picker.chosen == {0, 1, 2, 3}


async def test_a_lost_gpu_cannot_be_ticked(make_app) -> None:
    app = make_app(monitor=StillMonitor(source=Simulated(4, clock=lambda: 0.0, faults={0: "lost"})))
    async with app.run_test(size=WIDE) as pilot:
        screen = await opened(pilot, app)
        picker = screen.query_one(GpuPicker)
        assert picker.chosen == {1, 2}
        await pilot.press("home", "space")
        assert picker.chosen == {1, 2}
        assert "fallen off the bus" in picker.plain


async def test_the_review_follows_every_change(make_app) -> None:
    app = make_app(4)
    async with app.run_test(size=WIDE) as pilot:
        screen = await opened(pilot, app)
        await type_into(pilot, screen, "train.batch_size", "1024")
        text = await reviewed(pilot, screen, "3 GPUs, ", "effective batch 3072")
        assert "per GPU" in text
        assert ", estimated\n" in text
        await pilot.press("space")
        await reviewed(pilot, screen, "2 GPUs, ", "effective batch 2048")
        await type_into(pilot, screen, "train.batch_size", "512")
        await reviewed(pilot, screen, "effective batch 1024")


async def test_a_gpu_with_too_little_memory_shows_needed_and_free_memory(make_app) -> None:
    app = make_app(4)
    async with app.run_test(size=WIDE) as pilot:
        screen = await opened(pilot, app)
        await type_into(pilot, screen, "sae.d_sae", "4000000")
        await wait_until(pilot, lambda: "needs" in screen.query_one(GpuPicker).plain)
        assert "9.1 GiB free" in screen.query_one(GpuPicker).plain.splitlines()[3]


WRONG_VALUES = [
    ("sae.k", "0", "at least 1"),
    ("sae.k", "many", 'not "many"'),
    ("train.batch_size", "99999999", "at most"),
    ("data.path", "/nowhere/at/all", "nothing at"),
    ("train.lr", "-1", "above 0"),
    ("sae.k", "[16, 0]", "at least 1 (latents), not 0"),
    ("sae.k", "[16, 16]", "has a value twice"),
    ("sae.k", "[16, 32", 'not "[16, 32"'),
    ("sae.k", "[16, 100000]", "at most the number of latents"),
    ("train.batch_size", "[64, 128]", "must be an integer"),
]


async def test_an_invalid_value_is_reported_at_its_field_and_blocks_the_launch(make_app) -> None:
    app = make_app(4)
    async with app.run_test(size=WIDE) as pilot:
        screen = await opened(pilot, app)
        for path, value, problem in WRONG_VALUES:
            row = screen.query_one(f"#row-{path.replace('.', '-')}", SettingRow)
            right = row.text
            await type_into(pilot, screen, path, value)
            await wait_until(pilot, lambda row=row: row.has_class("-wrong"))
            assert problem in row.hint
            assert screen.query_one("#launch-button", Button).disabled
            await pilot.press("ctrl+l")
            await wait_until(pilot, lambda: not screen.form.has_to_answer)
            assert app.screen is screen
            assert not app.session.jobs
            await type_into(pilot, screen, path, right)
            await wait_until(pilot, lambda row=row: not row.has_class("-wrong") and job_of(screen))


async def test_all_wrong_settings_are_reported_at_once_even_if_this_machine_refuses_one(make_app) -> None:
    app = make_app(4)
    async with app.run_test(size=WIDE) as pilot:
        screen = await opened(pilot, app)
        for path, value in (("sae.k", "0"), ("train.lr", "-1"), ("data.path", "/nowhere/at/all")):
            await type_into(pilot, screen, path, value)
        await reviewed(pilot, screen, "sae.k: must be", "train.lr: must be", "data.path: there is nothing at")


async def test_all_settings_can_be_shown_without_losing_typed_values(make_app) -> None:
    app = make_app(4)
    async with app.run_test(size=WIDE) as pilot:
        screen = await opened(pilot, app)
        await type_into(pilot, screen, "sae.k", "24")
        shown = [row for row in screen.query(SettingRow) if row.display]
        await pilot.press("ctrl+t")
        everything = [row for row in screen.query(SettingRow) if row.display]
        assert len(shown) < len(everything) == len(job_form.form_fields({}))
        assert screen.query_one("#row-sae-k", SettingRow).text == "24"


async def test_a_job_file_can_be_saved_and_opened_again(make_app, tmp_path) -> None:
    app = make_app(4)
    path = tmp_path / "mine.toml"
    async with app.run_test(size=WIDE) as pilot:
        screen = await opened(pilot, app)
        await type_into(pilot, screen, "sae.k", "24")
        await reviewed(pilot, screen, "GPUs")
        await answer(pilot, app, "ctrl+s", path)
        await wait_until(pilot, path.exists)
        assert load_job(path).sae.settings.k == 24
        await type_into(pilot, screen, "sae.k", "8")
        await open_file(pilot, app, path)
        await wait_until(pilot, lambda: screen.query_one("#row-sae-k", SettingRow).text == "24")


async def test_an_unreadable_job_file_is_reported_in_one_sentence(make_app, tmp_path) -> None:
    app = make_app(4)
    broken = tmp_path / "broken.toml"
    broken.write_text("[sae\nk=3")
    async with app.run_test(size=WIDE) as pilot:
        await opened(pilot, app)
        await open_file(pilot, app, broken)
        await wait_until(pilot, lambda: any("not valid TOML" in note.message for note in app._notifications))


async def test_a_machine_without_gpus_offers_the_cpu(make_app) -> None:
    monitor = StillMonitor(1)
    monitor._latest = ()
    monitor.problem = str(NoGpus("no NVIDIA driver is installed")._reason)
    app = make_app(monitor=monitor)
    async with app.run_test(size=WIDE) as pilot:
        screen = await opened(pilot, app)
        assert screen.query_one(GpuPicker).gpus == "cpu"
        await reviewed(pilot, screen, "1 CPU process, single")
        await wait_until(pilot, lambda: job_of(screen) is not None)
        assert job_of(screen).launch.gpus == "cpu"
        assert "Toggle" in shown_bindings(screen).values()
        assert not {"All free", "Best"} & {*shown_bindings(screen).values()}


async def test_every_preset_is_a_valid_job(make_app, data) -> None:
    for preset in job_form.presets():
        table = job_form.flatten(job_form.read_job_table(preset))
        review = job_form.review(job_form.Draft(table, {}, "cpu"), [], data, [], cuda=False)
        assert review.job is not None, review.text


async def test_data_that_is_deleted_during_a_review_is_named_in_the_review(data, monkeypatch, tmp_path) -> None:
    table = job_form.flatten(job_form.read_job_table(job_form.default_preset()))
    rows = tmp_path / "rows"
    shutil.copytree("data/sample", rows)
    best = job_form.best_gpus

    def delete_first(*arguments: Any, **options: Any) -> Any:
        shutil.rmtree(rows)
        return best(*arguments, **options)

    monkeypatch.setattr(job_form, "best_gpus", delete_first)
    choices = [GpuChoice(0, "GPU-0", "H200", 141 << 30, 141 << 30, "available")]
    review = job_form.review(job_form.Draft(table | {"data.path": str(rows)}, {}, [0]), choices, data, [], cuda=True)
    assert review.job is None
    assert review.errors[0].path == "data.path"


async def test_the_form_is_kept_when_the_screen_is_left_and_reopened(make_app) -> None:
    app = make_app(4)
    async with app.run_test(size=WIDE) as pilot:
        screen = await opened(pilot, app)
        await type_into(pilot, screen, "name", "kept")
        await pilot.press("escape", "n")
        assert app.screen.query_one("#row-name", SettingRow).text == "kept"


async def test_a_draft_outlives_the_app_until_it_is_launched_or_discarded(make_app, data, monkeypatch) -> None:
    monkeypatch.setattr("sae_tui.jobs.launch.launching.detach.start", lambda *_: None)
    async with (app := make_app(4)).run_test(size=WIDE) as pilot:
        screen = await opened(pilot, app)
        assert not kept_draft.file_of(data, "train").exists()
        await type_into(pilot, screen, "sae.k", "24")
        await type_into(pilot, screen, "train.lr", "fast")
        await reviewed(pilot, screen, "train.lr")
        # The app exits here, without a quit command.
    left = kept_draft.file_of(data, "train")
    assert left.stat().st_mode & 0o777 == 0o600
    async with (app := make_app(4)).run_test(size=WIDE) as pilot:
        screen = await opened(pilot, app)
        assert any("Your draft is restored" in str(one.message) for one in app.notices)
        assert [screen.query_one(f"#row-{one}", SettingRow).text for one in ("sae-k", "train-lr")] == ["24", "auto"]
    assert left.exists()
    async with (app := make_app(4)).run_test(size=WIDE) as pilot:
        screen = await opened(pilot, app)
        screen.form.fill(job_form.default_preset())
        await wait_until(pilot, lambda: not left.exists())
        await type_into(pilot, screen, "sae.k", "8")
        await wait_until(pilot, left.exists)
        await pilot.press("ctrl+l")
        await wait_until(pilot, lambda: not isinstance(app.screen, LaunchScreen))
        await wait_until(pilot, lambda: not left.exists())


async def test_a_gpu_taken_by_another_job_in_the_meantime_is_shown_as_busy(make_app, data) -> None:
    app = make_app(4)
    async with app.run_test(size=WIDE) as pilot:
        screen = await opened(pilot, app)
        record_job(data, "other", JobState.RUNNING, gpu_ids=(1,), gpu_uuids=("GPU-51a0-sim-1",))
        await wait_until(pilot, lambda: "job 1" in screen.query_one(GpuPicker).plain)


async def test_launching_records_a_queued_job_and_returns_at_once(make_app, data, monkeypatch) -> None:
    started: list[int] = []
    monkeypatch.setattr("sae_tui.actions.KNOWN_WITHIN_S", 60.0)
    monkeypatch.setattr("sae_tui.jobs.launch.launching.enqueue", lambda data: started.append(data.last_id()) or "")
    app = make_app(4)
    async with app.run_test(size=WIDE) as pilot:
        screen = await opened(pilot, app)
        await type_into(pilot, screen, "train.n_tokens", "60000")
        await wait_until(pilot, lambda: job_of(screen) is not None and not screen.form.review.warnings)
        await pilot.press("ctrl+l")
        await wait_until(pilot, lambda: app.screen.id == "dashboard")
        await wait_until(pilot, lambda: app.session.jobs and started == [1])
        assert app.session.jobs[0].gpu_ids == (0, 1, 2)
        assert load_job(data.run(1).job_file).launch.gpus == [0, 1, 2]
        with closing(Control(data.control_db)) as control:
            control.update(1, waits_for="GPU 2 is lost")
        message = "Job 1 is waiting: GPU 2 is lost."
        await wait_until(pilot, lambda: message in [note.message for note in app._notifications])


FILE = """
name = "from-a-file"
[data]
path = "data/sample"
[train]
batch_size = 256
accumulate = 3
n_steps = 5
[launch]
gpus = {gpus}
max_restarts = 1
"""


async def answer(pilot, app, key: str, text: object) -> None:
    """Press a key that opens a text prompt, and enter the answer."""
    await pilot.press(key)
    await wait_until(pilot, lambda: isinstance(app.screen, Ask) and app.screen.query(Input))
    app.screen.query_one(Input).value = str(text)
    await pilot.press("enter")


async def open_file(pilot, app, path: Path) -> None:
    """Open a job file, and discard any changes to the form."""
    await answer(pilot, app, "ctrl+o", path)
    if isinstance(app.screen, Confirm):
        await pilot.press("y")


GPUS = [('"auto"', [0, 1, 2]), ("[1]", [1]), ("[0, 3]", [0]), ('"cpu:2"', "cpu:2"), ('"auto:2"', "auto:2")]


async def test_a_job_file_is_loaded_with_its_gpus_and_its_hidden_settings(make_app, tmp_path) -> None:
    path = tmp_path / "file.toml"
    app = make_app(4)
    async with app.run_test(size=WIDE) as pilot:
        screen = await opened(pilot, app)
        for gpus, chosen in GPUS:
            path.write_text(FILE.format(gpus=gpus))
            await open_file(pilot, app, path)
            await wait_until(
                pilot,
                lambda chosen=chosen: (
                    (job := job_of(screen)) and job.launch.gpus == chosen and job.name == "from-a-file"
                ),
            )
            assert job_of(screen).train.accumulate == 3
            assert job_of(screen).launch.max_restarts == 1


@pytest.mark.slow
async def test_on_a_cluster_the_user_chooses_the_number_of_gpus_per_node(make_app, tmp_path) -> None:
    path = tmp_path / "file.toml"
    path.write_text(FILE.format(gpus="[0, 5]") + 'backend = "slurm"\nnodes = 2\n')
    app = make_app(1)
    async with app.run_test(size=WIDE) as pilot:
        screen = await opened(pilot, app)
        picker = screen.query_one(GpuPicker)
        await open_file(pilot, app, path)
        await reviewed(pilot, screen, "4 GPUs")
        assert (picker.gpus, [row.key for row in picker.rows]) == ("auto:2", ["any", "cpu"])
        picker.focus()
        await pilot.press("home", "space")
        await reviewed(pilot, screen, "6 GPUs")
        await pilot.press("ctrl+t")
        await put_into_row(pilot, "launch-backend", "local")
        await wait_until(pilot, lambda: len(picker.rows) == 3)
        assert picker.gpus == [0]
        await open_file(pilot, app, path)
        await reviewed(pilot, screen, "4 GPUs")
        path.write_text(FILE.format(gpus='"auto:1"'))
        await open_file(pilot, app, path)
        await reviewed(pilot, screen, "1 GPU,")
        assert picker.gpus == "auto:1"
        path.write_text(FILE.format(gpus="[0, 5]") + 'backend = "slurm"\nnodes = 2\n')
        await open_file(pilot, app, path)
        await reviewed(pilot, screen, "4 GPUs")
        picker.focus()
        await pilot.press("r", "a")
        assert picker.gpus == "auto:2"
        path.write_text(FILE.format(gpus="[0]"))
        await open_file(pilot, app, path)
        await reviewed(pilot, screen, "1 GPU,")
        assert picker.gpus == [0]


async def test_a_list_typed_into_a_field_is_a_sweep(make_app, data, monkeypatch) -> None:
    monkeypatch.setattr("sae_tui.jobs.launch.launching.enqueue", lambda data: "")
    app = make_app(4)
    async with app.run_test(size=WIDE) as pilot:
        screen = await opened(pilot, app)
        await type_into(pilot, screen, "train.n_tokens", "60000")
        await type_into(pilot, screen, "sae.k", "[16, 32, 64]")
        await reviewed(pilot, screen, "3 SAEs: k=16, k=32, k=64 (hierarchical_topk ")
        assert not screen.query(".-wrong")
        await pilot.press("ctrl+l")
        await wait_until(pilot, data.run(1).job_file.exists)
        assert list(members(load_job(data.run(1).job_file))) == ["k=16", "k=32", "k=64"]


async def test_a_review_may_arrive_while_the_form_is_being_removed(make_app) -> None:
    app = make_app(4)
    async with app.run_test(size=WIDE) as pilot:
        screen = await opened(pilot, app)
        rows = screen.query_one(SettingForm).rows
        screen._detach()
        for row in rows:
            row.say("is wrong")
        screen._attach(app)


def model_of(folder: Path, n_parameters: int) -> Path:
    """Write the files that a review reads to estimate a language model's size."""
    folder.mkdir()
    config = {"hidden_size": 512, "num_hidden_layers": 8, "torch_dtype": "float32"}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "pytorch_model.bin").touch()
    os.truncate(folder / "pytorch_model.bin", 4 * n_parameters)
    return folder


async def pick_extraction(pilot, screen: LaunchScreen) -> LaunchScreen:
    """Switch to the form for extraction jobs, which is filled from its preset."""
    await pilot.press("f8")
    await wait_until(pilot, lambda: pilot.app.screen is not screen and pilot.app.screen.query("#row-model-path"))
    return pilot.app.screen


async def test_the_extraction_preset_shows_its_own_settings(make_app, data, tmp_path) -> None:
    text = tmp_path / "corpus.txt"
    text.write_text("the cat sat")
    app = make_app(4)
    async with app.run_test(size=WIDE) as pilot:
        screen = await opened(pilot, app)
        screen = await pick_extraction(pilot, screen)
        await reviewed(pilot, screen, "3 GPUs · 1,000,000 rows of 1 hook", "unknown")
        await type_into(pilot, screen, "model.path", str(model_of(tmp_path / "model", 10**7)))
        await type_into(pilot, screen, "model.hooks", "resid_post.4, mlp_out.5")
        await type_into(pilot, screen, "text.dataset", "")
        await type_into(pilot, screen, "text.path", str(text))
        await type_into(pilot, screen, "extract.n_tokens", "10k")
        await type_into(pilot, screen, "extract.output", str(tmp_path / "acts"))
        await reviewed(pilot, screen, "3 GPUs · 10,000 rows of 2 hooks, 512 wide · needs ", " per GPU, and ")
        assert not screen.query(SettingRow).filter("#row-sae-k")
        assert "Weights 38Mi" in screen.query_one(MemoryBar).plain
        await type_into(pilot, screen, "model.hooks", "resid_post.4, resid_post.4")
        await wait_until(pilot, lambda: screen.query_one("#row-model-hooks").has_class("-wrong"))


async def test_an_output_folder_containing_rows_is_reported_at_its_field(make_app, data, tmp_path) -> None:
    (tmp_path / "acts" / "resid_post.6").mkdir(parents=True)
    (tmp_path / "acts" / "resid_post.6" / "acts.safetensors").touch()
    app = make_app(4)
    async with app.run_test(size=WIDE) as pilot:
        screen = await opened(pilot, app)
        screen = await pick_extraction(pilot, screen)
        await type_into(pilot, screen, "model.hooks", "resid_post.6")
        await type_into(pilot, screen, "extract.output", str(tmp_path / "acts"))
        row = screen.query_one("#row-extract-output")
        await wait_until(pilot, lambda: row.has_class("-wrong"))
        assert "contains unrelated shards" in row.hint
        await type_into(pilot, screen, "extract.output", str(tmp_path / "new"))
        await wait_until(pilot, lambda: not row.has_class("-wrong"))


async def test_a_training_job_is_launched_after_the_job_that_is_still_writing_its_rows(
    make_app, data, monkeypatch, tmp_path
) -> None:
    monkeypatch.setattr("sae_tui.jobs.launch.launching.enqueue", lambda data: "")
    written = EXTRACTION.replace('"model"', f'"{model_of(tmp_path / "model", 10**7)}"')
    written = written.replace("n_tokens = 1000", f'n_tokens = 1_000_000\noutput = "{tmp_path / "acts"}"')
    record_job(data, "rows", JobState.QUEUED, config=written, supervisor=ProcessRef.current())
    app = make_app(4)
    async with app.run_test(size=WIDE) as pilot:
        screen = await opened(pilot, app)
        await wait_until(pilot, lambda: app.session.jobs)
        await type_into(pilot, screen, "data.path", str(tmp_path / "acts" / "mlp_out.2"))
        await reviewed(pilot, screen, "comes after job 1, whose rows it reads")
        assert screen.query_one("#row-sae-expansion_factor").has_class("-overridden")
        await pilot.press("ctrl+l")
        await wait_until(pilot, lambda: len(app.session.jobs) == 2)
        with closing(Control(data.control_db, readonly=True)) as control:
            assert (control.job(2).after, control.job(2).d_in) == ((1,), 512)


@pytest.mark.slow
async def test_an_extraction_can_be_launched_from_the_form_and_cloned_into_it(
    make_app, data, monkeypatch, tmp_path
) -> None:
    monkeypatch.setattr("sae_tui.jobs.launch.launching.enqueue", lambda data: "")
    file = tmp_path / "extract.toml"
    (tmp_path / "corpus.txt").write_text("the cat sat")
    model_of(tmp_path / "model", 10**7)
    file.write_text(EXTRACTION)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: ModuleSpec(name, None, origin="here"))
    app = make_app(4)
    async with app.run_test(size=WIDE) as pilot:
        screen = await opened(pilot, app)
        await open_file(pilot, app, file)
        await wait_until(pilot, lambda: (job := job_of(screen)) and job.name == "from-a-file")
        await pilot.press("ctrl+l")
        await wait_until(pilot, lambda: data.run(1).job_file.exists() and app.session.jobs)
        job = load_as(ExtractJob, data.run(1).job_file)
        assert job.model.path == str(tmp_path / "model")
        assert (job.model.hooks, job.launch.max_restarts) == (["resid_post.3", "mlp_out.2"], 2)
        await wait_until(pilot, lambda: app.screen.query(JobsPanel))
        await wait_until(pilot, lambda: app.session.jobs)
        app.screen.query_one(JobsPanel).focus()
        await pilot.press("y")
        await wait_until(pilot, lambda: isinstance(app.screen, LaunchScreen) and app.screen.query("#row-model-hooks"))
        await wait_until(pilot, lambda: (clone := job_of(app.screen)) and clone.model == job.model)
        assert app.screen.form.origin.job_id == 1


EXTRACTION = """
kind = "extract"
name = "from-a-file"
[model]
path = "model"
hooks = ["resid_post.3", "mlp_out.2"]
[text]
path = "corpus.txt"
[extract]
n_tokens = 1000
[launch]
gpus = [0]
max_restarts = 2
"""


SWEEP = """
name = "from-a-file"
[data]
path = "data/sample"
[sae]
architecture = ["topk", "batch_topk"]
k = [8, 16]
threshold_rate = 0.5
b_dec_init = ["mean", "zeros"]
[train]
batch_size = 256
n_steps = 5
deterministic = true
"""


async def test_a_sweep_in_a_job_file_shows_settings_for_all_its_architectures(make_app, tmp_path) -> None:
    path, again = tmp_path / "sweep.toml", tmp_path / "again.toml"
    path.write_text(SWEEP)
    app = make_app(4)
    async with app.run_test(size=WIDE) as pilot:
        screen = await opened(pilot, app)
        await open_file(pilot, app, path)
        await reviewed(pilot, screen, "8 SAEs: architecture=topk k=8 b_dec_init=mean, ")
        shown = {row.field.path: row.text for row in screen.query(SettingRow)}
        assert shown["sae.architecture"] == '["topk", "batch_topk"]'
        assert shown["sae.threshold_rate"] == "0.5"
        assert shown["train.deterministic"] == "true"
        job = job_of(screen)
        job_form.write_job(again, job)
        assert members(load_job(again)) == members(job)
        assert {sae.sae.architecture for sae in members(job).values()} == {"topk", "batch_topk"}
        assert job.train.deterministic


@pytest.mark.slow
async def test_architecture_settings_in_a_job_file_are_kept(make_app, tmp_path) -> None:
    path = tmp_path / "file.toml"
    path.write_text('[data]\npath = "data/sample"\n[sae]\narchitecture = "batch_topk"\nthreshold_rate = 0.125\n')
    app = make_app(4)
    async with app.run_test(size=WIDE) as pilot:
        screen = await opened(pilot, app)
        await pilot.press("ctrl+t")
        await open_file(pilot, app, path)
        await wait_until(pilot, lambda: job_of(screen) and job_of(screen).sae.architecture == "batch_topk")
        assert job_of(screen).sae.settings.threshold_rate == 0.125
        assert screen.query_one("#row-sae-threshold_rate", SettingRow).display


async def test_another_data_source_shows_its_own_settings(make_app) -> None:
    app = make_app(4)
    async with app.run_test(size=WIDE) as pilot:
        screen = await opened(pilot, app)
        await put_into_row(pilot, "data-source", "synthetic")
        await wait_until(pilot, lambda: screen.query("#row-data-n_features"))
        await wait_until(pilot, lambda: job_of(screen) and job_of(screen).data.source == "synthetic")
        assert job_of(screen).data_shape()[:3] == (64, None, 10_000_000)
        assert not screen.query("#row-data-path")


async def test_changing_the_architecture_keeps_the_focus(make_app) -> None:
    app = make_app(4)
    async with app.run_test(size=WIDE) as pilot:
        screen = await opened(pilot, app)

        def has_focus(row: str) -> bool:
            return any(widget.has_focus_within for widget in screen.query(row))

        screen.query_one("#row-sae-architecture", SettingRow).focus_editor()
        await put_into_row(pilot, "sae-architecture", "jumprelu")
        await wait_until(pilot, lambda: screen.query("#row-sae-bandwidth"))
        # The form is being rebuilt, so a row may be missing for a moment.
        await wait_until(pilot, lambda: has_focus("#row-sae-architecture") and screen.query("#row-sae-k"))
        screen.query_one("#row-sae-k", SettingRow).focus_editor()
        await put_into_row(pilot, "sae-architecture", "gated")
        await wait_until(pilot, lambda: not screen.query("#row-sae-bandwidth"))
        await wait_until(pilot, lambda: has_focus("#row-sae-k"))


@pytest.mark.slow
async def test_a_boolean_setting_offers_both_values(make_app) -> None:
    app = make_app(4)
    async with app.run_test(size=WIDE) as pilot:
        screen = await opened(pilot, app)
        row = screen.query_one("#row-train-deterministic", SettingRow)
        assert row.text == "false"
        await pilot.press("ctrl+t")
        assert row.text == "false"
        await put_into_row(pilot, "train-deterministic", "true")
        await wait_until(pilot, lambda: job_of(screen) is not None and job_of(screen).train.deterministic)


@pytest.mark.parametrize("size", [(80, 24), (120, 40)])
async def test_the_help_for_the_focused_field_is_shown_in_full_below_the_form(make_app, size) -> None:
    app = make_app(4)
    async with app.run_test(size=size) as pilot:
        screen = await opened(pilot, app)
        row, below = screen.query_one("#row-data-path", SettingRow), screen.query_one(FieldHelp)
        assert not below.display
        row.focus()
        await wait_until(pilot, lambda: below.display and below.size.height)
        assert str(below.content).startswith(f"path: {row.help}")
        assert below.size.width > size[0] - 6
        assert below.size.width * below.size.height >= len(str(below.content))
        assert row.size.height == 1
        await pilot.press("f2")
        await wait_until(pilot, lambda: not below.display)


@pytest.mark.parametrize("size", [(80, 24), (120, 40)])
async def test_the_help_below_the_form_says_what_each_source_reads(make_app, size) -> None:
    app = make_app(4)
    async with app.run_test(size=size) as pilot:
        screen = await opened(pilot, app)
        below = screen.query_one(FieldHelp)
        screen.query_one("#row-data-source", SettingRow).focus()
        await wait_until(pilot, lambda: below.display and below.size.height)
        text = str(below.content)
        assert all(f'"{name}": {entry.summary}' in text for name, entry in SOURCES.items())
        assert len(wrap(text, below.content_size.width)) == below.content_size.height


async def test_help_that_is_no_longer_on_the_screen_ignores_a_late_focus(make_app) -> None:
    app = make_app(4)
    async with app.run_test(size=(120, 40)) as pilot:
        screen = await opened(pilot, app)
        await (below := screen.query_one(FieldHelp)).remove()
        below.explain(screen.query_one("#row-data-source", SettingRow))
        assert not below.display


async def test_the_help_explains_the_current_choice_if_all_choices_need_too_much_space(make_app) -> None:
    app = make_app(4)
    async with app.run_test(size=(80, 24)) as pilot:
        screen = await opened(pilot, app)
        below = screen.query_one(FieldHelp)
        screen.query_one("#row-sae-architecture", SettingRow).focus()
        await wait_until(pilot, lambda: ARCHITECTURES["topk"].summary in str(below.content))
        assert ARCHITECTURES["gated"].summary not in str(below.content)
        await put_into_row(pilot, "sae-architecture", "gated")
        await wait_until(pilot, lambda: ARCHITECTURES["gated"].summary in str(below.content))


async def test_a_wide_window_shows_all_settings_in_columns(make_app) -> None:
    app = make_app(4)
    async with app.run_test(size=(200, 60)) as pilot:
        screen = await opened(pilot, app)
        form = screen.query_one(SettingForm)
        await wait_until(pilot, lambda: all(row.size.height for row in form.rows))
        assert len({row.region.x for row in form.rows}) == 3
        assert max(row.region.bottom for row in form.rows) <= screen.query_one("#form-scroll").region.bottom
        # A column has no space for help, so only the focused field's help is shown, in full, below the form.
        assert not any("…" in row.render().plain or row.help[:8] in row.render().plain for row in form.rows)
        form.focus_field("train.batch_size")
        await wait_until(pilot, lambda: "auto: " in str(screen.query_one(FieldHelp).content))
        assert screen.query_one(FieldHelp).size.height == 1
        await pilot.press("ctrl+t")
        assert {row.region.x for row in form.rows if row.display} == {form.rows[0].region.x}
        assert not any(row.display for row in form.rows if row.field.setting.advanced and not row.is_changed)
        await pilot.press("ctrl+t")
        assert all(row.display for row in form.rows)


async def test_the_launched_job_has_the_current_values_and_not_those_from_an_older_review(
    make_app, data, monkeypatch
) -> None:
    monkeypatch.setattr("sae_tui.jobs.launch.launching.enqueue", lambda data: "")
    app = make_app(4)
    async with app.run_test(size=WIDE) as pilot:
        screen = await opened(pilot, app)
        await type_into(pilot, screen, "train.n_tokens", "60000")
        await reviewed(pilot, screen, "GPUs")
        await put_into_row(pilot, "sae-d_sae", "999")
        screen.action_launch()
        await wait_until(pilot, data.run(1).job_file.exists)
        assert load_job(data.run(1).job_file).sae.d_sae == 999


async def test_a_failed_launch_returns_to_the_filled_form(make_app, monkeypatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("sae_tui.jobs.launch.launching.write_record", fail)
    app = make_app(4)
    async with app.run_test(size=WIDE) as pilot:
        screen = await opened(pilot, app)
        await type_into(pilot, screen, "train.n_tokens", "60000")
        await type_into(pilot, screen, "name", "kept")
        await pilot.press("ctrl+l")
        await wait_until(pilot, lambda: any("No space left" in note.message for note in app._notifications))
        assert app.screen.query_one("#row-name", SettingRow).text == "kept"


async def test_a_job_stays_queued_if_the_queue_process_does_not_start(make_app, data) -> None:
    (data.root / "queue.log").mkdir(parents=True)
    app = make_app(4)
    async with app.run_test(size=WIDE) as pilot:
        screen = await opened(pilot, app)
        await type_into(pilot, screen, "train.n_tokens", "60000")
        await pilot.press("ctrl+l")
        await wait_until(
            pilot, lambda: any("job 1 is queued, but" in note.message.lower() for note in app._notifications)
        )
        assert app.screen.id == "dashboard"
        assert app.session.jobs[0].state is JobState.QUEUED


async def test_an_invalid_path_is_reported_in_one_sentence(make_app) -> None:
    app = make_app(4)
    async with app.run_test(size=WIDE) as pilot:
        await opened(pilot, app)
        for path in ("~nobody-of-this-name/x.toml", "x" * 5000, "/proc/1/nothing.toml"):
            await open_file(pilot, app, Path(path))
            await wait_until(pilot, lambda: any("cannot be read" in note.message for note in app._notifications))
            app._notifications.clear()
            await answer(pilot, app, "ctrl+s", path)
            await wait_until(pilot, lambda: any("cannot write" in note.message for note in app._notifications))
            app._notifications.clear()


async def test_the_palette_survives_a_job_name_with_markup(make_app, data) -> None:
    record_job(data, "run [/x] [red]", JobState.RUNNING)
    app = make_app(4)
    async with app.run_test(size=WIDE) as pilot:
        await wait_until(pilot, lambda: app.session.jobs)
        await pilot.press("ctrl+p")
        await pilot.press(*"run")
        await pilot.pause(0.3)
        await pilot.press("escape")
        assert app.screen.id == "dashboard"


async def test_the_cursor_is_on_the_new_job_after_a_launch(make_app, data, monkeypatch) -> None:
    monkeypatch.setattr("sae_tui.jobs.launch.launching.enqueue", lambda data: "")
    record_job(data, "old", JobState.FINISHED)
    app = make_app(4)
    async with app.run_test(size=WIDE) as pilot:
        screen = await opened(pilot, app)
        await type_into(pilot, screen, "train.n_tokens", "60000")
        await pilot.press("ctrl+l")
        await wait_until(pilot, lambda: len(app.session.jobs) == 2 and app.screen.id == "dashboard")
        await wait_until(pilot, lambda: app.screen.query_one(JobsPanel).selected == 2)


def shown_bindings(screen) -> dict[str, str]:
    """Return the descriptions of the bindings in the footer, by key."""
    active = screen.active_bindings.values()
    return {one.binding.key: one.binding.description for one in active if one.binding.show and one.enabled}


async def test_keys_focus_gpus_settings_and_review_and_arrows_move_between_fields(make_app) -> None:
    app = make_app(4)
    async with app.run_test(size=WIDE) as pilot:
        screen = await opened(pilot, app)
        await pilot.press("f3")
        assert screen.query_one("#row-name").has_focus_within
        await pilot.press("down", "down", "down")
        assert screen.query_one("#row-sae-architecture").has_focus_within
        await pilot.press("up", "f2")
        assert screen.query_one(GpuPicker).has_focus
        await pilot.press("alt+2")
        assert screen.query_one("#row-data-path").has_focus_within
        await pilot.press("f4")
        assert screen.query_one("#launch-button").has_focus
        row = await type_into(pilot, screen, "sae.k", "0")
        await wait_until(pilot, lambda: row.has_class("-wrong"))
        await pilot.press("f2", "alt+3")
        assert row.has_focus_within


async def test_a_setting_is_found_by_part_of_its_name_even_if_the_setting_is_hidden(make_app) -> None:
    app = make_app(4)
    async with app.run_test(size=WIDE) as pilot:
        screen = await opened(pilot, app)
        row = screen.query_one("#row-train-grad_clip", SettingRow)
        assert not row.display
        await pilot.press("ctrl+f", *"clip", "enter")
        await wait_until(pilot, lambda: row.has_focus_within)
        assert row.display
        await pilot.press("ctrl+f", "down", "escape")
        assert row.has_focus_within


async def test_an_overridden_setting_is_dimmed_and_shows_its_effective_value(make_app) -> None:
    app = make_app(4)
    async with app.run_test(size=WIDE) as pilot:
        screen = await opened(pilot, app)
        row = screen.query_one("#row-sae-expansion_factor", SettingRow)
        await wait_until(pilot, lambda: row.hint.startswith("1.333 (from d_sae) · "))
        assert row.has_class("-overridden")
        await type_into(pilot, screen, "train.n_steps", "10")
        steps = screen.query_one("#row-train-n_tokens", SettingRow)
        await wait_until(pilot, lambda: steps.hint.startswith("122,880 (from n_steps) · "))
        await type_into(pilot, screen, "sae.d_sae", "")
        await wait_until(pilot, lambda: not row.has_class("-overridden"))


async def test_an_empty_field_shows_and_uses_its_default(make_app) -> None:
    app = make_app(4)
    async with app.run_test(size=WIDE) as pilot:
        screen = await opened(pilot, app)
        row = await type_into(pilot, screen, "train.batch_size", "")
        await wait_until(pilot, lambda: job_of(screen) and job_of(screen).train.batch_size == "auto")
        assert row.query_one(Input).placeholder == "auto"
        assert screen.query_one("#row-sae-d_sae", SettingRow).fill().placeholder == "none"


@pytest.mark.slow
async def test_comma_separated_values_are_a_sweep_and_enable_its_key(make_app) -> None:
    app = make_app(4)
    async with app.run_test(size=WIDE) as pilot:
        screen = await opened(pilot, app)
        assert "ctrl+g" not in shown_bindings(screen)
        await pilot.press("f3", "down", "down", "down", "down")
        help_line = screen.query_one(FieldHelp)
        await wait_until(pilot, lambda: "A list like 16,32,64 trains one SAE per value" in str(help_line.render()))
        await type_into(pilot, screen, "sae.k", "16,32,64")
        await reviewed(pilot, screen, "3 SAEs: k=16, k=32, k=64 ")
        assert shown_bindings(screen)["ctrl+g"] == "Each"
        row = await type_into(pilot, screen, "sae.d_sae", "512,768")
        await wait_until(pilot, lambda: "may be one number or several" in row.hint)


async def test_choosing_the_current_preset_again_resets_the_form_after_confirmation(make_app) -> None:
    app = make_app(4)
    async with app.run_test(size=WIDE) as pilot:
        screen = await opened(pilot, app)
        await type_into(pilot, screen, "sae.k", "0")
        await type_into(pilot, screen, "train.seed", "7")
        for answer, kept in (("n", "0"), ("y", "32")):
            screen.query_one("#preset").focus()
            await pilot.press("enter", "enter")
            await wait_until(pilot, lambda: isinstance(app.screen, Confirm))
            assert app.screen.question == "Replace your 2 changed settings with preset quick?"
            await pilot.press(answer)
            await wait_until(pilot, lambda kept=kept: screen.query_one("#row-sae-k", SettingRow).text == kept)
        assert screen.form.changed == []
        await wait_until(pilot, lambda: not screen.query_one("#changes", Static).render())


async def test_a_clone_replaces_a_changed_draft_only_after_confirmation(make_app, data) -> None:
    record_job(data, "first", JobState.FINISHED)
    app = make_app(4)
    async with app.run_test(size=WIDE) as pilot:
        await wait_until(pilot, lambda: app.session.jobs)
        screen = await opened(pilot, app)
        await type_into(pilot, screen, "sae.k", "8")
        await pilot.press("escape", "y")
        await wait_until(pilot, lambda: isinstance(app.screen, Confirm))
        assert app.screen.question == "A draft with 1 changed setting is kept. Replace it with the clone?"
        await pilot.press("n", "n")
        assert app.screen is screen
        await pilot.press("escape", "y", "y")
        await wait_until(pilot, lambda: isinstance(app.screen, LaunchScreen) and app.screen.form.origin)
        await wait_until(pilot, lambda: (clone := job_of(app.screen)) and clone.name == "first-2")
        assert "– (clone of job 1)" in str(app.screen.query_one("#preset").prompt)


async def test_in_a_text_field_the_footer_shows_the_help_key_that_works_there(make_app) -> None:
    app = make_app(4)
    async with app.run_test(size=WIDE) as pilot:
        screen = await opened(pilot, app)
        assert app.get_key_display(screen.active_bindings["question_mark"].binding) == "?"
        await pilot.press("f3")
        assert "question_mark" not in screen.active_bindings
        assert app.get_key_display(screen.active_bindings["f1"].binding) == "F1"


@pytest.mark.slow
async def test_a_registered_architecture_and_optimizer_show_their_settings(make_app, monkeypatch) -> None:
    monkeypatch.setitem(ARCHITECTURES, "loudest", toy_architecture.ENTRY)
    monkeypatch.setitem(OPTIMIZERS, "heavy_ball", toy_optimizer.ENTRY)
    app = make_app(4)
    async with app.run_test(size=WIDE) as pilot:
        screen = await opened(pilot, app)
        await put_into_row(pilot, "sae-architecture", "loudest")
        await wait_until(pilot, lambda: screen.query("#row-sae-n_loudest"))
        await type_into(pilot, screen, "sae.n_loudest", "10000")
        await reviewed(pilot, screen, "must be at most the number of latents")
        await type_into(pilot, screen, "sae.n_loudest", "16")
        await wait_until(pilot, lambda: job_of(screen) and job_of(screen).sae.settings.n_active == 16)
        await pilot.press("ctrl+t")
        await wait_until(pilot, lambda: screen.query("#row-train-optimizer"))
        await put_into_row(pilot, "train-optimizer", "heavy_ball")
        await wait_until(pilot, lambda: screen.query("#row-train-heaviness"))
        await wait_until(pilot, lambda: job_of(screen) and job_of(screen).train.optimizer == "heavy_ball")


async def test_a_key_reports_problems_with_the_stored_activations(make_app, monkeypatch) -> None:
    answers: list[Inspected | UserError] = [
        INSPECTED, msgspec.structs.replace(INSPECTED, findings=()), UserError("data.path: it cannot be read")
    ]  # fmt: skip

    def inspect(_: Inspections, place: str, is_over: object, python: str | None) -> Inspected:
        assert place.endswith("data/sample")
        if isinstance(answer := answers.pop(0), UserError):
            raise answer
        return answer

    monkeypatch.setattr(Inspections, "inspect", inspect)
    app = make_app(4)
    async with app.run_test(size=WIDE) as pilot:
        await opened(pilot, app)
        for words in ("warning: 3 rows are odd; leave them out", "No problems found."):
            await pilot.press("f5")
            await wait_until(pilot, lambda words=words: on_page(app, words))
            await pilot.press("escape")
            await wait_until(pilot, lambda: isinstance(app.screen, LaunchScreen))
        await pilot.press("f5")
        await wait_until(pilot, lambda: app.notices and "it cannot be read" in app.notices[-1].message)


INSPECTED = Inspected(100, 4, "F16", 100, 0.5, 1.0, 2.0, (DataFinding("warning", "3 rows are odd", "leave them out"),))


def on_page(app, words: str) -> bool:
    return isinstance(app.screen, LinesScreen) and any(words in page.plain for page in app.screen.query(Page))


def test_the_result_of_an_inspection_is_shown_in_full_at_any_width() -> None:
    for width in range(10, 90):
        lines = ["".join(text for text, _ in line) for line in inspection_lines("/a/long/path" * 9, INSPECTED, width)]
        assert all(len(line) <= width for line in lines)
        assert "".join(lines[-9:]).replace(" ", "").endswith("warning:3rowsareodd;leavethemout")


async def test_the_form_asks_before_it_loads_a_job_file_that_runs_code(make_app, tmp_path) -> None:
    python = stand_in(tmp_path / "given", f"touch {tmp_path}/ran; exit 1")
    file = tmp_path / "job.toml"
    file.write_text(f'name = "given"\n[data]\nsource = "synthetic"\nd_in = 8\n[launch]\npython = "{python}"\n')
    app = make_app(4)
    async with app.run_test(size=WIDE) as pilot:
        screen = await opened(pilot, app)
        for key, taken in (("n", None), ("y", str(python))):
            await answer(pilot, app, "ctrl+o", file)
            await wait_until(pilot, lambda: isinstance(app.screen, Confirm) and app.screen.query("#yes"))
            question = app.screen.question
            assert question.startswith(f"{file} runs code:\n  launch.python: runs `{python} -P -m trainer rank ...`")
            assert not (tmp_path / "ran").exists()
            await pilot.press(key)
            await wait_until(pilot, lambda: screen.query_one("#row-name", SettingRow).text == "given")
            values, _ = screen.query_one(SettingForm).values()
            assert values.get("launch.python") == taken
        await wait_until(pilot, (tmp_path / "ran").exists)


@pytest.mark.slow
async def test_the_review_waits_for_headers_read_by_the_trainer(make_app, tmp_path) -> None:
    os.mkfifo(tmp_path / "gate")
    (file := tmp_path / "acts.pt").write_bytes(b"not read here")
    found = ShardSet((Shard(0, 5000, 8, "F32", file=file),))
    (tmp_path / "answer").write_bytes(msgspec.json.encode(found, enc_hook=str))
    command = ["sh", "-c", f"read line < {tmp_path}/gate; cat {tmp_path}/answer"]
    app = make_app(4)
    with inspecting_by(ShardHeaders(DataDir(tmp_path / "data"), command).inspect):
        async with app.run_test(size=WIDE) as pilot:
            screen = await opened(pilot, app)
            await type_into(pilot, screen, "data.path", str(file))
            review = screen.query_one("#review", Static)
            await wait_until(pilot, lambda: str(review.content).startswith("reading the headers in "))
            await pilot.press("ctrl+l")
            (tmp_path / "gate").write_text("\n")
            await reviewed(pilot, screen, "needs ")


@pytest.mark.slow
async def test_another_python_environment_is_read_in_the_background_and_then_reviewed(make_app, tmp_path) -> None:
    os.mkfifo(tmp_path / "gate")
    python = stand_in(tmp_path, f"read line < {tmp_path}/gate; cat {tmp_path}/answer.json")
    (tmp_path / "answer.json").write_text(json.dumps(answer_of_python()))
    app = make_app(4, python=str(python))
    async with app.run_test(size=WIDE) as pilot:
        screen = await opened(pilot, app)
        await reviewed(pilot, screen, f"launch.python: {python} is being checked")
        await pilot.press("ctrl+l")
        await wait_until(pilot, lambda: "still being checked" in " ".join(one.message for one in app._notifications))
        (tmp_path / "gate").write_text("\n")
        await reviewed(pilot, screen, " · by Python 3.12.1, sae-tui ", "torch 2.9.0+cpu, built without CUDA")
        assert job_of(screen).launch.python == str(python)
        assert not screen.form.changed
        await pilot.press("ctrl+t")
        await type_into(pilot, screen, "launch.python", str(tmp_path))
        await reviewed(pilot, screen, f"{tmp_path} is a folder; name the Python interpreter in it")
        assert screen.query_one("#row-launch-python", SettingRow).has_class("-wrong")
        await type_into(pilot, screen, "launch.python", "")
        await wait_until(pilot, lambda: job_of(screen) and job_of(screen).launch.python is None)
