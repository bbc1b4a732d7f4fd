"""Tests that the app handles ctrl+z only while it has the terminal, and that its driver reads keys without delay and
restores the terminal.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest
from support.terminal import Terminal

from trainer.contract.exits import Exit
from trainer.contract.process import state_of

APP_WITHOUT_TERMINAL = """
import asyncio, os, signal
from textual.app import App
from sae_tui.terminal.driver import TerminalDriver

async def main():
    TerminalDriver(App())
    for number in (signal.SIGTSTP, signal.SIGCONT):
        os.kill(os.getpid(), number)
    assert signal.getsignal(signal.SIGTSTP) is not signal.SIG_DFL
    print("goes on")

asyncio.run(main())
"""


def test_an_app_that_has_released_its_terminal_ignores_ctrl_z() -> None:
    command = [sys.executable, "-c", APP_WITHOUT_TERMINAL]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, start_new_session=True, check=False)
    assert (done.returncode, done.stdout) == (0, "goes on\n"), done.stderr


STOPPED_AGAIN = """
import os, signal, sys, threading
from sae_tui.terminal.driver import Stopper

class App:
    lock, n_resumed, stops_in = threading.Lock(), 0, sys.argv[1]
    def pause_reading(self):
        with self.lock:
            self.stop_again("pause")
    def resume_reading(self):
        with self.lock:
            self.n_resumed += 1
            self.stop_again("resume")
    def stop_again(self, name):
        if self.stops_in == name:
            self.stops_in = ""
            os.kill(os.getpid(), signal.SIGTSTP)

app = App()
signal.signal(signal.SIGTSTP, Stopper(app))
os.kill(os.getpid(), signal.SIGTSTP)
print("resumed", app.n_resumed)
"""


@pytest.mark.parametrize(("stops_in", "n_stops"), [("pause", 1), ("resume", 2)])
def test_a_second_ctrl_z_is_ignored_during_a_pause_and_stops_an_app_that_resumes(stops_in: str, n_stops: int) -> None:
    command = [sys.executable, "-c", STOPPED_AGAIN, stops_in]
    # Use a new process group, because the kernel would discard the signal in a new session.
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, process_group=0) as process:
        for _ in range(n_stops):
            deadline = time.monotonic() + 20
            while state_of(process.pid) != "T":
                if time.monotonic() > deadline:
                    process.kill()
                    raise AssertionError("the process does not stop")
                time.sleep(0.01)
            process.send_signal(signal.SIGCONT)
        assert process.communicate(timeout=20)[0] == f"resumed {n_stops}\n"


KEYS_IN_A_TERMINAL = """
import asyncio, os, pty, sys, threading
from textual import events
from textual.app import App
from sae_tui.terminal import key_parser
from sae_tui.terminal.driver import TerminalDriver

key_parser._ESCAPE_S = float(sys.argv[1])
terminal, own = pty.openpty()
os.set_blocking(terminal, False)
os.system(f"stty raw -echo < {os.ttyname(own)}")

class Driver(TerminalDriver):
    def process_message(self, message):
        if isinstance(message, events.Key):
            keys.append(message.key)
            read.set()

async def main():
    driver = Driver(App())
    driver.fileno = own
    for pieces in (["\\x1b", "[A"], ["x"]):  # the second time after the terminal was given to another program
        driver._key_thread = threading.Thread(target=driver.run_input_thread)
        driver._key_thread.start()
        for piece in pieces:
            await asyncio.sleep(0.02)
            os.write(terminal, piece.encode())
        assert read.wait(20)
        read.clear()
        driver.disable_input()
        driver._key_thread.join(20)
        assert not driver._key_thread.is_alive()

keys, read = [], threading.Event()
asyncio.run(main())
print(*keys)
"""


def test_the_driver_reads_a_split_sequence_as_one_key_and_stops_reading_at_once() -> None:
    # The machine may be busy, so let the rest of the sequence arrive up to 10 s late.
    command = [sys.executable, "-c", KEYS_IN_A_TERMINAL, "10"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, start_new_session=True, check=False)
    assert (done.returncode, done.stdout) == (0, "up x\n"), done.stderr


APP_THAT_CANNOT_WRITE = """
import asyncio, os, select, signal, time
from textual.app import App
from sae_tui.terminal.driver import TerminalDriver

async def main():
    driver = TerminalDriver(App())
    driver.start_application_mode()
    driver.disable_input()
    driver.write("x" * 1_000_000)
    while select.select([], [1], [], 0)[1]:  # until the terminal's buffer is full
        time.sleep(0.01)
    for number in (signal.SIGTERM, signal.SIGTERM):
        os.kill(os.getpid(), number)
    await asyncio.sleep(60)

asyncio.run(main())
"""


def test_a_second_signal_restores_the_terminal_if_an_exiting_apps_output_is_blocked() -> None:
    terminal = Terminal([sys.executable, "-c", APP_THAT_CANNOT_WRITE], env=os.environ)
    before = terminal.mode
    try:
        assert terminal.process.wait(30) == Exit.TERMINATED
        terminal.read(0.2)
        assert terminal.raw.endswith(b"\x1b[?1049l\x1b[?25h\x1b[?1004l")
        assert terminal.mode == before
    finally:
        terminal.close()


APP_THAT_CLOSES = """
import asyncio, os, pty, termios
from textual.app import App
from sae_tui.terminal.driver import StderrAside, TerminalDriver

own = pty.openpty()[1]
before = termios.tcgetattr(own)
os.system(f"stty raw -echo < {os.ttyname(own)}")

async def main():
    class Aside(StderrAside):
        def end(self):
            print("restored", termios.tcgetattr(own) == before)
            super().end()
            driver._settings_before = before  # a signal's thread has read the settings before
            driver._restore_at_once()
            print("closed")

    driver = TerminalDriver(App())
    driver.fileno, driver._settings_before = own, before
    driver._aside = Aside(None)
    driver._file = driver._aside.screen
    driver.close()

asyncio.run(main())
"""


def test_settings_are_restored_before_the_file_is_closed_and_a_later_signal_is_safe() -> None:
    command = [sys.executable, "-c", APP_THAT_CLOSES]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, start_new_session=True, check=False)
    assert (done.returncode, done.stdout) == (0, "restored True\nclosed\n"), done.stderr
