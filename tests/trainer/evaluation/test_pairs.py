"""Tests that a Parquet file of pairs contains each row with the text around its token."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from support.extractions import extraction_job, run
from support.tiny_models import sentences

from trainer.activations.shards import Shards
from trainer.cli import main
from trainer.contract.runs.rank_spec import EXIT_FAILED, EXIT_FINISHED, EXIT_USAGE
from trainer.evaluation.contexts import texts_of
from trainer.extraction.token_bytes import read_tokens


@pytest.mark.parametrize("dtype", ["auto", "int8"])
def test_each_pair_has_a_row_and_the_text_up_to_its_token(
    tiny: Callable[[str], Path], tmp_path: Path, capsys, dtype: str
) -> None:
    (text := tmp_path / "text.jsonl").write_text("".join(json.dumps({"text": one}) + "\n" for one in sentences(20)))
    run(job := extraction_job(tiny("gpt2"), text, tmp_path / "acts", n_tokens=200, shard_rows=80, dtype=dtype))
    data, file = job.folder("resid_post.1"), tmp_path / "pairs.parquet"
    arguments = ["pairs", str(data), str(file), "--before", "3", "--after", "2", "--rows", "150"]
    assert main([*arguments, "--json"]) == EXIT_FINISHED
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == {"file": str(file), "n_pairs": 150}
    assert file.stat().st_mode & 0o777 == 0o600
    table = pq.read_table(file)
    tokens, at = read_tokens(data), 0
    for one in texts_of(data, 150):
        ids, documents = one.origin.token_ids.tolist(), one.origin.document.tolist()
        words = [tokens[number].decode() for number in ids]
        for row in range(len(ids)):
            pair = {name: column[at].as_py() for name, column in zip(table.column_names, table.columns, strict=True)}
            assert torch.equal(torch.tensor(pair["activation_vector"]), one.x[row])
            near = [place for place in range(len(ids)) if documents[place] == documents[row]]
            assert pair["text"] == "".join(words[place] for place in near if row - 3 <= place <= row)
            assert pair["text_after"] == "".join(words[place] for place in near if row < place <= row + 2)
            assert pair["token"] == words[row]
            at += 1
    assert at == len(table) == 150
    # The pairs can be trained on, too.
    source = Shards(path=str(file))
    assert (source.n_tokens, source.d_in) == (150, 32)
    assert source.notes == [f"{file}: the rows are in the column 'activation_vector'"]
    # An existing file is never replaced.
    assert main(arguments) == EXIT_USAGE
    assert f"{file} exists; name a new file" in capsys.readouterr().err
    (data / "tokens.json").unlink()
    assert main([*arguments[:2], str(tmp_path / "other.parquet")]) == EXIT_FAILED
    assert "the rows do not record their tokens, or tokens.json is missing" in capsys.readouterr().err
    assert not [*tmp_path.glob("*other*")]
