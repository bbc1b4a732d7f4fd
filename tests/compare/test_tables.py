from __future__ import annotations

import msgspec
import pytest

from sae_tui.compare.run import ComparedSae
from sae_tui.compare.tables import best, differences, over_seeds, results
from sae_tui.settings import Settings
from trainer.contract.store.rows import Job
from trainer.contract.store.seeds import Spread
from trainer.contract.store.states import JobState


def sae(number: int = 1, settings: dict | None = None, latest: dict | None = None, **fields) -> ComparedSae:
    usual = {"name": "x", "config": "", "user": "ada", "host": "here", "device": "cpu", "gpu_source": "none"}
    usual |= {"state": JobState.FINISHED, "step": 1}
    return ComparedSae(str(number), Job(id=number, **(usual | fields)), "", settings or {}, latest or {})


def test_only_differing_settings_are_shown_and_0_false_and_none_are_different_values() -> None:
    settings = [{"sae.k": 1, "a": 0, "b": 5}, {"sae.k": 1, "a": False, "b": 5}, {"sae.k": 1, "b": 5}]
    (line,) = differences([sae(number, one) for number, one in enumerate(settings)])
    assert (line.title, line.values) == ("a", (0, False, None))
    assert line.words() == ["0", "false", "–"]


def test_a_different_parallel_mode_or_device_is_listed_as_a_difference() -> None:
    (line,) = differences([sae(1), sae(2, mode="ddp", world_size=2, device="cuda")])
    assert line.words() == ["single, 1 × cpu", "ddp, 2 × cuda"]


def test_automatic_batch_sizes_that_differ_are_shown_as_tokens_per_step() -> None:
    short, long = sae(1, step=521, tokens=300_096), sae(2, step=1954, tokens=2_000_896)
    (line,) = differences([short, long])
    assert (line.title, line.values) == ("tokens per step", (576, 1024))
    assert differences([long, sae(3, step=977, tokens=1_000_448)]) == []


@pytest.mark.parametrize(
    ("values", "better", "indices"),
    [
        ([3.0, 1.0, 2.0], "lower", {1}),
        ([3.0, 1.0, 3.0], "higher", {0, 2}),
        ([None, 2.0, 1.0], "lower", {2}),
        ([2.0, 2.0], "lower", set()),
        ([1.0, None], "lower", set()),
        ([1.0, 2.0], None, set()),
        ([], "lower", set()),
    ],
)
def test_the_best_is_the_lowest_or_highest_value_unless_all_are_equal(values, better, indices) -> None:
    assert best(values, better) == indices


def test_layers_of_a_cross_layer_transcoder_are_not_ranked() -> None:
    values = {2: 0.4, 3: 0.3}
    layers = [
        msgspec.structs.replace(sae(1, latest={"heldout_fvu": fvu}), member=f"layer={layer}")
        for layer, fvu in values.items()
    ]
    seeds = [
        msgspec.structs.replace(sae(1, latest={"heldout_fvu": fvu}), member=f"k={layer}")
        for layer, fvu in values.items()
    ]
    of_layers, of_seeds = (
        next(one for one in results(saes) if one.title == "held-out FVU") for saes in (layers, seeds)
    )
    assert of_layers.values == of_seeds.values == (0.4, 0.3)
    assert (of_layers.best, of_layers.same) == (frozenset(), frozenset())
    assert of_seeds.best == {1}


def test_a_duration_is_shown_for_a_restarted_job_but_not_for_a_resumed_job() -> None:
    took = {"started": 100.0, "ended": 160.0}
    (line,) = [
        line
        for line in results(
            [sae(1, attempt=1, **took), sae(2, attempt=3, **took), sae(3, attempt=3, restarts=2, **took)]
        )
        if line.title == "duration"
    ]
    assert line.words() == ["60 s", "–", "60 s"]


def test_requested_values_and_values_displayed_as_equal_have_no_single_best() -> None:
    sizes = [634 << 20, 640 << 20, 636 << 20]
    saes = [
        sae(number, latest={"l0": 8.0 * number, "dead_fraction": dead}, peak_memory_bytes=size)
        for number, size, dead in zip((1, 2, 3), sizes, (0.0121, 0.25, 0.0119), strict=True)
    ]
    lines = {line.title: line.words() for line in results(saes)}
    assert lines["batch L0"] == ["8", "16", "24"]
    assert lines["peak memory"] == ["0.6 GiB", "0.6 GiB", "0.6 GiB"]
    assert lines["dead"] == ["1.2% ★", "25%", "1.2% ★"]


@pytest.mark.parametrize("state", [JobState.RUNNING, JobState.STOPPED, JobState.FAILED])
def test_an_unfinished_run_is_marked_and_never_the_best_in_quality(state) -> None:
    lows = [(0.1, state), (0.2, JobState.FINISHED), (0.3, JobState.FINISHED)]
    saes = [
        sae(number, state=of, latest={"heldout_fvu": fvu, "tokens_per_s": 3.0 - number})
        for number, (fvu, of) in enumerate(lows)
    ]
    lines = {line.title: line.words() for line in results(saes)}
    assert lines["held-out FVU"] == ["0.1 unfinished", "0.2 ★", "0.3"]
    # An unfinished run can be the fastest, because its speed does not depend on the remaining steps.
    assert lines["tokens/s"][0] == "3 ★"


def test_results_have_units_a_marked_best_and_no_empty_lines() -> None:
    first = sae(1, latest={"heldout_fvu": 0.25}, tokens=12_345, started=0.0, ended=3600.0, peak_memory_bytes=1 << 30)
    second = sae(2, latest={"heldout_fvu": 0.5}, tokens=500, started=0.0, ended=45.0)
    lines = {line.title: line.words() for line in results([first, second])}
    assert lines == {
        "held-out FVU": ["0.25 ★ (12.3k tokens)", "0.5"],
        "tokens": ["12.3k", "500"],
        "duration": ["1 h 00 min", "45 s ★"],
        "peak memory": ["1.0 GiB", "–"],
    }


def words(*saes: ComparedSae) -> dict[str, list[str]]:
    return {line.title: line.words() for line in results(saes)}


def test_training_batch_values_are_never_marked_as_best() -> None:
    trained = [{"fvu": 0.3037, "loss": 0.31}, {"fvu": 0.3141, "loss": 0.32}]
    saes = [sae(number, latest=one) for number, one in enumerate(trained)]
    assert words(*saes)["batch FVU"] == ["0.3037", "0.3141"]
    assert words(*saes)["loss"] == ["0.31", "0.32"]
    measured = [
        one | {"heldout_fvu": fvu, "heldout_fvu_error": 0.004} for one, fvu in zip(trained, (0.35, 0.36), strict=True)
    ]
    lines = words(*(sae(number, latest=one) for number, one in enumerate(measured)))
    assert lines["batch FVU"] == ["0.3037", "0.3141"]
    assert lines["loss"] == ["0.31", "0.32"]
    assert lines["held-out FVU"] == ["0.35 same", "0.36 same"]


def test_the_best_value_is_shown_with_its_tokens_if_the_runs_differ_in_tokens() -> None:
    def run(number: int, fvu: float, tokens: int) -> ComparedSae:
        latest = {"heldout_fvu": fvu, "tokens_per_s": 1000.0 / number}
        return sae(number, latest=latest, tokens=tokens, started=0.0, ended=100.0)

    lines = words(run(1, 0.10, 300_000), run(2, 0.25, 60_000), run(3, 0.3, 0))
    assert lines["held-out FVU"] == ["0.1 ★ (300.0k tokens)", "0.25", "0.3"]
    assert lines["tokens/s"] == ["1000 ★", "500", "333"]
    # A run ends after a complete step, so two token counts are rarely exactly equal.
    assert words(run(1, 0.10, 300_000), run(2, 0.25, 300_500))["held-out FVU"] == ["0.1 ★", "0.25"]


def test_speeds_and_times_are_marked_as_best_only_with_a_clear_lead() -> None:
    def run(number: int, speed: float, seconds: float) -> ComparedSae:
        return sae(number, latest={"tokens_per_s": speed}, started=0.0, ended=seconds)

    lines = words(run(1, 1000, 100), run(2, 1040, 96), run(3, 500, 200))
    assert lines["tokens/s"] == ["1000", "1040", "500"]
    assert lines["duration"] == ["2 min", "2 min", "3 min"]
    lines = words(run(1, 1000, 100), run(2, 1100, 80))
    assert lines["tokens/s"] == ["1000", "1100 ★"]
    assert lines["duration"] == ["2 min", "80 s ★"]


def test_dead_fractions_are_compared_by_their_binomial_errors() -> None:
    def run(number: int, dead: float, d_sae: int | None = 1000) -> ComparedSae:
        settings = {"sae.d_sae": d_sae, "sae.expansion_factor": 8.0}
        return sae(number, settings, {"dead_fraction": dead}, d_in=1000)

    assert words(run(1, 0.010), run(2, 0.015))["dead"] == ["1% same", "1.5% same"]
    assert words(run(1, 0.010), run(2, 0.040))["dead"] == ["1% ★", "4%"]
    # With 8,000 latents, the same difference is significant.
    assert words(run(1, 0.010, None), run(2, 0.015, None))["dead"] == ["1% ★", "1.5%"]


def test_language_model_scores_are_compared_by_their_standard_errors() -> None:
    def run(number: int, ce: float, kl: float) -> ComparedSae:
        errors = {"card_ce_score_error": 0.004, "card_kl_score_error": 0.004}
        return sae(number, latest={"card_ce_score": ce, "card_kl_score": kl} | errors)

    lines = words(run(1, 0.950, 0.950), run(2, 0.955, 0.970))
    assert lines["report card CE score"] == ["0.95 same", "0.955 same"]
    assert lines["report card KL score"] == ["0.95", "0.97 ★"]


def test_the_mean_and_standard_deviation_over_each_runs_seeds_are_shown() -> None:
    def seed(number: int, member: str, fvu: float | None) -> ComparedSae:
        latest = {} if fvu is None else {"heldout_fvu": fvu, "card_fvu": fvu}
        return msgspec.structs.replace(sae(number, latest=latest), member=member)

    saes = [
        seed(1, "k=8,seed=10", 0.3),
        seed(1, "k=8,seed=2", 0.1),
        seed(1, "k=16,seed=2", 0.4),
        seed(1, "k=16,seed=10", None),
        seed(2, "k=8,seed=2", 0.9),
        seed(3, "", 0.5),
    ]
    (found,) = over_seeds(saes)
    assert (found.job_id, found.group, found.labels) == (1, "k=8", ("k=8,seed=2", "k=8,seed=10"))
    assert found.spreads["heldout_fvu"] == Spread(pytest.approx(0.2), pytest.approx(0.02**0.5), 2)
    assert found.words == "job 1, k=8, 2 seeds: held-out FVU 0.20 ± 0.14, report card FVU 0.20 ± 0.14"
    saes.append(seed(1, "k=8,seed=3", None))
    (found,) = over_seeds(saes)
    assert found.words.startswith("job 1, k=8, 2 of 3 seeds: held-out FVU 0.20 ± 0.14")


def test_training_settings_of_an_imported_sae_are_not_listed_as_differences() -> None:
    def settings(n_steps: int) -> dict[str, object]:
        return {"sae.k": n_steps, "train.n_steps": n_steps, "launch.gpus": n_steps, "parallel.mode": n_steps}

    theirs = sae(1, settings(1), state=JobState.IMPORTED, step=0)
    mine = [sae(number, settings(number), state=JobState.FINISHED, started=1.0, device="cuda") for number in (2, 3)]
    assert [line.title for line in differences([theirs, mine[0]])] == ["sae.k"]
    lines = {line.title: line.words() for line in differences([theirs, *mine])}
    assert lines["train.n_steps"] == ["–", "2", "3"]
    assert "ran as" not in lines
    # An imported SAE that has been trained further is compared like any other SAE.
    trained = sae(1, settings(1), state=JobState.FINISHED, started=1.0, device="cuda")
    assert [line.title for line in differences([trained, mine[0]])] == list(settings(1))


def test_energy_is_compared_if_fully_measured_and_priced_by_the_settings() -> None:
    known = {"energy_s": 100.0, "energy_counted_s": 100.0}
    saes = [
        sae(1, energy_wh=900.0, energy_known_s=99.0, **known),
        sae(2, energy_wh=1500.0, energy_known_s=100.0, **known),
        sae(3, energy_wh=5.0, energy_known_s=60.0, **known),
        sae(4),
    ]
    lines = {line.title: line.words() for line in results(saes, Settings(price_per_kwh=0.2, currency="CHF"))}
    assert lines["energy"] == ["900 Wh ★", "1.5 kWh", "–", "–"]
    assert lines["price"] == ["0.18 CHF", "0.30 CHF", "–", "–"]
    assert "CO₂" not in lines


def test_a_random_twin_is_never_marked_as_the_best() -> None:
    latest = [{"heldout_fvu": 0.3}, {"heldout_fvu": 0.1}, {"heldout_fvu": 0.5}]
    members = ["freeze=off", "freeze=decoder", ""]
    saes = [
        msgspec.structs.replace(sae(number, latest=one), member=member)
        for number, one, member in zip((1, 1, 2), latest, members, strict=True)
    ]
    (line,) = [one for one in results(saes) if one.title == "held-out FVU"]
    assert line.words() == ["0.3 ★", "0.1", "0.5"]
