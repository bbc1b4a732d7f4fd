from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from support.tiny_models import make_model, sentences

from trainer.contract.runs.features import FEATURES, Features
from trainer.contract.settings.job_file import dump_job, parse_job
from trainer.contract.settings.tokens_of_data import may_tell_tokens
from trainer.evaluation import rows_with_tokens
from trainer.evaluation.command import evaluate
from trainer.training.loop import Trainer


def test_contexts_of_a_streamed_run_are_found_by_reading_its_text_again(
    make_trainer: Callable[..., Trainer],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read: list[Path] = []
    extract = rows_with_tokens.extract

    def noted(job, *others):
        read.append(Path(job.extract.output))
        return extract(job, *others)

    monkeypatch.setattr(rows_with_tokens, "extract", noted)
    monkeypatch.setitem(rows_with_tokens.N_ROWS, "cpu", 600)
    (text := tmp_path / "corpus.txt").write_text("\n\n".join(sentences(600)))
    model = str(make_model(tmp_path / "gpt2", "gpt2"))
    data = {"source": "model", "model": model, "hook": "resid_post.1", "text": str(text), "context": 32}
    data |= {"batch_tokens": 256, "shuffle_tokens": 500, "held_out_tokens": 100}
    sae, train = {"d_sae": 64, "k": [2, 4]}, {"batch_size": 64, "n_steps": 30}
    job, problems = parse_job({"data": data, "sae": sae, "train": train})
    assert job, problems
    folder = tmp_path / "run"
    assert make_trainer(job, checkpoints=folder / "checkpoints", output=folder / "sae").run()
    (folder / "job.toml").write_text(dump_job(job))
    assert may_tell_tokens(job.hooks.values())
    told = evaluate(folder, best=False, device="cpu")
    assert len(told) == 2
    # The text is read once for all SAEs of a hook, and its rows are deleted.
    assert len(read) == 1
    assert not read[0].exists()
    for one in told:
        features = Features(Path(one["written_to"]) / FEATURES)
        assert features.n_rows == 600
        assert features.order()
        assert features.search("the")
