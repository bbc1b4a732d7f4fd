"""A process that goes on in the background, while the one that started it learns whether it came up."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

from sae_tui.jobs.supervisor_log import note
from trainer.contract.errors import UserError
from trainer.contract.process import take_back_signals


def go_on(begin: Callable[[], Callable[[], None]]) -> int:
    """Fork; return in the first process 0 once `begin` has succeeded in the second, 1 if it could not.

    The second process calls what `begin` returned and exits; it never returns. It writes an error to stderr and then
    exits with 1.
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
        # A sampling thread may hang in the driver, and would keep the process from ending.
        os._exit(code)
    return 0
