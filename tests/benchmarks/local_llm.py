"""Serves a local language model with the chat interface of OpenAI, to try `sae-tui explain` without another server.

Run `PYTHONPATH=tests python tests/benchmarks/local_llm.py FOLDER`, where FOLDER has a model that transformers can load
and whose tokenizer has a chat template. Then run `sae-tui explain RUN --url http://127.0.0.1:8000/v1 --model local` in
another terminal. It answers one request at a time, on the CPU, and prints the seconds of each answer. A list of numbers
follows the requested schema: each next token is the most likely one that the schema allows. For real work, use
llama.cpp, vLLM or Ollama.
"""

from __future__ import annotations

import argparse
import json
import threading
import time
from http.server import ThreadingHTTPServer
from typing import Any

import torch
from support.stub_llm import StubServer, completion
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer


class LocalModel:
    """A model that answers a prompt with its most likely tokens."""

    def __init__(self, folder: str, threads: int) -> None:
        torch.set_num_threads(threads)
        self._tokenizer = AutoTokenizer.from_pretrained(folder)
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self._lock = threading.Lock()
        self.server: Any = None

    @torch.inference_mode()
    def answer(self, prompt: str) -> tuple[int, dict[str, str], bytes]:
        body = self.server.bodies[-1]
        most = min(int(body.get("max_tokens", 60)), 60)
        with self._lock:
            began = time.monotonic()
            messages = [{"role": "user", "content": prompt}]
            ids = self._tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt")
            ids = ids["input_ids"] if hasattr(ids, "keys") else ids
            form = body["response_format"]["json_schema"]["schema"]["properties"] if "response_format" in body else {}
            if "texts" in form:
                written = self._listed(ids, form["texts"]["items"]["enum"])
            else:
                written = self._model.generate(ids, max_new_tokens=most, do_sample=False)[0, ids.shape[1] :].tolist()
            text = self._tokenizer.decode(written, skip_special_tokens=True)
            seconds = time.monotonic() - began
        n_prompt, n_written = ids.shape[1], len(written)
        print(json.dumps({"prompt": n_prompt, "written": n_written, "seconds": round(seconds, 1), "text": text}))
        usage = {"prompt_tokens": n_prompt, "completion_tokens": n_written}
        return 200, {"Content-Type": "application/json"}, completion(text, usage=usage)

    def _listed(self, ids: Tensor, numbers: list[int]) -> list[int]:
        """Return the tokens of an object like {"texts": [2, 5]}, in which each number occurs at most once."""
        begin = self._tokenizer.encode('{"texts": [', add_special_tokens=False)
        output = self._model(torch.cat([ids, torch.tensor([begin])], dim=1), use_cache=True)
        written, left, ends = [*begin], [*numbers], ["]}"]
        while True:
            # A number with the sign after it is no prefix of another one, unlike 1 of 10.
            options = [*ends, *(f"{one}]}}" for one in left), *(f"{one}, " for one in left if len(left) > 1)]
            paths = [self._tokenizer.encode(one, add_special_tokens=False) for one in options]
            at = 0
            while len(paths) > 1 or at < len(paths[0]):
                allowed = sorted({path[at] for path in paths})
                token = allowed[int(output.logits[0, -1, allowed].argmax())]
                output = self._model(torch.tensor([[token]]), past_key_values=output.past_key_values, use_cache=True)
                paths, at = [path for path in paths if path[at] == token], at + 1
            written += paths[0]
            chosen = self._tokenizer.decode(paths[0])
            if chosen.endswith("}"):
                return written
            left.remove(int(chosen.strip(", ")))
            ends = []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--threads", type=int, default=2)
    flags = parser.parse_args()
    model = LocalModel(flags.folder, flags.threads)
    model.server = server = StubServer(model.answer, flags.port)
    assert isinstance(server, ThreadingHTTPServer)
    print(server.url, flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    main()
