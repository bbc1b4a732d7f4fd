"""A small OpenAI-compatible server for tests: it knows the truth about `explained_file`, guesses, or misbehaves."""

from __future__ import annotations

import contextlib
import json
import random
import re
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from support.features import TEXTS, features_file, flat

# A reply: an HTTP status, headers and a body, or a function that writes to the connection itself.
Reply = tuple[int, dict[str, str], bytes]
Answer = Callable[[str], "str | Reply"]


def completion(text: Any, **more: Any) -> bytes:
    """Return the body of a chat completion; a word counts as a token."""
    usage = {"prompt_tokens": 100, "completion_tokens": 7}
    return json.dumps(
        {"choices": [{"message": {"role": "assistant", "content": text}}], "usage": usage} | more
    ).encode()


class StubServer(ThreadingHTTPServer):
    """Answers with `answer(prompt)`, and keeps the prompts, headers and bodies of all requests."""

    daemon_threads = True

    def __init__(self, answer: Answer, port: int = 0) -> None:
        self.answer = answer
        self.prompts: list[str] = []
        self.headers: list[dict[str, str]] = []
        self.bodies: list[dict[str, Any]] = []
        self.paths: list[str] = []
        super().__init__(("127.0.0.1", port), _Handler)
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore clients that hang up."""


class _Handler(BaseHTTPRequestHandler):
    server: StubServer

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        prompt = body["messages"][-1]["content"]
        self.server.paths.append(self.path)
        self.server.headers.append(dict(self.headers))
        self.server.bodies.append(body)
        self.server.prompts.append(prompt)
        answer = self.server.answer(prompt)
        if callable(answer):
            answer(self)
            return
        status, headers, content = (200, {}, completion(answer)) if isinstance(answer, str) else answer
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(content))} | headers).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *_: object) -> None:  # noqa: A002
        """Print nothing."""


@contextlib.contextmanager
def stub_server(answer: Answer) -> Iterator[StubServer]:
    """Serve until the context ends."""
    server = StubServer(answer)
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()


# Latent i fires on the token of its own word, and on no other token.
WORDS = ("king", "river", "seven", "green", "march", "house", "sugar", "night", "paper", "stone", "cloud", "train")
_FILLERS = ("the", "of", "and", "to", "in", "that", "was", "for", "with", "her", "his", "they", "said", "from")
WIDTH, BEFORE = 12, 6


def explained_file(n_contexts: int = 20, n_latents: int = len(WORDS), weights: str = "") -> bytes:
    """Return a features file with a latent for each word, each with `n_contexts` different texts."""
    rng = random.Random(7)
    texts = [f" {word}" for word in (*WORDS, *_FILLERS)]
    ids, acts = [], []
    for latent in range(n_latents):
        contexts = [[rng.randrange(len(WORDS), len(texts)) for _ in range(WIDTH)] for _ in range(n_contexts)]
        for context in contexts:
            context[BEFORE] = latent
        ids.append(contexts)
        acts.append([[(at == BEFORE) * (20.0 - n % 20) for at in range(WIDTH)] for n in range(n_contexts)])
    ends = [sum(map(len, texts[: number + 1])) for number in range(len(texts))]
    shape = [n_latents, n_contexts, WIDTH]
    tensors: dict[str, tuple[str, str, list[int], list[Any]]] = {
        "n_fired": ("I32", "i", [n_latents], [50] * n_latents),
        "largest": ("F32", "f", [n_latents], [20.0 + n_latents - number for number in range(n_latents)]),
        "mean": ("F32", "f", [n_latents], [5.0] * n_latents),
        "histogram": ("I32", "i", [n_latents, 2], [25] * 2 * n_latents),
        "nearest": ("I32", "i", [n_latents, 1], [(one + 1) % n_latents for one in range(n_latents)]),
        "cosines": ("F32", "f", [n_latents, 1], [0.25] * n_latents),
        "token_ids": ("I32", "i", shape, flat(ids)),
        "acts": ("F32", "f", shape, flat(acts)),
        "n_rows": ("I64", "q", [1], [10_000]),
        "before": ("I64", "q", [1], [BEFORE]),
        "text_ids": ("I32", "i", [len(texts)], list(range(len(texts)))),
        "text_ends": ("I64", "q", [len(texts)], ends),
        "text": ("U8", "B", [ends[-1]], list("".join(texts).encode())),
        "index_ends": ("I64", "q", [len(texts)], [min(one + 1, n_latents) for one in range(len(texts))]),
        "index_latents": ("I32", "i", [n_latents], list(range(n_latents))),
    }
    content = features_file(TEXTS, **tensors)
    return with_weights(content, weights) if weights else content


def with_weights(content: bytes, weights: str) -> bytes:
    """Return a features file that says which weights it belongs to."""
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size]) | {"__metadata__": {"weights": weights}}
    encoded = json.dumps(header).encode()
    return len(encoded).to_bytes(8, "little") + encoded + content[8 + size :]


def knows_the_truth(prompt: str) -> str:
    """Answer as an explainer that finds the marked word, and as a scorer that always judges rightly."""
    numbered = dict(re.findall(r"^(\d+)\. (.*)$", prompt, re.MULTILINE))
    if "Answer with one line" in prompt:
        words = set(re.findall(r"<< ?(\w+) ?>>", prompt))
        return f"Description: the word {' and '.join(sorted(words))}"
    word = re.search(r"the word (\w+)", prompt)
    wanted = rf"<< ?{word[1]} ?>>" if word and "wrong tokens" in prompt else rf"\b{word[1] if word else '-'}\b"
    return json.dumps([int(number) for number, text in numbered.items() if re.search(wanted, text)])


def guesses(seed: int) -> Answer:
    """Return an explainer whose scorer chooses each text with a chance of one half."""
    rng, lock = random.Random(seed), threading.Lock()

    def answer(prompt: str) -> str:
        if "Answer with one line" in prompt:
            return "Description: something"
        n = len(re.findall(r"^\d+\. ", prompt, re.MULTILINE))
        with lock:
            return json.dumps([number for number in range(1, n + 1) if rng.random() < 0.5])

    return answer


def drips(handler: BaseHTTPRequestHandler) -> None:
    """Send a byte of an endless body now and then."""
    handler.send_response(200)
    handler.end_headers()
    with contextlib.suppress(OSError):
        while True:
            handler.wfile.write(b" ")
            handler.wfile.flush()
            time.sleep(0.05)


def floods(handler: BaseHTTPRequestHandler) -> None:
    """Send an endless body as fast as possible."""
    handler.send_response(200)
    handler.end_headers()
    with contextlib.suppress(OSError):
        while True:
            handler.wfile.write(b"x" * 65536)
