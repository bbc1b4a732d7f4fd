"""Forks a background process, and reports to the parent process whether it started successfully."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

from sae_tui.jobs.supervisor_log import note
from trainer.contract.errors import UserError
from trainer.contract.process import take_back_signals


def go_on(begin: Callable[[], Callable[[], None]]) -> int:
    """Fork and call `begin` in the child; in the parent, return 0 once `begin` has succeeded, or 1 if it fails.

    The child then calls the function returned by `begin`, and exits without returning. If an error occurs, the child
    writes it to stderr and exits with code 1.
    """
    take_back_signals()
    reading, writing = os.pipe()
    if os.fork():
        os.close(writing)
        return 0 if os.read(reading, 1) else 1
    os.close(reading)
    code = 1
    try:
        rest = begin()
        os.write(writing, b".")
        os.close(writing)
        rest()
        code = 0
    except UserError as error:
        note(str(error))
    except Exception as error:
        sys.excepthook(type(error), error, error.__traceback__)
    finally:
        # A thread hung in the driver would keep the process alive, so exit without waiting for threads.
        os._exit(code)
    return 0
