"""Tests for language models in GGUF files, with a tiny Llama written by the gguf package."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

gguf = pytest.importorskip("gguf")
transformers = pytest.importorskip("transformers")

from trainer.contract.settings.job_file import parse_any  # noqa: E402
from trainer.extraction.language_model import LanguageModel  # noqa: E402

BLOCKS, WIDTH, HIDDEN, HEADS = 3, 16, 32, 2
SHAPES = {
    "attn_q": (WIDTH, WIDTH), "attn_k": (WIDTH, WIDTH), "attn_v": (WIDTH, WIDTH), "attn_output": (WIDTH, WIDTH),
    "ffn_gate": (HIDDEN, WIDTH), "ffn_up": (HIDDEN, WIDTH), "ffn_down": (WIDTH, HIDDEN),
    "attn_norm": (WIDTH,), "ffn_norm": (WIDTH,),
}  # fmt: skip


def write_model(file: Path) -> None:
    words = [*(chr(ord("a") + number) for number in range(26)), "ab", "<end>"]
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_name("tiny")
    writer.add_context_length(64)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(BLOCKS)
    writer.add_feed_forward_length(HIDDEN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(words))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(words)
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(len(words) - 1)
    random = np.random.default_rng(0)
    shapes = {f"blk.{number}.{name}": shape for number in range(BLOCKS) for name, shape in SHAPES.items()}
    for name, shape in {"token_embd": (len(words), WIDTH), "output_norm": (WIDTH,), **shapes}.items():
        writer.add_tensor(f"{name}.weight", random.standard_normal(shape).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_gguf_file_is_parsed_once_and_yields_the_same_weights_as_transformers(tmp_path, monkeypatch) -> None:
    file = tmp_path / "tiny.gguf"
    write_model(file)
    expected = transformers.AutoModel.from_pretrained(tmp_path, gguf_file=file.name, dtype=torch.float32)
    parsed = []

    class Counted(gguf.GGUFReader):
        def __init__(self, path: str) -> None:
            parsed.append(path)
            super().__init__(path)

    monkeypatch.setattr(gguf, "GGUFReader", Counted)
    names = gguf.get_tensor_name_map
    model = {"path": str(file), "hooks": [f"blocks.{BLOCKS - 1}.hook_resid_post"]}
    job, problems = parse_any(
        {"kind": "extract", "model": model, "text": {"path": "x.txt", "context": 16}, "extract": {"output": "rows"}}
    )
    assert job, problems
    loaded = LanguageModel(job, torch.device("cpu"))
    assert parsed == [str(file)]
    assert (gguf.GGUFReader, gguf.get_tensor_name_map) == (Counted, names)
    found = loaded._model.state_dict()
    assert found.keys() == expected.state_dict().keys()
    for name, weight in expected.state_dict().items():
        assert torch.equal(found[name], weight), name
