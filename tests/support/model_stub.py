"""Answers like `sae-train interact`, without a model: `python model_stub.py MODE FOLDER_OF_SIGNS …`.

A word is a token. Latent 0 has the activation `len(word) % 5` on it, and latent 1 has 1.5. Modes: "plain"; "slow" loads
once the file `loaded` exists, and answers once `answers` exists; "lost" cannot be loaded; "dies" crashes while loading;
"falls" crashes while generating; "refuses" refuses every request; "endless" generates until it is stopped; "masked"
does not predict next tokens. Requests are appended to the file `requests`.
"""

from __future__ import annotations

import json
import os
import re
import select
import sys
import time
from pathlib import Path
from typing import Any

WORD = re.compile(r"\s*\S+")
PARENT = os.getppid()
CONTINUATION, OTHER = (
    re.findall(r"\S+", text)
    for text in ("was a wise ruler and the people lived in peace", "was a sheep and all the lambs ran over the hill")
)


def act(word: str) -> float:
    """Return the activation of latent 0 on a word."""
    return float(len(word) % 5)


def main() -> None:
    mode, signs = sys.argv[1], Path(sys.argv[2])
    if mode == "dies":
        os.write(2, b"Segmentation fault in the driver\n")
        os._exit(3)
    if mode == "lost":
        say({"error": {"field": None, "message": "there is no model /models/lost", "fix": None}})
        sys.exit(1)
    tell_progress()
    if mode == "slow":
        wait_for(signs / "loaded")
    ready = {"event": "ready", "model": "/models/tiny-lm", "hook": "blocks.3.hook_resid_post", "n_latents": 2}
    say(ready | {"device": "cpu", "generates": mode != "masked", "reads_chats": mode != "masked"})
    for line in sys.stdin:
        with (signs / "requests").open("a") as file:
            file.write(line)
        request = json.loads(line)
        if mode == "refuses":
            say({"event": "refused", "message": "the text has 9,000 tokens; enter at most 2,048"})
        elif request["request"] == "read":
            if mode == "slow":
                wait_for(signs / "answers")
            say(read(request["text"]))
        elif request["request"] == "generate":
            generate(request, mode)


def tell_progress() -> None:
    """Report a stage as `trainer.contract.progress` does."""
    os.write(int(os.environ["SAE_TUI_PROGRESS_FD"]), b'{"stage":"loading the model","share":0.5}\n')


def read(text: str) -> dict[str, Any]:
    words = WORD.findall(text) or [text]
    tokens = [
        {
            "text": word,
            "latents": [{"latent": 0, "act": act(word)}, {"latent": 1, "act": 1.5}] if act(word) else [],
            "is_counted": place > 0,
        }
        for place, word in enumerate(words)
    ]
    return {"event": "text", "tokens": tokens}


def generate(request: dict[str, Any], mode: str) -> None:
    n_tokens = 10**9 if mode == "endless" else request["n_tokens"]
    n = 0
    while n < min(n_tokens, len(CONTINUATION)) or mode == "endless":
        n += 1
        plain, steered = (" ".join(["", *words[:n]]) for words in (CONTINUATION, OTHER))
        say({"event": "continued", "plain": plain, "steered": steered, "n_tokens": n})
        if mode == "falls" and n == 3:
            os._exit(7)
        if mode == "endless" and has_line():
            sys.stdin.readline()
            break
    kl = [{"text": word, "kl": 0.0} for word in WORD.findall(request["prompt"])]
    kl += [{"text": f" {word}", "kl": 0.25 * place} for place, word in enumerate(CONTINUATION[:n])]
    moved = [
        {"text": " sheep", "logit": 3.5, "plain": 0.002, "steered": 0.25},
        {"text": " wise", "logit": -2.25, "plain": 0.31, "steered": 0.0004},
    ]
    both = {"plain": " ".join(["", *CONTINUATION[:n]]), "steered": " ".join(["", *OTHER[:n]])}
    say({"event": "generated", **both, "n_tokens": n, "moved": moved, "kl": kl})


def has_line() -> bool:
    """Wait a moment for a request, so that an endless generation does not fill the pipe."""
    return bool(select.select([0], [], [], 0.01)[0])


def wait_for(file: Path) -> None:
    """Wait until a test creates a file; end if the test has ended."""
    while not file.exists():
        if os.getppid() != PARENT:
            sys.exit(1)
        time.sleep(0.01)


def say(answer: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
