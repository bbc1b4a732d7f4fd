"""Language models with three blocks and random weights, and their tokenizers, as folders that transformers can load.

The variance of the weights is chosen so that a block changes the residual stream by about the same amount as a
trained block.
"""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

# Tests must not contact the hub. huggingface_hub reads this variable when it is imported.
os.environ["HF_HUB_OFFLINE"] = "1"

D_IN, N_BLOCKS, CONTEXT = 32, 3, 64
# As in Gemma 3, the first two blocks attend to a sliding window of tokens, and the last block attends to all tokens.
SLIDING_WINDOW = 5
DECODERS = ("gpt2", "llama", "gemma3", "qwen3")
ENCODERS = ("bert", "roberta")
FAMILIES = (*DECODERS, *ENCODERS)
BOS, EOS, PAD = "<bos>", "<eos>", "<pad>"
# The template that each family's tokenizer adds around a text.
AROUND = {"gpt2": "$A", "llama": f"{BOS} $A", "gemma3": f"{BOS} $A", "qwen3": "$A"}
CHAT = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}" + EOS + "{% endfor %}"
VOCABULARY = "the a cat dog sat ran on over under red blue small mat hill and then it saw was not here"


def sentences(n: int, seed: int = 0) -> list[str]:
    """Return texts of 3 to 30 words."""
    choose, words = random.Random(seed), VOCABULARY.split()
    return [" ".join(choose.choices(words, k=choose.randint(3, 30))) for _ in range(n)]


def make_model(folder: Path, family: str) -> Path:
    """Write a model of this family and its tokenizer to the folder; return the folder."""
    import torch
    import transformers

    torch.manual_seed(0)
    tokenizer = make_tokenizer(family)
    config = make_config(family, len(tokenizer))
    model = transformers.AutoModel.from_config(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name.lower() and "ln_" not in name:
                parameter.mul_(8)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def make_config(family: str, n_tokens: int) -> Any:
    """Return the configuration for a tiny model of this family."""
    import transformers

    if family == "gpt2":
        return transformers.GPT2Config(
            vocab_size=n_tokens,
            n_embd=D_IN,
            n_layer=N_BLOCKS,
            n_head=2,
            n_positions=CONTEXT,
            bos_token_id=0,
            eos_token_id=0,
        )
    sizes: dict[str, Any] = {
        "hidden_size": D_IN,
        "num_hidden_layers": N_BLOCKS,
        "num_attention_heads": 2,
        "intermediate_size": 48,
        "max_position_embeddings": CONTEXT,
        "vocab_size": n_tokens,
        "pad_token_id": 2,
    }
    if family in ENCODERS:
        return (transformers.BertConfig if family == "bert" else transformers.RobertaConfig)(**sizes)
    sizes |= {"num_key_value_heads": 1, "head_dim": 16}
    if family == "gemma3":
        kinds = ["sliding_attention", "sliding_attention", "full_attention"]
        return transformers.Gemma3TextConfig(**sizes, sliding_window=SLIDING_WINDOW, layer_types=kinds)
    return (transformers.LlamaConfig if family == "llama" else transformers.Qwen3Config)(**sizes)


def make_tokenizer(family: str) -> Any:
    """Return a byte-level tokenizer of about 300 tokens that adds the same special tokens as the family."""
    import tokenizers
    import transformers

    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300, special_tokens=[BOS, EOS, PAD], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(sentences(100), trainer)
    numbers = [(token, tokenizer.token_to_id(token)) for token in (BOS, EOS)]
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single=AROUND.get(family, f"{BOS} $A {EOS}"), special_tokens=numbers
    )
    special = {"bos_token": BOS, "eos_token": EOS, "pad_token": PAD}
    wrapped = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)
    wrapped.chat_template = CHAT if family == "qwen3" else None
    return wrapped
