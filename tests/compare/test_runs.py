from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path

from compare.conftest import job_file, write
from msgspec.structs import replace
from support.commands import command_file
from support.report_cards import put_card
from support.tui import record_job

from sae_tui.compare.run import settings_of
from sae_tui.compare.runs import Runs
from sae_tui.compare.tables import results
from sae_tui.panels.pareto import points_of
from trainer.contract.paths import DataDir
from trainer.contract.runs.explanations import Explanation, record
from trainer.contract.runs.latent_notes import change_note
from trainer.contract.store.job_store import Control
from trainer.contract.store.metrics_store import MetricRow
from trainer.contract.store.states import JobState


def test_every_sae_in_a_sweep_is_compared_separately(runs) -> None:
    comparison = runs.read("fvu")
    assert [sae.label for sae in comparison.saes] == ["1", "2 k=8", "2 k=32"]
    assert [sae.latest["fvu"] for sae in comparison.saes] == [0.2, 0.5, 0.1]
    assert [sae.settings["sae.k"] for sae in comparison.saes] == [16, 8, 32]
    assert [(curve.label, curve.sae) for curve in comparison.curves] == [("1", 0), ("2 k=8", 1), ("2 k=32", 2)]


def test_secrets_in_a_command_line_are_not_compared() -> None:
    file = command_file("python", "x.py", "--api-key", "s3cr3t", env=["HF_TOKEN=s3cr3t", "SEED=1"])
    (settings,) = settings_of(file).values()
    assert "s3cr3t" not in str(settings)
    assert settings["command.argv"][:3] == ["python", "x.py", "--api-key"]
    assert settings["command.env"][0].startswith("HF_TOKEN=")


def test_a_metric_shared_by_the_saes_in_a_sweep_is_one_curve(runs) -> None:
    comparison = runs.read("tokens_per_s")
    assert [(curve.label, curve.sae) for curve in comparison.curves] == [("2", 1)]
    assert [sae.latest.get("tokens_per_s") for sae in comparison.saes] == [None, 900.0, 900.0]


def test_each_sample_has_a_step_a_token_count_and_the_time_since_the_start(runs) -> None:
    samples = runs.read("fvu").curves[0].samples
    assert [(sample.step, sample.tokens, sample.value) for sample in samples] == [(10, 1000, 0.4), (20, 2000, 0.2)]
    assert all(sample.time_s >= 0 for sample in samples)


def test_an_unknown_metric_is_replaced_by_the_first_available_one(runs) -> None:
    comparison = runs.read("nonsense")
    assert comparison.metric == "fvu"
    assert comparison.metrics == ("fvu", "l0", "tokens_per_s", "lr")


def test_new_values_are_read_and_unchanged_series_are_not_read_again(data, pair, runs) -> None:
    before = runs.read("fvu")
    assert runs.read("fvu").curves[1].samples is before.curves[1].samples
    write(data, pair[1], [MetricRow("fvu@k=8", 30, 0.3)], steps=30)
    after = runs.read("fvu")
    assert [sample.step for sample in after.curves[1].samples] == [20, 30]
    assert after.saes[1].latest["fvu"] == 0.3
    assert after.curves[0].samples is before.curves[0].samples


def test_a_deleted_run_is_left_out(data, pair, runs) -> None:
    with closing(Control(data.control_db)) as control:
        control.forget(pair[0])
    assert [sae.label for sae in runs.read("fvu").saes] == ["2 k=8", "2 k=32"]


def test_a_run_without_metrics_has_no_curve(data, pair) -> None:
    data.run(pair[0]).metrics_db.unlink()
    with closing(Runs(data, pair[:1])) as runs:
        comparison = runs.read("fvu")
    assert (comparison.metrics, comparison.metric, comparison.curves) == ((), "", ())
    assert comparison.saes[0].label == "1"


def test_a_job_file_from_another_version_is_compared_by_its_raw_settings() -> None:
    assert settings_of("[sae]\nwings = 2\n[sae.more]\nx = false\n") == {"": {"sae.wings": 2, "sae.more.x": False}}
    assert settings_of("not toml") == {"": {}}


def test_an_sae_without_curves_is_compared_by_its_report_card(data: DataDir, pair: tuple[int, int]) -> None:
    imported = record_job(data, "theirs", JobState.IMPORTED, config=job_file(k=16))
    with closing(Runs(data, [pair[0], imported])) as runs:
        assert points_of(runs.read("fvu")) == (("batch L0", "batch FVU"), [(16.0, 0.2), None])
        for job_id, fvu in ((pair[0], 0.25), (imported, 0.24)):
            figures = {"n_tokens": 900, "fvu": fvu, "fvu_error": 0.01, "l0": 16.5, "dead": 0.1}
            data.sae(job_id).mkdir(parents=True)
            (data.sae(job_id) / "card.json").write_text(
                json.dumps({"figures": figures, "data": {"is_held_out": True}, "label": "", "spliced": None})
            )
        comparison = runs.read("fvu")
    assert points_of(comparison) == (("report card L0", "report card FVU"), [(16.5, 0.25), (16.5, 0.24)])
    lines = {line.title: line.words() for line in results(comparison.saes)}
    # The two values differ by less than twice their combined standard error.
    assert lines["report card FVU"] == ["0.25 same", "0.24 same"]
    assert lines["report card rows"] == ["900", "900"]
    assert [curve.sae for curve in comparison.curves] == [0]


def test_starred_and_named_latents_are_counted_for_each_sae(data, pair, runs) -> None:
    plain, sweep = pair
    assert not [line for line in results(runs.read("fvu").saes) if "latents" in line.title]
    for folder in (data.sae(plain), data.sae(sweep) / "k=8"):
        folder.mkdir(parents=True)
        change_note(folder, 1, lambda note: replace(note, starred=True, name="a"))
    change_note(data.sae(plain), 2, lambda note: replace(note, starred=True))
    lines = {line.title: line.words() for line in results(runs.read("fvu").saes)}
    assert (lines["starred latents"], lines["named latents"]) == (["2", "1", "–"], ["1", "1", "–"])


def explained(folder: Path, scores: list[float], model: str = "m", weights: str = "w") -> None:
    """Store a report card of the weights "w", and explanations with these scores."""
    put_card(folder, weights="w", label="" if folder.parent.name == "saes" else folder.name)
    for latent, score in enumerate(scores):
        one = Explanation(latent=latent, text="kings", detection=score, detection_error=0.05, model=model,
                          weights=weights)  # fmt: skip
        record(folder, one)


def test_scores_of_explanations_within_their_errors_are_the_same(data, pair, runs) -> None:
    plain, sweep = (data.sae(one) for one in pair)
    explained(plain, [0.8, 0.9])
    explained(sweep / "k=8", [0.8, 0.9, 0.95, 0.1])
    explained(sweep / "k=32", [0.9], weights="older")

    def words(title: str) -> list[str]:
        return next(line.words() for line in results(runs.read("fvu").saes) if line.title == title)

    assert words("explained latents") == ["2", "4", "–"]
    assert words("detection score") == ["0.850 ± 0.050", "0.688 ± 0.198 unfinished", "–"]
    with closing(Control(data.control_db)) as control:
        control.transition(pair[1], JobState.FINISHED)
    assert words("detection score") == ["0.850 ± 0.050 same", "0.688 ± 0.198 same", "–"]
    explained(plain, [1.0, 1.0, 1.0, 1.0])
    explained(sweep / "k=8", [0.1, 0.1, 0.1, 0.1])
    assert words("detection score") == ["1.000 ± 0.025 ★", "0.100 ± 0.025", "–"]
    explained(plain, [1.0, 1.0, 1.0, 1.0], model="another")
    (line,) = [one for one in results(runs.read("fvu").saes) if one.title == "detection score"]
    assert (line.best, line.same) == (frozenset(), frozenset())
    assert line.why == "detection score: not ranked, since different models explain: another () and m ()"
