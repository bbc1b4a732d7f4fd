from __future__ import annotations

import pytest
from support.tui import StillMonitor, put_into_row, record_job, wait_until

from sae_tui.gpu.none import NoGpus
from sae_tui.gpu.simulated import Simulated
from sae_tui.jobs.gpus.availability import GpuChoice, fit
from sae_tui.jobs.launch import job_form
from sae_tui.jobs.launch.job_form import Review
from sae_tui.jobs.launch.memory_need import FreeMemory, Need, PeakMemory
from sae_tui.panels.gpu_picker import GpuPicker
from sae_tui.panels.headline import Headline
from sae_tui.panels.memory_bar import MemoryBar, memory_lines, short
from sae_tui.screens.launch import LaunchScreen
from sae_tui.screens.launch_form import review_lines
from sae_tui.widgets.setting_form import SettingForm, SettingRow
from trainer.contract.errors import Problem
from trainer.contract.planning.memory import Memory
from trainer.contract.settings.job_file import dump_job
from trainer.contract.store.states import JobState

GIB = 2**30
SIZES = [(80, 24), (120, 40)]
PARTS = Memory(3 * GIB, 3 * GIB, 6 * GIB, 2 * GIB, GIB, GIB, GIB // 2)
REMEDIES = ('train.precision = "bf16"', 'parallel.mode = "tensor"', "train.batch_size = 1024")
LACKING = Need(PARTS, 1, PeakMemory(41, 12 * GIB, "cuda"), REMEDIES, judged_lacking=True)


async def opened(pilot, app) -> tuple[LaunchScreen, MemoryBar]:
    await pilot.press("n")
    await wait_until(pilot, lambda: isinstance(app.screen, LaunchScreen) and app.screen.form.review.need)
    screen = app.screen
    panel = screen.query_one(MemoryBar)
    await wait_until(
        pilot, lambda: screen.query_one("#row-name", SettingRow).text == "quick" and "Weights" in panel.plain
    )
    # With this batch size, ddp is the fastest parallel mode.
    await put_into_row(pilot, "train-batch_size", "1024")
    await wait_until(pilot, lambda: (job := screen.form.review.job) and job.train.batch_size == 1024)
    return screen, panel


def drawn(need: Need, space: FreeMemory, width: int) -> list[str]:
    return ["".join(text for text, _ in line) for line in memory_lines(" 3  Review", need, space, width)]


@pytest.mark.parametrize("width", [80, 120])
def test_every_part_of_the_memory_is_a_segment_with_a_letter_in_the_legend(width) -> None:
    bar, legend, *_ = drawn(LACKING, FreeMemory(24 * GIB, "GPU 1"), width)
    assert [char for char in bar.partition("✓")[0].split("Review")[1] if char.isalpha()] == list("WGOAERC")
    assert "✓ 16.5 GiB of 24.0 GiB free on GPU 1" in bar
    assert bar.index("│") > bar.index("C")
    assert [part for part in legend.split() if part[0].isdigit()] == [
        "3.0Gi",
        "3.0Gi",
        "6.0Gi",
        "2.0Gi",
        "1.0Gi",
        "1.0Gi",
        "0.5Gi",
    ]
    assert all(name in legend for name in ("Weights", "Grad", "Opt", "Act", "Exch", "Re", "CUDA"))
    assert len(bar) < width
    assert len(legend) <= width


@pytest.mark.parametrize("width", [80, 120])
def test_a_job_that_does_not_fit_is_marked_in_the_bar_with_its_remedies(width) -> None:
    bar, _, *sentences = drawn(LACKING, FreeMemory(9 * GIB, "GPU 2"), width)
    assert "✗ 16.5 GiB of 9.0 GiB free on GPU 2" in bar
    assert bar.index("O") < bar.index("│") < bar.index("A")
    assert all(len(line) <= width for line in sentences)
    together = " ".join(sentences)
    assert "measured 12.0 GiB in job 41, without the CUDA context" in together
    assert "fits with precision = bf16, or mode = tensor, or batch_size = 1024" in together


def test_much_free_memory_is_drawn_as_an_arrow_and_unknown_free_memory_is_left_out() -> None:
    assert "→ ✓ 16.5 GiB of 80.0 GiB" in drawn(LACKING, FreeMemory(80 * GIB, "GPU 0"), 80)[0]
    bar = drawn(LACKING, FreeMemory(), 80)[0]
    assert bar.endswith(" 16.5 GiB")
    assert not set("│→✓✗") & set(bar)


def test_the_memory_of_several_processes_is_added_up() -> None:
    assert (
        "✗ 4 × 16.5 GiB of 60.0 GiB free on this machine"
        in drawn(Need(PARTS, 4), FreeMemory(60 * GIB, "this machine"), 80)[0]
    )


@pytest.mark.parametrize(
    ("n_bytes", "text"),
    [(1, "1Mi"), (82 * 2**20, "82Mi"), (GIB, "1.0Gi"), (int(9.94 * GIB), "9.9Gi"), (10 * GIB, "10Gi")],
)
def test_sizes_in_the_legend_take_at_most_five_cells(n_bytes, text) -> None:
    assert short(n_bytes) == text


@pytest.mark.parametrize("size", SIZES)
async def test_the_bar_follows_the_form_and_the_chosen_gpus(make_app, size) -> None:
    app = make_app(4)
    async with app.run_test(size=size) as pilot:
        screen, panel = await opened(pilot, app)
        fullest = min(screen.query_one(GpuPicker).choices[:3], key=lambda choice: choice.memory_free_bytes)
        assert f"free on GPU {fullest.index}" in panel.plain
        assert "Exch" in panel.plain
        # The other components are smaller than a cell, so they are only named.
        letters = [segment.text for segment in panel.render_line(0) if segment.style.reverse]
        assert letters == list("ERC")
        small = "not drawn: Weights " if size[0] > 100 else "Weights+Grad+Opt+Acts "
        assert small in panel.plain
        before = screen.form.review.need.parts
        await put_into_row(pilot, "sae-d_sae", "294912")
        await wait_until(pilot, lambda: screen.form.review.need.parts.weights > 60 * before.weights)
        await wait_until(pilot, lambda: "Weights 0.3Gi" in panel.plain)
        screen.query_one(GpuPicker).choose([1])
        await wait_until(pilot, lambda: "free on GPU 1" in panel.plain)


@pytest.mark.parametrize("size", SIZES)
async def test_a_job_too_large_for_its_gpus_is_reported_and_leaves_space_for_the_form(make_app, size) -> None:
    app = make_app(monitor=StillMonitor(8))
    async with app.run_test(size=size) as pilot:
        screen, panel = await opened(pilot, app)
        await put_into_row(pilot, "train-batch_size", "14000")
        await put_into_row(pilot, "sae-d_sae", "8000000")
        await wait_until(pilot, lambda: "✗" in panel.plain)
        await wait_until(pilot, lambda: "fits with" in panel.plain)
        await wait_until(pilot, lambda: panel.size.height == len(panel.plain.splitlines()))
        assert all(len(line) <= size[0] for line in panel.plain.splitlines())
        assert screen.query_one("#form-scroll").size.height >= 3
        assert screen.query_one("#review-row").size.height >= 1


async def test_with_an_invalid_form_only_the_heading_is_shown_and_the_layout_is_unchanged(make_app) -> None:
    app = make_app(4)
    async with app.run_test(size=(80, 24)) as pilot:
        screen, panel = await opened(pilot, app)
        before = panel.region
        await put_into_row(pilot, "sae-k", "many")
        await wait_until(pilot, lambda: screen.form.review.errors)
        await wait_until(pilot, lambda: panel.plain.strip() == "F4 Review")
        assert panel.region.height == before.height


async def test_cpu_processes_are_compared_with_the_machines_memory(make_app, monkeypatch) -> None:
    free = [FreeMemory(2 * GIB, "this machine")]
    monkeypatch.setattr(job_form, "capacity_on_cpu", lambda: free[0])
    monitor = StillMonitor(1)
    monitor._latest = ()
    monitor.problem = str(NoGpus("no NVIDIA driver is installed")._reason)
    app = make_app(monitor=monitor)
    async with app.run_test(size=(80, 24)) as pilot:
        screen, panel = await opened(pilot, app)
        await wait_until(pilot, lambda: "of 2.0 GiB free on this machine" in panel.plain)
        assert "CUDA" not in panel.plain
        assert "Code 0.6Gi" in panel.plain
        screen.query_one(GpuPicker).choose_cpu(2)
        await wait_until(pilot, lambda: "✓ 2 × " in panel.plain)
        # Another process fills the memory.
        free[0] = FreeMemory(2**20, "this machine")
        screen.show_gpus()
        assert "✗ 2 × " in panel.plain
        await wait_until(pilot, lambda: screen.form.review.need.judged_lacking)
        assert "fits with a smaller batch_size or d_sae" in panel.plain


async def test_the_peak_memory_of_a_past_job_with_the_same_shape_is_used(make_app, data) -> None:
    app = make_app(monitor=StillMonitor(source=Simulated(2, clock=lambda: 0.0)))
    async with app.run_test(size=(80, 24)) as pilot:
        screen, panel = await opened(pilot, app)
        await wait_until(pilot, lambda: screen.form.review.job)
        assert "measured" not in panel.plain
        config = dump_job(screen.form.review.job)
        record_job(
            data,
            "before",
            JobState.FINISHED,
            config=config,
            world_size=2,
            d_in=384,
            mode="ddp",
            peak_memory_bytes=3 * GIB,
        )
        await wait_until(pilot, lambda: app.session.jobs)
        screen.query_one(SettingForm).post_message(SettingForm.Edited())
        await wait_until(pilot, lambda: "measured 3.0 GiB in job 1, libraries included" in panel.plain)
        await put_into_row(pilot, "sae-d_sae", "999")
        await wait_until(pilot, lambda: "measured" not in panel.plain)


@pytest.mark.parametrize(
    ("width", "said"),
    [(120, "memory: 10.4 GiB used, 11.2 GiB expected (libraries included)"), (80, "10.4 GiB used")],
)
async def test_the_job_screen_shows_the_estimated_and_the_peak_memory(make_app, data, width, said) -> None:
    sizes = {"estimated_memory_bytes": int(11.2 * GIB), "peak_memory_bytes": int(10.4 * GIB)}
    job_id = record_job(data, "minilm", JobState.FINISHED, **sizes)
    app = make_app(4)
    async with app.run_test(size=(width, 24)) as pilot:
        await wait_until(pilot, lambda: app.session.jobs)
        app.session.go.open_job(job_id)
        await wait_until(pilot, lambda: app.session.detail is not None and app.screen.query(Headline))
        await wait_until(pilot, lambda: said in app.screen.query_one(Headline).plain)


TOO_LARGE = Problem("sae.d_sae", "needs 17.9 GiB, and GPU 2 has 10.0 GiB in all; it fits with train.batch_size = 512")
BUSY = Problem("launch.gpus", "GPU 3 is busy: used by mallory (pid 31415, python train.py)", "warning")


@pytest.mark.parametrize("width", [30, 48, 64, 104])
@pytest.mark.parametrize("n_lines", [3, 5, 6])
def test_the_review_is_shown_in_complete_sentences_at_any_size(width, n_lines) -> None:
    review = Review(None, (TOO_LARGE, BUSY), "3 GPUs, ddp · effective batch 3072 = 1024 × 3 · needs 17.9 GiB per GPU")
    lines = review_lines(review, width, n_lines)
    assert len(lines) <= n_lines
    assert all(len(line) <= width for line in lines)
    text, (*_, last) = " ".join(lines), lines
    whole = [paragraph for sentence in review.sentences for paragraph in (sentence, sentence.partition("; ")[0])]
    assert "more; ctrl+l" in last or text.endswith(tuple(whole))
    for word in text.replace("… ", "").split(" more; ctrl+l")[0].split():
        assert word in " ".join(review.sentences) or word.isdigit()


def test_a_review_with_enough_space_shows_every_remedy() -> None:
    review = Review(None, (TOO_LARGE, BUSY), "3 GPUs, ddp")
    assert " ".join(review_lines(review, 40, 100)) == " ".join(review.sentences)


def test_a_gpu_without_a_job_shows_only_known_values() -> None:
    gpu = GpuChoice(0, "GPU-0", "H200", None, None, "available")
    assert fit(gpu, 0) == "free memory unknown"
