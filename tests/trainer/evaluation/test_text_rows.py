"""The row of a text is that of its last token when the model reads that text alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from support.extractions import CPU, extraction_job
from support.tiny_models import FAMILIES, sentences

from trainer.contract.errors import UserError
from trainer.evaluation.text_rows import last_rows
from trainer.extraction.language_model import LanguageModel

CONTEXT = 16


def load(folder: Path, *, whole: bool = False) -> LanguageModel:
    job = extraction_job(folder, Path("text"), Path("rows"), hooks=["resid_post.1"], context=CONTEXT)
    return LanguageModel(job, CPU, whole=whole)


def alone(folder: Path, text: str) -> torch.Tensor:
    """Return the output of the second block for the last token of a text, [d]."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModel.from_pretrained(folder).eval()
    ids = tokenizer(text)["input_ids"]
    own = tokenizer(text, add_special_tokens=False)["input_ids"]
    first = next(at for at in range(len(ids)) if ids[at : at + len(own)] == own)
    before, after = ids[:first], ids[first + len(own) :]
    own = own[-(CONTEXT - len(before) - len(after)) :]
    with torch.inference_mode():
        output = model(input_ids=torch.tensor([before + own + after]), output_hidden_states=True)
    return output.hidden_states[2][0, len(before) + len(own) - 1]


@pytest.mark.parametrize("family", FAMILIES)
def test_each_text_has_the_row_that_it_has_alone(tiny: Callable[[str], Path], family: str) -> None:
    texts = sentences(12)
    rows = last_rows(load(tiny(family)), texts, CONTEXT)
    expected = torch.stack([alone(tiny(family), text) for text in texts])
    torch.testing.assert_close(rows, expected, rtol=1e-4, atol=1e-4)


def test_a_full_model_gives_the_same_rows_and_stops_at_its_hook(tiny: Callable[[str], Path]) -> None:
    texts, model = sentences(5), load(tiny("gpt2"), whole=True)
    reads: list[object] = []
    model._model.get_output_embeddings().register_forward_pre_hook(lambda *_: reads.append(1))
    reads.clear()
    rows = last_rows(model, texts, CONTEXT)
    assert not reads
    torch.testing.assert_close(rows, last_rows(load(tiny("gpt2")), texts, CONTEXT))


def test_a_text_without_a_token_is_refused(tiny: Callable[[str], Path]) -> None:
    with pytest.raises(UserError, match="tokenizer makes no tokens from the text"):
        last_rows(load(tiny("gpt2")), ["the cat", ""], CONTEXT)
