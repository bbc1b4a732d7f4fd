"""Asks a language model behind an OpenAI-compatible server.

It uses the standard library: no package of the app brings an HTTP client, and `http.client` follows no redirects and
reads no proxies from the environment. A limit of the whole answer in time and bytes would be needed with any client.
"""

from __future__ import annotations

import contextlib
import email.utils
import http.client
import ipaddress
import os
import random
import re
import socket
import ssl
import threading
import time
import urllib.request
from collections.abc import Mapping
from typing import Annotated, Any, NamedTuple
from urllib.parse import SplitResult, unquote, urlsplit

import msgspec

from trainer.contract.errors import UsageError, UserError
from trainer.contract.json_file import decode_as
from trainer.contract.printable import on_one_line

KEY_VARIABLES = ("SAE_TUI_EXPLAIN_KEY", "OPENAI_API_KEY")
# The limit of an answer in bytes; of a connection in seconds.
MOST_BYTES, CONNECT_S = 2 << 20, 10.0
# How often a request is repeated if the server is busy (429, 503) or fails (other 5xx), and the longest wait between.
MOST_BUSY, MOST_FAILED, LONGEST_WAIT_S = 8, 3, 120.0
_LONGEST_MESSAGE = 200
# The least number of characters of a key that an answer cannot contain by chance.
_LEAST_SECRET = 12
_BUSY = (429, 503)
# How servers say that they do not know an option; an option with a wrong value, such as too many tokens, is kept.
_UNSUPPORTED = re.compile(r"not support|unsupported|unknown|unrecogni|unexpected|not permitted", re.IGNORECASE)
# What to do if the server refuses every request.
_REMEDIES = {
    401: f"give a valid key in ${KEY_VARIABLES[0]}",
    403: f"give a key in ${KEY_VARIABLES[0]} that may use this model",
    404: "check the path in --url, such as /v1, and the name in --model",
}
# The words of an internal error that is due to the schema of an answer.
_OF_SCHEMA = re.compile(r"response.?format|schema|grammar|structured|guided", re.IGNORECASE)
_Count = Annotated[int, msgspec.Meta(ge=0, le=10**12)]


class NoAnswer(Exception):
    """A request without a usable answer; the message says why. `may_repeat` says whether another try can help."""

    def __init__(self, message: str, *, may_repeat: bool = True) -> None:
        super().__init__(message)
        self.may_repeat = may_repeat


class Stopped(Exception):
    """Raised by a request that `Client.stop` has ended."""


class Answer(NamedTuple):
    """A model's answer, and the numbers of tokens that the server counted; None if it reports none."""

    text: str
    prompt_tokens: int | None
    completion_tokens: int | None


class Reply(NamedTuple):
    """A server's reply, or the reason in `fault` why it gave none. `has_connected` says whether it was reached."""

    status: int = 0
    headers: Mapping[str, str] = {}
    body: bytes = b""
    fault: str = ""
    has_connected: bool = True


class _Message(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    message: _Message
    finish_reason: str | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: _Count | None = None
    completion_tokens: _Count | None = None


class _Completion(msgspec.Struct):
    choices: list[_Choice]
    # Decoded apart, since an unusual usage must not spoil the answer.
    usage: Any = None


def key_from_environment() -> str:
    """Return the API key, or "" without one; an empty `SAE_TUI_EXPLAIN_KEY` turns `OPENAI_API_KEY` off."""
    name = next((name for name in KEY_VARIABLES if name in os.environ), "")
    key = os.environ.get(name, "").strip()
    # http.client would quote the key in its error message.
    if not re.fullmatch(r"[!-~]*", key):
        raise UserError(f"${name}: contains characters that a key cannot have; set it again")
    return key


def checked_url(url: str, key: str) -> SplitResult:
    """Return the parts of a server's URL; raise `UsageError` if it cannot be used or would reveal the key."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        parts, port = SplitResult("", "", "", "", ""), None
    if parts.scheme not in ("http", "https") or not parts.hostname or port == 0 or not re.fullmatch(r"[!-~]+", url):
        raise UsageError("--url: must be like http://localhost:8000/v1 or https://api.openai.com/v1")
    if "@" in parts.netloc or parts.query or parts.fragment:
        raise UsageError(
            f"--url: leave out names, passwords and parameters; give a key in the variable ${KEY_VARIABLES[0]}"
        )
    if key and parts.scheme == "http" and not is_loopback(parts.hostname):
        raise UsageError(
            f"--url: the API key would be sent without encryption to {parts.hostname}; use https, or set"
            f" {KEY_VARIABLES[0]}= to send no key"
        )
    return parts


def is_loopback(host: str) -> bool:
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host.lower().rstrip(".") == "localhost"


class Client:
    """Sends chat requests to a server; several threads may use it at once.

    A request ends after `timeout_s`, even if the server sends a byte now and then. `backoff_s` is the first wait before
    a request is repeated; it doubles each time.
    """

    def __init__(
        self, url: str, model: str, *, key: str = "", timeout_s: float = 300.0, max_tokens: int = 500,
        backoff_s: float = 1.0,
    ) -> None:  # fmt: skip
        self._parts, self._key = checked_url(url, key), key
        self.model = model
        self._timeout_s, self._backoff_s = timeout_s, backoff_s
        self._options: dict[str, Any] = {"temperature": 0, "seed": 0, "max_tokens": max_tokens}
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._open: set[socket.socket] = set()
        self._has_answered = False
        self._takes_schemas = True
        self.n_requests = self.n_unreported = self.prompt_tokens = self.completion_tokens = 0

    @property
    def is_counted(self) -> bool:
        """Whether the server has reported the tokens of every answer."""
        return self._has_answered and not self.n_unreported

    def stop(self) -> None:
        """End all requests."""
        self._stopped.set()
        with self._lock:
            for connection in self._open:
                _hang_up(connection)

    def ask(self, text: str, schema: Mapping[str, Any] | None = None) -> Answer:
        """Return the model's answer to a message; the server makes it follow a JSON schema if it can.

        Raise `NoAnswer` if this message has none, `UserError` if the server cannot be used, and `Stopped`.
        """
        waits = _Waits(self._backoff_s)
        is_refused = False
        while True:
            if self._stopped.is_set():
                raise Stopped
            options = dict(self._options)
            forms = _bound_to(schema) if schema and self._takes_schemas and not is_refused else {}
            body = {"model": self.model, "messages": [{"role": "user", "content": text}], **options, **forms}
            with self._lock:
                self.n_requests += 1
            reply = self._post(msgspec.json.encode(body))
            if self._stopped.is_set():
                raise Stopped
            if reply.status == 200 and not reply.fault:
                # Other refusals, such as of a long text, say nothing about schemas.
                self._takes_schemas &= not is_refused
                return self._answer(reply.body)
            if reply.status in (400, 422) and self._drop_option(self._said(reply.body), options):
                continue
            if forms and self._refuses_schema(reply):
                is_refused = True
                continue
            self._stopped.wait(self._wait_for(reply, waits))

    def _answer(self, body: bytes) -> Answer:
        try:
            completion = decode_as(body, _Completion)
        except ValueError as error:
            # Some proxies report errors with the status 200.
            reason = self._said(body) if b'"error"' in body else self._clean(str(error))
            raise NoAnswer(f"the answer is not a chat completion: {reason}") from None
        self._has_answered = True
        usage = _Usage()
        with contextlib.suppress(ValueError):
            usage = decode_as(msgspec.json.encode(completion.usage), _Usage)
        with self._lock:
            self.prompt_tokens += usage.prompt_tokens or 0
            self.completion_tokens += usage.completion_tokens or 0
            self.n_unreported += usage.prompt_tokens is None
        content = completion.choices[0].message.content if completion.choices else None
        if not (content and content.strip()):
            is_cut = bool(completion.choices) and completion.choices[0].finish_reason == "length"
            raise NoAnswer("the answer is cut off; raise --max-tokens" if is_cut else "the answer is empty")
        # A short key, as local servers often have, may be a part of an answer by chance.
        shown = self._redacted(content) if len(self._key) >= _LEAST_SECRET else content
        return Answer(shown, usage.prompt_tokens, usage.completion_tokens)

    def _refuses_schema(self, reply: Reply) -> bool:
        """Return whether a reply may be due to the schema; servers refuse it in many words."""
        if reply.status in (400, 422):
            return True
        return reply.status >= 500 and bool(_OF_SCHEMA.search(self._said(reply.body)))

    def _drop_option(self, message: str, options: Mapping[str, Any]) -> bool:
        """Leave out, from now on, an option that the server does not know; return whether there was one."""
        for name in options if _UNSUPPORTED.search(message) else ():
            if name in message:
                with self._lock:
                    value = self._options.pop(name, None)
                    # Newer models of OpenAI have another name for it.
                    if name == "max_tokens" and value and "max_completion_tokens" in message:
                        self._options["max_completion_tokens"] = value
                return True
        return False

    def _wait_for(self, reply: Reply, waits: _Waits) -> float:
        """Return how long to wait before the request is repeated; raise an error if repeating it does not help."""
        said = self._said(reply.body)
        answered = f"the server answers HTTP {reply.status}{f': {said}' if said else ''}"
        if not reply.has_connected:
            if not self._has_answered or waits.n_busy >= MOST_BUSY:
                raise UserError(f"--url: {self._place} cannot be reached: {reply.fault}; start the server or check it")
            return waits.busy()
        if reply.fault:
            raise NoAnswer(reply.fault)
        if reply.status in _REMEDIES:
            raise UserError(f"{answered}; {_REMEDIES[reply.status]}")
        if 300 <= reply.status < 400:
            raise UserError(f"--url: {self._place} redirects to another address; give that address")
        if reply.status in _BUSY:
            asked = _retry_after(reply.headers.get("retry-after", ""))
            if waits.n_busy >= MOST_BUSY or (asked or 0) > LONGEST_WAIT_S:
                when = f" and asks to wait {asked:.0f} s" if asked else f" after {waits.n_busy} tries"
                raise UserError(f"{answered}{when}; run the command again later, or with a smaller --parallel")
            return max(asked or 0.0, waits.busy())
        if reply.status >= 500 and waits.n_failed < MOST_FAILED:
            return waits.failed()
        raise NoAnswer(answered, may_repeat=False)

    @property
    def _place(self) -> str:
        return f"{self._parts.scheme}://{self._parts.netloc}"

    def _said(self, body: bytes) -> str:
        """Return the message in the body of an error, on one line and without the key."""
        text = body.decode("utf-8", "replace")
        with contextlib.suppress(ValueError):
            table: Any = decode_as(body, dict[str, Any])
            for name in ("error", "message", "detail"):
                table = table.get(name, table) if isinstance(table, dict) else table
            text = table if isinstance(table, str) else text
        return self._clean(text)

    def _clean(self, text: str) -> str:
        shown = on_one_line(self._redacted(text)).strip().rstrip(".")
        return shown if len(shown) <= _LONGEST_MESSAGE else f"{shown[:_LONGEST_MESSAGE]}…"

    def _redacted(self, text: str) -> str:
        return text.replace(self._key, "…") if self._key else text

    def _post(self, body: bytes) -> Reply:
        try:
            connection = self._connect()
        except (OSError, http.client.HTTPException, ValueError) as error:
            return Reply(fault=_reason(error), has_connected=False)
        sock, late = connection.sock, threading.Event()

        def end() -> None:
            late.set()
            _hang_up(sock)

        timer = threading.Timer(self._timeout_s, end)
        timer.daemon = True
        timer.start()
        with self._lock:
            self._open.add(sock)
        try:
            reply = self._exchange(connection, body)
        except (OSError, http.client.HTTPException, ValueError) as error:
            reply = Reply(fault=f"no answer: {_reason(error)}")
        finally:
            timer.cancel()
            with self._lock:
                self._open.discard(sock)
            connection.close()
        return Reply(fault=f"no complete answer within {self._timeout_s:g} s") if late.is_set() else reply

    def _exchange(self, connection: http.client.HTTPConnection, body: bytes) -> Reply:
        headers = {"Content-Type": "application/json", "Accept": "application/json", "User-Agent": "sae-tui"}
        headers |= {"Authorization": f"Bearer {self._key}"} if self._key else {}
        connection.request("POST", f"{self._parts.path.rstrip('/')}/chat/completions", body, headers)
        response = connection.getresponse()
        parts, n = [], 0
        while part := response.read1(1 << 16):
            parts.append(part)
            n += len(part)
            if n > MOST_BYTES:
                return Reply(response.status, fault=f"the answer is larger than {MOST_BYTES >> 20} MiB")
        return Reply(response.status, {name.lower(): value for name, value in response.getheaders()}, b"".join(parts))

    def _connect(self) -> http.client.HTTPConnection:
        """Connect to the server, for https through the proxy in the environment if there is one."""
        host, port = self._parts.hostname or "", self._parts.port
        connection: http.client.HTTPConnection
        if self._parts.scheme == "http":
            connection = http.client.HTTPConnection(host, port, timeout=CONNECT_S)
        elif proxy := _proxy_for(host):
            connection = http.client.HTTPSConnection(
                proxy.hostname or "", proxy.port or 3128, timeout=CONNECT_S, context=ssl.create_default_context()
            )
            connection.set_tunnel(host, port or 443, headers=_proxy_headers(proxy))
        else:
            connection = http.client.HTTPSConnection(
                host, port, timeout=CONNECT_S, context=ssl.create_default_context()
            )
        connection.connect()
        # The timer of the request is the limit; this one only prevents waiting forever.
        connection.sock.settimeout(2 * self._timeout_s + 10)
        return connection


def _bound_to(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return the option with which a server lets a model write only answers that follow a JSON schema."""
    return {
        "response_format": {"type": "json_schema", "json_schema": {"name": "answer", "strict": True, "schema": schema}}
    }


class _Waits:
    """Counts the repetitions of a request, and computes the waits before them."""

    def __init__(self, first_s: float) -> None:
        self._first_s = first_s
        self.n_busy = self.n_failed = 0

    def busy(self) -> float:
        self.n_busy += 1
        return self._doubled(self.n_busy)

    def failed(self) -> float:
        self.n_failed += 1
        return self._doubled(self.n_failed)

    def _doubled(self, n: int) -> float:
        # A random share keeps parallel requests from coming back all at once.
        return min(LONGEST_WAIT_S, self._first_s * 2.0 ** (n - 1) * random.uniform(0.75, 1.25))


def _retry_after(text: str) -> float | None:
    """Return the seconds in a Retry-After header, which may also be a date; None without one."""
    if re.fullmatch(r"\s*\d{1,9}(\.\d*)?\s*", text):
        return float(text)
    with contextlib.suppress(ValueError, TypeError, OverflowError):
        date: float = email.utils.parsedate_to_datetime(text).timestamp()
        return max(0.0, date - time.time())
    return None


def _reason(error: Exception) -> str:
    """Return an error's reason as one clause."""
    if isinstance(error, TimeoutError):
        return "it does not answer in time"
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not valid ({error.verify_message})"
    if isinstance(error, OSError) and error.strerror:
        return on_one_line(error.strerror)
    return on_one_line(str(error))[:_LONGEST_MESSAGE] or type(error).__name__


def _proxy_for(host: str) -> SplitResult | None:
    if is_loopback(host) or urllib.request.proxy_bypass(host):
        return None
    proxy = urllib.request.getproxies().get("https", "")
    parts = urlsplit(proxy if "://" in proxy else f"http://{proxy}") if proxy else None
    return parts if parts and parts.hostname else None


def _proxy_headers(proxy: SplitResult) -> dict[str, str]:
    if proxy.username is None:
        return {}
    import base64

    user = f"{unquote(proxy.username)}:{unquote(proxy.password or '')}"
    return {"Proxy-Authorization": f"Basic {base64.b64encode(user.encode()).decode()}"}


def _hang_up(connection: socket.socket) -> None:
    # An SSL socket's own method would also drop its state, which another thread is using.
    with contextlib.suppress(OSError):
        socket.socket.shutdown(connection, socket.SHUT_RDWR)
