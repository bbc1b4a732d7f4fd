"""Textual's terminal driver, modified to restore the terminal only after writing all of the app's output.

While the app uses the terminal, nothing else writes to it: standard error goes to a log. Termination signals quit the
app so that the terminal is restored.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import select
import signal
import sys
import termios
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from textual.app import App
from textual.drivers.linux_driver import LinuxDriver

from sae_tui.terminal.key_parser import PacketParser, TerminalDecoder
from trainer.contract.paths import open_private

_STDERR = 2
_MOST_READ = 4096  # bytes
# Without a handler, these signals would kill the app immediately and leave the terminal in application mode.
_END_SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
# Sent to a thread to interrupt its write. SIGWINCH cannot be used, because Textual removes its handler before the app's
# last output.
_INTERRUPTS = signal.SIGURG
# The number of seconds within which the app must quit after such a signal. systemd and container runtimes send SIGKILL
# after 10 s or more.
_QUIT_LIMIT_S = 5.0
# Terminate an unfinished sequence, then restore the modes that Textual has changed: paste, wrap, resize reports, mouse,
# keyboard protocol, alternate screen, cursor and focus.
_LEAVE = "\x18\x1b[?2004l\x1b[?7h\x1b[?2048l\x1b[?1000l\x1b[?1003l\x1b[?1015l\x1b[?1006l\x1b[<u"
_LEAVE += "\x1b[?1049l\x1b[?25h\x1b[?1004l"
# The log is emptied once it exceeds `_MOST_LOGGED` bytes. Its size is checked after every `_DRAWN_PER_LOOK` bytes drawn
# by the app.
_MOST_LOGGED, _DRAWN_PER_LOOK = 1 << 20, 1 << 16


class StderrAside:
    """The original standard error, used for drawing the app while descriptor 2 goes to a log.

    Libraries such as NVML and the C library write directly to descriptor 2 and would corrupt the screen.
    """

    def __init__(self, log: Path | None) -> None:
        """Redirect descriptor 2 to this file, or to /dev/null if the file is None or not writable."""
        before = sys.__stderr__
        assert before is not None
        self.screen = open(  # noqa: SIM115
            os.dup(_STDERR), "w", encoding=before.encoding, errors=before.errors, newline=""
        )
        try:
            sink = open_private(log, os.O_APPEND) if log else os.open(os.devnull, os.O_WRONLY)
        except OSError:
            sink = os.open(os.devnull, os.O_WRONLY)
        before.flush()
        os.dup2(sink, _STDERR)
        os.close(sink)

    def keep_short(self) -> None:
        """Empty the log if it is too large, for example if a driver logs errors all day."""
        with contextlib.suppress(OSError):
            if os.fstat(_STDERR).st_size > _MOST_LOGGED:
                os.ftruncate(_STDERR, 0)

    def end(self) -> None:
        """Restore descriptor 2."""
        os.dup2(self.screen.fileno(), _STDERR)
        with contextlib.suppress(OSError):  # the terminal is gone
            self.screen.close()


class Quitter:
    """Quits the app on SIGTERM, SIGHUP or SIGINT; kills the process if that takes too long or a second signal arrives.

    The app cannot quit in time if it is busy, its disk hangs, or the terminal accepts no output.
    """

    def __init__(self, quit_app: Callable[[int], object], restore: Callable[[], object]) -> None:
        """Use `quit_app` to quit the app with an exit code, and `restore` to restore the terminal immediately."""
        self.code = 0
        self._quit_app, self._restore = quit_app, restore
        self._signalled, self._signal = os.pipe()
        os.set_blocking(self._signal, False)
        threading.Thread(target=self._end_late, name="quitter", daemon=True).start()

    def take(self) -> None:
        """Handle the signals from now on, except ignored ones, such as SIGHUP after `nohup`.

        `_INTERRUPTS` gets a handler too, because the kernel discards it otherwise.
        """
        signal.signal(_INTERRUPTS, lambda *_: None)
        for number in _END_SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, _frame: object) -> None:
        # Start no thread and take no lock here, because a signal handler can interrupt the main thread anywhere.
        is_first, self.code = not self.code, 128 + number
        self._hurry()
        if is_first:
            try:
                self._quit_app(self.code)
            except RuntimeError:  # the app has exited, so do not wait for the time limit
                self._hurry()

    def _hurry(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.write(self._signal, b"!")

    def _end_late(self) -> None:
        os.read(self._signalled, 1)
        select.select([self._signalled], [], [], _QUIT_LIMIT_S)
        # The terminal may accept no output, which must not block the exit.
        restoring = threading.Thread(target=self._restore, name="restore", daemon=True)
        restoring.start()
        restoring.join(1.0)
        os._exit(self.code)


class TerminalDriver(LinuxDriver):
    """Restores the terminal settings only after the last line is written.

    Textual 8.2 restores them first. If the user then types ctrl+s, the terminal stops accepting output, and the app
    would wait forever to write its last line.
    """

    _settings_before: list[Any] | None = None
    _aside: StderrAside | None = None
    _quitter: Quitter | None = None
    n_written = 0  # bytes

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._input_ends, self._end_input = os.pipe()

    def write(self, data: str) -> None:
        """Write to the terminal, and count the bytes."""
        before = self.n_written
        self.n_written += len(data if data.isascii() else data.encode("utf-8", "replace"))
        if self._aside and self.n_written // _DRAWN_PER_LOOK > before // _DRAWN_PER_LOOK:
            self._aside.keep_short()
        super().write(data)

    def start_application_mode(self) -> None:
        """Take over the terminal. From then on, the event loop handles ctrl+z and SIGCONT between callbacks.

        A Python signal handler can interrupt any code. A handler that writes while it interrupts a write deadlocks on
        the output queue's only lock: about 1 % of suspensions hung while the app was drawing.
        """
        if os.isatty(_STDERR):
            self._aside = StderrAside(getattr(self._app, "log_file", None))
            self._file = self._aside.screen
        elif os.isatty(1):  # the user has redirected standard error
            self._file = sys.__stdout__
        loop = asyncio.get_running_loop()
        self._quitter = self._quitter or Quitter(functools.partial(self._quit_app, loop), self._restore_at_once)
        self._quitter.take()
        super().start_application_mode()  # type: ignore[no-untyped-call]
        loop.add_signal_handler(signal.SIGTSTP, self._sigtstp_application)
        loop.add_signal_handler(signal.SIGCONT, self._sigcont_application)

    def run_input_thread(self) -> None:
        """Read keys until `disable_input` is called.

        Textual checks for overdue keys only every 0.1 s, which delays the escape key and the exit by up to that long.
        """
        parser, decoder = PacketParser(), TerminalDecoder()
        watched = [self.fileno, self._input_ends]
        while self._input_ends not in (ready := select.select(watched, [], [], parser.left_s)[0]):
            data = os.read(self.fileno, _MOST_READ) if ready else b""
            if ready and not data:
                watched.remove(self.fileno)  # the terminal is gone
            text = decoder.decode(data)
            for message in (*(parser.feed(text) if text else ()), *parser.tick()):
                self.process_message(message)
        os.read(self._input_ends, 1)

    def disable_input(self) -> None:
        if self._key_thread is not None and self._key_thread.is_alive():
            os.write(self._end_input, b"!")
        super().disable_input()

    def stop_application_mode(self) -> None:
        self._settings_before, self.attrs_before = self.attrs_before, None
        super().stop_application_mode()

    def close(self) -> None:
        super().close()
        # Restore the settings first, because `_restore_at_once` cannot use the file after it is closed.
        if self._settings_before is not None:
            with contextlib.suppress(termios.error):  # the terminal is gone
                termios.tcsetattr(self.fileno, termios.TCSANOW, self._settings_before)
            self._settings_before = None
        if self._aside is not None:
            self._aside.end()
            self._aside = None

    def _quit_app(self, loop: asyncio.AbstractEventLoop, code: int) -> None:
        loop.call_soon_threadsafe(functools.partial(self._app.exit, return_code=code))

    def _restore_at_once(self) -> None:
        """Restore the terminal, from any thread, if the app is using it.

        Output that the terminal has not accepted is discarded.
        """
        settings = self._settings_before or self.attrs_before
        if settings is None:
            return
        # Without this mask, the kernel would stop the process if it changes the terminal's settings in the background.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTTOU})
        # The terminal may be gone, or `close` may have just restored it.
        with contextlib.suppress(termios.error, OSError, ValueError):
            drawn_on = self._file.fileno()  # type: ignore[union-attr]
            terminal = os.dup(drawn_on)
            # A thread may be stuck in a write, which blocks all other writes.
            # A signal interrupts that write, and its remaining output goes to /dev/null.
            os.dup2(os.open(os.devnull, os.O_WRONLY), drawn_on)
            if (writer := self._writer_thread) and writer.ident and writer.is_alive():
                signal.pthread_kill(writer.ident, _INTERRUPTS)
            termios.tcflush(terminal, termios.TCOFLUSH)
            termios.tcflow(terminal, termios.TCOON)
            termios.tcsetattr(self.fileno, termios.TCSANOW, settings)
            os.write(terminal, _LEAVE.encode())

    def _sigtstp_application(self, *args: Any) -> None:
        """Suspend the app; if it is not using the terminal, let the kernel stop the process as usual.

        While the app starts or exits, Textual would stop the app even if no shell can resume it, and would take over
        the terminal for an app that has exited.
        """
        if self.attrs_before is not None:
            with _at_rest(self._app):
                super()._sigtstp_application(*args)
            return
        _stop()

    def _sigcont_application(self, *args: Any) -> None:
        """Take back the terminal if it was given up. After any other stop, Textual would read the input twice.

        An app that is quitting leaves the terminal alone, because the shell already controls it.
        """
        if self._must_signal_resume and not (self._quitter and self._quitter.code):
            super()._sigcont_application(*args)


def _stop() -> None:
    """Stop this process as the kernel would. Return when it is resumed, or immediately if no shell can resume it."""
    before = signal.signal(signal.SIGTSTP, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGTSTP)
    signal.signal(signal.SIGTSTP, before)


@contextlib.contextmanager
def _at_rest(app: App[Any]) -> Iterator[None]:
    """Close the GPU driver while the app is stopped, so that GPUs can be reset in the meantime.

    This works because the main thread sends the stop signal to itself and continues only after the stop.
    """
    pause, resume = (getattr(app, name, None) for name in ("pause_reading", "resume_reading"))
    with contextlib.suppress(Exception):  # an error must not prevent the stop
        if pause:
            pause()
    try:
        yield
    finally:
        if resume:
            resume()


class Stopper:
    """Handles SIGTSTP outside of the event loop: closes the GPU driver and stops the process.

    A second SIGTSTP can interrupt the handler while it resumes reading and holds a lock. A nested pause would
    wait for that lock forever, so the process handles the second stop after the first one.
    """

    def __init__(self, app: Any) -> None:
        """Use the methods `pause_reading` and `resume_reading` of `app`, if it has them."""
        self._app = app
        self._is_requested = self._is_stopping = False

    def __call__(self, *_: object) -> None:
        self._is_requested = True
        if self._is_stopping:
            return
        self._is_stopping = True
        try:
            while self._is_requested:
                with _at_rest(self._app):
                    self._is_requested = False
                    _stop()
        finally:
            self._is_stopping = False


def has_shell() -> bool:
    """Return True if this process was started by a shell with job control that can continue it after a stop."""
    import psutil

    group, session = os.getpgrp(), os.getsid(0)
    with contextlib.suppress(psutil.Error, OSError):
        pid = os.getppid()
        while pid:  # a wrapper such as `uv run` is in the same process group
            if os.getpgid(pid) != group:
                return os.getsid(pid) == session
            pid = psutil.Process(pid).ppid()
    return False


@contextlib.contextmanager
def give_away(app: App[None]) -> Iterator[None]:
    """Hand the terminal over to another program; raise `SuspendNotSupported` if the app has no terminal.

    ctrl+c and ctrl+\\ in that program do not quit the app, and the shell handles ctrl+z, whereas Textual would stop the
    app even if no shell can continue it. Exceptions are raised after the block, because Textual takes back the terminal
    only if the block raises nothing.
    """

    raised: BaseException | None = None
    with _leave_signals(Stopper(app)), app.suspend():
        try:
            yield
        except BaseException as error:
            raised = error
    if raised is not None:
        raise raised


@contextlib.contextmanager
def _leave_signals(stop: Callable[..., None]) -> Iterator[None]:
    # Use handlers instead of ignoring signals, because the other program would inherit ignored signals. The app cannot
    # quit while it waits for the other program.
    acts: dict[int, Any] = dict.fromkeys((*_END_SIGNALS, signal.SIGCONT), signal.SIG_DFL)
    acts |= dict.fromkeys((signal.SIGINT, signal.SIGQUIT), lambda *_: None)
    acts[signal.SIGTSTP] = stop
    before = {
        number: signal.signal(number, act)
        for number, act in acts.items()
        if signal.getsignal(number) is not signal.SIG_IGN
    }
    # Detach the event loop, which would otherwise handle the same signals again afterwards.
    loop = signal.set_wakeup_fd(-1)
    try:
        yield
    finally:
        signal.set_wakeup_fd(loop)
        for number, act in before.items():
            signal.signal(number, act)
