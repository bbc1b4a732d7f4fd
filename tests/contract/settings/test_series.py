from __future__ import annotations

from trainer.contract.settings.catalog import METRICS
from trainer.contract.settings.series import (
    CRITERION,
    PER_RANK,
    curves,
    held_out,
    held_out_metrics,
    key_metrics,
    log_words,
    measured_names,
    result_metrics,
    series_named,
    title_of,
    with_held_out,
)
from trainer.contract.store.rows import VALUE_COLUMNS, Job


def test_results_keep_the_order_and_names_that_scripts_rely_on() -> None:
    assert list(result_metrics()) == ["fvu", "l0", "dead_fraction"]
    assert list(key_metrics()) == ["fvu", "l0"]
    assert measured_names() == ["heldout_fvu", "fvu", "heldout_l0", "l0", "dead_fraction"]
    assert [with_held_out(name) for name in result_metrics()] == [
        ["heldout_fvu", "fvu"],
        ["heldout_l0", "l0"],
        ["dead_fraction"],
    ]


def test_the_metric_that_judges_a_run_is_held_out_and_has_a_preferred_direction() -> None:
    assert CRITERION in key_metrics().keys() & held_out_metrics().keys()
    assert METRICS[CRITERION].series.better


def test_held_out_values_have_the_format_of_their_metric() -> None:
    words = [log_words(0.12345, series_named(name)) for name in ("fvu", held_out("fvu"), "dead_fraction", "grad_norm")]
    assert words == ["0.1235", "0.1235", "12.3%", "0.1235"]
    assert log_words(31.96, series_named("l0")) == "32.0"


def test_every_displayed_series_has_a_readable_title() -> None:
    names = ("fvu", "heldout_fvu", "heldout_fvu_error", "heldout_l0@k=16", "dead_fraction", "busy_ms", "of_a_plugin")
    assert [title_of(name) for name in names] == [
        "batch FVU",
        "held-out FVU",
        "held-out FVU, standard error",
        "held-out L0, k=16",
        "dead",
        "computing, ms",
        "of_a_plugin",
    ]
    assert not [name for name in (*measured_names(), *curves(), *PER_RANK) if "_" in title_of(name)]


def test_curves_that_are_redundant_for_all_saes_in_a_job_are_hidden() -> None:
    assert list(curves(["topk"])) == ["fvu", "dead_fraction", "tokens_per_s", "lr"]
    assert list(curves(["batch_topk"])) == ["fvu", "l0", "dead_fraction", "tokens_per_s", "lr"]
    assert curves(["topk", "jumprelu"]) == curves(["gated"]) == curves() == curves(["of_a_plugin"])
    assert list(curves())[:2] == ["fvu", "l0"]
    assert {"loss", "lr"} <= curves().keys()


def test_no_metric_has_the_name_of_an_unrelated_job_column() -> None:
    assert set(Job.__struct_fields__) >= set(VALUE_COLUMNS)
    assert METRICS.keys() & set(Job.__struct_fields__) <= set(VALUE_COLUMNS)
