"""Tests for the client of OpenAI-compatible servers, against a local server that misbehaves."""

from __future__ import annotations

import email.utils
import json
import shutil
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.stub_llm import Reply, StubServer, completion, drips, floods, stub_server

from sae_tui.explain import client as client_module
from sae_tui.explain.client import MOST_BUSY, MOST_FAILED, Client, NoAnswer, Stopped, checked_url, key_from_environment
from trainer.contract.errors import UsageError, UserError

KEY = "sk-a-very-secret-key-0123456789"


def client(server: StubServer | str, **more: Any) -> Client:
    url = server if isinstance(server, str) else server.url
    return Client(url, "some-model", **({"backoff_s": 0.001, "timeout_s": 20.0} | more))


def in_turn(*replies: Any) -> Callable[[str], Any]:
    """Return an answer that gives these replies one after the other, and then the last one again."""
    left, lock = list(replies), threading.Lock()

    def answer(_: str) -> Any:
        with lock:
            return left.pop(0) if len(left) > 1 else left[0]

    return answer


def error(status: int, message: str = "", **headers: str) -> Reply:
    body = json.dumps({"error": {"message": message}}).encode() if message else b""
    return status, {name.replace("_", "-"): value for name, value in headers.items()}, body


def test_a_request_has_the_form_of_the_chat_interface_and_its_tokens_are_counted() -> None:
    with stub_server(in_turn("kings")) as server:
        asking = client(f"{server.url}/", max_tokens=77, key=KEY)
        assert asking.ask("What?") == ("kings", 100, 7)
        asking.ask("And?")
        assert server.paths == ["/v1/chat/completions"] * 2
        assert server.headers[0]["Authorization"] == f"Bearer {KEY}"
        assert server.bodies[0] == {
            "model": "some-model", "messages": [{"role": "user", "content": "What?"}],
            "temperature": 0, "seed": 0, "max_tokens": 77,
        }  # fmt: skip
        assert (asking.n_requests, asking.prompt_tokens, asking.completion_tokens) == (2, 200, 14)
        assert asking.is_counted


@pytest.mark.parametrize(
    "usage", [None, {}, {"prompt_tokens": -1}, {"prompt_tokens": "x"}, [1], {"prompt_tokens": 1e99}]
)
def test_an_unusual_token_count_does_not_spoil_the_answer(usage: object) -> None:
    with stub_server(in_turn((200, {}, completion("kings", usage=usage)))) as server:
        asking = client(server)
        assert asking.ask("x") == ("kings", None, None)
        assert not asking.is_counted


@pytest.mark.parametrize("status", [429, 503])
def test_a_busy_server_is_asked_again_after_the_time_that_it_gives(status: int) -> None:
    with stub_server(in_turn(error(status, "slow down", Retry_After="1"), "kings")) as server:
        began = time.monotonic()
        assert client(server).ask("x").text == "kings"
        assert time.monotonic() - began >= 1
    date = email.utils.formatdate(time.time() + 2, usegmt=True)
    with stub_server(in_turn(error(status, Retry_After=date), error(status), "kings")) as server:
        began = time.monotonic()
        assert client(server).ask("x").text == "kings"
        assert time.monotonic() - began > 0.5
        assert len(server.prompts) == 3


class RecordedWaits(threading.Event):
    """Records for how long it is waited for, and does not wait."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[float] = []

    def wait(self, timeout: float | None = None) -> bool:
        self.waits.append(timeout or 0.0)
        return self.is_set()


def test_waits_before_a_repetition_double_up_to_a_limit() -> None:
    with stub_server(in_turn(error(429, "busy"))) as server:
        asking = client(server, backoff_s=5.0)
        asking._stopped = recorded = RecordedWaits()
        with pytest.raises(UserError, match=f"HTTP 429: busy after {MOST_BUSY} tries"):
            asking.ask("x")
    assert len(recorded.waits) == MOST_BUSY
    for n, wait in enumerate(recorded.waits):
        assert min(120, 0.75 * 5 * 2**n) <= wait <= min(120, 1.25 * 5 * 2**n)


def test_a_server_that_asks_to_wait_for_long_ends_the_run() -> None:
    with stub_server(in_turn(error(429, "quota exceeded.", Retry_After="3600"))) as server:
        with pytest.raises(UserError) as raised:
            client(server).ask("x")
        assert str(raised.value) == (
            "the server answers HTTP 429: quota exceeded and asks to wait 3600 s; run the command again later, or with"
            " a smaller --parallel"
        )
        assert len(server.prompts) == 1


@pytest.mark.parametrize("status", [500, 502, 504])
def test_a_failing_server_is_asked_a_few_times(status: int) -> None:
    with stub_server(in_turn(*[error(status)] * MOST_FAILED, "kings")) as server:
        assert client(server).ask("x").text == "kings"
    with stub_server(in_turn(error(status, "out of memory"))) as server:
        with pytest.raises(NoAnswer, match=f"HTTP {status}: out of memory") as raised:
            client(server).ask("x")
        assert len(server.prompts) == MOST_FAILED + 1
        assert not raised.value.may_repeat


@pytest.mark.parametrize(
    ("status", "remedy"),
    [
        (401, r"give a valid key in \$SAE_TUI_EXPLAIN_KEY"),
        (403, "that may use this model"),
        (404, "check the path in --url, such as /v1, and the name in --model"),
    ],
)
def test_a_wrong_key_path_or_model_is_refused_at_once(status: int, remedy: str) -> None:
    with stub_server(in_turn(error(status, "no such thing"))) as server:
        with pytest.raises(UserError, match=f"HTTP {status}: no such thing; .*{remedy}"):
            client(server).ask("x")
        assert len(server.prompts) == 1


def test_options_that_a_server_refuses_are_left_out_from_then_on() -> None:
    def answer(_: str) -> Any:
        body = server.bodies[-1]
        if "max_tokens" in body:
            return error(400, "Unsupported parameter: 'max_tokens'. Use 'max_completion_tokens' instead.")
        if "temperature" in body:
            return error(400, "Unsupported value: 'temperature' does not support 0")
        return "kings"

    with stub_server(answer) as server:
        asking = client(server, max_tokens=50)
        assert asking.ask("x").text == "kings"
        assert {"max_completion_tokens": 50, "seed": 0}.items() <= server.bodies[-1].items()
        asking.ask("x")
        assert len(server.bodies) == 4


SCHEMA = {"type": "object", "properties": {}}


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (400, "This response_format type is unavailable now"),
        (400, "Invalid parameter: 'response_format' of type 'json_schema' is not supported with this model."),
        (422, "[{'type': 'literal_error', 'msg': \"Input should be 'text' or 'json_object'\"}]"),
        (500, "failed to parse grammar"),
    ],
)
def test_a_server_that_refuses_schemas_is_asked_without_from_then_on(status: int, words: str) -> None:
    def answer(_: str) -> Any:
        return error(status, words) if "response_format" in server.bodies[-1] else "[2]"

    with stub_server(answer) as server:
        asking = client(server)
        assert [asking.ask(one, SCHEMA).text for one in "xyz"] == ["[2]"] * 3
    assert [body.get("response_format", {}).get("json_schema") for body in server.bodies] == [
        {"name": "answer", "strict": True, "schema": SCHEMA}, None, None, None,
    ]  # fmt: skip


def test_a_refused_text_does_not_turn_schemas_off() -> None:
    refused = error(400, "the request exceeds the available context size")
    with stub_server(in_turn(refused, refused, error(500, "out of memory"), "[2]")) as server:
        asking = client(server)
        with pytest.raises(NoAnswer, match="exceeds the available context"):
            asking.ask("x", SCHEMA)
        assert asking.ask("y", SCHEMA).text == "[2]"
    assert ["response_format" in body for body in server.bodies] == [True, False, True, True]


def test_a_refused_prompt_is_not_repeated() -> None:
    with stub_server(in_turn(error(400, "max_tokens is too large for the context"))) as server:
        with pytest.raises(NoAnswer, match="HTTP 400: max_tokens is too large") as raised:
            client(server).ask("x")
        assert (len(server.prompts), raised.value.may_repeat) == (1, False)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"", "not a chat completion"),
        (completion("kings")[:-20], "not a chat completion"),
        (b"<html>busy</html>", "not a chat completion"),
        (b'{"choices": "no"}', "not a chat completion"),
        (b'{"error": {"message": "no credits"}}', "not a chat completion: no credits"),
        (b'data: {"choices": []}\n\ndata: [DONE]\n', "not a chat completion"),
        (b"\xff\xfe", "not a chat completion"),
        (b"[" * 100_000, "not a chat completion"),
        (b'{"choices": []}', "the answer is empty"),
        (completion(None), "the answer is empty"),
        (completion("  \n"), "the answer is empty"),
        (completion("", choices=[{"message": {"content": ""}, "finish_reason": "length"}]), "raise --max-tokens"),
    ],
)
def test_an_unusable_answer_has_a_printable_reason(body: bytes, reason: str) -> None:
    with stub_server(in_turn((200, {}, body))) as server, pytest.raises(NoAnswer, match=reason) as raised:
        client(server).ask("x")
    assert raised.value.may_repeat
    assert str(raised.value).isprintable()


def test_a_body_shorter_than_its_length_is_no_answer() -> None:
    reply = 200, {"Content-Length": "5000", "Connection": "close"}, completion("kings")[:-3]
    with stub_server(in_turn(reply)) as server, pytest.raises(NoAnswer):
        client(server, timeout_s=2.0).ask("x")


def test_an_endless_or_slow_body_ends_after_its_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "MOST_BYTES", 1 << 20)
    with stub_server(lambda _: floods) as server, pytest.raises(NoAnswer, match="larger than 1 MiB"):
        client(server).ask("x")
    with stub_server(lambda _: drips) as server, pytest.raises(NoAnswer, match="no complete answer within"):
        client(server, timeout_s=0.5).ask("x")
    silent = threading.Event()
    with stub_server(lambda _: silent.wait(30) or "late") as server:
        with pytest.raises(NoAnswer, match="no complete answer within"):
            client(server, timeout_s=0.5).ask("x")
        silent.set()


def raw_server(content: bytes, *, per_byte_s: float = 0.0) -> Iterator[str]:
    """Serve these bytes to each connection, without the rules of HTTP."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                with connection:
                    connection.recv(65536)
                    try:
                        for at in range(len(content) if per_byte_s else 0):
                            connection.sendall(content[at : at + 1])
                            time.sleep(per_byte_s)
                        connection.sendall(b"" if per_byte_s else content)
                    except OSError:
                        pass

        threading.Thread(target=serve, daemon=True).start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
        listener.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize(
    "content", [b"", b"SSH-2.0-x\r\n", b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n"]
)
def test_a_server_that_speaks_no_http_gives_no_answer(content: bytes) -> None:
    for url in raw_server(content):
        with pytest.raises(NoAnswer, match="no answer"):
            client(url).ask("x")


def test_headers_that_never_end_are_given_up() -> None:
    for url in raw_server(b"HTTP/1.1 200 OK\r\nX: " + b"x" * 1000, per_byte_s=0.05):
        with pytest.raises(NoAnswer, match="within"):
            client(url, timeout_s=0.5).ask("x")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def test_a_server_that_is_not_running_is_reported_at_once() -> None:
    port = free_port()
    with pytest.raises(UserError) as raised:
        client(f"http://127.0.0.1:{port}/v1").ask("x")
    assert str(raised.value) == (
        f"--url: http://127.0.0.1:{port} cannot be reached: Connection refused; start the server or check it"
    )
    with pytest.raises(UserError, match="cannot be reached: "):
        client("http://no-such-host.invalid/v1").ask("x")


def test_a_server_that_restarts_during_a_run_is_waited_for() -> None:
    with stub_server(in_turn("kings")) as server:
        asking = client(server, backoff_s=0.05)
        asking.ask("x")
    again: list[StubServer] = []
    restart = threading.Timer(0.3, lambda: again.append(StubServer(in_turn("queens"), server.server_port)))
    restart.start()
    assert asking.ask("x").text == "queens"
    restart.join()
    again[0].shutdown()
    again[0].server_close()


def test_stopping_ends_a_request_that_waits_for_its_answer() -> None:
    arrived, ends = threading.Event(), threading.Event()
    with stub_server(lambda _: arrived.set() or ends.wait(30) or "late") as server:
        asking = client(server)
        threading.Thread(target=lambda: (arrived.wait(10), asking.stop())).start()
        with pytest.raises(Stopped):
            asking.ask("x")
        ends.set()


# The key


def test_the_key_is_read_from_the_environment_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SAE_TUI_EXPLAIN_KEY", raising=False)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    assert key_from_environment() == ""
    monkeypatch.setenv("OPENAI_API_KEY", "theirs")
    assert key_from_environment() == "theirs"
    monkeypatch.setenv("SAE_TUI_EXPLAIN_KEY", f" {KEY}\n")
    assert key_from_environment() == KEY
    monkeypatch.setenv("SAE_TUI_EXPLAIN_KEY", "")
    assert key_from_environment() == ""
    for wrong in ("two words", "ключ", "a\nb", "a\r\nX-Header: 1"):
        monkeypatch.setenv("SAE_TUI_EXPLAIN_KEY", wrong)
        with pytest.raises(UserError, match=r"\$SAE_TUI_EXPLAIN_KEY: contains characters") as raised:
            key_from_environment()
        assert wrong not in str(raised.value)


@pytest.mark.parametrize(
    ("url", "is_accepted"),
    [
        ("http://localhost:8000/v1", True),
        ("http://127.0.0.1/v1", True),
        ("http://127.9.9.9:1/v1", True),
        ("http://[::1]:8000/v1", True),
        ("https://api.example.com/v1", True),
        ("http://api.example.com/v1", False),
        ("http://10.0.0.7:8000/v1", False),
        ("http://localhost.example.com/v1", False),
        ("http://127.0.0.1.example.com/v1", False),
        ("http://0.0.0.0:8000/v1", False),
        ("http://[::]:8000/v1", False),
    ],
)
def test_a_key_is_sent_without_encryption_only_on_this_machine(url: str, is_accepted: bool) -> None:
    assert checked_url(url, "").hostname
    if is_accepted:
        assert checked_url(url, KEY).hostname
    else:
        with pytest.raises(UsageError, match="without encryption") as raised:
            checked_url(url, KEY)
        assert KEY not in str(raised.value)


@pytest.mark.parametrize(
    "url",
    ["", "localhost:8000", "ftp://x/v1", "file:///etc/passwd", "http://", "http:///v1", "http://x:99999/v1", "http://x:y/v1",
     "http://a b/v1", "http://x/v1\r\nX: y", "http://[::1/v1", "http://user:pw@localhost/v1", "http://x/v1?key=abc",
     "http://x/v1#y", "http://ü.example/v1"],
)  # fmt: skip
def test_an_unusable_url_is_refused(url: str) -> None:
    with pytest.raises(UsageError, match="--url: ") as raised:
        checked_url(url, "")
    assert "pw" not in str(raised.value).replace("password", "")


@pytest.mark.parametrize("status", [301, 302, 307, 308])
def test_redirects_are_refused_and_reach_no_other_server(status: int) -> None:
    with stub_server(in_turn("stolen")) as other:
        reply = error(status, "", Location=f"{other.url}/chat/completions")
        with stub_server(in_turn(reply)) as server, pytest.raises(UserError, match="redirects to another address"):
            client(server, key=KEY).ask("x")
        assert other.headers == []


def test_no_proxy_is_used_for_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    with stub_server(in_turn("stolen")) as proxy, stub_server(in_turn("kings")) as server:
        for name in ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{proxy.server_port}")
        assert client(server, key=KEY).ask("x").text == "kings"
        assert client(server.url.replace("127.0.0.1", "localhost"), key=KEY).ask("x").text == "kings"
        assert proxy.headers == []


def test_a_key_that_the_server_repeats_is_not_shown() -> None:
    replies = error(401, f"Incorrect key: {KEY}"), (500, {}, KEY.encode()), f"Description: {KEY}"
    with stub_server(in_turn(replies[0])) as server, pytest.raises(UserError, match="Incorrect key: …") as raised:
        client(server, key=KEY).ask("x")
    assert KEY not in str(raised.value)
    with stub_server(in_turn(replies[1])) as server, pytest.raises(NoAnswer) as failed:
        client(server, key=KEY).ask("x")
    assert KEY not in str(failed.value)
    with stub_server(in_turn(replies[2])) as server:
        assert client(server, key=KEY).ask("x").text == "Description: …"


def test_a_short_key_does_not_change_answers_that_contain_it() -> None:
    with stub_server(lambda _: "[1, 10]") as server:
        assert client(server, key="1").ask("x").text == "[1, 10]"


# TLS


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not shutil.which("openssl"):
        pytest.skip("the program openssl is not installed")
    file = tmp_path_factory.mktemp("tls") / "both.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", file, "-out", file.with_suffix(".crt"),
         "-days", "2", "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"],
        check=True, capture_output=True,
    )  # fmt: skip
    file.write_text(file.read_text() + file.with_suffix(".crt").read_text())
    return file


def test_an_https_server_needs_a_valid_certificate(certificate: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with stub_server(in_turn("kings")) as server:
        theirs = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        theirs.load_cert_chain(certificate)
        server.socket = theirs.wrap_socket(server.socket, server_side=True)
        url = f"https://localhost:{server.server_port}/v1"
        with pytest.raises(UserError, match="its certificate is not valid"):
            client(url, key=KEY).ask("x")
        assert server.headers == []
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        assert client(url, key=KEY).ask("x").text == "kings"
        with pytest.raises(UserError, match="its certificate is not valid"):
            client(url.replace("localhost", "127.0.0.1"), key=KEY).ask("x")
