"""A module for PYTHONPATH that records, in the file $WRITTEN_DOWN, which modules in a program unpickle data."""

import os
import pickle
import sys
import traceback
from typing import Any


def write_down() -> None:
    """Append the names of the modules on the call stack to the file, starting with the outermost."""
    if path := os.environ.get("WRITTEN_DOWN"):
        frames = [frame.f_globals.get("__name__", "?") for frame, _ in traceback.walk_stack(sys._getframe(2))]
        way = " ".join(dict.fromkeys(reversed(frames)))
        with open(path, "a") as file:
            file.write(f"{os.getpid()} unpickle {way}\n")


class Unpickler(pickle.Unpickler):
    def load(self) -> Any:
        write_down()
        return super().load()


def told(real: Any) -> Any:
    def instead(*arguments: Any, **options: Any) -> Any:
        write_down()
        return real(*arguments, **options)

    return instead


# Replace the functions before any module can import them. The audit event also detects classes and functions in pickled
# data loaded in other ways.
pickle.Unpickler, pickle.load, pickle.loads = Unpickler, told(pickle.load), told(pickle.loads)  # type: ignore[misc]
sys.addaudithook(lambda event, _: write_down() if event == "pickle.find_class" else None)
