"""Tests for `sae-tui features`, which shows the tokens that an SAE's latents fire on."""

from __future__ import annotations

import math
from contextlib import closing
from pathlib import Path

import pytest
from cli.conftest import Shell
from support.features import EFFECTS, MOVED, OF_PARTS, SCALING, SPREAD, features_file
from support.stores import put_store
from support.watched import put_watched, snapshot

from trainer.contract.runs.features import FEATURES
from trainer.contract.runs.latent_notes import NOTES
from trainer.contract.store.job_store import Control
from trainer.contract.store.rows import Job


@pytest.fixture
def job_id(shell: Shell) -> int:
    """Record a job whose SAE has been evaluated."""
    shell.data.create()
    put_store(shell.data.control_db, "control")
    job_id = record(shell)
    put(shell.data.sae(job_id))
    return job_id


def record(shell: Shell, config: str = "") -> int:
    with closing(Control(shell.data.control_db)) as control:
        return control.create_job(
            Job(name="a", config=config, user="ada", host="here", device="cpu", gpu_source="none", created=0.0)
        )


def put(folder: Path) -> None:
    folder.mkdir(parents=True)
    (folder / FEATURES).write_bytes(features_file())


def test_latents_are_listed_in_the_requested_order(shell: Shell, job_id: int) -> None:
    counts, head, *rows = shell.run("features", job_id, "--sort", "density").stdout.splitlines()
    assert counts == "2 latents on 100 rows: 0 dense (> 10%), 0 never fire"
    assert head.split() == ["LATENT", "DENSITY", "LARGEST", "FIRES", "ON"]
    assert [row.split() for row in rows] == [["1", "8.000%", "3.00", "the"], ["0", "3.000%", "4.00", "Lämb"]]
    *rows, more = shell.run("features", job_id, "--sort", "largest", "--limit", 1).stdout.splitlines()[2:]
    assert [row.split()[0] for row in rows] == ["0"]
    assert more == "1 more; show them with --limit N"


def test_latents_are_sorted_and_filtered_by_their_stability_across_seeds(shell: Shell, job_id: int) -> None:
    (line,) = shell.errors("features", job_id, "--sort", "stable", code=1)
    assert line.startswith("sae-tui: error: --sort: no stability across seeds is stored; with several seeds")
    (line,) = shell.errors("features", job_id, "--search", "stable:>0.7", code=1)
    assert line.startswith("sae-tui: error: stable: no stability across seeds is stored")
    (file,) = shell.data.sae(job_id).rglob(FEATURES)
    file.write_bytes(features_file(stability=("F32", "f", [2], [0.25, 0.9375])))
    assert [one["latent"] for one in shell.json("features", job_id, "--sort", "stable")] == [1, 0]
    for words, latents in {
        "stable:>0.7": [1],
        "stable:<0.7": [0],
        "stable:>0.1": [1, 0],
        "stable:>=0.9375": [1],
        "stable:<.9": [0],
        "family:other": [0, 1],
        "stable:>0.1 stable:<0.5": [0],
        "stable:<0.7 lämb": [0],
    }.items():
        assert [one["latent"] for one in shell.json("features", job_id, "--search", words)] == latents, words
    for words in ("stable:0.7", "stable:", "family:no", "lämb stable:>x"):
        (line,) = shell.errors("features", job_id, "--search", words, code=1)
        assert "is unknown; write stable:>0.7, effect:>0.001, or family: and one of silent, dense, token" in line
    assert shell.errors("features", job_id, "--search", "stable:>1", code=1) == [
        "sae-tui: error: no latent matches stable:>1"
    ]
    (line,) = shell.errors("features", job_id, "--search", "lämb stable:>0.7", code=1)
    assert line.startswith("sae-tui: error: no max-activating example contains")
    words = "stability    0.94, mean cosine with the nearest latent of each other seed"
    assert f"{words}\n" in shell.run("features", job_id, 1).stdout
    assert shell.json("features", job_id, 1)["firing_correlation"] is None
    firing = ("F32", "f", [2], [math.nan, 0.875])
    file.write_bytes(features_file(stability=("F32", "f", [2], [0.25, 0.9375]), firing_correlation=firing))
    assert f"{words}; firing correlation 0.88\n" in shell.run("features", job_id, 1).stdout
    assert [shell.json("features", job_id, latent)["firing_correlation"] for latent in (0, 1)] == [None, 0.875]
    file.write_bytes(features_file(stability=("F32", "f", [1], [0.25])))
    (line,) = shell.errors("features", job_id, code=1)
    assert line.endswith("was not written by `sae-train eval`; run the command again")


def test_latents_are_sorted_and_filtered_by_their_effect_on_the_loss(shell: Shell, job_id: int) -> None:
    (line,) = shell.errors("features", job_id, "--sort", "effect", code=1)
    assert line.startswith("sae-tui: error: --sort: no effects of latents are stored; `sae-tui eval ID --model auto")
    (line,) = shell.errors("features", job_id, "--search", "effect:>0", code=1)
    assert line.startswith("sae-tui: error: effect: no effects of latents are stored")
    assert shell.json("features", job_id, 0)["effect"] is None
    (file,) = shell.data.sae(job_id).rglob(FEATURES)
    file.write_bytes(features_file(**EFFECTS))
    assert [one["latent"] for one in shell.json("features", job_id, "--sort", "effect")] == [1, 0]
    head, *rows = shell.run("features", job_id, "--sort", "effect").stdout.splitlines()[1:]
    assert head.split() == ["LATENT", "DENSITY", "LARGEST", "EFFECT", "FIRES", "ON"]
    assert [row.split()[3] for row in rows] == ["+7.8e-03", "-2.5e-01"]
    for words, latents in {
        "effect:>0.001": [1],
        "effect:>1e-3": [1],
        "effect:<-0.1": [0],
        "effect:<=0.0078125": [1, 0],
        "effect:>0 family:other": [1],
        "effect:<0 lämb": [0],
    }.items():
        assert [one["latent"] for one in shell.json("features", job_id, "--search", words)] == latents, words
    (line,) = shell.errors("features", job_id, "--search", "effect:large", code=1)
    assert "effect:large is unknown; write stable:>0.7, effect:>0.001" in line
    shown = shell.run("features", job_id, 1).stdout
    assert "effect       +0.00781 ± 0.00098 nats per token if ablated, +0.5 per row on which it fires\n" in shown
    assert [shell.json("features", job_id, latent)["effect_error"] for latent in (0, 1)] == [None, 0.0009765625]
    file.write_bytes(features_file(**EFFECTS | {"effect_error": ("F32", "f", [1], [0.25])}))
    (line,) = shell.errors("features", job_id, code=1)
    assert line.endswith("was not written by `sae-train eval`; run the command again")


def test_a_latent_is_shown_with_its_contexts(shell: Shell, job_id: int) -> None:
    told = shell.run("features", job_id, 0).stdout
    assert "latent 0 of 2: fires on 3.000% of 100 rows, at most 4.00, 2.00 on average" in told
    assert "nearest      1 (0.25)" in told
    assert "    4.00   the[ Lämb]s" in told
    answer = shell.json("features", job_id, 0)
    assert answer["contexts"][0]["tokens"][1] == {"text": " Lämb", "act": 4.0}
    assert shell.json("features", job_id, "--search", "lämb") == [answer]


def test_characters_split_across_tokens_are_shown_whole_and_found(shell: Shell, job_id: int) -> None:
    (shell.data.sae(job_id) / FEATURES).write_bytes(features_file(SPREAD))
    assert "    4.00  [ 天]气" in shell.run("features", job_id, 0).stdout
    *_, apart, _, row, rest = shell.run("features", job_id, "--search", "天气").stdout.splitlines()
    assert (apart, rest) == ("fire on the words: 1", "only in their texts: 0")
    assert row.split()[0] == "0"
    assert row.split()[3] == "天"


def test_latents_with_the_words_only_in_their_texts_come_last_under_a_heading(shell: Shell, job_id: int) -> None:
    lines = shell.run("features", job_id, "--search", "the").stdout.splitlines()[1:]
    assert [line.split()[0] for line in lines] == ["fire", "LATENT", "1", "only", "LATENT", "0"]
    assert (lines[0], lines[3]) == ("fire on the words: 1", "only in their texts: 1")


def test_a_latent_is_shown_with_its_promoted_and_suppressed_tokens(shell: Shell, job_id: int) -> None:
    assert "promotes" not in shell.run("features", job_id, 0).stdout
    (shell.data.sae(job_id) / FEATURES).write_bytes(features_file(**MOVED))
    lines = shell.run("features", job_id, 0).stdout.splitlines()
    assert lines[3:5] == ["promotes     Lämb +1.50", "suppresses   s -2.50"]
    assert shell.json("features", job_id, 0)["promoted"] == [{"text": " Lämb", "logit": 1.5}]


def test_an_sae_folder_works_like_a_job_id(shell: Shell, job_id: int, tmp_path: Path) -> None:
    by_job = shell.run("features", job_id).stdout
    assert shell.run("features", shell.data.sae(job_id)).stdout == by_job
    put(tmp_path / "run" / "sae")
    assert shell.run("features", tmp_path / "run").stdout == by_job


def test_for_a_sweep_one_of_its_saes_must_be_chosen(shell: Shell, job_id: int, tmp_path: Path) -> None:
    for label in ("k=16", "k=8"):
        put(tmp_path / "sweep" / label)
    (line,) = shell.errors("features", tmp_path / "sweep", code=1)
    assert line.endswith('--sae: give one of "k=16", "k=8"')
    assert shell.json("features", tmp_path / "sweep", 0, "--sae", "k=8")["latent"] == 0
    (line,) = shell.errors("features", job_id, "--sae", "k=8", code=1)
    assert line.endswith("--sae: the run has only one SAE; leave --sae out")


def test_missing_features_are_reported_in_one_line(shell: Shell, job_id: int, tmp_path: Path) -> None:
    other, made_up = record(shell), record(shell, '[data]\nsource = "synthetic"\n')
    refusals = {
        ("features", 9): "there is no job 9",
        ("features", "9" * 5000): f"has no {FEATURES}",
        ("features", other): f"job {other}: `sae-tui eval {other}` finds its max-activating examples",
        ("features", made_up): f"job {made_up}: it has no max-activating examples, since its data has no token",
        ("features", tmp_path): f"{tmp_path} has no {FEATURES}; `sae-train eval` on the run writes it",
        ("features", job_id, 2): "there is no latent 2",
        ("features", job_id, "--search", "cow"): 'no max-activating example contains a token with "cow"',
    }
    for words, message in refusals.items():
        (line,) = shell.errors(*words, code=1)
        assert message in line
    (shell.data.sae(job_id) / FEATURES).write_bytes(b"nothing")
    (line,) = shell.errors("features", job_id, code=1)
    assert "was not written by `sae-train eval`" in line


def test_latents_of_a_crosscoder_are_listed_with_their_share_in_each_part(shell: Shell, job_id: int) -> None:
    (line,) = shell.errors("features", job_id, "--sort", "norm", code=1)
    assert line == "sae-tui: error: --sort: this SAE is not a crosscoder, so its latents have no parts"
    (file,) = shell.data.sae(job_id).rglob(FEATURES)
    file.write_bytes(features_file(**OF_PARTS, **SCALING))
    head, *rows = shell.run("features", job_id, "--sort", "norm").stdout.splitlines()[1:]
    assert head.split() == ["LATENT", "DENSITY", "LARGEST", "IN", "A", "IN", "B", "FIRES", "ON"]
    assert [row.split()[3:5] for row in rows] == [["0.06", "0.94"], ["0.50", "0.50"]]
    (one,) = shell.json("features", job_id, "--search", "confirmed:B")
    assert (one["latent"], one["part"], one["nu_error"]) == (1, "B", 0.125)
    assert one["parts"][1] == {"name": "chat", "share": 0.9375, "beta_error": 1.0, "beta_reconstruction": 2.0}
    lines = shell.run("features", job_id, 1).stdout.splitlines()
    assert "β error      A 0.12  B 1.00  ν 0.12" in lines
    assert "scaling      confirmed as only in B" in lines


def test_a_latent_is_starred_named_and_annotated(shell: Shell, job_id: int) -> None:
    assert shell.run("annotate", job_id).stdout.startswith("no latent has a note; `sae-tui annotate RUN LATENT --star`")
    assert shell.json("annotate", job_id) == []
    assert shell.run("annotate", job_id, 1).stdout == "latent 1: no note\n"
    output = shell.run("annotate", job_id, 1, "--star", "--name", "articles", "--note", "not only\nthe").stdout
    assert output == "★ latent 1: articles · not only the\n"
    note = shell.json("annotate", job_id, 1, "--unstar")
    assert {name: note[name] for name in ("latent", "starred", "name", "note", "tokens")} == {
        "latent": 1, "starred": False, "name": "articles", "note": "not only\nthe", "tokens": None,
    }  # fmt: skip
    assert shell.json("annotate", job_id) == [note]
    shell.run("annotate", job_id, 0, "--star")
    rows = shell.run("annotate", job_id).stdout.splitlines()
    assert [row.split() for row in rows] == [
        ["LATENT", "STAR", "NAME", "NOTE"], ["0", "★", "-", "-"], ["1", "-", "articles", "not", "only", "the"],
    ]  # fmt: skip
    shell.run("annotate", job_id, 1, "--clear", "--star")
    assert [(one["latent"], one["starred"], one["name"]) for one in shell.json("annotate", job_id)] == [
        (0, True, ""), (1, True, ""),
    ]  # fmt: skip
    shell.run("annotate", shell.data.sae(job_id), 0, "--clear")
    shell.run("annotate", job_id, 1, "--clear")
    assert not (shell.data.sae(job_id) / NOTES).exists()


def test_notes_are_shown_found_and_sorted_with_the_latents(shell: Shell, job_id: int) -> None:
    shell.run("annotate", job_id, 1, "--star", "--name", "articles", "--note", "a Lämb is a noun")
    head, first, second = shell.run("features", job_id, "--sort", "starred").stdout.splitlines()[1:]
    assert head.split() == ["LATENT", "DENSITY", "LARGEST", "STAR", "NAME", "FIRES", "ON"]
    assert first.split() == ["1", "8.000%", "3.00", "★", "articles", "the"]
    assert second.split() == ["0", "3.000%", "4.00", "-", "-", "Lämb"]
    lines = shell.run("features", job_id, 1).stdout.splitlines()
    assert lines[0].startswith("★ latent 1 of 2: ")
    assert lines[1:3] == ["name         articles", "note         a Lämb is a noun"]
    # The latent with the word in its note comes first, and is in no other list.
    *lines, last = shell.run("features", job_id, "--search", "lämb").stdout.splitlines()[1:]
    assert [line.split()[0] for line in lines] == ["in", "LATENT", "1", "fire", "LATENT", "0"]
    assert (lines[0], lines[3], last) == ("in your notes: 1", "fire on the words: 1", "only in their texts: 0")
    found = shell.json("features", job_id, "--search", "lämb starred:")
    assert [(one["latent"], one["starred"], one["name"], one["note"]) for one in found] == [
        (1, True, "articles", "a Lämb is a noun")
    ]
    assert [one["latent"] for one in shell.json("features", job_id, "--search", "named:art")] == [1]
    (line,) = shell.errors("features", job_id, "--search", "cow", code=1)
    assert line.endswith('no max-activating example contains a token with "cow", and no note has it')


def test_notes_that_cannot_be_written_are_refused_in_one_line(shell: Shell, job_id: int) -> None:
    for words, message in {
        (2, "--star"): "there is no latent 2; the SAE has latents 0 to 1",
        (1, "--name", "a\x1bb"): r"a name must not contain '\x1b'; remove it",
        (1, "--name", "x" * 81): "a name must have at most 80 characters, not 81",
    }.items():
        assert shell.errors("annotate", job_id, *words, code=1) == [f"sae-tui: error: {message}"]
    for words, message in {
        ("--star",): "LATENT: is missing; name the latent, as in `annotate 7 1234 --star`",
        (1, "--star", "--unstar"): "--unstar: not allowed with argument --star; see sae-tui annotate --help",
    }.items():
        assert shell.errors("annotate", job_id, *words, code=2) == [f"sae-tui: error: {message}"]
    file = shell.data.sae(job_id) / NOTES
    assert not file.exists()
    file.write_text('{"latent": 1, "name": "\\u001b[2Jred"}\n<<<<<<< HEAD\n')
    marked = f"{file}, line 2 is a mark of a merge conflict; delete the lines with <<<<<<<, ======= and >>>>>>>"
    warned, refused = shell.errors("annotate", job_id, 0, "--star", code=1)
    assert warned.startswith(f"sae-tui: {marked}")
    assert refused.startswith(f"sae-tui: error: {marked}")
    assert "\x1b" not in shell.run("features", job_id).stdout + shell.run("annotate", job_id).stdout


def test_each_sae_of_a_sweep_has_its_own_notes(shell: Shell, tmp_path: Path) -> None:
    for label in ("k=16", "k=8"):
        put(tmp_path / label)
    shell.run("annotate", tmp_path, 0, "--sae", "k=8", "--star")
    assert [shell.json("features", tmp_path, 0, "--sae", one)["starred"] for one in ("k=16", "k=8")] == [False, True]
    (line,) = shell.errors("annotate", tmp_path, 0, "--star", code=1)
    assert line.endswith('--sae: give one of "k=16", "k=8"')


def test_the_snapshots_of_watched_latents_are_listed_and_shown(shell: Shell, job_id: int) -> None:
    (line,) = shell.errors("features", job_id, "--watched", code=1)
    assert line.endswith("no snapshots of latents are stored; train.watch_latents stores some")
    run = shell.data.run(job_id).root
    put_watched(run, snapshot(100), snapshot(200))
    head, *rows = shell.run("features", job_id, "--watched").stdout.splitlines()
    assert head.split() == ["STEP", "LATENT", "WHY", "DENSITY", "COSINE", "FIRES", "ON"]
    assert rows[0].split() == ["100", "12", "asked", "1.000%", "-", "w12s100"]
    assert rows[3].split() == ["200", "77", "new", "2.000%", "0.875", "w77s200"]
    lines = shell.run("features", run, 77, "--watched").stdout.splitlines()
    assert lines[2] == "step 200: new, density 2.000%, cosine 0.875"
    assert lines[3].split() == ["2.00", "the[", "w77s200]", "ran"]
    of_both = shell.json("features", job_id, 77, "--watched")
    assert [(one["step"], one["latent"], one["cosine"]) for one in of_both] == [(100, 77, None), (200, 77, 0.875)]
    assert of_both[0]["contexts"][0]["tokens"][1] == {"text": " w77s100", "act": 2.0}


def test_wrong_uses_of_the_flag_for_watched_latents_are_refused(shell: Shell, job_id: int) -> None:
    run = shell.data.run(job_id).root
    put_watched(run, snapshot(100))
    (line,) = shell.errors("features", job_id, 5, "--watched", code=1)
    assert line.endswith("LATENT: latent 5 was not watched")
    (line,) = shell.errors("features", job_id, "--watched", "--sae", "k=2", code=1)
    assert "--sae" in line
    for flag, value in (("--search", "a"), ("--text", "a")):
        (line,) = shell.errors("features", job_id, "--watched", flag, value, code=2)
        assert f"{flag}: cannot be combined with --watched" in line
