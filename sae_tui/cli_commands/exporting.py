"""`sae-tui export-metrics`: serves GPU and job metrics to Prometheus, on this machine only."""

from __future__ import annotations

import argparse
import contextlib
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from sae_tui.cli_commands.context import CommandContext
from sae_tui.cli_commands.output import say
from sae_tui.gpu import faults
from sae_tui.gpu.base import GpuSample
from sae_tui.gpu.once import CLOSE_LIMIT_S
from sae_tui.gpu.sampler import Sampler, SamplerStatus
from sae_tui.gpu.visible import visible
from sae_tui.jobs.gpus.occupancy import Occupancy, gpu_source
from trainer.contract.errors import UserError
from trainer.contract.exits import Exit
from trainer.contract.extras import install
from trainer.contract.output import show_text

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
LOOPBACK = "127.0.0.1"
HOSTS = ("127.0.0.1", "localhost")
# Clients are disconnected after this time.
PATIENCE_S = 10.0
MOST_AT_ONCE = 16
# After `REST_AFTER_S` seconds without a request, the driver is closed; the next request waits up to `WAKE_S` seconds
# for it to reopen.
REST_AFTER_S, WAKE_S = 300.0, 5.0


def export_metrics(context: CommandContext, flags: argparse.Namespace) -> int:
    """Print the metrics once, or serve them until interrupted."""
    try:
        from sae_tui.cli_commands.prometheus import PrometheusText
    except ModuleNotFoundError:
        needs = "export-metrics needs the package prometheus-client"
        raise UserError(f"{needs}; run `{install('prometheus')}`") from None
    if flags.once:
        show_text(PrometheusText(context.data, lambda: context.gpus.samples).text())
        return Exit.DONE
    source = gpu_source(context.source_name, Occupancy(context.data), count=context.gpu_count)
    # The sampler uses one thread per GPU, so that a hung GPU does not delay the other GPUs.
    sampler = Sampler(source, context.settings.sampling_interval_s)
    gpus = AskedGpus(sampler, source.name)
    figures = PrometheusText(context.data, gpus.samples, lambda: sampler.problem)
    try:
        server = Server((LOOPBACK, flags.port), partial(Handler, figures.text), gpus.rest)
    except OSError as error:
        reason = f"port {flags.port} of {LOOPBACK} is not available: {error.strerror}"
        raise UserError(f"{reason}; choose another with --port") from None
    sampler.start()
    try:
        with server:
            say(
                f"http://{LOOPBACK}:{server.server_port}/metrics is open to every user of this machine; Ctrl-C stops it"
            )
            server.serve_forever()
    finally:
        if not sampler.stop():
            # A thread hanging in the driver cannot be stopped, and the interpreter would wait for it at exit.
            os._exit(Exit.FAILED)
    return Exit.DONE


class AskedGpus:
    """Reads the GPUs only while clients send requests, because a GPU cannot be reset while its driver is open."""

    def __init__(self, sampler: Sampler, source_name: str) -> None:
        self._sampler, self._name = sampler, source_name
        self._lock = threading.Lock()
        self._rests = False
        self._asked = time.monotonic()

    def samples(self) -> Sequence[GpuSample]:
        """Return the latest samples; if the driver was closed, wait up to `WAKE_S` for it to open."""
        with self._lock:
            self._asked = time.monotonic()
            if self._rests:
                self._rests = False
                self._sampler.resume()
                while self._is_waking and time.monotonic() < self._asked + WAKE_S:
                    time.sleep(0.02)
        return visible(self._sampler.latest(), self._name)

    @property
    def _is_waking(self) -> bool:
        is_opening = self._sampler.status is SamplerStatus.OPENING
        return is_opening or any(one.reason == faults.NO_ANSWER_YET for one in self._sampler.latest())

    def rest(self) -> None:
        """Close the driver if there has been no request for `REST_AFTER_S`."""
        if self._rests or time.monotonic() < self._asked + REST_AFTER_S or not self._lock.acquire(blocking=False):
            return
        try:
            self._rests = True
            self._sampler.pause(CLOSE_LIMIT_S)
        finally:
            self._lock.release()


class Server(ThreadingHTTPServer):
    """Serves at most `MOST_AT_ONCE` clients at a time; closes any further connection immediately."""

    daemon_threads = True

    def __init__(self, address: tuple[str, int], handler: Any, between: Callable[[], object] = lambda: None) -> None:
        """Bind the address; while serving, call `between` about twice per second."""
        self._capacity = threading.Semaphore(MOST_AT_ONCE)
        self._between = between
        super().__init__(address, handler)

    def service_actions(self) -> None:
        self._between()

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._capacity.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        # The limit applies to the entire request, even if the client sends it slowly.
        hang_up = threading.Timer(PATIENCE_S, _hang_up, (request,))
        hang_up.daemon = True
        hang_up.start()
        try:
            super().process_request_thread(request, client_address)
        finally:
            hang_up.cancel()
            self._capacity.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore disconnected clients; report errors in the server itself as usual."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


def _hang_up(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


class Handler(BaseHTTPRequestHandler):
    """Responds to `GET /metrics` if the Host header names the loopback address, and rejects all other requests."""

    server_version, sys_version = "sae-tui", ""
    timeout = PATIENCE_S

    def __init__(self, text: Callable[[], str], *arguments: object) -> None:
        self._text = text
        super().__init__(*arguments)  # type: ignore[arg-type]

    def do_GET(self) -> None:
        # Prevent DNS rebinding.
        # A web page can reach this port through its own host name, but then the Host header contains that name.
        if self.headers.get("Host", "").rpartition(":")[0] not in HOSTS and self.headers.get("Host") not in HOSTS:
            self._answer(403, "use the name 127.0.0.1 or localhost\n")
        elif self.path != "/metrics":
            self._answer(404, "only /metrics is served\n")
        else:
            self._answer(200, self._text(), CONTENT_TYPE)

    def _answer(self, status: int, text: str, kind: str = "text/plain; charset=utf-8") -> None:
        content = text.encode(errors="replace")
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *_: object) -> None:  # noqa: A002
        """Do not log requests."""
